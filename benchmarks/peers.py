"""How each peer turns a program into a callable: one function a peer, `prepare(module, inputs) ->
call`.

What a peer loads on its first use is part of its first call; what `prepare` does before it returns
is counted too for the ahead-of-time peers and is only the wrapping by torch.compile for the others.
`floor` and `guards` compute nothing: they are what Dynamo, with and without AOTAutograd, costs
whoever stands behind it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# A program that eager would run is an error, and no time of plait's; each is compiled anew.
os.environ.setdefault("PLAIT_STRICT", "1")
os.environ.setdefault("PLAIT_WARM_START", "0")

Call = Callable[..., Any]
Prepare = Callable[[nn.Module, tuple[Tensor, ...]], Call]


@dataclass(frozen=True)
class Peer:
    """lazy: compiling happens in the first call, so the clock starts there; else it starts before
    `prepare`.

    computes: its results are results. trains: it can run a training step. python: environment it
    runs in, "" for ours.
    """

    name: str
    prepare: Prepare
    lazy: bool = True
    computes: bool = True
    trains: bool = True
    python: str = ""
    modules: tuple[str, ...] = ()  # imported before the clock starts


def renamed(module: nn.Module, name: str) -> nn.Module:
    """The same module with a `forward` that Dynamo has not seen: it keeps what it compiles by code
    object."""
    forward = type(module).forward
    code = forward.__code__.replace(co_name=f"forward_{name}")
    own = FunctionType(code, forward.__globals__, None, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    twin = copy.copy(module)
    twin.__class__ = type(type(module).__name__, (type(module),), {"forward": own})
    return twin


def eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    return module


def plait(mode: str | None = None) -> Prepare:
    return lambda module, inputs: torch.compile(module, backend="plait", mode=mode)


def plait_compile(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    import plait

    return plait.compile(module, inputs)


def plait_freeze(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    import plait

    return plait.compile(module, inputs, freeze=True)


def inductor(mode: str | None = None, **options: Any) -> Prepare:
    return lambda module, inputs: torch.compile(
        module, backend="inductor", mode=mode, options=options or None
    )


def aot_inductor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    import torch._inductor

    package = Path(tempfile.mkdtemp(dir=os.environ["TORCHINDUCTOR_CACHE_DIR"])) / "model.pt2"
    exported = torch.export.export(module, inputs)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    return torch._inductor.aoti_load_package(str(package))


def guards(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Dynamo alone: its graph is answered with ready tensors."""

    def answer(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        ready = _ready(gm, "example_value")
        return lambda *args: ready

    return torch.compile(module, backend=answer)


def floor(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Dynamo and AOTAutograd: each of its graphs is answered with ready tensors."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    def answer(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        ready = _ready(gm, "val")
        return make_boxed_func(lambda *args: ready)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        table = dict(torch._decomp.core_aten_decompositions())
        table.pop(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None)
        with torch._functorch.config.patch(cse=False):
            return aot_module_simplified(
                gm,
                example_inputs,
                fw_compiler=answer,
                decompositions=table,
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )

    return torch.compile(module, backend=backend)


def _ready(gm: torch.fx.GraphModule, key: str) -> tuple[Any, ...]:
    """Real tensors of the shapes and strides that gm returns."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    *_, output = gm.graph.nodes
    (result,) = output.args
    ready = []
    for node in result:
        value = node.meta[key] if isinstance(node, torch.fx.Node) else node
        if isinstance(value, Tensor):
            shape = [int(s) for s in value.shape]
            stride = [int(s) for s in value.stride()]
            with (
                unset_fake_temporarily()
            ):  # the compiler is called under a mode that makes fake tensors
                value = torch.empty_strided(
                    shape, stride, dtype=value.dtype, device=value.device
                ).zero_()
        ready.append(value)
    return tuple(ready)


def onnxruntime(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    import onnxruntime as ort

    path = Path(tempfile.mkdtemp()) / "model.onnx"
    torch.onnx.export(module, inputs, str(path), dynamo=True, verbose=False)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def call(*args: Any) -> Any:
        return session.run(None, dict(zip(names, args, strict=True)))

    return call


def openvino(module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    import openvino as ov

    # Without the hint it computes in bfloat16 where the CPU can, and would run another race.
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    model = ov.convert_model(module, example_input=inputs, input=[tuple(x.shape) for x in inputs])
    compiled = ov.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()

    def call(*args: Any) -> Any:
        return request.infer(list(args), share_inputs=True, share_outputs=True)[0]

    return call


PLAIT = ("plait.capture.backend", "plait.compile")
INDUCTOR = ("torch._dynamo", "torch.export", "torch._inductor.compile_fx")
PEERS = {
    peer.name: peer
    for peer in (
        Peer("eager", eager),
        Peer("plait", plait(), modules=PLAIT),
        Peer(
            "plait.compile",
            plait_compile,
            lazy=False,
            trains=False,
            modules=("plait.capture.export",),
        ),
        Peer(
            "plait-freeze",
            plait_freeze,
            lazy=False,
            trains=False,
            modules=("plait.capture.export",),
        ),
        Peer("guards", guards, computes=False, trains=False, modules=("torch._dynamo",)),
        Peer("floor", floor, computes=False, modules=("torch._functorch.aot_autograd",)),
        Peer("inductor", inductor(), modules=INDUCTOR),
        Peer("inductor-cpp", inductor(cpp_wrapper=True), modules=INDUCTOR),
        Peer("inductor-freeze", inductor(freezing=True), trains=False, modules=INDUCTOR),
        Peer("aotinductor", aot_inductor, lazy=False, trains=False, modules=INDUCTOR),
        Peer(
            "onnxruntime",
            onnxruntime,
            lazy=False,
            trains=False,
            python=".venv-ort",
            modules=("numpy", "onnxruntime"),
        ),
        Peer(
            "openvino",
            openvino,
            lazy=False,
            trains=False,
            python=".venv-openvino",
            modules=("numpy", "openvino"),
        ),
    )
}

GPU_MODULES = (*INDUCTOR, "triton")
GPU_PEERS = {
    peer.name: peer
    for peer in (
        Peer("eager", eager),
        Peer("plait", plait(), modules=PLAIT),
        Peer(
            "plait.compile",
            plait_compile,
            lazy=False,
            trains=False,
            modules=("plait.capture.export",),
        ),
        Peer("plait-graphs", plait("reduce-overhead"), modules=PLAIT),
        Peer("guards", guards, computes=False, trains=False, modules=("torch._dynamo",)),
        Peer("inductor", inductor(), modules=GPU_MODULES),
        Peer("inductor-cpp", inductor(cpp_wrapper=True), modules=GPU_MODULES),
        Peer("inductor-graphs", inductor("reduce-overhead"), modules=GPU_MODULES),
    )
}
"""On a GPU; "-graphs" is mode="reduce-overhead"."""
