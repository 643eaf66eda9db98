"""Whether the reasons that explanations give are the true ones: rebuilt and tried, over models.

    python -m dev.check.reasons                # 200 refusals, 50 choices of who multiplies

In: models of transformers and of `tools.models`, explained. Out: a row per class of reasons, with
how many hold; exit status 1 where one does not.

    cycle      there is a way from one kernel to the other, or back, through a third step
    iteration spaces differ
               the loops of the two have other numbers of points (where they have the same, and
               nothing relates them: not tried)
    scatter    one of the two stores at places that are loaded, or combines with what is there
    device     the two run on different devices
    product    the product alone, built as loops and as a library call and timed both ways: who was
               chosen is at most `SLACK` slower

Other classes are counted and not tried: `tests/schedule/test_legality.py` has some of each.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import networkx
import torch

from deuteron.lower import graph as lowering
from deuteron.tools.explain import explain
from deuteron.tools.measuring import distinct, interleaved
from deuteron.tools.models import Gpt

Data = Mapping[str, Any]
REFUSALS, PRODUCTS = 200, 50
# What was chosen may be this much slower than the other, as a share: two runs of one program differ
# by as much on a machine that others use.
SLACK = 0.25
SPACE = re.compile(r"\[([\dx]+(?: \| [\dx]+)?)\]")
SHAPE = re.compile(r"(?:(\d+) of )?(\d+)x(\d+) by (\d+)x(\d+)")


def models() -> Iterator[tuple[str, torch.nn.Module, dict[str, Any]]]:
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTModel,
    )

    ids = torch.randint(2, 97, (4, 32))
    small = {"vocab_size": 97, "num_hidden_layers": 3, "num_attention_heads": 4}
    yield "Gpt", Gpt(97, 64, 4, 3, 64), {"ids": ids}
    gpt2 = GPT2Config(vocab_size=97, n_layer=3, n_head=4, n_embd=64, bos_token_id=1, eos_token_id=1)
    yield "GPT-2", GPT2LMHeadModel(gpt2), {"input_ids": ids, "labels": ids}
    bert = BertConfig(hidden_size=64, intermediate_size=128, **small)
    yield "BERT", BertModel(bert), {"input_ids": ids}
    llama = LlamaConfig(hidden_size=64, intermediate_size=128, num_key_value_heads=2, **small)
    yield "Llama", LlamaForCausalLM(llama), {"input_ids": ids, "labels": ids}
    vit = ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                    num_attention_heads=4, image_size=32, patch_size=8)  # fmt: skip
    yield "ViT", ViTModel(vit), {"pixel_values": torch.randn(4, 3, 32, 32)}
    t5 = T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
                  decoder_start_token_id=0)  # fmt: skip
    yield "T5", T5ForConditionalGeneration(t5), {"input_ids": ids, "labels": ids}


def steps_of(part: Data, tensor: str, node: str) -> set[int]:
    """The steps that make a tensor, or do its node."""
    makers = {k for k, s in enumerate(part["steps"]) if tensor in s["writes"]}
    doers = (k for k, s in enumerate(part["steps"]) if node in {o["node"] for o in s["ops"]})
    return makers or set(doers)


def dependencies(part: Data) -> Any:
    """Which step reads what which other has made."""
    out = networkx.DiGraph()
    maker: dict[str, int] = {}
    for k, s in enumerate(part["steps"]):
        out.add_node(k)
        for n in s["reads"]:
            home = part["tensors"].get(n, {}).get("in", n)
            out.add_edges_from((m, k) for m in {maker.get(n), maker.get(home)} - {None, k})
        maker.update(dict.fromkeys(s["writes"], k))
    return out


def holds(part: Data, graph: Any, r: Data) -> bool | None:
    """Whether a refusal's reason is true; None where it is not tried."""
    a = steps_of(part, r["first"], r["first_node"])
    b = steps_of(part, r["second"], r["second_node"])
    if r["reason"] == "cycle":
        if a & b:
            return None  # merged after all, in another way
        return any(
            graph.has_edge(u, v) is False and networkx.has_path(graph, u, v)
            or any(networkx.has_path(graph, w, v) for w in graph.successors(u) if w != v)
            for x in a for y in b for u, v in ((x, y), (y, x))
        )  # fmt: skip
    if r["reason"] == "scatter":
        texts = [part["steps"][k]["nest"] for k in a | b]
        return any(re.search(r"\] =\w+= |\[[^\]]*val\(|  where ", t) for t in texts)
    if r["reason"] == "device":
        return len({part["steps"][k]["device"] for k in a | b}) > 1
    if r["reason"] == "iteration spaces differ":
        extents = [loops(text) for text in SPACE.findall(r["detail"])]
        return True if len(extents) == 2 and extents[0] != extents[1] else None
    return None


def loops(space: str) -> list[int]:
    """``32x8 | 64`` -> [256, 64]: points of the parallel and of the reduced loops."""
    parts = [re.findall(r"\d+", part) for part in space.split("|")]
    return [math.prod(map(int, part)) for part in parts]


def product_holds(shape: str, generated: bool, dtype: torch.dtype = torch.float32) -> bool:
    """Both ways to multiply, timed in turn."""
    batch, m, k, _, n = (int(x or 1) for x in SHAPE.fullmatch(shape).groups())  # type: ignore[union-attr]
    x, w = torch.randn(batch, m, k, dtype=dtype), torch.randn(batch, k, n, dtype=dtype)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, w) if batch > 1 else x[0] @ w[0]

    torch._dynamo.reset()

    def form(choice: str) -> Any:
        own = distinct(f, choice)
        with patch.object(lowering, "choose_contraction", lambda *_: choice):
            call = torch.compile(own, backend="deuteron", options={"keep_graphs": False})
            call(x, w)
        return call

    loops, library = form("generated"), form("library")
    times = interleaved([lambda: loops(x, w), lambda: library(x, w)], 0.5, "cpu")
    mine, other = (min(t) for t in (times if generated else times[::-1]))
    return mine <= (1 + SLACK) * other


def main() -> int:
    torch.manual_seed(0)
    choose = random.Random(0)
    refusals: list[tuple[str, Data, Any, Data]] = []
    products: dict[tuple[str, bool], str] = {}
    for name, model, given in models():
        torch._dynamo.reset()
        told = explain(model, **given)
        for part in told.data["parts"]:
            graph = dependencies(part)
            refusals += [(name, part, graph, r) for r in part["refusals"]]
            for s in part["steps"]:
                if s["product"]:
                    chosen = any(
                        c["chosen"] and c["who"] != "library" for c in s["product"]["candidates"]
                    )
                    products.setdefault((s["product"]["shape"], chosen), name)
    tried: Counter[str] = Counter()
    false: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for name, of, graph, r in choose.sample(refusals, min(REFUSALS, len(refusals))):
        verdict = holds(of, graph, r)
        if verdict is None:
            left[r["reason"]] += 1
            continue
        tried[r["reason"]] += 1
        if not verdict:
            false[r["reason"]] += 1
            print(f"not true, {name} {of['id']}: {r['first']} + {r['second']}: {r['detail']}")
    for shape, chosen in choose.sample(sorted(products), min(PRODUCTS, len(products))):
        tried["product"] += 1
        if not product_holds(shape, chosen):
            false["product"] += 1
            print(f"not true: {shape} {'generated' if chosen else 'by the library'}")
    for reason in sorted(tried | left):
        known = f"{tried[reason] - false[reason]} of {tried[reason]} true"
        print(f"{reason}: {known}" + (f", {left[reason]} not tried" if left[reason] else ""))
    return int(bool(false))


if __name__ == "__main__":
    sys.exit(main())
