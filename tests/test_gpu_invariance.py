"""`batch_invariant` on a GPU: a row has the same bits in a batch of 1, 2, 7 and 32, whether sizes
are known or not, and beside keys behind it that a mask leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNTS = (32, 1, 2, 7)
HALF = torch.bfloat16
DTYPES = [torch.bfloat16, torch.float32]
Program = Callable[..., Any]


def compiled(fn: Program, dynamic: bool | None) -> Program:
    torch._dynamo.reset()
    options = {"batch_invariant": True}
    return torch.compile(fn, backend="plait", dynamic=dynamic, options=options)


def leaves(x: Any) -> list[Tensor]:
    found = torch.utils._pytree.tree_leaves(x)
    return [t for t in found if isinstance(t, Tensor)]


def differing(fn: Program, xs: Sequence[Tensor], fixed: Sequence[Any] = ()) -> list[Any]:
    """Counts of rows, and whether their number varies (None: as Dynamo finds out), with which the
    first rows have other bits than among all. xs: with a row for each of a batch. fixed: the same
    for all rows."""
    wrong: list[Any] = []
    with torch.no_grad():
        want = leaves(compiled(fn, False)(*xs, *fixed))
        for dynamic, counts in ((False, COUNTS[1:2]), (True, COUNTS[2:]), (None, COUNTS[:0:-1])):
            run = compiled(fn, None if dynamic else dynamic)
            for count in counts:
                given = [x[:count].clone() for x in xs]
                for x in given if dynamic else ():
                    torch._dynamo.mark_dynamic(x, 0)
                got = leaves(run(*given, *fixed))
                pairs = zip(got, want, strict=True)
                if not all(same(g, w[: len(g)]) for g, w in pairs):
                    wrong.append((count, dynamic))
    return wrong


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


# --------------------------------------------------------------------------------------- operators
def mlp(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    hidden = F.gelu(F.linear(x, w, b), approximate="tanh")
    return F.linear(hidden, v) + x


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 65])
@pytest.mark.parametrize("widths", [(96, 200), (768, 3072), (1001, 37)])
def test_products(widths: tuple[int, int], tokens: int, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and widths[0] * tokens > 10000:
        pytest.skip("takes long")
    k, n = widths
    x = rand(COUNTS[0], tokens, k, dtype=dtype)
    fixed = [rand(*s, dtype=dtype) / 16 for s in ((n, k), (k, n), (n,))]
    assert not differing(mlp, [x], fixed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("side", [7, 8])
def test_images(side: int, last: bool, dtype: torch.dtype) -> None:
    """Each is convolved by itself, by the same kernel wherever it lies; the batch is no number that
    varies."""
    layers = nn.Conv2d(8, 24, 3, groups=4), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 40, 1)
    net = nn.Sequential(*layers, nn.ConvTranspose2d(40, 12, 4, 2, 1)).to("cuda", dtype).eval()
    x = rand(7, 8, side, side, dtype=dtype)
    if last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        want = compiled(net, False)(x)
        for k in range(7):
            run, one = compiled(net, False), x[k : k + 1]
            for given in (one, one.clone(memory_format=torch.preserve_format)):
                assert same(run(given)[0], want[k]), k


@pytest.mark.parametrize("widths", [(768, 2304), (100, 37)])
def test_products_by_rows_of_weights(widths: tuple[int, int]) -> None:
    """In tiles of two kinds: all rows, and some, which are loaded by descriptors or not."""
    x = rand(COUNTS[0], 65, widths[0], dtype=HALF)
    fixed = [rand(*s, dtype=HALF) / 16 for s in (widths, widths[1:])]
    assert not differing(lambda x, w, b: F.gelu(x @ w + b), [x], fixed)


def kinds(x: Tensor) -> Tensor:
    """Of numbers: finite, infinite by sign, or none."""
    return torch.where(x.isnan(), 2, x.isinf() * x.sign())


def of_kind(x: Tensor, w: Tensor, kind: str) -> None:
    """Puts numbers of a kind into factors of a product."""
    if kind == "infinite":
        x[3, 5], x[4, 7], x[4, 8], w[11, 13], w[12, 14] = torch.tensor([1, -1, 1, 1, -1]) * math.inf
    elif kind == "no numbers":
        x[3, 5], w[11, 13] = torch.nan, torch.nan
    elif kind == "largest":  # 10 bits would round them up
        x[3:6] = 0
        x[3, 5], x[4, 7] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
        w.clamp_(-0.9, 0.9)
    elif kind == "small":
        x *= 1e-33


@pytest.mark.parametrize("kind", ["usual", "infinite", "no numbers", "largest", "small"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rows", [7, 1030])
def test_float32_by_tensor_cores_is_as_near_as_eager(rows: int, columns: bool, kind: str) -> None:
    """Of right factors whose rows lie side by side, or columns. In two numbers of 10 bits."""
    torch.manual_seed(0)
    x, w = rand(rows, 300), rand(500, 300)
    of_kind(x[: min(rows, 7)], w, kind)
    w = w.t().contiguous().t() if columns else w
    fn = torch.compile(F.linear, backend="plait", options={"batch_invariant": True})
    found, eager, exact = fn(x, w), F.linear(x, w), F.linear(x.double(), w.double())
    assert torch.equal(kinds(found), kinds(eager))
    finite = kinds(eager) == 0
    far, eagers = ((y.double() - exact)[finite].norm().item() for y in (found, eager))
    rounding = exact[finite].norm().item() * torch.finfo(torch.float32).eps
    assert far <= 1.2 * eagers + 4 * rounding, (far, eagers)


def test_products_in_tf32() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        fixed = [rand(*s) / 16 for s in ((512, 768), (768, 512), (512,))]
        assert not differing(mlp, [rand(COUNTS[0], 9, 768)], fixed)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_batches(dtype: torch.dtype) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v

    q, k, v = (rand(COUNTS[0], 4, n, 64, dtype=dtype) for n in (50, 90, 90))
    assert not differing(fn, [q, k, v])


def norms(x: Tensor) -> list[Tensor]:
    size = x.shape[-1:]
    return [F.layer_norm(x, size), F.rms_norm(x, size), x.softmax(-1), x.log_softmax(-1)]


def statistics(x: Tensor) -> list[Tensor]:
    found = [x.mean(-1), x.var(-1), x.sum((1, 2)), x.std(1), x.mean(1), x.norm(dim=-1)]
    return [*found, x.logsumexp(1), x.amax(1), x.argmax(-1), x.softmax(1), (x / 9).exp().prod(-1)]


def running(x: Tensor) -> list[Tensor]:
    return [x.cumsum(-1), x.cumsum(1), (x / 9).exp().cumprod(-1), x.cummax(1).values]


def chains(x: Tensor) -> list[Tensor]:
    y = F.silu(x) * x.tanh() + x.erf()
    return [y, y.mean(-1, keepdim=True) - y, (y * 3).softmax(-1), F.gelu(y).sum(1)]


def groups(x: Tensor) -> list[Tensor]:
    return [F.group_norm(x, 3), F.instance_norm(x), F.adaptive_avg_pool1d(x, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (33, 768), (300, 40), (3, 20000)])
@pytest.mark.parametrize("fn", [norms, statistics, running, chains, groups])
def test_reductions(fn: Program, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if fn is groups and shape[0] % 3:
        pytest.skip("no groups")
    assert not differing(fn, [rand(COUNTS[0], *shape, dtype=dtype)])


@pytest.mark.parametrize("length", [700, 300_000])
def test_one_row_each(length: int) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [x.sum(-1), x.softmax(-1), x.var(-1)]

    assert not differing(fn, [rand(COUNTS[0], length)])


# --------------------------------------------------------------------------------------- attention
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("lengths", [(1, 300), (70, 70), (260, 260)])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias", "grouped"])
def test_attention(kind: str, lengths: tuple[int, int], width: int, dtype: torch.dtype) -> None:
    m, n = lengths
    shared = 2 if kind == "grouped" else 4
    xs = [rand(COUNTS[0], h, t, width, dtype=dtype) for h, t in ((4, m), (shared, n), (shared, n))]
    more: dict[str, Any] = {}
    if kind == "causal":
        more["is_causal"] = m == n
    if kind == "grouped":
        more["enable_gqa"] = True
    if kind == "mask":
        xs.append(torch.rand(COUNTS[0], 1, m, n, device="cuda") > 0.3)
    if kind == "bias":
        xs.append(rand(COUNTS[0], 1, m, n, dtype=dtype))

    def fn(*xs: Tensor) -> Tensor:
        return attend(*xs, **more)

    assert not differing(fn, xs)
    with torch.no_grad():
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == HALF else {"rtol": 1e-3, "atol": 1e-3}
        want = compiled(fn, False)(*xs)
        torch.testing.assert_close(want, fn(*xs), **tolerance)
    if width == 64:
        grad = torch.randn_like(want)
        made, *grads = trained(compiled(fn, False), xs, grad)
        assert torch.equal(made, want)
        torch.testing.assert_close(grads, trained(fn, xs, grad)[1:], **tolerance)
        for count, dynamic in ((1, False), (7, True)):
            given = [x[:count] for x in xs]
            found = trained(compiled(fn, None), given, grad[:count], dynamic)
            assert all(same(x, y[:count]) for x, y in zip(found, (made, *grads), strict=True))


def trained(fn: Program, xs: Sequence[Tensor], grad: Tensor, dynamic: bool = False) -> list[Tensor]:
    """A result, and the gradients of the first three arguments. dynamic: the number of rows
    varies."""
    leaves = [x.detach().clone().requires_grad_(k < 3) for k, x in enumerate(xs)]
    for x in leaves if dynamic else ():
        torch._dynamo.mark_dynamic(x, 0)
    made = fn(*leaves)
    return [made.detach(), *torch.autograd.grad(made, leaves[:3], grad)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
def test_keys_that_do_not_count(kind: str, dynamic: bool) -> None:
    """Those behind a row that a mask leaves out, however many; with what is added to scores, which
    lies at multiples of 16 bytes or does not."""
    q, k, v = (rand(2, 4, 600, 64, dtype=HALF) for _ in range(3))
    added = rand(2, 1, 600, 600, dtype=HALF)

    def fn(q: Tensor, k: Tensor, v: Tensor, added: Tensor, length: int) -> Tensor:
        n = k.shape[2]
        mask = torch.arange(n, device="cuda") < length
        mask = mask.expand(2, 1, n, n)
        if kind == "causal":
            mask = mask & torch.ones(n, n, device="cuda", dtype=torch.bool).tril()
        if kind == "bias":
            return attend(q, k, v, torch.where(mask, added, -math.inf))
        return attend(q, k, v, mask)

    found = []
    with torch.no_grad():
        run = compiled(fn, dynamic)
        for n in (90, 93, 128, 256, 600):
            xs = (*(x[:, :, :n].clone() for x in (q, k, v)), added[:, :, :n, :n].contiguous())
            found.append(run(*xs, 90)[:, :, :90])
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [-1e9, -1e30, -math.inf])
def test_gradients_beside_rows_of_which_nothing_counts(least: float, dtype: torch.dtype) -> None:
    """Rows of padding, whose own gradients are 0: the logarithms of their sums lost what tells
    scores apart."""
    xs = [rand(2, 4, 70, 64, dtype=dtype) for _ in range(3)]
    mask, grad = xs[0].new_zeros(2, 1, 70, 70), rand(2, 4, 70, 64, dtype=dtype)
    mask[:, :, :5], grad[:, :, :5] = least, 0
    found = trained(compiled(attend, False), [*xs, mask], grad)
    want = trained(attend, [xs[0][:, :, 5:], *xs[1:]], grad[:, :, 5:])
    assert not found[1][:, :, :5].any()
    found[:2] = [x[:, :, 5:] for x in found[:2]]
    tolerance = 2e-2 if dtype == HALF else 1e-3
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------ models
def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_embd": 192, "n_layer": 2, "n_head": 3},
        "Bert": {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
                 "intermediate_size": 768},
    }.get(name, {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2})  # fmt: skip
    heads = {"GPT2": "GPT2LMHeadModel", "Bert": "BertModel"}
    config = getattr(transformers, f"{name}Config")(vocab_size=1000, **sizes)
    kind = getattr(transformers, heads.get(name, f"{name}ForCausalLM"))
    torch.manual_seed(0)
    model: nn.Module = kind(config)
    return model.eval().to("cuda")


def first_result(model: nn.Module) -> Program:
    more = {} if "Bert" in type(model).__name__ else {"use_cache": False}

    def fn(ids: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, attention_mask=mask, **more)[0]
        return found

    return fn


NAMES = ["GPT2", "Llama", "Bert", "Qwen2", "Mistral"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_models(name: str, dtype: torch.dtype) -> None:
    model = language_model(name).to(dtype)
    ids = torch.randint(0, 1000, (COUNTS[0], 45), device="cuda")
    mask = torch.ones_like(ids)
    mask[3, 20:] = mask[0, 40:] = 0
    assert not differing(first_result(model), [ids, mask])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_padded_models(name: str, dynamic: bool) -> None:
    """A program for each length, and one for all."""
    fn = first_result(language_model(name).to(HALF))
    ids, found = torch.randint(0, 1000, (2, 400), device="cuda"), []
    with torch.no_grad():
        run = compiled(fn, dynamic)
        for n in (45, 64, 150, 400):
            mask = (torch.arange(n, device="cuda") < 45).long().expand(2, n)
            found.append(run(ids[:, :n].contiguous(), mask.contiguous())[:, :45])
    assert all(torch.equal(found[0], other) for other in found[1:])
