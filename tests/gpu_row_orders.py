"""The order of sums in kernels for a GPU of which rows keep their bits, with no GPU: `python -m
tests.gpu_row_orders` compiles kernels up to Triton's own language, and fails where one adds up, or
multiplies, more than two floats at once. In which order that is done Triton chooses by how a block
is laid out, and that by what it knows of sizes and addresses. Fails, too, where what is added to a
product is what its sum starts with.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from plait import compat
from plait.compile import compile_texts
from plait.config import Config
from plait.graph.captured import Captured
from plait.log import watched
from plait.runtime.cubin import Job
from plait.runtime.triton_worker import load_module

Program = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
HALF = torch.bfloat16
TAKEN = re.compile(
    r'"tt\.(reduce|scan)"\(.*?\) <\{axis = (\d+) : i32.*?\}> \(\{(.*?)\}\) : \((.*?)\) ->', re.S
)
"""A reduction or scan in Triton's language: its axis, what it does, and of what."""


def norms(x: Tensor) -> list[Tensor]:
    n = x.shape[-1:]
    return [F.layer_norm(x, n), x.softmax(-1), x.var(-1), x.sum(-1), (x / 9).exp().prod(-1)]


def columns(x: Tensor) -> list[Tensor]:
    return [x.mean(1), x.softmax(1), x.std(1)]


def segments(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 32)).mean(-1)


def running(x: Tensor) -> list[Tensor]:
    return [x.cumsum(-1), x.cumprod(1), x.cummax(-1).values]


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """As CUDA has it, with a kernel of ours: elsewhere it would be taken apart."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0]


def attend_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, False)[0]


def _attention(n: int) -> Shapes:
    return ((2, 4, n, 64),) * 3


PROGRAMS: list[tuple[Program, Shapes, torch.dtype]] = [
    *((norms, ((7, n),), torch.float32) for n in (96, 9600)),
    *((norms, ((n, 300),), HALF) for n in (1, 4096)),
    *((columns, ((3, n, 40),), HALF) for n in (70, 9600)),
    (segments, ((64, 320),), HALF),
    *((running, ((3, n, 40),), torch.float32) for n in (1, 300)),
    (running, ((1, 2, 9000),), HALF),
    *((attend, _attention(n), dtype) for n in (45, 300) for dtype in (HALF, torch.float32)),
    # What a row of them lies at is a multiple of 16 bytes, or is not.
    *((attend_biased, (*_attention(n), (2, 4, n, n)), HALF) for n in (100, 104)),
]


def jobs(
    fn: Program, shapes: Shapes, dtype: torch.dtype, gpu: str = "sm_90", **options: bool
) -> tuple[Job, ...]:
    """The kernels of a function of tensors on a GPU."""
    with FakeTensorMode(), torch.no_grad():
        xs = [torch.empty(s, device="cuda", dtype=dtype) for s in shapes]
        table = compat.decompositions.decomposition_table()
        graph = make_fx(torch.func.functionalize(fn), table)(*xs)
    cfg = Config(gpu_arch=gpu, verify=True, **{"batch_invariant": True, **options})  # type: ignore[arg-type]
    _, made = compile_texts(Captured(graph, "rows_0", "inference"), cfg)
    return tuple(made.sources["cuda"].units) if "cuda" in made.sources else ()


def in_tritons_language(job: Job, folder: Path) -> str:
    """A kernel before blocks are laid out."""
    function = getattr(load_module(job.name, job.text, folder), job.name)
    source = ASTSource(function, dict(job.signature), {}, {})
    target = GPUTarget(*job.gpu[:3])
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": job.num_warps})
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](made, {}))


def orders(text: str) -> list[tuple[str, int]]:
    """Each sum and product of floats along an axis, running or not, and its length."""
    found = []
    for kind, axis, how, operands in TAKEN.findall(text):
        if re.search(r"arith\.(addf|mulf)", how):
            shape = re.match(r"tensor<((?:\d+x)+)", operands)
            assert shape, operands
            found.append((kind, int(shape[1].split("x")[int(axis)])))
    return found


def starts_at_zero(text: str) -> bool:
    """Whether the sum of a product whose walk has one step does, or with products of what was
    rounded off its factors, of which those that are no numbers are left out."""
    known = {*re.findall(r"(%\w+) = (?:arith\.constant dense<0\.0+e\+00>|arith\.select)", text)}
    dots = re.findall(r"(%\w+) = tt\.dot %\w+, %\w+, (%\w+)", text)
    made = {name for name, _ in dots}
    return bool(dots) and all(start in known | made for _, start in dots)


def main() -> None:
    """Command line: see the module's docstring."""
    n = 0
    with tempfile.TemporaryDirectory() as folder:
        for fn, shapes, dtype in watched("programs", PROGRAMS):
            found = {
                job.name: orders(in_tritons_language(job, Path(folder)))
                for job in jobs(fn, shapes, dtype)
            }
            case = f"{fn.__name__} of {shapes} in {dtype}"
            assert any(found.values()), f"{case}: no sums"
            for name, sums in found.items():
                assert all(length == 2 for _, length in sums), f"{case}: {name}: {sums}"
            n += sum(map(len, found.values()))
        for dtype in (HALF, torch.float32):
            (job,) = jobs(layer, ((7, 24), (70, 24), (70,)), dtype)
            text = in_tritons_language(job, Path(folder))
            assert starts_at_zero(text), f"a bias is what a sum in {dtype} starts with"
    print(f"{n} sums of two")


if __name__ == "__main__":
    main()
