"""The pictures of a page, as SVG: the steps of a graph, and the memory of a program.

In: the data of a graph. Out: text of SVG, linear in the number of steps; all words are escaped. A
step stands one layer below the last of those whose results it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import escape

from plait.tools.page.lives import bytes_text

Data = Mapping[str, Any]
DETAILED = 80  # steps of the largest graph whose operators are drawn one by one
OPERATORS = 8  # of one step
_W, _GAP, _ROW, _HEAD = 250, 26, 16, 24
_PLOT_W, _PLOT_H = 900, 170


def graph_svg(graph: Data, number: int) -> str:
    """The kernels and calls of a graph's own program with what flows between them. A kernel is a
    region around its operators; each step is a link to its row."""
    steps = [(k, s) for k, s in enumerate(graph["steps"]) if s["program"] == 0]
    if not steps:
        return ""
    detailed = len(steps) <= DETAILED
    edges = list(_edges(steps, graph["programs"][0]["views"] if graph["programs"] else {}))
    layer = dict.fromkeys((k for k, _ in steps), 0)
    for a, b in edges:  # in order of b
        layer[b] = max(layer[b], layer[a] + 1)
    rows: list[list[tuple[int, Data]]] = [[] for _ in range(max(layer.values()) + 1)]
    for k, s in steps:
        rows[layer[k]].append((k, s))
    place: dict[int, tuple[int, int, int]] = {}  # left, top, height
    y = _GAP
    for row in rows:
        for x, (k, s) in enumerate(row):
            shown = min(len(_operators(s)), OPERATORS + 1) if detailed else 0
            place[k] = (_GAP + x * (_W + _GAP), y, _HEAD + shown * _ROW + 8 * bool(shown))
        y += max(place[k][2] for k, _ in row) + _GAP + 8
    width = _GAP + max(map(len, rows)) * (_W + _GAP)
    parts = [
        f'<svg class="graph" role="img" aria-label="steps of {escape(graph["name"])}" '
        f'width="{width}" height="{y}" viewBox="0 0 {width} {y}">'
    ]
    for a, b in edges:
        (xa, ya, ha), (xb, yb, _) = place[a], place[b]
        x1, y1, x2 = xa + _W // 2, ya + ha, xb + _W // 2
        drawn = f' d="M{x1} {y1}C{x1} {y1 + 20} {x2} {yb - 20} {x2} {yb}"'
        if layer[b] - layer[a] > 1:  # beside the boxes that it passes
            x1, y1, x2, y2 = xa + _W, ya + 12, xb + _W, yb + 12
            drawn = f' class="far" d="M{x1} {y1}C{x1 + 30} {y1} {x2 + 30} {y2} {x2} {y2}"'
        parts.append(f"<path{drawn}/>")
    for k, s in steps:
        parts += _box(s, f"g{number}s{k}", place[k], detailed)
    return "".join((*parts, "</svg>"))


def _box(s: Data, target: str, place: tuple[int, int, int], detailed: bool) -> Iterator[str]:
    x, y, h = place
    yield f'<a href="#{target}" class="{s["what"]}"><rect x="{x}" y="{y}" width="{_W}" '
    yield f'height="{h}" rx="6"/><title>{escape(s["name"])}</title>'
    time = time_text(s["time_ns"]) if s["time_ns"] else ""
    name = _short(s["name"], 29 - len(time))
    yield f'<text x="{x + 8}" y="{y + 16}" class="name">{escape(name)}</text>'
    if time:
        yield f'<text x="{x + _W - 8}" y="{y + 16}" class="op" text-anchor="end">{time}</text>'
    ops = _operators(s) if detailed else []
    more = [f"and {len(ops) - OPERATORS} more"] if len(ops) > OPERATORS else []
    for n, op in enumerate((*ops[:OPERATORS], *more)):
        at = y + _HEAD + 12 + n * _ROW
        yield f'<text x="{x + 16}" y="{at}" class="op">{escape(_shown(op))}</text>'
    yield "</a>"


def _operators(s: Data) -> list[str]:
    """What a step was made of; of a call, only where it stands."""
    if s["what"] == "call":
        places = (s["module"], *(o["where"] for o in s["origin"]))
        return list(dict.fromkeys(p for p in places if p))
    return [f"{_word(o['op'])} {o['where']}".strip() for o in s["origin"]]


def _word(op: str) -> str:
    """`add` of `aten.add.Tensor`; a result is laid out as eager would."""
    return op.split(".")[1] if op.count(".") else "result" if op == "output" else op


def _shown(op: str) -> str:
    """An operator and its line, of which the end matters."""
    name, _, where = op.rpartition(" ")
    where = where.replace(".py:", ":")
    room = 28 - len(_cut(name, 14))
    return f"{_cut(name, 14)} {where if len(where) < room else '…' + where[1 - room :]}".strip()


def _short(name: str, n: int) -> str:
    """A kernel's name without what all or none of them have in common; of a long one both ends."""
    name = re.sub(r"^plait_(.+)_[0-9a-f]{4,}$", r"\1", name)
    return name if len(name) <= n else f"{name[: n // 2]}…{name[len(name) - n + n // 2 + 1 :]}"


def _cut(text: str, n: int) -> str:
    return text if len(text) <= n else f"{text[: n - 1]}…"


def _edges(
    steps: Sequence[tuple[int, Data]], views: Mapping[str, str]
) -> Iterator[tuple[int, int]]:
    """(step that makes, step that reads), by the latter."""
    maker: dict[str, int] = {}
    for k, s in steps:
        found = {maker[of] for of in (_base(b, views) for b in s["reads"]) if of in maker}
        yield from ((a, k) for a in sorted(found))
        maker.update((name, k) for name in s["writes"])


def _base(name: str, views: Mapping[str, str]) -> str:
    seen = 0
    while name in views and seen < 100:
        name, seen = views[name], seen + 1
    return name


def memory_svg(program: Data, number: int) -> str:
    """The bytes that a program holds, by instruction, as an area; its peaks are links to the
    buffers behind them."""
    held = program["held_nbytes"]
    top = max(held, default=0)
    if not top:
        return ""
    n = len(held)
    wide = min(n, _PLOT_W)
    most = [max(held[k * n // wide : max((k + 1) * n // wide, k * n // wide + 1)])
            for k in range(wide)]  # fmt: skip
    across = _PLOT_W / wide

    def high(nbytes: int) -> str:
        return f"{_PLOT_H - nbytes / top * (_PLOT_H - 24):.1f}"

    line = "".join(f"V{high(m)}H{(k + 1) * across:.1f}" for k, m in enumerate(most))
    parts = [
        f'<svg class="memory" role="img" aria-label="bytes held by instruction" '
        f'viewBox="-4 0 {_PLOT_W + 8} {_PLOT_H + 2}"><path d="M0 {_PLOT_H}{line}V{_PLOT_H}Z"/>'
    ]
    parts.append(f'<text x="0" y="12">{bytes_text(top)}</text>')
    parts.append(f'<text x="{_PLOT_W}" y="12" text-anchor="end">{n} instructions →</text>')
    for k, peak in enumerate(program["peaks"]):
        x = (peak["at"] + 0.5) / n * _PLOT_W
        title = f"{bytes_text(peak['nbytes'])} after instruction {peak['at']}"
        parts.append(
            f'<a href="#g{number}peak{k}"><circle cx="{x:.1f}" cy="{high(peak["nbytes"])}" r="5"/>'
            f"<title>{title}</title></a>"
        )
    return "".join((*parts, "</svg>"))


def time_text(ns: int) -> str:
    """A time in words: `3.2 us`."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:.1f} {unit}"
    return f"{ns} ns"


def number_text(n: int) -> str:
    """A count in words: `3.2 M`."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)
