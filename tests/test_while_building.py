"""Calls that do not wait for kernels (option while_building): eager runs them until programs are
there. The compiler of these tests waits for a file."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import plait
from plait._native import Program, Tangents
from plait.capture.backend import plait_backend
from plait.capture.pending import meanwhile
from plait.capture.warm import frames
from plait.capture.warm.frames import outcomes
from plait.config import Config
from plait.errors import ToolchainError
from plait.runtime.toolchain import find_toolchain

pytestmark = pytest.mark.skipif(
    os.environ.get("PLAIT_WRAPPER", "native") != "native", reason="native programs are waited for"
)
SECONDS = 100  # before a test that hangs fails


@dataclass
class Compiler:
    """The machine's compiler, which waits for a file, and the options that name it."""

    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """With an empty cache."""
        script = self.folder / "compiler"
        if not script.exists():
            own = find_toolchain(Config()).compiler
            wait = f'while [ ! -e "{self.folder}/go" ]; do sleep 0.02; done'
            words = f'case "$*" in *--version*) ;; *) {wait};; esac'
            script.write_text(f'#!/bin/sh\n{words}\nexec {own} "$@"\n')
            script.chmod(0o755)
        return {
            "while_building": "eager",
            "cpp_compiler": str(script),
            "cache_dir": str(self.folder / "cache"),
        }

    def go(self) -> None:
        """From now on it works."""
        (self.folder / "go").touch()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    monkeypatch.setattr(frames, "EXTENDED", [])  # whatever other tests have registered
    made = Compiler(tmp_path)
    meanwhile.clear()
    yield made
    made.go()  # or its threads would wait for ever


def until_built(call: Callable[[], Any], n_graphs: int = 1) -> None:
    """Calls until n_graphs graphs that eager ran have programs."""
    start = time.monotonic()
    while sum(bool(m.over) for m in meanwhile) < n_graphs:
        assert time.monotonic() - start < SECONDS, [m.line for m in meanwhile]
        call()
        time.sleep(0.01)


def lines() -> list[str]:
    return [m.line.partition(": ")[2] for m in meanwhile]


def compiled(fn: Callable[..., Any], compiler: Compiler, **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(
        fn, backend="plait", options={**compiler.options, **options}
    )
    return made


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def same_bits(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def waits_for_nothing(fn: Callable[..., Any], *args: Any) -> None:
    """That no graph of fn is run by eager."""
    fn(*args)
    assert not meanwhile


def test_eager_runs_calls_until_the_program_is_there(compiler: Compiler) -> None:
    model, x = mlp().eval(), torch.randn(3, 8)
    fn = compiled(model, compiler)
    with torch.no_grad():
        for _ in range(3):
            same_bits(fn(x), model(x))
        assert lines() == ["eager ran 3 calls; its kernels are being built"]
        compiler.go()
        until_built(lambda: fn(x))
        assert lines()[0].endswith(" calls; kernels run it now")
        n_calls = meanwhile[0].n_calls
        torch.testing.assert_close(fn(x), model(x))
        assert meanwhile[0].n_calls == n_calls
    report = plait.explain(lambda x: x + 1, x, quiet=True)
    assert report.meanwhile == (meanwhile[0].line,) and meanwhile[0].line in report.text


def test_what_takes_its_place_is_called_as_if_it_had_been_waited_for(compiler: Compiler) -> None:
    held: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        held.append(plait_backend(gm, inputs, options=compiler.options))
        return held[-1]

    x = torch.randn(7)
    fn = torch.compile(lambda x: (x.exp() + 1).sin(), backend=backend)
    fn(x)
    assert not isinstance(held[0].call, Program)
    compiler.go()
    until_built(lambda: fn(x))
    assert isinstance(held[0], Tangents) and isinstance(held[0].call, Program)


def gradients(fn: Callable[..., Any], model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = fn(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def test_passes_of_training_are_of_one_kind(compiler: Compiler) -> None:
    model, x = mlp(), torch.randn(3, 8)
    fn = compiled(model, compiler)
    want = gradients(model, model, x)
    same_bits(gradients(fn, model, x), want)
    given = x.clone().requires_grad_()
    before = fn(given)  # by eager; its backward pass comes when kernels are there
    compiler.go()
    until_built(lambda: torch.testing.assert_close(gradients(fn, model, x), want))
    parameters = [given, *model.parameters()]
    same_bits(torch.autograd.grad(before.square().sum(), parameters), tuple(want[1:]))
    after = fn(given)
    assert after.grad_fn is not None and after.grad_fn.name() == "PlaitBackward"
    loss = after.square().sum()
    for keeps in (True, False):
        got = torch.autograd.grad(loss, parameters, retain_graph=keeps)
        torch.testing.assert_close(got, tuple(want[1:]))


def test_no_pass_waits_for_a_compiler(compiler: Compiler) -> None:
    """Saved sizes have AOTAutograd ask for the backward program at once."""
    model = mlp()
    fn = torch.compile(
        lambda x: model(x) * x.shape[0], backend="plait", dynamic=True, options=compiler.options
    )
    for n in (3, 5):
        x = torch.randn(n, 8)
        same_bits(gradients(fn, model, x), gradients(lambda x: model(x) * len(x), model, x))
    assert [m.n_calls for m in meanwhile] == [2]
    compiler.go()
    until_built(lambda: gradients(fn, model, x))
    for n in (2, 9):
        x = torch.randn(n, 8)
        want = gradients(lambda x: model(x) * len(x), model, x)
        torch.testing.assert_close(gradients(fn, model, x), want)


def test_marks_of_sizes_that_vary_are_on_eagers_results(compiler: Compiler) -> None:
    seen: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return plait_backend(gm, inputs, options=compiler.options)

    @torch.compile(backend=backend, dynamic=True)
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y.sin() * 2

    def check() -> None:
        for n in (3, 4, 5):
            torch.testing.assert_close(fn(x := torch.randn(n)), x.exp().sin() * 2)

    check()
    compiler.go()
    until_built(check, 2)
    check()
    assert len(seen) == 2


def test_writes_of_both_are_seen(compiler: Compiler) -> None:
    def step(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        n += 1
        return x.mul_(2), n[0] + x.sum()

    fn = compiled(step, compiler, strict=False)
    x, n = torch.ones(4), torch.zeros(3)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        got = fn(x.fill_(1), n)
        assert got[0] is x and got[1] == calls + 8 and n.tolist() == [calls] * 3

    call()
    compiler.go()
    until_built(call)
    call()
    memory, same = torch.ones(5), torch.ones(5)
    got = fn(memory[:4], memory[1:4])  # written memory that is shared is eager's, now as ever
    same_bits((*got, memory), (*step(same[:4], same[1:4]), same))


@pytest.mark.parametrize("eager_random", [False, True])
def test_random_numbers_are_those_of_kernels_or_eagers(
    compiler: Compiler, eager_random: bool
) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) * 2

    if not eager_random:
        compiler.go()
    call = compiled(fn, compiler, eager_random=eager_random)
    x = torch.ones(1000)
    torch.manual_seed(3)
    got = call(x)
    assert bool(meanwhile) == eager_random
    compiler.go()
    if eager_random:
        until_built(lambda: call(x))
    torch.manual_seed(3)
    same_bits(call(x), got)


def test_attention_without_dropout_draws_nothing(compiler: Compiler) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    fn = compiled(lambda q, k, v: attend(q, k, v).exp() + 1, compiler)
    fn(*torch.randn(3, 1, 2, 8, 16))
    assert len(meanwhile) == 1


def test_what_may_differ_by_more_than_rounding_is_waited_for(compiler: Compiler) -> None:
    compiler.go()
    x = torch.randn(6)

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    @torch.library.custom_op("plait_tests::while_building", mutates_args=())
    def own(x: Tensor) -> Tensor:
        return x * 2

    own.register_fake(torch.empty_like)
    waits_for_nothing(compiled(branch, compiler), x)
    waits_for_nothing(compiled(lambda x: own(x).exp(), compiler), x)
    waits_for_nothing(compiled(lambda x: x.exp() + 1, compiler, nan_asserts=True), x)
    waits_for_nothing(compiled(lambda x: x.exp() + 2, compiler, wrapper="python"), x)
    report = plait.explain(lambda x: x.exp() + 3, x, options=compiler.options, quiet=True)
    assert report.kernels == 1 and not meanwhile


def test_a_checkpoint_sees_one_kind_of_pass(compiler: Compiler) -> None:
    """What it repeats must save as many tensors as the first pass."""
    model, x = mlp(), torch.randn(3, 8)
    fn = compiled(model, compiler)
    fn(x.requires_grad_())
    assert meanwhile[0].n_calls == 1
    timer = threading.Timer(0.3, compiler.go)
    timer.start()
    y = checkpoint(fn, x, use_reentrant=False)  # waits
    got = torch.autograd.grad(y.sum(), x)
    timer.join()
    torch.testing.assert_close(got, torch.autograd.grad(model(x).sum(), x))
    assert lines() == ["eager ran 1 call; kernels run it now"]


REFUSES = """for f in "$@"; do case "$f" in *.cpp)
    grep -q plait_probe "$f" || { echo no >&2; exit 1; };; esac; done
"""
BROKEN = 'case "$*" in *--version*) ;; *) exit 1;; esac\n'


def spoil(compiler: Compiler, words: str) -> None:
    """Has the compiler do this first, once it works."""
    script = Path(compiler.options["cpp_compiler"])
    script.write_text(script.read_text().replace("exec ", words + "exec "))


def test_a_build_that_fails_leaves_the_graph_to_eager(compiler: Compiler) -> None:
    spoil(compiler, REFUSES)
    fn = compiled(lambda x: x.exp() + 1, compiler, strict=False)
    x = torch.randn(5)
    fn(x)
    compiler.go()
    with pytest.warns(UserWarning, match="plait: eager runs a graph: .*refused a kernel"):
        until_built(lambda: same_bits(fn(x), x.exp() + 1))
    assert lines()[0].endswith("building them failed: eager runs it for good")
    same_bits(fn(x), x.exp() + 1)


def test_without_a_compiler_operators_are_called(compiler: Compiler) -> None:
    spoil(compiler, BROKEN)
    fn = compiled(lambda x: x.exp() + 1, compiler)
    x = torch.randn(5)
    fn(x)
    compiler.go()
    with pytest.warns(UserWarning, match="plait runs every op as a call of ATen"):
        until_built(lambda: same_bits(fn(x), x.exp() + 1))
    assert lines()[0].endswith("kernels run it now")
    same_bits(fn(x), x.exp() + 1)


def test_strict_raises_at_the_call_that_finds_out(compiler: Compiler) -> None:
    spoil(compiler, REFUSES)
    fn = compiled(lambda x: x.exp() + 1, compiler, strict=True)
    x = torch.randn(5)
    fn(x)
    compiler.go()
    for _ in range(2):
        with pytest.raises(ToolchainError, match="refused a kernel"):
            until_built(lambda: fn(x))


def test_threads_share_what_is_built(compiler: Compiler) -> None:
    model, x = mlp().eval(), torch.randn(3, 8)
    fn = compiled(model, compiler)
    want = model(x).detach()
    fn(x)

    def calls() -> None:
        until_built(lambda: torch.testing.assert_close(fn(x).detach(), want))
        torch.testing.assert_close(fn(x).detach(), want)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(calls) for _ in range(4)]
        compiler.go()
        for one in running:
            one.result()
    assert len(meanwhile) == 1


def test_a_forked_child_builds_on(compiler: Compiler) -> None:
    def work(x: Tensor) -> Tensor:
        return x.exp() + 1

    fn, x = compiled(work, compiler), torch.randn(4)
    fn(x)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            compiler.go()
            until_built(lambda: fn(x))
            torch.testing.assert_close(fn(x), work(x))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    until_built(lambda: fn(x))


ENDS = """
import os, sys, torch
import plait
fn = torch.compile(lambda x: x.exp() + 1, backend="plait", options=eval(sys.argv[1]))
fn(torch.ones(3))
print("called", flush=True)
"""


def test_the_interpreter_ends_while_a_compiler_works(compiler: Compiler) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, repr(compiler.options)],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "called\n", "")


def test_a_warm_start_is_kept_once_kernels_are_there(compiler: Compiler) -> None:
    outcomes.clear()

    def work(x: Tensor) -> Tensor:
        return (x.exp() + 1).sum(0)

    x = torch.randn(4, 4)
    fn = compiled(work, compiler, warm_start=True)
    fn(x)
    assert not outcomes
    compiler.go()
    until_built(lambda: fn(x))
    torch._dynamo.reset()
    torch.testing.assert_close(fn(x), work(x))
    assert [o.how for o in outcomes] == ["kept", "warm"]


def test_regions_that_eager_ran_are_not_kept(compiler: Compiler) -> None:
    """Eager makes other calls of them, which no text is to hold."""
    outcomes.clear()
    x = torch.randn(4, 4, requires_grad=True)
    work = compiled(
        lambda x: checkpoint(lambda y: y.exp() + 1, x, use_reentrant=False),
        compiler,
        warm_start=True,
    )
    work(x)
    compiler.go()
    until_built(lambda: torch.testing.assert_close(work(x), x.exp() + 1))
    assert [o.how for o in outcomes] == [
        "a graph with regions, which eager ran while its kernels were built"
    ]


def test_the_log_tells(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "plait")
    x = torch.randn(4)
    fn = compiled(lambda x: x.exp() + 1, compiler)
    fn(x)
    compiler.go()
    until_built(lambda: fn(x))
    compiled(lambda x: torch.rand_like(x) + 1, compiler)(x)
    assert meanwhile[0].line in caplog.messages
    assert any("calls wait for its kernels: it calls aten.rand_like" in m for m in caplog.messages)
