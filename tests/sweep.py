"""Everything at once: all op samples in all dtypes, forward and gradient, all error inputs, samples
made not to fit, and all models of the zoo.

It takes hours, so it keeps state: `python -m tests.sweep --state FILE` goes on where it stopped,
runs what failed once more, `--shard 1/2` takes every second case (shards may share a state file),
and `--tables` writes what is known as committed tables. A case that passed by the table of a run
before, on another machine, is not run again: for a sweep from the start, remove
benchmarks/results/sweep.md. Each case runs in a worker process under a time limit: a crash or a
hang is a finding like any other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from plait.log import watched
from tests import opinfo_tools as tools
from tests.error_inputs import compare, errors_table
from tests.unfit import DTYPES, compare_unfit, is_asked, lost, unfit_table

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
GROUPS = ("errors", "unfit", "zoo", "forward", "strided", "gradient", "dynamic")
_BATCH = 10  # samples that share a compile
_LIFE = 40  # cases that a worker runs before a fresh one takes over
_REFUSALS = ("errors", "unfit")  # groups with tables of their own
_TEXT = 300  # characters of a failure that are kept
State = dict[str, dict[str, Any]]


# ---------------------------------------------------------------------------------------- the cases
def all_cases(groups: Iterable[str]) -> Iterator[str]:
    """Names of all cases of the groups: group/op/dtype, errors/op, zoo/kind/model."""
    for group in groups:
        if group == "zoo":
            yield from _zoo_cases()
        elif group == "errors":
            yield from (
                f"errors/{tools.name_of(op)}" for op in op_db if op.error_inputs_func is not None
            )
        elif group == "unfit":
            asked = ((op, d) for op in op_db if is_asked(op) for d in DTYPES)
            yield from (f"unfit/{tools.name_of(op)}/{d}" for op, d in asked if _takes(op, d))
        else:
            yield from (
                f"{group}/{tools.name_of(op)}/{d}" for op in op_db for d in _dtypes(op, group)
            )


def _dtypes(op: Any, group: str) -> list[str]:
    if (
        op.name in tools.RANDOM
        or op.name.startswith("jiterator")
        or tools.name_of(op) == "as_strided.partial_views"
    ):
        return []
    known: set[torch.dtype] = op.supported_dtypes("cpu")
    if group == "gradient":
        known = op.supported_backward_dtypes("cpu") if op.supports_autograd else set()
    if group == "dynamic":
        known = known & {torch.float32}
    if group != "forward":
        known = {d for d in known if not tools.behind_dynamo(op, d)}
    return sorted(str(d).removeprefix("torch.") for d in known)


def _takes(op: Any, dtype: str) -> bool:
    return getattr(torch, dtype) in op.supported_dtypes("cpu")


def _zoo_cases() -> Iterator[str]:
    from tests.zoo import HF, OWN, TORCHVISION

    for name, case in {**HF, **OWN, **TORCHVISION}.items():
        yield f"zoo/inference/{name}"
        if case.dynamic and name not in TORCHVISION:
            yield f"zoo/batches/{name}"
        if case.trains:
            yield f"zoo/training/{name}"


# ----------------------------------------------------------------------------------------- one case
def run_case(name: str) -> dict[str, Any]:
    """What one case came to: samples, fallbacks (ATen calls for want of a rule) and failures, or
    error inputs."""
    group, *rest = name.split("/")
    torch.manual_seed(0)
    torch._dynamo.reset()
    if group == "errors":
        return {"errors": compare(_op(rest[0]))}
    if group == "unfit":
        return {"unfit": compare_unfit(_op(rest[0]), getattr(torch, rest[1]))}
    if group == "zoo":
        return _zoo(*rest)
    return _samples(group, _op(rest[0]), getattr(torch, rest[1]))


def _op(name: str) -> Any:
    return next(op for op in op_db if tools.name_of(op) == name)


def _zoo(kind: str, name: str) -> dict[str, Any]:
    from tests import test_zoo
    from tests.zoo import HF, OWN, TORCHVISION

    runs = {
        "inference": test_zoo.runs_well,
        "batches": test_zoo.takes_any_batch,
        "training": test_zoo.trains_well,
    }
    failure = _failure(lambda: runs[kind]({**HF, **OWN, **TORCHVISION}[name]))
    return {"samples": 1, "fallbacks": [], "failures": [failure] if failure else []}


def _samples(group: str, op: Any, dtype: torch.dtype) -> dict[str, Any]:
    strided = range(1 << 30) if group == "strided" else ()
    cases = tools.pick(op, dtype, 1 << 30, requires_grad=group == "gradient", strided=strided)
    behind = tools.behind_dynamo(op, dtype)
    cases = cases if behind else [c for c in cases if tools.traceable(c)]
    fallbacks: set[str] = set()
    failures: list[str] = []

    def check(batch: Sequence[tools.Case]) -> None:
        if behind:
            outcome = tools.check_through_dynamo(batch[0])
        elif group == "gradient":
            outcome = tools.check_gradient(batch)
        else:
            outcome = tools.check_forward(batch, dynamic=group == "dynamic")
        fallbacks.update(outcome.fallbacks)
        failures.extend(outcome.failures)

    each = 1 if behind or group == "dynamic" else _BATCH
    for k in range(0, len(cases), each):
        batch = cases[k : k + each]
        if not _failure(lambda batch=batch: check(batch)):
            continue
        failures += [
            f"sample {k + j}: {e}"
            for j, c in enumerate(batch)
            if (e := _failure(lambda c=c: check([c])))
        ]
    return {
        "samples": len(cases),
        "fallbacks": sorted(fallbacks),
        "failures": [f[:_TEXT] for f in failures],
    }


def _failure(run: Callable[[], object]) -> str:
    """The error that run ends with, "" if it ends well."""
    try:
        run()
    except Exception as error:  # noqa: BLE001  (a finding)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_TEXT]
    return ""


# ------------------------------------------------------------------------------------------ workers
class Worker:
    """A process that runs one case after another."""

    def __init__(self) -> None:
        self.ran = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sweep", "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def run(self, name: str, limit: float) -> dict[str, Any]:
        """The result of a case; a failure of its own where the process died or took longer than
        limit seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.ran += 1
        with contextlib.suppress(BrokenPipeError):
            print(name, file=self.process.stdin, flush=True)
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if waiting.select(limit) else ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        hung = self.process.poll() is None and not self._ends()
        self.stop()
        what = (
            f"took more than {limit:.0f} s"
            if hung
            else f"the process ended with {self.process.returncode}"
        )
        return {"samples": 0, "fallbacks": [], "failures": [what]}

    def _ends(self) -> bool:
        """Whether it is on its way out: its output is closed."""
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def spent(self) -> bool:
        return self.ran >= _LIFE or self.process.poll() is not None

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def serve() -> None:
    """A worker's loop: names of cases come in, a line of JSON goes out for each. Nothing else may
    reach the output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    for line in sys.stdin:
        name = line.strip()
        try:
            result = run_case(name)
        except Exception as error:  # noqa: BLE001  (a finding)
            text = f"{type(error).__name__}: {error}"[:_TEXT]
            result = {"samples": 0, "fallbacks": [], "failures": [text]}
        print(json.dumps(result), file=out, flush=True)


def sweep(names: Sequence[str], state: Path, limit: float) -> None:
    """Runs what has not passed by the state file yet, and adds a line for each case to it."""
    done = read_state(state)
    todo = [n for n in names if n not in done or done[n].get("failures")]
    worker: Worker | None = None
    for k, name in enumerate(watched("cases", todo)):
        if worker is None or worker.spent:
            if worker is not None:
                worker.stop()
            worker = Worker()
        result = worker.run(name, limit)
        with state.open("a") as f:  # one write: shards may share the file
            f.write(json.dumps({"case": name, **result}) + "\n")
        failures = result.get("failures", [])
        print(f"{k + 1}/{len(todo)} {name} {failures[:1] or ''}", flush=True)
    if worker is not None:
        worker.stop()


def read_state(path: Path) -> State:
    """Case -> its result: those of the committed table, then of the state file, whose last line of
    a case counts."""
    done = read_table(TABLE.read_text()) if TABLE.exists() else {}
    lines = path.read_text().splitlines() if path.exists() else []
    return done | {row.pop("case"): row for row in map(json.loads, lines)}


# ------------------------------------------------------------------------------------------- tables
TABLE = RESULTS / "sweep.md"
_CELL = re.compile(r"(\S+) (\d+)(e?)")


def sweep_table(state: State) -> str:
    """By group, op and dtype (of the zoo: what was done, with which model): how many samples
    passed, with `e` where ATen was called for want of a rule. `read_table` reads it back."""
    groups = [group for group in GROUPS if group not in _REFUSALS]
    cells: dict[str, dict[str, list[str]]] = {group: {} for group in groups}
    totals = {group: [0, 0, 0, 0] for group in groups}
    failures: list[str] = []
    for name, row in sorted(state.items()):
        group, op, dtype = name.split("/", 2)
        if group in _REFUSALS:
            continue
        extern, failed = bool(row["fallbacks"]), len(row["failures"])
        for k, n in enumerate((1, row["samples"], row["samples"] if extern else 0, failed)):
            totals[group][k] += n
        failures += [f"- `{name}`: {text}" for text in row["failures"]]
        if not failed:
            cells[group].setdefault(op, []).append(f"{dtype} {row['samples']}{'e' * extern}")
    lines = [
        "# Whole sweeps", "",
        f"`make sweep`, then `make sweep ARGS=--tables`; torch {torch.__version__}. It takes "
        "hours, so it was done in",
        "parts: a sweep leaves out what stands here.", "",
        "| group | cases | of | samples | with a fallback to ATen | failed |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for group, (cases, *rest) in totals.items():
        lines.append(
            f"| {group} | {' | '.join(map(str, (cases, len(list(all_cases([group]))), *rest)))} |"
        )
    lines += ["", "## Failures", "", *(failures or ["None."]), ""]
    lines += ["Below: samples that passed; `e`: ATen is called for something for want of a rule."]
    for group, by_op in cells.items():
        lines += [
            "",
            f"## {group}",
            "",
            *(f"- {op}: {', '.join(found)}" for op, found in by_op.items()),
        ]
    return "\n".join(lines) + "\n"


def read_table(text: str) -> State:
    """The cases that passed, from a table of `sweep_table`."""
    state: State = {}
    group = ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        elif line.startswith("- ") and group in GROUPS:
            op, _, cells = line.removeprefix("- ").partition(": ")
            for dtype, samples, extern in _CELL.findall(cells):
                row = {
                    "samples": int(samples),
                    "fallbacks": [extern] if extern else [],
                    "failures": [],
                }
                state[f"{group}/{op}/{dtype}"] = row
    return state


def write_tables(state: State) -> None:
    errors = {name.split("/")[1]: row["errors"] for name, row in state.items() if "errors" in row}
    if errors:
        (RESULTS / "error-inputs.md").write_text(errors_table(errors))
    asked = {n.partition("/")[2]: row for n, row in state.items() if n.startswith("unfit/")}
    unfit = {name: row.get("unfit") or lost(row["failures"][0]) for name, row in asked.items()}
    if unfit:
        (RESULTS / "unfit-inputs.md").write_text(
            unfit_table(unfit, len(list(all_cases(["unfit"]))))
        )
    if any(not name.startswith(_REFUSALS) for name in state):
        TABLE.write_text(sweep_table(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "groups", nargs="*", default=GROUPS, help=f"of {', '.join(GROUPS)}; all if none is named"
    )
    parser.add_argument("--state", type=Path, default=Path("build/sweep.jsonl"))
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds a case may take")
    parser.add_argument(
        "--tables", action="store_true", help="write the tables of what the state file has"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        serve()
        return
    if given.tables:
        write_tables(read_state(given.state))
        return
    given.state.parent.mkdir(parents=True, exist_ok=True)
    which, shards = map(int, given.shard.split("/"))
    sweep(list(all_cases(given.groups or GROUPS))[which - 1 :: shards], given.state, given.limit)


if __name__ == "__main__":
    main()
