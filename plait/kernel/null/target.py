"""The null target: kernels stay what they are, data. No compiler is needed, and nothing is known of
a machine; it is the first target that a new op goes through.

A launch runs a kernel in numpy, by the reference meaning of every op (`ir/interp.py`): slow, for
tests. The Python wrapper launches what it builds; under the others, which want machine code, every
op is a call of ATen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace

from plait.config import Config
from plait.ir.interp import EVALUATE
from plait.ir.ops import SPECIAL
from plait.kernel.null.run import launch
from plait.kernel.target import Choices, Machines, Source, Target, Unaligned
from plait.runtime.generated import LIBRARIES
from plait.runtime.store import Built
from plait.runtime.toolchain import ToolchainMissing
from plait.schedule.dedup import symbol_for
from plait.schedule.plan import Kernel
from plait.schedule.text import kernel_text


class NullTarget(Target):
    """Kernels as they are."""

    name = "null"
    table: Mapping[str, object] = {**EVALUATE, **dict.fromkeys(SPECIAL, "interp.Space")}

    def find_tools(self, cfg: Config) -> None:
        """The wrapper that can launch a function of Python."""
        if cfg.wrapper != "python":
            raise ToolchainMissing(
                f"the wrapper {cfg.wrapper!r} launches no kernels of the null target",
                hint="options={'wrapper': 'python'}",
            )

    def emit(
        self,
        kernels: Sequence[Kernel],
        unaligned: Unaligned,
        machines: Machines,
        choices: Choices,
        verifies: bool,
    ) -> Source:
        """The kernels' text."""
        taken: set[str] = set()
        names = {k.name: symbol_for(k.name, taken) for k in kernels}
        units = tuple((names[k.name], k) for k in kernels)
        return Source("\n".join(map(kernel_text, kernels)), names, units=units)

    def build(self, source: Source, cfg: Config) -> Built:
        """An entry in this process's table of libraries."""
        path = f"interpreted kernels {len(LIBRARIES)}"
        LIBRARIES[path] = SimpleNamespace(**{s: partial(launch, k) for s, k in source.units})
        return Built(path, False)
