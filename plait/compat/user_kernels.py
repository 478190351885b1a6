"""Which arguments a user's Triton kernel writes.

PyTorch's own analysis takes a kernel that it does not follow for one that writes all it is given
(one with defaults that the call leaves out), and misses what reductions and scatters of tensor
descriptors write, what is written by a pointer that a loop swaps or a block is given, and by
pointers that come from memory. This one takes its place while a graph is made functional.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import torch

from plait.errors import Unsupported

_WRITES = frozenset((
    "tt.store", "tt.atomic_cas", "tt.atomic_rmw", "tt.descriptor_reduce", "tt.descriptor_scatter",
    "tt.descriptor_store",
))  # fmt: skip
"""Operations that write to where their first operand points."""
_LOADS = frozenset((
    "tt.atomic_cas", "tt.atomic_rmw", "tt.descriptor_gather", "tt.descriptor_load", "tt.load",
))  # fmt: skip
"""Operations whose results come from memory."""
_BASES = frozenset((
    "tt.addptr", "tt.advance", "tt.make_tensor_descriptor", "tt.make_tensor_ptr",
))  # fmt: skip
"""Operations whose result points to where their first operand does."""
_KNOWN = _WRITES | _LOADS | _BASES | frozenset((
    "tt.assert", "tt.bitcast", "tt.broadcast", "tt.cat", "tt.clampf", "tt.dot",
    "tt.dot_scaled", "tt.expand_dims", "tt.fp_to_fp", "tt.gather", "tt.get_num_programs",
    "tt.get_program_id", "tt.histogram", "tt.int_to_ptr", "tt.join", "tt.make_range",
    "tt.map_elementwise", "tt.mulhiui", "tt.precise_divf", "tt.precise_sqrt", "tt.print",
    "tt.ptr_to_int", "tt.reduce", "tt.reshape", "tt.scan", "tt.splat", "tt.split", "tt.trans",
    "tt.unsplat",
))  # fmt: skip
"""Operations that write nowhere else. Another one writes to all that it is given, unless it says
that it is pure."""
_DIALECTS = ("arith", "cf", "math", "scf", "ub")
_ENDS = (".condition", ".return", ".yield")
LOADED = -1
"""In the place of a parameter: a pointer from memory."""


@dataclass
class _Function:
    """params: its parameters. returned: what it may return. written: values that are written to.
    calls: the function and its operands."""

    params: list[int]
    returned: list[list[int]]
    written: list[int]
    calls: list[tuple[str, list[int]]]


class Flow:
    """Of what the values of a module in Triton's IR are made, in one walk."""

    def __init__(self, module: Any) -> None:
        self.kernel = ""
        self.functions: dict[str, _Function] = {}
        self._sources: dict[int, set[int]] = defaultdict(set)
        self._results: dict[int, tuple[str, int, list[int]]] = {}  # of calls
        self._written: list[int] = []
        self._calls: list[tuple[str, list[int]]] = []
        self._blocks: dict[int, dict[int, list[int]]] = defaultdict(dict)  # by region
        self._ends: dict[int, list[tuple[str, list[int]]]] = defaultdict(list)
        module.walk(self._visit)

    def written_by(self, name: str) -> set[int]:
        """The positions of the parameters that a function writes to, or LOADED."""
        fn = self.functions[name]
        made = list(fn.written)
        for callee, operands in fn.calls:
            positions = self.written_by(callee)
            made += (operands[k] for k in positions if k != LOADED)
            made += (LOADED for k in positions if k == LOADED)
        return self._positions(fn, made)

    def _positions(self, fn: _Function, values: Iterable[int]) -> set[int]:
        """The parameters that values may be made of."""
        found, seen, left = set(), set(), list(values)
        place = {value: k for k, value in enumerate(fn.params)}
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            if value == LOADED:
                found.add(LOADED)
            elif value in place:
                found.add(place[value])
            elif value in self._results:
                left += self._from_call(*self._results[value])
            else:
                left += self._sources[value]
        return found

    def _from_call(self, callee: str, k: int, operands: list[int]) -> Iterator[int]:
        fn = self.functions[callee]
        for at in self._positions(fn, [given[k] for given in fn.returned]):
            yield LOADED if at == LOADED else operands[at]

    def _visit(self, op: Any) -> None:
        """Notes an operation. Those of its regions come before it."""
        name: str = op.get_name()
        operands = [op.get_operand(k).id() for k in range(op.get_num_operands())]
        results = [op.get_result(k).id() for k in range(op.get_num_results())]
        regions = [op.get_region(k).id() for k in range(op.get_num_regions())]
        region = self._region(op)
        if name == "tt.func":
            self._function(op, regions)
        elif name.endswith(_ENDS) or name.startswith("cf."):
            self._ends[region].append((name, operands[name == "scf.condition" :]))
        elif name == "tt.call":
            callee = op.get_flat_symbol_ref_attr("callee")
            self._calls.append((callee, operands))
            self._results.update((v, (callee, k, operands)) for k, v in enumerate(results))
        elif name != "builtin.module":
            self._effect(op, name, operands)
            self._link(name, regions, operands, results)

    def _region(self, op: Any) -> int:
        """The region of an operation, whose block is noted; 0: none."""
        block = op.get_block()
        region = None if block is None else block.get_parent()
        if region is None:
            return 0
        arguments = [block.get_argument(k).id() for k in range(block.get_num_arguments())]
        self._blocks[region.id()].setdefault(block.id(), arguments)
        return int(region.id())

    def _function(self, op: Any, regions: Sequence[int]) -> None:
        ends = self._ends.pop(regions[0], [])
        first, *others = self._blocks.pop(regions[0], {0: []}).values()
        returned = [given for end, given in ends if end == "tt.return"]
        jumps = {v for end, given in ends if end.startswith("cf.") for v in given}
        for block in others:
            for argument in block:
                self._sources[argument] |= jumps
        name = op.get_str_attr("sym_name")
        self.functions[name] = _Function(first, returned, self._written, self._calls)
        if op.get_str_attr("sym_visibility") == "public":
            self.kernel = name
        self._written, self._calls = [], []

    def _effect(self, op: Any, name: str, operands: list[int]) -> None:
        known = name in _KNOWN or name.partition(".")[0] in _DIALECTS
        if name in ("tt.elementwise_inline_asm", "tt.extern_elementwise"):
            known = op.get_bool_attr("pure")
        if name in _WRITES:
            self._written.append(operands[0])
        elif not known:
            self._written += operands

    def _link(
        self, name: str, regions: Sequence[int], operands: Sequence[int], results: Sequence[int]
    ) -> None:
        """Notes what results and the arguments of regions may be: in a for loop and a branch what
        is at the same position, else all that is given."""
        arguments = [a for r in regions for b in self._blocks.pop(r, {}).values() for a in b]
        ends = [given for r in regions for _, given in self._ends.pop(r, ())]
        if name in ("scf.for", "scf.if"):
            carried = operands[3:] if name == "scf.for" else ()
            for places, given in product((arguments[1:], results), (carried, *ends)):
                for place, value in zip(places, given, strict=False):
                    self._sources[place].add(value)
            return
        if name.startswith("arith.cmp"):
            return  # what is true or false points nowhere
        if name == "arith.select":
            operands = operands[1:]
        found = {LOADED} if name in _LOADS else {*operands[: 1 if name in _BASES else None]}
        for place in (*arguments, *results):
            self._sources[place] |= found.union(*ends)


def written_names(
    kernel: Any, given: Mapping[str, Any], descriptors: Mapping[str, Any]
) -> set[str]:
    """The arguments that a kernel writes. descriptors: how those of given are described that are
    tensor descriptors. Raises Unsupported for a kernel that writes elsewhere, and what Triton and
    PyTorch raise."""
    from torch._higher_order_ops.triton_kernel_wrap import generate_ttir

    function = kernel.fn if hasattr(kernel, "configs") else kernel
    defaults = {p.name: p.default for p in function.params if p.has_default}
    known = {k: 2.0 if isinstance(v, torch.SymFloat) else v for k, v in given.items()}
    found: set[str] = set()
    for config in _that_differ(getattr(kernel, "configs", ())):
        values = {**defaults, **known, **config}
        module, names = generate_ttir(function, dict(values), dict(descriptors))
        flow = Flow(module)
        n = len(flow.functions[flow.kernel].params)
        assert n == len(names), f"{n} parameters of {names}"
        positions = flow.written_by(flow.kernel)
        if LOADED in positions:
            raise Unsupported(
                f"the Triton kernel {function.__name__}, which writes to where a pointer from "
                "memory says",
                hint="a kernel that is given the tensors that it writes",
            )
        found |= {names[k] for k in positions}
    return found


def _that_differ(configs: Sequence[Any]) -> list[Mapping[str, Any]]:
    """What configurations give a kernel, one for all that differ in numbers only."""
    kinds = {
        tuple((k, v) for k, v in c.kwargs.items() if isinstance(v, bool | str)): c.kwargs
        for c in reversed(configs)
    }
    return list(kinds.values()) or [{}]


_asked = ContextVar("asked", default=False)


@contextmanager
def own_analysis() -> Iterator[None]:
    """Inside, PyTorch asks us which arguments a kernel writes."""
    _install()
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


_twice: dict[int, dict[str, str]] = {}


def given_twice(constants: int) -> Mapping[str, str]:
    """Of a call, by the number of its constant arguments: those that are the memory of another one
    that comes before them, and which. A functional graph does not tell: equal values are one node
    there, be they in one memory or in two."""
    return _twice.get(constants, {})


def _given_twice(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    first: dict[object, str] = {}
    found = {}
    for name, x in tensors.items():
        place = (x.untyped_storage()._cdata, str(x.storage_offset()), x.dtype)
        if (other := first.setdefault(place, name)) != name:
            found[name] = other
    return found


@cache
def _install() -> None:
    home: Any = import_module("torch._higher_order_ops.triton_kernel_wrap")
    theirs = home.get_mutated_tensors

    def which(kernel: int, constants: int, kwargs: dict[str, Any], described: Any) -> list[str]:
        if not _asked.get():
            return list(theirs(kernel, constants, kwargs, described))
        found = home.kernel_side_table.get_kernel(kernel)
        given = {**kwargs, **home.kernel_side_table.get_constant_args(constants)}
        tensors = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor)]
        _twice[constants] = _given_twice({k: kwargs[k] for k in tensors})
        try:
            written = written_names(found, given, described)
        except Unsupported:
            raise
        except Exception:  # noqa: BLE001  (of many kinds, by Triton's version; this is always right)
            return tensors
        return [k for k in tensors if k in written]

    home.get_mutated_tensors = which
