"""The models of benchmarks/suite as what is compared here: how each is run, and of which inputs one
row is taken."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite.models import MODELS, Case, Input, Model, Named
from plait.config import flags

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "traced": {"backend": "eager"},
    "autograd": {"backend": "aot_eager"},
    "plait": {"backend": "plait"},
    "plait-eager": {"backend": "plait", "options": {"numerics": "eager"}},
    "plait-precise": {"backend": "plait", "options": {"numerics": "precise"}},
    "plait-invariant": {"backend": "plait", "options": {"batch_invariant": True}},
    "inductor": {"backend": "inductor"},
    "inductor-casts": {"backend": "inductor", "options": {"emulate_precision_casts": True}},
}
"""What is said to torch.compile, by name; "traced" is what Dynamo makes of a model, "autograd"
what AOTAutograd does, both run as eager runs operators."""


def accepted(variant: str) -> bool:
    """Whether plait has the options of a variant; a column that it has not is left out."""
    options = how(variant).get("options", {}) if variant.startswith("plait") else {}
    return {row.name for row in flags()} >= set(options)


def how(variant: str) -> dict[str, Any]:
    """What is said to torch.compile."""
    return VARIANTS[variant.removesuffix("-deterministic")]


GRAPHS = {"plait": "cuda_graphs", "inductor": "triton.cudagraphs"}
"""The option of each compiler that replays what a GPU is told as a CUDA graph."""
BITS = ("eager", "traced", "autograd", "plait", "plait-eager", "plait-precise")
ROWS = ("eager", "plait", "plait-invariant", "inductor")
SORTED = ("eager-deterministic", "plait-deterministic")
"""Under torch.use_deterministic_algorithms(True)."""
PARTS: dict[str, tuple[str, ...]] = {
    "infer": (*BITS, "plait-invariant", "inductor", "inductor-casts"),
    "batch": ROWS,
    "padded": ROWS,
    "prefix": ROWS,
    "train": (*BITS, *SORTED, "inductor", "inductor-casts"),
    "other": ("eager", "plait", "inductor"),
    "other-train": ("eager", "plait", *SORTED, "inductor"),
    "cost": ("eager", "plait", "plait-eager", "plait-precise", "plait-invariant", "inductor"),
    "graphs": ("plait", "plait-eager", "plait-precise", "plait-invariant", "inductor"),
    "train-cost": ("eager", "plait", "plait-eager", "plait-invariant", "inductor"),
    "token": ROWS,
    "token-32": ROWS,
}
"""What is measured of a model: the variants of each part. "other" and "other-train" are another
process, whose results are to have the bits of "infer" and "train"."""

JOBS: tuple[tuple[str, ...], ...] = (
    ("infer", "batch", "padded", "prefix"),
    ("train",),
    ("other", "other-train"),
    ("cost", "graphs", "train-cost", "token", "token-32"),
)
"""Parts that one process does. The times come last, when nothing else runs."""

BATCHES = (1, 2, 7, 32)
TOKENS = {"token": 1, "token-32": 32}
"""How many rows have one token each."""
GRAPHED = ("graphs", *TOKENS)
"""Parts of which what is compiled is replayed as a CUDA graph."""
SHORT = 48  # tokens, of small models
SECONDS = 4000  # samples of a wave, of small models


def shortened(x: Input) -> Input:
    """An input of a small model: fewer tokens, samples or nodes."""
    if x.kind in ("ids", "mask"):
        return dataclasses.replace(x, shape=(min(SHORT, x.shape[0]),))
    if x.kind in ("nodes", "edges"):
        most = 256 if x.kind == "nodes" else 1024
        shape = x.shape if x.kind == "nodes" else (most,)
        return dataclasses.replace(x, shape=shape, rows=256)
    if x.kind == "normal" and len(x.shape) == 1 and x.shape[0] > SECONDS:
        return dataclasses.replace(x, shape=(SECONDS,))
    return x


def sides(model: Model, x: Input) -> Input:
    """An image of a small model: of 64 pixels where its size is no part of the model."""
    free = model.library == "torchvision" and model.name not in ("maxvit_t", "r3d_18")
    if free or model.name in ("segmentation_unet", "segformer", "detr"):
        return dataclasses.replace(x, shape=(*x.shape[:-2], 64, 64)) if len(x.shape) == 3 else x
    return x


def cut(model: Model) -> Model:
    """The same model with smaller inputs; its widths stay."""
    inputs = {name: sides(model, shortened(x)) for name, x in model.inputs.items()}
    return dataclasses.replace(model, inputs=inputs)


@dataclass(frozen=True)
class Drawn(Case):
    """A case whose norms and biases are drawn too, as training would have changed them. Where all
    are ones and zeros, a batch norm in inference multiplies by 0.999995: what lay between two
    numbers of 16 bits comes to lie just below, and all sums round down."""

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, inputs = super().build()
        numbers = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                if x.dim() != 1 or not x.is_floating_point():
                    continue
                noise = 0.5 * torch.rand(x.shape, generator=numbers) - 0.25
                if bool((x == 1).all() | (x == 0).all()):
                    x += noise.to(x.device, x.dtype)
        return model, inputs


@dataclass(frozen=True)
class Subject:
    """A model in one type on one device. small: two layers, a batch of two and short inputs, but
    real widths."""

    model: Model
    dtype: str
    device: str
    small: bool

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.dtype}"

    def case(self, train: bool) -> Case:
        model = cut(self.model) if self.small else self.model
        cpu = max(1, model.cpu)
        return Drawn(
            dataclasses.replace(model, cpu=cpu), train, self.dtype, self.device, self.small
        )

    def shallow(self) -> Case:
        """Of two layers, which hold every kernel that more would: rows are compared for many sizes,
        each with a program of its own."""
        return dataclasses.replace(self.case(False), small=True)

    def timed(self, part: str) -> Case:
        """What is timed: the model as the suite has it, or one token a row, without a cache."""
        if part not in TOKENS:
            return self.case(part == "train-cost")
        model, rows = self.model, TOKENS[part]
        inputs = {name: dataclasses.replace(x, shape=(1,)) for name, x in model.inputs.items()}
        step = dataclasses.replace(
            model, inputs=inputs, batch=rows, cpu=rows, build=lambda _: model.build(self.small)
        )
        return Drawn(step, False, self.dtype, self.device)  # as many rows of a small model

    def parts(self) -> dict[str, tuple[str, ...]]:
        """The parts that mean something for the model."""
        found = dict(PARTS)
        kinds = {x.kind for x in self.model.inputs.values()}
        if {"nodes", "edges"} & kinds:
            del found["batch"]  # one graph: it has no rows
        tokens = self.model.library == "transformers" and "input_ids" in self.model.inputs
        if not tokens or self.model.name in MASKLESS:
            del found["padded"]
        if not (tokens and "ForCausalLM" in self.model.spec or self.model.name == "gpt2"):
            del found["prefix"]
        if self.model.name not in ASKED:
            for part in ("graphs", "train-cost", *TOKENS):
                del found[part]
        elif self.device != "cuda":
            del found["graphs"]
        if not self.model.train:
            del found["train"], found["other-train"]
        return found


MASKLESS = ("fnet", "rwkv", "convbert")
"""Models of text whose results depend on what a mask would leave out, in float64 too."""


def subjects(device: str, small: bool) -> dict[str, Subject]:
    """All of them: in both types, on a GPU in float32 only those that the suite has so."""
    found = []
    for dtype in ("bfloat16", "float32"):
        for model in MODELS.values():
            if model.bf16 if dtype == "bfloat16" else (small or model.f32 or model.name in ASKED):
                found.append(Subject(model, dtype, device, small))
    return {s.name: s for s in found}


ASKED = ("gpt2", "llama")
"""Models whose costs are asked for, in float32 too."""


# ---------------------------------------------------------------------------- rows
def batches(subject: Subject) -> tuple[nn.Module, dict[str, tuple[Tensor, ...]]]:
    """The model and inputs of each batch, the first one's row also at the end of the others."""
    case = subject.shallow()
    model, _ = case.build()
    rows = _typed(case, [x.make(BATCHES[-1]) for x in case.model.inputs.values()])
    found = {str(n): tuple(torch.cat([x[: n - 1], x[:1]]) for x in rows) for n in BATCHES}
    return model, found


def padded(subject: Subject) -> tuple[nn.Module, dict[str, tuple[Tensor, ...]]]:
    """The model and a row alone, then as the first of two that are filled up to a length, with a
    mask."""
    case = subject.shallow()
    named, _ = case.build()
    assert isinstance(named, Named), "models of text are transformers'"
    names = tuple(n for n in case.model.inputs if n != "attention_mask")
    model = Named(named.model, ("attention_mask", *names))
    assert "attention_mask" in inspect.signature(named.model.forward).parameters, subject.name
    first, *longer = lengths(case)
    rest = [x.make(2) for n, x in case.model.inputs.items() if n in names and n != "input_ids"]
    text = case.model.inputs["input_ids"].make(2)
    at = names.index("input_ids")
    found = {}
    for n in (first, *longer):
        ids = text[:, :n].clone()
        mask = torch.ones_like(ids)
        ids[0, first:], mask[0, first:] = 0, 0
        given = [*rest[:at], ids, *rest[at:]]
        rows = 1 if n == first else 2
        found[str(n)] = tuple(x[:rows] for x in _typed(case, [mask, *given]))
    return model, found


def prefixes(subject: Subject) -> tuple[nn.Module, dict[str, tuple[Tensor, ...]]]:
    """The model and a text up to some lengths."""
    case = subject.shallow()
    model, _ = case.build()
    text = case.model.inputs["input_ids"].make(1)
    return model, {str(n): tuple(_typed(case, [text[:, :n]])) for n in lengths(case)}


def lengths(case: Case) -> tuple[int, int, int]:
    """Three lengths of a text, the first one that which is compared; the longest is the suite's."""
    (most,) = case.model.inputs["input_ids"].shape
    return 3 * most // 8, most // 2 + 1, most


def _typed(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    dtype = getattr(torch, case.dtype)
    moved = [x.to(case.device) for x in inputs]
    return [x.to(dtype) if x.is_floating_point() else x for x in moved]


def same_row(part: str, alone: Tensor, among: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What has to be equal of a result for a row alone and of the one for the row among others:
    pairs; none if the result has no rows."""
    if alone.dim() == 0 or among.dim() != alone.dim() or among.shape[0] % alone.shape[0]:
        return []
    pairs = [(alone, first_of(among, alone.shape))]
    if part == "batch":
        pairs.append((alone, last_of(among, alone.shape)))
    return pairs


def first_of(x: Tensor, shape: torch.Size) -> Tensor:
    """The part at the beginning of all dimensions that has a shape."""
    return x[tuple(slice(0, n) for n in shape)]


def last_of(x: Tensor, shape: torch.Size) -> Tensor:
    """The part at the end of all dimensions that has a shape."""
    return x[tuple(slice(x.shape[d] - n, None) for d, n in enumerate(shape))]


# ---------------------------------------------------------------------------- bits
def differing(a: Tensor, b: Tensor) -> int:
    """How many elements have other bits, signs of zeros included, NaN for NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return max(a.numel(), b.numel())
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return int((a != b).sum())
    other = (a != b) | (a.signbit() != b.signbit())
    return int((other & ~(a.isnan() & b.isnan())).sum())
