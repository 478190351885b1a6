"""Programs of several processes against eager, run by each: `python -m tests.distributed_programs
RANK PROCESSES FILE`.

They meet by a file, over gloo on the CPU, or with a last argument "nccl" on GPUs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import plait
from plait.capture.backend import plait_backend
from plait.wrapper.instructions import CallExtern
from plait.wrapper.program import CompileRecord, observers

WRAPPERS = ("native", "python", "cpp", "fx")


def compiled(fn: Callable[..., object], wrapper: str = "native") -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=plait_backend, options={"wrapper": wrapper, "strict": True})


def whole(x: object) -> object:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(got: object, want: object) -> None:
    assert type(got) is type(want)
    if isinstance(want, DTensor) and isinstance(got, DTensor):
        assert got.placements == want.placements and got.device_mesh == want.device_mesh
    torch.testing.assert_close(whole(got), whole(want))


def train(
    eager: nn.Module, model: nn.Module, fn: Callable[..., Tensor], batches: Sequence[Tensor]
) -> None:
    """Steps of both have equal losses, gradients and weights."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, model)]
    for x in batches:
        losses = [F.cross_entropy(f(x), x[:, 0].gt(0).long()) for f in (eager, fn)]
        same(losses[1].detach(), losses[0].detach())
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for p, q in zip(eager.parameters(), model.parameters(), strict=True):
            same(q.grad, p.grad)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        same(q.detach(), p.detach())


def ddp(rank: int, processes: int) -> None:
    """The model is large enough for several buckets, between which Dynamo splits its graph."""

    def build() -> DistributedDataParallel:
        torch.manual_seed(0)
        blocks = [m for _ in range(5) for m in (nn.Linear(400, 400), nn.GELU())]
        return DistributedDataParallel(nn.Sequential(*blocks, nn.Linear(400, 5)), bucket_cap_mb=1)

    eager, model = build(), build()
    torch.manual_seed(rank + 1)
    train(eager, model, compiled(model), [torch.randn(6, 400) for _ in range(3)])


def dtensor(rank: int, processes: int) -> None:
    """Operators on distributed tensors, whose graphs are given, and give back, the mesh."""
    mesh = init_device_mesh(torch.get_default_device().type, (processes,))
    torch.manual_seed(0)
    d = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(6, 4), mesh, [Shard(1)])
    programs: list[Callable[[DTensor], object]] = [
        lambda d: d + 1,
        lambda d: d.redistribute(mesh, [Replicate()]) * 2,
        lambda d: d @ w,
        lambda d: d.to_local().sin(),
        lambda d: DTensor.from_local(d.to_local() * 2, mesh, [Shard(0)], run_check=False),
        lambda d: (d * 2).full_tensor(),
        lambda d: d.softmax(0),
        lambda d: d.sum(),
        lambda d: d.add_(1),
    ]
    for wrapper in WRAPPERS if processes == 1 else WRAPPERS[:1]:
        for fn in programs:
            run = compiled(fn, wrapper)
            for _ in range(2):
                mine, theirs = d.clone(), d.clone()
                same(run(mine), fn(theirs))
                same(mine, theirs)


def tensor_parallel(rank: int, processes: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (processes,))

    def build() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
        return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    eager, model = build(), build()
    train(eager, model, compiled(model), [torch.randn(5, 8) for _ in range(3)])


def reduced(x: Tensor) -> list[Tensor]:
    """In place, of an input and of what the program made; of odd strides; a result that is used
    no more."""
    y = x * 2
    dist.all_reduce(y)
    dist.all_reduce(x)
    fc.all_reduce(x.exp(), "max", dist.group.WORLD).sin()
    return [y + 1, fc.all_reduce(x.t() * 3, "max", dist.group.WORLD)]


def gathered(x: Tensor) -> list[Tensor]:
    """Gathered and scattered, written to while a collective reads it; several at once."""
    world = dist.group.WORLD
    whole = fc.all_gather_tensor(x.sin(), 0, world)
    x.add_(1)
    part = fc.reduce_scatter_tensor(x * 2, "sum", 0, world)
    some = fc.all_reduce_coalesced([x * 2, x + 1], "sum", world)
    return [whole * 2, part.cos(), *(t + 1 for t in some)]


def exchanged(x: Tensor) -> list[Tensor]:
    world = dist.group.WORLD
    other = fc.all_to_all_single(x * 2, None, None, world)
    return [other.sin(), fc.broadcast(x * 2, 0, world) + 1]


def written(x: Tensor) -> list[Tensor]:
    """Slices that are reduced in place, rows of several numbers, an operation that overlaps, a
    branch with a collective in it."""
    y, n = x * 2, x.shape[0]
    dist.all_reduce(y[:2])
    dist.all_reduce(y[2:])
    first = dist.get_rank() == 0
    rows = [n - 1, n - 1] if first else [1, 1]
    some = fc.all_to_all_single(x.sin(), rows, [n - 1, 1], dist.group.WORLD)
    z = x.cos()
    work = dist.all_reduce(z, async_op=True)
    meanwhile = x.exp()
    work.wait()
    total = fc.all_reduce(x.sum(), "sum", dist.group.WORLD)
    taken = torch.cond(
        total > 0,
        lambda v: fc.all_reduce(v * 2, "sum", dist.group.WORLD),
        lambda v: fc.all_reduce(v * 3, "sum", dist.group.WORLD),
        (x,),
    )
    return [y + 1, some * 2, z + meanwhile, taken]


class Reduced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = fc.all_reduce(x.exp() * 2, "sum", dist.group.WORLD)
        return made + 1


def packaged(rank: int) -> None:
    """A package holds collectives."""
    x = torch.randn(4, 3)
    with tempfile.TemporaryDirectory() as folder:
        plait.package(Reduced(), f"{folder}/model.plait", (x,))
        got = plait.load(f"{folder}/model.plait")(x)
    torch.testing.assert_close(got, Reduced()(x) + 0)


def differentiated(x: Tensor) -> list[Tensor]:
    world = dist.group.WORLD
    whole = fc.all_gather_tensor_autograd(x * 2, 0, world)
    return [whole.sin(), fc.reduce_scatter_tensor_autograd(whole.cos(), "sum", 0, world)]


def collectives(rank: int, processes: int) -> None:
    """Collectives in a graph, of varying sizes, in every target, against eager."""
    if processes == 1:
        return
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    for wrapper in WRAPPERS:
        for fn in (reduced, gathered, exchanged)[: 3 if wrapper == "native" else 1]:
            check(compiled(fn, wrapper), fn, rank)
    # Where a wait breaks the graph, there is no strictness to ask for.
    check(torch.compile(written, backend=plait_backend), written, rank)
    if torch.get_default_device().type == "cpu":
        packaged(rank)
    check(compiled(differentiated), differentiated, rank, grad=True)
    observers.reset(token)
    calls = [i.op for r in made for i in r.wrapper.body if isinstance(i, CallExtern)]
    assert calls.count("_c10d_functional::all_reduce_") >= 2 * len(WRAPPERS), calls
    assert not any(r.fallback_reasons for r in made), made


def check(
    run: Callable[..., object], fn: Callable[[Tensor], object], rank: int, grad: bool = False
) -> None:
    for n in (4, 4, 6):
        torch.manual_seed(10 * rank + n)
        x = torch.randn(n, 3)
        mine, theirs = (x.clone().requires_grad_(grad) for _ in range(2))
        got, want = run(mine), fn(theirs)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine, theirs)
        if grad:
            for made in (got, want):
                sum(t.square().sum() for t in made).backward()
            torch.testing.assert_close(mine.grad, theirs.grad)


if __name__ == "__main__":
    rank, processes, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if sys.argv[4:] == ["nccl"]:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group(
        sys.argv[4] if sys.argv[4:] else "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=processes,
    )
    for case in (collectives, ddp, dtensor, tensor_parallel):
        case(rank, processes)
        dist.barrier()
    dist.destroy_process_group()
    print("passed")
