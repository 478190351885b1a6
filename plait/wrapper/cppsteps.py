"""Instructions as lines of C++.

In: a `Source` and the next input or instruction of a program. Out: the source with its lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from plait.devices import facts_of
from plait.ir.checks import ERRORS
from plait.ir.dtypes import DTYPES
from plait.ir.expr import Expr, Size
from plait.wrapper import instructions as ins
from plait.wrapper.cppsource import Source, comment, real, string
from plait.wrapper.text import line
from plait.wrapper.walk import operands, symbols


def add_input(s: Source, i: ins.Input) -> None:
    """Adds the line of an input, if something reads it."""
    match i:
        case ins.TensorInput():
            s.add(f"const Slot {s.slot(i.name)};", f"{i.dtype.name}, {i.device}")
        case ins.OpaqueInput():
            s.add(f"const Slot {s.slot(i.name)};")
        case ins.SymbolInput():
            if any(i.name in symbols(step) for step in s.p.body):
                s.symbol(i.name)
        case _:
            assert_never(i)


def add_instruction(s: Source, i: ins.Instr) -> None:
    """Adds the lines of one instruction, or puts a launch off."""
    name = s.names
    match i:
        case ins.Symbol():
            _define(s, i.name, i.value)
        case ins.AssertScalar():
            _require(s, i)
        case ins.AssertSizeStride():
            _require_layout(s, i)
        case ins.AssertAlignment():
            _require_aligned(s, i)
        case ins.CheckFinite():
            s.begin()
            given = f"{string(i.origin)}, {str(i.infinities).lower()}"
            s.add(f"TRY({name[i.tensor]}.require_finite({given}));")
        case ins.Arena():
            nbytes = s.size(i.nbytes)
            s.add(f"const Slot {s.slot(i.name)};", i.device)
            s.add(f"TRY({name[i.name]}.take({nbytes}));")
        case ins.Place():
            _place(s, i)
        case ins.Alloc():
            _alloc(s, i)
        case ins.Reuse():
            _view(s, i, s.at(i.old))
        case ins.Free():
            pass  # `Lives.drops` says the same, of kernels' views too
        case ins.View():
            start = s.at(i.base) if i.relative else _storage(s, i.base)
            far = f" + {s.size(i.offset)} * {i.dtype.nbytes}" if i.offset != 0 else ""
            _view(s, i, start + far)
        case ins.Constant():
            s.add(f"const Slot {s.slot(i.name)};", f"constant {i.index}")
        case ins.DefineKernel():
            s.kernel_names[i.name]
        case ins.Launch():
            _launch(s, i)
        case ins.CallExtern() | ins.CallPython() | ins.CallPrograms():
            _call(s, i)
        case ins.Hook():
            _call(s, i.call())
        case ins.Copy():
            s.begin()
            s.add(f"TRY({name[i.dst]}.copy({name[i.src]}, {str(i.bump).lower()}));")
        case ins.BumpVersion():
            s.add(f"TRY({name[i.tensor]}.bump());")
        case ins.Fill():
            s.begin()
            s.add(f"TRY({name[i.tensor]}.fill({_number(s, i.value)}));")
        case ins.Partition(recorded, reason):
            s.begin()
            recording = "a CUDA graph in the native target"
            s.lines += comment(recording if recorded else f"at every call: {reason}")
        case ins.Note():
            s.notes += comment(i.text)
        case ins.Return():
            _return(s, i)
        case _:
            assert_never(i)


def _define(s: Source, name: str, value: ins.SizeOf | ins.ItemOf | Size) -> None:
    if isinstance(value, (ins.SizeOf, ins.ItemOf)):
        if isinstance(value, ins.ItemOf):
            s.begin()
            what = "plait_item, 0"
        else:
            what = f"plait_{value.kind}, {value.dim}"
        s.add(f"int64_t {s.names[name]};")
        s.add(f"TRY({s.names[value.tensor]}.read({what}, {s.names[name]}));")
    elif isinstance(value, Expr) and value.symbol is None:
        s.add(f"SIZE({s.names[name]}, {s.expression(value)});")
    else:
        s.add(f"const int64_t {s.names[name]} = {s.size(value)};")


def _require(s: Source, i: ins.AssertScalar) -> None:
    given = f", {ERRORS.index(i.error)}, {s.listed(i.values)}" if i.values else ""
    if not i.values and i.error != "RuntimeError":
        given = f", {ERRORS.index(i.error)}"
    s.add(f"TRY(require(call, {s.size(i.expr)}, {string(i.message)}{given}));")


def _require_layout(s: Source, i: ins.AssertSizeStride) -> None:
    dtype = list(DTYPES).index(i.dtype.name)
    given = ", ".join([string(i.origin), str(i.copies).lower(), str(dtype), *s.layout(i)])
    s.add(f"TRY({s.names[i.tensor]}.require({given}));", i.dtype.name)


def _require_aligned(s: Source, i: ins.AssertAlignment) -> None:
    name, number = s.names[i.tensor], s.numbers.slots[i.tensor]
    slot = f"Slot(call, {number})" if s.lives.is_pointer(i.tensor) else name
    s.add(f"TRY({slot}.require_aligned({s.at(i.tensor)}, {i.nbytes}));")


def _place(s: Source, i: ins.Place) -> None:
    name = s.names
    if s.lives.is_pointer(i.name):
        first = f"{name[i.arena]}.data() + {i.offset}"
        s.add(f"char* const {name[i.name]} = {first};", i.dtype.name)
        return
    given = ", ".join([s.size(i.offset), *s.layout(i)])
    s.add(f"const Slot {s.slot(i.name)};", i.dtype.name)
    s.add(f"TRY({name[i.name]}.place({given}));")


def _alloc(s: Source, i: ins.Alloc) -> None:
    s.before_alloc()
    given = ", ".join(s.layout(i))
    s.add(f"Tensor {s.slot(i.name)};", f"{i.dtype.name}, {i.device}")
    s.add(f"TRY({s.names[i.name]}.alloc({given}));")


def _view(s: Source, i: ins.View | ins.Reuse, first: str) -> None:
    if s.lives.is_pointer(i.name):
        s.add(f"char* const {s.names[i.name]} = {first};", i.dtype.name)
        return
    given = ", ".join([first, *s.layout(i)])
    s.add(f"Tensor {s.slot(i.name)};", i.dtype.name)
    s.add(f"TRY({s.names[i.name]}.view({given}));")


def _storage(s: Source, name: str) -> str:
    """Where the storage of a tensor starts."""
    first = s.names.fresh(f"{name}_storage")
    s.add(f"char* {first};")
    s.add(f"TRY(Slot(call, {s.numbers.slots[name]}).storage({first}));")
    return first


def _launch(s: Source, i: ins.Launch) -> None:
    kernel = f"kernel::{s.kernel_names[i.kernel]}"
    buffers = ", ".join(s.at(a) for a in i.args)
    sizes = s.listed(i.sizes)
    if not facts_of(s.devices[i.kernel]).is_host:
        s.begin()
        grid = s.size(i.grid)
        s.add(
            f"TRY(launch(call, {kernel}, {grid}, Arguments<{len(i.args)}, {len(i.sizes)}>{{"
            f"{{{buffers}}}, {sizes}}}));"
        )
        return
    flags = " | ".join(
        f for f, on in (("kWhole", not i.parallel), ("kNoBarrier", not i.barrier)) if on
    )
    if all(isinstance(n, int) for n in i.sizes):
        sizes = f"kSizes<{sizes[1:-1]}>"
    arguments = f"{{{buffers}}}, {sizes}, {s.size(i.work_ns)}, {flags or 0}"
    s.region.lines += [*s.notes, f"Launch<{len(i.args)}, {len(i.sizes)}>{{{kernel}, {arguments}}},"]
    s.notes = []


_CALLS = {ins.CallExtern: "op", ins.CallPython: "python", ins.CallPrograms: "programs"}
"""The functions that run them; each counts its calls."""


def _call(s: Source, i: ins.Call) -> None:
    s.begin()
    given = _handed(s.given(operands(i)))
    function = _CALLS[type(i)]
    index = s.n_calls[function]
    s.n_calls[function] += 1
    s.lines += comment(line(i))
    s.add(f"TRY({function}(call, {index}{given}));")
    for out in i.outs:
        if out is not None and out in s.numbers.slots:
            s.add(f"Tensor {s.slot(out)};")
        elif out is not None and out in s.numbers.symbols:
            s.symbol(out)


def _number(s: Source, o: ins.Operand) -> str:
    match o:
        case ins.Literal("bool", text):
            return f"plait_bool, {int(text == 'True')}"
        case ins.Literal("float", text):
            return f"plait_real, 0, {real(text)}"
        case ins.Literal("complex", text):
            return f"plait_complex, 0, {', '.join(map(real, text.split()))}"
        case int() | Expr():
            return f"plait_integer, {s.size(o)}"
        case _:
            raise ValueError(f"a tensor cannot be filled with {o!r}")


def _return(s: Source, i: ins.Return) -> None:
    s.begin()
    given = []
    for o in i.values:
        if isinstance(o, (ins.Ref, ins.ValueOf)):
            name = o.name if isinstance(o, ins.Ref) else o.tensor
            borrowed = isinstance(
                s.lives.made[name],
                (ins.TensorInput, ins.OpaqueInput, ins.Constant, ins.Place, ins.Arena),
            )
            given.append(f"{s.names[name]}{'' if borrowed else '.keep()'}")
        else:
            given += s.given([o])
    s.add(f"return give(call{_handed(given)});")


def _handed(given: Sequence[str]) -> str:
    """A list as the last argument; none if it is empty."""
    return f", {{{', '.join(given)}}}" if given else ""
