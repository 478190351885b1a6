"""Compiles some hundred graphs of many kinds, each for a CPU and for a GPU, and runs none of what
was made: `plait replay record FOLDER -- python -m tests.corpus`.

Models of the test suite and of its zoo with fixed and with dynamic sizes and in training, the
kernels that benchmarks race, rows that blocks do not divide, and random programs of the fuzzer. A
change of plait that is meant to change no program is proved by it:
`plait replay rerun FOLDER` shows nothing. Where graphs run, eager runs them as they were captured.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import cases
from plait import compat
from plait.compile import Program, compile_texts
from plait.errors import PlaitError
from plait.graph.captured import Captured
from plait.log import watched
from plait.wrapper.program import CompileRecord
from tests.fuzz.check import _Run
from tests.fuzz.make import generate
from tests.interpreted import eager_run, on_gpu
from tests.models import MODELS
from tests.zoo import HF, OWN

FUZZED = 200
"""Programs of the fuzzer, from seed 0 on."""
ZOO = 5
"""Every so many models of the zoo, one."""
LONG_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax, weighted": lambda x: (x.exp() * x).sum(-1) + x.logsumexp(-1),
    "log_softmax backward": lambda x: x - x.log_softmax(-1).exp() * x.sum(-1, keepdim=True),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "columns": lambda x: x.sum(0) + x.amax(0),
    "all": lambda x: x.var() + x.prod(),
    "scan": lambda x: x.cumsum(-1).cummax(-1).values,
}
LONG_SHAPES = ((3, 65_537), (5, 65_536), (70_001, 3), (1, 1_000_003), (4_099, 2_048))
GPU = {"gpu_arch": "sm_90", "wrapper": "native"}

Thunk = Callable[[], object]


def compile_both(captured: Captured, cfg: Any, target: Any = None) -> Program:
    """In place of compile_graph: the texts of a program for each device, and eager's run."""
    boxed = eager_run(captured.graph)
    kind, _, number = captured.name.rpartition("_")
    wrapper, _ = compile_texts(captured, cfg)
    with suppress(PlaitError), on_gpu(captured.graph):  # what runs on a CPU alone
        compile_texts(replace(captured, name=f"{kind}_gpu_{number}"), cfg.with_options(GPU))
    record: Any = CompileRecord(captured.name, captured.kind, "", plan=None, wrapper=wrapper)  # type: ignore[arg-type]
    return Program(lambda *args: boxed(list(args)), boxed, record)


def programs() -> Iterator[tuple[str, Thunk]]:
    """What the corpus is made of: a name and what compiles it."""
    for name, (make, data) in MODELS.items():
        for how in ("fixed", "dynamic", "training"):
            yield f"{name}, {how}", lambda m=make, d=data, h=how: run_model(m, d, h)
    for name, case in list({**HF, **OWN}.items())[::ZOO]:
        yield f"zoo {name}", lambda c=case: run_model(c.make, c.data, "fixed")
    for how in ("fixed", "dynamic"):
        for name, (fn, given) in cases().items():
            yield f"kernel {name}, {how}", lambda f=fn, g=given, h=how: run_kernel(f, g, h)
        for name, rows in LONG_ROWS.items():
            for shape in LONG_SHAPES:
                yield (
                    f"rows {name} {shape}, {how}",
                    lambda f=rows, s=shape, h=how: run_kernel(f, (torch.rand(s),), h),
                )
    for seed in range(FUZZED):
        yield f"fuzz {seed}", lambda s=seed: run_fuzzed(s)


def run_model(make: Callable[[], Any], data: Any, how: str) -> None:
    """One call of a model, and its backward pass in training."""
    torch.manual_seed(0)
    model = make().train(how == "training")
    compiled = torch.compile(model, backend="plait", dynamic=how == "dynamic")
    with torch.set_grad_enabled(how == "training"):
        given = data(2)
        out = compiled(*(given if isinstance(given, tuple) else (given,)))
    if how == "training" and isinstance(out, Tensor):
        out.sum().backward()


def run_kernel(fn: Callable[..., Any], given: tuple[Tensor, ...], how: str) -> None:
    """One call of a function."""
    torch.compile(fn, backend="plait", dynamic=how == "dynamic")(*given)


def run_fuzzed(seed: int) -> None:
    """A random program as the fuzzer would run it; packages, which are built, are left out."""
    p = generate(seed, "cpu")
    if p.road.way != "package":
        run = _Run(p.source(), p.road, [o.name for o in p.operands if o.grad], p.inexact, "cpu")
        run.all_calls("plait")


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="one of so many programs")
    every = parser.parse_args().every
    pipeline: Any = importlib.import_module("plait.compile")
    pipeline.compile_graph = compile_both
    target: Any = importlib.import_module("plait.kernel.triton.target")
    target.triton_version = lambda: "3.6.0"
    capture: Any = importlib.import_module("plait.capture.program")
    capture.compile_graph = compile_both
    # The program is none of the executor's: AOTAutograd runs it.
    compat.autograd.training_reason = lambda *_: "its programs are texts"
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for name, compile_it in watched("programs", [*programs()][::every]):
        torch._dynamo.reset()
        try:
            compile_it()
        except Exception as error:  # noqa: BLE001 - what is refused is no graph
            print(f"{name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)


if __name__ == "__main__":
    main()
