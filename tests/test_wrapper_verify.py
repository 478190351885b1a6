"""The wrapper verifier: a legal program passes, and each rule, broken alone, is named with its
instruction and pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import InternalError
from plait.pipelines import PROGRAM, run_passes
from plait.wrapper.instructions import Alloc, AssertScalar, Free, Launch, WrapperProgram
from plait.wrapper.text import read
from plait.wrapper.verify import verify, verify_kept
from tests import instruction_table as table

HEAD = """
program('g', n_constants=1, n_callables=1)
s0 = symbol(lo=2)
x = tensor_input(f32[8] @ (1,))
kernel('k', 2, 0)
"""


def parse(body: str) -> WrapperProgram:
    return read(HEAD + body)


GOOD = """
arena = take_arena(64)
a = place(arena, 0, f32[8] @ (1,))
launch('k', (x, a), (), (a,), 1)
b = place(arena, 32, f32[8] @ (1,))
launch('k', (a, b), (), (b,), 1)
free(a)
c = alloc(f32[8] @ (1,))
launch('k', (b, c), (), (c,), 1)
free(b)
v = view(c, f32[4] @ (2,), 0)
return (v,)
"""


def test_legal_programs_pass() -> None:
    verify(parse(GOOD))
    verify(table.example())


START = """
v = alloc(f32[8] @ (1,))
w0 = alloc(f32[8] @ (1,))
w, = call('_c10d_functional::all_gather_into_tensor')(v, 1, '0')
require_layout(w, f32[8] @ (1,))
"""
WAIT = "_, = call('_c10d_functional::wait_tensor')(w)\nreturn (w,)"
BROKEN = {
    "use before definition": (
        "y = view(z, f32[8] @ (1,), 0)\nreturn (y,)",
        "z is used before it is defined",
    ),
    "defined twice": (
        "y = alloc(f32[8] @ (1,))\ny = alloc(f32[8] @ (1,))\nreturn ()",
        "y is defined twice",
    ),
    "input redefined": ("x = alloc(f32[8] @ (1,))\nreturn ()", "x is defined twice"),
    "freed twice": ("free(x)\nfree(x)\nreturn ()", "x was already freed by instruction 1"),
    "freed before it exists": ("free(y)\nreturn ()", "y is freed before it is defined"),
    "used after free": (
        "free(x)\nlaunch('k', (x, x), (), (), 1)\nreturn ()",
        "x is used after it was freed by instruction 1",
    ),
    "view used after its base was freed": (
        "v = view(x, f32[4] @ (1,), 0)\nfree(x)\nlaunch('k', (v, v), (), (), 1)\nreturn ()",
        "x is used after it was freed by instruction 2 (through v)",
    ),
    "dead output": ("free(x)\nreturn (x,)", "x is used after it was freed"),
    "unknown output": ("return (y,)", "y is used before it is defined"),
    "no return": ("free(x)", "the last instruction is no Return"),
    "instructions after the return": ("return ()\nreturn ()", "instructions follow"),
    "unbound symbol": ("y = alloc(f32[s0] @ (1,))\nreturn ()", "symbol s0 is not bound"),
    "unbound symbol in an assert": ("require((s0 < 4), 'm')\nreturn ()", "symbol s0 is not bound"),
    "kernel without definition": (
        "launch('k2', (), (), (), 1)\nreturn ()",
        "kernel k2 is launched before it is defined",
    ),
    "kernel defined twice": ("kernel('k', 2, 0)\nreturn ()", "kernel k is defined twice"),
    "too few arguments": (
        "launch('k', (x,), (), (), 1)\nreturn ()",
        "k takes 2 tensors and 0 sizes",
    ),
    "too many sizes": (
        "launch('k', (x, x), (1,), (), 1)\nreturn ()",
        "k takes 2 tensors and 0 sizes",
    ),
    "written but not given": (
        "y = alloc(f32[8] @ (1,))\nlaunch('k', (x, x), (), (y,), 1)\nreturn ()",
        "y is written but no argument",
    ),
    "two arenas": ("a = take_arena(64)\nb = take_arena(64)\nreturn ()", "a second arena on cpu"),
    "place in no arena": ("y = place(x, 0, f32[8] @ (1,))\nreturn ()", "x is no arena"),
    "place beyond the end": (
        "a = take_arena(64)\ny = place(a, 36, f32[8] @ (1,))\nreturn ()",
        "it ends beyond the 64 bytes of a",
    ),
    "place at an odd byte": (
        "a = take_arena(64)\ny = place(a, 2, f32[8] @ (1,))\nreturn ()",
        "byte 2 is no place for f32",
    ),
    "ranks differ": ("y = alloc(f32[8, 2] @ (1,))\nreturn ()", "2 sizes but 1 strides"),
    "constant out of range": ("y = constant(1)\nreturn ()", "the program has 1 constants"),
    "callable out of range": ("call_python(1, 'f')()\nreturn ()", "the program has 1 callables"),
    "arena tensor returned": (
        "a = take_arena(64)\ny = place(a, 0, f32[8] @ (1,))\nreturn (y,)",
        "output y lies in the arena",
    ),
    "view of an arena tensor returned": (
        "a = take_arena(64)\ny = place(a, 0, f32[8] @ (1,))\nv = view(y, f32[4] @ (1,), "
        "0)\nreturn (v,)",
        "output v lies in the arena",
    ),
    "a result that a kernel reads": (
        "y, = call('aten::neg')(x)\nlaunch('k', (y, x), (), (x,), 1)\nreturn ()",
        "nothing stands behind the sizes of y, the result of a call: no require_layout",
    ),
    "a result that is viewed": (
        "y, = call('aten::neg')(x)\nv = view(y, f32[4] @ (1,), 0)\nreturn (v,)",
        "nothing stands behind the sizes of y",
    ),
    "a result that a call reads": (
        "y, = call_python(0, 'f')(x)\nz, = call('aten::neg')(y)\nreturn ()",
        "nothing stands behind the sizes of y",
    ),
    "a result that is returned": (
        "y, = call('aten::neg')(x)\nreturn (y,)",
        "nothing stands behind the sizes of y",
    ),
    "a result that is copied": (
        "y, = call('aten::neg')(x)\ncopy(x, y)\nreturn ()",
        "nothing stands behind the sizes of y",
    ),
    "a range of a size of a result": (
        "u0 = symbol(hi=4)\ny, = call('aten::nonzero')(x)\nu0 = read(y, 'size', 0)\nz = "
        "alloc(f32[u0] @ (1,))\nreturn (z,)",
        "nothing stands behind u0 being 0 to 4: it is found at run time, at least 0",
    ),
    "a range of which one end is checked": (
        "u0 = symbol(lo=2, hi=4)\nu1 = symbol('u0', lo=-inf)\ny, = call('aten::nonzero')(x)\nu0 = "
        "read(y, 'size', 0)\nrequire((2 <= u1), 'few')\narena = take_arena(64)\nz = place(arena, "
        "4*u0, f32[1] @ (1,))\nreturn ()",
        "nothing stands behind u0 being 2 to 4: it is found at run time, at least 2",
    ),
    "a range of the value of a tensor": (
        "u0 = symbol()\nu0 = item(x)\ny = alloc(f32[u0] @ (1,))\nreturn (y,)",
        "nothing stands behind u0 being at least 0: it is found at run time, any number",
    ),
    "a range of an integer result": (
        "u0 = symbol()\nu0, = call('lib::count')(x)\nv = view(x, f32[u0] @ (1,), 0)\nreturn (v,)",
        "nothing stands behind u0 being at least 0",
    ),
    "a range of what is computed from such": (
        "u0 = symbol(lo=-inf)\nu1 = symbol()\nu0 = item(x)\nu1 = let((u0 // 2))\nlaunch('k', (x, "
        "x), (), (), u1)\nreturn ()",
        "nothing stands behind u1 being at least 0",
    ),
    "arena tensor kept": (
        "a = take_arena(64)\ny = place(a, 0, f32[8] @ (1,))\nz, = call('aten::alias')(y)\nreturn "
        "(z,)",
        "y lies in the arena and the call may keep it",
    ),
    "arena tensor in a list kept": (
        "a = take_arena(64)\ny = place(a, 0, f32[8] @ (1,))\nz, = call_python(0, "
        "'f')([y])\nreturn (z,)",
        "y lies in the arena and the call may keep it",
    ),
    "result into nothing": (
        "call('aten::neg.out', into=(x,))(x)\nreturn ()",
        "a result is written into a tensor that is no keyword argument",
    ),
    "takeover of an input": (
        "y = reuse(x, f32[8] @ (1,))\nreturn (y,)",
        "x was not allocated by this program",
    ),
    "taken over twice": (
        "y = alloc(f32[8] @ (1,))\nz = reuse(y, f32[8] @ (1,))\nw = reuse(y, f32[8] @ "
        "(1,))\nreturn ()",
        "y was already taken over by z",
    ),
    "used after takeover": (
        "y = alloc(f32[8] @ (1,))\nz = reuse(y, f32[8] @ (1,))\nlaunch('k', (y, z), (), (z,), 1)\n"
        "launch('k', (y, z), (), (z,), 1)\nreturn (z,)",
        "y is used after z took over its memory",
    ),
    "a list as output": ("return ([x],)", "is no output"),
    "a symbol freed": (
        "s0 = read(x, 'size', 0)\nfree(s0)\nreturn ()",
        "s0 is no tensor that can be freed",
    ),
    "an odd literal": (
        "call('aten::f')(number('3'))\nreturn ()",
        "a literal of unknown kind 'number'",
    ),
    "overlap in the arena": (
        GOOD.replace("place(arena, 32", "place(arena, 16"),
        "its memory overlaps that of a, which is live",
    ),
    "overlap at the same byte": (
        GOOD.replace("place(arena, 32", "place(arena, 0")
        .replace("free(a)\n", "")
        .replace("launch('k', (b, c)", "launch('k', (a, b), (), (b,), 1)\nlaunch('k', (b, c)"),
        "its memory overlaps that of a, which is live",
    ),
    "a read of what a collective has yet to fill": (
        START + "y = alloc(f32[8] @ (1,))\nlaunch('k', (w, y), (), (y,), 1)\n" + WAIT,
        "w is used before its collective is waited for",
    ),
    "a write to what a collective reads": (
        START + "launch('k', (w0, v), (), (v,), 1)\n" + WAIT,
        "v is written while a collective reads it",
    ),
    "an operator's write to what a collective reads": (
        START + "call('aten::add_.Tensor')(v, w0)\n" + WAIT,
        "v is written while a collective reads it",
    ),
    "memory taken over while a collective reads it": (
        START + "y = reuse(v, f32[8] @ (1,))\n" + WAIT,
        "v is written while a collective reads it",
    ),
    "a read of what a collective changes in place": (
        "v = alloc(f32[8] @ (1,))\ncall('_c10d_functional::all_reduce_')(v, 'sum', '0')\n"
        "launch('k', (v, x), (), (x,), 1)\nreturn ()",
        "v is used before its collective is waited for",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_is_held(name: str) -> None:
    body, message = BROKEN[name]
    with pytest.raises(InternalError) as e:
        verify(parse(body), after="some pass")
    assert message in str(e.value)
    assert "after some pass: g: " in str(e.value)


def test_in_place_in_the_arena_is_legal() -> None:
    verify(parse(GOOD.replace("place(arena, 32", "place(arena, 0")))


def test_ranges_with_symbols() -> None:
    text = """
s0 = read(x, 'size', 0)
n = let(64*((4*s0 + 63) // 64))
n = symbol()
arena = take_arena(2*n)
a = place(arena, 0, f32[s0] @ (1,))
launch('k', (x, a), (), (a,), 1)
b = place(arena, OFFSET, f32[s0] @ (1,))
launch('k', (a, b), (), (b,), 1)
c = alloc(f32[s0] @ (1,))
launch('k', (a, c), (), (c,), 1)
return (c,)
"""
    verify(parse(text.replace("OFFSET", "n")))
    verify(parse(text.replace("OFFSET", "64*((4*s0 + 63) // 64)")))
    with pytest.raises(InternalError, match="its memory overlaps that of a"):
        verify(parse(text.replace("OFFSET", "2*s0")))
    with pytest.raises(InternalError, match="it ends beyond the"):
        verify(parse(text.replace("OFFSET", "8*s0")))


OWNED = """
u0 = symbol(lo=2, hi=4)
u1 = symbol('u0', lo=-inf)
u2 = symbol(lo=1, hi=2)
y, = call('aten::nonzero')(x)
u0 = read(y, 'size', 0)
require_layout(y, i64[u0, 1] @ (1, u0), origin='aten::nonzero')
require((2 <= u1)*(u1 <= 4), 'found {}', values=(u1,))
u2 = let((u0 // 2))
z = alloc(f32[u0, u2] @ (u2, 1))
v = view(y, i64[u0] @ (1,), 0)
return (z, v)
"""


def test_what_is_checked_has_an_owner() -> None:
    verify(parse(OWNED))
    for line in OWNED.strip().splitlines():
        if line.startswith("require"):
            with pytest.raises(InternalError, match="nothing stands behind"):
                verify(parse(OWNED.replace(f"{line}\n", "")))


def test_the_message_names_pass_program_and_instruction() -> None:
    with pytest.raises(InternalError) as e:
        verify(parse("free(x)\nfree(x)\nreturn ()"), after="place frees")
    assert "after place frees: g: instruction 2, Free(name='x'): x was already freed" in str(
        e.value
    )


# --------------------------------------------------------------------------- effects between passes
def test_a_pass_may_not_drop_or_invent_an_effect() -> None:
    p = table.example()
    verify_kept(p, p, "nothing")
    for gone in p.body:
        less = replace(p, body=tuple(i for i in p.body if i is not gone))
        if type(gone).__name__ in (
            "Symbol",
            "Arena",
            "Place",
            "Alloc",
            "Reuse",
            "View",
            "Constant",
            "DefineKernel",
            "Free",
            "Partition",
            "Note",
            "Return",
        ):
            verify_kept(p, less, "pure")
            continue
        with pytest.raises(InternalError, match="after bad pass: effects changed: lost"):
            verify_kept(p, less, "bad pass")
        with pytest.raises(InternalError, match="lost none, new"):
            verify_kept(less, p, "bad pass")


def test_a_changed_signature_is_told() -> None:
    p = table.example()
    with pytest.raises(InternalError, match="the signature changed"):
        verify_kept(p, replace(p, inputs=p.inputs[:1]), "bad pass")


# ------------------------------------------------------------------------------------------- passes
def passed(body: str) -> list[str]:
    from plait.wrapper.text import line

    p = run_passes(parse(body), check=True)
    assert run_passes(p, check=True) == p, "not idempotent"
    return [line(i) for i in p.body]


def test_equal_views_that_are_returned_stay_apart() -> None:
    lines = passed("""
a = view(x, f32[4] @ (1,), 2)
b = view(x, f32[4] @ (1,), 2)
return (a, b, a)
""")
    assert lines[-1] == "return (a, b, a)"


def test_equal_views_merge_and_views_of_views_are_taken_from_the_base() -> None:
    lines = passed("""
a = view(x, f32[4] @ (1,), 2)
b = view(x, f32[4] @ (1,), 2)
c = view(b, f32[2] @ (1,), 1)
d = view(x, f32[2] @ (1,), 3)
y, = call('aten::cat')([a, b, c, d])
require_layout(y, f32[12] @ (1,))
return (y,)
""")
    assert lines == [
        "a = view(x, f32[4] @ (1,), 2)",
        "c = view(x, f32[2] @ (1,), 3)",
        "y, = call('aten::cat')([a, a, c, c])",
        "free(x)",
        "free(a)",
        "free(c)",
        "require_layout(y, f32[12] @ (1,))",
        "return (y,)",
    ]


def test_dead_code_goes_and_asserts_and_calls_stay() -> None:
    lines = passed("""
s0 = read(x, 'size', 0)
s1 = read(x, 'stride', 0)
w = constant(0)
kernel('unused', 1, 0)
v = view(x, f32[4] @ (1,), 0)
a = alloc(f32[8] @ (1,))
arena = take_arena(64)
require((s0 < 9), 'small')
y, z = call('aten::sort')(x)
require_layout(z, f32[8] @ (1,))
return (z,)
""")
    assert lines == [
        "s0 = read(x, 'size', 0)",
        "require((s0 < 9), 'small')",
        "_, z = call('aten::sort')(x)",
        "free(x)",
        "require_layout(z, f32[8] @ (1,))",
        "return (z,)",
    ]


def test_a_costly_size_is_computed_once() -> None:
    lines = passed("""
s0 = read(x, 'size', 0)
y = alloc(f32[(s0 // 2)] @ (1,))
z = alloc(f32[(s0 // 2), 2*s0] @ (2*s0, 1))
return (y, z, (s0 // 2))
""")
    assert lines == [
        "s0 = read(x, 'size', 0)",
        "free(x)",
        "n0 = let((s0 // 2))",
        "y = alloc(f32[n0] @ (1,))",
        "z = alloc(f32[n0, 2*s0] @ (2*s0, 1))",
        "return (y, z, n0)",
    ]


@pytest.mark.parametrize(
    ("body", "barriers"),
    [
        # independent, then reading both
        (
            "a = alloc(T)\nb = alloc(T)\nL(x, a)\nL(x, b)\nL(a, b)\nreturn (a, b)",
            [False, False, True],
        ),
        # chain
        (
            "a = alloc(T)\nb = alloc(T)\nL(x, a)\nL(a, b)\nL(x, a)\nreturn (a, b)",
            [False, True, True],
        ),
        # after a barrier only what came since counts
        (
            "a = alloc(T)\nb = alloc(T)\nc = alloc(T)\nL(x, a)\nL(a, b)\nL(a, c)\nreturn (b, c)",
            [False, True, False],
        ),
        # a call ends the region
        (
            "a = alloc(T)\nb = alloc(T)\nL(x, a)\ny, = call('aten::neg')(a)\nL(a, b)\n"
            "return (b, y)",
            [False, False],
        ),
        # through a view
        (
            "a = alloc(T)\nv = view(a, T, 0)\nb = alloc(T)\nL(x, v)\nL(a, b)\nreturn (b,)",
            [False, True],
        ),
        # two inputs may be one memory
        (
            "z, = call('aten::alias')(x)\na = alloc(T)\nL(x, a)\nL(a, z)\nL(x, a)\nreturn (a,)",
            [False, True, True],
        ),
        # a result of a call may be memory of ours that the call was given
        (
            "a = alloc(T)\nL(x, a)\nz, = call('aten::alias')(a)\nb = alloc(T)\nL(x, a)\n"
            "L(z, b)\nreturn (b,)",
            [False, False, True],
        ),
        # arena: apart, and overlapping after death
        (
            "r = take_arena(64)\na = place(r, 0, T)\nb = place(r, 32, T)\n"
            "L(x, a)\nL(x, b)\nreturn ()",
            [False, False],
        ),
        (
            "r = take_arena(64)\na = place(r, 0, T)\nc = alloc(T)\nL(x, a)\nL(a, c)\n"
            "b = place(r, 16, T)\nL(x, b)\nreturn (c,)",
            [False, True, True],
        ),
        # takeover
        ("a = alloc(T)\nL(x, a)\nb = reuse(a, T)\nL(a, b)\nreturn (b,)", [False, True]),
    ],
)
def test_barriers_stand_where_data_flows(body: str, barriers: list[bool]) -> None:
    import re

    body = body.replace("T)", "f32[8] @ (1,))").replace("T,", "f32[8] @ (1,),")
    body = re.sub(r"L\((\w+), (\w+)\)", r"launch('k', (\1, \2), (), (\2,), 1)", body)
    body = re.sub(r"(\w+), = call\(.*", r"\g<0>\nrequire_layout(\1, f32[8] @ (1,))", body)
    p = run_passes(parse(body), check=True)
    assert [i.barrier for i in p.body if isinstance(i, Launch)] == barriers


def test_frees_come_after_the_last_use() -> None:
    lines = passed("""
a = alloc(f32[8] @ (1,))
launch('k', (x, a), (), (a,), 1)
v = view(a, f32[4] @ (1,), 0)
b, = call('aten::neg')(v)
require_layout(b, f32[4] @ (1,))
c = view(b, f32[2] @ (1,), 0)
return (c,)
""")
    assert lines[3:] == [
        "free(x)",
        "v = view(a, f32[4] @ (1,), 0)",
        "b, = call('aten::neg')(v)",
        "free(a)",
        "free(v)",
        "require_layout(b, f32[4] @ (1,))",
        "c = view(b, f32[2] @ (1,), 0)",
        "return (c,)",
    ]


def test_every_pass_keeps_the_example_legal() -> None:
    p = table.example()
    for name, step in PROGRAM:
        now = step(p)
        verify(now, after=name)
        verify_kept(p, now, after=name)
        assert step(now) == now, f"{name} is not idempotent"
        p = now
    kinds = [type(i) for i in p.body]
    assert AssertScalar in kinds
    assert Alloc in kinds
    assert Free in kinds


def test_a_checked_symbol_without_its_range_says_nothing_of_memory() -> None:
    body = (
        "s0 = symbol(lo=1)\nn = symbol('s0')\nv = tensor_input(f32[s0] @ (1,))\n"
        "s0 = read(v, 'size', 0)\narena = take_arena(4*s0)\n"
        "a = place(arena, 0, f32[1] @ (1,))\nrequire(min(1, n), 'no elements')\nreturn ()"
    )
    verify(parse(body), "made")


def test_memory_of_sizes_that_divide_by_zero() -> None:
    """At values of s0 where a program fails before it comes so far."""
    size = "8*s0 // (s0 % 3)"
    body = (
        "s0 = int_input()\narena = take_arena({room})\na = place(arena, 0, f32[{size}] @ "
        "(1,))\nreturn ()"
    )
    verify(parse(body.format(room=f"4*({size})", size=size)), "made")
    with pytest.raises(InternalError, match="it ends beyond"):
        verify(parse(body.format(room=f"({size})", size=size)), "made")


def test_what_a_collective_reads_is_free_once_it_was_waited_for() -> None:
    verify(parse(START + "_, = call('_c10d_functional::wait_tensor')(w)\n"
                 "launch('k', (w, v), (), (v,), 1)\nreturn (w,)"))  # fmt: skip
