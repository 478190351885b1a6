"""The text of a user's Triton function with all that it uses, as a module that stands alone.

Comes in: a `JITFunction`. Goes out: source text that a process without the user's modules can
compile. Functions are copied as they are written; constants that they name are written as values;
what belongs to Triton or Python's maths is imported. Raises NoRule for what no text can say.
"""

from __future__ import annotations
import __future__

import ast
import enum
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from plait.lower.core import NoRule

_OWN = ("triton", "math", "builtins")
"""Packages that a compiler's process has."""
_SWITCHES = ("noinline", "debug")


def is_function(value: object) -> bool:
    """Whether a value is a function of the user's in Triton's language."""
    return hasattr(value, "raw_src") and not _is_known(getattr(value, "__module__", ""))


class SourceText:
    """Functions and values, each under the name that the user's text has for it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._taken: dict[str, object] = {}
        self._future: set[bool] = set()

    def text(self) -> str:
        """The module."""
        if len(self._future) > 1:
            raise NoRule("its functions come from modules that read annotations differently")
        first = ["from __future__ import annotations"] if True in self._future else []
        head = [*first, "import types", "import triton", "import triton.language as tl"]
        return "\n".join((*head, *self._lines)) + "\n"

    def constant(self, value: object) -> str:
        """An expression for a compile-time argument."""
        if is_function(value):
            return self.function(value)
        name = f"plait_c{len(self._lines)}"
        self._lines.append(f"{name} = tl.constexpr({self._value(value)})")
        return name

    def function(self, fn: Any) -> str:
        """Adds a function and all that it uses. Gives its name."""
        name: str = fn.__name__
        if self._take(name, fn):
            tree = ast.parse(fn.src).body[0]
            assert isinstance(tree, ast.FunctionDef), f"{name} is no function"
            self._check_defaults(fn, tree)
            flags = fn.fn.__code__.co_flags
            self._future.add(bool(flags & __future__.annotations.compiler_flag))
            self._add_used(fn, tree)
            self._lines.append(f"{_decorator(fn)}\n{fn.src.rstrip()}")
        return name

    def _take(self, name: str, value: object) -> bool:
        """Whether a name is new. Raises NoRule if it stands for something else."""
        if name not in self._taken:
            self._taken[name] = value
            return True
        other = self._taken[name]
        if other is value or (type(other) is type(value) and _same(other, value)):
            return False
        raise NoRule(f"two different values are called {name}")

    def _check_defaults(self, fn: Any, tree: ast.FunctionDef) -> None:
        """Defaults must be what their text says now."""
        given = [p for p in fn.signature.parameters.values() if p.default is not p.empty]
        texts = [*tree.args.defaults, *(d for d in tree.args.kw_defaults if d is not None)]
        for p, node in zip(given, texts, strict=True):
            text = ast.unparse(node)
            now = eval(text, fn.get_capture_scope())
            if now is not p.default and not _same(now, p.default):
                raise NoRule(f"the default of {p.name} has changed since it was read")

    def _add_used(self, fn: Any, tree: ast.FunctionDef) -> None:
        """Adds what a function names."""
        inside = inspect.getclosurevars(fn.fn).nonlocals
        code = fn.fn.__code__
        for name in dict.fromkeys(_names(tree)):
            if name in code.co_varnames or name in code.co_cellvars:
                continue
            if name in fn.__globals__:
                value = fn.__globals__[name]
            elif name in inside:
                value = inside[name]
            else:
                continue  # one of Python's own
            if isinstance(value, ModuleType) and not _is_known(value.__name__):
                self._add_parts(name, value, tree)
            else:
                self._add(name, value, fn)

    def _add(self, name: str, value: object, fn: Any) -> None:
        if is_function(value):
            made = self.function(value)
            if made != name and self._take(name, value):
                self._lines.append(f"{name} = {made}")
            return
        if not self._take(name, value):
            return
        marked = "constexpr" in str(fn.__globals__.get("__annotations__", {}).get(name, ""))
        kind = ": tl.constexpr" if marked else ""
        self._lines.append(f"{name}{kind} = {self._value(value)}")

    def _add_parts(self, name: str, module: ModuleType, tree: ast.FunctionDef) -> None:
        """Adds a module of the user's, with what is named of it."""
        if self._take(name, module):
            self._lines.append(f"{name} = types.ModuleType({name!r})")
        for n in ast.walk(tree):
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
                whole = f"{name}.{n.attr}"
                if n.value.id != name or not hasattr(module, n.attr):
                    continue
                value = getattr(module, n.attr)
                if self._take(whole, value):
                    made = self.function(value) if is_function(value) else self._value(value)
                    self._lines.append(f"{whole} = {made}")

    def _value(self, value: Any) -> str:
        """A value as an expression."""
        import triton
        from triton import language as tl

        if isinstance(value, enum.EnumMeta):
            return self._enumeration(value)  # type: ignore[arg-type]
        if isinstance(value, enum.Enum):
            return f"{self._enumeration(type(value))}({self._value(value.value)})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float:
            return repr(value) if value - value == 0 else f'float("{value}")'
        if isinstance(value, tl.constexpr):
            return f"tl.constexpr({self._value(value.value)})"
        if type(value) is tl.dtype:
            return f"tl.dtype({value.name!r})"
        if type(value) is tuple:
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if value is triton:
            return "triton"
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            given = f"{value.__name__!r}, {value._fields!r}"
            defaults = self._value(tuple(vars(value)["_field_defaults"].values()))
            return f'__import__("collections").namedtuple({given}, defaults={defaults})'
        if isinstance(value, ModuleType) and _is_known(value.__name__):
            return f'__import__("importlib").import_module({value.__name__!r})'
        home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if home and name and _is_known(home):
            module = importlib.import_module(home)
            if getattr(module, name, None) is value:
                return f'__import__("importlib").import_module({home!r}).{name}'
        raise NoRule(f"its text cannot say what {value!r:.80} is")

    def _enumeration(self, kind: type[enum.Enum]) -> str:
        """The name of an enumeration with the same members, made once."""
        name = f"plait_{kind.__name__}"
        if self._take(name, kind):
            base = next(c for c in kind.__mro__ if c.__module__ == "enum")
            members = ", ".join(
                f"{k!r}: {self._value(m.value)}" for k, m in kind.__members__.items()
            )
            kinds = [c.__name__ for c in kind.__mro__ if c in (int, str, float)]
            mixin = f", type={kinds[0]}" if kinds and base in (enum.Enum, enum.Flag) else ""
            made = f"{base.__name__}({kind.__name__!r}, {{{members}}}{mixin})"
            self._lines.append(f'{name} = __import__("enum").{made}')
        return name


def _decorator(fn: Any) -> str:
    import triton

    if not isinstance(fn, triton.JITFunction):
        return "@triton.constexpr_function"
    switches = [f"{k}={getattr(fn, k)!r}" for k in _SWITCHES if getattr(fn, k, None)]
    return f"@triton.jit({', '.join(switches)})" if switches else "@triton.jit"


def _names(tree: ast.AST) -> Iterator[str]:
    for n in ast.walk(tree):
        if isinstance(n, ast.Name):
            yield n.id


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _OWN


def _same(a: Any, b: Any) -> bool:
    plain = (bool, int, float, str, tuple, type(None))
    a, b = getattr(a, "value", a), getattr(b, "value", b)
    return isinstance(a, plain) and type(a) is type(b) and repr(a) == repr(b)
