"""The programs whose first calls benchmarks.first measures: of models.py, of the suite, and a Llama
as deep as that of 8B parameters but narrow, plain and with its layer as one region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.suite.models import cases as suite_cases
from benchmarks.suite.worker import Program

TRAINED = ("bert", "convnext", "deberta_v2", "swin", "albert")
"""Models of transformers, of the suite, whose training steps are measured; texts have 64 tokens."""
TEXT = ("ids", "mask")


@dataclass(frozen=True)
class Made:
    """A program with a name of its own."""

    name: str
    about: str
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    train: bool = False

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return self.build()


Case = models.Case | Made


def llama(layers: int, region: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A Llama of the 8B configuration with 256 in the place of 4096 columns, 1 x 64 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if region:
        layer: Any = LlamaDecoderLayer
        layer.forward = torch.compiler.nested_compile_region(layer.forward)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=896, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model = models.TextModel(LlamaForCausalLM(config)).eval()
    return model, (torch.randint(8192, (1, 64)),)


def _llamas() -> list[Case]:
    about = "Llama, 8B configuration at 256 columns, {} layers, 1 x 64 tokens"
    plain = Made("llama-32", about.format(32), lambda: llama(32))
    regions: list[Case] = [
        Made(
            f"llama-{n}-regions",
            about.format(n) + ", a layer is a region",
            lambda n=n: llama(n, True),  # type: ignore[misc]
        )
        for n in (4, 32)
    ]
    return [plain, *regions]


def _trained(name: str) -> Case:
    case = suite_cases("cpu")[f"{name}/train/float32"]
    inputs = {
        k: replace(x, shape=(64,)) if x.kind in TEXT else x for k, x in case.model.inputs.items()
    }
    case = replace(case, model=replace(case.model, inputs=inputs))

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, inputs = case.build()
        return Program(case, model, inputs).train(), inputs

    about = f"{name} of transformers, batch {case.batch}, forward + backward"
    return Made(f"{name}-train", about, build, train=True)


def _all() -> list[Case]:
    found: list[Case] = [models.CASES[name] for name in ("tf6", "gpt2", "gpt2-train")]
    found += _llamas()
    found += [_trained(name) for name in TRAINED]
    if torch.cuda.is_available():
        for name in ("gpt2", "gpt2-train"):
            found.append(replace(models.GPU_CASES[name], name=f"{name}-cuda"))
    return found


CASES = {case.name: case for case in _all()}
