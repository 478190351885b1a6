"""What writers of templates share: the operands of a call, the text of a template, and arguments of
its function as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from plait.ir.calls import Extern, TensorArg, UserKernel
from plait.ir.expr import Expr, Size
from plait.ir.loops import Buffer
from plait.kernel.triton.dialects import DIALECTS
from plait.kernel.triton.ops import POINTERS, prelude_for
from plait.runtime.cubin import Gpu

_LONG = 1 << 23  # strides from which on 256 of them have no 32 bits


def size_text(e: Size, sizes: list[Size], type_: str = "tl.int64") -> str:
    """A size, or a parameter that is it. sizes: what the parameters are; grows."""
    if isinstance(e, int):
        return str(e) if abs(e) < _LONG else f"tl.full((), {e}, {type_})"
    if e not in sizes:
        sizes.append(e)
    text = f"s{sizes.index(e)}.to({type_})"
    return f"tl.multiple_of({text}, 16)" if e % 16 == 0 else text


def tuple_text(texts: Sequence[str]) -> str:
    """A tuple."""
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


@cache
def template(name: str) -> str:
    """The text of a template."""
    return (Path(__file__).parent / "templates" / f"{name}.py").read_text()


@dataclass
class Writer:
    """Writes the kernel of one call.

    tensors, outs: its operands and results.
    sizes: what it is told of sizes, in order; grows as the kernel is written.
    """

    call: Extern
    buffers: Mapping[str, Buffer]
    gpu: Gpu
    tensors: tuple[TensorArg, ...] = ()
    outs: tuple[TensorArg, ...] = ()
    sizes: list[Size] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = tuple(a for a in self.call.args if isinstance(a, TensorArg))
        made = (self.buffers[o] for o in self.call.made)
        self.outs = tuple(TensorArg(b.name, b.shape, b.strides, 0) for b in made)
        self.sizes += (a for a in self.call.args if isinstance(a, Expr))

    def written(self) -> Extern:
        """The call, of a kernel whose text is known."""
        kernel = self.kernel()
        return replace(self.call, args=(*self.tensors, *self.sizes), kernel=kernel)

    def module_text(self, tf32: int, formulas: Sequence[str], *templates: str) -> str:
        """A module: helpers, formulas, and the named templates behind add_product, whose constant
        tf32 is."""
        dialect, rounds = DIALECTS[self.gpu.backend], "p_tf32" if tf32 else ""
        prelude = prelude_for("\n".join((*formulas, rounds)), dialect.instructions(self.gpu))
        texts = map(template, ("add_product", *templates))
        return "\n\n".join(filter(None, (dialect.head, prelude, *formulas, *texts)))

    def kernel(self) -> UserKernel:
        """The kernel."""
        raise NotImplementedError(f"{type(self).__name__} has to define kernel")

    def dtype(self, x: TensorArg) -> str:
        """The name of an operand's or result's dtype."""
        return (x.dtype or self.buffers[x.buf].dtype).name

    def pointers(self) -> tuple[str, ...]:
        """The types of the pointers of a launch."""
        return tuple(POINTERS[self.dtype(x)] for x in (*self.tensors, *self.outs))
