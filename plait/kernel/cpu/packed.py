"""Products with packed weights as C++: a tile of rows and columns at a time, whose sums stay in
registers while the panel of weights goes by.

Comes in: what is known of a packed `Product`. Goes out: the text of its epilogue and of a function,
which calls what all such functions share (`packed_shared.py`). Threads share tiles. Sums are cut
every few hundred products and added up, so that rounding errors do not grow with the length of a
row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.errors import InternalError
from plait.ir.calls import TensorArg
from plait.ir.dtypes import b1, f32
from plait.ir.expr import Size
from plait.ir.loops import Load, Node, walk
from plait.ir.product import PRODUCT, Pair, Panels, Product
from plait.kernel.cpu.expr import Parts, literal, memory, vector_cast, vector_node
from plait.kernel.cpu.packed_shared import LONGEST_SUM, NEAR_NBYTES, indented, most_rows, stretch_of
from plait.runtime.toolchain import Isa

KERNEL = "PACKED_KERNEL"
"""Stands for the symbol in a text."""
HEAD = f'extern "C" i64 {KERNEL}(i64 tid, i64 nthreads, void* const* bufs, const i64* syms)'
"""Of a function."""
OWN = "// of one kernel\n"
"""Behind the text of an epilogue; that of a kernel comes last."""
_A_TILE = 1.5
"""What loading a panel costs, in rows."""


# benchmarks/packed_cpu.py: the rows of "minilm up", the blocks of "minilm down" and "gpt2 down".
_NEAR_NBYTES, _FEWEST_BLOCKS = NEAR_NBYTES // 2, 10
"""Of rows that meet a panel one after the other; and so many blocks of long rows, if NEAR_NBYTES
twice have room for them."""


@dataclass
class Tile:
    """What one pass over a panel computes: rows by vectors of columns."""

    rows: int
    vectors: int

    def __str__(self) -> str:
        return f"tile_{self.rows}x{self.vectors}"


def tile_of(p: Panels, rows: Size | None, isa: Isa) -> Tile:
    """The tile that wastes fewest rows and loads."""
    able = most_rows(isa)
    vectors = next(v for v in sorted(able, reverse=True) if p.width % (v * isa.lanes) == 0)
    most = able[vectors]
    if not isinstance(rows, int):
        return Tile(most, vectors)
    fitting = range(max(1, most - 2), most + 1) if rows >= most else (max(rows, 1),)
    return Tile(min(fitting, key=lambda r: -(-rows // r) * (r + _A_TILE)), vectors)


@dataclass
class Writer:
    """One kernel. body: of its result. tensors, sizes: its operands. rows: of a call, as text,
    where they are not all."""

    packed: Panels
    body: Node
    tensors: Sequence[TensorArg]
    sizes: Sequence[Size]
    isa: Isa
    rows: str = ""

    def text(self) -> str:
        """The epilogue and the function."""
        name, epilogue = self.epilogue()
        before, known, call = self.call("tid, nthreads, bufs", name)
        return f"{epilogue}{OWN}{before}{HEAD} {{\n{indented([known, f'return {call};'])}}}\n"

    def steps(self) -> list[Size]:
        """How far the rows of what results load lie apart; 0 where all rows load the same."""
        steps = [a.strides[0] for a in self.tensors[2:]]
        return [0, *steps[1:]] if self.packed.scaled else steps

    def call(self, to: str, epilogue: str) -> tuple[str, str, str]:
        """What calls the walk. to: what a kernel is given. Before it what stands before the
        function, and in it."""
        before, call = self._call()
        down = ", ".join(map(str, self.steps()))
        known = f"static const i64 down[] = {{{down}}};" if down else "const i64* down = nullptr;"
        args = f"({to}, {len(self.tensors) - 2}, down, {epilogue}, "
        return before, known, call.replace("(", args, 1)

    def rows_at(self, places: Sequence[int | None]) -> str:
        """The buffers from `row` on. places: of them; None: `rows`, which begin there."""
        steps = [self.packed.depth, 0, *self.steps(), self.packed.columns]
        texts = []
        for place, step in zip(places, steps, strict=True):
            at = f"bufs[{place}]" if place is not None else "rows"
            texts.append(f"(f32*){at} + row * {step}" if step and place is not None else at)
        return ", ".join(texts)

    def epilogue(self) -> tuple[str, str]:
        """Its name and text."""
        text = self._epilogue()
        name = f"epilogue_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return name, f"static void {name}{text}"

    def given_sizes(self) -> str:
        """The sizes, as arguments."""
        dynamic = iter(range(len(self.sizes)))
        given = (n if isinstance(n, int) else f"syms[{next(dynamic)}]" for n in self.sizes)
        return ", ".join(map(str, given))

    def _call(self) -> tuple[str, str]:
        """The call of what kernels share, without what every one is given, and what stands before
        the function."""
        p, w = self.packed, self.packed.window
        tile = tile_of(p, self.sizes[0], self.isa)
        if w is None or w.is_point:
            each = stretch_of(p.depth)
            rows = self.rows or self.given_sizes().partition(",")[0]
            scaled = "true" if p.scaled else "false"
            return "", f"packed_rows({self.panels(tile, each)}, {rows}, {scaled})"
        (high, wide), side = w.kernel, 1
        if not any(w.padding) and w.dilation[1] == 1:
            wide, side = 1, wide
        stretches, length = high * wide, p.depth * side
        each = max(1, LONGEST_SUM // length)
        if stretches * length <= LONGEST_SUM * 3 // 2:
            each = stretches
        before, zeros = "", "nullptr"
        if any(w.padding):
            zeros = f"{KERNEL}_zeros"
            before = f"static const f32 {zeros}[{p.depth}] = {{}};\n"
        geometry = ", ".join(map(str, (*w.stride, *w.padding, *w.dilation)))
        return before, (
            f"packed_image({self.panels(tile, each, each < stretches)}, {high}, "
            f"{wide}, {side}, {geometry}, {zeros}, {self.given_sizes()})"
        )

    def panels(self, tile: Tile, each: int, adds: bool = False) -> str:
        """What is known of tiles and panels, as arguments. adds: sums are added to others."""
        p, block = self.packed, 4 * self.packed.depth * tile.rows
        near = max(1, _NEAR_NBYTES // block, min(_FEWEST_BLOCKS, 2 * NEAR_NBYTES // block))
        if p.window is not None and not p.window.is_point:
            near = max(1, NEAR_NBYTES // block)
        add = f"{tile}_more" if adds else "nullptr"
        numbers = tile.rows, tile.vectors, p.width, near, each, p.depth, p.columns
        return f"{tile}, {add}, {', '.join(map(str, numbers))}"

    def _epilogue(self) -> str:
        """What follows the name of the epilogue: a row after the other."""
        out, lanes = len(self.tensors), self.isa.lanes
        given, t = self.body.dtype, memory(self.body.dtype)
        body = self.body if given == f32 else self.body.args[0]  # rounded where it is stored
        lines = [f"const f32* const g{k - 2} = (const f32*)bufs[{k}];" for k in range(2, out)]
        lines += [
            f"{t}* const out = ({t}*)bufs[{out}];",
            f"const i64 left = (columns - n + {lanes - 1}) / {lanes};",
            "const i64 n_vectors = left < vectors ? left : vectors;",
            "for (i64 i = 0; i < count; ++i, ++row, sums += apart) {",
            f"for (i64 v = 0, at = n; v < n_vectors; ++v, at += {lanes}) {{",
        ]
        known: dict[Node, Parts] = {}
        value = "sums[v]"
        if not isinstance(body.attr, Load) or body.attr.buf != PRODUCT:
            for n in walk((body,)):
                known[n] = self._value(n, known, lines)
            value = known[body][0]
        (value,) = vector_cast((value,), f32, given)
        place = "out + row * columns + at"
        if self.packed.columns % self.isa.lanes == 0:
            lines.append(f"st_{t}({place}, {value});")
        else:
            lines.append(f"stn_{t}({place}, {value}, columns - at);")
        head = (
            "(\n    void* const* bufs, const i64* down, const vf32* sums, i64 apart, i64 count, "
            "i64 row,\n    i64 n, i64 vectors, i64 columns)"
        )
        return f"{head} {{\n{indented([*lines, '}', '}'])}}}\n"

    def _value(self, n: Node, known: Mapping[Node, Parts], lines: list[str]) -> Parts:
        """A node of the epilogue, as a variable."""
        if n.op == "const":
            assert isinstance(n.attr, (bool, int, float)), n
            if n.dtype == b1:
                return (f"splat_i32({-1 if n.attr else 0})",)
            return (f"splat_f32({literal(n.attr, f32)})",)
        if isinstance(n.attr, Load):
            text = self._loaded(n.attr)
        else:
            args = tuple(known[a] for a in n.args)
            (text,) = vector_node(n, args)
        name = f"e{len(known)}"
        lines.append(f"const {'vi32' if n.dtype == b1 else 'vf32'} {name} = {text};")
        return (name,)

    def _loaded(self, load: Load) -> str:
        """What the epilogue loads: a vector of columns, or a number that all of them share."""
        if load.buf == PRODUCT:
            return "sums[v]"
        k = int(load.buf.removeprefix("given"))
        row, column = self.tensors[2 + k].strides
        if not isinstance(row, int) or column not in (0, 1):
            raise InternalError(f"an epilogue loads with strides {row}, {column}")
        place = f"g{k} + row * down[{k}]" if row else f"g{k}"
        if column == 0:
            return f"splat_f32(*({place}))"
        if self.packed.columns % self.isa.lanes == 0:
            return f"ld_f32({place} + at)"
        return f"ldn_f32({place} + at, columns - at)"


def pair_text(pair: Pair, tensors: Sequence[TensorArg], rows: int, isa: Isa) -> str:
    """The epilogues and the function of two products. Of some rows at a time, those that the first
    makes lie where all others of this thread did."""
    assert isinstance(pair.first.how, Panels), pair
    columns, n = pair.first.how.columns, len(tensors)
    tall = tile_of(pair.first.how, rows, isa).rows
    some = max(1, NEAR_NBYTES // (4 * columns) // tall) * tall
    between = TensorArg(pair.first.results[0].out, (rows, columns), (columns, 1), 0)
    first = _part(pair.first, tensors[: pair.operands], (some,), isa)
    second = _part(pair.second, (between, *tensors[pair.operands :]), (some,), isa)
    lines = [
        f"const i64 begin = {rows} * tid / nthreads, end = {rows} * (tid + 1) / nthreads;",
        "for (i64 row = begin, count; row < end; row += count) {",
        f"count = end - row < {some} ? end - row : {some};",
        f"f32* const rows = (f32*)bufs[{n}] + begin * {columns};",
    ]
    texts = []
    for part, places in (
        (first, [*range(pair.operands), None]),
        (second, [None, *range(pair.operands, n), n + 1]),
    ):
        name, epilogue = part.epilogue()
        _, known, call = part.call("0, 1, b", name)
        texts.append(epilogue)
        lines += ["{", f"void* const b[] = {{{part.rows_at(places)}}};", known, f"{call};", "}"]
    lines += ["}", "return 0;"]
    return OWN.join((*texts, f"{HEAD} {{\n{indented(lines)}}}\n"))


def _part(p: Product, tensors: Sequence[TensorArg], sizes: Sequence[Size], isa: Isa) -> Writer:
    assert isinstance(p.how, Panels), p
    return Writer(p.how, p.results[0].body, tensors, sizes, isa, rows="count")
