"""`plait.reduce(fn, *args)`: a program that fails becomes a short script that fails in one way.

Its graphs are recorded without kernels. The first that fails alone is made small (`shrink.py`);
each candidate is a script (`pieces.py`) that is tried in a process of its own (`trial.py`), so that
crashes and hangs shrink too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.capture.sources import check_callable
from plait.config import Config
from plait.pipelines import LEAVABLE
from plait.tools.faults.pieces import SEEDS, WRONG, NoText, Pasted, Piece, paste, piece
from plait.tools.faults.recorded import in_key, record
from plait.tools.faults.script import load_script, of_script, read_options
from plait.tools.faults.shrink import candidates, smallest
from plait.tools.faults.trial import RIGHT, Trials

TRIAL_SECONDS = 60.0
"""After which a script hangs."""


@dataclass(frozen=True)
class Reduced:
    """outcome: what becomes of the script, as it became of the program: "exit 1" (a wrong number,
    or slower than eager), "signal SIGSEGV", "hang", "raises ValueError: ...". n_operators: in it.
    """

    outcome: str
    n_operators: int
    script: str


def reduce(
    fn: Callable[..., Any],
    *args: Any,
    failing: Callable[[Callable[..., Any], tuple[Any, ...]], bool] | None = None,
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
    cfg = Config.from_env().with_options(options, mode)
    check_callable(fn, "plait.reduce")
    bare = replace(cfg, kernels=False, without=",".join(LEAVABLE))
    pieces = [piece(g.bare(cfg), g.copies()) for g in record(fn, args, kwargs, bare) if g.is_known]
    check = f"slower(fn, *args, factor={slower}" if slower else WRONG
    tell: Callable[[str], None] = (lambda text: None) if quiet else partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder, closing(Trials(TRIAL_SECONDS)) as trials:
        untold: dict[str, None] = {}

        def becomes(p: Piece, seed: int | None) -> str:
            try:
                pasted = paste(p, in_key(cfg), seed, Path(folder), check)
            except NoText as why:
                untold[str(why)] = None
                return RIGHT
            if failing is None:
                return trials.outcome(pasted.text)
            return "it fails" if _holds(failing, pasted) else RIGHT

        for p, seed in product(pieces, SEEDS):
            outcome = becomes(p, seed)
            if outcome != RIGHT:
                tell(f"{outcome}: {p.n_calls} operators")
                fails = partial(_equal, becomes, seed, outcome)
                small = smallest(p, candidates, fails, seconds, partial(_tell_size, tell))
                script = paste(small, in_key(cfg), seed, Path(), check).text
                tell(f"\n{script}")
                return Reduced(outcome, small.n_calls, script)
    why = f", no script holds {', '.join(untold)}" if untold else ""
    tell(f"nothing fails: {len(pieces)} graphs tried{why}")
    return None


def _equal(
    becomes: Callable[[Piece, int | None], str], seed: int | None, outcome: str, p: Piece
) -> bool:
    return becomes(p, seed) == outcome


def _tell_size(tell: Callable[[str], None], p: Piece) -> None:
    numel = sum(x.numel() for x in p.given if isinstance(x, Tensor))
    tell(f"  {p.n_calls} operators, {numel} numbers")


def _holds(failing: Callable[..., bool], pasted: Pasted) -> bool:
    try:
        return failing(pasted.fn, pasted.args)
    except Exception:  # noqa: BLE001 - another failure, whatever it is
        return False


def main(arguments: Sequence[str]) -> None:
    """`plait reduce script.py[:function]`: exits with 1 if something fails."""
    parser = of_script("reduce", "shrink a failing program to a script")
    parser.add_argument("--slower", type=float, default=0.0, metavar="FACTOR",
                        help="what fails is to take so many times eager's time")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=120.0, help="for shrinking")
    given = parser.parse_args(arguments)
    fn, args = load_script(given.script)
    found = reduce(
        fn, *args, slower=given.slower, seconds=given.seconds, mode=given.mode,
        options=read_options(given.option),
    )  # fmt: skip
    sys.exit(found is not None)
