"""transformers' `generate` over a compiled model: the tokens of eager, and no graph for each
length."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from plait.capture.backend import plait_backend

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # half a minute each

SAMPLE = {"do_sample": True, "temperature": 0.8, "top_k": 50}
STATIC = {"cache_implementation": "static", "disable_compile": True}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}), "batch": (3, {}), "sample": (3, SAMPLE), "static": (3, STATIC),
    "assisted": (1, {"prompt_lookup_num_tokens": 4}),
}  # fmt: skip


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens(way: str, mode: str | None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    batch, options = WAYS[way]
    model, graphs = llama(), []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return plait_backend(gm, inputs, mode=mode)

    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward, backend=backend)
    made = []
    for length in (7, 9, 12):
        words = torch.randint(2, 512, (batch, length))
        mask = torch.ones_like(words)
        if batch > 1:
            mask[0, :2] = 0
        tokens = []
        for m in (model, compiled):
            torch.manual_seed(1)
            given = {"do_sample": False, "max_new_tokens": 20, "attention_mask": mask, **options}
            tokens.append(m.generate(words, **given))
        assert torch.equal(*tokens)
        made.append(len(graphs))
    assert made[2] == made[1] <= 8, made  # drafts of several lengths, one among them


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_drafts_of_a_second_model(schedule: str) -> None:
    """Drafts of varying length, by a model that is often right: the tokens of eager, and soon no
    further graph. Both models run one code, so they share Dynamo's limit of recompilations."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, draft, graphs = llama(), llama(), []
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs + 0.02 * torch.randn_like(theirs) * theirs.abs().mean())
    draft.generation_config.num_assistant_tokens_schedule = schedule

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return plait_backend(gm, inputs)

    pairs = [(model, draft), (copy.deepcopy(model), copy.deepcopy(draft))]
    for m in pairs[1]:
        m.forward = torch.compile(m.forward, backend=backend)
    made = []
    with torch._dynamo.config.patch(recompile_limit=16):
        for length in (7, 9, 12, 15):
            words = torch.randint(2, 512, (1, length))
            given = {"attention_mask": torch.ones_like(words), "max_new_tokens": 24}
            tokens = [m.generate(words, assistant_model=d, do_sample=False, **given)
                      for m, d in pairs]  # fmt: skip
            assert torch.equal(*tokens), f"{tokens[0]}, compiled {tokens[1]}"
            made.append(len(graphs))
    assert made[3] == made[2] <= 12, made
