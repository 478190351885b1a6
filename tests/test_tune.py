"""Tuning of GPU kernels: which tiles are tried, that each computes the same, and what becomes of
measured times.

Without a GPU: times are made up, tiles run in Triton's interpreter and compile to cubins in
processes that have Triton (see test_triton_kernels.py): `python -m tests.test_tune run | compile`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from plait._native import launch_cubin, load_cubin
from plait.config import MODES, Config
from plait.errors import CacheWarning, ToolchainError
from plait.ir.dtypes import f32
from plait.ir.loops import Buffer, Load, const, loop_vars, node
from plait.kernel.null.run import run_kernel
from plait.kernel.target import Measured
from plait.kernel.triton.target import TritonTarget, emit_kernel
from plait.kernel.triton.tiles import plan_tile
from plait.kernel.triton.tune import MAX_TILES, candidates, describe
from plait.runtime import tune
from plait.runtime.cubin import SM_90, Cubin, Job, pack
from plait.runtime.load import LoadError
from plait.runtime.store import TUNED, Store
from plait.schedule.legalize import legalize
from plait.schedule.plan import Kernel, Reduce
from plait.schedule.plan import Store as Put
from tests import warm
from tests.kernel_tools import aligned, emitted, strided

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")


# ------------------------------------------------------------------------------------------ kernels
def softmax(name: str, rows: int, columns: int) -> Kernel:
    (i,), (r,) = loop_vars("i", (rows,)), loop_vars("r", (columns,))
    x = node("load", (), Load("x", (i, r)), f32)
    e = node("exp", (node("sub", (x, node("acc", (), "peak", f32))),))
    value = node("truediv", (e, node("acc", (), "sum", f32)))
    stmts = (Reduce("peak", "max", x), Reduce("sum", "sum", e), Put("out", (i, r), value, True))
    args = (strided("x", f32, (rows, columns)), strided("out", f32, (rows, columns)))
    return Kernel(name, (i,), (r,), stmts, args, ("out",), ())


def centred(name: str, rows: int, columns: int) -> Kernel:
    """Rows without their mean, over their squares' sum."""
    (i,), (r,) = loop_vars("i", (rows,)), loop_vars("r", (columns,))
    x = node("load", (), Load("x", (i, r)), f32)
    off = node("sub", (x, node("mul", (node("acc", (), "sum", f32), const(1 / columns, f32)))))
    value = node("truediv", (off, node("acc", (), "squares", f32)))
    squares = Reduce("squares", "sum", node("mul", (off, off)))
    stmts = (Reduce("sum", "sum", x), squares, Put("out", (i, r), value, True))
    args = (strided("x", f32, (rows, columns)), strided("out", f32, (rows, columns)))
    return Kernel(name, (i,), (r,), stmts, args, ("out",), ())


def column_sums(name: str, rows: int, columns: int) -> Kernel:
    (j,), (r,) = loop_vars("j", (columns,)), loop_vars("r", (rows,))
    x = node("load", (), Load("x", (r, j)), f32)
    stmts = (Reduce("s", "sum", x), Put("out", (j,), node("acc", (), "s", f32), False))
    return Kernel(
        name,
        (j,),
        (r,),
        stmts,
        (strided("x", f32, (rows, columns)), strided("out", f32, (columns,))),
        ("out",),
        (),
    )


def transposed(name: str, rows: int, columns: int) -> Kernel:
    i, j = loop_vars("i", (rows, columns))
    x = node("load", (), Load("x", (j, i)), f32)
    stmts = (Put("out", (i, j), node("mul", (x, const(2.0, f32))), True),)
    args = (strided("x", f32, (columns, rows)), strided("out", f32, (rows, columns)))
    return Kernel(name, (i, j), (), stmts, args, ("out",), ())


def doubled(name: str, n: int) -> Kernel:
    (i,) = loop_vars("i", (n,))
    x = node("load", (), Load("x", (i,)), f32)
    stmts = (Put("out", (i,), node("mul", (x, const(2.0, f32))), True),)
    return Kernel(
        name, (i,), (), stmts, (strided("x", f32, (n,)), strided("out", f32, (n,))), ("out",), ()
    )


KERNELS = (
    softmax("rows", 5, 300),
    centred("long_rows", 3, 20001),
    column_sums("columns", 300, 100),
    column_sums("long_columns", 5000, 40),
    transposed("transposed", 70, 130),
    doubled("doubled", 70_000),
)


# -------------------------------------------------------------------------------------------- tiles
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_candidates(kernel: Kernel) -> None:
    linear = legalize(kernel)
    tiles = candidates(linear)
    assert tiles[0] == plan_tile(linear)
    assert 5 <= len(set(tiles)) == len(tiles) <= MAX_TILES
    assert len({describe(t) for t in tiles}) == len(tiles)
    for t in tiles:
        assert all(g.block & (g.block - 1) == 0 for g in t.groups)
        assert [(g.name, g.axes) for g in t.groups] == [(g.name, g.axes) for g in tiles[0].groups]
        r = [g for g in t.groups if g.name == "r"]
        assert t.looped or all(isinstance(g.points, int) and g.block >= g.points for g in r)


def test_rows_are_tried_whole_and_in_pieces() -> None:
    for kernel in KERNELS[:2]:
        assert {t.looped for t in candidates(legalize(kernel))} == {False, True}


def run_tiles() -> None:
    """Every tile of every kernel in Triton's interpreter, against the slow reference."""
    from tests.triton_tools import Runner

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for kernel in KERNELS:
            spans = {b.name: math.prod(int(n) for n in b.shape) for b in kernel.args}
            data = {n: rng.standard_normal(size).astype(np.float32) for n, size in spans.items()}
            want = {n: a.copy() for n, a in data.items()}
            run_kernel(kernel, want, wide=True)
            close = 1e-6 * float(np.abs(want["out"]).max())
            for k, tile in enumerate(candidates(legalize(kernel))):
                runner = Runner([kernel], Path(folder))
                runner.made[kernel.name] = emit_kernel(kernel, f"{kernel.name}_{k}", tile)
                got = {n: a.copy() for n, a in data.items()}
                got["out"][:] = np.nan
                assert runner(kernel, got) == 0
                np.testing.assert_allclose(
                    got["out"], want["out"], rtol=2e-6, atol=close, err_msg=describe(tile)
                )


def compile_tiles() -> None:
    """Every tile of every kernel to a cubin."""
    from tests.gpu_compile import compiled

    with tempfile.TemporaryDirectory() as folder:
        for kernel in KERNELS:
            for k, tile in enumerate(candidates(legalize(kernel))):
                cubin = compiled(
                    emit_kernel(kernel, f"{kernel.name}_{k}", tile, gpu=SM_90), Path(folder)
                )
                assert cubin[:4] == b"\x7fELF"


@needs_triton
@pytest.mark.parametrize("what", ["run", pytest.param("compile", marks=pytest.mark.slow)])
def test_tiles(what: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(TRITON), "TRITON_CACHE_DIR": str(tmp_path)}
    if what == "run":
        env["TRITON_INTERPRET"] = "1"
    done = warm.run("-m", "tests.test_tune", what, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------- outcomes
class Clock:
    """Stands for the device: gives made-up times and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *us: float) -> None:
        self.us, self.asked, self.refused = list(us), 0, [False] * len(us)
        self.submitted: list[Job] = []
        monkeypatch.setattr(tune, "missing_device", lambda contest: "")
        monkeypatch.setattr(tune, "obstacle", lambda: "")
        monkeypatch.setattr(tune, "times_us", self.times_us)
        monkeypatch.setattr(tune, "pool", lambda: self)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
        monkeypatch.setattr("plait.runtime.cubin.triton_version", lambda: "3.6.0")

    def submit(self, jobs: list[Job], cfg: Config) -> list[Future[Cubin]]:
        self.submitted += jobs
        made: list[Future[Cubin]] = [Future() for _ in jobs]
        for future, no in zip(made, self.refused, strict=True):
            if no:
                future.set_exception(ToolchainError("refused"))
            else:
                future.set_result(Cubin(b"", "s", 4, 1, 0, (0, 1), (0, 1), False, False))
        return made

    def times_us(
        self, contest: tune.Contest, versions: list[tuple[Job, int, Cubin | None]]
    ) -> list[float]:
        self.asked += 1
        rival = self.us[len(versions) :]
        return [
            *(
                math.inf if cubin is None else us
                for us, (_, _, cubin) in zip(self.us, versions, strict=False)
            ),
            *rival,
        ]


def contest(n: int, text: str = "text", name: str = "name") -> tune.Contest:
    def version(k: int) -> tuple[Job, int]:
        return Job(name, f"def {name}(): {text}", {}, SM_90, k), 100

    return tune.Contest(
        tuple(f"tile {k}" for k in range(n)), version, (tune.Scratch("f32", 64),), (), "cuda:0"
    )


def test_ranks_take_what_the_first_of_them_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that knows an outcome from before, and one with an empty folder, which may not measure
    while others wait."""
    clock, store = Clock(monkeypatch, 10.0, 9.0), torch.distributed.HashStore()
    ranks = [Config(cache_dir=str(tmp_path / name)) for name in "ab"]
    tune.tune([contest(2)], ranks[0])
    tune.tune([contest(2, "other")], ranks[1])
    monkeypatch.setattr(tune.ranks, "several", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(tune, "obstacle", lambda: "other ranks may wait for this one")
    for text, order in (("text", ranks), ("other", ranks)):
        took = [tune.tune([contest(2, text)], cfg)[0] for cfg in order]
        assert took[0].choice == took[1].choice == (1 if text == "text" else 0)
    assert clock.asked == 2 and took[1].text(contest(2)) == "not tuned: another rank chose tile 0"
    empty = torch.distributed.Store()  # it cannot compare
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: empty)
    (took_alone,) = tune.tune([contest(2)], ranks[0])
    assert (took_alone.choice, took_alone.reason) == (0, "the other ranks cannot be asked")


def test_the_fastest_is_taken_and_known_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, cfg = Clock(monkeypatch, 10.0, 9.0, 12.0), Config(cache_dir=str(tmp_path))
    (first,) = tune.tune([contest(3)], cfg)
    assert (first.choice, first.known, clock.asked) == (1, False, 1)
    assert first.text(contest(3)) == "10.0 us, tile 0 -> 9.0 us, tile 1 of 3 versions"
    clock.us = [1.0, 2.0, 3.0]
    (second,) = tune.tune([contest(3)], cfg)
    assert second == replace(first, known=True) and clock.asked == 1
    assert second.text(contest(3)).endswith("measured before")
    assert tune.tune([contest(3, name="renamed")], cfg) == [second] and clock.asked == 1
    assert tune.tune([contest(3, "another")], cfg)[0].choice == 0 and clock.asked == 2


OPERATORS = (("mm", 0, False), ("addmm", 1, False), ("addmm", 2, False),
             ("_addmm_activation", 1, False), ("_addmm_activation", 1, True))  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "f32", "i8"])
@pytest.mark.parametrize(("name", "dims", "gelu"), OPERATORS)
def test_the_operator_of_a_product_runs(
    name: str, dims: int, gelu: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a kernel beside it, that reads what it made."""
    name = "_int_mm" if dtype == "i8" else name
    left, right = tune.Strided(dtype, (32, 16), (16, 1)), tune.Strided(dtype, (16, 8), (1, 16))
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(torch, "neg", lambda x, out: moved.append((x, out)))
    call = tune.Rival(name, left, right, dims, gelu, nbytes=4096).calls(torch.device("cpu"), 2)
    found = []
    for k in (0, 1):
        call(k)
        source, target = moved[-1]
        assert source.nbytes == target.nbytes == 2048
        found.append(source[: 32 * 8].clone())
    assert not torch.equal(*found) and all(x.any() for x in found), (
        "another matrix, the same result"
    )
    alone = tune.Rival(name, left, right, dims, gelu).calls(torch.device("cpu"), 1)
    alone(0)
    assert len(moved) == 2


def test_an_operator_may_be_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    matrix = tune.Strided("bf16", (16, 64), (64, 1))
    rival = tune.Rival("mm", matrix, matrix)
    race = replace(contest(2), rival=rival)
    clock, cfg = Clock(monkeypatch, 10.0, 9.0, 5.0), Config(cache_dir=str(tmp_path))
    clock.refused.pop()
    others = (None, replace(rival, nbytes=1), replace(rival, more_us=1.5))
    assert race.key not in {replace(race, rival=other).key for other in others}
    assert race.key != replace(race, cold=(0,)).key
    for known in (False, True):
        (outcome,) = tune.tune([race], cfg)
        assert (outcome.choice, outcome.known) == (2, known)
        assert outcome.text(race).startswith("10.0 us, tile 0 -> 5.0 us, the operator of 3")
    assert clock.asked == 1 and len(clock.submitted) == 2


@pytest.mark.parametrize(
    ("us", "choice"), [((8.9, 9.0, 9.0), 2), ((9.0, 8.0, 9.0), 1), ((9.0, math.inf, 9.5), 0)]
)
def test_what_is_taken_without_tuning_wins_ties(
    us: tuple[float, ...], choice: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where nothing can be measured: an operator that is called by default still is."""
    matrix = tune.Strided("bf16", (16, 64), (64, 1))
    race = replace(contest(2), rival=tune.Rival("mm", matrix, matrix, is_usual=True))
    clock, cfg = Clock(monkeypatch, *us), Config(cache_dir=str(tmp_path))
    clock.refused.pop()
    (outcome,) = tune.tune([race], cfg)
    assert outcome.choice == choice
    said = "the best" if choice == 2 else f"-> {us[choice]:.1f} us, tile {choice} of 3"
    assert outcome.text(race).startswith(f"{us[2]:.1f} us, the operator") and said in outcome.text(
        race
    )
    monkeypatch.setattr(tune, "GRAPH_S", -1.0)
    late = replace(race, labels=("a", "b"))
    for known in (False, True):
        (outcome,) = tune.tune([late], cfg)
        assert (outcome.choice, outcome.known) == (2, known) and "were over" in outcome.reason
    monkeypatch.setattr(tune, "obstacle", lambda: "not now")
    other = replace(race, labels=("c", "d"))
    assert tune.tune([other], cfg) == [tune.Outcome(2, reason="not now")]
    assert clock.asked == 1


@pytest.mark.parametrize("us", [(100.0, 98.0), (5.0, 4.8)])
def test_a_small_gain_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, us: tuple[float, float]
) -> None:
    Clock(monkeypatch, *us)
    (outcome,) = tune.tune([contest(2)], Config(cache_dir=str(tmp_path)))
    assert outcome.choice == 0 and outcome.text(contest(2)) == f"{us[0]:.1f} us, tile 0: the best"


def test_what_does_not_compile_does_not_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(monkeypatch, 10.0, 1.0, 5.0)
    clock.refused = [False, True, False]
    cfg = Config(cache_dir=str(tmp_path))
    assert tune.tune([contest(3)], cfg)[0].choice == 2
    assert tune.tune([contest(3)], cfg)[0].us == (10.0, math.inf, 5.0)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"choice": 3, "us": [1, 2], "reason": ""}',
        '{"choice": "x", "us": [1, 2], "reason": ""}',
        '{"choice": 0, "us": [], "reason": ""}',
        '{"choice": 1, "us": [], "reason": "none"}',
        None,
    ],
)
def test_a_damaged_entry_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    clock, cfg = Clock(monkeypatch, 10.0, 9.0), Config(cache_dir=str(tmp_path))
    tune.tune([contest(2)], cfg)
    store = Store(tmp_path / "tuned", ".json")
    if content is None:
        (entry,) = (tmp_path / "tuned").glob("*/*.json")
        entry.write_bytes(entry.read_bytes()[:-1])
    else:
        store.put(contest(2).key, content.encode())
    with pytest.warns(CacheWarning):
        (outcome,) = tune.tune([contest(2)], cfg)
    assert outcome.choice == 1 and not outcome.known and clock.asked == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tune.tune([contest(2)], cfg)[0].known


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, 10.0, 9.0)
    (tmp_path / "file").touch()
    with pytest.warns(CacheWarning):
        (outcome,) = tune.tune([contest(2)], Config(cache_dir=str(tmp_path / "file")))
    assert outcome.choice == 1


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is with the compiler by then is measured; the rest stays as planned, also in other
    processes."""
    clock, cfg = Clock(monkeypatch, 10.0, 9.0), Config(cache_dir=str(tmp_path))
    now = iter(range(1000))  # a second each time it is asked
    monkeypatch.setattr(tune, "GRAPH_S", 6.5)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    contests = [contest(2, f"text {n}") for n in range(20)]
    outcomes = tune.tune(contests, cfg)
    n = sum(1 for o in outcomes if o.us)
    assert 2 < n < 10 and [o.choice for o in outcomes] == [1] * n + [0] * (20 - n)
    assert clock.asked == n and len(clock.submitted) == 2 * n
    assert "were over" in outcomes[n].text(contests[n])
    assert (
        tune.tune(contests, cfg) == [replace(o, known=True) for o in outcomes] and clock.asked == n
    )


def test_few_versions_wait_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others of this process that want a kernel compiled come between."""
    clock = Clock(monkeypatch, 10.0, 9.0)
    waiting: list[int] = []
    times_us = clock.times_us

    def watched(c: tune.Contest, versions: list[tuple[Job, int, Cubin | None]]) -> list[float]:
        waiting.append(len(clock.submitted) - 2 * clock.asked)
        return times_us(c, versions)

    monkeypatch.setattr(tune, "times_us", watched)
    tune.tune([contest(2, f"text {n}") for n in range(8)], Config(cache_dir=str(tmp_path)))
    assert waiting == [6] * 6 + [4, 2]


def test_without_memory_a_kernel_stays_as_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, cfg = Clock(monkeypatch, 10.0, 9.0), Config(cache_dir=str(tmp_path))

    def times_us(*_: object) -> list[float]:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as short:
        short.setattr(tune, "times_us", times_us)
        (first,) = tune.tune([contest(2)], cfg)
    assert "no memory" in first.reason and first.choice == 0
    assert tune.tune([contest(2)], cfg) == [replace(first, known=True)] and clock.asked == 0


def test_what_is_known_counts_where_nothing_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, cfg = Clock(monkeypatch, 10.0, 9.0), Config(cache_dir=str(tmp_path))
    (first,) = tune.tune([contest(2)], cfg)
    monkeypatch.setattr(tune, "obstacle", lambda: "not now")
    assert tune.tune([contest(2), contest(2, "new")], cfg) == [
        replace(first, known=True),
        tune.Outcome(reason="not now"),
    ]
    monkeypatch.setattr(
        tune, "missing_device", lambda c: "no device" if "odd" in c.planned[0].text else ""
    )
    monkeypatch.setattr(tune, "obstacle", lambda: "")
    odd, new = tune.tune([contest(2, "odd"), contest(2, "new")], cfg)
    assert odd == tune.Outcome(reason="no device") and new.choice == 1 and clock.asked == 2


def test_other_ranks_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tune.obstacle() == ""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert tune.obstacle() == ""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "ranks" in tune.obstacle()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "recorded" in tune.obstacle()


# --------------------------------------------------------------------------------------------- lock
def test_the_wait_for_another_process_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, cfg = Clock(monkeypatch, 10.0, 9.0), Config(cache_dir=str(tmp_path))
    monkeypatch.setattr(tune, "LOCK_S", 0.4, raising=False)
    with Store.of(cfg, TUNED).turn(""):
        with pytest.warns(UserWarning, match="waits for another process that measures"):
            (outcome,) = tune.tune([contest(2)], cfg)
        assert "another process" in outcome.reason and clock.asked == 0
    assert tune.tune([contest(2)], cfg)[0].choice == 1


def test_a_race_waits_for_its_own_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the device, on which other streams may wait for who knows what."""
    now = 0.0
    waits: list[float] = []

    class Event:
        def record(self) -> None:
            self.at = now

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waits.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            assert waits[-1] >= end.at
            return end.at - self.at

    def run(ms: float, k: int) -> None:
        nonlocal now
        now += ms + (0.5 if k == 0 else 0)
        ran.append(k)

    def refused(*_: object) -> None:
        raise AssertionError("all streams are waited for")

    monkeypatch.setattr(tune, "_event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    ran: list[int] = []
    runs = {k: partial(run, ms) for k, ms in enumerate((4.0, 1.0, 3.0))}
    sweep = torch.empty(8)
    assert tune._race(runs, sweep, 1, 0) == pytest.approx({0: 4500.0, 1: 1500.0, 2: 3500.0})
    assert {*ran} == {0} and tune._race({}, sweep, 1, 0) == {}
    n = len(ran)
    runs.pop(2)
    times = tune._race(runs, sweep, 2, 0)
    assert times == pytest.approx({0: 2250.0, 1: 750.0}), "the launch before does not count"
    assert ran[n : n + 2] == [2, 0], "it has other weights than those that are recorded"


@pytest.mark.parametrize("usual", [0, 2])
def test_a_race_takes_the_least_time(usual: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work on the device makes some rounds slower; who is far behind runs a few times, except
    for what is taken without tuning."""
    counts = [0, 0, 0]

    def a_round(
        runs: dict[int, object], sweep: object, calls: int, times: dict[int, tune._Times]
    ) -> None:
        for k in runs:
            counts[k] += 1
        busy = 50.0 if counts[1] in (1, 2) else 0.0
        for k in runs:
            times[k].us = min(times[k].us, (20.0, 10.0, 30.0)[k] + busy)

    monkeypatch.setattr(tune, "_round", a_round)
    found = tune._race(dict.fromkeys(range(3), print), torch.empty(0), 8, usual)
    assert found == {0: 20.0, 1: 10.0, 2: 30.0}
    assert counts == [tune.MAX_ROUNDS if k in (1, usual) else tune.FIRST_ROUNDS for k in range(3)]


@pytest.mark.parametrize("sweeps", [2, 2 * tune.MOST_SWEEPS])
def test_what_waits_for_the_host_does_not_count(
    sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is slow to put on the stream: the cache is swept longer, until so much of it hides
    that. Where nothing does, its late times count, and it stays in the race."""
    now, swept = 0.0, 0
    launched: list[str] = []

    class Event:
        def record(self) -> None:
            self.at, self.late = now, launched[-1:] == ["b"] and swept < sweeps

        def query(self) -> bool:
            return self.late

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at + (7.0 if self.late else 0.0)

    class Sweep:
        def sum(self) -> None:
            nonlocal swept
            swept = 1 if launched[-1:] else swept + 1
            launched.clear()

    def run(name: str, k: int) -> None:
        nonlocal now
        now += 1.0
        launched.append(name)

    monkeypatch.setattr(tune, "_event", Event)
    runs = {0: partial(run, "a"), 1: partial(run, "b")}
    found = tune._race(runs, Sweep(), 2, 0)  # type: ignore[arg-type]
    hidden = sweeps <= tune.MOST_SWEEPS
    assert found == pytest.approx({0: 500.0, 1: 500.0 if hidden else 4000.0})


def test_times_of_versions_and_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with other weights at each launch; one that cannot be loaded takes for ever."""
    now = 0.0
    launched: list[tuple[str, int]] = []

    class Event:
        def record(self) -> None:
            self.at = now

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def load(path: str, name: str, device: int, n_parameters: int) -> str:
        assert Path(path).stat().st_size and n_parameters == 4
        if name == "1":
            raise RuntimeError("too many registers")
        return name

    def launch(kernel: str, pointers: list[int], sizes: tuple[int, ...], grid: int) -> None:
        nonlocal now
        assert (sizes, grid) == ((7,), 100)
        launched.append((kernel, pointers[1]))
        now += 0.002

    properties = SimpleNamespace(L2_cache_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def recorded(run: tune.Run, calls: int, device: torch.device) -> Callable[[], object]:
        return lambda: [run(k) for k in range(calls)]

    for name, value in (
        ("_event", Event), ("load_cubin", load), ("launch_cubin", launch), ("_recorded", recorded),
    ):  # fmt: skip
        monkeypatch.setattr(tune, name, value)
    left, right = (tune.Strided("bf16", (8, 8), (8, 1)) for _ in range(2))
    race = replace(
        contest(2), device="cpu", sizes=(7,), cold=(1,), buffers=(tune.Scratch("bf16", 128),) * 3,
        rival=tune.Rival("mm", left, right, more_us=5.0),
    )  # fmt: skip
    cubin = Cubin(b"", "s", 4, 1, 0, (0, 1), (0, 1), False, False)
    versions = [(*race.version(k), cubin) for k in range(2)]
    times = tune.times_us(race, versions)
    assert times == [pytest.approx(2.0), math.inf, pytest.approx(5.0)]
    a_round = [at for kernel, at in launched if kernel == "0"][1 : 2 + tune.CALLS]
    assert len({*a_round}) == len(a_round) == tune.CALLS + 1


def test_cold_buffers_are_others_at_each_launch() -> None:
    wanted = (tune.Scratch("bf16", 64), tune.Scratch("bf16", 32), tune.Scratch("u8", 16))
    first, second = tune._buffers(wanted, (1,), 2, torch.device("cpu"))
    assert first[0] is second[0] and first[2] is second[2]
    assert not torch.equal(first[1], second[1]) and first[1].any()
    race, cache = replace(contest(2), cold=(0,)), 50 << 20
    sizes = (64, 40 << 20, 100 << 20, 1 << 30)
    found = [replace(race, buffers=(tune.Scratch("f32", n),)).calls(cache) for n in sizes]
    assert found == [tune.CALLS, 4, 2, 1] and contest(2).calls(cache) == 1


def measured(kernels: list[Kernel], cfg: Config) -> Measured:
    target = TritonTarget()
    return target.measure(kernels, aligned(kernels), target.machines({"cuda:0"}, cfg), cfg)


def test_the_emitted_kernel_is_the_tuned_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = replace(KERNELS[5], args=tuple(replace(b, device="cuda:0") for b in KERNELS[5].args))
    tiles = candidates(legalize(kernel))
    clock = Clock(monkeypatch, *([10.0] * (len(tiles) - 1) + [5.0]))
    cfg = Config(cache_dir=str(tmp_path), gpu_arch="sm_90")
    plain = emitted(TritonTarget(), [kernel], cfg)
    assert clock.asked == 0
    both = [kernel, replace(kernel, name="twin")]
    found = measured(both, cfg)
    assert found.choices == {"doubled": tiles[-1]} and clock.asked == 1
    tuned = emitted(TritonTarget(), both, cfg, found.choices)
    assert (
        clock.asked == 1
        and tuned.text == emit_kernel(kernel, "doubled", tiles[-1], gpu=SM_90).text != plain.text
    )
    (note,) = found.notes
    assert note.startswith("doubled: 10.0 us, ") and f"-> 5.0 us, {describe(tiles[-1])}" in note
    assert tuned.entry_points == {"doubled": "doubled", "twin": "doubled"}
    assert clock.submitted[-1] == tuned.units[0]  # compiled by now


def test_buffers_are_as_long_as_they_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    i, j = loop_vars("i", (8, 16))
    x = Buffer("x", f32, (8, 16), (100, 1), "cuda:0")
    out = Buffer("out", f32, (8, 16), (1, 8), "cuda:0")
    stmts = (Put("out", (i, j), node("load", (), Load("x", (i, j)), f32), True),)
    kernel = Kernel("k", (i, j), (), stmts, (x, out), ("out",), ())
    seen: list[tune.Contest] = []
    clock = Clock(monkeypatch, *[1.0] * len(candidates(legalize(kernel))))
    monkeypatch.setattr(tune, "times_us", lambda c, v: seen.append(c) or clock.us)
    cfg = Config(cache_dir=str(tmp_path), gpu_arch="sm_90")
    measured([kernel], cfg)
    assert seen[0].buffers == (
        tune.Scratch("f32", 4 * (7 * 100 + 16)),
        tune.Scratch("f32", 4 * 128),
    )


def test_without_the_device_nothing_is_measured(tmp_path: Path) -> None:
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    arch = "sm_100" if here == (9, 0) else "sm_90"
    kernel = replace(KERNELS[0], args=tuple(replace(b, device="cuda:0") for b in KERNELS[0].args))
    cfg = Config(cache_dir=str(tmp_path), gpu_arch=arch)
    found = measured([kernel], cfg)
    assert found.notes == (f"rows: not tuned: no device with {arch} at hand",)
    source = emitted(TritonTarget(), [kernel], cfg, found.choices)
    assert source == emitted(TritonTarget(), [kernel], cfg)
    assert not list(tmp_path.iterdir())


def test_tiles_are_for_the_device_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of 200 rows fills a device of 64 multiprocessors, and not one of 132."""
    kernel = softmax("rows", 200, 700)
    kernel = replace(kernel, args=tuple(replace(b, device="cuda:0") for b in kernel.args))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def warps(multiprocessors: int, **options: str) -> int:
        found = SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        source = emitted(TritonTarget(), [kernel], Config(**options))  # type: ignore[arg-type]
        return int(source.units[0].num_warps)

    assert warps(64) < warps(132) == warps(64, gpu_arch="sm_90")


def test_a_kernel_for_python_needs_its_device(tmp_path: Path) -> None:
    (tmp_path / "k.cubins").write_bytes(pack({}))
    with pytest.raises(LoadError):
        load_cubin(str(tmp_path / "k.cubins"), "k", 0, 1)
    with pytest.raises(ValueError, match="Capsule"):
        launch_cubin(object(), [], [], 1)


def test_modes() -> None:
    assert [m for m, changes in MODES.items() if changes.get("autotune")] == [
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ]
    assert not Config().autotune and json.dumps(dict(Config().key())).count("autotune") == 1


if __name__ == "__main__":
    {"run": run_tiles, "compile": compile_tiles}[sys.argv[1]]()
