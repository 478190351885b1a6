"""The slow reference: what nodes mean, in numpy.

Comes in: nodes, and the memory of each buffer as a flat array of its elements (bf16: the bits as
uint16). Every value is an array over the whole iteration space. With wide=True floating values are
float64 throughout, the truth that errors are measured against. Tests, fuzzers and the null target
(`kernel/null`) trust this file; nothing else in the compiler calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.ir.checks import Bound
from plait.ir.dtypes import DType, b1, bf16
from plait.ir.expr import Atom, Expr, Size, fold
from plait.ir.loops import Load, Node, is_arg, walk
from plait.ir.reductions import REDUCTIONS

Array = NDArray[Any]
Memory = dict[str, Array]
_M32 = (1 << 32) - 1


def numpy_type(d: DType) -> np.dtype[Any]:
    """The numpy type that holds values of d (bf16 values are held in float32)."""
    names = {
        "b": "bool",
        "i": f"int{8 * d.nbytes}",
        "u": f"uint{8 * d.nbytes}",
        "f": f"float{8 * d.nbytes}",
    }
    return np.dtype("float32" if d == bf16 else names[d.kind])


def memory_type(d: DType) -> np.dtype[Any]:
    """The numpy type of d's elements in memory."""
    return np.dtype("uint16") if d == bf16 else numpy_type(d)


def round_bf16(x: Array) -> Array:
    """float32 values rounded to the nearest bf16, ties to even."""
    bits = np.array(x, np.float32, order="C").view(np.uint32)
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    out = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), out)


def from_memory(raw: Array, d: DType) -> Array:
    """Elements as values."""
    if d == bf16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw


def to_memory(x: Array, d: DType) -> Array:
    """Values as elements."""
    if d == bf16:
        return (round_bf16(x.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(memory_type(d))


# ----------------------------------------------------------------------------------------- op table
def _exact(x: Array, like: Array) -> Array:
    return np.asarray(x).astype(like.dtype)


def _python(fn: Callable[..., float]) -> Callable[..., Array]:
    """A function on floats as one on arrays, in double precision; domain errors give NaN."""

    def one(*xs: float) -> float:
        try:
            return fn(*xs)
        except (ValueError, OverflowError):
            return math.nan

    whole = np.frompyfunc(one, fn.__code__.co_argcount if hasattr(fn, "__code__") else 1, 1)
    return lambda *xs: np.asarray(whole(*(np.asarray(x, np.float64) for x in xs))).astype(
        xs[0].dtype
    )


def _lgamma(x: float) -> float:
    if math.isnan(x):
        return x
    return math.inf if math.isinf(x) or (x <= 0 and x == math.floor(x)) else math.lgamma(x)


def _divide(kind: str, a: Array, b: Array) -> Array:
    """Integer division by rows: b == 0 gives 0."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    q, r = np.floor_divide(a, safe), np.mod(a, safe)
    if kind in ("truncdiv", "rem"):
        adjust = (r != 0) & ((a < 0) != (safe < 0))
        q, r = q + adjust.astype(a.dtype), np.where(adjust, r - safe, r)
    out = q if kind in ("floordiv", "truncdiv") else r
    return _exact(np.where(b == 0, 0, out), a)


def _shift(kind: str, a: Array, b: Array) -> Array:
    width = 8 * a.dtype.itemsize
    inside = (b >= 0) & (b < width)
    amount = np.where(inside, b, 0).astype(a.dtype)
    if kind == "shl":
        return _exact(np.where(inside, np.left_shift(a, amount), 0), a)
    beyond = np.where(a < 0, -1, 0).astype(a.dtype) if a.dtype.kind == "i" else np.zeros_like(a)
    return np.where(inside, np.right_shift(a, amount), beyond)


def _pymod(a: Array, b: Array) -> Array:
    m = np.fmod(a, b)
    return np.where((m != 0) & ((m < 0) != (b < 0)), m + b, m)


def _philox(seed: Array, counter: Array, word: Array) -> Array:
    u = np.uint64
    low = u(_M32)
    seed, counter, word = (
        x.astype(np.int64).view(np.uint64) for x in np.broadcast_arrays(seed, counter, word)
    )
    k0, k1, c0, c1 = seed & low, seed >> u(32), counter & low, counter >> u(32)
    c2, c3 = (word >> u(2)) & low, np.zeros_like(c0)
    for _ in range(10):
        p0, p1 = u(0xD2511F53) * c0, u(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> u(32)) ^ c1 ^ k0, p1 & low, (p0 >> u(32)) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + u(0x9E3779B9)) & low, (k1 + u(0xBB67AE85)) & low
    return np.select([word & u(3) == u(k) for k in range(4)], [c0, c1, c2, c3]).astype(np.int64)


EVALUATE: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "neg": np.negative, "abs": np.abs,
    **{k: (lambda a, b, k=k: _divide(k, a, b)) for k in ("floordiv", "truncdiv", "mod", "rem")},
    "fmod": np.fmod, "pymod": _pymod,
    **{k: (lambda a, b, k=k: _shift(k, a, b)) for k in ("shl", "shr")},
    "min": np.minimum, "max": np.maximum, "fmin": np.fmin, "fmax": np.fmax,
    "max_first": lambda a, b: np.asarray(np.where((b > a) | (b != b), b, a)),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "where": np.where, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a),
    "reciprocal": lambda a: 1 / a, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "round": np.rint, "sign": lambda a: np.where(a > 0, 1, np.where(a < 0, -1, 0)),
    "isnan": np.isnan, "isinf": np.isinf, "signbit": np.signbit, "copysign": np.copysign,
    "nextafter": np.nextafter, "hypot": np.hypot, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh,
    "erf": _python(math.erf), "erfc": _python(math.erfc), "lgamma": _python(_lgamma),
    "pow": np.power, "atan2": np.arctan2,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "philox": _philox,
}  # fmt: skip


# --------------------------------------------------------------------------------------- evaluation
@dataclass
class Evaluation:
    """All points of an iteration space at once.

    axes: loop variables, outermost first.
    sizes: values of size symbols.
    memory, strides: of the buffers."""

    axes: tuple[Atom, ...]
    sizes: Mapping[str, int]
    memory: Memory
    strides: Mapping[str, tuple[Size, ...]]
    wide: bool = False
    accs: dict[str, Array] = field(default_factory=dict)
    failed: list[Node] = field(default_factory=list)
    memo: dict[Node, Array] = field(default_factory=dict)

    def shape(self) -> tuple[int, ...]:
        """Extents of the axes."""
        return tuple(self.number(a.extent) for a in self.axes if a.extent is not None)

    def number(self, e: Size) -> int:
        """The value of a size expression."""
        return int(self.integer(e, ()))

    def integer(self, e: Size, args: Sequence[Array]) -> Array:
        """The value of an integer expression at every point; `$k` is args[k]."""
        return np.asarray(fold(e, lambda a: self._atom(a, args)), np.int64)

    def _atom(self, a: Atom, args: Sequence[Array]) -> Array:
        if a.kind == "sym":
            if is_arg(a):
                return args[int(a.name[1:])]
            if a in self.axes:
                k = self.axes.index(a)
                n = self.number(a.extent) if a.extent is not None else 0
                return np.arange(n, dtype=np.int64).reshape(
                    [-1 if j == k else 1 for j in range(len(self.axes))]
                )
            return np.asarray(self.sizes[a.name], np.int64)
        x, y = self.integer(a.a, args), self.integer(a.b, args)
        fn: Callable[[Array, Array], Array] = {
            "div": np.floor_divide, "mod": np.mod, "min": np.minimum, "max": np.maximum,
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        }[a.kind]  # fmt: skip
        return np.asarray(fn(x, y)).astype(np.int64)

    def value(self, root: Node) -> Array:
        """A node's value, broadcastable to shape()."""
        with np.errstate(all="ignore"):
            for n in walk((root,)):
                if n not in self.memo:
                    self.memo[n] = self._one(n, [self.memo[a] for a in n.args])
        return self.memo[root]

    def _type(self, d: DType) -> np.dtype[Any]:
        return np.dtype("float64") if self.wide and d.is_float else numpy_type(d)

    def _one(self, n: Node, args: list[Array]) -> Array:
        if n.op == "const":
            return self._rounded(np.asarray(n.attr), n.dtype)
        if n.op == "index":
            assert isinstance(n.attr, (int, Expr)), n
            return self.integer(n.attr, args)
        if n.op == "load":
            return self._load(n, args)
        if n.op == "bounded":
            return self._bounded(n, args)
        if n.op == "nonzero":
            self._require(n, args[0] != 0, args[1:])
            return args[0]
        if n.op == "acc":
            return self.accs[str(n.attr)]
        if n.op == "cast":
            return self._cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "bitcast":
            raw = to_memory(np.atleast_1d(args[0]), n.args[0].dtype)
            out = from_memory(raw.view(memory_type(n.dtype)), n.dtype)
            return out.reshape(np.shape(args[0])).astype(self._type(n.dtype))
        return self._rounded(np.asarray(EVALUATE[n.op](*args)), n.dtype)

    def _rounded(self, x: Array, d: DType) -> Array:
        if d == bf16 and not self.wide:
            return round_bf16(x.astype(np.float32))
        return x.astype(self._type(d))

    def _cast(self, x: Array, src: DType, dst: DType) -> Array:
        if dst == b1:
            return np.asarray(x != 0)
        if src.is_float and dst.is_int:
            whole = np.where(np.isfinite(x), np.trunc(x), 0)
            return (
                whole.astype(np.int64).astype(numpy_type(dst))
                if dst.nbytes < 8
                else whole.astype(numpy_type(dst))
            )
        return self._rounded(x, dst)

    def _load(self, n: Node, args: list[Array]) -> Array:
        assert isinstance(n.attr, Load), n
        offset = self.offset(n.attr.buf, n.attr.index, args)
        memory = self.memory[n.attr.buf]
        if n.attr.masked:
            offset, mask = np.broadcast_arrays(offset, args[-1])
            offset = np.where(mask, offset, 0)
            if not mask.any():
                return np.zeros(mask.shape, self._type(n.dtype))
        if 0 in self.shape():  # no point exists: nothing is read, and the buffer may hold nothing
            return np.zeros(offset.shape, self._type(n.dtype))
        if offset.size and (offset.min() < 0 or offset.max() >= memory.size):
            raise IndexError(f"{n} leaves its buffer")
        out = from_memory(memory[offset], n.dtype).astype(self._type(n.dtype))
        return np.where(mask, out, np.zeros_like(out)) if n.attr.masked else out

    def offset(self, buf: str, index: tuple[Size, ...], args: Sequence[Array]) -> Array:
        """The linear offset of an element at every point."""
        out: Array = np.asarray(0, np.int64)
        for e, s in zip(index, self.strides[buf], strict=True):
            out = out + self.integer(e, args) * self.integer(s, ())
        return out

    def _bounded(self, n: Node, args: list[Array]) -> Array:
        assert isinstance(n.attr, Bound), n
        size = self.number(n.attr.size)
        good = (args[0] >= 0) & (args[0] < size)
        self._require(n, good, args[1:])
        return np.where(good, args[0], 0)

    def _require(self, n: Node, good: Array, masks: Sequence[Array]) -> None:
        """Notes the check of n as failed where its value is not good at a point that its mask
        allows."""
        seen = ~good & masks[0] if masks else ~good
        if np.broadcast_to(seen, np.broadcast_shapes(self.shape(), seen.shape)).any():
            self.failed.append(n)

    def whole(self, n: Node) -> Array:
        """A node's value at every point of the space."""
        x = self.value(n)
        return np.broadcast_to(x, np.broadcast_shapes(self.shape(), x.shape))


# --------------------------------------------------------------------------------------- reductions
def reduce_array(kind: str, x: Array, d: DType, n_inner: int) -> dict[str, Array]:
    """x combined over its last n_inner axes (kept, with extent 1). Result names as Kernel accs: ''
    or '.mean', '.m2', '.count'."""
    outer = x.shape[: x.ndim - n_inner]
    keep = (*outer, *([1] * n_inner))
    flat = (
        x.reshape(*outer, -1)
        if x.size
        else x.reshape(*outer, math.prod(x.shape[x.ndim - n_inner :]))
    )
    if kind == "welford":
        count = flat.shape[-1]
        mean = flat.sum(-1, keepdims=True) / max(count, 1)
        m2 = ((flat - mean) ** 2).sum(-1, keepdims=True)
        return {
            ".mean": mean.astype(x.dtype).reshape(keep), ".m2": m2.astype(x.dtype).reshape(keep),
            ".count": np.full(keep, count, x.dtype),
        }  # fmt: skip
    return {"": _reduce_flat(kind, flat, d).reshape(keep)}


def _reduce_flat(kind: str, x: Array, d: DType) -> Array:
    row = REDUCTIONS[kind]
    if row.extreme:
        if x.shape[-1] == 0:
            return np.zeros(x.shape[:-1], np.int64)
        find = {"gt": np.argmax, "lt": np.argmin}[row.op]
        return np.asarray(find(x, axis=-1)).astype(np.int64)
    combine: Any = EVALUATE[row.op]
    first = x.dtype.type(row.identity(d))
    return np.asarray(combine.reduce(x, axis=-1, dtype=x.dtype, initial=first))


def running_array(kind: str, x: Array, d: DType) -> Array:
    """The inclusive scan of x, of dtype d, along its last axis."""
    row = REDUCTIONS[kind]
    wide = x.astype(np.promote_types(x.dtype, numpy_type(row.accumulates(d, running=True))))
    combine: Any = EVALUATE[row.op]
    return np.asarray(combine.accumulate(wide, axis=-1, dtype=wide.dtype)).astype(x.dtype)


def write(
    memory: Array, d: DType, offset: Array, value: Array, mask: Array | None, mode: str
) -> None:
    """memory[offset] (mode)= value in row-major order of the points."""
    arrays = (offset, value) if mask is None else (offset, value, mask)
    flat = [a.reshape(-1) for a in np.broadcast_arrays(*arrays)]
    if mask is not None:
        flat = [a[flat[2]] for a in flat]
    if flat[0].size and (flat[0].min() < 0 or flat[0].max() >= memory.size):
        raise IndexError("a store leaves its buffer")
    if mode == "store":
        memory[flat[0]] = to_memory(flat[1], d)
        return
    if mode == "sum":  # of all points that have this place, or none
        memory[...] = 0
    fn = EVALUATE["add" if mode == "sum" else mode]
    for o, x in zip(flat[0], flat[1], strict=True):
        with np.errstate(all="ignore"):
            old = from_memory(memory[o : o + 1], d)
            wide = np.asarray(fn(old, x)).astype(numpy_type(d))
            memory[o : o + 1] = to_memory(wide, d)
