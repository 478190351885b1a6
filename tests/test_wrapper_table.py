"""docs/instructions.md is what the code says."""

from __future__ import annotations

from plait.wrapper import table
from plait.wrapper.instructions import INSTRUCTIONS
from plait.wrapper.text import text


def test_the_file_is_up_to_date() -> None:
    assert table.path().read_text() == table.markdown(), "run python -m plait.wrapper.table"


def test_the_example_has_every_instruction_and_reads_back() -> None:
    assert {type(i) for i in table.example().body} == set(INSTRUCTIONS)
    assert text(table.example()) == table.EXAMPLE
