"""Dynamo asks here before it compiles a frame: the entry of an earlier process is put in place, or
what the compile comes to is kept for the next one."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import plait
from plait.capture.program import collector_paused
from plait.capture.recompiles import of_process, tell_recompile
from plait.capture.warm.entry import VERSION, Entry, from_bytes, to_bytes
from plait.capture.warm.graphs import Kept, graph_again, keeping
from plait.capture.warm.own_files import digest_of
from plait.capture.warm.prints import Prints, named_function, same_objects, shadowed_names
from plait.capture.warm.sources import own_sources, require_sources
from plait.compat import frame_facts, frames
from plait.compat.codes import with_code
from plait.compat.frame_facts import NotKept, Traced, Values, named
from plait.compat.frames import Frame
from plait.compat.torch_functions import LIBRARIES, is_library_code, is_torch_code, torch_functions
from plait.compat.trace_facts import Answer, Looked, looked_at, result_of
from plait.compat.versions import BEFORE_2_13
from plait.config import EXTENDED, Config
from plait.log import STAGES, PassLog
from plait.runtime.store import DIGESTS, STARTS, Store, key_of
from plait.runtime.toolchain import detect_isa
from plait.wrapper.program import listening
from plait.wrapper.watch import watcher


@dataclass(frozen=True)
class Outcome:
    """What became of a frame. how: "warm", "kept" for the next process, "skipped" where Dynamo
    finds nothing to compile, or why none of these."""

    function: str
    how: str

    @property
    def line(self) -> str:
        """For people."""
        told = {
            "warm": "started warm",
            "kept": "kept for the next process",
            "skipped": "nothing to compile",
        }
        return f"{self.function}: {told.get(self.how, f'not kept: {self.how}')}"


outcomes: deque[Outcome] = deque(maxlen=1000)
"""Of the last frames of this process that could start warm."""
SLOTS = 8
"""Entries of one key: of a function and arguments of some kinds, with other values."""


@cache
def start_warm() -> None:
    """From now on Dynamo asks."""
    frames.watch_frames(_on_frame)


def _on_frame(frame: Frame, compile_frame: Callable[[], Any]) -> Any:
    if not _is_ours(frame):
        return compile_frame()
    with collector_paused(), frames.guards_unmeasured():
        cfg = _config_of(frame)
        return compile_frame() if cfg is None else _started(frame, compile_frame, cfg)


def _started(frame: Frame, compile_frame: Callable[[], Any], cfg: Config) -> Any:
    """What Dynamo gets for a frame that entries serve."""
    log = PassLog(cfg, frame.code.co_name)
    store = Store.of(cfg, STARTS)
    try:
        key = _key(frame, cfg)
    except Exception as why:  # noqa: BLE001 - users' objects raise what they like
        _tell(log, str(why) if isinstance(why, NotKept) else f"{type(why).__name__}: {why}")
        return compile_frame()
    for slot in range(SLOTS):
        data = store.read(_slot(key, slot))
        if data is None:
            break
        try:
            result = _put_in_place(frame, from_bytes(data), cfg)
        except Exception as why:
            if cfg.strict and not isinstance(why, NotKept):
                raise
            log.note(STAGES, f"{log.name}: entry {slot} is not taken: {type(why).__name__}: {why}")
        else:
            _tell(log, "warm")
            with frames.recompiled(frame):
                tell_recompile(of_process, log)
            return result
    with keeping(cfg.strict) as kept:
        made, result = _compiled(frame, compile_frame, kept)

    def keep() -> None:
        with kept.reasons():
            if not kept.reason:
                assert made is not None, "there is a reason why not"
                _keep(store, key, replace(made, graph=kept.data, pieces=kept.pieces))
        _tell(log, kept.reason or "kept")

    kept.when_there(keep)
    return result


def _tell(log: PassLog, how: str) -> None:
    outcomes.append(Outcome(log.name, how))
    log.note(STAGES, outcomes[-1].line)


def _is_ours(frame: Frame) -> bool:
    """Whether plait compiles the frame."""
    own = getattr(frame.backend, "compiler_fn", None)
    return getattr(own, "__module__", "") == "plait.capture.backend"


def _config_of(frame: Frame) -> Config | None:
    """The configuration of a frame of ours that entries serve."""
    if not frame.plain:
        return None
    options: Mapping[str, Any] = getattr(frame.backend, "kwargs", {})
    cfg = Config.from_env().with_options(options.get("options"), options.get("mode"))
    usual = cfg.wrapper == "native" and not (cfg.debug_dir or cfg.debug > STAGES)
    looked_at = cfg.report_to or listening() or watcher() is not None
    if not cfg.warm_start or not usual or looked_at:
        return None
    return cfg if frames.is_ordinary_state() else None


def _slot(key: str, slot: int) -> str:
    return key_of((key, str(slot)))


def _keep(store: Store, key: str, entry: Entry) -> None:
    """In the first free place, or that of the oldest."""
    data = to_bytes(entry)
    found = [store.find(_slot(key, k)) for k in range(SLOTS)]
    ages = [-1.0 if f is None else f.used() for f in found]
    try:
        store.offer(_slot(key, ages.index(min(ages))), data)
    except OSError as error:
        raise NotKept(f"its folder cannot be written ({error.strerror})") from None


# ------------------------------------------------------------------------------------ keys
def _key(frame: Frame, cfg: Config) -> str:
    """What an entry is looked up by: all that decides which programs a trace can lead to, but for
    values. Raises NotKept."""
    if EXTENDED:
        raise NotKept(f"{EXTENDED[0]} from outside of plait")
    prints = Prints()
    closure = {k: prints.kind_of(v) for k, v in sorted(frame.locals.items())}
    return key_of(
        (
            str(VERSION),
            digest_of(Path(plait.__file__).parent, Store.of(cfg, DIGESTS)),
            _versions(),
            _machine(),
            prints.code(frame.code),
            str(shadowed_names(frame.code, frame.globals)),
            torch_functions(),
            json.dumps(closure),
            json.dumps(frames.ambient_state()),
            json.dumps(flags()),
            frames.settings(),
            str((frame.whole, frame.backend.dynamic)),
            json.dumps((cfg.key(), cfg.strict)),
            detect_isa(cfg.isa).full_name,
        )
    )


@cache
def _versions() -> str:
    """Of torch and Python."""
    return f"{torch.__version__} {torch.version.git_version} {sys.version}"


def _machine() -> str:
    # Where nothing has asked for a GPU yet, no argument lies on one.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    n = torch.cuda.device_count() if used else 0
    gpus = [str(torch.cuda.get_device_properties(k)) for k in range(n)]
    return f"{platform.machine()} {gpus}"


_FLAGS = (
    "backends.cuda.matmul.allow_tf32", "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.enabled", "backends.cudnn.allow_tf32", "backends.cudnn.benchmark",
    "backends.cudnn.deterministic", "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision", "backends.fp32_precision",
    "backends.mha.get_fastpath_enabled", "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "get_float32_matmul_precision", "get_num_threads",
    "is_anomaly_enabled", "is_anomaly_check_nan_enabled",
    "utils.deterministic.fill_uninitialized_memory", "distributed.is_initialized",
)  # fmt: skip


def flags() -> dict[str, str]:
    """Settings of torch that a trace or a lowering may read without a guard."""
    found = {}
    for path in _FLAGS:
        value: Any = torch
        try:
            for name in path.split("."):
                value = getattr(value, name)
            found[path] = str(value() if callable(value) else value)
        except (AttributeError, RuntimeError) as error:  # another version of torch; no such build
            found[path] = type(error).__name__
    if found["distributed.is_initialized"] == "True":
        found["ranks"] = f"{torch.distributed.get_rank()} {torch.distributed.get_world_size()}"
    return found


# ------------------------------------------------------------------------------------ keeping
def _compiled(
    frame: Frame, compile_frame: Callable[[], Any], kept: Kept
) -> tuple[Entry | None, Any]:
    """What the compiler makes of the frame, and its entry, without its graph; None where kept tells
    why there is none."""
    entries: list[Entry] = []

    def on_traced(code: types.CodeType, graph: Any, of_library: Any) -> Callable[..., None]:
        entries.clear()
        if code is frame.code:
            with kept.reasons():
                entries.append(_entry(frame, graph, of_library, looked))

        def on_guarded(python: Sequence[str], told: Sequence[str]) -> None:
            sizes = python, told
            entries[:] = [replace(e, traced=replace(e.traced, sizes=sizes)) for e in entries]

        return on_guarded

    with frames.traced_frames(on_traced), looked_at() as looked:
        result = compile_frame()
    with kept.reasons():
        graphs = [kind for e in entries for kind, _ in e.traced.installed.values()]
        if not kept.reason and not entries and not kept.n_graphs:
            kept.reason = "skipped"
        if not kept.reason and (not entries or graphs.count("graph") != kept.n_graphs):
            raise NotKept("several graphs")
        there = kept.data is not None or kept.comes_later
        if not kept.reason and graphs.count("graph") and not there:
            raise NotKept("a graph that eager runs")
        if not kept.reason:
            traced = with_code(entries[0].traced, result, frame)
            return replace(entries[0], traced=traced), result
    return None, result


_UNGUARDED = frozenset({"vars", "__dict__", "__annotations__", "get_annotations", "get_type_hints"})
"""Names by which code gets all attributes of an object at once, or annotations: no guard tells
which they were."""
_OF_PROCESS = frozenset({"hash", "__hash__"})
"""Names by which code gets numbers that are others in each process."""


def _entry(frame: Frame, graph: Any, of_library: Any, looked: Looked) -> Entry:
    """The entry of a frame, without its graph and code. Raises NotKept."""
    called = looked.codes(graph.tracing_context)
    codes = (frame.code, *called)
    if looked.of_process:
        raise NotKept(f"{looked.of_process}, which is another one in each process")
    if looked.unknown:
        raise NotKept(looked.unknown)
    if any(_OF_PROCESS.intersection(c.co_names) and c.co_name != "__hash__" for c in codes):
        raise NotKept("a hash, which is another one in each process")
    whole = any(_UNGUARDED.intersection(c.co_names) and not is_torch_code(c) for c in codes)
    traced = frame_facts.written(graph, of_library)
    values = Values(traced, frame.globals, frame.locals)
    bare = [v for v in looked.unguarded(graph.tracing_context) if _holds(v)]
    # Older versions guard less of what classes hold.
    held = BEFORE_2_13 or any(isinstance(v, type) or v.__closure__ for v in bare)
    prints = Prints(whole, held)
    told = _prints(traced, values, prints)
    prints.code(frame.code)
    by_name = _named(called, prints) + _named_holders(bare, prints)
    same, answers = _same(traced, values), _answers(looked.answers)
    answered = [a for k, a in enumerate(looked.asked) if a not in looked.asked[:k]]
    sources = own_sources()
    return Entry(traced, whole, held, told, same, by_name, answers, answered, sources, None, {})


def _prints(traced: Traced, values: Values, prints: Prints) -> list[str]:
    found = []
    layouts = {source: layout for source, *layout in traced.layouts}
    for g in traced.guards:
        stands = "" if g.kind in frame_facts.STATE_KINDS else values[g.source]
        more = frame_facts.arguments(g, values)
        if g.kind == "TENSOR_MATCH":
            more["layout"] = layouts.get(g.source)
        found.append(prints.of(g.kind, stands, more))
    found += [prints.keys(values[source]) for source in traced.key_order]
    return found


def _same(traced: Traced, values: Values) -> str:
    """As `same_objects` tells it."""
    guards = [g for g in traced.guards if g.built and g.kind not in frame_facts.STATE_KINDS]
    return same_objects((g.kind, values[g.source]) for g in guards)


def _answers(asked: Sequence[Answer]) -> list[tuple[str, str, bool]]:
    """What the trace asked of modules, by their names. Raises NotKept for one that has none."""
    for module, name, _ in asked:
        if sys.modules.get(module.__name__) is not module:
            raise NotKept(f"the question for {name} of a module that nothing names")
    return sorted({(module.__name__, name, found) for module, name, found in asked})


def _named(codes: Any, prints: Prints) -> list[tuple[str, str, str]]:
    """What the trace ran and no guard leads to. Raises NotKept for what has no name."""
    found = []
    loaded = dict(sys.modules)
    modules = {f"<frozen {name}>": m for name, m in loaded.items()}  # a part of Python's library
    modules |= {str(getattr(m, "__file__", "")): m for m in loaded.values()}
    for code in dict.fromkeys(codes):
        if code in prints.codes or (is_library_code(code) and not is_torch_code(code)):
            continue
        where = named_function(code, modules)
        if where is not None:
            found.append((*where, prints.identity(named(*where))))
        if code not in prints.codes:
            raise NotKept(f"the code of {code.co_name}, which nothing names")
    return found


def _holds(value: Any) -> bool:
    """Whether a function or class holds more than code, and is of the user's."""
    if isinstance(value, types.FunctionType):
        held = value.__closure__, value.__defaults__, value.__kwdefaults__
        return any(held) and not is_library_code(value.__code__)
    return str(getattr(value, "__module__", "")).partition(".")[0] not in LIBRARIES


def _named_holders(values: Sequence[Any], prints: Prints) -> list[tuple[str, str, str]]:
    """Functions and classes that the trace looked into and no guard leads to. Raises NotKept for
    what has no name."""
    found = []
    for value in values:
        if prints.knows(value):
            continue
        where = value.__module__, value.__qualname__
        if named(*where) is not value:
            raise NotKept(f"what {value.__qualname__} holds, which nothing names")
        found.append((*where, prints.identity(value)))
    return found


# ------------------------------------------------------------------------------------ starting
def _put_in_place(frame: Frame, entry: Entry, cfg: Config) -> Any:
    """What Dynamo gets for the frame. Raises NotKept where something is not what it was."""
    require_sources(entry.sources)
    traced = entry.traced
    values = Values(traced, frame.globals, frame.locals)
    prints = Prints(entry.whole, entry.held)
    prints_now = _prints(traced, values, prints)
    about = [(g.source, g.kind) for g in traced.guards]
    about += [(source, "order of keys") for source in traced.key_order]
    for (source, kind), told, now in zip(about, entry.prints, prints_now, strict=True):
        if told != now:
            raise NotKept(f"{values.name(source)} is another one ({kind})")
    if unmet := values.unmet(traced.sizes[0]):
        raise NotKept(f"{unmet} does not hold")
    if _same(traced, values) != entry.same:
        raise NotKept("other objects are the same one")
    for module, path, told in entry.named:
        value = named(module, path)
        if value is None or prints.identity(value) != told:
            raise NotKept(f"{module}.{path} is another one")
    for module, name, found in entry.asked:
        if hasattr(sys.modules.get(module), name) != found:
            raise NotKept(f"{module}.{name} is {'missing' if found else 'there'}")
    for module, name, given, told in entry.answered:
        fn = named(importlib.import_module(module).__name__, name)
        if fn is None or result_of(fn, given) != told:
            raise NotKept(f"{module}.{name} says something else")
    graph = None if entry.graph is None else graph_again(entry.graph, entry.pieces, cfg)
    frames.remember_sizes(frame, traced, values)
    return frames.put_in_place(frame, traced, values, graph)
