"""The garbage collector is held while compiling, and only then."""

from __future__ import annotations

import gc

import pytest
import torch

import plait
from plait.capture.program import collector_paused
from plait.errors import UserError


def test_the_collector_is_off_inside_and_on_after() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_after_an_error() -> None:
    with pytest.raises(UserError), collector_paused():
        raise UserError("no")
    assert gc.isenabled()


def test_whoever_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_compiling_leaves_it_on() -> None:
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x * 2, backend="plait")(x).sum().backward()
    plait.compile(lambda x: x * 2, (torch.ones(3),))
    assert gc.isenabled()
