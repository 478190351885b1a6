"""Training of encoder-decoders with random weights: transformers' T5 (small) and BART, a loss and
its gradients; also with the losses of eight batches before one backward pass, as pipelines and
contrastive losses have it."""

from __future__ import annotations

from typing import Any

import torch

from programs import Program


def _model(kind: str, device: str) -> Any:
    import transformers

    if kind == "T5":
        config: Any = transformers.T5Config(decoder_start_token_id=0)
    else:
        config = transformers.BartConfig(
            vocab_size=32128, d_model=512, encoder_layers=6, decoder_layers=6,
            encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
        )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).train()


def _training(kind: str, device: str, batches: int = 1) -> Program:
    model = _model(kind, device)
    rows, words = (16, 128) if device == "cuda" else (2, 32)

    def step(*given: Any) -> Any:
        model.zero_grad()
        loss = sum(model(input_ids=x, labels=y).loss for x, y in zip(*given, strict=True))
        loss.backward()
        return loss.detach()

    def draw(n: int) -> list[Any]:
        return [torch.randint(1, 32000, (rows, n), device=device) for _ in range(batches)]

    return Program(step, (draw(words), draw(words // 2)), grad=True, part=model)


def t5(device: str) -> Program:
    return _training("T5", device)


def bart(device: str) -> Program:
    return _training("Bart", device)


def t5_of_eight_batches(device: str) -> Program:
    return _training("T5", device, batches=8)


PROGRAMS = {f.__name__: f for f in (t5, bart, t5_of_eight_batches)}
