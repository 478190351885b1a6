"""Kernels of attention: the template `templates/attention.py` with constants and formulas before
it.

In: an `Extern` with an `Attention`. Out: the same with a `UserKernel`, which all that follows knows
how to tune, compile, store and launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.ir.attention import Attention, Formula
from plait.ir.calls import Extern, TensorArg, UserKernel, Variant
from plait.ir.dtypes import f32
from plait.ir.expr import Size, bounds, ceildiv, product
from plait.ir.loops import Buffer, Load, node
from plait.kernel.triton.dialects import DIALECTS, LEAST_NVIDIA, LEAST_SHARED, shared_nbytes
from plait.kernel.triton.formulas import additions_of, function_of, loading_function_of
from plait.kernel.triton.template import Writer, size_text, tuple_text
from plait.runtime.cubin import Gpu

LOG2E = math.log2(math.e)
_PARAMS = ("b", "h", "i", "j")
_INSIDE = ("i_inside", "j_inside", "given")


@dataclass(frozen=True)
class Block:
    """How a kernel is cut: queries and keys in a block, warps, and stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int


# Measured on an H100 with causal and sliding masks and changed scores, 1,024 to 16,384 positions
# (benchmarks/programs_race.py flex).
_BLOCKS: dict[tuple[str, int], Block] = {
    ("result", 64): Block(128, 128, 4, 2),
    ("result", 128): Block(128, 64, 4, 2),
    ("result", 256): Block(64, 64, 4, 2),
    ("few", 64): Block(128, 64, 2, 2),
    ("few", 128): Block(128, 64, 2, 2),
    ("few", 256): Block(64, 64, 4, 2),
    ("queries", 64): Block(64, 64, 4, 2),
    ("changed", 64): Block(128, 64, 4, 2),
    ("keys", 64): Block(128, 64, 4, 2),
    **{(kind, 128): Block(64, 64, 4, 2) for kind in ("queries", "changed", "keys")},
    **{(kind, 256): Block(32, 32, 4, 2) for kind in ("queries", "changed", "keys")},
}
"""By what a kernel gives, and the widest of its rows. "few": a result whose blocks are rows of
several heads, or share walks. "changed": the gradient of queries where scores are changed."""
_IN_TWO = {"result": Block(128, 64, 8, 2), "few": Block(64, 64, 4, 2)}
_IN_TWO_GRADIENTS = Block(64, 64, 4, 1)
"""In float32, of which tensor cores multiply each number as two (H200): 4 x 12 x 512 x 64, causal,
takes 78 us so, by 64 x 32 95, and by the vendor's kernel 101."""
_SINGLE = Block(32, 32, 4, 1)  # the same without tensor cores


def write_attention(call: Extern, buffers: Mapping[str, Buffer], gpu: Gpu) -> Extern:
    """The call, of a kernel whose text is known."""
    return _Writer(call, buffers, gpu).written()


class _Writer(Writer):
    """One kernel of attention."""

    @property
    def attention(self) -> Attention:
        """What it computes."""
        assert isinstance(self.call.kernel, Attention), self.call
        return self.call.kernel

    def kernel(self) -> UserKernel:
        """The template with constants and formulas before it."""
        a, q, k = self.attention, *self.tensors[:2]
        block = self._block()
        functions, checks = self._functions()
        constants = self._constants(block).items()
        lines = [f"{name}: tl.constexpr = tl.constexpr({x!r})" for name, x in constants]
        formulas = "\n".join(lines), *functions
        text = self.module_text(self._tf32, formulas, "attention")
        if a.gives == "keys":
            grid = product((ceildiv(k.shape[2], block.columns), *k.shape[:2]))
        elif a.heads > 1:  # the rows of a block are all there are of a head of keys
            grid = product((a.parts, q.shape[0], k.shape[1]))
        else:
            grid = product((a.parts, ceildiv(q.shape[2], block.rows), *q.shape[:2]))
        options = {
            "num_warps": block.warps, "num_stages": block.stages, "sanitize_overflow": False,
            "enable_reflect_ftz": False, "debug": checks,
        }  # fmt: skip
        variant = Variant(self._launched(), tuple(sorted(options.items())), grid)
        return UserKernel(a.name, text, self.pointers(), (variant,))

    # ---- how it is cut
    @property
    def _tf32(self) -> int:
        """3 where numbers are taken for sums of two that tensor cores multiply, else 0: under
        batch_invariant alone. What they cut off adds up where a formula's gradients are sums of all
        scores: those of slopes by position are six times as far off as eager's."""
        able = DIALECTS[self.gpu.backend].rounds_to_tf32(self.gpu)
        by_row = self.attention.by_row and self.dtype(self.tensors[0]) == "f32"
        return 3 if able and by_row else 0

    def _block(self) -> Block:
        a, (q, k, v) = self.attention, self.tensors[:3]
        width = max(_power(q.shape[3]), _power(v.shape[3]))
        nbytes = 4 if self.dtype(q) == "f32" else 2
        kind = "changed" if a.gives == "queries" and a.score is not None else a.gives
        if max(a.heads, a.parts) > 1:
            kind = "few"
        b = _BLOCKS[kind, max(64, width)]
        if nbytes == 4:
            b = _IN_TWO.get(kind, _IN_TWO_GRADIENTS) if self._tf32 else _SINGLE
        while b.columns > 16 and self._shared(b, width * nbytes) > shared_nbytes(self.gpu):
            if b.stages > 1:
                b = replace(b, stages=b.stages - 1)
            else:
                b = replace(b, rows=max(16, b.rows // 2), columns=b.columns // 2)
        if not self._tf32 and self._shared(b, width * nbytes) > shared_nbytes(self.gpu):
            b = replace(b, **{"columns" if a.gives == "keys" else "rows": 8})  # of what stays
        sparse = a.block if a.tables else (0, 0)
        if a.by_row:
            rows, columns = _dividing(b.rows, sparse[0]), _dividing(b.columns, sparse[1])
            return replace(b, rows=rows, columns=columns)
        if a.heads > 1:  # there is one block of the tables
            rows = _power(_known(q.shape[2]) * a.heads)
        else:
            rows = _fitting(b.rows, q.shape[2], sparse[0])
        columns = _fitting(b.columns, k.shape[2], sparse[1])
        return replace(b, rows=rows, columns=columns)

    def _shared(self, b: Block, row: int) -> int:
        """Bytes of it that a program takes at most. row: bytes of a key, or of a value."""
        stays, moves = (
            (b.columns, b.rows) if self.attention.gives == "keys" else (b.rows, b.columns)
        )
        each = 1 if self.attention.gives == "result" else 2
        rows = stays * each + 2 * b.stages * moves + (2 * each * moves if self._tf32 else 0)
        # Tiles of scores pass through it where copies to it are not asynchronous, and where
        # formulas load other numbers by other threads, for which large ones have room in any case.
        loads, space = self._end > self.attention.n_first, shared_nbytes(self.gpu)
        passes = space <= (LEAST_NVIDIA if loads else LEAST_SHARED)
        return rows * row + (4 * b.rows * b.columns if passes else 0)

    # ---- text
    def _functions(self) -> tuple[list[str], bool]:
        """What the template calls, and whether it holds run-time checks."""
        a = self.attention
        given = self.tensors[a.n_first : self._end]
        added = self.tensors[self._end :]
        names = {str(e): f"given[{len(given) + n}]" for n, e in enumerate(self.sizes)}
        narrow = self.dtype(self.tensors[0]) != "f32"
        params: tuple[str, ...] = ("score", *_PARAMS, *_INSIDE)
        first = any(map(self._is_ragged, given))
        made = [loading_function_of("score_of", params, self._score, given, names, narrow, first)]
        made += [
            function_of(name, params, f, given, names, narrow)
            for name, params, f in (
                ("gradient_of", ("score", *_PARAMS, "grad", *_INSIDE), a.gradient),
                ("mask_of", (*_PARAMS, *_INSIDE), a.mask),
            )
        ]
        params = ("score", *_PARAMS, "grad", *_INSIDE[:2], "counts", "given", "added")
        made.append(additions_of(params, a.additions, given, added, names))
        # Shares of a row are rounded to 16 bits: the instruction itself is near enough.
        power = "p_ex2(x)" if narrow else "tl.exp2(x)"
        made.append((f"@triton.jit\ndef power_of(x):\n    return {power}", False))
        return [text for text, _ in made], any(checks for _, checks in made)

    def _is_ragged(self, x: TensorArg) -> bool:
        """Whether rows of a tensor begin anywhere: its numbers are loaded one by one by each
        thread, and not copied ahead, 16 bytes at a time."""
        unit = 16 // (x.dtype or self.buffers[x.buf].dtype).nbytes
        strides = [s for n, s in zip(x.shape, x.strides, strict=True) if n != 1 and s != 1]
        return any(s % unit != 0 for s in strides)

    @property
    def _in_base(self) -> bool:
        """Whether score_of gives logarithms to base 2. Then all that count as little as a number
        can say count alike: nothing is rounded between them and the greatest. And a mask that adds
        0 has the bits of none."""
        return self.attention.by_row and self.attention.gives == "result"

    @property
    def _score(self) -> Formula | None:
        """What a score becomes."""
        f = self.attention.score
        if not self._in_base:
            return f
        f = f or Formula((), node("load", (), Load("score", ()), f32))
        return replace(f, body=f.body * LOG2E)

    @property
    def _end(self) -> int:
        """Where tensors end that formulas load."""
        return len(self.tensors) - self.attention.n_added

    def _constants(self, block: Block) -> dict[str, bool | int | float | str]:
        a, (q, k, v) = self.attention, self.tensors[:3]
        heads, shared = _known(q.shape[1]), _known(k.shape[1])
        width, v_width = _known(q.shape[3]), _known(v.shape[3])
        changes = a.score is not None
        m, n = q.shape[2], k.shape[2]
        rows = m if a.heads == 1 else m * a.heads
        per_row = a.gives != "keys"
        # A factor after score_of costs nothing: it is part of what exponentials are taken of. The
        # greatest score stays the greatest by one above 0.
        before, after = (a.scale, LOG2E) if changes else (1.0, a.scale * LOG2E)
        if self._in_base:
            before, after = a.scale, 1.0
        if after <= 0:
            before, after = after, 1.0
        return {
            "ROWS": block.rows, "COLUMNS": block.columns,
            "HEADS": heads, "GROUP": heads // shared,
            "QUERIES": _known(m) if a.heads > 1 else 0, "PARTS": a.parts,
            "WIDTH": width, "V_WIDTH": v_width, "W": _power(width), "V_W": _power(v_width),
            "TABLES": a.tables, "SPARSE_ROWS": a.block[0], "SPARSE_COLUMNS": a.block[1],
            "ROW_EDGE": self._has_edge(rows, block.rows, 0 if per_row else a.block[0]),
            "COLUMN_EDGE": self._has_edge(n, block.columns, a.block[1] if per_row else 0),
            "SCALE": a.scale, "BEFORE": before, "AFTER": after, "CHANGES": changes,
            "MASKS": a.mask is not None, "CAUSAL": a.causal, "ADDS": bool(a.additions),
            "STAGES": block.stages, "TF32": self._tf32, "BY_ROW": a.by_row,
        }  # fmt: skip

    def _has_edge(self, length: Size, block: int, walked: int) -> bool:
        """Whether a block may be larger than what is left. walked: the size of a block of tables,
        where these say which come: a block is walked to its end, unless it is the only one."""
        whole = walked and self.attention.tables and bounds(length)[1] > walked
        return length % (walked if whole else block) != 0

    def _launched(self) -> str:
        """The statement that calls the template's function."""
        a, n = self.attention, len(self.tensors)
        first = 3 if a.gives == "result" else 6
        lists = [f"p{k}" for k in range(first, a.n_first)]
        given = [f"p{k}" for k in range(a.n_first, self._end)]
        given += (f"s{k}" for k in range(len(self.sizes)))
        outs = [f"p{n + k}" for k in range(len(self.outs))]
        if a.gives == "result" and len(outs) == 2:
            outs.append("None")
        q, k, v = self.tensors[:3]
        strides = [self._strides(x, q.shape[0]) for x in (q, k, v)]
        if a.gives == "result":
            outer = [] if a.parts == 1 else [x.strides[0] for x in self.outs[:2]]
            own = [x if a.parts == 1 else _of_part(x) for x in self.outs[:2]]
            strides += [self._strides(x, q.shape[0]) for x in own]
            strides.append(tuple_text([size_text(s, self.sizes) for s in outer or (0, 0)]))
            strides.append(self._table_strides(first))
        else:
            strides += [self._strides(x, q.shape[0]) for x in self.tensors[3:5]]
            strides.append(self._table_strides(first))
            strides += [self._strides(x, q.shape[0]) for x in self.outs]
        lengths = [
            size_text(q.shape[2], self.sizes, "tl.int32"),
            size_text(k.shape[2], self.sizes, "tl.int32"),
        ]
        pointers = [f"p{k}" for k in range(first)]
        operands = [tuple_text(lists), tuple_text(given)]
        if a.gives == "queries":
            operands.append(tuple_text([f"p{k}" for k in range(self._end, n)]))
        if a.gives == "keys":
            lengths.append(
                "1" if q.shape[0] == k.shape[0] else size_text(q.shape[0], self.sizes, "tl.int32")
            )
        args = [*pointers, *outs, *operands, *strides, *lengths]
        name = {"result": "attention"}.get(a.gives, f"gradient_of_{a.gives}")
        return f"{name}({', '.join(args)})"

    def _strides(self, x: TensorArg, batch: Size) -> str:
        """The strides of a tensor; one batch of keys serves all of queries."""
        strides = list(x.strides)
        if x.shape[0] == 1 and batch != 1:
            strides[0] = 0
        return tuple_text([size_text(s, self.sizes) for s in strides])

    def _table_strides(self, first: int) -> str:
        """Of each kind of blocks: those of numbers of blocks, of batch, head and row, and those of
        lists of blocks, of place too."""
        found: list[Size] = []
        for x in self.tensors[first : self.attention.n_first]:
            found += [0 if n == 1 else s for n, s in zip(x.shape[:2], x.strides[:2], strict=True)]
            found += x.strides[2:]
        return tuple_text([size_text(s, self.sizes) for s in found])


def _of_part(x: TensorArg) -> TensorArg:
    return replace(x, shape=x.shape[1:], strides=x.strides[1:])


def _power(n: Size) -> int:
    """The next power of two from which on products have a kernel."""
    return max(16, 1 << (_known(n) - 1).bit_length())


def _known(n: Size) -> int:
    assert isinstance(n, int), f"the size {n} of a kernel of attention varies"
    return n


def _dividing(block: int, sparse: int) -> int:
    """A block that divides those of tables."""
    while block > 16 and sparse % block:
        block //= 2
    return block


def _fitting(block: int, length: Size, sparse: int) -> int:
    """A block that divides those of tables, and is not much longer than all."""
    most, block = bounds(length)[1], _dividing(block, sparse)
    while block > 16 and block >= 2 * most:
        block //= 2
    return block
