"""What a lowering rule is given, and the table of rules.

A rule gets `Lowering`, in which it records loops, and the values of an operator's arguments. A
tensor's value is a `View`: a buffer and a map from its logical indices to the buffer's; rules of
views build new ones and record nothing. `graph.py` asks the rules, `memory.py` has what gives views
strides, `integers.py` what is asserted of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.fx
from torch._prims_common import is_contiguous_or_false

from plait.config import Config
from plait.devices import Facts, facts_of
from plait.errors import Fallback, Rung
from plait.ir import expr
from plait.ir.calls import Variant
from plait.ir.dtypes import LOOP_DTYPES, DType
from plait.ir.expr import Expr, Size
from plait.ir.loops import (
    Assert,
    Buffer,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    Reduction,
    const,
    loop_vars,
    loosened,
    walk,
)  # fmt: skip
from plait.ir.record import Recorder
from plait.ir.reductions import REDUCTIONS
from plait.lower.dtypes import device_name, from_torch
from plait.lower.symbols import to_sizes

Index = Sequence[Size]
Body = Callable[[Recorder, tuple[Expr, ...]], Node]
ReduceBody = Callable[[Recorder, tuple[Expr, ...], tuple[Expr, ...]], Node]


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
        return _index_at(self.vars, self.index, tuple(point))

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


@lru_cache(1 << 13)  # models of equal blocks ask the same again and again
def _index_at(
    vars_: tuple[Expr, ...], index: tuple[Size, ...], point: tuple[Size, ...]
) -> tuple[Size, ...]:
    env = {v.symbol: e for v, e in zip(vars_, point, strict=True) if v.symbol is not None}
    return tuple(expr.substitute(e, env) for e in index)


CONVERTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
"""Operators that round because the program says so."""

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


@dataclass
class Tables:
    """What a program and its subprograms refer to by number.

    constants: tensors.
    callables: what calls of Python call.
    refused: variants of the user's kernels that the compiler has refused, by the kernel's text, and
        why. They are not to be asked for again.
    """

    constants: list[torch.Tensor] = field(default_factory=list)
    callables: list[object] = field(default_factory=list)
    refused: Mapping[tuple[str, Variant], str] = field(default_factory=dict)


class Mark(NamedTuple):
    """How far lowering was: how many ops, buffers, subprograms, constants and callables there were,
    and which symbols."""

    ops: int
    buffers: int
    programs: int
    constants: int
    callables: int
    symbols: dict[str, tuple[str, str, int] | Size | None]


@dataclass(eq=False)
class Lowering:
    """The state of lowering one graph, handed to every rule as `ctx`.

    name, cfg: of the graph, and how it is compiled.
    buffers, ops: the program so far.
    makers: of each buffer, the node in whose computation it is made; "" if in none.
    tables: what the program refers to by number.
    lower_graph: makes a subprogram of a graph.
    programs: the subprograms so far, by the graphs that they are of.
    constants: buffers of constants, and their numbers.
    symbols: where the value of each is found: in an input, by an expression, or None for one that
        an input or an operation is.
    input_buffers: those that the caller gives.
    donated: inputs that are the graph's to use up.
    from_host: buffers that hold a copy of a number in the host's memory.
    functions: symbols that stand for functions of sizes: as traced, and the function.
    found: symbols whose values are found at run time.
    computed: such numbers, by name, that a rule computes.
    floats: float symbols: the one-element tensors that they are the values of.
    mutations: inputs, and the values that they get after all else.
    bases: buffers that are memory of others, and of which.
    copies: of each buffer, what was copied of it, the copy, and how many operations stood before.
    loops: what makes all of a buffer, element by element.
    followed: buffers whose layout is free, laid out as what they are computed from.
    env: the values of nodes.
    traced: of buffers that are all of a node's value, the strides that it would have in eager.
    current, origin: the node that is lowered now (see `node`), and where it comes from.
    element: which of its results a rule makes now, where the node is as many calls as it has.
    made_as: its element type for the rule that makes it now, if that is not its own.
    """

    name: str
    cfg: Config
    tables: Tables
    lower_graph: Callable[[torch.fx.GraphModule, str], LoopProgram]
    programs: dict[torch.fx.GraphModule, LoopProgram] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, tuple[str, str, int] | Size | None] = field(default_factory=dict)
    input_buffers: set[str] = field(default_factory=set)
    donated: frozenset[str] = frozenset()
    from_host: set[str] = field(default_factory=set)
    functions: Mapping[str, tuple[Expr, Expr]] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    computed: dict[str, Size] = field(default_factory=dict)
    floats: dict[str, View] = field(default_factory=dict)
    mutations: list[tuple[str, View]] = field(default_factory=list)
    bases: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[tuple[View, View, int]]] = field(default_factory=dict)
    loops: dict[str, Pointwise] = field(default_factory=dict)
    followed: dict[str, Buffer] = field(default_factory=dict)
    env: dict[torch.fx.Node, Value] = field(default_factory=dict)
    traced: dict[str, tuple[Size, ...]] = field(default_factory=dict)
    current: torch.fx.Node | None = None
    origin: tuple[str, ...] = ()
    element: int | None = None
    made_as: DType | None = None
    _steps: dict[str, Fallback] = field(default_factory=dict)

    # ---- steps down the ladder
    def fell_back(self, rung: Rung, op: str, reason: str) -> None:
        """The current node's operator is called, for want of a rule. The first time of each
        operator is kept."""
        self._steps.setdefault(op, Fallback(rung, op, reason, self.where()))

    def fell_back_within(self, steps: Sequence[Fallback]) -> None:
        """The steps of a subprogram."""
        for step in steps:
            self._steps.setdefault(step.what, step)

    def steps(self) -> tuple[Fallback, ...]:
        """Every operator that was called for want of a rule, once, in the graph's order."""
        return tuple(self._steps.values())

    # ---- facts about the node being lowered
    @property
    def node(self) -> torch.fx.Node:
        """The node that is lowered now."""
        assert self.current is not None, "a rule is asked about a node"
        return self.current

    def where(self) -> str:
        """The user's line that it comes from, "" if none is known."""
        return self.origin[0].rpartition(" ")[0] if self.origin else ""

    def _made(self) -> Any:
        """The fake value that is made now, None where no node is lowered."""
        val = self.current.meta.get("val") if self.current is not None else None
        return val if self.element is None or val is None else val[self.element]

    def out_meta(self, k: int | None = None) -> torch.Tensor:
        """The fake tensor of the current node's result (of its k-th result)."""
        val = self._made()
        out = val if k is None else val[k]
        assert isinstance(out, torch.Tensor), out
        return out

    def out_shape(self, k: int | None = None) -> tuple[Size, ...]:
        """Sizes of the current node's (k-th) result."""
        return to_sizes(self.out_meta(k).shape)

    def out_dtype(self, k: int | None = None) -> DType:
        """Element type of the current node's (k-th) result."""
        return self.made_as or from_torch(self.out_meta(k).dtype)

    def making(self, dtype: DType, rule: Callable[[], View]) -> View:
        """rule(), which is told that the current node's result is of this element type."""
        self.made_as = dtype
        try:
            return rule()
        finally:
            self.made_as = None

    def float_readers(self) -> dict[str, Callable[[Recorder], Node]]:
        """How to read each float symbol inside a body (see symbols.to_scalar_node)."""
        return {name: _scalar_reader(x) for name, x in self.floats.items()}

    def device(self) -> str:
        """Where the current node's first tensor is; the host where it makes none."""
        val = self._made()
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
        row_major = expr.contiguous_strides(to_sizes(meta.shape))
        strides = to_sizes(meta.stride())  # mostly they are equal: torch's question takes longer
        return None if strides == row_major or is_contiguous_or_false(meta) else strides

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
        self.makers[name] = self.current.name if self.current is not None else ""
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
        if self.cfg.numerics == "precise" and self.current and self.current.target not in CONVERTS:
            value = loosened(value)
        if value.dtype != dtype:
            raise TypeError(f"the body gives {value.dtype}, not {dtype}")
        read = next((n.attr.buf for n in walk((value,)) if isinstance(n.attr, Load)), like)
        buf = self.new_buffer(
            dtype, shape, strides, device=self.buffers[read].device if read else None
        )
        self.loops[buf] = Pointwise(buf, vars_, value, origin=self.origin)
        self.ops.append(self.loops[buf])
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
        row = REDUCTIONS[kind]
        if 0 in rshape and row.merges:  # a loop that reads nothing might still touch memory
            first = const(row.identity(value.dtype), value.dtype)
            return (self.pointwise(shape, value.dtype, lambda ops, _: first),)
        dtype = row.gives(value.dtype)
        names = tuple(self.new_buffer(dtype, shape) if want else None for want in outs)
        self.ops.append(Reduction(names, vars_, rvars, kind, value, origin=self.origin))
        return tuple(None if n is None else self.whole(n) for n in names)

    def reduce(
        self, shape: tuple[Size, ...], rshape: tuple[Size, ...], kind: str, body: ReduceBody
    ) -> View:
        """A reduction with one result."""
        (out,) = self.reduction(shape, rshape, kind, body)
        assert out is not None, f"a reduction by {kind} that gives nothing"
        return out

    def assert_true(
        self, holds: Size, message: str, values: tuple[Size, ...] = (), error: str = "RuntimeError"
    ) -> None:
        """A run-time assertion. values: what the first marks {} of message stand for."""
        if not (isinstance(holds, int) and holds):
            self.ops.append(Assert(holds, message, values, error))

    # ---- undoing a rule that failed half-way
    def mark(self) -> Mark:
        """What `undo` needs to know."""
        tables = len(self.tables.constants), len(self.tables.callables)
        recorded = len(self.ops), len(self.buffers), len(self.programs)
        return Mark(*recorded, *tables, dict(self.symbols))

    def undo(self, mark: Mark) -> None:
        """Takes back all that was recorded since mark()."""
        self.symbols = mark.symbols
        del self.ops[mark.ops :]
        for graph in list(self.programs)[mark.programs :]:
            del self.programs[graph]
        del self.tables.constants[mark.constants :]
        del self.tables.callables[mark.callables :]
        for name in list(self.buffers)[mark.buffers :]:
            del self.buffers[name]
            self.loops.pop(name, None)
            self.followed.pop(name, None)
        for name, made in self.copies.items():
            self.copies[name] = [c for c in made if c[1].buf in self.buffers]


def _scalar_reader(x: View) -> Callable[[Recorder], Node]:
    return lambda ops: x.load(ops, ())
