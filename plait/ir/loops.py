"""Loop bodies and loops: what each buffer's elements are, as immutable interned data.

A body is a DAG of `Node`s over loop variables; a loop says which buffer the body defines. Loads
carry LOGICAL multi-dimensional indices, so a producer is inlined by substituting its variables;
strides enter only in the emitters. Comes from `plait/ir/record.py`, is fused by `plait/schedule`,
printed by `plait/ir/text.py`, run slowly by `plait/ir/interp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from plait.ir.calls import Extern, Scalar, TensorArg
from plait.ir.checks import Bound, Check
from plait.ir.dtypes import DType, b1, i64
from plait.ir.expr import Atom, Expr, Size, substitute, symbol
from plait.ir.ops import OPS

Const = bool | int | float


class Load(NamedTuple):  # many are made: sooner than a frozen dataclass
    """Element index[0], index[1], ... of buffer `buf`.

    index: over loop variables, size symbols and positional Arg symbols `$0, $1, ...`: `$k` is the
    value of the load's k-th argument node (i64, promised to lie in range wherever the mask holds).
    masked: the last argument node is a b1 mask; where it is false nothing is read and the value is
    0 (False)."""

    buf: str
    index: tuple[Size, ...]  # type: ignore[assignment]  # hides the method
    masked: bool = False


Attr = Const | Load | Size | str | Bound | Check | None


class Node:
    """One scalar operation; interned: equal nodes are the same object, and hash and compare as
    such, which is done most often of all. op: a name of ops.OPS or ops.SPECIAL."""

    __slots__ = ("op", "args", "attr", "dtype", "_below", "__weakref__")

    def __init__(self, op: str, args: tuple[Node, ...], attr: Attr, dtype: DType) -> None:
        self.op, self.args, self.attr, self.dtype = op, args, attr, dtype
        self._below: tuple[Node, ...] | None = None  # see `walk`

    # A formula reads as on paper. Beside a node a Python number takes its dtype. `==` asks whether
    # two nodes are the same one: `maths.eq` compares values.
    def __neg__(self) -> Node:
        return apply("neg", self)

    def __invert__(self) -> Node:
        return apply("not", self)

    def __abs__(self) -> Node:
        return apply("abs", self)

    def __add__(self, other: Node | Const) -> Node:
        return apply("add", self, other)

    def __radd__(self, other: Const) -> Node:
        return apply("add", other, self)

    def __sub__(self, other: Node | Const) -> Node:
        return apply("sub", self, other)

    def __rsub__(self, other: Const) -> Node:
        return apply("sub", other, self)

    def __mul__(self, other: Node | Const) -> Node:
        return apply("mul", self, other)

    def __rmul__(self, other: Const) -> Node:
        return apply("mul", other, self)

    def __truediv__(self, other: Node | Const) -> Node:
        return apply("truediv", self, other)

    def __rtruediv__(self, other: Const) -> Node:
        return apply("truediv", other, self)

    def __pow__(self, other: Node | Const) -> Node:
        return apply("pow", self, other)

    def __and__(self, other: Node | Const) -> Node:
        return apply("and", self, other)

    def __or__(self, other: Node | Const) -> Node:
        return apply("or", self, other)

    def __xor__(self, other: Node | Const) -> Node:
        return apply("xor", self, other)

    def __lshift__(self, other: Node | Const) -> Node:
        return apply("shl", self, other)

    def __rshift__(self, other: Node | Const) -> Node:
        return apply("shr", self, other)

    def __lt__(self, other: Node | Const) -> Node:
        return apply("lt", self, other)

    def __le__(self, other: Node | Const) -> Node:
        return apply("le", self, other)

    def __gt__(self, other: Node | Const) -> Node:
        return apply("gt", self, other)

    def __ge__(self, other: Node | Const) -> Node:
        return apply("ge", self, other)

    def __repr__(self) -> str:
        from_attr = "" if self.attr is None else f"[{self.attr}]"
        return f"{self.op}{from_attr}({', '.join(map(repr, self.args))}):{self.dtype}"


FEW = 4  # roots: more of them may have too much in common
_nodes: dict[object, Node] = {}


def forget() -> None:
    """Drops the intern table (see sizes.forget)."""
    _nodes.clear()
    loop_vars.cache_clear()


def node(
    op: str, args: tuple[Node, ...] = (), attr: Attr = None, dtype: DType | None = None
) -> Node:
    """The interned node. dtype may be left out where the op table decides it. Raises TypeError
    where the table forbids it."""
    if dtype is None:
        dtype = OPS[op].dtype(*(a.dtype for a in args))
    # repr keeps 0.0, -0.0, False and 0 apart, which compare equal in Python.
    key = (op, args, repr(attr) if isinstance(attr, (bool, int, float)) else attr, dtype)
    found = _nodes.get(key)
    if found is None:
        found = _nodes.setdefault(key, Node(op, args, attr, dtype))  # threads compile side by side
    return found


def const(value: Const, dtype: DType) -> Node:
    """A constant of that dtype. Ints become floats for float dtypes; floats are rounded by the
    emitter."""
    if dtype.is_float:
        value = float(value)
    elif dtype == b1:
        value = bool(value)
    else:
        value = int(value)
    return node("const", (), value, dtype)


def apply(op: str, *args: Node | Const) -> Node:
    """A row of the op table. Python numbers take the dtype of the first node among the operands (of
    `where`, of the first after the condition). Raises TypeError where arity or dtypes do not
    fit."""
    if len(args) != OPS[op].arity:
        raise TypeError(f"{op} takes {OPS[op].arity} arguments, not {len(args)}")
    typed = args[1:] if op == "where" else args
    dtype = next(a.dtype for a in typed if isinstance(a, Node))
    return node(op, tuple(a if isinstance(a, Node) else const(a, dtype) for a in args))


def cast(x: Node, dtype: DType) -> Node:
    """x in another dtype (x itself if it has it already)."""
    return x if x.dtype == dtype else node("cast", (x,), None, dtype)


LOOSE = "loose"
"""The attribute of a cast whose value may stay as it is where it is widened again."""


def loosened(x: Node) -> Node:
    """x, whose cast to a narrower float at its end is loose."""
    if x.op != "cast" or not (x.dtype.is_float and x.args[0].dtype.is_float):
        return x
    return node("cast", x.args, LOOSE, x.dtype)


def integer(e: Size, args: tuple[Node, ...] = ()) -> Node:
    """The value of an integer expression. args: the values of its Arg symbols."""
    return const(e, i64) if isinstance(e, int) else node("index", args, e, i64)


def arg_symbol(k: int, size: Size | None = None) -> Expr:
    """The symbol `$k` in a Load or index attribute: the value of argument node k. size: it is in
    [0, size) if given."""
    return symbol(f"${k}", extent=size) if size is not None else symbol(f"${k}", lo=float("-inf"))


def is_arg(a: Atom) -> bool:
    """Whether a symbol stands for an argument node."""
    return a.name.startswith("$")


def walk(roots: Sequence[Node]) -> Iterable[Node]:
    """All nodes below roots, arguments before users, each once, in a deterministic order. Roots
    remember what is below them where they are FEW: passes ask again and again."""
    if len(roots) == 1:
        return (*_below(roots[0]), roots[0])
    if len(roots) <= FEW:
        return dict.fromkeys(n for r in roots for n in (*_below(r), r))
    return _walked(roots)


def _below(root: Node) -> tuple[Node, ...]:
    if root._below is None:
        root._below = tuple(_walked((root,))[:-1])  # without itself: that would be a cycle
    return root._below


def _walked(roots: Sequence[Node]) -> list[Node]:
    order: dict[Node, None] = {}
    stack = list(reversed(roots))
    while stack:
        n = stack[-1]
        if n in order:
            stack.pop()
            continue
        if n._below is not None:
            order.update(dict.fromkeys(n._below))
        elif todo := [a for a in reversed(n.args) if a not in order]:
            stack += todo
            continue
        stack.pop()
        order[n] = None
    return list(order)


def index_exprs(n: Node) -> tuple[Size, ...]:
    """The integer expressions in a node's attribute."""
    if n.op == "load":
        assert isinstance(n.attr, Load), n
        return n.attr.index
    if n.op == "index":
        assert isinstance(n.attr, (int, Expr)), n
        return (n.attr,)
    return ()


def exprs_of(n: Node) -> tuple[Size, ...]:
    """All expressions on sizes in a node's attribute."""
    return (n.attr.size,) if isinstance(n.attr, Bound) else index_exprs(n)


def check_of(n: Node) -> Check | None:
    """What the call fails with if this node's promise does not hold; None for nodes that promise
    nothing."""
    if isinstance(n.attr, Bound):
        return n.attr.check
    return n.attr if isinstance(n.attr, Check) else None


def rewrite(
    root: Node, fn: Callable[[Node, tuple[Node, ...]], Node], memo: dict[Node, Node] | None = None
) -> Node:
    """Rebuilds a DAG bottom-up: fn(old node, new args) -> new node. memo is shared between calls
    that rewrite alike."""
    memo = {} if memo is None else memo
    for n in walk((root,)):
        if n not in memo:
            memo[n] = fn(n, tuple([memo[a] for a in n.args]) if n.args else ())
    return memo[root]


def with_args(n: Node, args: tuple[Node, ...]) -> Node:
    """n on other arguments."""
    return n if args == n.args else node(n.op, args, n.attr, n.dtype)


def substitute_vars(
    root: Node, env: Mapping[Atom, Size], memo: dict[Node, Node] | None = None
) -> Node:
    """root with loop variables replaced by expressions (which hold no Arg symbols; see inline for
    those that do)."""

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load":
            assert isinstance(n.attr, Load), n
            index = tuple(substitute(e, env) for e in n.attr.index)
            return node("load", args, Load(n.attr.buf, index, n.attr.masked), n.dtype)
        if n.op == "index":
            assert isinstance(n.attr, (int, Expr)), n
            value = substitute(n.attr, env)
            return integer(value, args)
        return with_args(n, args)

    return rewrite(root, fn, memo)


@lru_cache(1 << 12)
def loop_vars(prefix: str, sizes: tuple[Size, ...]) -> tuple[Expr, ...]:
    """Fresh loop variables prefix0, prefix1, ... with 0 <= var < size."""
    return tuple(symbol(f"{prefix}{k}", extent=s) for k, s in enumerate(sizes))


# ------------------------------------------------------------------------------------------ buffers
@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in memory. strides: in elements; fixed=False means that the scheduler may still
    choose the layout. offset: of its first element from what the pointer argument points at (always
    0 except for inputs seen as views: 0 there too)."""

    name: str
    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    device: str = "cpu"
    fixed: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it is known to have no element, and nothing else of its layout is a symbol."""
        return 0 in self.shape and all(isinstance(n, int) for n in (*self.shape, *self.strides))


# -------------------------------------------------------------------------------------------- loops
@dataclass(frozen=True, slots=True)
class Pointwise:
    """out[index] = body for every point of vars. index None: out[i0, i1, ...], vars have the
    extents of out's shape, in order.

    Otherwise the loop writes a part of out only (one piece of a concatenation, a slice): several
    Pointwise of one `out` with disjoint indices define it together, and it cannot be inlined."""

    out: str
    vars: tuple[Expr, ...]
    body: Node
    index: tuple[Size, ...] | None = None
    origin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """outs[m][vars] = (m-th result of) kind, a row of REDUCTIONS, over all rvars of body. vars are
    i0.., rvars r0...

    One out except for welford (mean, m2, count; a name may be None if nobody reads it). Reduced
    axes are NOT kept in outs; a keepdim result is a view. body's dtype is the accumulation dtype;
    outs have that dtype (i64 for arg reductions, b1 for any/all). down: see `settle_rows`."""

    outs: tuple[str | None, ...]
    vars: tuple[Expr, ...]
    rvars: tuple[Expr, ...]
    kind: str
    body: Node
    origin: tuple[str, ...] = ()
    down: bool | None = None


@dataclass(frozen=True, slots=True)
class Scatter:
    """out[index] (mode)= body for every point of vars, in row-major order of vars where points
    collide.

    out starts as a copy of buffer `base` (same shape; the scheduler copies or, when base dies,
    reuses its memory); where base is out (made by the scheduler only), it updates that buffer in
    place. index: over vars and Arg symbols, whose values are `index_args`. mode: 'store', 'add',
    'mul', 'min', 'max'. mask: a b1 node or None: points to leave out."""

    out: str
    base: str
    vars: tuple[Expr, ...]
    index: tuple[Size, ...]
    index_args: tuple[Node, ...]
    body: Node
    mode: str
    mask: Node | None = None
    origin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scan:
    """out[vars with axis] = inclusive running combination of body along vars[axis]. kind: a row of
    REDUCTIONS that scans. outs: (values,) or, for max and min, (values, positions i64 as PyTorch's
    cummax: the last of equal ones). down: see `settle_rows`."""

    outs: tuple[str | None, ...]
    vars: tuple[Expr, ...]
    axis: int
    kind: str
    body: Node
    origin: tuple[str, ...] = ()
    down: bool | None = None


Loop = Pointwise | Reduction | Scatter | Scan


@dataclass(frozen=True, slots=True)
class Alias:
    """Buffer `out` is memory of buffer `base`, seen with out's shape, strides, dtype and this
    element offset (as_strided, view as another dtype). relative=False: offset counts from the start
    of base's storage."""

    out: str
    base: str
    offset: Size
    relative: bool = True


@dataclass(frozen=True, slots=True)
class Item:
    """Symbol `name` is the value of one-element buffer `buf`, an integer (or bool)."""

    name: str
    buf: str


@dataclass(frozen=True, slots=True)
class Assert:
    """The call fails with message unless expr != 0; values and error as in
    wrapper.instructions.AssertScalar."""

    expr: Size
    message: str
    values: tuple[Size, ...] = ()
    error: str = "RuntimeError"


@dataclass(frozen=True, slots=True)
class Mutate:
    """Input buffer `target` takes the value of buffer `source` (same shape; the trailing copy_ of a
    functional graph). Happens after everything else that reads the old value of target."""

    target: str
    source: str


Op = Pointwise | Reduction | Scatter | Scan | Extern | Alias | Item | Assert | Mutate


def fences(ops: Sequence[Op]) -> tuple[int, ...]:
    """The places of the fences among ops."""
    return tuple(k for k, op in enumerate(ops) if isinstance(op, Extern) and op.fence)


@dataclass(frozen=True)
class LoopProgram:
    """A lowered graph: what `lower` gives to `schedule`.

    inputs: in calling order; each is a buffer name, ('sym', name) for an int, or None for an opaque
    or unused input.
    buffers: every buffer by name (inputs and constants too). constants: buffer -> its place in the
    table of tensors, which subprograms share.
    ops: in an order that respects the program. outputs: what the program returns, in order.
    symbols: every size symbol that appears, in an order of definition, and where its value comes
    from: (buffer, 'size'|'stride'|'offset', dim), an expression over symbols before it, or None for
    an int input or an Item.
    donated: inputs whose memory nobody reads after the call. hints: what symbols were in the call
    that is compiled for: decisions may be made for these sizes, and are right for all others.
    programs: subprograms, which its calls run by number (`calls.Control`)."""

    inputs: tuple[str | tuple[str, str] | None, ...]
    buffers: Mapping[str, Buffer]
    constants: Mapping[str, int]
    ops: tuple[Op, ...]
    outputs: tuple[TensorArg | Scalar | Size, ...]
    symbols: Mapping[str, tuple[str, str, int] | Size | None]
    donated: tuple[str, ...] = ()
    hints: Mapping[str, int] = field(default_factory=dict)
    programs: tuple[LoopProgram, ...] = ()

    @cached_property
    def given(self) -> frozenset[str]:
        """The buffers that are there before the first op: inputs and constants."""
        return frozenset((*self.constants, *[i for i in self.inputs if type(i) is str]))

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The buffers that the program returns, each once."""
        return tuple(dict.fromkeys([o.buf for o in self.outputs if isinstance(o, TensorArg)]))
