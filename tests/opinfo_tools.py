"""Drives PyTorch's own op samples through plait: several samples of an op as one function, so that
they share a compile.

The rule for a mismatch is distance from float64: plait is wrong only where it is further from the
float64 result than eager is, beyond tolerance.
"""

from __future__ import annotations

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

from plait import compat
from plait.capture.early import early_changes
from plait.compile import compile_graph
from plait.config import Config
from plait.graph.captured import Captured, GraphKind
from plait.graph.partition import partition

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

    def reference(self) -> list[torch.Tensor] | None:
        """The results in float64, None where the op has none."""
        try:
            return self.run(
                [
                    t.detach().double() if t.is_floating_point() else t.detach()
                    for t in self.inputs()
                ]
            )
        except (RuntimeError, TypeError, NotImplementedError):
            return None


@dataclass
class Outcome:
    """What went wrong, sample by sample, and what fell back to extern calls."""

    failures: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)


def name_of(op: Any) -> str:
    """An op as a test id."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


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
        partition_fn=functools.partial(partition, config),
        decompositions=compat.decomposition_table(),
        keep_inference_input_mutations=True,
        dynamic=dynamic,
    )

    def traced(*args: Any) -> Any:
        with early_changes:  # the first call traces
            return made(*args)

    return traced


def wrong(got: torch.Tensor, want: torch.Tensor, reference: torch.Tensor | None) -> str:
    """Why got is no good as want, or ''."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
    except AssertionError as error:
        if (
            reference is not None
            and reference.shape == want.shape
            and _no_further(got, want, reference)
        ):
            return ""
        return " ".join(str(error).split())
    return ""


def _no_further(got: torch.Tensor, want: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether got is at most twice as far from float64 as eager everywhere, beyond the usual
    tolerance."""
    if not (got.is_floating_point() and reference.is_floating_point()):
        return False
    ref = reference.double()
    same = torch.isfinite(ref)
    if not torch.equal(got[~same].double().nan_to_num(), want[~same].double().nan_to_num()):
        return False
    eps = torch.finfo(got.dtype).eps
    scale = ref[same].abs().max() if bool(same.any()) else torch.tensor(0.0)
    allowed = 2 * (want.double() - ref)[same].abs() + 8 * eps * ref[same].abs() + 4 * eps * scale
    return bool(((got.double() - ref)[same].abs() <= allowed).all())


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
        reference: list[torch.Tensor] | None = None
        for m, (g, w) in enumerate(zip(got, want, strict=True)):
            if wrong(g, w, None):
                reference = reference or case.reference()
            if text := wrong(g, w, reference[m] if reference and m < len(reference) else None):
                outcome.failures.append(f"sample {k} {what} {m}: {text}")


def check_gradient(
    cases: Sequence[Case], dynamic: bool = False, cfg: Config | None = None
) -> Outcome:
    """As check_forward, with the gradients of a weighted sum of the results."""
    outcome = Outcome()
    tensors = [t for c in cases for t in c.inputs()]
    eager = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    mine = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    wants = _all(cases)(*eager)
    gots = compiled(_all(cases), outcome, dynamic, cfg)(*mine)
    groups = [c.run([t.detach() for t in c.inputs()]) for c in cases]
    _compare(cases, _grouped(wants, groups), _grouped(gots, groups), outcome, "result")
    for k, (w, g) in enumerate(zip(_gradients(wants, eager), _gradients(gots, mine), strict=True)):
        if (w is None) != (g is None):
            outcome.failures.append(f"gradient {k}: {g} instead of {w}")
        elif w is not None and (text := _wrong_gradient(g, w, cases, k)):
            outcome.failures.append(f"gradient {k}: {text}")
    return outcome


def _wrong_gradient(got: torch.Tensor, want: torch.Tensor, cases: Sequence[Case], k: int) -> str:
    if not wrong(got, want, None):
        return ""
    doubles = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t.detach()
        for c in cases
        for t in c.inputs()
    ]
    try:
        reference = _gradients(_all(cases)(*doubles), doubles)[k]
    except (RuntimeError, TypeError, NotImplementedError):
        reference = None
    return wrong(got, want, reference)


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
