"""A piece: operators cut out of a graph, with what they were given; and the script of one that can
be pasted: a function of torch's operators, arguments by seed, and a call of `check.py`.

Where numbers of a seed do not show what is to be shown, the script loads the values from a file
that lies beside it.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from plait.devices import facts_of
from plait.graph.edit import output_of
from plait.tools.faults.evaluate import Values

SEEDS = (0, 1, 2, None)
"""Of arguments, in the order in which they are tried; None: the values themselves."""
WRONG = "wrong_number(fn, *args"
MOST_NUMBERS = 64
"""Of a tensor that is written out."""


@dataclass(frozen=True)
class Piece:
    """A graph of operators without constants, and arguments for it."""

    module: GraphModule
    given: tuple[Any, ...]

    @property
    def n_calls(self) -> int:
        """Its operators."""
        return sum(n.op == "call_function" for n in self.module.graph.nodes)

    @property
    def outputs(self) -> list[Node]:
        """The nodes that are returned."""
        return output_of(self.module.graph).all_input_nodes

    def values(self) -> Values:
        """Of its nodes, by eager."""
        names = self.module.graph.find_nodes(op="placeholder")
        return Values(self.module, dict(zip(names, self.given, strict=True)))


def piece(module: GraphModule, given: Sequence[Any]) -> Piece:
    """A graph with its constants as arguments; what it writes to arguments is a result."""
    constants = module.graph.find_nodes(op="get_attr")
    held = {n: getattr(module, str(n.target)) for n in constants}
    held |= zip(module.graph.find_nodes(op="placeholder"), given, strict=True)
    writes = [n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    written = [n.args[1] for n in writes if isinstance(n.args[1], Node)]
    outs = [n for n in output_of(module.graph).all_input_nodes if n not in writes]
    return cut_out(module, held, [*outs, *written])


def cut_out(module: GraphModule, held: Mapping[Node, Any], outs: Iterable[Node]) -> Piece:
    """The graph from values that are held to some nodes."""
    outs = [n for n in dict.fromkeys(outs) if n not in held]
    graph = Graph()
    env: dict[Node, Node] = {}
    needed = Values(module, held).needed(outs)
    for n in needed:
        if n in held:
            env[n] = graph.placeholder(n.name)
    for n in needed:
        if n not in held:
            env[n] = graph.node_copy(n, env.__getitem__)
    graph.output(tuple(env[n] for n in outs))
    return Piece(GraphModule(module, graph), tuple(held[n] for n in needed if n in held))


# ------------------------------------------------------------------------------------------ scripts
class NoText(Exception):
    """What no script can hold."""


@dataclass(frozen=True)
class Pasted:
    """A script: its text, and the function and arguments that it makes."""

    text: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def paste(
    p: Piece, options: Mapping[str, Any], seed: int | None, folder: Path, check: str = WRONG
) -> Pasted:
    """The script of a piece. seed: of arguments like those of the piece; None: its own, large ones
    from a file in the folder. check: what is called in plait.tools.faults.check; "": fn is only
    called. Raises NoText."""
    names = [n.name for n in p.module.graph.find_nodes(op="placeholder")]
    if seed is None:
        lines = _saved(names, p.given, folder)
    else:
        made = [f"{n} = {like(x)}" for n, x in zip(names, p.given, strict=True)]
        lines = [f"torch.manual_seed({seed})", *made]
    args = f"args = ({', '.join(names)}{',' if len(names) == 1 else ''})"
    head = ["import torch", *["", "from plait.tools.faults import check"] * bool(check), "", ""]
    text = "\n".join([*head, function_text(p.module), "", "", *lines, args, ""])
    scope: dict[str, Any] = {}
    exec(compile(text, "<pasted>", "exec"), scope)
    end = f"raise SystemExit(check.{check}, options={dict(options)!r}))\n"
    if not check:
        end = f'print(torch.compile(fn, backend="plait", options={dict(options)!r})(*args))\n'
    return Pasted(text + end, scope["fn"], scope["args"])


def function_text(module: GraphModule) -> str:
    """The graph as a function `fn`. Raises NoText."""
    lines, names = [], []
    for n in module.graph.nodes:
        match n.op:
            case "placeholder":
                names.append(n.name)
            case "call_function":
                lines.append(f"    {n.name} = {_call(n)}")
            case "output":
                lines.append(f"    return {_text(n.args[0])}")
            case _:
                raise NoText(f"{n.op} of {n.target}")
    return "\n".join([f"def fn({', '.join(names)}):", *lines])


def _call(n: Node) -> str:
    if n.target is operator.getitem:
        return f"{_text(n.args[0])}[{_text(n.args[1])}]"
    if isinstance(n.target, OpOverload):
        name = f"torch.ops.{n.target}"
    elif getattr(math, getattr(n.target, "__name__", ""), None) is n.target:
        raise NoText(f"a function of sizes, {n.target}")
    else:
        raise NoText(f"a call of {n.target}")
    words = [*map(_text, n.args), *(f"{k}={_text(v)}" for k, v in n.kwargs.items())]
    return f"{name}({', '.join(words)})"


def _text(x: Any) -> str:
    match x:
        case Node():
            return x.name
        case float() if not math.isfinite(x):
            return f'float("{x}")'
        case bool() | int() | float() | str() | None | complex():
            return repr(x)
        case torch.device():
            return f'torch.device("{x}")'
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(x)
        case tuple():
            return f"({', '.join(map(_text, x))}{',' if len(x) == 1 else ''})"
        case list():
            return f"[{', '.join(map(_text, x))}]"
    raise NoText(f"an argument of type {type(x).__name__}")


# --------------------------------------------------------------------------------------- arguments
def like(x: Any) -> str:
    """An expression for an argument like x, by torch's generator."""
    if not isinstance(x, Tensor):
        return repr(x)
    if x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
        raise NoText(f"a tensor of type {type(x).__name__}")
    size, place = tuple(x.shape), "" if facts_of(x.device).is_host else f', device="{x.device}"'
    dense = x.is_contiguous()
    n = 1 + sum((s - 1) * d for s, d in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    shape = size if dense else (n,)
    text = _numbers(x, shape, place)
    return text if dense else f"({text}).as_strided({size}, {tuple(x.stride())})"


def _numbers(x: Tensor, shape: tuple[int, ...], place: str) -> str:
    if x.dtype == torch.bool:
        return f"torch.rand({shape}{place}) < 0.5"
    if not x.is_floating_point() and not x.is_complex():
        low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
        return f"torch.randint({low}, {high + 1}, {shape}, dtype={x.dtype}{place})"
    made = f"torch.randn({shape}, dtype={x.dtype}{place})"
    finite = x.detach()[x.detach().isfinite()] if x.numel() else x
    if x.is_complex() or not finite.numel():
        return made
    size = float(finite.double().square().mean().sqrt())
    scale = 0.0 if not size else float(f"{size:.1g}")
    made = made if 0.3 <= size <= 3 else f"{made} * {scale}"
    positive = finite.numel() >= 8 and bool((finite >= 0).all())  # of few it may be chance
    return f"({made}).abs()" if positive else made


def _saved(names: Sequence[str], given: Sequence[Any], folder: Path) -> list[str]:
    """Lines that make exactly these arguments."""
    lines, kept = [], {}
    for name, x in zip(names, given, strict=True):
        if not isinstance(x, Tensor):
            lines.append(f"{name} = {x!r}")
        elif x.numel() <= MOST_NUMBERS and x.is_contiguous() and facts_of(x.device).is_host:
            numbers = str(x.tolist()).replace("inf", "float('inf')").replace("nan", "float('nan')")
            lines.append(f"{name} = torch.tensor({numbers}, dtype={x.dtype})")
        else:
            kept[name] = x.detach()
            lines.append(f'{name} = saved["{name}"]')
    if not kept:
        return lines
    digest = hashlib.sha256(b"".join(x.cpu().contiguous().view(-1).view(torch.uint8).numpy()
                            .tobytes() for x in kept.values())).hexdigest()  # fmt: skip
    file = folder.absolute() / f"arguments_{digest[:8]}.pt"
    torch.save(kept, file)
    return [f'saved = torch.load("{file}")', *lines]
