"""`python -m tests.fuzz.rows --count N`: random programs in which no row of a batch meets another,
compiled under `batch_invariant` for batches of several sizes: a row has to have the same bits in
all of them.

A program is text, so that a failure can be pasted. Statements act on dimensions behind the first
one. Inputs lie in memory in any order of these; weights are the same for all rows, some of the
shape of a row, which in a batch of one look like any other input.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.log import watched

ALL, COUNTS = 7, (1, 2, 5)
MOST = 40_000
"""Elements of a row."""
UNARY = (
    "{}.exp().log1p()", "{}.tanh()", "{}.sigmoid()", "F.gelu({})", "F.silu({})", "{} * 1.25 - 0.5",
    "{}.square() * 0.5", "{}.abs().sqrt()", "torch.where({0} > 0.25, {0}, -{0})", "{}.sin()",
    "{}.clamp(-1, 1)", "{}.roll(1, -1)", "{}.flip(-1)", "{}.contiguous()", "{}.clone()",
)  # fmt: skip
ALONG = (
    "{}.softmax({})", "{}.log_softmax({})", "{0} - {0}.mean({1}, True)", "F.normalize({}, dim={})",
    "{0} / (1 + {0}.std({1}, keepdim=True))", "{0} + {0}.amax({1}, True)", "{}.cumsum({})",
    "{0} * {0}.sum({1}, True)", "{}.sort({}).values", "{0}.gather({1}, {0}.argsort({1}))",
    "{0} - {0}.logsumexp({1}, True)", "{0} + {0}.argmax({1}, True).to({0}.dtype)",
)  # fmt: skip
GONE = (
    "{}.sum({})", "{}.mean({})", "{}.var({})", "{}.logsumexp({})", "{}.amin({})", "{}.norm(dim={})",
)  # fmt: skip
DTYPES = ("float32", "float32", "bfloat16", "float16")


@dataclass
class Made:
    """A program. inputs, weights: shapes, dtypes and orders in memory of dimensions. exact: also
    where the number of rows varies."""

    seed: int
    inputs: list[tuple[tuple[int, ...], str, tuple[int, ...]]] = field(default_factory=list)
    weights: list[tuple[tuple[int, ...], str, tuple[int, ...]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    varies: bool = True

    @property
    def text(self) -> str:
        """Of a function."""
        names = [f"x{k}" for k in range(len(self.inputs))]
        names += [f"w{k}" for k in range(len(self.weights))]
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def fn({', '.join(names)}):\n{body}    return {', '.join(self.results)},\n"

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs with ALL rows, and weights."""
        torch.manual_seed(self.seed)
        return [_made((ALL, *s), d, (0, *(k + 1 for k in o))) for s, d, o in self.inputs], [
            _made(s, d, o) / 4 for s, d, o in self.weights
        ]


def _made(shape: Sequence[int], dtype: str, order: Sequence[int]) -> Tensor:
    x = torch.randn([shape[k] for k in order]).to(getattr(torch, dtype))
    return x.permute([order.index(k) for k in range(len(order))])


class Maker:
    """Writes a program, and runs it as it grows, on one row and on two."""

    def __init__(self, seed: int) -> None:
        self.rng, self.made = random.Random(seed), Made(seed)
        self.values: dict[str, Tensor] = {}  # of two rows
        self.inputs: list[str] = []

    def generate(self) -> Made:
        for _ in range(self.rng.choice((1, 1, 2))):
            self._input()
        for _ in range(self.rng.randint(3, 12)):
            self._statement()
        names = [n for n in self.values if n.startswith("v")] or self.inputs
        self.made.results = [names[-1], *self.rng.sample(names, min(len(names), 2))]
        return self.made

    # ---------------------------------------------------------------------------------- operands
    def _shape(self) -> tuple[int, ...]:
        sizes = (1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 65, 128, 300)
        while True:
            shape = tuple(self.rng.choice(sizes) for _ in range(self.rng.choice((1, 2, 2, 3, 3))))
            if torch.Size(shape).numel() <= MOST:
                return shape

    def _input(self) -> None:
        shape, dtype = self._shape(), self.rng.choice(DTYPES)
        order = self._order(len(shape))
        name = f"x{len(self.made.inputs)}"
        self.made.inputs.append((shape, dtype, order))
        self.inputs.append(name)
        self.values[name] = _made((2, *shape), dtype, (0, *(k + 1 for k in order)))

    def _order(self, n: int) -> tuple[int, ...]:
        order = list(range(n))
        if self.rng.random() < 0.5:
            self.rng.shuffle(order)
        return tuple(order)

    def _weight(self, shape: Sequence[int], dtype: str) -> str:
        name = f"w{len(self.made.weights)}"
        order = self._order(len(shape))
        self.made.weights.append((tuple(shape), dtype, order))
        self.values[name] = _made(shape, dtype, order) / 4
        return name

    def _add(self, text: str) -> bool:
        name = f"v{len(self.made.lines)}"
        space = {"torch": torch, "F": torch.nn.functional, **self.values}
        try:
            found = eval(text, space)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        n = found.numel() // 2
        if found.dim() < 2 or found.shape[0] != 2 or not 0 < n <= MOST:
            return False
        if not found.dtype.is_floating_point or not bool(found.isfinite().all()):
            return False
        self.made.lines.append(f"{name} = {text}")
        self.values[name] = found
        return True

    # -------------------------------------------------------------------------------- statements
    def _statement(self) -> None:
        named = [n for n in self.values if not n.startswith("w")]
        x = named[-1] if self.rng.random() < 0.75 else self.rng.choice(named)
        kinds = (
            self._unary, self._along, self._along, self._gone, self._view, self._view,
            self._weighted, self._residual, self._other, self._linear, self._linear, self._matmul,
            self._attention, self._image, self._cast, self._norm, self._norm,
        )  # fmt: skip
        while not self.rng.choice(kinds)(x):
            pass

    def _unary(self, x: str) -> bool:
        return self._add(self.rng.choice(UNARY).format(x))

    def _axis(self, x: str) -> int:
        return self.rng.randrange(1, self.values[x].dim())

    def _along(self, x: str) -> bool:
        return self._add(self.rng.choice(ALONG).format(x, self._axis(x)))

    def _gone(self, x: str) -> bool:
        return self.values[x].dim() > 2 and self._add(
            self.rng.choice(GONE).format(x, self._axis(x))
        )

    def _view(self, x: str) -> bool:
        v, a = self.values[x], self._axis(x)
        n, b = v.shape[a], self._axis(x)
        parts = [k for k in (2, 3, 4, 8) if n % k == 0 and n > k]
        ways = [f"{x}.transpose({a}, {b})", f"{x}.flatten({min(a, b)}, {max(a, b)})"]
        ways += [f"{x}.unsqueeze({a})", f"torch.cat([{x}, {x} * 2], {a})", f"{x}.movedim({a}, {b})"]
        if parts:
            k = self.rng.choice(parts)
            ways += [f"{x}.unflatten({a}, ({k}, {n // k}))", f"{x}.chunk({k}, {a})[{k - 1}]"]
            ways += [f"torch.mul(*{x}.chunk(2, {a}))"] if n % 2 == 0 else []
        if n > 2:
            ways += [f"{x}.narrow({a}, 1, {n - 2})", f"F.pad({x}.transpose({a}, -1), (1, 1))"]
        return v.dim() <= 5 and self._add(self.rng.choice(ways))

    def _weighted(self, x: str) -> bool:
        """With a weight that has the shape of a row, or of what is broadcast over rows."""
        shape = [1 if self.rng.random() < 0.2 else n for n in self.values[x].shape[1:]]
        shape = shape[self.rng.randrange(len(shape)) if self.rng.random() < 0.4 else 0 :]
        w = self._weight(shape, self.rng.choice(DTYPES))
        return self._add(f"{x} {self.rng.choice('+*-')} {w}")

    def _other(self, x: str) -> bool:
        v = self.values[x]
        same = [n for n, o in self.values.items() if n[0] != "w" and n != x and o.shape == v.shape]
        return bool(same) and self._add(f"{x} {self.rng.choice('+*-')} {self.rng.choice(same)}")

    def _linear(self, x: str) -> bool:
        v = self.values[x]
        dtype, k, n = str(v.dtype)[6:], v.shape[-1], self.rng.choice((1, 3, 8, 16, 40, 64, 200))
        w = self._weight((n, k), dtype)
        b = self._weight((n,), dtype) if self.rng.random() < 0.5 else "None"
        return self._add(f"F.linear({x}, {w}, {b})")

    def _residual(self, x: str) -> bool:
        """What a layer adds to its input; of one row that has as many elements as a bias."""
        v = self.values[x]
        dtype, k = str(v.dtype)[6:], v.shape[-1]
        if k > 128:
            return False
        w, u = self._weight((2 * k, k), dtype), self._weight((k, 2 * k), dtype)
        b = self._weight((k,), dtype) if self.rng.random() < 0.3 else "None"
        ways = (f"F.linear(F.gelu(F.linear({x}, {w})), {u}, {b})", f"({x} @ {w}.mT) @ {u}.mT")
        return self._add(f"{x} {self.rng.choice('+-')} {self.rng.choice(ways)}")

    def _matmul(self, x: str) -> bool:
        v = self.values[x]
        if v.dim() < 3:
            return False
        w = self._weight((v.shape[-2], self.rng.choice((1, 5, 16, 33))), str(v.dtype)[6:])
        return self._add(self.rng.choice((f"{x} @ {x}.mT", f"{x}.mT @ {x}", f"{x}.mT @ {w}")))

    def _attention(self, x: str) -> bool:
        v = self.values[x]
        if v.dim() not in (3, 4) or v.shape[-1] > 128 or v.shape[-1] % 2 != 0:
            return False
        q = x if v.dim() == 4 else f"{x}.unsqueeze(1)"
        how = self.rng.choice(("", ", is_causal=True", ", scale=0.25"))
        return self._add(f"F.scaled_dot_product_attention({q}, {q}.roll(1, -1), {q} * 0.5{how})")

    def _image(self, x: str) -> bool:
        v = self.values[x]
        d = v.dim() - 2
        if d not in (1, 2):
            return False
        way = self.rng.choice(("conv", "conv", "conv1", "max", "avg", "up"))
        if way.startswith("conv"):
            k = 1 if way == "conv1" else 3
            w = self._weight((self.rng.choice((1, 4, 16)), v.shape[1], *[k] * d), str(v.dtype)[6:])
            text = f"F.conv{d}d({x}, {w}, padding={k // 2})"
        else:
            texts = {
                "max": f"F.max_pool{d}d({x}, 2)", "avg": f"F.avg_pool{d}d({x}, 3, 1, 1)",
                "up": f"F.interpolate({x}, scale_factor=2, mode='{('linear', 'bilinear')[d - 1]}')",
            }  # fmt: skip
            text = texts[way]
        done = self._add(text)
        if done and way.startswith("conv"):
            self.made.varies = False  # a convolution of a batch that varies is one call: no promise
        return done

    def _norm(self, x: str) -> bool:
        v = self.values[x]
        n, dtype = v.shape[-1], str(v.dtype)[6:]
        w, b = self._weight((n,), dtype), self._weight((n,), dtype)
        ways = [f"F.layer_norm({x}, ({n},), {w}, {b})", f"F.rms_norm({x}, ({n},), {w})"]
        if v.dim() > 2 and v.shape[1] % 2 == 0 and v[0].numel() > 2:
            ways.append(f"F.group_norm({x}, 2)")
        return self._add(self.rng.choice(ways))

    def _cast(self, x: str) -> bool:
        return self._add(f"{x}.to(torch.{self.rng.choice(DTYPES)})")


def check(made: Made, device: str = "cpu") -> str:
    """In which batches rows have other bits than among all, or "" if in none."""
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(made.text, space)
    xs, ws = ([t.to(device) for t in some] for some in made.tensors())
    options = {"batch_invariant": True, "strict": True}

    def run(rows: slice, varies: bool = False) -> tuple[Tensor, ...]:
        torch._dynamo.reset()
        some = [_rows(x, rows) for x in xs]
        for x in some if varies else ():
            torch._dynamo.mark_dynamic(x, 0)
        fn = torch.compile(
            space["fn"], backend="plait", dynamic=None if varies else False, options=options
        )
        found: tuple[Tensor, ...] = fn(*some, *ws)
        return found

    with torch.no_grad():
        want = run(slice(None))
        parts = [(f"{n} first", slice(n), False) for n in COUNTS]
        parts += [("the last", slice(ALL - 1, None), False)]
        parts += [("4 of a number that varies", slice(1, 5), True)] if made.varies else []
        for what, rows, varies in parts:
            got = run(rows, varies)
            for k, (x, y) in enumerate(zip(got, want, strict=True)):
                if not torch.equal(x.nan_to_num(7.0), y[rows].nan_to_num(7.0)):
                    n = int((x != y[rows]).sum())
                    return f"rows {what}, result {k}: {n} of {x.numel()} elements differ"
    return ""


def _rows(x: Tensor, rows: slice) -> Tensor:
    """A copy of some rows with the same order in memory."""
    some = x[rows]
    order = sorted(range(1, x.dim()), key=lambda d: -x.stride(d))
    order = [0, *order]
    return some.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows that keep their bits in any batch.")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    bad = 0
    for seed in watched("programs", range(args.first, args.first + args.count)):
        made = Maker(seed).generate()
        try:
            wrong = check(made, args.device)
        except Exception as error:  # noqa: BLE001  (it is a finding)
            wrong = f"{type(error).__name__}: {str(error)[:300]}"
        if wrong:
            bad += 1
            print(f"seed {seed}: {wrong}\n{made.inputs}\n{made.weights}\n{made.text}", flush=True)
    print(f"{args.count} programs, {bad} bad")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
