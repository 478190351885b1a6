"""An object store beside the folder of caches: read through, written behind, never an error."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from plait import extend
from plait.__main__ import main
from plait.config import Config
from plait.errors import CacheWarning, UserError
from plait.runtime import remote
from plait.runtime.cache import get_or_build
from plait.runtime.remote import mirror_of
from plait.runtime.store import KINDS, LIBRARIES, TUNED, Store, key_of, sealed
from plait.runtime.toolchain import find_toolchain
from plait.tools.archive import place_of

SOURCE = 'extern "C" long answer() { return 42; }'
KEY = key_of(["an entry"])


class Shelf:
    """A store in memory that notes what it is asked."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.asked: list[str] = []

    def get(self, name: str) -> bytes | None:
        self.asked.append(name)
        return self.kept.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.kept[name] = data

    def list(self) -> Iterable[str]:
        return iter(self.kept)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """What shelf:// is. Each test has stores of its own."""
    made = Shelf()
    monkeypatch.setattr(remote, "_mirrors", [])
    schemes = {"shelf": lambda url: made}
    for module in (remote, extend):
        monkeypatch.setattr(module, "SCHEMES", schemes)
    mirror_of.cache_clear()
    return made


def config(folder: Path, url: str = "shelf://here") -> Config:
    return Config(cache_dir=str(folder), cache_remote=url)


def tuned(folder: Path, url: str = "shelf://here") -> Store:
    return Store.of(config(folder, url), TUNED)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_what_one_machine_builds_others_find(
    scheme: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fsspec. tmp_path / "a", "b": the folders of two machines."""
    pytest.importorskip("fsspec")
    url = f"{scheme}://{tmp_path}/shared"
    built = get_or_build(SOURCE, find_toolchain(Config()), config(tmp_path / "a", url))
    mirror_of(url).flush()
    assert not built.hit
    mirror_of.cache_clear()
    place = place_of(LIBRARIES, built.path.stem)
    assert mirror_of(url).list() == [place]
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        patched.setattr("plait.runtime.cache._built", None)
        found = get_or_build(SOURCE, find_toolchain(Config()), config(tmp_path / "b", url))
        assert found.hit and found.path == tmp_path / "b" / place
        assert found.path.read_bytes() == built.path.read_bytes()


def test_every_kind_is_shared(shelf: Shelf, tmp_path: Path) -> None:
    for kind in KINDS:
        Store.of(config(tmp_path / "a"), kind).put(KEY, kind.name.encode())
    mirror_of("shelf://here").flush()
    assert shelf.kept == {place_of(k, KEY): sealed(k.name.encode()) for k in KINDS}
    for kind in KINDS:
        assert Store.of(config(tmp_path / "b"), kind).read(KEY) == kind.name.encode()
        assert Store.of(Config(cache_dir=str(tmp_path / "b")), kind).read(KEY) is not None


def test_what_is_nowhere_is_asked_for_once(shelf: Shelf, tmp_path: Path) -> None:
    for _ in range(3):
        assert tuned(tmp_path).read(KEY) is None
    assert shelf.asked == [place_of(TUNED, KEY)]
    tuned(tmp_path).put(KEY, b"{}")
    assert tuned(tmp_path).read(KEY) == b"{}" and len(shelf.asked) == 1


def test_a_damaged_entry_is_built_again(shelf: Shelf, tmp_path: Path) -> None:
    place = place_of(TUNED, KEY)
    shelf.kept[place] = sealed(b"{}")[:-1]
    with pytest.warns(CacheWarning, match="builds a damaged entry of shelf://here again"):
        assert tuned(tmp_path).read(KEY) is None
    assert not [*tmp_path.rglob("*.json")]
    tuned(tmp_path).put(KEY, b"{}")
    mirror_of("shelf://here").flush()
    assert shelf.kept == {place: sealed(b"{}")}


def test_a_folder_that_cannot_be_written(shelf: Shelf, tmp_path: Path) -> None:
    """What the store has serves this process."""
    shelf.kept[place_of(TUNED, KEY)] = sealed(b"{}")
    (tmp_path / "file").touch()
    with pytest.warns(CacheWarning, match="cannot write kernels"):
        assert tuned(tmp_path / "file").read(KEY) == b"{}"


def raises(*_: object) -> None:
    raise ConnectionError("no route to it")


@pytest.mark.parametrize("what", ["open", "get", "put", "type", "flush"])
def test_a_store_that_fails_is_a_warning(
    what: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: dict[str, Callable[[], None]] = {
        "open": lambda: monkeypatch.setitem(remote.SCHEMES, "shelf", raises),
        "get": lambda: monkeypatch.setattr(shelf, "get", raises),
        "put": lambda: monkeypatch.setattr(shelf, "put", raises),
        "type": lambda: monkeypatch.setattr(shelf, "get", lambda name: "text"),
        "flush": lambda: monkeypatch.setattr(shelf, "put", lambda *_: threading.Event().wait()),
    }
    failing[what]()
    url = f"shelf://{what}"
    texts = {
        "type": "TypeError: it gave a str",
        "flush": "TimeoutError: not all was written within 0.05 s",
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(3):
            key = key_of([what, str(k)])
            assert tuned(tmp_path, url).read(key) is None
            assert tuned(tmp_path, url).put(key, b"{}").path.exists()
            mirror_of(url).flush(0.05 if what == "flush" else 10)
            assert tuned(tmp_path, url).read(key) == b"{}"
    (warning,) = caught
    why = texts.get(what, "ConnectionError: no route to it")
    assert str(warning.message) == f"plait goes on without the cache at {url} ({why})"
    assert issubclass(warning.category, CacheWarning)


def test_no_answer_is_waited_for_long(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GET_S", 0.05)
    monkeypatch.setattr(shelf, "get", lambda name: threading.Event().wait())
    with pytest.warns(CacheWarning, match=r"TimeoutError: no answer within 0.05 s"):
        assert tuned(tmp_path, "shelf://slow").read(KEY) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://somewhere/plait", "whoever is on the way could change"),
        ("nothing-like-it://x", "nothing-like-it"),
    ],
)
def test_urls_that_are_no_store(shelf: Shelf, tmp_path: Path, url: str, why: str) -> None:
    pytest.importorskip("fsspec")
    with pytest.warns(CacheWarning, match=f"goes on without the cache at {url} .*{why}"):
        assert tuned(tmp_path, url).read(KEY) is None


@pytest.mark.stress
def test_a_forked_child_has_threads_of_its_own(shelf: Shelf, tmp_path: Path) -> None:
    shelf.kept[place_of(TUNED, KEY)] = sealed(b"{}")
    assert tuned(tmp_path / "a").read(KEY) == b"{}"
    child = os.fork()
    if child == 0:
        os._exit(0 if tuned(tmp_path / "b").read(KEY) == b"{}" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_users_register_schemes(shelf: Shelf, tmp_path: Path) -> None:
    urls: list[str] = []
    extend.remote_cache("my+own", lambda url: urls.append(url) or shelf)
    assert tuned(tmp_path, "my+own://host/x").read(KEY) is None
    assert urls == ["my+own://host/x"] and len(shelf.asked) == 1
    with pytest.raises(UserError, match="a second kind of cache for my"):
        extend.remote_cache("my+own", lambda url: shelf)
    for wrong in ("", "My", "my://", "a b"):
        with pytest.raises(UserError, match="is no scheme of a URL"):
            extend.remote_cache(wrong, lambda url: shelf)


def test_the_command_line_counts(
    shelf: Shelf,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAIT_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="no object store is named"):
        main(["cache", "list", "--remote"])
    monkeypatch.setenv("PLAIT_CACHE_REMOTE", "shelf://here")
    shelf.kept = {place_of(TUNED, key_of([str(k)])): b"" for k in range(3)} | {"readme": b""}
    main(["cache", "list", "--remote"])
    lines = capsys.readouterr().out.splitlines()
    assert f"tuned            3  {TUNED.doc}" in lines and lines[-1] == "others           1"
