"""A toy accelerator that runs what plait compiles: `torch.compile(model, backend=Toy())`.

plait captures the model, fuses it into kernels and plans the program; `Toy.compile_graph` gets that
as an FX graph, forward and backward alike, and turns every node into a command of an imaginary
machine with numbered registers. The machine carries the commands out on the CPU, frees registers
after their last use, and counts what real hardware would be judged by: kernels launched, bytes
moved, memory held. Results are checked against eager, by their distance from float64. Exits with 1
if one is wrong. docs/fx.md says what nodes there are.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from plait import FxCompiler
from plait.runtime.generated import with_layout

aten, ours = torch.ops.aten, torch.ops.plait

# What the machine's units do. Other operators of PyTorch are calls of the machine's library.
UNITS: dict[Any, str] = {
    torch.empty_strided: "memory",
    aten.as_strided.default: "view",
    aten.view.dtype: "view",
    operator.getitem: "view",
    ours.launch.default: "kernel",
    ours.require_layout.default: "check",
    ours.require_aligned.default: "check",
    ours.require_finite.default: "check",
    with_layout: "check",
    aten._assert_scalar.default: "check",
    ours.bump_version.default: "host",
    **dict.fromkeys(
        (aten.sym_size.int, aten.sym_stride.int, aten.sym_storage_offset.default), "size"
    ),
    aten.item.default: "size",
    **dict.fromkeys((operator.add, operator.mul, operator.floordiv, operator.mod), "size"),
    **dict.fromkeys((operator.eq, operator.ne, operator.lt, operator.le), "size"),
    **dict.fromkeys((torch.sym_min, torch.sym_max, torch.sym_ite, torch.sym_int), "size"),
}


@dataclass(frozen=True)
class Register:
    """A place of the machine that a command reads or writes."""

    number: int

    def __repr__(self) -> str:
        return f"r{self.number}"


@dataclass(frozen=True)
class Command:
    """unit: who carries it out. what: the kernel or operation. args: constants and registers. dead:
    registers that nobody reads afterwards."""

    unit: str
    what: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Register
    dead: tuple[Register, ...]

    def __str__(self) -> str:
        read = [r for r in tree_leaves((self.args, self.kwargs)) if isinstance(r, Register)]
        dead = f"   ; {', '.join(map(str, self.dead))} dead" if self.dead else ""
        return f"{self.unit:7} {self.result!s:4} <- {self.what} {', '.join(map(str, read))}{dead}"


@dataclass
class Machine:
    """Runs commands, and counts. most_held: bytes of all that was in registers at once, inputs
    included."""

    ran: Counter[str] = field(default_factory=Counter)
    bytes_moved: int = 0
    most_held: int = 0

    def run(self, commands: list[Command], registers: dict[Register, Any]) -> None:
        """Carries the commands out; results are in registers that no command calls dead."""
        for c in commands:
            args, kwargs = filled((c.args, c.kwargs), registers)
            registers[c.result] = c.function(*args, **kwargs)
            self.ran[c.unit] += 1
            if c.unit in ("kernel", "library"):
                self.bytes_moved += sum(memory([args, kwargs, registers[c.result]]).values())
            self.most_held = max(self.most_held, sum(memory(registers.values()).values()))
            for r in c.dead:
                del registers[r]


def memory(values: Any) -> dict[int, int]:
    """Address and bytes of the memory that values lie in."""
    storages = [t.untyped_storage() for t in tree_leaves(list(values)) if isinstance(t, Tensor)]
    return {s.data_ptr(): s.nbytes() for s in storages}


def filled(value: Any, registers: dict[Register, Any]) -> Any:
    """value with what is in the registers in place of their names."""
    if isinstance(value, Register):
        return registers[value]
    if isinstance(value, (list, tuple)):
        return type(value)(filled(v, registers) for v in value)
    if isinstance(value, dict):
        return {k: filled(v, registers) for k, v in value.items()}
    return value


class Toy(FxCompiler):
    """The compiler: all that plait asks for is `compile_graph`."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.listings: dict[str, list[Command]] = {}

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        """Commands for a graph, and the function that has the machine run them."""
        nodes = list(gm.graph.nodes)
        (output,) = (n for n in nodes if n.op == "output")
        number = {n: Register(k) for k, n in enumerate(nodes)}
        inputs = [number[n] for n in nodes if n.op == "placeholder"]
        constants = {number[n]: getattr(gm, n.target) for n in nodes if n.op == "get_attr"}
        last = {
            n: user for user in nodes for n in (user, *user.all_input_nodes)
        }  # who reads n last: the last to write here
        commands = [
            command(gm, n, number, tuple(number[d] for d, user in last.items() if user is n))
            for n in nodes
            if n.op in ("call_function", "call_module")
        ]
        results = map_arg(output.args[0], number.__getitem__)
        self.listings[type(gm).__name__] = commands

        def run(args: list[Any]) -> list[Any]:
            registers = {**constants, **dict(zip(inputs, args, strict=True))}
            args.clear()
            self.machine.run(commands, registers)
            return [filled(r, registers) for r in results]

        # Inputs come in a list and may die early.
        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def command(
    gm: GraphModule, node: Node, number: dict[Node, Register], dead: tuple[Register, ...]
) -> Command:
    """One node as a command."""
    args, kwargs = map_arg((node.args, node.kwargs), number.__getitem__)
    target: Any = node.target
    if node.op == "call_module":
        unit, what, target = "host", node.target, gm.get_submodule(str(target))
    elif target in UNITS:
        unit, what = UNITS[target], getattr(target, "__name__", str(target))
    elif isinstance(target, torch._ops.OpOverload):
        unit, what = "library", str(target)
    else:
        raise NotImplementedError(f"the machine has no unit for {node.format_node()}")
    if unit == "kernel":
        what, args = str(args[1]), tuple(args)
    return Command(unit, str(what), target, tuple(args), dict(kwargs), number[node], dead)


class Model(nn.Module):
    """Attention and a small network on what it gives, with a running mean as a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.net = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return self.net(x - self.mean) + x


def is_wrong(got: Tensor, eager: Tensor, truth: Tensor) -> bool:
    """Whether got is more than twice as far from float64 as eager is, and more than a rounding."""
    got, eager, truth = (t.detach().double() for t in (got, eager, truth))
    allowed = 2 * (eager - truth).abs().max() + 1e-6 * truth.abs().max()
    return bool((got - truth).abs().max() > allowed)


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """What a training step makes: the result, gradients, buffers."""
    model.zero_grad()
    out = run(x)
    out.square().mean().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def main() -> int:
    """Trains and infers on the machine and prints what it did. Returns how many results were
    wrong."""
    torch.manual_seed(0)
    eager, toy = Model(32), Toy()
    exact, twin = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    compiled = torch.compile(twin, backend=toy, dynamic=True)
    wrong = 0
    for batch in (4, 6):
        x = torch.randn(batch, 16, 32)
        runs = (eager, eager, x), (twin, compiled, x), (exact, exact, x.double())
        for e, g, t in zip(*(step(m, run, data) for m, run, data in runs), strict=True):
            wrong += is_wrong(g, e, t)
    x = torch.randn(3, 16, 32)
    with torch.no_grad():
        for m in (eager, exact, twin):
            m.eval()
        wrong += is_wrong(compiled(x), eager(x), exact(x.double()))

    for name, commands in toy.listings.items():
        print(f"{name}: {len(commands)} commands")
    print("\n".join(f"    {c}" for c in commands if c.unit != "size"))
    m = toy.machine
    print(f"ran {', '.join(f'{n} {unit}' for unit, n in m.ran.most_common())}")
    print(f"moved {m.bytes_moved / 1e6:.2f} MB, held {m.most_held / 1e6:.2f} MB at most")
    print(
        "every result is as close to float64 as eager's"
        if not wrong
        else f"{wrong} results are wrong"
    )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
