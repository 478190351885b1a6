"""The functions of a user's files: found and loaded, and described for C++.

What C++ knows of a function is its parameters and decorators, as src/signature.h reads them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from triton_launch.specialization import DTYPES, Callee, DType, write_value

SHAPES = ("launch_cooperative_grid", "launch_pdl", "num_ctas", "num_stages", "num_warps")
"""Options whose defaults nothing in the environment changes: to name one with its default is to
leave it out."""


def module_of(path: Path) -> ModuleType:
    """The module that a file is, imported once: as part of its package, or under a name that no
    other module has, since this may be the user's own process. What lies beside it is found first
    while it is imported, as by a script, and last afterwards. Raises FileNotFoundError, and
    whatever the file raises."""
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():  # so that its relative imports are found
        root, name = root.parent, f"{root.name}.{name}"
    if "." not in name and getattr(sys.modules.get(name), "__file__", None) != str(path):
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    behind = [] if str(root) in sys.path else [str(root)]
    sys.path.insert(0, str(root))
    try:
        if "." in name:
            importlib.import_module(name.rpartition(".")[0])
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except BaseException:
        if known is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = known
        raise
    finally:
        sys.path.remove(str(root))
        sys.path += behind
    return module


@lru_cache(None)
def load(file: str, function: str) -> tuple[Any, list[Any]]:
    """The @triton.jit function of that name, and its decorators, the outermost first. Raises
    AttributeError where there is none, TypeError for anything else."""
    import triton
    from triton.runtime.autotuner import Autotuner, Heuristics

    found = getattr(module_of(Path(file).resolve()), function, None)
    if found is None:
        raise AttributeError(f"{file} has no {function}")
    layers: list[Any] = []
    while type(found) in (Autotuner, Heuristics):
        layers.append(found)
        found = found.fn
    if not isinstance(found, triton.runtime.jit.JITFunction):
        raise TypeError(
            f"{function} of {file} is no plain @triton.jit function: it is a {type(found).__name__}"
        )
    if sum(isinstance(layer, Autotuner) for layer in layers) > 1:
        raise TypeError(f"{function} of {file} has two @triton.autotune")
    return found, layers


def describe(fn: Any, layers: Sequence[Any] = ()) -> str:
    """The signature of a function with its decorators, for C++."""
    import triton
    from triton.backends.nvidia.compiler import CUDAOptions

    lines = [";".join(f"{k}={getattr(CUDAOptions, k)}" for k in SHAPES)]
    for p in fn.params:
        flags = {
            "c": p.is_constexpr, "k": p.is_const, "s": p.do_not_specialize,
            "a": p.do_not_specialize_on_alignment,
        }  # fmt: skip
        default = write_constant(p.default) if p.has_default else ""
        lines.append(
            f"{p.name}|{p.annotation_type}|{''.join(k for k, v in flags.items() if v)}|{default}"
        )
    if layers:
        lines.append(
            "#" + hashlib.sha256(f"{fn.cache_key} {triton.__version__}".encode()).hexdigest()
        )
    for layer in layers:
        lines += _write_layer(layer)
    return "\n".join(lines)


def _write_layer(layer: Any) -> list[str]:
    if hasattr(layer, "values"):
        return [f"@heuristics|{','.join(layer.values)}"]
    flags = {
        "p": layer.early_config_prune or layer.perf_model,
        "b": any(c.pre_hook for c in layer.configs),
        "h": layer.user_defined_pre_hook or layer.user_defined_post_hook,
    }
    lists = map(",".join, (layer.keys, layer.reset_to_zero, layer.restore_value))
    told = "".join(flag for flag, is_there in flags.items() if is_there)
    return [f"@autotune|{'|'.join(lists)}|{told}", *(f"+{write_config(c)}" for c in layer.configs)]


def write_config(config: Any) -> str:
    """A configuration of @triton.autotune."""
    return ";".join(f"{k}={write_constant(v)}" for k, v in config.all_kwargs().items())


def write_constant(value: Any) -> str:
    import triton.language as tl

    value = value.value if isinstance(value, tl.constexpr) else value
    short = {long: k for k, long in DTYPES.items()}
    try:
        return write_value(
            DType(short.get(str(value), str(value))) if isinstance(value, tl.dtype) else value
        )
    except TypeError:
        return "?"


def for_triton(value: Any, fn: Any) -> Any:
    """A constant of a function's call as Triton takes it."""
    import triton.language as tl

    if isinstance(value, tuple):
        return tuple(for_triton(v, fn) for v in value)
    if isinstance(value, Callee):
        return fn.fn.__globals__[value.name]
    return tl.dtype(DTYPES[value.name]) if isinstance(value, DType) else value
