"""Flags: defaults, environment, options, modes, keys; and the runner of the pipeline that reads
them."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import plait
from plait.config import MODES, Config, list_modes, list_options
from plait.errors import UserError
from plait.log import IR, REASONS, STAGES, PassLog

FLAGS = dataclasses.fields(Config)


def test_environment_overrides_defaults() -> None:
    env = {
        "PLAIT_DEBUG": "3",
        "PLAIT_FUSION": "0",
        "PLAIT_OPT_LEVEL": "1",
        "PLAIT_ISA": "avx2",
        "PLAIT_CXX": "clang++",
    }
    cfg = Config.from_env(env)
    assert (cfg.debug, cfg.fusion, cfg.opt_level, cfg.isa, cfg.cpp_compiler) == (
        3,
        False,
        1,
        "avx2",
        "clang++",
    )
    assert Config.from_env({}) == Config()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("PLAIT_DEBUG", "9", "PLAIT_DEBUG is 9"),
        ("PLAIT_DEBUG", "x", "PLAIT_DEBUG is 'x', not an integer"),
        ("PLAIT_FUSION", "maybe", "PLAIT_FUSION is 'maybe'"),
        ("PLAIT_ISA", "sse", "PLAIT_ISA is 'sse'"),
    ],
)
def test_bad_environment(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config.from_env({name: text})


def test_an_empty_environment_variable_counts_as_unset() -> None:
    assert (
        Config.from_env({f.metadata["env"] or f"PLAIT_{f.name.upper()}": "" for f in FLAGS})
        == Config()
    )


def test_an_unknown_environment_name_is_one_warning_that_lists_the_known_ones() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            Config.from_env({"PLAIT_DEBG": "3", "PLAIT_DEBUG": "1", "PATH": "/bin"})
    (warning,) = caught
    assert "PLAIT_DEBG:" in str(warning.message) and "PLAIT_DEBUG_DIR, " in str(warning.message)
    assert warning.filename == __file__


def test_options_come_on_top_of_the_mode() -> None:
    assert Config().with_options(None, "max-autotune").opt_level == 3
    assert Config().with_options({"opt_level": 1}, "max-autotune").opt_level == 1
    assert Config().with_options() == Config()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_option_types_are_checked(value: object) -> None:
    with pytest.raises(UserError, match="option 'fusion' must be bool"):
        Config().with_options({"fusion": value})
    with pytest.raises(UserError, match="option 'debug' must be int"):
        Config().with_options({"debug": True})


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError) as option:
        Config().with_options({"fuse": True})
    assert all(f.name in option.value.hint for f in dataclasses.fields(Config))
    with pytest.raises(UserError) as mode:
        Config().with_options(None, "speed")
    assert all(m in mode.value.hint for m in MODES)


def test_lists() -> None:
    assert list_modes() == [
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    ]
    assert list(list_options()) == [f.name for f in dataclasses.fields(Config)]
    assert plait.list_options() == list_options()


def test_every_flag_is_documented_and_has_its_own_environment_name() -> None:
    rows = dataclasses.fields(Config)
    names = [f.metadata["env"] or f"PLAIT_{f.name.upper()}" for f in rows]
    assert len(set(names)) == len(rows) and all(f.metadata["doc"] for f in rows)


def test_key_holds_what_changes_the_output_and_nothing_else() -> None:
    base = Config().key()
    assert Config(opt_level=3).key() != base and Config(isa="portable").key() != base
    assert Config(debug=5, cache_dir="/elsewhere", debug_dir="d", verify=True).key() == base


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().debug = 1  # type: ignore[misc]


def test_steps_are_timed_verified_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    checked: list[int] = []
    log = PassLog(Config(debug=1), "graph_0", {"double": checked.append})
    assert log("double", lambda x: 2 * x, 21) == 42
    assert checked == [42] and log.times_ms["double"] >= 0.0
    log.note(REASONS, "not shown")
    err = capsys.readouterr().err
    assert "[plait] graph_0: double" in err and "not shown" not in err


def test_verifiers_are_off_by_default() -> None:
    checked: list[int] = []
    PassLog(Config(), "graph_0", {"step": checked.append})("step", int, "3")
    assert checked == []


def test_dumps_go_to_a_folder_a_graph(tmp_path: Path) -> None:
    log = PassLog(Config(debug_dir=str(tmp_path)), "graph_7")
    log.dump("a.txt", "one")
    log.dump("b.txt", lambda: "two")
    assert (tmp_path / "graph_7" / "a.txt").read_text() == "one"
    assert (tmp_path / "graph_7" / "b.txt").read_text() == "two"


def test_a_debug_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "graph" / "a.txt").mkdir(parents=True)
    for root in (str(tmp_path / "file"), "~nouser/x", str(tmp_path)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                log = PassLog(Config(debug_dir=root), "graph")
                log.dump("a.txt", "one")
                assert log.folder is None
        assert [w.filename for w in caught] == [__file__]
        assert str(caught[0].message).startswith(f"plait cannot write debug files to {root} (")


def test_no_text_is_built_that_nobody_reads() -> None:
    calls: list[str] = []
    PassLog(Config(), "g").dump("a.txt", lambda: calls.append("built") or "text")  # type: ignore[func-returns-value]
    assert calls == []


def test_python_logging_sees_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    log = PassLog(Config(), "g")
    assert not log.shows(STAGES)
    with caplog.at_level(logging.INFO, logger="plait"):
        assert log.shows(STAGES) and not log.shows(IR)
        log.note(STAGES, "hello")
    assert caplog.messages == ["hello"]


def test_torch_logs_switch_plait_on() -> None:
    code = (
        "import torch\n"
        "from plait.config import Config\n"
        "from plait.log import PassLog\n"
        "PassLog(Config(), 'g').note(3, 'a reason')\n"
    )
    env = {**os.environ, "TORCH_LOGS": "+plait", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "a reason" in done.stderr


def test_importing_plait_loads_neither_torch_nor_the_compiler() -> None:
    code = (
        "import sys, plait\n"
        "plait.list_modes()\n"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('plait.')])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    ).stdout
    assert out.strip() == "['plait.errors', 'plait.config']"


def test_public_names_resolve() -> None:
    import plait.compile  # the pipeline's module must not hide the public function

    assert callable(plait.compile) and callable(plait.plait_backend)
    assert set(plait.__all__) <= set(dir(plait))
    with pytest.raises(AttributeError, match="has no attribute 'compil'"):
        plait.compil  # noqa: B018
