"""The Python target end to end: programs at their borders against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.runtime import generated
from plait.wrapper.program import Artifacts
from plait.wrapper.python import make_python
from plait.wrapper.targets import TARGETS
from plait.wrapper.text import read
from tests import instruction_table as table
from tests.against_eager import same
from tests.test_frontend_cases import BOTH, NO_GRAD


def compiled(
    fn: Callable[..., Any], wrapper: str, dynamic: bool | None = None
) -> Callable[..., Any]:
    return torch.compile(fn, backend="plait", dynamic=dynamic, options={"wrapper": wrapper})


@pytest.mark.parametrize("name", [*BOTH, *NO_GRAD])
def test_inference(name: str) -> None:
    fn, make = {**BOTH, **NO_GRAD}[name]
    same(fn, make, other=compiled(fn, "python"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_dynamic_training(name: str) -> None:
    fn, make = BOTH[name]
    same(fn, make, grad=True, other=compiled(fn, "python", dynamic=True))


def test_one_program_serves_many_sizes() -> None:
    fn = compiled(lambda x: (x * 2).sum(0).softmax(-1), "python", dynamic=True)
    for n in (3, 17, 64):
        x = torch.randn(n, 33)
        torch.testing.assert_close(fn(x), (x * 2).sum(0).softmax(-1))


def test_the_source_is_deterministic_and_names_what_python_reserves() -> None:
    p = read("""
program('g')
lambda_ = symbol('lambda', lo=2)
ref['lambda'] = int_input()
torch = tensor_input(f32[4] @ (1,))
ref['9 lives'] = tensor_input(f32[4] @ (1,))
call = alloc(f32[4] @ (1,))
copy(call, torch, bump=False)
return (call, torch, ref['9 lives'], lambda_ + 1)
""")
    source = make_python(p, {})
    assert source == make_python(p, {})
    scope: dict[str, Any] = {}
    exec(compile(source, "g", "exec"), scope)
    x, y = torch.randn(4), torch.randn(4)
    out = scope["bind"](None, [], [])([5, x, y])
    assert torch.equal(out[0], x)
    assert out[1] is x
    assert out[2] is y
    assert out[3] == 6


def test_the_module_imports_torch_and_the_runtime_only() -> None:
    imports = [s for s in make_python(table.example(), {}).splitlines() if "import" in s]
    assert imports == ["import torch", "from plait.runtime import generated as rt"]


def test_wrong_inputs_are_refused() -> None:
    promised = (("x", torch.float32, "cpu"), None)
    generated.check_inputs([torch.ones(2), None], promised)
    for args, message in (
        ([torch.ones(2)], "expected 2 inputs, got 1"),
        ([3, None], "input 'x': expected a tensor, got int"),
        (
            [torch.ones(2).double(), None],
            "input 'x': expected dtype torch.float32, got torch.float64",
        ),
        (
            [torch.ones(2, device="meta"), None],
            "input 'x': expected a plain tensor on device cpu, got one on meta",
        ),
    ):
        with pytest.raises(TypeError) as e:
            generated.check_inputs(args, promised)
        assert str(e.value) == message


SEEDED = """
program('attention')
x = tensor_input(f32[4] @ (1,))
seed = tensor_input(i64[()] @ (), device='cuda:0')
y, = call('aten::add.Tensor')(x, seed)
{more}return (y,)
"""


@pytest.mark.parametrize("target", ["python", "fx"])
def test_what_only_operators_take_may_be_anywhere_if_it_has_no_dimensions(target: str) -> None:
    def load(text: str) -> Callable[..., Any]:
        return TARGETS[target](read(text), Artifacts({}))

    x, seed = torch.ones(4), torch.tensor(3)
    (y,) = load(SEEDED.format(more=""))(x, seed)
    assert y.tolist() == [4] * 4
    seen = SEEDED.format(more="v = view(seed, i32[2] @ (1,), 0)\n")
    wide = SEEDED.format(more="").replace("i64[()] @ ()", "i64[1] @ (1,)")
    for text, given in ((seen, seed), (wide, seed.view(1))):
        with pytest.raises(
            TypeError,
            match="input 'seed': expected a plain tensor on device cuda:0, got one on cpu",
        ):
            load(text)(x, given)


def test_a_missing_kernel_is_told(tmp_path: Any) -> None:
    import subprocess

    (tmp_path / "k.c").write_text("int x;")
    subprocess.run(["gcc", "-shared", "k.c", "-o", "k.so"], cwd=tmp_path, check=True)
    with pytest.raises(RuntimeError, match="kernel k_none is not in library"):
        generated.kernel(str(tmp_path / "k.so"), "k_none")


@pytest.mark.parametrize("wrapper", TARGETS)
def test_kernels_are_ranges_of_the_profiler(wrapper: str) -> None:
    fn = compiled(lambda x: (x + 1).tanh(), wrapper)
    fn(torch.ones(8))
    with torch.profiler.profile() as profile:
        fn(torch.ones(8))
    assert any(e.name.startswith("plait_") for e in profile.events())


@pytest.mark.parametrize("strides", [(1, 16), (16, 1), (2, 1), (0, 1), (0, 0)])
def test_a_copy_of_what_begins_at_an_odd_address_has_its_strides(strides: tuple[int, int]) -> None:
    x = torch.randn(101)[1:].as_strided((5, 4), strides)
    copy = generated.GpuKernel.readable(x)
    assert copy.data_ptr() % 16 == 0 and copy.stride() == x.stride()
    assert torch.equal(copy, x)
