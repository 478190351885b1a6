"""Products of matrices on a GPU, with what follows them, against the vendor's and Inductor's: time
on the device, in CUDA graphs of calls whose weights are too many for the cache.

Groups: `gpt2` and `llama` (the widths of GPT-2 and of an 8B Llama at 1 to 4,096 rows, with bias,
activation, residual or gate), `split` (few results of long sums), `rows` (64 and 256 rows), `norm`
(a residual, and a norm of the sum), `pairs` (a rotary embedding, or a gate of the same matrix),
`vocabulary` (a language model's last product, whose rows start anywhere) and `single` (float32).
Peers: eager; pair (the vendor's product, then one kernel of plait's); addend (the same, with a
residual as the addend of the product); plait; plait-tuned and inductor-tuned (max-autotune);
inductor.
Usage: products_gpu.py [GROUPS or NAMES...] [--peers LIST] [--jobs N] [--seconds N]: N processes
compile side by side, one at a time is timed; rows are printed as they are done, and the table comes
after so many seconds at the latest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from on_device import Turns, compiled, least_us, raced, write_row
from table import render
from torch import Tensor

PEERS = ("eager", "pair", "addend", "plait", "plait-tuned", "inductor", "inductor-tuned")
CALLS = 24
COLD_NBYTES = 160 << 20  # of weights that a round of calls reads: more than any cache holds
Program = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A product of m x k and k x n and what follows it. turned: which operands lie transposed:
    "nt" as of a linear layer. then: a row of BIASED or PLAIN."""

    m: int
    n: int
    k: int
    turned: str = "nt"
    then: str = ""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        after = f" {self.then}" if self.then else ""
        kind = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.m}x{self.n}x{self.k} {self.turned}{after}{kind}"


def silu_gate(y: Tensor, other: Tensor) -> Tensor:
    return F.silu(y) * other


def normed(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, F.rms_norm(y, y.shape[-1:])


def rotary(y: Tensor, angles: Tensor) -> Tensor:
    """Of heads of 128 columns."""
    heads, cos, sin = y.view(len(y), -1, 128), angles[:, None, :128], angles[:, None, 128:256]
    a, b = heads.chunk(2, -1)
    return heads * cos + torch.cat((-b, a), -1) * sin


def halves(y: Tensor, rest: Tensor) -> Tensor:
    """A gate and what it opens, of one matrix."""
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


SUMS: dict[str, Program] = {"add": lambda y: y, "norm": normed}
"""After a product with a residual."""
BIASED: dict[str, Program] = {
    "bias": lambda y, rest: y,
    "relu": lambda y, rest: F.relu(y),
    "gelu": lambda y, rest: F.gelu(y, approximate="tanh"),
    "erf": lambda y, rest: F.gelu(y),
    "residual": lambda y, rest: rest + y,
}
"""After a product with a bias."""
PLAIN: dict[str, Program] = {
    "": lambda y, rest: y,
    "gate": silu_gate,
    "add": lambda y, rest: rest + y,
    "norm": lambda y, rest: normed(rest + y),
    "float": lambda y, rest: y.float(),
    "rotary": rotary,
    "halves": halves,
}


def whole(then: str) -> Program:
    """The product and what follows it, as a model has it."""

    def program(x: Tensor, w: Tensor, bias: Tensor, rest: Tensor) -> Any:
        if then in BIASED:
            return BIASED[then](torch.addmm(bias, x, w), rest)
        return PLAIN[then](x @ w, rest)

    return program


def beside(then: str) -> Program:
    """What follows a product, its bias included, as a kernel has it."""
    if then in BIASED:
        return lambda y, bias, rest: BIASED[then](y + bias, rest)
    return lambda y, bias, rest: PLAIN[then](y, rest)


def _cases() -> dict[str, list[Case]]:
    rows = (1, 16, 128, 1024, 4096)
    gpt2 = [(2304, 768, "bias"), (768, 768, "residual"), (3072, 768, "gelu"), (3072, 768, "relu"),
            (3072, 768, "erf"), (768, 3072, "residual")]  # fmt: skip
    llama = [(6144, 4096, ""), (4096, 4096, "add"), (14336, 4096, "gate"), (4096, 14336, "add")]
    split = [
        (16, 16, 32768), (32, 32, 65536), (64, 64, 65536), (128, 128, 32768), (96, 96, 49152),
        (256, 256, 16384), (32, 2048, 16384), (512, 512, 32768), (1024, 1024, 65536),
    ]  # fmt: skip
    return {
        "gpt2": [Case(m, n, k, "nt", then) for m in rows for n, k, then in gpt2],
        "llama": [Case(m, n, k, "nt", then) for m in rows for n, k, then in llama],
        "split": [Case(m, n, k, t) for m, n, k in split for t in ("nn", "tn", "nt")],
        "rows": [Case(m, n, k) for m in (2, 8, 32, 64, 256) for n, k, _ in gpt2 + llama]
        + [Case(m, n, k, "nn") for m in (1, 16, 64) for n, k, _ in gpt2 + llama],
        "norm": [
            Case(m, n, k, "nt", then) for m in (128, 1024, 4096) for then in ("add", "norm")
            for n, k in ((768, 768), (768, 3072), (4096, 4096))
        ],
        "pairs": [
            Case(m, n, k, "nt", then) for m in (1, 16, 64)
            for n, k, then in ((4096, 4096, "rotary"), (1024, 4096, "rotary"),
                               (2048, 2048, "rotary"), (16384, 3072, "halves"))
        ],
        "vocabulary": [
            Case(m, n, k, "nt", then) for m in (128, 512, 1024, 2048)
            for n, k, then in ((50257, 768, ""), (50257, 768, "float"), (50265, 768, "bias"),
                               (30522, 1024, "bias"), (32000, 1024, ""))
        ],
        "single": [Case(*s, "nn", "", "float32") for s in ((16, 128, 128), (64, 128, 128),
                   (16, 256, 256), (1, 1024, 1024), (8, 1024, 1024))],
    }  # fmt: skip


CASES = _cases()


class Race:
    """One case: its inputs and its peers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        dtype = getattr(torch, case.dtype)
        m, n, k = case.m, case.n, case.k
        copies = max(1, min(12, COLD_NBYTES // ((m + n) * k * dtype.itemsize)))
        if n * k < 1 << 16 or case in CASES["split"]:
            copies = 1

        def matrix(rows: int, columns: int, turned: str) -> Tensor:
            size = (rows, columns) if turned == "n" else (columns, rows)
            made = torch.randn(size, device="cuda").to(dtype)
            return made if turned == "n" else made.t()

        self.x = matrix(m, k, case.turned[0])
        self.weights = [matrix(k, n, case.turned[1]) * k**-0.5 for _ in range(copies)]
        self.bias = torch.randn(n, device="cuda").to(dtype)
        self.rest = torch.randn(m, n, device="cuda").to(dtype)

    def call(self, peer: str) -> Callable[[Tensor], Any]:
        """A peer as a function of the weights."""
        program = whole(self.case.then)
        if peer == "pair":
            after: Any = beside(self.case.then)
            if self.case.then:
                after = torch.compile(after, backend="plait", dynamic=False)
            return lambda w: after(torch.mm(self.x, w), self.bias, self.rest)
        if peer == "addend":
            sums: Any = SUMS[self.case.then]
            if self.case.then != "add":
                sums = torch.compile(sums, backend="plait", dynamic=False)
            return lambda w: sums(torch.addmm(self.rest, self.x, w))
        run = compiled(program, peer)
        return lambda w: run(self.x, w, self.bias, self.rest)

    def error(self, call: Callable[[Tensor], Any]) -> float:
        """Distance of the result from float64."""
        w = self.weights[0]
        exact = whole(self.case.then)(*(t.double() for t in (self.x, w, self.bias, self.rest)))
        found, exact = (y[-1] if isinstance(y, tuple) else y for y in (call(w), exact))
        return float((found.double() - exact).norm() / exact.norm())


@torch.no_grad()
def work(names: Sequence[str], peers: Sequence[str], folder: Path) -> None:
    """Compiles rows and times them, one after the other."""
    turns = Turns(folder)
    known = {c.name: c for cases in CASES.values() for c in cases}  # some are in two groups
    for case in (known[name] for name in names):
        torch.compiler.reset()
        race = Race(case)
        calls: dict[str, tuple[Callable[[Tensor], Any], float]] = {}
        with turns.compiling():
            for peer in peers:
                try:
                    call = race.call(peer)
                    calls[peer] = call, race.error(call)
                except Exception as failed:  # noqa: BLE001 - a peer's, too: the row says so
                    text = f"{type(failed).__name__}: {failed}".splitlines()[0]
                    print(f"{case.name}: {peer} failed: {text[:200]}", file=sys.stderr)
        with turns.timing():
            us = least_us({p: call for p, (call, _) in calls.items()}, race.weights, CALLS)
        found = {p: (us[p], error) for p, (_, error) in calls.items()}
        write_row(folder, {"name": case.name, "found": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=list(CASES))
    parser.add_argument("--peers", default="eager,pair,plait,inductor")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    peers = args.peers.split(",")
    if args.work:
        work(json.loads(args.work), peers, Path(args.what[0]))
        return
    names = [
        c.name
        for group, cases in CASES.items()
        for c in cases
        if any(w == group or fnmatch(c.name, w) for w in args.what)
    ]
    names = list(dict.fromkeys(names))
    rows = raced(__file__, names, args, lambda name, row: row_of(name, row, peers)[0])
    table = []
    ratios: dict[str, list[float]] = {}
    for name in names:
        row, ratio = row_of(name, rows.get(name, {}), peers)
        table.append(row)
        group = next(g for g, cases in CASES.items() if name in [c.name for c in cases])
        ratios.setdefault(group, []).extend([ratio] if ratio > 0 else [])
    print(render(("µs on the device", *peers, "best other / plait", "error / eager's"), table))
    for group, known in ratios.items():
        if known:
            mean = math.exp(sum(map(math.log, known)) / len(known))
            print(f"{group}: geometric mean {mean:.2f}, least {min(known):.2f}, {len(known)} rows")


def row_of(
    name: str, found: dict[str, tuple[float, float]], peers: Sequence[str]
) -> tuple[list[str], float]:
    """A row of the table, and how many times plait's time the best other takes."""
    ours = min((found[p][0] for p in ("plait", "plait-tuned") if p in found), default=math.nan)
    others = [us for p, (us, _) in found.items() if not p.startswith("plait")]
    ratio = min(others, default=math.nan) / ours
    times = [f"{found[p][0]:.1f}" if p in found else "" for p in peers]
    errors = [found[p][1] for p in ("eager", "plait") if p in found]
    worse = f"{errors[1] / errors[0]:.2f}" if len(errors) == 2 and errors[0] else ""
    return [name, *times, f"{ratio:.2f}", worse], ratio


if __name__ == "__main__":
    main()
