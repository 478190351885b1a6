"""Instructions as nodes of a `torch.fx` graph; docs/fx.md says what the nodes mean.

In: an `FxGraph` and the next input or instruction of a program. Out: the graph with its nodes.
"""

from __future__ import annotations

import copy
import keyword
import operator
import re
from typing import Any, assert_never

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect, map_arg

from plait import compat
from plait.devices import facts_of
from plait.ir.calls import unpack_grid
from plait.ir.expr import Atom, Expr, Size, ceildiv, product, smin, symbol, total
from plait.lower.dtypes import TO_TORCH
from plait.runtime import generated
from plait.runtime.cubin import NUMBERS
from plait.runtime.fxops import PythonFunction, triton_function
from plait.wrapper import instructions as ins
from plait.wrapper.fxgraph import Arg, FxGraph, aten, value_of
from plait.wrapper.operators import known_operator, lists_of

_hop = torch.ops.higher_order


def add_input(g: FxGraph, i: ins.Input) -> None:
    """Adds the placeholder of an input."""
    node = g.env[i.name] = g.graph.create_node("placeholder", i.name, name=i.name)
    node.target = node.name  # one that Python takes for a variable
    match i:
        case ins.TensorInput():
            shape, strides = (
                [value_of(e, g.symbol, _apply) for e in t] for t in (i.shape, i.strides)
            )
            if i.dtype in TO_TORCH:
                dtype = TO_TORCH[i.dtype]
                node.meta["val"] = torch.empty_strided(shape, strides, dtype=dtype, device=i.device)
        case ins.SymbolInput():
            node.meta["val"] = g.symbol(g.atoms.get(i.name) or Atom("sym", i.name, i.name))
        case ins.OpaqueInput():
            pass
        case _:
            assert_never(i)


def add_instruction(g: FxGraph, i: ins.Instr) -> None:
    """Adds the nodes of one instruction."""
    env, plait = g.env, torch.ops.plait
    match i:
        case ins.Symbol():
            env[i.name] = _source(g, i)
        case ins.AssertScalar():
            _require(g, i)
        case ins.AssertSizeStride():
            _require_layout(g, i)
        case ins.AssertAlignment():
            g.effect(plait.require_aligned.default, (env[i.tensor], i.tensor, i.nbytes))
        case ins.CheckFinite():
            g.effect(
                plait.require_finite.default, (env[i.tensor], i.tensor, i.origin, i.infinities)
            )
        case ins.Arena():
            g.devices[i.name] = i.device
        case ins.Place():
            _alloc(g, i, g.devices[i.arena])
        case ins.Alloc():
            _alloc(g, i, i.device)
        case ins.Reuse():
            _view(g, ins.View(i.name, i.old, i.dtype, i.shape, i.strides, 0))
            g.own.add(i.name)
        case ins.Free():
            pass  # torch.fx drops every value after its last use
        case ins.View():
            _view(g, i)
        case ins.Constant():
            _constant(g, i)
        case ins.DefineKernel():
            g.kernels[i.name] = i
        case ins.Launch():
            _launch(g, i) if facts_of(g.kernels[i.kernel].device).is_host else _launch_on_gpu(g, i)
        case ins.CallExtern():
            _call_extern(g, i)
        case ins.CallPython():
            _call_python(g, i)
        case ins.CallPrograms():
            _call_programs(g, i)
        case ins.Hook():
            _call_python(g, i.call())
        case ins.Copy():
            g.effect(aten.copy_.default, (env[i.dst], env[i.src]))
            if i.bump:
                g.effect(plait.bump_version.default, (env[i.dst],))
        case ins.BumpVersion():
            g.effect(plait.bump_version.default, (env[i.tensor],))
        case ins.Fill():
            g.effect(aten.fill_.Scalar, (env[i.tensor], g.operand(i.value)))
        case ins.Partition():
            g.annotate(partition="recorded" if i.recorded else f"at every call: {i.reason}")
        case ins.Note():
            g.annotate(note=i.text)
            g.meta["stack_trace"] = _stack_trace(i.text)
        case ins.Return():
            _return(g, i)
        case _:
            assert_never(i)


def _source(g: FxGraph, i: ins.Symbol) -> Arg:
    match i.value:
        case ins.SizeOf(tensor, "offset", _):
            return g.integer(aten.sym_storage_offset.default, g.env[tensor], name=i.name)
        case ins.SizeOf(tensor, kind, dim):
            function = aten.sym_size.int if kind == "size" else aten.sym_stride.int
            return g.integer(function, g.env[tensor], dim, name=i.name)
        case ins.ItemOf(tensor):
            item = g.effect(aten.item.default, (g.env[tensor],))
            node = g.effect(torch.sym_int, (item,), name=i.name)
            node.meta["val"] = g.symbol(g.atoms.get(i.name) or Atom("sym", i.name, i.name))
            return node
        case int() | Expr():
            return g.size(i.value)
        case _:
            assert_never(i.value)


def _return(g: FxGraph, i: ins.Return) -> None:
    values = tuple(g.operand(o) for o in i.values)
    if g.callers_gpu is not None:
        g.effect(torch.cuda.set_device, (g.callers_gpu,))
    g.graph.output(values)


def _require(g: FxGraph, i: ins.AssertScalar) -> None:
    message = i.message.replace("\0", "\\0")
    if i.values or i.error != "RuntimeError":
        given = (g.size(i.expr), message, g.sizes(i.values), i.error)
        g.effect(torch.ops.plait.require.default, given)
    else:
        g.effect(aten._assert_scalar.default, (g.size(i.expr), message))


def _require_layout(g: FxGraph, i: ins.AssertSizeStride) -> None:
    dtype = TO_TORCH.get(i.dtype)
    shape, strides = g.sizes(i.shape), g.sizes(i.strides)
    args = (g.env[i.tensor], i.tensor, dtype, shape, strides, *([i.origin] if i.origin else []))
    if i.copies:
        before = g.env[i.tensor]
        g.env[i.tensor] = g.effect(generated.with_layout, args)
        if isinstance(val := before.meta.get("val"), torch.Tensor):
            layout = map_arg((shape, strides), lambda n: n.meta["val"])
            g.env[i.tensor].meta["val"] = torch.empty_strided(
                *layout, dtype=val.dtype, device=val.device
            )
    else:
        g.effect(torch.ops.plait.require_layout.default, args)
    if dtype is not None:
        g.promised[i.tensor] = dtype


def _alloc(g: FxGraph, i: ins.Alloc | ins.Place, device: str) -> None:
    more = {"dtype": TO_TORCH[i.dtype], "device": torch.device(device)}
    args = (g.sizes(i.shape), g.sizes(i.strides))
    g.env[i.name] = g.call(torch.empty_strided, args, more, i.name)
    g.own.add(i.name)


def _view(g: FxGraph, i: ins.View) -> None:
    base, have, want = g.env[i.base], _dtype(g, i.base), TO_TORCH.get(i.dtype)
    layout = g.sizes(i.shape), g.sizes(i.strides)
    if have is None and want is not None:
        g.effect(aten._assert_tensor_metadata.default, (base, None, None, want))
    if have is None or want is None or have == want:
        plain = i.relative and i.offset == 0
        at = () if plain else (g.size(i.offset + (_start(g, i.base) if i.relative else 0)),)
        g.env[i.name] = g.call(aten.as_strided.default, (base, *layout, *at), name=i.name)
        return
    start = _start(g, i.base) if i.relative else 0
    first = i.offset + start * have.itemsize // want.itemsize
    last = total((n - 1) * s for n, s in zip(i.shape, i.strides, strict=True))
    end = (first + last + 1) * product(smin(n, 1) for n in i.shape)  # 0 for no elements
    room = ceildiv(end * want.itemsize, have.itemsize)
    flat = g.call(aten.as_strided.default, (base, [g.size(room)], [1], 0))
    typed = g.call(aten.view.dtype, (flat, want))
    g.env[i.name] = g.call(aten.as_strided.default, (typed, *layout, g.size(first)), name=i.name)


def _dtype(g: FxGraph, name: str) -> torch.dtype | None:
    """A tensor's dtype, as far as that is known."""
    val = g.env[name].meta.get("val")
    return val.dtype if isinstance(val, torch.Tensor) else g.promised.get(name)


def _start(g: FxGraph, name: str) -> Size:
    """Where a tensor starts in its storage."""
    if name in g.own:
        return 0
    variable = f"offset of {name}"
    g.env[variable] = g.integer(aten.sym_storage_offset.default, g.env[name])
    return symbol(variable)


def _constant(g: FxGraph, i: ins.Constant) -> None:
    tensor, name = g.artifacts.constants[i.index], f"constant{i.index}"
    g.root.register_buffer(name, tensor)
    node = g.env[i.name] = g.graph.create_node("get_attr", name, name=i.name)
    if tensor.layout == torch.strided:
        like = {"dtype": tensor.dtype, "device": tensor.device}
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), **like)  # type: ignore[arg-type]


def _launch(g: FxGraph, i: ins.Launch) -> None:
    names = [*dict.fromkeys(a for a in i.args if a not in i.outs), *dict.fromkeys(i.outs)]
    reads, writes = ([g.env[n] for n in names if (n in i.outs) is out] for out in (False, True))
    order = [names.index(a) for a in i.args]
    order = [] if order == list(range(len(names))) else order
    more: dict[str, Arg] = {"work_ns": g.size(i.work_ns)}
    if not i.parallel:
        more["parallel"] = False
    if checks := g.kernels[i.kernel].checks:
        more["checks"] = [f"{c.error}: {c.message}" for c in checks]
    args = (str(g.artifacts.libraries["cpu"]), i.kernel, reads, writes, order, g.sizes(i.sizes))
    g.effect(torch.ops.plait.launch.default, args, more, i.kernel)


def _launch_on_gpu(g: FxGraph, i: ins.Launch) -> None:
    _set_gpu(g, g.kernels[i.kernel].device)
    operator_, table = compat.tracing.triton_operator()
    job = g.jobs[i.kernel]
    options: dict[str, Any] = {"num_warps": job.num_warps, "num_stages": job.num_stages, **NUMBERS}
    if job.checks:
        options |= {"debug": True, "sanitize_overflow": False}
    options |= dict(job.options)
    values = [*(g.env[a] for a in i.args), *g.sizes(i.sizes)]
    more = {
        "kernel_idx": table.add_kernel(triton_function(job.name, job.text)),
        "constant_args_idx": table.add_constant_args(options),
        "grid": [tuple(g.sizes(unpack_grid(i.grid)))],
        "tma_descriptor_metadata": {},
        "kwargs": dict(zip(job.signature, values, strict=True)),
    }
    has_side_effect(operator_)
    g.effect(operator_, (), more, i.kernel)


def _set_gpu(g: FxGraph, device: str) -> None:
    """Makes a device current, which Triton's kernels go to; the end of the program puts the
    caller's back."""
    if device == g.gpu:
        return
    if g.callers_gpu is None:
        has_side_effect(torch.cuda.set_device)
        g.callers_gpu = g.effect(torch.cuda.current_device, ())
    g.effect(torch.cuda.set_device, (torch.device(device),))
    g.gpu = device


def _call_extern(g: FxGraph, i: ins.CallExtern) -> None:
    op = known_operator(i.op)
    args, kwargs = g.arguments(i)
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    # 'from' is no keyword for Python.
    while len(args) < len(positional) and positional[len(args)] in kwargs:
        args.append(kwargs.pop(positional[len(args)]))
    lists = lists_of(op)
    several = lists != [False]
    one = i.outs[0] if len(i.outs) == 1 and not several else None
    function = op.overloadpacket if keyword.iskeyword(op._overloadname) else op
    node = g.call(function, tuple(args), kwargs, one)
    if several:
        nested = len(lists) > 1 and any(lists)
        g.unpack(g.call(generated.flat, (node,)) if nested else node, i.outs)
    elif one is not None:
        g.env[one] = node


def _call_python(g: FxGraph, i: ins.CallPython) -> None:
    args, kwargs = g.arguments(i)
    name = f"python{i.index}_{re.sub(r'[^0-9A-Za-z]+', '_', i.label)}"
    g.root.add_module(name, PythonFunction(g.artifacts.callables[i.index]))
    node = g.graph.create_node("call_module", name, tuple(args), kwargs)
    node.meta.update(g.meta)
    g.unpack(node, i.outs)


def _call_programs(g: FxGraph, i: ins.CallPrograms) -> None:
    """A higher-order operator on the graphs of subprograms, which are modules."""
    given = tuple(g.operand(o) for o in i.args)
    graphs = [g.graph.create_node("get_attr", f"program{k}") for k in i.programs]
    start = int(i.kind == "cond")
    carried, scanned = start + i.carried, start + i.carried + i.scanned
    state, slices, rest = given[start:carried], given[carried:scanned], given[scanned:]
    match i.kind:
        case "call":
            node = g.effect(_hop.invoke_subgraph, (*graphs, graphs[0].target, *rest))
        case "cond":
            node = g.effect(_hop.cond, (given[0], *graphs, rest))
        case "loop" | "rounds":
            holds = _condition(g, i.programs[0])
            op = _hop.while_loop if i.kind == "loop" else _hop.while_loop_stack_output
            node = g.effect(op, (holds, graphs[1], state, rest))
        case _ if state:
            node = g.effect(_hop.scan, (*graphs, list(state), list(slices), rest))
        case _:
            node = g.effect(_hop.map_impl, (*graphs, list(slices), list(rest)))
    g.unpack(node, i.outs)


def _condition(g: FxGraph, program: int) -> Node:
    """The module of a subprogram that returns its one result as a bool, in no tuple."""
    name = f"condition{program}"
    if not hasattr(g.root, name):
        module = copy.deepcopy(g.root.get_submodule(f"program{program}"))
        assert isinstance(module, GraphModule), module
        (end,) = module.graph.find_nodes(op="output")
        ((value,),) = end.args
        if not isinstance(value, Node):
            value = bool(value)
        elif not isinstance(value.meta.get("val"), torch.Tensor):
            with module.graph.inserting_before(end):
                value = module.graph.call_function(operator.ne, (value, 0))
        end.args = (value,)
        module.recompile()
        g.root.add_module(name, module)
    return g.graph.create_node("get_attr", name)


def _apply(function: Any, *args: Any) -> Any:
    return function(*args)


def _stack_trace(note: str) -> str | None:
    """Source lines of a note ('model.py:31 aten.relu; ...') as torch.fx writes them."""
    places = [
        m for part in note.split("; ") if (m := re.fullmatch(r"(\S+\.\w+):(\d+):? (.+)", part))
    ]
    return (
        "\n".join(
            f'File "{m[1]}", line {m[2]}, in {m[3]}\n    {" ".join(note.split())}' for m in places
        )
        or None
    )
