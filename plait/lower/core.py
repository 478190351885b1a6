"""The lowering machine: walks an ATen graph and calls one rule per op; rules record loops or extern
calls.

Comes in: `graph/captured.Captured` after clean-up passes. Goes out: `ir/loops.LoopProgram`, nothing
fused. A tensor value is a `View`: a buffer and a map from its logical indices to the buffer's; view
ops build new Views and record nothing. A rule that raises, and an op without a rule, becomes a
counted extern call (`lower/extern.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
import torch.fx
from torch._prims_common import is_contiguous_or_false

from plait.config import Config
from plait.devices import Facts, facts_of
from plait.errors import Fallback, Rung
from plait.ir import expr
from plait.ir.dtypes import LOOP_DTYPES, DType, i64
from plait.ir.expr import INF, Atom, Expr, Size
from plait.ir.loops import (
    Alias,
    Assert,
    Buffer,
    Extern,
    ExternArg,
    Item,
    ListArg,
    Load,
    Mutate,
    Node,
    Op,
    Pointwise,
    Reduction,
    Scalar,
    TensorArg,
    loop_vars,
    walk,
)  # fmt: skip
from plait.ir.record import Recorder
from plait.lower.dtypes import device_name, from_torch
from plait.lower.symbols import to_size

Index = Sequence[Size]
Body = Callable[[Recorder, tuple[Expr, ...]], Node]
ReduceBody = Callable[[Recorder, tuple[Expr, ...], tuple[Expr, ...]], Node]
_MAX_ORDERED = 4  # dimensions whose orders are tried to find a copy that holds the same
_OF_NOTHING = {
    "sum": 0,
    "prod": 1,
    "any": 0,
    "all": 1,
    "xor": 0,
}  # what reductions of no elements give


class NoRule(Exception):
    """A rule declines this use of its op (dtype, layout, argument); the op becomes an extern call.
    The text says why."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor value: element (vars...) is element (index...) of buffer buf. vars have the extents
    of shape.

    Views of one buffer share its memory. dtype is the buffer's."""

    buf: str
    dtype: DType
    shape: tuple[Size, ...]
    vars: tuple[Expr, ...]
    index: tuple[Size, ...]

    def at(self, point: Index) -> tuple[Size, ...]:
        """The buffer's index for logical index `point`."""
        env = {v.symbol: e for v, e in zip(self.vars, point, strict=True) if v.symbol is not None}
        return tuple(expr.substitute(e, env) for e in self.index)

    def load(self, ops: Recorder, point: Index) -> Node:
        """Records the load of element `point`. Of nothing it is 0: whatever leads there, such as
        a check of indices that fails, is no reason to read what is not there before.

        Raises NoRule for elements that loops cannot hold."""
        if self.dtype not in LOOP_DTYPES:
            raise NoRule(f"a loop over {self.dtype} elements")
        if 0 in self.shape:
            return ops.const(0, self.dtype)
        return ops.load(self.buf, self.at(point), self.dtype)

    def remap(self, shape: tuple[Size, ...], fn: Callable[[tuple[Expr, ...]], Index]) -> View:
        """A view of this view: its element v is element fn(v) of self."""
        vars_ = loop_vars("v", shape)
        return View(self.buf, self.dtype, shape, vars_, self.at(fn(vars_)))


Value = (
    Any  # View | Size | float | bool | str | None, tuples and lists of these, or an opaque object
)
Rule = Callable[..., Any]
RULES: dict[object, Rule] = {}
ANY_DTYPE: set[object] = set()
NO_LOOPS: set[object] = set()


def lower(*ops: object, any_dtype: bool = False, no_loops: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for OpOverloads (or HOPs).

    It is called as rule(ctx, *args, **kwargs) with Views for tensors and Sizes for SymInts and ints
    (other arguments as they are), and returns a View, a Size, None, or a tuple of these for several
    results. It raises NoRule to decline. any_dtype: the rule can take tensors that no loop touches
    (complex, float8), which otherwise go to an extern call before the rule is asked. no_loops: the
    rule makes no kernel, so it is asked even where there can be none."""

    def register(rule: Rule) -> Rule:
        for op in ops:
            if op in RULES:
                raise ValueError(f"two rules for {op}")
            RULES[op] = rule
            if any_dtype:
                ANY_DTYPE.add(op)
            if no_loops:
                NO_LOOPS.add(op)
        return rule

    return register


class Lowering:
    """The state of lowering one graph, handed to every rule as `ctx`."""

    def __init__(self, name: str, cfg: Config) -> None:
        self.name = name
        self.cfg = cfg
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.constants: list[str] = []
        self.constant_tensors: list[torch.Tensor] = []
        self.callables: list[object] = []
        self.symbols: dict[str, tuple[str, str, int] | Size | None] = {}
        self._steps: dict[str, Fallback] = {}
        self.input_buffers: set[str] = set()
        self.from_host: set[str] = (
            set()
        )  # buffers that hold a copy of a number in the host's memory
        self.donated: frozenset[str] = frozenset()  # inputs that are the graph's to use up
        self.functions: Mapping[
            str, tuple[Expr, Expr]
        ] = {}  # symbols that stand for functions of sizes
        self.found: set[str] = set()  # symbols whose values are found at run time
        self.computed: dict[str, Size] = {}  # such numbers, by name, that a rule computes
        self.floats: dict[
            str, View
        ] = {}  # float symbols: the one-element tensors that they are the values of
        self.mutations: list[tuple[str, View]] = []
        self.bases: dict[str, str] = {}  # buffers that are memory of others, by `alias`
        self.copies: dict[
            str, list[tuple[View, View, int]]
        ] = {}  # buffer -> [(copied, copy, ops before)]
        self.env: dict[torch.fx.Node, Value] = {}
        self.node: torch.fx.Node | None = None
        self.origin: tuple[str, ...] = ()

    # ---- steps down the ladder
    def fell_back(self, rung: Rung, op: str, reason: str) -> None:
        """The current node's operator is called, for want of a rule. The first time of each
        operator is kept."""
        where = self.origin[0].rpartition(" ")[0] if self.origin else ""
        self._steps.setdefault(op, Fallback(rung, op, reason, where))

    def steps(self) -> tuple[Fallback, ...]:
        """Every operator that was called for want of a rule, once, in the graph's order."""
        return tuple(self._steps.values())

    # ---- facts about the node being lowered
    def out_meta(self, k: int | None = None) -> torch.Tensor:
        """The fake tensor of the current node's result (of its k-th result)."""
        assert self.node is not None
        val = self.node.meta["val"]
        out = val if k is None else val[k]
        assert isinstance(out, torch.Tensor)
        return out

    def out_shape(self, k: int | None = None) -> tuple[Size, ...]:
        """Sizes of the current node's (k-th) result."""
        return tuple(to_size(s) for s in self.out_meta(k).shape)

    def out_dtype(self, k: int | None = None) -> DType:
        """Element type of the current node's (k-th) result."""
        return from_torch(self.out_meta(k).dtype)

    def float_readers(self) -> dict[str, Callable[[Recorder], Node]]:
        """How to read each float symbol inside a body (see symbols.to_scalar_node)."""
        return {name: _scalar_reader(x) for name, x in self.floats.items()}

    def device(self) -> str:
        """Where the current node's first tensor is; the host where it makes none."""
        val = None if self.node is None else self.node.meta.get("val")
        values = val if isinstance(val, (tuple, list)) else (val,)
        found = next((v for v in values if isinstance(v, torch.Tensor)), None)
        return "cpu" if found is None else device_name(found.device)

    def facts(self) -> Facts:
        """What is known of that device."""
        return facts_of(self.device())

    def out_strides(self, k: int | None = None) -> tuple[Size, ...] | None:
        """Eager's strides of the current node's (k-th) result, None if row-major. Asks no guard:
        what sizes are does not become a condition of the program."""
        meta = self.out_meta(k)
        return None if is_contiguous_or_false(meta) else tuple(to_size(s) for s in meta.stride())

    # ---- buffers
    def new_buffer(
        self,
        dtype: DType,
        shape: tuple[Size, ...],
        strides: tuple[Size, ...] | None = None,
        fixed: bool = False,
        device: str | None = None,
    ) -> str:
        """Declares a buffer. Its strides are row-major, and it is where the current node's result
        is, unless given."""
        name = f"buf{len(self.buffers)}"
        strides = strides or expr.contiguous_strides(shape)
        self.buffers[name] = Buffer(name, dtype, shape, strides, device or self.device(), fixed)
        return name

    def whole(self, buf: str) -> View:
        """The View of all of a buffer."""
        b = self.buffers[buf]
        vars_ = loop_vars("v", b.shape)
        return View(buf, b.dtype, b.shape, vars_, vars_)

    def is_whole(self, x: View) -> bool:
        """Whether x is its buffer itself and not a proper view."""
        return x.index == x.vars and x.shape == self.buffers[x.buf].shape

    def is_hosts(self, x: View) -> bool:
        """Whether x is in the host's memory, or a number that was copied from there."""
        return x.buf in self.from_host or facts_of(self.buffers[x.buf].device).is_host

    def fix_layout(self, buf: str) -> None:
        """From now on the scheduler must keep this buffer's strides."""
        if not self.buffers[buf].fixed:
            self.buffers[buf] = replace(self.buffers[buf], fixed=True)

    # ---- recording
    def pointwise(
        self,
        shape: tuple[Size, ...],
        dtype: DType,
        body: Body,
        strides: tuple[Size, ...] | None = None,
        like: str = "",
    ) -> View:
        """A new tensor whose element i is body(ops, i), a Node of dtype `dtype` (TypeError
        otherwise). It is where the first buffer is that the body reads, or `like`, or the current
        node's result.

        Raises NoRule for elements that loops cannot hold."""
        if dtype not in LOOP_DTYPES:
            raise NoRule(f"a loop that makes {dtype} elements")
        vars_ = loop_vars("i", shape)
        ops = Recorder()
        value = ops.kept(body(ops, vars_))
        if value.dtype != dtype:
            raise TypeError(f"the body gives {value.dtype}, not {dtype}")
        read = next((n.attr.buf for n in walk((value,)) if isinstance(n.attr, Load)), like)
        buf = self.new_buffer(
            dtype, shape, strides, device=self.buffers[read].device if read else None
        )
        self.ops.append(Pointwise(buf, vars_, value, origin=self.origin))
        return self.whole(buf)

    def reduction(
        self,
        shape: tuple[Size, ...],
        rshape: tuple[Size, ...],
        kind: str,
        body: ReduceBody,
        outs: Sequence[bool] = (True,),
    ) -> tuple[View | None, ...]:
        """New tensors of shape `shape`: body(ops, i, r) combined by `kind` over all r of rshape.
        outs: which results are wanted (welford has 3).

        The result dtype is the body's, i64 for argmax and argmin."""
        vars_, rvars = loop_vars("i", shape), loop_vars("r", rshape)
        ops = Recorder()
        value = ops.kept(body(ops, vars_, rvars))
        if (
            0 in rshape and kind in _OF_NOTHING
        ):  # a loop that reads nothing might still touch memory
            return (
                self.pointwise(
                    shape, value.dtype, lambda ops, _: ops.const(_OF_NOTHING[kind], value.dtype)
                ),
            )
        dtype = i64 if kind in ("argmax", "argmin") else value.dtype
        names = tuple(self.new_buffer(dtype, shape) if want else None for want in outs)
        self.ops.append(Reduction(names, vars_, rvars, kind, value, origin=self.origin))
        return tuple(None if n is None else self.whole(n) for n in names)

    def reduce(
        self, shape: tuple[Size, ...], rshape: tuple[Size, ...], kind: str, body: ReduceBody
    ) -> View:
        """A reduction with one result."""
        (out,) = self.reduction(shape, rshape, kind, body)
        assert out is not None
        return out

    def copy(self, x: View, strides: tuple[Size, ...] | None = None, fixed: bool = False) -> View:
        """x in a buffer of its own. Raises NoRule where that needs a loop and there can be none."""
        if x.dtype not in LOOP_DTYPES or not self.cfg.kernels:
            return self._clone(x, strides)
        out = self.pointwise(x.shape, x.dtype, lambda ops, i: x.load(ops, i), strides, like=x.buf)
        if fixed:
            self.fix_layout(out.buf)
        return out

    def _clone(self, x: View, strides: tuple[Size, ...] | None) -> View:
        """A copy of x by calls of ATen: row-major, or with these strides."""
        given = self.strided(x)
        if given is None:
            raise NoRule(f"a copy of {x.dtype} elements that no strides describe, without a loop")
        rows = expr.contiguous_strides(x.shape)
        if strides is None or _same_layout(x.shape, strides, rows):
            rowmajor = (("memory_format", Scalar("memory_format", "contiguous_format")),)
            return self._called(x, "aten::clone", (given,), rowmajor, rows)
        sizes = (ListArg(tuple(x.shape)), ListArg(tuple(strides)))
        into = self._called(x, "aten::new_empty_strided", (given, *sizes), (), strides)
        return self._called(x, "aten::copy", (self.tensor_arg(into), given), (), strides)

    def _called(
        self,
        like: View,
        op: str,
        args: tuple[ExternArg, ...],
        named: Any,
        strides: tuple[Size, ...],
    ) -> View:
        """The result of an operator, of like's sizes and dtype."""
        out = self.new_buffer(like.dtype, like.shape, strides, True, self.buffers[like.buf].device)
        self.ops.append(
            Extern((out,), op, args, named, may_keep=False, fallback=False, origin=self.origin)
        )
        return self.whole(out)

    # ---- strided memory, for extern operands, outputs and as_strided
    def strided(self, x: View) -> TensorArg | None:
        """x as strides and an offset into its buffer (whose layout is fixed by this), or None where
        no strides describe it."""
        b = self.buffers[x.buf]
        flat = expr.total(e * s for e, s in zip(x.index, b.strides, strict=True))
        strides: list[Size] = []
        rest = flat
        for v in x.vars:
            atom = v.symbol
            assert atom is not None
            k = expr.coefficient(flat, atom)
            if k is None:
                return None
            strides.append(k)
            rest = rest - v * k
        if any(v.symbol in expr.free_symbols(rest) for v in x.vars):
            return None
        # A dimension of size 1 has a variable that is always 0: give it a stride that keeps
        # contiguity checks happy.
        for d in range(len(strides) - 1, -1, -1):
            if x.shape[d] == 1:
                strides[d] = x.shape[d + 1] * strides[d + 1] if d + 1 < len(strides) else 1
        if 0 in x.shape:  # of no elements the first may lie beyond the memory
            rest = 0
        self.fix_layout(x.buf)
        return TensorArg(x.buf, x.shape, tuple(strides), rest)

    def tensor_arg(
        self, x: View, strides: tuple[Size, ...] | None = None, shared: bool = False
    ) -> TensorArg:
        """x as an extern operand: its own memory where strides describe it (and equal `strides` if
        given), else a copy. shared: which may be one that other operands read too, of the same
        elements in any order of dimensions."""
        self._lay_out(x, strides)
        for y in (x, *(self._copies_of(x) if shared else ())):
            found = self.strided(y)
            if found is not None:
                if strides is None:
                    return found
                if _same_layout(x.shape, found.strides, strides):
                    return replace(found, strides=strides)
        if strides is not None and 0 in strides:
            return self._expanded_copy(x, strides)
        wanted = strides or self._natural(x)
        made = self.strided(
            self.copied_once(x, wanted) if shared else self.copy(x, wanted, fixed=True)
        )
        assert made is not None
        return made if strides is None else replace(made, strides=strides)

    def lay_out(self, x: View, strides: tuple[Size, ...]) -> bool:
        """Whether x is memory with these strides, or has now become it. The layout of its buffer is
        fixed by this."""
        self._lay_out(x, strides)
        found = self.strided(x)
        return found is not None and _same_layout(x.shape, found.strides, strides)

    def _lay_out(self, x: View, strides: tuple[Size, ...] | None) -> None:
        """Gives x's buffer, if its layout is still free and x is all of it, the strides with which
        x is memory as it stands, so that nothing needs a copy. Neighbours stay neighbours. Kernels
        of a GPU do not mind the rest."""
        b = self.buffers[x.buf]
        if (
            facts_of(b.device).is_host
            or b.fixed
            or x.dtype not in LOOP_DTYPES
            or b.strides != expr.contiguous_strides(b.shape)
        ):
            return
        target = strides or self._natural(x)
        if (
            not isinstance(n := expr.numel(x.shape), int)
            or n != expr.numel(b.shape)
            or not _is_dense(x.shape, target)
        ):
            return
        new = [
            _stride_of(e, x.vars, target) if size != 1 else 1
            for e, size in zip(x.index, b.shape, strict=True)
        ]
        flat = expr.total(v * t for v, t in zip(x.vars, target, strict=True))
        laid = expr.total(e * s for e, s in zip(x.index, new, strict=True))
        kept = all(
            t == 1
            for s, t, size in zip(b.strides, new, b.shape, strict=True)
            if s == 1 and size != 1
        )
        if laid == flat and kept:
            self.buffers[x.buf] = replace(b, strides=tuple(new))

    def _natural(self, x: View) -> tuple[Size, ...]:
        """Strides for x's elements side by side: row-major, or column-major where neighbours in
        memory are those along the last dimension but one."""
        rows = expr.contiguous_strides(x.shape)
        if len(x.shape) < 2:
            return rows
        strides = self.buffers[x.buf].strides
        flat = expr.total(e * s for e, s in zip(x.index, strides, strict=True))
        across, along = (v.symbol for v in x.vars[-2:])
        assert across is not None and along is not None
        turned = expr.is_contiguous(flat, across) and not expr.is_contiguous(flat, along)
        return (*rows[:-2], 1, x.shape[-2]) if turned else rows

    def copied_once(self, x: View, strides: tuple[Size, ...]) -> View:
        """A copy of x with these strides, which later operands share."""
        for y in self._copies_of(x):
            if self.is_whole(y) and self.buffers[y.buf].strides == strides:
                return y
        made = self.copy(x, strides, fixed=True)
        self.copies.setdefault(x.buf, []).append((x, made, len(self.ops)))
        return made

    def _copies_of(self, x: View) -> list[View]:
        """Views of copies made for operands that hold what x holds, and still do."""
        out: list[View] = []
        for seen, made, n in self.copies.get(x.buf, ()):
            if any(isinstance(op, Extern) and (op.mutates or op.fence) for op in self.ops[n:]):
                continue
            if len(x.shape) != len(seen.shape) or len(x.shape) > _MAX_ORDERED:
                continue
            for order in permutations(range(len(x.shape))):
                point = tuple(x.vars[d] for d in order)
                if tuple(x.shape[d] for d in order) == seen.shape and seen.at(point) == x.index:
                    out.append(View(made.buf, x.dtype, x.shape, x.vars, made.at(point)))
        return out

    def _expanded_copy(self, x: View, strides: tuple[Size, ...]) -> TensorArg:
        """A copy of x whose dimensions of stride 0 are stored once."""
        thin = tuple(1 if st == 0 else s for s, st in zip(x.shape, strides, strict=True))
        once = x.remap(
            thin, lambda v: tuple(0 if t == 1 else e for e, t in zip(v, thin, strict=True))
        )
        made = self.copy(once, tuple(1 if st == 0 else st for st in strides), fixed=True)
        return TensorArg(made.buf, x.shape, strides, 0)

    def alias(
        self,
        x: View,
        dtype: DType,
        shape: tuple[Size, ...],
        strides: tuple[Size, ...],
        offset: Size,
        relative: bool = True,
    ) -> View:
        """Memory of x seen in another way (as_strided, another dtype). offset: from x's buffer's
        first element (or its storage's start)."""
        self.fix_layout(x.buf)
        out = self.new_buffer(dtype, shape, strides, True, self.buffers[x.buf].device)
        self.ops.append(Alias(out, x.buf, offset, relative))
        self.bases[out] = x.buf
        return self.whole(out)

    def seen_as(
        self, x: View, dtype: DType, shape: tuple[Size, ...], strides: tuple[Size, ...], first: Size
    ) -> View:
        """Memory of x's buffer, from its byte `first` on, as another element type. An offset counts
        elements of that type, and a buffer may begin between two of them (an odd int32 of its
        storage, seen as int64): a view of its own elements goes to that byte first."""
        if first % dtype.nbytes != 0:
            item = x.dtype.nbytes
            end = expr.total((n - 1) * s for n, s in zip(shape, strides, strict=True))
            some = expr.product(expr.smin(n, 1) for n in shape)  # 0 for no elements
            room = (end + 1) * some * dtype.nbytes // item
            x = self.alias(x, x.dtype, (room,), (1,), first // item)
            first = 0
        return self.alias(x, dtype, shape, strides, first // dtype.nbytes)

    def memory(self, buf: str) -> str:
        """The buffer whose memory this one is."""
        while buf in self.bases:
            buf = self.bases[buf]
        return buf

    # ---- integers
    def item(self, x: View, value: Expr) -> Size:
        """The symbol `value`, now defined as the value of one-element x (an integer or bool)."""
        atom = value.symbol
        assert atom is not None
        whole = x if self.is_whole(x) else self.copy(x.remap((), lambda _: (0,) * len(x.shape)))
        self.fix_layout(whole.buf)
        self.ops.append(Item(atom.name, whole.buf))
        self.symbols[atom.name] = None
        return value

    def define_functions(self) -> None:
        """Gives the symbols that stand for functions of known sizes their values. That a function
        of what is found at run time has the range that tracing gives it is asserted."""
        for name, (traced, value) in self.functions.items():
            if name in self.symbols or any(
                a.name not in self.symbols for a in expr.free_symbols(value)
            ):
                continue
            self.symbols[name] = value
            if self.is_found(value):
                self.found.add(name)
                found, said = (
                    expr.symbol(name, lo=-INF),
                    f"found {{}} where {{}} to {{}} was traced: {value}",
                )
                lo, hi = (int(max(min(b, 2**63 - 1), -(2**63))) for b in expr.bounds(traced))
                if (lo, hi) != (-(2**63), 2**63 - 1):
                    inside = expr.compare("le", lo, found) * expr.compare("le", found, hi)
                    self.assert_true(inside, said, (found, lo, hi))

    def assert_true(
        self, holds: Size, message: str, values: tuple[Size, ...] = (), error: str = "RuntimeError"
    ) -> None:
        """A run-time assertion. values: what the first marks {} of message stand for."""
        if not (isinstance(holds, int) and holds):
            self.ops.append(Assert(holds, message, values, error))

    def is_found(self, *sizes: Size) -> bool:
        """Whether one of sizes depends on numbers that are found at run time: no guard has looked
        at it."""
        return any(a.name in self.found for e in sizes for a in expr.free_symbols(e))

    def require_index(self, index: Size, dim: int, size: Size) -> None:
        """Asserts that an index into dimension dim, of this size, is in [-size, size), unless what
        was checked says so: torch 2.11 traces `x[1]` without a guard. Raises NoRule for one that
        never is, which ATen refuses."""
        inside = expr.compare("le", -size, index) * expr.compare("lt", index, size)
        if inside == 0:
            raise NoRule(f"index {index} is out of bounds for dimension {dim} with size {size}")
        if inside == 1 and expr.may_be_zero(size):  # its range does not tell 0
            inside = size
        if inside != 1:
            said = f"index {{}} is out of bounds for dimension {dim} with size {{}}"
            self.assert_true(inside, said, (index, size), "IndexError")

    def mutate(self, target: str, source: View) -> None:
        """Input buffer `target` takes the value of source (dtype and shape already agree), after
        all else: values made from the input are views of what it held before."""
        self.mutations.append((target, source))

    def finish_mutations(self) -> None:
        """Records the mutations, once everything that reads old contents is recorded."""
        sources = [
            t
            if self.is_whole(source) and source.buf == t
            else self._own(source)  # written in place
            for t, source in self.mutations
        ]
        pairs = zip(self.mutations, sources, strict=True)
        self.ops.extend(Mutate(target, source) for (target, _), source in pairs)

    def _own(self, x: View) -> str:
        """A buffer of the graph's own that holds x."""
        mine = self.is_whole(x) and x.buf not in self.constants and not self.is_input(x.buf)
        return x.buf if mine else self.copy(x).buf

    def is_input(self, buf: str) -> bool:
        """Whether a buffer is one of the graph's inputs."""
        return buf in self.input_buffers

    # ---- undoing a rule that failed half-way
    def mark(self) -> tuple[int, int, dict[str, tuple[str, str, int] | Size | None]]:
        """What `undo` needs to know."""
        return len(self.ops), len(self.buffers), dict(self.symbols)

    def undo(self, mark: tuple[int, int, dict[str, tuple[str, str, int] | Size | None]]) -> None:
        """Takes back all that was recorded since mark()."""
        n_ops, n_buffers, self.symbols = mark
        del self.ops[n_ops:]
        for name in list(self.buffers)[n_buffers:]:
            del self.buffers[name]
        for name, made in self.copies.items():
            self.copies[name] = [c for c in made if c[1].buf in self.buffers]


def _is_dense(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether strides place the elements side by side, in any order of dimensions."""
    end: Size = 1
    dims = [(t, n) for t, n in zip(strides, shape, strict=True) if isinstance(t, int) and n != 1]
    for stride, n in sorted(dims, key=lambda dim: dim[0]):
        if stride != end:
            return False
        end = end * n
    return end == expr.numel(shape)


def _stride_of(e: Size, vars_: tuple[Expr, ...], strides: tuple[Size, ...]) -> Size:
    """The address, in strides of vars_, of where e first is 1; 0 if no single variable takes it
    there."""
    zero: dict[Atom, Size] = dict.fromkeys(expr.free_symbols(e), 0)
    for v, stride in zip(vars_, strides, strict=True):
        for at in (1, *expr.divisors(e)):
            if v.symbol in zero and expr.substitute(e, {**zero, v.symbol: at}) == 1:
                return stride * at
    return 0


def _scalar_reader(x: View) -> Callable[[Recorder], Node]:
    return lambda ops: x.load(ops, ())


def _same_layout(shape: tuple[Size, ...], a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Whether two strides place the elements alike: dimensions of size 1 and empty tensors do not
    count."""
    return 0 in shape or all(s == 1 or x == y for s, x, y in zip(shape, a, b, strict=True))
