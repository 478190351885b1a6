"""Compiles functions of a user's files for C++ (triton_launch/src): `python -m
triton_launch.worker`, or `answer` in a process that runs Python itself.

Requests come in over the socket that is standard input, answers go out, and processes are forked
that do the same at the same time; src/providers.cpp says how requests are framed, src/specialize.h
how signatures and specializations are written. It uses Triton's own cache. Only functions load
Triton: who imports this module to read a specialization does not.
"""

from __future__ import annotations

import ast
import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import re
import socket
import string
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from plait.runtime.cubin import Cubin, pack
from plait.runtime.triton_worker import facts_of

MAX_TENSOR_MEMORY = 512
"""Columns of tensor memory that a program may use."""
LOCKS = 64
"""Files in Triton's cache that processes lock while they compile."""

SHAPES = ("launch_cooperative_grid", "launch_pdl", "num_ctas", "num_stages", "num_warps")
"""Options whose defaults nothing in the environment changes: to name one with its default is to
leave it out."""

_DTYPES = (
    {f"{k[0]}{n}": f"{'u' if k == 'u' else ''}int{n}" for k in ("i", "u") for n in (8, 16, 32, 64)}
    | {
        k: k
        for k in (
            "fp16",
            "bf16",
            "fp32",
            "fp64",
            "fp8e4nv",
            "fp8e5",
            "fp8e4b15",
            "fp8e4b8",
            "fp8e5b16",
        )
    }
    | {"u1": "int1"}
)


_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[(\d+(?:,\d+)*)\]>")


@dataclasses.dataclass(frozen=True)
class DType:
    """A dtype among constants, by Triton's short name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function among constants, by its name in the kernel's file."""

    name: str


@dataclasses.dataclass(frozen=True)
class Item:
    """How one argument is specialized. type: Triton's, 'constexpr', or a tuple's items. value: of a
    constant; Ellipsis: the parameter's default."""

    type: str | tuple[Item, ...]
    value: Any = None
    divisible: bool = False


class _SignatureReader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, sign: str) -> bool:
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) if found else 0
        return found

    def word(self) -> str:
        start = self.at
        if self.text.startswith("tensordesc<", start):
            self.at = self.text.find(">", start) + 1 or len(self.text)
        while self.at < len(self.text) and self.text[self.at] not in ",()=":
            self.at += 1
        if start == self.at:
            raise ValueError(f"nothing is at {self.text[: self.at]!r} of {self.text!r}")
        return self.text[start : self.at]

    def several(self, read: Any) -> tuple[Any, ...]:
        found = []
        while not self.take(")"):
            found.append(read())
            if not self.take(",") and not self.text.startswith(")", self.at):
                raise ValueError(f"a parenthesis is open in {self.text!r}")
        return tuple(found)

    def value(self, pointers: bool = False) -> Any:
        if self.take("("):
            return self.several(lambda: self.value(pointers))
        word = self.word()
        if pointers and word.startswith("*"):
            return _Memory(word[1:])
        if pointers and (found := _DESCRIPTOR.fullmatch(word)):
            return _descriptor(found[1], [int(n) for n in found[2].split(",")])
        if word == "?":
            return ...
        if word.startswith("@"):
            return Callee(word[1:])
        if word in _DTYPES:
            return DType(word)
        if word in ("nan", "inf", "-inf"):
            return float(word)
        value = ast.literal_eval(word)
        return unquote(value) if isinstance(value, str) else value

    def item(self) -> Item:
        if self.take("="):
            return Item("constexpr", self.value())
        if self.take("("):
            return Item(self.several(self.item))
        word = self.word()
        if (found := _DESCRIPTOR.fullmatch(word)) and found[1] in _DTYPES:
            return Item(word)
        kind, _, hint = word.partition(":")
        bare = kind.removeprefix("*")
        if (bare.removeprefix("k") if bare != kind else bare) not in _DTYPES or hint not in (
            "",
            "D",
        ):
            raise ValueError(
                f"{kind}{':' if hint else ''}{hint} in {self.text!r} is no type of Triton's"
            )
        return Item(kind, divisible=hint == "D")


def read_specialization(text: str) -> list[Item]:
    """The items of a specialization. Raises ValueError."""
    reader = _SignatureReader("".join(text.split()))
    found = [reader.item()] if reader.text else []
    while reader.at < len(reader.text):
        if not reader.take(","):
            raise ValueError(f"{text!r} has more than it should after {reader.text[: reader.at]!r}")
        found.append(reader.item())
    return found


def read_options(text: str) -> dict[str, Any]:
    """Options that are written as `num_warps=8;num_stages=2`."""
    return {
        name: _SignatureReader(value).value()
        for name, _, value in (o.partition("=") for o in text.split(";") if o)
    }


def write_value(value: Any) -> str:
    """A constant as text. Raises TypeError for what C++ cannot say."""
    if isinstance(value, tuple):
        return f"({','.join(map(write_value, value))})"
    if value is None or isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.17g}"
        return text if set(text) & set(".ein") else text + ".0"
    if isinstance(value, str):
        return f"'{quote(value, safe='')}'"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Callee):
        return f"@{value.name}"
    raise TypeError


def write_item(item: Item) -> str:
    """An item as read_specialization reads it, in the one way that it is written."""
    if isinstance(item.type, tuple):
        return f"({','.join(map(write_item, item.type))})"
    if item.type == "constexpr":
        return "=?" if item.value is ... else f"={write_value(item.value)}"
    return item.type + (":D" if item.divisible else "")


def _module_of(path: Path) -> ModuleType:
    """The module that a file is, imported once: as part of its package, or under a name that no
    other module has, since this may be the user's own process. What lies beside it is found first
    while it is imported, as by a script, and last afterwards. Raises FileNotFoundError, and
    whatever the file raises."""
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():  # so that its relative imports are found
        root, name = root.parent, f"{root.name}.{name}"
    if "." not in name and getattr(sys.modules.get(name), "__file__", None) != str(path):
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    behind = [] if str(root) in sys.path else [str(root)]
    sys.path.insert(0, str(root))
    try:
        if "." in name:
            importlib.import_module(name.rpartition(".")[0])
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except BaseException:
        if known is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = known
        raise
    finally:
        sys.path.remove(str(root))
        sys.path += behind
    return module


@lru_cache(None)
def load(file: str, function: str) -> tuple[Any, list[Any]]:
    """The @triton.jit function of that name, and its decorators, the outermost first. Raises
    AttributeError where there is none, TypeError for anything else."""
    import triton
    from triton.runtime.autotuner import Autotuner, Heuristics

    found = getattr(_module_of(Path(file).resolve()), function, None)
    if found is None:
        raise AttributeError(f"{file} has no {function}")
    layers: list[Any] = []
    while type(found) in (Autotuner, Heuristics):
        layers.append(found)
        found = found.fn
    if not isinstance(found, triton.runtime.jit.JITFunction):
        raise TypeError(
            f"{function} of {file} is no plain @triton.jit function: it is a {type(found).__name__}"
        )
    if sum(isinstance(layer, Autotuner) for layer in layers) > 1:
        raise TypeError(f"{function} of {file} has two @triton.autotune")
    return found, layers


def describe(fn: Any, layers: Sequence[Any] = ()) -> str:
    """The signature of a function with its decorators, for C++."""
    import triton
    from triton.backends.nvidia.compiler import CUDAOptions

    lines = [";".join(f"{k}={getattr(CUDAOptions, k)}" for k in SHAPES)]
    for p in fn.params:
        flags = {
            "c": p.is_constexpr, "k": p.is_const, "s": p.do_not_specialize,
            "a": p.do_not_specialize_on_alignment,
        }  # fmt: skip
        default = _write_default(p.default) if p.has_default else ""
        lines.append(
            f"{p.name}|{p.annotation_type}|{''.join(k for k, v in flags.items() if v)}|{default}"
        )
    if layers:
        lines.append(
            "#" + hashlib.sha256(f"{fn.cache_key} {triton.__version__}".encode()).hexdigest()
        )
    for layer in layers:
        lines += _write_layer(layer)
    return "\n".join(lines)


def _write_layer(layer: Any) -> list[str]:
    if hasattr(layer, "values"):
        return [f"@heuristics|{','.join(layer.values)}"]
    flags = {
        "p": layer.early_config_prune or layer.perf_model,
        "b": any(c.pre_hook for c in layer.configs),
        "h": layer.user_defined_pre_hook or layer.user_defined_post_hook,
    }
    lists = map(",".join, (layer.keys, layer.reset_to_zero, layer.restore_value))
    told = "".join(flag for flag, is_there in flags.items() if is_there)
    return [f"@autotune|{'|'.join(lists)}|{told}", *(f"+{write_config(c)}" for c in layer.configs)]


def write_config(config: Any) -> str:
    """A configuration of @triton.autotune."""
    return ";".join(f"{k}={_write_default(v)}" for k, v in config.all_kwargs().items())


def _write_default(value: Any) -> str:
    import triton.language as tl

    value = value.value if isinstance(value, tl.constexpr) else value
    short = {long: k for k, long in _DTYPES.items()}
    try:
        return write_value(
            DType(short.get(str(value), str(value))) if isinstance(value, tl.dtype) else value
        )
    except TypeError:
        return "?"


class _Memory:
    """Stands for a tensor where a decorator's function gets one."""

    def __init__(self, dtype: str, **known: Any) -> None:
        self.triton_dtype = dtype
        vars(self).update(known)

    @property
    def dtype(self) -> Any:
        import torch

        names = {
            "u1": "bool",
            "fp8e4nv": "float8_e4m3fn",
            "fp8e5": "float8_e5m2",
            "fp8e4b8": "float8_e4m3fnuz",
            "fp8e5b16": "float8_e5m2fnuz",
            "bf16": "bfloat16",
            "fp16": "float16",
            "fp32": "float32",
            "fp64": "float64",
        }
        return getattr(torch, names.get(self.triton_dtype) or _DTYPES[self.triton_dtype])

    def element_size(self) -> int:
        size: int = self.dtype.itemsize
        return size

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"C++ tells a decorator's function the dtype of a tensor, not its {name}"
        )


class _Hooked(_Memory):
    """The same for a configuration's pre_hook."""

    def zero_(self) -> _Hooked:
        self.zero = True
        return self


def _descriptor(dtype: str, block_shape: list[int]) -> Any:
    """Stands for a tensor descriptor, and is one to those who ask."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    kind: Any = type("Descriptor", (_Memory, TensorDescriptor), {})
    return kind(dtype, block_shape=block_shape)


class _Watched(dict[str, Any]):
    """A call's arguments, for functions that say what they depend on by reading it. What they add
    is their own."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.given, self.own, self.read = tuple(given), set[str](), dict[Any, None]()

    def add(self, name: str, value: Any) -> None:
        self.own.add(name)
        super().__setitem__(name, value)

    def note(self, *names: Any) -> None:
        self.read.update((n, None) for n in names if n not in self.own)

    def __getitem__(self, name: str) -> Any:
        self.note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.note(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.note(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.note(*self.given)
        return super().__iter__()

    def keys(self) -> Any:
        self.note(*self.given)
        return super().keys()

    def values(self) -> Any:
        self.note(*self.given)
        return super().values()

    def items(self) -> Any:
        self.note(*self.given)
        return super().items()


def evaluate(fn: Any, layers: Sequence[Any], kind: str, arguments: str) -> str:
    """What a decorator makes of a call: names that it depends on, and on a second line the
    answer."""
    layer = layers[int(kind.lstrip(string.ascii_letters))]
    positional, keywords = _read_arguments(fn, arguments)
    if kind.startswith("heuristics"):
        given = _Watched({**positional, **keywords})
        found = []
        for name, heuristic in layer.values.items():  # each sees what those before it made
            given.add(name, value := heuristic(given))
            found.append(f"{name}={_write_set(name, value)}")
        return f"{','.join(given.read)}\n{';'.join(found)}"
    if kind.startswith("hook"):
        config = max(
            (
                c
                for c in layer.configs
                if set(write_config(c).split(";")) <= {*arguments.split(";")}
            ),
            key=lambda c: len(c.all_kwargs()),
        )
        memory = {n: v for n, v in {**positional, **keywords}.items() if isinstance(v, _Memory)}
        memory = {
            n: v if hasattr(v, "block_shape") else _Hooked(v.triton_dtype)
            for n, v in memory.items()
        }
        given = _Watched({**positional, **keywords, **memory})
        if config.pre_hook is not None:
            config.pre_hook(given)
        found = [
            f"{n}.block_shape={write_value(tuple(v.block_shape))}"
            for n, v in memory.items()
            if "block_shape" in vars(v)
        ]
        found += [f"{n}.zero=True" for n, v in memory.items() if "zero" in vars(v)]
        return f"{','.join(given.read)}\n{';'.join(found)}"
    layer.nargs = positional
    try:
        configs = layer.prune_configs({**keywords, "grid": None, "warmup": False})
    finally:
        layer.nargs = None
    return f"{','.join(layer.keys)},@types,@gpu\n" + "|".join(map(write_config, configs))


def _write_set(name: str, value: Any) -> str:
    """A value that a heuristic set. Raises TypeError for what C++ cannot say."""
    if (text := _write_default(value)) == "?":
        raise TypeError(
            f"@triton.heuristics makes {name} a {type(value).__name__}, which C++ cannot pass"
        )
    return text


def _read_arguments(fn: Any, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments as C++ writes them: those by position, and those by name, which follow an item
    `*`."""

    def value(text: str) -> Any:
        found = _SignatureReader(text).value(pointers=True)
        return _for_triton(found, fn)

    first, _, second = (f";{text};").partition(";*;")
    parts = [
        dict(i.split("=", 1) for i in part.split(";") if i and i[0] != "@")
        for part in (first, second)
    ]
    positional, keywords = ({k: value(v) for k, v in part.items()} for part in parts)
    return positional, keywords


def _for_triton(value: Any, fn: Any) -> Any:
    """A constant of a function's call as Triton takes it."""
    import triton.language as tl

    if isinstance(value, tuple):
        return tuple(_for_triton(v, fn) for v in value)
    if isinstance(value, Callee):
        return fn.fn.__globals__[value.name]
    return tl.dtype(_DTYPES[value.name]) if isinstance(value, DType) else value


def compile_kernel(fn: Any, capability: int, specialization: str, options: str) -> Cubin:
    """The kernel that Triton makes of a function."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    items = read_specialization(specialization)
    if len(items) != len(fn.params):
        raise ValueError(
            f"{fn.__name__} has {len(fn.params)} parameters, {specialization!r} has {len(items)}"
        )
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def signature(item: Item, path: tuple[int, ...]) -> Any:
        if isinstance(item.type, tuple):
            return tuple(signature(x, (*path, k)) for k, x in enumerate(item.type))
        if item.type == "constexpr":
            constants[path] = (
                fn.params[path[0]].default if item.value is ... else _for_triton(item.value, fn)
            )
        if item.divisible:
            attributes[path] = [["tt.divisibility", 16]]
        return item.type.replace(",", ", ")  # a descriptor's

    types = {
        p.name: signature(item, (k,))
        for k, (p, item) in enumerate(zip(fn.params, items, strict=True))
    }
    chosen = read_options(options)
    chosen["debug"] = chosen.get("debug", fn.debug) or triton.knobs.runtime.debug
    unknown = sorted(
        chosen.keys() - set(triton.backends.nvidia.compiler.CUDAOptions.__dataclass_fields__)
    )
    if unknown:
        raise ValueError(f"Triton has no option {', '.join(unknown)}")
    source = ASTSource(fn, types, constants, attributes)
    with _alone(f"{fn.cache_key} {capability} {specialization} {options}"):
        made = triton.compile(source, GPUTarget("cuda", capability, 32), chosen)
    used = made.metadata.tmem_size
    if used is not None and used > MAX_TENSOR_MEMORY:
        raise ValueError(f"it needs {used} columns of tensor memory, there are {MAX_TENSOR_MEMORY}")
    descriptors = ";".join(map(_write_descriptor, made.metadata.tensordesc_meta or ()))
    return Cubin.of({**facts_of(made.metadata), "descriptors": descriptors}, made.asm["cubin"])


def _write_descriptor(meta: dict[str, Any]) -> str:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    block = "x".join(map(str, meta["block_size"]))
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return f"{meta['swizzle']},{meta['elem_size']},{element},{int(meta['fp4_padded'])},{block}"


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """No two processes compile the same kernel at once: the second one finds it in Triton's
    cache."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") % LOCKS
    with (folder / f"plait-{number}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def answer(request: bytes) -> bytes:
    """What goes out for a request."""
    try:
        kind, file, function, *more = request.decode().split("\n")
        fn, layers = load(file, function)
        if kind == "describe":
            return b"k" + describe(fn, layers).encode()
        if kind == "evaluate":
            return b"k" + evaluate(fn, layers, *more).encode()
        capability, specialization, options = more
        made = compile_kernel(fn, int(capability), specialization, options)
        return b"k" + (made.to_bytes() if kind == "cubin" else pack({"": made}))
    except Exception as error:  # noqa: BLE001  (it is handed to the process that asked, which raises it)
        last = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        return f"{'r' if _is_refusal(error) else 'e'}{last}\n{traceback.format_exc()}".encode()


def _is_refusal(error: Exception) -> bool:
    """What @triton.autotune takes for a configuration that is no good."""
    if "triton" not in sys.modules:
        return False
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    return isinstance(error, OutOfResources | PTXASError | CompileTimeAssertionFailure)


def _exactly(connection: socket.socket, n: int) -> bytes:
    """Raises EOFError."""
    data = bytearray()
    while len(data) < n:
        if not (more := connection.recv(min(n - len(data), 1 << 20))):
            raise EOFError
        data += more
    return bytes(data)


def serve(connection: socket.socket, children: set[int] | None = None) -> None:
    """Answers until the other end is closed. children: who was forked; None: nobody may be."""
    while True:
        try:
            request = _exactly(connection, *struct.unpack("<Q", _exactly(connection, 8)))
        except (EOFError, ConnectionError):
            return
        if request == b"fork" and children is not None:
            _, (handle,), _, _ = socket.recv_fds(connection, 1, 1)
            with socket.socket(fileno=handle) as theirs:
                _fork(connection, theirs, children)
            continue
        said = answer(request)
        connection.sendall(struct.pack("<Q", len(said)) + said)


def _fork(mine: socket.socket, theirs: socket.socket, children: set[int]) -> None:
    """A process that has loaded what this one has, and answers over `theirs`."""
    children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
    if (pid := os.fork()) != 0:
        children.add(pid)
        return
    try:
        mine.close()  # so that the other end sees when the parent dies
        serve(theirs)
    finally:
        os._exit(0)


def main() -> None:
    """Serves over the socket that is standard input."""
    with socket.socket(fileno=os.dup(0)) as connection:
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        serve(connection, set())


if __name__ == "__main__":
    main()
