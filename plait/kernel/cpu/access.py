"""Loads and stores of one kernel: addresses, contiguous vectors, lanes one by one, masks, tails,
updates in place.

The offset of an access is split by nesting level: the part that an outer block knows moves the
pointer there. Along the vector axis an access is contiguous (coefficient 1), the same for all lanes
(0), or goes lane by lane.
"""

from __future__ import annotations

from plait.ir.dtypes import DType, b1, i64, u8
from plait.ir.expr import Atom, Expr, Size, bounds, coefficient, free_symbols, substitute, total
from plait.ir.loops import Load, Node
from plait.kernel.cpu.expr import (
    Parts,
    mask_part,
    memory,
    n_parts,
    scalar_op,
    splat,
    vector_op,
    vtype,
)
from plait.kernel.cpu.values import Values, atom_text
from plait.kernel.stores import How, how_to_store
from plait.schedule.legalize.linear import offset_of
from plait.schedule.plan import Store

_UPDATE = {"add": "add", "mul": "mul", "min": "min", "max": "max"}


class AccessWriter:
    """Writes loads and stores into the blocks of a `Values`."""

    def __init__(self, values: Values) -> None:
        self.v = values
        self.tiles: dict[tuple[Node, bool], str] = {}

    # ------------------------------------------------------------------------------------ addresses
    def pointer(self, buf: str, offset: Size, to: int = -1) -> str:
        """A pointer to element `offset` (at lane 0, first vector in flight)."""
        v = self.v
        groups: dict[int, Size] = {}
        if isinstance(offset, int):
            groups[0] = offset
        else:
            if offset.const:
                groups[0] = offset.const
            for mono, c in offset.terms:
                term = Expr(0, ((mono, c),))
                depth = v.expr_depth(term)
                groups[depth] = groups.get(depth, 0) + term
        pointer, so_far = v.bases[buf], 0
        type_ = memory(v.nest.linear.buffers[buf].dtype)
        total: Size = so_far
        for depth in sorted(groups):
            if groups[depth] == 0:
                continue
            total = total + groups[depth]
            key = ("pointer", buf, total)
            memo = v.chain[depth].memo
            if key not in memo:
                memo[key] = (
                    v.define(f"{type_}*", f"{pointer} + {v.integer(groups[depth])}", depth),
                )
            pointer = memo[key][0]
        return pointer

    def step(self, offset: Size) -> Size | None:
        """Elements from one lane to the next; None if that is no constant along the axis."""
        v = self.v
        return None if v.varies(offset) else coefficient(offset, v.axis)

    # ---------------------------------------------------------------------------------------- loads
    def load(self, n: Node) -> Parts:
        """The value of a load node; 0 where its mask is false."""
        v = self.v
        assert isinstance(n.attr, Load)
        buf, offset, depth = n.attr.buf, offset_of(n), v.depth(n)
        mask = n.args[-1] if n.attr.masked else None
        if not v.is_vector(n):
            return (
                v.define(
                    _scalar_type(n.dtype), self._scalar_load(buf, offset, n.dtype, mask), depth
                ),
            )
        if n in v.nest.tiled:
            at, half = (
                f"{self.tiles[n, v.tail]} + ({v.names[v.tile]} - first) * {v.lanes}",
                v.lanes // 2,
            )
            t = memory(n.dtype)
            return self._loaded(n, [f"ld_{t}({at} + {k * half})" for k in range(n_parts(n.dtype))])
        step = self.step(offset)
        if step == 1:
            return self._contiguous(n, buf, offset, mask)
        if step == 0:
            return self._broadcast(n, buf, offset, mask)
        if isinstance(step, int) and step in (-1, 2) and mask is None and not v.tail:
            return self._shuffled(n, buf, offset, step)
        return self._lane_load(n, buf, offset, mask)

    def _scalar_load(self, buf: str, offset: Size, d: DType, mask: Node | None) -> str:
        p = self.pointer(buf, offset)
        text = f"*{p} != 0" if d == b1 else f"*{p}"
        if mask is None:
            return text
        return f"{self.v.get(mask)[0]} ? {text} : 0"

    def _contiguous(self, n: Node, buf: str, offset: Size, mask: Node | None) -> Parts:
        v, t = self.v, memory(n.dtype)
        p = f"{self.pointer(buf, offset)}{v.rep_offset(1)}"
        vector_mask = None
        if mask is not None and v.is_vector(mask):
            vector_mask = v.get(mask)[0] + (" & lm" if v.tail else "")
        texts = []
        for k in range(n_parts(n.dtype)):
            at = f"{p} + {k * v.lanes // 2}" if k else p
            left = f"n - {k * v.lanes // 2}" if k else "n"
            if vector_mask is not None:
                text = f"ldm_{t}({at}, {mask_part(f'({vector_mask})', _stored(n.dtype), k)})"
            elif v.tail:
                count = left if mask is None else f"{v.get(mask)[0]} ? {left} : 0"
                text = f"ldn_{t}({at}, {count})"
            else:
                text = f"ld_{t}({at})"
                if mask is not None:
                    text = f"v{t}{{}}; if ({v.get(mask)[0]}) NAME = {text}"
            texts.append(text)
        return self._loaded(n, texts)

    def _loaded(self, n: Node, texts: list[str]) -> Parts:
        """Names for loaded registers; bytes of bools become masks."""
        v, depth, t = self.v, self.v.depth(n), f"v{memory(n.dtype)}"
        raw = []
        for text in texts:
            name = v.name()
            const = "" if "NAME" in text else "const "
            v.line(f"{const}{t} {name} = {text.replace('NAME', name)};", depth)
            raw.append(name)
        if n.dtype != b1:
            return tuple(raw)
        return (v.define("vi32", f"mask_of_u8({raw[0]})", depth),)

    def _broadcast(self, n: Node, buf: str, offset: Size, mask: Node | None) -> Parts:
        """One element for all lanes: where a mask that differs between lanes holds, or in every
        lane."""
        v, depth = self.v, self.v.depth(n)
        if mask is None or not v.is_vector(mask):
            one = v.define(
                _scalar_type(n.dtype), self._scalar_load(buf, offset, n.dtype, mask), depth
            )
            return v.define_parts(n.dtype, splat(one, n.dtype), depth)
        m = v.get(mask)[0] + (" & lm" if v.tail else "")
        p = self.pointer(buf, offset)
        text = f"*{p} != 0" if n.dtype == b1 else f"*{p}"
        one = v.define(_scalar_type(n.dtype), f"any({m}) ? {text} : 0", depth)
        zero = f"({vtype(n.dtype)}){{}}"
        return v.define_parts(
            n.dtype,
            tuple(
                f"{mask_part(f'({m})', n.dtype, k)} ? {x} : {zero}"
                for k, x in enumerate(splat(one, n.dtype))
            ),
            depth,
        )  # fmt: skip

    def _shuffled(self, n: Node, buf: str, offset: Size, step: int) -> Parts:
        """Lanes backwards, or every second element: whole registers, rearranged. Reads nothing past
        the last lane."""
        v, t = self.v, memory(n.dtype)
        half = v.lanes // n_parts(n.dtype)
        texts = []
        for k in range(n_parts(n.dtype)):
            at = f"{self.pointer(buf, offset)}{v.rep_offset(step)} + {step * k * half}"
            if step == -1:
                texts.append(f"turned_{t}(ld_{t}({at} - {half - 1}))")
            else:
                texts.append(f"evens_{t}(ld_{t}({at}), ld_{t}({at} + {half - 1}))")
        return self._loaded(n, texts)

    def _lane_load(self, n: Node, buf: str, offset: Size, mask: Node | None) -> Parts:
        v, t, depth = self.v, memory(n.dtype), self.v.depth(n)
        half = v.lanes // n_parts(n.dtype)
        if n.dtype.nbytes == 4 and mask is None and not self._is_loaded(offset):
            at = self._short_lanes(offset)
            if at is not None:
                return self._loaded(
                    n, [f"gather_{t}({self.pointer(buf, self._parted(offset)[0])}, {at})"]
                )
        p, index = self._lane_address(buf, offset)
        whole = [
            ", ".join(f"{p}[{index.replace('LANE', str(k * half + j))}]" for j in range(half))
            for k in range(n_parts(n.dtype))
        ]
        if mask is None and not v.tail:
            return self._loaded(n, [f"{{{lanes}}}" for lanes in whole])
        array = v.name("g")
        v.line(f"alignas(64) {t} {array}[{v.lanes}] = {{}};", depth)
        guard = self._lane_guard(mask, depth)
        v.line(f"{self._lane_loop()}{guard}{array}[k] = {p}[{index.replace('LANE', 'k')}];", depth)
        return self._loaded(n, [f"ld_{t}({array} + {k * half})" for k in range(n_parts(n.dtype))])

    def _is_loaded(self, offset: Size) -> bool:
        """Whether memory holds the indices in an offset: then an element at a time is faster than a
        gather."""
        nodes = (self.v.nest.linear.indirect.get(a) for a in free_symbols(self._parted(offset)[1]))
        return any(n is not None and self._as_loaded(n) for n in nodes)

    def _short_lanes(self, offset: Size) -> str | None:
        """The part of an offset that differs between lanes, as a vi32; None where that is not known
        to be enough."""
        moving = self._parted(offset)[1]
        low, high = bounds(moving)
        if not isinstance(moving, Expr) or low < -(1 << 31) or high >= 1 << 31:
            return None
        if self.v.tail and any(a.kind != "sym" for mono, _ in moving.terms for a in mono):
            return None  # positions past the end; indices are in range in every lane
        texts = []
        for mono, c in moving.terms:
            text = self._short_factor(mono[0]) if len(mono) == 1 else None
            if text is None:
                return None
            texts.append(text if c == 1 else f"{text} * {c}")
        return " + ".join(texts)

    def _short_factor(self, a: Atom) -> str | None:
        """An index, or quotient or remainder of a position by a number so large that it changes
        once in a vector."""
        v = self.v
        if a.kind == "sym":
            node = v.nest.linear.indirect.get(a)
            return None if node is None else v.short(node)
        if a.kind not in ("div", "mod") or not isinstance(a.b, int) or v.varies(a.a):
            return None
        step = coefficient(a.a, v.axis)
        if not isinstance(step, int) or not 0 < step * (v.lanes - 1) < a.b or bounds(a.a)[0] < 0:
            return None
        first = f"({v.integer(a.a)}{v.rep_offset(step)})"
        return f"{a.kind}_lanes({first}, {step}, {a.b})"

    def fill_tile(self, n: Node, along: Atom, block: Atom) -> None:
        """Loads a tile of a load that is contiguous along `along` and leaves it turned around,
        contiguous along the axis."""
        v, t = self.v, memory(n.dtype)
        assert isinstance(n.attr, Load)
        offset = offset_of(n)
        step = self.step(offset)
        assert step is not None
        start = substitute(offset, {along: block.expr * v.lanes})
        name = self.tiles[n, v.tail] = v.name("tile")
        v.line(f"alignas(64) {t} {name}[{v.lanes * v.lanes}];")
        count = "n" if v.tail else str(v.lanes)
        v.line(
            f"turn_{t}({self.pointer(n.attr.buf, start)}, {v.integer(step)}, {name}, {count}, "
            "beyond - first);"
        )

    def lane_values(self, e: Size) -> Parts:
        """An integer expression that is no affine function of the lane, as i64 lanes."""
        v = self.v
        depth = v.expr_depth(e)
        array = v.name("g")
        text = self._lane_text(e)
        v.line(f"alignas(64) i64 {array}[{v.lanes}];", depth)
        v.line(
            f"for (i64 k = 0; k < {v.lanes}; ++k) {array}[k] = {text.replace('LANE', 'k')};", depth
        )
        return v.define_parts(
            i64, tuple(f"ld_i64({array} + {k * v.lanes // 2})" for k in range(2)), depth
        )

    # --------------------------------------------------------------------------------- lane by lane
    def _lane_loop(self) -> str:
        return f"for (i64 k = 0; k < {'n' if self.v.tail else self.v.lanes}; ++k) "

    def _lane_guard(self, mask: Node | None, depth: int) -> str:
        v = self.v
        if mask is None:
            return ""
        if not v.is_vector(mask):
            return f"if ({v.get(mask)[0]}) "
        return f"if ({self._lane_array(mask, depth)}[k]) "

    def _lane_array(self, n: Node, depth: int) -> str:
        """A vector value in memory, to be read lane by lane: spilled into an array, unless it was
        loaded as it is."""
        v = self.v
        memo = v.chain[depth].memo
        key = ("lanes", n, v.rep)
        if key not in memo and (found := self._as_loaded(n)):
            memo[key] = (found,)
        elif key not in memo:
            parts = v.vector(n)
            t = "i32" if n.dtype == b1 else memory(n.dtype)
            array = v.name("g")
            v.line(f"alignas(64) {t} {array}[{v.lanes}];", depth)
            for k, p in enumerate(parts):
                v.line(f"st_{t}({array} + {k * v.lanes // 2}, {p});", depth)
            v.line(f"in_memory({array});", depth)
            memo[key] = (array,)
        return memo[key][0]

    def _as_loaded(self, n: Node) -> str | None:
        """Where memory holds the lanes of a value: lanes leave a register slower than they come
        from there."""
        v = self.v
        x = n.args[0] if n.op == "bounded" and len(n.args) == 1 else n
        if x.op != "load" or x.dtype == b1 or x in v.nest.tiled or not v.is_vector(x):
            return None
        assert isinstance(x.attr, Load)
        if x.attr.masked or self.step(offset_of(x)) != 1:
            return None
        v.get(n)  # its check comes first
        return f"({self.pointer(x.attr.buf, offset_of(x))}{v.rep_offset(1)})"

    def _lane_address(self, buf: str, offset: Size) -> tuple[str, str]:
        """A pointer and the index from it of lane LANE."""
        fixed, moving = self._parted(offset)
        return self.pointer(buf, fixed), self._lane_text(moving)

    def _parted(self, offset: Size) -> tuple[Size, Size]:
        """What of an offset is the same for all lanes, and the rest."""
        if isinstance(offset, int):
            return offset, 0
        terms = [Expr(0, ((mono, c),)) for mono, c in offset.terms]
        moving = total(t for t in terms if self._moves(t))
        return offset.const + total(t for t in terms if not self._moves(t)), moving

    def _moves(self, e: Size) -> bool:
        """Whether e differs between lanes."""
        return self.v.axis in free_symbols(e) or self.v.varies(e)

    def _lane_text(self, e: Size) -> str:
        """e at lane LANE of the present vector, as C++ text."""
        v = self.v
        if not self._moves(e) or isinstance(e, int):
            return v.integer(e)
        parts = [f"{e.const}l"] if e.const else []
        for mono, c in e.terms:
            factors = [self._lane_factor(a) for a in mono]
            parts.append("*".join((*factors, *((f"({c}l)",) if c != 1 else ()))))
        return f"({' + '.join(parts)})"

    def _lane_factor(self, a: Atom) -> str:
        v = self.v
        e = a.expr
        if not self._moves(e):
            return v.integer(e)
        if a == v.axis:
            return f"({v.names[a]}{v.rep_offset(1)} + LANE)"
        if a.kind == "sym":
            node = v.nest.linear.indirect[a]
            return f"{self._lane_array(node, v.depth(node))}[LANE]"
        return f"({atom_text(a, self._lane_text(a.a), self._lane_text(a.b))})"

    # --------------------------------------------------------------------------------------- stores
    def store(self, s: Store) -> None:
        """Writes one store statement into the innermost block."""
        v = self.v
        offset = s.index[0]
        if v.lanes == 1 or v.axis not in v.depth_of:  # one point
            if v.rep == 0:
                self._scalar_store(s, offset)
            return
        values = (s.value, *(() if s.mask is None else (s.mask,)))
        moves = any(v.is_vector(n) for n in values)
        match how_to_store(s.mode, moves, self._moves(offset)):
            case How.ONCE:
                if v.rep == 0:
                    self._scalar_store(s, offset)
            case How.REPEAT:
                self._repeated_store(s, offset)
            case How.ROW if self.step(offset) == 1 and not s.atomic:
                self._contiguous_store(s, offset)
            case How.ROW | How.EACH:
                self._lane_store(s, offset)

    def _scalar_store(self, s: Store, offset: Size) -> None:
        v = self.v
        value, p = v.get(s.value)[0], self.pointer(s.buf, offset)
        guard = "" if s.mask is None else f"if ({v.get(s.mask)[0]}) "
        v.line(f"{guard}{self._element_store(s, f'*{p}', value)}")

    def _repeated_store(self, s: Store, offset: Size) -> None:
        """As many updates of one element as there are lanes, in a register."""
        v, t = self.v, memory(self.v.nest.linear.buffers[s.buf].dtype)
        value, p = v.get(s.value)[0], self.pointer(s.buf, offset)
        guard = "" if s.mask is None else f"if ({v.get(s.mask)[0]}) "
        if s.atomic:
            v.line(f"{guard}{self._lane_loop()}{self._element_store(s, f'*{p}', value)}")
            return
        now = v.name()
        update = self._element_store(s, now, value)
        v.line(f"{guard}{{ {t} {now} = *{p}; {self._lane_loop()}{update} *{p} = {now}; }}")

    def _element_store(self, s: Store, target: str, value: str) -> str:
        """target (mode)= value for one element."""
        d = self.v.nest.linear.buffers[s.buf].dtype
        if s.mode == "store":
            return f"{target} = {value};"
        t = memory(d)
        old = "(old != 0)" if d.kind == "b" else "old"
        update = scalar_op(_UPDATE[s.mode], d, (old, value), d)
        if not s.atomic:
            return f"{{ const {t} old = {target}; {target} = ({t}){update}; }}"
        return f"atomic_update(&{target}, [&]({t} old) {{ return ({t}){update}; }});"

    def _contiguous_store(self, s: Store, offset: Size) -> None:
        v, d = self.v, self.v.nest.linear.buffers[s.buf].dtype
        t = memory(d)
        value = v.vector(s.value)
        p = f"{self.pointer(s.buf, offset)}{v.rep_offset(1)}"
        mask = None if s.mask is None else v.vector(s.mask)[0] + (" & lm" if v.tail else "")
        ats = [f"{p} + {k * v.lanes // 2}" if k else p for k in range(n_parts(d))]
        if s.mode != "store":
            value = vector_op(_UPDATE[s.mode], d, (self._old(d, ats), value), d)
        for k, at in enumerate(ats):
            text = f"u8_of_mask({value[k]})" if d == b1 else value[k]
            if mask is not None:
                v.line(f"stm_{t}({at}, {text}, {mask_part(f'({mask})', _stored(d), k)});")
            elif v.tail:
                v.line(f"stn_{t}({at}, {text}, n{f' - {k * v.lanes // 2}' if k else ''});")
            else:
                v.line(f"st_{t}({at}, {text});")

    def _old(self, d: DType, ats: list[str]) -> Parts:
        """What memory holds before an update."""
        v, t = self.v, memory(d)
        names = []
        for k, at in enumerate(ats):
            left = f"n - {k * v.lanes // 2}" if k else "n"
            text = f"ldn_{t}({at}, {left})" if v.tail else f"ld_{t}({at})"
            names.append(v.define(f"v{t}", text))
        if d == b1:
            return (v.define("vi32", f"mask_of_u8({names[0]})"),)
        return tuple(names)

    def _lane_store(self, s: Store, offset: Size) -> None:
        v = self.v
        depth = len(v.chain) - 1
        p, index = self._lane_address(s.buf, offset)
        value = f"{self._lane_array(s.value, depth)}[k]"
        if s.value.dtype == b1:
            value = f"({value} != 0)"
        guard = self._lane_guard(s.mask, depth)
        target = f"{p}[{index.replace('LANE', 'k')}]"
        v.line(f"{self._lane_loop()}{guard}{{ {self._element_store(s, target, value)} }}")

    # ---------------------------------------------------------------------------------- row buffers
    def keep(self, n: Node, parts: Parts) -> None:
        """Writes a value into its row buffer."""
        v, t, depth = self.v, memory(n.dtype), self.v.depth(n)
        at = self._kept_at(n)
        if not v.is_vector(n):
            v.line(f"*({at}) = {parts[0]};", depth)
            return
        for k, p in enumerate(parts):
            v.line(f"st_{t}({at} + {k * v.lanes // 2}, {p});", depth)

    def kept(self, n: Node) -> Parts:
        """A value that an earlier pass kept."""
        v, t, depth = self.v, memory(n.dtype), self.v.depth(n)
        at = self._kept_at(n)
        if not v.is_vector(n):
            return (v.define(t, f"*({at})", depth),)
        return v.define_parts(
            n.dtype,
            tuple(f"ld_{t}({at} + {k * v.lanes // 2})" for k in range(n_parts(n.dtype))),
            depth,
        )

    def _kept_at(self, n: Node) -> str:
        """Where a value lies in its row buffer: the same place at all points of an axis on which it
        does not depend."""
        v, known = self.v, self.v.deps(n)
        width = 1 if v.nest.inner else v.lanes * v.nest.unroll
        index: Size = 0
        for a, step in v.keep_strides:
            if a in known:
                index = index + a.expr * (step * width)
        return f"{v.keep_names[n]} + {v.integer(index)} + {v.rep * v.lanes}"


def _scalar_type(d: DType) -> str:
    return "bool" if d == b1 else memory(d)


def _stored(d: DType) -> DType:
    """The dtype whose lanes have the width of d's elements in memory."""
    return u8 if d == b1 else d
