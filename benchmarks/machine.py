"""What a benchmark ran on: lines for the head of its page."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def machine(command: str) -> dict[str, Any]:
    """What was measured on what."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False)
    asked = ["git", "--git-dir", str(ROOT / ".git"), "rev-parse", "--short", "HEAD"]
    # NOTE: asked for by its folder: a copy without one may lie within another repository.
    commit = subprocess.run(asked, capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "commit": commit.stdout.strip(),
        "cpu": f"{len(names)} x {names[0] if names else platform.processor()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": compiler.stdout.splitlines()[0] if compiler.stdout else "none",
        "load_before": os.getloadavg()[0],
    }
