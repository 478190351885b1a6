"""Builds LoopPrograms by hand and runs LoopPrograms and Plans with numpy, slowly but independently
of any kernel target.

Values are whole arrays: a loop variable is an array along its own axis, so that every node is
evaluated at all points at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from plait.ir import loops as L
from plait.ir.dtypes import DType, b1, f32, i64
from plait.ir.effects import unwritten
from plait.ir.expr import Expr, Size, contiguous_strides, evaluate
from plait.ir.loops import apply
from plait.ir.record import Recorder
from plait.kernel.null.run import dealt
from plait.schedule.plan import Kernel, Plan, Reduce
from plait.schedule.verify import verify_plan

NUMPY = {
    "b1": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i64": np.int64,
    "i32": np.int32,
    "u8": np.uint8,
    "i8": np.int8,
}

FNS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "neg": np.negative,
    "abs": np.abs, "exp": np.exp, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a),
    "tanh": np.tanh, "reciprocal": lambda a: 1 / a, "max": np.maximum, "min": np.minimum,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "where": np.where, "log": np.log, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "isnan": np.isnan, "floordiv": np.floor_divide,
}  # fmt: skip

Arrays = dict[str, np.ndarray]


class Builder:
    """Makes a LoopProgram step by step."""

    def __init__(self) -> None:
        self.buffers: dict[str, L.Buffer] = {}
        self.inputs: list[str | tuple[str, str] | None] = []
        self.ops: list[L.Op] = []
        self.outputs: list[L.TensorArg | L.Scalar | Size] = []
        self.symbols: dict[str, tuple[str, str, int] | Size | None] = {}
        self.hints: dict[str, int] = {}
        self.donated: list[str] = []

    def buffer(
        self,
        shape: Sequence[Size],
        dtype: DType = f32,
        strides: Sequence[Size] | None = None,
        fixed: bool = False,
    ) -> str:
        name = f"buf{len(self.buffers)}"
        shape = tuple(shape)
        self.buffers[name] = L.Buffer(
            name, dtype, shape, tuple(strides or contiguous_strides(shape)), fixed=fixed
        )
        return name

    def input(self, *shape: Size, dtype: DType = f32, strides: Sequence[Size] | None = None) -> str:
        name = self.buffer(shape, dtype, strides, fixed=True)
        self.inputs.append(name)
        return name

    def size(self, name: str, lo: int = 2, hint: int | None = None) -> Expr:
        from plait.ir.expr import symbol

        self.symbols[name] = None
        if hint is not None:
            self.hints[name] = hint
        self.inputs.append(("sym", name))
        return symbol(name, lo=lo)

    def pointwise(
        self,
        shape: Sequence[Size],
        fn: Callable[..., L.Node],
        out: str | None = None,
        index: Callable[..., tuple[Size, ...]] | None = None,
    ) -> str:
        vars_ = L.loop_vars("i", tuple(shape))
        body = fn(Record(self), *vars_)
        out = out or self.buffer(shape, body.dtype)
        self.ops.append(
            L.Pointwise(
                out, vars_, body, index(*vars_) if index else None, origin=("aten.pw.default",)
            )
        )
        return out

    def map(self, op: str, *xs: str) -> str:
        """An elementwise op on buffers of one shape."""
        return self.pointwise(
            self.buffers[xs[0]].shape, lambda o, *i: apply(op, *(o.load(x, *i) for x in xs))
        )

    def reduce(
        self,
        shape: Sequence[Size],
        rshape: Sequence[Size],
        kind: str,
        fn: Callable[..., L.Node],
        outs: Sequence[bool] = (True,),
    ) -> str:
        """fn(ops, *vars, *rvars). The name of the only or of the first wanted result; see results
        for all."""
        vars_, rvars = L.loop_vars("i", tuple(shape)), L.loop_vars("r", tuple(rshape))
        body = fn(Record(self), *vars_, *rvars)
        dtype = i64 if kind.startswith("arg") else body.dtype
        names = tuple(self.buffer(shape, dtype) if w else None for w in outs)
        self.ops.append(
            L.Reduction(names, vars_, rvars, kind, body, origin=(f"aten.{kind}.default",))
        )
        return next(n for n in names if n)

    def results(self) -> tuple[str | None, ...]:
        """All results of the last op."""
        return self.ops[-1].outs  # type: ignore[union-attr]

    def extern(
        self, shape: Sequence[Size], *args: str, op: str = "test::opaque", **options: object
    ) -> str:
        out = self.buffer(shape, fixed=True)
        self.ops.append(L.Extern((out,), op, tuple(self.whole(a) for a in args), **options))  # type: ignore[arg-type]
        return out

    def whole(self, name: str) -> L.TensorArg:
        b = self.buffers[name]
        self.buffers[name] = L.Buffer(b.name, b.dtype, b.shape, b.strides, fixed=True)
        return L.TensorArg(name, b.shape, b.strides, 0)

    def output(self, *names: str) -> None:
        self.outputs += (self.whole(n) for n in names)

    def program(self) -> L.LoopProgram:
        return L.LoopProgram(
            tuple(self.inputs),
            dict(self.buffers),
            {},
            tuple(self.ops),
            tuple(self.outputs),
            dict(self.symbols),
            tuple(self.donated),
            dict(self.hints),
        )


class Record(Recorder):
    """A Recorder that knows the dtypes of the builder's buffers and takes indices as arguments."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.builder = builder

    def load(self, buf: str, *index: Size) -> L.Node:  # type: ignore[override]
        return super().load(buf, index, self.builder.buffers[buf].dtype)

    def __getattr__(self, name: str) -> Callable[..., L.Node]:
        return lambda *args: apply(name, *args)

    def f(self, value: float) -> L.Node:
        return self.const(value, f32)


# --------------------------------------------------------------------------------------- evaluation
def values(e: Size, env: Mapping[str, object]) -> np.ndarray:
    """sizes.evaluate for arrays."""
    if isinstance(e, int):
        return np.asarray(e)
    fns = {
        "div": np.floor_divide, "mod": np.mod, "min": np.minimum, "max": np.maximum,
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    }  # fmt: skip
    out = np.asarray(e.const)
    for mono, c in e.terms:
        term = np.asarray(c)
        for a in mono:
            term = term * (
                env[a.name] if a.kind == "sym" else fns[a.kind](values(a.a, env), values(a.b, env))
            )
        out = out + term
    return out


class Space:
    """A grid of points: every variable is an array along its own axis."""

    def __init__(self, vars_: Sequence[Expr], syms: Mapping[str, int]) -> None:
        self.shape = tuple(evaluate(v.symbol.extent, syms) for v in vars_)
        self.env: dict[str, object] = dict(syms)
        for k, v in enumerate(vars_):
            axis = [1] * len(self.shape)
            axis[k] = self.shape[k]
            self.env[v.symbol.name] = np.arange(self.shape[k]).reshape(axis)

    def nodes(self, arrays: Arrays, accs: Mapping[str, np.ndarray], root: L.Node) -> np.ndarray:
        done: dict[L.Node, np.ndarray] = {}
        for n in L.walk((root,)):
            done[n] = self._node(arrays, accs, n, [done[a] for a in n.args])
        return done[root]

    def index(self, index: Sequence[Size], args: Sequence[np.ndarray]) -> list[np.ndarray]:
        env = {**self.env, **{f"${k}": a for k, a in enumerate(args)}}
        return [values(e, env) for e in index]

    def _node(
        self, arrays: Arrays, accs: Mapping[str, np.ndarray], n: L.Node, args: list[np.ndarray]
    ) -> np.ndarray:
        dtype = NUMPY[n.dtype.name]
        if n.op == "const":
            return np.asarray(n.attr, dtype)
        if n.op == "cast":
            return args[0].astype(dtype)
        if n.op == "acc":
            return accs[n.attr]
        if n.op == "index":
            return self.index((n.attr,), args)[0].astype(dtype)
        if n.op in ("bounded", "nonzero"):
            return args[0]
        if n.op == "load":
            return self._load(arrays[n.attr.buf], n.attr, args)
        with np.errstate(all="ignore"):
            return np.asarray(FNS[n.op](*args), dtype)

    def _load(self, x: np.ndarray, load: L.Load, args: list[np.ndarray]) -> np.ndarray:
        at = self.index(load.index, args)
        if not load.masked:
            for e, n in zip(at, x.shape, strict=True):
                assert e.size == 0 or (e.min() >= 0 and e.max() < n), (
                    f"{load}: out of bounds of {x.shape}"
                )
            return x[tuple(np.broadcast_arrays(*at))] if at else x
        mask = args[-1]
        if x.size == 0:
            return np.zeros(np.broadcast_shapes(mask.shape, *(e.shape for e in at)), x.dtype)
        for e, n in zip(at, x.shape, strict=True):
            bad = np.logical_and(mask, (e < 0) | (e >= n))
            assert not bad.any(), f"{load}: out of bounds of {x.shape}"
        clipped = [np.clip(e, 0, n - 1) for e, n in zip(at, x.shape, strict=True)]
        value = x[tuple(np.broadcast_arrays(*clipped))] if at else x
        return np.where(mask, value, np.zeros((), x.dtype))


def combine(kind: str, x: np.ndarray, n_outer: int) -> tuple[np.ndarray, ...]:
    """Results of a reduction of x over all axes after the first n_outer (row-major)."""
    flat = x.reshape(*x.shape[:n_outer], -1)
    axis = -1
    if kind == "welford":
        count = np.full(flat.shape[:-1], flat.shape[-1], flat.dtype)
        mean = flat.mean(axis)
        return mean, ((flat - mean[..., None]) ** 2).sum(axis), count
    fns = {
        "sum": np.add.reduce, "prod": np.multiply.reduce, "max": np.maximum.reduce,
        "min": np.minimum.reduce, "any": np.logical_or.reduce, "all": np.logical_and.reduce,
    }  # fmt: skip
    if kind in fns:
        return (fns[kind](flat, axis=axis).astype(x.dtype),)
    return ((np.argmax if kind == "argmax" else np.argmin)(flat, axis=axis).astype(np.int64),)


def store(
    space: Space,
    out: np.ndarray,
    index: Sequence[Size],
    args: list[np.ndarray],
    value: np.ndarray,
    mode: str,
    mask: np.ndarray | None,
) -> None:
    at = (
        np.broadcast_arrays(*(np.broadcast_to(e, space.shape) for e in space.index(index, args)))
        if index
        else []
    )
    value = np.broadcast_to(value, space.shape)
    keep = np.ones(space.shape, bool) if mask is None else np.broadcast_to(mask, space.shape)
    where = tuple(e[keep] for e in at)
    fns = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "sum": np.add}
    if mode == "sum":
        out[...] = 0
    if mode == "store":
        if not index and keep.any():
            out[()] = value[keep].reshape(-1)[-1]
        elif index:
            out[where] = value[keep]
    else:
        fns[mode].at(out, where, value[keep])


def run_kernel(k: Kernel, arrays: Arrays, syms: Mapping[str, int]) -> None:
    """Runs the statements one after the other. Reads its own arguments only."""
    for part in k.parts[::-1]:  # any order will do
        run_kernel(part, {b.name: arrays[b.name] for b in k.args}, syms)
    assert len({a.name for a in k.args}) == len(k.args)
    mine = {a.name: arrays[a.name] for a in k.args}
    known = {s.symbol.name: syms[s.symbol.name] for s in k.sizes}
    outer, full = Space(k.vars, known), Space(k.vars + k.rvars, known)
    n, pad = len(k.vars), (1,) * len(k.rvars)
    inner = {v.symbol.name for v in k.rvars}
    accs: dict[str, np.ndarray] = {}
    for s in k.stmts:
        if isinstance(s, Reduce):
            value = np.broadcast_to(full.nodes(mine, accs, s.value), full.shape)
            if s.running:
                fns = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
                accs[s.name] = fns[s.kind].accumulate(value, axis=-1).astype(value.dtype)
                continue
            results = [r.reshape(*outer.shape, *pad) for r in combine(s.kind, value, n)]
            parts = (".mean", ".m2", ".count") if s.kind == "welford" else ("",)
            accs.update({s.name + part: r for part, r in zip(parts, results, strict=True)})
            continue
        assert s.buf in k.outs
        space, seen = (
            (full, accs)
            if s.full
            else (outer, {a: v.reshape(outer.shape) for a, v in accs.items() if v.shape[n:] == pad})
        )
        if not s.full:
            free = {a.name for e in s.index for a in _free(e)}
            assert not free & inner, f"outer statement with inner variables: {s}"
        args = [space.nodes(mine, seen, a) for a in s.index_args]
        mask = None if s.mask is None else space.nodes(mine, seen, s.mask)
        store(
            space,
            mine[s.buf],
            dealt(k, s.index),
            args,
            space.nodes(mine, seen, s.value),
            s.mode,
            mask,
        )


def _free(e: Size) -> frozenset:
    from plait.ir.expr import free_symbols

    return free_symbols(e)


def run_loop(
    op: L.Loop, arrays: Arrays, buffers: Mapping[str, L.Buffer], syms: Mapping[str, int]
) -> None:
    """One loop of an unfused program."""
    if isinstance(op, L.Reduction):
        space = Space(op.vars + op.rvars, syms)
        value = np.broadcast_to(space.nodes(arrays, {}, op.body), space.shape)
        for name, r in zip(op.outs, combine(op.kind, value, len(op.vars)), strict=True):
            if name is not None:
                arrays[name][...] = r
    elif isinstance(op, L.Scan):
        space = Space(op.vars, syms)
        value = np.broadcast_to(space.nodes(arrays, {}, op.body), space.shape)
        fns = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
        running = fns[op.kind].accumulate(value, axis=op.axis)
        if op.outs[0] is not None:
            arrays[op.outs[0]][...] = running
        if len(op.outs) == 2 and op.outs[1] is not None:
            at = np.arange(value.shape[op.axis]).reshape(
                [-1 if k == op.axis else 1 for k in range(value.ndim)]
            )
            arrays[op.outs[1]][...] = np.maximum.accumulate(
                np.where(value == running, at, -1), axis=op.axis
            )
    else:
        space = Space(op.vars, syms)
        index_args = getattr(op, "index_args", ())
        args = [space.nodes(arrays, {}, a) for a in index_args]
        mask = getattr(op, "mask", None)
        mask_value = None if mask is None else space.nodes(arrays, {}, mask)
        if isinstance(op, L.Scatter) and op.base != op.out:
            arrays[op.out][...] = arrays[op.base]
        mode = op.mode if isinstance(op, L.Scatter) else "store"
        index = op.vars if op.index is None else op.index
        store(
            space, arrays[op.out], index, args, space.nodes(arrays, {}, op.body), mode, mask_value
        )


def run_other(
    step: object, arrays: Arrays, syms: dict[str, int], seen: Mapping[str, L.Buffer]
) -> None:
    """Steps that are no loops. An unknown extern gives something that depends on all of its
    operands and their order."""
    if isinstance(step, L.Extern):
        total = np.float32(len(step.op))
        for k, a in enumerate(step.args):
            if isinstance(a, L.TensorArg):
                total = total + (k + 1) * np.float32(arrays[a.buf].astype(np.float64).sum() / 64)
        for name in step.outs:
            if name is not None:
                x = arrays[name]
                x[...] = (np.sin(np.arange(x.size, dtype=np.float64) + total)).reshape(x.shape)
        for name in step.mutates:
            arrays[name][...] += 1
    elif isinstance(step, L.Mutate):
        arrays[step.target][...] = arrays[step.source]
    elif isinstance(step, L.Item):
        syms[step.name] = int(arrays[step.buf].reshape(-1)[0])
    elif isinstance(step, L.Assert):
        assert evaluate(step.expr, syms), step.message
    else:
        raise TypeError(step)


def fresh(b: L.Buffer, syms: Mapping[str, int]) -> np.ndarray:
    """Memory full of a value that shows when it is read."""
    x = np.empty([evaluate(s, syms) for s in b.shape], NUMPY[b.dtype.name])
    x[...] = np.nan if b.dtype.is_float else 77 % 2 if b.dtype == b1 else 77
    return x


def random_inputs(program: L.LoopProgram, syms: Mapping[str, int], seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    out: Arrays = {}
    for name in program.inputs:
        if isinstance(name, str):
            b = program.buffers[name]
            shape = [evaluate(s, syms) for s in b.shape]
            dtype = NUMPY[b.dtype.name]
            out[name] = (
                rng.integers(0, 2, shape).astype(dtype)
                if not b.dtype.is_float
                else rng.standard_normal(shape).astype(dtype)
            )
    return out


def run_program(
    program: L.LoopProgram, inputs: Arrays, syms: Mapping[str, int] | None = None
) -> Arrays:
    """Buffers after running the ops one after the other, unfused."""
    known = dict(syms or {})
    arrays = {n: x.copy() for n, x in inputs.items()}
    arrays |= {n: fresh(program.buffers[n], known) for n in unwritten(program)}
    for op in program.ops:
        for name in _defined(op):
            if name not in arrays:
                arrays[name] = fresh(program.buffers[name], known)
        if isinstance(op, (L.Pointwise, L.Reduction, L.Scan, L.Scatter)):
            run_loop(op, arrays, program.buffers, known)
        else:
            run_other(op, arrays, known, program.buffers)
    return arrays


def _defined(op: object) -> tuple[str, ...]:
    if isinstance(op, Kernel):
        return op.outs
    if isinstance(op, (L.Pointwise, L.Scatter)):
        return (op.out,)
    outs = getattr(op, "outs", ())
    return tuple(o for o in outs if o is not None)


class Memory:
    """The memory that a plan asks for: an arena, takeovers, and arrays of their own."""

    def __init__(self, plan: Plan, inputs: Arrays, syms: dict[str, int]) -> None:
        self.plan, self.syms = plan, syms
        self.arena: np.ndarray | None = None
        self.arrays: Arrays = {}
        for name, x in inputs.items():
            mine = self.array(plan.program.buffers[name], None, 0)
            mine[...] = x
            self.arrays[name] = mine

    def array(self, b: L.Buffer, base: np.ndarray | None, at: int) -> np.ndarray:
        dtype = np.dtype(NUMPY[b.dtype.name])
        shape = [evaluate(s, self.syms) for s in b.shape]
        strides = [evaluate(s, self.syms) * dtype.itemsize for s in b.strides]
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
        if base is None:
            base = np.zeros(max(reach, 0), np.uint8)
            x = np.ndarray(shape, dtype, base.data, 0, strides)
            x[...] = np.nan if b.dtype.is_float else 1
            return x
        assert 0 in shape or at + reach <= base.nbytes, f"{b.name} ends beyond the arena"
        return np.ndarray(shape, dtype, base.data, 0 if 0 in shape else at, strides)

    def make(self, name: str) -> None:
        memory, b = self.plan.memory, self.plan.buffers[name]
        old = memory.in_place.get(name)
        if old is not None:
            base = self.arrays[old]
            like = self.plan.buffers[old]
            assert (
                np.dtype(NUMPY[like.dtype.name]).itemsize == np.dtype(NUMPY[b.dtype.name]).itemsize
            )
            shape, strides = (
                [evaluate(s, self.syms) for s in b.shape],
                [evaluate(s, self.syms) * base.itemsize for s in b.strides],
            )
            assert base.size == np.prod(shape, dtype=int), (
                f"{name} takes over {old} of another size"
            )
            self.arrays[name] = np.lib.stride_tricks.as_strided(
                base.view(NUMPY[b.dtype.name]), shape, strides
            )
        elif name in memory.offsets:
            if self.arena is None:
                self.arena = np.zeros(evaluate(memory.arena_nbytes, self.syms), np.uint8)
            self.arrays[name] = self.array(b, self.arena, evaluate(memory.offsets[name], self.syms))
        else:
            self.arrays[name] = self.array(b, None, 0)


def run_plan(plan: Plan, inputs: Arrays, syms: Mapping[str, int] | None = None) -> Arrays:
    """Buffers after running the plan. What was freed is gone, and memory that the plan shares is
    shared."""
    known = dict(syms or {})
    memory = Memory(plan, inputs, known)
    arrays = memory.arrays
    for name in unwritten(plan.program):
        if name in plan.buffers:
            memory.make(name)
    for step, dying in zip(plan.steps, plan.frees, strict=True):
        for name in _defined(step):
            if name not in arrays:
                memory.make(name)
        if isinstance(step, Kernel):
            run_kernel(step, arrays, known)
        elif not (
            isinstance(step, L.Mutate) and plan.memory.in_place.get(step.source) == step.target
        ):
            run_other(step, arrays, known, plan.buffers)
        for name in dying:
            del arrays[name]
    return arrays


def check(
    plan: Plan,
    program: L.LoopProgram,
    syms: Mapping[str, int] | None = None,
    seed: int = 0,
    note: str = "",
) -> None:
    """The plan is legal and computes what the program says: outputs and mutated inputs agree."""
    verify_plan(plan)
    inputs = random_inputs(program, syms or {}, seed)
    want, got = run_program(program, inputs, syms), run_plan(plan, inputs, syms)
    pairs = zip(
        program.outputs, plan.program.outputs, strict=True
    )  # a result may have got its base's name
    names = [
        (a.buf, b.buf)
        for a, b in pairs
        if isinstance(a, L.TensorArg) and isinstance(b, L.TensorArg)
    ]
    names += [(n, n) for n in program.inputs if isinstance(n, str) and n not in program.donated]
    for name, now in names:
        np.testing.assert_allclose(
            got[now], want[name], rtol=2e-4, atol=2e-5, err_msg=f"{name} {note}"
        )


def launches(plan: Plan) -> list[Kernel]:
    """The kernels, of one nest or of several."""
    return [s for s in plan.steps if isinstance(s, Kernel)]


def kernels(plan: Plan) -> list[Kernel]:
    """The loop nests."""
    return [n for s in launches(plan) for n in s.nests]


def points(shape: Sequence[int]) -> itertools.product:
    return itertools.product(*(range(n) for n in shape))
