"""One model in one process: makes the variants that it is asked for and compares what they compute.

Says events, one JSON object a line: what it begins, then what it found or why it failed.
Usage: python -m benchmarks.numerics.worker SUBJECT DEVICE SMALL LOCK PARTS, with PARTS a JSON list
of [part, variants] and LOCK a file that is locked while the clock runs.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.numerics.programs import (
    GRAPHED,
    GRAPHS,
    JOBS,
    VARIANTS,
    Subject,
    batches,
    differing,
    how,
    padded,
    prefixes,
    same_row,
    subjects,
)
from benchmarks.peers import renamed
from benchmarks.suite.models import Case
from benchmarks.suite.worker import WARM_CALLS, Figures, Held, Replies, Warnings, reason

MAKES_ROWS = {"batch": batches, "padded": padded, "prefix": prefixes}


class Compared(Held):
    """A program with eager's results and errors. Variants are made one after the other; each is
    dropped before the next."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        call = self._bind(self.program)
        self.wants = self._outcome(call, self.program)
        self.truth, self.exact = self._truth()
        self.own, self.own_typical = self._eager_error(call), self._typical(self.wants)

    def variant(self, name: str) -> Figures:
        """How far the results are from eager's and from the truth, whether a second call gives
        the same bits, and a digest of them for other processes."""
        torch.use_deterministic_algorithms(name.endswith("-deterministic"))
        try:
            call = self._bind(compiled(self.program, name))
            found = self._outcome(call, self.program)
            self._outcome(call, self.program)  # a second call may set things up
            again = self._outcome(call, self.program)
        finally:
            torch.use_deterministic_algorithms(False)
        return {
            "differ": total(self.wants, found),
            "of": sum(x.numel() for x in found),
            "error": self._distance(found),
            "own": self.own,
            "typical": self._typical(found),
            "own_typical": self.own_typical,
            "truth": self.exact,
            "again": total(found, again) == 0,
            "digest": digest(found),
        }

    def _typical(self, found: Sequence[Tensor]) -> float | None:
        """The median distance from the truth of a vector, such as the logits of a token: where
        experts are chosen by a narrow margin, a few tokens are far off, by luck."""
        each = []
        for a, b in zip(found, self.truth, strict=False):
            exact = b.to(a.device)
            a, exact = (
                x.reshape(-1, x.shape[-1] if x.dim() > 1 else x.numel()) for x in (a, exact)
            )
            size = exact.norm(dim=-1).clamp(min=1e-30)
            each.append((a.to(exact.dtype) - exact).norm(dim=-1) / size)
        return torch.cat(each).median().item() if each else None


class Rows:
    """A model with inputs that hold one row alone and among others."""

    def __init__(self, subject: Subject, part: str) -> None:
        torch.set_grad_enabled(False)
        self.part = part
        self.model, self.inputs = MAKES_ROWS[part](subject)

    def variant(self, name: str) -> Figures:
        """How many elements of the row's results have other bits among others, by batch or
        length."""
        call = compiled(self.model, name)
        (first, inputs), *others = self.inputs.items()
        alone = [x.clone() for x in call(*inputs)]
        differ, of = {}, 0
        for size, xs in others:
            pairs = [
                pair
                for a, b in zip(alone, call(*xs), strict=True)
                for pair in same_row(self.part, a, b)
            ]
            differ[size] = sum(differing(a, b) for a, b in pairs)
            of = sum(a.numel() for a, _ in pairs)
        if not of:
            raise RuntimeError("no result has rows")
        return {"alone": first, "differ": differ, "of": of}


class Timed(Held):
    """A program with all its variants, timed in turn; of GRAPHED parts as CUDA graphs on a GPU."""

    def times(self, part: str, variants: Sequence[str], lock: Path, say: Replies) -> None:
        torch._dynamo.reset()  # of the part before
        for name in variants:
            say("begin", part=part, variant=name)
            said = Warnings()
            try:
                call = self._bind(compiled(self.program, name, keep=True, graphs=part in GRAPHED))
                for _ in range(WARM_CALLS):
                    call()
                if skipped := [line for line in said.lines() if "without a CUDA graph" in line]:
                    raise RuntimeError(skipped[0])
                self.calls[name] = call
            except Exception as error:  # noqa: BLE001  (it is the variant's cell)
                say("failed", part=part, variant=name, why=reason(error))
        self._wait()
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = self.time(0.1, 7)
        for name, figures in found.items():
            say("found", part=part, variant=name, figures={"ms": figures.get("ms")})


def compiled(module: nn.Module, name: str, keep: bool = False, graphs: bool = False) -> Any:
    """A variant of a module, for each size of its inputs a program. keep: others of the process
    are kept. graphs: what a GPU is told is replayed as a CUDA graph, of compiled variants."""
    options = how(name)
    if options and graphs:
        more = {**options.get("options", {}), GRAPHS[options["backend"]]: True}
        options = {**options, "options": more}
    if not keep:
        torch._dynamo.reset()
        gc.collect()
    return torch.compile(renamed(module, name), dynamic=False, **options) if options else module


def total(wants: Sequence[Tensor], found: Sequence[Tensor]) -> int:
    """How many elements have other bits."""
    return sum(differing(a, b) for a, b in zip(wants, found, strict=True))


def digest(tensors: Sequence[Tensor]) -> str:
    """Of their bits."""
    found = hashlib.blake2b(digest_size=12)
    for x in tensors:
        found.update(x.resolve_conj().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def made(subject: Subject, part: str) -> Compared | Rows:
    """What measures the variants of a part."""
    if part in MAKES_ROWS:
        return Rows(subject, part)
    return Compared(subject.case(part.endswith("train")))


def measure(subject: Subject, part: str, variants: Sequence[str], say: Replies) -> None:
    """Says what is found of each variant; one that fails is said to have failed."""
    say("begin", part=part, variant="eager")
    try:
        measured = made(subject, part)
    except Exception as error:  # noqa: BLE001  (it is the part's row)
        say("failed", part=part, variant="eager", why=reason(error))
        return
    for name in variants:
        say("begin", part=part, variant=name)
        try:
            say("found", part=part, variant=name, figures=measured.variant(name))
        except Exception as error:  # noqa: BLE001  (it is the variant's cell)
            say("failed", part=part, variant=name, why=reason(error))
            error.__traceback__ = None


def main() -> None:
    name, device, small, lock, parts = sys.argv[1:]
    subject = subjects(device, small == "small")[name]
    say = Replies()
    config: Any = torch._dynamo.config
    config.recompile_limit *= len(VARIANTS)  # functions below a graph break are shared
    config.fail_on_recompile_limit_hit = True
    config.allow_rnn = True  # else Dynamo leaves recurrent modules to eager
    for part, variants in json.loads(parts):
        if part in JOBS[-1]:
            Timed(subject.timed(part)).times(part, variants, Path(lock), say)
        else:
            measure(subject, part, variants, say)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    say("done")
    os._exit(0)  # nothing to tidy that is worth the time


if __name__ == "__main__":
    main()
