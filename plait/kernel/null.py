"""The null target: renders every statement of every kernel as text and runs nothing.

It needs no compiler and no knowledge of a machine; it is the first target that a new op goes
through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.ir.loops import Node, walk
from plait.ir.ops import OPS, SPECIAL
from plait.kernel.target import Source
from plait.schedule.plan import Kernel, Reduce


class NullTarget:
    """Renders everything, runs nothing."""

    name = "null"
    table: Mapping[str, str] = {
        **{op: f"{op}({', '.join(['{}'] * d.arity)})" for op, d in OPS.items()},
        **{op: f"{op}[{{attr}}]({{args}})" for op in SPECIAL},
    }

    def emit(self, kernels: Sequence[Kernel]) -> Source:
        """One block of text a kernel."""
        text = "\n".join(self._kernel(n) for k in kernels for n in k.nests)
        return Source(text, {k.name: k.name for k in kernels})

    def _kernel(self, kernel: Kernel) -> str:
        lines = [f"kernel {kernel.name} over {list(kernel.vars)} x {list(kernel.rvars)}:"]
        for s in kernel.stmts:
            if isinstance(s, Reduce):
                lines.append(f"  {s.name} {s.kind}= {self._node(s.value)}")
            else:
                lines.append(f"  {s.buf}{list(s.index)} {s.mode}= {self._node(s.value)}")
        return "\n".join(lines) + "\n"

    def _node(self, root: Node) -> str:
        text: dict[Node, str] = {}
        for n in walk((root,)):
            args = [text[a] for a in n.args]
            row = self.table[n.op]
            text[n] = (
                row.format(*args) if n.op in OPS else row.format(attr=n.attr, args=", ".join(args))
            )
        return text[root]
