"""Runs a LoopProgram with torch tensors, every point of a loop at once: what the tests of lowering
trust.

It knows nothing of schedules, kernels or memory plans: each op of the program runs by itself on
freshly made buffers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.ir.calls import Extern, ListArg, Number, Scalar, TensorArg
from plait.ir.dtypes import DTYPES
from plait.ir.expr import Atom, Expr, Size, free_symbols
from plait.ir.loops import (
    Alias,
    Assert,
    Item,
    Load,
    Mutate,
    Node,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    walk,
)
from plait.lower.dtypes import TO_TORCH
from plait.lower.graph import Lowered

T = torch.Tensor
ERRORS = {"IndexError": IndexError, "RuntimeError": RuntimeError}
_SIMPLE: dict[str, Callable[..., T]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not, "neg": torch.neg,
    "abs": torch.abs, "truediv": torch.div, "fmod": torch.fmod, "pymod": torch.remainder,
    "min": torch.minimum, "max": torch.maximum, "fmin": torch.fmin, "fmax": torch.fmax,
    "max_first": lambda a, b: torch.where((b > a) | (b != b), b, a), "eq": torch.eq, "ne": torch.ne,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "where": torch.where,
    "sign": torch.sign, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "fma": lambda a, b, c: torch.addcmul(c, a, b),
}  # fmt: skip


def _op(name: str, *a: T) -> T:
    if name in _SIMPLE:
        return _SIMPLE[name](*a)
    if name in ("floordiv", "truncdiv", "mod", "rem"):
        zero = a[1] == 0
        b = torch.where(zero, torch.ones_like(a[1]), a[1])
        fn = {
            "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
            "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
            "mod": torch.remainder, "rem": torch.fmod,
        }[name]  # fmt: skip
        return torch.where(zero, torch.zeros_like(b), fn(a[0], b))
    return getattr(torch, name)(*a)


def _size(e: Size, env: Mapping[str, T]) -> T:
    if isinstance(e, int):
        return torch.tensor(e)
    out = torch.tensor(e.const)
    for mono, c in e.terms:
        term = torch.tensor(c)
        for a in mono:
            term = term * (env[a.name] if a.kind == "sym" else _atom(a, env))
        out = out + term
    return out


def _atom(a: Atom, env: Mapping[str, T]) -> T:
    x, y = _size(a.a, env), _size(a.b, env)
    fn: dict[str, Callable[[T, T], T]] = {
        "div": lambda p, q: torch.div(p, q, rounding_mode="floor"), "mod": torch.remainder,
        "min": torch.minimum, "max": torch.maximum, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
        "le": torch.le,
    }  # fmt: skip
    return fn[a.kind](x, y).long()


class Evaluate:
    """One run of a program."""

    def __init__(self, lowered: Lowered, inputs: Sequence[Any]) -> None:
        self.lowered, self.program = lowered, lowered.program
        self.bufs: dict[str, T] = {}
        self.env: dict[str, T] = {}
        self.empty = False  # the loop being run has no points
        for k, given in enumerate(self.program.inputs):
            if isinstance(given, str):
                self.bufs[given] = inputs[k]
            elif given is not None:
                self.env[given[1]] = torch.tensor(int(inputs[k]))
        for name, number in self.program.constants.items():
            self.bufs[name] = lowered.constants[number]

    def run(self) -> list[Any]:
        for op in self.program.ops:
            self._symbols()
            getattr(self, "_" + type(op).__name__.lower())(op)
        self._symbols()
        return [
            self.bufs[o.buf].item() if isinstance(o, Number) else self._operand(o)
            for o in self.program.outputs
        ]

    def _symbols(self) -> None:
        for name, source in self.program.symbols.items():
            if name in self.env or source is None:
                continue
            if isinstance(source, tuple):
                if source[0] in self.bufs:
                    t = self.bufs[source[0]]
                    self.env[name] = torch.tensor(
                        t.shape[source[2]] if source[1] == "size" else t.stride(source[2])
                    )
            elif all(a.name in self.env for a in free_symbols(source)):
                self.env[name] = _size(source, self.env)

    def num(self, e: Size) -> int:
        return int(_size(e, self.env))

    def new(self, name: str) -> T:
        b = self.program.buffers[name]
        shape, strides = [self.num(s) for s in b.shape], [self.num(s) for s in b.strides]
        return torch.empty_strided(shape, strides, dtype=TO_TORCH[b.dtype])

    # ---- bodies
    def grid(self, vars_: Sequence[Expr], extents: Sequence[int]) -> dict[str, T]:
        env = dict(self.env)
        self.empty = 0 in extents
        for k, (v, n) in enumerate(zip(vars_, extents, strict=True)):
            shape = [1] * len(vars_)
            shape[k] = n
            env[v.symbol.name] = torch.arange(n).reshape(shape)
        return env

    def extents(self, vars_: Sequence[Expr]) -> list[int]:
        return [self.num(v.symbol.extent) for v in vars_]

    def body(self, root: Node, env: dict[str, T]) -> T:
        value: dict[Node, T] = {}
        for n in walk((root,)):
            value[n] = self._node(n, [value[a] for a in n.args], env)
            assert value[n].dtype == TO_TORCH[n.dtype], (n, value[n].dtype)
        return value[root]

    def _node(self, n: Node, args: list[T], env: dict[str, T]) -> T:
        dtype = TO_TORCH[n.dtype]
        if n.op == "const":
            return torch.tensor(n.attr, dtype=dtype)
        if n.op == "cast":
            return args[0].to(dtype)
        if n.op == "bitcast":
            return args[0].view(dtype)
        if n.op == "index":
            return _size(n.attr, self._with_args(env, args))
        if n.op == "load":
            return self._load(n.attr, args, env)
        if n.op == "bounded":
            size = _size(n.attr.size, env)
            bad = (args[0] < 0) | (args[0] >= size)
            if len(args) > 1:
                bad = bad & args[1]
            if bool(bad.any()):
                raise ERRORS[n.attr.check.error](n.attr.check.message)
            return torch.where(
                (args[0] < 0) | (args[0] >= size), torch.zeros_like(args[0]), args[0]
            )
        if n.op == "nonzero":
            bad = (args[0] == 0) & args[1] if len(args) > 1 else args[0] == 0
            if bool(bad.any()):
                raise ERRORS[n.attr.error](n.attr.message)
            return args[0]
        return _op(n.op, *args)

    def _with_args(self, env: dict[str, T], args: Sequence[T]) -> dict[str, T]:
        return env | {f"${k}": a for k, a in enumerate(args)}

    def _load(self, attr: Load, args: list[T], env: dict[str, T]) -> T:
        buf = self.bufs[attr.buf]
        mask = args[-1] if attr.masked else None
        index = [_size(e, self._with_args(env, args)) for e in attr.index]
        if mask is not None:
            index = [torch.where(mask, i, torch.zeros_like(i)) for i in index]
            if buf.numel() == 0:
                return torch.zeros((), dtype=buf.dtype)
        if self.empty or any(i.numel() == 0 for i in index):
            shape = torch.broadcast_shapes(*(i.shape for i in index))
            return torch.zeros(shape, dtype=buf.dtype)
        for i, s in zip(index, buf.shape, strict=True):
            assert int(i.min()) >= 0 and int(i.max()) < s, f"{attr} leaves {tuple(buf.shape)}"
        out = buf[tuple(index)] if index else buf
        return out if mask is None else torch.where(mask, out, torch.zeros((), dtype=out.dtype))

    # ---- ops
    def _pointwise(self, op: Pointwise) -> None:
        extents = self.extents(op.vars)
        env = self.grid(op.vars, extents)
        value = self.body(op.body, env).expand(extents)
        if op.index is None:
            self.bufs[op.out] = self.new(op.out).copy_(value)
            return
        out = self.bufs.setdefault(op.out, self.new(op.out))
        if value.numel():
            index = tuple(_size(e, env).expand(extents) for e in op.index)
            out[index] = value

    def _reduction(self, op: Reduction) -> None:
        extents, rextents = self.extents(op.vars), self.extents(op.rvars)
        env = self.grid((*op.vars, *op.rvars), (*extents, *rextents))
        flat = self.body(op.body, env).expand((*extents, *rextents))
        flat = flat.reshape(*extents, math.prod(rextents))
        for name, value in zip(op.outs, _reduced(op.kind, flat), strict=False):
            if name is not None:
                self.bufs[name] = self.new(name).copy_(value)

    def _scatter(self, op: Scatter) -> None:
        extents = self.extents(op.vars)
        env = self.grid(op.vars, extents)
        out = self.bufs[op.base].clone()
        value = self.body(op.body, env).expand(extents).reshape(-1)
        args = [self.body(a, env) for a in op.index_args]
        index = [_size(e, self._with_args(env, args)).expand(extents).reshape(-1) for e in op.index]
        keep = (
            torch.ones(value.shape, dtype=torch.bool)
            if op.mask is None
            else self.body(op.mask, env).expand(extents).reshape(-1)
        )
        combine = {
            "store": lambda a, b: b,
            "add": torch.add,
            "mul": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
        }[op.mode]
        for k in range(value.numel()):
            if keep[k]:
                at = tuple(int(i[k]) for i in index)
                out[at] = combine(out[at], value[k])
        self.bufs[op.out] = out

    def _scan(self, op: Scan) -> None:
        extents = self.extents(op.vars)
        value = self.body(op.body, self.grid(op.vars, extents)).expand(extents)
        fn = {"sum": torch.cumsum, "prod": torch.cumprod, "max": torch.cummax, "min": torch.cummin}
        found = fn[op.kind](value, op.axis)
        for name, v in zip(op.outs, found if op.kind in ("max", "min") else (found,), strict=False):
            if name is not None:
                self.bufs[name] = self.new(name).copy_(v)

    def _extern(self, op: Extern) -> None:
        namespace, _, rest = op.op.partition("::")
        name, _, overload = rest.partition(".")
        fn = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        result = fn(*map(self._operand, op.args), **{k: self._operand(v) for k, v in op.kwargs})
        flat: list[Any] = []

        def lay(r: Any) -> None:
            for x in r if isinstance(r, (tuple, list)) else (r,):
                lay(x) if isinstance(x, (tuple, list)) else flat.append(x)

        lay(result)
        for out, r in zip(op.outs, flat, strict=False):
            if out is not None:
                self.bufs[out] = r
        for k, symbol in op.symbols:
            self.env[symbol] = torch.tensor(flat[k])

    def _alias(self, op: Alias) -> None:
        b, base = self.program.buffers[op.out], self.bufs[op.base]
        start = base.storage_offset() * base.element_size() // b.dtype.nbytes if op.relative else 0
        whole = torch.empty(0, dtype=TO_TORCH[b.dtype])
        shape, strides = [self.num(s) for s in b.shape], [self.num(s) for s in b.strides]
        self.bufs[op.out] = whole.set_(
            base.untyped_storage(), start + self.num(op.offset), shape, strides
        )

    def _item(self, op: Item) -> None:
        self.env[op.name] = torch.tensor(int(self.bufs[op.buf].item()))

    def _assert(self, op: Assert) -> None:
        if self.num(op.expr) == 0:
            raise RuntimeError(op.message)

    def _mutate(self, op: Mutate) -> None:
        self.bufs[op.target].copy_(self.bufs[op.source])

    # ---- operands
    def _operand(self, a: Any) -> Any:
        if isinstance(a, TensorArg):
            buf = self.bufs[a.buf]
            if buf.layout != torch.strided:
                return buf
            shape, strides = [self.num(s) for s in a.shape], [self.num(s) for s in a.strides]
            return torch.as_strided(buf, shape, strides, buf.storage_offset() + self.num(a.offset))
        if isinstance(a, ListArg):
            return [self._operand(x) for x in a.items]
        if isinstance(a, Scalar):
            return _scalar(a)
        return self.num(a)


def _scalar(a: Scalar) -> Any:
    if a.kind == "none":
        return None
    if a.kind == "bool":
        return a.text == "True"
    if a.kind == "float":
        return float.fromhex(a.text)
    if a.kind == "complex":
        return complex(*map(float.fromhex, a.text.split()))
    if a.kind == "dtype":
        return TO_TORCH[DTYPES[a.text]]
    if a.kind == "str":
        return a.text
    if a.kind == "device":
        return torch.device(a.text)
    return getattr(torch, a.text)


def _reduced(kind: str, x: T) -> tuple[T, ...]:
    n = x.shape[-1]
    if kind == "welford":
        mean = x.mean(-1) if n else torch.zeros(x.shape[:-1], dtype=x.dtype)
        return (
            mean,
            ((x - mean.unsqueeze(-1)) ** 2).sum(-1),
            torch.full(x.shape[:-1], float(n), dtype=x.dtype),
        )
    if kind == "xor":
        return (functools.reduce(torch.bitwise_xor, x.unbind(-1)),)
    if kind in ("max", "min") and n == 0:
        info = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        ends = (
            {"max": -float("inf"), "min": float("inf")}
            if x.dtype.is_floating_point
            else {"max": info.min, "min": info.max}
        )
        return (torch.full(x.shape[:-1], ends[kind], dtype=x.dtype),)
    fn: dict[str, Callable[[T], T]] = {
        "sum": lambda v: v.sum(-1, dtype=v.dtype), "prod": lambda v: v.prod(-1, dtype=v.dtype),
        "max": lambda v: v.amax(-1),
        "min": lambda v: v.amin(-1), "any": lambda v: v.any(-1), "all": lambda v: v.all(-1),
        "argmax": lambda v: v.argmax(-1), "argmin": lambda v: v.argmin(-1),
    }  # fmt: skip
    return (fn[kind](x),)
