"""How many kernels plait and Inductor launch for whole models, and what each hands to PyTorch's own
operators.

GPT-2 and BERT by their transformers configurations (few layers, random weights) and ResNet-18,
inference and training (forward and backward), each compiler in a process of its own. The goal: at
most 1.05 x Inductor's kernels. A kernel is one call from the program. On a CPU both compilers put
several loop nests into one: Inductor all that stand between two operator calls (threads meet at
barriers inside), plait only those that need nothing of each other. So loop nests are counted too.
Usage: kernel_counts.py [MODEL ...]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from models import CASES, TextModel
from table import render
from torch import Tensor, nn

from plait.log import watched

LIMIT = 1.05


def gpt2() -> tuple[nn.Module, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_head=4,
        n_embd=256,
        vocab_size=1000,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return TextModel(GPT2LMHeadModel(config)), torch.randint(0, 1000, (2, 64))


def bert() -> tuple[nn.Module, Tensor]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_size=256,
        intermediate_size=1024,
        vocab_size=1000,
    )
    return TextModel(BertModel(config)), torch.randint(0, 1000, (2, 64))


def resnet18() -> tuple[nn.Module, Tensor]:
    module, (x,) = CASES["resnet18"].make()
    return module, x


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet18": resnet18,
}


def count_inductor(run: Callable[[], Any]) -> dict[str, Any]:
    """Kernels and operator calls in the code that Inductor generates while run() runs."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(run)
    kernels: Counter[str] = Counter()
    externs: Counter[str] = Counter()
    nests = 0
    for source in sources:
        head, _, body = source.partition("def call(")
        called = Counter(re.findall(r"^\s+(?:kernels\.)?(cpp_fused\w*)\(", body, re.M))
        found = re.findall(r"^(cpp_fused\w*) = .*?'''(.*?)'''", head, re.M | re.S)
        nests += sum(called[name] * outermost_loops(text) for name, text in found)
        kernels.update(called)
        externs.update(re.findall(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", body))
    return {"kernels": kernels.total(), "nests": nests, "externs": dict(sorted(externs.items()))}


def outermost_loops(source: str) -> int:
    """The loops of indented C++ text that stand in no other loop."""
    n, depth = 0, 1 << 30  # of the loop that is open
    for line in source.splitlines():
        at = len(line) - len(line.lstrip())
        if line.lstrip().startswith("for(") and at <= depth:
            n, depth = n + 1, at
        elif line.strip() and at < depth:
            depth = 1 << 30
    return n


def count_plait(module: nn.Module, x: Tensor) -> dict[str, Any]:
    import plait
    from plait.schedule.plan import Kernel

    report = plait.explain(module, x, quiet=True)
    steps = [s for g in report.graphs for s in g.plan.steps]
    return {
        "kernels": report.kernels,
        "nests": sum(len(s.nests) for s in steps if isinstance(s, Kernel)),
        "externs": dict(sorted(report.extern_calls.items())),
        "fallbacks": dict(sorted(report.fallbacks.items())),
    }


def measure(compiler: str, model: str, train: bool) -> dict[str, Any]:
    """The counts of one compiler for one model, in this process."""
    torch.manual_seed(0)
    torch.set_grad_enabled(train)
    module, x = MODELS[model]()
    module.train(train)
    if compiler == "plait":
        return count_plait(module, x)
    compiled = torch.compile(module, backend="inductor")

    def run() -> None:
        out = compiled(x)
        if train:
            out.square().mean().backward()

    return count_inductor(run)


def in_process(compiler: str, model: str, train: bool) -> dict[str, Any]:
    """measure() in a fresh process with fresh caches."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", compiler, model, str(int(train))],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache, PLAIT_CACHE_DIR=cache),
        )
    if done.returncode:
        raise SystemExit(f"{compiler} on {model} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    warnings.filterwarnings("ignore")
    if sys.argv[1:2] == ["--measure"]:
        compiler, model, train = sys.argv[2:]
        print(json.dumps(measure(compiler, model, bool(int(train)))))
        return
    rows, externs = [], []
    for model in watched("models", sys.argv[1:] or MODELS):
        for train in (False, True):
            name = f"{model}, training" if train else model
            ours = in_process("plait", model, train)
            theirs = in_process("inductor", model, train)
            ratio = ours["kernels"] / max(theirs["kernels"], 1)
            verdict = "met" if ratio <= LIMIT else "MISSED"
            counts = [str(c[of]) for of in ("kernels", "nests") for c in (ours, theirs)]
            rows.append([name, *counts[:2], f"{ratio:.2f}", verdict, *counts[2:]])
            externs.append(
                f"{name}\n  plait     {ours['externs']}\n  Inductor  {theirs['externs']}"
            )
            if ours["fallbacks"]:
                externs.append(f"  fell back {ours['fallbacks']}")
    heads = ("kernels", "plait", "Inductor", "ratio", f"<= {LIMIT}", "nests: plait", "Inductor")
    print(render(heads, rows) + "\n")
    print("\n".join(externs))


if __name__ == "__main__":
    main()
