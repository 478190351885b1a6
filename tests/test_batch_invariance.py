"""`batch_invariant` on a CPU: a row has the same bits in any batch, whether sizes are known or not,
and beside keys behind it that a mask leaves out. On a GPU: test_gpu_invariance.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.errors import UserError
from tests import models
from tests.fuzz import rows
from tests.test_numerics import llama

OPTIONS = {"batch_invariant": True, "strict": True}
COUNTS = (1, -1, 2, 7, "varies")
"""Of rows: so many, the first ones; -1: the last one, by the program that just ran for the first.
"""
ALL = 13
Program = Callable[..., Any]


def compiled(fn: Program, dynamic: bool = False) -> Program:
    torch._dynamo.reset()
    return torch.compile(fn, backend="plait", dynamic=dynamic, options=OPTIONS)


def leaves(x: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, Tensor)]


def differing(fn: Program, xs: Sequence[Tensor], fixed: Sequence[Tensor] = ()) -> list[Any]:
    """COUNTS, and numbers of results, where these rows have other bits than among all; "varies"
    where the number of rows does. xs: with a row for each of a batch. fixed: the same for all rows.
    """
    with torch.no_grad():
        want = leaves(compiled(fn)(*xs, *fixed))
        wrong: list[Any] = []
        for count in COUNTS:
            some = (
                slice(5) if count == "varies" else slice(-1, None) if count == -1 else slice(count)
            )
            given = [x[some].clone() for x in xs]
            if count != -1:
                run = compiled(fn)
            if count == "varies":
                for x in given:
                    torch._dynamo.mark_dynamic(x, 0)
                run = torch.compile(fn, backend="plait", options=OPTIONS)
            got = leaves(run(*given, *fixed))
            wrong += [
                (count, k)
                for k, (x, y) in enumerate(zip(got, want, strict=True))
                if not torch.equal(x, y[some])
            ]
    return wrong


def norms(x: Tensor) -> list[Tensor]:
    n = x.shape[-1:]
    found = [F.layer_norm(x, n), F.rms_norm(x, n), x.softmax(-1), x.log_softmax(-1), x.var(-1)]
    return [
        *found,
        x.logsumexp(-1),
        F.normalize(x, dim=-1),
        x.cumsum(-1),
        x.amax(-1),
        x.sum((1, 2)),
    ]


def columns(x: Tensor) -> list[Tensor]:
    return [x.sum(1), x.mean(1), x.softmax(1), x.std(1), x.prod(1), x.argmax(1), x.cumsum(1)]


def functions(x: Tensor) -> list[Tensor]:
    """Each in a kernel of its own: a maths function is the same in vectors and in what is left of
    them, and of one number."""
    names = "exp tanh erf sin atan sigmoid log1p lgamma expm1 cosh".split()
    found = [getattr(torch, name)(x.abs() / 2) for name in names]
    return [*found, F.gelu(x), F.silu(x), x.abs().pow(1.7), torch.atan2(x, x + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (norms, (3, 100)), (norms, (1, 768)), (norms, (2, 4099)), (norms, (5, 3)),
        (columns, (33, 20)), (columns, (9, 1)), (functions, ()), (functions, (17,)),
        (lambda x: F.group_norm(x, 2), (4, 50000)),
    ],
)  # fmt: skip
def test_loops(fn: Program, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert not differing(fn, [torch.randn(ALL, *shape).to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 768, 100), (3, 33, 17), (40, 1700, 5)])
def test_products(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> list[Tensor]:
        y = F.gelu(F.linear(x, w, b))
        return [y, torch.relu(x @ v + b), y @ y.mT, torch.einsum("bij,kj->bk", x, w), x @ v[:, 0]]

    rows, k, n = sizes
    made = [torch.randn(s).to(dtype) / 8 for s in ((ALL, rows, k), (n, k), (k, n), (n,))]
    assert not differing(fn, made[:1], made[1:])


@pytest.mark.parametrize("shape", [(96,), (1, 96), (3, 96)])
def test_what_a_layer_adds_to_is_no_bias(shape: tuple[int, ...]) -> None:
    """Of one row it has as many elements as one. What is rounded before it is added always is."""
    made = [(torch.randn(s) / 8).bfloat16() for s in ((ALL, *shape), (96, 96), (96,))]
    assert not differing(
        lambda x, w, b: (F.linear(x, w) + x, x + F.linear(x, w, b)), made[:1], made[1:]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_as_near_as_eagers(dtype: torch.dtype) -> None:
    x, w = torch.randn(50, 3000).to(dtype), torch.randn(70, 3000).to(dtype)
    want = F.linear(x.double(), w.double())

    def error(y: Tensor) -> float:
        return float((y.double() - want).abs().max())

    with torch.no_grad():
        made = compiled(F.linear)(x, w)
    assert error(made) <= 2 * error(F.linear(x, w))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more) * 1.0


@pytest.mark.parametrize(
    ("lengths", "width", "dtype", "causal"),
    [
        ((40, 40), 64, torch.float32, True), ((1, 70), 20, torch.float32, False),
        ((7, 1200), 64, torch.bfloat16, False), ((530, 530), 128, torch.float32, True),
    ],
)  # fmt: skip
def test_attention(lengths: tuple[int, int], width: int, dtype: torch.dtype, causal: bool) -> None:
    m, n = lengths
    xs = [torch.randn(ALL, 2, t, width).to(dtype) for t in (m, n, n)]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=causal)

    assert not differing(fn, xs)
    with torch.no_grad():
        made, want = compiled(fn)(*xs).double(), fn(*(x.double() for x in xs))
        worst = (fn(*xs).double() - want).abs().max()
    assert (made - want).abs().max() <= 2.5 * worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_and_a_longer_text(dtype: torch.dtype) -> None:
    """The library's kernel, which takes fewer heads of keys as they are, has other tiles there."""
    xs = [torch.randn(3, heads, 300, 20).to(dtype) for heads in (6, 2, 2)]
    fn = functools.partial(attend, is_causal=True, enable_gqa=True)
    assert not differing(fn, xs)
    with torch.no_grad():
        long, short = compiled(fn)(*xs), compiled(fn)(*(x[:, :, :60].clone() for x in xs))
        want, eager = (fn(*given).double() for given in ([x.double() for x in xs], xs))
    assert torch.equal(long[:, :, :60], short)
    assert (long.double() - want).abs().max() <= 2.5 * (eager - want).abs().max()
    text = plait.explain(fn, *xs, options=OPTIONS, quiet=True).text
    assert "batch_invariant" in text and "not promised" not in text


def test_a_cache_that_grows() -> None:
    """How many keys and how many values there are is two numbers to tracing."""
    q, k, v, new = (torch.randn(3, h, t, 32) for h, t in ((4, 1), (2, 40), (2, 40), (2, 1)))

    def fn(q: Tensor, k: Tensor, v: Tensor, new: Tensor) -> Tensor:
        return attend(q, torch.cat((k, new), 2), torch.cat((v, new), 2), enable_gqa=True)

    with torch.no_grad():
        want = compiled(fn)(q, k, v, new)
        torch.testing.assert_close(want, fn(q, k, v, new))
        run = compiled(fn)
        for rows, length in ((3, 39), (3, 40), (1, 40), (2, 40)):
            k_part, v_part = (x[:rows, :, -length:].clone() for x in (k, v))
            torch._dynamo.mark_dynamic(k_part, 2)
            torch._dynamo.mark_dynamic(v_part, 2)
            made = run(q[:rows].clone(), k_part, v_part, new[:rows].clone())
            assert torch.equal(made, want[:rows]) == (length == 40)
        with pytest.raises(RuntimeError, match="fewer values than keys"):
            run(q[:2].clone(), k_part, v_part[:, :, 1:].clone(), new[:2].clone())
        text = plait.explain(fn, q[:2].clone(), k_part, v_part, new[:2].clone(), options=OPTIONS)
    assert "not promised" not in text.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_is_trained(dtype: torch.dtype) -> None:
    """It has the bits that it has without gradients; these are the library's."""
    xs = [torch.randn(3, heads, 50, 32).to(dtype) for heads in (4, 2, 2)]
    fn = functools.partial(attend, is_causal=True, enable_gqa=True)
    with torch.no_grad():
        want = compiled(fn)(*xs)
    types = (dtype, dtype, torch.float64)
    trained, eager, wide = ([x[:2].to(t, copy=True).requires_grad_() for x in xs] for t in types)
    made = compiled(fn)(*trained)
    assert torch.equal(made, want[:2])
    for result in (made, fn(*eager), fn(*wide)):
        result.square().sum().backward()
    for x, y, z in zip(trained, eager, wide, strict=True):
        off, eagers = ((g.grad.double() - z.grad).abs().max() for g in (x, y))
        assert off <= 2.5 * eagers
    text = plait.explain(fn, *trained, options=OPTIONS, quiet=True).text
    assert text.count("not promised") == text.count("flash_attention_for_cpu_backward (") == 1


def test_heads_in_uneven_groups_are_the_librarys() -> None:
    """What it gives for them only eager knows: nothing reads beyond the keys."""
    q, k = torch.randn(1, 3, 8, 16), torch.randn(1, 2, 8, 16)
    fn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch.no_grad():
        assert compiled(lambda q, k: fn(q, k, k)[0])(q, k).shape == fn(q, k, k)[0].shape


@pytest.mark.parametrize("more", [3, 600])
@pytest.mark.parametrize("mask", ["bool", "least", "infinite"])
def test_keys_that_do_not_count_change_nothing(mask: str, more: int) -> None:
    n = 500
    q, k, v = (torch.randn(2, 2, t, 64) for t in (9, n + more, n + more))
    seen = torch.arange(n + more) < n
    least = torch.finfo(torch.float32).min if mask == "least" else -torch.inf
    given = seen if mask == "bool" else torch.where(seen, 0.0, least)
    given = given.expand(2, 1, 9, n + more)
    with torch.no_grad():
        long = compiled(attend)(q, k, v, given)
        short = compiled(attend)(
            q, k[:, :, :n].clone(), v[:, :, :n].clone(), given[..., :n].clone()
        )
    assert torch.equal(long, short)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (3, 17, 19)), (nn.Conv2d(3, 24, 4, stride=4), (3, 32, 32)),
        (nn.Conv2d(16, 24, 1), (16, 9, 9)), (nn.Conv1d(4, 8, 3), (4, 50)),
        (nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)).eval(), (8, 12, 12)),
    ],
)  # fmt: skip
def test_images(layer: nn.Module, shape: tuple[int, ...]) -> None:
    wrong = differing(layer, [torch.randn(ALL, *shape)])
    assert not [w for w in wrong if w[0] != "varies"]  # explain tells that this is not promised


class Tokens(nn.Module):
    """Of an image, channels first, with weights of the shape of a row: in a batch of one they look
    like another input."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(64, 96))
        self.layer, self.norm = nn.Linear(96, 96), nn.LayerNorm(96)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.flatten(2).transpose(1, 2)
        y = y + self.layer(y) + self.place
        return self.norm(y), y.mT.softmax(-1).mean(-1)


@pytest.mark.parametrize("sizes", [(64, 64, 1), (40, 48, 1), (40, 48, 7)])
def test_images_that_lie_apart(sizes: tuple[int, int, int]) -> None:
    """The only one of a batch lies without gaps, and is multiplied as a matrix."""
    channels, filters, side = sizes
    x, w = torch.randn(ALL, 2 * channels, side, side), torch.randn(filters, channels, 1, 1)
    assert not differing(lambda x, w: F.conv2d(x.chunk(2, 1)[0], w), [x], [w])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_in_two_orders_of_memory(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert not differing(Tokens().to(dtype), [torch.randn(ALL, 96, 8, 8).to(dtype)])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.RNN])
def test_recurrent_layers(layer: type[nn.RNNBase]) -> None:
    """PyTorch writes a layer of `batch_first` out by whether a batch, turned, is contiguous: of one
    row it is. oneDNN's LSTM goes by the batch."""
    torch.manual_seed(0)
    net = layer(24, 40, batch_first=True).to(torch.bfloat16).eval()
    with torch._dynamo.config.patch(allow_rnn=True):
        assert not differing(lambda x: net(x)[0], [torch.randn(ALL, 3, 24).to(torch.bfloat16)])


@pytest.mark.parametrize("seed", [26, 48, 70, 201, 202])
def test_random_programs(seed: int) -> None:
    """The first three were faults: a layer's only row that was taken for a bias; a product that was
    added unrounded where it was computed, and rounded where it was read; a sum whose order followed
    what it was fused with."""
    assert rows.check(rows.Maker(seed).generate()) == ""


def test_a_number_of_rows_that_varies_may_be_that_of_columns() -> None:
    """At the first call: where both are compared, it must not become that number (the fuzzer's seed
    910307)."""
    w = torch.randn(8, 8).to(torch.bfloat16)
    run = compiled(lambda x: F.linear(x, w) + x)
    x = torch.randn(8, 3, 8).to(torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        assert torch.equal(run(x)[:5], run(x[:5].clone()))


ROWS = ("gpt2", "vit")
"""Models that are tested daily as they are; others are frozen."""


def rows_of(out: Any) -> Tensor:
    return leaves(out)[0]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        pytest.param(name, frozen, marks=[] if (name in ROWS) != frozen else pytest.mark.slow)
        for name in ("gpt2", "bert", "llama", "vit")
        for frozen in (False, True)
    ],
)
def test_models(name: str, frozen: bool) -> None:
    make = {"gpt2": models.gpt2, "bert": models.bert, "llama": llama, "vit": models.vit}[name]
    model = make().eval()
    x = models.images(7) if name == "vit" else torch.randint(0, 211, (7, 24))

    def program(given: Tensor) -> Program:
        if frozen:
            return plait.compile(model, (given,), freeze=True, options=OPTIONS)
        return compiled(model)

    with torch.no_grad():
        want = rows_of(program(x)(x))
        for same in ([slice(1), slice(6, 7)], [slice(3)]):  # sizes
            run = program(x[same[0]].clone())
            for some in same:
                assert torch.equal(rows_of(run(x[some].clone())), want[some])
        if name in ("gpt2", "llama"):  # a later token changes nothing before it
            few = x[:2, :17].clone()
            assert torch.equal(rows_of(program(few)(few)), want[:2, :17])


def test_explain_tells_what_is_not_promised() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.fft.rfft(x.softmax(-1)).abs()

    text = plait.explain(fn, torch.randn(4, 8), options=OPTIONS).text
    assert "batch_invariant" in text and "not promised for calls of aten._fft_r2c" in text
    text = plait.explain(F.softmax, torch.randn(4, 8), -1, options=OPTIONS).text
    assert "not promised" not in text


@pytest.mark.parametrize("numerics", ["eager", "precise"])
def test_what_contradicts_it(numerics: str) -> None:
    with pytest.raises(UserError, match="batch_invariant"):
        plait.config.Config().with_options({**OPTIONS, "numerics": numerics})


def test_nothing_is_tuned() -> None:
    assert not plait.config.Config().with_options(OPTIONS, "max-autotune").autotune
