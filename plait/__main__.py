"""`python -m plait --cmake-dir`: the folder for CMAKE_PREFIX_PATH with which C++ programs find plait."""

from __future__ import annotations

import argparse
from pathlib import Path

import plait


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plait")
    parser.add_argument("--version", action="version", version=plait.__version__)
    parser.add_argument("--cmake-dir", action="store_true", required=True, help="what find_package(plait) needs")
    parser.parse_args()
    print(Path(__file__).parent / "lib" / "cmake")


if __name__ == "__main__":
    main()
