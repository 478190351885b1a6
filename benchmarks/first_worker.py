"""One first call in a fresh process, split by who spends the time; the last line of its output is
JSON.

Nothing but the standard library is loaded before the clock starts, so that imports are measured
too. Usage, by benchmarks.first alone: python -m benchmarks.first_worker CASE WAY PACKAGE
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Call = Callable[..., Any]
Figures = dict[str, float]
DYNAMO = ("torch._dynamo", "torch._functorch.aot_autograd")
BUILDING = ("build kernels", "load")  # plait's steps that are no stages of the compiler


@dataclass(frozen=True)
class Way:
    """One way to the first result.

    modules: what it needs besides torch, its compiler's front end and, after that, `rest`:
        imported before the clock of the first call starts, and reported apart.
    make: (module, inputs) -> what is called; of a package, (path, inputs).
    after: what a process does for those after it, once the clock has stopped.
    env: variables of its process. warm: whether a second process is faster.
    """

    name: str
    make: Call
    modules: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    after: Callable[[], object] = lambda: None
    env: dict[str, str] = field(default_factory=dict)
    warm: bool = True


def _compiled(backend: str, **options: Any) -> Call:
    def make(module: Any, inputs: tuple[Any, ...]) -> Call:
        import torch

        return torch.compile(module, backend=backend, options=options or None)

    return make


def _save_for_precompile() -> None:
    import torch

    torch.compiler.save_cache_artifacts()


def _plait_load(path: Path, inputs: tuple[Any, ...]) -> Call:
    import plait

    return plait.load(path)


def _bare_loader(path: Path, inputs: tuple[Any, ...]) -> Call:
    """AOTInductor's own loader, without the Python around it."""
    import torch

    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    return lambda *args: loader.boxed_run(list(args))[0]


def _eager(module: Any, inputs: tuple[Any, ...]) -> Call:
    return module  # type: ignore[no-any-return]


INDUCTOR = ("torch._inductor.compile_fx",)
# A hit of the warm start needs the back end alone, and no compiler.
COMPILER = ("plait.capture.backend", "plait.compile")
WAYS = {
    way.name: way
    for way in (
        Way("eager", _eager, warm=False),
        Way("plait", _compiled("plait", warm_start=False), DYNAMO, COMPILER),
        Way("plait-warm", _compiled("plait", warm_start=True), DYNAMO, COMPILER[:1]),
        Way("inductor", _compiled("inductor"), DYNAMO, INDUCTOR),
        Way(
            "inductor-precompile",
            _compiled("inductor"),
            DYNAMO,
            INDUCTOR,
            after=_save_for_precompile,
            env={"TORCH_CACHING_PRECOMPILE": "1"},
        ),
    )
}
PACKAGE_WAYS = {
    way.name: way
    for way in (
        Way("plait", _plait_load, (), ("plait.runtime.package",)),
        Way("aotinductor", _bare_loader),
    )
}


# ----------------------------------------------------------------------------------------- one call
class Observed:
    """What plait's steps take meanwhile, by the logs that they are timed in. in_backward: whether
    a first backward pass is under way."""

    def __init__(self) -> None:
        self.in_backward = False
        self.logs: list[tuple[bool, dict[str, float]]] = []

    def steps(self, in_backward: bool) -> Counter[str]:
        """Milliseconds by step, of the programs that are compiled while Dynamo is at work, or in a
        backward pass."""
        found: Counter[str] = Counter()
        for when, times_ms in self.logs:
            if when == in_backward:
                found.update({k: ms for k, ms in times_ms.items() if "/" not in k})
        return found


def observing(way: Way) -> Observed:
    """Sees every log of plait from now on, if the way is plait's. (An observer of programs would
    not do: where there is one, nothing starts warm.)"""
    seen = Observed()
    if "plait.capture.backend" not in way.rest:
        return seen
    from plait.log import PassLog

    begin = PassLog.__init__

    def begun(log: PassLog, *args: Any, **kwargs: Any) -> None:
        begin(log, *args, **kwargs)
        seen.logs.append((seen.in_backward, log.times_ms))

    PassLog.__init__ = begun  # type: ignore[method-assign]
    return seen


def split(first_s: float, seen: Observed) -> Figures:
    """Seconds of the first call by who spent them."""
    from torch._dynamo.utils import compilation_time_metrics

    spent = {name: sum(times) for name, times in compilation_time_metrics.items()}
    frame = spent.get("_compile.compile_inner", 0.0)
    back_end = spent.get("OutputGraph.call_user_compiler", 0.0)
    in_frame, in_backward = seen.steps(False), seen.steps(True)
    later = spent.get("backward._backward_impl", 0.0) + sum(in_backward.values()) / 1e3
    if steps := in_frame + in_backward:
        building = sum(steps[name] for name in BUILDING) / 1e3
        own = sum(steps.values()) / 1e3 - building
    else:  # Inductor: with AOTAutograd's cache, the second is all that is left
        own = spent.get("compile_fx_inner", 0.0) + spent.get("AOTAutogradCache.inductor_load", 0.0)
        building = spent.get("PyCodeCache.load_by_key_path", 0.0)
        own -= building
    aot = max(0.0, back_end + later - own - building)
    figures = {
        "Dynamo": max(0.0, frame + later - aot - own - building),
        "guards": spent.get("build_guards", 0.0),
        "AOTAutograd": aot,
        "own": max(0.0, own),
        "building": building,
        "run": first_s - frame - later,
    }
    return figures | {f"stage {name}": ms / 1e3 for name, ms in steps.items()}


def bound(run: Call, inputs: tuple[Any, ...], train: bool, seen: Observed) -> Callable[[], Any]:
    """A call without arguments; of a training step, forward and backward."""

    def step() -> Any:
        result = run(*inputs)
        if not train:
            return result
        loss = result[0] if isinstance(result, tuple) else result
        seen.in_backward = True
        loss.backward()
        return loss.detach()

    return step


def first_call(case: Any, way: Way) -> Figures:
    """The first call of a module, compared with what eager makes of it afterwards."""
    import torch

    torch.set_grad_enabled(case.train)
    module, inputs = case.make()
    seen = observing(way)
    cpu, begin = cpu_seconds(), time.perf_counter()
    got = bound(way.make(module, inputs), inputs, case.train, seen)()
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    first_s = time.perf_counter() - begin
    cpu = cpu_seconds() - cpu
    figures = {"first_s": first_s, "cpu_s": cpu}
    if way.name != "eager":
        figures |= split(first_s, seen)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    want = bound(module, inputs, case.train, Observed())()
    expected = [p.grad for p in module.parameters() if p.grad is not None]
    compare([got, *gradients], [want, *expected])
    return figures


def first_load(path: Path, way: Way) -> Figures:
    """The load of a package and its first call."""
    import torch

    inputs, want = torch.load(path.with_suffix(".pt"))
    with torch.no_grad():
        cpu, begin = cpu_seconds(), time.perf_counter()
        call = way.make(path, inputs)
        loaded = time.perf_counter()
        got = call(*inputs)
        end = time.perf_counter()
    compare([got], [want])
    spent = {"first_s": end - begin, "cpu_s": cpu_seconds() - cpu}
    return spent | {"building": loaded - begin, "run": end - loaded}


def compare(found: list[Any], expected: list[Any]) -> None:
    """Raises where a result, or all gradients together, are far from eager's."""
    import torch

    def flat(tensors: list[Any]) -> Any:
        return torch.cat([t.double().flatten() for t in tensors])

    pairs = [(found[:1], expected[:1]), (found[1:], expected[1:])]
    for ours, theirs in pairs[: 1 + bool(expected[1:])]:
        assert len(ours) == len(theirs), f"{len(ours)} gradients, eager has {len(theirs)}"
        ours, theirs = (
            [t[0] if isinstance(t, (tuple, list)) else t for t in x] for x in (ours, theirs)
        )
        far = (flat(ours) - flat(theirs)).norm() / flat(theirs).norm().clamp(min=1e-30)
        limit = 1e-3 if ours[0].dtype is torch.float32 else 5e-2
        assert far < limit, f"the result is off by {far:.1e} of eager's"


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


# -------------------------------------------------------------------------------------- one process
def imported(names: tuple[str, ...]) -> float:
    """Seconds."""
    start = time.perf_counter()
    for name in names:
        importlib.import_module(name)
    return time.perf_counter() - start


def main() -> None:
    name, way_name, package = sys.argv[1:]
    way = (PACKAGE_WAYS if package else WAYS)[way_name]
    figures = {"import torch": imported(("torch",))}
    figures["import front"] = imported(way.modules)
    figures["import back end"] = imported(("plait",) * ("plait" in way_name) + way.rest)
    if package:
        figures |= first_load(Path(package), way)
    else:
        from benchmarks.first_cases import CASES

        figures |= first_call(CASES[name], way)
        way.after()
    print("\n" + json.dumps(figures))


if __name__ == "__main__":
    main()
