"""Writes a package: a program in one file, which plait.load and C++
(`plait/include/plait/package.h`) run.

Comes from `capture/package.py` as `Contents`. The bytes are described in native/core/package.cpp,
which reads and verifies them. Equal contents give equal bytes; a file appears whole or not at all.
Nothing is decided here.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import reprlib
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import plait
from plait import _native
from plait.errors import Unsupported
from plait.lower.dtypes import device_name, from_torch
from plait.runtime import mathtable
from plait.wrapper.native import EXPR_OPS

InputSpec = tuple[Any, ...]
Result = tuple[Any, ...]
"""Both as in capture/bound_program.py."""

VERSION = 5
_MAGIC = b"PLAITPKG"
_PAGE = 4096
_WEIGHT_ALIGN = 64
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_FACTS = ("int", "size", "stride", "offset")
"""In the order of their numbers in a file."""


@dataclass(frozen=True)
class Variant:
    """One way to run the program, on one kind of machine.

    machine: of the CPU "avx512", "avx2" or "portable"; of the GPU "sm_90", or "ptx_80" for that and
    everything newer; joined with '+' where both have kernels: "avx2+sm_90". plan: of
    `native.encode`. kernels: a shared object. cubins: of `runtime.cubin.pack`.
    """

    machine: str
    plan: bytes
    kernels: bytes | None = None
    cubins: bytes | None = None


@dataclass(frozen=True)
class Contents:
    """A program as it goes into a package.

    inputs: in the program's order, as in capture/bound_program.py, a weight as
        ("bound", name, None), a size as ("symbol", name).
    names: of the caller's tensors and ints.
    outputs: of the results.
    weights: by name; they live where the plan has its inputs.
    constants: the plan's table.
    constant_devices: where they are to live, empty: where they are.
    checks: a condition on arguments each: its text, then a formula with operands first. Operands
        are "const 4" and facts of the caller's argument 0: "size 0 1", "stride 0 1" (of dimension
        1), "offset 0" (in its storage), "int 0" (this int itself); operators are those of
        `native.EXPR_OPS`.
    folded: names of weights that others were computed from.
    variants: best first.
    python: JSON that plait.load reads.
    fixed: constants among the arguments: position among all of them, name, value.
    """

    name: str
    inputs: tuple[InputSpec, ...]
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[Result, ...]
    single: bool
    weights: Mapping[str, torch.Tensor]
    constants: Sequence[torch.Tensor]
    variants: tuple[Variant, ...]
    python: str = "{}"
    checks: tuple[tuple[str, ...], ...] = ()
    folded: tuple[str, ...] = ()
    constant_devices: tuple[str, ...] = ()
    fixed: tuple[tuple[int, str, Any], ...] = ()


class PackageWriter:
    """A file that becomes a package at path: `finish` puts it in the place of what is there. `with`
    cleans up.

    weights: those that it will have, as far as that is known: they are written by a thread, while
    others compile. Raises Unsupported for one that a package cannot hold.
    """

    def __init__(
        self, path: str | os.PathLike[str], weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._early = _Weights()
        for weight, x in (weights or {}).items():
            self._early.add(weight, x)
        self._early.place()
        self._target = Path(path).absolute()
        handle, name = tempfile.mkstemp(
            prefix=".new-", suffix=self._target.suffix, dir=self._target.parent
        )
        self._fresh, self._file = Path(name), handle
        self._rest: Future[Iterable[memoryview]] = Future()
        self._stopped = False
        self._thread = ThreadPoolExecutor(1)
        self._ahead = self._thread.submit(_native.write, self._file, _PAGE, self._ahead_of_rest())

    def __enter__(self) -> PackageWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        if not self._rest.done():
            self._rest.set_result(())
        self._thread.shutdown()
        os.close(self._file)
        self._fresh.unlink(missing_ok=True)

    def finish(self, contents: Contents) -> None:
        """Raises Unsupported for what a package cannot hold, OSError where nothing can be
        written."""
        weights = _Weights()
        blobs = _Sections(contents, weights).blobs
        early = self._early.places()
        fits = weights.places()[: len(early)] == early
        self._rest.set_result(self._pieces(weights, len(early)) if fits else ())
        checksum = self._ahead.result()
        if not fits:  # a constant widens a storage, say
            os.ftruncate(self._file, 0)
            checksum = _native.write(self._file, _PAGE, self._pieces(weights))
        table = [("weights", _PAGE, weights.nbytes, checksum)]
        end = _PAGE + weights.nbytes
        for name, blob in blobs.items():
            start = _next_page(end)
            self._write(blob, start)
            table.append((name, start, len(blob), _native.checksum([blob])))
            end = start + len(blob)
        entries = b"".join(
            struct.pack("<48s4Q", name.encode("ascii"), *numbers, 0) for name, *numbers in table
        )
        start = _next_page(end)
        head = _MAGIC + struct.pack("<IIQ", VERSION, len(table), start + len(entries))
        self._write(entries, start)
        self._write(head + struct.pack("<Q", _native.checksum([head + entries])), 0)
        umask = os.umask(0)
        os.umask(umask)
        self._fresh.chmod(0o666 & ~umask)
        self._fresh.rename(self._target)

    def _ahead_of_rest(self) -> Iterator[memoryview]:
        yield from self._pieces(self._early)
        yield from self._rest.result()

    def _pieces(self, weights: _Weights, first: int = 0) -> Iterator[memoryview]:
        """The storages of weights from one on, until the writer is given up."""
        return itertools.takewhile(lambda _: not self._stopped, weights.pieces(first))

    def _write(self, data: bytes | memoryview, start: int) -> None:
        view = memoryview(data)
        while view:
            n = os.pwrite(self._file, view, start)
            view, start = view[n:], start + n


def _next_page(end: int) -> int:
    return -(-end // _PAGE) * _PAGE


_Stored = tuple[str, torch.Tensor, tuple[str, int]]
"""Name, tensor as it is stored, and the key of its storage: device, address."""


@dataclass
class _Storage:
    """Bytes of a storage that tensors use. start: where it begins, first, last: the bytes among it
    that are kept."""

    tensor: torch.Tensor
    first: int
    last: int
    offset: int = 0


@dataclass
class _Weights:
    """The raw bytes of tensors; those that share memory share it in the file."""

    storages: dict[tuple[str, int], _Storage] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, tensor: torch.Tensor, device: str = "") -> _Stored:
        """Makes room for a tensor, or widens what it shares with another. device: where it is to
        live, if not where it is."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain or tensor.layout != torch.strided or from_torch(tensor.dtype).name == "opaque":
            what = (
                f"{name!r}, a {type(tensor).__name__} of layout {tensor.layout} and dtype "
                f"{tensor.dtype}"
            )
            raise Unsupported(f"a package cannot hold {what}", hint="a plain tensor")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        itemsize, start = tensor.element_size(), int(tensor.storage_offset())
        reach = (
            sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            + 1
        )
        first = start * itemsize // _WEIGHT_ALIGN * _WEIGHT_ALIGN
        last = (start + reach) * itemsize if tensor.numel() else first
        key = (
            device or device_name(tensor.device),
            tensor.untyped_storage().data_ptr() if tensor.numel() else 0,
        )
        have = self.storages.setdefault(key, _Storage(tensor, first, last))
        if last > have.last:  # another storage object on the same memory may end earlier
            have.tensor, have.last = tensor, last
        have.first = min(have.first, first)
        return name, tensor, key

    def place(self) -> None:
        """Decides where the storages lie."""
        for s in self.storages.values():
            s.offset = -(-self.nbytes // _WEIGHT_ALIGN) * _WEIGHT_ALIGN
            self.nbytes = s.offset + s.last - s.first

    def describe(self, name: str, t: torch.Tensor, key: tuple[str, int]) -> bytes:
        """What the manifest says of a tensor."""
        offset = (
            t.storage_offset() - self.storages[key].first // t.element_size() if t.numel() else 0
        )
        words = (offset, t.dim(), *t.shape, *t.stride())
        number = list(self.storages).index(key)
        return _text(name) + _words(number) + _text(from_torch(t.dtype).name) + _words(*words)

    def describe_storages(self) -> list[bytes]:
        """What the manifest says of all storages."""
        return [
            _words(s.offset, s.last - s.first) + _text(device)
            for (device, _), s in self.storages.items()
        ]

    def places(self) -> list[tuple[tuple[str, int], int, int, int]]:
        """What bytes are where."""
        return [(key, s.first, s.last, s.offset) for key, s in self.storages.items()]

    def pieces(self, first: int = 0) -> Iterator[memoryview]:
        """The bytes of each storage from one on."""
        for s in list(self.storages.values())[first:]:
            if s.last == s.first:
                continue
            raw = torch.empty(0, dtype=torch.uint8, device=s.tensor.device).set_(
                s.tensor.untyped_storage()
            )
            kept = raw[s.first : s.last].cpu()
            yield memoryview(
                (ctypes.c_char * (s.last - s.first)).from_address(kept.data_ptr())
            ).cast("B")


class _Sections:
    """The sections of a package but its weights, by name."""

    def __init__(self, c: Contents, weights: _Weights) -> None:
        self.blobs: dict[str, bytes] = {"manifest": b"", "python": c.python.encode()}
        self._symbols: dict[str, int] = {}
        self._weight_numbers = {name: k for k, name in enumerate(c.weights)}
        tensors = [weights.add(name, t) for name, t in c.weights.items()]
        devices = c.constant_devices or ("",) * len(c.constants)
        pairs = zip(c.constants, devices, strict=True)
        constants = [weights.add(f"constant {k}", t, device) for k, (t, device) in enumerate(pairs)]
        weights.place()
        inputs = [self._input(spec) for spec in c.inputs]
        variants = [self._variant(v) for v in c.variants]
        versions = {
            "plait": plait.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self.blobs["manifest"] = b"".join((
            _list(_text(name) + _text(version) for name, version in versions.items()),
            _text(c.name), _words(c.single), _texts(mathtable.NAMES),
            _list(weights.describe_storages()), _list(weights.describe(*t) for t in tensors),
            _list(weights.describe(*t) for t in constants), _texts(c.folded),
            _list(map(_fixed, c.fixed)), _texts(c.names),
            _texts(self._symbols), _texts(c.outputs), _list(inputs),
            _list(_result(r) for r in c.results), _list(_check(check) for check in c.checks),
            _list(variants),
        ))  # fmt: skip

    def _input(self, spec: InputSpec) -> bytes:
        match spec:
            case ("bound", name, _):
                return _words(0, self._weight_numbers[name])
            case ("symbol", name):
                return _words(2, self._symbol(name))
            case ("int", arg, value):
                return _words(3, arg) + self._dim(value)
            case ("tensor", arg, dtype, shape, strides, device):
                head = (
                    _words(1, arg)
                    + _text(dtype)
                    + _text(device)
                    + _list(self._dim(d) for d in shape)
                )
                if strides is None or strides == "contiguous":
                    return head + _words(0 if strides is None else 2)
                return head + _words(1) + _list(self._dim(d) for d in strides)
            case _:
                raise Unsupported(f"a package cannot describe an input such as {spec[:2]}")

    def _symbol(self, name: str) -> int:
        return self._symbols.setdefault(name, len(self._symbols))

    def _dim(self, dim: int | str | tuple[str, int | None, int | None] | None) -> bytes:
        if dim is None:
            return _words(0)
        if isinstance(dim, int):
            return _words(1, dim)
        name, low, high = dim if isinstance(dim, tuple) else (dim, None, None)
        return _words(
            2,
            self._symbol(name),
            _LOWEST if low is None else low,
            _HIGHEST if high is None else high,
        )

    def _variant(self, v: Variant) -> bytes:
        named = (self._blob("plan", v.machine, v.plan), self._blob("kernels", v.machine, v.kernels))
        return b"".join(map(_text, (v.machine, *named, self._blob("cubins", v.machine, v.cubins))))

    def _blob(self, kind: str, machine: str, blob: bytes | None) -> str:
        """The name of the section with these bytes, which several variants may share."""
        if blob is None:
            return ""
        for name, have in self.blobs.items():
            if name.startswith(f"{kind}/") and have == blob:
                return name
        name = f"{kind}/{machine}"
        assert name not in self.blobs, f"two variants for {machine}"
        self.blobs[name] = blob
        return name


def _result(r: Result) -> bytes:
    if r[0] == "program":
        return _words(0)
    _, base, requires_grad, offset = r
    return _words(2, base, requires_grad, offset is not None, offset or 0)


def _fixed(constant: tuple[int, str, Any]) -> bytes:
    position, name, x = constant
    kind, word, text = 5, 0, str(x)
    if x is None or type(x) is str:
        kind = 0 if x is None else 4
    elif type(x) in (bool, int) and -(2**63) <= x < 2**63:
        kind, word = 1 + (type(x) is int), int(x)
    elif type(x) is float:
        kind, (word,) = 3, struct.unpack("<q", struct.pack("<d", x))
    return (
        _words(position) + _text(name) + _words(kind, word) + _text(text) + _text(reprlib.repr(x))
    )


def _check(check: tuple[str, ...]) -> bytes:
    """Operands stand before what uses them: a node names them by number."""
    text, *tokens = check
    facts: dict[bytes, int] = {}
    nodes: list[bytes] = []
    stack: list[int] = []
    for token in tokens:
        op, *numbers = token.split()
        a, b = (map(int, (*numbers, "0")[:2])) if numbers else (stack.pop(-2), stack.pop())
        if op in _FACTS:
            fact = _words(_FACTS.index(op), a, b)
            op, a, b = "sym", facts.setdefault(fact, len(facts)), 0
        stack.append(len(nodes))
        nodes.append(_words(EXPR_OPS.index(op), a, b))
    return _text(text) + _list(facts) + _list(nodes)


def _words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _text(text: str) -> bytes:
    data = text.encode()
    return _words(len(data)) + data


def _list(items: Iterable[bytes]) -> bytes:
    parts = list(items)
    return _words(len(parts)) + b"".join(parts)


def _texts(texts: Iterable[str]) -> bytes:
    return _list(map(_text, texts))
