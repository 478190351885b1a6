"""transformers' `generate`, greedy, of a small Llama with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from programs import Program


def _generate(device: str, batch: int, **options: Any) -> Program:
    """fn calls `generate`, whose every step calls the model's forward; that is what is compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).eval()
    words = torch.randint(2, 1024, (batch, 12), device=device)

    def fn(words: Tensor) -> Any:
        return model.generate(
            words, attention_mask=torch.ones_like(words), max_new_tokens=32, do_sample=False,
            **options,
        )  # fmt: skip

    return Program(fn, (words,))


def dynamic_cache(device: str) -> Program:
    return _generate(device, 1)


def static_cache(device: str) -> Program:
    return _generate(device, 4, cache_implementation="static", disable_compile=True)


PROGRAMS = {f.__name__: f for f in (dynamic_cache, static_cache)}
