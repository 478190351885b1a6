"""What `python -m benchmarks.cost_of_tools` says; its figures here are made up."""

from __future__ import annotations

from benchmarks.cost_of_tools import BEFORE, ROWS, least, page


def test_the_least_of_all_rounds_counts() -> None:
    runs = [{key: float(n + k) for n, (key, _, _) in enumerate(ROWS)} for k in (3, 1, 2)]
    assert least(runs) == {key: n + 1.0 for n, (key, _, _) in enumerate(ROWS)}


def test_the_page_has_a_row_for_each_figure() -> None:
    before = {key: 100.0 for key, _, _ in ROWS}
    text = page({"commit": "c"}, before, before | {"call_ns": 104.0}, 5)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["a call of torch.compile's, ns", "100", "104", "+4", "1.040"] in rows
    assert {words for _, words, _ in ROWS} <= {row[0] for row in rows if row}
    assert "least of 5 processes" in text and BEFORE in text and "- commit: c" in text
