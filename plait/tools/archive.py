"""Archives: entries of a cache in one file, to be carried to other machines.

An archive is a ZIP file. Its members are entries as they lie in the cache, each under its place
there and with its checksum; equal entries make equal archives. Its comment ends with the checksum
of all that stands before, so that accidents are found before anything is taken. Nothing in an
archive is run or unpickled when it is read, but entries are machine code, which programs run later:
an archive is taken from those alone whose files are taken in a cache (`runtime/trust.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from plait.errors import UserError
from plait.runtime.store import KEY, KINDS, Kind, unsealed
from plait.runtime.trust import Trust

_COMMENT = b"entries of a cache of plait, format 1, sha256 "
_NO_DIGEST = b"0" * 64
_PLACE = re.compile(rf"\w+/([0-9a-f]{{2}})/({KEY.pattern})\.\w+")
_BLOCK = 1 << 20


def place_of(kind: Kind, key: str) -> str:
    """Where an entry lies below the folder of caches: its name in an archive."""
    return f"{kind.folder}/{key[:2]}/{key}{kind.suffix}"


def kind_of(place: str) -> Kind | None:
    """Of the entry that lies there; None for what is none."""
    match = _PLACE.fullmatch(place)
    kinds = [k for k in KINDS if match and place_of(k, match[2]) == place]
    return kinds[0] if kinds else None


def write_archive(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Writes an archive, or leaves what there was. members: places and files of entries. Raises
    OSError."""
    fresh = path.with_name(f".new-{secrets.token_hex(8)}")
    try:
        with fresh.open("xb+") as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & ~0o022)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for place, data in members:
                    info = zipfile.ZipInfo(place)  # of 1980, whenever it is made
                    info.external_attr = 0o644 << 16
                    archive.writestr(info, data, zipfile.ZIP_DEFLATED)
                archive.comment = _COMMENT + _NO_DIGEST
            digest = _digest(file)
            file.seek(-len(digest), os.SEEK_END)
            file.write(digest)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _digest(file: BinaryIO) -> bytes:
    """Of all but the last bytes, which hold it."""
    digest, left = hashlib.sha256(), file.seek(0, os.SEEK_END) - len(_NO_DIGEST)
    file.seek(0)
    while left > 0:
        block = file.read(min(_BLOCK, left))
        digest.update(block)
        left -= len(block)
    return digest.hexdigest().encode()


@dataclass(frozen=True)
class Archive:
    """An open archive. members: kind and key of each entry. read: what an entry holds."""

    members: tuple[tuple[Kind, str], ...]
    read: Callable[[Kind, str], bytes]


@contextmanager
def open_archive(path: Path, trust: Trust) -> Iterator[Archive]:
    """An archive whose every entry was checked. Raises UserError for what is none, or damaged,
    Untrusted for one that others could have written, OSError."""
    entry = trust.open(path.resolve())
    with os.fdopen(os.dup(entry.file), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_COMMENT) - len(_NO_DIGEST)))
        comment = file.read()
        if not comment.startswith(_COMMENT):
            raise UserError(f"{path} is no archive of a cache in a format that this plait reads")
        if comment[len(_COMMENT) :] != _digest(file):
            raise UserError(f"{path} is damaged: its checksum is wrong")
        try:
            checked = _checked(zipfile.ZipFile(file), path)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError) as error:
            raise UserError(f"{path} is no archive of a cache: {error}") from error
        yield checked


def _checked(archive: zipfile.ZipFile, path: Path) -> Archive:
    def read(kind: Kind, key: str) -> bytes:
        data = unsealed(archive.read(place_of(kind, key)))
        if data is None:
            raise UserError(f"{path} is damaged: the checksum of {place_of(kind, key)} is wrong")
        return data

    members: list[tuple[Kind, str]] = []
    for info in archive.infolist():
        name, kind = info.filename, kind_of(info.filename)
        if kind is None:
            raise UserError(f"{path} holds {name!r}, which is no entry of a cache")
        if info.compress_type != zipfile.ZIP_DEFLATED:
            raise UserError(f"{path} holds {name!r} compressed in another way than plait does")
        members.append((kind, Path(name).stem))
    for member in members:
        read(*member)
    return Archive(tuple(members), read)
