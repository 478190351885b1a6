"""Products with packed weights as C++: a tile of rows and columns at a time, whose sums stay in
registers while the panel of weights goes by.

Comes in: the call of a `PackedProduct`. Goes out: the same call of a `UserKernel`, whose text is
one function. Threads share tiles. Sums are cut every few hundred products and added up, so that
rounding errors do not grow with the length of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from plait.errors import InternalError
from plait.ir.calls import Extern, TensorArg, UserKernel, Variant
from plait.ir.dtypes import b1, f32
from plait.ir.expr import Expr, Size
from plait.ir.loops import Load, Node, walk
from plait.ir.packed import PackedProduct, Window
from plait.ir.product import PRODUCT
from plait.kernel.cpu.expr import Parts, literal, vector_op
from plait.runtime.toolchain import Isa
from plait.schedule.plan import UserLaunch

KERNEL = "PACKED_KERNEL"
"""Stands for the symbol in a text."""
LONGEST_SUM = 512
"""So many products are added up one after the other, about as many as vendors' libraries do."""
# Registers, rows by columns of vectors, that left none to be spilled and were fastest on an AVX-512
# machine with 2 cores: benchmarks/packed_cpu.py.
_MOST_ROWS = {4: 6, 3: 8, 2: 10}
_FEW_REGISTERS = (2, 5)
"""The same of machines with 16 vector registers: vectors, rows."""
_A_TILE = 1.5
"""What loading a panel costs, in rows."""
_NEAR_NBYTES = 1 << 20
"""Of a panel that a core's own cache holds beside all else."""
_SMALL_NBYTES = 1 << 19
"""Of weights that it holds as a whole."""
_AHEAD = 32
"""So many rows of a panel before their turn they are fetched from far memory."""


def write_packed(call: Extern, isa: Isa) -> Extern:
    """The call, of a kernel whose text is known."""
    assert isinstance(call.kernel, PackedProduct), call
    tensors = tuple(a for a in call.args if isinstance(a, TensorArg))
    sizes = tuple(a for a in call.args if not isinstance(a, TensorArg))
    assert all(isinstance(a, (int, Expr)) for a in sizes), call
    text = _Writer(call.kernel, tensors, sizes, isa).text()  # type: ignore[arg-type]
    kernel = UserKernel(
        call.kernel.name, text, ("*fp32",) * (len(tensors) + 1), (Variant("", (), 1),)
    )
    return replace(call, args=(*tensors, *(a for a in sizes if isinstance(a, Expr))), kernel=kernel)


def takes(launch: UserLaunch) -> tuple[int, int]:
    """How many buffers and sizes a kernel reads."""
    return len(launch.buffers), len(launch.sizes)


@dataclass
class _Tile:
    """What one pass over a panel computes: rows by vectors of columns."""

    rows: int
    vectors: int


def _tile(p: PackedProduct, rows: Size, isa: Isa) -> _Tile:
    """The tile that wastes fewest rows and loads."""
    vectors, most = _FEW_REGISTERS
    if isa.name == "avx512":
        vectors = p.width // isa.lanes
        if _depth(p) * p.width * 4 > _NEAR_NBYTES:
            vectors = {4: 2}.get(vectors, vectors)
        most = _MOST_ROWS[vectors]
    if not isinstance(rows, int):
        return _Tile(most, vectors)
    fitting = range(max(1, most - 2), most + 1) if rows >= most else (max(rows, 1),)
    return _Tile(min(fitting, key=lambda r: -(-rows // r) * (r + _A_TILE)), vectors)


def _depth(p: PackedProduct) -> int:
    """Rows of the matrix."""
    return p.depth * (prod(p.window.kernel) if p.window else 1)


@dataclass
class _Writer:
    """One kernel. tensors, sizes: its operands."""

    packed: PackedProduct
    tensors: Sequence[TensorArg]
    sizes: Sequence[Size]
    isa: Isa
    lines: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The function."""
        p = self.packed
        self.tile = tile = _tile(p, self.sizes[0], self.isa)
        self.step = tile.vectors * self.isa.lanes
        panels = -(-p.columns // p.width)
        out = len(self.tensors)
        add = self.lines.append
        add("const f32* const x = (const f32*)bufs[0];")
        add("const f32* const panels = (const f32*)bufs[1];")
        for k in range(2, out):
            add(f"const f32* const g{k - 2} = (const f32*)bufs[{k}];")
        add(f"f32* const out = (f32*)bufs[{out}];")
        names = ("rows", "height", "width", "high", "wide")
        dynamic = iter(range(len(self.sizes)))
        for name, size in zip(names, self.sizes, strict=False):
            value = size if isinstance(size, int) else f"syms[{next(dynamic)}]"
            add(f"const i64 {name} = {value};")
        add(f"const i64 blocks = (rows + {tile.rows - 1}) / {tile.rows}, all = blocks * {panels};")
        add("const i64 end = all * (tid + 1) / nthreads;")
        add("for (i64 job = all * tid / nthreads; job < end; ++job) {")
        self.near = _depth(p) * p.columns * 4 <= _SMALL_NBYTES
        if self.near:  # the weights stay near, rows go by once
            add(f"const i64 panel = job % {panels}, block = job / {panels};")
        else:
            add("const i64 panel = job / blocks, block = job % blocks;")
        add("const i64 m = rows * block / blocks, count = rows * (block + 1) / blocks - m;")
        self._places()
        add(f"const i64 last = (panel + 1) * {p.width};")
        add(f"for (i64 n = panel * {p.width}; n < last; n += {self.step}) {{")
        if p.columns % p.width:
            add(f"if (n >= {p.columns}) break;")
        add(f"const f32* b = panels + panel * {_depth(p) * p.width} + n % {p.width};")
        self._sums()
        self._results()
        add("}")
        add("}")
        add("return 0;")
        head = f'extern "C" i64 {KERNEL}'
        zeros = f"static const f32 {KERNEL}_zeros[{p.depth}] = {{}};\n" if self._pads else ""
        args = "(i64 tid, i64 nthreads, void* const* bufs, const i64* syms)"
        return f"{zeros}{head}{args} {{\n{_indented(self.lines)}}}\n"

    @property
    def _pads(self) -> bool:
        return self.packed.window is not None and any(self.packed.window.padding)

    # ------------------------------------------------------------------------------------- places
    def _places(self) -> None:
        """Where the rows of a tile are: beyond the last one it is met again."""
        p, rows = self.packed, range(self.tile.rows)
        if p.window is None or p.window.is_point:
            for i in rows:
                at = "m" if i == 0 else f"(m + ({i} < count ? {i} : 0))"
                self.lines.append(f"const f32* const r{i} = x + {at} * {p.depth};")
            return
        (sy, sx), (py, px) = p.window.stride, p.window.padding
        self.lines += [
            "i64 image = m / (high * wide), y = m / wide % high, z = m % wide;",
            *(
                f"const i64 y{i} = y * {sy} - {py}, z{i} = z * {sx} - {px}, "
                f"at{i} = (image * height + y{i}) * width + z{i};\n"
                f"if ({i + 1} < count && ++z == wide) {{\nz = 0;\n"
                "if (++y == high) y = 0, ++image;\n}"
                for i in rows
            ),
        ]
        self.lines[:] = [x for line in self.lines for x in line.split("\n")]

    # --------------------------------------------------------------------------------------- sums
    def _sums(self) -> None:
        """The sums of a tile, in `sums`."""
        add, p, w = self.lines.append, self.packed, self.packed.window
        rows, vectors = range(self.tile.rows), range(self.tile.vectors)
        names = [f"c{i}_{v}" for i in rows for v in vectors]
        add(f"vf32 sums[{len(names)}];")
        add(f"vf32 {', '.join(f'{c} = splat_f32(0.0f)' for c in names)};")
        self.cut = _depth(p) > LONGEST_SUM * 3 // 2
        if self.cut:
            add(f"for (int k = 0; k < {len(names)}; ++k) sums[k] = splat_f32(0.0f);")
            self.flush = [f"sums[{k}] += {c}; {c} = splat_f32(0.0f);" for k, c in enumerate(names)]
        if w is None or w.is_point:
            parts = -(-p.depth // LONGEST_SUM) if self.cut else 1
            length = -(-p.depth // parts)
            if parts == 1:
                self._run([f"r{i}" for i in rows], "0", str(p.depth))
            else:
                add(f"for (i64 from = 0; from < {p.depth}; from += {length}) {{")
                add(f"const i64 to = from + {length} < {p.depth} ? from + {length} : {p.depth};")
                self._run([f"r{i}" for i in rows], "from", "to")
                self.lines += [*self.flush, "}"]
        else:
            self._over_window(w)
        if not self.cut:
            self.lines += [f"sums[{k}] = {c};" for k, c in enumerate(names)]

    def _over_window(self, w: Window) -> None:
        """The points of the kernel, whose channels lie side by side. Where nothing is padded, so do
        those of a row of points."""
        add, p, rows = self.lines.append, self.packed, range(self.tile.rows)
        (high, wide), (dy, dx) = w.kernel, w.dilation
        merged = not any(w.padding) and dx == 1
        length = p.depth * (wide if merged else 1)
        if self.cut:
            add("i64 done = 0;")
        add(f"for (i64 ky = 0; ky < {high * dy}; ky += {dy}) {{")
        add(f"for (i64 kx = 0; kx < {1 if merged else wide * dx}; kx += {dx}) {{")
        for i in rows:
            place = f"x + (at{i} + ky * width + kx) * {p.depth}"
            if any(w.padding):
                inside = f"(u64)(y{i} + ky) < (u64)height && (u64)(z{i} + kx) < (u64)width"
                place = f"{inside} ? {place} : {KERNEL}_zeros"
            add(f"const f32* const r{i} = {place};")
        self._run([f"r{i}" for i in rows], "0", str(length))
        if self.cut:
            add(f"if ((done += {length}) >= {LONGEST_SUM}) {{")
            self.lines += ["done = 0;", *self.flush, "}"]
        self.lines += ["}", "}"]
        if self.cut:
            self.lines += self.flush

    def _run(self, rows: Sequence[str], first: str, end: str) -> None:
        """Products of a stretch of numbers of every row with rows of the panel."""
        add, vectors = self.lines.append, range(self.tile.vectors)
        add(f"for (i64 k = {first}; k < {end}; ++k, b += {self.packed.width}) {{")
        for v in vectors:
            add(f"const vf32 b{v} = ld_f32(b + {v * self.isa.lanes});")
        if not self.near:
            ahead = _AHEAD * self.packed.width
            self.lines += [
                f"__builtin_prefetch(b + {ahead + v * self.isa.lanes});"
                for v in vectors
                if v * self.isa.lanes % 16 == 0
            ]
        for i, row in enumerate(rows):
            add(f"const vf32 a{i} = splat_f32({row}[k]);")
            for v in vectors:
                add(f"c{i}_{v} = v_fma_f32(a{i}, b{v}, c{i}_{v});")
        add("}")

    # ------------------------------------------------------------------------------------ results
    def _results(self) -> None:
        """The epilogue of a tile, a row after the other."""
        p, lanes, vectors = self.packed, self.isa.lanes, self.tile.vectors
        whole = p.columns % p.width == 0
        self.lines.append("for (i64 i = 0; i < count; ++i) {")
        for v in range(vectors):
            at = f"n + {v * lanes}"
            left = f"{p.columns} - ({at})"
            if not whole and v:
                self.lines.append(f"if ({at} >= {p.columns}) continue;")
            known: dict[Node, Parts] = {}
            value = f"sums[i * {vectors} + {v}]"
            if p.epilogue is not None:
                for n in walk((p.epilogue.body,)):
                    known[n] = self._value(n, known, v, None if whole else left)
                value = known[p.epilogue.body][0]
            place = f"out + (m + i) * {p.columns} + {at}"
            store = f"st_f32({place}, {value})" if whole else f"stn_f32({place}, {value}, {left})"
            self.lines.append(f"{store};")
        self.lines.append("}")

    def _value(self, n: Node, known: Mapping[Node, Parts], v: int, left: str | None) -> Parts:
        """A node of the epilogue, as a variable."""
        if n.op == "const":
            assert isinstance(n.attr, (bool, int, float)), n
            if n.dtype == b1:
                return (f"splat_i32({-1 if n.attr else 0})",)
            return (f"splat_f32({literal(n.attr, f32)})",)
        if isinstance(n.attr, Load):
            text = self._loaded(n.attr, v, left)
        else:
            args = tuple(known[a] for a in n.args)
            (text,) = vector_op(n.op, n.args[-1].dtype, args, n.dtype)
        name = f"e{v}_{len(known)}"
        self.lines.append(f"const {'vi32' if n.dtype == b1 else 'vf32'} {name} = {text};")
        return (name,)

    def _loaded(self, load: Load, v: int, left: str | None) -> str:
        """What the epilogue loads: a vector of columns, or a number that all of them share."""
        if load.buf == PRODUCT:
            return f"sums[i * {self.tile.vectors} + {v}]"
        k = int(load.buf.removeprefix("given"))
        row, column = self.tensors[2 + k].strides
        if not isinstance(row, int) or column not in (0, 1):
            raise InternalError(f"an epilogue loads with strides {row}, {column}")
        at = f"g{k} + (m + i) * {row}" if row else f"g{k}"
        if column == 0:
            return f"splat_f32(*({at}))"
        at = f"{at} + n + {v * self.isa.lanes}"
        return f"ld_f32({at})" if left is None else f"ldn_f32({at}, {left})"


def _indented(lines: Sequence[str]) -> str:
    """Lines indented by their nesting."""
    out, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        out.append("  " * depth + line)
        depth += line.endswith("{")
    return "\n".join(out) + "\n"
