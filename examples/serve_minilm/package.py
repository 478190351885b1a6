"""Writes what serve_minilm serves: MiniLM as a package for sentences of any length, and sentences
as token ids.

Usage: python examples/serve_minilm/package.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import plait

sys.path.insert(0, str(Path(__file__).parent.parent))
import demo


def main() -> None:
    folder = Path(sys.argv[1])
    encoder, tokenizer = demo.load()
    sentences = [tokenizer(s)["input_ids"] for s in demo.SENTENCES]
    (folder / "tokens.txt").write_text("".join(" ".join(map(str, ids)) + "\n" for ids in sentences))
    ids = torch.tensor([sentences[0]])
    length = torch.export.Dim(
        "length", min=2, max=encoder.transformer.config.max_position_embeddings
    )
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    plait.package(
        encoder, folder / "minilm.plait", (ids, torch.ones_like(ids)), dynamic_shapes=shapes
    )


if __name__ == "__main__":
    main()
