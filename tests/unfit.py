"""Inputs of PyTorch's ops that do not fit: one number, size, index or dtype of a sample is changed.

Looked at is where eager raises, or gives other dtypes or sizes, and fake tensors do not say so:
what a compiler that goes by fake tensors gets wrong. Plait is to do as eager does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.error_inputs import ALIKE, OTHER, TAKEN, Row, caught_as, kind_of
from tests.opinfo_tools import RANDOM, Case, name_of, pick

SAMPLES = 8
DTYPES = ("float32", "int64", "bool")
RESULT = "another result"
SKIPPED = (*RANDOM, "empty", "resize_", "resize_as_", "sparse.sampled_addmm")
# Where eager reads or writes memory of others, or does not end: nothing can be learnt from it.
CRASHES = {
    "_segment_reduce.lengths": r".*", "_segment_reduce.offsets": r".*", "lu_unpack": r".*",
    "linalg.lstsq": r"leaf 1 empty .*", "linalg.lstsq.grad_oriented": r"leaf 1 empty .*",
    "nn.functional.embedding_bag": r"leaf \d+ empty .*",
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        r"leaf [1-4] (empty|cat|narrow) .*",  # weights and statistics are taken to be long enough
    ),
}  # fmt: skip


def is_asked(op: Any) -> bool:
    views = "as_strided" in op.name or op.name.startswith("jiterator")
    return op.name not in SKIPPED and not views


def changed(case: Case) -> Iterator[tuple[str, Case]]:
    """The case with one leaf changed, and what was changed."""
    for k, leaf in enumerate(case.leaves):
        for what, new in _others(leaf):
            leaves = [*case.leaves[:k], new, *case.leaves[k + 1 :]]
            yield f"leaf {k} {what}", replace(case, leaves=leaves)


def _others(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, torch.Tensor):
        yield from _other_tensors(x) if x.layout == torch.strided else ()
    elif isinstance(x, (int, float)) and not isinstance(x, bool):
        whole = isinstance(x, int)
        for v in (-7, -2, -1, 0, 1, 3, 6, 50) if whole else (-1.5, 0.0, 2.5, float("nan")):
            if v != x:
                yield f"{x} -> {v}", v


def _other_tensors(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for d in sorted({0, x.ndim - 1}) if x.ndim else ():
        if x.shape[d] > 1:
            yield f"narrow {d}", x.narrow(d, 0, x.shape[d] - 1)
        if x.shape[d]:
            yield f"cat {d}", torch.cat([x, x.narrow(d, 0, 1)], d)
            yield f"empty {d}", x.narrow(d, 0, 0)
    if x.ndim:
        yield "flat", x.reshape(-1)
        if x.shape[0]:
            yield "first", x.select(0, 0)
    yield "unsqueeze", x.unsqueeze(0)
    if x.is_complex():
        return
    if x.numel() and not x.is_floating_point() and x.dtype != torch.bool:
        yield "+ 9", x + 9
        yield "- 9", x - 9
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float16):
        if dtype != x.dtype:
            yield str(dtype), x.to(dtype)


Outcome = Exception | list[tuple[torch.Size, torch.dtype]]


def outcome(run: Callable[..., Any], case: Case, mode: FakeTensorMode | None = None) -> Outcome:
    """What a case comes to: an error, or sizes and dtypes."""
    torch.manual_seed(0)
    given = [x.detach().clone() for x in case.inputs()]
    try:
        with torch.no_grad():
            if mode is None:
                return [(x.shape, x.dtype) for x in run(given)]
            fakes = [mode.from_tensor(x) for x in given]
            with mode:
                return [(x.shape, x.dtype) for x in run(fakes)]
    except Exception as error:  # noqa: BLE001  (the answer)
        return error


def compare_unfit(op: Any, dtype: torch.dtype) -> dict[str, Any]:
    """How many changed samples were asked about, how many went as in eager, and a row for each kind
    of those that did not."""
    logging.disable(logging.ERROR)
    asked, rows = 0, dict[Any, Row]()
    skipped = CRASHES.get(name_of(op), "$")
    try:
        for sample in pick(op, dtype, SAMPLES):
            for what, case in changed(sample):
                if re.fullmatch(skipped, f"{what} "):
                    continue
                row = _row(case, what)
                if row is None:
                    continue
                asked += 1
                key = (
                    row["verdict"],
                    re.sub(r"[\d, ]+", "#", row.get("says") or what),
                    row["plait"],
                )
                if row["verdict"] != ALIKE:
                    first = rows.setdefault(key, {**row, "count": "0"})
                    first["count"] = str(int(first["count"]) + 1)
    finally:
        logging.disable(logging.NOTSET)
    return {"asked": asked, "rows": list(rows.values())}


def _row(case: Case, what: str) -> Row | None:
    """What plait does, None where fake tensors tell all."""
    want = outcome(case.run, case)
    fake = outcome(case.run, case, FakeTensorMode())
    if isinstance(fake, Exception) or want == fake:
        return None
    if not isinstance(want, Exception) and any(
        isinstance(n, torch.SymInt) for s, _ in fake for n in s
    ):
        return None  # known when it runs
    got = _through(case, "plait")
    refusal = got if isinstance(got, Exception) else None
    row = {"plait": kind_of(refusal)}
    if isinstance(want, Exception):
        kind = kind_of(want)
        verdict = TAKEN if refusal is None else ALIKE if caught_as(refusal, kind) else OTHER
        row |= {"eager": kind, "says": " ".join(str(want).split())[:120]}
    else:
        verdict = ALIKE if got == want else RESULT
    row["verdict"] = verdict
    if verdict != ALIKE:
        shapes = [list(x.shape) if isinstance(x, torch.Tensor) else x for x in case.leaves]
        row["what"] = f"{what}: {shapes}"[:120]
        for name, backend in (("dynamo", "eager"), ("aot", "aot_eager")):
            found = _through(case, backend)
            row[name] = kind_of(found) if isinstance(found, Exception) else ""
    return row


def _through(case: Case, backend: str) -> Outcome:
    torch._dynamo.reset()
    return outcome(torch.compile(case.run, backend=backend, dynamic=False), case)


def lost(failure: str) -> dict[str, Any]:
    """The result of a case that ended otherwise: in a crash."""
    row = {"verdict": RESULT, "plait": failure, "count": "1"}
    return {"asked": 1, "rows": [row]}


_HEAD = """\
# What does not fit

Samples of PyTorch's ops in which one number, size, index or dtype is changed, through
`torch.compile(backend="plait")` on CPU: those where eager raises, or gives other dtypes or sizes,
and fake tensors do not say so. {asked} were asked about, of {cases} ops and dtypes out of {total}.
`python -m tests.sweep unfit`, then `--tables`. Left out is where eager itself crashes.

| as eager | another class of error | not refused | another result |
|---|---|---|---|
| {alike} | {others} |

## Not as eager

| op | times | changed | eager | plait | Dynamo | AOTAutograd | eager says |
|---|---|---|---|---|---|---|---|
"""


def unfit_table(found: Mapping[str, Mapping[str, Any]], total: int) -> str:
    """The committed table. found: op/dtype -> what compare_unfit gave. total: how many there
    are."""
    rows = [(name, row) for name, result in sorted(found.items()) for row in result["rows"]]
    asked, others = sum(r["asked"] for r in found.values()), _counts(row for _, row in rows)
    text = _HEAD.format(
        asked=asked,
        cases=len(found),
        total=total,
        alike=asked - sum(others),
        others=" | ".join(map(str, others)),
    )
    for name, row in rows:
        kinds = (row.get(k) or "runs" for k in ("eager", "plait", "dynamo", "aot"))
        cells = (row["count"], row.get("what", ""), *kinds, row.get("says", ""))
        text += f"| {name} | " + " | ".join(c.replace("|", "\\|") for c in cells) + " |\n"
    text += (
        "\n## By op\n\n| op | asked | another class | not refused | another result |\n"
        "|---|---|---|---|---|\n"
    )
    for name, result in sorted(found.items()):
        if result["asked"]:
            counts = (result["asked"], *_counts(result["rows"]))
            text += f"| {name} | {' | '.join(map(str, counts))} |\n"
    return text


def _counts(rows: Iterable[Row]) -> list[int]:
    known = [(row["verdict"], int(row["count"])) for row in rows]
    return [sum(n for v, n in known if v == verdict) for verdict in (OTHER, TAKEN, RESULT)]
