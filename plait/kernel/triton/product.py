"""Kernels of products: the template `templates/product.py` with constants, and what is computed of
a product, before it.

In: an `Extern` with a `Product`. Out: the same with a `UserKernel`, which all that follows knows
how to tune, compile, store and launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.ir.calls import Extern, TensorArg, UserKernel, Variant
from plait.ir.expr import Size, ceildiv, product
from plait.ir.loops import Buffer, walk
from plait.ir.product import Cut, Product
from plait.kernel.triton.dialects import DIALECTS, shared_nbytes
from plait.kernel.triton.formulas import operand_of, results_of
from plait.kernel.triton.ops import prelude_for
from plait.kernel.triton.template import Writer, size_text, template, tuple_text
from plait.runtime.cubin import Gpu
from plait.schedule.deps import extent

_STAGES = 5
"""Of a loop, where memory holds them: measured on an H200 (benchmarks/products_gpu.py)."""
_SPARE = 4 << 10  # bytes that a kernel needs beside them
_KERNEL_US = 1.5  # of one that is small, in a CUDA graph
_WIDE = 64  # rows of the left factor that tensor cores want


_OTHERS = (
    (64, 128, 4), (32, 128, 4), (128, 128, 4), (64, 256, 4), (32, 256, 4), (64, 128, 8),
    (128, 64, 4), (128, 128, 8),
)  # fmt: skip
"""Columns and depth of tiles, and warps, that were the best of some shape on an H200."""


@dataclass(frozen=True, slots=True)
class _Version:
    """A way to cut a product, and how many warps compute a tile."""

    cut: Cut
    warps: int = 4


def write_product(
    call: Extern, buffers: Mapping[str, Buffer], gpu: Gpu, tunes: bool = False
) -> Extern:
    """The call, of a kernel whose text is known. tunes: in several versions."""
    return _Writer(call, buffers, gpu, tunes=tunes).written()


@dataclass
class _Writer(Writer):
    """One kernel of a product. tunes: it is to be measured in several versions."""

    tunes: bool = False

    @property
    def product(self) -> Product:
        """What it computes."""
        assert isinstance(self.call.kernel, Product), self.call
        return self.call.kernel

    def kernel(self) -> UserKernel:
        """The template with constants and formulas before it."""
        left, stored, *given = self.tensors
        (*batch, m, k), n = left.shape, extent(self.product.results[0].vars[-1])
        names = {str(e): f"given[{len(given) + at}]" for at, e in enumerate(self.sizes)}
        finish, checks = results_of(self.product.results, given, self.outs, names)
        sizes = (product(batch), m, n, k)
        variants = tuple(self._variant(v, sizes, checks) for v in self._versions())
        cut, dialect, right = self._cut, DIALECTS[self.gpu.backend], self.product.right
        made = ""
        if right is not None:
            float8, edge = dialect.converts_float8(self.gpu), self.tunes or n % cut.columns != 0
            made = operand_of(right, stored, given, names, cut.depth, edge, float8)
        prelude = prelude_for(f"{finish}\n{made}", dialect.instructions)
        parts = (dialect.head, prelude, finish, made, template("product"))
        text = "\n\n".join(filter(None, parts))
        rival_us = self._rival_us() if self.tunes else None
        return UserKernel(self.product.name, text, self.pointers(), variants, rival_us)

    def _rival_us(self) -> float | None:
        """How long kernels take that stand beside the vendor's product, and not beside this one, in
        microseconds. None: the vendor has no such product."""
        if self.product.right is not None:
            return None
        plain = (n.op for r in self.product.results for n in walk((r.body,)))
        finished = 0 if {*plain} <= {"load", "cast"} and len(self.outs) == 1 else _KERNEL_US
        return finished - (_KERNEL_US if self._cut.parts > 1 else 0)

    @property
    def _cut(self) -> Cut:
        """How it is cut, as planned."""
        assert isinstance(self.product.how, Cut), self.product
        return self.product.how

    def _versions(self) -> list[_Version]:
        """Ways to cut it: as planned, then others that are worth measuring. The right matrix is
        made a step of one depth at a time."""
        cut, made = self._cut, self.product.right is not None
        found = [_Version(cut)]
        if self.tunes:
            found += (
                _Version(replace(cut, rows=rows, columns=columns, depth=depth), warps)
                for rows in {cut.rows: 0, min(cut.rows, 32): 0}
                for columns, depth, warps in _OTHERS
                if columns <= 2 * cut.columns and (not made or depth == cut.depth)
            )
        return list(dict.fromkeys(found))

    def _variant(self, v: _Version, sizes: Sequence[Size], checks: bool) -> Variant:
        """One way to launch it. sizes: products, rows, columns and terms of a sum."""
        (batch, m, n, k), cut, dialect = sizes, v.cut, DIALECTS[self.gpu.backend]
        step = (cut.rows + cut.columns) * cut.depth * 2
        stages = max(1, min(_STAGES, (shared_nbytes(self.gpu) - _SPARE) // step))
        constants = {
            "rows": cut.rows, "columns": cut.columns, "depth": cut.depth,
            "turned": cut.rows < _WIDE <= cut.columns, "parts": cut.parts,
            "row_edge": m % cut.rows != 0, "column_edge": n % cut.columns != 0,
            "depth_edge": k % cut.depth != 0, "stages": stages,
            "made": self.product.right is not None, "whole": self.dtype(self.tensors[0]) == "i8",
        }  # fmt: skip
        options = {
            "num_warps": v.warps, "num_stages": stages, "sanitize_overflow": False,
            "enable_reflect_ftz": False, "debug": checks,
        }  # fmt: skip
        call = self._launched((m, n, k), constants)
        if dialect.starts_early(self.gpu):  # before the first access to memory
            options["launch_pdl"] = True
            call = f"{dialect.wait}\n    {call}"
        grid = product((batch, ceildiv(m, cut.rows), ceildiv(n, cut.columns), cut.parts))
        return Variant(call, tuple(sorted(options.items())), grid)

    def _launched(self, sizes: Sequence[Size], constants: Mapping[str, int]) -> str:
        """The statement that calls the template's function."""
        n_given = len(self.tensors) - 2
        given = [f"p{at + 2}" for at in range(n_given)]
        outs = [f"p{len(self.tensors) + at}" for at in range(len(self.outs))]
        strides = [self._strides(x) for x in self.tensors[:2]]
        if self.product.right is not None:
            strides[1] = "(0, 0, 0)"
        lengths = [size_text(e, self.sizes, "tl.int32") for e in sizes]
        given += (f"s{at}" for at in range(len(self.sizes)))
        args = ("p0", "p1", tuple_text(given), tuple_text(outs), *strides, *lengths)
        args += tuple(f"{name}={x!r}" for name, x in constants.items())
        return f"product({', '.join(args)})"

    def _strides(self, x: TensorArg) -> str:
        """The strides of a matrix, or of a batch of them."""
        strides = x.strides if len(x.strides) == 3 else (0, *x.strides)
        return tuple_text([size_text(s, self.sizes) for s in strides])
