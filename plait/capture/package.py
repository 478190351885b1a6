"""`plait.package`: a program and all that it needs in one file, for processes and machines without
the compiler.

The model is traced and planned once and its kernels are built for several machines.
`plait/wrapper/package.py` writes the file, `plait.load` and C++ (docs/package.md) run what is in
it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.capture.absent_device import on_device
from plait.capture.aliases import Result, results_of
from plait.capture.bound_program import argument_specs, captured_from
from plait.capture.freeze import frozen, require_other_bits
from plait.capture.program import collector_paused, guarded, roomy
from plait.capture.sources import Examples, Program, source_of
from plait.capture.trace import Traced, state_of, trace
from plait.capture.wrapped_state import parts_of, unwrapped
from plait.compile import Portable, compile_portable
from plait.config import Config
from plait.devices import facts_of
from plait.errors import Unsupported, UserError
from plait.graph.edit import last_frame
from plait.ir.calls import all_programs
from plait.kernel.targets import TARGETS
from plait.kernel.triton.dialects import GPUS
from plait.runtime import signature as signatures
from plait.runtime.toolchain import ISAS
from plait.wrapper import instructions as ins
from plait.wrapper.native import encode
from plait.wrapper.package import Contents, PackageWriter, Variant

_LAST_PORTABLE = 89
"""Triton's code for newer GPUs runs on these alone; that for this one, as PTX, on all that come
after."""
USUAL_GPUS = ("sm_100", "sm_90", "sm_80", f"ptx_{_LAST_PORTABLE}")
"""What GPU kernels are built for where nothing else is asked."""


@roomy
def package(
    model: Program,
    path: str | os.PathLike[str],
    example_inputs: Examples = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    *,
    machines: str | Sequence[str] | None = None,
    device: str | torch.device | None = None,
    fold: bool = False,
) -> None:
    """Writes a package of model for inputs like example_inputs; both as plait.compile takes them.

    machines: what kernels are built for, one or several of "avx512", "avx2", "portable", and for
    programs on a GPU "sm_80" and so on, "ptx_80" for GPUs that are newer, "gfx942" and so on;
    without it all of a CPU's, and the usual GPUs of NVIDIA. device: where the program is to run,
    such as "cuda", which this machine may lack; without it, where the model is. fold: what depends
    on weights alone is computed now. These weights cannot be changed any more.

    Raises as plait.compile does, and Unsupported for what needs Python when it runs. The file
    appears when it is whole.
    """
    cfg = Config.from_env().with_options(options, mode)
    for name, plain in (("wrapper", "native"), ("cuda_graphs", False)):
        if getattr(cfg, name) != plain:
            raise UserError(
                f"plait.package knows no option {name}={getattr(cfg, name)!r}",
                hint=f"{name}={plain!r}",
            )
    named = [name for name in (cfg.isa, cfg.gpu_arch) if name != "auto"]
    isas, archs = _machines(named if machines is None else _names(machines))
    source = source_of(model, example_inputs, dynamic_shapes, "plait.package")
    state = unwrapped(state_of(source[0]))
    aliases = _aliases(source[0], state)
    for weight, x in state.items():
        if x.is_meta:
            raise UserError(
                f"a package of a model whose weight {weight!r} has no values, on the device meta"
            )
    if fold:
        require_other_bits(cfg, "plait.package with fold=True")
    target = _device(device)
    with _writer(path, None if fold else state) as out, collector_paused(), on_device(target):
        traced = trace(*source, "plait.package", cfg, target)
        _require_conditions(traced)
        folded: Sequence[str] = ()
        ready: Future[None] | None = None
        if fold:
            done = frozen(traced, cfg)
            traced, folded, ready = done.traced, done.names, done.folded.ready
        # A name without a serial number: equal models make equal bytes.
        captured = replace(captured_from(traced), name=f"package_{type(source[0]).__name__}")
        results = tuple(results_of(traced.graph, traced.views))  # before the graph is cleaned
        made = guarded(lambda cfg: compile_portable(captured, cfg, isas, archs), captured, cfg)
        if ready is not None:
            ready.result()
        out.finish(_contents(captured.name, traced, results, made, folded, aliases))


def _writer(path: Any, weights: Mapping[str, torch.Tensor] | None) -> PackageWriter:
    """Raises UserError where no file can be made at path: before anything is traced."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        what = f"plait.package takes the path of a file to write, got {type(path).__name__}"
        raise UserError(what, hint='plait.package(model, "model.plait", (x,))')
    target = Path(os.fsdecode(path))
    what, hint = f"plait.package cannot write to {str(target)!r}", "a path where you may write"
    if "\0" in str(target):
        raise UserError(f"{what}: its name contains a NUL", hint=hint)
    try:
        if target.is_dir():
            hint = f"a file in it: {str(target / 'model.plait')!r}"
            raise UserError(f"{what}: it is a folder", hint=hint)
        if not target.parent.is_dir():
            missing = f"there is no folder {str(target.parent)!r}"
            raise UserError(f"{what}: {missing}", hint="make the folder first")
        return PackageWriter(target, weights)
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}", hint=hint) from error


def _aliases(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The other names of shared parameters and buffers, each with the name that state has."""
    first = {id(x): name for name, x in state.items()}
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    every = [part for name, x in (*parameters, *buffers) for part in parts_of(name, x)]
    return {name: first[id(x)] for name, x in every if name not in state and id(x) in first}


def _names(machines: Any) -> list[str]:
    """The names of machines: one, or several. Raises UserError for what is none."""
    if isinstance(machines, str):
        return [machines]
    names = list(machines) if isinstance(machines, Iterable) else [machines]
    for name in names:
        if not isinstance(name, str):
            hint = 'machines=["avx2", "portable"]'
            raise UserError(f"plait.package knows no machine {name!r}", hint=hint)
    return names


def _machines(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Vector instructions and GPUs, the best first: those asked for, or the usual ones."""
    gpus = [m for m in dict.fromkeys(asked) if m in GPUS]
    wrong = [m for m in asked if m not in (*ISAS, *gpus)]
    if wrong:
        hint = f"one of {', '.join((*ISAS, *GPUS))}"
        raise UserError(f"plait.package knows no machine {wrong[0]!r}", hint=hint)
    late = [m for m in gpus if m.startswith("ptx") and int(m[4:]) > _LAST_PORTABLE]
    if late:
        raise UserError(f"PTX for {late[0][4:]} runs on no newer GPU", hint=f"ptx_{_LAST_PORTABLE}")
    gpus = [m for m in reversed(list(GPUS)) if m in (gpus or USUAL_GPUS)]
    return [m for m in ISAS if m in asked] or list(ISAS), gpus


def _device(name: str | torch.device | None) -> torch.device | None:
    """The device of that name with its number, as arguments have it."""
    if name is None:
        return None
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"there is no device {name!r}", hint="cpu, cuda or cuda:1") from None
    if device.type not in TARGETS:
        raise UserError(
            f"a package for the device {name}: plait has kernels for {' and '.join(TARGETS)} only"
        )
    if str(device) != device.type or not facts_of(device).streams:
        return device
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device(device.type, current)


def _require_conditions(traced: Traced) -> None:
    """Raises Unsupported for a condition on sizes that a package cannot check."""
    inputs = traced.graph.graph.find_nodes(op="placeholder")[len(traced.state) :]
    ours = f'File "{trace.__code__.co_filename}"'  # the last frame if the user's is not known
    for check in traced.sizes.checks:
        if check.tokens:
            continue
        told = signatures.named_in(check.text, traced.signature.tensors)
        named = [inputs[int(number)] for number in re.findall(r"args\[(\d+)\]", check.text)]
        traces = [str(user.meta.get("stack_trace") or "") for x in named for user in x.users]
        theirs = {last_frame(t) for t in traces if t.rfind('File "') > t.rfind(ours)}
        what = f"a package of a program that needs sizes with {told}"
        line = "".join(theirs) if len(theirs) == 1 else ""  # which of several it is, is not known
        raise Unsupported(what, where=line, hint="plait.compile, which checks it in Python")


def _require_no_python(made: Portable) -> None:
    """Raises Unsupported, with the source line, for a call that takes Python."""
    why = {step.what: step for step in made.steps if step.rung == "python"}
    for program in all_programs(made.wrapper):
        line = ""
        for i in program.body:
            if isinstance(i, ins.Note):
                line = i.text
            if isinstance(i, ins.CallPython):
                what = f"a package of a program that calls Python: {i.label}"
                reason = f", which {why[i.label].reason}" if i.label in why else ""
                raise Unsupported(what + reason, where=line)


def _contents(
    name: str,
    traced: Traced,
    results: tuple[Result, ...],
    made: Sequence[Portable],
    folded: Sequence[str],
    aliases: Mapping[str, str],
) -> Contents:
    weights = {weight: x.detach() for weight, x in traced.state.items()}
    weights |= {alias: weights[weight] for alias, weight in aliases.items() if weight in weights}
    locked = {*folded, *(alias for alias, weight in aliases.items() if weight in folded)}
    signature = traced.signature
    names = tuple(signature.tensors)
    _require_no_python(made[0])
    leaves = list(zip(signature.names, signature.leaves, strict=True))
    checks = tuple((signatures.named_in(c.text, names), *c.tokens) for c in traced.sizes.checks)
    plans: dict[int, bytes] = {}
    for portable in made:
        if id(portable.wrapper) not in plans:
            plans[id(portable.wrapper)] = encode(portable.wrapper)
    return Contents(
        name=name,
        inputs=(*(("bound", weight, None) for weight in traced.state), *argument_specs(traced)),
        names=names,
        outputs=signatures.result_names(signature),
        results=results,
        single=signature.single,
        weights=weights,
        constants=[c.detach() for c in made[0].constants],
        constant_devices=made[0].constant_devices,
        checks=checks,
        folded=tuple(sorted(locked)),
        variants=tuple(
            Variant(
                machine=portable.machine,
                plan=plans[id(portable.wrapper)],
                kernels=read.get("cpu"),
                cubins=read.get("cuda"),
            )
            for portable in made
            for read in [{kind: built.read() for kind, built in portable.kernels.items()}]
        ),
        python=json.dumps(signatures.dump(signature)),
        fixed=tuple((k, n, x) for k, (n, x) in enumerate(leaves) if x is not signatures.VALUE),
    )
