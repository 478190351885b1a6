"""Statements with holes: pointwise operations, views, reductions and orders.

{x} is a tensor of the classes that `takes` names, {y} one that computes with it, {s} one of its
very shape, {d} and {e} are two of its dimensions, {r} is a number, {k} a small int that may vary
from call to call, {n} a size.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.maker import Maker, name_of


@dataclass(frozen=True)
class Entry:
    """exact, jumpy: as for Maker.add. ndim: the fewest dimensions of {x}."""

    kind: str
    text: str
    takes: str = "n"
    exact: str = "bits"
    jumpy: bool = False
    ndim: int = 0


def _rows(
    kind: str,
    takes: str = "n",
    exact: str = "bits",
    jumpy: bool = False,
    ndim: int = 0,
    texts: str = "",
) -> list[Entry]:
    """Entries of statements that ";" parts. Of one that "~" ends, eager's own vectors and tails
    differ in the sign of a zero."""
    found = [t.strip() for t in texts.split(";")]
    return [
        Entry(kind, t.rstrip(" ~"), takes, "no" if t.endswith("~") else exact, jumpy, ndim)
        for t in found
        if t
    ]


POINTWISE = [
    *_rows(
        "pointwise",
        texts="""
            -{x};  {x}.abs();  torch.relu({x});  {x} + {y};  {x} - {y};  {x} * {y};  {x} + {r};
            {x} * {r};
        """,
    ),
    *_rows(
        "pointwise",
        texts="""
            {x}.clamp(-1, 2);  torch.maximum({x}, {y});  torch.minimum({x}, {y});
            {x}.contiguous();
        """,
    ),
    *_rows(
        "pointwise",
        jumpy=True,
        texts="""
            {x}.clone();  torch.square({x});  torch.neg({x});  torch.where({x} > {r}, {x}, {y});
        """,
    ),
    *_rows(
        "pointwise",
        takes="f",
        texts="""
            F.hardtanh({x});  F.relu6({x});  F.hardshrink({x}, 1.0);  F.threshold({x}, 1.0, -2.0);
            F.leaky_relu({x}, 0.5);  {x}.nan_to_num();  torch.copysign({x}, {y}.nan_to_num());
            F.softshrink({x}, 1.0) ~;  torch.fmax({x}, {y});  torch.fmin({x}, {y});
        """,
    ),
    *_rows(
        "pointwise",
        takes="f",
        exact="no",
        texts="""
            torch.exp({x});  torch.sin({x});  torch.tanh({x});  torch.sigmoid({x});  F.gelu({x});
            F.silu({x});  torch.log1p({x});  torch.sinh({x});  torch.cosh({x});  torch.expm1({x});
            torch.erf({x});  torch.atan({x});  {x} ** 2.5;  torch.rsqrt({x});  F.softplus({x});
            torch.logaddexp({x}, {y});  torch.atan2({x}, {y});  {x} / ({y}.abs() + 1);
            torch.hypot({x}, {y});  F.softsign({x});  F.mish({x});  torch.asinh({x});
            torch.lerp({x}, {s}, 0.25);  torch.addcmul({x}, {s}, {s}, value=0.5);
            F.elu({x});  F.selu({x});  F.celu({x}, 0.5);  F.hardswish({x});  F.hardsigmoid({x});
            F.logsigmoid({x});  torch.exp2({x});  torch.log2({x}.abs() + 1);  torch.sinc({x});
            torch.acos({x}.clamp(-1, 1));  torch.special.entr({x});  torch.special.i0e({x});
            torch.logit({x}.sigmoid(), 1e-3);  torch.frac({x});  torch.deg2rad({x});
            torch.float_power({x}, 2);  torch.xlogy({s}, {x}.abs() + 1);
            torch.lgamma({x}.abs() + 1);  torch.special.log_ndtr({x});  torch.logaddexp2({x}, {y});
            {x}.pow({s});  torch.addcdiv({x}, {s}, {s}.abs() + 1);  {x} ** 3;  {x} ** -0.5;
            torch.log10({x}.abs());
        """,
    ),
    *_rows(
        "pointwise",
        takes="n",
        jumpy=True,
        texts="""
            torch.heaviside({x}, {s});  torch.rsub({x}, {y});  {x}.masked_fill({x} < {y}, 3);
            torch.positive({x});  {x}.clamp({s}, {s});  {x}.clamp_min({y});  torch.clip({x}, max=2);
            torch.logical_xor({x}, {y});  torch.logical_not({x});  torch.where({x} != 0, {x}, 0);
            {x}.sgn();  torch.isposinf({x});  torch.isneginf({x});  {x}.ne(0) * {y};
        """,
    ),
    *_rows(
        "rounding",
        takes="f",
        jumpy=True,
        texts="""
            torch.floor({x});  torch.ceil({x});  torch.round({x});  torch.trunc({x});
            torch.sign({x});  torch.remainder({x}, {r});
            torch.div({x}, {y}, rounding_mode='trunc');  {x} // {r};
        """,
    ),
    *_rows(  # eager's vectors lose the remainder where the quotient is huge
        "remainders",
        takes="f",
        jumpy=True,
        exact="whole",
        texts="{x} % {y};  {x} // {y};  torch.fmod({x}, {y});  torch.fmod({x}, 1e-30);",
    ),
    *_rows(
        "remainders",
        takes="f",
        jumpy=True,
        exact="no",
        texts="torch.fmod({x} * 1e30, 1e-30);  ({x} * 1e30) % 1e-30",
    ),
    *_rows(
        "integers",
        takes="i",
        texts="""
            {x} % {y};  {x} // {y};  {x} % {r};  {x} // {r};  {x} & {y};  {x} | {y};  {x} ^ {y};
            ~{x};  {x} << 2;  {x} >> 1;  torch.fmod({x}, {y});  {x} % -2**31;  {x} ** 2;
            torch.div({x}, {r}, rounding_mode='floor');  torch.sign({x});  torch.bitwise_not({x});
            torch.gcd({x}, {y});  {x} << {y};
        """,
    ),
    *_rows(
        "comparison",
        jumpy=True,
        texts="""
            {x} > {y};  {x} == {y};  {x} <= {r};  {x} != {y};  torch.isnan({x});
            torch.isinf({x});  torch.isfinite({x});  torch.logical_and({x}, {y});  {x}.bool();
            torch.signbit({x});  torch.isclose({x}, {s});
        """,
    ),
    *_rows(
        "booleans",
        takes="b",
        ndim=1,
        texts="""
            {x} & {y};  {x} | {y};  ~{x};  {x} ^ {y};  {x}.sum();  {x}.any();  {x}.all({d});
            {x} * 3;
        """,
    ),
    *_rows(
        "casts",
        takes="nb",
        exact="whole",
        jumpy=True,
        texts="""
            {x}.to(torch.float32);  {x}.to(torch.float64);  {x}.to(torch.float16);
            {x}.to(torch.bfloat16);  {x}.bool();  {x}.double() * 2;  {x}.to(torch.complex64);
        """,
    ),
    *_rows(
        "casts",
        takes="ib",
        texts="""
            {x}.to(torch.int64);  {x}.to(torch.int8);  {x}.to(torch.uint8);  {x}.int();
            {x}.float();
        """,
    ),
    *_rows(
        "promotion",
        takes="nb",
        exact="whole",
        jumpy=True,
        ndim=1,
        texts="""
            {x} + 1.5;  {x} * True;  {x} + {z};  {x} * {z};  torch.where({x} > 0, {x}, {z});
            torch.maximum({x}, {z});  torch.add({x}, {z}, alpha=2);  {x} / 2;  {x} - {z};
            torch.cat([{x}, {x}.double()]);  2 ** {x};
        """,
    ),
    *_rows(
        "complex",
        takes="c",
        exact="whole",
        ndim=1,
        texts="""
            {x} * {y};  {x} + {y};  {x}.conj();  {x}.real;  {x}.imag;  torch.view_as_real({x});
            {x}.sum({d});  -{x};  {x} * 1j;  {x}.conj() + {y};  {x}.abs();
            torch.view_as_real({x}).sum(-1);  {x} @ {x}.mT;  {x}.imag.neg();
        """,
    ),
]

VIEWS = [
    *_rows(
        "views",
        takes="a",
        ndim=2,
        texts="""
            {x}.transpose({d}, {e});  {x}.movedim({d}, 0);  {x}.swapaxes({d}, {e});
            {x}.flatten();  {x}.reshape(-1);  {x}.unsqueeze({d});  {x}.squeeze({d});
            {x}.flatten(0, 1);  {x}.mT;  {x}.diagonal();  {x}.expand(2, *{x}.shape);
            {x}.unfold({d}, 2, 1);  {x}.unfold({d}, 1, 2);  {x}.view_as({x});
            {x}.unflatten({d}, (-1, 1));  {x}.as_strided((2, 2), (1, 1));
            {x}.narrow_copy({d}, 0, 1);  {x}.detach();  {x}.T;  {x}.unflatten({d}, (2, -1));
        """,
    ),
    *_rows(
        "slices",
        takes="a",
        ndim=1,
        texts="""
            {x}[1:];  {x}[..., ::2];  {x}[:-1];  {x}[None];  {x}[..., -1];  {x}.select({d}, 0);
            {x}.select({d}, -1);  {x}[:0];  {x}.narrow({d}, 0, 1);  {x}.chunk(2, {d})[0];
            {x}.split(3, {d})[-1];  {x}.unbind({d})[0];  {x}[1:3, ...];  {x}[::3];  {x}[2:1];
            {x}.tensor_split(3, {d})[1];
        """,
    ),
    *_rows(
        "positions",
        takes="a",
        ndim=2,
        texts="""
            {x}[{k}];  {x}[{k}:];  {x}[:{k}];  {x}.narrow({d}, {k}, 1);  {x}.narrow({d}, 0, {k});
            {x}.select({d}, {k});  {x}[..., {k}];  {x}.roll({k}, {d});  {x}[{k}:{k} + 2];
            {x}[-{k}:];  torch.roll({x}, {k});  {x}.diagonal({k});  torch.tril({x}, {k});
            {x}[{k}] * 2;  {x}[{k}:].clone();  {x}[..., {k}:].contiguous();
            torch.triu({x}, -{k});  {x}.select({d}, {k}).clone();
        """,
    ),
    *_rows(
        "moves",
        takes="a",
        ndim=2,
        texts="""
            {x}.flip({d});  {x}.roll(1, {d});  torch.cat([{x}, {x}], {d});
            torch.stack([{x}, {x}], {d});  F.pad({x}, (1, 2));  torch.cat([{x}, {x}[:0]]);
            {x}.repeat(2, 1);  {x}.repeat_interleave(2, {d});  {x}.tile(2);
            torch.cat([{x}, {s}], {d});  torch.stack([{x}, {s}]);  F.pad({x}, (-1, 1), value=3);
            {x}.rot90();  torch.tril({x});  torch.triu({x}, 1);  {x}.fliplr();
            F.pad({x}[None], (1, 1), mode='replicate');  torch.hstack([{x}, {s}]);
            torch.diag_embed({x});  torch.cat([{x}.mT, {x}.mT]);
            torch.meshgrid({x}[0], {x}[..., 0], indexing='ij')[1];  torch.block_diag({x}, {x});
            torch.column_stack([{x}, {s}]);  torch.dstack([{x}, {s}]);  {x}.flipud();  {x}.ravel();
            F.pad({x}, (1, 0, 0, 2), value=True);  torch.atleast_3d({x});  {x}.repeat({d}, 2, 1);
            torch.broadcast_to({x}, (2, *{x}.shape)).contiguous();  {x}.resolve_conj().clone();
            torch.cartesian_prod({x}[0], {x}[..., 0]);  torch.vander({x}[0], 3);  {x}.new_zeros(3);
            torch.combinations({x}[0]);  F.pixel_shuffle({x}[None].repeat(4, 1, 1), 2);
            F.pad({x}[None], (1, 1), mode='circular');  F.pad({x}[None], (1, 0), mode='reflect');
            {x}.view(1, *{x}.shape).expand(3, -1, -1).reshape(-1, {x}.shape[-1]);
        """,
    ),
]

REDUCTIONS = [
    *_rows(
        "sums",
        takes="n",
        exact="whole",
        ndim=2,
        texts="""
            {x}.sum();  {x}.sum({d});  {x}.sum({d}, keepdim=True);  {x}.cumsum({d});
            {x}.count_nonzero({d});  {x}.diff(dim={d});  {x}.sum({d}, dtype=torch.float64);
            {x}.nansum({d});  torch.trace({x});  {x}.abs().sum(-1);  {x}.prod({d});
            {x}.cumprod({d});  torch.einsum('ij->j', {x});  {x}.sum((0, 1));
        """,
    ),
    *_rows(
        "extremes",
        takes="nb",
        jumpy=True,
        ndim=1,
        texts="""
            {x}.amax({d});  {x}.amin({d});  {x}.max({d}).values;  {x}.min();  {x}.argmax({d});
            {x}.argmin({d});  {x}.max({d}).indices;  {x}.cummax({d}).values;
            {x}.sort(dim={d}, stable=True).values;  {x}.sort(dim={d}, stable=True).indices;
            {x}.topk(1, {d}).values;  {x}.contiguous().median({d}).values;
            {x}.argsort(dim={d}, stable=True);  {x}.aminmax().max;  {x}.kthvalue(1, {d}).values;
            torch.sort({x}, dim={d}, stable=True, descending=True).values;  {x}.argmax();
            torch.cummin({x}, {d}).values;  torch.isin({x}, {y});
            torch.searchsorted({x}.sort(-1).values, {x});
            torch.bucketize({x}, torch.arange(3., device={x}.device));
        """,
    ),
    *_rows(
        "extremes",
        takes="nb",
        jumpy=True,
        ndim=1,
        texts="""
            {x}.any({d});  {x}.all({d});  {x}.any();  {x}.all();
        """,
    ),
    *_rows(
        "means",
        takes="f",
        exact="no",
        ndim=2,
        texts="""
            {x}.mean();  {x}.mean({d});  {x}.var({d});  {x}.std({d}, correction=0);  {x}.std();
            {x}.norm();  {x}.norm(dim={d});  {x}.logsumexp({d});  torch.softmax({x}, {d});
            torch.log_softmax({x}, {d});  torch.linalg.vector_norm({x}, 3, {d});
            torch.var_mean({x}, {d})[1];  {x}.logcumsumexp({d});  F.normalize({x}, dim={d});
            torch.cov({x});  {x}.quantile(0.5, {d});  F.softmin({x}, {d});  {x}.nanmean({d});
            torch.dist({x}, {x} + 1);  torch.renorm({x}, 2, {d}, 1.0);
            torch.trapezoid({x}, dim={d});
            torch.corrcoef({x});  torch.cdist({x}, {x});  {x}.norm(1);  {x}.norm(float('inf'), {d});
            torch.std_mean({x}, {d})[1];  torch.linalg.matrix_norm({x});  F.glu({x}.repeat(1, 2));
            F.softmax({x}, {d}, dtype=torch.float64);  {x}.var((0, 1));
            {x}.mean((0, 1), dtype=torch.float64);
        """,
    ),
    *_rows(
        "losses",
        takes="f",
        exact="no",
        ndim=2,
        texts="""
            F.mse_loss({x}, {s});  F.l1_loss({x}, {s}, reduction='none');  F.huber_loss({x}, {s});
            F.smooth_l1_loss({x}, {s}, beta=0.5);  F.kl_div({x}, {s}.abs(), reduction='batchmean');
            F.binary_cross_entropy_with_logits({x}, {s}.sigmoid());  F.soft_margin_loss({x}, {s});
            F.cosine_similarity({x}, {s}, {d});  F.pairwise_distance({x}, {s});
            F.poisson_nll_loss({x}, {s}.abs());  F.hinge_embedding_loss({x}, {s}.sign());
            F.gaussian_nll_loss({x}, {s}, {s}.abs() + 1);  F.triplet_margin_loss({x}, {s}, {x} * 2);
            F.margin_ranking_loss({x}, {s}, {x}.sign());
            F.binary_cross_entropy({x}.sigmoid(), {s}.sigmoid());
        """,
    ),
    *_rows(
        "sums",
        takes="i",
        ndim=1,
        texts="""
            {x}.sum({d});  {x}.prod({d});  {x}.cumsum({d});  {x}.cumprod({d});  {x}.float().mean()~;
            {x}.abs().clamp(0, 9).flatten().bincount(minlength=10);  {x}.sum({d}, dtype=torch.int8);
            {x}.amax({d}, keepdim=True);  {x}.aminmax(dim={d}).min;  {x}.diff(n=2, dim={d});
        """,
    ),
]


def pick(m: Maker, entries: list[Entry]) -> Entry:
    """One of the entries, or one of a kind: kinds of few entries come up too."""
    if m.rng.random() < 0.5:
        return m.rng.choice(entries)
    kind = m.rng.choice(sorted({e.kind for e in entries}))
    return m.rng.choice([e for e in entries if e.kind == kind])


def fill(m: Maker, entry: Entry) -> str:
    """Adds the entry's statement; its name, or ""."""
    x = m.pick(entry.takes, entry.ndim, entry.jumpy)
    n = max(m.value(x).ndim, 1)
    holes: dict[str, str] = {"x": x, "d": str(m.rng.randrange(n)), "e": str(m.rng.randrange(n))}
    if m.rng.random() < 0.2:
        holes["d"] = str(int(holes["d"]) - n)
    if "{r}" in entry.text:
        whole = not m.value(x).is_floating_point()
        holes["r"] = m.rng.choice(
            ("2", "3", "-1", "1", "-3", "0") if whole else ("2", "0.5", "-1.0", "0.25", "3", "1e30")
        )
    if "{k}" in entry.text:
        high = max(min((e[x].shape[0] if e[x].ndim else 1) for e in m.env) - 1, 0)
        holes["k"] = (
            m.integer(0, min(high, 6)) if m.rng.random() < 0.8 else str(m.rng.randint(0, 2))
        )
    if "{z}" in entry.text:
        holes["z"] = (
            m.other(
                x,
                m.rng.choice(("float32", "float64", "int64", "int32", "bool", "float16", "uint8")),
            )
            or ""
        )
    for hole in "ys":
        if "{" + hole + "}" in entry.text:
            mixed = m.rng.random() < 0.1
            holes[hole] = (
                m.other(x, "" if mixed else name_of(m.value(x).dtype), same=hole == "s") or ""
            )
    if "" in holes.values():
        return ""
    return m.add(entry.kind, entry.text.format(**holes), exact=entry.exact, jumpy=entry.jumpy)
