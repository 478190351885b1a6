"""Nodes that a test file makes when it is loaded. Equal nodes are one object; other tests, and
compilers that have made many, empty the table of those that there are."""

from __future__ import annotations

from typing import Any

import pytest

from plait.ir import loops


def stay() -> Any:
    """A fixture for the end of a file: what was made up to here is what is found again."""
    made = dict(loops._nodes)

    @pytest.fixture(autouse=True)
    def nodes_stay() -> None:
        loops._nodes.update(made)

    return nodes_stay
