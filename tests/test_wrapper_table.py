"""docs/instructions.md and native/core/instructions.h are what the code says."""

from __future__ import annotations

from plait.tools import table
from plait.wrapper.instructions import INSTRUCTIONS
from plait.wrapper.text import text as text_of


def test_the_files_are_up_to_date() -> None:
    for path, text in table.files().items():
        assert path.read_text() == text, "run python -m plait.tools.table"


def test_the_example_has_every_instruction_and_reads_back() -> None:
    assert {type(i) for i in table.example().body} == set(INSTRUCTIONS)
    assert text_of(table.example()) == table.EXAMPLE
