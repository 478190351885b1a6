"""Random numbers: the bits of Philox, distributions, seeds, and equal values in forward, backward
and recomputation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import UserError
from plait.runtime import philox
from tests.against_eager import compiled

M32 = 0xFFFFFFFF


def reference_words(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox4x32-10 on Python integers, from its definition."""
    k0, k1 = key
    c = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 & M32, (p0 >> 32) ^ c[3] ^ k1, p0 & M32)
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c


def test_known_answers_of_philox() -> None:
    """The test vectors published with the algorithm (Random123)."""
    assert reference_words((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert reference_words((M32, M32), (M32, M32, M32, M32)) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 0x123456789ABCDEF, -1])
@pytest.mark.parametrize("offset", [0, 7, M32])
def test_words_equal_the_reference(seed: int, offset: int) -> None:
    index = torch.tensor([0, 1, 5, M32, 2**32, 2**40 + 3])
    words = philox.philox_words(torch.tensor(seed), index, offset)
    for n, i in enumerate(index.tolist()):
        want = reference_words((seed & M32, (seed >> 32) & M32), (i & M32, i >> 32, offset, 0))
        assert tuple(int(w[n]) for w in words) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_uniform_stays_below_one(dtype: torch.dtype) -> None:
    u = torch.ops.plait.philox_uniform(torch.tensor(3), 0, [200_000], dtype)
    assert u.dtype == dtype and u.min() >= 0 and u.max() < 1
    assert abs(u.double().mean().item() - 0.5) < 0.01


def test_randint_covers_its_range() -> None:
    r = torch.ops.plait.philox_randint(torch.tensor(3), 0, -3, 4, [10_000], torch.int64)
    assert sorted(set(r.tolist())) == list(range(-3, 4))
    with pytest.raises(UserError, match="empty range"):
        torch.ops.plait.philox_randint(torch.tensor(3), 0, 4, 4, [1], torch.int64)


def ks(sample: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov-Smirnov distance times the square root of the number of samples; above 2.2 has a
    chance of 1e-4."""
    x = sample.double().flatten().sort().values
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    p = cdf(x)
    return float(torch.maximum((p - steps[:-1]).abs(), (steps[1:] - p).abs()).max()) * math.sqrt(n)


CONTINUOUS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda x: torch.rand(100, 200), lambda x: x.clamp(0, 1)),
    "rand_like": (lambda x: torch.rand_like(x), lambda x: x.clamp(0, 1)),
    "randn": (lambda x: torch.randn(100, 200), torch.special.ndtr),
    "randn_like": (lambda x: torch.randn_like(x), torch.special.ndtr),
    "uniform_": (
        lambda x: torch.empty_like(x).uniform_(-2, 5),
        lambda x: ((x + 2) / 7).clamp(0, 1),
    ),
    "normal_": (
        lambda x: torch.empty_like(x).normal_(1, 3),
        lambda x: torch.special.ndtr((x - 1) / 3),
    ),
    "normal": (
        lambda x: torch.normal(x * 0 + 1, x * 0 + 3),
        lambda x: torch.special.ndtr((x - 1) / 3),
    ),
    "normal float mean": (
        lambda x: torch.normal(1.0, x * 0 + 3),
        lambda x: torch.special.ndtr((x - 1) / 3),
    ),
    "normal float std": (
        lambda x: torch.normal(x * 0 + 1, 3.0),
        lambda x: torch.special.ndtr((x - 1) / 3),
    ),
    "normal of size": (
        lambda x: torch.normal(1.0, 3.0, (100, 200)),
        lambda x: torch.special.ndtr((x - 1) / 3),
    ),
    "exponential_": (
        lambda x: torch.empty_like(x).exponential_(2.0),
        lambda x: 1 - torch.exp(-2 * x),
    ),
    "log_normal_": (
        lambda x: torch.empty_like(x).log_normal_(0.5, 2.0),
        lambda x: torch.special.ndtr((x.log() - 0.5) / 2),
    ),
    "cauchy_": (
        lambda x: torch.empty_like(x).cauchy_(1.0, 2.0),
        lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi,
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_distribution(name: str) -> None:
    fn, cdf = CONTINUOUS[name]
    sample = compiled(fn)(torch.ones(100, 200))
    assert sample.shape == (100, 200)
    assert ks(sample, cdf) < 2.2


DISCRETE: dict[str, tuple[Callable[[Tensor], Tensor], dict[float, float]]] = {
    "randint": (lambda x: torch.randint(2, 6, (100, 200)), dict.fromkeys((2, 3, 4, 5), 0.25)),
    "randint_like": (lambda x: torch.randint_like(x, 4), dict.fromkeys(range(4), 0.25)),
    "randint_like low": (lambda x: torch.randint_like(x, 2, 6), dict.fromkeys((2, 3, 4, 5), 0.25)),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), {0: 0.7, 1: 0.3}),
    "bernoulli p": (lambda x: torch.bernoulli(x, 0.3), {0: 0.7, 1: 0.3}),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.3), {0: 0.7, 1: 0.3}),
    "bernoulli_ tensor": (lambda x: torch.empty_like(x).bernoulli_(x * 0.3), {0: 0.7, 1: 0.3}),
    "geometric_": (
        lambda x: torch.empty_like(x).geometric_(0.4),
        {k: 0.4 * 0.6 ** (k - 1) for k in (1, 2, 3, 4)},
    ),
    "dropout": (lambda x: F.dropout(x, 0.25), {0: 0.25, 1 / 0.75: 0.75}),
    "nothing dropped": (lambda x: F.dropout(x, 0.0), {1: 1.0}),
    "all dropped": (lambda x: F.dropout(x, 1.0), {0: 1.0}),
    "not training": (lambda x: F.dropout(x, 0.5, training=False), {1: 1.0}),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_frequencies(name: str) -> None:
    fn, want = DISCRETE[name]
    x = torch.ones(100, 200)
    sample = compiled(fn)(x)
    assert sample.dtype == fn(x).dtype
    for value, p in want.items():
        found = (sample.double() - value).abs().lt(1e-6).double().mean().item()
        assert abs(found - p) <= 4 * math.sqrt(p * (1 - p) / sample.numel()), (value, found, p)


@pytest.mark.parametrize(
    "fn", [torch.rand_like, lambda x: F.dropout(x, 0.5), lambda x: torch.randint_like(x, 1000)]
)
def test_seed_is_respected_and_advances(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(64)
    run = compiled(fn)
    torch.manual_seed(5)
    first, second = run(x), run(x)
    torch.manual_seed(5)
    assert torch.equal(run(x), first) and torch.equal(run(x), second)
    assert not torch.equal(first, second)


def test_two_draws_of_one_graph_differ() -> None:
    a, b = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.ones(64))
    assert not torch.equal(a, b)
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.5


def test_memory_order_of_the_argument_is_kept() -> None:
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    out = compiled(torch.rand_like)(x)
    assert out.stride() == x.stride()
    assert out.unique().numel() > 100


@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_mask_is_the_same_in_backward(dynamic: bool) -> None:
    run = compiled(lambda x: F.dropout(x, 0.4), dynamic=dynamic)
    x = torch.full((50, 60), 2.0, requires_grad=True)
    out = run(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach() / 2)
    assert 0.5 < out.ne(0).float().mean().item() < 0.7


def test_one_compile_serves_many_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("plait")
    fn = torch.compile(
        lambda x: F.dropout(x, 0.5) + torch.rand_like(x), backend=counter, dynamic=True
    )
    for n in (3, 5, 8):
        assert fn(torch.ones(n, 4)).shape == (n, 4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("reentrant", [False])
def test_checkpointing_recomputes_the_same_numbers(reentrant: bool) -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5) * torch.rand_like(x)

    def fn(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant).exp() - 1

    x = torch.linspace(0.1, 1.0, 3000, requires_grad=True)
    y = compiled(fn)(x)
    y.sum().backward()
    # With k = mask * scale * uniform: y = exp(k sin x) - 1, so y' = (y + 1) k cos x, and k comes
    # back from y.
    k = (y.detach() + 1).log() / x.detach().sin()
    torch.testing.assert_close(
        x.grad, (y.detach() + 1) * k * x.detach().cos(), rtol=1e-4, atol=1e-5
    )
    assert 0.4 < y.ne(0).float().mean().item() < 0.6


def test_explicit_generators_are_left_to_torch() -> None:
    def fn(x: Tensor, g: torch.Generator) -> Tensor:
        return x + torch.rand(4, generator=g)

    want = fn(torch.ones(4), torch.Generator().manual_seed(3))
    got = compiled(fn)(torch.ones(4), torch.Generator().manual_seed(3))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "fn", [lambda x: torch.randperm(50), lambda x: torch.multinomial(x, 5), torch.poisson]
)
def test_operators_without_a_rule_use_torch_s_generator(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(50)
    run = compiled(fn)
    run(x)
    torch.manual_seed(11)
    want = fn(x)
    torch.manual_seed(11)
    assert torch.equal(run(x), want)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda x: torch.normal(0.0, x),
    "normal of two": lambda x: torch.normal(x, x),
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: x.clone().bernoulli_(x),
    "bernoulli of a number": lambda x: x.clone().bernoulli_(-0.5),
    "uniform": lambda x: x.clone().uniform_(2.0, 1.0),
    "dropout": lambda x: torch.ops.aten.native_dropout(x, 2.0, True),
    "randint": lambda x: torch.randint(300, (3,), dtype=torch.uint8),
    "randint of bools": lambda x: torch.randint(3, (3,), dtype=torch.bool),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "poisson": torch.poisson,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters(name: str) -> None:
    """What a distribution cannot have fails as in eager: as an input of the graph and as a constant
    of it."""
    for value in (-0.25, math.nan):
        x = torch.tensor([0.5, value, 0.5])
        for run in (
            WRONG[name],
            lambda _, value=value: WRONG[name](torch.tensor([0.5, value, 0.5])),
        ):
            for fn in (run, torch.compile(run, backend="plait")):
                with pytest.raises(RuntimeError):
                    fn(x)


@pytest.mark.parametrize("kernels", [True, False])
def test_parameters_at_the_ends(kernels: bool) -> None:
    p = torch.tensor([0.0, 1.0, 1.0, 0.0])

    def f(p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.bernoulli(p),
            torch.normal(p, torch.zeros(4)),
            torch.normal(0.0, p),
            torch.bernoulli(p[:0]),
        )

    drawn = torch.compile(f, backend="plait", options={"kernels": kernels})(p)
    assert torch.equal(drawn[0], p) and torch.equal(drawn[1], p) and drawn[2][0] == 0 == drawn[2][3]


def test_the_numbers_of_eager() -> None:
    """With eager_random, operators draw what they draw without a compiler, in inference and
    training."""

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.5) + torch.rand_like(x) + torch.randn(x.shape)

    f = torch.compile(fn, backend="plait", options={"eager_random": True})
    for wants_grad in (False, True):
        x = torch.ones(64, 8, requires_grad=wants_grad)
        for _ in range(2):
            torch.manual_seed(4)
            want = fn(x)
            torch.manual_seed(4)
            got = f(x)
            assert torch.equal(got, want)
        if wants_grad:
            (a,), (b,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)
            assert torch.equal(a, b)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_an_operator_whose_name_is_a_word_of_python(wrapper: str, own: bool) -> None:
    """`aten.random.from`, which no Python can spell."""
    run = plait.compile(
        lambda x: x.random_(3, 5) * 1,
        (torch.ones(64),),
        options={"wrapper": wrapper, "eager_random": own},
    )
    assert set(run(torch.ones(64)).tolist()) == {3.0, 4.0}


DRAWS = random.Random(3)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str
)
def test_numbers_of_a_generator_of_the_users_own(dtype: torch.dtype) -> None:
    """Dynamo traces them as float32 and hands float64 in."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * DRAWS.random(), x + DRAWS.random()

    x = torch.arange(4).to(dtype)
    DRAWS.seed(3)
    wants = fn(x)
    DRAWS.seed(3)
    torch._dynamo.reset()
    gots = torch.compile(fn, backend="plait", options={"strict": True})(x)
    for want, got in zip(wants, gots, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
