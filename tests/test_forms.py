"""Work that can be done in several ways: what the verifier asks of it, and kernels of rows whose
length a call tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from plait.config import Config
from plait.errors import InternalError
from plait.ir.expr import Expr, bounds, evaluate, symbol
from plait.kernel.target import Source
from plait.kernel.triton.by_length import hints_at, tiles_by_length
from plait.kernel.triton.dialects import GPUS
from plait.kernel.triton.target import TritonTarget
from plait.kernel.triton.tiles import plan_tile
from plait.runtime.tune import Contest, Outcome
from plait.schedule.legalize import legalize
from plait.schedule.plan import Kernel
from plait.wrapper.cpp import make_cpp
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.python import make_python
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify
from tests.gpu_rows import kernel_of
from tests.interned import stay

N = symbol("n", lo=1)
HEAD = """
program('g')
n = symbol(lo=1)
pick = symbol(hi=1)
n = int_input()
x = tensor_input(f32[n] @ (1,), device='cuda:0')
kernel('short', 2, 1, device='cuda:0')
kernel('first', 2, 1, device='cuda:0')
kernel('second', 2, 1, device='cuda:0')
"""
SHORT = "launch('short', (x, y), (n,), (y,), n, grid=(pick == 0), when=(pick == 0))"
FIRST = "launch('first', (x, part), (n,), (part,), n, grid=64*(pick == 1), when=(pick == 1))"
SECOND = "launch('second', (part, y), (n,), (y,), n, grid=(pick == 1), when=(pick == 1))"
GOOD = f"""
y = alloc(f32[1] @ (1,), device='cuda:0')
part = alloc(f32[64] @ (1,), device='cuda:0')
pick = let((4096 < n))
{SHORT}
{FIRST}
{SECOND}
free(part)
return (y,)
"""


def parse(body: str) -> WrapperProgram:
    return read(HEAD + body)


def test_one_kernel_or_two() -> None:
    program = parse(GOOD)
    verify(program)
    assert read(text(program)) == program and encode(program)
    assert "launch(call, kernel::second, " in make_cpp(program)
    assert "grid=64*(pick == 1)" in make_python(program, {"cuda": "x.cubins"})


def test_what_all_ways_read_may_be_taken_over() -> None:
    """The ways run at one moment: the last use of what they read is the first of what they make."""
    program = parse("""
z = alloc(f32[n] @ (1,), device='cuda:0')
launch('short', (x, z), (n,), (z,), n, grid=n)
pick = let((4096 < n))
y = reuse(z, f32[n] @ (1,))
launch('short', (z, y), (n,), (y,), n, grid=n*(pick == 0), when=(pick == 0))
launch('first', (z, y), (n,), (y,), n, grid=(pick == 1), when=(pick == 1))
return (y,)
""")
    verify(program)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (SHORT, "", "pick = (4096 < n) picks from 0 to 1 among ways [1]"),
        ("(4096 < n)", "(4096 < n) + (9 < n)", "picks from 0 to 2 among ways [0, 1]"),
        ("grid=64*(pick == 1)", "grid=64", "first runs where another way is taken"),
        (SECOND, "", "y is not used by every way of the same work"),
        ("(part, y), (n,), (y,)", "(part, y), (n,), ()", "y is not written by every way"),
        ("return (y,)", "return (y, part)", "part is not used by every way of the same work"),
        ("when=(pick == 0)", "when=(n == 2)", "n picks a way of doing work and is no function"),
        ("when=(pick == 0)", "when=2*pick", "2*pick is not `pick == k`"),
    ],
)
def test_broken_ways(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(InternalError, match="after build") as caught:
        verify(parse(GOOD.replace(old, new).replace("free(part)\n", "")))
    assert says in str(caught.value)


def written(name: str, length: int | Expr, hint: int) -> Source:
    """The source of a kernel of rows."""
    kernel: Kernel = kernel_of(name, length)
    args = tuple(replace(b, device="cuda:0") for b in kernel.args)
    sizes = (N,) if isinstance(length, Expr) else ()
    kernel = replace(kernel, args=args, sizes=sizes, hints=(hint,) * len(sizes))
    machines = {"cuda:0": (GPUS["sm_90"], 264, False)}
    return TritonTarget().emit([kernel], {kernel.name: set()}, machines, {}, verifies=True)


def test_rows_of_any_length_that_are_read_once_where_a_block_holds_them() -> None:
    source = written("softmax", N, 500)
    forms = source.forms["softmax"]
    assert [name for name, _ in forms.entries] == [
        "softmax_128_vectors", "softmax_512_vectors", "softmax_2048_vectors",
        "softmax_8192_vectors", "softmax_vectors",
        "softmax_128", "softmax_512", "softmax_1024", "softmax_2048", "softmax",
    ]  # fmt: skip
    assert source.entry_points == {"softmax": "softmax"}  # of any length
    vectors = [evaluate(forms.pick, {"n": n}) for n in (4, 128, 132, 512, 516, 2052, 8192, 8196)]
    others = [evaluate(forms.pick, {"n": n}) for n in (1, 127, 129, 511, 513, 1025, 2047, 2049)]
    assert vectors == [0, 0, 1, 1, 2, 3, 3, 4] and others == [5, 5, 6, 6, 7, 8, 8, 9]
    assert bounds(forms.pick) == (0, 9)
    loops = [unit.text.count("for offset in") for unit in source.units]
    # Of any length: inside of rows, and at their ends.
    assert loops == [*[0] * 4, 2, *[0] * 4, 4] and len({unit.name for unit in source.units}) == 10


def test_rows_of_whole_vectors_are_read_by_vectors() -> None:
    """Of 16 bytes: the length is known to be a multiple of four float32."""
    for unit in written("softmax", N, 500).units:
        assert ("s0 = s0 // 4 * 4" in unit.text) == unit.name.endswith("_vectors")
        assert ("// 32 * 32" in unit.text) == (unit.name == "softmax")  # begins where lines do
    sums = written("exp_sum", N, 500)  # a sum is read once anyway, so nothing is held
    assert [name for name, _ in sums.forms["exp_sum"].entries] == ["exp_sum_vectors", "exp_sum"]
    assert [evaluate(sums.forms["exp_sum"].pick, {"n": n}) for n in (3, 4, 8)] == [1, 0, 0]
    assert not written("exp_sum", 8 * N, 500).forms  # all rows are


def test_the_pick_is_measured_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its tensors at that length; where nothing is measured, the sizes pick as before."""
    seen: list[tuple[tuple[int, ...], int]] = []

    def tune(contests: Sequence[Contest], cfg: Config) -> list[Outcome]:
        seen.extend((c.sizes, len(c.labels)) for c in contests)
        return [Outcome(len(c.labels) - 1, (1.0,) * len(c.labels)) for c in contests]

    kernel = replace(kernel_of("softmax", N), sizes=(N,), hints=(100,))
    kernel = replace(kernel, args=tuple(replace(b, device="cuda:0") for b in kernel.args))
    machines = {"cuda:0": (GPUS["sm_90"], 264, False)}
    target, cfg, anywhere = TritonTarget(), Config(), {"softmax": frozenset[str]()}
    plain = target.emit([kernel], anywhere, machines, {}, True)
    monkeypatch.setattr("plait.kernel.triton.target.tune", tune)
    found = target.measure([kernel], anywhere, machines, cfg)
    assert [n for (n,), _ in seen] == [100, 64, 128, 256, 512, 1024, 2048]
    assert [n for _, n in seen[1:]] == [4, 4, 3, 3, 2, 2]  # of whole vectors, as these lengths are
    assert any(note.startswith("softmax for rows up to 512: ") for note in found.notes)
    source = target.emit([kernel], anywhere, machines, found.choices, True)
    picks = [evaluate(source.forms["softmax"].pick, {"n": n}) for n in (60, 100, 500, 600, 99)]
    assert picks == [3, 3, 3, 3, 4]  # the last of each contest: the block that walks
    unknown = lambda contests, cfg: [Outcome(reason="no device") for _ in contests]
    monkeypatch.setattr("plait.kernel.triton.target.tune", unknown)
    found = target.measure([kernel], anywhere, machines, cfg)
    same = target.emit([kernel], anywhere, machines, found.choices, True)
    assert same == plain


def test_one_form_where_another_saves_nothing() -> None:
    assert not written("softmax", 500, 0).forms  # the length is known
    assert not written("exp_sum", 8 * N, 500).forms  # read once anyway


def test_a_pick_that_was_measured() -> None:
    """Rows of up to 64 by the second block, up to 128 by the one that walks, up to 512 by the
    second and the third: what was fastest, and never a block that is too short."""
    kernel = kernel_of("softmax", N)
    kernel = replace(kernel, sizes=(N,), hints=(100,))
    tiles = tiles_by_length(legalize(kernel), kernel.hint_of)
    blocks = [t and t.groups[-1].block for t in tiles.tiles if not (t and t.looped)]
    assert blocks == [128, 512, 2048, 128, 256, 512, None] and tiles.n_vectors == 4
    assert tiles.buckets == [64, 128, 256, 512, 1024, 2048]
    walks = plan_tile(legalize(kernel))
    measured = tiles.measured({64: 1, 128: 3, 256: 0, 512: 1}, walks)
    lengths = (4, 64, 68, 128, 132, 256, 260, 512, 516, 9999, 63, 129, 513)
    picks = [evaluate(measured.pick, {"n": n}) for n in lengths]
    assert picks == [1, 1, 3, 3, 1, 1, 2, 2, 2, 7, 4, 5, 7] and bounds(measured.pick) == (0, 7)
    assert measured.tiles[-1] is walks
    at = hints_at(kernel, tiles.length, 256)
    assert at is not None and at.hint_of == {"n": 256}
    assert hints_at(kernel, tiles.length, 1 << 30) is None  # gigabytes


nodes_stay = stay()
