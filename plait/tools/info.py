"""`plait info FILE`: what is in a package (plait.package), or in a pack of kernels
(plait.tools.pack).

The file is read and verified; nothing of it is loaded or run, so it may be for another machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from plait.runtime.cubin import unpack


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="plait info", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--weights", action="store_true", help="list a package's weights, and verify their checksum"
    )
    given = parser.parse_args(arguments)
    try:
        with given.file.open("rb") as file:
            is_package = file.read(8) == b"PLAITPKG"
        print("\n".join(_package(given.file, given.weights) if is_package else _pack(given.file)))
    except OSError as error:
        sys.exit(f"plait: {given.file}: {error.strerror}")
    except ValueError as error:
        sys.exit(f"plait: {error}")


def _package(path: Path, weights: bool) -> Iterator[str]:
    import torch  # noqa: F401  (plait._native is linked to its libraries)

    from plait._native import inspect_package

    for topic, entries in inspect_package(str(path), weights).items():
        if topic == "weights" and entries and not weights:
            yield f"weights: {len(entries)} tensors (--weights lists them)"
        elif entries:
            yield f"{topic}:"
            yield from (f"  {name} {text}".rstrip() for name, text in entries.items())


def _pack(path: Path) -> Iterator[str]:
    try:
        kernels, _ = unpack(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None
    yield f"{len(kernels)} kernels:"
    for name, cubin in kernels.items():
        function, *specialization = name.split("|")
        capability = f"sm_{specialization.pop()}, " if specialization else ""
        signature = " ".join(p for p in (function, *specialization) if p)
        yield f"  {signature}  ({capability}{cubin.num_warps} warps, {len(cubin.image)} bytes)"
