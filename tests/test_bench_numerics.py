"""What `python -m benchmarks.numerics` compares: rows alone and among others, bits, what is left to
do, and its page. The figures of the page are made up."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.numerics import __main__ as command
from benchmarks.numerics import page, programs
from benchmarks.numerics.worker import Compared, Rows, Timed, digest
from benchmarks.suite import records as book
from benchmarks.suite.models import Model, Plain, normal
from benchmarks.suite.run import say


class Mixed(nn.Module):
    """A product with weights; mixes: with something of the other rows."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.weight, self.mixes = nn.Parameter(torch.randn(16)), mixes

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        return y - 1e-3 * y.sum(0) if self.mixes else y


def subject(mixes: bool = False, dtype: str = "float32") -> programs.Subject:
    model = Model("mixed", "text", lambda small: Plain(Mixed(mixes)), {"x": normal(16)}, 4, cpu=4)
    return programs.Subject(model, dtype, "cpu", small=False)


def test_bits_are_compared_with_the_signs_of_zeros() -> None:
    a = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    b = torch.tensor([-0.0, 1.0, float("nan"), 2.5])
    assert programs.differing(a, a.clone()) == 0
    assert programs.differing(a, b) == 2
    assert programs.differing(a, a.double()) == 4
    assert programs.differing(torch.complex(a, b), torch.complex(a, a)) == 2
    assert digest([a]) == digest([a.clone()]) != digest([b])


def test_a_row_is_taken_from_the_first_and_the_last_place() -> None:
    alone, among = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0], [5.0, 6.0], [1.0, 2.5]])
    assert [programs.differing(*p) for p in programs.same_row("batch", alone, among)] == [0, 1]
    assert [programs.differing(*p) for p in programs.same_row("padded", alone, among)] == [0]
    products = torch.arange(9.0).view(3, 3)  # of all rows with all: the first and the last remain
    pairs = programs.same_row("batch", torch.zeros(1, 1), products)
    assert [b.item() for _, b in pairs] == [0.0, 8.0]
    assert programs.same_row("batch", torch.zeros(()), torch.zeros(())) == []


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_that_depend_on_others_are_found(mixes: bool) -> None:
    rows = Rows(subject(mixes), "batch")
    first = rows.inputs["1"][0]
    assert all(torch.equal(x[:1], first) and torch.equal(x[-1:], first) for (x,) in
               rows.inputs.values())  # fmt: skip
    assert [len(x) for (x,) in rows.inputs.values()] == list(programs.BATCHES)
    found = rows.variant("eager")
    assert found["of"] == 32 and list(found["differ"]) == ["2", "7", "32"]
    assert (found["differ"]["32"] > 0) is mixes


@pytest.mark.parametrize("train", [False, True])
def test_bits_errors_and_digests_of_a_model(train: bool) -> None:
    held = Compared(subject(dtype="bfloat16").case(train))
    eager, ours = held.variant("eager"), held.variant("plait-eager")
    assert eager["differ"] == ours["differ"] == 0 and eager["digest"] == ours["digest"]
    assert eager["error"] == eager["own"] > 0 and eager["again"]
    assert eager["typical"] == eager["own_typical"] > 0
    with torch.no_grad():
        held.wants[0].neg_()
    assert held.variant("eager")["differ"] == held.wants[0].numel()


def test_norms_and_biases_are_drawn() -> None:
    model = Model(
        "norm", "text", lambda small: Plain(nn.BatchNorm1d(8)), {"x": normal(8)}, 4, cpu=4
    )
    one, two = (programs.Subject(model, "float32", "cpu", False).case(False) for _ in range(2))
    first, second = one.build()[0].state_dict(), two.build()[0].state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert all(len(x.unique()) == 8 for x in first.values() if x.dim())
    assert 0.75 <= first["model.running_var"].min() <= first["model.running_var"].max() <= 1.25


def test_parts_fit_the_model() -> None:
    found = programs.subjects("cpu", small=True)
    on_gpu = programs.subjects("cuda", small=False)
    assert set(on_gpu["gpt2/float32"].parts()) == set(programs.PARTS)
    assert set(found["gpt2/float32"].parts()) == set(programs.PARTS) - {"graphs"}
    assert not {"graphs", "train-cost"} & set(on_gpu["bert/bfloat16"].parts())
    assert "padded" not in found["resnet18/bfloat16"].parts()
    assert (
        "prefix" not in found["bert/bfloat16"].parts()
        and "padded" in found["bert/bfloat16"].parts()
    )
    assert "batch" not in found["graph_attention/bfloat16"].parts()
    assert sorted(p for job in programs.JOBS for p in job) == sorted(programs.PARTS)
    assert {"llama/float32", "llama/bfloat16", "resnet18/float32"} <= set(on_gpu)
    assert "xlnet/float32" not in on_gpu
    llama = found["llama/bfloat16"]
    assert llama.timed("train-cost").train and not llama.timed("graphs").train
    for part, rows in programs.TOKENS.items():
        assert part in llama.parts() and part not in found["bert/bfloat16"].parts()
        timed = llama.timed(part)
        assert [x.make(timed.batch).shape for x in timed.model.inputs.values()] == [(rows, 1)]
    case = llama.case(False)
    assert programs.lengths(case) == (18, 25, 48) and case.batch == 2


def record(case: str, **parts: Any) -> book.Record:
    """A row as the command writes it."""
    key = {"torch": "t", "device": "CPU: 2 x AMD", "small": True}
    about = {"field": "text", "library": "transformers", "date": "2026-01-01T00:00:00+00:00"}
    for variants in parts.values():
        for found in variants.values():
            found |= {"plait": "p", "commit": "c"}
    return {"case": case, "parts": parts, **about, **key}


def figures(differ: int, error: float, digest: str, again: bool = True) -> dict[str, Any]:
    return {
        "differ": differ, "of": 100, "error": error, "own": 0.5, "again": again, "digest": digest,
        "truth": "torch.float64", "typical": error, "own_typical": 0.5,
    }  # fmt: skip


def rows() -> list[book.Record]:
    """Two models: one as promised, one where everything goes wrong."""
    same, other = figures(0, 0.5, "a"), figures(7, 1.0, "b", again=False)
    batch = {"differ": {"2": 0, "32": 5}, "of": 100, "alone": "1"}
    fine = {"differ": {"2": 0, "32": 0}, "of": 100, "alone": "1"}
    good = record(
        "gpt2/bfloat16",
        infer=dict.fromkeys(("eager", "traced", "autograd", "plait-eager"), same)
        | {"plait": figures(9, 0.25, "c"), "plait-precise": figures(9, 0.4, "d")},
        other={"plait": figures(9, 0.25, "c")},
        batch={"eager": batch, "plait-invariant": fine},
        cost={"plait": {"ms": 2.0}, "eager": {"ms": 4.0}},
        graphs={"plait": {"ms": 1.0}, "plait-eager": {"ms": 1.5}},
        **{"token-32": {"plait": {"ms": 0.5}, "plait-invariant": {"ms": 0.6}}},
    )
    bad = record(
        "bert/bfloat16",
        infer={"eager": same, "traced": other, "autograd": other, "plait-eager": other}
        | {"plait": other, "plait-precise": other},
        other={"plait": figures(9, 0.25, "x")},
        batch={"eager": fine, "plait-invariant": {"failed": "CompileError: why"}},
    )
    return [bad, good]


def cells(text: str, *starts: str) -> list[str]:
    """The cells of the row that starts so, without them."""
    for line in text.splitlines():
        found = [c.strip() for c in line.split("|")[1:-1]]
        if found[: len(starts)] == list(starts):
            return found[len(starts) :]
    raise AssertionError(f"no row {starts} in\n{text}")


def test_the_page_says_what_the_records_say() -> None:
    known = {"bert/bfloat16/infer": "a known cause"}
    known["bert/bfloat16/batch/plait-invariant"] = "mended"
    text = page.section({r["case"]: r for r in rows()}, known)
    flat = " ".join(text.split())
    want = ["1 of 2", "1 of 1", "1.414", "1.414", "2.00", "0 of 2"]
    assert cells(text, "inference, bfloat16", 'numerics="eager"') == want
    assert cells(text, "inference, bfloat16", '"precise"')[-1] == "1 of 2"
    assert "- bert/bfloat16, inference: 7.0% differ: the bits of what is traced (traced); a known" \
        " cause" in flat  # fmt: skip
    line = "- bert/bfloat16, inference: 2.000 times eager's, 2.000 times for the median vector"
    assert line in flat
    changed = rows()
    changed[0]["parts"]["other"]["plait"]["plait"] = "q"  # not the same program, nor the same bits
    part = page.each_time(changed)
    assert cells(part, "inference, bfloat16", "plait") == ["1 of 2", "1 of 1"]
    part = text[text.index("### The same each time") :]
    assert cells(part, "inference, bfloat16", "plait") == ["1 of 2", "1 of 2"]
    assert cells(part, "batch", "transformers' models", "bfloat16") == [
        "1 of 2", "-", "1 of 1", "-",
    ]  # fmt: skip
    assert cells(part, "gpt2/bfloat16", "2") == ["2.00 x", "-", "-", "-", "-"]
    assert cells(part, "gpt2/bfloat16", "1") == ["1.50 x", "-", "-", "-"]
    assert "rows: 1\n" not in part  # the record is of before there was this part
    part = part[part.index("rows: 32\n") :]
    assert cells(part, "gpt2/bfloat16", "0.5") == ["-", "1.20 x", "-"]
    assert "- bert/bfloat16, batch, plait-invariant (c): CompileError: why; mended" in part


def test_the_page_keeps_what_stands_above_its_mark(tmp_path: Path) -> None:
    table, md = tmp_path / "numerics-cpu.json", tmp_path / "numerics.md"
    book.write(table, {r["case"]: r for r in rows()})
    md.write_text("# Kept\n")
    page.write_page([table], md)
    first = md.read_text()
    page.write_page([table], md)
    assert md.read_text() == first and first.startswith("# Kept\n\n" + page.MARK)


def sweep(tmp_path: Path, **more: Any) -> command.Sweep:
    args = argparse.Namespace(
        out=tmp_path / "one.json",
        parts="",
        failed=False,
        changed=False,
        wants=lambda v: v != "inductor",
    )
    vars(args).update(more)
    key = {k: record("")[k] for k in ("torch", "device", "small")}
    return command.Sweep([], args, key)


def test_what_is_left_to_do(tmp_path: Path) -> None:
    job, one = ("infer", "batch"), subject()
    todo = dict(sweep(tmp_path).open(one, job))
    assert list(todo) == ["infer", "batch"] and "inductor" not in todo["infer"]
    assert set(todo["batch"]) >= {"eager", "plait"}
    known = {v: {"failed": "x"} if v == "plait" else figures(0, 0.5, "a") for v in todo["infer"]}
    book.write(tmp_path / "one.json", {one.name: record(one.name, infer=known)})
    assert [part for part, _ in sweep(tmp_path).open(one, job)] == ["batch"]
    assert sweep(tmp_path, failed=True, parts="infer").open(one, job) == [("infer", ["plait"])]
    hopeless = {"eager": {"failed": "x"}}
    book.write(tmp_path / "two.json", {one.name: record(one.name, infer=hopeless)})
    assert [p for p, _ in sweep(tmp_path, out=tmp_path / "two.json").open(one, job)] == ["batch"]
    changed = dict(sweep(tmp_path, changed=True).open(one, job))
    assert changed["infer"] == todo["infer"]
    other = sweep(tmp_path)
    other.key["torch"] = "changed"
    assert [part for part, _ in other.open(one, job)] == ["infer", "batch"]


def test_records_of_one_program_are_joined() -> None:
    one, two, three = ({"ms": x} for x in (1.0, 2.0, 3.0))
    a = record("bert/float32", infer={"eager": one, "plait": two}, batch={"eager": three})
    b = record("bert/float32", infer={"plait": {"ms": 4.0}}) | {"date": "2026-01-02T00:00"}
    found = command.joined(a, b)["parts"]
    assert found == command.joined(b, a)["parts"]
    assert [f["ms"] for f in found["infer"].values()] == [1.0, 4.0] and "batch" in found
    assert command.joined(a, b | {"torch": "u"})["parts"] == b["parts"]
    # A file may have been written after another one, of which a part is later.
    c = record("bert/float32", infer={"plait": {"ms": 5.0, "date": "2026-01-03T00:00"}})
    for again in (command.joined(b, c), command.joined(command.joined(a, c), b)):
        assert again["parts"]["infer"]["plait"]["ms"] == 5.0


def test_a_process_that_dies_is_a_cell_and_the_rest_stays_open() -> None:
    run = command.Running.__new__(command.Running)
    run.found, run.at, run.ended = {}, ("", ""), False
    run.parts = [("infer", ["eager", "plait", "inductor"]), ("batch", ["eager"])]
    run.take({"event": "begin", "part": "infer", "variant": "eager"})
    run.take({"event": "found", "part": "infer", "variant": "eager", "figures": {"differ": 0}})
    run.take({"event": "begin", "part": "infer", "variant": "plait"})
    run.lost("not done within 9 s")
    assert run.ended and run.found == {
        "infer": {"eager": {"differ": 0}, "plait": {"failed": "not done within 9 s"}}
    }
    assert run.left() == [("infer", ["inductor"]), ("batch", ["eager"])]
    run.found["infer"]["eager"] = {"failed": "x"}
    assert run.left() == [("batch", ["eager"])]


def test_tokens_are_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a GPU is told as a CUDA graph: one that is not is no time, but a failure."""
    parts = ("token", "token-32")
    monkeypatch.setattr(Timed, "time", lambda held, *_: {k: {"ms": 1.0} for k in held.calls})
    asked: list[Any] = []
    make = torch.compile

    def compiled(fn: Any, **how: Any) -> Any:
        asked.append(how["options"])
        if len(asked) == 4:
            logging.getLogger("plait").warning("part 0 runs without a CUDA graph: why")
        return make(fn, **how)

    monkeypatch.setattr(torch, "compile", compiled)
    told: list[Any] = []

    def say(event: str, **more: Any) -> None:
        told.append((event, *more.values()))

    for part in parts:
        held = Timed(subject().timed(part))
        assert held.inputs[0].shape == (programs.TOKENS[part], 1)
        held.times(part, ("eager", "plait", "plait-invariant"), tmp_path / "lock", say)
    assert asked == 2 * [{"cuda_graphs": True}, {"batch_invariant": True, "cuda_graphs": True}]
    ends = [event for event in told if event[0] != "begin"]
    assert [e[:3] for e in ends if e[0] == "found"] == [
        ("found", part, v) for part in parts
        for v in ("eager", "plait", "plait-invariant")[: 3 - (part == "token-32")]
    ]  # fmt: skip
    (failed,) = (e for e in ends if e[0] == "failed")
    assert failed[1:3] == ("token-32", "plait-invariant") and "why" in failed[3]


def test_a_worker_measures_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = programs.subjects("cpu", small=True)["dcgan/float32"]
    run = command.Running(known, [("infer", ["eager", "plait-eager"])], 0, 2, 240)
    while not run.ended:
        run.look()
    run.child.close()
    found = run.found["infer"]
    assert found["eager"]["again"] and found["plait-eager"]["differ"] == 0, run.found
    (line,) = command.outline(run)
    say(line)
    assert capsys.readouterr().out == "infer: eager =, plait-eager =\n"
