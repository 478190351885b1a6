"""What the catalogue of statements builds a program with: operands, sizes, and eager itself as
judge.

Every statement is run by eager for all calls as soon as it is made, so shapes and dtypes are never
worked out twice. A statement that eager refuses is dropped, or (seldom) kept as the last one: plait
has to refuse it too.
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz import flow, values
from tests.fuzz.program import NAME, Call, Line, Operand

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int64", "int32", "int16", "int8", "uint8")
_KINDS = {"f": FLOATS, "i": INTS, "n": FLOATS + INTS, "b": ("bool",), "c": ("complex64",)}
_DIGITS = {
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float32: 24,
    torch.float64: 53,
    torch.complex64: 24,
}
MOST = 20_000  # elements of any value
CALLED = ("REGIONS", "associative_scan", "autocast", "cond", "map_", "scan", "while_loop")
FREE = {"torch": torch, "F": F, "math": math} | {name: getattr(flow, name) for name in CALLED}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def takes(kinds: str, dtype: torch.dtype) -> bool:
    """Whether one of these classes of dtypes (f, i, n, b, c; a for all) holds dtype."""
    return "a" in kinds or any(name_of(dtype) in _KINDS[k] for k in kinds)


@dataclass
class Known:
    """What is known of a value's bits. exact: eager's are the only right ones. largest: of a whole
    value, its greatest magnitude in any call; infinity for one that is not whole."""

    exact: bool
    largest: float


class _Elements(TorchDispatchMode):
    """Notes the size of the largest tensor that eager meets: a statement may add up more elements
    than its operands have (`x.expand(1000)`, `torch.ones(1000)`)."""

    most = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs, made)):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.numel())
        return made


class Maker:
    def __init__(
        self,
        rng: random.Random,
        calls: list[Call],
        dtypes: tuple[str, ...],
        errors: float,
        grads: bool = False,
    ) -> None:
        """dtypes: what new operands mostly have. errors: how often a statement that eager refuses
        is kept. grads: gradients are taken."""
        self.rng = rng
        self.calls = calls
        self.dtypes = dtypes
        self.errors = errors
        self.grads = grads
        self.operands: list[Operand] = []
        self.lines: list[Line] = []
        self.env: list[dict[str, Any]] = [{} for _ in calls]
        self.known: dict[str, Known] = {}
        self.weights: list[str] = []
        self.ended = False
        self._n = 0

    # ------------------------------------------------------------------------------ operands
    def fresh(self, letter: str) -> str:
        self._n += 1
        return f"{letter}{self._n}"

    def operand(
        self,
        shape: tuple[str, ...],
        dtype: str = "",
        values_: str = "",
        bound: str = "0",
        layout: str = "",
    ) -> str:
        """A new argument. Empty texts: choose."""
        dtype = dtype or self.rng.choice(self.dtypes)
        kind = getattr(torch, dtype)
        if not values_:
            inexact = kind.is_floating_point or kind.is_complex
            values_ = self.rng.choices(
                ("whole", "normal", "special", "huge", "zeros"),
                (
                    6,
                    3 * inexact,
                    1 if dtype[0] != "c" else 0,
                    0.4 * inexact,
                    0.4 * kind.is_floating_point,
                ),
            )[0]
        layout = layout or self.layout(len(shape))
        o = Operand(self.fresh("a"), dtype, shape, layout, values_, bound)
        self.put(o)
        return o.name

    def put(self, o: Operand) -> None:
        for c, env in zip(self.calls, self.env, strict=True):
            at = {**c.sizes, **c.ints}
            if o.dtype == "int":
                env[o.name] = c.ints[o.name]
            elif o.alias:
                env[o.name] = eval(o.alias, dict(FREE), env)
            else:
                shape = [eval(d, {}, at) for d in o.shape]
                env[o.name] = values.tensor(
                    o.values,
                    shape,
                    o.dtype,
                    o.layout,
                    c.seed * 97 + len(self.operands),
                    c.mood,
                    eval(o.bound, {}, at),
                )
        self.operands.append(o)
        if o.dtype != "int":
            self.note(o.name, True)

    def layout(self, n: int) -> str:
        if n == 0 or self.rng.random() < 0.45:
            return "plain"
        return self.rng.choice([k for k, (least, _) in values.LAYOUTS.items() if least <= n])

    def integer(self, low: int, high: int) -> str:
        """An int argument that may differ from call to call."""
        o = Operand(self.fresh("k"), "int")
        same = self.rng.randint(low, high)
        for c in self.calls:
            c.ints[o.name] = same if self.rng.random() < 0.3 else self.rng.randint(low, high)
        self.put(o)
        return o.name

    # ------------------------------------------------------------------------------ choices
    def value(self, name: str) -> Any:
        return self.env[0][name]

    def tensors(self, kinds: str = "a", ndim: int = 0, exact: bool = False) -> list[str]:
        found = []
        for name, v in self.env[0].items():
            if (
                isinstance(v, Tensor)
                and v.ndim >= ndim
                and takes(kinds, v.dtype)
                and (not exact or self.known[name].exact)
            ):
                found.append(name)
        return found

    def pick(self, kinds: str = "a", ndim: int = 0, exact: bool = False) -> str:
        """A tensor that is there, most likely a late one, or a new one."""
        there = self.tensors(kinds, ndim, exact)
        if there and self.rng.random() < 0.75:
            return self.rng.choice(there[-5:])
        fits = [d for d in self.dtypes if takes(kinds, getattr(torch, d))]
        pool = fits or [d for k in kinds for d in _KINDS.get(k, FLOATS)]
        return self.operand(
            self.shape(max(ndim, self.rng.choice((0, 1, 1, 2, 2, 2, 3, 4)))), self.rng.choice(pool)
        )

    def dim(self) -> str:
        """The size of a new dimension."""
        if self.rng.random() < 0.6 and self.calls[0].sizes:
            return self.rng.choice(sorted(self.calls[0].sizes))
        return str(
            self.rng.choices(
                (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33), (1, 2, 3, 3, 3, 3, 2, 2, 2, 2, 1)
            )[0]
        )

    def shape(self, n: int) -> tuple[str, ...]:
        big = [k for k, v in self.calls[0].sizes.items() if v > 100]
        dims = tuple(self.dim() for _ in range(n))
        if n > 1 and any(d in big for d in dims):  # one large dimension is enough
            return (self.rng.choice(big), *(str(self.rng.choice((1, 2, 3))) for _ in range(n - 1)))
        return dims

    def shape_of(self, name: str) -> tuple[str, ...] | None:
        """The shape of a tensor in terms of the sizes of a call; None if it has none."""
        shapes = [tuple(env[name].shape) for env in self.env]
        if len({len(s) for s in shapes}) > 1:
            return None
        found = [self.size_text([s[d] for s in shapes]) for d in range(len(shapes[0]))]
        return None if None in found else tuple(map(str, found))

    def size_text(self, found: list[int]) -> str | None:
        """An expression that is found[k] at call k."""
        names = sorted(self.calls[0].sizes)
        if len(set(found)) == 1:
            return str(found[0])
        texts = [
            t.format(n)
            for n in names
            for t in ("{}", "2*{}", "{}+1", "{}-1", "({}+1)//2", "{}+3", "{}*2+1")
        ]
        texts += [f"{a}*{b}" for a in names for b in names] + [
            f"{a}+{b}" for a in names for b in names
        ]
        for text in texts:
            if [eval(text, {}, c.sizes) for c in self.calls] == found:
                return text
        return None

    def extent(self, name: str, dim: int) -> str | None:
        """The size of one dimension as an expression, or the least of all calls (as a bound of
        indices)."""
        found = [env[name].shape[dim] for env in self.env]
        return self.size_text(found) or (str(min(found)) if min(found) else None)

    def other(self, name: str, dtype: str = "", same: bool = False) -> str | None:
        """A tensor to compute with this one: that broadcasts with it, or has its very shape."""
        shape = self.shape_of(name)
        there = [n for n in self.tensors() if n != name and self._fits(name, n, same)]
        if dtype:
            there = [n for n in there if name_of(self.value(n).dtype) == dtype]
        if there and (shape is None or self.rng.random() < 0.5):
            return self.rng.choice(there)
        if shape is None:
            return None
        if not same:
            shape = tuple("1" if self.rng.random() < 0.15 else d for d in shape)
            shape = shape[self.rng.choice((0, 0, 0, 1)) :]
        return self.operand(shape, dtype or name_of(self.value(name).dtype))

    def _fits(self, a: str, b: str, same: bool) -> bool:
        for env in self.env:
            if not isinstance(env[a], Tensor) or not isinstance(env[b], Tensor):
                return False
            s, t = env[a].shape, env[b].shape
            if same and s != t:
                return False
            try:
                if math.prod(torch.broadcast_shapes(s, t)) > MOST:
                    return False
            except RuntimeError:
                return False
        return True

    # ------------------------------------------------------------------------------ statements
    def add(
        self, kind: str, text: str, *, exact: str = "bits", out: str = "t", jumpy: bool = False
    ) -> str:
        """Appends `out = text` if eager runs it for every call; its name, or "".

        out: letter of the new name; "" for a statement without a value. exact: "bits" where exact
        arguments give an exact result, "whole" if they have to be whole too, "no". jumpy: takes
        exact arguments only.
        """
        if self.ended:
            return ""
        reads = [n for n in NAME.findall(text) if n in self.known]
        if jumpy and not all(self.known[n].exact for n in reads):
            return ""
        line = Line(self.fresh(out) if out else "", text, kind)
        seen = _Elements()
        try:
            with seen if exact == "whole" else contextlib.nullcontext():
                results = [self._execute(line, env) for env in self.env]
        except Exception:  # noqa: BLE001 - whatever eager raises
            if self.rng.random() < self.errors and False not in self._last_resort(line):
                bits = exact == "bits" and all(self.known[n].exact for n in reads)
                self.lines.append(replace(line, exact=bits))
                self.ended = True
            self._forget(line.out)
            return ""
        if (
            exact == "no"
            and self._breaks_down(line, results)
            or any(isinstance(x, Tensor) and x.numel() > MOST for x in results)
        ):
            self._forget(line.out)
            return ""
        is_exact = (
            exact != "no"
            and all(self.known[n].exact for n in reads)
            and self._keeps(exact, reads, results, seen.most)
        )
        self.lines.append(replace(line, exact=is_exact))
        if line.out:
            self.note(line.out, is_exact)
        for n in reads if not line.out else ():
            self.note(n, is_exact)
        return line.out or "done"

    def _breaks_down(self, line: Line, results: list[Any]) -> bool:
        """Whether eager makes NaN of finite numbers: what overflows on the way is no measure."""
        for env, x in zip(self.env, results, strict=True):
            made = isinstance(x, Tensor) and bool(x.isnan().any())
            read = [env[n] for n in line.reads if isinstance(env.get(n), Tensor)]
            if made and all(bool(v.isfinite().all()) for v in read):
                return True
        return False

    def unruly(self, text: str) -> str:
        """Ends the program with a statement that eager runs at the first call, if it refuses it at
        a later one."""
        if self.ended:
            return ""
        line = Line(
            self.fresh("t") if not text.startswith("torch._check") else "",
            text,
            "data-dependent size",
        )
        found = self._last_resort(line)
        if found[0] is None and any(found) and False not in found:
            self.lines.append(replace(line, exact=False))
            self.ended = True
            return line.out
        self._forget(line.out)
        return ""

    def _forget(self, name: str) -> None:
        for env in self.env:
            env.pop(name, None)

    def _execute(self, line: Line, env: dict[str, Any]) -> Any:
        scope = {**FREE, **env}
        if not line.out:
            exec(line.text, scope)
            return None
        env[line.out] = eval(line.text, scope)
        return env[line.out]

    def _last_resort(self, line: Line) -> list[bool | None]:
        """For each call: None where eager runs, True where it refuses for good reason, False for
        another one."""
        found: list[bool | None] = []
        for env in self.env:
            try:
                self._execute(line, env)
                found.append(None)
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                found.append("not implemented for" not in str(error))
            except Exception:  # noqa: BLE001
                found.append(False)
        return found

    def _keeps(self, exact: str, reads: list[str], results: list[Any], terms: int) -> bool:
        """Whether the result of exact arguments is exact. terms: how many numbers a sum in it may
        have."""
        dtypes = [x.dtype for x in results if isinstance(x, Tensor)]
        dtypes += [self.value(n).dtype for n in reads]
        floats = [d for d in dtypes if d in _DIGITS]
        digits = min((_DIGITS[d] for d in floats), default=64)
        whole = all(self.known[n].largest < math.inf for n in reads)
        if exact == "bits" and (whole or digits >= 24):
            return True
        if not floats:
            return True
        if not whole:
            return False
        bound = math.prod(max(self.known[n].largest, 1.0) for n in reads)
        return bound * terms < 2.0**digits

    def note(self, name: str, exact: bool) -> None:
        """Notes what a value holds."""
        largest = 0.0
        for env in self.env:
            v = env[name]
            if not isinstance(v, Tensor) or v.dtype not in _DIGITS or v.numel() == 0:
                continue
            x = torch.view_as_real(v.detach().resolve_conj()) if v.is_complex() else v.detach()
            x = x.double()
            fine = bool(x.isfinite().all()) and bool((x == x.round()).all())
            fine = fine and not bool(((x == 0) & x.signbit()).any())
            largest = max(largest, float(x.abs().max()) if fine else math.inf)
        if isinstance(self.env[0][name], Tensor):
            self.known[name] = Known(exact, largest)
