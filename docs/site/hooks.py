"""What mkdocs adds to the pages of docs/: README as the first page, the other pages of the
repository, references written from the code, and the tables of results.

Pages name files as `docs/use.md`, or `docs/use.md`, "Caches": on the site these are links, with the
title of the page in the place of its name.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
from pathlib import Path
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import plait
import plait.config
from plait.__main__ import COMMANDS, HOMES

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "triton_launch/README.md": "triton-launch.md",
    "triton_launch/ops/README.md": "triton-ops.md",
}
"""Files outside of docs/ that are pages, by the address that they have."""

ADDRESS = {
    **OUTSIDE,
    **{f"docs/{p.name}": p.name for p in (ROOT / "docs").glob("*.md")},
    **{f"benchmarks/results/{p.name}": f"results/{p.name}" for p in RESULTS.glob("*.md")},
}
NAMED = re.compile(r'(?<![\w/\[.-])(?<!\]\()`?([\w./-]+\.md)`?(?:,\s"([^"`]+)")?')
PICTURE = re.compile(r"(?<=\]\()(?:\.\./\.\./)?docs/(?=[\w-]+\.(?:svg|png)\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def options() -> str:
    """The options and modes, from the rows of `plait.config`."""
    lines = [
        "# Options and modes", "",
        "`torch.compile(model, backend=\"plait\", options={...}, mode=...)`, and the same of "
        "`plait.compile`, `plait.package` and `plait.explain`. Each option is a variable of the "
        "environment too. How they are read: `docs/use.md`, \"Options and modes\".", "",
        "| option | default | variable | meaning |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in plait.config.flags():
        values = f" One of {', '.join(f'`{c!r}`' for c in row.choices)}." if row.choices else ""
        meaning = row.doc + ("." if values else "") + values
        lines.append(f"| `{row.name}` | `{row.default!r}` | `{row.env}` | {meaning} |")
    lines += ["", "## Modes", "", "| mode | is the same as these options |", "| --- | --- |"]
    for name, settings in plait.config.MODES.items():
        lines.append(f"| `{name}` | {f'`{settings}`' if settings else 'none'} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """What `plait COMMAND --help` prints, for each."""
    text = ["# Commands", "", "`plait COMMAND`, also `python -m plait COMMAND`."]
    for name, meaning in COMMANDS.items():
        printed = [_help(name)]
        if parts := re.search(r"^  \{([\w,]+)\}$", printed[0], re.MULTILINE):
            printed += [_help(name, part) for part in parts[1].split(",")]
        text += ["", f"## plait {name}", "", meaning[0].upper() + meaning[1:] + "."]
        text += [f"\n```text\n{one}```" for one in printed]
    return "\n".join(text) + "\n"


def _help(command: str, *part: str) -> str:
    printed = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS="92"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        home = HOMES.get(command, command)
        importlib.import_module(f"plait.tools.{home}").main([*part, "--help"])
    return printed.getvalue()


def names() -> str:
    """The public names of `plait` with their docstrings."""
    text = ["# Python", "", plait.__doc__ or ""]
    for name in plait.__all__:
        value = getattr(plait, name)
        doc = inspect.getdoc(value) or ""
        text += ["", f"## plait.{name}", ""]
        if not (inspect.isclass(value) and issubclass(value, Exception)) and value is not (
            plait.Config
        ):
            text += ["```python", f"{name}{inspect.signature(value)}", "```", ""]
        text += [doc]
    return "\n".join(text) + "\n"


def _readme() -> tuple[str, str]:
    """README without its part about results, and that part without its heading."""
    before, rest = (ROOT / "README.md").read_text().split("## Results\n")
    part, after = rest.split("## Install\n")
    return f"{before}## Install\n{after}", part


def index() -> str:
    """README without its results, which have a page."""
    return _readme()[0]


def results() -> str:
    """The part of README about results, and a list of the tables."""
    text = ["# Results", _readme()[1], "![speed-up per model](suite-cpu.svg)", "", "## All", ""]
    text += [f"- [{_title(p)}](results/{p.name})" for p in sorted(RESULTS.glob("*.md"))]
    return "\n".join(text) + "\n"


def _title(path: Path) -> str:
    return path.read_text().split("\n", 1)[0].lstrip("# ")


GENERATED = {
    "index.md": index,
    "options.md": options,
    "commands.md": commands,
    "python.md": names,
    "results.md": results,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in docs/."""
    for name, address in ADDRESS.items():
        if not name.startswith("docs/") and address not in GENERATED:
            files.append(File.generated(config, address, abs_src_path=str(ROOT / name)))
    for address, write in GENERATED.items():
        files.append(File.generated(config, address, content=write()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns names of files into links, outside of code."""
    depth = page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        name, part = found.groups()
        address = ADDRESS.get(name) or ADDRESS.get(f"benchmarks/results/{name}")
        if address is None or address == page.file.src_uri:
            return found[0]
        anchor = "#" + re.sub(r"[^\w-]+", "-", part.lower()).strip("-") if part else ""
        text = _title(ROOT / found[1] if found[1] in ADDRESS else RESULTS / found[1])
        text += f': "{part}"' if part else ""
        return f"[{text}]({'../' * depth}{address}{anchor})"

    parts = FENCE.split(PICTURE.sub("../" * depth, markdown))
    return "".join(text if k % 2 else NAMED.sub(link, text) for k, text in enumerate(parts))
