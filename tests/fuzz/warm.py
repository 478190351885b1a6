"""`python -m tests.fuzz.warm --count N`: versions of programs, each as if in a process of its own,
that look for an entry of a warm start that is taken and must not be.

A seed gives a program of two modules as text (`warm_features.txt`) and a walk through versions of
it: of its text, of what is patched after import, of its inputs and of the settings that hold. Each
version is imported anew under the same names, compiled over the same cache folder and compared with
eager. A result that differs, where a compile without an entry gives eager's, is `stale`. Versions
that were there before, or differ by what makes no difference, are to start warm: the report counts
how many do and why others are not kept.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import gc
import json
import logging
import math
import platform
import random
import re
import shutil
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch.distributions import kl
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plait.capture.warm import frames as warm_frames
from plait.log import watched
from plait.runtime.toolchain import ISAS

LIB, MAIN = "warmfuzz_lib", "warmfuzz_main"
PRELUDE = """
import abc, builtins, collections, contextlib, dataclasses, enum, functools, itertools, math
import operator, os, sys, types, typing
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
def ident(x, y, n, o):
    return x
"""
FEATURES: Mapping[str, str] = {
    name: text.strip("\n") + "\n"
    for name, _, text in (
        part.partition("\n")
        for part in Path(__file__).with_name("warm_features.txt").read_text().split("\n=== ")[1:]
    )
}
"""The pieces by name."""
PLACE = re.compile(r"<<(~?)(.*?)>>", re.S)


# ------------------------------------------------------------------------------------ programs
@dataclass(frozen=True)
class Piece:
    """One feature in a program. number: `_K`. lib: which module it stands in. inner: the number of
    the piece that NEXT is, or -1."""

    name: str
    number: int
    lib: bool
    inner: int


@dataclass(frozen=True)
class Source:
    """The text of a program with its places. order: numbers of the pieces that `top` calls. form:
    of what is compiled."""

    pieces: tuple[Piece, ...]
    order: tuple[int, ...]
    form: str

    def places(self) -> list[tuple[bool, int]]:
        """Of each place in all texts, in order: whether it makes no difference, and how many
        texts it has."""
        found = []
        for text in self._raw():
            for m in PLACE.finditer(text):
                found.append((bool(m[1]), len(m[2].split("||"))))
        return found

    def texts(self, choice: Sequence[int]) -> list[str]:
        """lib, main, lib after, main after, lib later, main later."""
        picks = iter(choice)

        def pick(m: re.Match[str]) -> str:
            return m[2].split("||")[next(picks)]

        return [PLACE.sub(pick, text) for text in self._raw()]

    def _raw(self) -> list[str]:
        raw = ["", "", "", "", "", ""]
        for p in self.pieces:
            text, _, later = FEATURES[p.name].partition("# LATER\n")
            text, _, after = text.partition("# AFTER\n")
            inner = "ident"
            if p.inner >= 0:
                other = next(q for q in self.pieces if q.number == p.inner)
                where = "" if other.lib == p.lib else f"{LIB}_as."
                inner = f"{where}step_{p.inner}"
            for k, part in enumerate((text, after, later)):
                part = re.sub(r"_K\b", f"_{p.number}", part).replace("NEXT", inner)
                raw[2 * k + (0 if p.lib else 1)] += part
        calls = "".join(
            f"    x = {f'{LIB}_as.' if q.lib else ''}step_{q.number}(x, y, n, o)\n"
            for k in self.order for q in self.pieces if q.number == k
        )  # fmt: skip
        top = f"def top(x, y, n, o):\n{calls}    return x <<||, x * 1||* 1>>\n"
        if self.form == "module":
            calls = "".join(f"    {line}\n" for line in calls.splitlines())
            top = (
                "class Top(nn.Module):\n    k = <<1.0||2.0>>\n    def __init__(self):\n"
                "        super().__init__()\n        self.lin = nn.Linear(4, 4)\n"
                f"    def forward(self, x, y, n, o):\n        x = self.lin(x) * self.k\n{calls}"
                "        return x\ntorch.manual_seed(3)\ntop = Top()<<||.eval()>>\n"
            )
        line = '<<~||# a line\n||"another line"\nunused = 3\n||def unused(x): return x\n>>'
        raw[0] = PRELUDE + line + raw[0]
        raw[1] = f"{PRELUDE}import {LIB} as {LIB}_as\n{raw[1]}{line}{top}"
        return raw


def make_source(rng: random.Random) -> Source:
    """A program: pieces in `lib` come first, so that those in `main` can call them."""
    names = [rng.choice(list(FEATURES)) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    libs = sorted((rng.random() < 0.5 for _ in names), reverse=True)
    pieces: list[Piece] = []
    free: list[int] = []
    for number, (name, lib) in enumerate(zip(names, libs, strict=True)):
        inner = -1
        if "NEXT" in FEATURES[name] and free and rng.random() < 0.6:
            inner = free.pop()
        pieces.append(Piece(name, number, lib, inner))
        free.append(number)
    return Source(tuple(pieces), tuple(free), rng.choice(("function", "function", "module")))


# ------------------------------------------------------------------------------------ versions
FLAGS: Mapping[str, Callable[[Any], Any]] = {
    # PyTorch's own test tools forbid the attributes of torch.backends for the whole process.
    "product": lambda on: _precision("mkldnn", "matmul", "bf16" if on else "none"),
    "product, tf32": lambda on: _precision("mkldnn", "matmul", "tf32" if on else "none"),
    "convolution": lambda on: _precision("mkldnn", "conv", "bf16" if on else "none"),
    "recurrent": lambda on: _precision("mkldnn", "rnn", "bf16" if on else "none"),
    "a GPU's convolution": lambda on: _precision("cuda", "conv", "ieee" if on else "tf32"),
    "all": lambda on: _precision("generic", "all", "ieee" if on else "none"),
    "warn only": lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
    "filled": lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", not on),
    "warn always": torch.set_warn_always,
    "fast path": lambda on: torch.backends.mha.set_fastpath_enabled(not on),
    "flash": lambda on: torch.backends.cuda.enable_flash_sdp(not on),
    "math": lambda on: torch.backends.cuda.enable_math_sdp(not on),
    "cache of autocast": lambda on: torch.set_autocast_cache_enabled(not on),
    "dtype of autocast": lambda on: torch.set_autocast_dtype(
        "cpu", torch.float16 if on else torch.bfloat16
    ),
    "one thread": lambda on: torch._C._set_multithreading_enabled(not on),
    "sparse": lambda on: torch._C._set_check_sparse_tensor_invariants(on),
    "oneDNN": lambda on: torch._C._set_mkldnn_deterministic(on),
    "seed": lambda on: torch.manual_seed(7 if on else 0),
    "float": lambda on: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(not on),
    "overwrite": torch.__future__.set_overwrite_module_params_on_conversion,
    "swap": torch.__future__.set_swap_module_params_on_conversion,
}  # fmt: skip
"""Switches of torch, by what they are of: True is not the default."""
VERSIONS: Mapping[str, tuple[Any, str, Any]] = {
    "torch": (torch, "__version__", "2.99.0"),
    "torch's commit": (torch.version, "git_version", "0" * 40),
    "Python": (sys, "version", "3.99"),
    "machine": (platform, "machine", lambda: "other"),
    "processor": (warm_frames, "detect_isa", lambda _: ISAS["portable"]),
    "plait": (warm_frames, "VERSION", 99),
}
"""What another process may have another version of: its place, and another value."""
MADE = ("inference", "inner", "negative", "parameter", "hooked", "retained", "view", "base", "grad")
"""How x comes about."""
SETTINGS: Mapping[str, Sequence[Any]] = {
    "grad": ("on", "on", "on", "off", "inference"),
    "autocast": (None, None, None, torch.bfloat16, torch.float16),
    "default_dtype": (torch.float32, torch.float32, torch.float64),
    "deterministic": (False, False, True),
    "threads": (1, 1, 2),
    "precision": ("highest", "highest", "high", "medium"),
    "mkldnn": (True, True, False),
    "benchmark": (False, False, True),
    "dynamic": (None, None, None, True, False),
    "fullgraph": (False, False, True),
    "options": (
        {}, {}, {"opt_level": 1}, {"verify": True}, {"fusion": False}, {"eager_random": True},
        {"nan_asserts": True}, {"size_asserts": True}, {"isa": "portable"}, {"max_recompute": 0},
    ),
    "device": (None, None, None, "cpu", "meta"),
    "around": ("", "", "function mode", "dispatch mode", "hooks", "dual", "anomaly", "vmap"),
    "flag": ("", *FLAGS),
    "version": ("", "", *VERSIONS),
    "dynamo": (
        {}, {}, {"specialize_float": True}, {"assume_static_by_default": False},
        {"inline_inbuilt_nn_modules": False}, {"guard_nn_modules": False},
        {"allow_unspec_int_on_nn_module": True}, {"skip_fsdp_guards": False},
    ),
    "functorch": ({}, {}, {"fake_tensor_allow_meta": False}, {"functionalize_rng_ops": False}),
    "rows": (3, 3, 3, 5, 1, 0),
    "layout": ("plain", "plain", "turned", "offset", "expanded", "wide"),
    "requires_grad": (True, True, False),
    "dtype": (torch.float32,) * 6 + (torch.float64, torch.bfloat16),
    "other": ("fresh", "fresh", "same", "view", "part", "leaf"),
    "n": (2, 2, 3, 2.5, True, 2.0),
    "o": ("none", "none", "tensor", "row", "x", "number"),
    "mark": ("", "", "", "dynamic", "static", "factor"),
    "made": ("", "", *MADE),
    "backward": (True, True, False),
}  # fmt: skip
"""What holds around a call and what its inputs are."""


@dataclass(frozen=True)
class Version:
    choice: tuple[int, ...]
    settings: Mapping[str, int] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        return SETTINGS[name][self.settings.get(name, 0)]


def versions(rng: random.Random, source: Source, n: int) -> list[tuple[Version, str]]:
    """A walk, and how each came about: most are one step away from the first."""
    places = source.places()
    made = [(Version(tuple(rng.randrange(n) if rng.random() < 0.15 else 0 for _, n in places)), "")]
    while len(made) < n:
        base = made[0][0] if rng.random() < 0.8 else rng.choice(made)[0]
        what = rng.choice(("same", *["text"] * 8, "neutral", *["setting"] * 4))
        if what in ("text", "neutral"):
            alike = what == "neutral"
            mine = [k for k, (same, n) in enumerate(places) if same == alike and n > 1]
            if not mine:
                continue
            choice = list(base.choice)
            k = rng.choice(mine)
            choice[k] = (choice[k] + rng.randrange(1, places[k][1])) % places[k][1]
            base = Version(tuple(choice), base.settings)
        elif what == "setting":
            name = rng.choice(list(SETTINGS))
            base = Version(base.choice, {**base.settings, name: rng.randrange(len(SETTINGS[name]))})
        made.append((base, what))
    return made


# ------------------------------------------------------------------------------------ processes
def _namespaces() -> list[Any]:
    return [
        torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.nn.Linear, math, builtins,
        torch._C._nn, torch.linalg, torch._VF, torch.nn.init, torch.distributions.Distribution,
        torch.distributions.Normal,
    ]  # fmt: skip


def _registries() -> list[Any]:
    """Dicts and sets of torch that programs add to."""
    handlers: Any = PolyfilledFunctionVariable._get_polyfill_handlers()
    return [
        torch._decomp.decomposition_table, trace_rules._allowed_callable_ids.function_ids,
        trace_rules._polyfilled_function_ids.function_ids, VariableBuilder._id_dispatch(),
        trace_rules.get_torch_obj_rule_map(), handlers, pytree.SUPPORTED_NODES,
        pytree.SUPPORTED_SERIALIZED_TYPES, pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE,
        kl._KL_REGISTRY, kl._KL_MEMOIZE,
    ]  # fmt: skip


@contextlib.contextmanager
def a_process(source: Source, version: Version) -> Iterator[types.ModuleType]:
    """The modules of a version, imported anew. What they patch is put back."""
    texts = source.texts(version.choice)
    before = [(space, dict(vars(space))) for space in _namespaces()]
    registries = [(held, held.copy()) for held in _registries() if held is not None]
    modules_before = set(sys.modules)
    torch.utils.hooks.RemovableHandle.next_id = 0
    torch._dynamo.reset()
    symbolic_convert._import_module.cache_clear()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    modules = [types.ModuleType(LIB), types.ModuleType(MAIN)]
    try:
        for k, m in enumerate(modules):
            m.__file__ = f"/nowhere/{m.__name__}.py"
            sys.modules[m.__name__] = m
            _run(texts[k], m, "")
        for k, m in enumerate(modules):
            _run(texts[2 + k], m, ".after")
        vars(modules[1])["_later"] = texts[4:]
        yield modules[1]
    finally:
        for space, held in before:
            for name in set(vars(space)) | set(held):
                if vars(space).get(name) is not held.get(name):
                    _put_back(space, name, held)
        for registry, earlier in registries:
            registry.clear()
            registry.update(earlier)
        for hooks in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            getattr(torch.nn.modules.module, hooks).clear()
        for m in modules:
            for value in list(vars(m).values()):
                if isinstance(value, torch.library.Library):
                    value._destroy()  # type: ignore[no-untyped-call]
        for name in set(sys.modules) - modules_before:
            if name.startswith("warmfuzz"):
                del sys.modules[name]


class NoProgram(Exception):
    """A version whose text fails outside of its function."""


def _run(text: str, module: types.ModuleType, when: str) -> None:
    try:
        exec(compile(text, f"/nowhere/{module.__name__}.py{when}", "exec"), vars(module))
    except Exception as error:
        raise NoProgram(f"{type(error).__name__}: {error}") from error


def _put_back(space: Any, name: str, held: Mapping[str, Any]) -> None:
    if name in held:
        setattr(space, name, held[name])
    else:
        delattr(space, name)


@contextlib.contextmanager
def settings_of(v: Version) -> Iterator[None]:
    """What holds around a compile and its calls."""
    with contextlib.ExitStack() as stack:
        torch.set_default_dtype(v.get("default_dtype"))
        stack.callback(torch.set_default_dtype, torch.float32)
        torch.use_deterministic_algorithms(v.get("deterministic"))
        stack.callback(torch.use_deterministic_algorithms, False)
        torch.set_num_threads(v.get("threads"))
        stack.callback(torch.set_num_threads, 1)
        torch.set_float32_matmul_precision(v.get("precision"))
        stack.callback(torch.set_float32_matmul_precision, "highest")
        # PyTorch's own test tools forbid the attributes of torch.backends for the whole process.
        torch._C._set_mkldnn_enabled(v.get("mkldnn"))
        stack.callback(torch._C._set_mkldnn_enabled, True)
        torch._C._set_cudnn_benchmark(v.get("benchmark"))
        stack.callback(torch._C._set_cudnn_benchmark, False)
        stack.enter_context(torch._dynamo.config.patch(**v.get("dynamo")))
        stack.enter_context(functorch_config.patch(**v.get("functorch")))
        if v.get("grad") == "off":
            stack.enter_context(torch.no_grad())
        elif v.get("grad") == "inference":
            stack.enter_context(torch.inference_mode())
        if v.get("autocast") is not None:
            stack.enter_context(torch.autocast("cpu", dtype=v.get("autocast")))
        if v.get("flag"):
            FLAGS[v.get("flag")](True)
            stack.callback(FLAGS[v.get("flag")], False)
        if v.get("version"):
            stack.enter_context(_other_version(*VERSIONS[v.get("version")]))
        yield


def _precision(backend: str, op: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, op, value)


@contextlib.contextmanager
def _other_version(place: Any, name: str, other: Any) -> Iterator[None]:
    """What is kept by version is kept as if by another one."""
    own = getattr(place, name)
    warm_frames._versions.cache_clear()
    setattr(place, name, other)
    try:
        yield
    finally:
        setattr(place, name, own)
        warm_frames._versions.cache_clear()


class _Modes:
    """What stands around a call."""

    class OfFunctions(torch.overrides.TorchFunctionMode):
        """Sines are another function."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    class OfDispatch(TorchDispatchMode):
        """Does nothing."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def around(v: Version) -> Iterator[None]:
    """What holds at a call, but for settings."""
    with contextlib.ExitStack() as stack:
        match v.get("around"):
            case "function mode":
                stack.enter_context(_Modes.OfFunctions())
            case "dispatch mode":
                stack.enter_context(_Modes.OfDispatch())
            case "hooks":
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2)
                stack.enter_context(hooks)
            case "dual":
                stack.enter_context(torch.autograd.forward_ad.dual_level())
            case "anomaly":
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
        if v.get("device") is not None:
            stack.enter_context(torch.device(v.get("device")))
        yield


def inputs(v: Version) -> tuple[Any, ...]:
    """x, y, n, o."""
    gen = torch.Generator().manual_seed(1)
    rows, dtype = v.get("rows"), v.get("dtype")
    memory = torch.rand(200, generator=gen).to(dtype) + 0.1
    match v.get("layout"):
        case "turned":
            x = memory[: 4 * rows].view(4, rows).t()
        case "offset":
            x = memory[3 : 3 + 4 * rows].view(rows, 4)
        case "expanded":
            x = memory[:4].expand(rows, 4)
        case "wide":
            x = memory[: 8 * rows].view(rows, 8)[:, ::2]
        case _:
            x = memory[: 4 * rows].view(rows, 4)
    x = x.detach()
    if v.get("mark") == "factor":
        x.factor = 4.0  # type: ignore[attr-defined]
    elif v.get("mark") == "dynamic" and rows > 1:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    elif v.get("mark") == "static":
        torch._dynamo.mark_static(x, 0)
    y = (torch.rand((rows, 4), generator=gen) + 0.1).to(dtype)
    match v.get("other"):
        case "same":
            y = x
        case "view":
            y = x.view_as(x) if v.get("layout") != "expanded" else x
        case "part":
            y = memory[2 : 2 + 4 * rows].view(rows, 4)
        case "leaf":
            y.requires_grad_()
    x = _made(x, v)
    o: Any = {
        "none": None, "tensor": torch.ones(rows, 4), "row": torch.ones(4) * 2, "x": x, "number": 2.0
    }[v.get("o")]  # fmt: skip
    return x, y, v.get("n"), o


def _made(x: torch.Tensor, v: Version) -> torch.Tensor:
    """x as a setting wants it."""
    if v.get("made") == "inference":
        with torch.inference_mode():
            return x.clone()
    if v.get("made") == "parameter":
        return torch.nn.Parameter(x.clone(), requires_grad=v.get("requires_grad"))
    if v.get("made") == "negative":
        x = torch._neg_view(-x)
    elif v.get("made") == "view":
        x = x.view(1, *x.shape)[0]
    elif v.get("made") == "base":
        x = x.clone(memory_format=torch.preserve_format)[:]
    if not v.get("requires_grad"):
        return x
    x.requires_grad_()
    match v.get("made"):
        case "inner":
            return x * 1
        case "hooked":
            x.register_hook(lambda g: g * 2)
        case "retained":
            x = x * 1
            x.retain_grad()
        case "grad":
            x.grad = torch.ones_like(x)
    return x


def flat(value: Any) -> list[Any]:
    """What a result holds."""
    if isinstance(value, (tuple, list)):
        return [len(value), *(leaf for v in value for leaf in flat(v))]
    if isinstance(value, dict):
        return flat(list(value.items()))
    if isinstance(value, torch.Tensor):
        own = value.detach().as_subclass(torch.Tensor)
        return [(own.clone(), value.requires_grad, value.dtype, value.stride())]
    return [value]


def called(source: Source, v: Version, cfg: Mapping[str, Any] | None) -> list[Any]:
    """All that a version comes to, by eager (None) or compiled."""
    with a_process(source, v) as main, settings_of(v):
        fn = main.top
        if cfg is not None:
            options = {**v.get("options"), **cfg}
            fn = torch.compile(
                fn, backend="plait", options=options, dynamic=v.get("dynamic"),
                fullgraph=v.get("fullgraph"),
            )  # fmt: skip
        found = [_one_call(main, fn, v)]
        for name, text in zip((LIB, MAIN), main._later, strict=True):
            _run(text, sys.modules[name], ".later")
        found.append(_one_call(main, fn, v))
        return found


class Missed(BaseException):
    """A version that no entry serves is not compiled."""


@contextlib.contextmanager
def only_warm(only: bool) -> Iterator[None]:
    """Inside, Missed is raised in place of a compile, unless it is of what is left of a frame that
    started warm."""
    own = warm_frames._compiled

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if any(o.how == "warm" for o in warm_frames.outcomes):
            return own(*args, **kwargs)
        raise Missed

    if only:
        warm_frames._compiled = compiled
    try:
        yield
    finally:
        warm_frames._compiled = own


@contextlib.contextmanager
def counted_frames() -> Iterator[list[str]]:
    """The names of the functions that are looked up inside."""
    own, names = warm_frames._key, list[str]()

    def key(frame: Any, cfg: Any) -> str:
        names.append(frame.code.co_name)
        return own(frame, cfg)

    warm_frames._key = key
    try:
        yield names
    finally:
        warm_frames._key = own


def _one_call(main: types.ModuleType, fn: Callable[..., Any], v: Version) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    args = inputs(v)
    for module in (sys.modules[LIB], main):
        for name, value in sorted(vars(module).items()):
            if re.fullmatch(r"given_\d+", name):
                args = value(*args)
    try:
        with around(v):
            if v.get("around") == "vmap":
                x, *others = args
                out = torch.func.vmap(lambda x: fn(x, *others), randomness="same")(x[None])
            else:
                out = fn(*args)
        first = out[0] if isinstance(out, tuple) else out
        if v.get("backward") and isinstance(first, torch.Tensor) and first.requires_grad:
            with torch.enable_grad():
                torch.autograd.backward(first.float().sum())
    except Exception as error:  # noqa: BLE001 - an answer, too
        return ["raised", type(error).__name__, str(error)]
    found = flat(out)
    for t in args:
        if isinstance(t, torch.Tensor):
            found += [*flat(t), *flat(t.grad if t.is_leaf else None)]
    for module in (sys.modules[LIB], main):
        for name, value in sorted(vars(module).items()):
            if re.fullmatch(r"state_\d+", name):
                found += flat(value())
    top = main.top
    if isinstance(top, torch.nn.Module):
        found += flat([p.grad for p in top.parameters()])
    return found


def differ(a: Sequence[Any], b: Sequence[Any], loose: bool) -> str:
    """Where two lists of `called` are not the same, or ""."""
    for call, (one, two) in enumerate(zip(a, b, strict=True)):
        if one[:1] == ["raised"] and two[:1] == ["raised"]:
            continue
        if len(one) != len(two):
            return f"call {call}: {str(one)[:300]} and {str(two)[:300]}"
        for k, (p, q) in enumerate(zip(one, two, strict=True)):
            if isinstance(p, tuple) and isinstance(q, tuple):
                if p[1:3] != q[1:3] or p[0].shape != q[0].shape:
                    return f"call {call}, {k}: {p[1:]} {p[0].shape} and {q[1:]} {q[0].shape}"
                near = 5e-2 if loose or p[0].dtype in (torch.bfloat16, torch.float16) else 1e-3
                if not torch.allclose(
                    p[0].double(), q[0].double(), rtol=near, atol=near, equal_nan=True
                ):
                    return f"call {call}, {k}: {p[0]} and {q[0]}"
            elif isinstance(p, float) and isinstance(q, float):
                if not math.isclose(p, q, rel_tol=1e-4) and not (p != p and q != q):
                    return f"call {call}, {k}: {p} and {q}"
            elif type(p) is not type(q) or p != q:
                return f"call {call}, {k}: {p} and {q}"
    return ""


# ------------------------------------------------------------------------------------ listening
class Listener(logging.Handler):
    """What plait says of warm starts."""

    def __init__(self) -> None:
        super().__init__(0)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    from plait.log import STAGES, _logging_level, logger

    heard, level = Listener(), logger.level
    logger.addHandler(heard)
    logger.setLevel(_logging_level(STAGES))
    propagates, logger.propagate = logger.propagate, False
    try:
        yield heard
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
        logger.propagate = propagates


# ------------------------------------------------------------------------------------ one seed
@dataclass
class Told:
    """What became of the versions of seeds. counts: by kind. reasons: why nothing was kept or
    taken. by_feature: versions, and those that started warm, of each feature. bad: what is
    wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    by_feature: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)


def neutral(source: Source, v: Version) -> tuple[Any, ...]:
    """Equal for versions of which one is to start warm after the other."""
    places = source.places()
    text = tuple(0 if same else c for (same, _), c in zip(places, v.choice, strict=True))
    return text, tuple((name, str(v.get(name))) for name in SETTINGS if name != "backward")


def run_seed(
    seed: int, told: Told, steps: int = 24, options: Mapping[str, Any] | None = None
) -> None:
    """Adds what became of a seed's versions to told. The first and a few others are compiled where
    no entry serves them."""
    rng = random.Random(seed)
    source = make_source(rng)
    walk = versions(rng, source, steps)
    with kept_versions(options) as (common, kept), listening() as heard:
        for k, (v, how) in enumerate(walk):
            with only_warm(bool(kept) and rng.random() < 0.95):
                _one_version(source, v, how, common, kept, heard, told, seed, k)
            if not kept and k == 1:
                break  # a program of which nothing can be kept


OF_SETTINGS = ("flags that are read", "questions to torch", "attention and vendors' functions")
"""Features that ask for settings."""


def sweep(name: str, told: Told, options: Mapping[str, Any] | None = None) -> None:
    """Adds what became of the edits of one feature to told: after each text of its place with the
    most, every text of all others, and of a feature that asks for settings each of those."""
    source = Source((Piece(name, 0, False, -1),), (0,), "function")
    sizes = [n for _, n in source.places()]
    first = tuple(0 for _ in sizes)
    main = sizes.index(max(sizes))

    def edited(base: Sequence[int], place: int, text: int) -> tuple[int, ...]:
        return (*base[:place], text, *base[place + 1 :])

    for text in range(sizes[main]):
        base = edited(first, main, text)
        with kept_versions(options) as (common, kept), listening() as heard:
            edits = [Version(edited(base, k, c)) for k, n in enumerate(sizes) for c in range(n)]
            if name in OF_SETTINGS:
                edits += [Version(base, {s: c}) for s, n in SETTINGS.items() for c in range(len(n))]
            for number, v in enumerate((Version(base), *edits)):
                with only_warm(bool(number)):
                    _one_version(source, v, "text", common, kept, heard, told, text, number)
                if not kept:
                    break


@contextlib.contextmanager
def kept_versions(
    options: Mapping[str, Any] | None,
) -> Iterator[tuple[dict[str, Any], set[tuple[Any, ...]]]]:
    """Options of compiles that share an empty folder of caches, and what is kept of them."""
    folder = tempfile.mkdtemp(prefix="plait-warm-", dir="/dev/shm")
    try:
        yield {"cache_dir": folder, "kernels": False, **(options or {})}, set()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        torch._dynamo.reset()


def _one_version(
    source: Source, v: Version, how: str, common: Mapping[str, Any], kept: set[tuple[Any, ...]],
    heard: Listener, told: Told, seed: int, k: int,
) -> None:  # fmt: skip
    heard.take()
    warm_frames.outcomes.clear()
    with counted_frames() as asked:
        try:
            got = called(source, v, {**common, "warm_start": True})
        except Missed:
            got = []
        except NoProgram:
            told.counts["no program"] += 1
            return
    lines = heard.take()
    came = [o.how for o in warm_frames.outcomes]
    warm = "warm" in came
    told.counts["versions"] += 1
    told.counts["pairs"] += bool(kept)
    told.counts["warm"] += warm
    like = neutral(source, v)
    if like in kept:
        told.counts["unedited"] += 1
        told.counts["unedited, warm"] += warm
        if not warm:
            told.bad.append({"seed": seed, "version": k, "kind": "missed", "lines": lines[-9:]})
            told.counts["missed"] += 1
    elif warm:
        told.counts["edited, warm"] += 1
    whole = {"warm", "kept", "skipped"}
    is_kept = "kept" in came and set(came) <= whole and len(came) == len(asked)
    if is_kept:
        kept.add(like)
    told.reasons.update(how[:120] for how in came if how not in whole)
    for p in source.pieces:
        counts = told.by_feature.setdefault(p.name, Counter())
        counts["versions"] += 1
        counts["warm"] += warm
        counts["kept"] += is_kept
    if not got:
        return
    eager = called(source, v, None)
    if eager[0][:1] == ["raised"]:
        told.counts["eager raises"] += 1
        return
    loose = v.get("autocast") is not None or v.get("dtype") == torch.bfloat16
    wrong = differ(eager, got, loose)
    if not wrong:
        return
    with only_warm(False):
        cold = differ(eager, called(source, v, common), loose)
    kind = "both" if cold else "stale" if warm else "keeping"
    told.counts[kind] += 1
    if kind != "both":
        told.bad.append({
            "seed": seed, "version": k, "how": how, "kind": kind, "what": wrong[:600],
            "features": [p.name for p in source.pieces], "lines": lines[-6:],
        })  # fmt: skip


def report(told: Told, seconds: float) -> str:
    """For people."""
    lines = [f"{k}: {n}" for k, n in sorted(told.counts.items())] + [f"seconds: {seconds:.0f}", ""]
    lines += [f"{n:6} {why}" for why, n in told.reasons.most_common(60)] + [""]
    for name, c in sorted(told.by_feature.items(), key=lambda f: f[1]["warm"] / f[1]["versions"]):
        lines.append(f"{name}: {c['versions']} versions, {c['kept']} kept, {c['warm']} warm")
    return "\n".join(lines)


def look(seed: int, only: int = -1) -> int:
    """Prints a seed's versions and what became of them."""
    told = Told()
    rng = random.Random(seed)
    source = make_source(rng)
    walk = versions(rng, source, 24)
    for k, (v, how) in enumerate(walk):
        if only >= 0 and k not in (0, only):
            continue
        print(f"# ---- version {k}: {how} { {n: SETTINGS[n][c] for n, c in v.settings.items()} }")
        print("\n# ----\n".join(t.replace(PRELUDE, "") for t in source.texts(v.choice)))
    run_seed(seed, told)
    print(report(told, 0.0))
    print(json.dumps(told.bad, indent=1))
    return int(bool(told.bad))


def once(seed: int, number: int) -> int:
    """Runs one version in this process, over the usual folder of caches, with kernels; prints what
    became of it."""
    rng = random.Random(seed)
    source = make_source(rng)
    v = versions(rng, source, 24)[number][0]
    got = called(source, v, {"warm_start": True})
    how = [o.how for o in warm_frames.outcomes]
    want = called(source, v, None)
    loose = v.get("autocast") is not None or v.get("dtype") == torch.bfloat16
    raised = want[0][:1] == ["raised"]
    wrong = "" if raised else differ(want, got, loose)
    if wrong and differ(want, called(source, v, {}), loose):
        wrong = ""  # it is no fault of the entry
    print(json.dumps({"how": how, "wrong": wrong}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.warm", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--version", type=int, default=-1)
    parser.add_argument("--once", action="store_true", help="one version in this process")
    parser.add_argument("--sweep", help="features whose names hold this, edit by edit")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if a.once:
        return once(a.seed, a.version)
    if a.seed is not None:
        return look(a.seed, a.version)
    told, start = Told(), time.time()
    if a.sweep:
        for name in watched("features", [name for name in FEATURES if a.sweep in name]):
            before = len(told.bad)
            sweep(name, told)
            for bad in told.bad[before:]:
                print(json.dumps(bad), flush=True)
            print(f"{name}: {told.counts['pairs']} pairs, {time.time() - start:.0f} s", flush=True)
        print(report(told, time.time() - start))
        return int(bool(told.bad))
    for seed in watched("programs", range(a.first, a.first + a.count)):
        if time.time() - start > a.seconds:
            break
        before = len(told.bad)
        run_seed(seed, told)
        for bad in told.bad[before:]:
            print(json.dumps(bad), flush=True)
        if seed % 20 == 19:
            gc.collect()
            if a.out is not None:
                a.out.write_text(report(told, time.time() - start) + "\n" + json.dumps(told.bad))
    print(report(told, time.time() - start))
    return int(bool(told.bad))


if __name__ == "__main__":
    sys.exit(main())
