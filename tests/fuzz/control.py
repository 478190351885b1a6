"""Statements of control flow: branches, loops, scans, maps and regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.fuzz.flow import REGIONS
from tests.fuzz.maker import FLOATS, Maker, name_of

FLOAT = (
    "{a}.sin()", "{a} * 0.5 + {b}", "torch.tanh({a}) * {b}", "{a} * {b}.sigmoid()",
    "{a} + {b}.mean()", "{a} - {b}.amax()", "{a}.flip(0)", "{a}.cumsum(0) * 0.5",
    "{a}.softmax(-1)", "F.gelu({a}) - {b}", "{a}.roll(1, 0)", "({a}.double() * 0.3).to({a}.dtype)",
    "({a} - {a}.mean(-1, keepdim=True))", "{b} + {a}.sum(0)", "{a}.clamp(-2, 2)", "{a} * {a}",
    "{b}", "{a} + 1", "-{a}", "{a}.clone()", "({a} * 2).relu()",
)  # fmt: skip
MATRIX = (  # an attribute (mT) would be an argument of the body that shares memory with another one
    "({a} @ {b}.t() @ {a}).tanh()", "{a}.t().contiguous().t()", "{a}.t().clone().t() + {b}",
    "torch.cat([{a}[1:], {b}[:1]])", "{a}[:, :1] * {b}", "({a} @ {a}.t()).softmax(-1) @ {b}",
    "autocast(lambda x, y: (x @ y.t() @ x).to(x.dtype) * 0.5, {a}, {b})",
    "{a}.unfold(0, 1, 1)[..., 0] + {b}",
    "{a}.as_strided({a}.shape, {a}.stride()) * {b}", "{a}.view(-1).view({a}.shape[0], -1) + 1",
)  # fmt: skip
WHOLE = (
    "{a} + {b}", "{a} * 3 - {b}", "{a}.flip(0)", "{a} ^ {b}", "{a}.cumsum(0).to({a}.dtype)",
    "torch.where({b} > 0, {a}, {b})", "{a}.sort(0)[0]", "torch.maximum({a}, {b})", "~{a}",
    "{a}.roll(1, 0)", "{a} & {b}", "({a} // 2)", "{a}.sum(0).to({a}.dtype) + {b}", "{b}",
)  # fmt: skip
BOOL = ("~{a}", "{a} & {b}", "{a} ^ {b}", "{a}.flip(0)", "{a} | {b}", "{a}.roll(1, 0)", "{b}")
ASSOCIATIVE = ("{a} + {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})")


class _Names:
    """Tensors that an expression may read, by name: those given to the body and those captured, of
    one shape and dtype."""

    def __init__(self, m: Maker, names: Sequence[str], value: Tensor) -> None:
        self.m, self.names, self.value = m, list(names), value
        self.depth = 0

    def expr(self, depth: int = 0) -> str:
        """A text of the same shape and dtype."""
        rng, v = self.m.rng, self.value
        table = BOOL if v.dtype == torch.bool else FLOAT if v.is_floating_point() else WHOLE
        if v.ndim == 0:
            table = tuple(t for t in table if not any(w in t for w in ("(0)", "-1", "(1, 0)")))
        if v.ndim == 2 and v.is_floating_point() and rng.random() < 0.3:
            table = MATRIX
        a, b = rng.choice(self.names), rng.choice(self.names)
        if depth < 2 and rng.random() < 0.5:
            a = f"({self.expr(depth + 1)})"
        return rng.choice(table).format(a=a, b=b)

    def own(self) -> str:
        """One that is a result: PyTorch refuses those that are operands, mostly, and those of other
        strides than they had (in a loop) or have (in the other branch)."""
        nests = self.depth < 2 and self.m.rng.random() < 0.12
        text, way = self._nested() if nests else self.expr(), self.m.rng.random()
        if way < 0.1 or way < 0.98 and text in self.names:
            return f"{text}.clone()"
        return text if way > 0.9 else f"({text}).clone(memory_format=torch.contiguous_format)"

    def _nested(self) -> str:
        """Control flow of this shape and dtype within a body."""
        rng, x = self.m.rng, self.m.rng.choice(self.names)
        own = f"u{self.depth}"  # what the body inside is given
        inner = _Names(self.m, [*self.names, own], self.value)
        inner.depth = self.depth + 1
        way = rng.random()
        if way < 0.4:
            yes, no = inner.own(), inner.own()
            return f"cond({_predicate(self.m)}, lambda {own}: {yes}, lambda {own}: {no}, ({x},))"
        if way < 0.7:
            start = f"torch.zeros((), dtype=torch.int64, device={x}.device)"
            n = rng.choice(("0", "1", "2", self.m.integer(0, 3)))
            step = f"lambda j, {own}: (j + 1, {inner.own()})"
            first = f"{x}.clone(memory_format=torch.contiguous_format)"
            return f"while_loop(lambda j, {own}: j < {n}, {step}, ({start}, {first},))[1]"
        xs = f"torch.stack([{x}, {rng.choice(self.names)}])"
        if way < 0.85:
            return f"map_(lambda {own}: {inner.own()}, {xs})[1]"
        first = f"{x}.clone(memory_format=torch.contiguous_format)"
        return f"scan(lambda c, {own}: ({inner.own()}, {own} + 1), {first}, {xs}, 0, False)[0]"


def _operands(m: Maker, ndim: int, n: int) -> tuple[list[str], list[str]] | None:
    """n tensors of one shape and dtype, and up to two more such to capture."""
    x = m.pick("nb", ndim)
    found, dtype = [x], name_of(m.value(x).dtype)
    if dtype in ("complex64",) or m.value(x).ndim > 3:
        return None
    for _ in range(n - 1 + m.rng.choice((0, 0, 1, 2))):
        y = m.other(x, dtype, same=True)
        if not y:
            return None
        found.append(y)
    return found[:n], found[n:]


def _exact(m: Maker, *names: str) -> str:
    whole = all(m.known[n].exact and not m.value(n).dtype.is_floating_point for n in names)
    return "bits" if whole else "no"


def _predicate(m: Maker) -> str:
    """A text that is true or false whatever the rounding."""
    way = m.rng.random()
    if way < 0.3:
        x = m.pick("ib", exact=True)
        return f"({x}.sum() > 0)" if m.rng.random() < 0.5 else f"({x} > 0).any()"
    if way < 0.6:
        return m.operand((), "bool")
    if way < 0.75:
        x = m.pick("a", 1)
        return f"({x}.shape[0] > {m.rng.randint(0, 6)})"
    return f"({m.operand(('2',), 'float32', 'whole')}[0] > 0)"


def _items(m: Maker, kind: str, text: str, exact: str, n: int) -> str:
    """The items of a tuple of n."""
    whole = m.add(kind, text, exact=exact, out="w")
    made = ""
    for k in m.rng.sample(range(n), m.rng.randint(1, n)) if whole else ():
        made = m.add(kind, f"{whole}[{k}]", exact=exact) or made
    return made


def branch(m: Maker) -> str:
    found = _operands(m, 0, m.rng.randint(1, 2))
    if found is None:
        return ""
    given, captured = found
    params = ["x", "y"][: len(given)]
    names = _Names(m, params + captured, m.value(given[0]))
    head, n = f"lambda {', '.join(params)}: ", m.rng.choice((1, 1, 2, 3))

    def body(depth: int) -> str:
        if depth < 2 and m.rng.random() < 0.15:
            yes, no = (head + body(depth + 1) for _ in range(2))
            return f"cond({_predicate(m)}, {yes}, {no}, ({', '.join(params)},))"
        made = [names.own() for _ in range(n)]
        return f"({', '.join(made)})" if n > 1 else made[0]

    yes, no = head + body(0), head + body(0)
    text = f"cond({_predicate(m)}, {yes}, {no}, ({', '.join(given)},))"
    exact = _exact(m, *given, *captured)
    return _items(m, "branch", text, exact, n) if n > 1 else m.add("branch", text, exact=exact)


def loop(m: Maker) -> str:
    found = _operands(m, 0, m.rng.randint(1, 2))
    if found is None:
        return ""
    given, captured = found
    if m.rng.random() < 0.85:  # a round gives what is laid out so
        copy = "clone(memory_format=torch.contiguous_format)"
        given = [m.add("loop", f"{x}.{copy}") or x for x in given]
    params = ["x", "y"][: len(given)]
    names = _Names(m, params + captured, m.value(given[0]))
    device = f"device={given[0]}.device"
    counts = m.grads or m.rng.random() < 0.6  # by a tensor; PyTorch's gradients want one
    start = f"torch.zeros((), dtype=torch.int64, {device})" if counts else "0"
    rounds = m.rng.choice(("0", "1", "3", "4", f"{given[0]}.shape[0]" if m.value(given[0]).ndim
                           else "2", m.integer(0, 4)))  # fmt: skip
    dtype, layout = m.rng.choice(("int32", "bool", "float64")), "plain" * (m.rng.random() < 0.9)
    more = m.operand(("3",), dtype, layout=layout) if m.rng.random() < 0.4 else ""
    z = {"int32": "z * 2 + 1", "bool": "~z", "float64": "z + i"}
    extra = [z[name_of(m.value(more).dtype)]] if more else []
    head = ", ".join(["i", *params, *(["z"] if more else [])])
    step = ", ".join([f"i + {m.rng.choice((1, 1, 2))}", *(names.own() for _ in params), *extra])
    carried = ", ".join([start, *given, *([more] if more else [])])
    text = f"while_loop(lambda {head}: i < {rounds}, lambda {head}: ({step}), ({carried},))"
    n = 1 + len(given) + bool(more)
    exact = _exact(m, *given, *captured)
    whole = m.add("loop", text, exact=exact, out="w")
    made = ""
    for k in m.rng.sample(range(1, n), m.rng.randint(1, n - 1)) if whole else ():
        counted = bool(more) and k == n - 1  # by itself
        own = "no" if counted and m.value(more).dtype.is_floating_point else "bits"
        made = m.add("loop", f"{whole}[{k}]", exact=own if counted else exact) or made
    return made


def _scanned(m: Maker, at_least: int) -> tuple[str, int, tuple[str, ...]] | None:
    """A tensor to scan, along which dimension, and the shape of a slice."""
    x = m.pick("nb", at_least)
    v, shape = m.value(x), m.shape_of(x)
    if shape is None or v.ndim > 3 or v.dtype == torch.bool:
        return None
    dim = m.rng.choice((0, 0, m.rng.randrange(v.ndim)))
    if any(e[x].shape[dim] == 0 for e in m.env) or v.shape[dim] > 40:
        return None
    return x, dim, (*shape[:dim], *shape[dim + 1 :])


def scanned(m: Maker) -> str:
    found = _scanned(m, 1)
    if found is None:
        return ""
    x, dim, shape = found
    dtype, reverse = name_of(m.value(x).dtype), m.rng.random() < 0.4
    starts = [m.operand(shape, dtype, layout="plain") for _ in range(m.rng.randint(1, 2))]
    also = m.rng.random() < 0.3 and m.other(x, dtype, same=True)
    captured = [m.operand(shape, dtype)] if m.rng.random() < 0.5 else []
    carries = ["c[0]", "c[1]"] if len(starts) == 2 else ["c"]
    slices = ["x[0]", "x[1]"] if also else ["x"]
    names = _Names(m, carries + slices + captured, m.value(starts[0]))
    n = m.rng.randint(1, 2)
    made = [", ".join(names.own() for _ in range(k)) for k in (len(starts), n)]
    carried, out = (f"({t})" for t in made)
    start = f"({', '.join(starts)})" if len(starts) == 2 else starts[0]
    xs = f"({x}, {also})" if also else x
    text = f"scan(lambda c, x: ({carried}, {out}), {start}, {xs}, {dim}, {reverse})"
    exact = _exact(m, x, *starts, *captured, *([also] if also else []))
    w = m.add("scan", text, exact=exact, out="w")
    t = ""
    for k, parts in ((0, len(starts)), (1, n)) if w else ():
        for j in range(parts):
            if m.rng.random() < 0.7:
                at = f"[{j}]" if parts > 1 else ""
                t = m.add("scan", f"{w}[{k}]{at}", exact=exact) or t
    return t


def mapped(m: Maker) -> str:
    found = _scanned(m, 1)
    if found is None:
        return ""
    x, dim, shape = found
    if dim:
        return ""
    dtype = name_of(m.value(x).dtype)
    given = [m.operand(shape, dtype)] if m.rng.random() < 0.6 else []
    captured = [m.operand(shape, dtype)] if m.rng.random() < 0.4 else []
    params = ["x", *["y"] * len(given)]
    names = _Names(m, params + captured, m.value((given or [m.operand(shape, dtype)])[0]))
    n = m.rng.choice((1, 1, 2))
    out = ", ".join(names.own() for _ in range(n))
    text = f"map_(lambda {', '.join(params)}: ({out}), {', '.join([x, *given])})"
    exact = _exact(m, x, *given, *captured)
    return _items(m, "map", text, exact, n) if n > 1 else m.add("map", text, exact=exact)


def combined(m: Maker) -> str:
    found = _scanned(m, 1)
    if found is None:
        return ""
    x, dim, _ = found
    dtype, reverse = name_of(m.value(x).dtype), m.rng.random() < 0.4
    pair = m.rng.random() < 0.4 and m.other(x, dtype, same=True)
    more = f"{dim}, {reverse}, {m.rng.choice(('pointwise', 'pointwise', 'generic'))!r}"
    exact = _exact(m, x, *([pair] if pair else []))
    if not pair:
        text = m.rng.choice(ASSOCIATIVE).format(a="a", b="b")
        call = f"associative_scan(lambda a, b: {text}, {x}, {more})"
        return m.add("associative scan", call, exact=exact)
    text = m.rng.choice(("(a[0] * b[0], a[1] * b[0] + b[1])", "(a[0] + b[0], a[1] * b[1])"))
    call = f"associative_scan(lambda a, b: {text}, ({x}, {pair}), {more})"
    return _items(m, "associative scan", call, exact, 2)


def called(m: Maker) -> str:
    """A region, called up to four times, with other tensors."""
    name = m.rng.choice(list(REGIONS))
    made = ""
    x = m.pick("f", 2)
    for _ in range(m.rng.randint(1, 4)):
        if m.rng.random() < 0.25:
            x = m.pick("f", 2)
        y = m.other(x, name_of(m.value(x).dtype), same=True)
        if not y:
            return made
        text = f"REGIONS[{name!r}]({x}, {y})"
        two = name in ("mix", "turned")
        t = _items(m, "region", text, "no", 2) if two else m.add("region", text, exact="no")
        made = t or made
        fits = t and m.value(t).ndim >= 2 and name_of(m.value(t).dtype) in FLOATS
        x = t if fits and m.rng.random() < 0.7 else x
    return made


MAKERS: tuple[tuple[float, Callable[[Maker], str]], ...] = (
    (5, branch), (5, loop), (4, scanned), (2, mapped), (2, combined), (4, called),
)  # fmt: skip
