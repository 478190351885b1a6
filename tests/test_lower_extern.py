"""Extern calls: what an operator may do to memory, operands, results, higher-order operators, the
committed list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified

import plait.lower
from plait.config import Config
from plait.graph.captured import Captured
from plait.ir.calls import Extern, ListArg, Scalar
from plait.ir.loops import Pointwise
from plait.ir.text import program_text
from plait.lower.core import ANY_DTYPE, RULES
from plait.lower.extern import op_facts, op_name
from plait.lower.graph import Lowered, load_rules, lower_graph
from plait.lower.library import by_library
from tests.lower_tools import DECOMPOSITIONS, Evaluation, lowered

aten = torch.ops.aten
r = torch.randn


# ------------------------------------------------------------------------------------------- facts
def test_facts_of_operators() -> None:
    mm = op_facts(aten.mm.default)
    assert (mm.out_op, mm.out_names, mm.may_keep, mm.effectful) == (
        "aten::mm.out",
        ("out",),
        False,
        False,
    )
    assert op_facts(aten.sort.default).out_names == ("values", "indices")
    assert (
        op_facts(aten.convolution.default).out_op == ""
    )  # a generated out= computes elsewhere and copies
    assert op_facts(aten.nonzero.default).out_op == ""  # its size is unknown
    assert op_facts(aten.bernoulli.p).effectful
    assert op_facts(aten._assert_async.msg).effectful
    assert op_facts(aten.view.default).aliases == ("self",)
    assert (
        op_facts(aten._unsafe_view.default).aliases == ("self",)  # though its schema is silent
        and op_facts(aten._unsafe_view.default).may_keep
    )
    assert op_facts(aten.add_.Tensor).mutates == ("self",)
    assert (
        op_name(aten.mm.default) == "aten::mm"
        and op_name(aten.sum.dim_IntList) == "aten::sum.dim_IntList"
    )


def _externs(low: Lowered) -> list[Extern]:
    return [op for op in low.program.ops if isinstance(op, Extern)]


def test_operands_leave_out_defaults() -> None:
    (sort,) = _externs(lowered(lambda x: torch.sort(x, 0)[1], (r(4, 5),)))
    assert (
        sort.args[1:] == (0,) and sort.kwargs == () and sort.outs[0] is None and sort.out_op == ""
    )
    (stable,) = _externs(lowered(lambda x: torch.sort(x, stable=True, descending=True), (r(4, 5),)))
    assert dict(stable.kwargs) == {
        "stable": Scalar("bool", "True"),
        "descending": Scalar("bool", "True"),
    }
    (conv,) = _externs(lowered(lambda x, w: torch.conv2d(x, w), (r(1, 2, 5, 5), r(3, 2, 3, 3))))
    assert (
        conv.args[2] == Scalar("none")
        and conv.args[3] == ListArg((1, 1))
        and conv.flops == 2 * 27 * 2 * 9
    )


def test_numbers_for_float_arguments_are_floats() -> None:
    (call,) = _externs(lowered(lambda x: torch.ops.aten.special_zeta.other_scalar(x, 2), (r(3),)))
    assert call.args[1] == 2  # a Scalar keeps its kind
    (call,) = _externs(
        lowered(
            lambda x: torch.ops.aten._upsample_bilinear2d_aa(x, [4, 4], False, 2, 2),
            (r(1, 1, 2, 2),),
        )
    )
    assert call.args[-2:] == (Scalar("float", (2.0).hex()),) * 2


# --------------------------------------------------------------------------------- custom operators
@torch.library.custom_op("plait_test::add_to", mutates_args=("x",))
def add_to(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("plait_test::scale_both", mutates_args=("x", "z"))
def scale_both(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    z.mul_(2)
    return x * 3


@scale_both.register_fake
def _(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("plait_test::column_major", mutates_args=())
def column_major(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.stride() == (1, x.shape[0]), x.stride()
    return x * 2, x.sum()


@column_major.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(())


def compare(fn, *args: torch.Tensor, dynamic: bool = False) -> Lowered:
    """fn under Dynamo and AOTAutograd, lowered and evaluated; its inputs must end up alike too."""
    seen: list[Lowered] = []

    def compiler(gm, _inputs):
        low = lower_graph(Captured(gm, "test", "inference"), Config())
        seen.append(low)
        return make_boxed_func(lambda *a: Evaluation(low, a).run())

    def backend(gm, inputs):
        return aot_module_simplified(
            gm,
            inputs,
            compiler,
            compiler,
            inference_compiler=compiler,
            decompositions=DECOMPOSITIONS,
            keep_inference_input_mutations=True,
        )

    copies = [a.clone() for a in args]
    with torch.no_grad():
        want = fn(*args)
        got = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*copies)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(copies, list(args))
    (low,) = seen
    return low


@pytest.mark.parametrize("dynamic", [False, True])
def test_mutable_custom_operators_run_in_place_on_copies(dynamic: bool) -> None:
    def intermediate(x, y):
        a = x * 2
        add_to(a, y)
        return a + 1, a

    def argument(x, y):
        add_to(x, y)
        return x + 1

    def slices(x, y):
        a, b = x * 2, y.clone()
        out = scale_both(a[1:2], y[1:2], b)
        return a + 1, out, b

    for fn in (intermediate, argument, slices):
        low = compare(fn, r(3, 4), r(3, 4), dynamic=dynamic)
        (call,) = _externs(low)
        assert call.mutates and call.callable_index == -1 and not low.fallbacks


IN_PLACE = {
    # name: (function, loops that are left besides the call)
    "intermediate": (lambda x, y: _then(x * 2, y), 2),
    "intermediate returned": (lambda x, y: _then(x * 2, y, lambda a: a), 1),
    "argument": (lambda x, y: _then(x, y), 1),
    "argument twice": (lambda x, y: _then(_then(x, y, lambda a: a), y), 1),
    "argument, then overwritten": (lambda x, y: _then(x, y, lambda a: a.mul_(2)), 1),
    "part of an argument": (lambda x, y: _then(x[1:], y[1:], lambda a: x + 1), 1),
    "old value read": (lambda x, y: _old(x * 2, y), 4),
    "old argument read": (lambda x, y: _old(x, y), 3),
    "old view read": (lambda x, y: _old(x * 2, y, lambda a: a[1:]), 4),
    "both arguments": (lambda x, y: _then(x, x * y, lambda a: a + y), 2),
    "itself": (lambda x, y: _then(x * 2, (x * 2).t().contiguous().t(), lambda a: a + 1), None),
}


def _then(a, b, fn=lambda a: a + 1):
    add_to(a, b)
    return fn(a)


def _old(a, b, view=lambda a: a):
    old = view(a).clone()
    add_to(a, b)
    return a.sin(), old + 1


@pytest.mark.parametrize("name", IN_PLACE)
def test_mutable_custom_operators_run_in_place_where_nobody_can_tell(name: str) -> None:
    fn, loops = IN_PLACE[name]
    low = compare(fn, r(4, 4), r(4, 4))
    found = [op for op in low.program.ops if isinstance(op, Pointwise)]
    assert loops is None or len(found) == loops, program_text(low.program)
    x, y = r(4, 4), r(4, 4)
    given = x.clone(), y.clone()
    before = x._version
    want, got = fn(x.detach().clone(), y), torch.compile(fn, backend="plait")(x, y)
    torch.testing.assert_close(got, want)
    fn(*given)
    torch.testing.assert_close((x, y), given)
    assert (x._version > before) == (given[0]._version > 0)


def test_custom_operators_use_up_saved_tensors() -> None:
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.sin()
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            z = y.clone()
            add_to(z, y)
            return g * z

    def fn(x):
        return F.apply(x).sum()

    x = r(5, requires_grad=True)
    (want,) = torch.autograd.grad(fn(x), x)
    for retain in (False, True):
        torch._dynamo.reset()
        loss = torch.compile(fn, backend="plait", fullgraph=True)(x)
        for _ in range(1 + retain):
            (got,) = torch.autograd.grad(loss, x, retain_graph=retain)
            torch.testing.assert_close(got, want)


def test_custom_operators_get_eager_strides() -> None:
    low = compare(lambda x: column_major((x + 1).t()), r(4, 4))
    assert low.fallbacks == {"plait_test::column_major": 1}
    assert all(e.may_keep for e in _externs(low))


@pytest.mark.parametrize("op", [torch.median, torch.mode, torch.kthvalue, torch.sort])
def test_operators_get_the_copy_that_a_program_made(op) -> None:
    """torch's median over elements that share memory is wrong."""

    def fn(x):
        return op(x.contiguous(), *([2] if op is torch.kthvalue else []), dim=0)[0]

    x = torch.tensor([4.0]).expand(33)
    assert torch.equal(
        torch.compile(fn, backend="plait", fullgraph=True)(x), torch.full_like(fn(x), 4.0)
    )


def test_what_no_instruction_can_spell_is_called_from_python() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        low = compare(lambda x, n: torch.special.zeta(x + 5, n.item() * 2), r(8), torch.tensor(3.5))
    (call,) = _externs(low)
    assert call.callable_index == 0 and low.fallbacks == {"aten::special_zeta.other_scalar": 1}


# --------------------------------------------------------------------------- higher-order operators
def _cond(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))


def _scan(x):
    return torch._higher_order_ops.scan(lambda c, y: (c + y, (c * y).clone()), torch.zeros(4), x)


def _while(x):
    step = torch._higher_order_ops.while_loop
    return step(
        lambda i, x: i.sum() < 3,
        lambda i, x: (i + 1, x * 2),
        (x.new_zeros(1, dtype=torch.int64), x),
    )


@torch.compiler.nested_compile_region
def _region(x):
    return x.sin() * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("cond", _cond),
        ("scan", _scan),
        ("while_loop", _while),
        ("map_impl", lambda x: torch._higher_order_ops.map(lambda a: a * 2, x)),
        ("invoke_subgraph", lambda x: _region(_region(x))),
    ],
)
def test_graphs_are_subprograms(name: str, fn, dynamic: bool) -> None:
    low = compare(fn, r(3, 4), dynamic=dynamic)
    assert not low.fallbacks and not low.callables
    assert {e.op for e in _externs(low) if e.control} == {f"higher_order::{name}"}
    assert low.program.programs


# ----------------------------------------------------------------------------------------- the list
LIST = Path(plait.lower.__file__).parent / "extern_ops.txt"
FALLBACKS = 72
"""How many lines of `fallback` there are: a rule that is added lowers it, nothing raises it."""


def _listed(kind: str) -> list[str]:
    lines = (
        line.split() for line in LIST.read_text().splitlines() if line and not line.startswith("#")
    )
    return [op for k, op in lines if k == kind]


def _overload(name: str):
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def test_list_of_fallbacks_only_shrinks() -> None:
    load_rules()
    listed = _listed("fallback")
    assert listed == sorted(set(listed))
    assert len(listed) <= FALLBACKS, "a new fallback: write a rule instead"
    assert len(listed) == FALLBACKS, "fewer fallbacks: lower FALLBACKS"
    with_rule = [op for op in listed if _overload(op) in RULES]
    assert not with_rule, "these have a rule now: take them off the list"


def test_list_of_choices_have_rules() -> None:
    load_rules()
    listed = _listed("choice")
    assert listed == sorted(set(listed))
    assert [op for op in listed if _overload(op) not in RULES] == []


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_without_loops_have_gaps_as_eagers(dynamic: bool, wrapper: str) -> None:
    """Complex numbers are copied by calls of ATen, also into memory with gaps."""
    x, y = torch.complex(torch.randn(2, 5, 14), torch.randn(2, 5, 14))[..., ::2]
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
    run = plait.compile(
        lambda x: x.conj(), (x,), dynamic_shapes=shapes, options={"wrapper": wrapper}
    )
    for each in (x, y[:3] if dynamic else y):
        got = run(each)
        assert got.stride() == each.stride() and torch.equal(got, each.conj())


# ------------------------------------------------------------------- elements that no loop can hold
_FOREIGN = {
    "_conj": lambda x: aten._conj(x),
    "_neg_view": lambda x: aten._neg_view(x),
    "_reshape_alias": lambda x: aten._reshape_alias(x, (6, 4), (4, 1)),
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.complex128),
    "_unsafe_view": lambda x: aten._unsafe_view(x, (6, 4)),
    "alias": lambda x: aten.alias(x),
    "alias_copy": lambda x: aten.alias_copy(x),
    "as_strided": lambda x: aten.as_strided(x, (3, 2), (1, 5), 2),
    "as_strided_copy": lambda x: aten.as_strided_copy(x, (3, 2), (1, 5), 2),
    "chunk": lambda x: aten.chunk(x, 3, 1),
    "clone": lambda x: aten.clone(x),
    "contiguous": lambda x: aten.contiguous(x.t()),
    "copy_": lambda x: x.clone().copy_(x.t().reshape(4, 6)),
    "detach": lambda x: aten.detach(x),
    "diagonal": lambda x: aten.diagonal(x, 1),
    "expand": lambda x: aten.expand(x, (2, 4, 6)),
    "expand_copy": lambda x: aten.expand_copy(x, (2, 4, 6)),
    "lift_fresh": lambda x: aten.lift_fresh(x),
    "lift_fresh_copy": lambda x: aten.lift_fresh_copy(x),
    "movedim": lambda x: aten.movedim(x, 0, 1),
    "narrow_copy": lambda x: aten.narrow_copy(x, 1, 2, 3),
    "permute": lambda x: aten.permute(x, (1, 0)),
    "permute_copy": lambda x: aten.permute_copy(x, (1, 0)),
    "convert_element_type": lambda x: torch.ops.prims.convert_element_type(x, torch.complex128),
    "reshape": lambda x: aten.reshape(x.t(), (4, 6)),
    "resolve_conj": lambda x: aten.resolve_conj(x.conj()),
    "resolve_neg": lambda x: aten.resolve_neg(aten._neg_view(x)),
    "select": lambda x: aten.select(x, 1, -1),
    "slice": lambda x: aten.slice(x, 1, 1, 6, 2),
    "split": lambda x: aten.split(x, 4, 1),
    "split_with_sizes": lambda x: aten.split_with_sizes(x, (1, 5), 1),
    "squeeze": lambda x: (aten.squeeze(x[:1]), aten.squeeze(x[:1], 0), aten.squeeze(x[:1], (0, 1))),
    "t": lambda x: aten.t(x),
    "tensor_split": lambda x: aten.tensor_split(x, 4, 1),
    "transpose": lambda x: aten.transpose(x, 0, 1),
    "unbind": lambda x: aten.unbind(x, 1),
    "unbind_copy": lambda x: aten.unbind_copy(x, 1),
    "unfold": lambda x: aten.unfold(x, 1, 3, 2),
    "unsafe_chunk": lambda x: aten.unsafe_chunk(x, 3, 1),
    "unsafe_split": lambda x: aten.unsafe_split(x, 4, 1),
    "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes(x, (1, 5), 1),
    "unsqueeze": lambda x: aten.unsqueeze(x, 1),
    "view": lambda x: (aten.view(x, (6, 4)), aten.view(x, torch.float32)),
    "view_as_complex": lambda x: aten.view_as_complex(aten.view_as_real(x)),
    "view_as_real": lambda x: aten.view_as_real(x),
    "view_copy": lambda x: aten.view_copy(x, (6, 4)),
}


def test_rules_for_any_element_are_all_tried() -> None:
    load_rules()
    rules = [
        op
        for op in ANY_DTYPE
        if isinstance(op, torch._ops.OpOverload)
        and op.namespace in ("aten", "prims")
        and RULES[op] is not by_library
    ]
    names = {op._schema.name.partition("::")[2] for op in rules}
    # Tracing takes no call of view_of, and these products take no complex numbers.
    products = {"_scaled_mm", "_grouped_mm"}
    assert names - products - {"_assert_tensor_metadata", "view_of"} <= _FOREIGN.keys()


@pytest.mark.parametrize("name", _FOREIGN)
def test_rules_for_any_element_make_no_loop_of_complex_numbers(name: str) -> None:
    fn, x = _FOREIGN[name], torch.complex(r(4, 6), r(4, 6))
    for program in (fn, lambda x: pytree.tree_map(lambda y: y + 1, fn(x))):
        got, want = plait.compile(program, (x,))(x), program(x)
        torch.testing.assert_close(
            pytree.tree_map(torch.resolve_neg, got), pytree.tree_map(torch.resolve_neg, want)
        )


def test_a_rule_that_makes_a_loop_of_complex_numbers_declines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, aten._neg_view.default, RULES[aten.neg.default])
    low = lowered(lambda x: aten._neg_view(x), (torch.complex(r(3), r(3)),))
    assert low.reasons == {"aten::_neg_view": "a loop that makes c64 elements"}
