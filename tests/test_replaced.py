"""Parameters, buffers and sub-modules that are replaced, removed or changed after a module was
compiled: what eager would compute, or an error that says what happened."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.capture import owners
from plait.errors import InputError

X = torch.arange(12.0).reshape(3, 4) / 7 - 0.5
both = pytest.mark.parametrize("wrapper", ["native", "python"])


class Net(nn.Module):
    """Everything that may hold a tensor: parameters, a buffer, a plain attribute, a list, a
    None."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4, bias=False))
        self.weights = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.register_buffer("scale", torch.randn(4))
        self.plain = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale + self.plain
        for w in self.weights:
            y = y * w
        return y


def compiled(module: nn.Module, wrapper: str = "native") -> Callable[..., Any]:
    call = plait.compile(module, (X,), options={"wrapper": wrapper})
    torch.testing.assert_close(call(X), module(X).detach())
    return call


def fresh(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def assign(m: Net) -> None:
    m.inner[0].weight = fresh(5, 4)


def assign_buffer(m: Net) -> None:
    m.scale = torch.randn(4)


def assign_attribute(m: Net) -> None:
    m.plain = torch.randn(4)


def assign_in_list(m: Net) -> None:
    m.weights[1] = fresh(4)


def assign_in_dict(m: Net) -> None:
    m.inner[2]._parameters["weight"] = fresh(4, 5)


def remove_and_add(m: Net) -> None:
    bias = m.inner[0].bias
    del m.inner[0].bias
    m.inner[0].register_parameter("bias", nn.Parameter(bias.detach() + 1))


def by_a_tensor(m: Net) -> None:
    del m.inner[0].bias  # a plain attribute may take the name of a parameter that is gone
    m.inner[0].bias = torch.randn(5)


def load_by_assignment(m: Net) -> None:
    m.load_state_dict({k: v + 1 for k, v in Net().state_dict().items()}, assign=True)


def to_and_back(m: Net) -> None:
    m.double().float()  # puts new buffers in the place of the old ones
    m.scale.add_(1)


def set_data(m: Net) -> None:
    m.inner[0].weight.data = torch.randn(5, 4)


def set_memory(m: Net) -> None:
    with torch.no_grad():
        m.inner[0].weight.set_(torch.randn(5, 4))  # type: ignore[call-overload]


def step(m: Net) -> None:
    m(X).sum().backward()
    torch.optim.SGD(m.parameters(), 0.5).step()


def change_attribute(m: Net) -> None:
    m.plain.add_(1)


def overwrite_conversion(m: Net) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        m.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    with torch.no_grad():
        m.inner[0].weight.mul_(2)


CHANGES = [
    assign, assign_buffer, assign_attribute, assign_in_list, assign_in_dict, remove_and_add,
    by_a_tensor, load_by_assignment, to_and_back, set_data, set_memory, step, change_attribute,
    overwrite_conversion,
]  # fmt: skip


@both
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_is_put_in_the_place_of_a_tensor_counts(
    change: Callable[[Net], None], wrapper: str
) -> None:
    module = Net()
    call = compiled(module, wrapper)
    for _ in range(3):
        before = call(X)
        change(module)
        torch.testing.assert_close(call(X), module(X).detach())
        assert not torch.equal(call(X), before)


def test_attributes_that_python_tells_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_TOLD", False)  # as newer versions of Python have it
    module = Net()
    init = owners.Owners.__init__

    def unseen(self: owners.Owners, *args: Any) -> None:
        init(self, *args)
        self.dicts = tuple(d for d in self.dicts if d is not vars(module))

    monkeypatch.setattr(owners.Owners, "__init__", unseen)
    call = compiled(module)
    for _ in range(2):
        module.plain = torch.randn(4)
        torch.testing.assert_close(call(X), module(X).detach())


def replace_module(m: Net) -> None:
    m.inner[0] = nn.Linear(4, 5)


def replace_by_relu(m: Net) -> None:
    m.inner[1] = nn.ReLU()


def append(m: Net) -> None:
    m.inner.append(nn.ReLU())


def append_parameter(m: Net) -> None:
    m.weights.append(fresh(4))


def remove(m: Net) -> None:
    del m.inner[0].bias


def set_none(m: Net) -> None:
    m.inner[0].bias = None


def give_bias(m: Net) -> None:
    m.inner[2].bias = fresh(4)


def other_size(m: Net) -> None:
    m.inner[0].weight = fresh(5, 1)


def other_dtype(m: Net) -> None:
    m.scale = torch.randn(4).double()


def half(m: Net) -> None:
    m.half()


def move(m: Net) -> None:
    m.to("meta")


def sparse(m: Net) -> None:
    m.inner[0].weight = nn.Parameter(torch.eye(5, 4).to_sparse(), requires_grad=False)


def parametrise(m: Net) -> None:
    nn.utils.parametrizations.weight_norm(m.inner[0])


REFUSED = [
    (replace_module, "sub-module 'inner.0' was replaced since it was compiled"),
    (replace_by_relu, "sub-module 'inner.1' was replaced"),
    (
        append,
        r"module 'inner' has sub-modules \['0', '1', '2', '3'\], "
        r"when compiled it had \['0', '1', '2'\]",
    ),
    (append_parameter, r"module 'weights' has parameters \['2'\] that it had not when compiled"),
    (remove, "parameter or buffer 'inner.0.bias' was removed"),
    (set_none, "parameter or buffer 'inner.0.bias' was removed"),
    (give_bias, "parameter or buffer 'inner.2.bias' was None when compiled"),
    (other_size, r"'inner.0.weight': its data is now float32 on cpu with sizes \[5, 1\]"),
    (other_dtype, "'scale': its data is now float64"),
    (half, "its data is now float16"),
    (move, "its data is now float32 on meta"),
    (sparse, r"'inner.0.weight': expected a plain tensor, got one of layout torch\.sparse_coo"),
    (parametrise, "module 'inner.0' has sub-modules"),
]


@both
@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_other_modules_and_tensors_that_do_not_fit_are_an_error(
    change: Callable[[Net], None], message: str, wrapper: str
) -> None:
    module = Net()
    call = compiled(module, wrapper)
    change(module)
    for _ in range(2):  # the second call has seen the change before
        with pytest.raises(InputError, match=message):
            call(X)


@both
def test_what_was_put_back_counts_again(wrapper: str) -> None:
    module = Net()
    call = compiled(module, wrapper)
    layer, expected = module.inner[0], call(X)
    module.inner[0] = nn.Linear(4, 5)
    with pytest.raises(InputError, match="was replaced"):
        call(X)
    module.inner[0] = layer
    torch.testing.assert_close(call(X), expected)


@both
def test_tied_parameters_are_replaced_together(wrapper: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    module = Tied()
    call = compiled(module, wrapper)
    module.a.weight = fresh(4, 4)
    with pytest.raises(
        InputError,
        match=r"'a.weight' and 'b.weight' were one tensor when compiled, they are two now",
    ):
        call(X)
    module.b.weight = module.a.weight
    torch.testing.assert_close(call(X), module(X).detach())


@both
def test_buffers_that_the_program_writes_follow_the_module(wrapper: str) -> None:
    module = nn.BatchNorm1d(4, affine=False)
    call, eager = (
        plait.compile(module, (X,), options={"wrapper": wrapper}),
        nn.BatchNorm1d(4, affine=False),
    )
    for _ in range(2):
        for m in (module, eager):
            m.running_mean = torch.ones(4)
        torch.testing.assert_close(call(X), eager(X))
        assert module.running_mean is not None and eager.running_mean is not None
        torch.testing.assert_close(module.running_mean, eager.running_mean)


def test_functional_calls_swap_parameters_for_a_while() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.call = [plait.compile(self.inner, (X,))]

        def forward(self, x: Tensor) -> Any:
            return self.call[0](x)

    module = Outer()
    own = module(X)
    given = {"inner.weight": torch.ones(3, 4), "inner.bias": torch.ones(3)}
    torch.testing.assert_close(
        torch.func.functional_call(module, given, (X,)), X @ torch.ones(4, 3) + 1
    )
    torch.testing.assert_close(module(X), own)


# ----------------------------------------------------------------------- functions that use modules
shared = nn.Linear(4, 4)
offset = torch.randn(4)


def uses_globals(x: Tensor) -> Tensor:
    return shared(x) + offset


class Holder:
    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.offset = torch.randn(4)

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x) + self.offset

    def method(self, x: Tensor) -> Tensor:
        return self(x) * 2


def in_closure() -> tuple[Callable[..., Any], nn.Module, Tensor]:
    model, inner = nn.Linear(4, 4), torch.randn(4)

    def helper(x: Tensor) -> Tensor:
        return model(x)

    return lambda x: helper(x) * inner, model, inner


def in_method() -> tuple[Callable[..., Any], nn.Module, Tensor]:
    model = nn.Linear(4, 4)
    return model.forward, model, model.bias


def in_object() -> tuple[Callable[..., Any], nn.Module, Tensor]:
    holder = Holder()
    return holder, holder.model, holder.offset


def in_method_of_an_object() -> tuple[Callable[..., Any], nn.Module, Tensor]:
    holder = Holder()
    return holder.method, holder.model, holder.offset


@both
@pytest.mark.parametrize(
    "make",
    [
        in_closure,
        in_method,
        in_object,
        in_method_of_an_object,
        lambda: (uses_globals, shared, offset),
    ],
)
def test_modules_and_tensors_that_a_function_uses(
    make: Callable[[], tuple[Callable[..., Any], nn.Module, Tensor]], wrapper: str
) -> None:
    fn, model, outside = make()
    call = plait.compile(fn, (X,), options={"wrapper": wrapper})
    with torch.no_grad():
        torch.testing.assert_close(call(X), fn(X))
        outside.add_(1)
        torch.testing.assert_close(call(X), fn(X))
        outside.data = torch.randn(4)
        torch.testing.assert_close(call(X), fn(X))
        model.weight = fresh(4, 4)
        torch.testing.assert_close(call(X), fn(X))
        model.weight = fresh(4, 1)
        with pytest.raises(
            InputError, match=r"weight': its data is now float32 on cpu with sizes \[4, 1\]"
        ):
            call(X)
        model.weight = fresh(4, 4)


@both
def test_numbers_without_dimensions_are_read_at_every_call(wrapper: str) -> None:
    factor = torch.tensor(2.0)
    call = plait.compile(lambda x: (x * factor, factor * 3), (X,), options={"wrapper": wrapper})
    for _ in range(2):
        torch.testing.assert_close(call(X), (X * factor, factor * 3))
        factor.add_(1)


@both
def test_a_tensor_from_outside_that_is_returned_is_itself(wrapper: str) -> None:
    table = torch.randn(4)
    call = plait.compile(lambda x: (x + 1, table, table[1:]), (X,), options={"wrapper": wrapper})
    _, whole, part = call(X)
    assert whole is table
    table.zero_()
    assert part.tolist() == [0, 0, 0]


def test_tensors_made_while_tracing_stay_constants() -> None:
    call = plait.compile(lambda x: x + torch.tensor([1.0, 2, 3, 4]), (X,))
    assert not any(i.name.startswith("outside") for i in call.record.wrapper.inputs)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------- lifetime
def test_what_was_replaced_is_let_go() -> None:
    module = nn.Linear(4, 4)
    call = compiled(module)
    old = weakref.ref(module.weight)
    module.weight = fresh(4, 4)
    call(X)
    gc.collect()
    assert old() is None
    module_ref, call_ref = weakref.ref(module), weakref.ref(call.record)  # type: ignore[attr-defined]
    module.call = call  # type: ignore[assignment]  # a cycle
    del module, call
    gc.collect()
    assert module_ref() is None and call_ref() is None


def test_threads_that_call_while_parameters_are_replaced() -> None:
    n = 256
    module, x = nn.Linear(n, n, bias=False), torch.ones(n, n)
    call = plait.compile(module, (x,))
    values = [nn.Parameter(torch.full((n, n), float(k)), requires_grad=False) for k in range(4)]
    module.weight = values[0]
    stop, wrong = threading.Event(), list[Any]()

    def work() -> None:
        while not stop.is_set():
            got = call(x)
            if not (got == got[0, 0]).all() or got[0, 0].item() not in (0, n, 2 * n, 3 * n):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for k in range(200):
        module.weight = values[k % 4]
        assert (call(x) == n * (k % 4)).all()
    stop.set()
    for t in threads:
        t.join()
    assert wrong == []


# ------------------------------------------------------------------------------------ torch.compile
@pytest.mark.parametrize(
    "change", [*CHANGES, replace_module, replace_by_relu, append, give_bias, set_none, half]
)
@pytest.mark.parametrize("grad", [False, True])
def test_torch_compile_sees_every_change(change: Callable[[Net], None], grad: bool) -> None:
    torch._dynamo.reset()
    module, x = Net(), X.clone()
    call = torch.compile(module, backend="plait")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(call(x), module(x))
        with torch.enable_grad():
            change(module)
        x = x.to(module.scale.dtype)
        if change is half:
            module.plain = module.plain.half()
        torch.testing.assert_close(call(x), module(x))
