"""Attention on a GPU: kernels of it, with functions of scores as formulas.

Comes in: `flex_attention` or its backward, of which `graph/attention_kernels.py` says that a kernel
holds them, with the user's functions; and, where rows keep their bits in any batch, what
`scaled_dot_product_attention` calls. Goes out: an `Extern` with an `Attention`; of a backward one
for the gradient of queries, and one for those of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.attention import is_regular
from plait.graph.attention_kernels import Sum, scalar_graph, sums_of, with_sums
from plait.graph.edit import results_read
from plait.ir import loops
from plait.ir.attention import Addition, Attention, Formula
from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import DType, b1, bf16, f16, f32, i64
from plait.ir.expr import (
    Expr,
    Size,
    bounds,
    compare,
    contiguous_strides,
    free_symbols,
    product,
    symbol,
)
from plait.ir.loops import Load, LoopProgram, Pointwise, apply, cast, integer, loop_vars
from plait.ir.record import inline
from plait.ir.rules import Simplifier
from plait.lower.convert import convert
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.elementwise import inside, load_if, result
from plait.lower.memory import tensor_arg
from plait.lower.pycall import rule_or_python
from plait.lower.symbols import to_size

_hop = torch.ops.higher_order
_LN2 = math.log(2)  # the operator gives logarithms to base 2
_WHOLE = 1 << 30  # PyTorch's size of a block where there is no block mask
_MOST_FEW = 64  # queries of heads that are rows of one block
_PROGRAMS = 264  # two for each multiprocessor of an H100
_LEAST_KEYS = 256  # of a program that shares a walk
_WIDEST = 256  # numbers of a row
_LEAST = -2.0e38
_ABSORBED = 2.0**22  # where float32 has steps of 0.5: logarithms of sums are rounded so coarsely
_MOST_ROWS = (1 << 31) - (1 << 12)  # positions, with those of a last block, have 32 bits


@lower(_hop.flex_attention)
def attention(ctx: Lowering, *args: Any) -> tuple[View | None, ...]:
    """One launch, or a call of Python."""
    op = _hop.flex_attention
    made: tuple[View | None, ...]
    made = rule_or_python(ctx, op, partial(_forward, ctx, *args), args, {}, fresh=True)
    return made


@lower(_hop.flex_attention_backward)
def attention_backward(ctx: Lowering, *args: Any) -> tuple[Any, ...]:
    """Two launches, or a call of Python."""
    op = _hop.flex_attention_backward
    made: tuple[Any, ...] = rule_or_python(
        ctx, op, partial(_backward, ctx, *args), args, {}, fresh=True
    )
    return made


def _forward(
    ctx: Lowering, q: View, k: View, v: View, score: GraphModule, block_mask: Sequence[Any],
    scale: float, options: Any, captured: Sequence[Any] = (), masking: Sequence[Any] = (),
) -> tuple[View, View, View | None]:  # fmt: skip
    _regular(ctx)
    c = _Call(ctx, (q, k, v), block_mask, scale)
    formulas = {"score": c.formula(score, captured, 7), "mask": c.mask(block_mask[-1], masking, 8)}
    n_wanted = 3 if 2 in results_read(ctx.node) else 2
    heads, parts = c.cut()
    if parts > 1:
        return _joined(ctx, c, formulas, heads, parts, n_wanted)
    outs = [c.result(n) for n in range(n_wanted)]
    c.launch("result", (q, k, v), 2, formulas, outs, flops=4, heads=heads)
    out, sums, *tops = map(ctx.whole, outs)
    return out, sums, (tops[0] if tops else None)


def _regular(ctx: Lowering) -> None:
    """Eager is asked about operands that it refuses."""
    if not is_regular(ctx.node):
        raise NoRule("operands that eager refuses")


def _joined(
    ctx: Lowering, c: _Call, formulas: dict[str, Formula | None], heads: int, parts: int,
    n_wanted: int,
) -> tuple[View, View, View | None]:  # fmt: skip
    """Results of parts of the keys, and what they are together: each counts by its share in the sum
    of a row's exponentials. This is Flash-Decoding (Dao et al., 2023)."""
    shapes = [(parts, *ctx.out_shape(n)) for n in range(n_wanted)]
    outs = [ctx.new_buffer(f32, shape, None, True, ctx.device()) for shape in shapes]
    c.launch("result", c.inputs, 2, formulas, outs, flops=4, heads=heads, parts=parts)
    out, sums, *tops = map(ctx.whole, outs)
    rows = sums.shape[1:]

    def greatest(x: View) -> View:
        return ctx.reduce(rows, (parts,), "max", lambda ops, i, r: x.load(ops, (*r, *i)))

    top = greatest(sums)

    def share(ops: Any, i: Any, r: Any) -> loops.Node:
        most = top.load(ops, i)
        base = apply("where", apply("eq", most, -math.inf), loops.const(0.0, f32), most)
        return apply("exp2", sums.load(ops, (*r, *i)) - base)

    total = ctx.reduce(rows, (parts,), "sum", share)
    found = ctx.reduce(
        out.shape[1:], (parts,), "sum",
        lambda ops, i, r: share(ops, i[:3], r) * out.load(ops, (*r, *i)),
    )  # fmt: skip

    def result(ops: Any, i: Any) -> loops.Node:
        n = total.load(ops, i[:3])
        whole = apply("where", apply("eq", n, 0.0), loops.const(1.0, f32), n)
        return cast(found.load(ops, i) / whole, ctx.out_dtype(0))

    def logs(ops: Any, i: Any) -> loops.Node:
        n, most = total.load(ops, i), top.load(ops, i)
        found = apply("where", apply("eq", n, 0.0), n, most) + apply("log2", n)
        return apply("where", apply("eq", most, math.inf), most, found)

    return (
        ctx.pointwise(ctx.out_shape(0), ctx.out_dtype(0), result, ctx.out_strides(0)),
        ctx.pointwise(rows, f32, logs),
        greatest(tops[0]) if tops else None,
    )


def _backward(
    ctx: Lowering, q: View, k: View, v: View, out: View, sums: View, grad: View,
    grad_sums: View | None, score: GraphModule, joint: GraphModule, block_mask: Sequence[Any],
    scale: float, options: Any, captured: Sequence[Any] = (), masking: Sequence[Any] = (),
) -> tuple[Any, ...]:  # fmt: skip
    _regular(ctx)
    c = _Call(ctx, (q, k, v), block_mask, scale)
    found: dict[str, Formula | None] = {"score": c.formula(score, captured, 12)}
    parts = sums_of(joint)
    assert parts is not None, "gradients that no kernel has"
    additions: tuple[Addition, ...] = ()
    if found["score"] is not None:
        found["gradient"], additions = c.gradients(joint, parts, captured, 12)
    found["mask"] = c.mask(block_mask[-1], masking, 13)
    along = _along(ctx, out, grad, grad_sums)
    given = (q, k, v, grad, along, sums)
    of_queries, of_keys, of_values = map(c.result, range(3))
    added = {k: c.zeros(captured[k].shape) for k in dict.fromkeys(p.to for p in parts)}
    c.launch("queries", given, 2, found, [of_queries], 6, (additions, [*added.values()]))
    c.launch("keys", given, 6, found, [of_keys, of_values], flops=8)
    grads = map(ctx.whole, (of_queries, of_keys, of_values))
    return *grads, tuple(
        convert(ctx, ctx.whole(added[k]), x.dtype) if k in added else None
        for k, x in enumerate(captured)
    )


def _along(ctx: Lowering, out: View, grad: View, grad_sums: View | None) -> View:
    """Per query, the product of result and gradient, less the gradient of the logarithm."""
    *rows, width = out.shape

    def body(ops: Any, i: Any, r: Any) -> loops.Node:
        return cast(out.load(ops, (*i, *r)), f32) * cast(grad.load(ops, (*i, *r)), f32)

    found = ctx.reduce(tuple(rows), (width,), "sum", body)
    if grad_sums is not None:
        of_sums, summed = grad_sums, found
        found = ctx.pointwise(
            tuple(rows),
            f32,
            lambda ops, i: summed.load(ops, i) - cast(of_sums.load(ops, i), f32) * (1 / _LN2),
        )
    ctx.fix_layout(found.buf)
    return found


# --------------------------------------------------------------------------- of the library's kinds
def row_attention(
    ctx: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """scaled_dot_product_attention by our kernel, where rows keep their bits, with what its
    backward reads. None: the library computes dropout, and rows that no kernel takes."""
    made = _row_call(ctx, args, kwargs)
    if made is None:
        return None
    _, c, formulas = made
    sums = ctx.new_buffer(f32, tuple(c.inputs[0].shape[:3]), None, True, ctx.device())
    outs = [c.result(0), sums]
    c.launch("result", c.inputs, 0, formulas, outs, 4, **c.row_kind(formulas))
    vals = ctx.node.meta["val"]
    found: list[Any] = [ctx.whole(outs[0]), *[None] * (len(vals) - 1)]
    for k in results_read(ctx.node) - {0}:
        if k == 1:
            found[k] = _natural(ctx, ctx.whole(sums))
        elif isinstance(vals[k], torch.Tensor):
            found[k] = result(ctx, _nothing(ctx, k), k)
        else:
            found[k] = to_size(vals[k])
    return found


def row_attention_backward(
    ctx: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[View | None] | None:
    """Its gradients, each sum in one order. None: the library computes those of a bias, too."""
    made = _row_call(ctx, args, kwargs)
    if made is None:
        return None
    given, c, formulas = made
    if given.get("grad_input_mask", (False,))[-1]:
        return None
    if formulas["score"] is not None:
        score = loops.node("load", (), Load("grad", ()), f32)
        formulas["gradient"] = Formula(c.vars, score)
    grad, out, logs = given["grad_out"], given["out"], given["logsumexp"]

    def in_base(ops: Any, i: Any) -> loops.Node:
        n: loops.Node = logs.load(ops, (*i, *[0] * (len(logs.shape) - 3)))
        n = n * (1 / _LN2)
        # A row of such scores alone has lost what tells them apart: each counts as 1, as in eager.
        return apply("where", apply("lt", n, -_ABSORBED), n * (1 + 2**-20), n)

    sums = ctx.pointwise(c.inputs[0].shape[:3], f32, in_base)
    ctx.fix_layout(sums.buf)
    wide = (*c.inputs, grad, _along(ctx, out, grad, None), sums)
    of_queries, of_keys, of_values = map(c.result, range(3))
    c.launch("queries", wide, 0, formulas, [of_queries], 6, **c.row_kind(formulas))
    c.launch("keys", wide, 0, formulas, [of_keys, of_values], 8, **c.row_kind(formulas))
    return [*map(ctx.whole, (of_queries, of_keys, of_values)), None][: len(ctx.node.meta["val"])]


def _row_call(
    ctx: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], _Call, dict[str, Formula | None]] | None:
    """The operands by name, and the call with its formulas; None where no kernel takes it."""
    op: Any = ctx.node.target
    names = (a.name.rstrip("_") for a in op._schema.arguments)
    given = dict(zip(names, args, strict=False)) | {**kwargs}
    q, k, v = (given[name] for name in ("query", "key", "value"))
    bias, causal = given.get("attn_bias", given.get("attn_mask")), given.get("is_causal", False)
    if not _is_taken(ctx, q, k, v) or given.get("dropout_p", 0.0):
        return None
    if causal and q.shape[2] != k.shape[2]:  # kernels differ in what the last query sees
        return None
    scale = given.get("scale")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        return None
    c = _Call(ctx, (q, k, v), (None, _WHOLE, _WHOLE, None), scale)
    return given, c, {"score": c.biased(bias), "mask": c.causal() if causal else None}


def _nothing(ctx: Lowering, k: int) -> Any:
    """Zeros for what random numbers are drawn by, of which there are none."""
    dtype = ctx.out_dtype(k)
    return lambda ops, i: ops.const(0, dtype)


def _natural(ctx: Lowering, sums: View) -> View:
    """Logarithms of sums as the operator has them: with the rows that it adds."""

    def body(ops: Any, i: Any) -> loops.Node:
        there = inside(ops, (i[2],), [(0, sums.shape[2])])
        return load_if(ops, there, lambda: sums.load(ops, i[:3]) * _LN2, math.inf)

    return result(ctx, body, 1)


def _is_taken(ctx: Lowering, q: View, k: View, v: View) -> bool:
    """Whether a kernel of ours can have these operands."""
    if not (ctx.facts().streams and ctx.cfg.kernels) or q.dtype not in (f16, bf16, f32):
        return False
    if any(len(x.shape) != 4 or x.dtype != q.dtype for x in (q, k, v)):
        return False
    sizes = (*q.shape[1::2], *k.shape[1::2], *v.shape[1::2])
    known = [n for n in sizes if isinstance(n, int) and n > 0]
    if len(known) < len(sizes):
        return False
    heads, width, shared, k_width, v_heads, v_width = known
    if bounds(q.shape[0])[0] < 1 or bounds(q.shape[2])[0] < 1 or bounds(k.shape[2])[0] < 1:
        return False
    alike = width == k_width and shared == v_heads and heads % shared == 0
    alike = alike and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    return alike and max(width, v_width) <= _WIDEST


@dataclass
class _Call:
    """One call of the operator.

    inputs: queries, keys and values.
    block_mask, scale: as the operator has them.
    vars: the loop variables of batch, head, query and key.
    given: what formulas load, in order.
    """

    ctx: Lowering
    inputs: tuple[View, View, View]
    block_mask: Sequence[Any]
    scale: float
    vars: tuple[Expr, ...] = ()
    given: list[View] = field(default_factory=list)

    def __post_init__(self) -> None:
        q, k, _ = self.inputs
        sizes = zip("bhij", (*q.shape[:3], k.shape[2]), strict=True)
        self.vars = tuple(symbol(name, extent=n) for name, n in sizes)
        for n in (q.shape[2], k.shape[2]):
            if bounds(n)[1] > _MOST_ROWS:
                said = f"attention over {{}} positions, more than {_MOST_ROWS}"
                self.ctx.assert_true(compare("le", n, _MOST_ROWS), said, (n,))
        if bounds(k.shape[2])[0] < 1:  # as eager refuses it
            said = "max(): Expected reduction dim 3 to have non-zero size."
            self.ctx.assert_true(compare("le", 1, k.shape[2]), said, error="IndexError")

    # ---- formulas
    def formula(self, graph: GraphModule, captured: Sequence[Any], place: int) -> Formula | None:
        """What a function of a score makes; None for the score itself. place: which argument of
        the node has what it captures."""
        (found,) = self._formulas(graph, ("score",), captured, place, (), f32)
        return None if found.is_score else found

    def mask(self, graph: GraphModule, captured: Sequence[Any], place: int) -> Formula | None:
        """Where scores count; None: everywhere."""
        (found,) = self._formulas(graph, (), captured, place, (), b1)
        return None if found.body == loops.const(True, b1) else found

    def biased(self, bias: View | None) -> Formula | None:
        """A score with a number of its own added."""
        if bias is None:
            return None
        self.given.append(bias)
        score = loops.node("load", (), Load("score", ()), f32)
        own = self.vars[len(self.vars) - len(bias.shape) :]
        index = tuple(0 if n == 1 else v for n, v in zip(bias.shape, own, strict=True))
        n = cast(loops.node("load", (), Load("given0", index), bias.dtype), f32)
        # So that to base 2 it is finite too: of a row of nothing but such, all keys count alike.
        least = apply("max", n, loops.const(_LEAST, f32))
        return Formula(self.vars, score + apply("where", apply("eq", n, -math.inf), n, least))

    def causal(self) -> Formula:
        """Where a key comes no later than a query."""
        *_, i, j = map(integer, self.vars)
        return Formula(self.vars, apply("le", j, i))

    def gradients(
        self, joint: GraphModule, sums: Sequence[Sum], captured: Sequence[Any], place: int
    ) -> tuple[Formula, tuple[Addition, ...]]:
        """The gradient of a score, and what it adds to those of what is captured: sums, of the
        graph."""
        graph = with_sums(joint, sums)
        first, *found = self._formulas(graph, ("score",), captured, place, ("grad",), None)
        bodies = iter([f.body for f in found])
        wanted = list(dict.fromkeys(s.to for s in sums))
        made: list[Addition] = []
        for s in sums:
            index = tuple(
                self._wrapped(next(bodies), n)
                for n, _ in zip(captured[s.to].shape, s.index, strict=True)
            )
            value = cast(next(bodies), f32)
            made.append(Addition(wanted.index(s.to), self.vars, index, value))
        return replace(first, body=cast(first.body, f32)), tuple(made)

    def _wrapped(self, index: loops.Node, size: Size) -> loops.Node:
        """An index that does not count from the end."""
        at = cast(index, i64)
        return Simplifier()(apply("where", apply("lt", at, 0), at + integer(size), at))

    def _formulas(
        self, graph: GraphModule, before: Sequence[str], captured: Sequence[Any], place: int,
        after: Sequence[str], dtype: DType | None,
    ) -> list[Formula]:  # fmt: skip
        """Of each result. dtype: what they are made; None: what they are."""
        nodes: Any = self.ctx.node.args[place] if len(self.ctx.node.args) > place else ()
        q_node: Any = self.ctx.node.args[0]
        traced = scalar_graph(graph, q_node.meta["val"], len(before), len(after), nodes)
        values: list[Any] = [*before, *map(integer, self.vars), *after]
        values += [x for x, n in zip(captured, nodes, strict=True) if isinstance(n, Node)]
        program = self.ctx.lower_graph(traced, f"{self.ctx.name}.formula")
        return [
            Formula(self.vars, Simplifier()(body if dtype is None else cast(body, dtype)))
            for body in self._bodies(program, values)
        ]

    def _bodies(self, program: LoopProgram, values: Sequence[Any]) -> list[loops.Node]:
        """The results of a program of scalars, of names and nodes that stand for its inputs."""
        known: dict[str, tuple[tuple[Expr, ...], loops.Node]] = {}
        for name, x in zip(program.inputs, values, strict=True):
            if isinstance(name, str):
                known[name] = self._input(x, program.buffers[name].dtype)
            elif not isinstance(x, Expr) or name != ("sym", str(x)):
                raise NoRule("a function of scores of a number that is no size")
        for op in program.ops:
            if not isinstance(op, Pointwise) or op.index is not None:
                raise NoRule("a function of scores that is no formula")
            known[op.out] = op.vars, inline(op.body, known)
        made = []
        for out in program.outputs:
            if not isinstance(out, TensorArg) or out.shape or out.buf not in known or out.offset:
                raise NoRule("a function of scores that gives no scalar")
            vars_, body = known[out.buf]
            if vars_:
                raise NoRule("a function of scores that gives an element of a tensor")
            made.append(body)
        return made

    def _input(self, x: Any, dtype: DType) -> tuple[tuple[Expr, ...], loops.Node]:
        if isinstance(x, loops.Node):
            return (), x
        if isinstance(x, str):
            return (), loops.node("load", (), Load(x, ()), f32)
        assert isinstance(x, View), f"a function of scores captures {x}"
        if x not in self.given:
            self.given.append(x)
        vars_ = loop_vars("v", x.shape)
        load = Load(f"given{self.given.index(x)}", vars_)
        return vars_, loops.node("load", (), load, dtype)

    # ---- the launch
    def row_kind(self, formulas: Mapping[str, Formula | None]) -> dict[str, Any]:
        """What a launch for an operator of the library's is said besides: its only mask is that of
        causal attention."""
        op: Any = self.ctx.node.target
        return {"causal": formulas["mask"] is not None, "operator": op.name()}

    def cut(self) -> tuple[int, int]:
        """How many heads of queries are rows of one block, and how many programs share a walk along
        keys: as many as keep a device busy where queries are few."""
        q, k, _ = self.inputs
        n, heads, shared = q.shape[2], q.shape[1], k.shape[1]
        if not isinstance(n, int) or n > _MOST_FEW or self.ctx.cfg.batch_invariant:
            return 1, 1
        assert isinstance(heads, int) and isinstance(shared, int), "a number of heads varies"
        tables = [x for x in self.block_mask[2:4] if isinstance(x, View)]
        group = heads // shared
        one_table = n <= self.block_mask[-3] and all(x.shape[1] == 1 for x in tables)
        if n * group > _MOST_FEW or not one_table:
            group = 1
        nodes: Any = self.ctx.node.args
        batch, *_ = map(compat.tracing.hint_of, nodes[0].meta["val"].shape)
        length = compat.tracing.hint_of(nodes[1].meta["val"].shape[2])
        parts = min(_PROGRAMS // (batch * heads // group or 1), length // _LEAST_KEYS)
        return group, max(parts, 1)

    def result(self, k: int) -> str:
        """A buffer for a result of the operator."""
        ctx = self.ctx
        return ctx.new_buffer(
            ctx.out_dtype(k), ctx.out_shape(k), ctx.out_strides(k), True, ctx.device()
        )

    def zeros(self, shape: tuple[Size, ...]) -> str:
        """A buffer that is added to."""
        ctx = self.ctx
        made = ctx.pointwise(
            shape, f32, lambda ops, i: loops.const(0.0, f32), like=self.inputs[0].buf
        )
        ctx.fix_layout(made.buf)
        return made.buf

    def launch(
        self, gives: str, given: Sequence[View], tables: int, formulas: dict[str, Formula | None],
        outs: list[str], flops: int, added: tuple[tuple[Addition, ...], list[str]] = ((), []),
        heads: int = 1, parts: int = 1, causal: bool = False,
        operator: str = "higher_order::flex_attention",
    ) -> None:  # fmt: skip
        """Records a launch. tables: where those of its walk begin in block_mask. flops: for each
        product of two numbers of a query and a key. added: additions, and what they are to. heads,
        parts, causal: as Attention has them. operator: that is lowered."""
        ctx, (q, k, _) = self.ctx, self.inputs
        lists = [x for x in self.block_mask[tables : tables + 4] if isinstance(x, View)]
        rows, columns = self.block_mask[-3:-1]
        ends = (bounds(q.shape[2])[1], rows), (bounds(k.shape[2])[1], columns)
        if all(most <= size or size >= _WHOLE for most, size in ends):
            lists = []  # one block is all there is
        additions, sums = added
        operands = (*given, *lists, *self.given, *map(ctx.whole, sums))
        of_rows = given[4:6]  # numbers of queries in a backward: kernels know them to lie alike
        args = [
            tensor_arg(ctx, x, contiguous_strides(x.shape) if x in of_rows else None)
            for x in operands
        ]
        kernel = Attention(
            f"attention_{gives}.{ctx.name}.{ctx.node.name}", gives,
            formulas["score"], formulas.get("gradient"), formulas["mask"], self.scale,
            len(lists) // 2, (int(rows), int(columns)), additions, heads, parts, causal,
            ctx.cfg.batch_invariant,
        )  # fmt: skip
        held = [f.body for f in formulas.values() if f is not None]
        held += (n for a in additions for n in (*a.index, a.body))
        own = {v.symbol for v in self.vars}
        asked: list[Size] = [e for n in loops.walk(held) for e in loops.exprs_of(n)]
        asked += (e for x in args[len(given) + len(lists) :] for e in (*x.shape, *x.strides))
        sizes = {
            a.expr: None
            for e in asked
            for a in free_symbols(e)
            if a not in own and not loops.is_arg(a)
        }
        work: Size = product((flops, *q.shape, k.shape[2]))
        ctx.ops.append(
            Extern(
                tuple(outs), operator, (*args, *sorted(sizes, key=str)),
                mutates=tuple(sums), may_keep=False, kernel=kernel, fallback=False, flops=work,
                origin=ctx.origin,
            )
        )  # fmt: skip
