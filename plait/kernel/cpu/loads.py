"""Loads: contiguous vectors, copies, gathers, lanes one by one, masks, tails, row buffers."""

from __future__ import annotations

from plait.ir.dtypes import DType, b1
from plait.ir.expr import Atom, Expr, Size, substitute
from plait.ir.loops import Load, Node
from plait.kernel.cpu.expr import Parts, ctype, mask_part, memory, n_parts, splat, stored, vtype
from plait.kernel.cpu.lanes import lane_address, lane_guard, lane_loop
from plait.kernel.cpu.values import Values
from plait.kernel.cpu.vectorize import STEPS, Walk
from plait.schedule.legalize.linear import offset_of


def load(v: Values, n: Node) -> Parts:
    """The value of a load node; 0 where its mask is false."""
    assert isinstance(n.attr, Load), n
    mask = n.args[-1] if n.attr.masked else None
    buf, offset = n.attr.buf, offset_of(n)
    match v.facts.loads[n, v.tail]:
        case Walk.ONE:
            text = _scalar_load(v, buf, offset, n.dtype, mask)
            return (v.define(ctype(n.dtype), text, v.depth(n)),)
        case Walk.TILE:
            return _tile_load(v, n)
        case Walk.ROW:
            return _contiguous(v, n, buf, offset, mask)
        case Walk.COPY:
            return _broadcast(v, n, buf, offset, mask)
        case Walk.BACK | Walk.SECOND as how:
            return _shuffled(v, n, buf, offset, STEPS[how])
        case Walk.GATHER:
            fixed, moving = v.facts.parted(offset)
            at = _short_lanes(v, moving)
            return _loaded(v, n, [f"gather_{memory(n.dtype)}({v.pointer(buf, fixed)}, {at})"])
        case _:
            return _lane_load(v, n, buf, offset, mask)


def _tile_load(v: Values, n: Node) -> Parts:
    assert v.nest.tile is not None, n
    at = f"{v.tiles[n, v.tail]} + ({v.names[v.nest.tile]} - first) * {v.lanes}"
    t, half = memory(n.dtype), v.lanes // 2
    return _loaded(v, n, [f"ld_{t}({at} + {k * half})" for k in range(n_parts(n.dtype))])


def _scalar_load(v: Values, buf: str, offset: Size, d: DType, mask: Node | None) -> str:
    p = v.pointer(buf, offset)
    text = f"*{p} != 0" if d == b1 else f"*{p}"
    if mask is None:
        return text
    return f"{v.get(mask)[0]} ? {text} : 0"


def _contiguous(v: Values, n: Node, buf: str, offset: Size, mask: Node | None) -> Parts:
    t = memory(n.dtype)
    p = f"{v.pointer(buf, offset)}{v.rep_offset(1)}"
    vector_mask = None
    if mask is not None and v.is_vector(mask):
        vector_mask = v.get(mask)[0] + (" & lm" if v.tail else "")
    texts = []
    for k in range(n_parts(n.dtype)):
        at = f"{p} + {k * v.lanes // 2}" if k else p
        left = f"n - {k * v.lanes // 2}" if k else "n"
        if vector_mask is not None:
            text = f"ldm_{t}({at}, {mask_part(f'({vector_mask})', stored(n.dtype), k)})"
        elif v.tail:
            count = left if mask is None else f"{v.get(mask)[0]} ? {left} : 0"
            text = f"ldn_{t}({at}, {count})"
        else:
            text = f"ld_{t}({at})"
            if mask is not None:
                text = f"v{t}{{}}; if ({v.get(mask)[0]}) NAME = {text}"
        texts.append(text)
    return _loaded(v, n, texts)


def _loaded(v: Values, n: Node, texts: list[str]) -> Parts:
    """Names for loaded registers; bytes of bools become masks."""
    depth, t = v.depth(n), f"v{memory(n.dtype)}"
    raw = []
    for text in texts:
        name = v.name()
        const = "" if "NAME" in text else "const "
        v.line(f"{const}{t} {name} = {text.replace('NAME', name)};", depth)
        raw.append(name)
    if n.dtype != b1:
        return tuple(raw)
    return (v.define("vi32", f"mask_of_u8({raw[0]})", depth),)


def _broadcast(v: Values, n: Node, buf: str, offset: Size, mask: Node | None) -> Parts:
    """One element for all lanes: where a mask that differs between lanes holds, or in every
    lane."""
    depth = v.depth(n)
    if mask is None or not v.is_vector(mask):
        one = v.define(ctype(n.dtype), _scalar_load(v, buf, offset, n.dtype, mask), depth)
        return v.define_parts(n.dtype, splat(one, n.dtype), depth)
    m = v.get(mask)[0] + (" & lm" if v.tail else "")
    p = v.pointer(buf, offset)
    text = f"*{p} != 0" if n.dtype == b1 else f"*{p}"
    one = v.define(ctype(n.dtype), f"any({m}) ? {text} : 0", depth)
    zero = f"({vtype(n.dtype)}){{}}"
    return v.define_parts(
        n.dtype,
        tuple(
            f"{mask_part(f'({m})', n.dtype, k)} ? {x} : {zero}"
            for k, x in enumerate(splat(one, n.dtype))
        ),
        depth,
    )  # fmt: skip


def _shuffled(v: Values, n: Node, buf: str, offset: Size, step: int) -> Parts:
    """Lanes backwards, or every second element: whole registers, rearranged. Reads nothing past
    the last lane."""
    t = memory(n.dtype)
    half = v.lanes // n_parts(n.dtype)
    texts = []
    for k in range(n_parts(n.dtype)):
        at = f"{v.pointer(buf, offset)}{v.rep_offset(step)} + {step * k * half}"
        if step == -1:
            texts.append(f"turned_{t}(ld_{t}({at} - {half - 1}))")
        else:
            texts.append(f"evens_{t}(ld_{t}({at}), ld_{t}({at} + {half - 1}))")
    return _loaded(v, n, texts)


def _lane_load(v: Values, n: Node, buf: str, offset: Size, mask: Node | None) -> Parts:
    t, depth = memory(n.dtype), v.depth(n)
    half = v.lanes // n_parts(n.dtype)
    p, index = lane_address(v, buf, offset)
    whole = [
        ", ".join(f"{p}[{index.replace('LANE', str(k * half + j))}]" for j in range(half))
        for k in range(n_parts(n.dtype))
    ]
    if mask is None and not v.tail:
        return _loaded(v, n, [f"{{{lanes}}}" for lanes in whole])
    array = v.name("g")
    v.line(f"alignas(64) {t} {array}[{v.lanes}] = {{}};", depth)
    guard = lane_guard(v, mask, depth)
    v.line(f"{lane_loop(v)}{guard}{array}[k] = {p}[{index.replace('LANE', 'k')}];", depth)
    return _loaded(v, n, [f"ld_{t}({array} + {k * half})" for k in range(n_parts(n.dtype))])


def _short_lanes(v: Values, moving: Size) -> str:
    """An index that differs between lanes, as a vi32."""
    assert isinstance(moving, Expr), moving
    texts = []
    for mono, c in moving.terms:
        text = _short_factor(v, mono[0])
        texts.append(text if c == 1 else f"{text} * {c}")
    return " + ".join(texts)


def _short_factor(v: Values, a: Atom) -> str:
    if a.kind == "sym":
        return v.short(v.nest.linear.indirect[a])
    step = v.facts.step(a.a)
    assert step is not None, a
    return f"{a.kind}_lanes(({v.integer(a.a)}{v.rep_offset(step)}), {step}, {a.b})"


def fill_tile(v: Values, n: Node, along: Atom) -> None:
    """Loads a tile of a load that is contiguous along `along` and leaves it turned around,
    contiguous along the axis."""
    t = memory(n.dtype)
    assert isinstance(n.attr, Load), n
    offset = offset_of(n)
    step = v.facts.step(offset)
    number = v.nest.tile_number
    assert step is not None and number is not None, n
    start = substitute(offset, {along: number.expr * v.lanes})
    name = v.tiles[n, v.tail] = v.name("tile")
    v.line(f"alignas(64) {t} {name}[{v.lanes * v.lanes}];")
    count = "n" if v.tail else str(v.lanes)
    v.line(
        f"turn_{t}({v.pointer(n.attr.buf, start)}, {v.integer(step)}, {name}, {count}, "
        "beyond - first);"
    )


def keep(v: Values, n: Node, parts: Parts) -> None:
    """Writes a value into its row buffer."""
    t, depth = memory(n.dtype), v.depth(n)
    at = _kept_at(v, n)
    if not v.is_vector(n):
        v.line(f"*({at}) = {parts[0]};", depth)
        return
    for k, p in enumerate(parts):
        v.line(f"st_{t}({at} + {k * v.lanes // 2}, {p});", depth)


def read_kept(v: Values, n: Node) -> Parts:
    """A value that an earlier pass kept."""
    t, depth = memory(n.dtype), v.depth(n)
    at = _kept_at(v, n)
    if not v.is_vector(n):
        return (v.define(t, f"*({at})", depth),)
    return v.define_parts(
        n.dtype, tuple(f"ld_{t}({at} + {k * v.lanes // 2})" for k in range(n_parts(n.dtype))), depth
    )


def _kept_at(v: Values, n: Node) -> str:
    """Where a value lies in its row buffer."""
    index = v.integer(v.nest.kept[n].index)
    return f"{v.kept_names[n]} + {index} + {v.rep * v.lanes}"
