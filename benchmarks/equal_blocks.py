"""What a first call of a model of many equal blocks costs, and which part of it is plait's.

    python -m benchmarks.equal_blocks [--layers 4,32] [--train] [--ways whole,block,region]

A Llama of small width, in a fresh process with empty caches for each figure, compiled as a whole,
block by block (`layer.compile(backend="plait")`), or as a whole in which a block is a region
(`torch.compiler.nested_compile_region`). CPU seconds: of all (compilers of kernels included), of
plait's stages, of the compilers. A block that Dynamo compiles once, and a region, are one program
however many there are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.table import render
from plait.log import watched

WAYS = ("whole", "block", "region")
BUILDING = ("build kernels", "load")


def child(way: str, layers: int, train: bool) -> dict[str, float]:
    """The figures of this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from plait.log import PassLog
    from plait.wrapper.program import CompileRecord, observers

    importlib.import_module("plait.capture.backend")  # the compiler, before the clock starts
    PassLog.clock = staticmethod(time.thread_time)
    shape: Any = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
    config = LlamaConfig(
        **shape, num_key_value_heads=2, num_hidden_layers=layers, vocab_size=1024, use_cache=False
    )
    torch.manual_seed(0)
    model, tokens = LlamaForCausalLM(config), torch.randint(0, 1024, (2, 64))
    torch.set_grad_enabled(train)
    expected = model(tokens, labels=tokens).loss.detach()
    if way == "region":
        kind = type(model.model.layers[0])
        kind.forward = torch.compiler.nested_compile_region(kind.forward)
    if way == "block":
        for layer in model.model.layers:
            layer.compile(backend="plait")
    call = model if way == "block" else torch.compile(model, backend="plait")
    took: Counter[str] = Counter()

    def note(record: CompileRecord) -> None:
        took.update({step: ms / 1e3 for step, ms in record.times_ms.items() if "/" not in step})

    observers.set((note,))
    begin, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    loss = call(tokens, labels=tokens).loss
    if train:
        loss.backward()
    cpu, after = time.process_time() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=1e-4)
    built = after.ru_utime - children.ru_utime + after.ru_stime - children.ru_stime
    own = sum(s for step, s in took.items() if step not in BUILDING)
    return {"all": cpu + built, "own": own, "building": built}


def in_process(way: str, layers: int, train: bool) -> dict[str, float]:
    """The figures of a fresh process with empty caches."""
    command = [sys.executable, "-m", "benchmarks.equal_blocks", "--child", way, str(layers)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *["--train"] * train],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PLAIT_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)},
        )
    if done.returncode:
        sys.exit(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="4,32")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--child", nargs=2, metavar=("WAY", "LAYERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], int(args.child[1]), args.train)))
        return
    sizes = [int(n) for n in args.layers.split(",")]
    rows = []
    for way in watched("ways", args.ways.split(",")):
        found = [in_process(way, n, args.train) for n in sizes]
        for key in ("all", "own", "building", "own and building"):
            values = [sum(f[k] for k in key.split(" and ")) for f in found]
            rows.append([way, key, *(f"{v:.2f}" for v in values), f"{values[-1] / values[0]:.2f}"])
    print(render(("", "CPU s", *(f"{n} layers" for n in sizes), "x"), rows))


if __name__ == "__main__":
    main()
