"""Compiled steps of every optimizer of torch.optim: parameters and state after several steps are
those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plait
from tests.against_eager import compiled

LR = 0.02
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "foreach": {"foreach": True, "weight_decay": 0.1},
    "maximize": {"maximize": True},
    "tensor lr": {"lr": torch.tensor(LR)},
}
SPECIAL = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    ("SGD", {"fused": True, "momentum": 0.9}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("AdamW", {"fused": True, "amsgrad": True}),
    (
        "Adam",
        {
            "betas": (torch.tensor(0.9), torch.tensor(0.999)),
            "lr": torch.tensor(LR),
            "foreach": False,
        },
    ),
    ("RMSprop", {"centered": True, "momentum": 0.9, "foreach": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("LBFGS", {"max_iter": 3}),
]
if hasattr(torch.optim, "Muon"):
    SPECIAL.append(("Muon", {"weight_decay": 0.1, "nesterov": True}))
NAMES = sorted(
    n
    for n, c in vars(torch.optim).items()
    if isinstance(c, type) and n not in ("Optimizer", "SparseAdam")
)


def steps(
    name: str, options: dict[str, Any], dtype: torch.dtype, compile_it: bool
) -> tuple[Any, ...]:
    """Parameters and state after some steps, or the class of the error."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 5, bias=name != "Muon"), nn.Tanh(), nn.Linear(5, 4, bias=name != "Muon")
    ).to(dtype)
    optimizer = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
    x = torch.randn(8, 6).to(dtype)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(x) - 0.3).square().mean()
        value.backward()
        return value

    step = compiled(optimizer.step) if compile_it else optimizer.step
    for _ in range(4):
        if name == "LBFGS":
            step(loss)
        else:
            loss()
            step()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return tuple(p.detach().clone() for p in (*model.parameters(), *state))


def agree(name: str, options: dict[str, Any]) -> None:
    """Compiled steps end no further from those in float64 than eager's do, beyond tolerance."""
    want = steps(name, options, torch.float32, False)
    got = steps(name, options, torch.float32, True)
    exact = steps(name, options, torch.float64, False)
    assert len(want) == len(got) == len(exact)
    for g, w, e in zip(got, want, exact, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        far, allowed = (g - e).abs(), (w - e).abs() + 1e-5 + 1e-5 * e.abs()
        assert (far <= allowed).all(), (
            f"{name}: {far.max()} from the float64 result, eager {(w - e).abs().max()}"
        )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_optimizer(name: str, setting: str) -> None:
    options = {"lr": LR, **SETTINGS[setting]}
    try:
        getattr(torch.optim, name)([torch.zeros(2, 2)], **options)
    except (TypeError, ValueError) as refused:
        pytest.skip(str(refused))
    agree(name, options)


@pytest.mark.parametrize(
    ("name", "options"), SPECIAL, ids=[f"{n} {' '.join(o)}" for n, o in SPECIAL]
)
def test_special_options(name: str, options: dict[str, Any]) -> None:
    agree(name, {"lr": LR, **options})


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
UPDATES: dict[str, Step] = {
    "addcmul": lambda x, y, z: x.addcmul_(y, z, value=0.001),
    "addcdiv": lambda x, y, z: x.addcdiv_(y, z, value=-0.3),
    "by a tensor": lambda x, y, z: x.add_(y, alpha=z[0]),
    "of rows": lambda x, y, z: x.addcmul_(y[:1], z[3], value=2),
    "by an integer": lambda x, y, z: torch.ops.prims.fma(x, 2, z),
    "of numbers": lambda x, y, z: torch.ops.prims.fma(0.5, x, 1),
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32], ids=str
)
@pytest.mark.parametrize("name", UPDATES)
def test_multiply_add(name: str, dtype: torch.dtype, kernels: bool) -> None:
    """The primitive that Dynamo makes of a scaled update, with a number for a tensor; half types
    are rounded once."""
    whole = dtype == torch.int32
    if whole and name in ("addcmul", "addcdiv", "by a tensor"):
        pytest.skip("eager refuses it")
    torch.manual_seed(0)
    x, y, z = ((torch.randn(1000) * 4 + 20).to(dtype) for _ in range(3))
    want = UPDATES[name](x.clone(), y, z)
    got = torch.compile(UPDATES[name], backend="plait", options={"kernels": kernels})(
        x.clone(), y, z
    )
    if name.startswith("addc") and dtype.itemsize == 2:
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want)


SIZES = [(3 + 5 * k, 16) if k % 3 else (2 + 7 * k,) for k in range(60)]


def parameters(dtype: torch.dtype, sizes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """With gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(s).to(dtype)) for s in sizes]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def test_sixty_parameters() -> None:
    """They take a handful of launches, and nothing is called."""
    given = parameters(torch.float32, SIZES)
    optimizer = torch.optim.AdamW(given, lr=LR, foreach=True)
    told = plait.explain(optimizer.step, quiet=True)
    assert told.kernels <= 6 and not told.fallbacks, told


FEW_LAUNCHES = [
    *[(name, {"foreach": True}) for name in ("Adam", "RMSprop", "Adagrad", "NAdam", "RAdam")],
    ("SGD", {"foreach": True, "momentum": 0.9}),
    ("AdamW", {"foreach": False, "lr": torch.tensor(LR)}),
]


@pytest.mark.parametrize(
    ("name", "options"), FEW_LAUNCHES, ids=[f"{n} {' '.join(o)}" for n, o in FEW_LAUNCHES]
)
def test_few_launches(name: str, options: dict[str, Any]) -> None:
    """One launch steps eight parameters, and one their counters."""
    given = parameters(torch.float32, [(3, 4 + k) for k in range(8)])
    optimizer = getattr(torch.optim, name)(given, **{"lr": LR, **options})
    told = plait.explain(optimizer.step, quiet=True)
    assert 1 <= told.kernels <= 2 and not told.fallbacks, told


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_parameters(dtype: torch.dtype) -> None:
    """Of mixed size, empty and of one element among them: as in eager, but for a unit in the last
    place."""
    sizes = [*SIZES[:8], (), (0, 4), (1,)]
    seen = []
    for compile_it in (False, True):
        given = parameters(dtype, sizes)
        optimizer = torch.optim.SGD(given, lr=LR, momentum=0.9, foreach=True)
        step = compiled(optimizer.step) if compile_it else optimizer.step
        for _ in range(2):
            step()
        seen.append(given)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(seen[1], seen[0], rtol=2 * eps, atol=eps)


@pytest.mark.parametrize("foreach", [True, False])
def test_empty_parameters(foreach: bool) -> None:
    """They take no launch; their version counts as eager's does."""
    told, versions = [], []
    for sizes in ([(3, 4)], [(3, 4), (0, 4), (0,), (2, 0, 3)]):
        given = parameters(torch.float32, sizes)
        optimizer = torch.optim.SGD(given, lr=LR, momentum=0.9, foreach=foreach)
        told.append(plait.explain(optimizer.step, quiet=True))
        versions.append([p._version for p in given])
    assert told[0].kernels == told[1].kernels == 1, told[1]
    assert versions[1] == versions[0] * 4


@pytest.mark.parametrize("foreach", [True, False])
def test_clipped(foreach: bool) -> None:
    """Gradients are clipped, then the step is made: one function."""
    seen = []
    for compile_it in (False, True):
        given = parameters(torch.float32, SIZES[:9])
        optimizer = torch.optim.SGD(given, lr=LR, momentum=0.9, foreach=foreach)

        def step(given: Any = given, optimizer: Any = optimizer) -> torch.Tensor:
            norm = nn.utils.clip_grad_norm_(given, 1.0, foreach=foreach)
            optimizer.step()
            return norm

        run = compiled(step) if compile_it else step
        seen.append((run(), run(), given))
    torch.testing.assert_close(seen[1], seen[0])


def test_unscaled() -> None:
    """Gradients are brought back to scale, as GradScaler does it."""

    def unscale(grads: list[torch.Tensor], found: torch.Tensor, by: torch.Tensor) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, by)

    for last in (1.0, float("inf")):
        seen = []
        for run in (unscale, compiled(unscale)):
            grads = [torch.ones(4, 3), torch.full((5,), last)]
            found = torch.zeros(1)
            run(grads, found, torch.tensor([0.5]))
            seen.append((grads, found))
        torch.testing.assert_close(seen[1], seen[0])


def test_scaled_and_clipped() -> None:
    """Three steps with GradScaler and clipping, each one function; the second overflows and is left
    out."""
    seen = []
    for compile_it in (False, True):
        given = parameters(torch.float32, SIZES[:4])
        optimizer = torch.optim.AdamW(given, lr=LR, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step(
            weight: Any, given: Any = given, optimizer: Any = optimizer, scaler: Any = scaler
        ) -> Any:
            optimizer.zero_grad()
            loss = sum((p * p.detach().cos()).square().sum() for p in given)
            scaler.scale(loss * weight).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(given, 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            return norm

        run = compiled(step) if compile_it else step
        norms, scales = [], []
        for weight in (torch.tensor(1.0), torch.tensor(float("inf")), torch.tensor(0.5)):
            norms.append(run(weight))
            scales.append(scaler.get_scale())
        seen.append((norms, scales, given))
    assert seen[0][1] == seen[1][1] == [8.0, 4.0, 4.0]
    torch.testing.assert_close(seen[1], seen[0], equal_nan=True)


def test_training_step() -> None:
    """Forward and backward pass and the step, compiled as one function."""
    seen = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=True)
        x = torch.randn(8, 6)

        def train(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - 0.3).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = compiled(train) if compile_it else train
        seen.append(([run() for _ in range(4)], list(model.parameters())))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


def whole_step(by_hand: bool) -> tuple[Callable[[], torch.Tensor], list[nn.Parameter]]:
    """A step of training as one function, and its parameters. by_hand: the update is written out,
    for torch.optim's ends Dynamo's graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    given, x = list(model.parameters()), torch.randn(8, 6)
    optimizer = torch.optim.AdamW(given, lr=LR, foreach=True)
    means = [torch.zeros_like(p) for p in given]

    def gradients() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = (model(x) - 0.3).square().mean()
        return loss.detach(), torch.autograd.grad(loss, given)

    def train() -> torch.Tensor:
        loss, grads = gradients()
        with torch.no_grad():
            torch._foreach_lerp_(means, grads, 0.1)
            torch._foreach_add_(given, torch._foreach_sign(means), alpha=-LR)
        return loss

    def backward() -> torch.Tensor:  # nothing that has a gradient leaves it
        loss: torch.Tensor = (model(x) - 0.3).square().mean()
        loss.backward()
        return loss.detach()

    def with_optimizer() -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward()
        optimizer.step()
        return loss

    return train if by_hand else with_optimizer, given


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch cannot trace it"
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_backward_is_traced(by_hand: bool) -> None:
    """With the update written out a step of training is one graph; else the optimizer's is a
    second one."""
    seen = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for compile_it in (False, True):
            train, given = whole_step(by_hand)
            run = compiled(train, fullgraph=by_hand) if compile_it else train
            seen.append(([run() for _ in range(4)], given))
        torch._dynamo.reset()
        told = plait.explain(whole_step(by_hand)[0], quiet=True)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    assert len(told.graphs) == 2 - by_hand and not told.fallbacks, told


@pytest.mark.parametrize("foreach", [True, False])
def test_adafactor(foreach: bool) -> None:
    """It reads a number of each parameter's: Dynamo traces it where it is told to."""
    sizes = [(4 + k, 5) for k in range(4)]
    seen = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for compile_it in (False, True):
            given = parameters(torch.float32, sizes)
            optimizer = torch.optim.Adafactor(given, lr=LR, foreach=foreach)
            step = compiled(optimizer.step, fullgraph=True) if compile_it else optimizer.step
            for _ in range(3):
                step()
            seen.append(given)
    torch.testing.assert_close(seen[1], seen[0])


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Five rounds of Newton and Schulz, as Muon makes them."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def test_newton_schulz() -> None:
    """A step of Muon that is written by hand."""
    seen = []
    for compile_it in (False, True):
        given = parameters(torch.float32, [(6, 9), (5, 5)])
        momenta = [torch.zeros_like(p) for p in given]

        def step(given: Any = given, momenta: Any = momenta) -> None:
            grads = [p.grad for p in given]
            with torch.no_grad():
                torch._foreach_mul_(momenta, 0.95)
                torch._foreach_add_(momenta, grads)
                ahead = torch._foreach_add(grads, momenta, alpha=0.95)
                torch._foreach_add_(given, list(map(orthogonal, ahead)), alpha=-LR)

        run = compiled(step, fullgraph=True) if compile_it else step
        run()
        run()
        seen.append((given, momenta))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
