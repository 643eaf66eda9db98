"""Device functions by which programs that share rows exchange what they reduced, for `libm`, under
whose name generated kernels call them.

A flag has 64 bits: a number of 32 bits, and above it a tag that says which exchange of which launch
it belongs to. It is written and read at once, so that whoever sees the tag has the number: nothing
else needs to be ordered. Cooperating programs must run at the same time (a cooperative launch).

A decoupled look-back needs no cooperative launch: its programs wait for programs with smaller
numbers, which begin before them.

Where cooperating programs are a cluster (sm_90), they write into one another's shared memory
instead: the last `CLUSTER_BYTES` of it, for which the launch makes room. For each round and
reduction there are a barrier (`mbarrier`), which counts the bytes that have come, and a number from
every program.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.base.cluster import CLUSTER_BYTES, EXCHANGE_ROUNDS, MAX_CLUSTER
from deuteron.codegen.triton.fast import INTERPRETED
from deuteron.codegen.triton.merging import maximum, minimum, mul_combine

ROUND_SLOTS = tl.constexpr(EXCHANGE_ROUNDS)
# Of a cluster's shared memory: where the numbers begin, behind barriers of 8 bytes for each round
# and reduction, and bytes of the numbers of a round and reduction.
NUMBERS_OFFSET, NUMBERS_BYTES = 256, 4 * MAX_CLUSTER
EXCHANGE_ADDRESS = (
    ".reg .b32 at, size, bar; .reg .pred one; "
    "mov.u32 at, global_smem; mov.u32 size, %dynamic_smem_size; add.u32 at, at, size; "
    f"sub.u32 at, at, {CLUSTER_BYTES}; "
)
# Makes $1 barriers. What the others send (`CLUSTER_MEET`) finds them, and what a program loads
# until then need not wait.
CLUSTER_BEGIN = tl.constexpr(
    "{ "
    + EXCHANGE_ADDRESS
    + ".reg .b32 who, k; mov.u32 who, %tid.x; setp.ne.u32 one, who, 0; mov.u32 k, 0; "
    "@one bra ready; "
    "next: mbarrier.init.shared::cta.b64 [at], 1; add.u32 at, at, 8; add.u32 k, k, 1; "
    "setp.lt.u32 one, k, $1; @one bra next; fence.mbarrier_init.release.cluster; "
    "ready: barrier.cluster.arrive.relaxed; mov.u32 $0, 0; }"
)
# In the first round ($1 is 0): returns once all programs have made their barriers.
CLUSTER_MEET = tl.constexpr(
    "{ .reg .pred later; setp.ne.b32 later, $1, 0; @later bra met; barrier.cluster.wait; "
    "met: mov.u32 $0, 0; }"
)
# Sends $1 to $3 programs, at place $2 of theirs.
CLUSTER_SEND = tl.constexpr(
    "{ " + EXCHANGE_ADDRESS + ".reg .b32 who, rank, bytes; "
    "mov.u32 who, %tid.x; mov.u32 rank, %cluster_ctarank; "
    f"mad.lo.u32 bar, $2, 8, at; mad.lo.u32 at, $2, {NUMBERS_BYTES}, at; "
    "mad.lo.u32 at, rank, 4, at; "
    "shl.b32 bytes, $3, 2; setp.eq.u32 one, who, 0; "
    "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], bytes; "
    "setp.lt.u32 one, who, $3; "
    "@one mapa.shared::cluster.u32 at, at, who; @one mapa.shared::cluster.u32 bar, bar, who; "
    "@one st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 "
    f"[at + {NUMBERS_OFFSET}], $1, [bar]; mov.u32 $0, 0; }}"
)
# Waits for the numbers at place $1, whose barrier's phase is $2; that of program $3.
CLUSTER_RECEIVE = tl.constexpr(
    "{ " + EXCHANGE_ADDRESS + f"mad.lo.u32 bar, $1, 8, at; mad.lo.u32 at, $1, {NUMBERS_BYTES}, at; "
    "mad.lo.u32 at, $3, 4, at; "
    "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 one, [bar], $2; "
    "@!one bra again; "
    f"ld.shared.b32 $0, [at + {NUMBERS_OFFSET}]; }}"
)

# Waits for flags with a tag; their numbers. Labels are the block's own.
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
def begin_exchange(flags, CLUSTER: tl.constexpr, REDUCTIONS: tl.constexpr):
    """The last tag that was used before this launch."""
    if CLUSTER and not INTERPRETED:
        tl.inline_asm_elementwise(
            CLUSTER_BEGIN, "=r,r", [REDUCTIONS * ROUND_SLOTS], dtype=tl.int32, is_pure=False, pack=1
        )
        return tl.full([], -1, tl.int32)
    else:
        return tl.load(flags + 1).to(tl.int32)


@triton.jit
def publish(
    flags,
    REDUCTION: tl.constexpr,
    REDUCTIONS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    value,
    tag,
    CLUSTER: tl.constexpr,
):
    """Publishes `value` (one element of 32 bits), that of a reduction in the round `tag`; reduction
    0 comes first. `flags`: the row group's."""
    place = (tag & (ROUND_SLOTS - 1)) * REDUCTIONS + REDUCTION
    if CLUSTER and not INTERPRETED:
        if REDUCTION == 0:
            tl.inline_asm_elementwise(
                CLUSTER_MEET, "=r,r", [tag], dtype=tl.int32, is_pure=False, pack=1
            )
        what = [tl.sum(tl.ravel(value.to(tl.int32, bitcast=True)), 0), place, PROGRAMS]
        tl.inline_asm_elementwise(
            CLUSTER_SEND, "=r,r,r,r", what, dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        write_flag(flags + place * PROGRAMS + tl.program_id(0) % PROGRAMS, value, tag)


@triton.jit
def write_flag(at, value, tag):
    """Writes `value` (one element of 32 bits) and the tag into the flag `at`."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    text = bits | (tl.zeros_like(bits) + tag).to(tl.int64) << 32
    tl.atomic_xchg(at + tl.zeros_like(bits), text, sem="relaxed", scope="gpu")


@triton.jit
def _await_interpreted(at, tags):
    """For Triton's interpreter."""
    flags = tl.load(at)
    while tl.sum(tl.where((flags >> 32).to(tl.int32) == tags, 0, 1)) > 0:
        flags = tl.load(at)
    return flags.to(tl.int32)


@triton.jit
def _await_two(ones, twos, tags):
    """The numbers of flags with these tags; returns once all are there."""
    if INTERPRETED:
        return _await_interpreted(ones, tags), _await_interpreted(twos, tags)
    else:
        at = [ones.to(tl.int64), twos.to(tl.int64), tags]
        return tl.inline_asm_elementwise(
            WAIT_TWO, "=&r,=&r,l,l,r", at, dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )


@triton.jit
def _await_cluster(place, lane, tag):
    what = [place + tl.zeros_like(lane), ((tag // ROUND_SLOTS) & 1) + tl.zeros_like(lane), lane]
    return tl.inline_asm_elementwise(
        CLUSTER_RECEIVE, "=&r,r,r,r", what, dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def collect(
    flags,
    REDUCTION: tl.constexpr,
    REDUCTIONS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    tag,
    CLUSTER: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The bits of all programs' numbers of a reduction in `ROOM` lanes (a power of two, at least a
    warp, so that a thread reads one; the rest repeat the first); returns once all have come."""
    lane = tl.arange(0, ROOM)
    lane = tl.where(lane < PROGRAMS, lane, 0)
    place = (tag & (ROUND_SLOTS - 1)) * REDUCTIONS + REDUCTION
    if CLUSTER and not INTERPRETED:
        return _await_cluster(place, lane, tag)
    else:
        at = flags + place * PROGRAMS + lane
        tags = tl.zeros([ROOM], tl.int32) + tag
        if INTERPRETED:
            return _await_interpreted(at, tags)
        else:
            return tl.inline_asm_elementwise(
                WAIT_ONE, "=&r,l,r", [at.to(tl.int64), tags], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def collect_two(
    flags,
    REDUCTION: tl.constexpr,
    OTHER: tl.constexpr,
    REDUCTIONS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    tag,
    CLUSTER: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The same of two reductions, which are read together."""
    lane = tl.arange(0, ROOM)
    lane = tl.where(lane < PROGRAMS, lane, 0)
    one, two = (
        (tag & (ROUND_SLOTS - 1)) * REDUCTIONS + REDUCTION,
        (tag & (ROUND_SLOTS - 1)) * REDUCTIONS + OTHER,
    )
    if CLUSTER and not INTERPRETED:
        return _await_cluster(one, lane, tag), _await_cluster(two, lane, tag)
    else:
        at = flags + one * PROGRAMS + lane
        return _await_two(at, flags + two * PROGRAMS + lane, tl.zeros([ROOM], tl.int32) + tag)


@triton.jit
def collected(bits, like, neutral, COUNT: tl.constexpr):
    """What was collected as values of the dtype of `like`, filled up with `neutral`."""
    values = bits.to(like.dtype, bitcast=True)
    return tl.where(tl.arange(0, bits.shape[0]) < COUNT, values, neutral)


# What all programs' numbers reduce to: scalars, which all points share without an exchange of
# layouts.


@triton.jit
def combine_sum(x):
    return tl.sum(x, 0)


@triton.jit
def combine_max(x):
    return tl.reduce(x, 0, maximum)


@triton.jit
def combine_min(x):
    return tl.reduce(x, 0, minimum)


@triton.jit
def _reduce(x, KIND: tl.constexpr):
    if KIND == "sum":
        return combine_sum(x)
    elif KIND == "prod":
        return tl.reduce(x, 0, mul_combine)
    elif KIND == "max":
        return combine_max(x)
    else:
        return combine_min(x)


@triton.jit
def _both(x, y, KIND: tl.constexpr):
    if KIND == "sum":
        return x + y
    elif KIND == "prod":
        return x * y
    elif KIND == "max":
        return maximum(x, y)
    else:
        return minimum(x, y)


@triton.jit
def exclusive_prefix(values, place, neutral, KIND: tl.constexpr):
    """What the blocks of a row reduce to from the row's begin up to before the block of the
    program of rank `place`."""
    return _reduce(tl.where(tl.arange(0, values.shape[0]) < place, values, neutral), KIND)


@triton.jit
def block_sizes(count, block, PROGRAMS: tl.constexpr, ROOM: tl.constexpr):
    """Elements of a row that each program has."""
    lane = tl.arange(0, ROOM)
    left = tl.minimum(tl.maximum(count - lane * block, 0), block)
    return tl.where(lane < PROGRAMS, left, 0).to(tl.float32)


@triton.jit
def combine_moments(sums, m2s, sizes, count):
    """The mean of a row, and the sum of squared deviations from it, from the same of its blocks
    (Chan, Golub, LeVeque 1979)."""
    means = sums / tl.maximum(sizes, 1.0)
    mean = tl.sum(means * sizes, 0) / count
    away = means - mean
    return mean, tl.sum(m2s + sizes * away * away, 0)


@triton.jit
def end_exchange(flags, tag, rounds, CLUSTER: tl.constexpr):
    """The last thing of every program: the last one of a launch leaves the next one's tag. A
    cluster's program can go: the others need nothing of it that it has not sent, and what they
    send it has received, since who publishes in a round collects all of it."""
    if not CLUSTER or INTERPRETED:
        tl.debug_barrier()
        ticket = tl.atomic_add(flags, 1, sem="acq_rel", scope="gpu")
        if ticket == tl.num_programs(0) - 1:
            tl.store(flags, 0)
            tl.store(flags + 1, tag.to(tl.int64) + rounds)


# Programs that look back along a row: each is one of `blocks` blocks of it. Of so many blocks one
# after another as there are lanes (a group), the last one writes what they reduce to, and of as
# many groups (a part), what the row reduces to up to its end.


@triton.jit
def look_back_flags(blocks, LANES: tl.constexpr):
    """Flags of a row's blocks, groups and parts."""
    return blocks + blocks // LANES + blocks // (LANES * LANES)


@triton.jit
def decoupled_look_back(
    flags, block, blocks, own, tag, neutral, KIND: tl.constexpr, LANES: tl.constexpr
):
    """What a row reduces to up to before this block (`neutral` before the first), which has written
    that it reduces to `own` (one element). `flags`: the row's, of this scan."""
    lane = tl.arange(0, LANES)
    group = block // LANES
    part = group // LANES
    rank, group_rank = block % LANES, group % LANES
    groups = flags + blocks
    parts = groups + blocks // LANES
    in_group = lane < rank
    in_part = lane < group_rank
    start = (lane == LANES - 1) & (part > 0)  # a lane that no group before this one has
    here = flags + block
    ones = tl.where(in_group, here - rank + lane, here)
    twos = tl.where(
        in_part, groups + (group - group_rank) + lane, tl.where(start, parts + part - 1, here)
    )
    one, two = _await_two(ones, twos, tl.zeros([LANES], tl.int32) + tag)
    one = tl.where(in_group, one.to(own.dtype, bitcast=True), neutral)
    two = tl.where(in_part | start, two.to(own.dtype, bitcast=True), neutral)
    blocks_reduced, groups_reduced = _reduce(one, KIND), _reduce(two, KIND)
    if rank == LANES - 1:
        group_reduced = _both(blocks_reduced, own, KIND)
        write_flag(groups + group, group_reduced, tag)
        if group_rank == LANES - 1:
            write_flag(parts + part, _both(groups_reduced, group_reduced, KIND), tag)
    return _both(groups_reduced, blocks_reduced, KIND)


@triton.jit
def end_look_back(flags, block, blocks, rows, tag):
    """The last thing of a program that has looked back: the last of the rows' last ones leaves the
    next launch's tag. All programs have begun, with the tag before, since it has what they
    wrote."""
    if block == blocks - 1:
        ticket = tl.atomic_add(flags, 1, sem="acq_rel", scope="gpu")
        if ticket == rows - 1:
            tl.store(flags, 0)
            tl.store(flags + 1, tag.to(tl.int64))
