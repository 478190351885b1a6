"""The legality of LoopPrograms: what every pass may rely on and must keep.

Comes in: a program and the name of the pass that made it. Raises InternalError with that name and
the object that breaks a rule; gives back nothing. Costs one walk over all nodes, so the pipeline
runs it in tests and when debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.errors import InternalError
from plait.ir import loops as ir
from plait.ir.attention import Attention, HostAttention
from plait.ir.calls import DeviceKernel, Extern, ExternArg, Number, TensorArg, UserKernel
from plait.ir.checks import ERRORS, Bound
from plait.ir.dtypes import LOOP_DTYPES, DType, b1, bf16, f16, f64, i64
from plait.ir.effects import arg_sizes, defines, needs, sizes, tensor_args, unwritten, updates
from plait.ir.expr import INF, Atom, Expr, Size, bounds, free_symbols, known_lt
from plait.ir.ops import CHECKED, OPS, SPECIAL
from plait.ir.product import Pair, Product
from plait.ir.reductions import REDUCTIONS

# Ops that may stand on half types: they move values and do not compute.
_MOVES = frozenset({"where"})
_MODES = frozenset({"store", "add", "mul", "min", "max"})


def verify(program: ir.LoopProgram, passname: str) -> None:
    """Checks the whole program. Raises InternalError naming the pass."""
    for p in program.programs:
        verify(p, passname)
    known, op = _Known(program), None
    try:
        _start(known)
        for op in program.ops:
            _op(known, op)
        op = None
        _end(known)
    except _Fault as e:
        name = "" if op is None else f" in {_name(op)}"
        raise InternalError(f"after {passname}: {e}{name}") from None


class _Fault(Exception):
    """A broken rule, in words."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known at a place of the program.

    defined: the buffers that have a value.
    pieces: those of them that several loops define together.
    checked: nodes, with the loop variables that they were checked under.
    """

    program: ir.LoopProgram
    defined: set[str] = field(default_factory=set)
    pieces: set[str] = field(default_factory=set)
    checked: dict[ir.Node, frozenset[Atom]] = field(default_factory=dict)


def _start(known: _Known) -> None:
    p = known.program
    for name, buf in p.buffers.items():
        if name != buf.name or len(buf.shape) != len(buf.strides):
            raise _Fault(f"buffer {buf} under the name {name}")
    for given in p.inputs:
        if isinstance(given, str):
            _define(known, given)
        elif given is not None and given[1] not in p.symbols:
            raise _Fault(f"the int input {given[1]} is no symbol of the program")
    for name in (*p.constants, *unwritten(p)):
        _define(known, name)


def _end(known: _Known) -> None:
    p = known.program
    _ranks(p.outputs)
    _sizes(known, arg_sizes(p.outputs))
    for out in tensor_args(p.outputs):
        _use(known, out.buf)
        if isinstance(out, Number) and _buffer(known, out.buf).dtype not in (f64, b1):
            raise _Fault(f"{out.buf} is no float and no bool")
    if unknown := [d for d in p.donated if d not in p.inputs]:
        raise _Fault(f"donated buffers that are no inputs: {unknown}")


# -------------------------------------------------------------------------------- buffers and sizes
def _buffer(known: _Known, name: str) -> ir.Buffer:
    if name not in known.program.buffers:
        raise _Fault(f"buffer {name} is not declared")
    return known.program.buffers[name]


def _define(known: _Known, name: str) -> None:
    _buffer(known, name)
    if name in known.defined:
        raise _Fault(f"buffer {name} is defined twice")
    known.defined.add(name)


def _use(known: _Known, name: str) -> None:
    if name not in known.defined:
        raise _Fault(f"buffer {name} is read before it is defined")


def _symbol(known: _Known, name: str) -> None:
    if name not in known.program.symbols:
        raise _Fault(f"{name} is no symbol of the program")


def _sizes(known: _Known, exprs: Iterable[Size], allowed: frozenset[Atom] = frozenset()) -> None:
    """Every symbol is a size symbol of the program or one of those allowed."""
    for e in exprs:
        for a in free_symbols(e):
            if a not in allowed and a.name not in known.program.symbols:
                raise _Fault(f"the symbol {a} in {e} is neither a loop variable nor a size symbol")


def _ranks(args: Iterable[ExternArg]) -> None:
    for a in tensor_args(args):
        if len(a.shape) != len(a.strides):
            raise _Fault(f"operand {a}")


def _space(vars_: Sequence[Expr], shape: Sequence[Size] | None = None) -> frozenset[Atom]:
    """The symbols of loop variables, which must be distinct and (if a shape is given) range
    over it."""
    atoms = [v.symbol for v in vars_]
    found = frozenset(a for a in atoms if a is not None and a.extent is not None)
    if len(found) != len(vars_):
        raise _Fault(f"loop variables {vars_} are not distinct symbols with extents")
    if shape is not None:
        extents = tuple(a.extent for a in atoms if a is not None)
        if extents != tuple(shape):
            raise _Fault(
                f"loop variables range over {extents}, the buffer's shape is {tuple(shape)}"
            )
    return found


# ---------------------------------------------------------------------------------------------- ops
def _pointwise(known: _Known, op: ir.Pointwise) -> None:
    out = _buffer(known, op.out)
    atoms = _space(op.vars, out.shape if op.index is None else None)
    if op.index is not None:
        if len(op.index) != len(out.shape):
            raise _Fault(f"{len(op.index)} indices for the shape {out.shape}")
        _sizes(known, op.index, atoms)
        for i, n in zip(op.index, out.shape, strict=True):
            beyond = isinstance(n, int) and n <= bounds(i)[1] < INF and not known_lt(i, n)
            if beyond and 0 not in out.shape:
                raise _Fault(f"a piece that ends at {i}, beyond the shape {out.shape}")
    _body(known, op.body, atoms)
    if op.body.dtype != out.dtype:
        raise _Fault(f"the body gives {op.body.dtype}, the buffer holds {out.dtype}")


def _reduction(known: _Known, op: ir.Reduction) -> None:
    row = REDUCTIONS.get(op.kind)
    if row is None:
        raise _Fault(f"no reduction {op.kind}")
    if len(op.outs) > len(row.parts):
        raise _Fault(f"{len(op.outs)} results of {op.kind}")
    _body(known, op.body, _space((*op.vars, *op.rvars)))
    if op.body.dtype in (f16, bf16) or op.body.dtype.kind not in row.on:
        raise _Fault(f"{op.kind} over {op.body.dtype}")
    for name in op.outs:
        _result(known, name, op.vars, row.gives(op.body.dtype))


def _scan(known: _Known, op: ir.Scan) -> None:
    row = REDUCTIONS.get(op.kind)
    if row is None or not row.scans or not 0 <= op.axis < len(op.vars):
        raise _Fault(f"scan {op.kind} over axis {op.axis}")
    _body(known, op.body, _space(op.vars))
    for k, name in enumerate(op.outs):
        _result(known, name, op.vars, i64 if k else op.body.dtype)


def _result(known: _Known, name: str | None, vars_: Sequence[Expr], dtype: DType) -> None:
    if name is None:
        return
    out = _buffer(known, name)
    _space(vars_, out.shape)
    if out.dtype != dtype:
        raise _Fault(f"{name} holds {out.dtype}, not {dtype}")


def _scatter(known: _Known, op: ir.Scatter) -> None:
    out, base = _buffer(known, op.out), _buffer(known, op.base)
    if (
        (out.shape, out.dtype) != (base.shape, base.dtype)
        or op.body.dtype != out.dtype
        or op.mode not in _MODES
    ):
        raise _Fault(f"scatter ({op.mode}) of {op.body.dtype} into {out} based on {base}")
    atoms = _space(op.vars)
    for n in (op.body, *op.index_args, *(() if op.mask is None else (op.mask,))):
        _body(known, n, atoms)
    _indices(known, op.index, len(out.shape), op.index_args, atoms)
    if op.mask is not None and op.mask.dtype != b1:
        raise _Fault(f"a mask of {op.mask.dtype}")


def _extern(known: _Known, op: Extern) -> None:
    _ranks(op.operands)
    for name in (*op.aliases, *op.held):
        _use(known, name)
    for _, name in op.symbols:
        _symbol(known, name)
    if op.control is not None:
        signatures = [(len(p.inputs), len(p.outputs)) for p in known.program.programs]
        if fault := op.control.fault(len(op.args), signatures, len(op.outs)):
            raise _Fault(fault)
    if op.kernel is not None:
        _launched(known, op, op.kernel)


def _launched(known: _Known, op: Extern, kernel: DeviceKernel) -> None:
    tensors = [a for a in op.args if isinstance(a, TensorArg)]
    n_tensors = len(tensors)
    if isinstance(kernel, HostAttention):
        if fault := kernel.fault(tensors, len(op.args) - n_tensors, len(op.outs)):
            raise _Fault(fault)
    elif isinstance(kernel, UserKernel):
        if n_tensors + len(op.outs) != len(kernel.pointers) or not kernel.variants:
            raise _Fault(f"a launch of {kernel.name} with other tensors than it takes")
    elif isinstance(kernel, Attention):
        if fault := kernel.fault(n_tensors, len(op.outs)):
            raise _Fault(fault)
    elif isinstance(kernel, (Pair, Product)):
        if fault := kernel.fault(n_tensors, len(op.args) - n_tensors, op.outs):
            raise _Fault(fault)
    else:
        raise _Fault(f"a kernel of unknown kind {type(kernel).__name__}")


def _item(known: _Known, op: ir.Item) -> None:
    _symbol(known, op.name)


def _assert(known: _Known, op: ir.Assert) -> None:
    if op.error not in ERRORS:
        raise _Fault(f"an assertion that raises {op.error!r}")


def _mutate(known: _Known, op: ir.Mutate) -> None:
    a, b = _buffer(known, op.target), _buffer(known, op.source)
    if op.target not in known.program.inputs or a.dtype != b.dtype or len(a.shape) != len(b.shape):
        raise _Fault(f"{a} cannot take the value of {b}")


_MORE: dict[type, Callable[[_Known, Any], None]] = {
    ir.Pointwise: _pointwise, ir.Reduction: _reduction, ir.Scan: _scan, ir.Scatter: _scatter,
    Extern: _extern, ir.Item: _item, ir.Assert: _assert, ir.Mutate: _mutate,
}  # fmt: skip
"""What holds of the ops of a class, beside what holds of every op."""


def _op(known: _Known, op: ir.Op) -> None:
    changed = updates(op)
    for name in (*needs(op), *changed):
        _use(known, name)
    _sizes(known, sizes(op))
    if more := _MORE.get(type(op)):
        more(known, op)
    is_piece = isinstance(op, ir.Pointwise) and op.index is not None
    for name in defines(op):
        if name not in changed and not (is_piece and name in known.pieces):
            _define(known, name)
        if is_piece:
            known.pieces.add(name)


def _name(op: ir.Op) -> str:
    if isinstance(op, (ir.Pointwise, ir.Scatter)):
        return f"{type(op).__name__} {op.out}"
    if isinstance(op, (ir.Reduction, ir.Scan)):
        return f"{type(op).__name__} {op.outs}"
    return f"{op}"


# -------------------------------------------------------------------------------------------- nodes
def _body(known: _Known, root: ir.Node, atoms: frozenset[Atom]) -> None:
    for n in ir.walk((root,)):
        if known.checked.get(n) != atoms:
            known.checked[n] = atoms
            _node(known, n, atoms)


def _node(known: _Known, n: ir.Node, atoms: frozenset[Atom]) -> None:
    if n.dtype not in LOOP_DTYPES:
        raise _Fault(f"a node of {n.dtype}")
    if n.op in OPS:
        _table_node(n)
    elif n.op == "load":
        _load(known, n, atoms)
    elif n.op == "index":
        _indices(known, ir.index_exprs(n), 1, n.args, atoms)
    elif n.op in CHECKED:
        _checked(n)
    elif n.op not in SPECIAL:
        raise _Fault(f"no op {n.op}")
    elif len(n.args) != (1 if n.op in ("cast", "bitcast") else 0):
        raise _Fault(f"{n.op} with {len(n.args)} arguments")
    elif n.op == "bitcast" and n.dtype.nbytes != n.args[0].dtype.nbytes:
        raise _Fault(f"a bitcast of {n.args[0].dtype} to {n.dtype}")


def _checked(n: ir.Node) -> None:
    """A node that can make the call fail: (value) or (value, mask), with a known kind of
    error."""
    dtypes = [a.dtype for a in n.args]
    check = ir.check_of(n)
    if (
        dtypes[:1] != [n.dtype]
        or dtypes[1:] not in ([], [b1])
        or not (n.dtype == i64 if n.op == "bounded" else n.dtype.is_int)
        or isinstance(n.attr, Bound) != (n.op == "bounded")
    ):
        raise _Fault(f"{n}")
    if check is None or check.error not in ERRORS:
        raise _Fault(f"{n.op} fails with {check}")


def _table_node(n: ir.Node) -> None:
    row = OPS[n.op]
    dtypes = [a.dtype for a in n.args]
    if len(dtypes) != row.arity:
        raise _Fault(f"{n.op} with {len(dtypes)} arguments")
    try:
        want = row.dtype(*dtypes)
    except TypeError as e:
        raise _Fault(f"{n.op}: {e}") from e
    if n.dtype != want:
        raise _Fault(f"{n.op} of {dtypes} has dtype {n.dtype}, the op table says {want}")
    main = dtypes[-1]
    if main.kind not in row.on or (main in (f16, bf16) and n.op not in _MOVES):
        raise _Fault(f"{n.op} on {main}")


def _load(known: _Known, n: ir.Node, atoms: frozenset[Atom]) -> None:
    load = n.attr
    if not isinstance(load, ir.Load):
        raise _Fault(f"a load of {load}")
    _use(known, load.buf)
    buf = _buffer(known, load.buf)
    if buf.dtype != n.dtype:
        raise _Fault(f"a load of {n.dtype} from {buf}")
    args = n.args
    if load.masked:
        if not args or args[-1].dtype != b1:
            raise _Fault(f"a masked load without a mask: {n}")
        args = args[:-1]
    _indices(known, load.index, len(buf.shape), args, atoms)


def _indices(
    known: _Known, exprs: Sequence[Size], rank: int, args: Sequence[ir.Node], atoms: frozenset[Atom]
) -> None:
    """Index expressions over loop variables, size symbols and exactly the Arg symbols of
    args."""
    if len(exprs) != rank:
        raise _Fault(f"{len(exprs)} indices {tuple(exprs)} where the buffer has {rank} dimensions")
    found = {a for e in exprs for a in free_symbols(e) if ir.is_arg(a)}
    if {a.name for a in found} != {f"${k}" for k in range(len(args))}:
        raise _Fault(f"indices {tuple(exprs)} with {len(args)} arguments")
    if any(a.dtype != i64 for a in args):
        raise _Fault(f"an index argument that is not i64 in {tuple(exprs)}")
    _sizes(known, exprs, atoms | found)
