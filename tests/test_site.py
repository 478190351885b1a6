"""The site of `make docs`: it builds without a broken link, asks no other host for anything, and
its references have every option, command and public name."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

import plait
import plait.config
from plait.__main__ import COMMANDS

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("material", reason="the extra `docs` is not installed")

ROOT = Path(__file__).parent.parent
ELSEWHERE = re.compile(
    r"""\ssrc=["']?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))"""
    r"""[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//""",
    re.IGNORECASE,
)
"""What makes a browser load a thing of another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        # Broken links, pages that are not reached and unknown anchors end it.
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def text(page: Path) -> str:
    """What a page says, without its tags."""
    body = re.sub(r"<(?:head|script)\b.*?</(?:head|script)>", "", page.read_text(), flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", body))


@pytest.mark.parametrize(
    "line, elsewhere",
    [
        ('<script src="https://unpkg.com/x"></script>', True),
        ("<img src=//host/x.png>", True),
        ('<link href="https://fonts/x.css" rel="stylesheet">', True),
        ("@import url(https://fonts/x.css)", True),
        ('<a href="https://pytorch.org">', False),
        ('<link rel="stylesheet" href="assets/x.css">', False),
    ],
)
def test_what_comes_from_elsewhere_is_seen(line: str, elsewhere: bool) -> None:
    assert bool(ELSEWHERE.search(line)) == elsewhere


def test_nothing_comes_from_other_hosts(site: Path) -> None:
    pages = [p for p in site.rglob("*") if p.suffix in (".html", ".css", ".svg")]
    assert len(pages) > 40
    assert [(p.name, m[0]) for p in pages for m in ELSEWHERE.finditer(p.read_text())] == []


def test_every_page_is_there(site: Path) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        assert (site / source.with_suffix(".html").name).exists()
    tables = [*(ROOT / "benchmarks" / "results").glob("*.md")]
    index = (site / "results.html").read_text()
    for source in tables:
        assert f'href="results/{source.stem}.html"' in index
        assert (site / "results" / f"{source.stem}.html").exists()
    for plot in ("suite-cpu.svg", "suite-h200.svg"):
        assert f'src="{plot}"' in index and (site / plot).exists()


def test_names_of_pages_are_links(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert '<a href="use.html#warm-starts">Use: "Warm starts"</a>' in front
    assert "README.md" not in text(site / "tour.html")
    assert 'src="../suite-cpu.svg"' in (site / "results" / "suite-cpu.html").read_text()


def test_references_are_complete(site: Path) -> None:
    options = text(site / "options.html")
    for row in plait.config.flags():
        assert {row.name, row.env} <= set(options.split()), row.name
        assert row.doc.replace("`", "") in " ".join(options.split()), row.name
    assert set(plait.list_modes()) <= set(options.split())
    commands = text(site / "commands.html")
    for command, meaning in COMMANDS.items():
        assert f"usage: plait {command}" in commands and meaning[1:] in commands
    assert "usage: plait cache verify [-h] [--remove]" in commands
    names = text(site / "python.html")
    for name in plait.__all__:
        assert f"plait.{name}" in names
    assert "compile(" in names
