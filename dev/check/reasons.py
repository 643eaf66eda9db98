"""Whether the reasons that explanations give are the true ones: rebuilt and tried, over models.

    python -m dev.check.reasons [--threads 2]  # 200 refusals, 50 choices of who multiplies

In: twelve small models of transformers and of `tools.models`, forward and backward, explained on
the CPU. Out: a row per class of reasons, with how many hold; exit status 1 where one does not, or
where fewer could be tried.

    cycle      there is a way from the loops of one to the other's, or back, through others
    iteration spaces differ
               no loops of the one have as many points as loops of the other that it could be
               computed in: all of them, or its rows (where some have: not tried)
    index maps differ
               there is a point at which the two maps name different elements
    rows against columns
               the reduced loops of one have as many points as rows of the other
    scatter    one of the two stores at places that are loaded, or combines with what is there
    device     the two run on different devices
    product    the product alone, built as loops and as a library call and timed both ways: who was
               chosen is at most `SLACK` slower (median of rounds, each of which times both)

What two threads cost one another depends on where a host runs them: a call of the library between
others took 4 us longer on two threads than its share in one hour, 9 in the next.

Other classes are counted and not tried: `tests/schedule/test_refusals.py` has some of each.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import networkx
import torch

from deuteron.lower import contractions
from deuteron.schedule import contract
from deuteron.tools.explain import explain
from deuteron.tools.measuring import distinct, interleaved
from deuteron.tools.models import Gpt

Data = Mapping[str, Any]
REFUSALS, PRODUCTS = 200, 50
# What was chosen may be this much slower than the other, as a share: two runs of one program differ
# by as much on a machine that others use.
SLACK = 0.25
TRIALS = 3  # of which one that holds is enough: others' work on the machine slows one of the two
SPACE = re.compile(r"\[([\dx]+(?: \| [\dx]+)?)\]")
SHAPE = re.compile(r"(?:(\d+) of )?(\d+)x(\d+) by (\d+)x(\d+)")
MAPS = re.compile(r"made at \[(.*)\] and read by .* at \[(.*)\]")
VIEW = re.compile(r"view\('([^']+)', \(([\d, ]+)\)")
LAYOUT = re.compile(r"\w+\[([\d, ]+)\](?:\.strides\(([\d, ]+)\))?")
LOOPS = re.compile(r"^ +(?:for ([^;:]*)|once)(?:; over ([^;:]*))?", re.M)
# The heads of a kernel's loops, what they store, and what they name.
NEST = re.compile(r"^    (?=for |once)", re.M)
STORED = re.compile(r"^ +([A-Za-z_]\w*)\[[^=]*\] \S*= ", re.M)
USED = re.compile(r"([A-Za-z_]\w*)\[")
IDS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def models() -> Iterator[tuple[str, torch.nn.Module, dict[str, Any]]]:
    """Twelve families in small, each of a width of its own, and what they are called with."""
    import transformers as t

    def of(kind: str, config: str, **sizes: Any) -> torch.nn.Module:
        return getattr(t, kind)(getattr(t, config)(**sizes))

    def usual(width: int, heads: int = 4, **more: Any) -> dict[str, Any]:
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
        return IDS | sizes | {"num_attention_heads": heads} | more

    ids = torch.randint(2, 97, (4, 32))
    text, labelled = {"input_ids": ids}, {"input_ids": ids, "labels": ids}
    image = {"pixel_values": torch.randn(4, 3, 32, 32)}
    squares = {"image_size": 32, "patch_size": 8}
    yield "Gpt", Gpt(97, 64, 4, 3, 64), {"ids": ids}
    gpt2 = {"n_layer": 2, "n_head": 4, "n_embd": 64}
    yield "GPT-2", of("GPT2LMHeadModel", "GPT2Config", **IDS, **gpt2), labelled
    yield "BERT", of("BertModel", "BertConfig", **usual(96)), text
    yield (
        "Llama",
        of("LlamaForCausalLM", "LlamaConfig", **usual(48, num_key_value_heads=2)),
        labelled,
    )
    yield "ViT", of("ViTModel", "ViTConfig", **usual(80), **squares), image
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0}
    yield "T5", of("T5ForConditionalGeneration", "T5Config", vocab_size=97, **t5), labelled
    neox = usual(112, rotary_pct=0.5)
    yield "GPT-NeoX", of("GPTNeoXForCausalLM", "GPTNeoXConfig", **neox), labelled
    opt = {"hidden_size": 40, "ffn_dim": 72, "num_hidden_layers": 2, "num_attention_heads": 2}
    opt |= {"word_embed_proj_dim": 40, "max_position_embeddings": 64}
    yield "OPT", of("OPTForCausalLM", "OPTConfig", **IDS, **opt), labelled
    distil = {"dim": 72, "hidden_dim": 200, "n_layers": 2, "n_heads": 4, "vocab_size": 97}
    yield "DistilBERT", of("DistilBertModel", "DistilBertConfig", **distil), text
    qwen = usual(128, num_key_value_heads=2, head_dim=32)
    yield "Qwen3", of("Qwen3ForCausalLM", "Qwen3Config", **qwen), labelled
    bloom = {"hidden_size": 56, "n_layer": 2, "n_head": 2}
    yield "Bloom", of("BloomForCausalLM", "BloomConfig", **IDS, **bloom), labelled
    dino = usual(32, mlp_ratio=3)
    yield "DINOv2", of("Dinov2Model", "Dinov2Config", **dino, **squares), image


def steps_of(part: Data, tensor: str, node: str) -> set[int]:
    """The steps that make a tensor, or do its node."""
    makers = {k for k, s in enumerate(part["steps"]) if tensor in s["writes"]}
    doers = (k for k, s in enumerate(part["steps"]) if node in {o["node"] for o in s["ops"]})
    return makers or set(doers)


def dependencies(part: Data) -> Any:
    """Which loops or library call read what which other has made: nodes (step, place in it), with
    the tensors that each makes."""
    out = networkx.DiGraph()
    maker: dict[str, tuple[int, int]] = {}
    for k, s in enumerate(part["steps"]):
        bodies = NEST.split(s["nest"])[1:] if s["kind"] == "kernel" else []
        names = {n.replace(".", "_"): n for n in (*s["reads"], *s["writes"])}
        for j, body in enumerate(bodies or [""]):
            stored, used = (set(x.findall(body)) for x in (STORED, USED))
            made = [names.get(n, n) for n in stored] if bodies else s["writes"]
            read = [names.get(n, n) for n in used - stored] if bodies else s["reads"]
            out.add_node((k, j), made=set(made))
            for n in read:
                home = part["tensors"].get(n, {}).get("in", n)
                out.add_edges_from(
                    (m, (k, j)) for m in {maker.get(n), maker.get(home)} - {None, (k, j)}
                )
            maker.update(dict.fromkeys(made, (k, j)))
    return out


def places_of(graph: Any, steps: set[int], tensor: str) -> set[tuple[int, int]]:
    """The loops of steps that make a tensor; all of them where it is in none by name."""
    makers = {n for n, made in graph.nodes(data="made") if tensor in made}
    return makers or {n for n in graph if n[0] in steps}


def holds(part: Data, graph: Any, r: Data) -> bool | None:
    """Whether a refusal's reason is true; None where it is not tried."""
    a = steps_of(part, r["first"], r["first_node"])
    b = steps_of(part, r["second"], r["second_node"])
    if r["reason"] == "cycle":
        one, two = places_of(graph, a, r["first"]), places_of(graph, b, r["second"])
        if one & two:
            return None  # merged after all, in another way
        return any(
            graph.has_edge(u, v) is False and networkx.has_path(graph, u, v)
            or any(networkx.has_path(graph, w, v) for w in graph.successors(u) if w != v)
            for x in one for y in two for u, v in ((x, y), (y, x))
        )  # fmt: skip
    if r["reason"] == "scatter":
        texts = [part["steps"][k]["nest"] for k in a | b]
        return any(re.search(r"\] =\w+= |\[[^\]]*val\(|  where ", t) for t in texts)
    if r["reason"] == "device":
        return len({part["steps"][k]["device"] for k in a | b}) > 1
    if r["reason"] == "iteration spaces differ":
        spaces = [loops(text) for text in SPACE.findall(r["detail"])]
        return True if len(spaces) == 2 and not one_in_other(*spaces) else None
    if r["reason"] == "index maps differ":
        return maps_differ(r["detail"])
    if r["reason"] == "rows against columns" and not a & b:
        rows, columns = ([x for k in ks for x in nests(part["steps"][k])] for ks in (a, b))
        return any(against(x, y) or against(y, x) for x in rows for y in columns)
    return None


Loops = tuple[list[int], list[int]]  # extents of the parallel loops, of the reduced ones


def loops(space: str) -> Loops:
    """``32x8 | 64`` -> ([32, 8], [64]), without loops of one point."""
    rows, _, reduced = space.partition(" | ")
    one, two = ([int(n) for n in part.split("x") if n not in ("", "1")] for part in (rows, reduced))
    return one, two


def one_in_other(one: Loops, two: Loops) -> bool:
    """Whether there are as many points as one nest needs, as far as numbers tell."""
    (rows, reduced), (others, other_reduced) = one, two
    if reduced and other_reduced:
        return math.prod(rows) == math.prod(others) and math.prod(reduced) == math.prod(
            other_reduced
        )
    if reduced or other_reduced:
        base, guest = (one, others) if reduced else (two, rows)
        return math.prod(guest) in (math.prod(base[0]), math.prod(base[0] + base[1]))
    return math.prod(rows) in products(others) or math.prod(others) in products(rows)


def products(extents: list[int]) -> set[int]:
    """Of all that may be chosen among them."""
    found = {1}
    for n in extents:
        found |= {n * m for m in found}
    return found


def nests(step: Data) -> list[Loops]:
    """The loops of a kernel, as printed."""
    found = []
    for m in LOOPS.finditer(step["nest"]):
        rows, reduced = ([int(n) for n in re.findall(r"< (\d+)", g or "")] for g in m.groups())
        found.append((rows, reduced))
    return found


def against(one: Loops, two: Loops) -> bool:
    """Whether `one` reduces as many points as rows of `two` have."""
    return bool(one[1]) and math.prod(one[1]) in products(two[0])


def maps_differ(detail: str) -> bool | None:
    """Whether both maps name other elements at one of some points; None where places are loaded."""
    match = MAPS.search(detail)
    if match is None or "val(" in detail:
        return None
    code = [compile(f"[{text}]", "map", "eval") for text in match.groups()]
    names = sorted(set(re.findall(r"[A-Za-z_]\w*", " ".join(match.groups()))))
    for seed in range(50):
        point = {n: random.Random(f"{seed} {n}").randrange(2 + seed) for n in names}
        one, two = (eval(c, {}, point) for c in code)
        if one != two:
            return True
    return False


Whole = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, order=True)
class Choice:
    """A product and who was chosen: its shape as printed, whether each operand lies along the sum,
    whether it is ours, and of the tensors whose views the operands of a call are the shapes, and
    their dimensions in the order of memory."""

    shape: str
    along: tuple[bool, bool]
    ours: bool
    whole: tuple[Whole, ...] = ()

    def __str__(self) -> str:
        order = " by ".join("along" if x else "across" for x in self.along)
        return f"{self.shape}, {order}, {'generated' if self.ours else 'by the library'}"


def whole_tensors(part: Data, call: Data) -> tuple[Whole, ...]:
    """Of the tensors whose views the two operands of a library's product are."""
    names = [n for n, _ in VIEW.findall(call["nest"])[-2:]]
    found = [LAYOUT.fullmatch(part["tensors"].get(n, {}).get("layout", "")) for n in names]
    out = []
    for m in found:
        texts = m.groups("") if m else ("", "")
        dims, strides = ([int(n) for n in text.split(", ") if n] for text in texts)
        order = sorted(range(len(dims)), key=lambda d: -strides[d]) if strides else range(len(dims))
        out.append((tuple(dims), tuple(order)))
    return tuple(out)


def product_holds(choice: Choice, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the way chosen to multiply is not the slower one."""
    return times_slower(choice, dtype) <= 1 + SLACK


def times_slower(choice: Choice, dtype: torch.dtype = torch.float32) -> float:
    """The time of the way chosen over that of the other, timed in turn: the least of trials."""
    sizes = SHAPE.fullmatch(choice.shape)
    assert sizes is not None
    batch, m, k, _, n = (int(x or 1) for x in sizes.groups())
    left, right = not choice.along[0], choice.along[1]  # whether they lie the other way round
    shapes: list[tuple[int, ...]] = [(k, m) if left else (m, k), (n, k) if right else (k, n)]
    if batch > 1:
        shapes = [(batch, *shape) for shape in shapes]
    orders, bases = [tuple(range(len(shape))) for shape in shapes], list(shapes)
    for side, (dims, order) in enumerate(choice.whole if batch == 1 else ()):
        if dims and math.prod(dims) == math.prod(shapes[side]):
            orders[side], bases[side] = order, tuple(dims[d] for d in order)
    x, w = (
        torch.randn(base, dtype=dtype).permute([order.index(d) for d in range(len(order))])
        for base, order in zip(bases, orders, strict=True)
    )

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w = x.permute(orders[0]).reshape(shapes[0]), w.permute(orders[1]).reshape(shapes[1])
        x, w = x.mT if left else x, w.mT if right else w
        return torch.bmm(x, w) if batch > 1 else x @ w

    torch._dynamo.reset()

    def form(ours: bool) -> Any:
        """The schedule decides where `lower` keeps a product for it."""
        own, us = distinct(f, str(ours)), math.inf if ours else 0.0
        with (
            patch.object(contractions, "library_us", lambda *_: us),
            patch.object(contract, "library_us", lambda *_: us),
        ):
            call = torch.compile(own, backend="deuteron", options={"keep_graphs": False})
            call(x, w)
        return call

    generated_form, library = form(True), form(False)
    least = math.inf
    for _ in range(TRIALS):
        times = interleaved([lambda: generated_form(x, w), lambda: library(x, w)], 0.5, "cpu")
        rounds = zip(*(times if choice.ours else times[::-1]), strict=True)
        least = min(least, statistics.median(mine / other for mine, other in rounds))
        if least <= 1 + SLACK:
            break
    return least


def gathered() -> tuple[list[tuple[str, Data, Any, Data]], dict[Choice, str]]:
    """All refusals, with model, part and dependencies; all products, by who was chosen."""
    refusals: list[tuple[str, Data, Any, Data]] = []
    products: dict[Choice, str] = {}
    for name, model, given in models():
        torch._dynamo.reset()
        told = explain(model, **given)
        for part in told.data["parts"]:
            graph = dependencies(part)
            refusals += [(name, part, graph, r) for r in part["refusals"]]
            for s in part["steps"]:
                p = s["product"]
                who = [c["who"] for c in p["candidates"] if c["chosen"]] if p else []
                if who and len(p["candidates"]) > 1:
                    ours, whole = who != ["library"], whole_tensors(part, s)
                    choice = Choice(p["shape"], tuple(p["along"]), ours, () if ours else whole)
                    products.setdefault(choice, name)
    return refusals, products


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.check.reasons")
    parser.add_argument(
        "--threads", type=int, default=2, help="cores of this CPU, a thread on each"
    )
    threads = parser.parse_args().threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    choose = random.Random(0)
    refusals, choices = gathered()
    tried: Counter[str] = Counter()
    false: Counter[str] = Counter()
    left: Counter[str] = Counter()
    of_models: set[str] = set()
    for name, of, graph, r in choose.sample(refusals, len(refusals)):
        if tried.total() == REFUSALS:
            break
        verdict = holds(of, graph, r)
        if verdict is None:
            left[r["reason"]] += 1
            continue
        of_models.add(name)
        tried[r["reason"]] += 1
        if not verdict:
            false[r["reason"]] += 1
            print(f"not true, {name} {of['id']}: {r['first']} + {r['second']}: {r['detail']}")
    enough = tried.total() == REFUSALS and len(choices) >= PRODUCTS
    print(f"{tried.total()} of {len(refusals)} refusals tried, of {len(of_models)} models")
    some = choose.sample(sorted(choices), min(PRODUCTS, len(choices)))
    for choice in some:
        tried["product"] += 1
        slower = times_slower(choice)
        if slower > 1 + SLACK:
            false["product"] += 1
            print(f"not true: {choice}: {slower:.2f} times the other")
    ours = sum(choice.ours for choice in some)
    print(f"{len(some)} of {len(choices)} products, {ours} generated, of "
          f"{len({choices[x] for x in some})} models")  # fmt: skip
    for reason in sorted(tried | left):
        known = f"{tried[reason] - false[reason]} of {tried[reason]} true"
        print(f"{reason}: {known}" + (f", {left[reason]} not tried" if left[reason] else ""))
    return int(bool(false) or not enough)


if __name__ == "__main__":
    sys.exit(main())
