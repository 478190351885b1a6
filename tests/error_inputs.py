"""PyTorch's own wrong inputs of its ops: what eager raises for each, and what a compiled function
raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests.opinfo_tools import Case

ALIKE, OTHER, TAKEN = "refused alike", "refused with another class", "not refused"
_KINDS = (NotImplementedError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)
Row = dict[str, str]


def kind_of(error: Exception | None) -> str:
    """The builtin class by which a program would catch an error; "" for none."""
    if error is None:
        return ""
    return next((k.__name__ for k in _KINDS if isinstance(error, k)), type(error).__name__)


def caught_as(error: Exception, kind: str) -> bool:
    return kind in (k.__name__ for k in type(error).__mro__)


def raised(fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Exception | None:
    """What fn raises for copies of these tensors."""
    try:
        with torch.no_grad():
            fn([t.detach().clone() if t.layout == torch.strided else t for t in tensors])
    except Exception as error:  # noqa: BLE001  (the answer)
        return error
    return None


def compare(op: Any) -> list[Row]:
    """A row for each of an op's error inputs that eager refuses: verdict, eager's class, plait's,
    and where they differ those of torch's own back ends."""
    logging.disable(logging.ERROR)  # torch logs the fake errors, which are expected here
    try:
        return [row for wrong in op.error_inputs("cpu") if (row := _row(op, wrong.sample_input))]
    finally:
        logging.disable(logging.NOTSET)


def _row(op: Any, sample: Any) -> Row | None:
    case = Case.of(op, sample)
    tensors = case.inputs()
    want = raised(case.run, tensors)
    if want is None:  # wrong for other reasons, such as a warning
        return None
    kind = kind_of(want)
    got = _through(case, tensors, "plait")
    verdict = TAKEN if got is None else ALIKE if caught_as(got, kind) else OTHER
    row = {"verdict": verdict, "eager": kind, "plait": kind_of(got)}
    if verdict != ALIKE:
        row["says"] = " ".join(str(want).split())[:120]
        row["dynamo"], row["aot"] = (
            kind_of(_through(case, tensors, b)) for b in ("eager", "aot_eager")
        )
    return row


def _through(case: Case, tensors: Sequence[torch.Tensor], backend: str) -> Exception | None:
    torch._dynamo.reset()
    return raised(torch.compile(case.run, backend=backend), tensors)


def is_torchs_own(row: Row) -> bool:
    """Whether torch's tracing alone comes to what plait came to, so that the difference is not
    plait's."""
    return row["plait"] in (row.get("dynamo"), row.get("aot"))


def errors_table(found: Mapping[str, Sequence[Row]]) -> str:
    """The committed table: a line for each op, and one for each error input that is not refused
    alike."""
    rows = [row for rows in found.values() for row in rows]
    count = {v: sum(r["verdict"] == v for r in rows) for v in (ALIKE, OTHER, TAKEN)}
    lines = [
        "# What eager refuses",
        "",
        'Error inputs of PyTorch\'s ops through `torch.compile(backend="plait")` on CPU:',
    ]
    lines += [
        f"{len(rows)} that eager refuses, of {len(found)} ops. `python -m tests.sweep errors`, "
        "then `--tables`.",
        "",
    ]
    lines += ["| refused alike | refused with another class | not refused |", "|---|---|---|"]
    lines += [f"| {count[ALIKE]} | {count[OTHER]} | {count[TAKEN]} |", "", "## Not alike", ""]
    lines += [
        "What torch's own tracing comes to, by Dynamo alone "
        '(`backend="eager"`) and with AOTAutograd'
    ]
    lines += ['(`backend="aot_eager"`), is the evidence that a difference is not plait\'s.', ""]
    lines += [
        "| op | eager | plait | Dynamo | AOTAutograd | eager says |",
        "|---|---|---|---|---|---|",
    ]
    for name, op_rows in sorted(found.items()):
        for row in op_rows:
            if row["verdict"] != ALIKE:
                cells = [
                    row["eager"],
                    *(row.get(k) or "runs" for k in ("plait", "dynamo", "aot")),
                    row["says"],
                ]
                lines.append(
                    f"| {name} | " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
                )
    lines += [
        "",
        "## By op",
        "",
        "| op | alike | another class | not refused |",
        "|---|---|---|---|",
    ]
    for name, op_rows in sorted(found.items()):
        each = (sum(r["verdict"] == v for r in op_rows) for v in (ALIKE, OTHER, TAKEN))
        lines.append(f"| {name} | {' | '.join(map(str, each))} |")
    return "\n".join(lines) + "\n"
