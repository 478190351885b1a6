"""The shape of the source tree: imports run one way, files stay short, names that must not appear
do not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import instruction_table as table

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "plait"
ORDER = (
    "errors", "config", "log", "devices", "compat", "runtime", "ops", "ir", "graph", "lower",
    "schedule", "kernel", "wrapper", "pipelines", "compile", "capture", "tools", "extend",
)  # fmt: skip
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def plait_imports(tree: ast.AST) -> list[tuple[str, int]]:
    """(room, line) of every import of a room of plait, wherever it stands in the file."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = (
                [f"plait.{a.name}" for a in node.names] if node.module == "plait" else [node.module]
            )
        found += [(n.split(".")[1], node.lineno) for n in names if n.startswith("plait.")]
    return found


def upward_imports(name: str, source: str) -> list[str]:
    """Imports of `name`'s source that point to a later room, as text."""
    rank = {r: i for i, r in enumerate(ORDER)}
    return [
        f"{name} imports {other} (line {line})"
        for other, line in plait_imports(ast.parse(source))
        if other in rank and rank[other] > rank[name]
    ]


def test_the_check_finds_an_upward_import() -> None:
    assert upward_imports("ir", "def f():\n    from plait.kernel import cpp\n") == [
        "ir imports kernel (line 2)"
    ]
    assert upward_imports("kernel", "import plait.ir.expr") == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    name = room(path)
    if name in ("__init__", "__main__"):
        return
    assert name in ORDER, f"{path} is in no room of the design"
    assert upward_imports(name, path.read_text()) == []


KINDS = {"cpu", "cuda"}
COMPARING_CALLS = {"startswith", "endswith", "count", "index", "find", "removeprefix"}


def _constants(node: ast.AST) -> set[object]:
    """A constant, or those that a literal collection holds."""
    if isinstance(node, ast.Constant):
        return {node.value}
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return {c for e in node.elts for c in _constants(e)}
    if isinstance(node, ast.Dict):
        return {c for e in node.keys if e is not None for c in _constants(e)}
    return set()


def compared_kinds(source: str) -> list[int]:
    """Lines that compare something with the name of a kind of device."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            operands = [n.value for n in ast.walk(node.pattern) if isinstance(n, ast.MatchValue)]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.BitAnd)):
            operands = [node.left, node.right]  # sets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = [*node.args] if node.func.attr in COMPARING_CALLS else []
        for operand in operands:
            if any(isinstance(c, str) and c.rstrip(":") in KINDS for c in _constants(operand)):
                found.add(operand.lineno)
    return sorted(found)


def test_the_check_finds_compared_kinds() -> None:
    for text in (
        'x.device.type == "cpu"',
        'device not in ("cpu", "meta")',
        '("cuda", f) != (kind, g)',
        'device.startswith("cuda:")',
        'devices - {"cpu"}',
        'match kind:\n  case "meta" | "cuda":\n    pass',
    ):
        assert compared_kinds(text), text
    assert not compared_kinds('facts_of(x).is_host and f(torch.device("cpu")) is not None')


def test_no_kind_of_device_is_named() -> None:
    """Facts of devices.py are asked instead, but in a target's folder and in the runtime."""
    for path in SOURCES:
        parts = path.relative_to(PACKAGE).parts
        target = parts[0] == "kernel" and len(parts) > 2
        if parts[0] != "runtime" and not target:
            lines = compared_kinds(path.read_text())
            assert not lines, f"{path}: compares with the name of a kind of device: lines {lines}"


def test_ir_does_not_import_torch() -> None:
    for path in sorted((PACKAGE / "ir").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] == "torch"], path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 920


def code_lines(text: str, python: bool = True) -> int:
    """Lines of code: no blank line, comment or docstring (184,745 in PyTorch's own compiler, torch
    2.13)."""
    lines = {k: line.strip() for k, line in enumerate(text.splitlines(), 1)}
    if python:
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                and ast.get_docstring(node) is not None
            ):
                doc = node.body[0]
                for k in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1):
                    lines.pop(k, None)
    return sum(bool(line) and not line.startswith(("#", "//")) for line in lines.values())


def test_code_lines() -> None:
    assert code_lines('"""Doc."""\n\n# why\nx = 1  # so\n') == 1
    assert code_lines("// why\nint x;\n", python=False) == 1


LAUNCH = ROOT / "triton_launch"


def cpp_and_python(*folders: Path) -> list[Path]:
    """The sources in these folders; tests and examples of the library are neither part's."""
    return [
        p
        for folder in folders
        for p in sorted(folder.rglob("*"))
        if p.suffix in {".py", ".cpp", ".h"}
        and not {"tests", "examples"} & {*p.relative_to(ROOT).parts}
    ]


LAUNCH_SOURCES = [p for p in cpp_and_python(LAUNCH) if p.suffix == ".py"]


def test_the_compiler_is_small() -> None:
    """What launches Triton kernels from C++, and the operators made of it: a library beside it."""
    library = [*cpp_and_python(LAUNCH), PACKAGE / "ops.py"]
    beside = [*library, *table.files()]  # what is generated is counted in its tables
    compiler = [p for p in cpp_and_python(PACKAGE, ROOT / "native") if p not in beside]
    assert sum(code_lines(p.read_text(), p.suffix == ".py") for p in library) <= 6_500
    # 160 of them are AMD's GPUs: a dialect of Triton, and a driver; 250 control flow as programs,
    # 700 operators on lists of tensors, launches of many of them and steps of optimizers that are
    # one operator, 980 the user's Triton kernels, 260 several ranks, 140 recurrent layers that are
    # called whole, 1,210 attention on GPUs, 60 jagged tensors, 160 regions whose calls cost little,
    # 50 gradients of loops, 210 looking where arguments lie, 1,740 weights as constants and what
    # follows products as part of their kernels on CPUs, 420 several forms of one kernel, 1,030
    # products on GPUs, 410 factors of 8 and 4 bits,
    # 130 sorting a few numbers on GPUs, 190 images read at positions that a tensor holds, 40
    # where operands of products lie, 60 results of norms that backward passes make again,
    # 400 segments of rows and codes of 8 bits, 370
    # results of operators that a recording writes where the caller wants them, 180 sums that are
    # products, 190 rows that one product on a CPU passes on to the next, 70
    # sums of few rows of large tables, 40 biases that are split off, 120 maxima that are cut with
    # the sums below them and parts by lanes, 270 attention on a CPU, 90 rows written one by one, 30
    # modules of torch.fx with branches and loops that are read from a file, 140 layouts and
    # products of convolutions on a CPU, 260 pairs and parts of columns of products, 10 kernels of
    # convolutions, of which no guard is left, 560 caches that processes and machines share,
    # 160 what recompiles are told by, 1,690 starts without a trace, 50 what is compared with what
    # is made of it, 90 kernels that are told their places, 250 what equal blocks share, 220 costs
    # of first calls, 290 calls that do not wait for kernels, 1,410 reports, 1,405 what finds wrong
    # numbers, 325 where time goes, 400 what a machine lacks, 360 eager's bits, 1,030
    # rows that keep their bits, 120 sizes that a trace leaves out, 100 choices that go by sizes,
    # 120 objects among arguments and results, 40 shapes that torch does not know, 50 conditions
    # that are asked for to raise.
    assert sum(code_lines(p.read_text(), p.suffix == ".py") for p in compiler) <= 69_800


def imports(path: Path, package: str) -> set[str]:
    """The names, with their modules', that a file imports from a package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return {name for name in found if name.partition(".")[0] == package}


def included(path: Path) -> set[str]:
    """What a C++ file includes, as it names it."""
    return {*re.findall(r'#include ["<]([^">]+)[">]', path.read_text())}


def test_triton_launch_is_used_as_by_any_user() -> None:
    """The compiler sees public names and headers; the library of the compiler what README.md
    says."""
    public = re.compile(r"triton_launch(\.specialization)?(\.[a-zA-Z]\w*)?")
    used = {name for p in SOURCES for name in imports(p, "triton_launch")}
    assert used and [name for name in sorted(used) if not public.fullmatch(name)] == []
    compiler = [p for p in cpp_and_python(ROOT / "native", PACKAGE) if p.suffix != ".py"]
    assert [p for p in compiler if any("triton_launch" in name for name in included(p))] == []

    needs = {name.rpartition(".")[0] for p in LAUNCH_SOURCES for name in imports(p, "plait")}
    assert needs == {"plait.runtime.cubin", "plait.runtime.triton_worker"}
    library = [p for p in cpp_and_python(LAUNCH) if p.suffix != ".py"]
    foreign = {
        name
        for p in library
        for name in included(p)
        if (ROOT / "native" / name).exists() or (PACKAGE / "include" / name).exists()
    }
    core = {"core/cubins.h", "core/cuda.h", "core/files.h", "core/plan.h"}
    assert foreign == {*core, "torch/accelerator.h", "plait/errors.h"}


def test_inductor_is_never_named() -> None:
    files = cpp_and_python(PACKAGE, ROOT / "native", LAUNCH)
    assert [str(p) for p in files if "_inductor" in p.read_text()] == []


def test_only_its_folder_knows_torch_in_native() -> None:
    """Names of operators are data of a plan, and a text for people may name torch."""
    known = re.compile(
        r"#include [<\"](torch|ATen|c10|Python|pybind)|\b(at|c10)::|libtorch|\bPy_?[A-Z]"
    )
    code = {p: re.sub(r"//.*", "", p.read_text()) for p in cpp_and_python(ROOT / "native" / "core")}
    assert (
        code and {str(p): m.group() for p, text in code.items() if (m := known.search(text))} == {}
    )


def test_triton_is_unknown_to_ir_and_schedule() -> None:
    files = [p for d in ("ir", "schedule") for p in sorted((PACKAGE / d).rglob("*.py"))]
    assert files and [str(p) for p in files if "triton" in p.read_text().lower()] == []


def test_failures_say_what_is_wrong() -> None:
    """An assert shows what it found, or says what it expected."""
    bare = [
        f"{path}:{n.lineno}"
        for path in SOURCES
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Assert) and n.msg is None
    ]
    assert bare == []


def test_every_module_says_what_it_is() -> None:
    for path in SOURCES + LAUNCH_SOURCES:
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc, f"{path} has no docstring"


@pytest.mark.parametrize(
    "path",
    [p for d in (ROOT, LAUNCH) for p in sorted((d / "tests").glob("test_gpu*.py"))],
    ids=lambda p: p.stem,
)
def test_what_tests_for_a_gpu_import_is_there(path: Path) -> None:
    """They are not collected where there is none."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or str(node.module).partition(".")[0] not in (
            "tests",
            "plait",
            "triton_launch",
        ):
            continue
        module = ROOT / str(node.module).replace(".", "/")
        for name in (a.name for a in node.names):
            files = [module / f"{name}.py", module / name / "__init__.py"]
            source = next(
                (p for p in (module.with_suffix(".py"), module / "__init__.py") if p.exists()), None
            )
            assert any(f.exists() for f in files) or (source and name in names_of(source)), (
                node.module,
                name,
            )


def names_of(path: Path) -> set[str]:
    """The names that a file defines or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name) for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
