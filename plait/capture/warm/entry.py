"""What is kept of a compiled frame, as bytes: a header in JSON and named pieces of bytes behind
it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.compat.frame_facts import Guarded, NotKept, Traced

_MAGIC = b"PLAITWRM"
VERSION = 2


@dataclass(frozen=True)
class Entry:
    """A compiled frame.

    whole: the trace read all attributes of some object at once, so that prints name those of each.
    held: it read numbers of functions and classes without guards, so that prints tell them.
    prints: of each of traced's guards, what it relies on, and of each dict whose order counts its
    keys. same: which objects are the same one.
    named: module, path and print of what the trace ran that no guard leads to. asked: module and
    name of what it asked for, and whether that was there. answered: what functions said to it, as
    `result_of` tells it. sources: as `own_sources` tells it. graph: its graph as `graphs.py` writes
    it, None if it has none. pieces: the bytes that graph names."""

    traced: Traced
    whole: bool
    held: bool
    prints: Sequence[str]
    same: str
    named: Sequence[tuple[str, str, str]]
    asked: Sequence[tuple[str, str, bool]]
    answered: Sequence[tuple[str, str, Sequence[Any], str]]
    sources: Mapping[str, str]
    graph: Mapping[str, Any] | None
    pieces: Mapping[str, bytes]


def packed(header: Mapping[str, Any], pieces: Mapping[str, bytes]) -> bytes:
    """A header and named pieces as `unpacked` reads them."""
    sizes = [[name, len(data)] for name, data in pieces.items()]
    text = json.dumps([header, sizes], separators=(",", ":")).encode()
    start = _MAGIC + VERSION.to_bytes(8, "little") + len(text).to_bytes(8, "little")
    return start + text + b"".join(pieces.values())


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Raises NotKept for what is not of this version."""
    if data[:8] != _MAGIC or int.from_bytes(data[8:16], "little") != VERSION:
        raise NotKept("an entry of another version")
    at = 24 + int.from_bytes(data[16:24], "little")
    header, sizes = json.loads(data[24:at])
    pieces: dict[str, bytes] = {}
    for name, size in sizes:
        pieces[name] = data[at : at + size]
        at += size
    return header, pieces


def to_bytes(entry: Entry) -> bytes:
    """The entry as `from_bytes` reads it."""
    traced = {**vars(entry.traced), "guards": [list(vars(g).values()) for g in entry.traced.guards]}
    pieces = {**entry.pieces, "code": traced.pop("code")}
    header = {
        "traced": traced,
        "whole": entry.whole,
        "held": entry.held,
        "prints": entry.prints,
        "same": entry.same,
        "named": entry.named,
        "asked": entry.asked,
        "answered": entry.answered,
        "sources": entry.sources,
        "graph": entry.graph,
    }
    return packed(header, pieces)


def from_bytes(data: bytes) -> Entry:
    """Raises NotKept for what is no entry of this version."""
    header, pieces = unpacked(data)
    traced = header["traced"]
    traced["guards"] = [Guarded(*row) for row in traced["guards"]]
    made = Traced(**traced, code=pieces.pop("code"))
    return Entry(
        made,
        header["whole"],
        header["held"],
        header["prints"],
        header["same"],
        header["named"],
        header["asked"],
        header["answered"],
        header["sources"],
        header["graph"],
        pieces,
    )
