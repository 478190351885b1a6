"""`plait cache`: what it lists, checks, removes, writes to archives and takes from them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import time
import warnings
import zipfile
from functools import partial
from pathlib import Path

import pytest

from plait.__main__ import main
from plait.config import Config
from plait.runtime.cache import get_or_build
from plait.runtime.store import CUBINS, KINDS, LIBRARIES, TUNED, Kind, Store, key_of, sealed
from plait.runtime.toolchain import find_toolchain
from plait.tools import archive
from plait.tools import cache as tool
from plait.tools.archive import place_of, write_archive

SOURCE = 'extern "C" long answer() { return 42; }'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a cache, which is empty."""
    made = tmp_path / "cache"
    monkeypatch.setenv("PLAIT_CACHE_DIR", str(made))
    return made


def filled(n: int = 2, nbytes: int = 100) -> dict[Path, bytes]:
    """So many entries of each kind in the cache, and what is in their files."""
    made = {}
    for kind in KINDS:
        store = Store.of(Config.from_env(), kind)
        for k in range(n):
            data = f"{kind.name} {k}".ljust(nbytes).encode()
            entry = store.put(key_of((kind.name, str(k))), data)
            made[entry.path] = entry.read()
    return made


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def says(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main(["cache", *map(str, arguments)])
    return capsys.readouterr().out


def exits(*arguments: object) -> object:
    with pytest.raises(SystemExit) as stop:
        main(["cache", *map(str, arguments)])
    return stop.value.code


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(says(capsys, "list").splitlines()) == len(KINDS) + 2
    files = filled(3, 1 << 20)
    old, new = time.time() - 50 * 86400, time.time() - 40 * 86400
    for path in files:
        os.utime(path, (new, new))
    os.utime(next(p for p in files if p.suffix == ".json"), (old, old))
    next(p for p in files if p.suffix == ".json").with_name(".new-1.json").touch()
    lines = says(capsys, "list").splitlines()
    (tuned,) = [line for line in lines if line.startswith("tuned")]
    assert "      3   3.0 MiB  " in tuned and TUNED.doc in tuned
    assert time.strftime("%Y-%m-%d %H:%M", time.localtime(old)) in tuned
    assert lines[-2].startswith(f"all             {3 * len(KINDS)}")
    assert lines[-1].startswith("unfinished       1")
    facts = json.loads(says(capsys, "list", "--json"))
    assert facts["folder"] == str(folder) and facts["max_nbytes_each"] == 512 << 20
    assert [*facts["kinds"]] == [k.name for k in KINDS] and facts["unfinished"]["entries"] == 1
    tuned_facts = facts["kinds"]["tuned"]
    assert tuned_facts.pop("used_last") == pytest.approx(new)
    assert tuned_facts.pop("used_longest_ago") == pytest.approx(old)
    assert tuned_facts == {"entries": 3, "nbytes": 3 * len(sealed(bytes(1 << 20)))}


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = filled()
    assert exits("verify") == 0
    assert f"{len(files)} good, 0 bad, 0 removed" in capsys.readouterr().out
    flipped, cut, open_, link, place, good = random.Random(0).sample(sorted(files), 6)
    flipped.write_bytes(bytes([files[flipped][0] ^ 1]) + files[flipped][1:])
    cut.write_bytes(files[cut][:-1])
    open_.chmod(0o666)
    other = good.with_name("other" + good.suffix)
    other.write_bytes(files[good])
    link.unlink()
    link.symlink_to(good)
    place.unlink()
    place.mkdir()
    bad = {flipped, cut, open_, link, place, other}
    for removed in (False, True):
        assert exits("verify", *(["--remove"] if removed else [])) == (not removed)
        *lines, total = capsys.readouterr().out.splitlines()
        assert {Path(line.partition(": ")[0]) for line in lines} == bad
        assert total == f"{len(files) - 5} good, 6 bad, {6 * removed} removed"
        assert [p for p in bad if os.path.lexists(p)] == ([] if removed else [*bad])
    assert contents(folder) == {p: d for p, d in files.items() if p not in bad}
    assert exits("verify") == 0


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(filled())
    for k, path in enumerate(files):
        os.utime(path, (time.time() - (k + 0.5) * 86400,) * 2)
    fresh, left = (files[0].with_name(f".new-{k}{files[0].suffix}") for k in range(2))
    fresh.touch()
    left.touch()
    os.utime(left, (time.time() - 86400,) * 2)
    assert f"3 of {len(files) + 2} files" in says(
        capsys, "prune", "--older-than", f"{len(files) - 2}d"
    )
    assert sorted(contents(folder)) == sorted([*files[:-2], fresh])
    nbytes = len(sealed(bytes(100)))
    says(capsys, "prune", "--max-bytes", 3 * nbytes + 1, "--older-than", "100w")
    assert sorted(contents(folder)) == sorted([*files[:3], fresh])
    says(capsys, "prune", "--max-bytes", "1K")
    assert len(contents(folder)) == 4
    says(capsys, "prune", "--older-than", "0h")
    assert [*contents(folder)] == [fresh]
    assert exits("prune") == exits("prune", "--max-bytes", "x") == 2
    assert exits("prune", "--older-than", "3") == exits("prune", "--max-bytes", "-1") == 2


def test_a_folder_of_others_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """Where others can put links, what is behind them is not ours to check or to remove."""
    files = filled()
    (folder / "tuned").chmod(0o777)
    for command in (["list"], ["verify", "--remove"], ["prune", "--max-bytes=0"]):
        assert "others can write to" in str(exits(*command))
    assert "others can write to" in str(exits("export", tmp_path / "file"))
    assert contents(folder) == files and not (tmp_path / "file").exists()


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE_DIR", "~nouser/x")
    assert str(exits("list")).startswith("plait: no folder ~nouser/x")


# ----------------------------------------------------------------------------------------- archives
def moved(folder: Path) -> Path:
    return folder.rename(folder.with_name("before"))


def test_an_archive_makes_the_same_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, tools = Config.from_env(), find_toolchain(Config())
    built = get_or_build(SOURCE, tools, cfg).path
    files, file = {**filled(), built: built.read_bytes()}, tmp_path / "file"
    assert f"{len(files)} entries in {file}" in says(capsys, "export", file)
    first = file.read_bytes()
    for path in files:
        os.utime(path, (1e9, 1e9))
    says(capsys, "export", file)
    assert file.read_bytes() == first, "it depends on more than the entries"
    assert [*tmp_path.iterdir()] in ([folder, file], [file, folder])
    moved(folder)
    assert f"{len(files)} entries taken, 0 were there" in says(capsys, "import", file)
    assert contents(folder) == files and get_or_build(SOURCE, tools, cfg).hit
    assert exits("verify") == 0
    moved_again = built.stat().st_ino
    assert f"0 entries taken, {len(files)} were there" in says(capsys, "import", file)
    assert built.stat().st_ino == moved_again, "what is good is left"
    built.write_bytes(b"damaged")
    assert f"1 entries taken, {len(files) - 1} were there" in says(capsys, "import", file)
    assert contents(folder) == files


def test_some_kinds(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, file = filled(), tmp_path / "file"
    bad = next(p for p in files if p.suffix == ".json")
    bad.write_bytes(b"damaged")
    said = says(capsys, "export", file, "--kinds", "tuned", "cubins")
    assert said.startswith(f"3 entries in {file}, 1 left out that are bad")
    moved(folder)
    says(capsys, "import", file)
    parts = {p.relative_to(folder).parts[0] for p in contents(folder)}
    assert parts == {"tuned", "cubins"} and len(contents(folder)) == 3
    assert exits("export", file, "--kinds", "others") == 2


def test_what_is_too_much_goes(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled(3, 400_000)
    says(capsys, "export", tmp_path / "file")
    moved(folder)
    monkeypatch.setenv("PLAIT_CACHE_MB", "1")
    assert f"{len(KINDS)} old ones removed" in says(capsys, "import", tmp_path / "file")
    assert len(contents(folder)) == 2 * len(KINDS)


def test_a_damaged_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    filled(1, 10)
    file = tmp_path / "file"
    main(["cache", "export", str(file)])
    moved(folder)
    whole = file.read_bytes()
    damaged = [b"", whole[1:], whole + b"x"]
    damaged += [whole[:n] for n in range(0, len(whole), 97)]
    for k in range(0, len(whole), 29):
        damaged.append(whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :])
    for data in damaged:
        file.write_bytes(data)
        said = str(exits("import", file))
        assert "is no archive of a cache" in said or "is damaged: its checksum" in said
    assert not contents(folder)


def test_whatever_an_archive_says_entries_are_whole(folder: Path, tmp_path: Path) -> None:
    """Its checksum is right for what is wrong: one that was made to deceive."""
    files = {p.relative_to(folder): data for p, data in filled(1, 10).items()}
    file, taken = tmp_path / "file", 0
    main(["cache", "export", str(file)])
    whole = file.read_bytes()[:-64]
    for k in random.Random(0).sample(range(len(whole)), 150):
        made = whole[:k] + bytes([whole[k] ^ (1 << k % 8)]) + whole[k + 1 :]
        file.write_bytes(made + hashlib.sha256(made).hexdigest().encode())
        shutil.rmtree(folder)
        try:
            main(["cache", "import", str(file)])
            found = {p.relative_to(folder): data for p, data in contents(folder).items()}
            assert {*found.values()} <= {*files.values()}
            taken += 1
        except SystemExit as stop:
            assert str(stop.code).startswith(f"plait: {file} ")
            assert not folder.exists()
        folder.mkdir(exist_ok=True)
    assert 0 < taken < 100


GOOD = "0" * 64
FOREIGN = [
    "../kernels/00/" + GOOD + ".so",
    "/etc/00/" + GOOD + ".so",
    "kernels/../../00/" + GOOD + ".so",
    "kernels/00/../../../x.so",
    f"kernels/01/{GOOD}.so",
    f"kernels/00/{GOOD}.json",
    f"elsewhere/00/{GOOD}.so",
    f"kernels/00/{GOOD}.so\n",
    f"kernels/00/{GOOD[1:]}.so",
    f"kernels\\00\\{GOOD}.so",
    "lock",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_archive_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """With all that is good in it; nothing outside the cache is written."""
    file = tmp_path / "file"
    good = (place_of(LIBRARIES, "1" * 64), sealed(b"good"))
    write_archive(file, [good, (name, sealed(b"evil"))])
    assert "which is no entry of a cache" in str(exits("import", file))
    assert [*tmp_path.iterdir()] == [file] and not folder.exists()


def test_an_archive_of_damaged_entries_is_refused(folder: Path, tmp_path: Path) -> None:
    file, place = tmp_path / "file", place_of(CUBINS, GOOD)
    for data in (b"", b"unsealed", sealed(b"data")[:-1]):
        write_archive(file, [(place_of(CUBINS, "1" * 64), sealed(b"good")), (place, data)])
        assert f"the checksum of {place} is wrong" in str(exits("import", file))
    with zipfile.ZipFile(file, "w") as plain:
        plain.writestr(place, sealed(b"data"))
    assert "is no archive of a cache in a format" in str(exits("import", file))
    assert not folder.exists()


def test_an_archive_has_the_owners_of_a_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        old = os.umask(0)
        try:
            write_archive(file, [(place_of(TUNED, GOOD), sealed(b"{}"))])
        finally:
            os.umask(old)
    main(["cache", "import", str(file)])
    file.chmod(0o664)
    assert exits("import", file) == f"plait: others can write to {file}"
    monkeypatch.setenv("PLAIT_TRUST", str(tmp_path))
    main(["cache", "import", str(file)])
    monkeypatch.setenv("PLAIT_TRUST", "")
    folder.chmod(0o777)
    assert "others can write to" in str(exits("import", file))


def test_export_to_a_full_disk_leaves_what_there_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled()
    file = tmp_path / "file"
    file.write_bytes(b"before")

    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "_digest", full)
    assert exits("export", file) == "plait: No space left on device"
    assert file.read_bytes() == b"before" and len([*tmp_path.iterdir()]) == 2
    monkeypatch.undo()
    assert "No such file or directory" in str(exits("export", tmp_path / "no folder" / "file"))
    assert (
        exits("import", tmp_path / "nothing")
        == f"plait: {tmp_path}/nothing: No such file or directory"
    )


def test_a_kind_of_entries_is_a_row() -> None:
    with pytest.raises(AssertionError, match="no row of KINDS"):
        Store.of(Config(), Kind("others", "others", ".x", "nothing"))
    assert len({(k.folder, k.suffix) for k in KINDS}) == len({k.name for k in KINDS}) == len(KINDS)


# -------------------------------------------------------------------------------------- all at once
def kill(*children: int) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
    ends = [os.waitpid(child, 0)[1] for child in children]
    assert ends == [signal.SIGKILL] * len(children), "one found a fault"


def _use_at_random(seed: int, folder: Path) -> None:
    """What processes and people do to a cache, until killed. Ends where an entry is not what its
    key says, or one is damaged."""
    rng, cfg, parent = random.Random(seed), Config.from_env(), os.getppid()
    try:
        while os.getppid() == parent:
            kind, k = rng.choice([TUNED, CUBINS]), rng.randrange(30)
            store, key = Store.of(cfg, kind), key_of([str(k)])
            want = f"{kind.name} {k}".encode() * 20_000
            match rng.randrange(30):
                case 0:
                    tool.prune(cfg, rng.randrange(5_000_000), None)
                case 1:
                    assert tool.verify(cfg, removes=False) == 0, "a damaged entry"
                case 2:
                    tool.export(cfg, folder / f"{seed}", ["tuned", "cubins"])
                    tool.import_(cfg, folder / f"{seed}")
                case _:
                    make = partial(store.put, key, want)
                    found, _ = store.once(key, partial(store.find, key), make)
                    assert found.read() == sealed(want), "another entry"
    finally:
        os._exit(1)


@pytest.mark.stress
def test_whoever_is_killed_leaves_a_good_cache(folder: Path, tmp_path: Path) -> None:
    children: list[int] = []
    try:
        for seed in range(8):
            child = os.fork()
            if child == 0:
                warnings.simplefilter("error")
                _use_at_random(seed, tmp_path)
            children.append(child)
            if len(children) > 3:
                time.sleep(0.05)
                kill(children.pop(0))
    finally:
        kill(*children)
    assert exits("verify") == 0
