"""What Dynamo compiled again, which guard failed, and what would avoid it.

Dynamo compiles a function anew for a call that fails the guards of all its graphs. Each such
compile is a line of the log and of `plait.explain`. Comes in: the texts of the guards, from
`compat/recompiles.py`. Goes out: `Recompile`s.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from plait.compat.recompiles import FailedGuard, current_compile, failures
from plait.log import STAGES, PassLog

_KEPT = 200  # recompiles of a process that can still be asked for

_SIZES = (
    "Dynamo lets this size vary from now on; torch._dynamo.mark_dynamic(tensor, dimension) before "
    "the first call, or torch.compile(dynamic=True), saves this compile"
)
_FEW = (
    "sizes 0 and 1 have a graph each: it ends by itself; "
    "torch._dynamo.decorators.mark_unbacked(tensor, dimension) makes one for all sizes"
)
_NUMBER = (
    "a number of Python that changes is part of the graph: keep it in a tensor (of a module: a "
    "buffer), or hand it over as an argument; for integers of modules there is "
    "torch._dynamo.config.allow_unspec_int_on_nn_module"
)
_SAME_STATE = "state of the process is part of the graph: set it before the first call"

ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"requires_grad mismatch.*on a parameter",
        "each set of trained parameters has a graph: freeze before the first call",
    ),
    (r"on a parameter", "parameters that differ in this have a graph each, whoever runs the code"),
    (r"size mismatch .*expected [01], |size mismatch .* actual [01]\b", _FEW),
    (r"size mismatch", _SIZES),
    (r"rank mismatch", "each number of dimensions has a graph: reshape before the call"),
    (r"^2 <= [^<]*size\(\)\[\d+\]$", _FEW),
    (r"dynamic dims|dim_marking", "mark dimensions before the first call too, or never"),
    (
        r"size\(\)|stride\(\)|storage_offset\(\)",
        "the code or an operator asks this of a size: where nothing is asked, one graph serves all",
    ),
    (r"dtype mismatch", "each dtype has a graph: convert before the call"),
    (r"device mismatch", "each device has a graph"),
    (
        r"stride mismatch",
        "each layout in memory has a graph: .contiguous(), of images with memory_format=..., "
        "before the call",
    ),
    (
        r"requires_grad mismatch",
        "with and without requires_grad are two graphs: .detach() or .requires_grad_() make calls "
        "alike",
    ),
    (
        r"dispatch key set mismatch",
        "tensors of torch.inference_mode(), of a transform or of a subclass have graphs of their "
        "own",
    ),
    (r"grad_mode", "with and without torch.no_grad() are two graphs: it ends by itself"),
    (r"autocast", "each setting of autocast has a graph: enter it inside the function, or always"),
    (
        r"GLOBAL_STATE|_get_fp32_precision|torch_function_mode_stack|CURRENT_DEVICE|deterministic",
        _SAME_STATE,
    ),
    (r"Unexpected recompilation", "threads may compile it at once: call it once before they begin"),
    (
        r"BACKEND_MATCH|current_backend",
        "torch.compile was called again with other options: call it once, and keep what it returns",
    ),
    (
        r"got deallocated",
        "an object that the graph was made for is gone: make modules, optimisers and functions "
        "once, and keep them",
    ),
    (r"== (True|False|None)$| is (not )?(True|False|None)$", "each value of a flag has a graph"),
    (
        r"Duplicate tensor|^[^=]+ is (not )?[A-Za-z_]",
        "arguments that are one tensor have a graph of their own: let them be one always, or never",
    ),
    (
        r"hasattr|_contains|keys\(",
        "each set of keys or attributes has a graph: fill them before the first call",
    ),
    (
        r"\blen\(|^not [^()]*$",
        "each number of items has a graph: stack them into one tensor, or pad the list",
    ),
    (
        r"check_obj_id|id_match|\bid\(",
        "it must be one object: make functions, modules and enumerations once; what changes should "
        "be an argument",
    ),
    (
        r"check_type_id|type\(|expected type of",
        "each class of an argument has a graph: a Parameter, too, is no plain tensor",
    ),
    (
        r"^\w+ == -?\d[\d.e+-]*$",
        "Dynamo lets a number that is an argument vary from now on; a tensor saves this compile",
    ),
    (r"== -?(\d[\d.e+-]*|inf|nan)j?$", _NUMBER),
    (r"== ['\"]", "each text has a graph: it is part of the program"),
)
"""(what is found in a guard, what would avoid the recompile); the first that is found counts."""


def advice(guard: str) -> str:
    """What would avoid a recompile for this guard; "" where nothing is known."""
    return next((text for found, text in ADVICE if re.search(found, guard)), "")


@dataclass(frozen=True)
class Recompile:
    """function: name and "file:line". number: which compile of it, from 1. guards: those that the
    call failed, one for each graph that there was, the one used last first."""

    function: str
    number: int
    guards: tuple[FailedGuard, ...]

    @property
    def line(self) -> str:
        """All of it in one line; advice that holds for several guards is given once."""
        told: dict[str, list[str]] = {}
        for g in self.guards:
            at = f" ({g.where})" if g.where else ""
            told.setdefault(advice(g.text), []).append(f"`{g.text.partition('. Guard ')[0]}`{at}")
        parts = (
            f"{', '.join(dict.fromkeys(guards))} failed" + (f": {why}" if why else "")
            for why, guards in told.items()
        )
        return f"{self.function}, compile {self.number}: {'; '.join(parts)}"


@dataclass
class Recompiles:
    """Those of one back end.

    found: the last ones, in order.
    compiles: by name, what the back end compiled. Guards of graphs that others made are not told:
    a call of this back end would not have run them. Of compiles that made no graph it is not
    told."""

    found: deque[Recompile] = field(default_factory=lambda: deque(maxlen=_KEPT))
    compiles: set[str] = field(default_factory=set)

    def note(self) -> Recompile | None:
        """Looks at the compile that is under way; what there is to tell of it, once."""
        failed = failures()
        self.compiles.add(current_compile())
        if failed is None:
            return None
        self.compiles |= {c for c, fn in failed.without_graph.items() if self._is_of(fn)}
        told = tuple(g for g in failed.guards if g.graph in self.compiles)
        if not told:
            return None
        made = Recompile(failed.function, failed.number, told)
        if self.found and self.found[-1] == made:  # one compile, cut into several graphs
            return None
        self.found.append(made)
        return made

    def _is_of(self, backend: Any) -> bool:
        """Whether a back end is plait's and tells this list, as `plait_backend` says."""
        fn, given = getattr(backend, "func", backend), getattr(backend, "keywords", {})
        own = getattr(fn, "__module__", "") == "plait.capture.backend"
        return own and given.get("recompiles", of_process) is self


of_process = Recompiles()
"""Those of torch.compile(backend="plait") in this process."""


def tell_recompile(recompiles: Recompiles, log: PassLog) -> None:
    """Notes the compile that is under way, and logs why it is not the first one."""
    if again := recompiles.note():
        log.note(STAGES, f"compiled again: {again.line}")
