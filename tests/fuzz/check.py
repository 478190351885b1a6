"""Runs one program eagerly and by plait, call after call, and compares all that a caller can see.

Values whose bits eager alone decides are compared bit for bit. Others may be twice as far from
float64 as eager. A call that eager refuses must be refused, by the same kind of error; what eager
runs must run. What fails is tried with PyTorch's own tracing and no compiler ("aot_eager",
torch.export): where that differs from eager in the same way, the fault is not plait's. Of
infinities and NaN PyTorch's own decompositions ("aot_eager_decomp_partition") are asked, too: they
multiply in another order.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.errors import InputError, InternalError, PlaitError, Unsupported, UserError
from plait.graph import hidden_products, pack
from plait.schedule import pair_products
from plait.tools.faults.measure import HALF, NUDGES, equal, further, jitter, real
from plait.wrapper.program import CompileRecord, observers
from tests.fuzz.program import Program, Road
from tests.fuzz.traced import found_sizes, traced_strides

LOW = ("float32", "float16", "bfloat16")
_ORDER = {
    "matrices": re.compile(r"@|matmul|einsum|linear|conv|mm\(|mv\(|dot\("),
    "sums": re.compile(
        r"@|sum|mean|matmul|einsum|linear|conv|var|std|norm|prod|dot|mm|mv|_add|accumulate"
    ),
    "products": re.compile(r"prod"),
    "bounds": re.compile(r"amin|amax|\.min\(|\.max\(|maximum|minimum|fmax|fmin|cl(am|i)p"),
}
"""Calls whose order of elements is free. Of sums it decides whether what overflows is an infinity
or NaN, of products whether it meets a zero, of the least and the greatest element which of 0.0 and
-0.0 it is (of two, eager's vectors and tails differ), of products of matrices whether they begin at
0.0."""

_STEPS = re.compile(r"::(relu6|hard(sigmoid|swish|tanh|shrink)|softshrink|[sc]?elu)_?(\.|$)")
"""Operators of ATen that are defined by steps. Their gradient at NaN is free."""


_BITS = re.compile(r"\.view\(torch\.")
"""Bits that are read as another type. Of a tensor in float64 they give other sizes and other
numbers, with which an index can be out of bounds: on a GPU that ends the process."""

_FLOW = re.compile(r"\b(cond|while_loop|scan|map_)\(|REGIONS\[")

_OVER_ITSELF = re.compile(r"(\w+)\[1:\]\.copy_\(\1\[:-1\]\)")


@dataclass(frozen=True)
class Outcome:
    """kind: "ok"; "refused": eager's error was plait's too; "declined": plait.compile and packages
    turned away arguments that are not as the example; "torch": PyTorch's tracing has this fault;
    "fault". what: of a fault, its class and text."""

    kind: str
    what: str = ""
    graphs: int = 0  # compiled by plait


class Fault(AssertionError):
    pass


class _ForEager(Exception):
    """A program is eager's to run: what shares memory among its elements, AOTAutograd gets
    wrong."""


def check(p: Program) -> Outcome:
    """What becomes of a program."""
    grads = tuple(o.name for o in p.operands if o.grad)
    records: list[CompileRecord] = []
    token = observers.set((*observers.get(), records.append))
    try:
        found = judge(p.source(), p.road, grads, p.inexact, p.device)
    finally:
        observers.reset(token)
    return replace(found, graphs=len(records))


def passes(p: Program) -> None:
    """Raises AssertionError with a program to paste and run where p shows a fault."""
    found = check(p)
    assert found.kind != "fault", f"{found.what}\n\n{p.repro()}"


def with_road(p: Program, **changes: Any) -> Program:
    """p on a road with these changes."""
    return replace(p, road=replace(p.road, **changes))


def check_source(
    source: str, road: Road, grads: Sequence[str], inexact: Sequence[str], device: str
) -> None:
    """For repros. Raises Fault."""
    found = judge(source, road, grads, inexact, device)
    print(found.kind, found.what)
    if found.kind == "fault":
        raise Fault(found.what)


def _outcome(run: _Run) -> Outcome:
    try:
        return run.outcome("plait")
    except _ForEager:
        run.strict = False
        return run.outcome("plait")


def judge(
    source: str, road: Road, grads: Sequence[str], inexact: Sequence[str], device: str
) -> Outcome:
    if device != "cpu":
        torch.backends.cudnn.conv.fp32_precision = (
            "ieee"  # else eager's error is that of its choice
        )
    run = _Run(source, road, grads, inexact, device)
    try:
        # Sums that are products are taken for them however small they are.
        with patch.multiple(hidden_products, LEAST_SIDE=2, MARGIN=-1.0):
            return _outcome(run)
    except Fault as fault:
        if "InternalError" in str(fault) or str(fault).startswith("internal"):
            return Outcome("fault", str(fault))
        over_itself = str(fault).startswith("wrong") or "refer to a single memory location" in str(
            fault
        )
        if over_itself and _OVER_ITSELF.search(
            source
        ):  # refused by strides that tracing gives, which may not be eager's
            return Outcome("declined", "which element is copied first is eager's secret")
        lazy = ": conj is " in str(fault) or road.way != "compile"
        if str(fault).startswith(("metadata", "aliasing")) and lazy and ".conj(" in source:
            return Outcome(
                "declined", str(fault)
            )  # lazily conjugated views of what was computed come as copies
        traces = str(fault).startswith("raises")
        if road.threads > 1 and "using FX to symbolically trace" in str(fault):
            return Outcome("torch", str(fault))  # one thread sees what another one traces
        if road.params and road.way != "compile" and not traces:
            return Outcome("fault", str(fault))  # an exported module keeps its first parameters
        unordered = str(fault).startswith("wrong") and re.search(r"\b(inf|nan)\b", str(fault))
        rounds = road.grad and str(fault).startswith("wrong") and "while_loop(" in source
        if rounds and not unordered:  # PyTorch's gradients of no round are those of one
            return Outcome("fault", str(fault))
        for who in ("torch", "decompositions") if unordered else ("torch",):
            try:
                run.outcome(who)
            except Fault as other:
                if str(other).partition(":")[0] == str(fault).partition(":")[0]:
                    return Outcome("torch", str(fault))
            except Exception as error:  # noqa: BLE001 - whatever torch's own tracing raises
                if traces:
                    return Outcome("torch", f"{fault}\nPyTorch: {type(error).__name__}")
        return Outcome("fault", str(fault))


@dataclass
class _Seen:
    """What a call gave: results, arguments afterwards, gradients or tangents; or an error."""

    results: list[Any]
    inputs: list[Any]
    before: list[Any]
    grads: list[Tensor | None]
    error: BaseException | None = None


class _Run:
    def __init__(
        self, source: str, road: Road, grads: Sequence[str], inexact: Sequence[str], device: str
    ) -> None:
        module = ModuleType("fuzzed")
        sys.modules["fuzzed"] = module  # Dynamo looks globals up there
        scope = vars(module)
        exec(compile(source, "<fuzzed>", "exec"), scope)
        self.scope, self.road, self.device = scope, road, device
        # Eager takes tangents, views of inputs that are lazily conjugated, and writes to operands
        # that overlap.
        overlaps = re.search(r"'(expanded|expanded_last|one|overlapping|windows)'", source)
        writes = re.search(r"\w_\(|out=|\] [-+*/|&^]?= ", source)
        self.strict = (
            road.grad != "forward" and ".conj(" not in source and not (overlaps and writes)
        )
        self.f, self.calls = scope["f"], scope["CALLS"]
        self.args = list(self.f.__code__.co_varnames[: self.f.__code__.co_argcount])
        self.grads = [a in grads for a in self.args]
        self.outputs, self.truth = _truth(source, set(inexact), promote_all=bool(road.grad))
        self.changes = _truth(source, set(inexact), promote_all=True)[
            1
        ]  # the truth of arguments that are written
        self.inexact = set(inexact)
        self.dtypes: list[Any] = []  # of eager's results
        self.traced = ""  # the last difference in strides that is PyTorch's tracing
        self.source = source
        self.flow = bool(_FLOW.search(source))  # its gradients are 0 where eager has none
        self.order = {name for name, calls in _ORDER.items() if calls.search(source)}

    # -------------------------------------------------------------------------- running
    def inputs(self, call: dict[str, Any]) -> list[Any]:
        made = list(self.scope["inputs"](call, self.device))
        if self.road.grad == "backward":
            for k, wanted in enumerate(self.grads):
                if wanted:
                    made[k].requires_grad_()
        return made

    def call(self, run: Callable[..., Any], call: dict[str, Any], wide: bool = False) -> _Seen:
        """What a call gives. wide: of float64 in place of smaller floats."""
        seen = _Seen([], [], [], [])
        try:
            args = self.inputs(call)
            if wide:
                args = [
                    _up(x.detach()).requires_grad_(x.requires_grad)
                    if isinstance(x, Tensor) and x.is_floating_point()
                    else x
                    for x in args
                ]
            seen.inputs, seen.before = args, list(args)
            if self.road.grad == "forward":
                self._forward(run, seen)
            else:
                out = run(*args)
                seen.results = list(out) if isinstance(out, (tuple, list)) else [out]
            if self.road.grad == "backward":
                self._backward(seen)
            if self.device != "cpu":
                # What a kernel found wrong is an error of this call.
                torch.accelerator.synchronize()
        except Exception as error:  # noqa: BLE001 - compared with eager's
            seen.error = error
        return seen

    def _backward(self, seen: _Seen) -> None:
        self.dtypes = self.dtypes or [getattr(x, "dtype", None) for x in seen.results]
        used = [
            (x, HALF.get(dtype, 2.0**-24))
            for x, dtype in zip(seen.results, self.dtypes, strict=False)
            if isinstance(x, Tensor) and x.requires_grad and not x.is_complex()
        ]
        if used:
            ends = [
                jitter(x, most, _nudge).sum() if _nudge else x.double().sum() for x, most in used
            ]
            sum(ends, torch.zeros((), dtype=torch.float64, device=self.device)).backward()
        leaves = [x for x, wanted in zip(seen.inputs, self.grads, strict=True) if wanted]
        seen.grads = [x.grad if x.is_leaf else None for x in leaves]

    def _forward(self, run: Callable[..., Any], seen: _Seen) -> None:
        with forward_ad.dual_level():
            args = [
                forward_ad.make_dual(x, torch.ones_like(x)) if wanted else x
                for x, wanted in zip(seen.inputs, self.grads, strict=True)
            ]
            out = [forward_ad.unpack_dual(x) if isinstance(x, Tensor) else x for x in run(*args)]
            seen.results = [x.primal if isinstance(x, tuple) else x for x in out]
            seen.grads = [
                None if not isinstance(x, tuple) or x.tangent is None else x.tangent for x in out
            ]

    # -------------------------------------------------------------------------- compiling
    def compiled(self, who: str) -> Callable[..., Any]:
        """f by plait, or by PyTorch's tracing alone."""
        r = self.road
        f: Any = _Module(self.f, self.args, r) if r.params else self.f
        f = self.holder() if r.held else f
        if r.way == "compile" or who == "decompositions":
            options = {"wrapper": r.wrapper, "isa": r.isa, "strict": self.strict}
            if who != "plait":
                backend = "aot_eager" if who == "torch" else "aot_eager_decomp_partition"
                made = torch.compile(f, backend=backend, dynamic=r.dynamic)
            else:
                made = torch.compile(f, backend="plait", dynamic=r.dynamic, options=options)
            return f.around(made) if isinstance(f, _Wrapped) else made
        example = self.inputs(self.calls[0])
        if isinstance(f, _Wrapped):
            example = f.take(example)
        if who == "torch":
            module = f if isinstance(f, torch.nn.Module) else _Function(f)
            made = torch.export.export(
                module, tuple(example), dynamic_shapes=self._shapes(example)
            ).module()
        elif r.way == "direct":
            options = {"wrapper": r.wrapper, "isa": r.isa}
            if r.freeze:  # what is small is packed too
                options["small_matmul_flops"] = 0
                pack.FEW_COLUMNS = 1
                pair_products.MIN_ROWS = 1
                pair_products.MIN_NBYTES = 0
            made = plait.compile(
                f, tuple(example), self._shapes(example), options=options, freeze=r.freeze
            )
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "fuzzed.plait")
                shapes = self._shapes(example)
                plait.package(f, path, tuple(example), shapes, machines=[_machine()], fold=r.freeze)
                made = plait.load(path)
        return f.around(made) if isinstance(f, _Wrapped) else made

    def holder(self) -> _Holder:
        """f as a module that holds the buffer, with its value of the first call."""
        at = self.args.index(self.road.held)
        return _Holder(self.f, at, self.inputs(self.calls[0])[at])

    def _shapes(self, example: Sequence[Any]) -> Any:
        if not self.road.dynamic:
            return None
        dim = torch.export.Dim
        shapes = [
            dict.fromkeys(range(x.ndim), dim.AUTO) if isinstance(x, Tensor) else dim.AUTO
            for x in example
        ]
        return tuple(shapes) if not self.road.params else {"args": tuple(shapes)}

    def all_calls(self, who: str) -> list[_Seen]:
        torch._dynamo.reset()
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch._dynamo.config.patch(
                capture_scalar_outputs=self.road.capture,
                capture_dynamic_output_shape_ops=self.road.capture
            ))  # fmt: skip
            if not self.road.grad:
                stack.enter_context(torch.no_grad())
            try:
                run = self.compiled(who)
            except Exception as error:  # noqa: BLE001 - compared with eager's
                return [_Seen([], [], [], [], error)]
            if self.road.threads > 1:
                self.call(run, self.calls[0])
                grad = torch.is_grad_enabled()

                def threaded(call: dict[str, Any]) -> _Seen:
                    with torch.set_grad_enabled(grad):
                        return self.call(run, call)

                with ThreadPoolExecutor(self.road.threads) as pool:
                    return list(pool.map(threaded, self.calls))
            return [self.call(run, c) for c in self.calls]

    # -------------------------------------------------------------------------- judging
    def outcome(self, who: str) -> Outcome:
        grad = contextlib.nullcontext() if self.road.grad else torch.no_grad()
        with warnings.catch_warnings(), grad:
            warnings.simplefilter("ignore")
            held = self.holder() if self.road.held else None
            eager = [
                self.call(self.f if held is None else held.around(held), c) for c in self.calls
            ]
        if any(isinstance(e.error, torch.AcceleratorError) for e in eager):
            return Outcome("declined", "eager loses the device")
        if self.device != "cpu" and self._divides_by_zero():
            return Outcome(
                "declined", "an integer is divided by 0, which gives any number on a GPU"
            )
        got = self.all_calls(who)
        kinds = set()
        if len(got) == 1 and len(self.calls) > 1 and got[0].error is not None:  # at compile time
            kinds.add(self._error(eager[0], got[0].error, self.calls[0]))
            return Outcome(max(kinds))
        for call, e, g in zip(self.calls, eager, got, strict=True):
            if e.error is not None or g.error is not None:
                kinds.add(self._error(e, g.error, call))
            else:
                self._same(call, e, g)
                kinds.add("ok")
        if self.traced:
            return Outcome("torch", self.traced)
        return Outcome("ok" if "ok" in kinds else max(kinds))

    def _divides_by_zero(self) -> bool:
        inputs = self.scope["inputs"]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in self.calls:
                try:
                    self.f(*inputs(call, "cpu"))
                except RuntimeError as error:
                    if str(error) == "ZeroDivisionError":
                        return True
                except Exception:  # noqa: BLE001 - other errors are compared on the device
                    continue
        return False

    def _error(self, e: _Seen, got: BaseException | None, call: dict[str, Any]) -> str:
        where = f"call {self.calls.index(call)}"
        if e.error is None:
            assert got is not None
            differs = any(call[k] != self.calls[0][k] for k in ("sizes", "ints"))
            if self.road.way != "compile" and isinstance(got, InputError) and differs:
                return "declined"
            if (
                self.road.way != "compile"
                and self.road.grad == "forward"
                and isinstance(got, InputError)
            ):
                return "declined"  # a program drops tangents
            if self.road.way != "compile" and _is_strange_write(got):
                return "declined"
            if (
                self.road.params
                and isinstance(got, PlaitError)
                and not isinstance(got, InternalError)
            ):
                return "declined"
            if self.road.way != "compile" and "aliased inputs that are mutated" in str(got):
                return "declined"  # arguments in one memory, which are written
            if "gives control flow a tensor of size 1" in str(got):
                return "declined"  # Dynamo's own error, where strides that are equal may part
            if "might be aliasing the input or the output" in str(got):
                return "declined"  # PyTorch's own word on graphs within an operator
            if re.search(r"a size expression overflows|does not fit into 64 bits", str(got)):
                return "declined"  # Python's integers have no end
            if self.road.grad == "forward" and "Runtime assertion failed" in str(got):
                return "declined"  # eager runs the graph, and what tracing asserted in it
            if _is_promise(got) or isinstance(got, UserError) and "dynamic_shapes" in str(got):
                return "declined"
            loops = "UncapturedHigherOrderOpError" in str(
                got
            )  # what PyTorch makes of their strides
            if self.strict and (_is_strange_write(got) or loops):
                raise _ForEager
            raise Fault(
                f"raises where eager runs: {where}: {type(got).__name__}: {str(got)[:1200]}"
            )
        if got is None and _line_of(e.error) in _unneeded(self.source):
            return "declined"  # what nobody needs is not computed, whatever is wrong with it
        if got is None:
            raise Fault(
                f"runs where eager raises: {where}: {type(e.error).__name__}: {str(e.error)[:300]}"
            )
        if isinstance(got, (InternalError, SystemError)):
            raise Fault(
                f"internal error: {where}: {got}; eager {type(e.error).__name__}: "
                f"{str(e.error)[:300]}"
            )
        if _is_strange_write(got):
            return "declined"  # before anything runs, whatever else eager finds
        if not _same_kind(e.error, got, self.road.way) and not self._also(call, got):
            raise Fault(
                f"another error: {where}: {type(got).__name__}: {str(got)[:300]}\n"
                f"eager {type(e.error).__name__}: {str(e.error)[:300]}"
            )
        return "refused"

    def _also(self, call: dict[str, Any], got: BaseException) -> bool:
        """Whether eager raises this error too, where it does not stop at the user's checks: two
        errors of one call come in any order."""
        scope = dict(self.scope)
        exec(
            compile(
                re.sub(r"(?m)^    torch\._check\(.*$", "    pass", self.source),
                "<unchecked>",
                "exec",
            ),
            scope,
        )
        other = self.call(scope["f"], call).error
        return other is not None and _same_kind(other, got, self.road.way)

    def _same(self, call: dict[str, Any], e: _Seen, g: _Seen) -> None:
        where = f"call {self.calls.index(call)}"
        if len(e.results) != len(g.results):
            raise Fault(f"number of results: {where}: {len(g.results)}, eager {len(e.results)}")
        rows = [
            ("output", k, a, b) for k, (a, b) in enumerate(zip(e.results, g.results, strict=True))
        ]
        if self.road.way == "compile" and not (self.road.params or self.road.held):
            rows += [
                ("argument", k, a, b)
                for k, (a, b) in enumerate(zip(e.inputs, g.inputs, strict=True))
            ]

        @cache
        def truth(what: str, nudge: int) -> _Seen | None:
            """What comes of numbers half a unit in the last place off, of none for 0."""
            global _nudge
            if not self.inexact and not self.road.grad:
                return None
            lost = (
                self.device != "cpu"
            )  # an index beyond such other sizes takes the device from the process
            if _BITS.search(self.source) and (what == "argument" or self.road.grad or lost):
                return None
            _nudge = nudge
            try:
                if (
                    what == "argument" or "" in self.inexact
                ):  # what a statement writes is in float64 if all is
                    found = self.call(self.changes, call, wide=True)
                else:
                    found = self.call(self.truth, call, wide=bool(self.road.grad))
            finally:
                _nudge = 0
            return None if found.error is not None else found

        def truths(what: str, place: str, k: int, nudges: Sequence[int]) -> list[Any]:
            seen = [t for n in nudges if (t := truth(what, n)) is not None]
            return [values[k] for t in seen if k < len(values := getattr(t, place))]

        def overflows() -> bool:
            return watched().overflow

        @cache
        def watched() -> _Watch:
            with _Watch() as found:
                self.call(self.f, call)
            return found

        for what, k, a, b in rows:
            exact = self.outputs[k] not in self.inexact if what == "output" else not self.inexact
            place = "results" if what == "output" else "inputs"
            t = None if exact else next(iter(truths(what, place, k, (0,))), None)
            moved = partial(truths, what, place, k, NUDGES)
            b = self._in_order(call, e, k, b) if what == "output" else b
            compare(a, b, t, exact, f"{where}, {what} {k}", self.order, moved, overflows)
        if self.road.grad:
            if len(e.grads) != len(g.grads):
                raise Fault(f"number of gradients: {where}")
            free = self.road.grad == "backward" and watched().nan_at_step
            for k, (a, b) in enumerate(zip(e.grads, g.grads, strict=True)):
                none = a is None and self.flow and isinstance(b, Tensor) and not b.any()
                if (a is None) != (b is None) and not none:
                    raise Fault(f"gradient: {where}: {k} is {b}, eager {a}")
                if a is not None and b is not None and not free:
                    t = next(iter(truths("output", "grads", k, (0,))), None)
                    moved = partial(truths, "output", "grads", k, NUDGES)
                    compare(a, b, t, False, f"{where}, gradient {k}", self.order, moved, overflows)
        self._metadata(call, e, g)

    def _in_order(self, call: dict[str, Any], e: _Seen, k: int, x: Any) -> Any:
        """x, result k of a call of plait, laid out as eager's where its strides are those that
        tracing promised."""
        want = e.results[k]
        if not isinstance(x, Tensor) or not isinstance(want, Tensor) or x.shape != want.shape:
            return x
        have = _counting(x, x.stride())
        if have == _counting(want, want.stride()):
            return x
        promised = traced_strides(self.f, self.inputs(call), e.results)[k]
        if promised is None or have != _counting(x, promised):
            return x
        self.traced = f"strides: output {k}: {x.stride()}, as traced, eager {want.stride()}"
        return torch.empty_strided(want.shape, want.stride(), dtype=x.dtype, device=x.device).copy_(
            x
        )

    def _metadata(self, call: dict[str, Any], e: _Seen, g: _Seen) -> None:
        """Tracing does not know whether there can be a view of what has a size that is found at run
        time. Where a copy begins in memory of its own that none sees, as those of `select_scatter`,
        may be 0."""
        where = f"call {self.calls.index(call)}"
        direct = self.road.way != "compile"
        shared = {name for pair in _aliases(e) for name in pair}
        for k, (a, b) in enumerate(zip(e.results, g.results, strict=True)):
            if not isinstance(a, Tensor):
                continue
            facts: list[tuple[str, Any, Any]] = []
            if (
                a.numel()
                and not (direct and self.road.held)  # a buffer keeps its strides
                and (f"o{k}" in shared or b.storage_offset())
                and "_scatter(" not in self.source
            ):
                facts.append(("storage offset", a.storage_offset(), b.storage_offset()))
            facts += [("conj", a.is_conj(), b.is_conj()), ("neg", a.is_neg(), b.is_neg())]
            if not direct and self.road.grad != "forward":
                facts.append(("requires_grad", a.requires_grad, b.requires_grad))
            for name, want, have in facts:
                if want != have:
                    raise Fault(f"metadata: {where}, output {k}: {name} is {have}, eager {want}")
        if self.road.params or self.road.held:
            return
        have, want = _aliases(g), _aliases(e)
        if have != want and set(have) < set(want):
            found = found_sizes(self.f, self.inputs(call), len(e.results))
            unknown = [
                pair for pair in want if pair not in have and all(found.get(name) for name in pair)
            ]
            if len(have) + len(unknown) == len(want):
                self.traced = f"aliasing: {where}: a view or a copy, as its size says"
                return
        if have != want:
            raise Fault(f"aliasing: {where}: {have}, eager {want} (o: output, i: argument)")


def _aliases(seen: _Seen) -> list[tuple[str, str]]:
    """Which results share memory with which results and arguments."""
    named = [(f"o{k}", x) for k, x in enumerate(seen.results)] + [
        (f"i{k}", x) for k, x in enumerate(seen.before)
    ]
    where = [
        (n, x.untyped_storage().data_ptr()) for n, x in named if isinstance(x, Tensor) and x.numel()
    ]
    pairs = []
    for k, (n, p) in enumerate(where):
        pairs += [(n, m) for m, q in where[k + 1 :] if p == q and p and n[0] == "o"]
    return pairs


def _counting(x: Tensor, strides: Sequence[int]) -> list[int]:
    """Strides of the dimensions of more than one element."""
    return [s for n, s in zip(x.shape, strides, strict=True) if n > 1] if x.numel() else []


def compare(
    e: Any,
    g: Any,
    t: Any,
    exact: bool,
    what: str,
    order: Set[str] = frozenset(),
    nudged: Callable[[], Sequence[Any]] = lambda: (),
    overflows: Callable[[], bool] = lambda: False,
) -> None:
    """Raises Fault where g is not what e is; t is the same from float64, None if it is not known.
    nudged: t from inputs that are a little off; where it is far from t, rounding alone decides. Nor
    is there a measure where eager overflows. order: names of `_ORDER`, the calls of the program
    whose order is free. overflows: whether a sum on the way is infinite in eager: in another order
    it may be NaN, whatever is made of it then."""
    if not isinstance(e, Tensor):
        same = type(e) is type(g) and (e == g or e != e and g != g)
        close = (
            isinstance(e, float)
            and isinstance(g, float)
            and not exact
            and math.isclose(e, g, rel_tol=1e-12)
        )
        if not (same or close):
            raise Fault(f"wrong: {what}: {g!r}, eager {e!r}")
        return
    if not isinstance(g, Tensor):
        raise Fault(f"wrong: {what}: {type(g)}")
    if (g.shape, g.dtype) != (e.shape, e.dtype):
        raise Fault(f"shape: {what}: {g.dtype}{list(g.shape)}, eager {e.dtype}{list(e.shape)}")
    strides = [
        (d, a, b)
        for d, a, b in zip(e.shape, g.stride(), e.stride(), strict=True)
        if d > 1 and e.numel()
    ]
    if any(a != b for _, a, b in strides):
        raise Fault(f"strides: {what}: (size, stride, stride of eager): {strides}")
    e, g = real(e), real(g)
    same = equal(g, e)
    if e.is_floating_point() and exact and not order & {"bounds", "matrices"}:
        same &= (g.signbit() == e.signbit()) | g.isnan()
    if bool(same.all()):
        return
    if exact:
        bad = ~same
        raise Fault(
            f"wrong: {what}: {int(bad.sum())} of {bad.numel()}: {g[bad][:5]}, eager {e[bad][:5]}"
        )
    if t is None:  # float64 cannot tell
        return
    t = real(t)
    if t.shape != e.shape:
        return
    bad = further(g, e, t)
    if "sums" in order:
        bad &= ~(t.isinf() & g.isnan())
        lost = g.isnan() | ~t.isfinite()
        if bool((bad & lost).any()) and overflows():
            bad &= ~lost
    if "products" in order:
        bad &= t.isfinite() & ~g.isnan()
    for other in nudged() if bool(bad.any()) else ():
        if other.shape == t.shape:
            bad &= further(g, e, t, real(other))
    if bool(bad.any()):
        raise Fault(f"wrong: {what}: plait {g[bad][:5]}, eager {e[bad][:5]}, float64 {t[bad][:5]}")


def _has_nan(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(x.isnan().any())


def _low(x: Tensor) -> bool:
    return str(x.dtype).removeprefix("torch.") in LOW


def _same_kind(want: BaseException, got: BaseException, way: str) -> bool:
    """Whether this error is the same kind as eager's: its class, or that of tracing or checking
    arguments."""
    if (
        isinstance(got, type(want))
        or isinstance(want, type(got))
        or str(want).startswith("setStorage")
    ):
        return True  # eager tripped over memory that is not there
    if type(got).__module__.startswith("torch._dynamo") or isinstance(got, PlaitError):
        return way != "compile" or not isinstance(got, Unsupported)
    return isinstance(got, RuntimeError) and bool(re.search(r"size|that was traced", str(got)))


_SIZES = ("shape", "ndim", "dtype", "device", "size", "stride", "numel", "dim")


def _unneeded(source: str) -> set[int]:
    """The lines of f whose values no result needs: at most their sizes."""
    f = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "f")
    needed, unneeded = set[str](), set[int]()
    for line in reversed(f.body):
        made = line.targets[0] if isinstance(line, ast.Assign) else None
        if isinstance(made, ast.Name) and made.id not in needed:
            unneeded.add(line.lineno)
        else:
            needed |= _values_read(line)
    return unneeded


def _values_read(tree: ast.AST) -> set[str]:
    """The names whose values are read, and not only their sizes."""
    if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name):
        return set() if tree.attr in _SIZES else {tree.value.id}
    own = {tree.id} if isinstance(tree, ast.Name) else set[str]()
    return own.union(*map(_values_read, ast.iter_child_nodes(tree)))


def _line_of(error: BaseException) -> int:
    """The line of f that raised this."""
    lines = traceback.walk_tb(error.__traceback__)
    found = [n for frame, n in lines if frame.f_code.co_filename == "<fuzzed>"]
    return found[0] if found else 0


def _is_strange_write(error: BaseException) -> bool:
    """Whether the write is one that tracing cannot follow: to elements that share memory, or to
    windows with gaps between them."""
    strange = ("share memory", "a write to windows", "a write to an input, of which")
    return isinstance(error, Unsupported) and any(text in str(error) for text in strange)


def _is_promise(error: BaseException) -> bool:
    """Whether a result whose size depends on data was not of the size that tracing took for
    granted, in these words: PyTorch unifies such sizes without a word, and a clear error is all
    that can be done."""
    return isinstance(error, RuntimeError) and "traced" in str(error)


def _machine() -> str:
    from plait.runtime.toolchain import detect_isa

    return detect_isa().name


class _Watch(TorchDispatchMode):
    """What eager met. overflow: the result of a sum is infinite; nan_at_step: an operator that is
    defined by steps had a NaN as argument."""

    overflow = False
    nan_at_step = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _STEPS.search(func.name()):
            self.nan_at_step |= any(_has_nan(x) for x in args)
        made = func(*args, **(kwargs or {}))
        if _ORDER["sums"].search(func.name() + "("):
            for x in made if isinstance(made, (tuple, list)) else (made,):
                self.overflow |= (
                    isinstance(x, Tensor) and x.is_floating_point() and bool(x.isinf().any())
                )
        return made


class _Function(torch.nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


class _Wrapped(torch.nn.Module):
    """f with some of its arguments in the module."""

    def take(self, args: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: compiled(*self.take(args))


class _Holder(_Wrapped):
    """f with argument number `at` as a buffer, which a call assigns: a result like it, or the next
    number."""

    def __init__(self, f: Callable[..., Any], at: int, value: Tensor) -> None:
        super().__init__()
        self.f, self.at = f, at
        self.register_buffer("held", value)

    def take(self, args: Sequence[Any]) -> list[Any]:
        return [x for k, x in enumerate(args) if k != self.at]

    def forward(self, *args: Any) -> Any:
        old = self.held
        out = self.f(*args[: self.at], old, *args[self.at :])
        alike = [
            x for x in out if isinstance(x, Tensor) and (x.dtype, x.shape) == (old.dtype, old.shape)
        ]
        self.held = alike[-1] if alike else old + 1
        return out


class _Module(_Wrapped):
    """f with some operands as parameters; `around` puts a call's own parameters in place of the
    last ones."""

    def __init__(self, f: Callable[..., Any], args: Sequence[str], road: Road) -> None:
        super().__init__()
        self.f, self.args, self.params = f, list(args), list(road.params)
        self.freeze = road.freeze and road.way != "package"
        self.in_place, self.others = road.in_place, set[str]()

    def take(self, args: Sequence[Any]) -> list[Any]:
        for name, x in zip(self.args, args, strict=True):
            if name in self.params:
                self._put(name, x)
        return [x for name, x in zip(self.args, args, strict=True) if name not in self.params]

    def _put(self, name: str, x: Any) -> None:
        """As a new parameter. One that is frozen has other values when it is compiled, and gets
        those of the first call in place; later a result may be a view of it, unless in_place."""
        old = getattr(self, name, None)
        same = old is not None and (old.shape, old.dtype) == (x.shape, x.dtype)
        if self.freeze and same and (name in self.others or self.in_place):
            self.others.discard(name)
            with torch.no_grad():
                old.copy_(x)
        else:
            first = self.freeze and old is None
            made = x.clone().zero_() if first else x
            self.others |= {name} if first else set()
            setattr(self, name, torch.nn.Parameter(made, requires_grad=False))

    def forward(self, *args: Any) -> Any:
        rest = iter(args)
        return self.f(*(getattr(self, n) if n in self.params else next(rest) for n in self.args))


_nudge = 0  # which numbers are off, 0: none


def _up(x: Any) -> Any:
    """A float tensor as float64; all elements a little larger or smaller where they are to be
    nudged."""
    if isinstance(x, Tensor) and (_low(x) or _nudge and x.dtype == torch.float64):
        return jitter(x, HALF.get(x.dtype, 2.0**-24), _nudge) if _nudge else x.double()
    return x.to(torch.complex128) if isinstance(x, Tensor) and x.dtype == torch.complex64 else x


class _Promote(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("float", "half", "bfloat16"):
            return ast.Call(ast.Name("_up", ast.Load()), [node], [])
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id[1:].isdigit():
            return ast.Call(ast.Name("_up", ast.Load()), [node], [])
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in LOW:
            return ast.Attribute(node.value, "float64", ast.Load())
        self.generic_visit(node)
        return node


def _truth(
    source: str, inexact: set[str], promote_all: bool
) -> tuple[list[str], Callable[..., Any]]:
    """Names of f's results, and f with inexact statements (or all) in float64."""
    tree = ast.parse(source)
    f = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "f")
    promote = _Promote()
    names: list[str] = []
    for k, line in enumerate(f.body):
        if isinstance(line, ast.Return):
            assert isinstance(line.value, ast.Tuple)
            names = [x.id for x in line.value.elts if isinstance(x, ast.Name)]
        elif isinstance(line, ast.Assign) and isinstance(name := line.targets[0], ast.Name):
            line.value = (
                promote.visit(line.value) if promote_all or name.id in inexact else line.value
            )
        f.body[k] = line
    scope: dict[str, Any] = {"_up": _up}
    exec(compile(ast.fix_missing_locations(tree), "<float64>", "exec"), scope)
    return names, scope["f"]
