"""The sweep's committed table is its state: it reads back what passed."""

from __future__ import annotations

from typing import Any

from tests.sweep import read_table, sweep_table


def _row(
    samples: int, fallbacks: tuple[str, ...] = (), failures: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {"samples": samples, "fallbacks": list(fallbacks), "failures": list(failures)}


def test_the_table_reads_back() -> None:
    passed = {
        "forward/abs/bool": _row(2),
        "forward/abs/float32": _row(12, ("e",)),
        "dynamic/linalg.tensorsolve/float32": _row(0),
        "zoo/inference/gpt2": _row(1),
    }
    failed = {
        "gradient/nn.functional.max_pool2d/float32": _row(3, failures=("took more than 900 s",))
    }
    text = sweep_table(passed | failed)
    assert read_table(text) == passed and "took more than 900 s" in text
    assert sweep_table(read_table(text) | failed) == text
