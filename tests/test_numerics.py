"""The option `numerics`: eager's bits, over op samples and models, and no rounding between
operators of 16 bits."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import plait
from plait.lower.exact import ALWAYS
from plait.runtime.cubin import SM_90, Job
from plait.tools.bits import bits_of
from tests import bits, models, warm
from tests import opinfo_tools as tools
from tests.models import network, step

EAGER = {"numerics": "eager", "strict": True}
KERNELS = [
    op
    for op in op_db
    if op.name.removeprefix("nn.functional.") in {*ALWAYS, "add", "sub", "max", "amin"}
    and "empty" not in op.name
]
"""Ops that become kernels: of others the call is eager's own."""


DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("part", range(8))
def test_kernels_have_eagers_bits(part: int) -> None:
    """An eighth of them in one program. `python -m tests.bits` goes through all ops, dtypes and
    gradients."""
    ops = KERNELS[part::8]
    if not bits.together(ops, DTYPES, most=1):
        wrong = [tools.name_of(op) for op in ops if not bits.together([op], DTYPES, most=1)]
        pytest.fail(f"{wrong or [tools.name_of(op) for op in ops]}")


def encoder() -> nn.Module:
    """Attention with dropout, of which one lies in memory as a transposed tensor."""
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


def bert() -> nn.Module:
    """With attention as it is written: compiled, transformers gives the vendor's a mask."""
    from transformers import BertConfig, BertModel

    cfg = BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=128,
        vocab_size=211, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    return models.Logits(BertModel(cfg))


def llama() -> nn.Module:
    """With as many keys as queries: of fewer transformers runs other code when it is compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, hidden_size=64,
        intermediate_size=128, vocab_size=211, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return models.Logits(LlamaForCausalLM(cfg))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt2": (models.gpt2, lambda: models.tokens(2)),
    "bert": (bert, lambda: models.tokens(2)),
    "llama": (llama, lambda: models.tokens(2)),
    "network": (network, lambda: torch.randn(2, 3, 31, 31)),
    "encoder": (encoder, lambda: torch.randn(2, 17, 64)),
}


def has_eagers_bits(module: nn.Module, x: Tensor, train: bool) -> bool:
    """Whether a call does, with its gradients and what it does to buffers."""
    other = copy.deepcopy(module)
    wants = step(module, module, x, train)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="plait", options=EAGER)
    return bits.equal(wants, step(compiled, other, x, train))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_have_eagers_bits(name: str, dtype: torch.dtype, train: bool) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    module = make().to(dtype).train(train)
    x = inputs()
    x = x.to(dtype) if x.is_floating_point() else x
    assert has_eagers_bits(module, x, train)


def test_programs_without_dynamo_and_packages_have_them(tmp_path: Any) -> None:
    torch.manual_seed(0)
    module, x = network().eval(), torch.randn(2, 3, 31, 31)
    with torch.no_grad():
        want = module(x)
        assert bits.same_bits(want, plait.compile(module, (x,), options=EAGER)(x))
        plait.package(module, tmp_path / "one.plait", (x,), options=EAGER)
        assert bits.same_bits(want, plait.load(tmp_path / "one.plait")(x))


def test_folded_weights_have_other_bits(tmp_path: Any) -> None:
    given = (network().eval(), (torch.randn(2, 3, 31, 31),))
    with pytest.raises(plait.UserError, match="numerics='eager'"):
        plait.compile(*given, freeze=True, options=EAGER)
    with pytest.raises(plait.UserError, match="numerics='eager'"):
        plait.package(given[0], tmp_path / "one.plait", given[1], fold=True, options=EAGER)


def chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh((x * y + y) * 0.3) * x + y


def cast(x: Tensor, y: Tensor) -> Tensor:
    """The program says where it rounds."""
    return (x * y).float().to(torch.bfloat16).float() + y.float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_precise_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(64, 333).to(dtype) for _ in range(2))

    def error(found: Tensor) -> float:
        return float((found.double() - chain(x.double(), y.double())).norm())

    precise = torch.compile(chain, backend="plait", options={"numerics": "precise"})(x, y)
    once = chain(x.float(), y.float()).to(dtype)
    assert error(precise) < 1.001 * error(once) < 0.9 * error(chain(x, y))
    torch._dynamo.reset()
    kept = torch.compile(cast, backend="plait", options={"numerics": "precise"})(x, y)
    assert torch.equal(kept, cast(x.float(), y.float()))


def normed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and norms that become one kernel."""
    z = x + y
    rms = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
    return z, F.layer_norm(z, (333,)), rms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_precise_rounds_no_operand_of_a_norm_in_its_kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(64, 333).to(dtype) for _ in range(2))

    def errors(found: tuple[Tensor, ...]) -> list[float]:
        exact = normed(x.double(), y.double())
        return [float((a.double() - b).norm()) for a, b in zip(found, exact, strict=True)]

    precise = torch.compile(normed, backend="plait", options={"numerics": "precise"})(x, y)
    once = [t.to(dtype) for t in normed(x.float(), y.float())]
    got, want, eager = errors(precise), errors(tuple(once)), errors(normed(x, y))
    assert all(a < 1.001 * b for a, b in zip(got, want, strict=True)), (got, want)
    assert all(a < 0.9 * b for a, b in zip(got[1:], eager[1:], strict=True)), (got, eager)


def test_loose_casts_are_read_back(tmp_path: Any) -> None:
    from plait.ir.text import program_text, read_program

    options = {"numerics": "precise", "debug_dir": str(tmp_path), "verify": True}
    x = torch.randn(4, 8).bfloat16()
    torch.compile(lambda x: (x * 2, (x * 2).exp() + x), backend="plait", options=options)(x)
    (file,) = tmp_path.glob("*/2_loops.txt")
    text = file.read_text()
    assert "'loose'" in text and program_text(read_program(text)) == text


def report(options: dict[str, Any]) -> Any:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.exp(x * 2 + 1) * w.sum() + F.relu(x)

    return plait.explain(fn, torch.randn(8, 64), torch.randn(64), options=options, quiet=True)


def test_explain_says_which_kernels_have_them() -> None:
    from plait.schedule.plan import kernels_of

    (g,) = report(EAGER).graphs
    assert {bits_of(k, g) for k in kernels_of(g.plan)} == {"eager's bits"}
    assert report(EAGER).extern_calls == {"aten::exp": 1, "aten::sum": 1}
    found = report({})
    said = {bits_of(k, g) for g in found.graphs for k in kernels_of(g.plan)}
    assert any("exp" in s for s in said) and any("sum" in s for s in said)
    assert "may have other bits than eager: sum" in found.details


def test_a_gpu_keeps_products_and_sums_apart() -> None:
    """Else its compiler rounds both at once, as eager's kernels of one operator each cannot."""
    job = Job("k", "", {}, SM_90._replace(joins=False), 4)
    assert '"enable_fp_fusion": false' in job.frame()
    assert "enable_fp_fusion" not in Job("k", "", {}, SM_90, 4).frame()


@pytest.mark.parametrize("name", ["nn.functional.embedding_bag", "native_dropout_backward"])
def test_calls_have_eagers_bits(name: str) -> None:
    """Bags leave results empty that nobody asks for; integers have no noise."""
    (op,) = (op for op in op_db if tools.name_of(op) == name)
    for dtype in (torch.bfloat16, torch.int64):
        if op.supports_dtype(dtype, "cpu"):
            trains = dtype.is_floating_point and op.supports_autograd
            assert [*bits.differing(op, dtype, train=trains, most=2)] == []


AFTER_ANOTHER = """
import torch
def step(backend, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).bfloat16()
    x = torch.randn(4, 3, 8, 8).bfloat16()
    torch.compile(net, backend=backend, **options)(x).float().pow(2).mean().backward()
    return [p.grad for p in net.parameters()]
wants = step("aot_eager")
gots = step("plait", options={"numerics": "eager"})
assert all(map(torch.equal, wants, gots))
"""


def test_what_another_back_end_traced_before_is_forgotten() -> None:
    """PyTorch remembers element types of results, and has other ones for these statistics."""
    done = warm.run("-c", AFTER_ANOTHER, env=os.environ)
    assert done.returncode == 0, done.stderr


SPECTRA = {
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "nuclear norm": lambda x: torch.linalg.norm(x, "nuc", dim=(1, 2)),
    "norm": lambda x: torch.linalg.norm(x, 2, dim=(1, 2)),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT, UPLO="U"),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "method": lambda x: x.svd().S,
    "eigh": lambda x: torch.linalg.eigh(x @ x.mT)[0],
    "vectors": lambda x: torch.linalg.svd(x, full_matrices=False),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_singular_values_alone_are_computed_as_eager_does(name: str) -> None:
    """Tracing takes any matrix for one with a gradient, for which vectors are needed."""
    torch.manual_seed(0)
    x = torch.randn(3, 40, 30)
    fn = SPECTRA[name]
    wants, gots = fn(x), bits.compiled(fn, strict=True)(x)
    wants, gots = ((t,) if isinstance(t, Tensor) else t for t in (wants, gots))
    assert bits.equal([*wants], [*gots])
    if name in ("svdvals", "eigvalsh"):
        assert bits.same_bits(*wants, plait.compile(Spectrum(fn), (x,), options=EAGER)(x))


class Spectrum(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def test_gradients_of_singular_values_have_eagers_bits() -> None:
    x = torch.randn(40, 30, requires_grad=True)
    wants = bits.outcome(torch.linalg.svdvals, [x], {}, True)
    assert bits.equal(wants, bits.outcome(bits.compiled(torch.linalg.svdvals), [x], {}, True))
