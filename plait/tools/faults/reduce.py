"""`plait.reduce(fn, *args)`: a program that fails becomes a short script that fails in one way.

Its graphs are recorded without kernels. The first that fails alone is made small (`shrink.py`);
each candidate is a script (`pieces.py`) that is tried in a process of its own (`trial.py`), so that
crashes and hangs shrink too. `bisect` makes its scripts by the same `Tries`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.capture.sources import check_callable
from plait.config import Config
from plait.pipelines import LEAVABLE
from plait.tools.faults.pieces import SEEDS, WRONG, NoText, Pasted, Piece, paste, piece
from plait.tools.faults.recorded import Graphs, Recording, record, told
from plait.tools.faults.script import load_script, of_script, read_arguments, run_script
from plait.tools.faults.shrink import candidates, smallest
from plait.tools.faults.trial import RIGHT, Trials
from plait.tools.report import count

Tell = Callable[[str], object]
Failing = Callable[[Callable[..., Any], tuple[Any, ...]], bool]


def patience(n_operators: int) -> float:
    """Seconds after which a script of so many operators hangs: many times what compiling it takes
    on a busy machine."""
    return 60.0 + n_operators


@dataclass(frozen=True)
class Small:
    """A piece that fails, and its script. outcome: what becomes of that."""

    outcome: str
    piece: Piece
    seed: int | None
    script: str


@dataclass
class Tries:
    """Tries pieces as scripts. folder: of files that scripts read. check: what a script calls.
    untold: why pieces have no script."""

    cfg: Config
    trials: Trials
    folder: Path
    check: str = WRONG
    failing: Failing | None = None
    untold: dict[str, None] = field(default_factory=dict)

    def becomes(self, p: Piece, seed: int | None, cfg: Config | None = None) -> str:
        """What becomes of the script of a piece. cfg: another one than usual."""
        try:
            pasted = paste(p, told(cfg or self.cfg), seed, self.folder, self.check)
        except NoText as why:
            self.untold[str(why)] = None
            return RIGHT
        if self.failing is None:
            return self.trials.outcome(pasted.text)
        return "it fails" if _holds(self.failing, pasted) else RIGHT

    def smallest(
        self, pieces: Sequence[Piece], seconds: float, tell: Tell, wanted: str = ""
    ) -> Small | None:
        """The first piece that fails, made small in so many seconds. wanted: the one outcome that
        counts, if any does not."""
        for p, seed in product(pieces, SEEDS):
            self.trials.seconds = patience(p.n_calls)
            outcome = self.becomes(p, seed)
            if outcome == RIGHT or wanted not in ("", outcome):
                continue
            tell(f"{outcome}: {p.n_calls} operators")
            if outcome == "hang":
                self._wait_less(p, seed)
            fails = partial(self._becomes_that, seed, outcome)
            small = smallest(p, candidates, fails, seconds, partial(_tell_size, tell))
            script = paste(small, told(self.cfg), seed, Path(), self.check).text
            return Small(outcome, small, seed, script)
        return None

    def _becomes_that(self, seed: int | None, outcome: str, p: Piece) -> bool:
        return self.becomes(p, seed) == outcome

    def _wait_less(self, p: Piece, seed: int | None) -> None:
        """Nothing takes four times as long as it does without kernels, but what hangs."""
        start = time.monotonic()
        if self.becomes(p, seed, replace(self.cfg, kernels=False)) == RIGHT:
            self.trials.seconds = 5.0 + 4 * (time.monotonic() - start)


@dataclass(frozen=True)
class Reduced:
    """outcome: what becomes of the script, as it became of the program: "exit 1" (a wrong number,
    or slower than eager), "signal SIGSEGV", "hang", "raises ValueError: ..."; "it fails" as
    `failing` says. n_operators: in it."""

    outcome: str
    n_operators: int
    script: str


def reduce(
    fn: Callable[..., Any],
    *args: Any,
    failing: Failing | None = None,
    slower: float = 0.0,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    seconds: float = 120.0,
    quiet: bool = False,
    **kwargs: Any,
) -> Reduced | None:
    """Shrinks what goes wrong in the compiled fn, for so many seconds: a wrong number, an error, a
    crash or a hang, each tried in a process of its own; None if nothing does.

    slower: what takes more than so many times eager's time, in place of these. failing: what is to
    stay true of a function and its arguments, in place of all that; it is called in this process.
    Arguments of the script are made by seed where that will do. options, mode: as for
    torch.compile. Prints progress and the script, unless quiet."""
    check_callable(fn, "plait.reduce")
    graphs = record(fn, args, kwargs, Recording(options, mode, _bare))
    tell: Tell = (lambda text: None) if quiet else partial(print, flush=True)
    return _reduced(graphs, slower, failing, seconds, tell)


def _bare(cfg: Config) -> Config:
    """Graphs as they come: what a pass over joint graphs makes of them would be in the script."""
    return replace(cfg, without=",".join(LEAVABLE))


def _reduced(
    graphs: Graphs, slower: float, failing: Failing | None, seconds: float, tell: Tell
) -> Reduced | None:
    check = f"slower(fn, *args, factor={slower}" if slower else "" if failing else WRONG
    untold: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder, closing(Trials()) as trials:
        for g, cfg in graphs:
            if why := g.why_unknown:
                untold[f"{g.name}, {why}"] = None
                continue
            tries = Tries(cfg, trials, Path(folder), check, failing, untold)
            if small := tries.smallest([piece(g.bare(cfg), g.copies())], seconds, tell):
                tell(f"\n{small.script}")
                return Reduced(small.outcome, small.piece.n_calls, small.script)
    why = f", no script holds {', '.join(untold)}" if untold else ""
    tell(f"nothing fails: {count(len(graphs), 'graph')} tried{why}")
    return None


def _tell_size(tell: Tell, p: Piece) -> None:
    numel = sum(x.numel() for x in p.given if isinstance(x, Tensor))
    tell(f"  {p.n_calls} operators, {numel} numbers")


def _holds(failing: Failing, pasted: Pasted) -> bool:
    try:
        return failing(pasted.fn, pasted.args)
    except Exception:  # noqa: BLE001 - another failure, whatever it is
        return False


def main(arguments: Sequence[str]) -> None:
    """`plait reduce script.py[:function]` or `plait reduce -- script.py ...`: exits with 1 if
    something fails."""
    parser = of_script("reduce", "shrink a failing program to a script")
    parser.add_argument("--slower", type=float, default=0.0, metavar="FACTOR",
                        help="what fails is to take so many times eager's time")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=120.0, help="for shrinking")
    given, script, by = read_arguments(parser, arguments, _bare)
    graphs = run_script(script, by) if script else record(*load_script(given.file), {}, by)
    found = _reduced(graphs, given.slower, None, given.seconds, partial(print, flush=True))
    sys.exit(found is not None)
