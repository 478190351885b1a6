"""Cuts a program into partitions: work of a GPU that can be recorded as a CUDA graph, and what must
run at every call.

A pass over the final instructions, run where CUDA graphs are wanted. What needs the host while it
runs (kernels of the CPU, Python, sizes that depend on data, operators that wait for the device) is
never recorded, and its reason is written down. Control flow is recorded where its subprograms could
be: the graph decides what runs (native/torch/conditional_node.h). Seeds are drawn first, so that a
replay gets new random numbers as any input. Results for the caller that kernels alone write are
allocated before the recorded work and patched into it. Those of operators have to be copied out of
a recording: where the last operators make large ones, they run after it instead. Where the first
instructions use large inputs up, such as the gradient of logits, they run before it: what they make
and free is no memory of a recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse, pairwise, takewhile

import torch

from plait.devices import facts_of
from plait.ir.calls import WAIT, starts_collective
from plait.wrapper import instructions as ins
from plait.wrapper.operators import operator_of
from plait.wrapper.walk import bases_of, defined, is_fence, operands, refs, root, symbols, used

MIN_STEPS = 2
"""Launches and calls that a recording must save."""
COPIED_NBYTES = 16 << 20
"""A result of this size or more takes longer to copy than its operator to be called beside a
recording: GPT-2's logits, 206 MB, took 96 of 1548 us (benchmarks/gpu.py)."""
SEED = "plait::seed"
# Operators that wait for the device or ask the host for sizes, though no tag says so.
_WAITS = frozenset({
    "aten::_local_scalar_dense", "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::item",
    "aten::linalg_cholesky_ex", "aten::linalg_eig", "aten::linalg_eigh", "aten::_linalg_eigh",
    "aten::linalg_inv_ex", "aten::linalg_lstsq", "aten::linalg_lu_factor_ex",
    "aten::_linalg_check_errors", "aten::_linalg_det", "aten::_linalg_slogdet",
    "aten::_linalg_solve_ex", "aten::_linalg_svd", "aten::masked_select", "aten::multinomial",
    "aten::nonzero", "aten::repeat_interleave", "aten::_unique2", "aten::unique_consecutive",
    "aten::unique_dim", "aten::_ctc_loss", "aten::_embedding_bag", "aten::_cudnn_rnn",
    "aten::_cudnn_rnn_backward", "aten::_thnn_fused_lstm_cell",
})  # fmt: skip


def partition(
    program: ins.WrapperProgram,
    constants: Sequence[torch.Tensor],
    n_results: int | None = None,
    nbytes: Mapping[str, int] | None = None,
    spent: Collection[str] = (),
    decides: bool = True,
) -> ins.WrapperProgram:
    """The program with a Partition before each part; unchanged where nothing runs on a GPU.

    constants: its table of constants. n_results: as in the program that is returned. nbytes:
    plausible sizes.
    spent: inputs that nobody needs after the call. decides: whether the graphs of the machine can
    decide what they run."""
    gpus = _gpus(program)
    if not gpus:
        return program
    if len(gpus) > 1 or any(map(is_fence, program.body)):
        several = (
            f"several GPUs: {', '.join(sorted(gpus))}" if len(gpus) > 1 else "streams of its own"
        )
        alone = ins.Partition(False, f"it uses {several}")
        return replace(program, body=(alone, *program.body), n_results=n_results)
    body = _seeds_first(program)
    head = list(takewhile(_is_early, body))
    rest = body[len(head) :]
    facts = _Facts(program, constants, decides)
    why = [reason for i in head if (reason := facts.why_not(i))]
    parts = _leave_results(_cut(rest, facts), n_results, nbytes or {})
    parts = _give_arena(_leave_inputs(parts, spent, nbytes or {}))
    moved = _outputs_of_kernels(program, head, [i for p in parts for i in p.body], n_results)
    parts = [_Part(False, head, why), *parts]
    for before, p in pairwise(parts):
        if p.recorded:  # which what stands before it is not
            before.body += [i for i in p.body if isinstance(i, ins.Alloc) and i.name in moved]
            p.body = [i for i in p.body if not (isinstance(i, ins.Alloc) and i.name in moved)]
    out: list[ins.Instr] = []
    for p in parts:
        out += [ins.Partition(p.recorded, "; ".join(dict.fromkeys(p.reasons))), *p.body]
    return replace(program, body=tuple(out), n_results=n_results)


def _gpus(program: ins.WrapperProgram) -> set[str]:
    named = [*program.inputs, *program.body]
    return {
        i.device
        for i in named
        if isinstance(i, (ins.DefineKernel, ins.TensorInput, ins.Alloc))
        and not facts_of(i.device).is_host
    }


def _is_early(i: ins.Instr) -> bool:
    """Whether this starts a program: what the host knows of its inputs, and seeds."""
    host = (
        ins.Symbol,
        ins.DefineKernel,
        ins.Constant,
        ins.Note,
        ins.AssertScalar,
        ins.AssertSizeStride,
    )
    return isinstance(i, host) or _is_seed(i)


def _is_seed(i: ins.Instr) -> bool:
    return isinstance(i, ins.CallExtern) and i.op == SEED


@dataclass
class _Part:
    recorded: bool
    body: list[ins.Instr] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def _cut(body: list[ins.Instr], facts: _Facts) -> list[_Part]:
    """Runs of instructions that agree on whether they can be recorded. What the host computes from
    what it knows goes with what stands before it, memory and views with what follows."""
    parts = [_Part(False)]
    waiting: list[ins.Instr] = []
    for i in body:
        why = facts.why_not(i)
        if why is None:
            waiting.append(i)
            continue
        if (
            isinstance(i, (ins.Symbol, ins.AssertScalar, ins.AssertSizeStride, ins.AssertAlignment))
            and not why
        ):
            recorded = parts[-1].recorded
        else:
            recorded = not why
        if (
            recorded
            and isinstance(i, ins.Symbol)
            and not {*used(i)} <= {n for j in parts[-1].body for n in defined(j)}
        ):
            # A replay would not see another one.
            recorded, why = False, f"a size of {used(i)[0]} is read"
        if recorded != parts[-1].recorded:
            parts.append(_Part(recorded))
        parts[-1].body += [*waiting, i]
        waiting = []
        if why:
            parts[-1].reasons.append(why)
    parts[-1].body += waiting
    return _joined(parts)


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """The parts, those with too little work not recorded, neighbours of one kind as one."""
    joined: list[_Part] = []
    for p in parts:
        if p.recorded and sum(map(_steps, p.body)) < MIN_STEPS:
            p = _Part(False, p.body, ["too little work to record"])
        if joined and p.recorded == joined[-1].recorded:
            joined[-1].body += p.body
            joined[-1].reasons += p.reasons
        else:
            joined.append(p)
    return [p for p in joined if p.body]


_WORK = (ins.Launch, ins.CallExtern, ins.CallPrograms, ins.Copy, ins.Fill)


def _steps(i: ins.Instr) -> int:
    """How many steps a recording saves by this one: control flow is many of the host's."""
    return MIN_STEPS if isinstance(i, ins.CallPrograms) else int(isinstance(i, _WORK))


# Belong to the work that they follow.
_AFTER = (ins.Free, ins.AssertSizeStride, ins.AssertAlignment)


def _leave_results(
    parts: list[_Part], n_results: int | None, nbytes: Mapping[str, int]
) -> list[_Part]:
    """The parts, where what the last operators of a recorded one make for the caller is made after
    it, if it is large: nothing needs to be copied, and the recording holds no memory for it."""
    *before, last = parts
    if not last.recorded:
        return parts
    returned = _returned(last.body, bases_of(last.body), n_results)
    cut, ops = len(last.body), []
    while (at := _last_work(last.body, cut)) >= 0:
        i = last.body[at]
        if (
            not isinstance(i, ins.CallExtern)
            or sum(nbytes.get(n, 0) for n in returned & {*defined(i)}) < COPIED_NBYTES
        ):
            break
        ops.append(i.op)
        cut = _last_work(last.body, at) + 1
        while isinstance(last.body[cut], _AFTER):
            cut += 1
    if not ops:
        return parts
    outside = _Part(
        False, last.body[cut:], [f"the caller gets what {op} makes" for op in reversed(ops)]
    )
    return _joined([*before, _Part(True, last.body[:cut], last.reasons), outside])


def _leave_inputs(
    parts: list[_Part], spent: Collection[str], nbytes: Mapping[str, int]
) -> list[_Part]:
    """The parts, where what the first one does with the large inputs that it uses up first, and
    with what kernels make of them, is done before it: all of that is freed before anything else of
    the call needs memory."""
    first, *others = parts
    work = [k for k, i in enumerate(first.body) if isinstance(i, _WORK)]
    if not first.recorded:
        return parts
    bases = bases_of(first.body)
    reads = {k: {root(n, bases) for n in used(first.body[k])} for k in work}
    large = {n for n in spent if nbytes.get(n, 0) >= COPIED_NBYTES} & reads[work[0]]
    seen, cut = set(large), 0
    for k in work:
        i = first.body[k]
        if not reads[k] & seen:
            break
        if isinstance(i, ins.Launch) and reads[k] & large:
            seen.update(root(n, bases) for n in i.outs if nbytes.get(n, 0) >= COPIED_NBYTES)
        cut = k + 1
    while 0 < cut < len(first.body) and isinstance(first.body[cut], _AFTER):
        cut += 1
    before = _Part(False, first.body[:cut], [f"it uses {n} up" for n in sorted(large)])
    return _joined([before, _Part(True, first.body[cut:], first.reasons), *others])


def _returned(
    body: Sequence[ins.Instr], bases: Mapping[str, str], n_results: int | None
) -> set[str]:
    """What holds the memory of the caller's results. bases: of the body."""
    last = body[-1]
    assert isinstance(last, ins.Return), last
    return {root(n, bases) for v in last.values[:n_results] for n in refs(v)}


def _last_work(body: Sequence[ins.Instr], end: int) -> int:
    return next((k for k in reversed(range(end)) if isinstance(body[k], _WORK)), -1)


class _Facts:
    """What is known of names: which kernels and tensors are the host's, and what is no tensor."""

    def __init__(
        self, program: ins.WrapperProgram, constants: Sequence[torch.Tensor], decides: bool
    ) -> None:
        self.programs = program.programs
        self.decides = decides
        self.host_kernels: set[str] = set()
        self.host = {
            i.name
            for i in program.inputs
            if isinstance(i, ins.TensorInput) and facts_of(i.device).is_host
        }
        self.objects = {i.name for i in program.inputs if isinstance(i, ins.OpaqueInput)}
        self.constants = constants

    def why_not(self, i: ins.Instr) -> str | None:
        """Why an instruction cannot be recorded, "" if it can, None if that is all the same."""
        self._learn(i)
        match i:
            case ins.Launch() if i.kernel in self.host_kernels:
                return f"kernel {i.kernel} runs on the CPU"
            case ins.CallExtern():
                return self._extern(i)
            case ins.CallPython():
                return f"{i.label} is a Python function"
            case ins.CallPrograms():
                return self._programs(i)
            case ins.Hook():
                return "intermediates are watched"
            case ins.CheckFinite():
                return "values are checked"
            case ins.Symbol(_, ins.ItemOf(tensor)):
                return f"the value of {tensor} is read"
            case ins.Copy() if i.dst in self.host or i.src in self.host:
                return "a copy to or from the host"
            case ins.Fill() if i.tensor in self.host:
                return "memory of the host is filled"
            case (
                ins.Launch()
                | ins.Copy()
                | ins.Fill()
                | ins.Symbol()
                | ins.AssertScalar()
                | ins.AssertSizeStride()
                | ins.AssertAlignment()
            ):
                return ""
            case _:
                return None

    def _learn(self, i: ins.Instr) -> None:
        match i:
            case ins.DefineKernel() if facts_of(i.device).is_host:
                self.host_kernels.add(i.name)
            case ins.Alloc() | ins.Arena() if facts_of(i.device).is_host:
                self.host.add(i.name)
            case ins.Constant() if facts_of(self.constants[i.index].device).is_host:
                self.host.add(i.name)
            case ins.View() | ins.Place() | ins.Reuse() if self.host.intersection(used(i)):
                self.host.add(i.name)
            case _:
                pass

    def _extern(self, i: ins.CallExtern) -> str:
        tensors = [n for o in operands(i) for n in refs(o)]
        devices = [o.text for o in operands(i) if isinstance(o, ins.Literal) and o.kind == "device"]
        hosts = [facts_of(d).is_host for d in devices]
        here = [n for n in tensors if n in self.host]
        if any(hosts) or (here and all(hosts) and len(here) == len(tensors)):
            self.host.update(defined(i))
        if i.op == SEED:
            return "a seed is drawn"
        if self.objects.intersection(tensors):
            return f"{i.op} takes an object that may change"
        if here or any(hosts):
            return f"{i.op} has a tensor on the host"
        if starts_collective(i.op) or i.op == WAIT:
            return f"{i.op} needs the other ranks"
        name = i.op.partition(".")[0]
        tags = _tags(i.op)
        if (
            torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
            or name in _WAITS
        ):
            return f"{name} waits for the device"
        if "attention" in name and not _without_dropout(i):
            return f"{name} draws its seed where it runs, on the host or on the device"
        if getattr(torch.Tag, "cudagraph_unsafe", None) in tags:
            return f"{name} may not be recorded"
        return ""

    def _programs(self, i: ins.CallPrograms) -> str:
        if i.kind in ("cond", "loop") and not self.decides:
            return f"{i.label}: the driver's graphs cannot decide what they run"
        if i.kind == "rounds":
            return f"{i.label} gives as many results as it runs rounds"
        if here := self.host.intersection(n for o in i.args for n in refs(o)):
            return f"{i.label} takes {min(here)}, which is on the host"
        for p in (self.programs[k] for k in i.programs):
            inner = _Facts(p, self.constants, self.decides)
            why = next(filter(None, map(inner._why_not_inside, p.body)), "")
            if why:
                return f"{i.label}: {why}"
        return ""

    def _why_not_inside(self, i: ins.Instr) -> str:
        """The same of a subprogram's instruction. What is recorded there is no node that a replay
        could give new random numbers, and the device knows no numbers of the host."""
        none = ins.Literal("none", "")
        if isinstance(i, ins.Return):
            numbers = [v for v in i.values if not isinstance(v, ins.Ref) and v != none]
            return "it gives a number" if numbers else ""
        if isinstance(i, ins.CallExtern) and (
            not i.op.startswith("aten::") or torch.Tag.nondeterministic_seeded in _tags(i.op)
        ):
            return self.why_not(i) or f"{i.op} may draw random numbers"
        return self.why_not(i) or ""


def _without_dropout(i: ins.CallExtern) -> bool:
    """Whether an attention operator's probability of dropping is 0."""
    given = operator_of(i.op)
    if given is None:
        return True
    names = [a.name for a in given._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    p = i.args[at] if at < len(i.args) else dict(i.kwargs).get("dropout_p", 0)
    return p == 0 or (
        isinstance(p, ins.Literal) and p.kind == "float" and float.fromhex(p.text) == 0
    )


def _tags(op: str) -> list[torch.Tag]:
    found = operator_of(op)
    return [] if found is None else list(found.tags)


def _seeds_first(program: ins.WrapperProgram) -> list[ins.Instr]:
    """The body with seeds, and the checks of these, before everything else."""
    seeds = {name for i in filter(_is_seed, program.body) for name in defined(i)}

    def early(i: ins.Instr) -> bool:
        return _is_seed(i) or (isinstance(i, ins.AssertSizeStride) and i.tensor in seeds)

    return [*filter(early, program.body), *filterfalse(early, program.body)]


def _outputs_of_kernels(
    program: ins.WrapperProgram, head: list[ins.Instr], rest: list[ins.Instr], n_results: int | None
) -> set[str]:
    """Allocations that the caller gets and that nothing but kernels touches, with sizes known
    before anything runs."""
    bases = bases_of(rest)
    known = {
        i.name for i in (*program.inputs, *head) if isinstance(i, (ins.SymbolInput, ins.Symbol))
    }
    touched = {
        root(n, bases)
        for i in rest
        if not isinstance(i, (ins.Launch, ins.View, ins.Reuse, ins.Return, ins.AssertAlignment))
        for n in used(i)
    }
    kept = _returned(rest, bases, n_results) - touched
    return {
        i.name
        for i in rest
        if isinstance(i, ins.Alloc)
        and i.name in kept
        and not facts_of(i.device).is_host
        and symbols(i) <= known
    }


def _give_arena(parts: list[_Part]) -> list[_Part]:
    """The parts, where the arena belongs to the one that needs it most: what others use of it is
    allocated."""
    body = [i for p in parts for i in p.body]
    arena = next((i for i in body if isinstance(i, ins.Arena)), None)
    if arena is None:
        return parts
    bases = bases_of(body)
    at = {i.name: {k} for k, p in enumerate(parts) for i in p.body if isinstance(i, ins.Place)}
    for k, p in enumerate(parts):
        for i in p.body:
            for n in used(i):
                at.get(root(n, bases), set()).add(k)
    counts = Counter(k for users in at.values() if len(users) == 1 for k in users)
    owner = max(counts, key=counts.__getitem__, default=None)
    own = {n for n, users in at.items() if users == {owner}}

    def given(i: ins.Instr) -> ins.Instr:
        if not isinstance(i, ins.Place) or i.name in own:
            return i
        return ins.Alloc(i.name, i.dtype, i.shape, i.strides, arena.device)

    made = [replace(p, body=[given(i) for i in p.body if i is not arena]) for p in parts]
    if owner is not None:
        made[owner].body.insert(0, arena)
    return made


def fixed_inputs(program: ins.WrapperProgram) -> tuple[list[str], list[str]]:
    """Inputs that recorded parts may find anywhere, for kernels alone read and write them, and
    those that have to stay where they are, be copied or be recorded again, because operators see
    them too."""
    bases = bases_of(program.body)
    inputs = [i.name for i in program.inputs if isinstance(i, ins.TensorInput)]
    kernels: set[str] = set()
    others: set[str] = set()
    recorded = False
    for i in program.body:
        if isinstance(i, ins.Partition):
            recorded = i.recorded
        elif recorded and not isinstance(i, (ins.View, ins.Reuse, ins.Return)):
            (kernels if isinstance(i, ins.Launch) else others).update(
                root(n, bases) for n in used(i)
            )
    anywhere = kernels - others
    return [n for n in inputs if n in anywhere], [n for n in inputs if n in others]


def recorded_results(program: ins.WrapperProgram) -> tuple[list[str], list[str]]:
    """Memory of the caller's results that recorded parts write where it belongs, for kernels alone
    touch it, and memory that they make for themselves and copy from."""
    bases = bases_of(program.body)
    returned = _returned(program.body, bases, program.n_results)
    made: set[str] = set()
    direct: dict[str, None] = {}
    copied: dict[str, None] = {}
    recorded = False
    for i in program.body:
        if isinstance(i, ins.Partition):
            recorded = i.recorded
        elif not recorded and isinstance(i, ins.Alloc):
            made.add(i.name)
        elif recorded and isinstance(i, (ins.Alloc, ins.CallExtern, ins.CallPrograms)):
            copied.update(dict.fromkeys(n for n in defined(i) if n in returned))
        elif recorded and isinstance(i, ins.Launch):
            direct.update(
                (n, None) for o in i.outs if (n := root(o, bases)) in returned and n in made
            )
    return list(direct), list(copied)
