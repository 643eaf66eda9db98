"""What attention in models of transformers leaves in memory that is of all queries times all keys.

    python -m dev.check.squares [NAME...]      # bert-eager, t5-sdpa, ...; all without names

In: models with random weights, small but long, in inference and in training (with the dropout that
they have). They are planned for an H200; nothing runs. Out: a row per model, dtype and mode: steps,
and each tensor of that size, with the kernel or call that makes it and the reasons in the Record
for its region; exit status 1 where there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from deuteron.ir.program import Extern
from deuteron.schedule.kernel import Kernel
from tests.schedule.planning import Plan, planned

# Of inputs and of labels. No other extents have their factors 11 and 31.
LENGTH, OTHER = 1056, 992
AREAS = [a * b for a in (LENGTH, OTHER) for b in (LENGTH, OTHER, LENGTH + 1)]  # 1: a sink
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "f32": torch.float32}


@dataclass(frozen=True)
class Model:
    """`inputs(length, labels)`: what the model is called with."""

    build: Callable[[str], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]


def text(vocabulary: int, padded: bool, other: bool = False) -> Callable[..., dict[str, Tensor]]:
    """Tokens, and labels; `padded`: of different lengths; `other`: as many labels as that says."""

    def make(length: int, labels: int) -> dict[str, Tensor]:
        ids = torch.randint(2, vocabulary, (2, length))
        out = {"input_ids": ids, "labels": ids[:, :labels].clone() if other else ids}
        if padded:
            ends = torch.tensor([[length], [length * 2 // 3]])
            out["attention_mask"] = (torch.arange(length) < ends).long()
        return out

    return make


SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=256, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=2048,
)  # fmt: skip
KEYS: dict[str, Any] = {"num_key_value_heads": 2, "pad_token_id": 0}


def bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, attn_implementation=attention))


def llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **KEYS, attn_implementation=attention))


def gemma2(attention: str) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    own = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 256}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **KEYS, **own, attn_implementation=attention))


def gpt_oss(attention: str) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    own = {
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    }
    return GptOssForCausalLM(GptOssConfig(**SIZES, **KEYS, **own, attn_implementation=attention))


def t5(attention: str) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=256, d_kv=64, d_ff=192, num_layers=2, num_heads=4,
                 decoder_start_token_id=0, attn_implementation=attention)
    )  # fmt: skip


MODELS: dict[str, Model] = {
    "bert": Model(bert, text(97, False)),
    "bert-padded": Model(bert, text(97, True)),
    "llama": Model(llama, text(97, False)),
    "llama-padded": Model(llama, text(97, True)),
    "gemma2": Model(gemma2, text(97, False)),
    "gpt_oss": Model(gpt_oss, text(97, False)),
    "t5": Model(t5, text(97, False, True)),
    "t5-padded": Model(t5, text(97, True, True)),
}
NO_SDPA = ("gemma2", "gpt_oss")  # refused by transformers
CASES = [
    (n, attention)
    for n in MODELS
    for attention in ("eager", "sdpa")
    if attention == "eager" or n not in NO_SDPA
]


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    """Of tokens and labels; without a cache of keys and values."""
    more = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}

    def loss(**given: Tensor) -> Tensor:
        result: Tensor = model(**given, **more).loss
        return result

    return loss


def plan_of(name: str, attention: str, dtype: torch.dtype, train: bool) -> Plan:
    torch.manual_seed(0)
    model = MODELS[name].build(attention).to(dtype).train(train)
    inputs, loss = MODELS[name].inputs(LENGTH, OTHER), loss_of(model)

    if not train:
        with torch.no_grad():
            return planned(lambda: loss(**inputs), run=False, device="H200")
    plan = planned(lambda: loss(**inputs), run=False, device="H200")
    plan.results.backward()
    return plan


def squares(plan: Plan) -> list[tuple[str, str, str]]:
    """What is that large: its name and shape, who makes it, and the reasons of its region."""
    out = []
    for program, schedule, record in zip(plan.programs, plan.schedules, plan.records, strict=True):
        refused = [d for d in record.of("decision") if not d["accepted"]]
        for step in schedule.steps:
            for name, layout in made(step):
                numel = layout.numel.value or 0
                if not numel or all(numel % a for a in AREAS):
                    continue
                near = dict.fromkeys(
                    f"{d['reason']} ({d['detail']})"
                    for d in refused
                    if d["subject"] == "contract" and name in (d["first"], d["second"])
                )
                saved = " saved" if name in {o.tensor for o in program.outputs} else ""
                shape = "x".join(str(e) for e in layout.shape)
                out.append((f"{name}{saved} {layout.dtype}[{shape}]", who(step), "; ".join(near)))
    return out


def made(step: Kernel | Extern) -> list[tuple[str, Any]]:
    if isinstance(step, Kernel):
        return list(step.writes)
    return [(n, lay) for n, lay in zip(step.names, step.layouts, strict=True) if n and lay]


def who(step: Kernel | Extern) -> str:
    return step.name if isinstance(step, Kernel) else str(step.op)


def main(names: list[str]) -> int:
    found = 0
    for name, attention in CASES:
        if names and not {name, f"{name}-{attention}"} & set(names):
            continue
        for kind, dtype in DTYPES.items():
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            for train in (False, True):
                plan = plan_of(name, attention, dtype, train)
                rows = squares(plan)
                found += len(rows)
                steps = "+".join(str(len(s.steps)) for s in plan.schedules)
                mode = "training" if train else "inference"
                print(f"{name} {attention} {kind} {mode}: {steps} steps, {len(rows)} squares")
                for row in rows:
                    print("   ", " | ".join(row), flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
