"""Recurrent layers and packed sequences while a program is traced.

How many steps a packed sequence has, and how many rows each of them, is known when the program
runs; torch's decompositions take a layer apart into its steps. Where that number is not known, and
no gradient is taken, a layer stays whole (`runtime/layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.modules.rnn as layers
import torch.nn.utils.rnn as sequences
from torch._decomp.decompositions import select_one_layer_lstm_function
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from plait.compat.shared import Shared
from plait.runtime.layers import LAYERS, WHOLE, is_packed

Kernels = Mapping[Any, Callable[..., Any]]  # by dispatch key
_aten = torch.ops.aten


def kernels_of(op: OpOverload, kernels: Kernels, by_rows: bool = False) -> Kernels:
    """The Python kernels that an operator shall have while it is traced, of those that it has.
    by_rows: a row of a layer's results does not depend on how many there are."""
    if op not in LAYERS:
        return kernels
    return {key: partial(_layer, op, by_steps, by_rows) for key, by_steps in kernels.items()}


def _layer(
    op: OpOverload, by_steps: Callable[..., Any], by_rows: bool, *args: Any, **kwargs: Any
) -> Any:
    """A layer whole where its steps are not known, else by torch's decomposition by_steps."""
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    # oneDNN's LSTM saves nothing for a gradient here, which torch asks of the input alone, and
    # divides by how many rows there are.
    empty = not is_packed(op) and 0 in _known(named["input"].shape)
    apart = empty or _trains(named)
    with _without_onednn() if apart or by_rows else nullcontext():
        drops = named["train"] and named["dropout"] > 0
        whole = not apart and not drops and _stays_whole(op, named)
        return (WHOLE[op] if whole else by_steps)(*args, **kwargs)


@contextmanager
def _without_onednn() -> Iterator[None]:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _stays_whole(op: OpOverload, named: Mapping[str, Any]) -> bool:
    """Whether a layer's steps are not known, or it is an LSTM of oneDNN that may have none, or no
    rows: eager looks before it calls that."""
    if is_packed(op):
        return True
    x = named["input"]
    if len(_known(x.shape)) == len(x.shape):
        return False
    if isinstance(x.shape[1 if named["batch_first"] else 0], torch.SymInt):
        return True
    if op is not _aten.lstm.input:
        return False
    choose: Any = select_one_layer_lstm_function
    chosen = choose(x, named["hx"], [named["params"]])
    return bool(chosen.__name__ == "mkldnn_one_layer_lstm")


def _known(shape: Sequence[Any]) -> list[int]:
    return [n for n in shape if not isinstance(n, torch.SymInt)]


def _trains(named: Mapping[str, Any]) -> bool:
    """Whether a gradient is wanted."""
    given = [x for v in named.values() for x in (v if isinstance(v, (list, tuple)) else [v])]
    wants = any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
    return wants and torch.is_grad_enabled()


# ----------------------------------------------------------------- torch's Python around the layers
def _padded(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """_pad_packed_sequence: row b of step t is row b behind the first one of that step, if the step
    has so many."""
    steps, most = batch_sizes.shape[0], batch_sizes[0].item()
    counts = batch_sizes
    if total_length is not steps:
        counts = torch.nn.functional.pad(batch_sizes, (0, total_length - steps))
    first = (counts.cumsum(0) - counts).unsqueeze(1)
    row = torch.arange(most, device=counts.device).unsqueeze(0)
    there = row < counts.unsqueeze(1)
    index = torch.where(there, first + row, 0).to(data.device)
    kept = there.to(data.device).reshape(*there.shape, *[1] * (data.dim() - 1))
    padded = torch.where(kept, data[index], padding_value)
    return padded.transpose(0, 1) if batch_first else padded, there.sum(0)


def _pad(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """pad_packed_sequence, whose code this one's takes the place of: of the number of steps the
    program asks when it runs. Of globals only `torch` is known there."""
    steps = sequence.batch_sizes.size(0)
    if total_length is not None:
        if isinstance(steps, int) and total_length < steps:
            raise ValueError(
                f"Expected total_length to be at least the length of the longest sequence in "
                f"input, but got {total_length=} and max sequence length being {steps}"
            )
        enough: Any = total_length >= steps
        torch._check(enough, lambda: "total_length is less than the longest length")  # type: ignore[no-untyped-call]
        steps = total_length
    padded, lengths = torch.nn.utils.rnn._VF._pad_packed_sequence(  # type: ignore[attr-defined]
        sequence.data, sequence.batch_sizes, batch_first, padding_value, steps
    )
    order = sequence.unsorted_indices
    if order is None:
        return padded, lengths
    return padded.index_select(0 if batch_first else 1, order), lengths[order.cpu()]


def _check_hidden_size(
    layer: Any, hx: torch.Tensor, expected: tuple[Any, ...], msg: str = "Expected {}, got {}"
) -> None:
    """Of sizes that are not known yet the program asks when it runs."""
    sizes, wanted = list(hx.size()), list(expected)
    for k in reversed(range(min(len(sizes), len(wanted)))):
        if free_unbacked_symbols((sizes[k], wanted[k])):
            same: Any = sizes.pop(k) == wanted.pop(k)
            torch._check(same, lambda: f"{layer}: a hidden state is for another batch")  # type: ignore[no-untyped-call]
    if sizes != wanted:
        raise RuntimeError(msg.format(expected, list(hx.size())))


def _int(x: Any) -> Any:
    return x.item() if isinstance(x, torch.Tensor) else int(x)


def _keep_apart(layer: Any) -> None:
    """Weights that are traced have no memory that could be joined for cuDNN."""


_CHANGED = (
    (layers, "int", _int),
    (layers.RNNBase, "flatten_parameters", _keep_apart),
    (layers.RNNBase, "check_hidden_size", _check_hidden_size),
    (sequences, "_VF", SimpleNamespace(
        _pad_packed_sequence=_padded, _pack_padded_sequence=torch._VF._pack_padded_sequence,
    )),
)  # fmt: skip
_own_code = sequences.pad_packed_sequence.__code__
_own = [(place, name, vars(place)[name]) for place, name, _ in _CHANGED if name in vars(place)]


def _change() -> None:
    sequences.pad_packed_sequence.__code__ = _pad.__code__  # under whatever name it was imported
    for place, name, changed in _CHANGED:
        setattr(place, name, changed)


def _undo() -> None:
    sequences.pad_packed_sequence.__code__ = _own_code
    del layers.int  # type: ignore[attr-defined]
    for place, name, own in _own:
        setattr(place, name, own)


packed_sequences = Shared(_change, _undo)
"""Inside, torch's Python around recurrent layers asks for no number of rows or steps."""
