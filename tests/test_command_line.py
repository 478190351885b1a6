"""The command line `plait`: what it prints of plait, of packages and of packs of kernels."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

import plait
from plait.__main__ import COMMANDS, main
from plait.runtime.cubin import Cubin, pack, unpack

ROOT = Path(__file__).parent.parent
KERNELS = {
    "add|*fp32:D,i32,=64|num_warps=8|90": Cubin(
        b"image", "add_kernel", 8, 2, 3, (4, 5), (6, 7), True, False
    ),
    "plait_add_7f3a": Cubin(
        b"", "plait_add_7f3a", 4, 1, 0, (0, 1), (0, 1), False, True, "descriptors"
    ),
}


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([*map(str, arguments)])
    return capsys.readouterr().out


def exits(*arguments: object) -> object:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    return stop.value.code


def test_the_script_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"plait": "plait.__main__:main"}


def test_what_it_says_of_plait(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("--version") == exits("--cmake-dir") == exits("--help") == 0
    version, folder, usage = capsys.readouterr().out.split("\n", 2)
    assert version == plait.__version__ and (Path(folder) / "plait" / "plait-config.cmake").exists()
    assert all(f"  {name}" in usage and meaning in usage for name, meaning in COMMANDS.items())
    assert exits() == exits("weave") == 2
    for command in COMMANDS:
        assert exits(command, "--help") == 0
        assert "usage:" in capsys.readouterr().out


def test_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.plait"
    batch = torch.export.Dim("batch", max=64)
    model = torch.nn.Linear(4, 8).eval()
    plait.package(
        model, path, (torch.randn(3, 4),), dynamic_shapes=({0: batch},), machines=["portable"]
    )
    text = said(capsys, "info", path)
    assert (
        f"plait {plait.__version__}" in text and "gives:\n  result\nmachines:\n  portable " in text
    )
    (symbol,) = [line.split()[0] for line in text.partition("sizes:\n")[2].splitlines()[:1]]
    assert f"takes:\n  input f32 ({symbol}, 4) on cpu\nsizes:\n  {symbol} 0 to 64\n" in text
    assert text.endswith("weights: 2 tensors (--weights lists them)\n")
    assert said(capsys, "info", "--weights", path).endswith(
        "weights:\n  weight f32 (8, 4)\n  bias f32 (8)\n"
    )

    bytes_ = bytearray(path.read_bytes())
    bytes_[bytes_.index(model.weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(bytes_)
    assert said(capsys, "info", path) == text
    assert str(exits("info", "--weights", path)).startswith(f"plait: {path}: ")


def test_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.pack"
    path.write_bytes(pack(KERNELS, {"add": "signature"}))
    assert unpack(path.read_bytes()) == (KERNELS, {"add": "signature"})
    assert said(capsys, "info", path).splitlines() == [
        "2 kernels:", "  add *fp32:D,i32,=64 num_warps=8  (sm_90, 8 warps, 5 bytes)",
        "  plait_add_7f3a  (4 warps, 0 bytes)",
    ]  # fmt: skip


def test_a_pack_for_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for arch in ("79", "sm_90", "-90"):
        assert exits("pack", "kernels.py", "--signatures", "f i32", f"--arch={arch}") == 2
        assert f"{arch!r} is no compute capability from 80 on" in capsys.readouterr().err


def test_what_is_neither(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert exits("info", path) == f"plait: {path}: No such file or directory"
    whole = pack(KERNELS, {"add": "signature"})
    for n in range(len(whole)):
        with pytest.raises(ValueError, match="a damaged kernel file"):
            unpack(whole[:n])
    path.write_bytes(b"PLAITCUB" + bytes(8))
    assert exits("info", path) == f"plait: {path} is no kernel file of this version"
    path.write_bytes(whole[:24] + b"\xff" * 8 + whole[32:])
    assert exits("info", path) == f"plait: {path} is a damaged kernel file"


def test_commands_and_scripts_are_told_apart(tmp_path: Path) -> None:
    """`plait report` and `replay record` run commands, `bisect` and `reduce` scripts."""
    script = tmp_path / "train.py"
    script.touch()
    for run in (("report", "-o", tmp_path / "page.html"), ("replay", "record", tmp_path / "all")):
        told = f"plait: {script}: Permission denied; try: python {script} --steps 3"
        assert exits(*run, "--", script, "--steps", 3) == told
    for search in ("bisect", "reduce"):
        assert "try: -- train.py, without python" in str(exits(search, "--", "python", script))
