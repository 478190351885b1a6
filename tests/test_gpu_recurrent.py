"""Recurrent layers on a GPU that are called whole, without Dynamo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from tests.test_recurrent import LAYERS, LENGTHS, Packs, X, check


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    module = Packs(kind, num_layers=2, bidirectional=True, batch_first=True).cuda()
    x = X.cuda()
    call = plait.compile(module, (x, LENGTHS[0]))
    for lengths in LENGTHS:
        check(call, module, x, lengths)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_as_many_steps_as_a_call_has(kind: type[nn.RNNBase], mode: Any) -> None:
    module = kind(4, 5, 2, batch_first=True).eval().cuda()
    steps = torch.export.Dim("steps", max=64)
    call = plait.compile(module, (X.cuda(),), ({1: steps},), mode=mode)
    for n in (6, 6, 17, 1, 6, 17):
        check(call, module, torch.randn(3, n, 4, device="cuda"))
