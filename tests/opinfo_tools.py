"""Drives PyTorch's own op samples through plait: several samples of an op as one function, so that
they share a compile.

The rule for a mismatch is distance from float64: plait is wrong only where it is further from the
float64 result than eager is, beyond tolerance. Where terms cancel, eager is exact by chance: it is
also measured at points nearby, with each result rounded otherwise. What eager refuses, plait has to
refuse.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from plait import compat
from plait.capture.early_kernels import early_changes
from plait.compile import compile_graph
from plait.config import Config
from plait.graph.captured import Captured, GraphKind
from plait.pipelines import split_joint

# Results that are random or uninitialised: tests/test_capture_random.py checks the former by their
# statistics.
RANDOM = frozenset(
    """bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric
    log_normal multinomial new_empty new_empty_strided normal nn.functional.alpha_dropout
    nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward
    nn.functional.rrelu pca_lowrank rand_like randint randint_like randn randn_like svd_lowrank
    uniform""".split()
)
# Samples that AOTAutograd itself cannot trace without Dynamo around it (values of tensors, sparse
# layouts, jiterator).
UNTRACEABLE = frozenset(
    """allclose argwhere combinations corrcoef cov equal item jiterator_2inputs_2outputs
    jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref
    jiterator_unary linalg.lstsq masked_select nonzero nonzero_static resize_ resize_as_ sparse.mm
    sparse.sampled_addmm tensor_split unique unique_consecutive nn.functional.ctc_loss
    nn.functional.gaussian_nll_loss to_sparse nn.functional.scaled_dot_product_attention""".split()
)
# Their complex numbers come out wrong where AOTAutograd calls the operator under a mode of Python's
# dispatcher (aot_eager, too); by Dynamo and plait.compile they are right.
UNTRACEABLE_COMPLEX = frozenset(("pinverse", "linalg.pinv", "linalg.pinv.singular"))

# Ops that refuse tensors whose last stride is not 1.
DENSE = frozenset(("view_as_complex",))


@dataclass
class Case:
    """One sample: its leaves, which of them are tensors, and how to call the op on them."""

    call: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    tensors: list[int]

    @staticmethod
    def of(op: Any, sample: Any) -> Case:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        return Case(
            op.op, leaves, spec, [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        )

    def inputs(self) -> list[torch.Tensor]:
        return [self.leaves[k] for k in self.tensors]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The op's tensor results."""
        leaves = list(self.leaves)
        for k, t in zip(self.tensors, tensors, strict=True):
            leaves[k] = t
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return [
            x
            for x in pytree.tree_leaves(self.call(first, *args, **kwargs))
            if isinstance(x, torch.Tensor)
        ]


@dataclass
class Outcome:
    """What went wrong, sample by sample, and what fell back to extern calls."""

    failures: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)


def name_of(op: Any) -> str:
    """An op as a test id."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def behind_dynamo(op: Any, dtype: torch.dtype) -> bool:
    """Whether its samples need Dynamo."""
    unfit = name_of(op) in UNTRACEABLE_COMPLEX and dtype.is_complex
    return op.name in UNTRACEABLE or unfit or op.name.startswith("masked.")


def pick(
    op: Any,
    dtype: torch.dtype,
    count: int,
    requires_grad: bool = False,
    strided: Container[int] = (),
    device: str = "cpu",
) -> list[Case]:
    """At most `count` samples of an op, evenly spaced over all it has. strided: which of them are
    made not contiguous, where the op takes such tensors."""
    strided = () if op.name in DENSE else strided
    samples = list(op.sample_inputs(device, dtype, requires_grad=requires_grad))
    count = min(count, len(samples))
    chosen = [samples[k * len(samples) // count] for k in range(count)]
    return [Case.of(op, s.noncontiguous() if k in strided else s) for k, s in enumerate(chosen)]


def traceable(case: Case) -> bool:
    """Whether AOTAutograd can trace a case and its gradient by itself: no control flow on the
    values of tensors."""
    mode = FakeTensorMode()
    inputs = [mode.from_tensor(t.detach()).requires_grad_(t.requires_grad) for t in case.inputs()]
    with mode:
        try:
            _gradients(case.run(inputs), inputs)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ):
            return False
        except AssertionError as error:  # a tensor made inside the op
            return "Please convert all Tensors" not in str(error)
    return True


def check_through_dynamo(case: Case) -> Outcome:
    """One case through torch.compile, with graph breaks allowed."""
    outcome = Outcome()
    inputs = [t.detach() for t in case.inputs()]
    with torch.no_grad():
        want = case.run([t.clone() for t in inputs])
        torch._dynamo.reset()
        got = torch.compile(case.run, backend="plait")([t.clone() for t in inputs])
    _compare([case], [want], [got], outcome, "result")
    return outcome


def compiled(
    fn: Callable[..., Any], outcome: Outcome, dynamic: bool = False, cfg: Config | None = None
) -> Callable[..., Any]:
    """fn through AOTAutograd and plait, without Dynamo (which would cost more than all the
    rest)."""
    config = cfg or Config.from_env()

    def compiler(kind: GraphKind) -> Callable[..., Any]:
        def run(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            program = compile_graph(Captured(gm, f"{kind}_opinfo", kind), config)
            outcome.fallbacks |= dict(program.record.fallback_reasons)
            return program.boxed

        return run

    made = aot_function(
        fn,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=functools.partial(split_joint, config),
        decompositions=compat.decompositions.decomposition_table(),
        keep_inference_input_mutations=True,
        dynamic=dynamic,
    )

    def traced(*args: Any) -> Any:
        with early_changes:  # the first call traces
            return made(*args)

    return traced


_ILL_DEFINED = "ill-defined"  # gradients that eager refuses for their values; no tracing sees them
_NEARBY = 8  # points
_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]


@dataclass
class Truth:
    """A result in float64, and the most that eager is away from float64, at the operands and at
    points nearby."""

    value: torch.Tensor
    error: torch.Tensor


def truths(run: _Run, operands: Sequence[torch.Tensor]) -> list[Truth | None]:
    """Of each result of run, None where it has none; none at all if float64 is refused."""
    found: list[Truth | None] = []
    for k in range(1 + _NEARBY):
        here = [_moved(t, k) if k else t for t in operands]
        try:
            wide = run([_wide(t) for t in here])
            with _Rounding(k) if k else contextlib.nullcontext():
                low = run(here)
        except (RuntimeError, TypeError, NotImplementedError):
            if k == 0:
                return []
            continue
        new = [
            None if w is None or x is None or w.shape != x.shape else Truth(w, (x.to(w) - w).abs())
            for w, x in zip(wide, low, strict=True)
        ]
        if k == 0:
            found = new
        for old, other in zip(found, new, strict=True):
            if old and other and old.error.shape == other.error.shape:
                old.error = torch.maximum(old.error, other.error.nan_to_num())
    return found


def _wide(t: torch.Tensor) -> torch.Tensor:
    if not t.is_floating_point() and not t.is_complex():
        return t.detach()
    return t.detach().to(_WIDE.get(t.dtype, torch.float64)).requires_grad_(t.requires_grad)


class _Rounding(TorchDispatchMode):
    """New results of operators are one unit in the last place off, at most."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not isinstance(made, torch.Tensor) or func.is_view:
            return made
        self.seed += _NEARBY
        return _moved(made, self.seed).detach() if made.layout == torch.strided else made


def _moved(t: torch.Tensor, seed: int) -> torch.Tensor:
    """t with each float a little larger or smaller: by one unit in the last place at most."""
    if not t.is_floating_point() and not t.is_complex():
        return t
    random = torch.Generator().manual_seed(seed)
    by = 2 * torch.rand(t.shape, generator=random, dtype=torch.float64) - 1
    factors = (1 + by * torch.finfo(t.dtype).eps).to(t.device)
    return (_wide(t) * factors).detach().to(t.dtype).requires_grad_(t.requires_grad)


def wrong(got: torch.Tensor, want: torch.Tensor, truth: Truth | None) -> str:
    """Why got is no good as want, or ''."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError as error:
        if truth is not None and truth.value.shape == want.shape and _no_further(got, want, truth):
            return ""
        return " ".join(str(error).split())
    return ""


def _no_further(got: torch.Tensor, want: torch.Tensor, truth: Truth) -> bool:
    """Whether got is at most twice as far from float64 as eager everywhere, beyond the usual
    tolerance; where eager overflows on the way, within that tolerance."""
    if not (got.is_floating_point() or got.is_complex()):
        return False
    ref = truth.value
    same = (got == want) | (got.isnan() & want.isnan()) | (got == ref.to(got.dtype))
    finite = ref.isfinite()
    eps = torch.finfo(got.dtype).eps
    scale = ref[finite].abs().max() if bool(finite.any()) else 0.0
    error = truth.error.nan_to_num(0.0, 0.0)
    allowed = 2 * error + 8 * eps * ref.abs() + 4 * eps * scale
    return bool((same | finite & ((got.to(ref) - ref).abs() <= allowed)).all())


def check_forward(
    cases: Sequence[Case], dynamic: bool = False, cfg: Config | None = None
) -> Outcome:
    """Runs all cases as one compiled function without gradients and compares."""
    outcome = Outcome()
    tensors = [t.detach() for c in cases for t in c.inputs()]
    with torch.no_grad():
        wants = [c.run([t.detach().clone() for t in c.inputs()]) for c in cases]
        gots = compiled(_all(cases), outcome, dynamic, cfg)(*[t.clone() for t in tensors])
        _compare(cases, wants, _grouped(gots, wants), outcome, "result")
    return outcome


def _all(cases: Sequence[Case]) -> Callable[..., list[torch.Tensor]]:
    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        at = 0
        for c in cases:
            out += c.run(tensors[at : at + len(c.tensors)])
            at += len(c.tensors)
        return out

    return fn


def _grouped(flat: Sequence[Any], like: Sequence[Sequence[Any]]) -> list[list[Any]]:
    items = iter(flat)
    return [[next(items) for _ in group] for group in like]


def _compare(cases: Sequence[Case], wants: Any, gots: Any, outcome: Outcome, what: str) -> None:
    for k, (case, want, got) in enumerate(zip(cases, wants, gots, strict=True)):
        for m, (g, w) in enumerate(zip(got, want, strict=True)):
            if wrong(g, w, None) and (text := wrong(g, w, _truth(case.run, case.inputs(), m))):
                outcome.failures.append(f"sample {k} {what} {m}: {text}")


def check_gradient(
    cases: Sequence[Case], dynamic: bool = False, cfg: Config | None = None
) -> Outcome:
    """As check_forward, with the gradients of a weighted sum of the results."""
    outcome = Outcome()
    tensors = [t for c in cases for t in c.inputs()]
    eager = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    mine = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    run = compiled(_all(cases), outcome, dynamic, cfg)
    try:
        wants = _all(cases)(*eager)
        want_grads = _gradients(wants, eager)
    except (RuntimeError, NotImplementedError) as refused:
        if len(cases) > 1:
            raise
        if _ILL_DEFINED in str(refused):
            return outcome
        with contextlib.suppress(type(refused)):
            _gradients(run(*mine), mine)
            outcome.failures.append(f"runs where eager raises {refused}")
        return outcome
    gots = run(*mine)
    groups = [c.run([t.detach() for t in c.inputs()]) for c in cases]
    _compare(cases, _grouped(wants, groups), _grouped(gots, groups), outcome, "result")
    places = [(c, m) for c in cases for m in range(len(c.tensors))]
    for k, (w, g) in enumerate(zip(want_grads, _gradients(gots, mine), strict=True)):
        if (w is None) != (g is None):
            outcome.failures.append(f"gradient {k}: {g} instead of {w}")
        elif w is not None and wrong(g, w, None):
            case, m = places[k]
            gradients = lambda ts, c=case: _gradients(c.run(ts), ts)
            if text := wrong(g, w, _truth(gradients, case.inputs(), m)):
                outcome.failures.append(f"gradient {k}: {text}")
    return outcome


def _truth(run: _Run, operands: Sequence[torch.Tensor], m: int) -> Truth | None:
    found = truths(run, operands)
    return found[m] if m < len(found) else None


def _gradients(
    outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    differentiable = [o for o in outs if o.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    if not differentiable or not leaves:
        return [None] * len(inputs)
    # That every dtype holds exactly: the reference must be the gradient of the same sum.
    weights = [
        torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=torch.bfloat16)[: o.numel()]
        .reshape(o.shape)
        .to(o)
        for o in differentiable
    ]
    found = iter(torch.autograd.grad(differentiable, leaves, weights, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]
