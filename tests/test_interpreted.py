"""Tests of the CPU suite as on a GPU, without one: see tests/interpreted.py. A sample here, the
suite under `slow`.

Kernels run in Triton's interpreter, or are compiled to cubins and do not run.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.fuzz.make import generate
from tests.fuzz.pool import INTERPRETED, Worker
from tests.fuzz.program import Call, Line, Operand, Program, Road

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"
NAMED = "not repro and not prints and not many"
ALL = ["-m", "slow or not slow", "-k", NAMED]
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")


def passes(args: list[str], at_least: int, folder: Path, timeout: int, **more: str) -> None:
    """These tests pass in a process with the plugin, and so many of them were there. more: its
    environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PLAIT_"))}
    options = ["-p", "tests.interpreted", "-q", "-o", f"cache_dir={folder}"]
    env |= {"PYTHONPATH": str(TRITON), **more}
    done = warm.run("-m", "pytest", *options, *args, env=env, cwd=ROOT, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) >= at_least, done.stdout


@needs_triton
@pytest.mark.parametrize(
    "suite",
    [
        "graphs",
        "attention",
        "products",
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in ("operators", "float8", "models", "pools")
        ),
    ],
)
def test_sample(suite: str, tmp_path: Path) -> None:
    forward = "softmax or scatter_add or cumsum or digamma or sigmoid or silu"
    some_ops = f"test_forward and ({forward}) or test_dynamic and pool"
    samples = {
        "graphs": (
            ALL[:2]
            + [f"tests/test_fuzz_graphs.py::test_random_graphs[{k}]" for k in (1, 2, 4, 5, 6)]
            + ["tests/test_batches.py::test_mixed_sizes[python]"],
            6,
        ),
        "attention": (
            ["tests/test_flex_attention.py", "-k", "as_eager and (ids or decode)", *ALL[:2]],
            2,
        ),
        "products": (
            [
                "tests/test_products.py",
                "tests/test_segments.py",
                "-k",
                "residual or parts or two or heads or odd or wait or described or test_random",
                *ALL[:2],
            ],
            12,
        ),
        "float8": (
            ["tests/test_float8.py", "-k", "(read_as_eager or rounded_as_eager) and e4m3fn]"],
            8,
        ),
        "models": (["tests/test_models.py", "-k", "step and bert or inference and resnet"], 2),
        "operators": (["tests/test_opinfo.py", *ALL[:2], "-k", f"({some_ops}) and not _all"], 18),
        "pools": (["tests/test_pool_training.py", "-k", "first_layers"], 2),
    }
    passes(*samples[suite], tmp_path, timeout=300, TRITON_INTERPRET="1")


SCALARS = {
    "a float of a size": "torch.full((2,), float(round(a0.shape[0] * 0.37, 1)))",
    "times a float of a size": "a0[:2] * round(a0.shape[0] * 0.37, 1)",
    "a product of sizes": "torch.full((2,), a0.shape[0] * 1000000007)",
    "the rest of a product": "torch.full((2,), a0.shape[0] * 1000000007 % 1013)",
}
"""Values that sizes make, in kernels of a few points."""


@needs_triton
def test_programs_of_the_fuzzer_run_as_on_a_gpu(tmp_path: Path) -> None:
    """In the fuzzer's own process, which says where numbers are wrong."""
    calls = (Call(1, {"n": 5}, {}), Call(2, {"n": 7}, {}))
    worker = Worker(cache=str(tmp_path), device=INTERPRETED)
    try:
        for text in SCALARS.values():
            p = Program(
                0, (Operand("a0", "float32", ("n",)),), (Line("t1", text, "sizes"),), ("t1",),
                calls, Road(dynamic=True, wrapper="python"),
            )  # fmt: skip
            found = worker.ask({"program": p.dumps()})
            assert (found["kind"], found["graphs"]) == ("ok", 1), (text, found)
    finally:
        worker.close()


def test_programs_for_the_interpreter_are_those_of_a_gpu() -> None:
    for seed in range(10):
        p, there = generate(seed, INTERPRETED), generate(seed, "cuda")
        assert (p.lines, p.calls, p.device) == (there.lines, there.calls, "cpu")
        assert p.road.wrapper in ("python", "fx")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["test_fuzz_graphs", "test_models", "test_opinfo", "test_optimizers"]
)
@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_suite(file: str, gpu: str, tmp_path: Path) -> None:
    marked = [] if file == "test_opinfo" else ALL  # its slow samples would take hours
    passes(
        [f"tests/{file}.py", *marked],
        18,
        tmp_path,
        timeout=3000,
        TRITON_INTERPRET="1",
        PLAIT_GPU_ARCH=gpu,
    )


def builds(args: list[str], at_least: int, n_cubins: int, gpu: str, folder: Path) -> None:
    """As `passes`, with the kernels compiled to at least so many cubins."""
    passes(
        args,
        at_least,
        folder / "pytest",
        timeout=3000,
        PLAIT_GPU_ARCH=gpu,
        PLAIT_CACHE_DIR=str(folder),
    )
    assert len(list(folder.glob("cubins/*/*.cubin"))) >= n_cubins


@needs_triton
@pytest.mark.parametrize("gpu", ["sm_100", "gfx942"])
def test_sample_builds(gpu: str, tmp_path: Path) -> None:
    builds(["tests/test_models.py", *ALL[:2], "-k", "step and bert"], 1, 12, gpu, tmp_path)


@needs_triton
def test_casts_of_float8_build(tmp_path: Path) -> None:
    casts = "(read_as_eager or rounded_as_eager) and float32"
    builds(["tests/test_float8.py", "-k", casts, *ALL[:2]], 8, 8, "sm_90", tmp_path)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx1100"])
def test_everything_builds(gpu: str, tmp_path: Path) -> None:
    suites = [f"tests/test_{s}.py" for s in ("models", "fuzz_graphs", "optimizers")]
    # What PyTorch captures of Muon is 3e-4 from eager where PyTorch itself runs it (backend
    # "aot_eager").
    builds([*suites, *ALL[:-1], f"{NAMED} and not Muon"], 150, 300, gpu, tmp_path)
