"""Every error class by its text, and errors that reach the user of torch.compile unwrapped."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.errors import (
    InputError,
    InternalError,
    PlaitError,
    ToolchainError,
    Unsupported,
    UserError,
)


def test_text_says_what_where_and_what_to_try() -> None:
    error = UserError("sizes differ", where="model.py:31", hint="pad the batch")
    assert str(error) == "sizes differ\n  at model.py:31\n  try: pad the batch"
    assert (error.what, error.where, error.hint) == ("sizes differ", "model.py:31", "pad the batch")
    assert str(Unsupported("no float8")) == "no float8"


def test_a_bug_says_so_and_what_to_send() -> None:
    text = str(InternalError("after fuse: node 3 has no dtype"))
    assert text.startswith("bug in plait: after fuse: node 3 has no dtype")
    assert "PLAIT_DEBUG_DIR" in text


def test_three_kinds() -> None:
    kinds = (UserError, Unsupported, InternalError)
    assert all(issubclass(k, PlaitError) for k in kinds)
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)
    assert issubclass(InputError, UserError) and issubclass(ToolchainError, Unsupported)


def test_unknown_option_through_torch_compile() -> None:
    fn = torch.compile(lambda x: x + 1, backend="plait", options={"fusoin": True})
    with pytest.raises(
        UserError, match=r"(?s)unknown option 'fusoin' for backend 'plait'.*fusion"
    ) as info:
        fn(torch.ones(2))
    assert isinstance(info.value, plait.UserError)
    assert info.value.what == "unknown option 'fusoin' for backend 'plait'"


def test_errors_through_torch_keep_class_and_fields() -> None:
    from plait.compat.errors import through_dynamo

    for error in (InputError("a", where="b:1", hint="c"), ToolchainError("a"), InternalError("a")):
        passed = through_dynamo(error)
        assert isinstance(passed, type(error)) and str(passed) == str(error)
        assert (
            f"{type(passed).__module__}.{type(passed).__qualname__}"
            == f"plait.errors.{type(error).__name__}"
        )
        assert (passed.what, passed.where, passed.hint) == (error.what, error.where, error.hint)
        assert type(through_dynamo(error)) is type(passed)


def test_wrong_option_type_through_torch_compile() -> None:
    fn = torch.compile(lambda x: x + 1, backend="plait", options={"opt_level": "fast"})
    with pytest.raises(UserError, match="option 'opt_level' must be int, got 'fast'"):
        fn(torch.ones(2))


def test_wrong_kinds_of_options_and_modes() -> None:
    x = torch.ones(2)
    for options in (["debug"], "debug", {"debug": "x"}, {1: 2}):
        with pytest.raises(UserError, match="option"):
            plait.compile(torch.sin, (x,), options=options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"unknown mode \[\]"):
        plait.compile(torch.sin, (x,), mode=[])  # type: ignore[arg-type]
    with pytest.raises(UserError) as info:
        plait.compile(torch.sin, (x,), options={"opt_level": "3"})
    assert info.value.hint == "one of 0, 1, 2, 3"


def test_unknown_mode_through_torch_compile() -> None:
    fn = torch.compile(lambda x: x + 1, backend="plait", mode="fastest")
    with pytest.raises(
        UserError, match=r"(?s)unknown mode 'fastest'.*default, reduce-overhead, max-autotune"
    ):
        fn(torch.ones(2))


def test_a_crash_of_the_compiler_is_a_bug_of_plait(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.capture import program

    def crash(*args: object) -> None:
        raise KeyError("no such buffer")

    monkeypatch.setattr(program, "compile_graph", crash)
    text = r"failed with KeyError: 'no such buffer' \(test_errors.py:\d+, in crash\)"
    with pytest.raises(InternalError, match=r"compiling inference_\d+ " + text):
        torch.compile(lambda x: x + 1, backend="plait")(torch.ones(2))
    with pytest.raises(InternalError, match=r"compiling export_\d+ " + text) as info:
        plait.compile(lambda x: x + 1, (torch.ones(2),))
    assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.parametrize("mode", plait.list_modes())
def test_known_modes(mode: str) -> None:
    fn = torch.compile(lambda x: x + 1, backend="plait", mode=mode)
    assert fn(torch.ones(2)).tolist() == [2.0, 2.0]


def test_known_options() -> None:
    fn = torch.compile(lambda x: x + 1, backend="plait", options={"fusion": False, "debug": 0})
    assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
