"""Recurrent layers: in a tagger and over packed sequences, inference and training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from programs import Program


class Tagger(nn.Module):
    """Embeddings, two recurrent layers in both directions, a label a token; 64 wide."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.layers = kind(64, 64, 2, batch_first=True, bidirectional=True)
        self.labels = nn.Linear(128, 16)

    def forward(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = self.words(words)
        if lengths is None:
            out = self.layers(x)[0]
        else:
            packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            out = pad_packed_sequence(self.layers(packed)[0], True)[0]
        labels: Tensor = self.labels(out)
        return labels


def _words(device: str) -> Tensor:
    return torch.randint(1000, (8, 24), device=device)


def _tagger(kind: Any, device: str) -> Program:
    return Program(Tagger(kind).to(device).eval(), (_words(device),))


def lstm(device: str) -> Program:
    return _tagger(nn.LSTM, device)


def gru(device: str) -> Program:
    return _tagger(nn.GRU, device)


def _packed(kind: Any, device: str) -> Program:
    lengths = torch.tensor([24, 3, 17, 9, 21, 5, 12, 14])  # on the CPU, as packing wants them
    return Program(Tagger(kind).to(device).eval(), (_words(device), lengths))


def lstm_packed(device: str) -> Program:
    return _packed(nn.LSTM, device)


def gru_packed(device: str) -> Program:
    return _packed(nn.GRU, device)


def _training(kind: Any, device: str) -> Program:
    model = Tagger(kind).to(device)

    def step(words: Tensor) -> Any:
        return torch.autograd.grad(model(words).square().mean(), list(model.parameters()))

    return Program(step, (_words(device),), grad=True)


def lstm_training(device: str) -> Program:
    return _training(nn.LSTM, device)


def gru_training(device: str) -> Program:
    return _training(nn.GRU, device)


PROGRAMS = {
    f.__name__: f for f in (lstm, gru, lstm_packed, gru_packed, lstm_training, gru_training)
}
