"""A slow interpreter of wrapper instructions on torch tensors: what the targets are compared with.

It follows the words of plait/wrapper/instructions.py and shares no code with a target. Memory of an
arena and of an Alloc starts as 0xa5 bytes, so that a program that reads what nobody wrote shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch

from plait.ir.dtypes import DTYPES
from plait.ir.expr import Size, evaluate
from plait.lower.dtypes import TO_TORCH
from plait.wrapper import instructions as ins

ERRORS = {"IndexError": IndexError, "RuntimeError": RuntimeError}
KernelMeaning = Callable[[list[torch.Tensor], list[int]], int]


def interpret(
    program: ins.WrapperProgram,
    args: Sequence[object],
    kernels: dict[str, KernelMeaning],
    constants: Sequence[torch.Tensor] = (),
    callables: Sequence[Callable[..., object]] = (),
) -> tuple[object, ...]:
    """The results of one call. kernels: name -> what it does; returns 0 or the number of the check
    that failed."""
    with torch.no_grad():
        return _Call(program, args, kernels, constants, callables).run()


class _Call:
    def __init__(self, p: Any, args: Any, kernels: Any, constants: Any, callables: Any) -> None:
        assert len(args) == len(p.inputs)
        self.p, self.kernels, self.constants, self.callables = p, kernels, constants, callables
        self.checks: dict[str, Any] = {}
        self.env: dict[str, Any] = {i.name: a for i, a in zip(p.inputs, args, strict=True)}

    def run(self) -> tuple[object, ...]:
        for i in self.p.body:
            if isinstance(i, ins.Return):
                return tuple(self.operand(o) for o in i.values)
            self.step(i)
        raise AssertionError("no Return")

    def size(self, e: Size) -> int:
        return evaluate(e, self.env)

    def sizes(self, values: Sequence[Size]) -> list[int]:
        return [self.size(v) for v in values]

    def step(self, i: Any) -> None:
        env = self.env
        match i:
            case ins.Symbol(name, ins.SizeOf(tensor, kind, dim)):
                t = env[tensor]
                env[name] = {"size": t.shape, "stride": t.stride(), "offset": [t.storage_offset()]}[
                    kind
                ][dim]
            case ins.Symbol(name, ins.ItemOf(tensor)):
                (value,) = env[tensor].reshape(-1).tolist()
                env[name] = int(value)
            case ins.Symbol(name, value):
                env[name] = self.size(value)
            case ins.AssertScalar(expr, message):
                if self.size(expr) == 0:
                    raise RuntimeError(message)
            case ins.AssertSizeStride(tensor, dtype, shape, strides):
                if env[tensor].dtype != TO_TORCH.get(dtype, env[tensor].dtype):
                    found, want = str(env[tensor].dtype)[6:], str(TO_TORCH[dtype])[6:]
                    raise RuntimeError(f"'{tensor}' has dtype {found}, expected {want}")
                sizes, steps = self.sizes(shape), self.sizes(strides)
                if i.copies and list(env[tensor].shape) == sizes:
                    made = torch.empty_strided(sizes, steps, dtype=env[tensor].dtype)
                    env[tensor] = made.copy_(env[tensor])
                self.layout(tensor, sizes, steps)
            case ins.AssertAlignment(tensor, nbytes):
                if env[tensor].data_ptr() % nbytes != 0:
                    raise RuntimeError(f"'{tensor}' is not aligned to {nbytes} bytes")
            case ins.CheckFinite(tensor, origin, infinities):
                values = env[tensor].double().reshape(-1).tolist()
                if any(math.isnan(v) or (infinities and math.isinf(v)) for v in values):
                    what = "a NaN or an infinity" if infinities else "a NaN"
                    raise RuntimeError(f"'{tensor}' holds {what}, computed by {origin}")
            case ins.Arena(name, nbytes, device):
                assert device == "cpu"
                env[name] = torch.full((self.size(nbytes),), 0xA5, dtype=torch.uint8)
            case ins.Place(name, arena, offset, dtype, shape, strides):
                env[name] = self.memory(env[arena], self.size(offset), dtype, shape, strides)
            case ins.Alloc(name, dtype, shape, strides, device):
                assert device == "cpu"
                shape, strides = self.sizes(shape), self.sizes(strides)
                env[name] = torch.empty_strided(shape, strides, dtype=TO_TORCH[dtype])
                env[name].untyped_storage().fill_(0xA5)
            case ins.Reuse(name, old, dtype, shape, strides):
                env[name] = self.memory(env[old], self.start(old), dtype, shape, strides)
            case ins.Free(name):
                del env[name]
            case ins.View(name, base, dtype, shape, strides, offset, relative):
                start = self.start(base) if relative else 0
                start += self.size(offset) * dtype.nbytes
                env[name] = self.memory(env[base], start, dtype, shape, strides)
            case ins.Constant(name, index):
                env[name] = self.constants[index]
            case ins.DefineKernel(name):
                assert name in self.kernels
                self.checks[name] = i.checks
            case ins.Launch(kernel, args, sizes):
                failed = self.kernels[kernel]([env[a] for a in args], self.sizes(sizes))
                if failed:
                    check = self.checks[kernel][failed - 1]
                    raise ERRORS[check.error](f"{check.message} (in kernel {kernel})")
            case ins.CallExtern(op, args, kwargs, outs):
                self.results(outs, op, args, kwargs)
            case ins.CallPython(index, _, args, kwargs, outs):
                self.results(outs, self.callables[index], args, kwargs)
            case ins.CallPrograms(kind, programs, carried, scanned, _, args, outs):
                given = [self.operand(o) for o in args]
                made = self.control(kind, programs, carried, scanned, given)
                env.update({n: v for n, v in zip(outs, made, strict=True) if n is not None})
            case ins.Hook(tensor, index, node, label):
                self.callables[index](node, label, env[tensor])
            case ins.Copy(dst, src, bump):
                before = env[dst]._version
                env[dst].copy_(env[src])
                assert env[dst]._version == before + 1 or not bump
            case ins.BumpVersion(tensor):
                torch.autograd.graph.increment_version(env[tensor])
            case ins.Fill(tensor, value):
                env[tensor].fill_(self.operand(value))
            case ins.Partition() | ins.Note():
                pass
            case ins.Return():
                raise AssertionError("Return is no step")
            case _:
                assert_never(i)

    def control(self, kind: str, programs: Any, carried: int, scanned: int, given: Any) -> Any:
        """The results of subprograms, by the words of ir/calls.py."""

        def run(k: int, *args: Any) -> Any:
            p = self.p.programs[programs[k]]
            return _Call(p, args, self.kernels, self.constants, self.callables).run()

        if kind == "call":
            return run(0, *given)
        if kind == "cond":
            return run(0 if given[0] else 1, *given[1:])
        state, rest = given[:carried], given[carried + scanned :]
        if kind == "loop":
            while run(0, *state, *rest)[0]:
                state = list(run(1, *state, *rest))
            return [v.clone() if isinstance(v, torch.Tensor) else v for v in state]
        rounds: list[Any] = []
        if kind == "rounds":
            while run(0, *state, *rest)[0]:
                state = list(run(1, *state, *rest))
                rounds.append(state)
            pairs = zip(*(rounds or [state]), strict=True)
            return [torch.stack(v) if isinstance(v[0], torch.Tensor) else v[-1] for v in pairs]
        whole = [x.unbind(0) for x in given[carried : carried + scanned]]
        if not whole[0]:
            raise RuntimeError("a scan needs tensors with as many slices, at least one")
        for slices in zip(*whole, strict=True):
            made = run(0, *state, *(x.clone().contiguous() for x in slices), *rest)
            state = list(made[:carried])
            rounds.append(made[carried:])
        return [*state, *(torch.stack(x) for x in zip(*rounds, strict=True))]

    def layout(self, name: str, shape: list[int], strides: list[int]) -> None:
        t = self.env[name]
        dims = zip(t.shape, t.stride(), shape, strides, strict=False)
        strided = t.numel() > 0
        if t.dim() != len(shape) or any(
            a != b or (strided and a > 1 and x != y) for a, x, b, y in dims
        ):
            have = f"has sizes {list(t.shape)} and strides {list(t.stride())}"
            raise RuntimeError(f"'{name}' {have}, expected {shape} and {strides}")

    def start(self, name: str) -> int:
        t = self.env[name]
        return int(t.storage_offset() * t.element_size())

    def memory(
        self, of: torch.Tensor, at: int, dtype: Any, shape: Any, strides: Any
    ) -> torch.Tensor:
        """The tensor at byte `at` of a storage."""
        assert at % dtype.nbytes == 0
        out = torch.empty(0, dtype=TO_TORCH[dtype])
        return out.set_(
            of.untyped_storage(), at // dtype.nbytes, self.sizes(shape), self.sizes(strides)
        )

    def results(self, outs: Any, op: Any, args: Any, kwargs: Any) -> None:
        if isinstance(op, str):
            name, _, overload = op.partition(".")
            namespace, _, base = name.partition("::")
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        result = op(*map(self.operand, args), **{k: self.operand(o) for k, o in kwargs})
        for name, value in zip(outs, _laid_open(result), strict=False):
            if name is not None:
                self.env[name] = value

    def operand(self, o: Any) -> Any:
        match o:
            case ins.Ref(name):
                return self.env[name]
            case ins.ValueOf(name):
                return self.env[name].item()
            case ins.ListOf(items):
                return [self.operand(i) for i in items]
            case ins.Literal(kind, text):
                return _literal(kind, text)
            case _:
                return self.size(o)


def _laid_open(result: object) -> list[object]:
    if isinstance(result, (list, tuple)):
        return [x for r in result for x in _laid_open(r)]
    return [result]


def _literal(kind: str, text: str) -> object:
    readers: dict[str, Callable[[str], object]] = {
        "none": lambda t: None,
        "bool": lambda t: {"True": True, "False": False}[t],
        "float": float.fromhex,
        "str": str,
        "complex": lambda t: complex(*map(float.fromhex, t.split())),
        "dtype": lambda t: TO_TORCH[DTYPES[t]],
        "device": torch.device,
        "layout": lambda t: getattr(torch, t),
        "memory_format": lambda t: getattr(torch, t),
    }
    return readers[kind](text)
