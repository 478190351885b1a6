"""Integer expressions against Python integers: value, bounds, idempotence, interning, and the rules
by name."""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass

import pytest

from plait.ir.expr import (
    BUILD,
    INF,
    Expr,
    Size,
    bounds,
    ceildiv,
    compare,
    evaluate,
    forget,
    free_symbols,
    interned,
    known_nonneg,
    product,
    smax,
    smin,
    substitute,
    symbol,
)
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
        n, m = symbol("s0", lo=2), symbol("s1", lo=0, hi=40)
        self.symbols: dict[str, Expr] = {
            "s0": n, "s1": m, "i0": symbol("i0", extent=8), "i1": symbol("i1", extent=5),
            "i2": symbol("i2", extent=n),
            "i3": symbol("i3", extent=n * 4), "u": symbol("u", lo=-INF),
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
            return Made(a.expr * c, f"({a.text}*{c})", [v * c for v in a.values])
        if op in ("div", "mod"):
            return self._divide(op, a)
        b = self.make(depth - 1)
        meaning = {
            "add": operator.add, "sub": operator.sub, "mul": operator.mul,
            "min": min, "max": max, "eq": lambda x, y: int(x == y), "ne": lambda x, y: int(x != y),
            "lt": lambda x, y: int(x < y), "le": lambda x, y: int(x <= y),
        }  # fmt: skip
        expr = BUILD.get(op, meaning[op])(a.expr, b.expr)
        values = [meaning[op](x, y) for x, y in zip(a.values, b.values, strict=True)]
        return Made(expr, f"{op}({a.text}, {b.text})", values)

    def _divide(self, op: str, a: Made) -> Made:
        """By a positive constant, a size, or a product of both."""
        n = self.symbols["s0"]
        b, name = self.rng.choice(
            ((2, "2"), (3, "3"), (4, "4"), (8, "8"), (n, "s0"), (n * 4, "4*s0"), (n + 1, "s0+1"))
        )
        by = [evaluate(b, e) for e in self.envs]
        if op == "div":
            return Made(
                a.expr // b,
                f"({a.text})//({name})",
                [v // d for v, d in zip(a.values, by, strict=True)],
            )
        return Made(
            a.expr % b, f"({a.text})%({name})", [v % d for v, d in zip(a.values, by, strict=True)]
        )


def _rebuild(e: Size) -> Size:
    """e made again from its atoms, which must change nothing."""
    if isinstance(e, int):
        return e
    return substitute(e, {a: symbol(a.name, a.lo, a.hi, a.extent) for a in free_symbols(e)})


def _check(made: Made, envs: list[dict[str, int]], seed: int) -> None:
    repro = f"seed={seed}\nmade by {made.text}\nexpr = {made.expr}"
    lo, hi = bounds(made.expr)
    for env, want in zip(envs, made.values, strict=True):
        got = evaluate(made.expr, env)
        assert got == want, f"{repro}\nenv = {env}\n{got} != {want}"
        assert lo <= want <= hi, f"{repro}\nenv = {env}\n{want} is not in [{lo}, {hi}]"
        if known_nonneg(made.expr):
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
        inside = part.expr % 8
        after = substitute(made.expr, {i0: inside})
        for env in fuzz.envs:
            want = evaluate(made.expr, env | {"i0": evaluate(inside, env)})
            assert evaluate(after, env) == want, (
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
    forget()
    after = Fuzz(3).make(4).expr
    assert interned() > 0
    assert before == after and hash(before) == hash(after)


def test_symbols_of_one_name_with_other_ranges_are_others() -> None:
    a, b = symbol("v0", extent=6), symbol("v0", extent=12)
    assert a % 3 != b % 3
    assert substitute(b % 3, {b.symbol: 7}) == 1  # type: ignore[dict-item]


n, k = symbol("s0", lo=2), symbol("s1", lo=1)
q = symbol("i5", extent=2) * 16 + symbol("i6", extent=16)  # in [0, 32)
i, j, r = symbol("i0", extent=8), symbol("i1", extent=n), symbol("r0", extent=n * 4)
third = (n + 1) // 3 + 1
inside = symbol("r1", extent=third * 16)


@pytest.mark.parametrize(
    ("expr", "want"),
    [
        ((i * 4 + 3) // 4, i),
        ((i * 4 + 3) % 4, 3),
        (r // 4 * 4 + r % 4, r),
        ((i * n + j) // n, i),
        ((i * n + j) % n, j),
        (i // 8, 0),
        (i % 8, i),
        (inside // (third * 2) // 8, 0),
        (inside % (third * 16), inside),
        (n * k * 6 // (n * 2), k * 3),
        (r // 2 // 2, r // 4),
        (r % 8 % 4, r % 4),
        ((i * 32 + q) // 64, i // 2),
        ((i * 32 + q) % 64, i % 2 * 32 + q),
        (smax(n, 1), n),
        (smin(i, 7), i),
        (compare("lt", i, 8), 1),
        (compare("le", n, 1), 0),
        (compare("le", symbol("u0"), 2**64 - 4), 1),
        (compare("lt", 2**63, symbol("u0")), 0),
        (compare("eq", symbol("u0"), -(2**63) - 1), 0),
        (ceildiv(n * 4, 4), n),
        (((symbol("s2", lo=3, hi=4) + 1) // 2 + 1) // 2, 1),
    ],
)
def test_rules(expr: Size, want: Size) -> None:
    assert expr == want


def test_division_by_zero_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        i // 0
    with pytest.raises(ZeroDivisionError):
        i % 0


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
    vars_ = tuple(symbol(f"v{d}", extent=s) for d, s in enumerate(new))
    index = reshape_index(old, new, vars_)
    for flat in range(number):
        env, rest = {}, flat
        for d in range(len(new) - 1, -1, -1):
            env[f"v{d}"], rest = rest % new[d], rest // new[d]
        back = 0
        for e, s in zip(index, old, strict=True):
            back = back * s + evaluate(e, env)
        assert back == flat, f"{old} -> {new} at {flat}: {index}"


def test_reshape_keeps_dimensions_apart() -> None:
    """Splitting or joining one dimension leaves the others alone, symbolic sizes included."""
    v = tuple(symbol(f"v{d}", extent=s) for d, s in enumerate((n, 3, 4, k)))
    assert reshape_index((n, 12, k), (n, 3, 4, k), v) == (v[0], v[1] * 4 + v[2], v[3])
    w = tuple(symbol(f"w{d}", extent=s) for d, s in enumerate((n, 12, k)))
    assert reshape_index((n, 3, 4, k), (n, 12, k), w) == (w[0], w[1] // 4, w[1] % 4, w[2])


def test_reshapes_there_and_back_cancel() -> None:
    v = tuple(symbol(f"v{d}", extent=s) for d, s in enumerate((n, 6, k)))
    flat = (product((n, 6, k)),)
    there = reshape_index(flat, (n, 6, k), v)
    assert reshape_index((n, 6, k), flat, there) == v
