"""`plait.bisect(fn, *args)`: where does the compiled fn leave eager, relative to float64?

fn is compiled and called once, and each of its graphs is kept (`recorded.py`). The first wrong
value of a graph is searched for (`search.py`): that names the kernel. Its operators become a
script, which is made short (`shrink.py`, `pieces.py`). Then passes are left out by halves until the
smallest set is left without which the script is right (`switches.py`).
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait.capture.program import compile_graph
from plait.capture.sources import check_callable
from plait.config import Config
from plait.errors import PlaitError
from plait.ir.calls import Extern
from plait.ir.effects import defines
from plait.ir.loops import Loop, Pointwise
from plait.lower.calls import where_of
from plait.schedule.plan import Plan
from plait.tools.faults.evaluate import Unknown
from plait.tools.faults.pieces import SEEDS, Piece, paste, piece
from plait.tools.faults.recorded import Recorded, in_key, record
from plait.tools.faults.script import load_script, of_script, read_options
from plait.tools.faults.search import Wrong, search_graph, wrong_result
from plait.tools.faults.shrink import candidates, smallest
from plait.tools.faults.switches import find_switches, first_wrong_decision
from plait.tools.faults.whole import Call, wrong_whole

SECONDS = 30.0
"""For making a script short."""


@dataclass(frozen=True)
class Found:
    """What `bisect` found. wrong: the first value that is. switches: the smallest set of passes and
    options without which it is right, () where there is none. script: Python that shows it
    alone. decision: what one pass does that makes it wrong, in words, "" where that is not known.
    """

    wrong: Wrong
    switches: tuple[str, ...]
    script: str
    decision: str = ""

    @property
    def text(self) -> str:
        """The report, without the script."""
        why = ", ".join(self.switches)
        return "\n".join((
            self.wrong.text,
            f"right without: {why}" if why else _NO_SWITCH,
            *([f"{self.decision} makes the number wrong"] if self.decision else []),
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
    where none is, but a result of the graph is wrong, that one, with a script of the whole graph if
    it shows it. None: rounding, or a value that a pass gave another meaning."""
    for wrong in suspects:
        if wrong.piece is not None and (shown := _shown(wrong.piece, cfg)):
            return _found(_first_kernel(wrong, suspects), shown, cfg)
    result = wrong_result(graph, cfg)
    if result is None:
        return None
    wrong = next((w for w in suspects if w.node == result.node), result)
    shown = _shown(piece(graph.bare(cfg), graph.copies()), cfg)
    return _found(wrong, shown or _Shown([graph], _NO_SCRIPT, lambda origin: origin), cfg)


def _first_kernel(wrong: Wrong, suspects: Sequence[Wrong]) -> Wrong:
    """Of a result, the first suspect that it is computed from: what is wrong only beside what makes
    its operands has no script of its own kernel."""
    if wrong.operators or wrong.piece is None:
        return wrong
    within = {n.name for n in wrong.piece.module.graph.nodes}
    return next((w for w in suspects if w.same and w.operators and w.node in within), wrong)


@dataclass(frozen=True)
class _Shown:
    """What shows a fault. graphs: of which one is wrong. script: that they are made of. named: the
    origin of a loop in words."""

    graphs: Sequence[Recorded]
    script: str
    named: Callable[[str], str]


def _shown(p: Piece, cfg: Config) -> _Shown | None:
    """The shortest script that shows what is wrong with a piece."""
    for seed in SEEDS:
        fails = partial(_is_wrong, seed=seed, cfg=cfg, right=set())
        if fails(p):
            small = smallest(p, candidates, fails, SECONDS)
            pasted = paste(small, in_key(cfg), seed, Path())
            alone = record(pasted.fn, pasted.args, {}, cfg, dynamic=False)
            return _Shown(alone, pasted.text, partial(_named, small, pasted.text))
    return None


def _found(wrong: Wrong, shown: _Shown, cfg: Config) -> Found:
    """With what makes it right."""
    is_right = partial(_all_right, shown.graphs)
    switches = find_switches(cfg, is_right)
    decision = None
    if len(switches) == 1:
        decision = first_wrong_decision(cfg, switches[0], is_right, partial(_plans, shown.graphs))

    def name(buffer: str, plan: Plan) -> str:
        made = (op for op in plan.program.ops if buffer in defines(op))
        maker = next(made, None)
        if not isinstance(maker, Loop | Extern) or not maker.origin:
            return buffer
        of = shown.named(maker.origin[-1])
        return of if isinstance(maker, Pointwise | Extern) else f"a {_kind(maker)} of {of}"

    return Found(wrong, switches, shown.script, decision.text(name) if decision else "")


def _kind(loop: Loop) -> str:
    return type(loop).__name__.lower()


def _plans(graphs: Sequence[Recorded], cfg: Config) -> list[Plan]:
    return [compile_graph(g.captured(), cfg).record.plan for g in graphs]


def _named(p: Piece, script: str, origin: str) -> str:
    """The origin of a loop, of a line of the script of a piece, as the value of that line and where
    the program computes it."""
    found = re.match(r"<pasted>:(\d+) ", origin)
    if found is None:
        return origin
    name = script.splitlines()[int(found[1]) - 1].partition("=")[0].strip()
    where = next((where_of(n) for n in p.module.graph.nodes if n.name == name), "")
    return f"{name} ({where})" if where else name


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
