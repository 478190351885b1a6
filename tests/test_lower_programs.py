"""Lowering by itself: what programs it makes, checked by the verifier and run by
tests/lower_eval.py against eager."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import plait
from plait import compat
from plait.config import Config
from plait.errors import Unsupported
from plait.graph.captured import Captured
from plait.ir.calls import Extern, TensorArg
from plait.ir.expr import Expr, bounds, evaluate
from plait.ir.loops import Mutate, Pointwise, Reduction, loop_vars, walk
from plait.ir.verify import verify
from plait.lower import core
from plait.lower.core import View
from plait.lower.dtypes import FROM_TORCH, from_torch
from plait.lower.elementwise import common_dtype
from plait.lower.float_nodes import to_scalar_node
from plait.lower.graph import Lowered, lower_graph
from plait.lower.memory import copy
from plait.lower.symbols import to_size
from tests.lower_eval import Evaluate

Fn = Callable[..., Any]


def lowered(
    fn: Fn, *inputs: Any, dynamic: bool = False, cfg: Config | None = None
) -> tuple[Lowered, list[Any]]:
    """The program of fn, verified, and what it gives on the inputs."""
    found: list[Lowered] = []

    def compiler(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Fn:
        low = lower_graph(Captured(gm, "test", "inference"), cfg or Config())
        verify(low.program, "lower")
        found.append(low)

        def run(args: list[Any]) -> list[Any]:
            return Evaluate(low, args).run()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with torch.no_grad():
        out = aot_function(
            fn,
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=compat.decompositions.decomposition_table(),
            keep_inference_input_mutations=True,
            dynamic=dynamic,
        )(*inputs)
    return found[0], list(out) if isinstance(out, (tuple, list)) else [out]


def check(fn: Fn, *inputs: torch.Tensor, dynamic: bool = False) -> Lowered:
    """Lowered, equal to eager in value, dtype and stride, and without extern calls."""
    mine = [t.clone() if t.is_contiguous() else t for t in inputs]
    want = fn(*[t.clone() if t.is_contiguous() else t for t in inputs])
    low, got = lowered(fn, *mine, dynamic=dynamic)
    for g, w in zip(got, want if isinstance(want, (tuple, list)) else [want], strict=True):
        torch.testing.assert_close(g, w, equal_nan=True)
        assert g.numel() == 0 or g.stride() == w.stride()
    assert not low.fallbacks, low.reasons
    return low


X = torch.randn(6, 8)
V = torch.randn(8)
IMAGE = torch.randn(2, 6, 5, 4)

VIEWS: dict[str, Fn] = {
    "view": lambda x: x.view(3, 2, 8),
    "reshape of transpose": lambda x: x.t().reshape(4, 2, 6),
    "join and split": lambda x: x.view(-1).view(8, 6).view(2, 4, 6),
    "permute": lambda x: x.view(2, 3, 8).permute(2, 0, 1),
    "expand": lambda x: x.unsqueeze(1).expand(6, 5, 8),
    "slices": lambda x: x[1:-1, ::3],
    "negative slices": lambda x: x[-4:, -100:100],
    "select": lambda x: (x[2], x[:, -1]),
    "split": lambda x: x.split(4),
    "split with sizes": lambda x: torch.split(x, [1, 2, 3]),
    "chunk": lambda x: x.chunk(4, 1),
    "unbind": lambda x: x.unbind(0),
    "diagonal": lambda x: (x.diagonal(), x.diagonal(2), x.diagonal(-3, 1, 0)),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "squeeze": lambda x: x.view(6, 1, 8, 1).squeeze(),
    "squeeze dim": lambda x: x.view(6, 1, 8, 1).squeeze(1),
    "movedim": lambda x: x.view(2, 3, 8).movedim(0, -1),
    "as_strided": lambda x: x.as_strided((3, 4), (8, 2), 1),
    "overlapping as_strided": lambda x: x.as_strided((5, 3), (1, 1)),
    "flatten": lambda x: x.flatten(),
    "narrow": lambda x: x.narrow(0, 2, 3),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_inputs_record_nothing(name: str, dynamic: bool) -> None:
    """Each view of an input that is contiguous in eager is the input's own memory."""
    fn = VIEWS[name]
    low, got = lowered(lambda x: fn(x), X, dynamic=dynamic)
    want = fn(X)
    for g, w in zip(got, want if isinstance(want, tuple) else [want], strict=True):
        torch.testing.assert_close(g, w)
        assert g.stride() == w.stride()
        if w.untyped_storage().data_ptr() == X.untyped_storage().data_ptr():
            assert g.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    loops = [op for op in low.program.ops if isinstance(op, Pointwise)]
    assert not loops


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_intermediates_are_rewritten_indices(name: str, dynamic: bool) -> None:
    fn = VIEWS[name]

    def through(x: torch.Tensor) -> Any:
        out = fn(x * 2)
        return tuple(o + 1 for o in (out if isinstance(out, tuple) else (out,)))

    low = check(through, X, dynamic=dynamic)
    made = [op for op in low.program.ops if isinstance(op, Pointwise)]
    assert len(made) == 1 + len(low.program.outputs), (
        "one loop a multiplication and addition, none a view"
    )


def test_index_of_a_reshaped_transpose_is_affine() -> None:
    """(N, H*D) -> heads and back cancel: no division is left in the loads."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).view(2, 5, 3, 4).transpose(1, 2)
        return (y * 2).transpose(1, 2).reshape(2, 5, 12) - 1

    low = check(heads, torch.randn(2, 5, 12))
    text = " ".join(
        str(n.attr) for op in low.program.ops if isinstance(op, Pointwise) for n in walk((op.body,))
    )
    assert "//" in text and "%" in text, "a reshape to heads splits one dimension"
    last = low.program.ops[-1]
    assert isinstance(last, Pointwise)


POINTWISE: dict[str, Fn] = {
    "arithmetic": lambda x,
    v: (x + v, x - 2 * v, x * v, x / (v.abs() + 1), torch.add(x, v, alpha=3)),
    "division": lambda x, v: (
        torch.div(x, 0.3, rounding_mode="floor"), torch.div(x, v, rounding_mode="trunc"), x % 0.7,
        torch.fmod(x, 0.7),
    ),
    "powers": lambda x,
    v: (x**2, x**3, x.abs() ** 0.5, 2.0**x, x**-1, x.abs() ** v, x**0, x.abs() ** -0.5),
    "clamps": lambda x,
    v: (x.clamp(-1, 1), x.clamp(min=v), x.clamp(max=0.5), F.relu(x), F.hardtanh(x)),
    "comparison": lambda x,
    v: (x > v, x == v, x <= 0, torch.isnan(x), torch.isinf(x), torch.signbit(x)),
    "selection": lambda x, v: (torch.where(x > 0, x, v), torch.maximum(x, v), torch.fmin(x, v)),
    "activations": lambda x, v: (
        F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), torch.sigmoid(x), F.elu(x),
        F.leaky_relu(x, 0.1), F.mish(x), F.softplus(x), F.hardswish(x), F.celu(x),
        F.selu(x), F.hardsigmoid(x), F.logsigmoid(x), F.relu6(x),
    ),
    "rounding": lambda x,
    v: (x.floor(), x.ceil(), x.trunc(), x.round(), torch.round(x, decimals=1), x.frac()),
    "composite": lambda x, v: (
        torch.lerp(x, v, 0.3), torch.addcmul(x, x, v), torch.addcdiv(x, v, x.abs() + 1),
        torch.nan_to_num(x), torch.copysign(x, v), torch.hypot(x, v), torch.atan2(x, v),
        torch.xlogy(x, v.abs()), torch.logaddexp(x, v),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str, dynamic: bool) -> None:
    check(lambda x, v: tuple(POINTWISE[name](x, v)), X, V, dynamic=dynamic)


def test_integers_and_bools() -> None:
    a = torch.randint(-20, 20, (6, 8))
    b = torch.randint(1, 7, (8,))
    check(
        lambda a, b: (
            a // b, a % b, torch.fmod(a, b), a / b, a & b, a | b, a ^ b, ~a, a << 2, a >> b, a**3,
            a.abs(), -a, a.sign(), torch.sqrt(b), a > 2.5, (a > 0) + (b > 3),
            (a > 0) * (b > 3), torch.logical_xor(a, b), a.to(torch.int8),
        ),
        a, b,
    )  # fmt: skip


REDUCTIONS: dict[str, Fn] = {
    "sums": lambda x: (
        x.sum(),
        x.sum(1),
        x.sum((0, 2), keepdim=True),
        x.mean(-1),
        x.sum(0, dtype=torch.float64),
    ),
    "products": lambda x: (x.prod(), x.prod(1), x.prod(2, keepdim=True)),
    "extrema": lambda x: (x.amax(1), x.amin((0, 1)), x.max(), *x.max(1), *x.min(2, keepdim=True)),
    "positions": lambda x: (x.argmax(), x.argmin(1), x.argmax(2, keepdim=True)),
    "tests": lambda x: ((x > 0).any(), (x > 0).all(1), (x > 0).any(0, keepdim=True)),
    "moments": lambda x: (
        x.var(),
        x.std(1),
        *torch.var_mean(x, (1, 2), correction=0),
        x.var(0, keepdim=True),
    ),
    "norms": lambda x: (
        x.norm(),
        torch.linalg.vector_norm(x, 1, 1),
        torch.linalg.vector_norm(x, 3),
        torch.linalg.vector_norm(x, float("inf"), 0),
        torch.linalg.vector_norm(x, 0),
    ),
    "soft": lambda x: (x.logsumexp(1), F.softmax(x, 1), F.log_softmax(x, -1), F.softmin(x, 0)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dynamic: bool) -> None:
    check(lambda x: tuple(REDUCTIONS[name](x)), torch.randn(3, 4, 5), dynamic=dynamic)


def test_reductions_of_integers_and_bools() -> None:
    a = torch.randint(-4, 5, (3, 7))
    check(
        lambda a: (
            a.sum(), a.prod(1), (a > 0).sum(), a.to(torch.int8).sum(0), a.amax(1), *a.max(0),
            a.any(1), a.argmin(0), (a > 0).amax(0), a.to(torch.uint8).any(),
        ),
        a,
    )  # fmt: skip


def test_reductions_of_nothing_and_of_scalars() -> None:
    check(
        lambda e: (
            e.sum(),
            e.sum(1),
            e.prod(0),
            e.mean(0),
            e.any(),
            e.all(),
            *torch.var_mean(e),
            e.sum(0),
        ),
        torch.randn(0, 3),
    )
    check(
        lambda s: (
            s.sum(), s.prod(), s.amax(), s.argmax(), s.mean(), s.any(), F.softmax(s, 0), s.norm(),
            *s.max(0), s.logsumexp(0),
        ),
        torch.tensor(2.5),
    )  # fmt: skip


NORMS: dict[str, Fn] = {
    "layer": lambda x: F.layer_norm(x, (5, 4), torch.ones(5, 4) * 2, torch.ones(5, 4)),
    "layer without weights": lambda x: F.layer_norm(x, (4,)),
    "group": lambda x: F.group_norm(x, 3, torch.arange(6.0), torch.ones(6)),
    "instance": lambda x: F.instance_norm(x),
    "rms": lambda x: F.rms_norm(x, (4,), torch.ones(4) * 3),
    "batch": lambda x: F.batch_norm(
        x, torch.zeros(6), torch.ones(6), torch.arange(6.0), torch.ones(6)
    ),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, dynamic: bool) -> None:
    check(NORMS[name], IMAGE, dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0, 0.5, 1, 2, 3, -2, math.inf])
def test_vector_norms_of_one_element_are_its_size(p: float, dtype: torch.dtype) -> None:
    big = 1e200 if dtype == torch.float64 else 1e30
    x = torch.tensor([[big, -big, 1 / big, math.nan, -math.inf, 0]], dtype=dtype)

    def norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vector = torch.linalg.vector_norm
        one = x[0, 1]
        return (
            vector(x, p, 0),
            vector(x.t(), p, 1, keepdim=True),
            vector(one, p),
            vector(x[:, None], p, (0, 1)),
        )

    check(norms, x)


def test_vector_norms_of_a_varying_number_of_elements() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x[x > 0], 3)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(norm, backend="plait", fullgraph=True)
        for given in ([1.0, 2, 3], [1e30, -1], [-1.0, -2]):
            torch.testing.assert_close(compiled(torch.tensor(given)), norm(torch.tensor(given)))


def test_batch_norm_updates_its_buffers() -> None:
    mean, var = torch.zeros(6), torch.ones(6)

    def step(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, m, v, training=True, momentum=0.3)

    m1, v1, m2, v2 = mean.clone(), var.clone(), mean.clone(), var.clone()
    want = step(IMAGE, m1, v1)
    low, got = lowered(step, IMAGE, m2, v2)
    for g, w in ((got[0], want), (m2, m1), (v2, v1)):
        torch.testing.assert_close(g, w)
    assert sum(isinstance(op, Mutate) for op in low.program.ops) == 2


def test_softmax_is_two_reductions_and_one_loop() -> None:
    low = check(lambda x: F.softmax(x, -1), X)
    kinds = [op.kind if isinstance(op, Reduction) else type(op).__name__ for op in low.program.ops]
    assert kinds == ["max", "sum", "Pointwise"]


# ---------------------------------------------------------------------------------------- promotion
_TYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def _view(dtype: torch.dtype, shape: tuple[int, ...]) -> View:
    vars_ = loop_vars("v", shape)
    return View("x", from_torch(dtype), shape, vars_, vars_)


@pytest.mark.parametrize("a", _TYPES)
def test_promotion_is_pytorchs(a: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(2,), ()]
    for b, sa, sb in itertools.product(_TYPES, shapes, shapes):
        want = torch.result_type(torch.ones(sa, dtype=a), torch.ones(sb, dtype=b))
        assert common_dtype((_view(a, sa), _view(b, sb))) == from_torch(want), (a, sa, b, sb)
    for number, sa in itertools.product((True, 2, 2.5), shapes):
        want = torch.result_type(torch.ones(sa, dtype=a), number)
        assert common_dtype((_view(a, sa), number)) == from_torch(want), (a, sa, number)


def test_half_types_are_rounded_after_every_op() -> None:
    x = X.to(torch.bfloat16)
    low = check(lambda x: torch.exp(x * 3) + 1, x)
    assert all(
        n.dtype.name == "f32"
        for op in low.program.ops
        for n in walk((op.body,))
        if n.op in ("mul", "exp", "add")
    )  # type: ignore[union-attr]
    assert [op.body.op for op in low.program.ops] == ["cast"] * 3  # type: ignore[union-attr]


def test_every_dtype_has_a_way_back() -> None:
    assert len(set(FROM_TORCH.values())) == len(FROM_TORCH)


# ------------------------------------------------------------------------------- inputs and outputs
def test_outputs_share_memory_only_where_eager_does() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x.clone(), y, y.clone(), y.view(8, 6).clone()

    x = X.clone()
    _, got = lowered(fn, x)
    pointers = [t.data_ptr() for t in (x, *got)]
    assert len(set(pointers)) == len(pointers)


def test_outputs_have_eagers_strides() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(
        lambda x: (
            x + 1,
            (x * 2).contiguous(),
            x.permute(0, 2, 3, 1) * 3,
            (x + 2).sum(1),
            x.flatten(1) * 2,
        ),
        x,
    )


def test_as_strided_reaches_beyond_a_view() -> None:
    """Offsets count from the start of the storage, which may be larger than the input."""
    base = torch.randn(20)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 2), (1, 9), 3) * 2

    torch.testing.assert_close(torch.compile(fn, backend="plait")(base[5:15]), fn(base[5:15]))


def test_integer_and_none_outputs() -> None:
    low, got = lowered(lambda x: (x + 1, x.shape[0] * 2 - 1, None), X, dynamic=True)
    assert got[1:] == [11, None]
    assert isinstance(low.program.outputs[1], Expr) or low.program.outputs[1] == 11


def test_mutated_inputs() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.add_(1)
        return y + x

    a, b = X.clone(), X.clone()
    want = fn(a)
    low, got = lowered(fn, b)
    torch.testing.assert_close(got[0], want)
    torch.testing.assert_close(b, a)
    assert [op.target for op in low.program.ops if isinstance(op, Mutate)] == ["arg0"]


def test_complex_goes_to_extern_calls() -> None:
    x = torch.randn(4, 5, dtype=torch.complex64)
    low, got = lowered(lambda x: (x * 2).transpose(0, 1).reshape(2, 10) + 1, x)
    torch.testing.assert_close(got[0], (x * 2).transpose(0, 1).reshape(2, 10) + 1)
    assert set(low.fallbacks) <= {
        "aten::mul.Tensor",
        "aten::add.Tensor",
        "aten::clone",
        "aten::view",
        "aten::_unsafe_view",
    }
    assert "c64" in " ".join(low.reasons.values())


def test_constants() -> None:
    """A tensor of the module goes into the table; a number becomes part of the loops."""
    root = torch.nn.Module()
    root.table, root.number = torch.arange(8.0), torch.tensor(2.0)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    for name in ("table", "number"):
        value = graph.get_attr(name)
        value.meta["val"] = getattr(root, name)
        x = graph.call_function(torch.ops.aten.add.Tensor, (x, value))
        x.meta["val"] = X
    graph.output((x,))
    low = lower_graph(Captured(torch.fx.GraphModule(root, graph), "t", "inference"), Config())
    verify(low.program, "lower")
    torch.testing.assert_close(Evaluate(low, [X]).run()[0], X + root.table + 2.0)
    assert len(low.program.constants) == len(low.constants) == 1


def test_without_kernels_every_op_is_a_call() -> None:
    def fn(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.softmax((x + v).t().reshape(8, 6), -1)[1:], x[2:], x.clone()

    low, got = lowered(fn, X, V, cfg=Config(kernels=False))
    for g, w in zip(got, fn(X, V), strict=True):
        torch.testing.assert_close(g, w)
    assert all(isinstance(op, Extern) for op in low.program.ops)


# ---------------------------------------------------------------------------------------- symbols
def _fake(shape: Sequence[int], env: ShapeEnv) -> tuple[torch.Tensor, FakeTensorMode]:
    mode = FakeTensorMode(shape_env=env)
    real = torch.randn(*shape)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape))
    return mode.from_tensor(real, symbolic_context=context), mode


def _graph(
    inputs: Sequence[Any], fn: Callable[[torch.fx.Graph, list[torch.fx.Node]], torch.fx.Node]
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes = []
    for k, val in enumerate(inputs):
        node = graph.placeholder(f"p{k}")
        node.meta["val"] = val
        nodes.append(node)
    graph.output((fn(graph, nodes),))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _doubled(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    out = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
    out.meta["val"] = node.meta["val"] * 2
    return out


def test_a_size_that_is_an_expression_is_solved() -> None:
    """A saved tensor of size 2*s0-1 is the only one that tells s0."""
    x, mode = _fake((7,), ShapeEnv())
    with mode:
        saved = torch.empty(x.shape[0] * 2 - 1)
        gm = _graph([saved], lambda g, n: _doubled(g, n[0]))
    low = lower_graph(Captured(gm, "t", "backward"), Config())
    verify(low.program, "lower")
    real = torch.randn(13)
    torch.testing.assert_close(Evaluate(low, [real]).run()[0], real * 2)
    assert any(isinstance(source, Expr) for source in low.program.symbols.values())


def test_symbols_in_any_order() -> None:
    """s0*s1 is solved once s1 is known, which arrives later, as an integer."""
    x, mode = _fake((3, 5), ShapeEnv())
    with mode:
        saved = torch.empty(x.shape[0] * x.shape[1])
        gm = _graph([saved, x.shape[1]], lambda g, n: _doubled(g, n[0]))
    low = lower_graph(Captured(gm, "t", "backward"), Config())
    torch.testing.assert_close(Evaluate(low, [torch.ones(15), 5]).run()[0], torch.full((15,), 2.0))


def test_a_size_that_nothing_tells_is_unsupported() -> None:
    x, mode = _fake((3, 5), ShapeEnv())
    with mode:
        saved = torch.empty(x.shape[0] * x.shape[1])
        gm = _graph([saved], lambda g, n: _doubled(g, n[0]))
    with pytest.raises(Unsupported, match="no input tells the value of the size symbol"):
        lower_graph(Captured(gm, "t", "backward"), Config())


def test_sizes_keep_their_ranges_and_meaning() -> None:
    x, _ = _fake((7, 9), ShapeEnv())
    n, m = x.shape
    size = to_size(n)
    assert bounds(size)[0] >= 0 and to_size(n) is size
    for sym, python in (
        (n * m, 63), (n // 2, 3), (n % 4, 3), (2 * n - 1, 13), (torch.sym_max(n, m), 9),
        (torch.sym_min(n, m), 7), (n == m, 0), (n <= m, 1), (torch.sym_ite(n > m, n, m), 9),
        (torch.sym_not(n == 3), 1), (-n // 4, -2), (n**2, 49),
        (torch.sym_int(n * 1.7), 11), (torch.sym_int(n / 2), 3),
    ):  # fmt: skip
        names = {
            a.name: v for a, v in zip((to_size(n).symbol, to_size(m).symbol), (7, 9), strict=True)
        }  # type: ignore[union-attr]
        assert evaluate(to_size(sym), names) == python, sym
    with pytest.raises(Unsupported):
        to_size(n**-2)


def test_floats_of_sizes_are_f64_nodes() -> None:
    low = check(
        lambda x: (x / x.shape[1] ** 0.5, x * (1 / x.shape[0]), x + x.shape[0]), X, dynamic=True
    )
    assert any(n.op == "index" for op in low.program.ops for n in walk((op.body,)))  # type: ignore[union-attr]
    from plait.ir.record import Recorder

    assert to_scalar_node(Recorder(), 2.5).attr == 2.5


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, k: x * k.item(),
        lambda x, k: torch.zeros(k.item()) + x[0, 0],
        lambda x, k: x[: k.item()] + 1,
        lambda x, k: x.nonzero() * 2,
        lambda x, k: x[x > 0] + 1,
        lambda x, k: x * (k.sum() * 0.5).item(),
        lambda x, k: (
            x.repeat_interleave(k.view(1), 0, output_size=None)[:1]
            if False
            else x.masked_select(x > 0.1) * k.item()
        ),
    ],
)
def test_values_of_tensors_as_numbers(fn: Fn) -> None:
    run = torch.compile(fn, backend="plait", fullgraph=True)
    for k in (2, 4):
        args = (torch.randn(6, 8), torch.tensor(k))
        torch.testing.assert_close(run(*args), fn(*args))


_SPLIT: dict[str, Fn] = {
    "views": lambda x, k: torch.tensor_split(x, k),
    "computed": lambda x, k: [part * 2 for part in torch.tensor_split(x, k, dim=1)],
    "at the same places": lambda x, k: (*torch.tensor_split(x, k), *torch.tensor_split(x + 1, k)),
    "a number twice": lambda x, k: (*torch.tensor_split(x, k), x[k[0].item() :]),
    "split again": lambda x, k: torch.tensor_split(torch.tensor_split(x, k)[1], k),
    "written": lambda x, k: [part.mul_(2) for part in torch.tensor_split(x.clone(), k)],
}


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fn", _SPLIT.values(), ids=_SPLIT.keys())
def test_split_at_indices_that_a_tensor_holds(fn: Fn, ahead: bool) -> None:
    x = torch.randn(10, 12)
    given = [torch.tensor(k) for k in ([2, 5], [5, 2], [-3, 20], [0, 0])]
    if ahead:
        run = plait.compile(fn, (x, given[0]))
    else:
        run = torch.compile(fn, backend="plait", fullgraph=True)
    for k in given:
        torch.testing.assert_close([*run(x, k)], [*fn(x, k)])


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_gradients_of_parts_that_are_split_at_found_indices() -> None:
    def fn(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        (a, b, c), (d, *_) = torch.tensor_split(x, k), torch.tensor_split(x.exp(), k)
        return a.sum() + (b * b).sum() + c.sin().sum() + (d * a).sum()

    run = torch.compile(fn, backend="plait", fullgraph=True)
    for k in ([2, 5], [5, 2]):
        x, y = (torch.linspace(0, 1, 10).requires_grad_() for _ in range(2))
        run(x, torch.tensor(k)).backward()
        fn(y, torch.tensor(k)).backward()
        torch.testing.assert_close(x.grad, y.grad)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_run_time_assertions() -> None:
    def fn(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n = k.item()
        torch._check(n >= 2, lambda: "n is small")
        return x * n

    run = torch.compile(fn, backend="plait", fullgraph=True)
    torch.testing.assert_close(run(X, torch.tensor(3)), X * 3)
    with pytest.raises(RuntimeError):
        run(X, torch.tensor(1))


# ------------------------------------------------------------------------------------- falling back
def test_a_failing_rule_falls_back_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ctx: core.Lowering, x: View) -> View:
        copy(ctx, x)
        raise ValueError("half-way")

    monkeypatch.setitem(core.RULES, torch.ops.aten.sin.default, broken)
    with pytest.warns(UserWarning, match="bug in plait: .*half-way"):
        low, got = lowered(lambda x: torch.sin(x * 2) + 1, X)
    torch.testing.assert_close(got[0], torch.sin(X * 2) + 1)
    assert low.fallbacks == {"aten::sin": 1}
    assert "half-way" in low.reasons["aten::sin"]
    assert [type(op).__name__ for op in low.program.ops] == ["Pointwise", "Extern", "Pointwise"]
    assert set(low.program.buffers) == {"arg0", "buf1", "buf2", "buf3"}


@pytest.mark.parametrize("wrong", ["shape", "dtype", "count"])
def test_a_rule_with_a_wrong_result_falls_back(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def rule(ctx: core.Lowering, x: View) -> Any:
        if wrong == "shape":
            return copy(ctx, x.remap((3, 16), lambda v: (0, 0)))
        return (
            ctx.pointwise(x.shape, FROM_TORCH[torch.int64], lambda ops, i: ops.index(i[0]))
            if wrong == "dtype"
            else 3
        )

    monkeypatch.setitem(core.RULES, torch.ops.aten.sin.default, rule)
    with pytest.warns(UserWarning, match="bug in plait: .*the rule gave"):
        low, got = lowered(lambda x: torch.sin(x), X)
    torch.testing.assert_close(got[0], torch.sin(X))
    assert "the rule gave" in low.reasons["aten::sin"]


def test_two_rules_for_one_op_are_an_error() -> None:
    with pytest.raises(ValueError, match="two rules"):
        core.lower(torch.ops.aten.sin.default)(lambda ctx, x: x)


def test_origins_name_the_users_line() -> None:
    found: list[Lowered] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Fn:
        def compiler(g: torch.fx.GraphModule, _: Sequence[Any]) -> Fn:
            found.append(lower_graph(Captured(g, "t", "inference"), Config()))
            return g.forward

        return compat.tracing.aot_compile(
            gm,
            inputs,
            forward=compiler,
            backward=compiler,
            inference=compiler,
            partition=lambda *a: a,
        )

    with torch.no_grad():
        torch.compile(lambda x: x.exp() + 1, backend=backend)(X)
    origins = [op.origin[0] for op in found[0].program.ops if isinstance(op, Pointwise)]
    assert all(o.startswith("test_lower_programs.py:") for o in origins) and origins[0].endswith(
        "aten.exp.default"
    )


def test_equal_graphs_give_equal_programs() -> None:
    def fn(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.gelu(x + v), (8,))

    a, b = lowered(fn, X, V)[0].program, lowered(fn, X, V)[0].program
    assert repr(a) == repr(b)
    assert isinstance(a.outputs[0], TensorArg)


@pytest.mark.parametrize("times", [2, 3, 40])
def test_rows_that_are_repeated(times: int) -> None:
    """What a pass keeps for the next one does not move with the repetitions."""
    x = torch.randn(5, 3, dtype=torch.float64)
    fn = lambda x: x.repeat_interleave(times, 0).softmax(0)
    torch.testing.assert_close(plait.compile(fn, (x,))(x), fn(x))
