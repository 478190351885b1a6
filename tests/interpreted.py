"""A pytest plugin that runs a suite as on a GPU, without one: `TRITON_INTERPRET=1 pytest -p
tests.interpreted ...`.

Every graph is compiled as if its tensors were on a GPU (the fake tensors that describe it say so
while it is compiled); its kernels then run in Triton's interpreter on the tensors that the test
made, on the CPU, and extern calls are those of the CPU. Programs run as the Python target writes
them. What only a device can show (alignment, races, the launcher, CUDA's own operators) it does not
show. Needs Triton on the path; slow: a program of a kernel takes about a millisecond.

Without TRITON_INTERPRET, kernels are compiled to cubins for the GPU that PLAIT_GPU_ARCH names, and
the graphs run as PyTorch captured them.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MOST_PROGRAMS = 20_000  # of one launch: more would take minutes
SkippedHere: type[BaseException] = pytest.skip.Exception
"""Raised through a compiled program that cannot run here."""

_folder = tempfile.TemporaryDirectory(prefix="plait-interpreted-")
_packs: dict[str, dict[str, Any]] = {}


class Interpreted:
    """A kernel, with the interface of runtime.generated.GpuKernel."""

    def __init__(self, pack: str, name: str, device: str) -> None:
        self.name, self.function = name, _packs[pack][name]

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int] = (),
        grid: int = 1,
        writes: Sequence[int] = (),
    ) -> None:
        """Runs all programs, one after the other."""
        from plait.ir.calls import unpack_grid
        from plait.runtime.generated import without_lazy_bits

        if (programs := math.prod(unpack_grid(grid))) > MOST_PROGRAMS:
            pytest.skip(f"{programs} programs of a kernel take too long here")
        # A load that no point uses may be without a mask; the compiler drops it, the interpreter
        # would read address 0.
        used = [without_lazy_bits(t) if t.numel() else torch.zeros(1).to(t.dtype) for t in tensors]
        if programs:
            run = self.function[unpack_grid(grid)]
            _checked(self.name, lambda: run(*used, *map(int, sizes)))
        for k in writes:
            if used[k] is not tensors[k]:
                tensors[k].copy_(used[k])


@contextmanager
def on_gpu(graph: torch.fx.GraphModule) -> Iterator[None]:
    """The graph says that its tensors are on a GPU, and afterwards what it said before."""

    def graphs() -> list[torch.fx.GraphModule]:
        return [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]

    fakes = {
        id(x): x
        for g in graphs()
        for n in g.graph.nodes
        for x in tree_leaves(n.meta.get("val"))
        if isinstance(x, FakeTensor)
    }
    moved = [x for x in fakes.values() if x.fake_device == CPU]

    def move(old: torch.device, new: torch.device) -> None:
        for g in graphs():
            for n in g.graph.nodes:
                n.args, n.kwargs = tree_map_only(
                    torch.device, lambda d: new if d == old else d, (n.args, n.kwargs)
                )
            g.recompile()
        for x in moved:
            x.fake_device = new

    move(CPU, GPU)
    try:
        yield
    finally:
        move(GPU, CPU)


def pytest_configure() -> None:
    """From here on, whoever compiles a graph compiles it for a GPU."""
    from plait.devices import facts_of

    os.environ.setdefault("PLAIT_WRAPPER", "python")
    memory_format: Any = importlib.import_module("plait.graph.memory_format")
    # Results of the CPU's convolutions have layouts of their own.
    memory_format.facts_of = lambda device: facts_of("")
    pipeline: Any = importlib.import_module("plait.compile")
    if os.environ.get("TRITON_INTERPRET") == "1":
        _interpret(pipeline)
    else:
        _only_build(pipeline)
    capture: Any = sys.modules.get("plait.capture.program")
    if capture is not None:
        capture.compile_graph = pipeline.compile_graph


def _interpret(pipeline: Any) -> None:
    from plait.kernel.targets import TARGETS
    from plait.runtime import generated
    from plait.runtime.store import Built
    from plait.wrapper.fx import load_program
    from plait.wrapper.python import load_python, make_python
    from plait.wrapper.text import read, text
    from tests.triton_tools import interpreted

    compile_graph = pipeline.compile_graph

    def compile_for_gpu(captured: Any, cfg: Any, target: Any = None) -> Any:
        with on_gpu(captured.graph):
            return compile_graph(captured, cfg, target)

    def build(sources: Mapping[str, Any], cfg: Any) -> dict[str, Built]:
        built = {}
        for kind, source in sources.items():
            if kind == "cpu":
                built[kind] = TARGETS[kind].build(source, cfg)
                continue
            pack = f"pack {len(_packs)}"
            folder = Path(_folder.name) / str(len(_packs))
            folder.mkdir()
            _packs[pack] = {
                unit.name: interpreted(unit.name, unit.text, folder) for unit in source.units
            }
            built[kind] = Built(pack, False)
        return built

    def python(program: Any, parts: Any) -> Any:
        source = make_python(program, parts.libraries).replace("cuda:0", "cpu")
        return load_python(source, parts.libraries, parts.constants, parts.callables)

    def fx(program: Any, parts: Any) -> Any:
        lines = text(program).splitlines()  # kernels stay those of a GPU
        lines = [s if s.startswith("kernel(") else s.replace("cuda:0", "cpu") for s in lines]
        return load_program(read("\n".join(lines)), parts)

    os.environ.setdefault("PLAIT_GPU_ARCH", "sm_90")
    generated.GpuKernel = Interpreted  # type: ignore[misc,assignment]
    importlib.import_module("plait.wrapper.fxnodes").triton_function = _triton_function  # type: ignore[attr-defined]
    torch.cuda.current_device, torch.cuda.set_device = _current_gpu, _choose_gpu
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment,misc]
    pipeline._build, pipeline.compile_graph = build, compile_for_gpu
    pipeline.WRAPPERS = {"python": python, "fx": fx}


def _triton_function(name: str, source: str) -> Any:
    """For FX graphs, in place of runtime.fxops.triton_function."""
    from tests.triton_tools import interpreted

    folder = Path(_folder.name) / f"fx{len(list(Path(_folder.name).iterdir()))}"
    folder.mkdir()
    function: Any = interpreted(name, source, folder)
    run = function.run
    function.run = lambda *args, **given: _checked(name, lambda: run(*args, **given))
    return function


def _checked(name: str, run: Callable[[], object]) -> None:
    """Runs a kernel. Raises what a GPU's programs raise where a check failed in it."""
    from tests.triton_tools import failed

    try:
        wrong = failed(run)
    except NotImplementedError as error:
        pytest.skip(str(error))
    if wrong:
        raise RuntimeError(f"a check failed (in kernel {name})")


def _current_gpu() -> int:
    return 0


def _choose_gpu(device: torch.device | int) -> None:
    assert device in (GPU, 0)


def eager_run(graph: Any) -> Any:
    """The graph as it is now, run by eager, as a program is called."""
    forward = type(graph).forward

    def boxed(args: list[Any]) -> tuple[Any, ...]:
        given = list(args)
        args.clear()
        return tuple(forward(graph, *given))

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class _NotLoaded:
    boxed = None


def _only_build(pipeline: Any) -> None:
    from plait.compile import Program

    compile_graph = pipeline.compile_graph

    def compile_for_gpu(captured: Any, cfg: Any, target: Any = None) -> Any:
        boxed = eager_run(captured.graph)
        with on_gpu(captured.graph):
            made = compile_graph(captured, cfg, target)
        return Program(lambda *args: boxed(list(args)), boxed, made.record)

    pipeline.compile_graph, pipeline.WRAPPERS = (
        compile_for_gpu,
        {"python": lambda *args: _NotLoaded()},
    )
