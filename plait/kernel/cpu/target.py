"""The C++ target: kernels -> translation units without headers, and the symbols of their
functions.

Each kernel becomes `extern "C" int64_t SYMBOL(int64_t tid, int64_t nthreads, void* const* bufs,
const int64_t* syms)`, and `SYMBOL_takes` beside it: how many buffers and sizes it reads, which
whoever loads it compares with the program. Kernels that differ only in names are written once. The
text depends on the kernels and the instruction set alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from plait.config import Config
from plait.ir.calls import Extern, TensorArg
from plait.kernel.cpu.compute import RULES
from plait.kernel.cpu.expr import SCALAR, VECTOR
from plait.kernel.cpu.nest import print_body
from plait.kernel.cpu.packed import KERNEL
from plait.kernel.cpu.plan_body import plan_body
from plait.kernel.cpu.prelude import prelude_for
from plait.kernel.cpu.products import library_texts, shared_unit, takes, write_packed
from plait.kernel.target import Choices, Machines, Source, Target, Unaligned
from plait.runtime.cache import begin_objects, get_or_build
from plait.runtime.store import Built
from plait.runtime.toolchain import NEXT_UNIT, SHARED, Isa, detect_isa, find_toolchain
from plait.schedule.dedup import part_operands, structure, symbol_for
from plait.schedule.legalize import legalize
from plait.schedule.plan import Kernel, Plan, UserLaunch, device_of

_SPECIAL = {
    **RULES, "cast": "expr.scalar_cast, vector_cast", "bitcast": "expr.vector_bitcast",
}  # fmt: skip


class CppTarget(Target):
    """C++ with vector extensions."""

    name = "cpp"
    table: Mapping[str, object] = {**{op: (SCALAR[op], VECTOR[op]) for op in SCALAR}, **_SPECIAL}

    def find_tools(self, cfg: Config) -> None:
        """A C++ compiler."""
        find_toolchain(cfg)

    def machines(self, devices: Set[str], cfg: Config) -> Machines:
        """Vector instructions."""
        isa = replace(find_toolchain(cfg).isa, by_row=cfg.batch_invariant)
        return dict.fromkeys(devices, isa)

    def emit(
        self,
        kernels: Sequence[Kernel],
        unaligned: Unaligned,
        machines: Machines,
        choices: Choices,
        verifies: bool,
    ) -> Source:
        """The functions. Vectors are read from any address."""
        return _functions(kernels, machines[kernels[0].device], verifies)

    def write_template(self, plan: Plan, call: Extern, machines: Machines, tunes: bool) -> Extern:
        """The call of a product with its text."""
        dtypes = [plan.buffers[a.buf].dtype for a in call.args if isinstance(a, TensorArg)]
        return write_packed(call, dtypes, machines[device_of(plan, call)])

    def emit_users(
        self, launches: Sequence[UserLaunch], machines: Machines, choices: Choices
    ) -> Source:
        """The functions of products, each text once."""
        symbols: dict[str, str] = {}
        taken: set[str] = set()
        texts = []
        for u in launches:
            if u.kernel.text not in symbols:
                symbol = symbol_for(u.kernel.name.partition(".")[0], taken)
                symbols[u.kernel.text] = symbol
                texts.append(u.kernel.text.replace(KERNEL, symbol) + _takes(symbol, *takes(u)))
        groups = library_texts(texts, machines[launches[0].device])
        names = {u.kernel.name: symbols[u.kernel.text] for u in launches}
        return Source("\n".join(groups), names, dict.fromkeys(names, 1), groups)

    def expect(self, forms: Set[str], cfg: Config) -> None:
        """Their units."""
        isa = detect_isa(cfg.isa)
        begin_objects([shared_unit(form, isa) for form in sorted(forms)], cfg)

    def finish(self, source: Source, machines: Machines) -> Source:
        """Translation units, which are compiled side by side."""
        isa = next(m for m in machines.values() if isinstance(m, Isa))
        units = _shared_out([u for u in source.units if not u.startswith(SHARED)])
        texts = (f"{prelude_for(t, isa, k, len(units))}\n{t}" for k, t in enumerate(units))
        shared = (u for u in source.units if u.startswith(SHARED))
        return replace(source, text=NEXT_UNIT.join((*texts, *shared)), units=())

    def build(self, source: Source, cfg: Config) -> Built:
        """The shared object."""
        return get_or_build(source.text, find_toolchain(cfg), cfg, {*source.entry_points.values()})


UNIT_LENGTH, MOST_UNITS = 16_000, 4
"""Characters of a translation unit before there is a second one, which takes 0.04 s more."""


def emit_library(kernels: Sequence[Kernel], isa: Isa, verifies: bool = False) -> Source:
    """Translation units. Kernels that are equal up to the names of kernel, buffers and origin
    share one symbol. verifies: what was decided is checked before it is printed."""
    return CppTarget().finish(_functions(kernels, isa, verifies), {"cpu": isa})


def _functions(kernels: Sequence[Kernel], isa: Isa, verifies: bool) -> Source:
    library = _Library(isa, verifies)
    entry_points = {kernel.name: library.symbol_of(kernel) for kernel in kernels}
    functions = (*library.functions,)
    return Source("\n".join(functions), entry_points, units=functions)


def _shared_out(groups: Sequence[str]) -> list[str]:
    """Translation units of groups of functions, about equally long. Their number, which depends on
    the text alone as a library's name does, is a power of two, as that of cores often is."""
    wanted = 1 << (sum(map(len, groups)) // UNIT_LENGTH).bit_length()
    n = min(MOST_UNITS, wanted, max(1, len(groups)))
    units: list[list[int]] = [[] for _ in range(n)]
    lengths = [0] * n
    for k in sorted(range(len(groups)), key=lambda k: -len(groups[k])):
        shortest = lengths.index(min(lengths))
        units[shortest].append(k)
        lengths[shortest] += len(groups[k])
    return ["\n".join(groups[k] for k in sorted(unit)) for unit in units]


def _takes(symbol: str, n_args: int, n_sizes: int) -> str:
    """What says how many buffers and sizes a function reads."""
    return f'extern "C" const int {symbol}_takes[2] = {{{n_args}, {n_sizes}}};\n'


class _Library:
    """The functions written so far."""

    def __init__(self, isa: Isa, verifies: bool) -> None:
        self.isa, self.verifies = isa, verifies
        self.functions: list[str] = []
        self.shared: dict[object, str] = {}
        self.taken: set[str] = set()

    def symbol_of(self, kernel: Kernel) -> str:
        """The function of a kernel; those of its parts stand before it."""
        parts = [self.symbol_of(p) for p in kernel.parts[: 1 if kernel.alike else None]]
        key = structure(kernel)
        symbol = self.shared.get(key)
        if symbol is None:
            symbol = self.shared[key] = symbol_for(kernel.name, self.taken)
            if kernel.alike:
                text = emit_batch(kernel, symbol, *parts)
            elif parts:
                text = emit_calls(kernel, symbol, parts)
            else:
                text = emit_function(kernel, symbol, self.isa, self.verifies)
            self.functions.append(text + _takes(symbol, len(kernel.args), len(kernel.sizes)))
        return symbol


def emit_calls(kernel: Kernel, symbol: str, parts: Sequence[str]) -> str:
    """The C++ function of a kernel with parts: one call a part. parts: their symbols."""
    n_checks, lines = 0, []
    for n, (part, name) in enumerate(zip(kernel.parts, parts, strict=True)):
        bufs, sizes = part_operands(kernel, n)
        lines.append(f"void* const b{n}[] = {{{', '.join(f'bufs[{k}]' for k in bufs)}}};")
        if sizes:
            lines.append(f"const i64 z{n}[] = {{{', '.join(f'syms[{k}]' for k in sizes)}}};")
        call = f"{name}(tid, nthreads, b{n}, {f'z{n}' if sizes else 'syms'})"
        if part.checks:
            lines.append(f"if (const i64 k = {call}) return k + {n_checks};")
            n_checks += len(part.checks)
        else:
            lines.append(f"{call};")
    declared = "".join(_function_type(name) for name in dict.fromkeys(parts))
    return declared + _function(f'extern "C" i64 {symbol}', "\n".join((*lines, "return 0;")))


def emit_batch(kernel: Kernel, symbol: str, part: str) -> str:
    """The C++ function of a kernel whose parts are alike: shares of all of them together are dealt
    out to threads. part: the function of one. Its sizes: a length for each, then the ends of their
    shares."""
    bufs = [k for n in range(len(kernel.parts)) for k in part_operands(kernel, n)[0]]
    n_bufs = len(kernel.parts[0].args)
    lines = f"""\
static const int at[] = {{{", ".join(map(str, bufs))}}};
const i64* const ends = syms + {len(kernel.parts)};
const i64 all = ends[{len(kernel.parts) - 1}];
const i64 lo = all * tid / nthreads, hi = all * (tid + 1) / nthreads;
for (i64 k = 0, first = 0; k < {len(kernel.parts)} && first < hi; first = ends[k++]) {{
const i64 n = ends[k] - first;
void* b[{n_bufs}];
for (int i = 0; i < {n_bufs}; ++i) b[i] = bufs[at[{n_bufs} * k + i]];
const i64 from = lo > first ? lo - first : 0, to = hi < first + n ? hi - first : n;
if (from == 0 && to == n) {{
{part}(0, 1, b, syms + k);
}} else {{
for (i64 j = from; j < to; ++j) {part}(j, n, b, syms + k);
}}
}}
return 0;"""
    return _function_type(part) + _function(f'extern "C" i64 {symbol}', lines)


def emit_function(kernel: Kernel, symbol: str, isa: Isa, verifies: bool) -> str:
    """The C++ function of one kernel."""
    linear = replace(legalize(kernel, verifies), by_row=isa.by_row)
    plan = plan_body(kernel, linear, isa.lanes, verifies)
    before, instead = "", ""
    if plan.vectors.nest.keep_limit:  # a second version, for rows too long for a stack's buffer
        instead = f"{symbol}_long"
        plain = plan_body(kernel, linear, isa.lanes, verifies, keep=False)
        before = _function(f"static i64 {instead}", print_body(plain, isa))
    return before + _function(f'extern "C" i64 {symbol}', print_body(plan, isa, instead))


def _function_type(symbol: str) -> str:
    """The declaration of a function, which may stand in another unit."""
    return f'extern "C" i64 {symbol}(i64, i64, void* const*, const i64*);\n'


def _function(head: str, body: str) -> str:
    return (
        f"{head}(i64 tid, i64 nthreads, void* const* bufs, const i64* syms) "
        f"{{\n{_indented(body)}}}\n"
    )


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
