"""Recurrent layers: over packed sequences and over as many steps as a call has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import plait

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
WRAPPERS = ("native", "python", "cpp", "fx")
X = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
LENGTHS = [torch.tensor(n) for n in ([6, 4, 2], [2, 5, 5], [1, 1, 1])]


class Packs(nn.Module):
    """A layer over padded sequences of any order."""

    def __init__(self, kind: Any, total: int | None = None, **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 5, **options).eval()
        self.first, self.total = options.get("batch_first", False), total

    def forward(self, x: Tensor, lengths: Tensor, hx: Any = None) -> Any:
        packed = pack_padded_sequence(x, lengths, self.first, enforce_sorted=False)
        out, state = self.layer(packed, hx)
        given = {"batch_first": self.first, "padding_value": -1.5, "total_length": self.total}
        return (*pad_packed_sequence(out, **given), state)


@torch.no_grad()
def check(call: Any, module: nn.Module, *args: Any) -> None:
    got, want = call(*args), module(*args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, check_stride=True)


@pytest.mark.parametrize(
    ("kind", "wrapper"), [(nn.LSTM, "native"), (nn.RNN, "native"), *((nn.GRU, w) for w in WRAPPERS)]
)
def test_packed_sequences(kind: type[nn.RNNBase], wrapper: str) -> None:
    module = Packs(kind, num_layers=2, bidirectional=True, batch_first=True)
    call = plait.compile(module, (X, LENGTHS[0]), options={"wrapper": wrapper})
    for lengths in LENGTHS:
        check(call, module, X, lengths)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_sequences_with_states(kind: type[nn.RNNBase], bias: bool) -> None:
    module, x = Packs(kind, bias=bias).double(), X.double().transpose(0, 1)
    h = torch.randn(1, 3, 5, dtype=torch.float64)
    hx = (h, h + 1) if kind is nn.LSTM else h
    call = plait.compile(module, (x, LENGTHS[0], hx))
    for lengths in LENGTHS:
        check(call, module, x, lengths, hx)


def test_a_state_for_another_batch() -> None:
    module = nn.GRU(4, 5)
    data, sizes = torch.randn(7, 4), torch.tensor([3, 2, 2])
    h = torch.randn(1, 3, 5)

    def run(data: Tensor, sizes: Tensor, h: Tensor) -> Tensor:
        out: Tensor = module(PackedSequence(data, sizes), h)[0].data
        return out

    call = plait.compile(run, (data, sizes, h))
    with torch.no_grad():
        torch.testing.assert_close(call(data, sizes, h), run(data, sizes, h))
    for call_it in (call, run):
        with pytest.raises(RuntimeError):
            call_it(data, torch.tensor([4, 2, 1]), h)


def test_a_projection() -> None:
    module, x = Packs(nn.LSTM, proj_size=3, bidirectional=True), X.transpose(0, 1)
    check(plait.compile(module, (x, LENGTHS[0])), module, x, LENGTHS[1])


def test_a_packed_sequence_is_an_argument_and_a_result() -> None:
    module = nn.LSTM(4, 5).eval()
    packed = pack_padded_sequence(X.transpose(0, 1), LENGTHS[0])
    call = plait.compile(module, (packed,))
    with torch.no_grad():
        got, want = call(packed)[0], module(packed)[0]
    assert isinstance(got, PackedSequence)
    torch.testing.assert_close(got.data, want.data)


def test_packed_sequences_of_a_package(tmp_path: Path) -> None:
    module = Packs(nn.GRU, batch_first=True)
    plait.package(module, tmp_path / "p.plait", (X, LENGTHS[0]), machines=["portable"])
    loaded = plait.load(tmp_path / "p.plait")
    for lengths in LENGTHS:
        check(loaded, module, X, lengths)


def test_explain_says_how_dynamo_takes_a_layer() -> None:
    report = plait.explain(Packs(nn.LSTM, batch_first=True).layer, X, quiet=True)
    assert "allow_rnn = True" in str(report), report


def test_dynamo_leaves_packed_sequences_to_eager() -> None:
    module = Packs(nn.LSTM, batch_first=True)
    torch._dynamo.reset()
    check(torch.compile(module, backend="plait"), module, X, LENGTHS[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_total_length(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    """Steps beyond the longest sequence are padding; too few are refused at the call."""
    module = Packs(kind, total=5, batch_first=True)
    plait.package(module, tmp_path / "p.plait", (X, LENGTHS[1]), machines=["portable"])
    for call in (plait.compile(module, (X, LENGTHS[1])), plait.load(tmp_path / "p.plait")):
        for lengths in LENGTHS[1:]:
            check(call, module, X, lengths)
        with pytest.raises(ValueError, match="total_length"):
            module(X, LENGTHS[0])
        with pytest.raises((RuntimeError, plait.PlaitError)):
            call(X, LENGTHS[0])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_many_steps_as_a_call_has(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    module = kind(4, 5, 2, bidirectional=True, batch_first=True, dtype=dtype).eval()
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("steps", max=64)}
    call = plait.compile(module, (X.to(dtype),), (sizes,))
    for shape in ((3, 6, 4), (5, 17, 4), (2, 1, 4)):
        check(call, module, torch.randn(shape, dtype=dtype))


@pytest.mark.parametrize("kind", LAYERS)
def test_no_rows_and_no_steps(kind: type[nn.RNNBase]) -> None:
    """oneDNN's LSTM divides by how many rows there are."""
    module, nothing = kind(4, 5).eval(), torch.zeros(6, 0, 4)
    check(plait.compile(module, (nothing,)), module, nothing)
    for vary in ({1: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}):
        call = plait.compile(module, (X.mT.contiguous().view(6, 3, 4),), (vary,))
        with torch.no_grad():
            torch.testing.assert_close(call(nothing), module(nothing))
        check(call, module, torch.randn(6, 5, 4))
    with pytest.raises(RuntimeError, match="sequence length"):
        call(torch.zeros(0, 3, 4))
    with pytest.raises(RuntimeError, match="sequence length"):
        plait.compile(module, (torch.zeros(0, 3, 4),))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_few_steps_are_kernels(kind: type[nn.RNNBase]) -> None:
    """A number of steps that is known is taken apart, but by oneDNN's LSTM."""
    module = kind(4, 5).eval()
    check(call := plait.compile(module, (X,)), module, X)
    called = {i.op for i in call.record.plan.steps if hasattr(i, "op")}
    assert not {op for op in called if op.startswith(("aten::gru", "aten::rnn", "aten::lstm"))}


@pytest.mark.parametrize("kind", LAYERS)
def test_dynamo_lets_layers_in(kind: type[nn.RNNBase]) -> None:
    """With torch's own switch, gradients too."""
    module = kind(4, 5, batch_first=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        call = torch.compile(module, backend="plait", fullgraph=True)
        got, want = call(X[:, :3])[0], module(X[:, :3])[0]
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.sin().sum(), list(module.parameters())) for y in (got, want)]
    torch.testing.assert_close(*grads)
