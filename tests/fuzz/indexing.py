"""Statements that index: gathers, every accumulating mode of scatters, and writes at data's
positions.

Indices are arguments of every layout (stride 0 and overlapping among them). Where eager's answer
would depend on which of two writes wins, indices differ or the value is one number.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.maker import Maker, name_of

REDUCES = ("sum", "prod", "mean", "amax", "amin")


def _target(
    m: Maker, kinds: str = "n", ndim: int = 1
) -> tuple[str, int, str, tuple[str, ...]] | None:
    """(tensor, dimension, its size, shape)."""
    x = m.pick(kinds, ndim)
    shape = m.shape_of(x)
    if shape is None or not shape:
        return None
    d = m.rng.randrange(len(shape))
    bound = m.extent(x, d)
    return None if bound is None else (x, d, bound, shape)


def _zeros(m: Maker, x: str) -> str:
    """x itself, or zeros in place of an argument: then sums are all that is seen."""
    return f"torch.zeros_like({x})" if m.rng.random() < 0.4 and x[0] == "a" else x


def _index(
    m: Maker, shape: tuple[str, ...], bound: str, values: str = "index", int32: bool = False
) -> str:
    dtype = "int32" if int32 and m.rng.random() < 0.2 else "int64"
    if m.rng.random() < 0.03:
        bound = f"{bound} + 1"  # out of range at times
    return m.operand(shape, dtype, values, bound)


def _written(m: Maker, shape: tuple[str, ...], dtype: str) -> str:
    """Values of a shape to write; at times one that does not fit, or that does by chance only."""
    if shape and m.rng.random() < 0.06:
        k = m.rng.randrange(len(shape))
        shape = m.rng.choice(((*shape[:k], m.dim(), *shape[k + 1 :]), shape[1:], (*shape, m.dim())))
    return m.operand(shape, dtype)


def _scatter_shape(m: Maker, shape: tuple[str, ...], d: int) -> tuple[str, ...]:
    count = m.rng.choice((m.dim(), shape[d], "1", "0", "40"))
    return tuple(count if k == d else s for k, s in enumerate(shape))


def scatter_add(m: Maker) -> str:
    found = _target(m)
    if found is None:
        return ""
    x, d, bound, shape = found
    s = _scatter_shape(m, shape, d)
    i, v = _index(m, s, bound), _written(m, s, name_of(m.value(x).dtype))
    into = _zeros(m, x)
    text = f"{into}.scatter_add({d}, {i}, {v})"
    if m.rng.random() < 0.25:
        text = f"{into}.scatter({d}, {i}, {v}, reduce={m.rng.choice(('add', 'multiply'))!r})"
    return m.add("scatter add", text, exact="whole")


def scatter_reduce(m: Maker) -> str:
    found = _target(m)
    if found is None:
        return ""
    x, d, bound, shape = found
    s = _scatter_shape(m, shape, d)
    how = m.rng.choice(REDUCES)
    i, v = _index(m, s, bound), _written(m, s, name_of(m.value(x).dtype))
    exact = {"amax": "bits", "amin": "bits", "mean": "no", "prod": "whole", "sum": "whole"}[how]
    if how == "mean" and not m.value(x).is_floating_point():
        exact = "whole"
    text = (
        f"{_zeros(m, x)}.scatter_reduce({d}, {i}, {v}, {how!r}, "
        f"include_self={m.rng.random() < 0.5})"
    )
    return m.add("scatter reduce", text, exact=exact)


def index_add(m: Maker) -> str:
    found = _target(m)
    if found is None:
        return ""
    x, d, bound, shape = found
    s = _scatter_shape(m, shape, d)
    dtype = name_of(m.value(x).dtype)
    if m.rng.random() < 0.1:
        dtype = m.rng.choice(("float32", "float64", "float16", "int64"))
    i, v = _index(m, (s[d],), bound, int32=True), _written(m, s, dtype)
    how = m.rng.choice(("add", "add", "add2", "reduce"))
    if how == "reduce":
        mode = m.rng.choice(REDUCES[1:])
        text = (
            f"{_zeros(m, x)}.index_reduce({d}, {i}, {v}, {mode!r}, "
            f"include_self={m.rng.random() < 0.5})"
        )
        exact = {"amax": "bits", "amin": "bits", "mean": "no", "prod": "whole"}[mode]
        return m.add("index reduce", text, exact=exact)
    alpha = ", alpha=2" if how == "add2" else ""
    return m.add("index add", f"{_zeros(m, x)}.index_add({d}, {i}, {v}{alpha})", exact="whole")


def index_put(m: Maker) -> str:
    found = _target(m)
    if found is None:
        return ""
    x, _, _, shape = found
    n = m.rng.randint(1, len(shape))
    count = m.rng.choice((m.dim(), "1", "0", "40"))
    s = (count,) if m.rng.random() < 0.8 else (count, m.dim())
    bounds = [m.extent(x, k) for k in range(n)]
    if None in bounds:
        return ""
    picked = ", ".join(
        _index(m, s if m.rng.random() < 0.8 else s[-1:], str(b), "signed", True) for b in bounds
    )
    dtype = name_of(m.value(x).dtype)
    if m.rng.random() < 0.1:
        dtype = m.rng.choice(("float32", "float64", "float16", "int64"))
    rest = shape[n:] if m.rng.random() < 0.7 else ()
    v = _written(m, (*s, *rest) if m.rng.random() < 0.8 else rest, dtype)
    if m.rng.random() < 0.3:
        c = m.add("in place", f"{x}.clone()")
        if not c or not m.add(
            "in place", f"{c}.index_put_(({picked},), {v}, accumulate=True)", exact="whole", out=""
        ):
            return ""
        return c
    return m.add(
        "index put", f"{_zeros(m, x)}.index_put(({picked},), {v}, accumulate=True)", exact="whole"
    )


def store_once(m: Maker) -> str:
    """Writes that do not accumulate."""
    found = _target(m)
    if found is None:
        return ""
    x, d, bound, shape = found
    i = _index(m, (m.rng.choice(("1", bound, m.dim(), "0")),), bound, "perm")
    if any(e[i].unique().numel() != e[i].numel() for e in m.env):
        return ""
    s = tuple(m.operands[-1].shape[0] if k == d else n for k, n in enumerate(shape))
    v = _written(m, s, name_of(m.value(x).dtype))
    colons = ":, " * d
    c = m.add("in place", f"{x}.clone()")
    texts = [
        f"{x}.index_copy({d}, {i}, {v})", f"{x}.index_fill({d}, {i}, 3)",
        f"torch.index_put({x}, ({i},), {v})" if d == 0 else "",
    ]  # fmt: skip
    if c and m.rng.random() < 0.4:
        text = m.rng.choice(
            (f"{c}[{colons}{i}] = {v}", f"{c}[{colons}{i}] += {v}", f"{c}[{colons}{i}] = 2")
        )
        return m.add("in place", text, out="") and c
    text = m.rng.choice(texts)
    return m.add("index copy", text) if text else ""


def masked(m: Maker) -> str:
    x = m.pick("n", 1)
    shape = m.shape_of(x)
    if shape is None:
        return ""
    b = m.operand(shape if m.rng.random() < 0.7 else shape[-1:], "bool", "bool")
    v = _written(m, shape, name_of(m.value(x).dtype))
    text = m.rng.choice(
        (f"{x}.masked_fill({b}, 2)", f"torch.where({b}, {x}, {v})", f"{x}.masked_scatter({b}, {v})",
         f"torch.index_put({x}, ({b},), torch.tensor(3).to({x}))")
    )  # fmt: skip
    return m.add("masked", text)


def part(m: Maker) -> str:
    """A copy of a tensor with a part of it replaced (eager copies elements that share memory as
    such)."""
    found = _target(m, "a")
    if found is None:
        return ""
    x, d, bound, shape = found
    dtype = name_of(m.value(x).dtype)
    spread, x = x, f"{x}.contiguous()"
    rest = tuple(n for k, n in enumerate(shape) if k != d)
    k = m.integer(0, 3) if m.rng.random() < 0.5 else m.rng.choice(("0", "-1"))
    way = m.rng.randrange(4)
    if way == 0:
        text = f"torch.select_scatter({x}, {_written(m, rest, dtype)}, {d}, {k})"
    elif way == 1:
        like = _written(m, tuple("2" if n == d else s for n, s in enumerate(shape)), dtype)
        end = m.rng.choice((f"{k} + 2", f"{k} + 2", f"{k} + 4, 2", "None"))
        text = f"torch.slice_scatter({x}, {like}, {d}, {k}, {end})"
    elif way == 2 and len(shape) == 2:
        text = f"torch.diagonal_scatter({x}, {_written(m, (m.rng.choice(shape),), dtype)})"
    elif way == 2:  # of a copy whose elements lie apart
        whole = ", ".join(["-1"] * len(shape))
        # PyTorch differentiates none but of contiguous tensors.
        text = f"torch.as_strided_scatter({spread}.detach().expand(2, {whole}), "
        text += f"{_written(m, ('2',), dtype)}, (2,), (1,), 0)"
        return m.add("parts", text)
    else:
        at = m.operand(shape, "bool", "bool")
        text = (
            f"torch.masked_scatter({x}, {at}, {_written(m, (m.rng.choice((bound, '40')),), dtype)})"
        )
    return m.add("parts", text)


def gather(m: Maker) -> str:
    found = _target(m, "a")
    if found is None:
        return ""
    x, d, bound, shape = found
    s = _scatter_shape(m, shape, d)
    way = m.rng.randrange(6)
    colons = ":, " * d
    if way == 0:
        return m.add("gather", f"{x}.gather({d}, {_index(m, s, bound)})")
    if way == 1:
        return m.add("gather", f"{x}.index_select({d}, {_index(m, (s[d],), bound, int32=True)})")
    if way == 2:
        return m.add("gather", f"{x}[{colons}{_index(m, (m.dim(),), bound, 'signed')}]")
    if way == 3 and len(shape) == 2:
        return m.add(
            "gather", f"F.embedding({_index(m, m.shape(m.rng.randint(0, 2)), shape[0])}, {x})"
        )
    if way == 4:
        return m.add(
            "gather", f"torch.take({x}, {_index(m, m.shape(m.rng.randint(0, 2)), '*'.join(shape))})"
        )
    return m.add("gather", f"{x}[{colons}{_index(m, (m.dim(), m.dim()), bound)}]")


def put(m: Maker) -> str:
    found = _target(m)
    if found is None:
        return ""
    x, _, _, shape = found
    s = m.shape(m.rng.randint(1, 2))
    i, v = (
        _index(m, s, "*".join(f"({n})" for n in shape)),
        _written(m, s, name_of(m.value(x).dtype)),
    )
    return m.add("scatter add", f"{_zeros(m, x)}.put({i}, {v}, accumulate=True)", exact="whole")


def lone_index(m: Maker) -> str:
    """Index and value do not move: the whole sum goes to one place."""
    count = m.rng.choice(("17", "40", m.dim(), "1000"))
    i = m.operand((), "int64", "index", "16")
    dtype = m.rng.choice(("float32", "int64", "int32", "float64", m.rng.choice(m.dtypes)))
    ones = m.rng.choice(
        (f"torch.ones({count}, dtype=torch.{dtype}, device={i}.device)", m.operand((count,), dtype))
    )
    into = f"torch.zeros(16, dtype=torch.{dtype}, device={i}.device)"
    text = m.rng.choice(
        (
            f"{into}.scatter_add(0, {i}.expand({count}), {ones})",
            f"{into}.index_add(0, {i}.expand({count}), {ones})",
            f"{into}.index_put(({i}.expand({count}),), {ones}, accumulate=True)",
            f"{into}.scatter_reduce(0, {i}.expand({count}), {ones}, 'sum')",
        )
    )
    return m.add(
        "scatter add",
        text.replace(count, f"({count})") if not count.isalnum() else text,
        exact="whole",
    )


def lone_gather(m: Maker) -> str:
    """A row read often: its gradient is accumulated."""
    x = m.operand(
        (m.rng.choice(("8", "16", "3")), m.rng.choice(("1", "5", "16")))[: m.rng.randint(1, 2)],
        "float32",
    )
    i = m.operand((), "int64", "index", "3")
    return m.add("gather", f"{x}[{i}.expand({m.rng.choice(('16', '33', '3'))})]")


MAKERS: tuple[Callable[[Maker], str], ...] = (
    scatter_add, scatter_reduce, index_add, index_put, store_once, masked, part, gather, put,
    lone_index, lone_gather,
)  # fmt: skip
