"""Prints a formula of an element as a function in Triton, of a whole tile of them.

In: a `Formula`, or results of a product, and what their loads are of. Out: the text of a function
of the values that it is given (VALUES), of scalar positions (batch, head, part), of i and j (a
column and a row, or a row and a column), of where these lie inside of the tensors, and of `given`,
a tuple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from plait.ir.attention import Addition, Formula
from plait.ir.calls import TensorArg
from plait.ir.checks import Bound
from plait.ir.dtypes import f32, i64
from plait.ir.expr import (
    Atom,
    Expr,
    Size,
    atom_of,
    bounds,
    fold,
    free_symbols,
    product,
    substitute,
    symbol,
    total,
)
from plait.ir.loops import (
    Load,
    Node,
    Pointwise,
    check_of,
    exprs_of,
    is_arg,
    node,
    substitute_vars,
    walk,
    with_args,
)
from plait.ir.ops import OPS
from plait.ir.product import PARTNER, PRODUCT, RIGHT, Part, Product
from plait.ir.rules import Simplifier
from plait.kernel.triton.choose_forms import Form, codec, inverse, near, short_form
from plait.kernel.triton.indices import SIGN, function_text
from plait.kernel.triton.ops import NEAR, bitcast, cast, literal, render
from plait.schedule.deps import extent
from plait.schedule.legalize.find_narrow import find_rounded

VALUES = ("score", "grad", PRODUCT, PARTNER)
INSIDE = {"i": "i_inside", "j": "j_inside"}
_LIMIT = 2**31


def function_of(
    name: str, params: Sequence[str], formula: Formula | None, given: Sequence[TensorArg],
    sizes: Mapping[str, str], narrow: bool,
) -> tuple[str, bool]:  # fmt: skip
    """The function, and whether it holds run-time checks. formula: None gives the first parameter.
    sizes: what holds each size symbol. narrow: what is made of it is rounded to 16 bits."""
    written = _Function(given, sizes, narrow)
    result = params[0] if formula is None else written.value(formula.body)
    head = f"@triton.jit\ndef {name}({', '.join(params)}):"
    return "\n    ".join([head, *written.lines, f"return {result}"]), written.checks


def loading_function_of(
    name: str, params: Sequence[str], formula: Formula | None, given: Sequence[TensorArg],
    sizes: Mapping[str, str], narrow: bool, loads_first: bool,
) -> tuple[str, bool]:  # fmt: skip
    """The same in two functions: loads_of_NAME, of all parameters but the first, where loads_first
    loads what does not depend on that; the other has the tuple that it returns as its second."""
    first, rest = (_Function(given, sizes, narrow) for _ in range(2))
    body = [] if formula is None or not loads_first else [formula.body]
    loads = [n for n in walk(body) if isinstance(n.attr, Load) and not _is_given(n)]
    for k, n in enumerate(loads):
        first.value(n)
        rest.know(n, f"loaded[{k}]", first)
    loaded = [first.value(n) for n in loads] or [params[1]]  # an empty tuple has no type
    result = rest.value(formula.body) if formula else params[0]
    heads = (
        f"@triton.jit\ndef loads_of_{name}({', '.join(params[1:])}):",
        f"@triton.jit\ndef {name}({', '.join((params[0], 'loaded', *params[1:]))}):",
    )
    texts = (
        "\n    ".join([heads[0], *first.lines, f"return ({', '.join(loaded)},)"]),
        "\n    ".join([heads[1], *rest.lines, f"return {result}"]),
    )
    return "\n\n".join(texts), first.checks or rest.checks


def _is_given(n: Node) -> bool:
    """Whether a value depends on one that a function is given."""
    return any(isinstance(x.attr, Load) and x.attr.buf in VALUES for x in walk((n,)))


def additions_of(
    params: Sequence[str], additions: Sequence[Addition], given: Sequence[TensorArg],
    added: Sequence[TensorArg], sizes: Mapping[str, str],
) -> tuple[str, bool]:  # fmt: skip
    """The function that adds to tensors what a tile of scores gives, and whether it holds run-time
    checks. Scores that share an element are summed first. Its last parameters: which scores count,
    what it loads, and what it adds to."""
    written = _Function(given, sizes, False)
    for a in additions:
        written.add(a, added[a.to])
    head = f"@triton.jit\ndef add_gradients({', '.join(params)}):"
    return "\n    ".join([head, *(written.lines or ["pass"])]), written.checks


def results_of(
    kernel: Product, given: Sequence[TensorArg], outs: Sequence[TensorArg],
    sizes: Mapping[str, str], aligned: bool = False, by_row: bool = False,
) -> tuple[str, bool]:  # fmt: skip
    """The function that computes results of a tile of a product and writes them, and whether it
    holds run-time checks. Its last parameters: what it loads, and what it writes. aligned: all
    columns lie inside, and the first of each row is written to a multiple of 16 bytes. by_row: what
    kernels of loops approximate, where rows keep their bits, is so here."""
    inside = {"i": "i_inside"} if aligned else INSIDE
    written = _Function(given, sizes, False, inside=inside)
    if by_row:
        written.rounded = find_rounded([r.body for r in kernel.results])
    places = {out.buf: k for k, out in enumerate(outs)}
    for r, part in kernel.pieces:
        k = places[r.out]
        written.go_over(part, r.vars[-1])
        written.write(r, f"outs[{k}]", outs[k], aligned)
    params = (PRODUCT, PARTNER, "p", "b", "i", "j", "i_inside", "j_inside", "given", "outs")
    name = "finish_aligned" if aligned else "finish"
    head = f"@triton.jit\ndef {name}({', '.join(params)}):"
    return "\n    ".join([head, *written.lines]), written.checks


def operand_of(
    right: Pointwise, stored: TensorArg, given: Sequence[TensorArg], sizes: Mapping[str, str],
    depth: int, edge: bool, float8: bool,
) -> str:  # fmt: skip
    """The function that makes a tile of a right matrix, columns by a step along k, of what lies in
    memory. stored: the operand. depth: of a step. edge: columns may lie outside of the matrix. Its
    parameters: the batch, the step, columns, and which lie inside.

    Where two elements that follow each other along k are parts of one in memory, a position is that
    of a pair."""
    k = right.vars[1]
    simplify = Simplifier()

    def at(fold: int, e: int) -> Node:
        q, step = symbol("q", extent=depth // fold), symbol("step", extent=extent(k) // depth)
        return simplify(substitute_vars(right.body, {atom_of(k): step * depth + q * fold + e}))

    bodies = [at(2, 0), at(2, 1)]
    if len({frozenset(n for n in walk((b,)) if _is_stored(n)) for b in bodies}) > 1:
        bodies = [at(1, 0)]
    length = depth // len(bodies)
    grouped = [_in_groups(b, length) for b in bodies]
    bodies = [b for b, _ in grouped]
    inside = {"j": "j_inside"} if edge else {}
    written = _Function(given, sizes, False, positions="qj", inside=inside, stored=stored)
    written.float8 = float8
    if float8:
        # A product gives NaN for NaN of either sign.
        signs = any(n.op in ("copysign", "signbit") for n in walk(bodies))
        written.forms = {} if signs else {"p_of_": "p_number_of_"}
    values = [written.value(b) for b in bodies]
    shape = f"[j.shape[0], {length}]"
    tiles = [f"tl.broadcast_to({v}, {shape})" for v in values]
    result = f"tl.interleave({', '.join(tiles)})" if len(tiles) > 1 else tiles[0]
    sizes_of = {"q": length} | {f"q{g}": length // g for _, some in grouped for g in some}
    constants = [f"{name} = tl.arange(0, {n})[None, :]" for name, n in sizes_of.items()]
    head = "@triton.jit\ndef right_tile(b, step, j, j_inside, right, given):"
    return "\n    ".join([head, *constants, *written.lines, f"return {result}"])


_SPREAD = "spread"
"""The operator of a node whose argument has one element for so many that follow each other along k:
these are its elements."""


def _in_groups(body: Node, length: int) -> tuple[Node, list[int]]:
    """A formula of positions q, which are so many, where what only the group of a position decides,
    such as a scale of every 32 elements, is loaded and computed once a group. The groups' sizes: of
    32 positions, q32 is a group."""
    q = symbol("q", extent=length)
    simplify, each, made = Simplifier(), dict[Node, int](), dict[Node, Node]()
    groups: dict[int, None] = {}
    for n in walk((body,)):
        own = [_group_of(e, q, length) for e in exprs_of(n)]
        found = {g for g in (*own, *(each[a] for a in n.args)) if g}
        each[n] = 0 if not found else found.pop() if len(found) == 1 else 1

    def spread(n: Node) -> Node:
        g = each[n]
        if g < 2 or not any(isinstance(x.attr, Load) for x in walk((n,))):
            return made[n]
        groups[g] = None
        inner = substitute_vars(n, {atom_of(q): symbol(f"q{g}", extent=length // g) * g})
        return node(_SPREAD, (simplify(inner),), g, n.dtype)

    for n in walk((body,)):
        args = n.args if each[n] != 1 else tuple(spread(a) for a in n.args)
        made[n] = with_args(n, args)
    return spread(body), list(groups)


def _group_of(e: Size, q: Expr, length: int) -> int:
    """How many positions that follow each other have one value of an expression; 0: all have."""
    if not isinstance(e, Expr) or atom_of(q) not in free_symbols(e):
        return 0
    g = length // 2
    while g > 1:
        inside = symbol("r", extent=g)
        at = substitute(e, {atom_of(q): symbol("u", extent=length // g) * g + inside})
        if atom_of(inside) not in free_symbols(at):
            return g
        g //= 2
    return 1


def _is_stored(n: Node) -> bool:
    return isinstance(n.attr, Load) and n.attr.buf == RIGHT


class _Function:
    """The lines of one function.

    positions: names of variables that are blocks. inside: the conditions under which they lie
        inside of the tensors, for those that may lie outside.
    stored: the operand of which the right matrix is made.
    float8: floats of 8 bits have instructions. forms: helpers that take the place of others.
    rounded: values that may be approximated.
    """

    def __init__(
        self, given: Sequence[TensorArg], sizes: Mapping[str, str], narrow: bool,
        positions: str = "ij", inside: Mapping[str, str] = INSIDE,
        stored: TensorArg | None = None,
    ) -> None:  # fmt: skip
        self.given, self.sizes, self.narrow = given, sizes, narrow
        self.positions, self.inside, self.stored = positions, inside, stored
        self.float8 = False
        self.forms: Mapping[str, str] = {}
        self.rounded: Set[Node] = frozenset()
        self.lines: list[str] = []
        self.checks = False
        self._names: dict[Node, str] = {}
        self._positions: dict[Node, frozenset[str]] = {}

    def know(self, n: Node, name: str, there: _Function) -> None:
        """What another function computed of a node is handed over under a name."""
        self._names[n], self._positions[n] = name, there._positions[n]

    def value(self, root: Node) -> str:
        """The variable that holds a node's value."""
        stack = [root]
        while stack:
            n = stack[-1]
            if n in self._names:
                stack.pop()
                continue
            form = (codec(n) if self.float8 else None) or short_form(n)
            form = form or (near(n) if n in self.rounded else None) or inverse(n)
            needed = n.args if form is None else form.operands
            if missing := [a for a in needed if a not in self._names]:
                stack += reversed(missing)
                continue
            stack.pop()
            self._positions[n] = self._positions_of(n, needed)
            text = self._text(n) if form is None else self._formed(form)
            self._names[n] = f"t{len(self._names)}"
            self.lines.append(f"{self._names[n]} = {text}")
        return self._names[root]

    def add(self, addition: Addition, to: TensorArg) -> None:
        """Adds what a tile gives to a tensor."""
        x, at = f"x{len(self.lines)}", f"at{len(self.lines)}"
        value = self.value(addition.body)
        index = [self.value(n) for n in addition.index]
        moved = frozenset[str]().union(*(self._positions[n] for n in addition.index))
        self.lines.append(f"{x} = tl.where(counts, {value}, 0.0)")
        for axis, v in ((1, "j"), (0, "i")):
            if v not in moved:
                self.lines.append(f"{x} = tl.sum({x}, {axis}, keep_dims=True)")
        self.lines.append(f"{at} = tl.full({x}.shape, 0, tl.int64)")
        mask = ["counts" if moved == {*"ij"} else f"{v}_inside" for v in sorted(moved)]
        for name, n, stride in zip(index, to.shape, to.strides, strict=True):
            self.lines.append(f"{at} += {name} * {self._expr(stride, ())}")
            mask.append(f"({name} >= 0) & ({name} < {self._expr(n, ())})")
        inside = " & ".join(dict.fromkeys([*mask, f"({at} >= 0)"]))  # of the tile's shape
        self.lines.append(
            f"tl.atomic_add(added[{addition.to}] + {at}, {x}, {inside}, sem='relaxed')"
        )

    def go_over(self, part: Part | None, j: Expr) -> None:
        """What follows is of these columns alone."""
        inside = INSIDE["j"]
        if part is not None:
            inside = f"inside{len(self.lines)}"
            at = self._expr(j % part.period, ())
            low, high = f"({at} >= {part.first})", f"({at} < {part.first + part.length})"
            self.lines.append(f"{inside} = {INSIDE['j']} & {low} & {high}")
        if self.inside.get("j", inside) != inside:  # loads have other conditions
            self.inside = {**self.inside, "j": inside}
            self._names.clear()

    def write(self, r: Pointwise, to: str, out: TensorArg, aligned: bool = False) -> None:
        """Writes a result of a tile. to: the pointer. aligned: as of results_of."""
        assert r.index is not None, r
        value = f"tl.broadcast_to({self.value(r.body)}, {PRODUCT}.shape)"
        at = total(e * s for e, s in zip(r.index, out.strides, strict=True))
        place = f"{to} + {self._expr(at, ())}"
        if not {r.vars[2].symbol, r.vars[3].symbol} <= {*free_symbols(at)}:  # one row or column
            place = f"tl.broadcast_to({place}, {PRODUCT}.shape)"
        if aligned:
            place = f"tl.multiple_of({place}, (1, 16))"
        self.lines.append(f"tl.store({place}, {value}, {' & '.join(self.inside.values())})")

    def _positions_of(self, n: Node, needed: Sequence[Node]) -> frozenset[str]:
        """Which of the positions a value depends on."""
        if isinstance(n.attr, Load) and n.attr.buf in VALUES:
            return frozenset("ij")
        exprs = n.attr.index if isinstance(n.attr, Load) else (n.attr,)
        names = {a.name for e in exprs if isinstance(e, Expr) for a in free_symbols(e)}
        found = frozenset(names & {*self.positions})
        return found.union(*(self._positions[a] for a in needed))

    def _formed(self, form: Form) -> str:
        text = form.text
        for old, new in self.forms.items():
            text = text.replace(old, new)
        return text.format(*(self._names[a] for a in form.operands))

    def _text(self, n: Node) -> str:
        args = tuple(self._names[a] for a in n.args)
        if n.op in SIGN and all(map(_is_short, n.args)):
            left, right = (self._short(a) for a in n.args)
            return f"({left} {SIGN[n.op]} {right})"
        if self.narrow and n.dtype == f32 and n.op in ("tanh", "exp"):
            return NEAR[n.op].format(*args)
        if n.op in OPS:
            return render(n.op, n.args[-1].dtype, args)
        if n.op == "load":
            return self._load(n, args)
        if n.op == "index":
            assert isinstance(n.attr, Expr), n
            return f"({self._expr(n.attr, args)}).to(tl.int64)"
        if n.op == "bounded":
            return self._bounded(n, args)
        if n.op == "nonzero":
            return f"tl.where({args[0]} == 0, 1, {args[0]})"
        if n.op == "cast":
            short = n.dtype.is_float and _is_short(n.args[0])
            return cast(self._short(n.args[0]) if short else args[0], n.args[0].dtype, n.dtype)
        if n.op == "bitcast":
            return bitcast(args[0], n.dtype)
        if n.op == _SPREAD:
            return f"p_spread({args[0]}, {n.attr})"
        assert n.op == "const" and isinstance(n.attr, (bool, int, float)), n
        return literal(n.attr, n.dtype)

    def _load(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, Load), n
        if n.attr.buf in VALUES:
            return n.attr.buf
        if n.attr.buf == RIGHT:
            assert self.stored is not None, n
            name, operand = RIGHT, self.stored
        else:
            number = int(n.attr.buf.removeprefix("given"))
            name, operand = f"given[{number}]", self.given[number]
        at = total(e * s for e, s in zip(n.attr.index, operand.strides, strict=True))
        conditions = self._inside(n)
        if n.attr.masked:
            conditions.append(args[-1])
        mask = f", {' & '.join(conditions)}, other=0" if conditions else ""
        return f"tl.load({name} + {self._expr(at, args)}{mask})"

    def _bounded(self, n: Node, args: tuple[str, ...]) -> str:
        """As in kernels of loops: a check on the device, and a value that is in range."""
        check = check_of(n)
        assert isinstance(n.attr, Bound) and check is not None, n
        self.checks = True
        good = f"({args[0]} >= 0) & ({args[0]} < {self._expr(n.attr.size, ())})"
        outside = [f"~{m}" for m in (*args[1:], *self._inside(n))]
        held = " | ".join([f"({good})", *outside])
        self.lines.append(f"tl.device_assert({held}, {check.message!r})")
        return f"tl.where({good}, {args[0]}, 0)"

    def _inside(self, n: Node) -> list[str]:
        """Conditions under which positions of a value lie inside of the tensors."""
        return [self.inside[v] for v in sorted(self._positions[n]) if v in self.inside]

    # ---- integers
    def _short(self, n: Node) -> str:
        """An integer that has 32 bits."""
        if n.op == "const":
            return str(n.attr)
        assert isinstance(n.attr, Expr), n
        return self._expr(n.attr, tuple(self._names[a] for a in n.args))

    def _expr(self, e: Size, args: Sequence[str]) -> str:
        """An expression, in 64 bits where 32 might not hold it. args: the values of its Arg
        symbols."""
        wide = not _fits(e)

        def atom(a: Atom) -> str:
            if a.kind != "sym":
                return self._function(a, args)
            if is_arg(a):
                return f"{args[int(a.name[1:])]}{'' if wide else '.to(tl.int32)'}"
            name = self.sizes.get(a.name, a.name)
            return f"{name}.to(tl.int64)" if wide else name

        text: str = fold(e, atom, str, lambda a, b: f"({a} + {b})", lambda a, b: f"({a} * {b})")
        return text

    def _function(self, a: Atom, args: Sequence[str]) -> str:
        return function_text(a, self._expr(a.a, args), self._expr(a.b, args), "tl.int32")


def _is_short(n: Node) -> bool:
    """Whether a value is an integer that 32 bits hold on the whole way to it."""
    if n.dtype != i64 or n.args:
        return False
    if n.op == "const":
        assert isinstance(n.attr, int), n
        return -_LIMIT < n.attr < _LIMIT
    return n.op == "index" and isinstance(n.attr, Expr) and _fits(n.attr)


def _fits(e: Size) -> bool:
    parts: list[Size] = [e]
    if isinstance(e, Expr):
        for mono, c in e.terms:
            parts.append(product(a.expr for a in mono) * c)
            parts += (part for a in mono if a.kind != "sym" for part in (a.a, a.b))
    found = [bounds(p) for p in parts]
    return all(-_LIMIT < low and high < _LIMIT for low, high in found)
