"""The parts of the graph fuzzer: what it draws, what it takes for a fault, crashes, states,
shrinking and repros."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.tools.faults.measure import jitter
from tests import warm
from tests.fuzz.__main__ import run
from tests.fuzz.check import Fault, _Run, check, compare
from tests.fuzz.make import generate
from tests.fuzz.maker import Maker
from tests.fuzz.pool import Worker
from tests.fuzz.program import Call, Line, Operand, Program, Road
from tests.fuzz.shrink import shrink
from tests.fuzz.traced import traced_strides


def test_programs_are_of_their_seed_and_read_back() -> None:
    for seed in range(40):
        p = generate(seed)
        assert p.source() == generate(seed).source()
        assert Program.loads(p.dumps()) == p


def test_every_class_is_drawn() -> None:
    """In the programs of a few hundred seeds."""
    ops = (
        "scatter add", "scatter reduce", "index add", "index reduce", "index put", "index copy",
        "masked", "gather", "data-dependent size", "item", "check", "sizes", "positions", "casts",
        "dtype views", "in place", "aliases", "products", "layers", "refused", "promotion", "sums",
        "complex", "integers", "extremes", "means", "moves", "changed later",
    )  # fmt: skip
    layouts = (
        "expanded",
        "overlapping",
        "windows",
        "one",
        "stepped",
        "shifted",
        "transposed",
        "alias",
    )
    others = (
        "empty", "sizes change", "sizes change to or from 0 or 1", "positions change",
        "data change", "threads", "grad: backward", "grad: forward", "parameters replaced",
        "values: special", "wrapper: fx", "wrapper: cpp", "road: package, static sizes",
        "road: direct, dynamic sizes", "isa: portable",
    )  # fmt: skip
    want = {f"op: {x}" for x in ops} | {f"layout: {x}" for x in layouts} | set(others)
    want |= {
        f"dtype: {x}"
        for x in ("float64", "float16", "bfloat16", "int8", "uint8", "bool", "complex64")
    }
    for seed in range(400):
        want -= generate(seed).classes()
        if not want:
            break
    assert not want


def made(text: str, *operands: Operand, road: Road | None = None, **line: Any) -> Program:
    """A program of one statement that is called twice."""
    calls = (Call(1, {"n": 5}, {}), Call(2, {"n": 7}, {}))
    return Program(0, operands, (Line("t1", text, "test", **line),), ("t1",), calls, road or Road())


@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_number_is_found(exact: bool) -> None:
    e = torch.tensor([1.0, 2.0, 3.0])
    near = e.clone()
    near[1] = 2.0000002
    truth = e.double()
    compare(e, e.clone(), truth, exact, "same")
    with pytest.raises(Fault, match="wrong: "):
        compare(e, e + torch.tensor([0, 1.0, 0]), truth, exact, "off")
    if exact:
        with pytest.raises(Fault, match="wrong: "):
            compare(e, near, truth, exact, "near")
    else:
        compare(e, near, truth, exact, "near")
    with pytest.raises(Fault, match="strides: "):
        compare(torch.zeros(2, 3), torch.zeros(3, 2).T, None, exact, "strides")
    with pytest.raises(Fault, match="shape: "):
        compare(e, e.double(), truth, exact, "dtype")


ONES = "torch.ones({n}, dtype=torch.{dtype})"
SUMS = {
    "scatter_add": "torch.zeros(16, dtype=torch.{dtype}).scatter_add(0, {i}.expand({n}), {ones})",
    "index_put": "torch.zeros(16, dtype=torch.{dtype}).index_put(({i}.expand({n}),), {ones}, "
    "accumulate=True)",
    "a value that is spread": "torch.zeros(16, dtype=torch.{dtype}).index_add(0, {i}.expand({n}), "
    "{x}.expand({n}))",
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(
    ("dtype", "n", "exact"),
    [
        ("bfloat16", 63, True),
        ("bfloat16", 1000, False),
        ("float16", 250, True),
        ("float16", 3000, False),
        ("float32", 3000, True),
        ("int8", 3000, True),
    ],
)
def test_a_sum_of_more_numbers_than_a_type_counts_is_not_exact(
    name: str, dtype: str, n: int, exact: bool
) -> None:
    """In bfloat16 eager stays at 256 = 256 + 1. The numbers are the statement's own: its operands
    have one element."""
    m = Maker(random.Random(0), [Call(1, {}, {})], (dtype,), 0.0)
    i, x = m.operand((), "int64", "index", "16"), m.operand((), dtype, "whole")
    ones = ONES.format(n=n, dtype=dtype)
    assert m.add("test", SUMS[name].format(n=n, dtype=dtype, i=i, x=x, ones=ones), exact="whole")
    assert m.lines[-1].exact == exact


def test_what_rounding_decides_among_equal_numbers_is_no_fault() -> None:
    """All keys are one huge number, so a query's gradient is what is left of terms that cancel,
    times that number. Keys that were nudged apart would leave nothing at all."""
    shape = ("n", "1", "8", "1")
    q, v = (
        Operand(name, "float64", shape, values="normal", layout=layout, grad=True)
        for name, layout in (("a1", "rotated"), ("a3", "expanded_last"))
    )
    k = Operand("a2", "float64", shape, values="huge", layout="one")
    text = "F.scaled_dot_product_attention(a1, a2, a3)"
    found = check(made(text, q, k, v, road=Road(grad="backward"), exact=False))
    assert found.kind == "ok", found.what


def test_nudges_keep_what_is_one_number_in_memory_one() -> None:
    x = torch.randn(3, 1, 2, generator=torch.Generator().manual_seed(1)).expand(3, 4, 2)
    moved = jitter(x, 2.0**-24, 0)
    assert moved.dtype == torch.float64
    assert bool((moved == moved[:, :1]).all()) and bool((moved != x).all())
    assert bool(((moved - x).abs() <= x.abs() * 2.0**-24).all())
    same = jitter(torch.ones(3, 4), 2.0**-24, 0)  # 12 numbers
    assert same.unique().numel() == 12


def test_what_eager_refuses_must_be_refused() -> None:
    a = Operand("a1", shape=("n", "4"))
    assert check(made("a1 @ a1", a)).kind == "refused"
    assert check(made("a1.sum(1)", a)).kind == "ok"


def test_what_no_result_needs_may_be_wrong() -> None:
    """An index out of bounds: only the size of what it reads is returned."""
    lines = (
        Line("t1", "a1[a2]", "gather"),
        Line("t2", "torch.cat([t1, t1])", "moves"),
        Line("s3", "t2.shape[0]", "sizes"),
        Line("t4", "a1 * 2", "pointwise"),
    )
    operands = (Operand("a1", shape=("3",)), Operand("a2", "int64", ("2",), values="index"))
    calls = (Call(0, {}, {}),)
    p = Program(0, (operands[0], replace(operands[1], bound="9")), lines, ("s3", "t4"), calls)
    assert check(p).kind == "declined"
    assert check(replace(p, outputs=("t2", "s3"))).kind == "refused"


def test_a_crash_is_an_answer(tmp_path: Path) -> None:
    worker = Worker(cache=str(tmp_path))
    crash = made("__import__('os').abort()", Operand("a1", shape=("n",)))
    hang = made("__import__('time').sleep(600)", Operand("a1", shape=("n",)))
    fine = made("a1 * 2", Operand("a1", shape=("n",)))
    found = worker.ask({"program": crash.dumps()})
    assert found["kind"] == "crash" and "SIGABRT" in found["what"]
    assert worker.ask({"program": fine.dumps()})["kind"] == "ok"
    worker.seconds = 1
    assert worker.ask({"program": hang.dumps()})["kind"] == "hang"
    worker.close()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    first = run(2, state, 1, 0, "cpu", 600)
    both = run(4, state, 1, 0, "cpu", 600)
    assert (first["next"], both["next"]) == (2, 4)
    assert sum(both["kinds"].values()) == 4


class Failing:
    """A worker whose programs fail where they hold a sum over an expanded tensor."""

    def ask(self, request: dict[str, str]) -> dict[str, str]:
        p = Program.loads(request["program"])
        names = {o.name for o in p.operands if o.layout == "expanded"}
        bad = any("sum" in line.text and line.reads & names for line in p.lines)
        return {"kind": "fault" if bad else "ok", "what": "wrong: made up"}


def test_failures_are_shrunk() -> None:
    a, b = (
        Operand("a1", "float64", ("n", "3"), "expanded", "special"),
        Operand("a2", shape=("n",), layout="stepped"),
    )
    lines = (
        Line("t1", "a2 * 2", "test"), Line("t2", "a1.sum(0)", "test"),
        Line("t3", "t1.sum() + t2", "test"), Line("", "a2.add_(1)", "test"),
        Line("t4", "t3.exp()", "test", False),
    )  # fmt: skip
    calls = tuple(Call(k, {"n": 5 + k}, {}) for k in range(3))
    p = Program(
        0, (a, b), lines, ("t1", "t4"), calls, Road(wrapper="fx", isa="avx2", grad="backward")
    )
    worker: Any = Failing()
    small = shrink(p, {"kind": "fault", "what": "wrong: made up"}, worker)
    assert [line.text for line in small.lines] == ["a1.sum(0)"]
    assert [(o.name, o.dtype, o.layout, o.values) for o in small.operands] == [
        ("a1", "float32", "expanded", "whole")
    ]
    assert len(small.calls) == 1 and small.road == Road()


def test_a_failure_prints_a_program_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Operand("a1", shape=("n", "4"), layout="transposed")
    text = made("torch.softmax(a1, 0)", a, road=Road(dynamic=None), exact=False).repro()
    file = tmp_path / "repro.py"
    file.write_text(text)
    root = Path(__file__).parent.parent
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "PLAIT_CACHE_DIR": str(tmp_path)}
    done = warm.run(file, env=env)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stdout + done.stderr

    labels = iter(range(100))

    def differs(*args: object) -> None:
        raise Fault(f"label {next(labels)}: made up")

    monkeypatch.setattr("tests.fuzz.check.compare", differs)
    with pytest.raises(Fault, match="made up"):
        exec(compile(text, str(file), "exec"), {"__name__": "__main__", "__file__": str(file)})


def test_strides_that_tracing_promises_are_known() -> None:
    def written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        y.cumsum_(0)
        return y, x.cumsum(0), x + 1

    def found(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.relu((x.nonzero() * 2).unfold(-2, 2, 1)),)

    x = torch.ones(3, 2).T
    assert traced_strides(written, [x], written(x)) == [(3, 1), (3, 1), (1, 2)]
    assert written(x)[0].stride() == (1, 2)
    y = torch.ones(4)
    assert traced_strides(found, [y], found(y)) == [(1, 1, 3)]
    assert traced_strides(lambda x: (x.tolist(),), [y], [[1.0] * 4]) == [None]


def test_strides_as_traced_are_no_fault_but_numbers_are() -> None:
    p = made("(a1 * 2).cumsum_(0)", Operand("a1", shape=("n", "n"), layout="transposed"))
    assert check(p).kind == "torch"
    run = _Run(p.source(), p.road, (), (), "cpu")
    call = run.calls[0]
    eager = run.call(run.f, call)
    as_traced = eager.results[0].contiguous()
    run._same(call, eager, replace(eager, results=[as_traced]))
    assert run.traced.startswith("strides: output 0")
    with pytest.raises(Fault, match="wrong: "):
        run._same(call, eager, replace(eager, results=[as_traced + 1]))
    with pytest.raises(Fault, match="strides: "):
        run._same(call, eager, replace(eager, results=[torch.cat([as_traced] * 2, 1)[:, ::2]]))
