"""Device functions by which programs that share rows tell each other what they folded, for `libm`,
under whose name generated kernels call them.

A word has 64 bits: a number of 32 bits, and above it a tag that says which exchange of which launch
it belongs to. It is written and read at once, so that whoever sees the tag has the number: nothing
else needs to be ordered. The programs must run at the same time (a cooperative launch).
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.codegen.triton.fast import INTERPRETED
from deuteron.codegen.triton.merging import maximum, minimum

# Waits for words with a tag; their numbers. Labels are the block's own.
WAIT_ONE = tl.constexpr(
    "{ .reg .pred other; .reg .b64 word; .reg .b32 tag; "
    "bra first; again: nanosleep.u32 32; "
    "first: ld.relaxed.gpu.global.b64 word, [$1]; mov.b64 {$0, tag}, word; "
    "setp.ne.b32 other, tag, $2; @other bra again; }"
)
WAIT_TWO = tl.constexpr(
    "{ .reg .pred other; .reg .b64 a, b; .reg .b32 s, t; "
    "bra first; again: nanosleep.u32 32; "
    "first: ld.relaxed.gpu.global.b64 a, [$2]; ld.relaxed.gpu.global.b64 b, [$3]; "
    "mov.b64 {$0, s}, a; mov.b64 {$1, t}, b; "
    "setp.ne.b32 other, s, $4; setp.ne.or.b32 other, t, $4, other; @other bra again; }"
)


@triton.jit
def publish(word, value, tag, when):
    """Writes `value` (one element of 32 bits) with `tag` at `word`; if `when`, where given."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    text = bits | (tl.zeros_like(bits) + tag).to(tl.int64) << 32
    at = word + tl.zeros_like(bits)
    if when is None:
        tl.atomic_xchg(at, text, sem="relaxed", scope="gpu")
    else:
        tl.atomic_xchg(at, text, (bits == bits) & when, sem="relaxed", scope="gpu")


@triton.jit
def _polled(at, tags):
    """For Triton's interpreter."""
    found = tl.load(at)
    while tl.sum(tl.where((found >> 32).to(tl.int32) == tags, 0, 1)) > 0:
        found = tl.load(at)
    return found.to(tl.int32)


@triton.jit
def collect(words, tag, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """The bits of the numbers of `COUNT` words in `ROOM` lanes (a power of two, at least a warp, so
    that a thread reads one word; the rest repeat the first); returns once all have the tag."""
    lane = tl.arange(0, ROOM)
    at = words + tl.where(lane < COUNT, lane, 0)
    tags = tl.zeros([ROOM], tl.int32) + tag
    if INTERPRETED:
        return _polled(at, tags)
    else:
        return tl.inline_asm_elementwise(
            WAIT_ONE, "=&r,l,r", [at.to(tl.int64), tags], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def collect_two(words, others, tag, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """The same of two kinds of words, which are read together."""
    lane = tl.arange(0, ROOM)
    step = tl.where(lane < COUNT, lane, 0)
    tags = tl.zeros([ROOM], tl.int32) + tag
    if INTERPRETED:
        return _polled(words + step, tags), _polled(others + step, tags)
    else:
        at = [(words + step).to(tl.int64), (others + step).to(tl.int64), tags]
        return tl.inline_asm_elementwise(
            WAIT_TWO, "=&r,=&r,l,l,r", at, dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )


@triton.jit
def told(bits, like, neutral, COUNT: tl.constexpr):
    """What was collected as values of the dtype of `like`, filled up with `neutral`."""
    values = bits.to(like.dtype, bitcast=True)
    return tl.where(tl.arange(0, bits.shape[0]) < COUNT, values, neutral)


# What a team's numbers fold to: scalars, which all points share without an exchange of layouts.


@triton.jit
def team_sum(x):
    return tl.sum(x, 0)


@triton.jit
def team_max(x):
    return tl.reduce(x, 0, maximum)


@triton.jit
def team_min(x):
    return tl.reduce(x, 0, minimum)


@triton.jit
def team_sizes(count, block, TEAM: tl.constexpr, ROOM: tl.constexpr):
    """Elements of a row that each of a team's programs has."""
    lane = tl.arange(0, ROOM)
    left = tl.minimum(tl.maximum(count - lane * block, 0), block)
    return tl.where(lane < TEAM, left, 0).to(tl.float32)


@triton.jit
def team_moments(sums, m2s, sizes, count):
    """The mean of a row, and the sum of squared deviations from it, from the same of its blocks
    (Chan, Golub, LeVeque 1979)."""
    means = sums / tl.maximum(sizes, 1.0)
    mean = tl.sum(means * sizes, 0) / count
    away = means - mean
    return mean, tl.sum(m2s + sizes * away * away, 0)


@triton.jit
def arrive(words, tag, rounds):
    """The last thing of every program: the last one of the launch leaves the next one's tag."""
    tl.debug_barrier()
    ticket = tl.atomic_add(words, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        tl.store(words, 0)
        tl.store(words + 1, tag.to(tl.int64) + rounds)
