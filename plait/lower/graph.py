"""Walks a captured ATen graph, asks the rules, and gives back one LoopProgram.

Comes in: `Captured`. Goes out: `Lowered`: the program, the tensors and callables that it refers to
by number, and what fell back to extern calls and why. A rule that declines or fails leaves no trace
but an extern call with the reason. Integers that the graph computes are not lowered: their value is
the size expression that their fake value names.
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload

from plait import compat
from plait.config import Config
from plait.devices import facts_of
from plait.errors import Fallback, InexpressibleSize, OperandError, PlaitError, Unsupported
from plait.graph.captured import Captured, InputView
from plait.graph.edit import begins_anywhere, is_view, last_frame, memory_of
from plait.graph.refuse import CLONE, SHARED
from plait.graph.streams import is_fence
from plait.ir import expr, loops
from plait.ir.dtypes import LOOP_DTYPES, DType, b1, f64, opaque
from plait.ir.expr import Atom, Expr, Size
from plait.ir.loops import Buffer, Extern, LoopProgram, Number, Scalar, TensorArg
from plait.lower.core import ANY_DTYPE, NO_LOOPS, RULES, Lowering, NoRule, Value, View
from plait.lower.dtypes import device_name, from_torch
from plait.lower.extern import call_extern
from plait.lower.found import Found, truth
from plait.lower.hop import call_higher_order
from plait.lower.operands import is_object_input, object_input
from plait.lower.symbols import (
    definitions,
    is_found_float,
    is_ragged,
    is_symbolic,
    size_hints,
    to_scalar_node,
    to_size,
)
from plait.lower.view import bytes_behind
from plait.lower.wide import take_out_wide

aten = torch.ops.aten

# What a rule may raise and still leave the compiler standing: the op becomes an extern call, with
# the error as reason.
_RULE_ERRORS = (
    NoRule, Unsupported, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


# A process that compiles without end must not grow without end: about 100 MB of expressions and
# nodes.
_MAX_INTERNED = 200_000


@dataclass(frozen=True)
class Lowered:
    """program, and what stands behind its numbers: constants (tensors, in the order of
    program.constants) and callables.

    fallbacks: how often each op became an extern call for want of a rule; steps: the first of each
    op, and why. nodes: buffer -> the FX node whose value it is."""

    program: LoopProgram
    constants: tuple[torch.Tensor, ...]
    callables: tuple[object, ...]
    fallbacks: Mapping[str, int]
    steps: tuple[Fallback, ...]
    nodes: Mapping[str, str]

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons of steps, by op."""
        return {step.what: step.reason for step in self.steps}


@cache
def load_rules() -> None:
    """Imports every module of plait.lower, which registers its rules."""
    import plait.lower as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def lower_graph(captured: Captured, cfg: Config) -> Lowered:
    """The LoopProgram of a graph. Raises Unsupported, with the user's line, where neither a rule
    nor an extern call will do."""
    load_rules()
    if expr.interned() > _MAX_INTERNED:
        expr.forget()
        loops.forget()
    return _Walk(captured, cfg).run()


class _Walk:
    def __init__(self, captured: Captured, cfg: Config) -> None:
        self.captured = captured
        self.module = captured.graph
        self.ctx = Lowering(captured.name, cfg)
        self.ctx.donated = frozenset(f"arg{k}" for k in captured.donated_inputs)
        self.env = self.ctx.env
        self.inputs: list[str | tuple[str, str] | None] = []
        self.input_storages: dict[str, int] = {}
        self.facts: list[tuple[Size, tuple[str, str, int] | str]] = []
        self.constants: dict[str, View] = {}
        self.outputs: tuple[TensorArg | Scalar | Size, ...] = ()
        self.results: dict[torch.fx.Node, TensorArg] = {}
        self.given: set[TensorArg] = set()  # the values of results
        self.moved: dict[tuple[View, str], View] = {}
        self.placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.found = Found(self.ctx)
        self.last_fences: list[torch.fx.Node] = []  # of streams, after inputs have their new values

    def run(self) -> Lowered:
        ctx = self.ctx
        defined = False
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node)
                continue
            if not defined:
                self._define_symbols()
                ctx.functions = definitions(n.meta.get("val") for n in self.placeholders)
                defined = True
            if node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "output":
                self.outputs = self._output(node)
            else:
                raise Unsupported(f"a graph node of kind {node.op}", where=_where(node))
        donated = tuple(
            name for k in self.captured.donated_inputs if isinstance(name := self.inputs[k], str)
        )
        ctx.define_functions()
        ops, wide = take_out_wide(ctx.ops, ctx.buffers.values(), ctx.symbols)
        ctx.symbols |= wide
        program = LoopProgram(
            tuple(self.inputs), ctx.buffers, tuple(ctx.constants), tuple(ops), self.outputs,
            ctx.symbols, donated, self._hints(wide),
        )  # fmt: skip
        _check_symbols(program)
        counts = Counter(op.op for op in ctx.ops if isinstance(op, Extern) and op.fallback)
        values = reversed(self.env.items())  # of nodes with one value the first counts
        nodes = {x.buf: n.name for n, x in values if isinstance(x, View) and ctx.is_whole(x)}
        return Lowered(
            program,
            tuple(ctx.constant_tensors),
            tuple(ctx.callables),
            dict(counts),
            ctx.steps(),
            nodes,
        )

    def _hints(self, wide: Mapping[str, Expr]) -> dict[str, int]:
        """What symbols are in the example, as far as that is known. wide: those that were taken out
        of loops."""
        hints = size_hints((n.meta.get("val") for n in self.placeholders), self.ctx.symbols)
        given = [(e, source) for e, source in self.facts if isinstance(source, str)]
        functions = {name: e for name, (_, e) in self.ctx.functions.items()}
        for e, name in (*given, *((e, name) for name, e in (*functions.items(), *wide.items()))):
            if name in self.ctx.symbols and all(a.name in hints for a in expr.free_symbols(e)):
                with suppress(ArithmeticError, ValueError):  # a function that has no value there
                    hints[name] = expr.evaluate(e, hints)
        return hints

    # ---- inputs
    def _placeholder(self, node: torch.fx.Node) -> Value:
        val = node.meta.get("val")
        if _is_token(node):
            self.inputs.append(None)
            return None
        if isinstance(val, torch.Tensor):
            return self._tensor_input(val)
        if isinstance(val, torch.SymInt) and not is_ragged(val):
            return self._int_input(to_size(val))
        if isinstance(val, torch.SymBool) and (bit := _bit(to_size(val))) is not None:
            return self._int_input(bit)
        if is_symbolic(val) and not is_ragged(val):
            raise Unsupported(
                f"a graph input that is a {type(val).__name__}", hint="pass it as a tensor"
            )
        self.inputs.append(None)
        if val is None and not node.users or isinstance(val, (bool, int, float, str, torch.SymInt)):
            return val
        return object_input(len(self.inputs) - 1)

    def _tensor_input(self, val: torch.Tensor) -> View:
        name = f"arg{len(self.inputs)}"
        shape = tuple(to_size(s) for s in val.shape)
        dense = val.layout == torch.strided
        strides = (
            tuple(to_size(s) for s in val.stride()) if dense else expr.contiguous_strides(shape)
        )
        dtype = from_torch(val.dtype) if dense else opaque
        self.ctx.buffers[name] = Buffer(
            name, dtype, shape, strides, device=device_name(val.device), fixed=True
        )
        self.ctx.input_buffers.add(name)
        self.inputs.append(name)
        if dense:
            self.input_storages[name] = compat.tracing.storage_of(val)
        offset = (to_size(val.storage_offset()),) if dense else ()
        for what, exprs in (("size", shape), ("stride", strides), ("offset", offset)):
            for d, e in enumerate(exprs):
                if isinstance(e, Expr):
                    self.facts.append((e, (name, what, d)))
        return self.ctx.whole(name)

    def _int_input(self, size: Size) -> Size:
        if isinstance(size, int):
            self.inputs.append(None)
            return size
        atom = size.symbol
        if atom is not None and atom.name not in self.ctx.symbols:
            self.inputs.append(("sym", atom.name))
            self.ctx.symbols[atom.name] = None
        else:
            name = f"t{len(self.inputs)}"
            self.inputs.append(("sym", name))
            self.ctx.symbols[name] = None
            self.facts.append((size, name))
        return size

    def _define_symbols(self) -> None:
        """Finds a source for every symbol of the inputs: first those that are a size by themselves,
        then those that an expression with one unknown determines, in sweeps, since each may make
        another one known."""
        symbols = self.ctx.symbols
        for e, source in self.facts:
            atom = e.symbol if isinstance(e, Expr) else None
            if atom is not None and atom.name not in symbols:
                symbols[atom.name] = self._value_of(source)
        progress = True
        while progress:
            progress = False
            for e, source in self.facts:
                unknown = [a for a in expr.free_symbols(e) if a.name not in symbols]
                if len(unknown) == 1:
                    progress |= self._solve(e, source, unknown[0])

    def _value_of(self, source: tuple[str, str, int] | str) -> tuple[str, str, int] | Size:
        return expr.symbol(source) if isinstance(source, str) else source

    def _solve(self, e: Size, source: tuple[str, str, int] | str, unknown: Atom) -> bool:
        k = expr.coefficient(e, unknown)
        if k is None or expr.bounds(k)[0] <= 0:
            return False
        if isinstance(source, str):
            given: Size = expr.symbol(source)
        else:
            name = f"t{source[0]}_{source[1]}{source[2]}"
            self.ctx.symbols[name] = source
            given = expr.symbol(name)
        known = expr.substitute(e, {unknown: 0})
        self.ctx.symbols[unknown.name] = (given - known) // k
        return True

    # ---- constants
    def _attribute(self, node: torch.fx.Node) -> Value:
        assert isinstance(node.target, str)
        if node.target in self.constants:
            return self.constants[node.target]
        value: Any = self.module
        for part in node.target.split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        fake = node.meta.get("val")  # its device counts: this machine may lack it
        device = fake.device if isinstance(fake, torch.Tensor) else value.device
        view = self._constant(node.target, value, device)
        self.constants[node.target] = view
        return view

    def _constant(self, target: str, value: torch.Tensor, device: torch.device) -> View:
        ctx = self.ctx
        name = f"const{len(ctx.constants)}"
        dense = value.layout == torch.strided
        shape = tuple(int(s) for s in value.shape)
        strides = tuple(int(s) for s in value.stride()) if dense else expr.contiguous_strides(shape)
        dtype = from_torch(value.dtype) if dense else opaque
        if (
            not shape
            and ctx.cfg.kernels
            and dtype in LOOP_DTYPES
            and type(value) is torch.Tensor
            and facts_of(device).is_host
        ):
            with torch.utils._python_dispatch._disable_current_modes():  # value is no fake tensor
                number = value.item()  # a literal: fused like any number
            return ctx.pointwise((), dtype, lambda ops, i: ops.const(number, dtype))
        ctx.buffers[name] = Buffer(
            name, dtype, shape, strides, device=device_name(device), fixed=True
        )
        ctx.constants.append(name)
        ctx.constant_tensors.append(
            value.detach() if isinstance(value, torch.nn.Parameter) else value
        )
        return ctx.whole(name)

    # ---- calls
    def _call(self, node: torch.fx.Node) -> Value:
        try:
            return self._called(node)
        except PlaitError as e:
            if e.where or not (where := _where(node)):
                raise
            raise e.placed(f"{node.target}: {e.what}", where) from e

    def _called(self, node: torch.fx.Node) -> Value:
        target, val = node.target, node.meta.get("val")
        if target is operator.getitem:
            return self._value(node.args[0])[node.args[1]]
        bound = node.meta.get("unbacked_bindings")
        if not bound and isinstance(val, (bool, int, torch.SymInt, torch.SymBool)):
            return self._size(val)
        if isinstance(val, float) or (isinstance(val, torch.SymFloat) and not bound):
            return val
        ctx = self.ctx
        if is_fence(node):
            self.moved.clear()
            if ctx.mutations and node not in self.last_fences:
                self.last_fences.append(node)
                return None
        ctx.node, ctx.origin = node, (_origin(node),)
        args = tuple(self._value(a) for a in node.args)
        kwargs = {k: self._value(v) for k, v in node.kwargs.items()}
        ctx.define_functions()  # before the first that relies on their ranges
        value = self._lower(node, args, kwargs)
        if bound:
            self.found.bind(node, value, _where(node))
        return value

    def _value(self, a: Any) -> Value:
        if isinstance(a, torch.fx.Node):
            return self.env[a]
        if isinstance(a, list):
            return [self._value(x) for x in a]
        if isinstance(a, tuple):
            return tuple(self._value(x) for x in a)
        if isinstance(a, dict):
            return {name: self._value(x) for name, x in a.items()}
        if isinstance(a, (torch.SymInt, torch.SymBool)):
            return self._size(a)
        return a

    def _size(self, value: int | torch.SymInt | torch.SymBool) -> Size:
        if isinstance(value, torch.SymBool) and any(
            map(is_found_float, value.node.expr.free_symbols)
        ):
            return truth(self.ctx, value.node.expr, value.node.shape_env)
        return to_size(value)

    def _lower(
        self, node: torch.fx.Node, args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> Value:
        target: Any = node.target
        rule = RULES.get(target)
        if not self.ctx.cfg.kernels and isinstance(target, OpOverload) and target not in NO_LOOPS:
            return self._extern(node, args, kwargs, "kernels are switched off")
        if rule is None and isinstance(target, HigherOrderOperator) and not self.ctx.cfg.strict:
            return call_higher_order(self.ctx, target, args, kwargs)
        if rule is None:
            return self._extern(node, args, kwargs, "no lowering rule")
        if target not in ANY_DTYPE:
            foreign = (
                _foreign_dtype(args)
                or _foreign_dtype(tuple(kwargs.values()))
                or _foreign_meta(node.meta.get("val"))
            )
            if foreign:
                return self._extern(node, args, kwargs, f"{foreign} elements")
        near, named = (
            self._beside(args),
            self._beside(kwargs),
        )  # others share the copies: before what may be undone
        mark = self.ctx.mark()
        try:
            value = self._settle(rule(self.ctx, *near, **named), node.meta.get("val"))
            value = self.found.in_own_memory(node, value)
            self._check_devices(mark[0])
            return value
        except OperandError:  # eager refuses it, too
            raise
        except _RULE_ERRORS as e:
            self.ctx.undo(mark)
            if not isinstance(target, OpOverload):
                raise
            said = (
                str(e)
                if isinstance(e, NoRule)
                else e.what
                if isinstance(e, PlaitError)
                else f"rule failed: {e!r}"
            )
            return self._extern(node, args, kwargs, said)

    def _beside(self, values: Any) -> Any:
        """Arguments of a rule: numbers that lie in the host's memory come to where the result
        is."""
        where = self.ctx.device()
        if facts_of(where).is_host:
            return values
        if isinstance(values, dict):
            return {k: self._beside(v) for k, v in values.items()}
        if isinstance(values, (list, tuple)):
            return type(values)(self._beside(v) for v in values)
        if (
            isinstance(values, View)
            and not values.shape
            and facts_of(self.ctx.buffers[values.buf].device).is_host
        ):
            return self._moved(values, where)
        return values

    def _moved(self, x: View, where: str) -> View:
        """A copy of a number on another device; all its readers share it."""
        found = self.moved.get((x, where))
        if found is None:
            given = self.ctx.tensor_arg(x)
            out = self.ctx.new_buffer(x.dtype, (), device=where, fixed=True)
            device = (("device", Scalar("device", where)),)
            self.ctx.ops.append(
                Extern((out,), "aten::_to_copy", (given,), device, may_keep=False, fallback=False)
            )
            found = self.moved[x, where] = self.ctx.whole(out)
            self.ctx.from_host.add(out)
        return found

    def _check_devices(self, start: int) -> None:
        """Raises NoRule where a loop recorded since `start` touches memory of two devices."""
        for op in self.ctx.ops[start:]:
            if not isinstance(op, loops.Loop):
                continue
            nodes = [op.body, *op.index_args] if isinstance(op, loops.Scatter) else [op.body]
            names = [n.attr.buf for n in loops.walk(nodes) if isinstance(n.attr, loops.Load)]
            names += (
                [op.out]
                if isinstance(op, (loops.Pointwise, loops.Scatter))
                else [o for o in op.outs if o]
            )
            touched = {self.ctx.buffers[b].device for b in names}
            if len(touched) > 1:
                raise NoRule(f"operands on {' and '.join(sorted(touched))}")

    def _extern(
        self, node: torch.fx.Node, args: tuple[Value, ...], kwargs: dict[str, Value], reason: str
    ) -> Value:
        if not isinstance(node.target, OpOverload):
            raise Unsupported(f"no lowering for {node.target}", where=_where(node))
        if reason == SHARED:  # ATen copies nothing to there
            raise Unsupported(reason, where=_where(node), hint=CLONE)
        return call_extern(self.ctx, node, args, kwargs, fallback=True, reason=reason)

    def _settle(self, value: Value, val: Any) -> Value:
        """A rule's result, checked against the fake value: same dtype and shape (spelled as the
        fake value does)."""
        if isinstance(val, torch.Tensor):
            if not isinstance(value, View):
                raise TypeError(f"the rule gave {type(value).__name__}, not a tensor")
            shape = tuple(to_size(s) for s in val.shape)
            dtype = from_torch(val.dtype)
            if value.dtype != dtype or len(value.shape) != len(shape):
                raise TypeError(
                    f"the rule gave {value.dtype}{list(value.shape)}, not {dtype}{list(shape)}"
                )
            if value.shape != shape:
                if any(
                    expr.compare("eq", a, b) == 0 for a, b in zip(value.shape, shape, strict=True)
                ):
                    raise TypeError(f"the rule gave shape {value.shape}, not {shape}")
                self.found.check_shape(value.shape, shape)
                value = value.remap(shape, lambda v: v)
            if dtype not in LOOP_DTYPES and dtype != opaque and self.ctx.strided(value) is None:
                raise NoRule(f"a view of {dtype} elements that no strides describe")
            return value
        if isinstance(val, (tuple, list)) and isinstance(value, (tuple, list)):
            if len(value) != len(val):
                raise TypeError(f"the rule gave {len(value)} results, not {len(val)}")
            return tuple(
                v if v is None else self._settle(v, m) for v, m in zip(value, val, strict=True)
            )
        return value

    # ---- outputs
    def _output(self, node: torch.fx.Node) -> tuple[TensorArg | Scalar | Size, ...]:
        found = node.args[0]
        items = found if isinstance(found, (tuple, list)) else (found,)
        owners: dict[str, int] = dict(self.input_storages)
        self.ctx.origin = ("output",)
        first = items[: self.captured.n_results]  # what a backward graph reads may lie anywhere
        own = [
            a for k, a in enumerate(first) if _is_strided(a) and k not in self.captured.input_views
        ]
        roots = {a: _root(a) for a in own}
        views = {root for a, root in roots.items() if root is not a}
        for root in roots.values():
            self._own_memory(root, owners, seen=root in views)
        results = tuple(self._result(k, a, owners) for k, a in enumerate(items))
        self.ctx.finish_mutations()
        for fence in self.last_fences:
            self._call(fence)
        return results

    def _result(self, k: int, a: Any, owners: dict[str, int]) -> TensorArg | Scalar | Size:
        """The output at position k. owners: see `_tensor_result`."""
        value = self._value(a)
        val = a.meta.get("val") if isinstance(a, torch.fx.Node) else None
        if self.ctx.cfg.kernels and isinstance(val, (torch.SymFloat, torch.SymBool)):
            return self._number(val, value)
        if isinstance(value, View):
            assert isinstance(a, torch.fx.Node)
            if k in self.captured.input_views:
                return self._input_view(a, self.captured.input_views[k])
            if a not in self.results:  # one node returned twice is one tensor
                kept = self.captured.n_results is not None and k >= self.captured.n_results
                found = None if kept else self._in_root(value, a)
                out = self._tensor_result(value, a, owners) if found is None else found
                self.results[a] = self._distinct(a, out)
                self.given.add(self.results[a])
            return self.results[a]
        if value is None:
            return Scalar("none")
        if isinstance(value, bool):
            return Scalar("bool", str(value))
        if isinstance(value, (int, Expr)):
            return value
        if isinstance(value, float):
            return Scalar("float", value.hex())
        if is_object_input(value):
            return Scalar(value.kind, value.text)
        if is_ragged(value):
            return to_size(value)  # says why it cannot be
        raise Unsupported(f"a graph output of type {type(value).__name__}")

    def _own_memory(self, root: torch.fx.Node, owners: dict[str, int], seen: bool) -> None:
        """Copies a value that is a result, or that results are views of, where a rule left it in
        memory of another tensor or in a part of memory: in eager it has its own, which the results
        that are views of it share. seen: there are such results, so the memory must be laid out as
        eager's."""
        view, like = self.env[root], root.meta["val"]
        if root.op != "call_function" or not isinstance(view, View) or not self.ctx.cfg.kernels:
            return
        storage = compat.tracing.storage_of(like)
        memory = self.ctx.memory(view.buf)
        part = not expr.known_eq(self._nbytes(memory), expr.numel(view.shape) * view.dtype.nbytes)
        if not part and not seen:
            return
        shape, strides = (tuple(map(to_size, s)) for s in (like.shape, like.stride()))
        taken = not part and owners.setdefault(memory, storage) != storage
        if _repeats(shape, strides) or not (taken or part or not self.ctx.lay_out(view, strides)):
            return
        self.env[root] = self.ctx.copy(view, strides, fixed=True)
        owners[self.env[root].buf] = storage

    def _nbytes(self, buf: str) -> Size:
        b = self.ctx.buffers[buf]
        return expr.numel(b.shape) * b.dtype.nbytes

    def _number(self, val: torch.SymFloat | torch.SymBool, value: Value) -> Number:
        """A Python float or bool that depends on sizes or on values of tensors. value: a bool as an
        integer."""
        floats = self.ctx.float_readers()
        if isinstance(val, torch.SymFloat):
            found = self.ctx.pointwise((), f64, lambda ops, i: to_scalar_node(ops, val, floats))
        else:
            found = self.ctx.pointwise((), b1, lambda ops, i: ops.cast(ops.index(value), b1))
        return Number(found.buf, (), (), 0)

    def _tensor_result(self, x: View, node: torch.fx.Node, owners: dict[str, int]) -> TensorArg:
        """x with the fake value's strides. Results share memory with inputs and with each other
        only where the fake values do: what is a copy in eager is one here. owners: the fake storage
        that each buffer given out stands for."""
        val = node.meta["val"]
        if val.layout != torch.strided:
            return TensorArg(x.buf, x.shape, self.ctx.buffers[x.buf].strides, 0)
        strides = tuple(to_size(s) for s in val.stride())
        storage = compat.tracing.storage_of(_root(node).meta["val"])
        out = self.ctx.tensor_arg(x, strides, shared=True)
        memory = self.ctx.memory(out.buf)
        if memory in self.ctx.constants or owners.get(memory, storage) != storage:
            out = self.ctx.tensor_arg(self.ctx.copy(x), strides)
        owners.setdefault(self.ctx.memory(out.buf), storage)
        return out

    def _input_view(self, node: torch.fx.Node, view: InputView) -> TensorArg:
        """A result that eager makes as a view of an input, which holds its new value by then."""
        name = self.inputs[view.input]
        assert isinstance(name, str)
        base, val = self.ctx.buffers[name], node.meta["val"]
        if view.whole:
            return TensorArg(name, base.shape, base.strides, 0)
        relative = not begins_anywhere(node)
        at: tuple[Any, ...] = (view.shape, view.strides, view.offset)
        if not self._knows(at):  # numbers found while the function was traced the first time
            at = (val.shape, val.stride(), val.storage_offset())
        shape, strides, dtype = *(tuple(map(to_size, n)) for n in at[:2]), from_torch(val.dtype)
        if not relative:
            x = self.ctx.alias(
                self.ctx.whole(name), dtype, shape, strides, to_size(at[2]), relative=False
            )
            return TensorArg(x.buf, shape, strides, 0)
        first = bytes_behind(self.placeholders[view.input].meta["val"], at[2], val)
        return self._aliased(name, dtype, shape, strides, first)

    def _knows(self, layout: tuple[Any, ...]) -> bool:
        """Whether every symbol of a shape, strides and offset has a source in this graph."""
        exprs = [to_size(n) for part in layout[:2] for n in part] + [to_size(layout[2])]
        return all(
            a.name in self.ctx.symbols
            for e in exprs
            if isinstance(e, Expr)
            for a in expr.free_symbols(e)
        )

    def _in_root(self, x: View, node: torch.fx.Node) -> TensorArg | None:
        """A result in the memory of the value at the root of the views that lead to it, which it is
        a view of in eager: rules may compute a view anew, or see memory that is laid out in another
        way. None where there is no such root, or its memory is not known to be as eager's."""
        val = node.meta["val"]
        root = _root(node)
        view, like = self.env[root], root.meta["val"]
        if root is node or not isinstance(view, View) or not self.ctx.cfg.kernels:
            return None
        if root.op == "placeholder" and begins_anywhere(node):
            return None
        if (like.is_conj(), like.is_neg()) != (val.is_conj(), val.is_neg()):
            return None
        strides = tuple(map(to_size, like.stride()))
        if root.op != "call_function" and view.buf == x.buf:
            return None
        if root.op != "placeholder" and _repeats(tuple(map(to_size, like.shape)), strides):
            return None
        memory = self.ctx.tensor_arg(view, strides)
        within = memory.offset * view.dtype.nbytes
        first = within + bytes_behind(like, val.storage_offset(), val)
        dtype = from_torch(val.dtype)
        shape, strides = tuple(map(to_size, val.shape)), tuple(map(to_size, val.stride()))
        if dtype == self.ctx.buffers[memory.buf].dtype:
            return TensorArg(memory.buf, shape, strides, first // dtype.nbytes)
        return self._aliased(memory.buf, dtype, shape, strides, first)

    def _aliased(
        self,
        buf: str,
        dtype: DType,
        shape: tuple[Size, ...],
        strides: tuple[Size, ...],
        first: Size,
    ) -> TensorArg:
        """Memory of a buffer, from its byte `first` on, as a new tensor of this element type."""
        view = self.ctx.seen_as(self.ctx.whole(buf), dtype, shape, strides, first)
        return TensorArg(view.buf, shape, strides, 0)

    def _distinct(self, node: torch.fx.Node, out: TensorArg) -> TensorArg:
        """out as a tensor of its own where another node's result, or an input, is the same memory
        seen alike: eager makes a new object for every view."""
        b = self.ctx.buffers[out.buf]
        whole = TensorArg(b.name, b.shape, b.strides, 0)
        is_input = node.op != "placeholder" and b.name in self.input_storages and out == whole
        if not is_input and out not in self.given:
            return out
        dtype = out.dtype or b.dtype
        first = out.offset * dtype.nbytes
        return self._aliased(b.name, dtype, out.shape, out.strides, first)


def _bit(condition: Size) -> Expr | None:
    """The symbol of a bool that is found, 0 or 1: tracing has it as a condition, that the symbol is
    1."""
    for a in expr.free_symbols(condition):
        if (a.lo, a.hi) == (0, 1) and [expr.substitute(condition, {a: k}) for k in (0, 1)] == [
            0,
            1,
        ]:
            return expr.symbol(a.name, 0, 1)
    return None


def _is_token(node: torch.fx.Node) -> bool:
    """Whether a placeholder only orders effects: AOTAutograd passes None for it."""
    effects = torch.ops.higher_order.with_effects
    return bool(node.users) and all(u.target is effects and u.args[0] is node for u in node.users)


def _is_strided(node: Any) -> bool:
    """Whether an output is a tensor with strides."""
    val = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(val, torch.Tensor) and val.layout == torch.strided


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """The value that a result is a view of: as far up as views share one storage."""
    root = node
    while (
        node.op == "call_function"
        and is_view(node)
        and isinstance(source := node.args[0], torch.fx.Node)
    ):
        if _is_strided(source):
            if compat.tracing.storage_of(root.meta["val"]) not in map(
                compat.tracing.storage_of, memory_of(source)
            ):
                break
            root = source
        node = source
    return root


def _repeats(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether elements of a tensor are known to share memory."""
    return any(stride == 0 and size != 1 for size, stride in zip(shape, strides, strict=True))


def _foreign_dtype(values: tuple[Value, ...] | list[Value]) -> str:
    """The name of a dtype that loops cannot hold, among tensors in values; or ''."""
    for v in values:
        if isinstance(v, View):
            if v.dtype not in LOOP_DTYPES:
                return v.dtype.name
        elif isinstance(v, complex):
            return "complex"
        elif isinstance(v, (tuple, list)) and v and (found := _foreign_dtype(v)):
            return found
    return ""


def _foreign_meta(val: Any) -> str:
    for v in val if isinstance(val, (tuple, list)) else (val,):
        if isinstance(v, torch.Tensor):
            if v.layout != torch.strided:
                return str(v.layout).removeprefix("torch.")
            if from_torch(v.dtype) not in LOOP_DTYPES:
                return str(v.dtype).removeprefix("torch.")
    return ""


def _check_symbols(program: LoopProgram) -> None:
    """Every symbol in the shape of a buffer has a source. Raises Unsupported."""
    for buf in program.buffers.values():
        for e in (*buf.shape, *buf.strides):
            for atom in () if isinstance(e, int) else expr.free_symbols(e):
                if atom.name not in program.symbols:
                    raise InexpressibleSize(
                        f"no input tells the value of the size symbol {atom.name} (in {e})",
                        hint="pass a tensor that has this size by itself, or mark it static",
                        symbols=(atom.name,),
                    )


# --------------------------------------------------------------------------- where things come from
def _where(node: torch.fx.Node) -> str:
    return last_frame(node.meta.get("stack_trace") or "")


def _origin(node: torch.fx.Node) -> str:
    where = _where(node)
    return f"{where} {node.target}" if where else str(node.target)
