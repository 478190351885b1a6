"""The torch.compile back end: a Dynamo graph in, a callable for Dynamo out.

AOTAutograd makes one inference graph, or a forward and a backward graph, each compiled by
`plait.compile`. Where what its own callable does around them can be done natively (`direct.py`,
`training.py`), Dynamo gets a native callable. Loading this module, when `backend="plait"` is looked
up, does not load the compiler: the first graph does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from plait import _native, compat
from plait.capture import ladder
from plait.capture.aliases import (
    Argument,
    check_bases,
    dynamo_views,
    input_views,
    shared_arguments,
    view_like,
)
from plait.capture.checkpoints import is_run_by_eager
from plait.capture.direct import DirectGraph
from plait.capture.dynamo import note_breaks, watch_limits
from plait.capture.early_kernels import early_kernels_of
from plait.capture.found_numbers import index_by_found, mended_tracing
from plait.capture.fused_steps import write_out_fused
from plait.capture.masks import simplify_masks
from plait.capture.object_results import take_objects, with_objects
from plait.capture.pending import Begun, Meanwhile, Pending, why_wait
from plait.capture.program import (
    collector_paused,
    compile_beside,
    compile_captured,
    follow,
    load_compiler,
)
from plait.capture.random_values import as_at_calls
from plait.capture.recompiles import Recompiles, of_process, tell_recompile
from plait.capture.registration import allow_again
from plait.capture.training import TrainingGraph, asks_of_precision
from plait.capture.warm.frames import start_warm
from plait.capture.warm.graphs import Kept, backward_graph, keep_backward, keep_graph, kept_here
from plait.capture.writes import check_writes
from plait.compat.frame_facts import NotKept
from plait.config import Config
from plait.errors import InternalError, PlaitError
from plait.graph.captured import Captured, GraphKind, InputView
from plait.log import STAGES, PassLog
from plait.wrapper.program import Program, Target, is_timed, listening
from plait.wrapper.watch import watcher

allow_again()  # before any thread gets to register what it loads from here
watch_limits()
start_warm()
compat.tracing.write_joint_graphs()
_serial = itertools.count()  # makes graph names unique within the process


def plait_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    target: Target | None = None,
    recompiles: Recompiles = of_process,
) -> Callable[..., Any]:
    """Compiles one graph for torch.compile(backend="plait", mode=..., options=...).

    target: what makes programs run, in place of that of the option 'wrapper'. recompiles: the list
    that is told of this compile if Dynamo compiles again. What cannot be compiled goes down the
    ladder (`ladder.py`). Raises UserError for an unknown mode or option; every error of plait
    reaches the user unwrapped.
    """
    try:
        cfg = Config.from_env().with_options(options, mode)
        if cfg.report_to:
            follow(cfg.report_to)
        tell_recompile(recompiles, PassLog(cfg, ""))
        note_breaks()
        # Graphs of compiled autograd take lists.
        if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
            return compat.tracing.flatten_inputs(gm, example_inputs, partial(_compile, cfg, target))
        return _compile(cfg, target, gm, example_inputs)
    except PlaitError as error:
        raise compat.errors.through_dynamo(error) from error.__cause__
    except _native.LoadError as error:  # from a callable around a program
        raise compat.errors.through_dynamo(InternalError(str(error))) from error


def _compile(
    cfg: Config,
    target: Target | None,
    gm: compat.tracing.DynamoGraph,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    one = _OneGraph(cfg, target, len(example_inputs))
    return ladder.descend(
        cfg,
        lambda: one.name,
        lambda taken: one.again(taken).compile(gm, example_inputs),
        lambda taken: ladder.whole_graph(gm, one.name, one.kind, taken),
    )


class _OneGraph:
    """The compilation of one Dynamo graph: the three compilers that AOTAutograd calls, and what
    they found out."""

    def __init__(self, cfg: Config, target: Target | None, n_inputs: int) -> None:
        self.cfg = cfg
        self.target = target
        self.n_inputs = n_inputs
        # A program that is timed kernel by kernel is Python too.
        self.native = cfg.wrapper in ("native", "cpp") and not is_timed(PassLog(cfg, ""))
        self.nested = False  # the callable takes one list of inputs
        self.serial = next(_serial)
        self.kind: GraphKind = "inference"  # of what is compiled first
        self.taken: ladder.Steps = ()  # down the ladder
        self.program: Program | None = None  # of the inference or forward graph
        self.direct = DirectGraph()
        self.training: TrainingGraph | None = None
        self.begun: Begun | None = None  # of that graph, where calls do not wait for its kernels
        self.begun_backward: dict[tuple[int, ...], _Backward] = {}  # by donated inputs
        self.marks: Sequence[compat.autograd.Mark] = ()
        self.dynamo_views: dict[int, InputView] = {}
        self.written: Sequence[bool] = ()  # of each argument, whether calls write it
        self.has_bases = False  # AOTAutograd joins arguments that share memory
        self.watcher = watcher()  # of the backward graph too, which is compiled later
        self.arguments: tuple[str, ...] = ()  # their names, if somebody listens
        self.flags: compat.precision.Flags = {}  # that it depends on
        self.kept = kept_here()  # what is left for the next process; None: nothing

    @property
    def name(self) -> str:
        """Of what is compiled first."""
        return f"{self.kind}_{self.serial}"

    def again(self, taken: ladder.Steps) -> _OneGraph:
        """The compilation from its start, after these steps down the ladder."""
        self.program, self.direct, self.training, self.taken = None, DirectGraph(), None, taken
        self.begun, self.begun_backward = None, {}
        return self

    def compile(
        self, gm: compat.tracing.DynamoGraph, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        load_compiler()
        self.nested = not isinstance(gm, GraphModule)
        if isinstance(gm, GraphModule):
            check_writes(gm)  # on the graph as it came
            example_inputs = as_at_calls(gm, example_inputs)
            if not self.cfg.keeps_bits:  # attention that eager writes out rounds otherwise
                simplify_masks(gm)
            write_out_fused(gm)
            self.dynamo_views = dynamo_views(gm)
            if listening():
                from plait.capture.names import argument_names

                self.arguments = argument_names(gm.graph)
        compat.tracing.see_other_types(view_like)
        noted = compat.precision.noting_flags(self.flags)
        early = early_kernels_of(self.cfg)
        with early, mended_tracing, index_by_found(gm), noted:
            wrapped = compat.tracing.aot_compile(
                gm,
                example_inputs,
                forward=self.forward,
                backward=compat.tracing.untraced(self.backward),
                inference=self.inference,
                partition=self.partition,
                whole=self.cfg.keeps_bits,
            )
        begun = [] if self.begun is None else [self.begun, *self._begin_backward()]
        compat.precision.guard_flags(self.flags)
        made = self.training or self.direct
        if not isinstance(gm, GraphModule):
            return wrapped if self.program is None else made.around(self.program, wrapped)
        run = ladder.at_first_call(gm)
        eager = partial(
            ladder.eager_at_calls, run, self.name, self.kind, self.cfg, ladder.n_calls(gm)
        )
        arguments = None
        if any(self.written):
            arguments = shared_arguments(example_inputs, self.written, self.has_bases)

        def around() -> Callable[..., Any]:
            call = wrapped if self.program is None else made.around(self.program, wrapped)
            if arguments is not None:
                call = ladder.kept_apart(call, eager, arguments)
            if self.kept is not None:
                self._keep(gm, made, arguments)
            return call

        if self.kept is not None:
            self.kept.comes_later = bool(begun)
        if not begun:
            return ladder.with_tangents(around(), eager)
        pending = self._pending(begun, gm, run, around)
        held = pending.tangents = ladder.with_tangents(pending, eager)
        return held

    def _begin_backward(self) -> Sequence[Begun]:
        """The backward graph, if there is one."""
        if self.training is None:
            return ()
        graph, donated = self.training.backward_graph()
        with compat.precision.noting_flags(self.flags):
            one = self.begun_backward[donated] = self._one_backward(graph, donated, ())
            return (one.begin(),)

    def _pending(
        self,
        begun: Sequence[Begun],
        gm: GraphModule,
        eager: Callable[..., Any],
        around: Callable[[], Callable[..., Any]],
    ) -> Pending:
        """What runs eager until the kernels of all passes are built. begun: the first of them, and
        its backward pass. around: puts together what takes its place."""
        resume = compat.tracing.resume_tracing()

        def compiled(taken: ladder.Steps) -> Callable[..., Any]:
            self.program = begun[0].program()
            if self.training is not None:
                self.training.backward(*self.training.backward_graph())
            return around()

        def by_eager(taken: ladder.Steps) -> Callable[..., Any]:
            ladder.whole_graph(gm, self.name, self.kind, taken)
            if self.kept is not None:
                self.kept.reason = "a graph that eager runs"
            return eager

        def finish(waits: bool) -> Callable[..., Any] | None:
            with resume(), compat.precision.noting_flags(self.flags), collector_paused():
                if not waits and not all(b.ended() for b in begun):
                    return None
                return ladder.descend(self.cfg, lambda: self.name, compiled, by_eager)

        def tell(told: Meanwhile) -> None:
            PassLog(self.cfg, self.name).note(STAGES, told.line)
            if self.kept is not None:
                self.kept.come()

        return Pending(self.name, eager, self.marks, begun, finish, tell)

    def _keep(
        self,
        gm: GraphModule,
        made: DirectGraph | TrainingGraph,
        arguments: Sequence[Argument] | None,
    ) -> None:
        """For the next process."""
        assert self.kept is not None, "nobody asked for it"
        with self.kept.reasons():
            if self.taken or self.watcher is not None or self.kept.program is None:
                raise NotKept("a graph that eager runs, whose sizes were specialised, or watched")
            if is_run_by_eager(gm):
                raise NotKept("a graph with regions, which eager ran while its kernels were built")
            around = made.data() | {"kind": self.kind, "n_ops": ladder.n_calls(gm)}
            if isinstance(made, TrainingGraph):
                backward, donated = made.backward_graph()
                if take_objects(backward):
                    raise NotKept("a backward pass that gives objects")
                name = f"backward_{self.serial}"
                captured = Captured(backward, name, "backward", donated_inputs=donated)
                text, around["tensors"] = backward_graph(captured, self.cfg)
                self.kept.pieces["backward"] = text
                around["name"] = self.kept.name
            keep_graph(self.kept, gm, around, arguments)

    def partition(
        self, joint: GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        from plait.pipelines import split_joint

        forward, backward = split_joint(self.cfg, joint, joint_inputs, **kwargs)
        if asks_of_precision(backward):  # its compile, which comes later, gets these answers
            self.flags.update(compat.precision.flags_now())
        self.training = TrainingGraph(self._backward, backward, self._interpreted)
        return forward, backward

    def inference(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._first(gm, inputs, "inference", self.direct)

    def forward(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self.training is not None, "AOTAutograd partitions before it compiles"
        return self._first(gm, inputs, "forward", self.training)

    def backward(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self.training is not None, "AOTAutograd partitions before it compiles"
        return self.training.boxed(gm, later=self.begun is not None)

    def _first(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        kind: GraphKind,
        made: DirectGraph | TrainingGraph,
    ) -> Callable[..., Any]:
        """Compiles what a call runs first, the inference or the forward graph."""
        self.kind = kind
        meta = compat.autograd.forward_metadata()
        same = len(inputs) == self.n_inputs
        self.has_bases, self.written = not same, [i.mutates_data for i in meta.input_info]
        if not same:  # which argument is which input is not known
            self.written = [any(self.written)] * self.n_inputs
        check_bases(gm, meta)
        reason = "" if same else "inputs were deduplicated or got a synthetic base"
        views = input_views(meta, self.dynamo_views, inputs) if same else {}
        made.learn(gm, meta, "inputs come in a list" if self.nested else reason, self.native, views)
        # Behind the wrapper, the wrapper itself bumps versions.
        bumped = () if made.reason else compat.autograd.bumped_input_indices(meta)
        n_results = meta.num_forward if kind == "forward" else None
        captured = self._captured(
            gm,
            kind,
            bumped_inputs=bumped,
            n_results=n_results,
            wrapper_reason=made.reason,
            input_views=views,
        )
        target = self._target(self.kept)
        if self._waits(gm, made):
            self.program = compile_captured(captured, self.cfg, target)
            return self.program.boxed
        self.marks = compat.autograd.dynamic_marks(meta)
        self.begun = Begun(compile_beside(captured, self.cfg, target))

        def boxed(args: list[Any]) -> tuple[Any, ...]:
            assert self.program is not None, "eager runs it still"
            return self.program.boxed(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        return compat.tracing.untraced(boxed)

    def _waits(self, gm: GraphModule, made: DirectGraph | TrainingGraph) -> bool:
        """Whether calls wait for the kernels of the inference or forward graph gm."""
        cfg, log = self.cfg, PassLog(self.cfg, self.name)
        if cfg.while_building == "wait":
            return True
        checks = cfg.size_asserts, cfg.alignment_asserts, cfg.nan_asserts, cfg.finite_asserts
        why = made.reason
        if self.target is not None or cfg.wrapper != "native":
            why = "the native executor does not run it"
        elif listening() or self.watcher is not None or any(checks):
            why = "somebody looks at it"
        if not why:
            backward = () if self.training is None else self.training.backward_graph()[:1]
            why = why_wait((gm, *backward), cfg)
        if why:
            log.note(STAGES, f"{log.name}: calls wait for its kernels: {why}")
        return bool(why)

    def _backward(self, gm: GraphModule, donated: tuple[int, ...]) -> Program:
        """The backward program, also at the first backward pass, on its own. Changes gm."""
        assert self.training is not None, "an inference graph has no backward pass"
        came, native = ladder.AsItCame(gm), not self.training.reason
        name = f"backward_{self.serial}"

        def compiled(taken: ladder.Steps) -> Program:
            begun = None if taken else self.begun_backward.pop(donated, None)
            with compat.precision.noting_flags(self.flags):
                one = begun or self._one_backward(came.module() if taken else gm, donated, taken)
                program = one.program()
            if self.kept is not None and one.kept is not None:
                keep_backward(self.kept.name, donated, one.kept, self.cfg)
            return with_objects(program, one.objects)

        def by_eager(taken: ladder.Steps) -> Program:
            return ladder.backward_graph(came.module(), name, taken, native, self.cfg)

        return ladder.descend(self.cfg, lambda: name, compiled, by_eager)

    def _one_backward(
        self, gm: GraphModule, donated: tuple[int, ...], taken: ladder.Steps
    ) -> _Backward:
        objects = take_objects(gm)
        kept = None if self.kept is None or objects or taken else Kept()
        captured = self._captured(gm, "backward", taken, donated_inputs=donated)
        return _Backward(captured, self.cfg, self._target(kept), objects, kept)

    def _interpreted(
        self, graph: Callable[[], GraphModule]
    ) -> Callable[[list[Any]], tuple[Any, ...]]:
        return ladder.interpreted_gradients(graph, f"backward_{self.serial}", self.cfg)

    def _captured(
        self, gm: GraphModule, kind: GraphKind, taken: ladder.Steps = (), **facts: Any
    ) -> Captured:
        if names := self.arguments:
            from plait.capture.names import input_names, result_names

            facts["input_names"] = input_names(gm.graph, names)
            facts["result_names"] = result_names(gm.graph, names)
        return Captured(
            gm,
            f"{kind}_{self.serial}",
            kind,
            watcher=self.watcher,
            ladder=(*self.taken, *taken),
            **facts,
        )

    def _target(self, kept: Kept | None) -> Target | None:
        if self.target is None and kept is not None and self.cfg.wrapper == "native":
            return kept.target
        return self.target


@dataclass
class _Backward:
    """A backward graph that is compiled. objects: among its results. kept: what it leaves for the
    next process. begun: where calls do not wait for it."""

    captured: Captured
    cfg: Config
    target: Target | None
    objects: Mapping[int, Any]
    kept: Kept | None
    begun: Begun | None = None

    def begin(self) -> Begun:
        """To be waited for later."""
        self.begun = Begun(compile_beside(self.captured, self.cfg, self.target))
        return self.begun

    def program(self) -> Program:
        """Waited for."""
        if self.begun is not None:
            return self.begun.program()
        return compile_captured(self.captured, self.cfg, self.target)
