"""plait's operators where there is no GPU: values, gradients of every order, what torch says of a
custom operator, programs, and C++."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import plait
import plait.ops as ops
from tests import warm
from triton_launch.tests import ops_cases

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent
LIB = ROOT / "plait" / "lib"
P: Any = torch.ops.plait

TARGET = torch.tensor([1, 0, -100, 3])
WEIGHT = torch.linspace(0.2, 1, 5, dtype=torch.float64)
ANGLES = torch.linspace(-3, 3, 16, dtype=torch.float64).view(8, 2)
TABLES = ANGLES.cos(), ANGLES.sin()


def r(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("case", ops_cases.CASES, ids=str)
def test_against_float64(case: ops_cases.Case) -> None:
    ops_cases.check(case)


def loss(x: Tensor, weight: Tensor | None, reduction: int, smoothing: float) -> Tensor:
    return P.cross_entropy(x, TARGET, weight, reduction, -100, smoothing)


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add": (partial(P.add, alpha=2), ((2, 3, 1), (3, 4))),
    "softmax": (lambda x: P.softmax(x, 1), ((2, 3, 2),)),
    "rms_norm": (lambda x: P.rms_norm(x, [3, 2]), ((2, 3, 2),)),
    "add_rms_norm": (lambda x, y, w: P.add_rms_norm(x, y, [4], w), ((2, 4), (2, 4), (4,))),
    "rotary": (lambda x: P.rotary(x, *TABLES, offset=1), ((2, 3, 2, 5),)),
    "rotary, offsets": (
        lambda x: P.rotary(x, *TABLES, offsets=torch.tensor([3, 1]), interleaved=True),
        ((2, 3, 2, 4),),
    ),
    "rotary, tables": (P.rotary, ((1, 3, 2, 5), (4, 2), (4, 2))),
    "matmul": (P.matmul, ((2, 1, 2, 3), (2, 3, 2))),
    "linear": (P.matmul, ((2, 2, 3), (3, 2))),
    "cross_entropy": (lambda x: loss(x, None, 0, 0.0), ((4, 5),)),
    "cross_entropy, mean": (lambda x: loss(x, WEIGHT, 1, 0.0), ((4, 5),)),
    "cross_entropy, smoothed": (lambda x: loss(x, WEIGHT, 1, 0.1), ((4, 5),)),
    "cross_entropy, smoothed sum": (lambda x: loss(x, None, 2, 0.1), ((4, 5),)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    """Of both modes and of the second order."""
    op, shapes = GRADIENTS[name]
    x = [r(*s) for s in shapes]
    assert gradcheck(op, x, check_forward_ad=True, fast_mode=True) and gradgradcheck(
        op, x, fast_mode=True
    )


F32 = partial(r, dtype=torch.float32)
HALF = partial(r, dtype=torch.bfloat16)
TABLES32 = ANGLES.cos().float(), ANGLES.sin().float()
CHECKED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (P.add.default, (F32(3, 4), F32(4)), {"alpha": 2}),
    (P.add.Scalar, (F32(3, 4), 2.5), {}),
    (P.softmax.default, (F32(3, 4, 2), 1), {}),
    (P.softmax.default, (HALF(3, 4), -1, torch.float32), {}),
    (P._softmax_backward.default, (F32(3, 4), F32(3, 4), 1, torch.float32), {}),
    (P.rotary.default, (F32(2, 3, 2, 5), *TABLES32), {"offset": 1}),
    (
        P.rotary.default,
        (F32(2, 3, 2, 5).transpose(0, 1), *TABLES32),
        {"offsets": torch.tensor([1, 2, 0]), "interleaved": True},
    ),
    (P._rms_norm.default, (F32(3, 4), F32(3, 4), F32(4), 1, 1e-5), {}),
    (P._rms_norm.default, (HALF(3, 4), F32(3, 4), F32(4), 1, 1e-5), {}),
    (P._rms_norm.default, (F32(3, 4).t(), None, None, 1, 1e-5), {}),
    (
        P._rms_norm_backward.default,
        (F32(3, 4), F32(3, 4), F32(3, 4), F32(4), torch.rand(3, 1), 1, 1e-5),
        {},
    ),
    (P._cross_entropy.default, (F32(4, 5), TARGET, None, 1, -100, 0.0), {}),
    (P._cross_entropy.default, (HALF(4, 5), TARGET, torch.rand(5), 0, -100, 0.1), {}),
    (
        P._cross_entropy_backward.default,
        (F32(), F32(4, 5), TARGET, torch.rand(5), torch.rand(4), torch.tensor(3.0), 1, -100, 0.1),
        {},
    ),
    (P._bmm.default, (F32(2, 4, 3).mT, F32(2, 4, 5)), {}),
    (P.matmul.default, (F32(2, 3, 4), F32(4, 5)), {}),
    (P.cross_entropy.default, (F32(4, 5, 2), torch.randint(5, (4, 2))), {}),
    (P.add_rms_norm.default, (F32(3, 4), F32(3, 4), [4], F32(4)), {}),
]


@pytest.mark.parametrize("k", range(len(CHECKED)), ids=lambda k: str(CHECKED[k][0]))
def test_as_torch_wants_operators(k: int) -> None:
    """Shapes without values, dynamic ones too, and gradients as AOTAutograd traces them."""
    op, args, kwargs = CHECKED[k]
    opcheck(op, args, kwargs)


def model(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    tables = TABLES32
    y, z = ops.add_rms_norm(x, 2 * x, [16], w)
    q = ops.rotary(y.view(2, -1, 4, 4), *tables, interleaved=True).reshape(x.shape)
    a = ops.softmax(ops.matmul(q, ops.add(z, y, alpha=0.5).mT), -1)
    return ops.cross_entropy(ops.matmul(a, y).flatten(0, 1), target)


def inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return F32(2, n, 16), F32(16), torch.randint(16, (2 * n,))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "plait"])
def test_programs(backend: str, dynamic: bool, programs: list[Any]) -> None:
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    for n in (5, 6) if dynamic else (5,):
        x, w, target = inputs(n)
        want, got = model(x, w, target), compiled(x, w, target)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w))
        )
    assert len(programs) == (2 if backend == "plait" else 0)


def test_plait_takes_them_apart() -> None:
    x, w, target = inputs(5)
    found = plait.explain(model, x, w, target, quiet=True)
    assert "0 calls of PyTorch's own operators" in str(found)
    with torch.no_grad():
        torch.testing.assert_close(
            plait.compile(model, (x, w, target))(x, w, target), model(x, w, target)
        )


def test_in_bfloat16_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.matmul(F32(3, 4), F32(4, 2)).dtype == torch.bfloat16


ERRORS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: ops.rms_norm(r(3, 4), [3]),
        r"last dimensions of input, \[3, 4\], must be normalized_shape, \[3\]",
    ),
    (
        lambda: ops.rms_norm(r(3, 4), [4], r(3)),
        r"weight is of shape \[3\], and normalized_shape \[4\]",
    ),
    (
        lambda: ops.add_rms_norm(r(3, 4), r(4), [4]),
        r"residual is of shape \[4\], and input \[3, 4\]",
    ),
    (
        lambda: ops.rms_norm(torch.arange(4), [4]),
        "input must be of half, bfloat16, float or double, not Long",
    ),
    (lambda: ops.softmax(torch.arange(4), 0), "self must be of half"),
    (lambda: ops.softmax(r(4), 1), "Dimension out of range"),
    (lambda: ops.matmul(r(3, 4), r(3, 4)), r"shapes \[3, 4\] and \[3, 4\] do not fit: 4 against 3"),
    (lambda: ops.matmul(r(3, 4), F32(4, 3)), "self is of Double, other of Float"),
    (lambda: ops.matmul(r(), r(3)), "both must have a dimension at least, they have 0 and 1"),
    (lambda: ops.cross_entropy(r(4, 5), TARGET[:3]), r"classes must be of shape \[4\], not \[3\]"),
    (lambda: ops.cross_entropy(r(4, 5), TARGET, r(4).detach()), "one for each of 5 classes"),
    (lambda: ops.cross_entropy(r(4, 5), TARGET, r(5)), "has no gradient for weight"),
    (lambda: ops.cross_entropy(r(4, 5), TARGET, None, 3), "reduction is 0, 1 or 2"),
    (lambda: ops.cross_entropy(r(4, 5), TARGET, None, 1, -100, 2.0), "between 0 and 1, it is 2"),
    (lambda: ops.rotary(r(2, 3, 4), *TABLES), "it has 3 dimensions"),
    (lambda: ops.rotary(r(2, 3, 4, 5), *TABLES, offset=6), "positions 6 to 8 of x, and cos has 8"),
    (lambda: ops.rotary(r(2, 3, 4, 3), *TABLES), "2 pairs, and x only 3 elements"),
    (lambda: ops.rotary(r(2, 3, 4, 5), *TABLES, offsets=TARGET), "for each of 2 batches"),
    (lambda: ops.add(torch.arange(3), 1, alpha=0.5), "alpha must not be a floating point number"),
    (lambda: ops.use_pack("nowhere"), "cannot read kernel file nowhere"),
]


@pytest.mark.parametrize("k", range(len(ERRORS)))
def test_errors(k: int) -> None:
    call, said = ERRORS[k]
    with pytest.raises((RuntimeError, IndexError), match=said):
        call()


def test_complex_numbers() -> None:
    x, y = r(3).to(torch.complex128), r(3).to(torch.complex128)
    torch.testing.assert_close(ops.add(x, y, alpha=2j), torch.add(x, y, alpha=2j))


def test_plait_does_not_load_them() -> None:
    code = "import plait, plait.capture.backend, sys; assert 'plait.ops' not in sys.modules"
    done = warm.run("-c", code, env=os.environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def build_api(folder: Path) -> Path:
    """The C++ program of ops_api.cpp."""
    program = folder / "ops_api"
    libraries = [
        f"-L{LIB}",
        f"-L{TORCH / 'lib'}",
        f"-Wl,-rpath,{LIB}:{TORCH / 'lib'}",
        "-lplait_ops",
        "-ltorch_cpu",
    ]
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O0",
            f"-I{ROOT / 'triton_launch' / 'include'}",
            f"-I{ROOT / 'plait' / 'include'}",
            "-isystem",
            str(TORCH / "include"),
            "-o",
            str(program),
            str(HERE / "ops_api.cpp"),
            *libraries,
            "-lplait_core",
            "-lc10",
            "-ldl",
        ],
        check=True,
        timeout=300,
    )
    return program


def test_from_cpp(tmp_path: Path) -> None:
    done = subprocess.run([build_api(tmp_path), "cpu"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == [
        "plait::rms_norm: the last dimensions of input, [4, 6, 32], must be normalized_shape, [31]",
        "plait::matmul: shapes [4, 6, 32] and [4, 6, 32] do not fit: 32 against 6",
    ]
    assert len(lines) == 11 and all(line.endswith(" ok") for line in lines[:-2])
