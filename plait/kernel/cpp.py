"""The C++ target: kernels -> one translation unit without headers, and the symbols of its functions.

Each kernel becomes `extern "C" int64_t SYMBOL(int64_t tid, int64_t nthreads, void* const* bufs, const int64_t* syms)`.
Kernels that differ only in names are written once. The text depends on the kernels and the instruction set alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from plait.ir.loops import Load, Node, walk
from plait.kernel.cpp_expr import SCALAR, VECTOR
from plait.kernel.cpp_nest import kernel_body
from plait.kernel.cpp_passes import plan_nest
from plait.kernel.cpp_prelude import prelude_for
from plait.kernel.space import linear_space, stmt_nodes
from plait.kernel.target import Source
from plait.runtime.toolchain import Isa
from plait.schedule.plan import Kernel, Reduce

_SPECIAL = {
    "const": "cpp_expr.literal", "index": "Values._index", "cast": "cpp_expr.scalar_cast, vector_cast",
    "bitcast": "cpp_expr.vector_bitcast", "load": "Access.load", "bounded": "Values._bounded",
    "nonzero": "Values._nonzero", "acc": "Values._acc",
}  # fmt: skip


class CppTarget:
    """C++ with vector extensions."""

    name = "cpp"
    table: Mapping[str, object] = {**{op: (SCALAR[op], VECTOR[op]) for op in SCALAR}, **_SPECIAL}

    def emit_library(self, kernels: Sequence[Kernel], isa: Isa) -> Source:
        """The source of all kernels."""
        return emit_library(kernels, isa)


def emit_library(kernels: Sequence[Kernel], isa: Isa) -> Source:
    """One translation unit. Kernels that are equal up to the names of kernel, buffers and origin share one symbol."""
    library = _Library(isa)
    entry_points = {kernel.name: library.symbol_of(kernel) for kernel in kernels}
    body = "\n".join(library.functions)
    return Source(f"{prelude_for(body, isa)}\n{body}", entry_points)


class _Library:
    """The functions written so far."""

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self.functions: list[str] = []
        self.shared: dict[object, str] = {}
        self.taken: set[str] = set()

    def symbol_of(self, kernel: Kernel) -> str:
        """The function of a kernel; those of its parts stand before it."""
        parts = [self.symbol_of(p) for p in kernel.parts]
        key = structure(kernel)
        symbol = self.shared.get(key)
        if symbol is None:
            symbol = self.shared[key] = _symbol(kernel.name, self.taken)
            text = emit_calls(kernel, symbol, parts) if parts else None
            self.functions.append(text or emit_function(kernel, symbol, self.isa))
        return symbol


def emit_calls(kernel: Kernel, symbol: str, parts: Sequence[str]) -> str:
    """The C++ function of a kernel with parts: one call a part. parts: their symbols."""
    n_checks, lines = 0, []
    for n, (part, name) in enumerate(zip(kernel.parts, parts, strict=True)):
        bufs, sizes = _part_operands(kernel, part)
        lines.append(f"void* const b{n}[] = {{{', '.join(f'bufs[{k}]' for k in bufs)}}};")
        if sizes:
            lines.append(f"const i64 z{n}[] = {{{', '.join(f'syms[{k}]' for k in sizes)}}};")
        call = f"{name}(tid, nthreads, b{n}, {f'z{n}' if sizes else 'syms'})"
        if part.checks:
            lines.append(f"if (const i64 k = {call}) return k + {n_checks};")
            n_checks += len(part.checks)
        else:
            lines.append(f"{call};")
    return _function(f'extern "C" i64 {symbol}', "\n".join((*lines, "return 0;")))


def _part_operands(kernel: Kernel, part: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which buffers and which sizes of a kernel are those of its part."""
    names = [b.name for b in kernel.args]
    sizes = [str(s) for s in kernel.sizes]
    return (tuple(names.index(b.name) for b in part.args), tuple(sizes.index(str(s)) for s in part.sizes))


def emit_function(kernel: Kernel, symbol: str, isa: Isa) -> str:
    """The C++ function of one kernel."""
    space = linear_space(kernel)
    nest = plan_nest(space, isa.lanes, kernel.sequential)
    before, instead = "", ""
    if nest.keep_limit:  # a second version for rows that are too long for a buffer on the stack
        instead = f"{symbol}_long"
        plain = plan_nest(space, isa.lanes, kernel.sequential, keep=False)
        before = _function(f"static i64 {instead}", kernel_body(kernel, plain, isa))
    return before + _function(f'extern "C" i64 {symbol}', kernel_body(kernel, nest, isa, instead))


def _function(head: str, body: str) -> str:
    return f"{head}(i64 tid, i64 nthreads, void* const* bufs, const i64* syms) {{\n{_indented(body)}}}\n"


def _symbol(name: str, taken: set[str]) -> str:
    base = re.sub(r"\W", "_", name)
    symbol, k = base, 1
    while symbol in taken:
        symbol, k = f"{base}_{k}", k + 1
    taken.add(symbol)
    return symbol


def _indented(text: str) -> str:
    """Lines indented by their nesting."""
    out, depth = [], 1
    for line in text.splitlines():
        if line.startswith("}"):
            depth -= 1
        out.append("  " * depth + line)
        if line.endswith("{"):
            depth += 1
    return "\n".join(out) + "\n"


def structure(kernel: Kernel) -> object:
    """A hashable value that is equal for kernels that differ only in the names of kernel, buffers and reductions."""
    if kernel.parts:
        return tuple((structure(p), _part_operands(kernel, p)) for p in kernel.parts)
    buffers = {b.name: k for k, b in enumerate(kernel.args)}
    accs = {s.name: k for k, s in enumerate(s for s in kernel.stmts if isinstance(s, Reduce))}
    numbers: dict[Node, int] = {}
    rows: list[object] = []
    for n in walk([n for s in kernel.stmts for n in stmt_nodes(s)]):
        attr: object = n.attr
        if isinstance(n.attr, Load):
            attr = (buffers[n.attr.buf], n.attr.index, n.attr.masked)
        elif n.op == "acc":
            name, _, part = str(n.attr).rpartition(".")
            attr = (accs[str(n.attr)], "") if n.attr in accs else (accs[name], part)
        elif isinstance(n.attr, (bool, int, float)):
            attr = repr(n.attr)
        numbers[n] = len(numbers)
        rows.append((n.op, n.dtype.name, attr, tuple(numbers[a] for a in n.args)))
    stmts: list[object] = []
    for s in kernel.stmts:
        nodes = tuple(numbers[n] for n in stmt_nodes(s))
        if isinstance(s, Reduce):
            stmts.append((accs[s.name], s.kind, nodes, s.running))
        else:
            stmts.append((buffers[s.buf], s.index, nodes, s.full, s.mode, s.mask is not None, s.atomic))
    layout = tuple((b.dtype.name, b.strides) for b in kernel.args)
    return (kernel.vars, kernel.rvars, tuple(rows), tuple(stmts), layout, kernel.sizes, kernel.sequential)
