"""The operations that random programs are made of: one line of text each.

In: nothing. Out: `ROWS`, group -> rows. A row is ``class text``. The class is that of its first
operand ``{x}``: f floating, i integer, b truth values, n a number, a anything. Further fields:

    {y} {z}   numbers that broadcast with x          {fy}  one of x's dtype and shape
    {b}       truth values that broadcast with x     {i}   an integer tensor of any shape
    {m}       a matrix that x can be multiplied by   {same}  another tensor to stand beside x
    {d} {e}   axes of x   {ds} a tuple of axes       {k}   keepdim
    {c}       a constant  {p} a positive one         {n}   a small whole number
    {dt}      a dtype     {o} an order of x's axes   {v} a new axis' place

Texts say sizes through ``.shape`` where they can, so that programs hold for other sizes too. What no
two machines agree about is avoided: the sign of a NaN.
"""

# ruff: noqa: E501 - a row is one line
from __future__ import annotations

UNARY = """
f torch.sin({x})
f torch.cos({x})
f torch.tanh({x})
f torch.exp({x}.clamp(-4, 4))
f torch.exp2({x}.clamp(-4, 4))
f torch.log({x}.abs() + {p})
f torch.log2({x}.abs() + {p})
f torch.log1p({x}.abs())
f torch.expm1({x}.clamp(max=3))
f torch.sqrt({x}.abs())
f torch.rsqrt({x}.abs() + {p})
f torch.reciprocal({x}.abs() + {p})
f torch.sigmoid({x})
f torch.erf({x})
f torch.atan({x})
f torch.asinh({x})
f torch.lgamma({x}.abs() + {p})
f torch.floor({x} * 1.7)
f torch.ceil({x} * 1.3)
f torch.round({x} * 2.1)
f torch.trunc({x} * 1.9)
f torch.frac({x})
f F.gelu({x})
f F.gelu({x}, approximate='tanh')
f F.silu({x})
f F.relu({x})
f F.softplus({x})
f F.leaky_relu({x}, 0.1)
f F.elu({x})
f F.hardswish({x})
f F.mish({x})
f F.logsigmoid({x})
f torch.isnan({x})
f torch.isfinite({x})
f torch.nan_to_num({x}, nan={c})
n -{x}
n torch.abs({x})
n torch.square({x})
n torch.sign({x})
n {x} + {c}
n {x} * {c}
n {c} - {x}
f {x} / {p}
f {x} ** 2
f {x} ** 3
f {p} ** {x}.clamp(-3, 3)
n {x}.clamp({c}, {c} + 1)
n {x}.clamp(min={c})
n {x} > {c}
n {x} == {n}
n {x}.ne({c})
i {x} + {n}
i {x} // {n}
i {x} % {n}
i {x} & 7
i {x} << 1
i {x} >> 1
i ~{x}
b ~{x}
b torch.logical_not({x})
n torch.logical_not({x})
"""

BINARY = """
n {x} + {y}
n {x} - {y}
n {x} * {y}
n {x} + {y} * {z}
n {x} / ({y}.abs() + {p})
n torch.maximum({x}, {y})
n torch.minimum({x}, {y})
n torch.add({x}, {y}, alpha=2)
f torch.atan2({x}, {y})
f torch.hypot({x}, {y})
f torch.lerp({x}, {fy}, 0.3)
f torch.addcmul({x}, {fy}, {fy}, value=0.5)
f torch.addcdiv({x}, {fy}, {fy}.abs() + {p})
f torch.copysign({x}, {y}.nan_to_num(1.0))
f torch.fmod({x}, {y}.abs() + {p})
f torch.remainder({x}, {y}.abs() + {p})
f torch.pow({x}.abs() + {p}, {y}.clamp(-2, 2))
f torch.logaddexp({x}, {fy})
f torch.xlogy({x}, {y}.abs() + {p})
n {x} < {y}
n {x} >= {y}
i {x} == {y}
n torch.where({b}, {x}, {y})
n torch.where({x} > {y}, {x}, {c})
n torch.where({b}, {x}, {c})
n {x}.masked_fill({b}, {c})
i torch.floor_divide({x}, {i}.abs().max().clamp(min=1))
i torch.remainder({x}, 5)
i {x} ^ 3
b {x} & {b}
b {x} | {b}
b {x} ^ {b}
a torch.logical_and({x}, {b})
a {x} != {b}
"""

CASTS = """
n {x}.to({dt})
b {x}.to({dt})
f {x}.nan_to_num(0.0).clamp(-99, 99).to(torch.int64)
f {x}.nan_to_num(0.0).clamp(-99, 99).to(torch.int32)
n {x}.to(torch.bool)
n {x}.type_as({y})
"""

VIEWS = """
a {x}.transpose({d}, {e})
a {x}.permute({o})
a {x}.reshape(-1)
a {x}.flatten({d})
a {x}.unsqueeze({v})
a {x}.squeeze({d})
a {x}[..., None]
a {x}[None]
a {x}.narrow({d}, 0, ({x}.shape[{d}] + 1) // 2)
a {x}.select({d}, 0)
a {x}[..., ::2]
a {x}[1:]
a {x}[..., :-1]
a {x}[-2:]
a {x}.flip({d})
a {x}.movedim({d}, {e})
a {x}.diagonal(0, {d}, {e})
a {x}.unfold({d}, 2, 1)
a {x}.unfold({d}, 3, 2)
a {x}.unsqueeze({v}).expand(*[3 if i == 1 else -1 for i in range({x}.dim() + 1)])
a {x}.chunk(2, {d})[-1]
a {x}.split(2, {d})[0]
a {x}.unbind({d})[-1]
a {x}.view({x}.shape)
a {x}.reshape({x}.shape[0], -1)
a {x}.reshape(-1, {x}.shape[-1])
a {x}.unflatten({d}, (-1, 1))
a {x}.contiguous()
a {x}.clone()
a {x}.mT
a {x}.broadcast_to((2, *{x}.shape))
a {x}.swapaxes({d}, {e}).contiguous()
a {x}.as_strided((2, 2), (1, 1))
a {x}.detach()
"""

MOVES = """
a torch.cat([{x}, {same}], {d})
a torch.cat([{x}, {x}], {d})
a torch.stack([{x}, {x}], {v})
a torch.cat([{x}[..., 1:], {x}[..., :1]], -1)
f F.pad({x}, (1, 2), value=0.5)
f F.pad({x}, (0, 1, 2, 0))
f F.pad({x}, (-1, 1))
f F.pad({x}[None, None].flatten(0, -3), (1, 1), mode='replicate')
f F.pad({x}[None, None].flatten(0, -3), (1, 0), mode='reflect')
a {x}.roll(1, {d})
a {x}.roll((1, -2), ({d}, {e}))
a {x}.repeat(*([2] + [1] * ({x}.dim() - 1)))
a {x}.repeat_interleave(2, {d})
a {x}.tril()
a {x}.triu(1)
a {x}.rot90(1, ({d}, {e}))
a torch.diag_embed({x})
a {x}.tile((2,))
a torch.slice_scatter({x}, {x}.narrow({d}, 0, {x}.shape[{d}] // 2) , {d}, 0, {x}.shape[{d}] // 2)
a torch.select_scatter({x}, {x}.select({d}, -1), {d}, 0)
"""

REDUCTIONS = """
n {x}.sum()
n {x}.sum({ds}, keepdim={k})
n {x}.sum({d}, keepdim={k})
n {x}.sum({d})
f {x}.mean()
f {x}.mean({ds}, keepdim={k})
n {x}.amax({ds}, keepdim={k})
n {x}.amin({ds}, keepdim={k})
n {x}.max()
n {x}.max({d}, keepdim={k})[0]
n {x}.max({d})[1]
n {x}.min({d}, keepdim={k})[1]
n {x}.argmax({d}, keepdim={k})
n {x}.argmin({d})
n {x}.argmax()
f {x}.clamp(-1.3, 1.3).prod({d}, keepdim={k})
a {x}.any({d}, keepdim={k})
a {x}.all({d})
a {x}.any()
a torch.count_nonzero({x}, {d})
f {x}.var({ds}, keepdim={k}, correction=0)
f {x}.var({d})
f {x}.std({d}, keepdim={k}, correction=0)
f torch.var_mean({x}.nan_to_num(0.0), {d}, correction=0)[1]
f torch.linalg.vector_norm({x}, 2, {d}, keepdim={k})
f {x}.norm(p=1, dim={d})
f {x}.norm()
f torch.logsumexp({x}, {d}, keepdim={k})
f torch.softmax({x}, {d})
f torch.log_softmax({x}, {d})
f F.softmin({x}, {d})
n {x}.cumsum({d})
f {x}.clamp(-1.2, 1.2).cumprod({d})
f torch.logcumsumexp({x}, {d})
f {x}.cummax({d})[0]
f F.layer_norm({x}, {x}.shape[-1:])
f F.layer_norm({x}, {x}.shape[-2:])
f F.rms_norm({x}, {x}.shape[-1:])
f F.normalize({x}, dim={d})
f {x} - {x}.mean({d}, keepdim=True)
f {x} / ({x}.abs().sum({d}, keepdim=True) + {p})
f ({x} - {x}.amax({d}, keepdim=True)).exp()
f {x}.nansum({d})
f F.mse_loss({x}, {fy})
f F.smooth_l1_loss({x}, {fy}, reduction='sum')
f F.huber_loss({x}, {fy}, reduction='none')
f F.cosine_similarity({x}, {fy}, dim={d})
f F.kl_div({x}.log_softmax(-1), {fy}.softmax(-1), reduction='sum')
f F.cross_entropy({x}.flatten(0, -2), {x}.flatten(0, -2).detach().argmin(-1))
f F.avg_pool1d({x}[None, None].flatten(0, -3), 2)
f F.max_pool1d({x}[None, None].flatten(0, -3), 2, 1)
f F.adaptive_avg_pool1d({x}[None, None].flatten(0, -3), 2)
f F.glu({x}, {d})
f {x}.sort({d})[0]
f {x}.topk(1, {d})[0]
"""

INDEXING = """
a {x}.index_select({d}, {i}.reshape(-1) % {x}.shape[{d}])
a {x}[{i} % {x}.shape[0]]
a {x}[:, {i} % {x}.shape[1]]
a {x}[{i} % {x}.shape[0], {i} % {x}.shape[1]]
a {x}[..., {i} % {x}.shape[-1]]
f torch.gather({x}, {d}, {x}.argsort({d}, stable=True))
f torch.take_along_dim({x}, {x}.argmax({d}, keepdim=True), {d})
a torch.take({x}, {i} % {x}.numel())
f F.embedding({i} % {x}.shape[0], {x}.reshape({x}.shape[0], -1))
n {x}.index_add({d}, torch.zeros_like({x}.select({d}, 0).reshape(-1)[:1], dtype=torch.int64), {x}.narrow({d}, 0, 1))
n {x}.scatter_add({d}, {x}.argsort({d}, stable=True) // 2, {x})
f {x}.scatter({d}, {x}.argsort({d}, stable=True), {fy})
f {x}.scatter_reduce({d}, {x}.argsort({d}, stable=True) // 2, {fy}, 'amax')
f {x}.scatter_reduce({d}, {x}.argsort({d}, stable=True) // 2, {fy}, 'mean', include_self={k})
n torch.index_put({x}, ({i}.reshape(-1) % {x}.shape[0],), {x}[:1].sum(), accumulate=True)
f torch.zeros_like({x}).index_add(0, {i}.reshape(-1)[:1] % {x}.shape[0], {x}[:1])
a {x}.index_fill({d}, {i}.reshape(-1)[:1] % {x}.shape[{d}], 1)
i F.one_hot({x}.remainder(5).to(torch.int64), 5)
f torch.bucketize({x}, torch.tensor([-1.0, 0.0, 0.5], dtype={x}.dtype))
a torch.where({b}, {x}, {x}.flip(0))
"""

CONTRACTIONS = """
f {x} @ {m}
f torch.matmul({x}, {x}.mT)
f F.linear({x}, {m}.mT)
f torch.einsum('...ij,...kj->...ik', {x}, {x})
f torch.mv({x}.reshape(-1, {x}.shape[-1]), {x}.reshape(-1, {x}.shape[-1])[0])
f torch.outer({x}.reshape(-1)[:7], {x}.reshape(-1)[:5])
f torch.dot({x}.reshape(-1), {x}.reshape(-1))
f ({x}.unsqueeze(-1) * {m}).sum(-2)
f torch.softmax({x} @ {x}.mT, -1) @ {x}
f F.scaled_dot_product_attention({x}[None, None].flatten(0, -4), {x}[None, None].flatten(0, -4), {x}[None, None].flatten(0, -4))
"""

FACTORIES = """
n torch.arange({x}.shape[{d}], device={x}.device)
n torch.arange({x}.shape[-1], device={x}.device) * {x}
n torch.full_like({x}, {n})
n torch.zeros_like({x}) + {x}.shape[{d}]
a torch.ones_like({x}, dtype=torch.float32)
f torch.linspace(0, 1, 5, dtype={x}.dtype, device={x}.device)
f torch.eye({x}.shape[-1], dtype={x}.dtype, device={x}.device)
f {x}.new_zeros({x}.shape)
f {x} * {x}.shape[{d}]
f {x} / max({x}.numel(), 1)
"""

RANDOM = """
f torch.rand_like({x})
f torch.randn_like({x}) + {x}
f F.dropout({x}, 0.3, True)
f torch.bernoulli({x}.sigmoid())
f torch.rand({x}.shape[0], 3, dtype={x}.dtype, device={x}.device)
a torch.randint(0, 5, {x}.shape, device={x}.device)
"""

# These change x and give nothing new.
MUTATIONS = """
n {x}.add_({y})
n {x}.mul_({c})
f {x}.mul_({y})
f {x}.sub_({x}.mean())
a {x}.zero_()
a {x}.copy_({same})
f {x}.relu_()
f {x}.tanh_()
f {x}.clamp_(-1, 1)
n {x}.fill_({n})
n {x}.masked_fill_({b}, {n})
n {x}[0] = {n}
a {x}[..., 0] = {x}[..., -1]
n {x}[1:] += 1
n {x}[..., ::2] *= 2
f {x}.transpose({d}, {e}).add_({c})
n {x}[{i} % {x}.shape[0]] = {n}
n {x}.index_add_(0, {i}.reshape(-1)[:1] % {x}.shape[0], {x}[:1].clone())
f {x}.select({d}, 0).copy_({x}.select({d}, -1))
f {x}.view(-1)[:2].mul_(3)
f {x}.diagonal(0, {d}, {e}).zero_()
f {x}.add_({x}.flip(0))
f {x}.copy_({x}.mT.contiguous())
n {x}.sub_({x}.clone().roll(1, 0))
"""


def rows(text: str) -> tuple[tuple[str, str], ...]:
    lines = [x for x in text.splitlines() if x.strip()]
    return tuple((x[0], x[2:]) for x in lines)


# Group -> (how often, rows).
ROWS: dict[str, tuple[float, tuple[tuple[str, str], ...]]] = {
    "unary": (5.0, rows(UNARY)),
    "binary": (6.0, rows(BINARY)),
    "casts": (1.0, rows(CASTS)),
    "views": (4.0, rows(VIEWS)),
    "moves": (2.0, rows(MOVES)),
    "reductions": (4.5, rows(REDUCTIONS)),
    "indexing": (2.0, rows(INDEXING)),
    "contractions": (0.8, rows(CONTRACTIONS)),
    "factories": (0.7, rows(FACTORIES)),
    "random": (0.4, rows(RANDOM)),
    "mutations": (1.6, rows(MUTATIONS)),
}
