"""Kernels of products: the template `templates/product.py` with constants, and what is computed of
a product, before it.

In: an `Extern` with a `Product`. Out: the same with a `UserKernel`, which all that follows knows
how to tune, compile, store and launch.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ir.calls import Extern, TensorArg, UserKernel, Variant
from plait.ir.expr import Size, ceildiv, product
from plait.ir.loops import Buffer
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
_WIDE = 64  # rows of the left factor that tensor cores want


def write_product(call: Extern, buffers: Mapping[str, Buffer], gpu: Gpu) -> Extern:
    """The call, of a kernel whose text is known."""
    return _Writer(call, buffers, gpu).written()


class _Writer(Writer):
    """One kernel of a product."""

    @property
    def product(self) -> Product:
        """What it computes."""
        assert isinstance(self.call.kernel, Product), self.call
        return self.call.kernel

    def kernel(self) -> UserKernel:
        """The template with constants and formulas before it."""
        left, stored, *given = self.tensors
        cut, right = self.product.how, self.product.right
        assert isinstance(cut, Cut), self.product
        turned = cut.rows < _WIDE <= cut.columns
        (*batch, m, k), n = left.shape, extent(self.product.results[0].vars[-1])
        names = {str(e): f"given[{len(given) + at}]" for at, e in enumerate(self.sizes)}
        finish, checks = results_of(self.product.results, given, self.outs, names)
        step = (cut.rows + cut.columns) * cut.depth * 2
        stages = max(1, min(_STAGES, (shared_nbytes(self.gpu) - _SPARE) // step))
        constants = {
            "ROWS": cut.rows, "COLUMNS": cut.columns, "DEPTH": cut.depth, "TURNED": turned,
            "PARTS": cut.parts, "ROW_EDGE": m % cut.rows != 0, "COLUMN_EDGE": n % cut.columns != 0,
            "DEPTH_EDGE": k % cut.depth != 0, "STAGES": stages, "MADE": right is not None,
        }  # fmt: skip
        lines = [f"{name}: tl.constexpr = tl.constexpr({x!r})" for name, x in constants.items()]
        dialect = DIALECTS[self.gpu.backend]
        made = ""
        if right is not None:
            float8, edge = dialect.converts_float8(self.gpu), constants["COLUMN_EDGE"]
            made = operand_of(right, stored, given, names, cut.depth, bool(edge), float8)
        prelude = prelude_for(f"{finish}\n{made}", dialect.instructions)
        parts = (dialect.head, prelude, "\n".join(lines), finish, made, template("product"))
        tiles = product((*batch, ceildiv(m, cut.rows), ceildiv(n, cut.columns)))
        options = {
            "num_warps": 4, "num_stages": stages, "sanitize_overflow": False,
            "enable_reflect_ftz": False, "debug": checks,
        }  # fmt: skip
        call = self._launched(m, n, k)
        variant = Variant(call, tuple(sorted(options.items())), tiles * cut.parts)
        text = "\n\n".join(filter(None, parts))
        return UserKernel(self.product.name, text, self.pointers(), (variant,))

    def _launched(self, m: Size, n: Size, k: Size) -> str:
        """The statement that calls the template's function."""
        n_given = len(self.tensors) - 2
        given = [f"p{at + 2}" for at in range(n_given)]
        outs = [f"p{len(self.tensors) + at}" for at in range(len(self.outs))]
        strides = [self._strides(x) for x in self.tensors[:2]]
        if self.product.right is not None:
            strides[1] = "(0, 0, 0)"
        lengths = [size_text(e, self.sizes, "tl.int32") for e in (m, n, k)]
        given += (f"s{at}" for at in range(len(self.sizes)))
        args = ("p0", "p1", tuple_text(given), tuple_text(outs), *strides, *lengths)
        return f"product({', '.join(args)})"

    def _strides(self, x: TensorArg) -> str:
        """The strides of a matrix, or of a batch of them."""
        strides = x.strides if len(x.strides) == 3 else (0, *x.strides)
        return tuple_text([size_text(s, self.sizes) for s in strides])
