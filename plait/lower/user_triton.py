"""Triton kernels of the user: `triton_kernel_wrapper_functional` becomes a launch like those of
our own kernels, with the user's functions called by one of ours.

In: the operator's arguments, of which kernels and constants are numbers in tables of the process.
Out: an `Extern` with a `UserKernel`. What the kernel writes is written in place where nobody needs
the old value, into new memory where there is no old value, else into a copy. Where that cannot be
(a kernel for the CPU, text that refers to what no text can say), it is called as Python.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx

from plait import compat
from plait.compat import user_kernels
from plait.devices import facts_of
from plait.errors import Unsupported
from plait.ir.calls import MAX_GRID, Extern, TensorArg, UserKernel, Variant, pack_grid
from plait.ir.expr import Expr, Size, bounds, compare, contiguous_strides, numel
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.float_nodes import to_word
from plait.lower.inplace import may_write_part, place_to_write
from plait.lower.memory import lay_out, tensor_arg
from plait.lower.operands import fake_strides
from plait.lower.pycall import number_of, rule_or_python
from plait.lower.symbols import to_sizes
from plait.lower.user_source import SourceText

hop = torch.ops.higher_order
aten = torch.ops.aten

_EMPTY = frozenset((
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
))  # fmt: skip
_SEEN = frozenset((
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.alias.default, aten.detach.default,
))  # fmt: skip
"""Operators whose result is their argument seen in another way."""

_POINTERS: dict[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.bool: "i1", torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32",
    torch.uint64: "u64", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
_TYPES = {
    "i1": "int1", "u1": "int1", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "fp16": "float16",
    "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
}  # fmt: skip
"""Types as signatures have them -> as the language has them."""
_DEFAULTS = (("num_warps", 4), ("num_stages", 3), ("num_ctas", 1), ("maxnreg", None))


@lower(hop.triton_kernel_wrapper_functional, any_dtype=True)
def user_kernel(ctx: Lowering, **given: Any) -> dict[str, Any]:
    """A launch, or a call of Python."""
    op = hop.triton_kernel_wrapper_functional
    made: dict[str, Any]
    made = rule_or_python(ctx, op, partial(launch, ctx, **given), (), given, fresh=True)
    same = user_kernels.given_twice(given["constant_args_idx"])
    tensors = [k for k, v in given["kwargs"].items() if isinstance(v, View)]
    nodes: Any = ctx.node.kwargs["kwargs"]
    call = ctx.ops[-1]
    by_python = isinstance(call, Extern) and call.callable_index >= 0
    if by_python and shared_writes(same, nodes, tensors, given["tensors_to_clone"]):
        raise Unsupported("a Triton kernel as Python that writes one of two equal arguments")
    return made


@lower(hop.triton_kernel_wrapper_mutation, any_dtype=True)
def user_kernel_in_place(ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
    # AOTAutograd makes the functional operator of it. Our operands may be copies, which nobody
    # would read.
    raise Unsupported(
        "a Triton kernel that writes to its arguments, in a graph that is not functional"
    )


def launch(
    ctx: Lowering,
    *,
    kernel_idx: int,
    constant_args_idx: int,
    grid: Sequence[Sequence[Size]],
    tma_descriptor_metadata: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    tensors_to_clone: Sequence[str],
) -> dict[str, View]:
    """Records a launch. Raises NoRule, and what recording raises."""
    kernel, constants = compat.tracing.triton_kernel(kernel_idx, constant_args_idx)
    if not ctx.cfg.kernels:
        raise NoRule("there are no kernels here")
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, View)}
    devices = {ctx.buffers[v.buf].device for v in tensors.values()}
    if len(devices) != 1 or facts_of(device := devices.pop()).is_host:
        raise NoRule("its tensors are not on one GPU")
    function = kernel.fn if hasattr(kernel, "configs") else kernel
    configs = kernel.configs if hasattr(kernel, "configs") else (None,)
    if not hasattr(function, "params") or len(configs) != len(grid):
        raise NoRule("a kernel in a wrapper of an unknown kind")
    o = _Operands(ctx, device, user_kernels.given_twice(constant_args_idx))
    outs = o.take(tensors, tensors_to_clone, tma_descriptor_metadata)
    for k, facts in tma_descriptor_metadata.items():
        o.pointers[k] = _descriptor(o, k, facts)
    common = {**constants, **{k: v for k, v in kwargs.items() if k not in tensors}}
    text = SourceText()
    variants = dict.fromkeys(
        _variant(o, text, function, config, common, sizes)
        for config, sizes in zip(configs, grid, strict=True)
    )
    made = UserKernel(
        ".".join((f"plait_{function.__name__}", *ctx.name.split(".")[1:], ctx.node.name)),
        text.text(),
        (*o.types, *o.new_types),
        tuple(variants),
    )
    made = _not_refused(ctx, made)
    for node, buf in o.moved.items():
        seen = ctx.env[node]
        assert isinstance(seen, View), f"{node} is no tensor"
        ctx.env[node] = replace(seen, buf=buf)
    ctx.ops.append(
        Extern(
            tuple(o.outs), f"triton::{function.__name__}", (*o.tensors, *o.sizes),
            mutates=tuple(o.written), may_keep=False, kernel=made, fallback=False,
            origin=ctx.origin,
        )
    )  # fmt: skip
    return outs


@dataclass
class _Operands:
    """What a launch is given, as far as it is known.

    same: arguments that are the memory of others.
    tensors, types: of which pointers.
    outs, new_types: results in new memory, whose pointers come next.
    pointers: the name of each tensor argument in the call.
    written: buffers that are written in place.
    floats: the text of each argument that is a float which a call tells.
    sizes: integers.
    moved: nodes whose memory is new, since this launch is the first to write it.
    """

    ctx: Lowering
    device: str
    same: Mapping[str, str]
    tensors: list[TensorArg] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    outs: list[str] = field(default_factory=list)
    new_types: list[str] = field(default_factory=list)
    pointers: dict[str, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    sizes: list[Size] = field(default_factory=list)
    moved: dict[torch.fx.Node, str] = field(default_factory=dict)

    def take(
        self, tensors: Mapping[str, View], written: Sequence[str], described: Container[str]
    ) -> dict[str, View]:
        """Takes all tensor arguments. Gives what those that are written are afterwards.
        described: those that are tensor descriptors."""
        nodes: Any = self.ctx.node.kwargs["kwargs"]
        made: dict[str, View] = {}
        begun: dict[str, TensorArg] = {}
        shared = shared_writes(self.same, nodes, tensors, written)
        new = [k for k in tensors if k in written and k not in shared and _is_new(nodes[k])]
        for k, x in tensors.items():
            if k in new or k in shared:
                continue
            strides = fake_strides(nodes[k])
            if strides is None:
                raise NoRule("a tensor without strides")
            if k in written:
                others = tuple(v for n, v in tensors.items() if shared.get(n) != k)
                part = may_write_part(self.ctx, x, nodes[k], k, others)
                if part and lay_out(self.ctx, x, strides):
                    self.ctx.fix_layout(x.buf)
                else:
                    part, x = False, place_to_write(self.ctx, x, strides, others)
                if part and k not in described and (buf := self._new_memory(nodes[k], x)):
                    made[k] = replace(x, buf=buf)
                    begun[k] = tensor_arg(self.ctx, made[k], strides)
                    continue
                made[k] = x
                self.written.append(x.buf)
            self.pointers[k] = f"p{len(self.tensors)}"
            self.tensors.append(tensor_arg(self.ctx, x, strides))
            self.types.append(_pointer(nodes[k]))
        self._take_floats()
        for k in new:
            val = nodes[k].meta["val"]
            shape = to_sizes(val.shape)
            buf = self.ctx.new_buffer(
                tensors[k].dtype, shape, fake_strides(nodes[k]), True, self.device
            )
            made[k] = self.ctx.whole(buf)
            self.pointers[k] = f"p{len(self.tensors) + len(self.outs)}"
            self.outs.append(buf)
            self.new_types.append(_pointer(nodes[k]))
        for k, arg in begun.items():
            at = f"p{len(self.tensors) + len(self.outs)}"
            self.pointers[k] = at if arg.offset == 0 else f"({at} + {self._offset(arg.offset)})"
            self.outs.append(arg.buf)
            self.new_types.append(_pointer(nodes[k]))
        for k, first in shared.items():
            self.pointers[k] = self.pointers[first]
            if k in written:
                made[k] = made[first]
        return made

    def _new_memory(self, part: torch.fx.Node, x: View) -> str:
        """New memory in place of that of a tensor whose part x is, if nobody but this launch knows
        of the tensor and nobody has written to it; else "". What fills it is dead from then on."""
        base: Any = part.args[0]
        if len(part.users) != 1 or len(base.users) != 2:  # this launch; what puts the part back
            return ""
        nodes = [part, base]
        while base.target in _SEEN and len(base.args[0].users) == 1:
            (base, *_) = base.args
            nodes.append(base)
        if base.target not in _EMPTY:
            return ""
        b = self.ctx.buffers[x.buf]
        made = self.ctx.new_buffer(b.dtype, b.shape, b.strides, True, b.device)
        self.moved.update(dict.fromkeys(nodes, made))
        return made

    def _offset(self, e: Size) -> str:
        """An offset of elements, as text."""
        return str(e) if isinstance(e, int) else self.size(e, "i64")

    def _take_floats(self) -> None:
        """Floats that a call tells: by their words, or in memory if they are values of tensors."""
        ctx = self.ctx
        given: Any = ctx.node.kwargs["kwargs"]
        for k, node in given.items():
            value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
            if not isinstance(value, torch.SymFloat):
                continue
            e = value.node.expr
            if not any(s.name in ctx.floats for s in e.free_symbols):
                word = to_word(e, value.node.shape_env)
                self.floats[k] = f"{self._integer(word)}.to(tl.float64, bitcast=True)"
                continue
            made = number_of(ctx, value)
            if ctx.buffers[made.buf].device != self.device:
                raise NoRule(f"the argument {k} is a number on another device")
            self.floats[k] = f"tl.load(p{len(self.tensors)})"
            self.tensors.append(tensor_arg(ctx, made))
            self.types.append("*fp64")

    def _integer(self, e: Size) -> str:
        """The parameter that is this integer."""
        if e not in self.sizes:
            self.sizes.append(e)
        return f"s{self.sizes.index(e)}"

    def size(self, e: Expr, kind: str, name: str = "") -> str:
        """An integer that a call tells, as Triton's own launcher would hand it over. name: of the
        argument: what it was when the program was traced decides whether it has 32 bits, which
        every call checks; kernels may not compile for 64."""
        low, high = bounds(e)
        node: Any = self.ctx.node.kwargs["kwargs"]
        example = node[name].meta["val"] if name in node else 2
        if not kind and isinstance(example, torch.SymBool):
            kind = "u1"
        if not kind:
            most = (1 << 31) - 1
            example = compat.tracing.hint_of(example)
            kind = "i32" if -most <= example <= most else "i64"
            said = "an argument of a Triton kernel that was traced with 32 bits is {}"
            if kind == "i32" and high > most:
                self.ctx.assert_true(compare("le", e, most), said, (e,))
            if kind == "i32" and low < -most:
                self.ctx.assert_true(compare("le", -most, e), said, (e,))
        text = f"{self._integer(e)}.to(tl.{_TYPES[kind]})"
        return f"tl.multiple_of({text}, 16)" if e % 16 == 0 else text


def shared_writes(
    same: Mapping[str, str],
    nodes: Mapping[str, Any],
    tensors: Iterable[str],
    written: Sequence[str],
) -> dict[str, str]:
    """The arguments that are the memory of one that the kernel writes, and which. same: those that
    are the memory of another one. Raises Unsupported for one that sees it in another way."""
    found: dict[str, str] = {}
    firsts: dict[str, list[str]] = {}
    for k in tensors:
        firsts.setdefault(same.get(k, k), []).append(k)
    for names in firsts.values():
        first = next((k for k in names if k in written), None)
        for k in names:
            if first is None or k == first:
                continue
            other = tuple(nodes[k].meta["val"].shape) != tuple(nodes[first].meta["val"].shape)
            if not _alike(nodes[k], nodes[first]) or (other and k in written):
                raise Unsupported("a Triton kernel that writes a part of another of its arguments")
            found[k] = first
    return found


def _alike(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Whether the elements of two nodes in one memory lie alike: then both are the same to a
    kernel."""
    shapes = [to_sizes(n.meta["val"].shape) for n in (a, b)]
    rows = all(
        fake_strides(n) == contiguous_strides(shape)
        for n, shape in zip((a, b), shapes, strict=True)
    )
    as_many = _seen(a) is _seen(b) or numel(shapes[0]) == numel(shapes[1])
    return a is b or (rows and as_many)


def _descriptor(o: _Operands, name: str, facts: Sequence[Any]) -> str:
    """A tensor descriptor that the user's program makes on the host, made on the device. facts:
    which kind it is, and the shape of its blocks."""
    if facts[0] != "stable":
        raise NoRule("a tensor descriptor of a kind that Triton no longer has")
    at = int(o.pointers[name][1:])
    if at >= len(o.tensors):
        b = o.ctx.buffers[o.outs[at - len(o.tensors)]]
        shape, strides = b.shape, b.strides
    else:
        shape, strides = o.tensors[at].shape, o.tensors[at].strides
    if strides[-1] != 1:
        raise NoRule("a tensor descriptor of elements that are not side by side")
    texts = [
        ", ".join(str(e) if isinstance(e, int) else o.size(e, kind) for e in values)
        for values, kind in ((shape, "i32"), (strides, "i64"), (facts[1][0], ""))
    ]
    given = ", ".join(f"[{text}]" for text in texts)
    return f"tl.make_tensor_descriptor(p{at}, {given})"


def _variant(
    o: _Operands,
    text: SourceText,
    function: Any,
    config: Any,
    given: Mapping[str, Any],
    grid: Sequence[Size],
) -> Variant:
    """One configuration: the call of the user's function, and how it is compiled and launched."""
    options = {k: getattr(config, k, None) for k, _ in _DEFAULTS} if config is not None else {}
    known = {**given, **(config.kwargs if config is not None else {})}
    if getattr(config, "ir_override", None) or getattr(config, "pre_hook", None):
        raise NoRule("a configuration with a hook or with code of its own")
    values = []
    for p in function.params:
        if p.name in o.pointers:
            node: Any = o.ctx.node.kwargs["kwargs"]
            if p.annotation_type.replace("*k", "*") not in ("", _pointer(node[p.name])):
                raise NoRule(f"the tensor {p.name} as {p.annotation_type}")
            values.append(o.pointers[p.name])
        elif p.name in known:
            values.append(_argument(o, text, p, known[p.name]))
        elif options.get(p.name) is not None:
            values.append(_argument(o, text, p, options[p.name]))
        elif p.has_default:
            values.append(_argument(o, text, p, p.default))
        else:
            raise NoRule(f"the argument {p.name} is missing")
    names = {p.name for p in function.params}
    if getattr(function, "debug", False):
        options["debug"] = True
    options |= {k: v for k, v in known.items() if k not in names}
    for k, default in _DEFAULTS:
        options[k] = default if options.get(k) is None else options[k]
    if any(not isinstance(v, (bool, int, str, type(None))) for v in options.values()):
        raise NoRule("an option of the compiler of an unusual kind")
    call = f"{text.function(function)}({', '.join(values)})"
    return Variant(call, tuple(sorted(options.items())), _grid(o.ctx, grid))


def _argument(o: _Operands, text: SourceText, p: Any, value: Any) -> str:
    """An argument that is no tensor, as Triton's launcher would specialise the kernel for it."""
    if value is None:
        return "None"
    if p.is_constexpr:
        if isinstance(value, (Expr, View, torch.SymFloat)):
            raise NoRule(f"the constant {p.name} varies")
        return text.constant(value)
    kind: str = p.annotation_type
    if kind and kind not in _TYPES:
        raise NoRule(f"the argument {p.name} of type {kind}")
    if p.name in o.floats:
        return f"{o.floats[p.name]}.to(tl.{_TYPES[kind or 'fp32']})"
    if isinstance(value, Expr):
        return o.size(value, kind, p.name)
    if isinstance(value, bool):
        return f"tl.full((), {value}, tl.{_TYPES[kind or 'u1']})"
    if isinstance(value, int):
        if value == 1 and not p.do_not_specialize:
            return "1"
        return f"tl.full((), {value}, tl.{_TYPES[kind or _integer(value)]})"
    if isinstance(value, float):
        return f"tl.full((), {text.constant(value)}, tl.{_TYPES[kind or 'fp32']})"
    return text.constant(value)


def _not_refused(ctx: Lowering, kernel: UserKernel) -> UserKernel:
    """The kernel without the variants that Triton has refused."""
    reasons = {v: ctx.tables.refused.get((kernel.text, v)) for v in kernel.variants}
    left = tuple(v for v, reason in reasons.items() if reason is None)
    if not left:
        raise NoRule(next(iter(reasons.values())) or "no configuration is left of it")
    return replace(kernel, variants=left)


def _integer(value: int) -> str:
    """The type that Triton's launcher gives a number."""
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"


def _grid(ctx: Lowering, grid: Sequence[Size]) -> Size:
    """A grid as one word; what does not fit one fails, as it does in the driver but for the last
    dimension."""
    x, y, z = (*grid, 1, 1)[:3]
    for n, most in zip((x, y, z), MAX_GRID, strict=True):
        if isinstance(n, int):
            if n > most:
                raise NoRule(f"a grid of {n} programs along a dimension")
        elif bounds(n)[1] > most and (y, z) != (1, 1):
            said = f"a grid of {{}} programs along a dimension is more than {most}"
            ctx.assert_true(compare("le", n, most), said, (n,))
    return pack_grid(x, y, z)


def _seen(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose elements, all of them, a node shows in another way."""
    while node.target in _SEEN:
        (node, *_) = node.args  # type: ignore[assignment]
    return node


def _is_new(node: torch.fx.Node) -> bool:
    """Whether a node is memory that nobody has written to."""
    return _seen(node).target in _EMPTY


def _pointer(node: torch.fx.Node) -> str:
    dtype = node.meta["val"].dtype
    if dtype not in _POINTERS:
        raise NoRule(f"a tensor of {dtype}")
    return f"*{_POINTERS[dtype]}"
