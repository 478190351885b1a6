"""Cutting programs into what is recorded as a CUDA graph and what runs at every call, on programs
as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from plait.tools.report import recorded_lines
from plait.wrapper.instructions import (
    Alloc,
    Arena,
    CallExtern,
    Launch,
    Partition,
    Place,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.partition import COPIED_NBYTES, fixed_inputs, partition, recorded_results
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify, verify_kept

HEAD = """\
program('p', n_constants=1, n_callables=1)

x = tensor_input(f32[4, 8] @ (8, 1), device='cuda:0')
y = tensor_input(f32[4, 8] @ (8, 1), device='cuda:0')
h = tensor_input(f32[4, 8] @ (8, 1))

kernel('k', 2, 0, device='cuda:0')
kernel('c', 2, 0)
"""


def cut(
    body: str,
    n_results: int | None = None,
    nbytes: Mapping[str, int] | None = None,
    spent: str = "",
) -> WrapperProgram:
    program = read(HEAD + body)
    verify(program, after="test")
    made = partition(program, [torch.zeros(3)], n_results, nbytes, spent)
    verify(made, after="partition")
    verify_kept(program, made, after="partition")
    assert read(text(made)) == made
    encode(made)
    return made


def parts(program: WrapperProgram) -> list[tuple[bool, str]]:
    return [(i.recorded, i.reason) for i in program.body if isinstance(i, Partition)]


KERNELS = """\
a = alloc(f32[4, 8] @ (8, 1), device='cuda:0')
launch('k', (x, a), (), (a,), 1)
b = alloc(f32[4, 8] @ (8, 1), device='cuda:0')
launch('k', (a, b), (), (b,), 1)
"""


def test_kernels_are_recorded_and_their_results_are_not() -> None:
    made = cut(KERNELS + "v = view(b, f32[32] @ (1,), 0)\nreturn (v,)\n")
    assert parts(made) == [(False, ""), (True, "")]
    at = {i.name if isinstance(i, Alloc) else type(i).__name__: k for k, i in enumerate(made.body)}
    first = next(k for k, i in enumerate(made.body) if isinstance(i, Partition) and i.recorded)
    assert at["b"] < first < at["a"]
    assert fixed_inputs(made) == (["x"], []) and recorded_results(made) == (["b"], [])


def test_results_of_operators_stay_in_recorded_memory() -> None:
    made = cut(
        KERNELS + "call('aten::mm.out', into=(b,), may_keep=False)(a, y, out=b)\nreturn (b,)\n"
    )
    first = next(k for k, i in enumerate(made.body) if isinstance(i, Partition) and i.recorded)
    assert all(made.body.index(i) > first for i in made.body if isinstance(i, Alloc))
    assert fixed_inputs(made) == (["x"], ["y"]) and recorded_results(made) == ([], ["b"])
    assert recorded_lines(made, {}) == [
        "  CUDA graphs: 1 part recorded; "
        "1 input (x) patched if moved, 1 input (y) that operators see copied or recorded again; "
        "0 results written where it belongs, 1 copied inside the graph"
    ]
    assert recorded_lines(replace(made, body=made.body[-1:]), {}) == []


def test_a_result_in_the_memory_of_another_tensor_is_not_recorded_memory() -> None:
    made = cut(
        KERNELS
        + "c = reuse(b, f32[4, 8] @ (8, 1))\nlaunch('k', (b, c), (), (c,), 1)\nreturn (c,)\n"
    )
    first = next(k for k, i in enumerate(made.body) if isinstance(i, Partition) and i.recorded)
    assert [i.name for i in made.body[:first] if isinstance(i, Alloc)] == ["b"]
    assert recorded_results(made) == (["b"], [])


def test_what_a_forward_pass_saves_stays_in_recorded_memory() -> None:
    def hoisted(program: WrapperProgram) -> list[str]:
        first = next(
            k for k, i in enumerate(program.body) if isinstance(i, Partition) and i.recorded
        )
        return [i.name for i in program.body[:first] if isinstance(i, Alloc)]

    both = KERNELS + "return (b, a)\n"
    assert (
        hoisted(cut(both, 1)) == ["b"]
        and hoisted(cut(both)) == ["a", "b"]
        and hoisted(cut(both, 0)) == []
    )
    assert cut(both, 1).n_results == 1 and cut(both).n_results is None


MORE = """\
e = alloc(f32[4, 8] @ (8, 1), device='cuda:0')
launch('k', (x, e), (), (e,), 1)
g = alloc(f32[4, 8] @ (8, 1), device='cuda:0')
launch('k', (e, g), (), (g,), 1)
"""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "c = alloc(f32[4, 8] @ (8, 1))\nlaunch('c', (h, c), (), (c,), 1)\n",
            "kernel c runs on the CPU",
        ),
        ("c, = call_python(0, 'lib.f')(a)\n", "lib.f is a Python function"),
        ("require_finite(a, 'm.py:1')\n", "values are checked"),
        ("c, = call('aten::nonzero')(a)\n", "aten::nonzero waits for the device"),
        (
            "c, = call('_c10d_functional::all_reduce')(a, 'sum', '0')\n",
            "_c10d_functional::all_reduce needs the other ranks",
        ),
        ("c, = call('aten::multinomial')(a, 1)\n", "aten::multinomial waits for the device"),
        (
            "call('aten::_linalg_check_errors')(a, 'inv', is_matrix=True)\n",
            "aten::_linalg_check_errors waits for the device",
        ),
        ("c, = call('aten::add.Tensor')(a, h)\n", "aten::add.Tensor has a tensor on the host"),
        (
            "w = constant(0)\nc, = call('aten::add.Tensor')(a, w)\n",
            "aten::add.Tensor has a tensor on the host",
        ),
        (
            "c, = call('aten::_to_copy')(a, device=device('cpu'))\n",
            "aten::_to_copy has a tensor on the host",
        ),
        ("copy(h, a)\n", "a copy to or from the host"),
        ("s0 = read(y, 'size', 0)\n", "a size of y is read"),
        (
            "c, _, _, _ = call('aten::_scaled_dot_product_efficient_attention')(a, a, a, None, "
            "False, 0.5)\n",
            "aten::_scaled_dot_product_efficient_attention draws its seed where it runs, on the "
            "host or on the device",
        ),
    ],
)
def test_what_needs_the_host_is_not_recorded(line: str, reason: str) -> None:
    assert parts(cut(KERNELS + line + MORE + "return (b, g)\n")) == [
        (False, ""),
        (True, ""),
        (False, reason),
        (True, ""),
    ]


def test_attention_without_dropout_is_recorded() -> None:
    line = (
        "c, _, _, _ = call('aten::_scaled_dot_product_efficient_attention')(a, a, a, None, False, "
        "0.0)\n"
    )
    line += "require_layout(c, f32[4, 8] @ (8, 1))\n"
    assert parts(cut(KERNELS + line + "return (b, c)\n")) == [(False, ""), (True, "")]


def test_little_work_is_not_recorded() -> None:
    made = cut(
        "a = alloc(f32[4, 8] @ (8, 1), device='cuda:0')\nlaunch('k', (x, a), (), (a,), 1)\nreturn "
        "(a,)\n"
    )
    assert parts(made) == [(False, ""), (False, "too little work to record")]


def test_seeds_are_drawn_first() -> None:
    seed = "s, = call('plait::seed')(device('cuda:0'))\nrequire_layout(s, i64[()] @ ())\n"
    made = cut(f"{KERNELS}{seed}launch('k', (s, b), (), (b,), 1)\nreturn (b,)\n")
    assert parts(made) == [(False, "a seed is drawn"), (True, "")]


ARENA = """\
arena = take_arena(256, device='cuda:0')
a = place(arena, 0, f32[4, 8] @ (8, 1))
launch('k', (x, a), (), (a,), 1)
b = place(arena, 128, f32[4, 8] @ (8, 1))
launch('k', (a, b), (), (b,), 1)
"""


@pytest.mark.parametrize(
    ("more", "placed", "allocated"),
    [
        ("", {"a", "b"}, set()),
        ("c, = call_python(0, 'lib.f')(x)\nlaunch('k', (b, g), (), (g,), 1)\n", {"a"}, {"b"}),
        (
            "c, = call_python(0, 'lib.f')(x)\nlaunch('k', (a, g), (), (g,), 1)\nfree(b)\n",
            {"b"},
            {"a"},
        ),
        (
            "require_finite(a, 'm.py:1')\nlaunch('both', (a, b, g), (), (g,), 1)\n",
            set(),
            {"a", "b"},
        ),
    ],
)
def test_an_arena_belongs_to_one_part(more: str, placed: set[str], allocated: set[str]) -> None:
    made = cut(
        "kernel('both', 3, 0, device='cuda:0')\n"
        + ARENA
        + "g = alloc(f32[4, 8] @ (8, 1), device='cuda:0')\n"
        + more
        + "launch('k', (g, g), (), (g,), 1)\nreturn (g,)\n"
    )
    assert {i.name for i in made.body if isinstance(i, Place)} == placed
    assert {i.name for i in made.body if isinstance(i, Alloc)} == {"g", *allocated}
    arenas = [k for k, i in enumerate(made.body) if isinstance(i, Arena)]
    assert len(arenas) == (1 if placed else 0)
    assert all(made.body[k - 1] == Partition(True) for k in arenas)


LARGE = {"c": COPIED_NBYTES, "d": COPIED_NBYTES, "e": COPIED_NBYTES - 1}
LAST = """\
v = view(b, f32[8, 4] @ (1, 8), 0)
c, = call('aten::mm')(y, v)
require_layout(c, f32[4, 4] @ (4, 1))
d, = call('aten::mm')(c, y)
require_layout(d, f32[4, 8] @ (8, 1))
"""


@pytest.mark.parametrize(
    ("body", "n_results", "outside"),
    [
        ("return (b, c, d)", None, ["aten::mm", "aten::mm"]),
        ("t = view(d, f32[3] @ (1,), 0)\nreturn (c, t)", None, ["aten::mm", "aten::mm"]),
        ("return (d,)", None, ["aten::mm"]),  # c is used and stays
        ("return (d, c)", 1, ["aten::mm"]),  # c is saved
        ("return (c,)", None, []),
        (
            "e, = call('aten::mm')(d, v)\nrequire_layout(e, f32[4, 4] @ (4, 1))\nreturn (c, d, e)",
            None,
            [],
        ),
        ("e, = call('aten::mm')(d, v)\nreturn (c, d)", None, []),
        (
            "g = alloc(f32[4, 4] @ (4, 1), device='cuda:0')\nlaunch('k', (c, g), (), (g,), "
            "1)\nreturn (c, d, g)",
            None,
            [],
        ),
    ],
)
def test_large_results_of_the_last_operators_are_made_beside_the_recording(
    body: str, n_results: int | None, outside: list[str]
) -> None:
    made = cut(f"{KERNELS}{LAST}{body}\n", n_results, LARGE)
    recorded, after = True, []
    for i in made.body:
        recorded = i.recorded if isinstance(i, Partition) else recorded
        if isinstance(i, CallExtern) and not recorded:
            after.append(i.op)
    assert after == outside
    why = "; ".join(dict.fromkeys(f"the caller gets what {op} makes" for op in outside))
    assert parts(made) == [(False, ""), (True, ""), *([(False, why)] if outside else [])]


FIRST = """\
p = alloc(f32[4, 8] @ (16, 1), device='cuda:0')
launch('k', (x, p), (), (p,), 1)
v = view(p, f32[8, 4] @ (1, 16), 0)
m, = call('aten::mm')(v, y)
require_layout(m, f32[8, 8] @ (8, 1))
free(p)
"""
REST = """\
a = alloc(f32[4, 8] @ (8, 1), device='cuda:0')
launch('k', (m, a), (), (a,), 1)
b = alloc(f32[4, 8] @ (8, 1), device='cuda:0')
launch('k', (a, b), (), (b,), 1)
return (b,)
"""


@pytest.mark.parametrize(
    ("spent", "large", "more", "outside"),
    [
        ("x", "xp", "", 2),
        ("x", "xp", "z = view(x, f32[4, 8] @ (8, 1), 0)\n", 2),  # that is read
        ("x", "x", "", 1),  # p is small: it may lie in the recording
        ("xy", "yp", "", 0),  # x is small
        ("", "xp", "", 0),  # the caller keeps x
        ("x", "xpm", "", 2),  # what an operator makes is no copy
        (
            "x",
            "xpe",
            "e = alloc(f32[4, 8] @ (8, 1), device='cuda:0')\nlaunch('k', (p, e), (), (e,), 1)\n",
            3,
        ),
        (
            "x",
            "xpef",
            "e, = call('aten::mm')(v, y)\nf, = call('aten::mm')(m, y)\nrequire_layout(f, f32[8, "
            "8] @ (8, 1))\ng, = call('aten::mm')(p, f)\n",
            3,
        ),
    ],
)
def test_what_uses_large_inputs_up_comes_before_the_recording(
    spent: str, large: str, more: str, outside: int
) -> None:
    first = (
        more + FIRST.replace("(x, p)", "(z, p)")
        if "z" in more
        else FIRST.replace("free(p)\n", f"{more}free(p)\n")
    )
    made = cut(first + REST, None, dict.fromkeys(large, COPIED_NBYTES), spent)
    assert [p.recorded for p in made.body if isinstance(p, Partition)] == [
        False,
        *([False] if outside else []),
        True,
    ]
    before = made.body[: made.body.index(Partition(True))]
    assert sum(isinstance(i, (Launch, CallExtern)) for i in before) == outside
    assert ("it uses x up" in [r for _, r in parts(made)]) == bool(outside)
    assert (
        isinstance(before[-1], Alloc) and before[-1].name == "b"
    )  # only once what was spent is free


def test_all_that_would_be_recorded_uses_an_input_up() -> None:
    last = "c, = call_python(0, 'lib.f')(m)\nrequire_layout(c, f32[8] @ (1,))\nreturn (c,)\n"
    made = cut(FIRST + last, None, dict.fromkeys("xp", COPIED_NBYTES), "x")
    assert parts(made)[1] == (
        False,
        "it uses x up; too little work to record; lib.f is a Python function",
    )


def test_a_recording_is_not_left_with_too_little() -> None:
    checks = [f"require_layout({name}, f32[4, 8] @ (8, 1))\n" for name in "cd"]
    calls = "c, = call('aten::mm')(x, y)\n", "d, = call('aten::mm')(c, y)\n"
    made = cut(f"{calls[0]}{checks[0]}{calls[1]}{checks[1]}return (d,)\n", None, LARGE)
    assert parts(made) == [
        (False, ""),
        (False, "too little work to record; the caller gets what aten::mm makes"),
    ]


def test_programs_of_the_host_are_left_alone() -> None:
    program = read("""\
program('p')

x = tensor_input(f32[4] @ (1,))

kernel('k', 2, 0)
a = alloc(f32[4] @ (1,))
launch('k', (x, a), (), (a,), 1)
return (a,)
""")
    assert partition(program, []) is program
