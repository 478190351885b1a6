"""Results as Markdown tables, aligned so that they read well in a terminal too."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]
HEADS = (
    "", "first, cold s", "warm s", "next s", "call µs", "eager / it", "it / plait",
    "above guards µs", "peak MiB", "wrap s", "error",
)  # fmt: skip
LEGEND = """\
cold: the first graph ever, fresh process and fresh caches; warm: another process, same caches; \
next: fresh caches, but
the process has compiled something tiny before; wrap: torch.compile(...) itself, before the clock; \
eager / it: how many
times as fast as eager; it / plait: how many times plait's time; error: farthest from eager, \
relative to its largest
element. Everything that a peer can import beforehand is imported before the clock starts."""
DYNAMO = ("plait", "guards", "floor", "inductor", "inductor-cpp", "inductor-freeze")


def render(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    widths = [max(len(r[k]) for r in [list(heads), *rows]) for k in range(len(heads))]

    def line(cells: list[str]) -> str:
        padded = [
            c.ljust(w) if k == 0 else c.rjust(w)
            for k, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if k else "-") for k, w in enumerate(widths)) + "|"
    return "\n".join([line(list(heads)), rule, *(line(r) for r in rows)])


def case_table(name: str, about: str, peers: Result) -> str:
    """One program: a row a peer."""
    eager, plait = _us(peers, "eager"), _us(peers, "plait")
    guards = _us(peers, "guards")
    rows, failures = [], []
    for peer, r in peers.items():
        if "failed" in r:
            failures.append(f"{peer} failed: {r['failed']}")
            rows.append([peer, "failed", *[""] * (len(HEADS) - 2)])
            continue
        us = r["us"]
        compiles = peer != "eager"
        rows.append(
            [
                peer,
                _number(r["first_s"], 2) if compiles else "",
                _number(r.get("warm_s"), 2),
                _number(r.get("next_s"), 2),
                _number(us, 2 if us < 100 else 0),
                _number(eager / us if eager else None, 2),
                _number(us / plait if plait else None, 2),
                _number(us - guards if guards and peer in DYNAMO and us < 1000 else None, 2),
                _number(r["peak_bytes"] / 2**20 if "peak_bytes" in r else None, 2),
                _number(r["wrap_s"] or None, 2) if compiles else "",
                f"{r['error']:.0e}" if r.get("error") else "",
            ]
        )
    return "\n".join(
        [f"## {name}: {about}", "", render(HEADS, rows), *([""] if failures else []), *failures]
    )


def claims_table(claims: list[Result]) -> str:
    """Figures that plait is meant to reach, and those of this run."""
    rows = [[c["claim"], c["measured"], c["limit"], c["verdict"]] for c in claims]
    return "## Goals\n\n" + render(("goal", "measured", "limit", ""), rows)


def _us(peers: Result, name: str) -> float | None:
    value = peers.get(name, {}).get("us")
    return float(value) if value else None


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
