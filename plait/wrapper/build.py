"""A Plan becomes a program of typed instructions.

In: `schedule.plan.Plan` (kernels and calls in order, memory decided). Out: a `WrapperProgram` that
names every tensor and symbol once, with the memory and the views of extern operands spelled out.
Decides nothing that costs time: fusion, order and memory are the scheduler's. Symbols are defined
as soon as what they come from exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from plait.config import Config
from plait.devices import facts_of
from plait.errors import InternalError
from plait.ir.calls import DeviceKernel, Extern, ExternArg, ListArg, Number, Scalar, TensorArg
from plait.ir.dtypes import DType, opaque
from plait.ir.effects import extern_reads, tensor_args, unwritten
from plait.ir.expr import Expr, Size, contiguous_strides, free_symbols
from plait.ir.loops import Alias, Assert, Buffer, Item, Mutate
from plait.schedule.deps import memory_roots
from plait.schedule.plan import Kernel, Plan, Step, user_launch
from plait.wrapper import instructions as ins
from plait.wrapper.walk import symbols

ARENA = "arena"

_FLOPS_A_NS = 100  # of a product on one core, about
_GPU_ALIGNMENT = 16  # bytes, for which kernels are compiled; arguments with less are copied


def build(
    plan: Plan,
    name: str,
    bumped_inputs: tuple[int, ...] = (),
    cfg: Config | None = None,
    guarded: bool = True,
    nested: bool = False,
) -> ins.WrapperProgram:
    """The program of a plan. Nothing is freed yet: `passes/place_frees.py` does it.

    bumped_inputs: positions of mutated inputs whose autograd version the program bumps (for others,
    the caller does).
    cfg: says which checks it makes beyond the necessary ones; None: none. guarded: whether others
    look at the strides of inputs before a call. nested: it is a subprogram: what it is given comes
    from operators, so it checks all of that, and copies what lies otherwise than it was traced
    with. Raises InternalError if the plan contradicts itself."""
    programs = [build(p, f"{name}.{k}", cfg=cfg, nested=True) for k, p in enumerate(plan.programs)]
    d = _Draft(plan, frozenset(plan.program.inputs[k] for k in bumped_inputs), cfg or Config())
    for k, entry in enumerate(plan.program.inputs):
        _add_input(d, k, entry)
    d.define_symbols()
    for i in d.inputs:
        if isinstance(i, ins.TensorInput):
            unknown = d.cfg.size_asserts or not (guarded or _is_known(i))
            if unknown or (nested and i.dtype != opaque):
                _check_layout(d, i.name, copies=nested)
            _check_alignment(d, i.name)
    _define_tables(d)
    for empty in unwritten(plan.program):
        if empty in plan.buffers:
            d.make(plan.buffers[empty])
    for step in plan.steps:
        _add_step(d, step)
        d.define_symbols()
        _check_results(d, step)  # sizes that only the results tell are symbols by now
    _add_return(d)
    called = [s.callable_index + 1 for s in plan.steps if isinstance(s, Extern)]
    known = [k + 1 for k in plan.program.constants.values()]
    origins = [(k.name, "; ".join(s.origin)) for k, s in _launched(plan) if s.origin]
    return ins.WrapperProgram(
        name=name,
        inputs=tuple(d.inputs),
        body=_without_unread(d.body),
        n_constants=max([0, *known, *(p.n_constants for p in programs)]),
        n_callables=max([0, *called, *(p.n_callables for p in programs)]),
        origins=tuple(origins),
        programs=tuple(programs),
    )


def _without_unread(body: Sequence[ins.Instr]) -> tuple[ins.Instr, ...]:
    """A body without the symbols that nobody reads and that need no more than other symbols: a
    function of sizes may have no value where eager never asks for one."""
    read: set[str] = set()
    kept: list[ins.Instr] = []
    for i in reversed(body):
        if not isinstance(i, ins.Symbol) or i.name in read or not isinstance(i.value, (int, Expr)):
            read |= symbols(i)
            kept.append(i)
    return tuple(reversed(kept))


def _launched(plan: Plan) -> list[tuple[Kernel | DeviceKernel, Kernel | Extern]]:
    """Every kernel, and the step that launches it."""
    found: list[tuple[Kernel | DeviceKernel, Kernel | Extern]] = []
    for s in plan.steps:
        if isinstance(s, Kernel):
            found.append((s, s))
        elif isinstance(s, Extern) and s.kernel is not None:
            found.append((s.kernel, s))
    return found


def _definition(plan: Plan, step: Kernel | Extern) -> ins.DefineKernel:
    if isinstance(step, Extern):
        launch = user_launch(plan, step, ())
        n_args, n_sizes = len(launch.buffers), len(launch.sizes)
        return ins.DefineKernel(launch.kernel.name, n_args, n_sizes, (), launch.device)
    # On a GPU a check that fails ends the process's use of the device, as eager's does: nothing is
    # returned.
    checks = step.checks if facts_of(step.device).is_host else ()
    n_sizes = len(step.sizes) + len(step.lengths)
    return ins.DefineKernel(step.name, len(step.args), n_sizes, checks, step.device)


def _read_as_memory(plan: Plan) -> set[str]:
    """The buffers whose element type something relies on: kernels, views, and what is read or
    copied by itself."""
    found: set[str] = set()
    args: list[ExternArg | Scalar] = list(plan.program.outputs)
    for step in plan.steps:
        match step:
            case Kernel():
                found.update(b.name for b in step.args)
            case Extern():
                args += step.operands
                if step.kernel is not None:
                    found.update(extern_reads(step))
            case Alias():
                found.add(step.base)
            case Item():
                found.add(step.buf)
            case Mutate():
                found.update((step.target, step.source))
            case Assert():
                pass
            case _:
                assert_never(step)
    for a in tensor_args(args):
        b = plan.buffers.get(a.buf) or plan.program.buffers[a.buf]
        if isinstance(a, Number) or (a.dtype or b.dtype, a.shape, a.strides, a.offset) != (
            b.dtype,
            b.shape,
            b.strides,
            0,
        ):
            found.add(a.buf)
    return found


def _is_known(i: ins.TensorInput) -> bool:
    """Whether callers compare all strides with numbers, or ask for a row-major tensor."""
    return all(isinstance(step, int) for step in i.strides) or i.strides == contiguous_strides(
        i.shape
    )


class _Draft:
    """The instructions so far and what they defined.

    how: name -> 'input', 'constant', 'place', 'alloc', 'result', 'view' or 'symbol'."""

    def __init__(self, plan: Plan, bumped: frozenset[object], cfg: Config) -> None:
        self.plan = plan
        self.cfg = cfg
        self.bumped = bumped
        self.inputs: list[ins.Input] = []
        self.body: list[ins.Instr] = []
        self.how: dict[str, str] = {}
        self.offsets: dict[str, Size] = {}  # of places, in the arena
        self.pending = dict(plan.program.symbols)
        self.views: dict[TensorArg, str] = {}
        self.typed = _read_as_memory(plan)

    def define_symbols(self) -> None:
        """Defines every symbol whose source exists by now, in the order of the program's table as
        far as that goes."""
        while ready := [name for name, source in self.pending.items() if self.exists(source)]:
            for name in ready:
                source = self.pending[name]
                assert source is not None, f"{name} has no source"
                self.define_symbol(
                    name, ins.SizeOf(*source) if isinstance(source, tuple) else source
                )

    def exists(self, source: tuple[str, str, int] | Size | None) -> bool:
        if source is None:
            return False  # an Item or an extern call brings it
        if isinstance(source, tuple):
            return source[0] in self.how
        return all(a.name in self.how for a in free_symbols(source))

    def define_symbol(self, name: str, value: ins.SizeOf | ins.ItemOf | Size) -> None:
        self.body.append(ins.Symbol(name, value))
        self.bring_symbol(name)

    def bring_symbol(self, name: str) -> None:
        self.pending.pop(name, None)
        self.how[name] = "symbol"

    # ---- memory
    def make(self, b: Buffer) -> None:
        """Defines a buffer that a kernel or an `out=` call is about to fill, where the memory plan
        wants it."""
        memory = self.plan.memory
        old = memory.in_place.get(b.name)
        if old is not None:
            self.take_over(b, old)
        elif b.name in memory.offsets:
            self.place(b, memory.offsets[b.name])
        else:
            self.body.append(ins.Alloc(b.name, b.dtype, b.shape, b.strides, b.device))
            self.how[b.name] = "alloc"

    def take_over(self, b: Buffer, old: str) -> None:
        """b on the memory of `old`, which the next instruction reads for the last time."""
        origin = self.how.get(old)
        if origin == "alloc":
            self.body.append(ins.Reuse(b.name, old, b.dtype, b.shape, b.strides))
            self.how[b.name] = "alloc"
        elif origin == "place":
            self.place(b, self.offsets[old])
        elif origin is None:
            raise InternalError(f"{b.name} takes over {old}, which does not exist yet")
        else:  # memory that is not ours to hand on by itself: an input, an extern's result
            self.view(b, old, 0, True)

    def place(self, b: Buffer, offset: Size) -> None:
        self.offsets[b.name] = offset
        self.body.append(ins.Place(b.name, ARENA, offset, b.dtype, b.shape, b.strides))
        self.how[b.name] = "place"

    def view(self, b: Buffer, base: str, offset: Size, relative: bool) -> None:
        self.body.append(ins.View(b.name, base, b.dtype, b.shape, b.strides, offset, relative))
        self.how[b.name] = "view"

    def operand(self, a: ExternArg) -> ins.Operand:
        match a:
            case TensorArg():
                return ins.Ref(self.tensor(a, exact=False))
            case Scalar("object", number):
                given = self.inputs[int(number)]
                assert isinstance(given, ins.OpaqueInput), f"{given} is no object"
                return ins.Ref(given.name)
            case Scalar(kind, text):
                return ins.Literal(kind, text)
            case ListArg(items):
                return ins.ListOf(tuple(self.operand(item) for item in items))
            case int() | Expr():
                return a
            case _:
                assert_never(a)

    def tensor(self, a: TensorArg, exact: bool) -> str:
        """The name of a strided operand: the buffer itself, or a View that all equal operands
        share."""
        b = self.buffer(a.buf)
        dtype: DType = a.dtype or b.dtype
        if dtype == b.dtype and a.offset == 0 and a.shape == b.shape:
            # Nothing reads the stride of a dimension of size 1, but callers may compare an
            # output's.
            dims = zip(a.shape, a.strides, b.strides, strict=True)
            if a.strides == b.strides or all(x == y or (s == 1 and not exact) for s, x, y in dims):
                return a.buf
        found = self.views.get(a)
        if found is None:
            found = self.views[a] = self.fresh("view", numbered=True)
            self.body.append(ins.View(found, a.buf, dtype, a.shape, a.strides, a.offset))
            self.how[found] = "view"
        return found

    def buffer(self, name: str) -> Buffer:
        found = self.plan.buffers.get(name) or self.plan.program.buffers.get(name)
        if found is None:
            raise InternalError(f"the plan names buffer {name} but does not describe it")
        return found

    def fresh(self, stem: str, numbered: bool = False) -> str:
        taken = (self.how, self.plan.program.buffers, self.pending)
        k = len(self.views)
        name = f"{stem}{k}" if numbered else stem
        while any(name in t for t in taken):
            k += 1
            name = f"{stem}{k}"
        return name


def _add_input(d: _Draft, k: int, entry: str | tuple[str, str] | None) -> None:
    if entry is None:
        d.inputs.append(ins.OpaqueInput(d.fresh(f"opaque{k}")))
    elif isinstance(entry, tuple):
        d.inputs.append(ins.SymbolInput(entry[1]))
        d.pending.pop(entry[1], None)
        d.how[entry[1]] = "symbol"
    else:
        b = d.plan.program.buffers[entry]
        d.inputs.append(ins.TensorInput(b.name, b.dtype, b.shape, b.strides, b.device))
        d.how[entry] = "input"


def _define_tables(d: _Draft) -> None:
    for name, k in d.plan.program.constants.items():
        d.body.append(ins.Constant(name, k))
        d.how[name] = "constant"
    # Launches of equal kernels share one definition.
    defines = dict.fromkeys(_definition(d.plan, s) for _, s in _launched(d.plan))
    d.body.extend(defines)
    memory = d.plan.memory
    if memory.offsets:
        if not all(a.name in d.how for a in free_symbols(memory.arena_nbytes)):
            raise InternalError(
                f"the arena's size {memory.arena_nbytes} is not known when the program starts"
            )
        devices = {d.buffer(n).device for n in memory.offsets}
        if len(devices) > 1:
            raise InternalError(f"an arena on {' and '.join(sorted(devices))}")
        d.body.append(ins.Arena(ARENA, memory.arena_nbytes, *devices))


def _add_step(d: _Draft, step: Step) -> None:
    match step:
        case Kernel():
            if step.form is None or step.form.at == 0:
                _note(d, step.origin)
            _launch(d, step)
        case Extern():
            _note(d, step.origin)
            _call(d, step) if step.kernel is None else _launch_users(d, step)
        case Alias(out, base, offset, relative):
            d.view(d.buffer(out), base, offset, relative)
        case Item(name, buf):
            d.define_symbol(name, ins.ItemOf(buf))
        case Assert(expr, message, values, error):
            d.body.append(ins.AssertScalar(expr, message, values, error))
        case Mutate(target, source):
            _mutate(d, target, source)
        case _:
            assert_never(step)


def _note(d: _Draft, origin: tuple[str, ...]) -> None:
    if origin:
        d.body.append(ins.Note("; ".join(origin)))


def _launch(d: _Draft, k: Kernel) -> None:
    for out in k.outs:
        if out not in d.how:
            d.make(d.buffer(out))
    when: Size = 1
    if k.form is not None:
        symbol = str(k.form.symbol)
        if symbol not in d.how:
            d.define_symbol(symbol, k.form.pick)
        when = k.form.runs
    d.body.append(
        ins.Launch(
            kernel=k.name,
            args=tuple(b.name for b in k.args),
            sizes=(*k.sizes, *k.lengths),
            outs=k.outs,
            work_ns=k.work_ns,
            parallel=not k.sequential or bool(k.apart),
            grid=when * k.grid,
            when=when,
        )
    )


def _launch_users(d: _Draft, e: Extern) -> None:
    for out in e.made:
        d.make(d.buffer(out))
    launch = user_launch(d.plan, e, ())
    args = tuple(d.tensor(a, exact=False) for a in launch.buffers)
    outs = [n for n, a in zip(args, launch.buffers, strict=True) if a.buf in (*e.mutates, *e.made)]
    (variant,) = launch.kernel.variants
    d.body.append(
        ins.Launch(
            launch.kernel.name,
            args,
            launch.sizes,
            tuple(dict.fromkeys(outs)),
            e.flops // _FLOPS_A_NS if facts_of(launch.device).is_host else 0,
            grid=variant.grid,
        )
    )


def _call(d: _Draft, e: Extern) -> None:
    args = tuple(d.operand(a) for a in e.args)
    kwargs = tuple((k, d.operand(a)) for k, a in e.kwargs)
    into = _call_into(d, e)
    if into:
        given = tuple((k, ins.Ref(n)) for k, n in zip(e.out_names, into, strict=True))
        d.body.append(ins.CallExtern(e.out_op, args, kwargs + given, (), into, may_keep=e.may_keep))
        return
    outs = list(e.outs)
    for k, symbol in e.symbols:
        outs.extend([None] * (k + 1 - len(outs)))
        outs[k] = symbol
        d.bring_symbol(symbol)
    for name in e.outs:
        if name is not None:
            d.how[name] = "result"
    if e.control is not None:
        c = e.control
        call = ins.CallPrograms(
            c.kind, c.programs, c.carried, c.scanned, e.op, args, tuple(outs)
        )  # fmt: skip
        d.body.append(call)
    elif e.callable_index >= 0:
        d.body.append(ins.CallPython(e.callable_index, e.op, args, kwargs, tuple(outs)))
    else:
        how = e.may_keep, e.as_eager, e.fence
        d.body.append(ins.CallExtern(e.op, args, kwargs, tuple(outs), (), *how))


def _check_results(d: _Draft, step: Step) -> None:
    """What operators make is what tracing said, before anything reads it; of a subprogram that is
    called as it is, what it cannot promise. One that shares memory with others is never copied;
    results of control flow are nobody else's."""
    if isinstance(step, Extern):
        promised = _promised(d, step)
        for name in step.outs:
            if name is not None and d.how.get(name) == "result" and name not in promised:
                origin = "; ".join(step.origin) or step.op
                mine = step.control is not None or not (step.aliases or step.starts)
                _check_layout(d, name, origin, copies=mine)
                _check_alignment(d, name)


def _promised(d: _Draft, step: Extern) -> set[str]:
    """The results that a subprogram returns with these very sizes and strides, all numbers: it
    looks after them itself."""
    if step.control is None or step.control.kind != "call":
        return set()
    (program,) = (d.plan.programs[k].program for k in step.control.programs)
    memory = memory_roots(program.ops)  # what shares some may begin anywhere in it
    found: set[str] = set()
    for name, out in zip(step.outs, program.outputs, strict=True):
        if name is None or type(out) is not TensorArg or out.buf in memory:
            continue
        b, made = d.buffer(name), program.buffers[out.buf]
        theirs = (out.dtype or made.dtype, made.device, out.shape, out.strides, out.offset)
        numbers = all(type(n) is int for n in (*b.shape, *b.strides))
        if numbers and theirs == (b.dtype, b.device, b.shape, b.strides, 0):
            found.add(name)
    return found


def _check_layout(d: _Draft, name: str, origin: str = "", copies: bool = False) -> None:
    """The check of a tensor that somebody else has made."""
    b = d.buffer(name)
    # Operators look at the type themselves.
    dtype = b.dtype if name in d.typed or not origin else opaque
    d.body.append(ins.AssertSizeStride(name, dtype, b.shape, b.strides, origin, copies))


def _check_alignment(d: _Draft, name: str) -> None:
    """The same of where it starts."""
    b = d.buffer(name)
    if d.cfg.alignment_asserts and b.dtype != opaque:
        nbytes = b.dtype.nbytes if facts_of(b.device).is_host else _GPU_ALIGNMENT
        d.body.append(ins.AssertAlignment(name, nbytes))


def _call_into(d: _Draft, e: Extern) -> tuple[str, ...]:
    """Memory for all results, if the op can write there and the plan has a place for each, or one
    lies in an order that the op would not choose; else ()."""
    memory = d.plan.memory
    names = [n for n in e.outs if n is not None]
    if not e.out_op or not names or len(names) != len(e.outs) or len(names) != len(e.out_names):
        return ()
    buffers = [d.buffer(n) for n in names]
    if not all(n in memory.offsets or n in memory.in_place for n in names) and all(
        b.strides == contiguous_strides(b.shape) for b in buffers
    ):
        return ()
    for n in names:
        d.make(d.buffer(n))
    return tuple(names)


def _mutate(d: _Draft, target: str, source: str) -> None:
    if source == target or d.plan.memory.in_place.get(source) == target:
        if target in d.bumped:
            d.body.append(ins.BumpVersion(target))
    else:
        d.body.append(ins.Copy(target, source, bump=target in d.bumped))


def _add_return(d: _Draft) -> None:
    _check_symbols(d)
    values: list[ins.Operand] = []
    for out in d.plan.program.outputs:
        if isinstance(out, Number):
            values.append(ins.ValueOf(out.buf))
        elif isinstance(out, TensorArg):
            values.append(ins.Ref(d.tensor(out, exact=True)))
        else:
            values.append(d.operand(out))
    d.body.append(ins.Return(tuple(values)))


def _check_symbols(d: _Draft) -> None:
    """Symbols that the table has but nothing defines are wrong only where something needs them:
    verify tells."""
    cyclic = [n for n, source in d.pending.items() if source is not None]
    if cyclic:
        raise InternalError(f"the sources of symbols {', '.join(cyclic)} never come to exist")
