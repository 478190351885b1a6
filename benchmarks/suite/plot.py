"""A plot of speed-ups as SVG: a panel a kind of case, a bar a model, sorted; a logarithmic scale
whose middle line is 1. Equal figures give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Rows = Sequence[tuple[str, float]]
PANEL, NAMES, LINE, TOP = 430, 130, 13, 56
LOW, HIGH = 0.5, 4.0  # bars end here at the latest; the number says how far they would go
TICKS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
STYLE = "text{font:10px sans-serif;fill:#222}.t{font-size:13px}.n{text-anchor:end}"


def draw(panels: Mapping[str, Rows], title: str) -> str:
    """The whole picture."""
    height = TOP + LINE * max((len(rows) for rows in panels.values()), default=0) + 20
    width = PANEL * max(1, len(panels))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text class="t" x="10" y="18">{escape(title)}</text>',
    ]
    for k, name in enumerate(sorted(panels)):
        parts += panel(k * PANEL, name, panels[name])
    return "\n".join([*parts, "</svg>", ""])


def panel(left: int, name: str, rows: Rows) -> list[str]:
    """One panel, and what its bars mean together."""
    mean = math.exp(sum(math.log(r) for _, r in rows) / len(rows))
    bottom = TOP + LINE * len(rows)
    about = f"{name}: {len(rows)} models, geometric mean {mean:.2f}"
    parts = [f'<text class="t" x="{left + 10}" y="36">{escape(about)}</text>']
    for tick in TICKS:
        x = left + place(tick)
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}" '
            f'stroke="{"#222" if tick == 1 else "#ddd"}"/>'
            f'<text x="{x - 7}" y="{TOP - 4}">{tick:g}</text>'
        )
    for k, (model, ratio) in enumerate(rows):
        y, one, end = TOP + LINE * k, place(1.0), place(ratio)
        colour = "#2a7f4f" if ratio >= 0.98 else "#c0392b"
        parts.append(
            f'<text class="n" x="{left + NAMES - 6}" y="{y + 10}">{escape(model)}</text>'
            f'<rect x="{left + min(one, end)}" y="{y + 2}" width="{abs(end - one):.1f}" '
            f'height="{LINE - 4}" fill="{colour}"/>'
            f'<text x="{left + max(one, end) + 3}" y="{y + 10}">{ratio:.2f}</text>'
        )
    return parts


def place(ratio: float) -> float:
    """Where a ratio is, in a panel."""
    share = math.log(min(max(ratio, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return round(NAMES + share * (PANEL - NAMES - 50), 1)
