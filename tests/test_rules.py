"""The rewrites of bodies: random nodes keep their values bit for bit, and simplifying twice changes
nothing. A failure names its seed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from plait.ir.checks import OUT_OF_RANGE, Bound
from plait.ir.dtypes import DType, b1, f32, f64, i32, i64
from plait.ir.expr import Size
from plait.ir.interp import Evaluation
from plait.ir.loops import Load, Node, arg_symbol, cast, const, loop_vars, node
from plait.ir.rules import RULES, Simplifier, preserves

I, J = loop_vars("i", (6, 4))
N = 8


class Random:
    """Makes random nodes of a dtype."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def node(self, dtype: DType, depth: int) -> Node:
        if depth == 0 or self.rng.random() < 0.1:
            return self.leaf(dtype)
        kind = self.rng.choice(["op", "op", "op", "where", "cast"])
        if kind == "where":
            return node(
                "where",
                (
                    self.node(b1, depth - 1),
                    self.node(dtype, depth - 1),
                    self.node(dtype, depth - 1),
                ),
            )
        if kind == "cast":
            source = self.rng.choice([b1, i32, i64, f32, f64])
            if not (source.is_float and not dtype.is_float) or dtype == b1:
                return cast(self.node(source, depth - 1), dtype)
        if dtype == b1:
            if self.rng.random() < 0.4:
                a, b = self.node(b1, depth - 1), self.node(b1, depth - 1)
                op = self.rng.choice(["and", "or", "xor", "not"])
                return node(op, (a,) if op == "not" else (a, b))
            of = self.rng.choice([i64, i64, f32])
            op = self.rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])
            return node(op, (self.node(of, depth - 1), self.node(of, depth - 1)))
        ops = ["add", "sub", "mul", "min", "max", "neg"]
        ops += ["truediv"] if dtype.is_float else ["floordiv", "truncdiv", "mod", "rem"]
        op = self.rng.choice(ops)
        args = (self.node(dtype, depth - 1),)
        if op != "neg":
            args += (self.node(dtype, depth - 1),)
        return node(op, args)

    def leaf(self, dtype: DType) -> Node:
        if dtype == b1:
            return self.rng.choice(
                [const(True, b1), const(False, b1), node("lt", (self.leaf(f32), self.leaf(f32)))]
            )
        if dtype == i64 and self.rng.random() < 0.6:
            e: Size = self.rng.choice([I, J, I + 1, I * 4 + J, I // 2, (I * 4 + J) % 3])
            return node("index", (), e, i64)
        if dtype in (f32, i64) and self.rng.random() < 0.5:
            return self.load(dtype)
        if dtype.is_float:
            return const(self.rng.choice([0.0, -0.0, 1.0, -1.0, 2.0, 0.1, 4.0, 0.3]), dtype)
        return const(self.rng.choice([0, 1, -1, 2, 5]), dtype)

    def load(self, dtype: DType) -> Node:
        index: Node = self.rng.choice(
            [node("index", (), I, i64), node("index", (), J + 1, i64), const(2, i64)]
        )
        args: tuple[Node, ...] = ()
        at: Size = (I * 4 + J) % N
        if self.rng.random() < 0.6:
            args = (node("bounded", (index,), Bound(N, OUT_OF_RANGE), i64),)
            at = arg_symbol(0, N)
        masked = self.rng.random() < 0.3
        if masked:
            args += (self.node(b1, 1),)
        return node("load", args, Load("x" if dtype == f32 else "n", (at,), masked), dtype)


def value(n: Node) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(N).astype(np.float32)
    x[:3] = [np.nan, np.inf, -0.0]
    memory = {"x": x, "n": rng.integers(-3, 7, N)}
    assert I.symbol is not None and J.symbol is not None
    space = Evaluation((I.symbol, J.symbol), {}, memory, {"x": (1,), "n": (1,)})
    out = space.whole(n)
    assert not space.failed
    return out


@pytest.mark.parametrize("block", range(6))
def test_random_bodies_keep_their_values(block: int) -> None:
    changed = 0
    for seed in range(block * 100, block * 100 + 100):
        r = Random(seed)
        before = r.node(r.rng.choice([b1, i32, i64, f32, f64]), 4)
        simplify = Simplifier()
        after = simplify(before)
        assert after.dtype == before.dtype
        assert Simplifier()(after) == after, f"seed={seed}: not idempotent: {after}"
        a, b = value(before), value(after)
        same = (a == b) & (np.signbit(a) == np.signbit(b)) if before.dtype.is_float else a == b
        assert (same | ((a != a) & (b != b))).all(), f"seed={seed}\n{before}\n{after}\n{a}\n{b}"
        changed += after != before
    assert changed > 50


def test_an_index_that_ranges_decide_needs_no_check() -> None:
    at = node("index", (), I, i64)
    wrapped = node("where", (node("lt", (at, const(0, i64))), node("add", (at, const(6, i64))), at))
    safe = node("bounded", (wrapped,), Bound(6, OUT_OF_RANGE), i64)
    load = node("load", (safe,), Load("x", (arg_symbol(0, 6),)), f32)
    assert Simplifier()(load) == node("load", (), Load("x", (I,)), f32)


def test_floats_keep_their_zeros() -> None:
    x = node("load", (), Load("x", (I,)), f32)
    keep = node("add", (x, const(0.0, f32)))
    assert Simplifier()(keep) == keep
    assert Simplifier()(node("sub", (x, const(0.0, f32)))) == x
    narrow = cast(cast(cast(x, f64), f32), f64)
    assert Simplifier()(narrow) == cast(x, f64)
    rounded = cast(cast(cast(x, f64), i64), f32)
    assert Simplifier()(rounded) == cast(cast(x, i64), f32)


def test_constants_of_16_bits_are_widened() -> None:
    from plait.ir.dtypes import bf16, f16

    for dtype in (f16, bf16):
        assert Simplifier()(cast(const(0.5, dtype), f32)) == const(0.5, f32)
        for c in (float("inf"), float("nan"), 1e-30):
            kept = cast(const(c, dtype), f32)
            assert Simplifier()(kept) == kept


def test_which_casts_keep_values() -> None:
    from plait.ir.dtypes import bf16, f16, u8

    assert preserves(u8, f16) and preserves(bf16, f32) and preserves(i32, f64) and preserves(b1, u8)
    assert (
        not preserves(f16, bf16)
        and not preserves(bf16, f16)
        and not preserves(i64, f64)
        and not preserves(i32, f32)
    )


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({name for name, _, _ in RULES}) == len(RULES)
