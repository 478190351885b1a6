"""Compiles functions of a user's files for C++ (triton_launch/src): `python -m
triton_launch.worker`, or `answer` in a process that runs Python itself.

Requests come in over the socket that is standard input, answers go out, and processes are forked
that do the same at the same time; src/providers.cpp says how requests are framed. It uses Triton's
own cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.runtime.cubin import Cubin, pack
from plait.runtime.triton_worker import facts_of
from triton_launch.decorators import evaluate
from triton_launch.functions import describe, for_triton, load
from triton_launch.specialization import Item, read_options, read_specialization

MAX_TENSOR_MEMORY = 512
"""Columns of tensor memory that a program may use."""
LOCKS = 64
"""Files in Triton's cache that processes lock while they compile."""


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
                fn.params[path[0]].default if item.value is ... else for_triton(item.value, fn)
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
