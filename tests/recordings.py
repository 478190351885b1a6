"""Recording and replaying programs on the GPU that tests/fake_gpu.cpp plays: run by
tests/test_recordings.py."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(os.environ["FAKE_GPU"])
gpu = ctypes.CDLL(str(FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(FOLDER / "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
gpu.fake_end.restype = ctypes.c_void_p
gpu.fake_waits.restype = ctypes.c_char_p
gpu.fake_own_nbytes.restype = gpu.fake_shared_nbytes.restype = ctypes.c_int64

import plait.runtime.graphs as module  # noqa: E402
from plait import _native  # noqa: E402
from plait.runtime.cubin import Cubin, pack  # noqa: E402
from plait.runtime.load import load  # noqa: E402
from plait.tools.explain import explain  # noqa: E402
from plait.wrapper.cpp import load_program  # noqa: E402
from plait.wrapper.native import encode  # noqa: E402
from plait.wrapper.partition import COPIED_NBYTES, partition  # noqa: E402
from plait.wrapper.program import Artifacts  # noqa: E402
from plait.wrapper.text import read  # noqa: E402

HEAD = """\
program('p')
s0 = symbol()
s1 = symbol()

s0 = int_input()
s1 = int_input()
x = tensor_input(f32[s0] @ (1,), device='cuda:0')
y = tensor_input(f32[s1] @ (1,), device='cuda:0')

kernel('k', 2, 1, device='cuda:0')
kernel('both', 3, 1, device='cuda:0')
"""
CALLS = HEAD.replace("program('p')", "program('p', n_callables=1)")
N = 64
SHAPE = "f32[s0] @ (1,), device='cuda:0'"


def nbytes() -> tuple[int, int]:
    """Memory that the last recording has to itself, and that all of a test share."""
    return gpu.fake_own_nbytes(), gpu.fake_shared_nbytes()


class Capture:
    """In the place of torch's graphs."""

    def __init__(self, device: int) -> None:
        gpu.fake_begin()
        self.records = True

    limit = 1 << 40

    def keep(self, kept: bool) -> None:
        gpu.fake_keep(int(kept))

    def stop(self) -> None:
        self.records = False

    def end(self) -> tuple[int, int, int, int]:
        return int(gpu.fake_end()), *nbytes(), self.limit

    def abort(self) -> None:
        if self.records:
            gpu.fake_end()


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """From a body, its constants and the number of results that are the caller's, a program."""
    monkeypatch.setattr(module, "Capture", Capture)
    facts = {"num_warps": 4, "num_ctas": 1, "shared": 0, "cooperative": False, "pdl": False}
    path = tmp_path / "kernels"
    path.write_bytes(
        pack(
            {
                name: Cubin(
                    f"{name} {n} 0".encode(),
                    name,
                    global_scratch=(0, 1),
                    profile_scratch=(0, 1),
                    **facts,
                )
                for name, n in (("k", 5), ("both", 6))
            }
        )
    )
    yield lambda body, n_results=None, nbytes=None, head=HEAD, spent=(), callables=(): load(
        encode(partition(read(head + body), [], n_results, nbytes, spent)),
        {"cuda": str(path)},
        (),
        callables,
    )
    gpu.fake_limit(ctypes.c_int64(1 << 40))
    gpu.fake_forget_shared()


def here(x: Tensor) -> Tensor:
    return torch.ops.fake_gpu.to_gpu(x)


def there(x: Tensor) -> Tensor:
    return torch.ops.fake_gpu.to_host(x)


def ramp(n: int, k: int = 0) -> Tensor:
    return torch.arange(n, dtype=torch.float32) + k


def test_the_cpp_target_launches_what_native_does(make: Make, tmp_path: Path) -> None:
    body = CHAIN + "return (c, d)\n"
    kernels = {"cuda": str(tmp_path / "kernels")}
    native, cpp = make(body), load_program(read(HEAD + body), Artifacts(kernels))
    for n in (5, 9, 5):
        given = (n, 2, here(ramp(n)), here(ramp(2)))
        for a, b in zip(cpp(*given), native(*given), strict=True):
            assert torch.equal(there(a), there(b))


def stats(program: Any) -> dict[str, Any]:
    return dict(program.stats()["graphs"])


CHAIN = """\
a = alloc(f32[s0] @ (1,), device='cuda:0')
launch('k', (x, a), (s0,), (a,), 1)
b, = call('aten::neg')(a)
c = alloc(f32[s0] @ (1,), device='cuda:0')
launch('k', (b, c), (s0,), (c,), 1)
d, = call('aten::neg')(c)
"""


def chain(x: Tensor) -> tuple[Tensor, Tensor]:
    b = -(2 * x + 1)
    return b, -(2 * b + 1)


def test_results_of_operators_are_copied_and_their_memory_is_used_again(make: Make) -> None:
    program = make(CHAIN + "return (b, d)\n")
    held = []
    for k in range(6):
        x = ramp(N, k)
        got = program(N, N, here(x), here(x))
        held.append((x, got))
    for x, got in held:
        for g, want in zip(got, chain(x), strict=True):
            assert torch.equal(there(g), want)
    assert stats(program)["recorded"] == 1 and stats(program)["replayed"] == 4
    assert stats(program)["results_copied"] == 2 and stats(program)["results_direct"] == 0
    assert stats(program)["refused"] == {}
    assert nbytes() == (0, 2 * 4 * N)  # a and c, b and d


MOVED = """\
a = alloc(f32[s0] @ (1,), device='cuda:0')
launch('k', (x, a), (s0,), (a,), 1)
b, = call('aten::negative', may_keep=False)(a)
c = alloc(f32[s0] @ (1,), device='cuda:0')
launch('k', (y, c), (s0,), (c,), 1)
d, = call('aten::negative', may_keep=False)(c)
return (b, d)
"""


@pytest.mark.parametrize(
    ("how", "n_direct"),
    [
        ("plain", 2), ("spaced", 2), ("brought", 2), ("numbered", 2),
        ("packed", 0), ("pointed", 0), ("over_freed", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("n", [N, 1000, 300_000])
def test_results_of_operators_are_written_where_they_belong(
    make: Make, how: str, n_direct: int, n: int
) -> None:
    """Wherever an operator is told nothing of where they lie but their addresses."""
    hows = ["plain", "spaced", "brought", "numbered", "packed", "pointed", "over_freed"]
    gpu.fake_negative(hows.index(how))
    program, held = make(MOVED), []
    for k in range(6):
        x, y = ramp(n, k), ramp(n, 7 * k)
        held.append((x, y, program(n, n, here(x), here(y))))
    for x, y, (b, d) in held:
        assert torch.equal(there(b), -(2 * x + 1)) and torch.equal(there(d), -(2 * y + 1))
    assert len({t.data_ptr() for *_, got in held for t in got}) == 12
    counts = stats(program)
    assert counts["recorded"] == 1 and counts["replayed"] == 4
    assert counts["results_direct"] == n_direct and counts["results_copied"] == 2 - n_direct
    assert sum(counts["why_copied"].values()) == 2 - n_direct
    assert all(why.startswith("aten::negative: ") for why in counts["why_copied"])


def test_a_view_made_late_does_not_keep_memory(make: Make) -> None:
    program = make(CHAIN + "v = view(b, f32[3] @ (1,), s1)\nreturn (d, v)\n")
    for k in range(5):
        x = ramp(N, k)
        d, v = program(N, 7, here(x), here(x[:7]))
        b, want = chain(x)
        assert torch.equal(there(d), want) and torch.equal(there(v), b[7:10])
    assert nbytes() == (0, 2 * 4 * N)
    assert stats(program)["recorded"] == 1 and stats(program)["results_copied"] == 2


def test_results_of_kernels_are_written_where_they_belong(make: Make) -> None:
    program = make(
        CHAIN + "e = alloc(f32[s0] @ (1,), device='cuda:0')\n"
        "launch('both', (b, d, e), (s0,), (e,), 1)\nreturn (e,)\n"
    )
    held = []
    for k in range(5):
        x = ramp(N, k)
        held.append((x, program(N, N, here(x), here(x))[0]))
    for x, got in held:
        assert torch.equal(there(got), sum(chain(x)))
    assert stats(program)["results_copied"] == 0 and stats(program)["results_direct"] == 1


def test_large_results_of_the_last_operators_are_no_memory_of_a_recording(make: Make) -> None:
    program = make(
        CHAIN + "v = view(d, f32[3] @ (1,), 2)\nreturn (b, v)\n", None, {"d": COPIED_NBYTES}
    )
    held = []
    for k in range(6):
        x = ramp(N, k)
        held.append((x, program(N, N, here(x), here(x))))
    for x, (b, v) in held:
        want_b, want_d = chain(x)
        assert torch.equal(there(b), want_b) and torch.equal(there(v), want_d[2:5])
    assert stats(program)["recorded"] == 1 and stats(program)["replayed"] == 4
    assert stats(program)["results_copied"] == 1  # b
    assert nbytes() == (4 * N, 2 * 4 * N)  # c, and a and b


def test_what_is_saved_stays_and_views_and_shared_memory_are_kept(make: Make) -> None:
    body = (
        CHAIN
        + "v = view(b, f32[3] @ (1,), 2)\nw, = call('aten::alias')(d)\nreturn (v, b, w, d, c)\n"
    )
    program = make(body, 4)
    held = []
    for k in range(6):
        x = ramp(N, k)
        *mine, c = program(N, N, here(x), here(x))
        assert torch.equal(there(c), 2 * chain(x)[0] + 1)
        held.append((x, mine))
        del c  # while it is held, its recording waits
    for x, (v, b, w, d) in held:
        want_b, want_d = chain(x)
        assert (
            torch.equal(there(b), want_b)
            and torch.equal(there(w), want_d)
            and torch.equal(there(d), want_d)
        )
        assert torch.equal(there(v), want_b[2:5]) and v.data_ptr() == b.data_ptr() + 8
        assert w.data_ptr() == d.data_ptr()
    assert stats(program)["results_copied"] == 2


def test_a_recording_serves_all_sizes_that_it_does_not_read(make: Make) -> None:
    program = make(CHAIN + "return (b, s1, 3*s1)\n")
    for n, m in ((N, 5), (N, 6), (N, 7), (N, 8), (9, 8), (9, 7), (9, 6), (N, 5)):
        x = ramp(n)
        b, *sizes = program(n, m, here(x), here(ramp(m)))
        assert torch.equal(there(b), chain(x)[0]) and sizes == [m, 3 * m]
    assert stats(program)["recorded"] == 2 and stats(program)["replayed"] == 4


def test_recordings_know_the_sizes_of_what_they_are_given(make: Make) -> None:
    """a is made by a part that is not recorded; the recorded one meets its size only in its
    shape."""
    program = make(
        "a = alloc(f32[s1] @ (1,), device='cuda:0')\nlaunch('k', (y, a), (s1,), (a,), 1)\n"
        "s2 = read(x, 'offset', 0)\n"
        "b, = call('aten::neg')(a)\nc, = call('aten::neg')(b)\nreturn (c,)\n"
    )
    for m in (5, 6, 5, 6, 5, 6):
        y = ramp(m)
        assert torch.equal(there(program(m, m, here(y), here(y))[0]), 2 * y + 1)
    assert stats(program)["recorded"] >= 2


@pytest.mark.parametrize("offset", ["1", "s1"])
def test_a_view_from_an_earlier_part_is_of_the_copy_that_is_read(make: Make, offset: str) -> None:
    """An operator's input moves and is copied from then on; it is seen through a view that another
    part made."""
    body = f"""\
v = view(x, f32[3] @ (1,), {offset})
a, = call('aten::neg')(v)
b, = call('aten::neg')(a)
call_python(0, 'f')()
c, = call('aten::neg')(v)
d = alloc(f32[3] @ (1,), device='cuda:0')
launch('both', (v, c, d), (3,), (d,), 1)
e, = call('aten::neg')(d)
return (b, c, e, v)
"""
    program, held = make(body, callables=[lambda: None], head=CALLS), []
    for k in range(6):
        x = here(ramp(N, 10 * k))
        held.append((k, x, program(N, 1, x, x)))
    for k, x, (b, c, e, v) in held:
        want = ramp(3, 10 * k + 1)
        assert all(
            torch.equal(there(a), w) for a, w in ((b, want), (c, -want), (e, 0 * want), (v, want))
        )
        assert v.data_ptr() == x.data_ptr() + 4
    assert stats(program)["copied"] == 6 and stats(program)["replayed"] == 6


def test_what_is_seen_from_the_start_of_its_storage_is_not_copied(make: Make) -> None:
    program, held = (
        make(
            "v = view(x, f32[3] @ (1,), 2, relative=False)\n"
            + CHAIN.replace("(x, a)", "(v, a)")
            + "return (d,)\n"
        ),
        [],
    )
    for k in range(6):
        whole = here(ramp(N, 10 * k))
        x = whole.as_strided((3,), (1,), 8)
        held.append((k, x, program(3, 3, x, x)))
    for k, _, (d,) in held:
        assert torch.equal(there(d), chain(ramp(3, 10 * k + 2))[1])
    assert stats(program)["copied"] == 0


def test_recordings_share_memory_that_lives_no_longer_than_a_run(make: Make) -> None:
    """Calls of several programs in any order, whose results are used and let go of later."""
    arena = """\
arena = take_arena(1024, device='cuda:0')
p = place(arena, 0, f32[s0] @ (1,))
launch('k', (x, p), (s0,), (p,), 1)
q = place(arena, 512, f32[s0] @ (1,))
launch('k', (p, q), (s0,), (q,), 1)
d, = call('aten::neg', may_keep=False)(q)
"""
    programs = [
        make(CHAIN + "return (d, b)\n", 1),
        make(CHAIN + "return (d, c)\n", 1),
        make(arena + "return (d,)\n"),
    ]
    rng, held = random.Random(0), []
    for k in range(120):
        at, n = rng.randrange(3), rng.choice([N, N // 2])
        x = ramp(n, k)
        b, d = chain(x)
        want = [(d, b), (d, 2 * b + 1), (-(2 * (2 * x + 1) + 1),)][at]
        held.append((want, programs[at](n, n, here(x), here(x))))
        while len(held) > rng.randrange(4):
            for w, got in zip(*held.pop(rng.randrange(len(held))), strict=True):
                assert torch.equal(there(got), w)
    assert all(stats(p)["replayed"] > 10 and not stats(p)["refused"] for p in programs)


def test_what_is_saved_in_the_memory_of_another_result_is_kept(make: Make) -> None:
    saves = make(
        CHAIN + "w, = call('aten::alias')(b)\nv = view(w, f32[3] @ (1,), 2)\nreturn (d, v)\n", 1
    )
    other = make(CHAIN + "return (d,)\n")
    for k in range(4):
        x = ramp(N, k)
        d, v = saves(N, N, here(x), here(x))
        for _ in range(3):
            other(N, N, here(x + 9), here(x))
        assert torch.equal(there(v), chain(x)[0][2:5]) and torch.equal(there(d), chain(x)[1])
        del v
    assert stats(saves)["replayed"] == 2


# A forward pass that saves b, c and v, a view of d, and its backward pass.
SAVES = (
    CHAIN + "v = view(d, f32[s0] @ (1,), 0)\ne, = call('aten::neg')(d)\nreturn (e, b, c, v, s0)\n"
)
SPENDS_HEAD = """\
program('q')
s0 = symbol()
s1 = symbol()

s0 = int_input()
b = tensor_input(f32[s0] @ (1,), device='cuda:0')
c = tensor_input(f32[s0] @ (1,), device='cuda:0')
v = tensor_input(f32[s0] @ (1,), device='cuda:0')
g = tensor_input(f32[s0] @ (1,), device='cuda:0')

kernel('both', 3, 1, device='cuda:0')
"""
SPENDS = """\
p = alloc(f32[s0] @ (1,), device='cuda:0')
launch('both', (g, v, p), (s0,), (p,), 1)
q = alloc(f32[s0] @ (1,), device='cuda:0')
launch('both', (p, c, q), (s0,), (q,), 1)
r = alloc(f32[s0] @ (1,), device='cuda:0')
launch('both', (q, b, r), (s0,), (r,), 1)
t = alloc(f32[s0] @ (1,), device='cuda:0')
launch('both', (p, q, t), (s0,), (t,), 1)
u = alloc(f32[s0] @ (1,), device='cuda:0')
launch('both', (r, t, u), (s0,), (u,), 1)
w, = call('aten::neg')(u)
return (None, None, w, None)
"""
LARGE = 1 << 18  # 1 MiB


class Passes:
    """A differentiable function of x, and what its backward pass should give."""

    def __init__(self, make: Make, *backward: Any) -> None:
        self.forward = make(SAVES, 1)
        self.backward = backward or [make(SPENDS, None, None, SPENDS_HEAD) for _ in range(2)]
        self.call = _native.Training(
            self.forward, None, self.backward.__getitem__, None, [True], 3, 1,
            ["contiguous_format"], [(2, [0])], False, [], [], False,
        )  # fmt: skip

    def __call__(self, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        x = here(ramp(n, k)).requires_grad_()
        y = self.call(n, n, x, here(ramp(1)))
        b, d = chain(ramp(n, k))
        assert torch.equal(there(y[0].detach()), -d)
        return x, y[0], -(3 * d + 2 * (2 * b + 1) + b)

    @staticmethod
    def back(made: tuple[Tensor, Tensor, Tensor], k: int, retain: bool = False) -> None:
        x, y, want = made
        g = ramp(len(x), k)
        (got,) = torch.autograd.grad(y, x, here(g), retain_graph=retain)
        assert torch.equal(there(got), want - 3 * g)


def test_dead_saved_tensors_are_memory_of_the_backward_pass(make: Make) -> None:
    passes = Passes(make)
    for k in range(6):
        passes.back(passes(LARGE, k), 2 * k)
    assert nbytes() == (
        0,
        4 * LARGE,
    )  # of the backward pass. What p and w need, a and e did; v, c and b lie elsewhere
    for program in (passes.forward, passes.backward[True]):
        assert (
            stats(program)["recorded"] == 1
            and stats(program)["replayed"] == 4
            and not stats(program)["refused"]
        )
    twice = passes(LARGE, 1)
    for k in range(3):
        passes.back(twice, k, retain=True)
    assert nbytes() == (0, 4 * 4 * LARGE) and stats(passes.backward[False])["replayed"] == 1


def test_a_recording_goes_with_the_memory_that_it_was_lent(make: Make) -> None:
    backward = Passes(make).backward
    for k in range(1, 3):
        passes = Passes(make, *backward)
        for _ in range(3):
            passes.back(passes(LARGE, k), k)
        assert stats(backward[True])["recorded"] == k


@pytest.mark.parametrize("seed", range(4))
def test_passes_in_any_order(make: Make, seed: int) -> None:
    """Several forward passes at once, whose backward passes come in any order, some of them
    twice."""
    rng = random.Random(seed)
    passes, other = Passes(make), make(CHAIN + "return (d, c)\n", 1)
    pending: list[tuple[Tensor, Tensor, Tensor]] = []
    for k in range(60):
        n = rng.choice([LARGE, LARGE, 5])
        if len(pending) < 3 and rng.random() < 0.5:
            pending.append(passes(n, k))
        elif rng.random() < 0.3:
            got = other(n, n, here(ramp(n, k)), here(ramp(1)))
            assert torch.equal(there(got[0]), chain(ramp(n, k))[1])
        elif pending:
            at, retain = rng.randrange(len(pending)), rng.random() < 0.3
            passes.back(pending[at] if retain else pending.pop(at), k, retain)
    assert stats(passes.forward)["replayed"] > 3 and stats(passes.backward[True])["replayed"] > 3
    assert not stats(passes.forward)["refused"] and not stats(passes.backward[True])["refused"]


def test_calls_in_turn_share_the_recording_of_their_backward_pass(make: Make) -> None:
    """Such as those of a block that a model has many of: each saves what it saves in other memory.
    The first recording borrows from one of them, the next from none."""
    passes = Passes(make)
    for k in range(8):
        made = [passes(LARGE, 6 * k + j) for j in range(6)]
        for j in reversed(range(6)):
            passes.back(made.pop(), 6 * k + j)
    backward = stats(passes.backward[True])
    assert backward["recorded"] <= 3 and backward["replayed"] >= 40, backward
    assert backward["refused"] == {}


def test_a_recording_waits_for_calls_that_ran_beside_others(make: Make) -> None:
    """Such a call may still read on its stream what a recording keeps, and is about to write."""
    x, calls = here(ramp(N)), [lambda: None]
    outer = make(
        CHAIN + "call_python(0, 'f')()\nreturn (d,)\n", callables=[lambda: calls[-1]()], head=CALLS
    )
    inner = make(CHAIN + "return (d, c)\n", 1)

    def on_stream(program: Any, number: int) -> bytes:
        gpu.fake_stream(number)
        program(N, N, x, x)
        gpu.fake_stream(0)
        return bytes(gpu.fake_waits())

    on_stream(outer, 1)
    assert [on_stream(inner, k) for k in (1, 2, 1)] == [b"", b"21 ", b"12 "]
    calls.append(lambda: on_stream(inner, 3))
    assert on_stream(outer, 1) == b"" and stats(inner)["bypassed"] == 1
    calls.pop()
    assert (
        on_stream(inner, 1) == b"13 "
        and on_stream(inner, 1) == b""
        and on_stream(inner, 3) == b"31 "
    )


def test_recordings_that_do_not_fit_give_way_to_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(CHAIN + "return (d, c)\n", 1), make(CHAIN + "return (b, c)\n", 1)
    x = ramp(N)
    monkeypatch.setattr(
        Capture, "limit", 8 * 4 * N
    )  # 6 N floats for what all share, and what one keeps
    for _ in range(3):
        for n in (N, 2 * N):
            assert torch.equal(there(first(n, n, here(ramp(n)), here(x))[0]), chain(ramp(n))[1])
        assert torch.equal(there(second(N, N, here(x), here(x))[0]), chain(x)[0])
    assert (
        stats(first)["recorded"] == 4
        and stats(first)["replayed"] == 0
        and stats(first)["refused"] == {}
    )
    assert stats(second)["recorded"] == 2


def test_a_recording_larger_than_all_may_be_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = make(CHAIN + "return (b, d)\n")
    monkeypatch.setattr(Capture, "limit", 4 * N)
    refuses(
        program,
        "it would hold 0 MiB, all recordings 0 MiB, and those of a device may hold 0 MiB",
        caplog,
    )


def refuses(program: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    module.refusals.clear()
    held = []
    for k in range(4):
        x = ramp(N, k)
        held.append((x, program(N, N, here(x), here(x))))
    for x, got in held:
        for g, want in zip(got, chain(x), strict=True):
            assert torch.equal(there(g), want)
    assert stats(program)["recorded"] == 0 and stats(program)["refused"] == {"1": why}
    assert module.refusals == {"p": {1: why}}
    said = [r.getMessage() for r in caplog.records if r.name == "plait"]
    assert said == [f"p: part 1 runs without a CUDA graph: {why}"]
    assert explain(torch.neg, x, quiet=True).given_up == (f"p, part 1: {why}",)


def test_running_out_of_memory_while_recording(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.fake_limit(ctypes.c_int64(4 * N))
    refuses(make(CHAIN + "return (b, d)\n"), "CUDA out of memory", caplog)


FULL = (
    "it has {} recordings of 0 MiB, in use or of other sizes: with one more, all recordings 0 MiB, "
    "and those of a device may hold 0 MiB"
)


def test_many_sizes(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as the memory holds; a further one runs without, and drives none out."""
    program = make(CHAIN + "return (d, c)\n", 1)
    module.refusals.clear()
    monkeypatch.setattr(Capture, "limit", 2 * 256 + 25 * 256)  # what all share, and each has
    for _ in range(3):
        before = stats(program)
        for n in range(2, 42):
            x = ramp(n)
            assert torch.equal(there(program(n, n, here(x), here(x))[0]), chain(x)[1])
    found = stats(program)
    recorded = found["recorded"]
    assert recorded == 25 and before["recorded"] == recorded, found
    assert found["replayed"] == recorded and before["replayed"] == 0, found
    assert found["refused"] == {"1": FULL.format(25)} == {"1": module.refusals["p"][1]}, found
    assert len(caplog.records) == 1, caplog.records


def test_sizes_without_end(make: Make) -> None:
    program = make(CHAIN + "return (b, d)\n")
    for n in range(2, 1030):
        x = ramp(n)
        assert torch.equal(there(program(n, n, here(x), here(x))[1]), chain(x)[1])
    assert stats(program)["refused"] == {"1": "it was met with more than 1024 sizes"}


def test_results_of_many_recordings_in_use(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So many as the memory holds; a further call runs without until some are free."""
    program = make(CHAIN + "return (d, c)\n", 1)
    module.refusals.clear()

    def calls(n: int) -> None:
        held = []
        for k in range(n):
            x = ramp(N, k)
            held.append((x, program(N, N, here(x), here(x))))
        for x, (d, c) in held:
            assert torch.equal(there(d), chain(x)[1]) and torch.equal(there(c), 2 * chain(x)[0] + 1)

    calls(40)
    found = stats(program)
    assert found["recorded"] == 39 and found["refused"] == {}, found
    monkeypatch.setattr(Capture, "limit", 4 * N * 50)
    calls(60)
    found = stats(program)
    recorded = found["recorded"]
    assert 40 <= recorded < 60 and found["refused"] == {"1": FULL.format(recorded)}, found
    calls(60)
    again = stats(program)
    assert again["recorded"] == recorded and again["replayed"] == found["replayed"] + recorded
    assert len(caplog.records) == 1, caplog.records
    assert explain(torch.neg, ramp(N), quiet=True).given_up == (
        f"p, part 1: {FULL.format(recorded)}",
    )


def test_a_recording_that_cannot_be_changed_is_given_up(make: Make) -> None:
    program = make(CHAIN + "return (b, d)\n")
    gpu.fake_refuse_copies(1)
    try:
        held = []
        for k in range(4):
            x = ramp(N, k)
            held.append((x, program(N, N, here(x), here(x))))
    finally:
        gpu.fake_refuse_copies(0)
    for x, got in held:
        for g, want in zip(got, chain(x), strict=True):
            assert torch.equal(there(g), want)
    assert stats(program)["recorded"] == 1 and stats(program)["replayed"] == 0
    assert stats(program)["refused"] == {"1": "cuGraphExecMemcpyNodeSetParams: out of luck (1)"}


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(make: Make, seed: int) -> None:
    """Operators, kernels, parts, views and names of one memory in any order; some results saved,
    some held."""
    rng = random.Random(seed)
    names, lines, code = ["x"], [], []
    for k in range(rng.randint(3, 12)):
        a, b, made = rng.choice(names), rng.choice(names), f"v{k}"
        names.append(made)
        match rng.choice(["k", "both", "neg", "neg", "out", "alias", "view", "part"]):
            case "part":
                lines.append("call_python(0, 'f')()")
                names.pop()
            case "view":
                lines.append(f"{made} = view({a}, f32[s0] @ (1,), 0)")
                code.append(f"{made} = {a}")
            case "k":
                lines += [
                    f"{made} = alloc({SHAPE})",
                    f"launch('k', ({a}, {made}), (s0,), ({made},), 1)",
                ]
                code.append(f"{made} = 2 * {a} + 1")
            case "both":
                lines += [
                    f"{made} = alloc({SHAPE})",
                    f"launch('both', ({a}, {b}, {made}), (s0,), ({made},), 1)",
                ]
                code.append(f"{made} = {a} + {b}")
            case "neg":
                lines.append(f"{made}, = call('aten::neg')({a})")
                code.append(f"{made} = -{a}")
            case "out":
                out = f"call('aten::neg.out', into=({made},), may_keep=False)({a}, out={made})"
                lines += [f"{made} = alloc({SHAPE})", out]
                code.append(f"{made} = -{a}")
            case _:
                lines.append(f"{made}, = call('aten::alias')({a})")
                code.append(f"{made} = {a}")
    lines.append(f"v = view({names[-1]}, f32[2] @ (1,), 1)")
    code.append(f"v = {names[-1]}[1:3]")
    wanted = [*rng.sample(names[1:], rng.randint(1, len(names) - 1)), "v"]
    lines.append(f"return ({', '.join(wanted)},)\n")
    n_results = rng.choice([None, rng.randint(0, len(wanted))])
    program = make("\n".join(lines), n_results, head=CALLS, callables=[lambda: None])
    held = []
    for k in range(14):
        n = rng.choice([5, 9])
        x = ramp(n, k)
        got = program(n, 4, here(x), here(x))
        held.append((x, list(zip(wanted, got, strict=True))))
        if rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        for given, results in held:
            known = {"x": given}
            exec("\n".join(code), known)
            for name, result in results:
                assert torch.equal(there(result), known[name]), (name, lines)
    refused = program.stats().get("graphs", {"refused": {}})[
        "refused"
    ]  # parts may all be too small
    assert not refused, refused


# Control flow: on x, y and i, of one element, of which the kernels make others.
INPUTS = """\
i = tensor_input(f32[1] @ (1,), device='cuda:0')
x = tensor_input(f32[64] @ (1,), device='cuda:0')
y = tensor_input(f32[64] @ (1,), device='cuda:0')

kernel('k', 2, 1, device='cuda:0')
kernel('both', 3, 1, device='cuda:0')

"""
IS_SMALL = "p, = call('aten::lt.Scalar')(i, 5)\n"
ADDED = "a = alloc(f32[64] @ (1,), device='cuda:0')\nlaunch('both', (x, y, a), (64,), (a,), 1)\n"
TURNED = "b, = call('aten::neg')(y)\nc, = call('aten::neg')(b)\nd, = call('aten::neg')(c)\n"
NEXT = "j = alloc(f32[1] @ (1,), device='cuda:0')\nlaunch('k', (i, j), (1,), (j,), 1)\n"
COND = "e, = call_programs('cond', (0, 1), 0, 0, 'cond')(p, i, x, y)\n"
LOOP = "k, v, w = call_programs('loop', (0, 1), 3, 0, 'loop')(i, x, y)\n"
BRANCHES = ADDED + "return (a,)\n", TURNED + "return (d,)\n"
CONTROL_HEAD = "program('p')\n\n" + INPUTS


def subprograms(*bodies: str) -> str:
    """They stand behind the program that runs them."""
    return "".join(
        f"\ndef subprogram_{k}():\n" + indent(f"program('q{k}')\n\n{INPUTS}{body}", "    ")
        for k, body in enumerate(bodies)
    )


def branched(i: float, x: Tensor, y: Tensor) -> Tensor:
    return x + y if i < 5 else -y


@pytest.mark.parametrize("given", [False, True])
def test_a_graph_decides_which_branch_runs(make: Make, given: bool) -> None:
    """given: one branch returns what it is given."""
    branches = (BRANCHES[0], "return (y,)\n") if given else BRANCHES
    body = IS_SMALL + COND + "f, = call('aten::neg')(e)\nreturn (e, f)\n"
    program = make(body + subprograms(*branches), head=CONTROL_HEAD)
    held = []
    for k, i in enumerate((1, 1, 9, 1, 9, 9, 5)):
        x, y = ramp(64, k), ramp(64, 3 * k)
        want = y if given and i >= 5 else branched(i, x, y)
        held.append((want, program(here(torch.tensor([float(i)])), here(x), here(y))))
    for want, (e, f) in held:
        assert torch.equal(there(e), want) and torch.equal(there(f), -want)
    made = stats(program)
    assert (made["recorded"], made["replayed"], made["refused"]) == (1, 5, {})


def test_a_graph_decides_how_often_a_loop_runs(make: Make) -> None:
    """Each round reads what the one before it left, also where two results change places; in it,
    branches decide again."""
    inner = IS_SMALL.replace("5", "2") + COND + NEXT + "return (j, y, e)\n"
    body = LOOP + "z, = call('aten::neg')(w)\nreturn (k, v, w, z)\n"
    nested = subprograms(IS_SMALL + "return (p,)\n", inner + subprograms(*BRANCHES))
    program = make(body + nested, head=CONTROL_HEAD)
    held = []
    for k, i in enumerate((0, 0, 9, 1, 0, 3, 9)):
        x, y = ramp(64, k), ramp(64, 3 * k)
        held.append((float(i), x, y, program(here(torch.tensor([float(i)])), here(x), here(y))))
    for i, x, y, got in held:
        while i < 5:
            i, x, y = 2 * i + 1, y, x + y if i < 2 else -y
        for g, want in zip(got, (torch.tensor([i]), x, y, -y), strict=True):
            assert torch.equal(there(g), want)
    made = stats(program)
    assert (made["recorded"], made["replayed"], made["refused"]) == (1, 5, {})


def test_branches_of_other_sizes_are_not_recorded(make: Make) -> None:
    shorter = "v = view(y, f32[3] @ (1,), 2)\nreturn (v,)\n"
    body = IS_SMALL + COND + "return (e,)\n"
    program = make(body + subprograms(BRANCHES[0], shorter), head=CONTROL_HEAD)
    for i in (1, 9, 1, 9):
        x, y = ramp(64, i), ramp(64, 3 * i)
        (got,) = program(here(torch.tensor([float(i)])), here(x), here(y))
        assert torch.equal(there(got), x + y if i < 5 else y[2:5])
    made = stats(program)
    assert made["recorded"] == 0 and "not always the same size" in str(made["refused"])
    chained = make(CHAIN + "return (d,)\n")  # what failed left nothing behind
    for k in range(4):
        x = ramp(N, k)
        assert torch.equal(there(chained(N, N, here(x), here(x))[0]), chain(x)[1])
    assert stats(chained)["replayed"] == 2
