"""`plait cache`: what lies in the folder of caches (PLAIT_CACHE_DIR), and carrying it elsewhere.

    plait cache list                      kinds of entries: how many, how large, when they were used
    plait cache verify --remove           check every entry's checksum and owner, remove what fails
    plait cache prune --older-than 30d    remove what was used longest ago
    plait cache export FILE               all entries, or those of some kinds, in one file
    plait cache import FILE               take the entries of such a file

Entries are machine code: import a file only if you would run a program from where it comes.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from plait.config import Config
from plait.errors import UserError
from plait.runtime.remote import mirror_of
from plait.runtime.store import KEY, KINDS, Kind, Listed, Store, drop_oldest
from plait.runtime.trust import Entry, trust_of
from plait.tools.archive import kind_of, open_archive, place_of, write_archive

UNFINISHED_S = 3600.0
"""Age of a file from which on nobody writes it any more: whoever did was killed."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 800M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 12h or 30d")
    return float(match[1]) * _SECONDS[match[2]]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="plait cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", help="kinds of entries")
    listed.add_argument("--json", action="store_true", help="as data, times in seconds since 1970")
    listed.add_argument(
        "--remote", action="store_true", help="of the object store, no more than names"
    )
    verified = commands.add_parser("verify", help="check checksums and owners")
    verified.add_argument("--remove", action="store_true", help="remove what fails")
    pruned = commands.add_parser("prune", help="remove what was used longest ago")
    pruned.add_argument("--max-bytes", type=_nbytes, help="leave at most so much: 800M, 2G")
    pruned.add_argument("--older-than", type=_seconds, help="not used for so long: 12h, 30d, 8w")
    exported = commands.add_parser("export", help="write entries to one file")
    exported.add_argument("file", type=Path)
    names = [k.name for k in KINDS]
    exported.add_argument("--kinds", nargs="+", choices=names, default=names, metavar="KIND")
    imported = commands.add_parser("import", help="take the entries of such a file")
    imported.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "prune" and given.max_bytes is None and given.older_than is None:
        parser.error("prune needs --max-bytes or --older-than")
    try:
        cfg = Config.from_env()
        if given.command == "list":
            print(_list_remote(cfg) if given.remote else _list(cfg, given.json))
        elif given.command == "verify":
            sys.exit(verify(cfg, given.remove))
        elif given.command == "prune":
            prune(cfg, given.max_bytes, given.older_than)
        elif given.command == "export":
            export(cfg, given.file, given.kinds)
        else:
            import_(cfg, given.file)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(f"plait: {where}{error.strerror}")
    except UserError as error:
        sys.exit(f"plait: {error.line}")


def stores(cfg: Config) -> dict[Kind, Store]:
    """A store for each kind of entries. Raises UserError where there is no folder for them, and
    Untrusted, OSError for one in which others could have put links to other files."""
    try:
        folder = Path(cfg.cache_dir).expanduser()
    except RuntimeError as error:
        raise UserError(f"no folder {cfg.cache_dir}: {error}") from None
    found = {kind: Store.of(replace(cfg, cache_dir=str(folder)), kind) for kind in KINDS}
    for store in found.values():
        with suppress(FileNotFoundError):
            store.trust.check_folder(store.folder)
    return found


def _open(store: Store, file: Listed) -> Entry:
    """Raises FileNotFoundError where another process has removed it, and OSError for what no
    process would take."""
    key = file.path.name.removesuffix(store.suffix)
    if not KEY.fullmatch(key) or store.path(key) != file.path:
        raise OSError(errno.EINVAL, "no entry has this name")
    return store.open(key)


# --------------------------------------------------------------------------------------------- list
def _list(cfg: Config, as_json: bool) -> str:
    found = {kind: store.files() for kind, store in stores(cfg).items()}
    entries = {kind: [f for f in files if f.is_entry] for kind, files in found.items()}
    unfinished = [f for files in found.values() for f in files if not f.is_entry]
    if as_json:
        facts = {
            "folder": cfg.cache_dir,
            "max_nbytes_each": cfg.cache_mb << 20,
            "kinds": {kind.name: _facts(files) for kind, files in entries.items()},
            "unfinished": _facts(unfinished),
        }
        return json.dumps(facts, indent=2)
    lines = [
        "kind       entries      size  used last         longest ago",
        *(_line(kind.name, files) + f"  {kind.doc}" for kind, files in entries.items()),
        _line("all", [f for files in entries.values() for f in files]) + f"  in {cfg.cache_dir}",
    ]
    if unfinished:
        lines.append(_line("unfinished", unfinished) + "  being written, or whoever did was killed")
    return "\n".join(lines)


def _list_remote(cfg: Config) -> str:
    if not cfg.cache_remote:
        raise UserError("no object store is named", hint="PLAIT_CACHE_REMOTE=s3://bucket/folder")
    found = Counter(kind_of(name) for name in mirror_of(cfg.cache_remote).list())
    lines = [f"{kind.name:10} {found[kind]:7}  {kind.doc}" for kind in KINDS]
    return "\n".join(["kind       entries", *lines, f"{'others':10} {found[None]:7}"])


def _facts(files: Sequence[Listed]) -> dict[str, float | None]:
    used = [f.used for f in files]
    times = {"used_last": max(used, default=None), "used_longest_ago": min(used, default=None)}
    return {"entries": len(files), "nbytes": sum(f.nbytes for f in files), **times}


def _line(name: str, files: Sequence[Listed]) -> str:
    used = sorted(f.used for f in files)
    dates = [f"{datetime.fromtimestamp(t):%Y-%m-%d %H:%M}" for t in used[-1:] + used[:1]]
    last, first = dates or ("-", "-")
    return f"{name:10} {len(files):7} {_mib(files)}  {last:16}  {first:16}"


def _mib(files: Sequence[Listed]) -> str:
    return f"{sum(f.nbytes for f in files) / 2**20:5.1f} MiB"


# ------------------------------------------------------------------------------------ verify, prune
def fault_of(store: Store, file: Listed) -> str:
    """Why no process would take an entry; "" for a good one, and one that somebody has removed."""
    try:
        _open(store, file)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{file.path}: {error.strerror}"
    return ""


def verify(cfg: Config, removes: bool) -> int:
    """Checks every entry, and prints a line for each that no process would take. The exit status: 1
    if such a one is left."""
    n = Counter[str]()
    for store in stores(cfg).values():
        for file in store.files():
            if not file.is_entry:
                continue
            if fault := fault_of(store, file):
                print(fault)
                n["removed" if removes and _remove(file.path) else "left"] += 1
            else:
                n["good"] += 1
    print(f"{n['good']} good, {n['removed'] + n['left']} bad, {n['removed']} removed")
    return int(n["left"] > 0)


def _remove(path: Path) -> bool:
    """Whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(PermissionError):
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def prune(cfg: Config, max_bytes: int | None, seconds: float | None) -> None:
    """Removes what was used longest ago, of all kinds: all that was not used for so long, then as
    much as leaves at most max_bytes; and what nobody finished."""
    files = [f for store in stores(cfg).values() for f in store.files()]
    limit, now = math.inf if seconds is None else seconds, time.time()
    old = {f for f in files if now - f.used > (limit if f.is_entry else UNFINISHED_S)}
    dropped = drop_oldest(old, -1)
    if max_bytes is not None:
        dropped += drop_oldest([f for f in files if f not in old and f.is_entry], max_bytes)
    print(f"{len(dropped)} of {len(files)} files removed, {_mib(dropped).strip()}")


# ----------------------------------------------------------------------------------- export, import
def export(cfg: Config, path: Path, names: Sequence[str]) -> None:
    """Writes the good entries of some kinds to an archive."""
    n = Counter[str]()

    def members() -> Iterator[tuple[str, bytes]]:
        chosen = [(k, s) for k, s in stores(cfg).items() if k.name in names]
        for kind, store in sorted(chosen, key=lambda c: (c[0].folder, c[0].suffix)):
            for file in sorted(store.files(), key=lambda f: f.path.name):
                if not file.is_entry:
                    continue
                try:
                    data = _open(store, file).read()
                except OSError as error:
                    n["bad"] += not isinstance(error, FileNotFoundError)
                else:
                    n["written"] += 1
                    yield place_of(kind, file.path.name.removesuffix(store.suffix)), data

    write_archive(path, members())
    left_out = f", {n['bad']} left out that are bad: see plait cache verify" if n["bad"] else ""
    print(f"{n['written']} entries in {path}{left_out}")


def import_(cfg: Config, path: Path) -> None:
    """Takes those entries of an archive of which there is no good one."""
    found, n = stores(cfg), Counter[str]()
    with open_archive(path, trust_of(cfg.trust)) as archive:
        for kind, key in archive.members:
            try:
                found[kind].open(key)
            except OSError:
                found[kind].write(key, archive.read(kind, key))
                n["taken"] += 1
            else:
                n["there"] += 1
    dropped = [f for store in found.values() for f in drop_oldest(store.files(), store.max_bytes)]
    gone = f", {len(dropped)} old ones removed (PLAIT_CACHE_MB)" if dropped else ""
    print(f"{n['taken']} entries taken, {n['there']} were there{gone}")
