"""Whether kernels of templates fit in the memory of a multiprocessor, with no GPU: `python -m
tests.gpu_room MODE GPUS [NAMES]` compiles products with whatever is computed of them, and attention
with what is added to its scores, its gradients too, and fails where one needs more than such a GPU
has. MODE: "rows", as they are under `batch_invariant`; "usual", as they are otherwise; or "tuned",
every version that would be measured. GPUS, NAMES: with commas between them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plait.kernel.triton.target import TritonTarget
from plait.kernel.triton.user import unit_of
from plait.log import watched
from plait.runtime.cubin import NUMBERS, Job
from plait.runtime.triton_worker import load_module
from tests.gpu_row_orders import HALF, Program, Shapes, attend_biased, jobs

M, N, K = 2048, 6144, 512
FACTORS: Shapes = ((M, K), (N, K))


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def across(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Beside what lies column by column."""
    return F.linear(x, w) * F.silu(y.t())


def looked_up(x: Tensor, w: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return F.linear(x, w) + torch.index_select(table, 0, at.long())


def turned(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).t().clone(memory_format=torch.contiguous_format)


def heads(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w).view(2, M // 2, N // 64, 64).transpose(1, 2)
    return y.clone(memory_format=torch.contiguous_format)


PRODUCTS: dict[str, tuple[Program, Shapes]] = {
    "plain": (lambda x, w: F.linear(x, w), FACTORS),
    "float32": (lambda x, w: torch.tanh(F.linear(x, w).float()), FACTORS),
    "float64": (lambda x, w: F.linear(x, w).double(), FACTORS),
    "bits": (lambda x, w: F.linear(x, w) > 0, FACTORS),
    "two": (lambda x, w: (F.linear(x, w).relu(), F.linear(x, w).float().exp()), FACTORS),
    "activated": (activated, (*FACTORS, (N,))),
    "across": (across, (*FACTORS, (N, M))),
    "looked up": (looked_up, (*FACTORS, (100, N), (M,))),
    "turned": (turned, FACTORS),
    "heads": (heads, FACTORS),
    "odd": (lambda x, w: F.linear(x, w) > 0, ((M, K), (N + 1, K))),
    "columns": (lambda x, w: x @ w > 0, ((M, K), (K, N))),
    "few": (lambda x, w: F.linear(x, w) > 0, ((40, K), (N, K))),
    "one": (lambda x, w: F.linear(x, w) > 0, ((1, K), (N, K))),
}


def gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    """Of attention, where what is added to scores has none."""
    ops: Any = torch.ops.aten
    out, *more = ops._scaled_dot_product_efficient_attention(q, k, v, bias, True)
    given = (out, q, k, v, bias, out, *more, 0.0, [True, True, True, False])
    return ops._scaled_dot_product_efficient_attention_backward(*given)[:3]


ATTENTION: dict[str, tuple[Program, Shapes]] = {
    f"{name} {w}": (fn, (*((2, 4, 501, w),) * 3, (2, 4, 501, 501)))
    for name, fn in (("attention", attend_biased), ("gradients", gradients))
    for w in (64, 128, 256)
}


def every_version(found: list[Job]) -> Any:
    """In place of TritonTarget.emit_users: keeps all versions of a kernel."""
    emit_users = TritonTarget.emit_users

    def emit(
        self: Any, launches: Sequence[Any], machines: Mapping[str, Any], choices: Mapping[str, int]
    ) -> Any:
        for u in launches:
            found.extend(unit_of(u, v, machines[u.device][0]) for v in u.kernel.variants)
        return emit_users(self, launches, machines, choices)

    return emit


def shared_nbytes(job: Job, folder: Path) -> int:
    """Bytes that a program of a compiled kernel needs."""
    function = getattr(load_module(job.name, job.text, folder), job.name)
    aligned: Any = {(k,): [["tt.divisibility", 16]] for k in job.aligned}
    source = ASTSource(function, dict(job.signature), {}, aligned)
    options = {
        "num_warps": job.num_warps, "num_stages": job.num_stages, "sanitize_overflow": False,
        "launch_pdl": job.early, **NUMBERS, **dict(job.options),
    }  # fmt: skip
    return int(triton.compile(source, GPUTarget(*job.gpu[:3]), options).metadata.shared)


def main() -> None:
    """Command line: see the module's docstring."""
    mode, gpus, *names = (x.split(",") for x in sys.argv[1:])
    options = {"rows": {}, "usual": {"batch_invariant": False}}.get(
        mode[0], {"batch_invariant": False, "autotune": True}
    )
    cases = {(n, how): p for n, p in PRODUCTS.items() for how in ("bfloat16", "tf32", "ieee")}
    cases |= {(n, how): p for n, p in ATTENTION.items() for how in ("bfloat16", "ieee")}
    found: list[Job] = []
    setattr(TritonTarget, "emit_users", every_version(found))  # noqa: B010
    for (name, how), (fn, shapes) in cases.items():
        torch.backends.cuda.matmul.fp32_precision = "tf32" if how == "tf32" else "ieee"
        dtype = HALF if how == "bfloat16" else torch.float32
        for gpu in gpus if not names or name in names[0] else ():
            jobs(fn, shapes, dtype, gpu, **options)
    different = {job.key(): job for job in found}
    most: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/cache"
        for job in watched("kernels", different.values()):
            needed, there = shared_nbytes(job, Path(folder)), job.gpu.most_shared
            assert there is not None and needed <= there, f"{job.name}: {needed}\n{job.text}"
            most[job.gpu.name] = max(most.get(job.gpu.name, 0), needed)
    assert most, "no kernels"
    print(f"{len(different)} kernels fit; the largest: {most}")


if __name__ == "__main__":
    main()
