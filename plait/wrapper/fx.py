"""The FX target: a wrapper program as a `torch.fx.GraphModule` of public parts, for compilers out
of tree to consume.

In: a `WrapperProgram` and its `Artifacts`. Out: a module that runs by calling it under no_grad;
docs/fx.md says what its nodes mean. Memory is plain tensors that die after their last use, as in
every FX graph: an arena, a Free and a kernel's definition leave no node. `load_fx` runs the module,
or what a compiler makes of it, behind the interface of the native program.
"""

from __future__ import annotations

import ast
import contextlib
import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, assert_never

import torch
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.fx.node import has_side_effect, map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten

from plait import compat
from plait.errors import InternalError, Unsupported
from plait.ir import sizes as sz
from plait.ir.dtypes import DTYPES
from plait.ir.sizes import Atom, Expr, Size
from plait.lower.dtypes import TO_TORCH
from plait.lower.pycall import PythonCall
from plait.runtime import generated
from plait.runtime.cubin import NUMBERS
from plait.runtime.functions import FUNCTIONS
from plait.runtime.fxops import PythonFunction, python_below_autograd, triton_function
from plait.runtime.source import executed
from plait.wrapper import instructions as ins
from plait.wrapper.program import Artifacts, Loaded, promises
from plait.wrapper.walk import forks, sizes, used

aten = torch.ops.aten
GraphCompiler = Callable[[GraphModule], Callable[..., Any]]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "div": operator.floordiv, "mod": operator.mod, "min": torch.sym_min, "max": torch.sym_max,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, **FUNCTIONS,
}  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le")
_CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl", "invoke_subgraph")


def load_fx(
    program: ins.WrapperProgram, artifacts: Artifacts, compiler: GraphCompiler | None = None
) -> Loaded:
    """The program as a callable. compiler: makes a callable of the graph; None: the graph itself
    runs.

    Raises RuntimeError if a library lacks a kernel."""
    for i in program.body:
        if isinstance(i, ins.DefineKernel) and i.device == "cpu":
            generated.kernel(artifacts.libraries["cpu"], i.name)  # the file may be gone later
    module = make_fx(program, artifacts)
    return FxProgram(program, module, boxed(module) if compiler is None else compiler(module))


class FxProgram:
    """prog(*inputs) -> tuple, prog.boxed(list of inputs) -> tuple (empties the list).

    module: the graph. run: what it became; takes the inputs, in one list if it has a true attribute
    _boxed_call."""

    def __init__(
        self, program: ins.WrapperProgram, module: GraphModule, run: Callable[..., Any]
    ) -> None:
        self.module = module
        signature = promises(program)
        in_list = getattr(run, "_boxed_call", False)
        gpus = sorted({i.device for i in program.body if isinstance(i, ins.DefineKernel)} - {"cpu"})
        if len(gpus) > 1:  # Triton's operator launches on the current device
            raise Unsupported(
                f"one FX graph with kernels on {' and '.join(gpus)}",
                hint="options={'wrapper': 'native'}",
            )
        raw = _read_by_kernels(program) if gpus else []
        python = any(isinstance(i, (ins.CallPython, ins.Hook)) for i in program.body)
        streams = generated.callers_stream if forks(program) else contextlib.nullcontext
        below = python_below_autograd if python else generated.below_autograd

        def call(args: list[object]) -> tuple[object, ...]:
            generated.check_inputs(args, signature)
            device = torch.cuda.device(gpus[0]) if gpus else contextlib.nullcontext()
            with below(), device, streams():
                for k in raw:  # Triton reads memory as it is
                    args[k] = generated.without_lazy_bits(args[k])  # type: ignore[arg-type]
                if in_list:
                    return tuple(run(args))
                given = list(args)
                args.clear()
                return tuple(run(*given))

        call._boxed_call = True  # type: ignore[attr-defined]
        self._call = compat.tracing.untraced(call)

    def __call__(self, *args: object) -> tuple[object, ...]:
        return self._call(list(args))

    @property
    def boxed(self) -> Callable[[list[object]], tuple[object, ...]]:
        """The same program with its inputs in one list."""
        return self._call


def _read_by_kernels(program: ins.WrapperProgram) -> list[int]:
    """Positions of the tensors that kernels read and nothing else touches."""
    users: dict[str, list[ins.Instr]] = {}
    for i in program.body:
        for name in used(i):
            users.setdefault(name, []).append(i)
    return [
        k
        for k, given in enumerate(program.inputs)
        if isinstance(given, ins.TensorInput)
        and all(
            isinstance(i, ins.Launch) and given.name not in i.outs
            for i in users.get(given.name, ())
        )
    ]


def boxed(module: GraphModule) -> Callable[[list[object]], Any]:
    """The module's function with its inputs in one list, which it empties: an input dies after its
    last use."""
    made = module.graph.python_code("self")
    tree = ast.parse(made.src)
    (forward,) = (s for s in tree.body if isinstance(s, ast.FunctionDef))
    names = [a.arg for a in forward.args.args[1:]]
    given = max(["inputs", *names], key=len) + "_"  # another name than theirs
    forward.args.args[1:] = [ast.arg(given)]
    unpack = f"{', '.join(names)}, = {given}\n" if names else ""
    forward.body[:0] = ast.parse(f"{unpack}{given}.clear()").body
    source = ast.unparse(ast.fix_missing_locations(tree))
    run = partial(executed(source, "graph", dict(made.globals), forward.name), module)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def make_fx(program: ins.WrapperProgram, artifacts: Artifacts) -> GraphModule:
    """The graph of a program; every node has its fake value in meta['val'] where that is known."""
    return _made(program, artifacts)[0]


def fx_lines(
    program: ins.WrapperProgram, artifacts: Artifacts
) -> list[tuple[ins.Instr, list[str]]]:
    """Every instruction with the lines of the graph's code that it becomes."""
    module, ends = _made(program, artifacts)
    code = [s.strip().partition(";  ")[0] for s in module.code.splitlines()]
    lines = {"output" if s.startswith("return") else s.partition(" = ")[0]: s for s in code}
    nodes = [n for n in module.graph.nodes if n.op != "placeholder"]
    starts = [0, *ends]
    return [
        (i, [lines[n.name] for n in nodes[start:end]])
        for i, start, end in zip(program.body, starts, ends, strict=False)
    ]


def _made(program: ins.WrapperProgram, artifacts: Artifacts) -> tuple[GraphModule, list[int]]:
    """The graph, and how many nodes there were, inputs not counted, after each instruction."""
    maker, ends = _Maker(program, artifacts), []
    with maker.fakes.active():
        for i in program.inputs:
            maker.input(i)
        for instruction in program.body:
            maker.instruction(instruction)
            ends.append(len(maker.graph.nodes) - len(program.inputs))
    module = GraphModule(maker.root, maker.graph, program.name)
    compat.tracing.drop_text_with(module)
    module.graph.lint()
    return module, ends


class _Retracer(Tracer):
    """Makes the graph again that a pickled module's code is of: torch.fx itself would run what
    makes a tensor out of numbers only, and all calls would get the same one."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """The graph of root's code."""
        with _Recorded(self):
            return super().trace(root, concrete_args)


class _Recorded(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})


Arg = Any
"""What a node takes: a Node, a number, or another constant of torch.fx."""


class _Maker:
    """The graph so far. env: what tensors and symbols are; a symbol may be a plain int."""

    def __init__(self, program: ins.WrapperProgram, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.root = torch.nn.Module()
        self.graph = Graph(tracer_cls=_Retracer)
        self.fakes = compat.tracing.Fakes()
        self.env: dict[str, Arg] = {}
        self.integers: dict[object, Node] = {}  # each is computed once
        self.devices: dict[str, str] = {}  # of arenas
        self.own: set[str] = set()  # tensors that start where their memory does
        self.promised: dict[str, torch.dtype] = {}  # of results that have no fake value
        self.kernels: dict[str, ins.DefineKernel] = {}
        self.jobs = {
            job.name: job
            for kind, s in artifacts.sources.items()
            if kind != "cpu"
            for job in s.units
        }
        self.meta: dict[str, Any] = {}  # of the nodes that follow
        self.gpu = ""  # the current one, where the program has chosen one
        self.callers_gpu: Node | None = None
        atoms = [a for i in program.inputs for e in sizes(i) for a in sz.free_symbols(e)]
        atoms += [a for i in program.body for e in sizes(i) for a in sz.free_symbols(e)]
        self.atoms = {a.name: a for a in reversed(atoms)}
        self.symbols: dict[str, Any] = {}

    # ---- nodes
    def effect(
        self,
        function: Any,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg] | None = None,
        name: str | None = None,
    ) -> Node:
        """A node that calls function, whatever that gives."""
        node = self.graph.create_node("call_function", function, args, dict(kwargs or {}), name)
        node.meta.update(self.meta)
        return node

    def call(
        self,
        function: Any,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg] | None = None,
        name: str | None = None,
    ) -> Node:
        """The same with a value: what function makes of its arguments' values."""
        node = self.effect(function, args, kwargs, name)
        with contextlib.suppress(
            Exception
        ):  # a courtesy, and operators may refuse fake tensors in any way
            given = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = function(*given[0], **given[1])
        return node

    def integer(self, function: Any, *args: Arg, name: str | None = None) -> Node:
        """The node of an integer, the same wherever that is used."""
        key = (function, *args)
        found = self.integers.get(key)
        if found is None:
            found = self.integers[key] = self.call(function, args, name=name)
        return found

    def size(self, e: Size) -> Arg:
        """An expression as a node or a number."""
        return _fold(e, lambda a: self.env[a.name], self.integer)

    def sizes(self, values: Sequence[Size]) -> list[Arg]:
        return [self.size(v) for v in values]

    def symbol(self, a: Atom) -> Any:
        """The SymInt of a symbol."""
        if a.name not in self.symbols:
            self.symbols[a.name] = self.fakes.symbol(
                a.name, a.lo, a.hi, self.artifacts.hints.get(a.name)
            )
        return self.symbols[a.name]

    # ---- instructions
    def input(self, i: ins.Input) -> None:
        node = self.env[i.name] = self.graph.create_node("placeholder", i.name, name=i.name)
        node.target = node.name  # one that Python takes for a variable
        match i:
            case ins.TensorInput():
                shape, strides = (
                    [_fold(e, self.symbol, _apply) for e in t] for t in (i.shape, i.strides)
                )
                if i.dtype in TO_TORCH:
                    dtype = TO_TORCH[i.dtype]
                    node.meta["val"] = torch.empty_strided(
                        shape, strides, dtype=dtype, device=i.device
                    )
            case ins.SymbolInput():
                node.meta["val"] = self.symbol(
                    self.atoms.get(i.name) or Atom("sym", i.name, i.name)
                )
            case ins.OpaqueInput():
                pass
            case _:
                assert_never(i)

    def instruction(self, i: ins.Instr) -> None:
        env, plait = self.env, torch.ops.plait
        match i:
            case ins.Symbol():
                env[i.name] = self.source(i)
            case ins.AssertScalar():
                message = i.message.replace("\0", "\\0")
                if i.values or i.error != "RuntimeError":
                    given = (self.size(i.expr), message, self.sizes(i.values), i.error)
                    self.effect(plait.require.default, given)
                else:
                    self.effect(aten._assert_scalar.default, (self.size(i.expr), message))
            case ins.AssertSizeStride():
                self.require_layout(i)
            case ins.AssertAlignment():
                self.effect(plait.require_aligned.default, (env[i.tensor], i.tensor, i.nbytes))
            case ins.CheckFinite():
                self.effect(
                    plait.require_finite.default, (env[i.tensor], i.tensor, i.origin, i.infinities)
                )
            case ins.Arena():
                self.devices[i.name] = i.device
            case ins.Place():
                self.alloc(i, self.devices[i.arena])
            case ins.Alloc():
                self.alloc(i, i.device)
            case ins.Reuse():
                self.view(ins.View(i.name, i.old, i.dtype, i.shape, i.strides, 0))
                self.own.add(i.name)
            case ins.Free():
                pass  # torch.fx drops every value after its last use
            case ins.View():
                self.view(i)
            case ins.Constant():
                self.constant(i)
            case ins.DefineKernel():
                self.kernels[i.name] = i
            case ins.Launch():
                self.launch(i) if self.kernels[i.kernel].device == "cpu" else self.launch_on_gpu(i)
            case ins.CallExtern():
                self.extern(i)
            case ins.CallPython():
                self.python(i)
            case ins.Hook():
                self.python(i.call())
            case ins.Copy():
                self.effect(aten.copy_.default, (env[i.dst], env[i.src]))
                if i.bump:
                    self.effect(plait.bump_version.default, (env[i.dst],))
            case ins.BumpVersion():
                self.effect(plait.bump_version.default, (env[i.tensor],))
            case ins.Fill():
                self.effect(aten.fill_.Scalar, (env[i.tensor], self.operand(i.value)))
            case ins.Partition():
                self.annotate(partition="recorded" if i.recorded else f"at every call: {i.reason}")
            case ins.Note():
                self.annotate(note=i.text)
                self.meta["stack_trace"] = _stack_trace(i.text)
            case ins.Return():
                values = tuple(self.operand(o) for o in i.values)
                if self.callers_gpu is not None:
                    self.effect(torch.cuda.set_device, (self.callers_gpu,))
                self.graph.output(values)
            case _:
                assert_never(i)

    def annotate(self, **words: str) -> None:
        self.meta["custom"] = {**self.meta.get("custom", {}), **words}  # which torch.fx prints

    def source(self, i: ins.Symbol) -> Arg:
        match i.value:
            case ins.SizeOf(tensor, "offset", _):
                return self.integer(aten.sym_storage_offset.default, self.env[tensor], name=i.name)
            case ins.SizeOf(tensor, kind, dim):
                function = aten.sym_size.int if kind == "size" else aten.sym_stride.int
                return self.integer(function, self.env[tensor], dim, name=i.name)
            case ins.ItemOf(tensor):
                item = self.effect(aten.item.default, (self.env[tensor],))
                node = self.effect(torch.sym_int, (item,), name=i.name)
                node.meta["val"] = self.symbol(
                    self.atoms.get(i.name) or Atom("sym", i.name, i.name)
                )
                return node
            case int() | Expr():
                return self.size(i.value)
            case _:
                assert_never(i.value)

    def require_layout(self, i: ins.AssertSizeStride) -> None:
        dtype = TO_TORCH.get(i.dtype)
        shape, strides = self.sizes(i.shape), self.sizes(i.strides)
        args = (
            self.env[i.tensor],
            i.tensor,
            dtype,
            shape,
            strides,
            *([i.origin] if i.origin else []),
        )
        if i.copies:
            before = self.env[i.tensor]
            self.env[i.tensor] = self.effect(generated.with_layout, args)
            if isinstance(val := before.meta.get("val"), torch.Tensor):
                layout = map_arg((shape, strides), lambda n: n.meta["val"])
                self.env[i.tensor].meta["val"] = torch.empty_strided(
                    *layout, dtype=val.dtype, device=val.device
                )
        else:
            self.effect(torch.ops.plait.require_layout.default, args)
        if dtype is not None:
            self.promised[i.tensor] = dtype

    # ---- memory
    def alloc(self, i: ins.Alloc | ins.Place, device: str) -> None:
        more = {"dtype": TO_TORCH[i.dtype], "device": torch.device(device)}
        args = (self.sizes(i.shape), self.sizes(i.strides))
        self.env[i.name] = self.call(torch.empty_strided, args, more, i.name)
        self.own.add(i.name)

    def view(self, i: ins.View) -> None:
        base, have, want = self.env[i.base], self.dtype(i.base), TO_TORCH.get(i.dtype)
        layout = self.sizes(i.shape), self.sizes(i.strides)
        if have is None and want is not None:
            self.effect(aten._assert_tensor_metadata.default, (base, None, None, want))
        if have is None or want is None or have == want:
            plain = i.relative and i.offset == 0
            at = () if plain else (self.size(i.offset + (self.start(i.base) if i.relative else 0)),)
            self.env[i.name] = self.call(aten.as_strided.default, (base, *layout, *at), name=i.name)
            return
        start = self.start(i.base) if i.relative else 0
        first = i.offset + start * have.itemsize // want.itemsize
        last = sz.total((n - 1) * s for n, s in zip(i.shape, i.strides, strict=True))
        end = (first + last + 1) * sz.product(sz.smin(n, 1) for n in i.shape)  # 0 for no elements
        room = sz.ceildiv(end * want.itemsize, have.itemsize)
        flat = self.call(aten.as_strided.default, (base, [self.size(room)], [1], 0))
        typed = self.call(aten.view.dtype, (flat, want))
        self.env[i.name] = self.call(
            aten.as_strided.default, (typed, *layout, self.size(first)), name=i.name
        )

    def dtype(self, name: str) -> torch.dtype | None:
        """A tensor's dtype, as far as that is known."""
        val = self.env[name].meta.get("val")
        return val.dtype if isinstance(val, torch.Tensor) else self.promised.get(name)

    def start(self, name: str) -> Size:
        """Where a tensor starts in its storage."""
        if name in self.own:
            return 0
        symbol = f"offset of {name}"
        self.env[symbol] = self.integer(aten.sym_storage_offset.default, self.env[name])
        return sz.symbol(symbol)

    def constant(self, i: ins.Constant) -> None:
        tensor, name = self.artifacts.constants[i.index], f"constant{i.index}"
        self.root.register_buffer(name, tensor)
        node = self.env[i.name] = self.graph.create_node("get_attr", name, name=i.name)
        if tensor.layout == torch.strided:
            like = {"dtype": tensor.dtype, "device": tensor.device}
            node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), **like)  # type: ignore[arg-type]

    # ---- kernels and calls
    def launch(self, i: ins.Launch) -> None:
        names = [*dict.fromkeys(a for a in i.args if a not in i.outs), *dict.fromkeys(i.outs)]
        reads, writes = (
            [self.env[n] for n in names if (n in i.outs) is out] for out in (False, True)
        )
        order = [names.index(a) for a in i.args]
        order = [] if order == list(range(len(names))) else order
        more: dict[str, Arg] = {"work_ns": self.size(i.work_ns)}
        if not i.parallel:
            more["parallel"] = False
        if checks := self.kernels[i.kernel].checks:
            more["checks"] = [f"{c.error}: {c.message}" for c in checks]
        args = (
            str(self.artifacts.libraries["cpu"]),
            i.kernel,
            reads,
            writes,
            order,
            self.sizes(i.sizes),
        )
        self.effect(torch.ops.plait.launch.default, args, more, i.kernel)

    def launch_on_gpu(self, i: ins.Launch) -> None:
        self.set_gpu(self.kernels[i.kernel].device)
        operator_, table = compat.tracing.triton_operator()
        job = self.jobs[i.kernel]
        options: dict[str, Any] = {
            "num_warps": job.num_warps,
            "num_stages": job.num_stages,
            **NUMBERS,
        }
        if job.checks:
            options |= {"debug": True, "sanitize_overflow": False}
        values = [*(self.env[a] for a in i.args), *self.sizes(i.sizes)]
        more = {
            "kernel_idx": table.add_kernel(triton_function(job.name, job.text)),
            "constant_args_idx": table.add_constant_args(options),
            "grid": [(self.size(i.grid), 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": dict(zip(job.signature, values, strict=True)),
        }
        has_side_effect(operator_)
        self.effect(operator_, (), more, i.kernel)

    def set_gpu(self, device: str) -> None:
        """Makes a device current, which Triton's kernels go to; the end of the program puts the
        caller's back."""
        if device == self.gpu:
            return
        if self.callers_gpu is None:
            has_side_effect(torch.cuda.set_device)
            self.callers_gpu = self.effect(torch.cuda.current_device, ())
        self.effect(torch.cuda.set_device, (torch.device(device),))
        self.gpu = device

    def extern(self, i: ins.CallExtern) -> None:
        namespace, _, rest = i.op.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name)
        op = getattr(packet, overload or "default")
        args, kwargs = self.arguments(i)
        positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
        while (
            len(args) < len(positional) and positional[len(args)] in kwargs
        ):  # 'from' is no keyword for Python
            args.append(kwargs.pop(positional[len(args)]))
        lists = [isinstance(r.type, torch.ListType) for r in op._schema.returns]
        several = lists != [False]
        one = i.outs[0] if len(i.outs) == 1 and not several else None
        node = self.call(packet if keyword.iskeyword(overload) else op, tuple(args), kwargs, one)
        if several:
            nested = len(lists) > 1 and any(lists)
            self.unpack(self.call(generated.flat, (node,)) if nested else node, i.outs)
        elif one is not None:
            self.env[one] = node

    def python(self, i: ins.CallPython) -> None:
        function = self.artifacts.callables[i.index]
        args, kwargs = self.arguments(i)
        if isinstance(function, PythonCall) and str(function.op) in _CONTROL_FLOW:
            node = self.call(
                generated.settled, (self.control_flow(function, args), function.strides)
            )
        else:
            name = f"python{i.index}_{re.sub(r'[^0-9A-Za-z]+', '_', i.label)}"
            self.root.add_module(name, PythonFunction(function))
            node = self.graph.create_node("call_module", name, tuple(args), kwargs)
            node.meta.update(self.meta)
        self.unpack(node, i.outs)

    def control_flow(self, call: PythonCall, operands: Sequence[Arg]) -> Node:
        """A branch or a loop with its graphs as modules."""
        leaves = list(call.leaves)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.nn.Module):
                name = f"graph{len(list(self.root.children()))}"
                self.root.add_module(name, leaf)
                leaves[k] = self.graph.create_node("get_attr", name)
        for k, value in zip(call.holes, operands, strict=True):
            leaves[k] = self.call(aten.item.default, (value,)) if k in call.items else value
        args, kwargs = tree_unflatten(leaves, call.tree)
        return self.effect(call.op, args, kwargs)

    def arguments(self, i: ins.CallExtern | ins.CallPython) -> tuple[list[Arg], dict[str, Arg]]:
        return [self.operand(o) for o in i.args], {k: self.operand(o) for k, o in i.kwargs}

    def unpack(self, node: Node, outs: Sequence[str | None]) -> None:
        for k, name in enumerate(outs):
            if name is not None:
                self.env[name] = self.call(operator.getitem, (node, k), name=name)

    def operand(self, o: ins.Operand) -> Arg:
        match o:
            case ins.Ref(name):
                return self.env[name]
            case ins.ValueOf(name):
                return self.call(aten.item.default, (self.env[name],))
            case ins.Literal("complex", text):  # Python has no word for some
                return self.call(complex, tuple(map(float.fromhex, text.split())))
            case ins.Literal():
                return _literal(o)
            case ins.ListOf(items):
                return [self.operand(item) for item in items]
            case int() | Expr():
                return self.size(o)
            case _:
                assert_never(o)


def _apply(function: Any, *args: Any) -> Any:
    return function(*args)


def _fold(e: Size, symbol: Callable[[Atom], Any], apply: Callable[..., Any]) -> Any:
    """The value of an expression where apply(function, *values) computes and symbols have
    values."""
    if not isinstance(e, Expr):
        return e
    terms = []
    for mono, coefficient in e.terms:
        factors = [] if coefficient == 1 else [coefficient]
        for a in mono:
            if a.kind == "sym":
                factors.append(symbol(a))
                continue
            value = apply(_FUNCTIONS[a.kind], _fold(a.a, symbol, apply), _fold(a.b, symbol, apply))
            factors.append(apply(torch.sym_ite, value, 1, 0) if a.kind in _COMPARISONS else value)
        terms.append(reduce(partial(apply, operator.mul), factors))
    return reduce(partial(apply, operator.add), terms + ([e.const] if e.const else []))


def _literal(o: ins.Literal) -> Arg:
    match o.kind:
        case "none":
            return None
        case "bool":
            return o.text == "True"
        case "float":
            return float.fromhex(o.text)
        case "str":
            return o.text
        case "device":
            return torch.device(o.text)
        case "dtype":
            return TO_TORCH[DTYPES[o.text]] if o.text in DTYPES else getattr(torch, o.text)
        case "layout" | "memory_format":
            return getattr(torch, o.text)
        case _:
            raise InternalError(f"a literal of unknown kind {o.kind!r}")


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
