"""Random PyTorch functions as source text: what the graph fuzzer compiles, and what its repro prints.

`generate(seed)` gives a self-contained function `f(x, y, z)` over float tensors and `inputs(dtype, device)` that makes
them; every statement is one op whose result shape is tracked here, so that all programs are valid. A failure prints a
program to paste into a file and run from the source tree; `python -m tests.fuzz_graphs SEED...` looks for failures.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
UNARY = (
    "torch.relu({})", "torch.tanh({})", "torch.sigmoid({})", "torch.exp(-{}.abs())", "{} * 0.5", "{}.abs() + 1",
    "torch.sin({})", "F.gelu({})", "F.silu({})", "-{}", "{}.clamp(-1, 1)", "{}.to(torch.float64).to({}.dtype)",
    "{}.to(torch.bfloat16).to({}.dtype)", "torch.where({0} > 0, {0}, {0} * 0.1)", "({0} > 0.3).to({0}.dtype)",
    "{}.contiguous()",
)  # fmt: skip
BINARY = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "torch.maximum({}, {})",
    "{} / ({}.abs() + 1)",
    "torch.where({0} > {1}, {0}, {1})",
)


@dataclass
class Program:
    seed: int
    lines: list[str] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def source(self) -> str:
        """A module with f and inputs."""
        args = ", ".join(n for n in self.shapes if n in "xyz")
        body = "\n".join(f"    {line}" for line in self.lines)
        made = "\n".join(f"        {line}.to(device, dtype)," for line in self._inputs())
        return f"""\
import torch
from torch.nn import functional as F


def f({args}):
{body}


def inputs(dtype, device):
    gen = torch.Generator().manual_seed({self.seed})
    return [
{made}
    ]
"""

    def _inputs(self) -> list[str]:
        rng = random.Random(self.seed)
        out = []
        for n, shape in self.shapes.items():
            if n in "xyz":
                if len(shape) >= 2 and rng.random() < 0.3:  # an input that is a transposed view
                    flipped = (*shape[:-2], shape[-1], shape[-2])
                    out.append(f"torch.randn({flipped}, generator=gen).transpose(-1, -2)")
                else:
                    out.append(f"torch.randn({shape}, generator=gen)")
        return out

    def repro(self, dynamic: bool, backward: bool, device: str) -> str:
        """The module, and the call that compares plait with eager."""
        call = f"check_function(f, inputs, dynamic={dynamic}, backward={backward}, device={device!r})"
        head = "# Save as repro.py in the root of the source tree, then: python repro.py"
        return f"{head}\n{self.source()}\n\nfrom tests.fuzz_graphs import check_function\n\n{call}\n"


def generate(seed: int) -> Program:
    """A random program of 4 to 14 ops."""
    rng = random.Random(seed)
    p = Program(seed)
    dims = [rng.choice((1, 2, 3, 5, 8, 16, 17)) for _ in range(3)]
    for n in "xyz"[: rng.randint(1, 3)]:
        p.shapes[n] = tuple(rng.choice((d, d, d, 1)) for d in dims[rng.randint(0, 2) :])
    for k in range(rng.randint(4, 14)):
        _step(p, rng, f"t{k}")
    names = [n for n in p.shapes if n.startswith("t")]
    keep = sorted({names[-1], *rng.sample(names, min(2, len(names)))})
    p.lines.append(f"return {', '.join(keep)},")
    return p


def _step(p: Program, rng: random.Random, out: str) -> None:
    a = rng.choice(list(p.shapes)[-6:])
    s = p.shapes[a]
    kind = rng.random()
    if kind < 0.3:
        text, shape = rng.choice(UNARY).replace("{}", "{0}").format(a), s
    elif kind < 0.5:
        text, shape = _binary(p, rng, a)
    elif kind < 0.7:
        text, shape = _reduction(rng, a, s)
    elif kind < 0.92:
        text, shape = _view(rng, a, s)
    else:
        text, shape = _structured(rng, a, s)
    p.lines.append(f"{out} = {text}")
    p.shapes[out] = shape


def _binary(p: Program, rng: random.Random, a: str) -> tuple[str, Shape]:
    fits = []
    for b, sb in p.shapes.items():
        try:
            fits.append((b, tuple(torch.broadcast_shapes(p.shapes[a], sb))))
        except RuntimeError:
            continue
    fits = [f for f in fits if torch.Size(f[1]).numel() <= 40000]
    b, shape = rng.choice(fits)
    text = rng.choice(BINARY)
    if "{0}" not in text:
        first, _, rest = text.partition("{}")
        text = first + "{0}" + rest.replace("{}", "{1}")
    return text.format(a, b), shape


def _reduction(rng: random.Random, a: str, s: Shape) -> tuple[str, Shape]:
    if not s:
        return f"{a}.sum()", ()
    d = rng.randrange(len(s))
    op = rng.choice(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "softmax",
            "log_softmax",
            "var",
            "logsumexp",
            "layer_norm",
            "all",
            "cumsum",
            "argmax",
        )
    )
    if op in ("softmax", "log_softmax"):
        return f"torch.{op}({a}, {d})", s
    if op == "layer_norm":
        return f"F.layer_norm({a}, ({s[-1]},))", s
    if op == "cumsum":
        return f"{a}.cumsum({d})", s
    if op == "argmax":
        return f"{a}.argmax({d}).to({a}.dtype)", s[:d] + s[d + 1 :]
    keep = rng.random() < 0.5
    shape = s[:d] + ((1,) if keep else ()) + s[d + 1 :]
    if op == "var":
        return f"{a}.var({d}, correction=0, keepdim={keep})", shape
    if op == "all":
        return f"({a} > -1).all({d}, keepdim={keep}).to({a}.dtype)", shape
    return f"{a}.{op}({d}, keepdim={keep})", shape


def _view(rng: random.Random, a: str, s: Shape) -> tuple[str, Shape]:
    n = len(s)
    choice = rng.randrange(9)
    if choice == 0 and n >= 2:
        i, j = rng.sample(range(n), 2)
        t = list(s)
        t[i], t[j] = t[j], t[i]
        return f"{a}.transpose({i}, {j})", tuple(t)
    if choice == 1:
        return f"{a}.reshape(-1)", (torch.Size(s).numel(),)
    if choice == 2 and n >= 2:
        return f"{a}.flatten(0, 1)", (s[0] * s[1], *s[2:])
    if choice == 3:
        return f"{a}.unsqueeze(0)", (1, *s)
    if choice == 4 and n and s[0] > 1:
        return f"{a}[1:]", (s[0] - 1, *s[1:])
    if choice == 5 and n:
        return f"{a}[..., ::2]", (*s[:-1], (s[-1] + 1) // 2)
    if choice == 6 and n:
        return f"{a}.select(0, {rng.randrange(s[0])})", s[1:]
    if choice == 7 and n:
        return f"{a}.flip({n - 1})", s
    if choice == 8 and n and s[-1] % 2 == 0:
        return f"{a}.unflatten(-1, (2, {s[-1] // 2}))", (*s[:-1], 2, s[-1] // 2)
    return f"{a}.unsqueeze(-1)", (*s, 1)


def _structured(rng: random.Random, a: str, s: Shape) -> tuple[str, Shape]:
    n = len(s)
    choice = rng.randrange(6)
    if choice == 0 and n:
        d = rng.randrange(n)
        return f"torch.cat([{a}, {a} * 2], {d})", (*s[:d], 2 * s[d], *s[d + 1 :])
    if choice == 1 and n:
        return f"F.pad({a}, (1, 2))", (*s[:-1], s[-1] + 3)
    if choice == 2 and n >= 2:
        return f"{a} @ {a}.transpose(-1, -2)", (*s[:-1], s[-2])
    if choice == 3 and n:
        return f"{a}.index_select(0, torch.arange({s[0]}, device={a}.device).flip(0))", s
    if choice == 4 and n >= 2:
        return f"torch.tril({a})", s
    return f"torch.stack([{a}, -{a}])", (2, *s)


def check(p: Program, dynamic: bool = False, backward: bool = False, device: str = "cpu") -> None:
    """Compiles p and compares with eager. Raises AssertionError with a program to paste and run."""
    scope: dict[str, Any] = {}
    exec(compile(p.source(), f"<fuzz {p.seed}>", "exec"), scope)
    try:
        check_function(scope["f"], scope["inputs"], dynamic, backward, device)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {frame.filename}:{frame.lineno}: {str(error)[:1500]}"
        raise AssertionError(f"{what}\n\n{p.repro(dynamic, backward, device)}") from error


def check_function(
    f: Callable[..., tuple[Tensor, ...]],
    inputs: Callable[[torch.dtype, str], list[Tensor]],
    dynamic: bool,
    backward: bool,
    device: str,
) -> None:
    """Compiles f and compares with eager by distance from float64. Raises AssertionError where plait is further off."""
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="plait", dynamic=dynamic)
    xs, ys, zs = (inputs(dtype, device) for dtype in (torch.float32, torch.float32, torch.float64))
    if backward:
        for t in (*xs, *ys, *zs):
            t.requires_grad_()
    eager, got, truth = f(*xs), compiled(*ys), f(*zs)
    for k, (e, g, t) in enumerate(zip(eager, got, truth, strict=True)):
        _compare(e, g, t, f"output {k}")
    if backward and all(o.is_floating_point() for o in eager):
        for outs in (eager, got, truth):
            used = [o.sum() for o in outs if o.requires_grad]
            if not used:
                return
            sum(used).backward()
        for k, (e, g, t) in enumerate(zip(xs, ys, zs, strict=True)):
            if e.grad is None:
                assert g.grad is None, f"gradient {k} is none in eager"
            else:
                _compare(e.grad, g.grad, t.grad, f"gradient {k}")


def _compare(e: Tensor, g: Tensor, t: Tensor, what: str) -> None:
    assert g is not None and g.shape == e.shape and g.dtype == e.dtype, f"{what}\n{g}"
    strides = [(d, a, b) for d, a, b in zip(e.shape, g.stride(), e.stride(), strict=True) if d > 1 and e.numel()]
    assert all(a == b for _, a, b in strides), f"{what}\n(size, stride, stride of eager): {strides}"
    e, g, t = e.detach(), g.detach(), t.detach()
    same = (g == e) | (g.isnan() & e.isnan())
    if bool(same.all()):
        return
    dg, de = (g.double() - t.double()).abs(), (e.double() - t.double()).abs()
    # Where bfloat16 rounding or a comparison amplified a last bit, eager itself is as far off elsewhere.
    slack = 2e-5 * (1 + t.abs().double()) + 4 * float(de[de.isfinite()].max() if de.isfinite().any() else 0)
    bad = ~same & ~(dg <= 2 * de + slack)
    assert not bool(bad.any()), f"{what}\nplait {g[bad][:5]}\neager {e[bad][:5]}\nfloat64 {t[bad][:5]}"


if __name__ == "__main__":
    failures = 0
    seeds = [int(s) for s in sys.argv[1:]] or list(range(100))
    for seed in seeds:
        for backward in (False, True):
            try:
                check(generate(seed), dynamic=seed % 3 == 2, backward=backward)
            except AssertionError as error:
                failures += 1
                print(f"== seed {seed}: {error}\n")
    print(f"{len(seeds)} programs, {failures} failures")
