"""`plait.bisect(fn, *args)`: where does the compiled fn leave eager, relative to float64?

fn is called once, and each of its graphs is kept (`recorded.py`). Each is compiled and called in a
process of its own, which may crash or hang, then the first value that is wrong is searched for here
(`search.py`): that names the kernel. Its operators become a script, which is made short
(`reduce.py`). Then passes are left out by halves until the smallest set is left without which the
script is right; of one that counts its decisions, the first that makes it wrong (`switches.py`).
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait.capture.export import record_of
from plait.capture.program import compile_graph
from plait.capture.sources import check_callable
from plait.config import Config
from plait.errors import PlaitError
from plait.ir.calls import Extern
from plait.ir.effects import defines
from plait.ir.loops import Loop, Pointwise
from plait.log import watched
from plait.lower.calls import origin_of, where_of
from plait.schedule.plan import Plan
from plait.tools.faults.evaluate import Unknown
from plait.tools.faults.pieces import Piece, piece
from plait.tools.faults.recorded import Graphs, Recorded, Recording, record, told
from plait.tools.faults.reduce import Small, Tell, Tries, patience
from plait.tools.faults.script import load_script, of_script, read_arguments, run_script
from plait.tools.faults.search import Wrong, search_graph, wrong_result
from plait.tools.faults.switches import find_switches, first_wrong_decision
from plait.tools.faults.trial import RIGHT, Trials
from plait.tools.faults.whole import Call, Way, as_module, wrong_whole
from plait.tools.report import count

SECONDS = 30.0
"""For making a script short."""
WRONG_NUMBER = "exit 1"
"""What becomes of a script that shows one."""


@dataclass(frozen=True)
class Found:
    """What `bisect` found.

    graph: the name of its graph.
    outcome: WRONG_NUMBER, or how a graph fails: "signal SIGSEGV", "hang", "raises ...".
    wrong: the first value that is; None where a graph fails.
    operators: those of the script, with source lines.
    switches: the smallest set of passes and options without which it is right; () if none is.
    script: Python that shows it alone.
    decision: what one pass does that makes it wrong, in words; "" where that is not known."""

    graph: str
    outcome: str
    wrong: Wrong | None
    operators: str
    switches: tuple[str, ...]
    script: str
    decision: str = ""

    @property
    def text(self) -> str:
        """The report, without the script."""
        why = ", ".join(self.switches)
        of = f"\n  of {self.operators}" if self.operators else ""
        what = "the number wrong" if self.wrong else "it fail"
        return "\n".join((
            self.wrong.text if self.wrong else f"{self.graph}: {self.outcome}{of}",
            f"right without: {why}" if why else _NO_SWITCH,
            *([f"{self.decision} makes {what}"] if self.decision else []),
        ))  # fmt: skip


_NO_SWITCH = "wrong without every pass that can be left out, and without kernels"
_NO_SCRIPT = "# It is wrong only where it stands: no script of a part of its graph shows it.\n"


def bisect(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    freeze: bool = False,
    quiet: bool = False,
    **kwargs: Any,
) -> Found | None:
    """Finds the first kernel of the compiled fn whose result is further from float64 than eager's,
    by more than rounding explains, and what in the compiler makes it so; None if there is none.
    A graph that does not compile, crashes or hangs is found, too. Prints a report with a script to
    paste, unless quiet.

    fn is called once, on copies of its arguments, as torch.compile with these options and mode
    sees it; where its result needs gradients that it does not take itself, the backward graphs are
    looked at too. What plait.compile returned is compiled anew, as it was, for these arguments.
    Random numbers are those that plait drew. freeze: what plait.compile with freeze=True makes of a
    module is looked at as a whole, besides. Raises what fn or tracing raises."""
    with _bisecting((lambda text: None) if quiet else print) as b:  # it loads torch meanwhile
        return b.of_call(fn, (args, kwargs), Recording(options, mode), freeze)


@contextmanager
def _bisecting(tell: Tell) -> Iterator[_Bisection]:
    with tempfile.TemporaryDirectory() as folder, closing(Trials()) as trials:
        yield _Bisection(tell, trials, Path(folder))


@dataclass
class _Bisection:
    """One search. n_graphs, n_compared: what was looked at. passed_over: what was not."""

    tell: Tell
    trials: Trials
    folder: Path
    n_graphs: int = 0
    n_compared: int = 0
    passed_over: list[str] = field(default_factory=list)

    def of_call(self, fn: Any, call: Call, by: Recording, freeze: bool = False) -> Found | None:
        """What is wrong in the graphs of a call, or else in its results."""
        check_callable(fn, "plait.bisect")
        graphs = record(fn, *call, by)
        ways: Sequence[Way] = [fn.given] if record_of(fn) else [None, *[{"freeze": True}] * freeze]
        return self.first(graphs, partial(self._whole, fn, call, graphs, ways))

    def first(
        self, graphs: Graphs, whole: Callable[[], Found | None] = lambda: None
    ) -> Found | None:
        """What is wrong in the first graph in which something is, or else in the whole. Tells it,
        or that nothing was found and where it was not looked for."""
        found = self._first_graph(graphs) or whole()
        if found is not None:
            self.tell(f"{found.text}\n\n{found.script}")
        elif not graphs:
            self.tell("plait compiled no graph; plait.explain says why")
        else:
            values = count(self.n_compared, "value")
            self.tell(f"nothing found in {count(self.n_graphs, 'graph')}: {values} compared")
        if found is None and graphs and self.passed_over:
            self.tell(f"not compared: {', '.join(self.passed_over)}")
        return found

    def _first_graph(self, graphs: Graphs) -> Found | None:
        for graph, cfg in watched("graphs", graphs):
            self.n_graphs += 1
            if found := self._failing(graph, cfg) or self._wrong_number(graph, cfg):
                return found
        return None

    def _failing(self, graph: Recorded, cfg: Config) -> Found | None:
        """What becomes of a graph that does not get as far as to a number."""
        if graph.why_unknown:
            return None
        alone = partial(self._outcome, graph)
        outcome = alone(cfg)
        if outcome in (RIGHT, WRONG_NUMBER):
            return None
        tries = Tries(cfg, self.trials, self.folder)
        p = piece(graph.bare(cfg), graph.copies())
        small = tries.smallest([p], SECONDS, lambda text: None, wanted=outcome)
        return _found(graph.name, outcome, None, _Shown.of(small, tries, graph, alone), cfg)

    def _outcome(self, graph: Recorded, cfg: Config) -> str:
        """What becomes of a graph in a process of its own."""
        file = self.folder / f"{graph.name}.pt"
        if not file.exists():
            graph.save(file)
            self.trials.seconds = patience(graph.text.count("\n"))
        call = f"check.wrong_graph({str(file)!r}, options={told(cfg)!r})"
        return self.trials.outcome(
            f"from plait.tools.faults import check\nraise SystemExit({call})\n"
        )

    def _wrong_number(self, graph: Recorded, cfg: Config) -> Found | None:
        """The first suspect that is wrong as the result of a script of its own, and what makes it
        so; where none is, but a result of the graph is wrong, that one, with a script of the whole
        graph if it shows it. None: rounding, or a value that a pass gave another meaning."""
        search = search_graph(graph, cfg)
        self.n_compared += search.n_compared
        self.passed_over += search.passed_over
        if not search.suspects:
            return None
        tries = Tries(cfg, self.trials, self.folder)
        alone = partial(self._outcome, graph)
        for wrong in search.suspects:
            if wrong.piece is not None and (small := _script(wrong.piece, tries)):
                blamed = _first_kernel(wrong, search.suspects)
                shown = _Shown.of(small, tries, graph, alone)
                return _found(graph.name, WRONG_NUMBER, blamed, shown, cfg)
        result = wrong_result(graph, cfg)
        if result is None:
            return None
        wrong = next((w for w in search.suspects if w.node == result.node), result)
        small = _script(piece(graph.bare(cfg), graph.copies()), tries)
        shown = _Shown.of(small, tries, graph, alone)
        return _found(graph.name, WRONG_NUMBER, wrong, shown, cfg)

    def _whole(self, fn: Any, call: Call, graphs: Graphs, ways: Sequence[Way]) -> Found | None:
        """A wrong result or gradient of what has no wrong kernel."""
        if not graphs:
            return None
        cfg = graphs[0][1]
        try:
            if (module := as_module(fn.__wrapped__ if record_of(fn) else fn)) is None:
                raise Unknown("functions and exported programs may hold what a call changes")
            if any(g.draws(cfg) for g, _ in graphs):
                raise Unknown("they may be random")
            found = (_wrong_whole(module, call, cfg, way) for way in ways)
            return next(filter(None, found), None)
        except Unknown as why:
            self.passed_over.append(f"results and gradients of the whole ({why})")
        return None


def _wrong_whole(fn: torch.nn.Module, call: Call, cfg: Config, way: Way) -> Found | None:
    found = wrong_whole(fn, call, cfg, way)
    if found is None:
        return None
    name, worst = found
    graph = "the whole, frozen" if way and way["freeze"] else "the whole"
    wrong = Wrong(graph, "no kernel", "graphs made of it", name, "", worst, piece=None)
    switches = find_switches(cfg, lambda c: wrong_whole(fn, call, c, way) is None)
    return Found(graph, WRONG_NUMBER, wrong, "", switches, _NO_SCRIPT)


def _script(p: Piece, tries: Tries) -> Small | None:
    """The shortest script that shows a wrong number."""
    return tries.smallest([p], SECONDS, lambda text: None, wanted=WRONG_NUMBER)


def _first_kernel(wrong: Wrong, suspects: Sequence[Wrong]) -> Wrong:
    """Of a result, the first suspect that it is computed from: what is wrong only beside what makes
    its operands has no script of its own kernel."""
    if wrong.operators or wrong.piece is None:
        return wrong
    within = {n.name for n in wrong.piece.module.graph.nodes}
    return next((w for w in suspects if w.same and w.operators and w.node in within), wrong)


@dataclass(frozen=True)
class _Shown:
    """What shows a fault. becomes: what becomes of it with a configuration. operators: of the
    script. named: the origin of a loop in words."""

    graphs: Sequence[Recorded]
    becomes: Callable[[Config], str]
    script: str
    operators: str
    named: Callable[[str], str]

    @staticmethod
    def of(
        small: Small | None, tries: Tries, graph: Recorded, alone: Callable[[Config], str]
    ) -> _Shown:
        """A script, or the graph where none shows it. alone: what becomes of the graph."""
        if small is None:
            return _Shown([graph], alone, _NO_SCRIPT, "", lambda origin: origin)
        p = small.piece
        calls = (n for n in p.module.graph.nodes if n.op == "call_function")
        graphs = record(*_pasted(small), {}, Recording(vars(tries.cfg)), dynamic=False)
        return _Shown(
            [g for g, _ in graphs],
            lambda c: tries.becomes(p, small.seed, c),
            small.script,
            "; ".join(dict.fromkeys(map(origin_of, calls))),
            partial(_named, p, small.script),
        )


def _pasted(small: Small) -> tuple[Callable[..., Any], Sequence[Any]]:
    scope: dict[str, Any] = {}
    text = small.script.rpartition("raise SystemExit")[0]
    exec(compile(text, "<pasted>", "exec"), scope)
    return scope["fn"], scope["args"]


def _found(name: str, outcome: str, wrong: Wrong | None, shown: _Shown, cfg: Config) -> Found:
    """With what makes it right."""

    def is_right(c: Config) -> bool:
        return shown.becomes(c) == RIGHT

    switches = find_switches(cfg, is_right)
    decision = None
    if len(switches) == 1:
        plans = partial(_plans, shown.graphs)
        decision = first_wrong_decision(cfg, switches[0], is_right, plans)

    def name_of(buffer: str, plan: Plan) -> str:
        maker = next((op for op in plan.program.ops if buffer in defines(op)), None)
        if not isinstance(maker, Loop | Extern) or not maker.origin:
            return buffer
        of, kind = shown.named(maker.origin[-1]), type(maker).__name__.lower()
        return of if isinstance(maker, Pointwise | Extern) else f"a {kind} of {of}"

    text = decision.text(name_of) if decision else ""
    return Found(name, outcome, wrong, shown.operators, switches, shown.script, text)


def _plans(graphs: Sequence[Recorded], cfg: Config) -> list[Plan]:
    try:
        return [compile_graph(g.captured(), cfg).record.plan for g in graphs]
    except PlaitError:
        return []


def _named(p: Piece, script: str, origin: str) -> str:
    """The origin of a loop, of a line of the script of a piece, as the value of that line and where
    the program computes it."""
    found = re.match(r"<pasted>:(\d+) ", origin)
    if found is None:
        return origin
    name = script.splitlines()[int(found[1]) - 1].partition("=")[0].strip()
    where = next((where_of(n) for n in p.module.graph.nodes if n.name == name), "")
    return f"{name} ({where})" if where else name


# ------------------------------------------------------------------------------------ command line
def main(arguments: Sequence[str]) -> None:
    """`plait bisect script.py[:function]` or `plait bisect -- script.py ...`: exits with 1 if
    something is found, with 2 if nothing could be compared."""
    parser = of_script("bisect", "where a compiled program leaves eager")
    given, script, by = read_arguments(parser, arguments)
    with _bisecting(print) as b:
        if script:
            b.passed_over.append("results and gradients of the whole (a script runs once)")
            found = b.first(run_script(script, by))
        else:
            fn, args = load_script(given.file)
            found = b.of_call(fn, (args, {}), by)
        sys.exit(1 if found else 2 * (not b.n_compared))
