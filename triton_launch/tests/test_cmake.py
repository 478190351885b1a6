"""plait as a part of other CMake projects and in a prefix of its own, where there is no Python; and
the programs of triton_launch/examples, run with a driver whose GPU is the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plait.runtime.cubin import Cubin, pack
from triton_launch.tests.test_jit import TRITON

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = HERE.parent / "examples"
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# {how}: as a folder, or as something fetched. What the outer project has set stays.
OUTER = """\
cmake_minimum_required(VERSION 3.21)
project(outer LANGUAGES C CXX)
set(seen CMAKE_BUILD_TYPE CMAKE_CXX_FLAGS CMAKE_CXX_FLAGS_RELEASE CMAKE_CXX_STANDARD
         CMAKE_CXX_VISIBILITY_PRESET CMAKE_POSITION_INDEPENDENT_CODE CMAKE_EXPORT_COMPILE_COMMANDS)
foreach(name IN LISTS seen)
  set(before_${{name}} "${{${{name}}}}")
endforeach()
{how}
foreach(name IN LISTS seen)
  if(NOT "${{${{name}}}}" STREQUAL "${{before_${{name}}}}")
    message(FATAL_ERROR "${{name}} is '${{${{name}}}}', not '${{before_${{name}}}}'")
  endif()
endforeach()
{rest}
"""
FETCHED = f"""include(FetchContent)
FetchContent_Declare(plait SOURCE_DIR "{ROOT}")
FetchContent_MakeAvailable(plait)"""
USER_IN_C = """\
cmake_minimum_required(VERSION 3.20)
project(user LANGUAGES C)
find_package(plait 0.1 REQUIRED COMPONENTS core)
add_executable(user user.c)
target_link_libraries(user PRIVATE plait::core)
"""
# There may be no Python at all.
NO_PYTHON = ("-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON", "-DPLAIT_PYTHON=/nowhere/python")


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": TOOLS, **env},
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cmake(folder: Path, text: str, *options: str) -> Path:
    """Writes, configures and builds a project."""
    folder.mkdir(exist_ok=True)
    (folder / "CMakeLists.txt").write_text(text)
    run("cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", *options)
    run("cmake", "--build", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a project of others, without Python or torch, installed itself with plait as a part of
    it."""
    folder = tmp_path_factory.mktemp("outer")
    rest = f'add_subdirectory("{EXAMPLES}" examples)\ninstall(TARGETS launch_cpp launch_c)'
    options = (
        f"-DCMAKE_INSTALL_PREFIX={folder / 'prefix'}",
        "-DCMAKE_INSTALL_RPATH=$ORIGIN/../lib",
    )
    build = cmake(
        folder, OUTER.format(how=FETCHED, rest=rest), "-DPLAIT_INSTALL=ON", *NO_PYTHON, *options
    )
    run("cmake", "--install", build)
    return folder / "prefix"


def test_a_prefix_has_what_c_needs(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "user.c").write_text(
        "#include <plait/triton_c.h>\n#include <stdio.h>\nint main(void) {\n  "
        "plait_triton_kernel* k;\n"
        '  return plait_triton_from_pack("nowhere", "k", &k) == PLAIT_TRITON_ERROR &&\n'
        "         plait_triton_abi() == PLAIT_TRITON_ABI && "
        "puts(plait_triton_last_error()->message) >= 0 ? 0 : 1;\n}\n"
    )
    build = cmake(tmp_path, USER_IN_C, f"-DCMAKE_PREFIX_PATH={prefix}", *NO_PYTHON)
    assert run(build / "user") == "kernel (all of a pack): cannot read kernel file nowhere\n"


@pytest.mark.parametrize(
    "wanted, said",
    [
        ("COMPONENTS core torch", "this plait has no torch"),
        ("9.0", "0.1.0"),
        ("COMPONENTS tensor", "no tensor"),
    ],
)
def test_a_prefix_says_what_it_lacks(prefix: Path, tmp_path: Path, wanted: str, said: str) -> None:
    text = (
        "cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES CXX)\nfind_package(plait "
        f"{wanted} REQUIRED)\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(text)
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"]
    done = subprocess.run(
        command, env={**os.environ, "PATH": TOOLS}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and said in " ".join(done.stderr.split()), done.stderr


def test_a_project_of_its_own(tmp_path: Path) -> None:
    """Configured only: what is built is the same. It installs what a prefix has."""
    run("cmake", "-S", HERE.parent, "-B", tmp_path / "build", "-G", "Ninja", *NO_PYTHON)
    targets = run("ninja", "-C", tmp_path / "build", "-t", "targets", "all")
    assert "libplait_core.so:" in targets and "libplait_ops.so" not in targets
    installed = (tmp_path / "build" / "cmake_install.cmake").read_text()
    for part in ("libplait_core.so", "plait-config.cmake", "triton_launch/include/plait"):
        assert part in installed


def test_a_folder_of_a_project(tmp_path: Path) -> None:
    """Configured only: what is built is the same. A torch that is not there is said to be
    missing."""
    how = f'set(PLAIT_TORCH ON)\nadd_subdirectory("{ROOT}" plait)'
    rest = (
        "add_library(user INTERFACE)\ntarget_link_libraries(user INTERFACE plait::core "
        "plait::torch plait::ops)"
    )
    (tmp_path / "CMakeLists.txt").write_text(OUTER.format(how=how, rest=rest))
    command = ("cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", *NO_PYTHON)
    torch = Path(sys.modules["torch"].__file__ or "").parent
    run(*command, f"-DPLAIT_TORCH_DIR={torch}")
    for part in ("native", "triton_launch"):
        install = tmp_path / "build" / "plait" / part / "cmake_install.cmake"
        assert "libplait" not in install.read_text()
    done = subprocess.run(
        [*map(str, command), "-DPLAIT_TORCH_DIR=/nowhere"],
        env={**os.environ, "PATH": TOOLS}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "no torch in '/nowhere'" in done.stderr, done.stderr


USER_OF_PACKAGES = """\
#include <plait/package.h>
#include <cstdio>
int main() {
  try {
    plait::Package::load("nowhere");
  } catch (const plait::PackageError& e) {
    std::puts(e.what());
  }
}
"""


@pytest.mark.slow
def test_packages_inside_a_project(tmp_path: Path) -> None:
    """plait::torch, built by another project with the torch that it has found, and found where that
    installed it."""
    torch = Path(sys.modules["torch"].__file__ or "").parent
    how = (
        f'set(TORCH_INSTALL_PREFIX "{torch}")\n'
        f"set(PLAIT_TORCH ON)\nset(PLAIT_INSTALL ON)\n{FETCHED}"
    )
    user = (
        'add_executable(user "${CMAKE_SOURCE_DIR}/../user.cpp")\n'
        "target_link_libraries(user PRIVATE plait::torch)"
    )
    (tmp_path / "user.cpp").write_text(USER_OF_PACKAGES)
    built = cmake(
        tmp_path / "outer", OUTER.format(how=how, rest=user), *NO_PYTHON, "-DCMAKE_CXX_FLAGS=-O0"
    )
    run("cmake", "--install", built, "--prefix", tmp_path / "prefix")
    find = (
        "cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES CXX)\nfind_package(plait "
        f"REQUIRED)\n{user}\n"
    )
    found = cmake(tmp_path / "user", find, *NO_PYTHON, f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")
    for folder in (built, found):
        assert "nowhere: cannot be opened" in run(folder / "user")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the examples meet a driver that computes on the host."""
    folder = tmp_path_factory.mktemp("driver")
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-I", ROOT / "native", "-o")
    run("g++", *flags, folder / "libcuda.so.1", ROOT / "tests" / "fake_cuda.cpp", "-ldl")
    run("g++", *flags, folder / "kernels.so", HERE / "host_kernels.cpp")
    return {"LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_HOST": str(folder / "kernels.so")}


def check(said: str, *kernels: str) -> None:
    lines = [line.split(": largest error ") for line in said.splitlines()]
    assert [name for name, _ in lines] == list(kernels)
    assert all(float(error) < 1e-6 for _, error in lines)


def test_examples_from_a_pack(prefix: Path, driver: dict[str, str], tmp_path: Path) -> None:
    texts = {
        "add_kernel": "num_warps=4\nx|||\ny|||\nout|||\nn|||\nBLOCK||c|",
        "softmax_kernel": "num_warps=4\nout|||\nx|||\nn_columns|||\nBLOCK||c|",
    }
    sizes = {"add_kernel": "6 0 8 8 8 4", "softmax_kernel": "5 0 8 8 4"}
    facts = {"num_ctas": 1, "shared": 0, "global_scratch": (0, 1), "profile_scratch": (0, 1)}
    kernels = {}
    for line in (EXAMPLES / "signatures.txt").read_text().splitlines():
        name, types, *options = line.split()
        image = f"{name} {sizes[name]}".encode()
        cubin = Cubin(image, name, 8 if options else 4, **facts, cooperative=False, pdl=False)
        kernels[f"{name}|{types}|{''.join(options)}|90"] = cubin
    (tmp_path / "kernels.pack").write_bytes(pack(kernels, texts))
    check(run(prefix / "bin" / "launch_cpp", tmp_path / "kernels.pack", **driver), "add", "softmax")
    check(run(prefix / "bin" / "launch_c", tmp_path / "kernels.pack", **driver), "add")
    older = {**os.environ, **driver, "FAKE_CUDA_CAPABILITY": "8"}
    refused = subprocess.run(
        [prefix / "bin" / "launch_cpp", tmp_path / "kernels.pack"], env=older, stderr=-1
    )
    wanted = (
        b"kernels.pack for sm_80: pack it with 'add_kernel *fp32:D,*fp32:D,*fp32:D,i32:D,=1024' "
        b"and --arch 80\n"
    )
    assert refused.returncode == 1 and wanted in refused.stderr, refused.stderr
    missing = subprocess.run(
        [prefix / "bin" / "launch_c", EXAMPLES / "gpu.h"], env={**os.environ, **driver}, stderr=-1
    )
    assert missing.returncode == 1 and b"is no kernel file of this version" in missing.stderr


@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
def test_examples_with_triton(prefix: Path, driver: dict[str, str], tmp_path: Path) -> None:
    """The command line writes the pack; a process compiles the same kernels when they are
    launched."""
    env = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(TRITON))),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    signatures = f"@{EXAMPLES / 'signatures.txt'}"
    path = tmp_path / "kernels.pack"
    run(
        sys.executable,
        "-m",
        "plait",
        "pack",
        EXAMPLES / "kernels.py",
        "-o",
        path,
        "--signatures",
        signatures,
        **env,
    )
    check(run(prefix / "bin" / "launch_cpp", path, **driver), "add", "softmax")
    compiled = (EXAMPLES / "kernels.py", sys.executable)
    check(run(prefix / "bin" / "launch_cpp", *compiled, **env, **driver), "add", "softmax")
    check(run(prefix / "bin" / "launch_c", *compiled, **env, **driver), "add")
    if rustc := shutil.which("rustc"):
        folder = f"native={prefix / 'lib'}"
        rpath = f"link-arg=-Wl,-rpath,{prefix / 'lib'}"
        options = (
            "--edition=2021",
            "-D",
            "warnings",
            "-L",
            folder,
            "-C",
            rpath,
            "-o",
            tmp_path / "launch_rs",
        )
        run(rustc, *options, EXAMPLES / "launch.rs")
        check(run(tmp_path / "launch_rs", path, **driver), "add")
        check(run(tmp_path / "launch_rs", *compiled, **env, **driver), "add")
