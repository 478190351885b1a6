"""Modules whose forward assigns tensors: plait.compile writes buffers, and says what it cannot
assign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import plait
from plait.errors import InputError, Unsupported
from tests.metadata import facts

ROW = torch.arange(4.0)


class Assigns(nn.Module):
    def __init__(
        self, fn: Callable[..., Any], attributes: dict[str, Any], **buffers: Tensor | None
    ) -> None:
        super().__init__()
        self.fn = fn
        for name, x in buffers.items():
            self.register_buffer(name, x if x is None else x.clone())
        for name, x in attributes.items():
            setattr(self, name, x)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def counted(m: Any, x: Tensor) -> Tensor:
    m.a = m.a + 1
    return x + m.a


def returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    old = m.a
    m.a = m.a + x
    return old, old[:2], m.a


def swapped(m: Any, x: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a
    return x + m.a


def written_again(m: Any, x: Tensor) -> Tensor:
    m.a = torch.roll(m.a, 1, 0)
    m.a.mul_(x)
    m.b = m.a
    return m.a + m.b


def of_a_found_size(m: Any, x: Tensor) -> Tensor:
    rows = (x * m.b)[x + 9 > 0]
    torch._check(rows.shape[0] == m.a.shape[0])
    m.a = rows
    return rows


def of_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.w = nn.Parameter(m.w * 2)
    return x * m.w


def kept(m: Any, x: Tensor) -> Tensor:
    m.last = x * 2
    return x + 1


def grown(m: Any, x: Tensor) -> Tensor:
    m.a = torch.cat([m.a, x])
    return m.a


def wider(m: Any, x: Tensor) -> Tensor:
    m.a = m.a.double()
    return x + m.a


def by_data(m: Any, x: Tensor) -> Tensor:
    m.a.data = m.a.data + 1
    return x + m.a


@pytest.mark.parametrize(
    "fn", [counted, returned, swapped, written_again, of_a_parameter, of_a_found_size]
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_assigned_is_written(fn: Callable[..., Any], packed: bool, tmp_path: Path) -> None:
    ours, eager = (
        Assigns(fn, {"w": nn.Parameter(ROW.clone())}, a=ROW, b=ROW * 2) for _ in range(2)
    )
    with torch.no_grad():
        if packed:
            plait.package(ours, tmp_path / "p.plait", (ROW,))
            call: Callable[..., Any] = plait.load(tmp_path / "p.plait")
        else:
            call = plait.compile(ours, (ROW,))
        for k in range(3):
            torch.testing.assert_close(call(ROW + k), eager(ROW + k), rtol=0, atol=0)
    if not packed:
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn, attributes, buffers",
    [
        (grown, {}, {"a": ROW}),
        (wider, {}, {"a": ROW}),
        (by_data, {}, {"a": ROW}),
        (counted, {"a": ROW.clone()}, {}),
        (kept, {}, {"last": None}),
    ],
    ids=["grown", "wider", "by data", "no buffer", "an empty buffer"],
)
def test_what_no_program_can_assign_is_told(
    fn: Callable[..., Any], attributes: dict[str, Any], buffers: dict[str, Any]
) -> None:
    module = Assigns(fn, attributes, **buffers)
    before = dict(module.__dict__), dict(module._buffers)
    with pytest.raises(Unsupported):
        plait.compile(module, (ROW,))
    assert (module.__dict__, module._buffers) == before


def test_what_a_module_keeps_beside_its_state_is_warned_of() -> None:
    module = Assigns(kept, {"last": None})
    with pytest.warns(UserWarning, match="assigns 'last'"):
        call = plait.compile(module, (ROW,))
    assert torch.equal(call(ROW), ROW + 1) and module.last is None


def made_from_the_first(m: Any, x: Tensor) -> Tensor:
    if m.a is None:
        m.a = x.clone()
    return x - m.a


def summed(m: Any, x: Tensor) -> Tensor:
    m.a = x if m.a is None else m.a + x
    return m.a * 1


def summed_in_place(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "made"):
        m.made = torch.zeros(4)
    m.made += x
    return m.made * 1


def drawn_once(m: Any, x: Tensor) -> Tensor:
    if m.a is None:
        m.a = torch.rand(4)
    return x * m.a


def made_once(m: Any, x: Tensor) -> Tensor:
    if m.a is None or m.n < x.shape[0]:
        m.n, m.a = x.shape[0], torch.arange(float(x.shape[0]))
    return x * m.a[: x.shape[0]]


def in_a_pair(m: Any, x: Tensor) -> Tensor:
    a, b = m.a or (torch.zeros(4), torch.zeros(4))
    m.a = (a + x, b + a)
    return b * 1


def in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.d["a"] = m.d.get("a", 0) + x
    return m.d["a"] * 1


def in_a_list(m: Any, x: Tensor) -> Tensor:
    m.l.append(x)
    return torch.stack(m.l).sum(0)


def in_an_object(m: Any, x: Tensor) -> Tensor:
    m.o.a = m.o.a + x
    return m.o.a * 1


def counts(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    return x * m.n


def tells_the_first(m: Any, x: Tensor) -> Tensor:
    first, m.first = m.first, False
    return x if first else x * 2


def turns(m: Any, x: Tensor) -> tuple[Tensor, bool]:
    m.first = not m.first
    return x * 2, m.first


def never_settles(m: Any, x: Tensor) -> Tensor:
    m.first = not m.first
    return x * 2


TABLE: dict[str, Tensor] = {}


def in_a_global(_: Any, x: Tensor) -> Tensor:
    TABLE["sum"] = TABLE.get("sum", 0) + x
    return TABLE["sum"] * 1


def new_buffer(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "made"):
        m.register_buffer("made", torch.zeros(4))
    return x + m.made


def new_layer(m: Any, x: Tensor) -> Any:
    if not hasattr(m, "made"):
        m.made = nn.Linear(4, 4)
    return m.made(x)


def attributes() -> dict[str, Any]:
    return {
        "a": None,
        "n": 0,
        "first": True,
        "d": {},
        "l": [],
        "o": SimpleNamespace(a=torch.zeros(4)),
    }


REMEMBERS = [
    made_from_the_first, summed, summed_in_place, drawn_once, made_once, in_a_pair, in_a_dict,
    in_a_list, in_an_object, counts, tells_the_first, turns, never_settles, in_a_global, new_buffer,
    new_layer,
]  # fmt: skip


@pytest.mark.parametrize("fn", REMEMBERS)
@pytest.mark.parametrize("shapes", [None, ({0: Dim.DYNAMIC},)], ids=["fixed", "dynamic"])
def test_calls_that_ask_for_what_others_kept_are_refused(
    fn: Callable[..., Any], shapes: Any
) -> None:
    module = Assigns(fn, attributes())
    with pytest.raises(
        Unsupported, match=r"asks for what the one before it left|no buffer with a value"
    ):
        plait.compile(module, (ROW,), shapes)
    assert not TABLE and not hasattr(module, "made") and not module._buffers
    assert {name: getattr(module, name) for name in ("a", "n", "first", "d", "l")} == {
        name: x for name, x in attributes().items() if name != "o"
    }


def test_what_is_made_once_may_be_there_before(tmp_path: Path) -> None:
    module = Assigns(made_once, attributes())
    module(torch.ones(8))
    shapes = ({0: Dim.DYNAMIC},)
    plait.package(module, tmp_path / "p.plait", (ROW,), shapes)
    for call in (plait.compile(module, (ROW,), shapes), plait.load(tmp_path / "p.plait")):
        for n in (4, 8, 3):
            assert torch.equal(call(torch.ones(n)), torch.arange(float(n)))
        with pytest.raises(InputError, match="expected size at most 8"):
            call(torch.ones(9))


def test_what_nobody_asks_for_is_not_kept() -> None:
    """In attributes, lists and dicts, also those of hooks; numbers that count, and flags."""

    def keeps(m: Any, x: Tensor) -> Tensor:
        m.n += 1
        m.l.append(x * 2)
        m.d["last"] = x * 3
        m.a = (x, m.n)
        if m.first:
            m.first = False
        return m.layer(x) + 1  # type: ignore[no-any-return]

    seen: dict[str, Tensor] = {}
    module = Assigns(keeps, attributes() | {"layer": nn.Identity()})
    module.layer.register_forward_hook(lambda *_: seen.update(x=_[2]))
    module.l.append(ROW)
    with pytest.warns(
        UserWarning, match="a call of Assigns assigns .*'n'.*, one of the program does not"
    ):
        call = plait.compile(module, (ROW,))
    for k in range(3):
        assert torch.equal(call(ROW + k), ROW + k + 1)
    assert not seen and module.d == {} and module.first and module.n == 0 and module.a is None
    assert len(module.l) == 1 and module.l[0] is ROW


def test_a_layer_in_two_places_and_a_tensor_in_two_layers() -> None:
    layer, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    module = nn.Sequential(layer, nn.Sequential(layer), tied)
    before = {name: id(x) for name, x in module.named_parameters(remove_duplicate=False)}
    want = module(ROW)
    torch.testing.assert_close(plait.compile(module, (ROW,))(ROW), want)
    assert {name: id(x) for name, x in module.named_parameters(remove_duplicate=False)} == before
    assert torch.equal(module(ROW), want)


@pytest.mark.parametrize("road", ["native", "python", "cpp", "fx", "package"])
def test_results_in_a_buffer_that_is_assigned_lie_as_in_eager(road: str, tmp_path: Path) -> None:
    def parts(m: Any, x: Tensor) -> Any:
        old = m.a
        m.a = old + x
        return old.diagonal(), old.t()[1:], old[:, 1], old.view(torch.int32)

    ours, eager = (Assigns(parts, {}, a=torch.arange(16.0).view(4, 4)) for _ in range(2))
    if road == "package":
        plait.package(ours, tmp_path / "p.plait", (ROW,))
        call: Callable[..., Any] = plait.load(tmp_path / "p.plait")
    else:
        call = plait.compile(ours, (ROW,), options={"wrapper": road})
    for _ in range(2):
        got, want = call(ROW), eager(ROW)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert facts(got[:3], []) == facts(want[:3], [])


def test_what_is_put_into_arguments_is_warned_of() -> None:
    """Results are eager's; the dicts and lists of the caller stay."""

    def fn(
        x: Tensor, batch: dict[str, Tensor], rest: list[Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        batch["sum"] = x + batch.pop("a")
        return batch, rest.pop() * 2

    text = r"a call of fn changes 'rest', \"batch\['a'\]\", \"batch\['sum'\]\" of its arguments"
    with pytest.warns(UserWarning, match=text):
        call = plait.compile(fn, (ROW, {"a": ROW}, [ROW, ROW]))
    batch, rest = {"a": ROW + 1}, [ROW, ROW + 2]
    out, last = call(ROW, batch, rest)
    assert (
        list(out) == ["sum"]
        and torch.equal(out["sum"], ROW * 2 + 1)
        and torch.equal(last, (ROW + 2) * 2)
    )
    assert list(batch) == ["a"] and len(rest) == 2
