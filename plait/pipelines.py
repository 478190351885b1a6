"""Every list of passes, in order: of captured graphs, joint graphs, loops, kernels and programs.

`compile.py` runs them one after the other, capture the one of joint graphs. Each pass has a file of
its own; its name here is the one in times, dumps and errors. A constraint on order is a comment on
the line that it binds. `log.PassLog` times steps and, where `Config.verifies`, checks what they
made (VERIFIERS): the steps of `schedule` one by one, each other list as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch.fx import GraphModule, Node

from plait import compat
from plait.config import Config
from plait.errors import UserError
from plait.graph.bags import write_out_bags
from plait.graph.biases import split_biases
from plait.graph.captured import Captured
from plait.graph.constants import fold_constants
from plait.graph.convolutions import CONVOLUTIONS, OF_ROWS
from plait.graph.cse import merge_common
from plait.graph.dead import drop_dead
from plait.graph.edit import know_replaced
from plait.graph.epilogues import join_epilogues
from plait.graph.few_rows import add_few_rows
from plait.graph.fma import gather_products
from plait.graph.hidden_products import find_products
from plait.graph.images_apart import convolve_images_apart
from plait.graph.items import list_items
from plait.graph.joint import (
    drop_bags,
    save_compared,
    save_old_values,
    save_random,
    widen_logsumexp,
)
from plait.graph.noop import drop_noops
from plait.graph.norm_results import remake_norm_results
from plait.graph.point_convolutions import multiply_points
from plait.graph.pool_indices import narrow_pool_indices
from plait.graph.random import replace_random
from plait.graph.row_biases import join_biases
from plait.graph.rows import join_rows
from plait.graph.softmax import split_log_softmax
from plait.graph.spectra import drop_vectors
from plait.graph.streams import order_streams
from plait.graph.write_out import write_out
from plait.ir.calls import Extern, UserKernel, all_programs
from plait.ir.expr import symbol
from plait.ir.loops import LoopProgram, Reduction
from plait.ir.verify import verify as verify_loops
from plait.kernel.target import Choices, Forms, Machines, Measured, Source, Unaligned
from plait.kernel.targets import TARGETS
from plait.lower.control_flow import graphs_within
from plait.lower.graph import Lowered
from plait.schedule.assemble import make_plan
from plait.schedule.by_size import split_by_size
from plait.schedule.dedup import Shared
from plait.schedule.deps import Bodies
from plait.schedule.deps import drop_dead as drop_dead_loops
from plait.schedule.fuse import fuse
from plait.schedule.grouping import group_loops
from plait.schedule.horizontal import fuse_horizontally
from plait.schedule.inline import inline_loops
from plait.schedule.join_operands import join_operands
from plait.schedule.join_readers import join_readers
from plait.schedule.kernels import Names
from plait.schedule.layout import settle_layouts, unaligned
from plait.schedule.limits import Limits
from plait.schedule.memory import ARENA, IN_PLACE, OVER_INPUTS, plan_memory
from plait.schedule.normal import normalise
from plait.schedule.order import order
from plait.schedule.pair_products import pair_products
from plait.schedule.plan import (
    Form,
    Kernel,
    Plan,
    Step,
    UserLaunch,
    device_of,
    kernels_of,
    launching_calls,
    launching_devices,
    user_launch,
)
from plait.schedule.row_forms import settle_rows
from plait.schedule.share_lengths import share_lengths
from plait.schedule.split import split_reductions
from plait.schedule.split_readers import split_readers
from plait.schedule.verify import verify_plan
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.passes.drop_dead import drop_dead as drop_dead_instructions
from plait.wrapper.passes.find_barriers import find_barriers
from plait.wrapper.passes.merge_views import merge_views
from plait.wrapper.passes.place_frees import place_frees
from plait.wrapper.passes.share_sizes import share_sizes
from plait.wrapper.verify import verify as verify_program
from plait.wrapper.verify import verify_kept

P = ParamSpec("P")
T = TypeVar("T")
GraphPass = Callable[[GraphModule], int | None]
"""Edits a graph in place; returns how many nodes it changed, if it counts them."""
ProgramPass = Callable[[WrapperProgram], WrapperProgram]


class Log(Protocol):
    """Runs one named step (`log.PassLog` does)."""

    def __call__(self, step: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """fn(*args, **kwargs)."""
        ...


def quiet(step: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a step, and does nothing else."""
    return fn(*args, **kwargs)


# ---------------------------------------------------------------------------------- captured graphs
GRAPH: tuple[tuple[str, GraphPass], ...] = (
    ("know replaced", know_replaced),  # first: others take copies away, whose views lie elsewhere
    ("list items", list_items),  # before passes that drop or merge what makes no number
    ("order streams", order_streams),  # before passes that make nodes, which have no stream
    ("replace random", replace_random),  # before CSE: two equal random calls are two draws
    ("write out bags", write_out_bags),
    *CONVOLUTIONS,  # before copies that change nothing go
    ("convolve images apart", convolve_images_apart),
    ("multiply points again", multiply_points),  # of images that lie apart, each seen alone
    ("join biases", join_biases),  # before CSE, which may give a product more readers
    ("drop dead", drop_dead),  # early: the other passes are linear in what is left
    ("drop vectors", drop_vectors),
    # After it: what nobody reads need not be made. Before those that clean what it makes.
    ("write out", write_out),
    ("join rows", join_rows),
    ("find products", find_products),
    ("drop no-ops", drop_noops),
    ("gather products", gather_products),
    ("fold constants", fold_constants),
    ("merge common", merge_common),
    ("add few rows", add_few_rows),
    ("join epilogues", join_epilogues),  # after all that may leave a product one reader
    ("drop dead again", drop_dead),  # after folding and merging: arguments lose their users
)
ADDED: list[tuple[str, GraphPass]] = []
"""Passes from outside the tree, see `extend.graph_pass`: they run after GRAPH."""


CHANGES_BITS = frozenset[GraphPass](
    (
        replace_random, write_out_bags, find_products, add_few_rows, join_epilogues,
        remake_norm_results, split_biases, split_log_softmax, narrow_pool_indices, widen_logsumexp,
        *(run for _, run in CONVOLUTIONS),
    )
)  # fmt: skip
"""Passes whose results may end in other bits than eager's, or that are of use to kernels alone that
`lower/exact.py` does not let be."""


BY_ROWS = frozenset[GraphPass]((convolve_images_apart, join_biases))
"""Passes that keep a row's bits whatever is beside it."""
BY_SIZE = frozenset[GraphPass](
    (find_products, add_few_rows, join_epilogues, *{run for _, run in CONVOLUTIONS} - OF_ROWS)
)
"""Passes that ask how many rows there are, or that are of use to a library's kernels alone."""


def left_out(cfg: Config) -> frozenset[str]:
    """The passes that a compilation does without. Raises UserError for a name of none."""
    return frozenset(name for name, most in _without(cfg).items() if most is None)


def limits_of(cfg: Config) -> Limits:
    """How many decisions steps may take. Raises UserError as `left_out` does."""
    return Limits({name: most for name, most in _without(cfg).items() if most is not None})


def _without(cfg: Config) -> dict[str, int | None]:
    """Pass -> how many decisions it may take; None: it is left out."""
    found: dict[str, int | None] = {}
    for word in filter(None, cfg.without.split(",")):
        name, limited, most = word.partition(":")
        if name not in LEAVABLE:
            raise UserError(f"no pass {name} can be left out", hint=f"one of {LEAVABLE}")
        if limited and (name not in COUNTED or not most.isdecimal()):
            raise UserError(f"without={word!r} is no limit", hint=f'"fuse:3"; {COUNTED}')
        found[name] = int(most) if limited else None
    return found


def _run(passes: tuple[tuple[str, GraphPass], ...], graph: GraphModule, cfg: Config) -> None:
    names, off = left_out(cfg), set[GraphPass]()
    if cfg.draws_as_eager:  # eager's own operators draw
        off.add(replace_random)
    if cfg.keeps_bits:
        off |= CHANGES_BITS
    off |= BY_SIZE if cfg.batch_invariant else BY_ROWS
    if not cfg.kernels:  # ATen's operators on layouts that eager would not hand them
        off.update(run for _, run in CONVOLUTIONS)
    for name, run in passes:
        if run not in off and name not in names:
            run(graph)


def clean_graph(captured: Captured, cfg: Config) -> Captured:
    """Runs the passes over the graph, and over those that its control flow runs, in place and
    returns the same object. The modules' code is not regenerated."""
    for graph in graphs_within(captured.graph):
        clean_graph(replace(captured, graph=graph), cfg)
    _run(GRAPH, captured.graph, cfg)
    for name, run in ADDED:
        before = set(captured.graph.graph.nodes)
        run(captured.graph)
        _verify_added(name, captured.graph, before)
    if ADDED:
        drop_dead(captured.graph)
    return captured


def _verify_added(name: str, graph: GraphModule, before: Set[Node]) -> None:
    """Raises UserError where a pass from outside the tree left what lowering cannot take. before:
    nodes that are not its own, of which those that give nothing have no value."""
    try:
        graph.graph.lint()
    except RuntimeError as e:
        raise UserError(f"the graph pass {name!r} left a broken graph: {e}") from e
    for n in graph.graph.nodes:
        if n not in before and n.op == "call_function" and "val" not in n.meta:
            raise UserError(
                f"the graph pass {name!r} left {n.name} without its fake value",
                hint='set meta["val"] of every node that it makes',
            )


# ------------------------------------------------------------------------------------- joint graphs
JOINT: tuple[tuple[str, GraphPass], ...] = (
    # Before the split, so that a value that the backward pass makes again comes from the seed that
    # the forward pass saved.
    ("replace random", replace_random),
    ("save random", save_random),
    *CONVOLUTIONS,
    ("remake norm results", remake_norm_results),
    ("split biases", split_biases),  # after it: what is made again reads what convolutions make
    ("split log_softmax", split_log_softmax),
    ("narrow pool indices", narrow_pool_indices),
    ("list items", list_items),
    ("write out bags", write_out_bags),
    ("drop bags", drop_bags),
    ("widen logsumexp", widen_logsumexp),
    ("merge common", merge_common),
    ("save compared", save_compared),
    ("save old values", save_old_values),  # last: of the nodes that there are in the end
)


def split_joint(
    cfg: Config, joint: GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a joint graph, by torch's min-cut: the partition function that
    AOTAutograd is given. kwargs are whatever its version passes on."""
    _run(JOINT, joint, cfg)
    return compat.tracing.min_cut_partition(joint, joint_inputs, **kwargs)


NEEDED = (
    "know replaced",
    "list items",  # lowering knows no lists
    "order streams",
    "replace random",  # eager_random does without it
    "write out",  # of what there is no other way to compile
    "write out bags",
    "drop bags",
    "widen logsumexp",
    "save random",
    "save compared",
    "save old values",
)
"""Passes on graphs that no compilation can do without."""


# -------------------------------------------------------------------------------------------- loops
LOOPS = (
    "drop dead loops",
    "normal form",
    "join rows",
    "inline",
    "drop inlined loops",
    "split readers",
    "settle layouts",
    "join readers",
    "join operands",
)
"""The steps of `schedule` that give a loop program."""


LEAVABLE = tuple(
    dict.fromkeys((
        *(name for name, _ in (*JOINT, *GRAPH) if name not in NEEDED),
        "join rows",
        "inline",
        "split readers",
        "join readers",
        "join operands",
        "split reductions",
        "fuse",
        "fuse horizontally",
        "split by size",
        "pair products",
        OVER_INPUTS,
        ARENA,
        IN_PLACE,
        "inline programs",
        "merge views",
        "drop dead instructions",
        "find barriers",
        "share sizes",
        "place frees",
        "partition",
    ))
)  # fmt: skip
"""What `Config.without` may name: all that only makes programs faster or take less memory."""
COUNTED = ("inline", "fuse", "fuse horizontally", OVER_INPUTS, ARENA, IN_PLACE)
"""Those whose decisions, each on a pair of buffers, it may limit."""


def schedule(
    program: LoopProgram, cfg: Config, log: Log = quiet, names: Names | None = None
) -> Plan:
    """From loops to kernels: the plan of a program and its subprograms. names: of kernels; None:
    new ones."""
    return _schedule(program, cfg, log, names or Names(), limits_of(cfg))


def _schedule(program: LoopProgram, cfg: Config, log: Log, names: Names, limits: Limits) -> Plan:
    bodies, off, kept_from = Bodies(), left_out(cfg), {*limits.refusals}

    def may(
        step: str, fn: Callable[Concatenate[T, P], T], x: T, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The step, or x where it is left out."""
        return x if step in off else log(step, fn, x, *args, **kwargs)

    loops = log("drop dead loops", drop_dead_loops, program, bodies)
    loops = log("normal form", normalise, loops, bodies)
    if cfg.batch_invariant:
        loops = log("settle rows", settle_rows, loops, bodies)
    # Before inlining, which would put what a product can take over into loops that it cannot.
    loops = may("join rows", join_readers, loops, bodies, in_rows=True)
    loops = may("inline", inline_loops, loops, cfg, bodies, limits)
    loops = log("drop inlined loops", drop_dead_loops, loops, bodies)
    # After both: what reads a concatenation has become one loop.
    loops = may("split readers", split_readers, loops, bodies)
    # Before splitting, which asks what is contiguous.
    loops = log("settle layouts", settle_layouts, loops, bodies, cfg.batch_invariant)
    # After it: a kernel of a product stores to strides.
    loops = may("join readers", join_readers, loops, bodies, in_rows=False)
    loops = may("join operands", join_operands, loops, bodies)
    split: tuple[LoopProgram, dict[str, Reduction]] = (loops, {})
    if "split reductions" not in off:
        split = log("split reductions", split_reductions, loops, bodies, cfg.batch_invariant)
    grouping = log("group loops", group_loops, split, bodies)
    grouping = may("fuse", fuse, grouping, cfg, limits)
    ordered = log("order", order, grouping)
    # After the order is known: it must not let more memory be alive at once.
    if "fuse horizontally" not in off:
        ordered = log("fuse horizontally", fuse_horizontally, grouping, ordered, cfg, limits)
    plan = log("make plan", make_plan, grouping, ordered, names)
    if not cfg.batch_invariant:
        plan = may("split by size", split_by_size, plan, names)
    # Before memory is planned: what the first of a pair is given is needed for longer.
    plan = may("pair products", pair_products, plan)
    plan = log("plan memory", plan_memory, plan, cfg, off, limits)
    new = (r for step, r in limits.refusals.items() if step not in kept_from)
    plan = replace(plan, refusals=(*plan.refusals, *new))
    nested = tuple(_schedule(p, cfg, log, names, limits) for p in program.programs)
    final = replace(plan.program, programs=tuple(n.program for n in nested))
    return replace(plan, program=final, programs=nested)


# ------------------------------------------------------------------------------------------ kernels
@dataclass(frozen=True)
class Kernels:
    """A plan's kernels as source.

    plan: names each kernel by its symbol, which equal kernels share
    sources: by kind of device
    notes: what measuring found, a line a kernel
    lost: kernels whose operators are faster
    """

    plan: Plan
    sources: Mapping[str, Source]
    notes: tuple[str, ...]
    lost: tuple[str, ...] = ()


def make_kernels(plan: Plan, cfg: Config, log: Log = quiet) -> Kernels:
    """From a plan to the source of its kernels."""
    shared = log("share lengths", share_lengths, kernels_of(plan))
    machines = log("find machines", find_machines, plan, cfg)
    plan = log("write templates", write_templates, plan, machines, cfg.autotune)
    found = Measured({})
    if cfg.autotune:  # before kernels are written: it chooses how
        found = log("measure candidates", measure_candidates, plan, shared, machines, cfg)
    if any(launching_calls(p) for p in all_programs(plan)):
        more = log("measure variants", measure_variants, plan, machines, cfg)
        found = _together([found, more])
    sources = log("emit kernels", emit_kernels, plan, shared, machines, found.choices, cfg.verifies)
    return Kernels(_named(plan, shared, sources), sources, found.notes, found.lost)


def find_machines(plan: Plan, cfg: Config) -> Machines:
    """What kernels for each device are made for."""
    devices = launching_devices(plan)
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(d.partition(":")[0] for d in devices):
        of_kind = {d for d in devices if d.partition(":")[0] == kind}
        found |= TARGETS[kind].machines(of_kind, cfg)
    return found


def write_templates(plan: Plan, machines: Machines, tunes: bool) -> Plan:
    """The plan with texts for kernels of known kinds."""

    def written(s: Step) -> Step:
        if not isinstance(s, Extern) or s.kernel is None or isinstance(s.kernel, UserKernel):
            return s
        target = TARGETS[device_of(plan, s).partition(":")[0]]
        return target.write_template(plan, s, machines, tunes)

    nested = tuple(write_templates(p, machines, tunes) for p in plan.programs)
    return replace(plan, steps=tuple(map(written, plan.steps)), programs=nested)


def measure_candidates(
    plan: Plan, shared: Mapping[str, Shared], machines: Machines, cfg: Config
) -> Measured:
    """The candidates that were fastest on the device at hand."""
    anywhere, kinds = _unaligned(plan), _by_kind(plan, shared)
    found = [TARGETS[kind].measure(k, anywhere, machines, cfg) for kind, k in kinds.items()]
    return _together(found)


def measure_variants(plan: Plan, machines: Machines, cfg: Config) -> Measured:
    """The variants of the user's kernels that were fastest: who gave several wants them to be
    measured."""
    users = _users_by_kind(plan)
    return _together([TARGETS[k].measure_users(u, machines, cfg) for k, u in users.items()])


def _together(found: Sequence[Measured]) -> Measured:
    choices = {name: choice for f in found for name, choice in f.choices.items()}
    notes = tuple(note for f in found for note in f.notes)
    return Measured(choices, notes, tuple(name for f in found for name in f.lost))


def emit_kernels(
    plan: Plan, shared: Mapping[str, Shared], machines: Machines, choices: Choices, verifies: bool
) -> dict[str, Source]:
    """The source of all kernels, by kind of device."""
    anywhere, kinds = _unaligned(plan), _by_kind(plan, shared)
    sources = {
        kind: TARGETS[kind].emit(k, anywhere, machines, choices, verifies)
        for kind, k in kinds.items()
    }
    for kind, users in _users_by_kind(plan).items():
        made = TARGETS[kind].emit_users(users, machines, choices)
        sources[kind] = sources[kind].joined(made) if kind in sources else made
    return {kind: TARGETS[kind].finish(s, machines) for kind, s in sources.items()}


def _by_kind(plan: Plan, shared: Mapping[str, Shared] | None = None) -> dict[str, list[Kernel]]:
    """The kernels of a plan and its subprograms, as they are written."""
    kinds: dict[str, list[Kernel]] = {}
    for k in kernels_of(plan):
        written = shared[k.name].kernel if shared and k.name in shared else k
        kinds.setdefault(k.device.partition(":")[0], []).append(written)
    return kinds


def _unaligned(plan: Plan) -> Unaligned:
    programs = ((p, unaligned(p)) for p in all_programs(plan))
    return {s.name: found for p, found in programs for s in p.steps if isinstance(s, Kernel)}


def _users_by_kind(plan: Plan) -> dict[str, list[UserLaunch]]:
    kinds: dict[str, list[UserLaunch]] = {}
    for p in all_programs(plan):
        for call in launching_calls(p):
            launch = user_launch(p, call, unaligned(p))
            kinds.setdefault(launch.device.partition(":")[0], []).append(launch)
    return kinds


def _named(plan: Plan, shared: Mapping[str, Shared], sources: Mapping[str, Source]) -> Plan:
    """The plan with the names of symbols, and what launches say. A kernel that was written in
    several forms is a step for each."""
    names = {k: n for source in sources.values() for k, n in source.entry_points.items()}
    grids = {k: g for source in sources.values() for k, g in source.grids.items()}
    forms = {k: f for source in sources.values() for k, f in source.forms.items()}

    def named(s: Step) -> list[Step]:
        if isinstance(s, Kernel) and s.name in forms and s.form is None:
            return _formed(s, forms[s.name])
        if isinstance(s, Kernel):
            made = replace(s, name=names[s.name], grid=grids.get(s.name, 1))
            return [shared[s.name].launched(made) if s.name in shared else made]
        if not isinstance(s, Extern) or s.kernel is None:
            return [s]
        assert isinstance(s.kernel, UserKernel), f"{s.kernel.name} was not written"
        chosen = tuple(v for v in s.kernel.variants if v.grid == grids[s.kernel.name])[:1]
        return [replace(s, kernel=replace(s.kernel, name=names[s.kernel.name], variants=chosen))]

    steps: list[Step] = []
    frees: list[tuple[str, ...]] = []
    for s, freed in zip(plan.steps, plan.frees, strict=True):
        made = named(s)
        steps += made
        frees += [()] * (len(made) - 1) + [freed]
    nested = tuple(_named(p, shared, sources) for p in plan.programs)
    return replace(plan, steps=tuple(steps), frees=tuple(frees), programs=nested)


def _formed(kernel: Kernel, forms: Forms) -> list[Step]:
    """The steps of a kernel that was written in several forms."""
    picked = symbol(f"{kernel.name}_form", 0, len(forms.entries) - 1)
    return [
        replace(kernel, name=name, grid=grid, form=Form(forms.pick, picked, k))
        for k, (name, grid) in enumerate(forms.entries)
    ]


# ----------------------------------------------------------------------------------------- programs
PROGRAM: tuple[tuple[str, ProgramPass], ...] = (
    ("merge views", merge_views),
    # After merging: a view may have lost its only use.
    ("drop dead instructions", drop_dead_instructions),
    ("find barriers", find_barriers),
    ("share sizes", share_sizes),  # after all that compare sizes
    ("place frees", place_frees),  # only now are the last uses known
)


def run_passes(
    program: WrapperProgram,
    check: bool = False,
    show: Callable[[str, WrapperProgram], None] | None = None,
    off: Set[str] = frozenset(),
) -> WrapperProgram:
    """The program after all passes.

    check: verify before the first and after each, and that none dropped an effect. show: called
    with each result. off: passes that are left out.
    """
    nested = tuple(run_passes(p, check, None, off) for p in program.programs)
    program = replace(program, programs=nested)
    if check:
        verify_program(program)
    for name, step in PROGRAM:
        if name in off:
            continue
        now = step(program)
        if check:
            verify_program(now, after=name)
            verify_kept(program, now, after=name)
        if show is not None:
            show(name, now)
        program = now
    return program


# ---------------------------------------------------------------------------------------- verifiers
def _verify_lowered(lowered: Lowered) -> None:
    verify_loops(lowered.program, "lower")


VERIFIERS: dict[str, Callable[[Any], object]] = {
    "lower": _verify_lowered,
    **{step: partial(verify_loops, passname=step) for step in LOOPS},
    "schedule": verify_plan,
}
"""The check of what a step makes, by the step's name. Programs are checked by `run_passes`."""
