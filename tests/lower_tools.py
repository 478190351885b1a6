"""Lowers a function from its ATen graph, evaluates the loop program and compares it with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compat.decompositions import kept_whole
from plait.config import Config
from plait.graph.captured import Captured
from plait.ir.calls import Control, Extern
from plait.lower.graph import Lowered, lower_graph
from plait.runtime.philox import philox_words
from tests.lower_eval import Evaluate

DECOMPOSITIONS = dict(torch._decomp.core_aten_decompositions())
for _op in kept_whole():
    del DECOMPOSITIONS[_op]


class Evaluation(Evaluate):
    """Also calls Python callables and checks that externs keep their promises about strides."""

    def _node(self, n: Any, args: list[torch.Tensor], env: dict[str, torch.Tensor]) -> torch.Tensor:
        if n.op == "philox":
            word = int(args[2])
            return philox_words(args[0], args[1], word >> 2)[word & 3]
        return super()._node(n, args, env)

    def _extern(self, op: Extern) -> None:
        if op.control is not None:
            given = [self._operand(a) for a in op.args]
            flat = self._control(op.control, given)
            self.bufs.update({o: r for o, r in zip(op.outs, flat, strict=True) if o is not None})
            self.env.update({name: torch.tensor(int(flat[k])) for k, name in op.symbols})
        elif op.callable_index >= 0:
            flat = self.lowered.callables[op.callable_index](*map(self._operand, op.args))
            self.bufs.update(
                {out: r for out, r in zip(op.outs, flat, strict=True) if out is not None}
            )
        else:
            super()._extern(op)
        self._symbols()
        self._check_strides(op)

    def _control(self, c: Control, given: list[Any]) -> Sequence[Any]:
        """By the words of ir/calls.py."""

        def run(number: int, args: Sequence[Any]) -> Any:
            program = self.program.programs[c.programs[number]]
            return Evaluation(replace(self.lowered, program=program), args).run()

        if c.kind == "call":
            return run(0, given)
        if c.kind == "cond":
            return run(0 if given[0] else 1, given[1:])
        state, rest = given[: c.carried], given[c.carried + c.scanned :]
        if c.kind == "loop":
            while run(0, [*state, *rest])[0]:
                state = run(1, [*state, *rest])
            return state
        rounds = []
        if c.kind == "rounds":
            while run(0, [*state, *rest])[0]:
                state = run(1, [*state, *rest])
                rounds.append(state)
            return [torch.stack(v) for v in zip(*(rounds or [state]), strict=True)]
        for slices in zip(*given[c.carried : c.carried + c.scanned], strict=True):
            made = run(0, [*state, *slices, *rest])
            state = made[: c.carried]
            rounds.append(made[c.carried :])
        return [*state, *map(torch.stack, zip(*rounds, strict=True))]

    def _check_strides(self, op: Extern) -> None:
        for out in op.outs:
            if out is None or self.bufs[out].layout != torch.strided:
                continue
            t, b = self.bufs[out], self.program.buffers[out]
            assert tuple(t.shape) == tuple(map(self.num, b.shape)), op.op
            promised = tuple(map(self.num, b.strides))
            assert t.numel() == 0 or all(
                s == 1 or p == q for s, p, q in zip(t.shape, promised, t.stride(), strict=True)
            ), op.op


def lowered(
    fn: Callable[..., Any], args: Sequence[Any], dynamic: bool = False, decompose: bool = True
) -> Lowered:
    """fn's graph on args, lowered."""
    table = DECOMPOSITIONS if decompose else {}
    mode = "symbolic" if dynamic else "fake"
    gm = make_fx(lambda *a: _tuple(fn(*a)), table, mode, _allow_non_fake_inputs=True)(*args)
    gm.graph.eliminate_dead_code()
    return lower_graph(Captured(gm, "test", "inference"), Config())


def _tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def check(
    fn: Callable[..., Any],
    *args: Any,
    decompose: bool = True,
    fallback: bool = False,
    exact: bool = False,
    dynamic: bool | None = None,
) -> None:
    """fn lowered gives what fn gives, with static and with symbolic sizes.

    fallback: it may (and for static sizes must) have fallen back. exact: bit for bit."""
    for symbolic in (False, True) if dynamic is None else (dynamic,):
        low = lowered(fn, args, symbolic, decompose)
        assert bool(low.fallbacks) == fallback or symbolic, low.reasons
        got = Evaluation(low, args).run()
        close = {"rtol": 0, "atol": 0} if exact else {}
        for g, w in zip(got, _tuple(fn(*args)), strict=True):
            if isinstance(w, torch.Tensor):
                torch.testing.assert_close(
                    g, w, equal_nan=True, check_stride=w.numel() > 1 and 1 not in w.shape, **close
                )
            else:
                assert g == w
