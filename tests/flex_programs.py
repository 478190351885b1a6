"""Attention with modified scores and masks, on any device: what is run and how it is judged."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.experimental._paged_attention import PagedAttention

from plait.errors import RefusedKernel
from plait.ir.calls import all_programs
from plait.wrapper.instructions import CallPython, Launch
from plait.wrapper.program import CompileRecord, observers
from tests.against_eager import poison

WRAPPERS = ("native", "python", "cpp", "fx")
Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """score: score_mod of captured tensors, or None. mask: mask_mod, or None.

    fixed: the sizes of captured tensors that come first, and want no gradient.
    captured: the sizes of the captured tensors, which want a gradient.
    heads: of queries and of keys.
    batches: of queries and of keys.
    lengths: of queries and of keys.
    width: of a key, and of a value.
    by_ids: queries see keys of their own number in a captured tensor, up to themselves.
    transposed: heads lie inside of positions, as after a projection.
    with_aux: logarithms of sums and greatest scores are results too.
    longer_queries: where lengths vary, those of queries do.
    scale: of scores."""

    score: Callable[..., Mod] | None = None
    mask: Mod | None = None
    fixed: tuple[tuple[int, ...], ...] = ()
    captured: tuple[tuple[int, ...], ...] = ()
    heads: tuple[int, int] = (4, 4)
    batches: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (37, 37)
    width: int = 16
    by_ids: bool = False
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    with_aux: bool = False
    longer_queries: bool = True
    scale: float | None = None

    def program(self, device: str) -> Callable[..., Any]:
        """The function of queries, keys, values and captured tensors."""
        on_gpu = device != "cpu"  # greatest scores are given there only
        seen = self.mask
        if self.by_ids:
            ids = torch.arange(max(self.lengths), device=device) // 7
            seen = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
        mask = seen and flex.create_block_mask(
            seen, self.batches[0], None, *self.lengths, device=device
        )

        made = torch.Generator().manual_seed(1)
        fixed = [torch.randn(sizes, generator=made).to(device) for sizes in self.fixed]

        def run(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Any:
            aux = flex.AuxRequest(lse=True, max_scores=on_gpu) if self.with_aux else None
            score = self.score and self.score(*fixed, *captured)
            more = {"enable_gqa": self.heads[0] != self.heads[1], "return_aux": aux}
            more["scale"] = self.scale
            if self.transposed:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = flex.flex_attention(q, k, v, score_mod=score, block_mask=mask, **more)
            if aux is None:
                return out
            found, sums = out
            return (found, sums.lse, sums.max_scores) if on_gpu else (found, sums.lse)

        return run

    def inputs(self, device: str, seed: int = 0, longer: int = 0) -> list[Tensor]:
        """Values, every one from another seed. longer: by how much lengths are."""
        made = torch.Generator().manual_seed(seed)
        more = (longer if self.longer_queries else 0, longer)
        sizes = zip(self.batches, self.heads, self.lengths, more, strict=True)
        dims = [[b, h, n + extra, self.width] for b, h, n, extra in sizes]
        if self.transposed:
            dims = [[b, n, h, d] for b, h, n, d in dims]
        shapes = (dims[0], dims[1], dims[1], *self.captured)
        values = [torch.randn(list(shape), generator=made) for shape in shapes]
        return [x.to(device, self.dtype).requires_grad_() for x in values]


def _soft_cap() -> Mod:
    return lambda s, b, h, i, j: 5 * torch.tanh(s / 5)


def _alibi(slopes: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + (j - i) * slopes[h]


def _bias(bias: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + bias[h, i, j]


def _distances(by_distance: Tensor) -> Mod:
    return lambda s, b, h, i, j: s * by_distance[(i - j).abs() % 8]


def _constants(t: Tensor) -> Mod:
    return lambda s, b, h, i, j: s * 1.5 + t[h, i - j] * t[h, 0] + t[h, 1] * t[1, j]


def _divided(t: Tensor) -> Mod:
    """s or -s; outside of the tensors it has the gradient 0 / 0."""
    return lambda s, b, h, i, j: s * (t[i] * t[j]) / (t[i] * t[j]).abs()


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < 5


def _document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i // 7 == j // 7) & (i >= j)


def _prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j < 4 + b) | (i >= j)


def _thirds(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j % 3 != 0


def _half_empty(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i > 9)


CASES = {
    "plain": Case(lengths=(9, 21), with_aux=True),
    "whole": Case(lengths=(9, 21)),
    "causal heads": Case(mask=_causal, with_aux=True),
    "causal": Case(mask=_causal, transposed=True),
    "window": Case(mask=_window, dtype=torch.bfloat16),
    "document": Case(mask=_document, heads=(4, 2), with_aux=True),
    "prefix": Case(mask=_prefix, batches=(2, 1)),
    "alibi": Case(_alibi, _causal, captured=((4,),), heads=(4, 1)),
    "soft cap": Case(_soft_cap, _half_empty),
    "bias": Case(_bias, None, captured=((4, 37, 37),)),
    "distances": Case(_distances, _window, captured=((8,),)),
    "constants": Case(_constants, _causal, captured=((4, 40),), heads=(4, 2)),
    "decode": Case(_soft_cap, None, heads=(4, 2), lengths=(1, 50), with_aux=True),
    "double": Case(
        _alibi, _causal, captured=((4,),), lengths=(9, 12), dtype=torch.float64, with_aux=True
    ),
    "ids": Case(by_ids=True, heads=(4, 2)),
    "divided": Case(_divided, None, fixed=((37,),), heads=(1, 1), batches=(1, 1)),
    "half a block": Case(
        None, _thirds, heads=(1, 1), batches=(1, 1), lengths=(160, 192), with_aux=True
    ),
    "negative scale": Case(None, _causal, scale=-0.5),
    "infinite scores": Case(
        lambda: lambda s, b, h, i, j: torch.where(i == 2, (3.5 - j) * math.inf, s), with_aux=True
    ),
    "some scores": Case(lambda: lambda s, b, h, i, j: torch.where(j % 3 == 0, i * 0.1, s), _window),
}
LARGE = {
    "causal heads": Case(
        _soft_cap, _causal, heads=(4, 2), lengths=(300, 300), width=128, dtype=torch.bfloat16
    ),
    "plain": Case(None, _causal, lengths=(200, 200), width=64, dtype=torch.bfloat16),
    "odd width": Case(None, _window, lengths=(150, 170), width=80, dtype=torch.float16),
    "widest": Case(_soft_cap, _document, lengths=(130, 130), width=256, dtype=torch.bfloat16),
    "ids": Case(by_ids=True, batches=(3, 3), lengths=(270, 270), width=64, dtype=torch.bfloat16),
    "whole": Case(_soft_cap, None, lengths=(256, 384), width=64, dtype=torch.bfloat16),
    "single": Case(_soft_cap, _prefix, lengths=(200, 140), width=64),
    "one of many": Case(_soft_cap, None, heads=(8, 1), lengths=(1, 500), width=64),
    "few of many": Case(
        _soft_cap, _half_empty, heads=(6, 2), lengths=(13, 900), width=64, with_aux=True
    ),
    "parts": Case(
        lambda: lambda s, b, h, i, j: s * (h + 1) - j % (b + 2),
        None,
        batches=(3, 3),
        heads=(8, 2),
        lengths=(1, 1100),
        width=80,
        dtype=torch.bfloat16,
        with_aux=True,
    ),
}
"""Cases that fill a GPU's blocks."""


def check_tables(wrapper: str, device: str) -> None:
    """Lists of whole blocks have other strides than those of masked ones, or are those of every
    batch and head where these are of all: each is read by its own."""
    n, made = 64, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=made).to(device) for _ in range(3))
    blocks = flex.create_block_mask(_causal, None, None, n, n, device, BLOCK_SIZE=16)
    masked = blocks.kv_num_blocks, blocks.kv_indices
    full: Any = blocks.full_kv_num_blocks, blocks.full_kv_indices
    of_each_masked, of_each_full = (
        [x.expand(2, 2, *x.shape[2:]).contiguous() for x in tables] for tables in (masked, full)
    )
    turned = full[0], full[1].mT.contiguous().mT
    options: Any = {"wrapper": wrapper, "strict": True}
    compiled = torch.compile(flex.flex_attention, backend="plait", options=options)
    for pair in ((of_each_masked, full), (masked, of_each_full), (masked, turned)):
        tables = [x for kind in pair for x in kind]
        seen = flex.BlockMask.from_kv_blocks(
            *tables, BLOCK_SIZE=16, mask_mod=_causal, seq_lengths=(n, n), compute_q_blocks=False
        )
        torch.testing.assert_close(
            compiled(q, k, v, block_mask=seen), flex.flex_attention(q, k, v, block_mask=seen)
        )


def check_pages(n_queries: int, wrapper: str, device: str) -> None:
    """Two sequences of 70 and 33 keys lie in pages of one cache, whose order is random: the last
    queries of both see what they do where keys lie side by side. No Python is called."""
    lengths, size, made = (70, 33), 16, torch.Generator().manual_seed(0)
    pages = PagedAttention(12, size, 2, device=device)
    torch.manual_seed(0)
    pages.empty_pages = torch.randperm(12).tolist()
    n_keys = torch.tensor(lengths, device=device)
    k, v = (torch.randn(2, 2, 80, 16, generator=made).to(device) for _ in range(2))
    q = torch.randn(2, 4, n_queries, 16, generator=made).to(device)
    k_cache, v_cache = (torch.zeros(1, 2, 12 * size, 16, device=device) for _ in range(2))
    for b in range(2):
        at = torch.tensor([b], device=device)
        pages.reserve(at, torch.tensor([80], device=device))
        places = torch.arange(80, device=device)[None]
        pages.assign(at, places, k[b : b + 1], v[b : b + 1], k_cache, v_cache)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + n_keys[b] - n_queries >= j

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + (j - i) * 0.1

    blocks = flex.create_block_mask(seen, 2, None, n_queries, 80, device, BLOCK_SIZE=size)
    in_pages = pages.convert_logical_block_mask(blocks, kv_len=n_keys)
    moved = pages.get_score_mod(score, n_keys)

    def run(q: Tensor, k: Tensor, v: Tensor, score: Mod, blocks: Any) -> Tensor:
        found: Tensor = flex.flex_attention(q, k, v, score, blocks, enable_gqa=True)
        return found

    options: Any = {"wrapper": wrapper, "strict": True}
    compiled = torch.compile(run, backend="plait", options=options)
    got = compiled(q, k_cache, v_cache, moved, in_pages)
    torch.testing.assert_close(got, run(q, k, v, score, blocks))


def check_found_lengths(wrapper: str, device: str) -> None:
    """Queries and keys as many as tensors say; without keys eager fails, and so does a program."""

    def run(q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> Any:
        keys = k[:, :, : n.item()]
        changed = lambda s, b, h, i, j: s + (i - j) * 0.1
        plain = flex.flex_attention(q, keys, keys, return_aux=flex.AuxRequest(lse=True))
        return *plain, flex.flex_attention(q[:, :, : m.item()], keys, keys, changed)

    torch._dynamo.reset()
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, n, 16, generator=made).to(device) for n in (5, 7))
    options: Any = {"wrapper": wrapper, "strict": True}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(run, backend="plait", options=options)
        for sizes in ((3, 4), (5, 7), (1, 1), (2, 7)):
            m, n = map(torch.tensor, sizes)
            got, want = compiled(q, k, m, n), run(q, k, m, n)
            torch.testing.assert_close(got[0], want[0])
            torch.testing.assert_close(got[1].lse, want[1].lse)
            torch.testing.assert_close(got[2], want[2])
        with pytest.raises((RuntimeError, IndexError)):
            compiled(q, k, torch.tensor(2), torch.tensor(0))


def check_ignored(wrapper: str, device: str) -> None:
    """A score that the function ignores has the gradient 0; eager's backward fails there."""
    w = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    ignores = Case(lambda: lambda s, b, h, i, j: (i - j) * w[h])
    reads = Case(lambda: lambda s, b, h, i, j: 0 * s + (i - j) * w[h])
    given = [*ignores.inputs(device), w]
    options: Any = {"wrapper": wrapper, "strict": True}
    torch._dynamo.reset()

    def gradients(case: Case, compiles: bool) -> list[Tensor]:
        run: Any = case.program(device)
        fn = lambda q, k, v, w: run(q, k, v)
        if compiles:
            fn = torch.compile(fn, backend="plait", options=options)
        return results(fn, given)

    with gradients_anywhere():
        got, want = gradients(ignores, True), gradients(reads, False)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def check_refused(name: str, wrapper: str, device: str) -> None:
    """A kernel that its compiler refuses takes no more than its own call down the ladder."""
    pipeline: Any = importlib.import_module("plait.compile")
    build, refused = pipeline._build, set[str]()

    def built(sources: Any, cfg: Any) -> Any:
        for unit in (u for s in sources.values() for u in s.units):
            if unit.name.startswith("attention_") and not refused:
                refused.add(unit.name)
            if unit.name in refused:
                error = RefusedKernel(f"Triton refused kernel {unit.name}: a test")
                error.kernel = unit.name
                raise error
        return build(sources, cfg)

    case = CASES[name]
    run = case.program(device)
    two = lambda q, k, v: (run(q, k, v), flex.flex_attention(q, k, v))
    given = [x.detach() for x in case.inputs(device)]
    options: Any = {"wrapper": wrapper, "strict": False}
    made: list[CompileRecord] = []
    torch._dynamo.reset()
    token = observers.set((made.append,))
    try:
        with mock.patch.object(pipeline, "_build", built):
            got = torch.compile(two, backend="plait", options=options)(*given)
    finally:
        observers.reset(token)
    torch.testing.assert_close(got, two(*given), rtol=1e-3, atol=1e-3)
    (step,) = made[-1].ladder
    assert step.rung == "operators" and step.what == "higher_order::flex_attention", step
    assert "a test" in step.reason, step
    launched = {i.kernel for i in made[-1].wrapper.body if isinstance(i, Launch)}
    assert len([k for k in launched if k.startswith("attention_result")]) == 1, launched


SCORES = (
    "s + (i - j) * 0.1", "s * t[h % 4]", "2.0 * torch.tanh(s / 2)", "(s * s + 1).sqrt() - s",
    "torch.where(i % 3 == j % 2, s, s - 1.5)", "s + t[(i - j).abs() % 5]", "s * (b + 1)",
    "s + (t[j % 7] > 0).to(s.dtype)", "torch.sigmoid(s) + t[(i * 3 + h) % 8]", "s.clamp(-1, 1)",
    "s * t[i % 4].exp() + t[(i - j) % 5 - 5]", "s + t[b] * t[h]",
    "s - torch.exp(-(i - j).abs() / 4)", "s + i // 5 - j // 7", "torch.maximum(s, t[b % 2])",
)  # fmt: skip
MASKS = (
    "i >= j", "(i - j).abs() < 6", "i // 5 == j // 5", "j < 3 + b", "(h % 2 == 0) | (i >= j)",
    "(j % 3 != 0)", "~(i < 4)", "(i + j) % 7 != h", "i - j >= -(j // 4)", "j != i",
)  # fmt: skip


def random_case(seed: int) -> Case:
    """Formulas of one to three of these, of other sizes each."""
    rng = random.Random(seed)
    heads = rng.choice(((4, 4), (4, 2), (4, 1), (3, 3)))
    batches = rng.choice(((2, 2), (1, 1), (3, 1)))
    scores = rng.sample(SCORES, rng.randrange(4))
    steps = "".join(f"    s = {text}\n" for text in scores)
    names: dict[str, Any] = {"torch": torch}
    exec(f"def score(t):\n  def f(s, b, h, i, j):\n{steps}    return s\n  return f", names)
    masks = rng.sample(MASKS, rng.randrange(3))
    if batches == (3, 1) and not masks:  # PyTorch wants a mask then
        masks = ["i >= j"]
    joined = f" {rng.choice('&|')} ".join(f"({text})" for text in masks)
    exec(f"def mask(b, h, i, j):\n    return {joined or 'i >= 0'}", names)
    captures = rng.choice(("fixed", "captured")) if "t[" in steps else "fixed"
    tables: dict[str, Any] = {captures: ((8,),) * bool(scores)}
    return Case(
        names["score"] if scores else None, names["mask"] if masks else None, **tables,
        heads=heads, batches=batches, lengths=(rng.randrange(1, 50), rng.randrange(1, 70)),
        width=rng.choice((8, 16, 24, 32)), transposed=rng.random() < 0.3,
        dtype=rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        with_aux=rng.random() < 0.3,
    )  # fmt: skip


@contextmanager
def gradients_anywhere() -> Iterator[None]:
    """PyTorch's function refuses gradients on a CPU, its operator does not."""
    with mock.patch.object(flex, "_validate_device", lambda *_: None):
        yield


def results(fn: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """Results, and gradients of a weighted sum of them."""
    out = fn(*given)
    outs = list(out) if isinstance(out, tuple) else [out]
    weights = [torch.linspace(-1, 1, o.numel(), device=o.device).reshape(o.shape) for o in outs]
    finite = [torch.where(o.isfinite(), o, 0) for o in outs]
    total = sum((o * w.to(o.dtype)).sum() for o, w in zip(finite, weights, strict=True))
    return [*outs, *torch.autograd.grad(total, given)]


def judge(got: Sequence[Tensor], fn: Callable[..., Any], given: Sequence[Tensor]) -> None:
    """got is no further from what float64 gives than eager is, but for a tolerance."""
    eager = results(fn, given)
    wide = results(fn, [x.detach().double().requires_grad_() for x in given])
    for k, (mine, theirs, true) in enumerate(zip(got, eager, wide, strict=True)):
        assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride()), k
        assert torch.equal(mine.isfinite(), theirs.isfinite()), k
        assert torch.equal(mine.isnan(), theirs.isnan()), k
        off, allowed = (
            torch.where(true.isfinite(), x.double() - true, 0).abs().max() for x in (mine, theirs)
        )
        slack = 1000 if theirs.dtype == torch.float64 else 4  # nothing is nearer than eager there
        unit = (
            slack * torch.finfo(mine.dtype).eps * torch.where(true.isfinite(), true, 0).abs().max()
        )
        assert off <= 2 * allowed + unit, (k, float(off), float(allowed), float(unit))


def check(
    name: str | Case, wrapper: str, device: str, longer: Sequence[int] = (0, 0)
) -> list[CompileRecord]:
    """A case, compiled once for a target, forward and backward, does what eager does. No Python is
    called. Gives what was compiled. longer: by how much the lengths of each call are, dynamic where
    they differ."""
    case = name if isinstance(name, Case) else CASES[name]
    fn = case.program(device)
    torch._dynamo.reset()
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    try:
        with gradients_anywhere():
            compiled = torch.compile(
                fn,
                backend="plait",
                dynamic=len(set(longer)) > 1,
                options={"wrapper": wrapper, "strict": True},
            )
            for seed, more in enumerate(longer):
                given = case.inputs(device, seed, more)
                poison((given, results(fn, given)))
                judge(results(compiled, given), fn, given)
    finally:
        observers.reset(token)
    # The backward pass of another device is compiled in a thread of its own, unobserved.
    assert len(made) == 2 or device != "cpu", [record.name for record in made]
    for record in made:
        every = [i for p in all_programs(record.wrapper) for i in p.body]
        assert not any(isinstance(i, CallPython) for i in every), record.name
    return made
