"""Frames that Dynamo is about to compile: asked for first, and put in place without a trace."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as symbolic_config
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import convert_frame, pgo, source
from torch._dynamo import guards as guarding
from torch._dynamo.bytecode_transformation import unique_id
from torch._dynamo.cache_size import is_recompilation
from torch._dynamo.convert_frame import input_codes, output_codes
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._dynamo.types import GuardedCode, wrap_guarded_code
from torch._dynamo.utils import (
    CleanupHook,
    CleanupManager,
    chromium_event_timed,
    get_metrics_context,
    orig_code_map,
)
from torch._guards import (
    CompileContext,
    Guard,
    GuardsSet,
    Source,
    TracingContext,
    compile_context,
    tracing,
)
from torch.fx.experimental.symbolic_shapes import _ShapeGuardsHelper
from torch.utils._ordered_set import OrderedSet
from torch.utils.weak import TensorWeakRef

from plait.compat import precision
from plait.compat.codes import code_of, known_to_dynamo, resumed_again
from plait.compat.frame_facts import (
    ATTRIBUTE_BY_SOURCE,
    COMPILED,
    RESUMED,
    SIZES,
    NotKept,
    Traced,
    Values,
    decoded,
    imported,
    installed_here,
)
from plait.compat.trace_facts import take_of_library


@dataclass(frozen=True)
class Frame:
    """A frame that Dynamo is about to compile."""

    code: types.CodeType
    globals: dict[str, Any]
    locals: dict[str, Any]
    backend: Any
    whole: bool  # fullgraph=True
    plain: bool  # nothing but torch.compile asks for it: no export, no filter of guards
    before: Any  # its entries in Dynamo's cache
    hooks: Any
    compile_id: Any
    again: Callable[[], None]  # has Dynamo note which guards of these entries failed


# ------------------------------------------------------------------------------------ watching
OnFrame = Callable[[Frame, Callable[[], Any]], Any]


def watch_frames(on_frame: OnFrame) -> None:
    """From now on Dynamo asks on_frame(frame, compile) for what it would get of compile()."""
    own = convert_frame._compile
    signature = inspect.signature(own)

    @functools.wraps(own)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        hooks = given["hooks"]
        asked = (given["export"], given.get("package"), hooks.guard_export_fn,
                 hooks.guard_filter_fn, torch._dynamo.config.caching_precompile)  # fmt: skip
        # The older name.
        before = given["cache_entries"] if "cache_entries" in given else given.get("cache_entry")
        backend = given["compiler_fn"]
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        others: Any = given.get("cache_entries_for_reasons", before)

        def again() -> None:
            if is_recompilation(given["cache_size"]) and given.get("frame"):
                guarding.get_and_maybe_log_recompilation_reasons(others, given["frame"], backend)

        frame = Frame(
            given["code"], given["globals"], given["locals"], backend, bool(given["one_graph"]),
            not any(asked), before, hooks, given["compile_id"], again,
        )  # fmt: skip

        def compiled() -> Any:
            known_to_dynamo(frame.code)
            return own(*args, **kwargs)

        return on_frame(frame, compiled)

    convert_frame._compile = compile_frame


@contextmanager
def guards_unmeasured() -> Iterator[None]:
    """Inside, Dynamo does not measure the guards that it makes: for a number in its log it empties
    the processor's caches, which takes 23 ms a frame. Who reads that log gets the number."""
    home: Any = guarding
    if home.guards_log.isEnabledFor(logging.DEBUG):
        yield
        return
    own = home.profile_guard_manager
    home.profile_guard_manager = lambda *_: 0.0
    try:
        yield
    finally:
        home.profile_guard_manager = own


OnTraced = Callable[
    [types.CodeType, Any, Sequence[Guard]], Callable[[Sequence[str], Sequence[str]], None]
]


@contextmanager
def traced_frames(on_traced: OnTraced) -> Iterator[None]:
    """Inside, on_traced(code, Dynamo's graph of it, guards of what Python's own modules hold) is
    called before guards are made: what they were found on still stands there. What it gives is
    called when they are made, with the conditions on sizes, as Python and for people."""
    _watchers.append(on_traced)
    try:
        yield
    finally:
        _watchers.remove(on_traced)


_watchers: list[OnTraced] = []  # of one thread at a time: Dynamo compiles under a lock


def _tell_watchers() -> None:
    own = guarding.CheckFunctionManager.__init__

    @functools.wraps(own)
    def init(self: Any, f_code: Any, output_graph: Any, *args: Any, **kwargs: Any) -> None:
        if not _watchers:
            own(self, f_code, output_graph, *args, **kwargs)
            return
        guarded = _watchers[-1](f_code, output_graph, take_of_library(output_graph))
        with _told_sizes(output_graph) as told:
            own(self, f_code, output_graph, *args, **kwargs)
        python, for_people = told[-1][:2] if told else ((), ())
        guarded(python, for_people)

    guarding.CheckFunctionManager.__init__ = init  # type: ignore[method-assign]


_tell_watchers()


@contextmanager
def _told_sizes(graph: Any) -> Iterator[list[list[Sequence[str]]]]:
    """Inside, the conditions on sizes that guards are made of come into the result."""
    env: Any = graph.shape_env
    own, told = env.produce_guards_verbose, list[list[Sequence[str]]]()

    def produce(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        told.append([list(part.exprs) for part in made])
        return made

    env.produce_guards_verbose = produce
    try:
        yield told
    finally:
        del env.produce_guards_verbose


def ambient_state() -> list[str]:
    """What holds in this thread that a trace depends on and no value tells: grad mode, autocast,
    flags of torch, modes and hooks."""
    state: Any = GlobalStateGuard()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return [
        str(state.__getstate__()),
        str(torch._C._len_torch_function_stack()),
        str(torch.utils._device.CURRENT_DEVICE),
        str(torch._C._functorch.get_dynamic_layer_stack_depth()),
        str(torch.autograd.forward_ad._current_level),
        str(hooks is None),
        str(torch.is_inference_mode_enabled()),
    ]


def is_ordinary_state() -> bool:
    """Whether nothing of `ambient_state` is there that binds objects: modes, transforms, hooks."""
    _, modes, device, layers, level, no_hooks, _ = ambient_state()
    return (modes, device, layers, level, no_hooks) == ("0", "None", "0", "-1", "True")


def settings() -> str:
    """The settings of the tracers, as a text."""
    held: list[Any] = [torch._dynamo.config, functorch_config, symbolic_config]
    return "\n".join(
        f"{name} {_setting(value)}"
        for config in held
        for name, value in sorted(config.get_config_copy().items())
    )


def _setting(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(map(_setting, value), key=str)
    if callable(value):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value))
    return value


# ------------------------------------------------------------------------------------ placing
def remember_sizes(frame: Frame, traced: Traced, values: Values) -> None:
    """Tells Dynamo the sizes of this call's tensors as a compile does, so that others vary from
    then on."""
    seen = pgo.get_code_state()[pgo.CodeId.make(frame.code)].automatic_dynamic
    for number, _, _ in traced.layouts:
        x = values[number]
        if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter):
            entry = pgo.FrameStateSizeEntry.make_tensor(tuple(x.shape), tuple(x.stride()))
            name = values.name(number)
            if name in seen:
                seen[name] |= entry  # there is no other way to join two
            else:
                seen[name] = entry


@contextmanager
def recompiled(frame: Frame) -> Iterator[None]:
    """Inside, the frame's compile is under way, and Dynamo has noted why it is not the first one.
    Raises what Dynamo raises where the user allows no other."""
    with compile_context(CompileContext(frame.compile_id)):
        frame.again()
        yield


def put_in_place(frame: Frame, traced: Traced, values: Values, graph: Any) -> Any:
    """What Dynamo gets for the frame: the code of `traced` around graph (None if there is none),
    under guards of what lies here. Nothing has changed where it raises."""
    code = code_of(traced, frame)
    fresh = {
        name: unique_id(COMPILED if kind == "graph" else name, with_uuid=True)
        for name, (kind, _) in traced.installed.items()
    }
    installed = {fresh[name]: value for name, value in installed_here(traced).items()}
    for name, (kind, data) in traced.installed.items():
        if kind == "graph":
            reason = "what Dynamo compiled is not traced"
            installed[fresh[name]] = torch._dynamo.disable(graph, reason=reason)  # type: ignore[no-untyped-call]
        elif kind == RESUMED:
            installed[fresh[name]], rest = resumed_again(data, frame, fresh[name])
            consts = tuple(rest if c == rest else c for c in code.co_consts)
            code = code.replace(co_consts=consts)
    code = code.replace(co_names=tuple(fresh.get(n, n) for n in code.co_names))
    for name, module in imported(traced).items():
        if frame.globals.setdefault(name, module) is not module:
            raise NotKept(f"the global {name} is another one")
    cleanups = [CleanupHook.create(frame.globals, name, v) for name, v in installed.items()]
    try:
        with chromium_event_timed("dynamo", reset_event_log_on_exit=True), get_metrics_context():
            checks = _guards(frame, traced, values, fresh)
    except BaseException:
        for cleanup in cleanups:
            cleanup()
        raise
    input_codes.add(frame.code)
    orig_code_map[code] = frame.code
    output_codes.add(code)
    CleanupManager.instance[code] = cleanups
    text = f"Torch-Compiled Region: {frame.compile_id}"
    return wrap_guarded_code(GuardedCode(code, checks, frame.compile_id, text))


def _guards(frame: Frame, traced: Traced, values: Values, fresh: Mapping[str, str]) -> Any:
    sources = _sources(traced, fresh)
    guards = []
    for g in (g for g in traced.guards if g.built):
        create: Any = getattr(guarding.GuardBuilder, g.kind, None) or getattr(precision, g.kind)
        more = {k: _argument(v, sources, values, g.source) for k, v in g.more.items()}
        of = sources[g.source]
        if g.kind == "HASATTR" and ATTRIBUTE_BY_SOURCE:
            of, more = source.AttrSource(of, more["attr"]), {}
        create = functools.partial(create, **more) if more else create
        guards.append(Guard(of, create))
    builtin_names = [fresh[n] for n, (kind, _) in traced.installed.items() if kind == "builtins"]
    known: dict[str, Any] = {
        "local_scope": frame.locals,
        "global_scope": frame.globals,
        "torch_function_mode_stack": [],
        "guard_on_key_order": {sources[k] for k in traced.key_order},
        "input_source_to_sizes_strides": {
            sources[k]: {"size": tuple(size), "stride": tuple(stride)}
            for k, size, stride in traced.layouts
        },
        "dual_level": torch.autograd.forward_ad._current_level,
        "functorch_layers": [],
        "current_device": None,
        "global_state_guard": convert_frame.initial_global_state,
        "name_of_builtins_dict_key_in_fglobals": builtin_names[0] if builtin_names else None,
        "_aotautograd_guards": [],
        "skip_guards_check": True,  # it measures them as well, with the processor's caches emptied
    }
    python, for_people = traced.sizes
    if python:
        guards.append(Guard(source.ShapeEnvSource(), getattr(guarding.GuardBuilder, SIZES)))
    names = {f.name for f in fields(OutputGraphGuardsState)}
    known["_guards"] = GuardsSet(OrderedSet(guards))  # one by one, each would note its stack
    state = OutputGraphGuardsState(**{k: v for k, v in known.items() if k in names})
    graph = OutputGraphCommon(state, import_sources=dict(traced.imports))
    manager = guarding.CheckFunctionManager(
        frame.code,
        graph,
        frame.before,
        frame.hooks.guard_fail_fn,
        shape_code_parts=guarding.ShapeCodeParts(
            _ShapeGuardsHelper(list(python)), _ShapeGuardsHelper(list(for_people)), None, True, []
        ),
    )
    if not manager.guard_manager.check(frame.locals):
        raise NotKept("guards that do not hold here")
    return manager.guard_manager


def _argument(v: Any, sources: Sequence[Source], values: Values, own: int) -> Any:
    if isinstance(v, Mapping) and "tensor" in v:
        return TensorWeakRef(values[own])
    return decoded(v, sources.__getitem__)


def _sources(traced: Traced, fresh: Mapping[str, str]) -> list[Source]:
    """The sources, made again. fresh: new names of globals."""
    made: list[Source] = []
    with tracing(TracingContext(None)):  # where some leave a guard, which is in traced.guards
        for name, row in traced.sources:
            given = {k: decoded(v, made.__getitem__) for k, v in row.items()}
            if "global_name" in given:
                given["global_name"] = fresh.get(given["global_name"], given["global_name"])
            made.append(getattr(source, name)(**given))
    return made
