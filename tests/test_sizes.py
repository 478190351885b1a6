"""Integer expressions against Python integers: value, bounds, idempotence, interning, and the rules
by name."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from plait.ir import sizes as sz
from plait.ir.sizes import Expr, Size
from plait.lower.view import reshape_index

_OPS = ("add", "sub", "mul", "scale", "div", "mod", "min", "max", "eq", "ne", "lt", "le")


@dataclass
class Made:
    """An expression with the text that made it and its value at each test point."""

    expr: Size
    text: str
    values: list[int]


class Fuzz:
    """Random expressions over two sizes, two loop variables of constant and two of symbolic
    extent."""

    def __init__(self, seed: int, points: int = 12) -> None:
        self.rng = random.Random(seed)
        n, m = sz.symbol("s0", lo=2), sz.symbol("s1", lo=0, hi=40)
        self.symbols: dict[str, Expr] = {
            "s0": n, "s1": m, "i0": sz.symbol("i0", extent=8), "i1": sz.symbol("i1", extent=5),
            "i2": sz.symbol("i2", extent=n),
            "i3": sz.symbol("i3", extent=sz.mul(n, 4)), "u": sz.symbol("u", lo=-sz._INF),
        }  # fmt: skip
        self.envs = [self._point() for _ in range(points)]

    def _point(self) -> dict[str, int]:
        r = self.rng
        n, m = r.choice((2, 3, 4, 7, 12, 64)), r.choice((0, 1, 5, 16, 40))
        return {
            "s0": n, "s1": m, "i0": r.randrange(8), "i1": r.randrange(5), "i2": r.randrange(n),
            "i3": r.randrange(4 * n),
            "u": r.randrange(-50, 50),
        }  # fmt: skip

    def leaf(self) -> Made:
        if self.rng.random() < 0.3:
            c = self.rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 20, -1, -4))
            return Made(c, str(c), [c] * len(self.envs))
        name = self.rng.choice(sorted(self.symbols))
        return Made(self.symbols[name], name, [e[name] for e in self.envs])

    def make(self, depth: int) -> Made:
        if depth == 0:
            return self.leaf()
        op = self.rng.choice(_OPS)
        a = self.make(depth - 1)
        if op == "scale":
            c = self.rng.choice((-2, 2, 3, 4, 5, 8))
            return Made(sz.mul(a.expr, c), f"({a.text}*{c})", [v * c for v in a.values])
        if op in ("div", "mod"):
            return self._divide(op, a)
        b = self.make(depth - 1)
        build = {
            "add": sz.add, "sub": lambda x, y: sz.add(x, sz.mul(y, -1)), "mul": sz.mul,
            "min": sz.smin, "max": sz.smax,
        }  # fmt: skip
        meaning = {
            "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
            "min": min, "max": max, "eq": lambda x, y: int(x == y), "ne": lambda x, y: int(x != y),
            "lt": lambda x, y: int(x < y), "le": lambda x, y: int(x <= y),
        }  # fmt: skip
        expr = build[op](a.expr, b.expr) if op in build else sz.compare(op, a.expr, b.expr)
        values = [meaning[op](x, y) for x, y in zip(a.values, b.values, strict=True)]
        return Made(expr, f"{op}({a.text}, {b.text})", values)

    def _divide(self, op: str, a: Made) -> Made:
        """By a positive constant, a size, or a product of both."""
        n = self.symbols["s0"]
        b, name = self.rng.choice(
            (
                (2, "2"),
                (3, "3"),
                (4, "4"),
                (8, "8"),
                (n, "s0"),
                (sz.mul(n, 4), "4*s0"),
                (sz.add(n, 1), "s0+1"),
            )
        )
        by = [sz.evaluate(b, e) for e in self.envs]
        if op == "div":
            return Made(
                sz.floordiv(a.expr, b),
                f"({a.text})//({name})",
                [v // d for v, d in zip(a.values, by, strict=True)],
            )
        return Made(
            sz.mod(a.expr, b),
            f"({a.text})%({name})",
            [v % d for v, d in zip(a.values, by, strict=True)],
        )


def _rebuild(e: Size) -> Size:
    """e made again from its atoms, which must change nothing."""
    if isinstance(e, int):
        return e
    return sz.substitute(
        e, {a: sz.symbol(a.name, a.lo, a.hi, a.extent) for a in sz.free_symbols(e)}
    )


def _check(made: Made, envs: list[dict[str, int]], seed: int) -> None:
    repro = f"seed={seed}\nmade by {made.text}\nexpr = {made.expr}"
    lo, hi = sz.bounds(made.expr)
    for env, want in zip(envs, made.values, strict=True):
        got = sz.evaluate(made.expr, env)
        assert got == want, f"{repro}\nenv = {env}\n{got} != {want}"
        assert lo <= want <= hi, f"{repro}\nenv = {env}\n{want} is not in [{lo}, {hi}]"
        if sz.known_nonneg(made.expr):
            assert want >= 0, f"{repro}\nenv = {env}\n{want} was known to be >= 0"
    assert _rebuild(made.expr) == made.expr, (
        f"not idempotent: {repro}\nagain = {_rebuild(made.expr)}"
    )


@pytest.mark.parametrize("seed", range(60))
def test_fuzz_values_bounds_idempotence(seed: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(60):
        _check(fuzz.make(fuzz.rng.randrange(1, 5)), fuzz.envs, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_fuzz_long(seed: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(200):
        _check(fuzz.make(fuzz.rng.randrange(1, 6)), fuzz.envs, seed)


@pytest.mark.parametrize("seed", range(20))
def test_fuzz_substitution(seed: int) -> None:
    """Substituting and then evaluating is evaluating with the substituted values."""
    fuzz = Fuzz(seed)
    for _ in range(40):
        made, part = fuzz.make(3), fuzz.make(2)
        i0 = fuzz.symbols["i0"].symbol
        assert i0 is not None
        inside = sz.mod(part.expr, 8)
        after = sz.substitute(made.expr, {i0: inside})
        for env in fuzz.envs:
            want = sz.evaluate(made.expr, env | {"i0": sz.evaluate(inside, env)})
            assert sz.evaluate(after, env) == want, (
                f"seed={seed}\n{made.text}\ni0 := ({part.text})%8\nenv={env}"
            )


@pytest.mark.parametrize("seed", range(20))
def test_fuzz_interning(seed: int) -> None:
    """The same construction gives the same object, and equal expressions hash and print alike."""
    first, again = Fuzz(seed), Fuzz(seed)
    for _ in range(40):
        a, b = first.make(3), again.make(3)
        assert a.expr == b.expr and hash(a.expr) == hash(b.expr) and str(a.expr) == str(b.expr)
        assert isinstance(a.expr, int) or a.expr is b.expr


def test_forgetting_changes_nothing_but_sharing() -> None:
    before = Fuzz(3).make(4).expr
    sz.forget()
    after = Fuzz(3).make(4).expr
    assert sz.interned() > 0
    assert before == after and hash(before) == hash(after)


def test_symbols_of_one_name_with_other_ranges_are_others() -> None:
    a, b = sz.symbol("v0", extent=6), sz.symbol("v0", extent=12)
    assert sz.mod(a, 3) != sz.mod(b, 3)
    assert sz.substitute(sz.mod(b, 3), {b.symbol: 7}) == 1  # type: ignore[dict-item]


n, k = sz.symbol("s0", lo=2), sz.symbol("s1", lo=1)
q = sz.add(sz.mul(sz.symbol("i5", extent=2), 16), sz.symbol("i6", extent=16))  # in [0, 32)
i, j, r = sz.symbol("i0", extent=8), sz.symbol("i1", extent=n), sz.symbol("r0", extent=sz.mul(n, 4))


@pytest.mark.parametrize(
    ("expr", "want"),
    [
        (sz.floordiv(sz.add(sz.mul(i, 4), 3), 4), i),
        (sz.mod(sz.add(sz.mul(i, 4), 3), 4), 3),
        (sz.add(sz.mul(sz.floordiv(r, 4), 4), sz.mod(r, 4)), r),
        (sz.floordiv(sz.add(sz.mul(i, n), j), n), i),
        (sz.mod(sz.add(sz.mul(i, n), j), n), j),
        (sz.floordiv(i, 8), 0),
        (sz.mod(i, 8), i),
        (sz.floordiv(sz.mul(sz.mul(n, k), 6), sz.mul(n, 2)), sz.mul(k, 3)),
        (sz.floordiv(sz.floordiv(r, 2), 2), sz.floordiv(r, 4)),
        (sz.mod(sz.mod(r, 8), 4), sz.mod(r, 4)),
        (sz.floordiv(sz.add(sz.mul(i, 32), q), 64), sz.floordiv(i, 2)),
        (sz.mod(sz.add(sz.mul(i, 32), q), 64), sz.add(sz.mul(sz.mod(i, 2), 32), q)),
        (sz.smax(n, 1), n),
        (sz.smin(i, 7), i),
        (sz.compare("lt", i, 8), 1),
        (sz.compare("le", n, 1), 0),
        (sz.compare("le", sz.symbol("u0"), 2**64 - 4), 1),
        (sz.compare("lt", 2**63, sz.symbol("u0")), 0),
        (sz.compare("eq", sz.symbol("u0"), -(2**63) - 1), 0),
        (sz.ceildiv(sz.mul(n, 4), 4), n),
        (sz.floordiv(sz.floordiv(sz.symbol("s2", lo=3, hi=4) + 1, 2) + 1, 2), 1),
    ],
)
def test_rules(expr: Size, want: Size) -> None:
    assert expr == want


def test_division_by_zero_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        sz.floordiv(i, 0)
    with pytest.raises(ZeroDivisionError):
        sz.mod(i, 0)


def test_truth_of_an_expression_is_an_error() -> None:
    with pytest.raises(TypeError, match="not known at compile time"):
        bool(n)


# ----------------------------------------------------------------------------------------- reshapes
def _split_number(rng: random.Random, number: int) -> tuple[int, ...]:
    dims = []
    while number > 1 and len(dims) < 4:
        d = rng.choice([f for f in (1, 2, 3, 4, 5, 6, number) if number % f == 0])
        dims.append(d)
        number //= d
    dims.append(number)
    rng.shuffle(dims)
    return tuple(dims)


@pytest.mark.parametrize("seed", range(40))
def test_reshape_index_is_row_major(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.choice((12, 24, 60, 48))
    old, new = _split_number(rng, number), _split_number(rng, number)
    vars_ = tuple(sz.symbol(f"v{d}", extent=s) for d, s in enumerate(new))
    index = reshape_index(old, new, vars_)
    for flat in range(number):
        env, rest = {}, flat
        for d in range(len(new) - 1, -1, -1):
            env[f"v{d}"], rest = rest % new[d], rest // new[d]
        back = 0
        for e, s in zip(index, old, strict=True):
            back = back * s + sz.evaluate(e, env)
        assert back == flat, f"{old} -> {new} at {flat}: {index}"


def test_reshape_keeps_dimensions_apart() -> None:
    """Splitting or joining one dimension leaves the others alone, symbolic sizes included."""
    v = tuple(sz.symbol(f"v{d}", extent=s) for d, s in enumerate((n, 3, 4, k)))
    assert reshape_index((n, 12, k), (n, 3, 4, k), v) == (v[0], sz.add(sz.mul(v[1], 4), v[2]), v[3])
    w = tuple(sz.symbol(f"w{d}", extent=s) for d, s in enumerate((n, 12, k)))
    assert reshape_index((n, 3, 4, k), (n, 12, k), w) == (
        w[0],
        sz.floordiv(w[1], 4),
        sz.mod(w[1], 4),
        w[2],
    )


def test_reshapes_there_and_back_cancel() -> None:
    v = tuple(sz.symbol(f"v{d}", extent=s) for d, s in enumerate((n, 6, k)))
    flat = (sz.product((n, 6, k)),)
    there = reshape_index(flat, (n, 6, k), v)
    assert reshape_index((n, 6, k), flat, there) == v
