"""The single ops and small chains that `benchmarks.kernels_cpu` races: name -> function and inputs.

Sizes are such that eager takes from tens of microseconds to a few milliseconds on one core: inputs
lie in the second or third level of cache, as between two layers of a model. A name's prefix is its
family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as f

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def pw(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The pointwise benchmark of the peers' table."""
    y = torch.tanh(x) * torch.sigmoid(x) - torch.exp(-x.abs())
    y = f.layer_norm(y, (y.shape[-1],), w, b)
    return torch.softmax(f.gelu(y), -1)


def cases() -> dict[str, Case]:
    """Every case, in families."""
    torch.manual_seed(0)
    return {
        **_pointwise(),
        **_rows(),
        **_reductions(),
        **_moves(),
        **_indexing(),
        **_windows(),
        **_narrow(),
        **_strides(),
    }


def _pointwise() -> dict[str, Case]:
    x, y, r = torch.randn(512, 512), torch.randn(512, 512), torch.rand(512, 512) + 0.5
    row, column = torch.randn(512), torch.randn(512, 1)
    h, g = x.bfloat16(), y.bfloat16()
    single: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": f.gelu, "gelu_tanh": lambda a: f.gelu(a, approximate="tanh"), "silu": f.silu,
        "exp": torch.exp, "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid,
        "relu": torch.relu, "sin": torch.sin, "hardswish": f.hardswish, "mish": f.mish,
        "elu": f.elu, "softplus": f.softplus, "neg": torch.neg, "leaky_relu": f.leaky_relu,
        "clamp": lambda a: a.clamp(-1, 1), "abs": torch.abs, "round": torch.round,
        "pow2": lambda a: a**2,
    }  # fmt: skip
    out: dict[str, Case] = {name: (fn, (x,)) for name, fn in single.items()}
    for name in ("gelu", "gelu_tanh", "silu", "exp", "tanh", "erf", "sigmoid", "relu"):
        out[f"{name}_bf16"] = (single[name], (h,))
    return {
        **out,
        "log": (torch.log, (r,)),
        "log1p": (torch.log1p, (r,)),
        "sqrt": (torch.sqrt, (r,)),
        "rsqrt": (torch.rsqrt, (r,)),
        "pow": (torch.pow, (r, y)),
        "pow_2.5": (lambda a: a**2.5, (r,)),
        "pow3": (lambda a: a**3, (x,)),
        "div": (torch.div, (x, r)),
        "fmod": (torch.fmod, (x, r)),
        "atan2": (torch.atan2, (x, y)),
        "add": (torch.add, (x, y)),
        "add_bf16": (torch.add, (h, g)),
        "mul_add_bf16": (lambda a: a + a * 2, (h,)),
        "add_row": (torch.add, (x, row)),
        "add_column": (torch.add, (x, column)),
        "add_row_bf16": (torch.add, (h, row.bfloat16())),
        "addcmul": (torch.addcmul, (x, y, r)),
        "where": (torch.where, (x > y, x, y)),
        "masked_fill": (lambda a, m: a.masked_fill(m, -1e9), (x, x > y)),
        "maximum": (torch.maximum, (x, y)),
        "gt": (torch.gt, (x, y)),
        "silu_mul": (lambda a, c: f.silu(a) * c, (x, y)),
        "silu_mul_bf16": (lambda a, c: f.silu(a) * c, (h, g)),
        "dropout": (lambda a: f.dropout(a, 0.1, True), (x,)),
        "rand": (lambda a: torch.rand_like(a), (x,)),
        "randn": (lambda a: torch.randn_like(a), (x,)),
        "f64_exp": (torch.exp, (x.double(),)),
        "f64_add": (torch.add, (x.double(), y.double())),
        "pw": (pw, (torch.randn(1024, 1024), torch.randn(1024), torch.randn(1024))),
    }


def _rows() -> dict[str, Case]:
    """Softmax and norms."""
    wide, x = torch.randn(16, 32768), torch.randn(512, 1000)
    short, tiny, image = torch.randn(4096, 64), torch.randn(16384, 16), torch.randn(4, 64, 28, 28)
    w, b, c = torch.randn(1024), torch.randn(1024), torch.randn(64)
    t = torch.randn(256, 1024)
    out: dict[str, Case] = {}
    for suffix, cast in (("", torch.float32), ("_bf16", torch.bfloat16)):
        a, s, v, n = x.to(cast), short.to(cast), wide.to(cast), t.to(cast)
        m, gain, bias, chan = image.to(cast), w.to(cast), b.to(cast), c.to(cast)
        out |= {
            f"softmax_64{suffix}": (lambda q: torch.softmax(q, -1), (s,)),
            f"softmax_1000{suffix}": (lambda q: torch.softmax(q, -1), (a,)),
            f"softmax_32k{suffix}": (lambda q: torch.softmax(q, -1), (v,)),
            f"log_softmax_64{suffix}": (lambda q: torch.log_softmax(q, -1), (s,)),
            f"log_softmax_1000{suffix}": (lambda q: torch.log_softmax(q, -1), (a,)),
            f"layer_norm{suffix}": (
                lambda q, g, h: f.layer_norm(q, (1024,), g, h),
                (n, gain, bias),
            ),
            f"layer_norm_64{suffix}": (lambda q, g: f.layer_norm(q, (64,), g, g), (s, chan)),
            f"rms_norm{suffix}": (lambda q, g: f.rms_norm(q, (1024,), g, 1e-6), (n, gain)),
            f"group_norm{suffix}": (lambda q, g: f.group_norm(q, 8, g, g), (m, chan)),
            f"batch_norm{suffix}": (
                lambda q, g: f.batch_norm(q, g, g.abs(), g, g, training=False),
                (m, chan),
            ),
            f"batch_norm_train{suffix}": (
                lambda q: f.batch_norm(q, None, None, training=True),
                (m,),
            ),
        }
    return {
        **out,
        "softmax_16": (lambda q: torch.softmax(q, -1), (tiny,)),
        "softmax_columns": (lambda q: torch.softmax(q, 0), (torch.randn(512, 512),)),
        "softmax_scores": (lambda q: torch.softmax(q * 0.125, -1), (torch.randn(4, 4, 128, 128),)),
        "normalize": (lambda q: f.normalize(q, dim=-1), (t,)),
        "logsumexp": (lambda q: torch.logsumexp(q, -1), (x,)),
    }


def _reductions() -> dict[str, Case]:
    x, image = torch.randn(1000, 512), torch.randn(8, 64, 32, 32)
    out: dict[str, Case] = {}
    dims: dict[str, dict[str, Any]] = {"rows": {"dim": 1}, "columns": {"dim": 0}, "all": {}}
    kinds: dict[str, Callable[..., Any]] = {
        "sum": torch.sum, "mean": torch.mean, "amax": lambda a, dim=(): torch.amax(a, dim),
        "argmax": torch.argmax, "var": lambda a, dim=None: torch.var(a, dim),
    }  # fmt: skip
    for kind, fn in kinds.items():
        for where, kw in dims.items():
            out[f"{kind}_{where}"] = (lambda a, fn=fn, kw=kw: fn(a, **kw), (x,))
    h = x.bfloat16()
    return {
        **out,
        "sum_rows_bf16": (lambda a: a.sum(1), (h,)),
        "sum_columns_bf16": (lambda a: a.sum(0), (h,)),
        "sum_all_bf16": (lambda a: a.sum(), (h,)),
        "sum_rows_i64": (lambda a: a.sum(1), (x.long(),)),
        "max_dim": (lambda a: a.max(1), (x,)),
        "norm": (lambda a: a.norm(dim=1), (x,)),
        "mean_image": (lambda a: a.mean((2, 3)), (image,)),
        "sum_nhw": (lambda a: a.sum((0, 2, 3)), (image,)),
        "any_rows": (lambda a: a.any(1), (x > 5,)),
        "count_true": (lambda a: a.sum(), (x > 0,)),
        "cumsum": (lambda a: a.cumsum(1), (x,)),
        "cumsum_columns": (lambda a: a.cumsum(0), (x,)),
        "prod_rows": (lambda a: a.prod(1), (x,)),
    }


def _moves() -> dict[str, Case]:
    """Copies with another arrangement."""
    x, y, image = torch.randn(512, 512), torch.randn(512, 512), torch.randn(4, 16, 56, 56)
    h = x.bfloat16()
    odd = torch.randn(500, 300)
    return {
        "cat_rows": (lambda a, b: torch.cat([a, b]), (x, y)),
        "cat_columns": (lambda a, b: torch.cat([a, b], 1), (x, y)),
        "cat_columns_bf16": (lambda a, b: torch.cat([a, b], 1), (h, h * 2)),
        "cat_odd": (lambda a, b: torch.cat([a, b[:, :37]], 1), (odd, odd * 2)),
        "cat_4": (lambda a, b: torch.cat([a, b, a, b], 1), (x[:, :128], y[:, 128:256])),
        "stack_last": (lambda a, b: torch.stack([a, b], -1), (x, y)),
        "stack_rows": (lambda a, b: torch.stack([a, b], 1), (x, y)),
        "pad": (lambda a: f.pad(a, (1, 1, 1, 1)), (image,)),
        "pad_bf16": (lambda a: f.pad(a, (1, 1, 1, 1)), (image.bfloat16(),)),
        "pad_wide": (lambda a: f.pad(a, (7, 9)), (x,)),
        "pad_value": (lambda a: f.pad(a, (3, 3), value=1.0), (x,)),
        "pad_reflect": (lambda a: f.pad(a, (2, 2, 2, 2), mode="reflect"), (image,)),
        "pad_replicate": (lambda a: f.pad(a, (2, 2, 2, 2), mode="replicate"), (image,)),
        "pad_circular": (lambda a: f.pad(a, (2, 2, 2, 2), mode="circular"), (image,)),
        "flip_last": (lambda a: a.flip(1), (x,)),
        "flip_first": (lambda a: a.flip(0), (x,)),
        "flip_bf16": (lambda a: a.flip(1), (h,)),
        "roll_last": (lambda a: a.roll(5, 1), (x,)),
        "roll_first": (lambda a: a.roll(5, 0), (x,)),
        "transpose": (lambda a: a.t().contiguous(), (x,)),
        "transpose_odd": (lambda a: a.t().contiguous(), (odd,)),
        "transpose_bf16": (lambda a: a.t().contiguous(), (h,)),
        "add_transposed": (lambda a, c: a.t() + c, (x, y)),
        "heads": (lambda a: a.view(4, 128, 8, 64).transpose(1, 2).contiguous(), (x,)),
        "nchw_to_nhwc": (lambda a: a.permute(0, 2, 3, 1).contiguous(), (image,)),
        "nhwc_to_nchw": (
            lambda a: a.contiguous(),
            (image.contiguous(memory_format=torch.channels_last),),
        ),
        "permute_3": (lambda a: a.view(64, 64, 64).permute(2, 0, 1).contiguous(), (x,)),
        "tril": (torch.tril, (x,)),
        "triu_bf16": (lambda a: a.triu(1), (h,)),
        "expand": (lambda a: a[:, None, :].expand(512, 4, 512).contiguous(), (x,)),
        "repeat_interleave": (lambda a: a.repeat_interleave(2, 1), (x,)),
        "pixel_shuffle": (lambda a: f.pixel_shuffle(a, 2), (image,)),
        "unfold": (lambda a: a.unfold(2, 8, 4).contiguous(), (image,)),
        "slice_step": (lambda a: a[:, ::2].contiguous(), (x,)),
        "slice_step3": (lambda a: a[:, 1::3] * 2, (x,)),
        "rotate_half": (lambda a: torch.cat([-a[:, 256:], a[:, :256]], 1), (x,)),
        "one_hot": (lambda i: f.one_hot(i, 64), (torch.randint(0, 64, (4096,)),)),
        "diagonal_add": (lambda a: a + torch.eye(512), (x,)),
    }


def _indexing() -> dict[str, Case]:
    x, table, ids = torch.randn(1000, 256), torch.randn(5000, 256), torch.randint(0, 5000, (1000,))
    cols, rows = torch.randint(0, 256, (1000, 256)), torch.randint(0, 1000, (1000, 256))
    few = torch.randint(0, 256, (1000, 8))
    some = torch.randint(0, 1000, (2000,))
    flat, where = torch.randn(100_000), torch.randint(0, 100_000, (100_000,))
    return {
        "embedding": (lambda t, i: f.embedding(i, t), (table, ids)),
        "embedding_bf16": (lambda t, i: f.embedding(i, t), (table.bfloat16(), ids)),
        "embedding_mul": (lambda t, i: f.embedding(i, t) * 16, (table, ids)),
        "index_select": (lambda a, i: a.index_select(0, i), (x, some)),
        "index_select_columns": (lambda a, i: a.index_select(1, i), (x, few[0].repeat(16))),
        "index_rows": (lambda a, i: a[i], (x, some)),
        "index_pairs": (lambda a, i, j: a[i, j], (x, rows, cols)),
        "gather_columns": (lambda a, i: a.gather(1, i), (x, cols)),
        "gather_rows": (lambda a, i: a.gather(0, i), (x, rows)),
        "gather_flat": (lambda a, i: a[i], (flat, where)),
        "gather_bf16": (lambda a, i: a.gather(1, i), (x.bfloat16(), cols)),
        "take_along": (lambda a, i: a.gather(1, i), (x, few)),
        "scatter": (lambda a, i, s: a.scatter(1, i, s), (x, few, torch.randn(1000, 8))),
        "scatter_wide": (lambda a, i, s: a.scatter(1, i, s), (x, cols, x * 2)),
        "scatter_add": (lambda a, i, s: a.scatter_add(1, i, s), (x, cols, x * 2)),
        "scatter_add_rows": (lambda a, i, s: a.scatter_add(0, i, s), (x, rows, x * 2)),
        "scatter_amax": (lambda a, i, s: a.scatter_reduce(1, i, s, "amax"), (x, cols, x * 2)),
        "index_add": (lambda a, i, s: a.index_add(0, i, s), (x, some, torch.randn(2000, 256))),
        "index_put": (lambda a, i, s: a.index_put((i,), s), (x, some[:500], torch.randn(500, 256))),
        "index_put_acc": (
            lambda a, i, s: a.index_put((i,), s, accumulate=True),
            (x, some, torch.randn(2000, 256)),
        ),
        "masked_scatter_where": (lambda a, i: torch.where(i > 100, a, 0), (x, cols)),
        "bincount_add": (lambda a, i: torch.zeros(1000).index_add(0, i, a), (flat, where % 1000)),
        "sort": (lambda a: a.sort(-1), (x,)),
        "topk": (lambda a: a.topk(8), (x,)),
        "searchsorted": (lambda a, v: torch.searchsorted(a, v), (x[0].sort()[0], x[:100])),
        "cross_entropy": (f.cross_entropy, (x, few[:, 0])),
    }


def _windows() -> dict[str, Case]:
    a = torch.randn(4, 32, 56, 56)
    last = a.contiguous(memory_format=torch.channels_last)
    h = a.bfloat16()
    return {
        "max_pool": (lambda q: f.max_pool2d(q, 2), (a,)),
        "max_pool_3s2": (lambda q: f.max_pool2d(q, 3, 2, 1), (a,)),
        "max_pool_3s1": (lambda q: f.max_pool2d(q, 3, 1, 1), (a,)),
        "max_pool_indices": (lambda q: f.max_pool2d(q, 2, return_indices=True), (a,)),
        "max_pool_nhwc": (lambda q: f.max_pool2d(q, 3, 2, 1), (last,)),
        "max_pool_bf16": (lambda q: f.max_pool2d(q, 3, 2, 1), (h,)),
        "avg_pool": (lambda q: f.avg_pool2d(q, 2), (a,)),
        "avg_pool_3s1": (lambda q: f.avg_pool2d(q, 3, 1, 1), (a,)),
        "avg_pool_nhwc": (lambda q: f.avg_pool2d(q, 3, 2, 1), (last,)),
        "avg_pool_beyond": (
            lambda q: f.avg_pool2d(q, 1280, ceil_mode=True),
            (torch.randn(4, 1280, 4, 4),),
        ),
        "adaptive_avg_1": (lambda q: f.adaptive_avg_pool2d(q, 1), (a,)),
        "adaptive_avg_7": (lambda q: f.adaptive_avg_pool2d(q, 7), (a,)),
        "adaptive_avg_5": (lambda q: f.adaptive_avg_pool2d(q, 5), (a,)),
        "adaptive_max_7": (lambda q: f.adaptive_max_pool2d(q, 7), (a,)),
        "nearest": (lambda q: f.interpolate(q, scale_factor=2.0), (a,)),
        "nearest_odd": (lambda q: f.interpolate(q, size=(75, 75)), (a,)),
        "bilinear": (lambda q: f.interpolate(q, scale_factor=2.0, mode="bilinear"), (a,)),
        "bilinear_corners": (
            lambda q: f.interpolate(q, size=(80, 80), mode="bilinear", align_corners=True),
            (a,),
        ),
        "bilinear_nhwc": (lambda q: f.interpolate(q, scale_factor=2.0, mode="bilinear"), (last,)),
        "bicubic": (lambda q: f.interpolate(q[:1], scale_factor=2.0, mode="bicubic"), (a,)),
    }


def _narrow() -> dict[str, Case]:
    """Casts, small integers, bools."""
    x = torch.randn(512, 512)
    i, j = torch.randint(-100, 100, (512, 512)), torch.randint(1, 100, (512, 512))
    a, b = i.to(torch.int8), j.to(torch.int8)
    u = j.to(torch.uint8)
    p, q = x > 0, i > 0
    return {
        "to_bf16": (lambda v: v.bfloat16(), (x,)),
        "from_bf16": (lambda v: v.float(), (x.bfloat16(),)),
        "to_f16": (lambda v: v.half(), (x,)),
        "from_f16": (lambda v: v.float(), (x.half(),)),
        "to_i8": (lambda v: v.to(torch.int8), (x,)),
        "from_u8": (lambda v: v.float(), (u,)),
        "from_u8_scaled": (lambda v: v.float() / 255 - 0.5, (u,)),
        "to_i64": (lambda v: v.long(), (x,)),
        "i64_to_f32": (lambda v: v.float(), (i,)),
        "to_f64": (lambda v: v.double(), (x,)),
        "bool_to_f32": (lambda v: v.float(), (p,)),
        "to_bool": (lambda v: v.bool(), (i,)),
        "add_i8": (torch.add, (a, b)),
        "mul_i8": (torch.mul, (a, b)),
        "add_i32": (torch.add, (i.int(), j.int())),
        "add_i64": (torch.add, (i, j)),
        "mul_i64": (torch.mul, (i, j)),
        "floordiv_i64": (torch.floor_divide, (i, j)),
        "remainder_i64": (torch.remainder, (i, j)),
        "and_bool": (torch.logical_and, (p, q)),
        "not_bool": (torch.logical_not, (p,)),
        "xor_i8": (torch.bitwise_xor, (a, b)),
        "eq_i64": (torch.eq, (i, j)),
        "where_i64": (torch.where, (p, i, j)),
        "shift_i32": (lambda v: v << 3, (i.int(),)),
        "dequant": (lambda v, s: v.float() * s, (a, x[0])),
        "quant": (lambda v: (v * 20).round().clamp(-128, 127).to(torch.int8), (x,)),
        "sum_i8_rows": (lambda v: v.sum(1), (a,)),
    }


def _strides() -> dict[str, Case]:
    """Inputs that are no dense row-major block."""
    x, image = torch.randn(512, 1024), torch.randn(4, 64, 28, 28)
    last = image.contiguous(memory_format=torch.channels_last)
    return {
        "relu_nhwc": (torch.relu, (last,)),
        "gelu_sliced": (f.gelu, (x[:, :500],)),
        "add_sliced": (lambda v: v[:, 1:] + v[:, :-1], (x,)),
        "exp_step2": (torch.exp, (x[:, ::2],)),
        "exp_transposed": (torch.exp, (x.t(),)),
        "add_nhwc_nchw": (torch.add, (image, last)),
        "sum_nhwc": (lambda v: v.sum((2, 3)), (last,)),
        "batch_norm_nhwc": (
            lambda v, g: f.batch_norm(v, g, g.abs(), g, g, training=False),
            (last, image[0, :, 0, 0].clone()),
        ),
        "batch_norm_train_nhwc": (lambda v: f.batch_norm(v, None, None, training=True), (last,)),
        "softmax_transposed": (lambda v: torch.softmax(v.t(), -1), (x,)),
        "sum_rows_transposed": (lambda v: v.sum(1), (x.t(),)),
        "layer_norm_transposed": (
            lambda v: f.layer_norm(v.transpose(1, 2), (64,)),
            (image.view(4, 64, 784),),
        ),
        "glu": (f.glu, (x,)),
        "chunk_silu": (lambda v: f.silu(v.chunk(2, 1)[0]) * v.chunk(2, 1)[1], (x,)),
    }
