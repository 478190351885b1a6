"""Generated CPU kernels against eager and the memory's bandwidth: `python -m benchmarks.kernels_cpu [--threads
1 2] [NAME ...]`.

For each case the time of one call (best of many), eager's, their ratio, and the rate at which the case's bytes
(inputs and outputs once) move, beside
the rate of a plain copy of the same size. `--inductor` adds torch's own compiler.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def pw(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The pointwise benchmark of the peers' table."""
    y = torch.tanh(x) * torch.sigmoid(x) - torch.exp(-x.abs())
    y = torch.nn.functional.layer_norm(y, (y.shape[-1],), w, b)
    return torch.softmax(torch.nn.functional.gelu(y), -1)


def cases() -> dict[str, Case]:
    """Name -> function and inputs."""
    f = torch.nn.functional
    torch.manual_seed(0)
    x, y, w, b = (
        torch.randn(1024, 1024),
        torch.randn(1024, 1024),
        torch.randn(1024),
        torch.randn(1024),
    )
    h = x.bfloat16()
    small = torch.randn(4096, 64)
    image = torch.randn(8, 64, 56, 56)
    table, ids = torch.randn(5000, 256), torch.randint(0, 5000, (4096,))
    scores = torch.randn(4, 8, 128, 128)
    return {
        "pw": (pw, (x, w, b)),
        "softmax": (lambda a: torch.softmax(a, -1), (x,)),
        "softmax_64": (lambda a: torch.softmax(a, -1), (small,)),
        "softmax_scores": (lambda a: torch.softmax(a * 0.125, -1), (scores,)),
        "softmax_columns": (lambda a: torch.softmax(a, 0), (x,)),
        "layer_norm": (lambda a, w, b: f.layer_norm(a, (1024,), w, b), (x, w, b)),
        "gelu": (f.gelu, (x,)),
        "gelu_tanh": (lambda a: f.gelu(a, approximate="tanh"), (x,)),
        "silu_mul": (lambda a, c: f.silu(a) * c, (x, y)),
        "add": (lambda a, c: a + c * 2, (x, y)),
        "add_bf16": (lambda a: a + a * 2, (h,)),
        "tanh": (torch.tanh, (x,)),
        "sum_all": (lambda a: (a * a).sum(), (x,)),
        "sum_rows": (lambda a: (a * 2).sum(1), (x,)),
        "sum_columns": (lambda a: (a * 2).sum(0), (x,)),
        "argmax_rows": (lambda a: (a * 2).argmax(1), (x,)),
        "cumsum": (lambda a: (a * 2).cumsum(1), (x,)),
        "transpose": (lambda a: (a.t() + 1).contiguous(), (x,)),
        "add_transposed": (lambda a, c: a.t() + c, (x, y)),
        "heads": (lambda a: (a * 2).view(4, 256, 16, 64).transpose(1, 2).contiguous(), (x,)),
        "batch_norm": (lambda a: f.batch_norm(a, None, None, training=True), (image,)),
        "embedding": (lambda t, i: f.embedding(i, t) * 2, (table, ids)),
        "cat": (lambda a, c: torch.cat([a * 2, c], 1), (x, y)),
        "mask_fill": (lambda a, c: torch.where(a > c, a, -1e9), (x, y)),
        "dropout_bits": (lambda a: f.dropout(a, 0.1, True), (x,)),
    }


def best_ms(fn: Callable[..., object], args: Sequence[torch.Tensor], seconds: float = 0.4) -> float:
    """The shortest call in milliseconds."""
    fn(*args)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        fn(*args)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--inductor", action="store_true")
    options = parser.parse_args()
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(
            f"{'threads ' + str(threads):16} {'plait ms':>9} {'eager ms':>9} {'ratio':>6} {'GB/s':>6} {'copy GB/s':>9}"
        )
        for name, (fn, args) in cases().items():
            if options.names and name not in options.names:
                continue
            with torch.no_grad():
                print(f"{name:16} {row(fn, args, options.inductor)}", flush=True)


def row(fn: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], inductor: bool) -> str:
    """One line of the table."""
    torch._dynamo.reset()
    mine = torch.compile(fn, backend="plait", dynamic=False)
    out = mine(*args)
    ours, eager = best_ms(mine, args), best_ms(fn, args)
    nbytes = sum(t.nbytes for t in (*args, out))
    source, target = (
        torch.empty(nbytes // 2, dtype=torch.uint8),
        torch.empty(nbytes // 2, dtype=torch.uint8),
    )
    copy = best_ms(target.copy_, (source,), 0.1)
    text = f"{ours:9.3f} {eager:9.3f} {ours / eager:6.2f} {nbytes / ours / 1e6:6.1f} {nbytes / copy / 1e6:9.1f}"
    if inductor:
        torch._dynamo.reset()
        theirs = best_ms(torch.compile(fn, backend="inductor", dynamic=False), args)
        text += f"   inductor {theirs:.3f} ({ours / theirs:.2f})"
    return text


if __name__ == "__main__":
    main()
