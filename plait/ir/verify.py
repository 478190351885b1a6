"""The legality of LoopPrograms: what every pass may rely on and must keep.

Comes in: a program and the name of the pass that made it. Raises InternalError with that name and
the object that breaks a rule; gives back nothing. Costs one walk over all nodes, so the pipeline
runs it in tests and when debugging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.errors import InternalError
from plait.ir import loops as ir
from plait.ir.checks import ERRORS, Bound
from plait.ir.dtypes import LOOP_DTYPES, b1, bf16, f16, f64, i64
from plait.ir.expr import Atom, Expr, Size, free_symbols
from plait.ir.ops import CHECKED, OPS, REDUCTIONS, SPECIAL

# Ops that may stand on half types: they move values and do not compute.
_MOVES = frozenset({"where"})
_SCANS = frozenset({"sum", "prod", "max", "min", "logaddexp"})
_MODES = frozenset({"store", "add", "mul", "min", "max"})


def verify(program: ir.LoopProgram, passname: str) -> None:
    """Checks the whole program. Raises InternalError naming the pass."""
    _Verify(program, passname).run()


class _Verify:
    def __init__(self, program: ir.LoopProgram, passname: str) -> None:
        self.program, self.passname = program, passname
        self.defined: set[str] = set()
        self.parts: set[str] = set()
        self.seen: dict[ir.Node, frozenset[Atom]] = {}
        self.op: ir.Op | None = None

    def fail(self, what: str) -> InternalError:
        name = "" if self.op is None else f" in {_name(self.op)}"
        return InternalError(f"after {self.passname}: {what}{name}")

    def run(self) -> None:
        p = self.program
        for name, buf in p.buffers.items():
            if name != buf.name or len(buf.shape) != len(buf.strides):
                raise self.fail(f"buffer {buf} under the name {name}")
        for given in p.inputs:
            if isinstance(given, str):
                self.define(given)
            elif given is not None and given[1] not in p.symbols:
                raise self.fail(f"the int input {given[1]} is no symbol of the program")
        for name in p.constants:
            self.define(name)
        for op in p.ops:
            self.op = op
            self.check(op)
        self.op = None
        for out in p.outputs:
            self.operand(out)
            if isinstance(out, ir.Number) and self.buffer(out.buf).dtype not in (f64, b1):
                raise self.fail(f"{out.buf} is no float and no bool")
        if unknown := [d for d in p.donated if d not in p.inputs]:
            raise self.fail(f"donated buffers that are no inputs: {unknown}")

    # ---- buffers and sizes
    def buffer(self, name: str) -> ir.Buffer:
        if name not in self.program.buffers:
            raise self.fail(f"buffer {name} is not declared")
        return self.program.buffers[name]

    def define(self, name: str) -> None:
        self.buffer(name)
        if name in self.defined:
            raise self.fail(f"buffer {name} is defined twice")
        self.defined.add(name)

    def use(self, name: str) -> None:
        if name not in self.defined:
            raise self.fail(f"buffer {name} is read before it is defined")

    def sizes(self, exprs: Iterable[Size], allowed: frozenset[Atom] = frozenset()) -> None:
        """Every symbol is a size symbol of the program or one of those allowed."""
        for e in exprs:
            for a in free_symbols(e):
                if a not in allowed and a.name not in self.program.symbols:
                    raise self.fail(
                        f"the symbol {a} in {e} is neither a loop variable nor a size symbol"
                    )

    def space(self, vars_: Sequence[Expr], shape: Sequence[Size] | None = None) -> frozenset[Atom]:
        """The symbols of loop variables, which must be distinct and (if a shape is given) range
        over it."""
        atoms = [v.symbol for v in vars_]
        found = frozenset(a for a in atoms if a is not None and a.extent is not None)
        if len(found) != len(vars_):
            raise self.fail(f"loop variables {vars_} are not distinct symbols with extents")
        if shape is not None:
            extents = tuple(a.extent for a in atoms if a is not None)
            if extents != tuple(shape):
                raise self.fail(
                    f"loop variables range over {extents}, the buffer's shape is {tuple(shape)}"
                )
        return found

    # ---- ops
    def check(self, op: ir.Op) -> None:
        if isinstance(op, ir.Pointwise):
            self.pointwise(op)
        elif isinstance(op, ir.Reduction):
            self.reduction(op)
        elif isinstance(op, ir.Scatter):
            self.scatter(op)
        elif isinstance(op, ir.Scan):
            self.scan(op)
        elif isinstance(op, ir.Extern):
            self.extern(op)
        elif isinstance(op, ir.Alias):
            self.use(op.base)
            self.sizes((op.offset,))
            self.define(op.out)
        elif isinstance(op, ir.Item):
            self.use(op.buf)
            if op.name not in self.program.symbols:
                raise self.fail(f"{op.name} is no symbol of the program")
        elif isinstance(op, ir.Assert):
            self.sizes((op.expr, *op.values))
            if op.error not in ERRORS:
                raise self.fail(f"an assertion that raises {op.error!r}")
        elif isinstance(op, ir.Mutate):
            self.mutate(op)

    def pointwise(self, op: ir.Pointwise) -> None:
        out = self.buffer(op.out)
        if op.index is None:
            atoms = self.space(op.vars, out.shape)
            self.define(op.out)
        else:
            atoms = self.space(op.vars)
            if len(op.index) != len(out.shape):
                raise self.fail(f"{len(op.index)} indices for the shape {out.shape}")
            self.sizes(op.index, atoms)
            if op.out not in self.parts:
                self.define(op.out)
                self.parts.add(op.out)
        self.body(op.body, atoms)
        if op.body.dtype != out.dtype:
            raise self.fail(f"the body gives {op.body.dtype}, the buffer holds {out.dtype}")

    def reduction(self, op: ir.Reduction) -> None:
        if op.kind not in REDUCTIONS:
            raise self.fail(f"no reduction {op.kind}")
        if len(op.outs) > (3 if op.kind == "welford" else 1):
            raise self.fail(f"{len(op.outs)} results of {op.kind}")
        atoms = self.space((*op.vars, *op.rvars))
        self.body(op.body, atoms)
        wants = b1 if op.kind in ("any", "all") else None
        if op.body.dtype in (f16, bf16) or (wants is not None and op.body.dtype != wants):
            raise self.fail(f"{op.kind} over {op.body.dtype}")
        dtype = i64 if op.kind in ("argmax", "argmin") else op.body.dtype
        for name in op.outs:
            if name is not None:
                self.define(name)
                self.space(op.vars, self.buffer(name).shape)
                if self.buffer(name).dtype != dtype:
                    raise self.fail(f"{name} holds {self.buffer(name).dtype}, not {dtype}")

    def scatter(self, op: ir.Scatter) -> None:
        out, base = self.buffer(op.out), self.buffer(op.base)
        self.use(op.base)
        if (
            (out.shape, out.dtype) != (base.shape, base.dtype)
            or op.body.dtype != out.dtype
            or op.mode not in _MODES
        ):
            raise self.fail(f"scatter ({op.mode}) of {op.body.dtype} into {out} based on {base}")
        atoms = self.space(op.vars)
        for n in (op.body, *op.index_args, *(() if op.mask is None else (op.mask,))):
            self.body(n, atoms)
        self.indices(op.index, len(out.shape), op.index_args, atoms)
        if op.mask is not None and op.mask.dtype != b1:
            raise self.fail(f"a mask of {op.mask.dtype}")
        if op.out != op.base:  # else it updates its base in place
            self.define(op.out)

    def scan(self, op: ir.Scan) -> None:
        if op.kind not in _SCANS or not 0 <= op.axis < len(op.vars):
            raise self.fail(f"scan {op.kind} over axis {op.axis}")
        self.body(op.body, self.space(op.vars))
        for k, name in enumerate(op.outs):
            if name is not None:
                out = self.buffer(name)
                self.space(op.vars, out.shape)
                if out.dtype != (i64 if k else op.body.dtype):
                    raise self.fail(f"{name} holds {out.dtype}")
                self.define(name)

    def extern(self, op: ir.Extern) -> None:
        for a in (*op.args, *(v for _, v in op.kwargs)):
            self.operand(a)
        for name in (*op.aliases, *op.mutates):
            self.use(name)
        for _, name in op.symbols:
            if name not in self.program.symbols:
                raise self.fail(f"{name} is no symbol of the program")
        for out in op.outs:
            if out is not None:
                self.define(out)

    def mutate(self, op: ir.Mutate) -> None:
        self.use(op.target)
        self.use(op.source)
        a, b = self.buffer(op.target), self.buffer(op.source)
        if (
            op.target not in self.program.inputs
            or a.dtype != b.dtype
            or len(a.shape) != len(b.shape)
        ):
            raise self.fail(f"{a} cannot take the value of {b}")

    def operand(self, a: ir.ExternArg) -> None:
        if isinstance(a, ir.TensorArg):
            self.use(a.buf)
            self.sizes((*a.shape, *a.strides, a.offset))
            if len(a.shape) != len(a.strides):
                raise self.fail(f"operand {a}")
        elif isinstance(a, ir.ListArg):
            for item in a.items:
                self.operand(item)
        elif isinstance(a, Expr):
            self.sizes((a,))

    # ---- nodes
    def body(self, root: ir.Node, atoms: frozenset[Atom]) -> None:
        for n in ir.walk((root,)):
            if self.seen.get(n) != atoms:
                self.seen[n] = atoms
                self.node(n, atoms)

    def node(self, n: ir.Node, atoms: frozenset[Atom]) -> None:
        if n.dtype not in LOOP_DTYPES:
            raise self.fail(f"a node of {n.dtype}")
        if n.op in OPS:
            self.table_node(n)
        elif n.op == "load":
            self.load(n, atoms)
        elif n.op == "index":
            self.indices(ir.index_exprs(n), 1, n.args, atoms)
        elif n.op in CHECKED:
            self.checked(n)
        elif n.op not in SPECIAL:
            raise self.fail(f"no op {n.op}")
        elif len(n.args) != (1 if n.op in ("cast", "bitcast") else 0):
            raise self.fail(f"{n.op} with {len(n.args)} arguments")
        elif n.op == "bitcast" and n.dtype.nbytes != n.args[0].dtype.nbytes:
            raise self.fail(f"a bitcast of {n.args[0].dtype} to {n.dtype}")

    def checked(self, n: ir.Node) -> None:
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
            raise self.fail(f"{n}")
        if check is None or check.error not in ERRORS:
            raise self.fail(f"{n.op} fails with {check}")

    def table_node(self, n: ir.Node) -> None:
        row = OPS[n.op]
        dtypes = [a.dtype for a in n.args]
        if len(dtypes) != row.arity:
            raise self.fail(f"{n.op} with {len(dtypes)} arguments")
        try:
            want = row.dtype(*dtypes)
        except TypeError as e:
            raise self.fail(f"{n.op}: {e}") from e
        if n.dtype != want:
            raise self.fail(f"{n.op} of {dtypes} has dtype {n.dtype}, the op table says {want}")
        main = dtypes[-1]
        if main.kind not in row.on or (main in (f16, bf16) and n.op not in _MOVES):
            raise self.fail(f"{n.op} on {main}")

    def load(self, n: ir.Node, atoms: frozenset[Atom]) -> None:
        load = n.attr
        if not isinstance(load, ir.Load):
            raise self.fail(f"a load of {load}")
        self.use(load.buf)
        buf = self.buffer(load.buf)
        if buf.dtype != n.dtype:
            raise self.fail(f"a load of {n.dtype} from {buf}")
        args = n.args
        if load.masked:
            if not args or args[-1].dtype != b1:
                raise self.fail(f"a masked load without a mask: {n}")
            args = args[:-1]
        self.indices(load.index, len(buf.shape), args, atoms)

    def indices(
        self, exprs: Sequence[Size], rank: int, args: Sequence[ir.Node], atoms: frozenset[Atom]
    ) -> None:
        """Index expressions over loop variables, size symbols and exactly the Arg symbols of
        args."""
        if len(exprs) != rank:
            raise self.fail(
                f"{len(exprs)} indices {tuple(exprs)} where the buffer has {rank} dimensions"
            )
        found = {a for e in exprs for a in free_symbols(e) if ir.is_arg(a)}
        if {a.name for a in found} != {f"${k}" for k in range(len(args))}:
            raise self.fail(f"indices {tuple(exprs)} with {len(args)} arguments")
        if any(a.dtype != i64 for a in args):
            raise self.fail(f"an index argument that is not i64 in {tuple(exprs)}")
        self.sizes(exprs, atoms | found)


def _name(op: ir.Op) -> str:
    if isinstance(op, (ir.Pointwise, ir.Scatter)):
        return f"{type(op).__name__} {op.out}"
    if isinstance(op, (ir.Reduction, ir.Scan)):
        return f"{type(op).__name__} {op.outs}"
    return f"{op}"
