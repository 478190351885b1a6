"""What C++ may pass to a Triton kernel, by the header alone: arrays are pointers, and what cannot
be passed is one error of the compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from triton_launch.tests.test_jit import INCLUDES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

ARRAYS = """
#include <plait/triton.h>
using namespace plait::triton;
alignas(16) float floats[4096];
alignas(16) const int64_t table[2][8] = {};

// Whether an array is passed as the pointer that it decays to.
template <class A, class P>
bool same(const A& array, const P& pointer) {
  detail::Frame<A> a(array);
  detail::Frame<P> p(pointer);
  // The head is the launch's, and written by it.
  return a.leaves.size() == 1 && a.leaves[0].kind == p.leaves[0].kind &&
         std::equal(a.words.begin() + detail::n_head_words, a.words.end(),
                    p.words.begin() + detail::n_head_words);
}
#ifdef CALLS  // of functions that are in a library
void compiles(Kernel kernel, Stream stream) {
  kernel[{1, stream}](floats, table, 4096, plait::arg<"out"> = floats);
  auto bound = kernel.bind({1}, floats, 1);
  bound.set<0>(floats + 16);
}
#endif
int main() {
  return same(floats, floats + 0) && same(table, &table[0][0]) && !same(floats, floats + 1) &&
         detail::nbytes_of(floats) == sizeof floats && detail::nbytes_of(table) == sizeof table
             ? 0 : 1;
}
"""

CALL = """
#include <plait/triton.h>
struct Odd { int x; };
void call(plait::triton::Kernel kernel, plait::triton::Stream stream, Odd odd,
          std::pair<int, Odd> pair, void* p) {
  kernel[{1, stream}](ARGUMENTS);
}
"""
NO_TRAITS = "plait::triton cannot pass this type to a kernel: specialize Traits for it"
NO_DTYPE = (
    "plait::triton knows no element type for this pointer: pass plait::triton::Pointer{p, dtype}"
)


def compiled(source: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "source.cpp").write_text(source)
    command = ["g++", "-std=c++20", *INCLUDES, *flags, "source.cpp"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_an_array_is_a_pointer(tmp_path: Path) -> None:
    run = compiled(ARRAYS, tmp_path, "-DCALLS", "-fsyntax-only", "-Wall", "-Werror")
    assert run.returncode == 0, run.stderr
    run = compiled(ARRAYS, tmp_path, "-o", "arrays")
    assert run.returncode == 0, run.stderr
    assert subprocess.run([tmp_path / "arrays"], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("odd, 4096", NO_TRAITS),
        ("pair", NO_TRAITS),
        ('plait::arg<"x"> = odd', NO_TRAITS),
        ("p, 4096", NO_DTYPE),
    ],
)
def test_what_cannot_be_passed_is_one_error(arguments: str, text: str, tmp_path: Path) -> None:
    run = compiled(CALL.replace("ARGUMENTS", arguments), tmp_path, "-fsyntax-only")
    errors = [line for line in run.stderr.splitlines() if " error: " in line]
    assert run.returncode == 1 and len(errors) == 1 and text in errors[0], run.stderr
    assert "source.cpp:6:" in run.stderr.split(" error: ")[0]  # the user's line stands before it
