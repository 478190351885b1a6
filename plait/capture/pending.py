"""Calls that do not wait for kernels: eager runs Dynamo's graph until its programs are there.

The graph is traced, lowered and planned by the first call, as ever; what goes on beside calls is
what compilers do. A call that finds all kernels built loads the programs, of both passes of a
training graph, and puts them in place for good; one that eager ran has eager's backward pass. So
two calls may differ as eager and plait do. Graphs whose calls have to agree wait for their kernels
as without the option (`why_wait`), and so does a call under hooks of saved tensors, by which a
checkpoint compares a pass with its repetition.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from plait import _native, compat
from plait.config import Config
from plait.errors import Unsupported
from plait.wrapper.program import Program

if TYPE_CHECKING:
    from plait.compile import Steps

_NAMESPACES = ("aten", "prims", "prim", "plait")


@dataclass
class Meanwhile:
    """What eager ran in the place of a graph whose kernels were being built.

    graph: its name. n_calls: so far. over: what ended that, or "".
    """

    graph: str
    n_calls: int = 0
    over: str = ""

    @property
    def line(self) -> str:
        """For people."""
        calls = f"{self.n_calls} call{'' if self.n_calls == 1 else 's'}"
        return f"{self.graph}: eager ran {calls}; {self.over or 'its kernels are being built'}"


meanwhile: deque[Meanwhile] = deque(maxlen=1000)
"""Of the last graphs of this process that were not waited for."""


def why_wait(graphs: Iterable[GraphModule], cfg: Config) -> str:
    """Why calls of a graph of ATen operators wait for its kernels, whatever the option says, or "".

    Eager and plait draw different random numbers, and a reentrant checkpoint draws those of a pass
    once more; ranks have to run collectives in one order; operators of higher order may need far
    more memory by eager, or a compiler of their own."""
    for n in (n for gm in graphs for n in gm.graph.nodes):
        target: Any = n.target
        if isinstance(target, HigherOrderOperator):
            return f"it calls {target.name()}"  # type: ignore[no-untyped-call]
        if isinstance(target, OpOverload):
            if target.namespace not in _NAMESPACES:
                return f"it calls {target}, which is a collective or not PyTorch's own"
            if not cfg.draws_as_eager and _draws(n, target):
                return f"it calls {target} for random numbers, and eager_random is off"
    return ""


def _draws(node: Node, op: OpOverload) -> bool:
    """Whether a node draws random numbers, as attention does not whose dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments = op._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False))
    return (given | node.kwargs).get("dropout_p") != 0


class Begun:
    """A graph that is compiled in steps. What the first of them raises, this does."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._building = next(steps)
        self._result: Future[Program] = Future()

    @property
    def built(self) -> bool:
        """Whether it can go on."""
        return self._result.done() or self._building.done()

    def ended(self) -> bool:
        """Whether `program` comes at once, or fails; goes on as far as that takes no waiting."""
        while not self._result.done() and self._building.done():
            self._go_on()
        return self._result.done()

    def program(self) -> Program:
        """Waited for."""
        while not self._result.done():
            self._building.exception()  # an interruption here leaves the steps alone
            self._go_on()
        return self._result.result()

    def _go_on(self) -> None:
        try:
            self._building = next(self._steps)
        except StopIteration as end:
            self._result.set_result(end.value)
        except Exception as error:  # noqa: BLE001  (it is raised where the program is wanted)
            self._result.set_exception(error)
        except BaseException:
            self._result.set_exception(Unsupported("its compilation was interrupted"))
            raise


class Pending:
    """The callable of a graph whose programs are not there yet.

    eager: runs Dynamo's graph.
    marks: of the dynamic dimensions of results, which eager does not make.
    begun: the compilations that go on meanwhile.
    finish: goes on with them, and gives what takes this one's place, or None if other kernels have
        to be built first, unless it is told to wait.
    tell: is told of the end.
    """

    def __init__(
        self,
        name: str,
        eager: Callable[..., Any],
        marks: Sequence[compat.autograd.Mark],
        begun: Sequence[Begun],
        finish: Callable[[bool], Callable[..., Any] | None],
        tell: Callable[[Meanwhile], None],
    ) -> None:
        self.__name__ = name
        self.tangents: _native.Tangents | None = None  # what holds this one
        self.eager, self._marks, self._begun = eager, marks, begun
        self._finish, self._tell = finish, tell
        self._told = Meanwhile(name)
        self._lock = threading.Lock()
        self._made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        call = self._found()
        if call is not None:
            return call(*args)
        if not self._told.n_calls:
            meanwhile.append(self._told)
        self._told.n_calls += 1
        results = self.eager(*args)
        for k, name, dims in self._marks:
            setattr(results[k], name, {*getattr(results[k], name, ()), *dims})
        return results

    def _found(self) -> Callable[..., Any] | None:
        """What takes this one's place; None while that is not there and need not be waited for."""
        waits = compat.autograd.saves_by_hooks()
        if self._made is None and self._lock.acquire(blocking=waits):
            try:
                if self._made is None and (waits or self._built()):
                    self._put_in_place(waits)
            finally:
                self._lock.release()
        return self._made

    def _built(self) -> bool:
        # While a GPU's work is recorded nothing may be loaded.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return False
        return all(b.built for b in self._begun)

    def _put_in_place(self, waits: bool) -> None:
        call = self._finish(waits)
        if call is None:
            return
        failed = "building them failed: eager runs it for good"
        self._told.over = failed if call is self.eager else "kernels run it now"
        assert self.tangents is not None, "nothing holds it"
        self._made = self.tangents.call = call
        self._tell(self._told)
