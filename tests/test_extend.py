"""The doors for code outside the tree (`plait/extend.py`): the example runs, and mistakes are told
where they are made."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait import compat, extend, pipelines
from plait.compile import compile_graph, compile_texts
from plait.config import Config
from plait.devices import DEVICES, Facts
from plait.errors import UserError
from plait.graph.captured import Captured
from plait.kernel.cpu.target import CppTarget
from plait.kernel.null.target import NullTarget
from plait.kernel.targets import TARGETS
from plait.lower import core
from plait.runtime.toolchain import ToolchainMissing
from plait.wrapper.python import load_python, make_python
from tests import warm

aten = torch.ops.aten
EXAMPLE = Path(__file__).parent.parent / "examples" / "extending.py"


def test_the_example_is_one_kernel() -> None:
    """Lowering, decomposition and pass meet in one loop, which the target of the example made. In a
    process of its own: what it registers stays."""
    done = warm.run(EXAMPLE, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "1 on the shelf" in done.stdout
    assert "-> 1 kernel, 0 calls of PyTorch's own operators" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 kernel"
    assert "def plait_softmax_" in done.stdout
    assert "neg" not in done.stdout


def test_a_lowering_is_for_an_operator_that_has_none() -> None:
    with pytest.raises(UserError, match="which is no operator"):
        extend.lowering(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a second lowering for aten\.exp\.default"):
        extend.lowering(aten.exp.default)


def test_a_lowering_serves_the_next_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    op = aten.special_airy_ai.default
    monkeypatch.setattr(core, "RULES", dict(core.RULES))
    monkeypatch.setattr("plait.lower.calls.RULES", core.RULES)

    @extend.lowering(op)
    def zero(ctx: core.Lowering, x: core.View) -> core.View:
        from plait.lower.elementwise import elementwise

        return elementwise(ctx, lambda a: a * 0.0 + 7.0, (x,))

    compiled = torch.compile(lambda x: torch.special.airy_ai(x), backend="plait")
    assert torch.equal(compiled(torch.ones(5)), torch.full((5,), 7.0))


def test_a_decomposition_is_for_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.decompositions, "DECOMPOSITIONS", {})
    with pytest.raises(UserError, match="which is no operator"):
        extend.decomposition(aten.exp)  # type: ignore[arg-type]
    extend.decomposition(aten.exp.default)(torch.exp)
    with pytest.raises(UserError, match="a second decomposition"):
        extend.decomposition(aten.exp.default)


def test_a_decomposition_goes_before_plaits_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operator that plait keeps whole, too."""
    monkeypatch.setattr(compat.decompositions, "DECOMPOSITIONS", {})
    monkeypatch.setattr(compat.decompositions, "CHECKS", {})
    extend.decomposition(aten.roll.default)(torch.roll)
    assert compat.decompositions.decomposition_table()[aten.roll.default] is torch.roll


def test_a_pass_that_breaks_the_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "ADDED", [])
    monkeypatch.setattr(extend, "ADDED", pipelines.ADDED)

    @extend.graph_pass("careless")
    def careless(gm: torch.fx.GraphModule) -> int:
        for n in list(gm.graph.nodes):
            if n.target is aten.exp.default:
                with gm.graph.inserting_before(n):
                    new = gm.graph.call_function(aten.sin.default, n.args)  # without meta["val"]
                n.replace_all_uses_with(new)
        return 1

    with pytest.raises(UserError, match="a second graph pass"):
        extend.graph_pass("careless")(careless)
    with pytest.raises(UserError, match="'careless' left sin_default without its fake value"):
        plait.compile(lambda x: x.exp() + 1, (torch.ones(3),))


def test_a_pass_answers_for_its_own_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that gives nothing has no fake value."""
    monkeypatch.setattr(pipelines, "ADDED", [])
    monkeypatch.setattr(extend, "ADDED", pipelines.ADDED)
    extend.graph_pass("idle")(lambda gm: 0)
    checked = lambda x: (aten._assert_async.default(x.sum() > 0), x + 1)[1]
    gm = make_fx(checked, tracing_mode="fake")(torch.ones(3))
    assert any("val" not in n.meta for n in gm.graph.nodes if n.op == "call_function")
    pipelines.clean_graph(Captured(gm, "inference_0", "inference"), Config())


def test_a_pass_runs_in_every_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "ADDED", [])
    monkeypatch.setattr(extend, "ADDED", pipelines.ADDED)

    @extend.graph_pass("sines for exponentials")
    def sines(gm: torch.fx.GraphModule) -> int:
        found = [n for n in gm.graph.nodes if n.target is aten.exp.default]
        for n in found:
            n.target = aten.sin.default
        return len(found)

    x = torch.rand(7)
    assert torch.allclose(plait.compile(lambda x: x.exp(), (x,))(x), x.sin())
    assert torch.allclose(torch.compile(lambda x: x.exp(), backend="plait")(x), x.sin())


def test_a_kernel_target_has_every_operation() -> None:
    class Holes(CppTarget):
        name = "holes"
        table: ClassVar = {k: v for k, v in CppTarget.table.items() if k != "exp"}

    with pytest.raises(UserError, match=r"'holes' and plait/ir/ops\.py differ in exp"):
        extend.kernel_target("cpu", Holes())
    with pytest.raises(UserError, match="a kernel target for 'abacus'"):
        extend.kernel_target("abacus", CppTarget())
    assert {*NullTarget.table} == {*CppTarget.table}
    before = extend.kernel_target("cpu", CppTarget())
    assert isinstance(extend.kernel_target("cpu", before), CppTarget)


ROW = replace(DEVICES["cpu"], target="null", eager_cpu=False)


@pytest.mark.parametrize(
    ("kind", "row", "error"),
    [
        ("abacus", ROW, "'abacus', which is no device of torch"),
        ("mtia:0", ROW, "a row for one device, 'mtia:0'"),
        ("cpu", ROW, "a second row for 'cpu'"),
        ("mtia", replace(ROW, is_host=False), "whose memory the host does not see"),
        ("mtia", replace(ROW, streams=True), "whose memory the host does not see"),
        ("mtia", DEVICES["cpu"], "names 'cpp', not 'null'"),
        ("mtia", replace(ROW, machine="year"), "names the option 'year'"),
    ],
)
def test_a_row_that_cannot_be_kept(kind: str, row: Facts, error: str) -> None:
    before = dict(DEVICES)
    with pytest.raises(UserError, match=error):
        extend.device(kind, row, NullTarget())
    assert before == DEVICES


def test_tools_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C++ compiler makes programs for a device that needs none."""

    class Bare(NullTarget):
        def find_tools(self, cfg: Config) -> None:
            raise ToolchainMissing("no assembler of mtia")

    monkeypatch.setitem(TARGETS, "mtia", Bare())
    with FakeTensorMode():
        x, scale = torch.empty(4, device="mtia"), torch.tensor(2.0)
        gm = make_fx(lambda x, scale: (x * scale,), tracing_mode="fake")(x, scale)
    with pytest.raises(ToolchainMissing, match="no assembler of mtia"):
        compile_graph(Captured(gm, "inference_0", "inference"), Config())


def test_a_device_needs_every_operation_too() -> None:
    class Holes(NullTarget):
        table: ClassVar = {k: v for k, v in NullTarget.table.items() if k != "exp"}

    with pytest.raises(UserError, match=r"'null' and plait/ir/ops\.py differ in exp"):
        extend.device("mtia", ROW, Holes())


def test_a_program_for_a_new_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program, with the CPU's memory in place of the device's, runs as eager does."""
    monkeypatch.setitem(DEVICES, "mtia", ROW)  # taken away afterwards
    monkeypatch.setitem(TARGETS, "mtia", NullTarget())
    del DEVICES["mtia"]
    extend.device("mtia", ROW, NullTarget())
    f = lambda x: (torch.softmax(x * 2, -1),)
    with FakeTensorMode():
        gm = make_fx(f, tracing_mode="fake")(torch.empty(4, 8, device="mtia"))
    program, made = compile_texts(Captured(gm, "inference_0", "inference"), Config())
    libraries = {"mtia": TARGETS["mtia"].build(made.sources["mtia"], Config()).library}
    source = make_python(program, libraries)
    assert "libraries['mtia']" in source and "device='mtia'" in source
    source = source.replace("device='mtia'", "device='cpu'").replace(", 'mtia')", ", 'cpu')")
    x = torch.randn(4, 8)
    torch.testing.assert_close(load_python(source, libraries, (), ())(x), f(x))
