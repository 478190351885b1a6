"""What the suite keeps: one record a case, in one file a device:
benchmarks/results/suite-DEVICE.json.

A record holds all variants of a case, measured together on one machine, so that their times can be
compared; it is keyed by the case, and says of which program, plait, torch and device it is.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]
Records = dict[str, Record]
RIGHT = 2.0  # times eager's distance from the truth, the most that a right result may have


def short(device: str) -> str:
    """The part of a device's name that goes into names of files."""
    if device.startswith("CPU"):
        return "cpu"
    found = re.search(r"\b([A-Z]+\d+\w*)\b", device)
    return found[1].lower() if found else re.sub(r"\W+", "-", device).strip("-").lower()


def path(device: str, folder: Path = RESULTS) -> Path:
    return folder / f"suite-{short(device)}.json"


def read(file: Path) -> Records:
    """The records of a file, none if it is not there."""
    if not file.exists():
        return {}
    return {record["case"]: record for record in json.loads(file.read_text())}


def write(file: Path, records: Records) -> None:
    """A record a line, in the order of their cases; the file is there whole or not at all."""
    lines = [json.dumps(records[case], sort_keys=True) for case in sorted(records)]
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".tmp")
    beside.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    beside.replace(file)


def merge(old: Records, new: Records) -> Records:
    """The later record of each case, with the modes that the other one alone has."""
    found = dict(old)
    for case, record in new.items():
        known = found.get(case, record)
        later = known["date"] > record["date"]
        found[case] = with_others(record, known) if later else with_others(known, record)
    return found


def with_others(old: Record | None, new: Record) -> Record:
    """A record with the modes that it lacks and an older one of the same program has: a command may
    measure some modes alone."""
    if old is None or any(old[key] != new[key] for key in ("spec", "torch", "device")):
        return new
    others = {name: f for name, f in old["variants"].items() if name not in new["variants"]}
    return {**new, "variants": {**new["variants"], **others}}


def sources(root: Path = ROOT) -> str:
    """A digest of what plait is made of."""
    digest = hashlib.sha256()
    files = [f for room in ("plait", "native", "triton_launch") for f in (root / room).rglob("*")]
    for file in sorted(files):
        if file.suffix in (".py", ".cpp", ".h") and "tests" not in file.parts:
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def is_open(record: Record | None, now: Record, changed: bool, wanted: Iterable[str]) -> bool:
    """Whether a case has to be measured: it never was, or another program or with another torch;
    with `changed`, or with another plait; or it lacks a variant. now: what it would be keyed by."""
    if record is None or any(record[key] != now[key] for key in ("spec", "torch", "device")):
        return True
    if changed and record["plait"] != now["plait"]:
        return True
    return "failed" not in record and any(name not in record["variants"] for name in wanted)


def matching(names: Sequence[str], only: str) -> list[str]:
    """Those that one of some patterns, separated by commas, matches, whole or up to a stroke:
    "bert" means "bert/*" too."""
    patterns = [q for p in only.split(",") if p for q in (p, f"{p}/*")] or ["*"]
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def times(record: Mapping[str, Any], peer: str) -> dict[str, float]:
    """The times of a peer's modes that ran, in ms, by their names."""
    return {
        name: figures["ms"]
        for name, figures in record.get("variants", {}).items()
        if name.split("-")[0] == peer and figures.get("ms")
    }


def best(record: Mapping[str, Any], peer: str) -> float | None:
    """The best time of a peer's modes that ran, in ms."""
    return min(times(record, peer).values(), default=None)


def error(record: Mapping[str, Any], variant: str) -> float | None:
    """A variant's distance from the truth, as a multiple of eager's."""
    distance, eager = record["variants"].get(variant, {}).get("error"), record.get("eager_error")
    return None if distance is None or eager is None else distance / max(eager, 1e-12)


def failures(record: Mapping[str, Any], peer: str = "plait") -> dict[str, str]:
    """What failed or is not right among a peer's modes, by variant, and why."""
    if "failed" in record:
        return {"eager": record["failed"]}
    found = {}
    for name, figures in record["variants"].items():
        if name.split("-")[0] != peer:
            continue
        distance = error(record, name)
        if "failed" in figures:
            found[name] = figures["failed"]
        elif distance is not None and distance > RIGHT:
            found[name] = f"its error is {distance:.1f} times eager's"
    return found


def ratio(record: Mapping[str, Any]) -> float | None:
    """How many times as fast as Inductor's best mode plait's best one is."""
    ours, theirs = best(record, "plait"), best(record, "inductor")
    return theirs / ours if ours and theirs else None


def worst(records: Records, n: int) -> list[str]:
    """The cases with the lowest ratio."""
    found = {case: r for case, record in records.items() if (r := ratio(record)) is not None}
    return sorted(found, key=lambda case: found[case])[:n]
