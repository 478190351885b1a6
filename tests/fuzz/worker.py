"""One process of a fuzz run: reads a line of JSON a program, writes a line with what became of it.

It says when it starts to run, so that a crash or hang belongs to a program. Run by pool.py as
`python -m tests.fuzz.worker`; plait is the one on the path (a mutant's copy, say).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
import warnings
from typing import Any

# The plait on the path comes first: where plait is installed as editable, a finder would take the
# installed one.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]

import torch  # noqa: E402


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"seed": n, "device": d, "subject": s} or {"program": text} -> kind, what, classes, program,
    graphs."""
    from tests.fuzz.check import check
    from tests.fuzz.make import generate
    from tests.fuzz.program import Program
    from tests.interpreted import SkippedHere

    try:
        if "program" in request:
            p = Program.loads(request["program"])
        else:
            p = generate(request["seed"], request.get("device", "cpu"), request.get("subject", ""))
    except Exception:  # noqa: BLE001 - a fault of the fuzzer itself
        return {
            "kind": "generator",
            "what": traceback.format_exc()[-1500:],
            "classes": [],
            "program": "",
        }
    try:
        found = check(p)
    except SkippedHere as skipped:
        return {"kind": "skipped", "what": str(skipped), "classes": [], "program": p.dumps()}
    except Exception:  # noqa: BLE001
        return {
            "kind": "checker",
            "what": traceback.format_exc()[-1500:],
            "classes": [],
            "program": p.dumps(),
        }
    program = p.dumps() if found.kind in ("fault", "torch") else ""
    classes = sorted(p.classes())
    return {
        "kind": found.kind,
        "what": found.what,
        "classes": classes,
        "program": program,
        "graphs": found.graphs,
    }


def _excluded() -> str:
    """The dispatch keys that this thread excludes."""
    return str(torch._C._dispatch_tls_local_exclude_set())


def _device_is_lost() -> bool:
    """A failed check in a kernel takes the device from the process: every later call raises."""
    try:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    except torch.AcceleratorError:
        return True
    return False


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a program prints does not disturb the answers
    torch.set_num_threads(int(os.environ.get("FUZZ_THREADS", "1")))
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import interpreted

        interpreted.pytest_configure()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    excluded = _excluded()
    for k, line in enumerate(sys.stdin):
        found = answer(json.loads(line))
        if found["kind"] not in ("ok", "declined") or k % 20 == 19:
            gc.collect()
        # Where PyTorch's printing of a tensor raises, the traceback keeps its guard alive, and the
        # collector destroys it: it sets the keys that were excluded then, for good.
        last = _device_is_lost() or _excluded() != excluded
        out.write(json.dumps({**found, "last": last}) + "\n")
        out.flush()
        if last:
            break


if __name__ == "__main__":
    main()
