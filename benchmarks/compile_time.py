"""How long plait takes to compile recorded graphs, against another version of it.

    python -m plait replay record CORPUS -- python train.py    # any program; or `make corpus`
    git worktree add ../before COMMIT                          # then build it, as any checkout
    python -m benchmarks.compile_time CORPUS --against ../before --rounds 3

Both versions compile every graph of the corpus in turn, in fresh processes. What counts is the CPU
time of the thread that compiles, from a captured graph to the encoded program and the text of its
kernels: Dynamo and AOTAutograd come before it, the compilers of kernels after it. Of several rounds
a graph's least time counts. The lines are ratios, this version's time to the other's, of the graphs
that grew most; then that of all graphs' sum, and the geometric mean. --limit 1.05: the command
fails where the sum grew by more than 5 %.

Graphs of a GPU are compiled without one, where Triton can be found. A checkout needs its extension:
`make native`, or a copy of plait/_native*.so and plait/lib where C++ is the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

Times = dict[str, float]
"""Graph -> CPU seconds."""


# ------------------------------------------------------------------------- one version, one process
def measure(corpus: Path, only: Sequence[str] = ()) -> Times:
    """Compiles the graphs of a corpus once. Those that this version refuses are not in the
    result."""
    import torch

    from plait.compile import compile_texts
    from plait.errors import PlaitError
    from plait.graph.text import read_given
    from plait.wrapper.native import encode
    from plait.wrapper.show import GIVEN, GIVEN_TENSORS

    found: Times = {}
    for folder in sorted(f.parent for f in corpus.glob(f"*/{GIVEN}")):
        if only and folder.name not in only:
            continue
        text, tensors = (folder / GIVEN).read_text(), folder / GIVEN_TENSORS
        torch.set_default_dtype(getattr(torch, json.loads(text)["machine"]["default_dtype"]))
        try:
            constants = torch.load(tensors, weights_only=True) if tensors.is_file() else {}
            captured, cfg = read_given(text, constants)
            captured = replace(captured, name=folder.name)
            gc.collect()
            start = time.thread_time()
            encode(compile_texts(captured, cfg)[0])
        except (PlaitError, ValueError) as error:
            print(f"{folder.name}: {error}", file=sys.stderr)
            continue
        found[folder.name] = time.thread_time() - start
    return found


def _work(corpus: Path, only: Sequence[str], out: Path) -> None:
    """What a process does; the version is that of the current folder, whatever is installed."""
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
    sys.path.insert(0, str(Path.cwd()))
    import torch

    import plait

    assert Path.cwd() in Path(plait.__file__).parents, f"{plait.__file__} is another version"
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    out.write_text(json.dumps(measure(corpus, only)))


def measured(checkout: Path, corpus: Path, only: Sequence[str]) -> Times:
    """As `measure`, by the version in a folder, in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "times.json"
        command = [sys.executable, "-P", str(Path(__file__).resolve()), str(corpus.resolve())]
        # Equal hashes: sets are walked in the same order by both.
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run(
            [*command, "--only", ",".join(only), "--write", str(out)],
            cwd=checkout, env=env, check=True,
        )  # fmt: skip
        times: Times = json.loads(out.read_text())
    return times


# ------------------------------------------------------------------------------------- two versions
def least(rounds: Sequence[Times]) -> Times:
    """Of every graph that was compiled in each round."""
    common = set.intersection(*(set(r) for r in rounds))
    return {name: min(r[name] for r in rounds) for name in sorted(common)}


@dataclass(frozen=True)
class Comparison:
    before: Times
    after: Times

    @property
    def ratios(self) -> dict[str, float]:
        """Of the graphs that both versions compile, the slowest first."""
        both = self.before.keys() & self.after.keys()
        found = {name: self.after[name] / self.before[name] for name in sorted(both)}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def of_sums(self) -> float:
        both = self.ratios
        return sum(self.after[n] for n in both) / sum(self.before[n] for n in both)

    @property
    def geometric_mean(self) -> float:
        logs = [math.log(r) for r in self.ratios.values()]
        return math.exp(sum(logs) / len(logs))

    def lines(self, worst: int) -> list[str]:
        if not self.ratios:
            return ["no graph is compiled by both versions"]
        said = [
            f"{ratio:6.2f} x  {1e3 * self.before[name]:9.1f} -> {1e3 * self.after[name]:9.1f} ms"
            f"  {name}"
            for name, ratio in list(self.ratios.items())[:worst]
        ]
        before, after = (sum(t[n] for n in self.ratios) for t in (self.before, self.after))
        said.append(
            f"{self.of_sums:6.3f} x  {before:9.2f} -> {after:9.2f} s   sum of {len(self.ratios)} "
            f"graphs; geometric mean {self.geometric_mean:.3f} x"
        )
        for which, here, there in (
            ("this version", self.after, self.before),
            ("the other", self.before, self.after),
        ):
            if alone := sorted(here.keys() - there.keys()):
                said.append(f"compiled by {which} alone: {', '.join(alone)}")
        return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worst", type=int, default=10, help="how many graphs get a line")
    parser.add_argument("--limit", type=float, default=math.inf, help="the most of the sums' ratio")
    parser.add_argument("--only", default="", metavar="GRAPH,...")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    if args.write is not None:
        return _work(args.corpus, only, args.write)
    if args.against is None:
        parser.error("--against CHECKOUT is missing")
    from plait.log import watched  # not before _work, which takes another version

    before, after = [], []
    for k in watched("rounds", range(args.rounds)):
        before.append(measured(args.against, args.corpus, only))
        after.append(measured(Path.cwd(), args.corpus, only))
        found = Comparison(least(before), least(after))
        print(f"round {k + 1}: {found.lines(worst=0)[0]}", file=sys.stderr, flush=True)
    print("\n".join(found.lines(args.worst)))
    sys.exit(bool(found.ratios) and found.of_sums > args.limit)


if __name__ == "__main__":
    main()
