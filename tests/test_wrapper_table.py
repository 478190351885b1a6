"""docs/instructions.md and native/core/instructions.h are what the code says; an instruction is
described once, by its class."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import InternalError
from plait.wrapper import native, walk
from plait.wrapper import text as texts
from plait.wrapper.instructions import INSTRUCTIONS, ASize, Uses
from plait.wrapper.verify import verify
from tests import instruction_table as table
from tests.plan_header import header

ROOT = Path(__file__).parent.parent


def test_the_files_are_up_to_date() -> None:
    for path, text in table.files().items():
        assert path.read_text() == text, "run python -m tests.instruction_table"


def test_plans_of_other_words_have_another_version() -> None:
    """A library that reads others says so, and not that a plan is damaged. Who changes what is
    written raises PLAN_VERSION, and puts the new digest here."""
    words = "".join(re.findall(r"(?s)case \d+: return .*?;", header()))
    digest = hashlib.sha256(re.sub(r"\s", "", words).encode()).hexdigest()[:12]
    assert (native.PLAN_VERSION, digest) == (10, "71595fc4378c")


def test_the_example_has_every_instruction_and_reads_back() -> None:
    assert {type(i) for i in table.example().body} == set(INSTRUCTIONS)
    assert texts.text(table.example()) == table.EXAMPLE


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchanges the first n elements of two tensors."""

    left: Uses
    right: Uses
    n: ASize = 1


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers the new instruction and gives it a word, as a row of INSTRUCTIONS does."""
    monkeypatch.setitem(texts._WORDS, Swap, "swap")
    monkeypatch.setitem(texts._CLASSES, "swap", Swap)
    monkeypatch.setitem(native.OPCODES, Swap, len(native.OPCODES))


def with_step(step: Any) -> Any:
    """The example with a step before its last."""
    p = table.example()
    return replace(p, body=(*p.body[:-1], step, p.body[-1]))


def test_a_new_instruction_needs_its_class_alone(swap: None) -> None:
    """To be walked, printed, read, verified, encoded and decoded; targets say what it does."""
    size = next(e for i in table.example().inputs for e in walk.sizes(i) if not isinstance(e, int))
    step: Any = Swap("x", "state", size)
    assert walk.used(step) == ("x", "state") and walk.sizes(step) == (size,)
    renamed: Any = walk.rewrite(step, str.upper, lambda e: e + 1)
    assert renamed == Swap("X", "STATE", size + 1)
    p = with_step(step)
    assert "\nswap(x, state, n=s0)\n" in texts.text(p) and texts.read(texts.text(p)) == p
    verify(p)
    with pytest.raises(InternalError, match="nobody is used before it is defined"):
        verify(with_step(Swap("x", "nobody")))
    made = native.encode_numbered(p)
    words = native.OPCODES[Swap], 3, made.slots["x"], made.slots["state"]
    assert native._pack([*words]) in made.plan
    assert "struct Swap {\n  SlotId left;\n  SlotId right;\n  ExprId n;\n};" in header()
    assert "Swap{in.slot(), in.slot(), in.expr()}" in header()


def test_an_instruction_stands_where_it_is_made_and_where_it_acts() -> None:
    sources = [*ROOT.glob("plait/**/*.py"), *ROOT.glob("native/**/*.cpp")]
    naming = {str(p.relative_to(ROOT)) for p in sources if "BumpVersion" in p.read_text()}
    wrapper = {n for n in naming if not n.startswith("native/torch/")}
    makers = "instructions", "build", "pysteps", "cppsteps", "fxnodes"
    assert wrapper == {f"plait/wrapper/{name}.py" for name in makers}
    assert len(naming - wrapper) in (1, 2)  # the executor
