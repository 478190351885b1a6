"""`plait.watch`: callbacks on intermediates. What is compiled inside of it shows every result of a
kernel or an operator, in order, whenever it runs.

A pass puts a `Hook` after the last instruction that writes a result; the callbacks stand in the
program's table of callables. They are handed copies, since memory of a program is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from torch import Tensor

from plait.wrapper import instructions as ins
from plait.wrapper.forms import of_one_way
from plait.wrapper.walk import defined, symbols

Callback = Callable[[str, str, Tensor], object]
_callbacks: ContextVar[tuple[Callback, ...]] = ContextVar("plait_watch", default=())


@contextmanager
def watch(callback: Callback) -> Iterator[None]:
    """What is compiled inside calls callback(node, label, tensor) for each result of a kernel or an
    operator, whenever it runs; so does its backward pass.

    node: the FX node whose value it is (as `0_captured.py` of the debug folder names it), the name
    of the buffer if it is no node's. label: what computed it, with source lines. tensor: a copy,
    the callback's to keep."""
    token = _callbacks.set((*_callbacks.get(), callback))
    try:
        yield
    finally:
        _callbacks.reset(token)


def watcher() -> Callable[..., None] | None:
    """What the hooks of a graph that is captured now call; None if nobody watches."""
    callbacks = _callbacks.get()

    def show(node: str, label: str, tensor: Tensor | None) -> None:
        if tensor is not None:  # an operator may leave a result out
            for callback in callbacks:
                callback(node, label, tensor.detach().clone())

    return show if callbacks else None


def add_hooks(p: ins.WrapperProgram, nodes: Mapping[str, str]) -> ins.WrapperProgram:
    """The program with hooks that call a new last callable. nodes: buffer -> the FX node whose
    value it is."""
    hidden = frozenset().union(*(symbols(i) for i in p.body)) | of_one_way(p.body)
    last = {name: k for k, i in enumerate(p.body) for name in _results(i)}
    out: list[ins.Instr] = []
    note = ""
    for k, i in enumerate(p.body):
        out.append(i)
        note = i.text if isinstance(i, ins.Note) else note
        for name in _results(i):
            if last[name] == k and name not in hidden:
                out.append(
                    ins.Hook(name, p.n_callables, nodes.get(name, name), f"{_maker(i)} ({note})")
                )
    return replace(p, body=tuple(out), n_callables=p.n_callables + 1)


def _results(i: ins.Instr) -> tuple[str, ...]:
    match i:
        case ins.Launch():
            return i.outs
        case ins.CallExtern():
            return (*defined(i), *i.into)
        case _ if isinstance(i, ins.Call):
            return defined(i)
        case _:
            return ()


def _maker(i: ins.Instr) -> str:
    match i:
        case ins.Launch():
            return i.kernel
        case _ if isinstance(i, ins.Call):
            return i.label
        case _:
            raise AssertionError(f"{i} computes nothing")
