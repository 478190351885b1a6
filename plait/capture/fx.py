"""`plait.FxCompiler`: the base of compilers out of tree that are handed plait's programs as FX
graphs.

A subclass overrides `compile_graph` and is itself a backend of torch.compile. docs/fx.md says what
the graphs are made of, examples/toy_accelerator.py is a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from plait.capture.backend import plait_backend
from plait.errors import PlaitError, UserError
from plait.wrapper.fx import load_program


class FxCompiler:
    """`torch.compile(model, backend=MyCompiler())`: plait captures, fuses and plans,
    `compile_graph` makes it run.

    mode and options of torch.compile are plait's.
    """

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        """What runs in place of gm: takes its inputs and returns its outputs, a sequence.

        Called for the inference graph, or for the forward graph and, at the first backward pass,
        for the backward graph. A callable with a true attribute `_boxed_call` takes all inputs in
        one list, which it may empty."""
        raise NotImplementedError(f"{type(self).__name__} has to define compile_graph")

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """What torch.compile calls."""
        chosen = {**(options or {}), "wrapper": "fx"}
        target = partial(load_program, compiler=self._compile_graph)
        return plait_backend(gm, example_inputs, mode=mode, options=chosen, target=target)

    def _compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        """compile_graph, with its mistakes told as such."""
        name = f"{type(self).__name__}.compile_graph"
        try:
            run = self.compile_graph(gm)
        except PlaitError:
            raise
        except Exception as error:
            raise UserError(f"{name} failed with {type(error).__name__}: {error}") from error
        if not callable(run):
            raise UserError(f"{name} gave {run!r}", hint="return what runs the graph")
        return run
