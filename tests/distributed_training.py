"""Training on several ranks against eager: losses of 20 steps, by each rank as in
`tests/distributed_programs.py`; a last argument "nccl" makes it GPUs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from plait.capture.backend import plait_backend

STEPS = 20
WIDTH = 16
Step = Callable[[Tensor], Tensor]


def device() -> str:
    """The device of this rank: a GPU with NCCL, else the CPU."""
    return f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else "cpu"


class Block(nn.Module):
    """A layer norm and two products with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net() -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device())


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend=plait_backend, options={"strict": True, **options})


def losses(
    model: nn.Module, fn: Step, sizes: tuple[int, ...] = (4,), accumulate: int = 1
) -> Tensor:
    """The losses of STEPS steps. sizes: of the batches, in turn. accumulate: batches a step, whose
    gradients meet at the last."""
    # torch 2.11 takes no list of tensors of which only some are distributed.
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    torch.manual_seed(dist.get_rank() + 1)
    found = []
    for k in range(STEPS):
        for part in range(accumulate):
            last = part == accumulate - 1
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                x = torch.randn(sizes[k % len(sizes)], WIDTH, device=device())
                loss = fn(x).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().float())
    return torch.stack(found)


def same_losses(
    build: Callable[[], nn.Module],
    compile_it: Callable[[nn.Module], Step] = compiled,
    rtol: float = 1e-4,
    **how: Any,
) -> None:
    """Losses of the compiled model are eager's."""
    torch._dynamo.reset()
    eager, model = build(), build()
    want = losses(eager, eager, **how)
    got = losses(model, compile_it(model), **how)
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5)


# --------------------------------------------------------------------------------------------- DDP
class Routed(nn.Module):
    """A model of whose branches a call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.shape[0] == 4 else self.second(x)


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    ids = [dist.get_rank()] if device() != "cpu" else None
    return DistributedDataParallel(model, device_ids=ids, **options)


@contextmanager
def graph_splitting(on: bool) -> Iterator[None]:
    with torch._dynamo.config.patch(optimize_ddp=on):
        yield


def ddp() -> None:
    """Graph splitting with several buckets is in `tests/distributed_programs.py`."""

    def hooked() -> nn.Module:
        model = data_parallel(net(), static_graph=True)
        model.register_comm_hook(
            None, fp16_compress_hook if device() == "cpu" else bf16_compress_hook
        )
        return model

    with graph_splitting(False):
        same_losses(lambda: data_parallel(net()), sizes=(4, 6), accumulate=2)
    with graph_splitting(True):
        same_losses(lambda: data_parallel(Routed(), find_unused_parameters=True), sizes=(4, 6))
        same_losses(hooked, rtol=1e-2)


# ------------------------------------------------------------------------------------------- FSDP2
def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def compile_blocks(model: nn.Module) -> Step:
    for block in model.children():
        block.compile(backend=plait_backend, options={"strict": True})
    return model


def fsdp() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    same_losses(lambda: sharded(net()), sizes=(4, 6))
    same_losses(lambda: sharded(net(), mp_policy=half), compile_blocks, rtol=2e-2)


# ----------------------------------------------------------------------------- tensors in parallel
def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh(torch.device(device()).type, (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = net()
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


class Rows(nn.Module):
    """A block whose activations are sharded by rows outside of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def sequence_parallel() -> nn.Module:
    mesh = init_device_mesh(torch.device(device()).type, (dist.get_world_size(),))
    torch.manual_seed(0)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "norm": SequenceParallel(),
        "mlp": gather,
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(Rows().to(device()), mesh, plan)


def tensors() -> None:
    def rows(model: nn.Module) -> Step:
        fn = compiled(model)
        return lambda x: fn(x[None]).full_tensor()

    same_losses(tensor_parallel)
    torch._dynamo.reset()
    eager, model = sequence_parallel(), sequence_parallel()
    want = losses(eager, lambda x: eager(x[None]).full_tensor())
    torch.testing.assert_close(losses(model, rows(model)), want, rtol=1e-4, atol=1e-5)


def main(rank: int, processes: int, file: str, backend: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=processes)
    for case in (ddp, fsdp, tensors):
        case()
        dist.barrier()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *(sys.argv[4:] or ["gloo"]))
