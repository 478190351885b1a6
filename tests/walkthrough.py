"""Writes the blocks of docs/architecture.md that show a function at every stage: `python -m
tests.walkthrough --write`; without it, prints the page as plait makes it now.

A block stands between a line `<!-- made: GRAPH FILE -->` and the end of the fence behind it. Its
text is what a compile leaves in its debug folder, less what is printed for every program alike.
"""

from __future__ import annotations

import importlib
import linecache
import re
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from plait import compat
from tests import corpus

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
SOURCE = """\
def project(x, weight):
    return torch.softmax(x @ weight, dim=-1)
"""
WIDTH = 100
_BLOCK = re.compile(r"(<!-- made: (\S+) (\S+) -->\n```\w*\n)(.*?)(```\n)", re.DOTALL)


def stages(folder: Path) -> None:
    """Compiles the function, forward and backward, for a CPU with AVX2 and for a GPU; runs none of
    it."""
    pipeline: Any = importlib.import_module("plait.compile")
    capture: Any = importlib.import_module("plait.capture.program")
    pipeline.compile_graph = capture.compile_graph = corpus.compile_both
    compat.autograd.training_reason = lambda *_: "its programs are texts"
    lines = SOURCE.splitlines(keepends=True)
    linecache.cache["project.py"] = (len(SOURCE), None, lines, "project.py")
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(SOURCE, "project.py", "exec"), scope)
    compiled = torch.compile(
        scope["project"], backend="plait", options={"debug_dir": str(folder), "isa": "avx2"}
    )
    x, weight = (torch.ones(s, requires_grad=True) for s in ((128, 256), (256, 512)))
    compiled(x, weight).sum().backward()


def page(text: str, folder: Path) -> str:
    """The page with its blocks as they are now."""

    def block(found: re.Match[str]) -> str:
        head, graph, file, _, end = found.groups()
        made = SOURCE if graph == "source" else (folder / graph / file).read_text()
        return head + "\n".join(map(_folded, _essence(made, file).splitlines())) + "\n" + end

    return _BLOCK.sub(block, text)


def _essence(text: str, file: str) -> str:
    """What differs from program to program: of kernels, the last function."""
    if file == "4_kernels.cpp":
        text = text[text.rindex('extern "C" i64 plait_') :]
        return text[: text.index("\n}\n") + 2]
    if file == "4_kernels_cuda.py":
        return text[text.rindex("@triton.jit") :]
    return text.strip("\n")


def _folded(line: str) -> str:
    """A line in pieces that fit, cut behind commas outside of as many brackets as can be."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    out = []
    while len(line) > WIDTH:
        depths = accumulate((c in "([{") - (c in ")]}") for c in line[:WIDTH])
        cuts = [
            (-depth, k + 1)
            for k, depth in enumerate(depths)
            if k > len(indent) and line[k : k + 2] in (", ", "; ")
        ]
        if not cuts:
            break
        _, at = max(cuts)
        out.append(line[:at])
        line = indent + line[at:].lstrip()
    return "\n".join([*out, line])


def main() -> None:
    """Command line: see the module's docstring."""
    with tempfile.TemporaryDirectory() as folder:
        stages(Path(folder))
        made = page(PAGE.read_text(), Path(folder))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made)
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
