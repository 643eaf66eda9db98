"""Which models a run of the suite `real` takes: drawn by date from the packages' own registries.

In: a date and how many models. Out: `Slot`s, each with its settings (inference or training, dtype,
memory order) and the candidates that it takes in order until one builds and runs in eager. Slots do
not depend on one another, so that a part of them can be run alone. Nothing here names a model.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PACKAGES = ("timm", "transformers")
# Heads of transformers that are drawn, beside the bare model: their names in its registry.
MODEL_HEADS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
)
MAX_CANDIDATES = 16  # of a slot, at most


@dataclass(frozen=True)
class Candidate:
    """`name`: a timm model, or a class of transformers with its configuration's `model_type`."""

    package: str
    name: str
    model_type: str = ""

    def __str__(self) -> str:
        return f"{self.package}/{self.name}"


@dataclass(frozen=True)
class Slot:
    number: int
    train: bool
    dtype: str  # "bf16" or "fp32"
    channels_last: bool  # of models that take images
    candidates: tuple[Candidate, ...]

    def settings(self) -> str:
        words = ["train" if self.train else "infer", self.dtype]
        return " ".join([*words, "channels-last"] if self.channels_last else words)


def slots(date: str, count: int, packages: tuple[str, ...] = PACKAGES) -> list[Slot]:
    """The slots of a date (ISO). Settings alternate at different paces, so that every combination
    comes; candidates of a slot are its package's, in steps of the number of its slots."""
    orders = {p: ORDER_OF_PACKAGE[p](random.Random(f"{date} {p}")) for p in packages}
    paces = list(itertools.product((False, True), ("bf16", "fp32"), (False, True)))
    drawn = []
    for k in range(count):
        package = packages[k % len(packages)]
        turn, own = divmod(k, len(packages))[0], -(-count // len(packages))
        channels_last, dtype, train = paces[turn % len(paces)]
        candidates = orders[package][turn::own][:MAX_CANDIDATES]
        drawn.append(Slot(k, train, dtype, channels_last, tuple(candidates)))
    return drawn


def timm_order(generator: random.Random) -> list[Candidate]:
    """timm's models, one of each family (module) first, then a second of each."""
    timm = import_timm()
    families = [timm.list_models(module=m) for m in timm.list_modules()]
    for f in families:
        generator.shuffle(f)
    generator.shuffle(families)
    names = [n for rank in itertools.zip_longest(*families) for n in rank if n is not None]
    return [Candidate("timm", n) for n in dict.fromkeys(names)]


def transformers_order(generator: random.Random) -> list[Candidate]:
    """One class of each configuration of transformers' registry, with a head or without."""
    modeling = importlib.import_module("transformers.models.auto.modeling_auto")
    classes: dict[str, list[str]] = {}
    for head in MODEL_HEADS:
        for model_type, names in getattr(modeling, head, {}).items():
            class_names = (names,) if isinstance(names, str) else names
            classes.setdefault(model_type, []).extend(n for n in class_names if n)
    types_ = sorted(classes)
    generator.shuffle(types_)
    return [Candidate("transformers", generator.choice(classes[t]), t) for t in types_]


ORDER_OF_PACKAGE = {"timm": timm_order, "transformers": transformers_order}


# ------------------------------------------------------------------------- timm without torchvision
def import_timm() -> Any:
    """timm, also where torchvision cannot be loaded beside torch: its models need the name of one
    class of it, its data loaders more, and these are not used here."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    try:
        importlib.import_module("torchvision")
    except Exception:  # noqa: BLE001 - absent, or built for another torch
        with absent("torchvision"):
            return importlib.import_module("timm")
    return importlib.import_module("timm")


class _Names(type):
    """A class whose attributes are their own names (values of enumerations)."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def absent(package: str) -> Iterator[None]:
    """Imports of a package find empty modules inside the block. They are forgotten afterwards: who
    asks then whether there is such a package (transformers does) hears the truth."""
    finder = _Finder(package)
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
