"""Products with packed weights as C++: a tile of rows and columns at a time, whose sums stay in
registers while the panel of weights goes by.

Comes in: what is known of a packed `Product`. Goes out: the text of one function. Threads share
tiles. Sums are cut every few hundred products and added up, so that
rounding errors do not grow with the length of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from plait.errors import InternalError
from plait.ir.calls import TensorArg
from plait.ir.dtypes import b1, f32
from plait.ir.expr import Size
from plait.ir.loops import Load, Node, walk
from plait.ir.product import PRODUCT, Panels
from plait.kernel.cpu.expr import Parts, literal, vector_node
from plait.runtime.toolchain import Isa

KERNEL = "PACKED_KERNEL"
"""Stands for the symbol in a text."""
LONGEST_SUM = 512
"""So many products are added up one after the other, about as many as vendors' libraries do."""
# Registers, rows by columns of vectors, that left none to be spilled and were fastest on an AVX-512
# machine with 2 cores: benchmarks/packed_cpu.py.
MOST_ROWS = {5: 5, 4: 6, 3: 8, 2: 10, 1: 12}
_FEW_REGISTERS = (1, 8), (2, 5)
"""The same of machines with 16 vector registers: vectors, rows."""
_A_TILE = 1.5
"""What loading a panel costs, in rows."""
NEAR_NBYTES = 1 << 19
"""Of rows that stay in a core's own cache while all panels go by."""
_MANY_BLOCKS = 4
"""Of rows, that a thread has at least before it has rows of its own."""
_FAR_NBYTES = 3 << 19
"""Results that are larger are no longer in a core's cache, where their memory was used before."""
LINE = 16
"""Numbers in a line of a cache."""
_AHEAD = 32
"""So many rows of a panel before their turn they are fetched from far memory."""


def tile_text(rows: int, vectors: int, more: str, isa: Isa) -> str:
    """Sums of products of numbers of rows, which lie in stretches of one length, with the rows of
    a panel; gives where the panel goes on. Meanwhile it fetches, from memory far away, what comes
    soon in this panel, and a share of the next one. more: "_more" where they are added to other
    sums."""
    sums = [(i, v) for i in range(rows) for v in range(vectors)]
    lines = [f"vf32 {', '.join(f'c{i}_{v} = splat_f32(0.0f)' for i, v in sums)};"]
    lines.append(f"for (i64 s = 0; s < stretches; ++s, rows += {rows}) {{")
    lines += [f"const f32* const r{i} = rows[{i}];" for i in range(rows)]
    lines.append("for (i64 k = 0; k < length; ++k, b += width, next += step) {")
    lines.append("__builtin_prefetch(next, 0, 2);")
    for v in range(vectors):
        lines.append(f"const vf32 b{v} = ld_f32(b + {v * isa.lanes});")
        if v * isa.lanes % LINE == 0:
            lines.append(f"__builtin_prefetch(b + {_AHEAD} * width + {v * isa.lanes});")
    for i in range(rows):
        lines.append(f"const vf32 a{i} = splat_f32(r{i}[k]);")
        lines += [f"c{i}_{v} = v_fma_f32(a{i}, b{v}, c{i}_{v});" for v in range(vectors)]
    lines += ["}", "}"]
    stored = "+=" if more else "="
    lines += [f"sums[{k}] {stored} c{i}_{v};" for k, (i, v) in enumerate(sums)]
    head = (
        f"__attribute__((noinline)) static const f32* tile_{rows}x{vectors}{more}(\n"
        "    const f32* const* rows, i64 stretches, i64 length, const f32* b, i64 width, "
        "const f32* next,\n    i64 step, vf32* sums)"
    )
    return f"{head} {{\n{indented([*lines, 'return b;'])}}}\n"


@dataclass
class Tile:
    """What one pass over a panel computes: rows by vectors of columns."""

    rows: int
    vectors: int


def tile_of(p: Panels, rows: Size | None, isa: Isa) -> Tile:
    """The tile that wastes fewest rows and loads."""
    if isa.name == "avx512":
        vectors = p.width // isa.lanes
        most = MOST_ROWS[vectors]
    else:
        vectors, most = next(t for t in reversed(_FEW_REGISTERS) if p.width % t[0] == 0)
    if not isinstance(rows, int):
        return Tile(most, vectors)
    fitting = range(max(1, most - 2), most + 1) if rows >= most else (max(rows, 1),)
    return Tile(min(fitting, key=lambda r: -(-rows // r) * (r + _A_TILE)), vectors)


def _depth(p: Panels) -> int:
    """Rows of the matrix."""
    return p.depth * (prod(p.window.kernel) if p.window else 1)


@dataclass
class Writer:
    """One kernel. body: of its result. tensors, sizes: its operands."""

    packed: Panels
    body: Node
    tensors: Sequence[TensorArg]
    sizes: Sequence[Size]
    isa: Isa
    lines: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The function."""
        p = self.packed
        self.tile = tile = tile_of(p, self.sizes[0], self.isa)
        self.operands()
        self._jobs()
        self._places()
        step = tile.vectors * self.isa.lanes
        self.add(f"const i64 last = (panel + 1) * {p.width};")
        self.add(f"for (i64 n = panel * {p.width}; n < last; n += {step}) {{")
        if p.columns % p.width:
            self.add(f"if (n >= {p.columns}) break;")
        share = f"({'some' if self.each else _depth(p)} * step)"
        begin = f"panel * {_depth(p) * p.width} + n % {p.width}"
        if self.each:
            begin += f" + from * {p.width}"
        self.add(
            f"const f32* b = panels + {begin};",
            f"const f32* const next = b + {_depth(p) * p.width} + rest % most * {share};",
        )
        self._fetch()
        self._sums()
        if self.each:
            self._keep()
        self._results()
        self.add("}", "}", *(["}"] if self.each else []), "return 0;")
        head = f'extern "C" i64 {KERNEL}'
        zeros = f"static const f32 {KERNEL}_zeros[{p.depth}] = {{}};\n" if self._pads else ""
        args = "(i64 tid, i64 nthreads, void* const* bufs, const i64* syms)"
        return f"{zeros}{head}{args} {{\n{indented(self.lines)}}}\n"

    def add(self, *lines: str) -> None:
        """Writes lines."""
        self.lines += lines

    def operands(self) -> None:
        """Names for operands and sizes."""
        self.add(
            "const f32* const x = (const f32*)bufs[0];",
            "const f32* const panels = (const f32*)bufs[1];",
        )
        out = len(self.tensors)
        self.add(*(f"const f32* const g{k - 2} = (const f32*)bufs[{k}];" for k in range(2, out)))
        self.add(f"f32* const out = (f32*)bufs[{out}];")
        dynamic = iter(range(len(self.sizes)))
        for name, size in zip(
            ("rows", "height", "width", "high", "wide"), self.sizes, strict=False
        ):
            value = size if isinstance(size, int) else f"syms[{next(dynamic)}]"
            self.add(f"const i64 {name} = {value};")

    @property
    def is_whole(self) -> bool:
        """Whether all lanes of all vectors are columns."""
        return self.packed.columns % self.packed.width == 0

    @property
    def _pads(self) -> bool:
        return self.packed.window is not None and any(self.packed.window.padding)

    def _jobs(self) -> None:
        """The loop over a thread's tiles. A thread has rows of its own, which are in its core's
        cache if it has made them, or where they are few, panels. All panels go by as many rows as
        stay near, then by the next ones. each: so many numbers of long rows are multiplied for all
        tiles before the next ones; until the last ones the result holds sums; 0: all at once."""
        p, r = self.packed, self.tile.rows
        panels = -(-p.columns // p.width)
        self.each = 0
        if p.depth > LONGEST_SUM * 3 // 2 and (p.window is None or p.window.is_point):
            self.each = -(-p.depth // -(-p.depth // LONGEST_SUM))
        near = max(1, NEAR_NBYTES // (4 * (self.each or p.depth) * r))
        self.add(
            f"const i64 blocks = (rows + {r - 1}) / {r}, all = blocks * {panels};",
            f"const bool apart = blocks >= {_MANY_BLOCKS} * nthreads;",
            "const i64 first = apart ? blocks * tid / nthreads : 0;",
            "const i64 own = apart ? blocks * (tid + 1) / nthreads - first : blocks;",
            "const i64 begin = apart ? 0 : all * tid / nthreads;",
            f"const i64 end = apart ? own * {panels} : all * (tid + 1) / nthreads;",
        )
        if self.each:
            some = (
                f"const i64 some = {p.depth} - from < {self.each} ? {p.depth} - from : {self.each};"
            )
            self.add(f"for (i64 from = 0; from < {p.depth}; from += {self.each}) {{", some)
        self.add(
            "for (i64 job = begin; job < end; ++job) {",
            f"const i64 part = job / {near * panels}, rest = job % {near * panels};",
            f"const i64 left = own - part * {near}, most = left < {near} ? left : {near};",
            f"const i64 panel = rest / most, block = first + part * {near} + rest % most;",
            f"const i64 step = most > 1 ? ({p.width - 1} + most) / most : 0;",
            "const i64 m = rows * block / blocks, count = rows * (block + 1) / blocks - m;",
        )

    # ------------------------------------------------------------------------------------- places
    def _places(self) -> None:
        """Where the numbers of a tile's rows begin; the rows that it lacks are its first one. Of an
        image each point of the window has a stretch of numbers; where nothing is padded, those of a
        row of points lie side by side."""
        p, w, r = self.packed, self.packed.window, self.tile.rows
        self.stretches, self.length = 1, p.depth
        if w is None or w.is_point:
            row = f"x + (m + (i < count ? i : 0)) * {p.depth}" + (" + from" if self.each else "")
            self.add(f"const f32* rows_[{r}];", f"for (i64 i = 0; i < {r}; ++i) rows_[i] = {row};")
            return
        (high, wide), (dy, dx) = w.kernel, w.dilation
        if not any(w.padding) and dx == 1:
            self.length, wide = p.depth * wide, 1
        self.stretches = high * wide
        place = f"x + (at[i] + ky * width + kx) * {p.depth}"
        if any(w.padding):
            within = "(u64)(y[i] + ky) < (u64)height && (u64)(z[i] + kx) < (u64)width"
            place = f"{within} ? {place} : {KERNEL}_zeros"
        self.add(
            "i64 image = m / (high * wide), y_ = m / wide % high, z_ = m % wide;",
            f"i64 y[{r}], z[{r}], at[{r}];",
            f"for (i64 i = 0; i < {r}; ++i) {{",
            f"y[i] = y_ * {w.stride[0]} - {w.padding[0]};",
            f"z[i] = z_ * {w.stride[1]} - {w.padding[1]};",
            "at[i] = (image * height + y[i]) * width + z[i];",
            "if (i + 1 >= count || ++z_ < wide) continue;",
            "z_ = 0;",
            "if (++y_ == high) y_ = 0, ++image;",
            "}",
            f"const f32* rows_[{self.stretches * r}];",
            "const f32** row = rows_;",
            f"for (i64 ky = 0; ky < {high * dy}; ky += {dy})",
            f"  for (i64 kx = 0; kx < {wide * dx}; kx += {dx})",
            f"    for (i64 i = 0; i < {r}; ++i) *row++ = {place};",
        )

    def _fetch(self) -> None:
        """Fetches the memory of the results, and rows that the epilogue loads, while sums are made
        which they wait for, where the result is large."""
        p, lanes, vectors = self.packed, self.isa.lanes, self.tile.vectors
        if isinstance(self.sizes[0], int) and 4 * self.sizes[0] * p.columns < _FAR_NBYTES:
            return
        rows = {k: a.strides for k, a in enumerate(self.tensors[2:]) if a.strides[0] != 0}
        self.add("for (i64 i = 0; i < count; ++i) {")
        for v in range(0, vectors * lanes, LINE):
            place = f"out + (m + i) * {p.columns} + n + {v}"
            self.add(f"__builtin_prefetch({place}, 1);")
            for k, (row, column) in rows.items():
                if column:
                    self.add(f"__builtin_prefetch(g{k} + (m + i) * {row} + n + {v});")
        self.add("}")

    # --------------------------------------------------------------------------------------- sums
    def _sums(self) -> None:
        """The sums of a tile, in `sums`; cut where they are long."""
        r, v, width = self.tile.rows, self.tile.vectors, self.packed.width
        n, length = self.stretches, "some" if self.each else self.length
        if self.each or n * self.length <= LONGEST_SUM * 3 // 2:
            self.add(f"vf32 sums[{r * v}];")
            self.add(f"tile_{r}x{v}(rows_, {n}, {length}, b, {width}, next, step, sums);")
            return
        self.add(f"vf32 sums[{r * v}] = {{}};")
        each = max(1, LONGEST_SUM // self.length)
        some = f"{n} - k < {each} ? {n} - k : {each}"
        self.add(f"for (i64 k = 0; k < {n}; k += {each}) {{")
        self.add(
            f"b = tile_{r}x{v}_more(rows_ + k * {r}, {some}, {length}, b, {width}, "
            f"next + k * {length} * step, step, sums);",
            "}",
        )

    def _keep(self) -> None:
        """Adds what the result holds, and leaves sums there that are not whole yet."""
        p, lanes, vectors = self.packed, self.isa.lanes, self.tile.vectors
        whole = self.is_whole
        self.add("for (i64 i = 0; i < count; ++i) {")
        for v in range(vectors):
            at = f"n + {v * lanes}"
            if not whole and v:
                self.add(f"if ({at} >= {p.columns}) continue;")
            place, value = f"out + (m + i) * {p.columns} + {at}", f"sums[i * {vectors} + {v}]"
            n, left = ("", "") if whole else ("n", f", {p.columns} - ({at})")
            self.add(
                f"if (from) {value} += ld{n}_f32({place}{left});",
                f"if (from + some < {p.depth}) st{n}_f32({place}, {value}{left});",
            )
        self.add("}", f"if (from + some < {p.depth}) continue;")

    # ------------------------------------------------------------------------------------ results
    def _results(self) -> None:
        """The epilogue of a tile, a row after the other."""
        self.add("for (i64 i = 0; i < count; ++i) {", "const i64 row = m + i;")
        self.add(f"const vf32* const made = sums + i * {self.tile.vectors};")
        self.result()
        self.add("}")

    def result(self) -> None:
        """The epilogue of a row of the result, of which `made` has the columns from n on."""
        p, lanes, vectors = self.packed, self.isa.lanes, self.tile.vectors
        self.add(f"for (i64 v = 0, at = n; v < {vectors}; ++v, at += {lanes}) {{")
        if not self.is_whole and vectors > 1:
            self.add(f"if (at >= {p.columns}) break;")
        known: dict[Node, Parts] = {}
        value = "made[v]"
        if not isinstance(self.body.attr, Load) or self.body.attr.buf != PRODUCT:
            for n in walk((self.body,)):
                known[n] = self._value(n, known)
            value = known[self.body][0]
        place = f"out + row * {p.columns} + at"
        if self.is_whole:
            self.add(f"st_f32({place}, {value});", "}")
        else:
            self.add(f"stn_f32({place}, {value}, {p.columns} - at);", "}")

    def _value(self, n: Node, known: Mapping[Node, Parts]) -> Parts:
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
        self.lines.append(f"const {'vi32' if n.dtype == b1 else 'vf32'} {name} = {text};")
        return (name,)

    def _loaded(self, load: Load) -> str:
        """What the epilogue loads: a vector of columns, or a number that all of them share."""
        if load.buf == PRODUCT:
            return "made[v]"
        k = int(load.buf.removeprefix("given"))
        row, column = self.tensors[2 + k].strides
        if not isinstance(row, int) or column not in (0, 1):
            raise InternalError(f"an epilogue loads with strides {row}, {column}")
        place = f"g{k} + row * {row}" if row else f"g{k}"
        if column == 0:
            return f"splat_f32(*({place}))"
        if self.is_whole:
            return f"ld_f32({place} + at)"
        return f"ldn_f32({place} + at, {self.packed.columns} - at)"


def indented(lines: Sequence[str]) -> str:
    """Lines indented by their nesting."""
    out, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        out.append("  " * depth + line)
        depth += line.endswith("{")
    return "\n".join(out) + "\n"
