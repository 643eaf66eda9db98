"""Classes of reasons in words: why two groups of operations share no kernel, and what in the
user's code would change that.

A row per class that the modules of `schedule` refuse with; ``tests/tools/test_advice.py`` holds the
table against their source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What a class of refusals means, and what to change."""

    meaning: str
    change: str


REFUSALS: dict[str, Advice] = {
    "cycle": Advice(
        "something else (often a library call) reads one of them and is read by the other, so it "
        "would have to run inside the kernel",
        "Move what stands between, if the order does not matter to you: compute it before both or "
        "after both.",
    ),
    "iteration spaces differ": Advice(
        "their loops go over different points, and no tensor that both touch relates them",
        "Give both the same shape, or reshape once before both; values of another shape that are "
        "needed in many places are cheap to compute twice.",
    ),
    "index maps differ": Advice(
        "one makes an element at a point where the other reads another one",
        "Read the tensor in the order in which it is made: avoid transposing, rolling or "
        "reshaping between the two.",
    ),
    "rows against columns": Advice(
        "one reduces over the rows of the other, so it is complete only after all of them",
        "Reduce along the same dimension, or accept two kernels: a sum over all rows needs them "
        "all.",
    ),
    "parallelism lost": Advice(
        "together they have too few independent rows to keep the device busy, and that costs more "
        "than the bytes that would be saved",
        "Larger batches bring more rows. Nothing is to be gained on this size.",
    ),
    "no gain": Advice(
        "the kernel of both would take as long as the two, or longer",
        "Nothing to change: two kernels are as good.",
    ),
    "too large": Advice(
        "the kernel would have more code than is compiled in reasonable time",
        "Nothing to change: a kernel of this size saves little by growing.",
    ),
    "scatter": Advice(
        "one stores at computed places, so nobody knows which point holds what until it is done",
        "Where the places are a permutation or a slice, write it as indexing or slicing.",
    ),
    "device": Advice(
        "they run on different devices",
        "Make both tensors on one device (`.to(device)` before the computation).",
    ),
    "grouped reductions": Advice(
        "groups of a row are reduced, and a program cannot hold such a row on chip",
        "Shorter rows or larger groups fit.",
    ),
    "no nest": Advice(
        "a product of matrices and what surrounds it cannot be written as one nest of loops",
        "The detail names what is in the way: a scan, random numbers, positions that are loaded, "
        "or a result that is read at two places.",
    ),
    "no tiling": Advice(
        "one kernel of the products and what surrounds them would need more than fits on chip, or "
        "would read rows at odd places",
        "Heads of at most 256 columns fit, if that number is fixed, and rows of whole 4 bytes.",
    ),
    "crossed sums": Advice(
        "of two results each is summed over what the other has rows of (the gradients of queries "
        "and of keys): one kernel would have to add to one of them atomically",
        "Nothing to change: each has a kernel, and the scores are computed in both.",
    ),
    "many results": Advice(
        "others need more results of the products and what surrounds them than a search for their "
        "kernels takes",
        "Nothing to change: smaller parts of it are tried.",
    ),
    "another saves more": Advice(
        "a kernel with more of what surrounds the same product, or with less, saves more",
        "Nothing to change: the product is in that kernel.",
    ),
    "leaves more in memory": Advice(
        "it reads what a larger kernel would not store; with that memory counted, that one saves "
        "more",
        "Nothing to change: the product is in that kernel.",
    ),
    "in another kernel": Advice(
        "a part of it, or what stands between, is in a kernel already, with a product",
        "Nothing to change: what a kernel has is not computed again in another one.",
    ),
    "kept unfused": Advice(
        "it was measured: apart they are faster (option guard='measure')",
        "Nothing to change.",
    ),
    "scanned in blocks": Advice(
        "programs scan blocks of a long row, beside pointwise work only",
        "Nothing to change: the scan would be slower in a kernel with reductions.",
    ),
    "positions": Advice(
        "one keeps positions along a single loop (argmax), which the common loops do not have",
        "Flatten the dimensions before the argmax, or take it along the last one.",
    ),
    "columns": Advice(
        "one reads a sum over all rows, which is complete only after the kernel",
        "Nothing to change: the sum must be complete before it is read.",
    ),
    "order": Advice(
        "one reads the other before it is there",
        "Nothing to change: they depend on each other in this order.",
    ),
    "levels": Advice(
        "one has a value per row, the other per element, in loops that do not nest that way",
        "Reduce along the last dimension, or make the reduced tensor contiguous.",
    ),
    "overwritten": Advice(
        "one overwrites memory that the other still reads",
        "Use the operation that makes a new tensor instead of the in-place one.",
    ),
    "row split": Advice(
        "rows are shared out among persistent programs, and this work cannot be split that way",
        "Nothing to change: a reduction over all rows needs partial results.",
    ),
}
UNKNOWN = Advice("see the detail", "")


def advice(reason: str) -> Advice:
    """Of a class of refusals."""
    return REFUSALS.get(reason, UNKNOWN)


__all__ = ["REFUSALS", "Advice", "advice"]
