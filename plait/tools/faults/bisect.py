"""`plait.bisect(fn, *args)`: where does the compiled fn leave eager, relative to float64?

fn is compiled and called once, and each of its graphs is kept (`recorded.py`). The first wrong
value of a graph is searched for (`search.py`): that names the kernel. Its operators become a
script, which is made short (`shrink.py`, `pieces.py`). Then passes are left out by halves until the
smallest set is left without which the script is right (`switches.py`).
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait.capture.sources import check_callable
from plait.config import Config
from plait.errors import PlaitError
from plait.tools.faults.evaluate import Unknown
from plait.tools.faults.pieces import SEEDS, Piece, paste
from plait.tools.faults.recorded import Recorded, in_key, record
from plait.tools.faults.script import load_script, of_script, read_options
from plait.tools.faults.search import Wrong, search_graph, wrong_result
from plait.tools.faults.shrink import candidates, smallest
from plait.tools.faults.switches import find_switches
from plait.tools.faults.whole import Call, wrong_whole

SECONDS = 30.0
"""For making a script short."""


@dataclass(frozen=True)
class Found:
    """What `bisect` found. wrong: the first value that is. switches: the smallest set of passes and
    options without which it is right, () where there is none. script: Python that shows it
    alone."""

    wrong: Wrong
    switches: tuple[str, ...]
    script: str

    @property
    def text(self) -> str:
        """The report, without the script."""
        why = ", ".join(self.switches)
        return "\n".join((
            self.wrong.text,
            f"right without: {why}" if why else _NO_SWITCH,
        ))  # fmt: skip


_NO_SWITCH = "wrong without every pass that can be left out, and without kernels"


def bisect(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Found | None:
    """Finds the first kernel of the compiled fn whose result is further from float64 than eager's,
    by more than rounding explains, and what in the compiler makes it so; None if there is none.
    Prints a report with a script to paste, unless quiet.

    fn is called once, on copies of its arguments, compiled by torch.compile with these options and
    mode; where its result needs gradients that it does not take itself, the backward graphs are
    looked at too. Random numbers are those that plait drew. Raises what fn or the compiler
    raises."""
    cfg = Config.from_env().with_options(options, mode)
    check_callable(fn, "plait.bisect")
    tell = (lambda text: None) if quiet else print
    graphs = record(fn, args, kwargs, cfg)
    n_compared, passed_over = 0, list[str]()
    for graph in graphs:
        search = search_graph(graph, cfg)
        if search.suspects and (found := _confirmed(search.suspects, graph, cfg)):
            tell(f"{found.text}\n\n{found.script}")
            return found
        n_compared += search.n_compared
        passed_over += search.passed_over
    try:
        if (found := _between(fn, (args, kwargs), graphs, cfg)) is not None:
            tell(f"{found.text}\n\n{found.script}")
            return found
    except Unknown as why:
        passed_over.append(f"results and gradients of the whole ({why})")
    tell(f"nothing found in {len(graphs)} graphs: {n_compared} values compared")
    if passed_over:
        tell(f"not compared: {', '.join(passed_over)}")
    return None


def _confirmed(suspects: Sequence[Wrong], graph: Recorded, cfg: Config) -> Found | None:
    """The first suspect that is wrong as the result of a script of its own, and what makes it so;
    where none is, but a result of the graph is wrong, that one. None: rounding, or a value that a
    pass gave another meaning."""
    for wrong in suspects:
        for seed in SEEDS:
            fails = partial(_is_wrong, seed=seed, cfg=cfg, right=set())
            if wrong.piece is not None and fails(wrong.piece):
                small = smallest(wrong.piece, candidates, fails, SECONDS)
                pasted = paste(small, in_key(cfg), seed, Path())
                alone = record(pasted.fn, pasted.args, {}, cfg, dynamic=False)
                return Found(wrong, find_switches(cfg, partial(_all_right, alone)), pasted.text)
    result = wrong_result(graph, cfg)
    if result is None:
        return None
    wrong = next((w for w in suspects if w.node == result.node), result)
    return Found(wrong, find_switches(cfg, partial(_all_right, [graph])), _NO_SCRIPT)


def _between(
    fn: Callable[..., Any], call: Call, graphs: Sequence[Recorded], cfg: Config
) -> Found | None:
    """A wrong result or gradient of a module in which no kernel is wrong. Raises Unknown."""
    if not isinstance(fn, torch.nn.Module):
        return None
    if any(g.draws(cfg) for g in graphs):
        raise Unknown("they are random")
    found = wrong_whole(fn, call, cfg)
    if found is None:
        return None
    name, worst = found
    wrong = Wrong("the whole", "no kernel", "graphs made of it", name, "", worst, piece=None)
    switches = find_switches(cfg, lambda c: wrong_whole(fn, call, c) is None)
    return Found(wrong, switches, _NO_SCRIPT)


_NO_SCRIPT = "# It is wrong only where it stands: no script of a part of its graph shows it.\n"


def _is_wrong(p: Piece, seed: int | None, cfg: Config, right: set[str]) -> bool:
    """Whether the script of a piece shows a wrong number. right: scripts that show none."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pasted = paste(p, {}, seed, Path(folder))
            if pasted.text in right:
                return False
            graphs = record(pasted.fn, pasted.args, {}, cfg, dynamic=False)
            if any(wrong_result(g, cfg) for g in graphs):
                return True
        except Exception:  # noqa: BLE001 - another failure, whatever it is
            return False
    right.add(pasted.text)
    return False


def _all_right(graphs: Sequence[Recorded], cfg: Config) -> bool:
    try:
        return not any(wrong_result(g, cfg) for g in graphs)
    except PlaitError:
        return False


# ------------------------------------------------------------------------------------ command line
def main(arguments: Sequence[str]) -> None:
    """`plait bisect script.py[:function]`: exits with 1 if something is found."""
    given = of_script("bisect", "where a compiled program leaves eager").parse_args(arguments)
    fn, args = load_script(given.script)
    options = read_options(given.option)
    sys.exit(bisect(fn, *args, options=options, mode=given.mode) is not None)
