"""Warm starts: an entry is taken where the trace would have come to the same, and nowhere else.

Each pair of programs differs by what Dynamo guards on least; the fuzzer (tests/fuzz/warm.py) found
most of them. A pair of processes is played as the fuzzer does.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.capture.warm import frames
from plait.compat.torch_functions import is_library_code, torch_functions
from plait.config import Config
from plait.errors import CacheWarning
from plait.runtime.store import STARTS, Store
from tests import warm as processes
from tests.fuzz import warm
from tests.fuzz.warm import Source, Told, Version, run_seed

pytestmark = pytest.mark.skipif(
    os.environ.get("PLAIT_WRAPPER", "native") != "native", reason="native programs are kept"
)

ABSTRACT = """
class A(abc.ABC): pass
class B: pass
b = B()
def top(x, y, n, o):
    return x * (2 if isinstance(b, A) else 3)
"""
BUILT_IN = """
def top(x, y, n, o):
    return x * sum((1.0, 2.0))
"""
CONTEXT = """
@torch.enable_grad()
def help(x): return x * 2
def top(x, y, n, o):
    return help(x)
"""
ENUM = """
class Mode(enum.Enum):
    A = 2
def top(x, y, n, o):
    return x * Mode.A.value
"""
METACLASS = """
class Meta(type):
    k = 2.0
class A(metaclass=Meta): pass
def top(x, y, n, o):
    return x * A.k
"""
OBJECTS = """
class A: v = 1.0
a, b = A(), A()
def top(x, y, n, o):
    a.v = 5.0
    return x * b.v
"""
OPERATOR = """
lib = torch.library.Library("warmfuzz", "FRAGMENT")
lib.define("op(Tensor x) -> Tensor")
lib.impl("op", lambda x: x * 2, "CompositeImplicitAutograd")
def top(x, y, n, o):
    return torch.ops.warmfuzz.op(x)
"""
OPAQUE = """
K = 2
def deeper(x): return x * K
@torch._dynamo.allow_in_graph
def opaque(x): return deeper(x)
def top(x, y, n, o):
    return opaque(x)
"""
CONSTANT = """
K = 2
@torch._dynamo.assume_constant_result
def constant(): return K
def top(x, y, n, o):
    return x * constant()
"""
GLOBAL = """
K = 2
def top(x, y, n, o):
    return x * K
"""
PATCHED = """
def top(x, y, n, o):
    return F.softmax(x, -1)
"""
ATTRIBUTES = """
class A: pass
a = A()
def top(x, y, n, o):
    return x * len(vars(a))
a.b = 1
"""
MODULE = """
def top(x, y, n, o):
    return x * (2 if hasattr(math, "turns") else 3)
"""
PROTOCOL = """
@typing.runtime_checkable
class A(typing.Protocol):
    def f(self): ...
class B: pass
b = B()
def top(x, y, n, o):
    return x * (2 if isinstance(b, A) else 3)
"""
DEFAULT = """
def top(x, y, n, o):
    return x * getattr(math, "turns", 2)
"""
HOOKED = """
net = nn.Linear(4, 4, bias=False)
nn.init.ones_(net.weight)
def top(x, y, n, o):
    return net(x)
"""
HOOK = "nn.modules.module.register_module_forward_hook(lambda m, a, out: out * 3)"
CHAINED = """
chain = collections.ChainMap({}, {"k": 2})
def top(x, y, n, o):
    return x * chain["k"]
"""
RAISES = """
class A:
    def f(self, k):
        if k in vars(self):
            return 2
        raise KeyError(k)
a = A()
def top(x, y, n, o):
    try:
        return x * a.f("k")
    except KeyError:
        return x * 3
"""
NAMED = """
WORD = "turns"
def top(x, y, n, o):
    return x * (2 if hasattr(math, WORD) else 3) + getattr(math, WORD + "_", 2)
"""
COMPUTED = """
class A(nn.Module):
    def __getattr__(self, name):
        return 2.0 if name == "k" else super().__getattr__(name)
    def forward(self, x):
        return x * self.k
a = A()
def top(x, y, n, o):
    return a(x)
"""
GIVEN = """
t = torch.ones(3, 4)
def given_0(x, y, n, o):
    return x, t, n, o
def top(x, y, n, o):
    with torch.no_grad():
        y.add_(1)
        return x * t.mul_(2)
def state_0():
    return t
"""
POLYFILLED = """
def helper(a): return a * 2
def top(x, y, n, o):
    return x * helper(2.0)
"""
POLYFILL = """
@torch._dynamo.substitute_in_graph(helper)
def other(a): return a * 2
"""
ALIKE = """
def make():
    class A: pass
    return A
A, B = make(), make()
a = A()
def top(x, y, n, o):
    return x * (2 if isinstance(a, B) else 3)
"""
KEYED = """
def make():
    def inner(): pass
    return inner
a, b = make(), make()
keys = {a: 2.0}
def top(x, y, n, o):
    return x * keys.get(b, 5.0)
"""
DECOMPOSED = """
def top(x, y, n, o):
    return F.softplus(x)
"""
DECOMPOSITION = """
table = torch._decomp.decomposition_table
table[torch.ops.aten.softplus.default] = lambda x, *a: (1 + x.exp()).log()
"""
ANNOTATED = """
def help(x: int): return x
def top(x, y, n, o):
    notes = typing.get_type_hints(help)
    return x * (2 if notes["x"] is int or help.__annotations__["x"] is int else 3)
"""
MARKED = """
def help(x): return x
def top(x, y, n, o):
    return x * (2 if hasattr(help, "mark") else 3) + getattr(help, "mark", 1)
"""
LISTED = """
keys = {"long": 1.0, "k": 2.0}
def top(x, y, n, o):
    return x * len(list(keys)[0]) + keys["k"]
"""
ORDERED = """
keys = collections.OrderedDict(long=1.0, k=2.0)
def top(x, y, n, o):
    return x * next(iter(keys.values())) + sum(k * len(v) for k, v in enumerate(keys))
"""
MADE = """
def made(k):
    def init(self): self.k = k
    return init
class A:
    __init__ = made(2.0)
def top(x, y, n, o):
    return x * A().k
"""
FACTORY = """
def made(k):
    return lambda: [k]
@dataclasses.dataclass
class A:
    k: list = dataclasses.field(default_factory=made(2.0))
def top(x, y, n, o):
    return x * A().k[0]
"""
SLOTS = """
@dataclasses.dataclass(slots=True)
class A:
    k: float = dataclasses.field(init=False, default=2.0)
def top(x, y, n, o):
    return x * A().k
"""
DECORATED = """
def scaled(k):
    def outer(fn):
        return lambda self: fn(self) * k
    return outer
class A:
    @property
    @scaled(2.0)
    def k(self): return 1.0
def top(x, y, n, o):
    return x * A().k
"""
CLOSED = (
    MADE.replace("= k\n", "= k.n\n")
    .replace("2.0", "B")
    .replace(
        "class A",
        """class B:
    n = 2.0
class A""",
    )
)
ODD_ENUM = """
class Mode(enum.IntEnum):
    A = 2
    def __repr__(self): return "a mode"
mode = Mode.A
def top(x, y, n, o):
    return x * mode
"""
NOTED = """
class Mode(enum.Enum):
    A = 1
Mode.A.note = 2.0
def top(x, y, n, o):
    return x * Mode(1).note
"""
WORDED = """
WORD = "a"
class Mode(enum.Enum):
    A = 1
    def __str__(self): return WORD + self.name
mode = Mode.A
def top(x, y, n, o):
    return x * len(f"{mode}") + len(str(mode))
"""
LISTED_ATTRIBUTE = """
class A:
    seen = [1.0]
    k = {"a": 2.0, "other": object()}
def top(x, y, n, o):
    return x * len(A.seen) + A.k["a"] + len(A.__name__)
"""
UNKNOWN = """
K = 1
class Mode(enum.Enum):
    A = 1
    B = 2
    @classmethod
    def _missing_(cls, value): return cls(K)
def top(x, y, n, o):
    return x * Mode(5).value
"""
CHECKED = """
K = True
class Meta(type):
    def __instancecheck__(cls, thing): return K
class A(metaclass=Meta): pass
class B: pass
b = B()
def top(x, y, n, o):
    return x * (2 if isinstance(b, A) else 3)
"""
HOOK_OF_CLASSES = """
K = True
class A(abc.ABC):
    @classmethod
    def __subclasshook__(cls, other): return K
class B: pass
def top(x, y, n, o):
    return x * (2 if issubclass(B, A) else 3)
"""
CONSTANT_METHOD = """
K = 2
class A:
    @torch._dynamo.assume_constant_result
    def get(self): return K
a = A()
def top(x, y, n, o):
    return x * a.get()
"""
CONSTANT_INSIDE = """
K = 2
def made():
    @torch._dynamo.assume_constant_result
    def constant(): return K
    return lambda x: x * constant()
run = made()
def top(x, y, n, o):
    return run(x)
"""
HIDDEN = """
class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.ones(4))
    def forward(self, x): return x * self.w
a = A()
def top(x, y, n, o):
    return a(x)
"""
VARIABLE = """
os.environ["WARMFUZZ"] = "2"
def top(x, y, n, o):
    return x * float(os.getenv("WARMFUZZ"))
"""
ALL_NAMES = """
def top(x, y, n, o):
    return x * len(dir(math))
"""
SIZED = """
held = (2.0, 3.0)
def top(x, y, n, o):
    if held is None: return x
    first, second = held
    return x * first + second
"""
NAMES = """
held = {"a": 2.0}
def top(x, y, n, o):
    return x * (held["a"] if isinstance(held, dict) and "a" in held else 1.0)
"""
LOOPED = """
held = {"a": 2.0}
def top(x, y, n, o):
    for k in held or (): x = x * held[k]
    return x
"""
SETS = """
held = {"a", "b"}
def top(x, y, n, o):
    return x * (2.0 if held and "a" in held else 1.0)
"""
EDITS = {
    "class registered": (ABSTRACT, ABSTRACT + "A.register(B)"),
    "built-in shadowed": (BUILT_IN, BUILT_IN + "def sum(v): return 10.0"),
    "context of a helper": (CONTEXT, CONTEXT.replace("enable_grad", "no_grad")),
    "value of an enum": (ENUM, ENUM.replace("A = 2", "A = 3")),
    "attribute of a metaclass": (METACLASS, METACLASS.replace("2.0", "3.0")),
    "two names of one object": (OBJECTS, OBJECTS + "b = a"),
    "operator": (OPERATOR, OPERATOR.replace("x * 2", "x * 3")),
    "function that is not traced": (OPAQUE, OPAQUE.replace("K = 2", "K = 3")),
    "constant result": (CONSTANT, CONSTANT.replace("K = 2", "K = 3")),
    "method of tensors": (PATCHED, PATCHED + "torch.Tensor.softmax = lambda self, *a: self * 3"),
    "function of C++": (PATCHED, PATCHED + "torch.Tensor.softmax = torch.Tensor.log_softmax"),
    "hook of all modules": (HOOKED, HOOKED + HOOK),
    "attributes at once": (ATTRIBUTES, ATTRIBUTES + "a.c = 1"),
    "attribute of a module": (MODULE, MODULE + "math.turns = 1"),
    "attribute of a module or a default": (DEFAULT, DEFAULT + "math.turns = 5"),
    "protocol": (PROTOCOL, PROTOCOL + "b.f = 1"),
    "key that was missing": (CHAINED, CHAINED + "chain.maps[0]['k'] = 3"),
    "attribute that was missing": (RAISES, RAISES + "a.k = 1"),
    "name of an attribute": (NAMED, NAMED + "math.turns = 1"),
    "name that is computed": (NAMED, NAMED + "math.turns_ = 1"),
    "attribute that was computed": (COMPUTED, COMPUTED + "a.k = 3.0"),
    "argument and global": (GIVEN, GIVEN.replace("x, t, n", "x, y, n")),
    "function in the place of another": (POLYFILLED, POLYFILLED + POLYFILL),
    "nothing in the place of a function": (POLYFILLED + POLYFILL, POLYFILLED),
    "classes that look alike": (ALIKE, ALIKE + "B = A"),
    "functions that look alike": (KEYED, KEYED + "b = a"),
    "decomposition": (DECOMPOSED + DECOMPOSITION, DECOMPOSED),
    "annotation": (ANNOTATED, ANNOTATED.replace("x: int", "x: float")),
    "attribute of a function": (MARKED, MARKED + "help.mark = 5"),
    "order of a dict in a list": (LISTED, LISTED + "keys['long'] = keys.pop('long')"),
    "order of an ordered dict": (ORDERED, ORDERED + "keys.move_to_end('long')"),
    "number that a method closes over": (MADE, MADE.replace("2.0", "3.0")),
    "number that a factory closes over": (FACTORY, FACTORY.replace("2.0", "3.0")),
    "default of a slot": (SLOTS, SLOTS.replace("2.0", "3.0")),
    "number of a decorator": (DECORATED, DECORATED.replace("2.0", "3.0")),
    "class that a method closes over": (CLOSED, CLOSED.replace("2.0", "3.0")),
    "value of an enum that does not show it": (ODD_ENUM, ODD_ENUM.replace("= 2", "= 3")),
    "attribute of a member": (NOTED, NOTED.replace("2.0", "3.0")),
    "list of a class": (LISTED_ATTRIBUTE, LISTED_ATTRIBUTE + "A.seen.append(2.0)"),
    "dict of a class": (LISTED_ATTRIBUTE, LISTED_ATTRIBUTE.replace("2.0", "3.0")),
    "name of a class": (LISTED_ATTRIBUTE, LISTED_ATTRIBUTE + "A.__name__ = 'AA'"),
    "text of a member": (WORDED, WORDED.replace('"a"', '"ab"')),
    "member that is missing": (UNKNOWN, UNKNOWN.replace("K = 1", "K = 2")),
    "what counts as an instance": (CHECKED, CHECKED.replace("K = True", "K = False")),
    "what counts as a subclass": (HOOK_OF_CLASSES, HOOK_OF_CLASSES.replace("= True", "= False")),
    "constant result of a method": (CONSTANT_METHOD, CONSTANT_METHOD.replace("K = 2", "K = 3")),
    "constant result inside": (CONSTANT_INSIDE, CONSTANT_INSIDE.replace("K = 2", "K = 3")),
    "buffer that is hidden": (HIDDEN, HIDDEN + "a.__dict__['w'] = torch.ones(4) * 2"),
    "variable of the environment": (VARIABLE, VARIABLE.replace('"2"', '"3"')),
    "names of a module": (ALL_NAMES, ALL_NAMES + "math.turns = 1"),
    "nothing in the place of a tuple": (SIZED, SIZED.replace("(2.0, 3.0)", "None")),
    "nothing in the place of a dict": (NAMES, NAMES.replace('{"a": 2.0}', "None")),
    "nothing in the place of keys": (LOOPED, LOOPED.replace('{"a": 2.0}', "None")),
    "nothing in the place of a set": (SETS, SETS.replace('{"a", "b"}', "None")),
    "a list in the place of a set": (SETS, SETS.replace('{"a", "b"}', "['a', 'b']")),
    "global": (GLOBAL, GLOBAL.replace("K = 2", "K = 3")),
}  # fmt: skip


class Text(Source):
    """A program of one text."""

    def __init__(self, text: str) -> None:
        super().__init__((), (), "")
        object.__setattr__(self, "text", text)

    def texts(self, choice: object) -> list[str]:
        """As a program of pieces has them."""
        return [warm.PRELUDE, warm.PRELUDE + vars(self)["text"], "", "", "", ""]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Of compiles that start warm and build no kernels."""
    monkeypatch.setattr(frames, "EXTENDED", [])  # whatever other tests have registered
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    frames.outcomes.clear()
    yield {"warm_start": True, "kernels": False, "strict": True, "cache_dir": str(tmp_path)}
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def check(text: str, options: dict[str, Any], **settings: int) -> str:
    """Compares a program with eager; gives what became of its frame. settings: as of a Version."""
    frames.outcomes.clear()
    source, version = Text(text), Version((), settings)
    got, want = warm.called(source, version, options), warm.called(source, version, None)
    assert not warm.differ(want, got, False), text
    assert want[0][0] != "raised", want
    return frames.outcomes[0].how


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_seen(edit: str, options: dict[str, Any]) -> None:
    before, after = EDITS[edit]
    first = check(before, options)
    assert check(after, options) != "warm"
    if first == "kept":
        assert check(before, options) == "warm"


def test_what_makes_no_difference(options: dict[str, Any]) -> None:
    """A comment, a function that nobody calls, another place in the file."""
    text = "def help(x): return x * 2\ndef top(x, y, n, o): return help(x) + y"
    assert check(text, options) == "kept"
    assert check(f"# a comment\n\ndef unused(x): return x\n{text}", options) == "warm"


def test_numbers_that_are_arguments(options: dict[str, Any]) -> None:
    """With dynamic=True: Dynamo traces twice, and no guard asks for the number."""
    dynamic = warm.SETTINGS["dynamic"].index(True)
    text = GLOBAL.replace("2", "2.5")
    assert check(text, options, dynamic=dynamic) == "kept"
    assert check(text, options, dynamic=dynamic) == "warm"
    assert check(text.replace("2.5", "3.5"), options, dynamic=dynamic) == "warm"


OF_PROCESS = {
    "set": "for k in words: x = x * 2 + len(k)",
    "set of an expression": "for k in words | {'z'}: x = x * 2 + len(k)",
    "set in a list": "x = x * len(list(words)[0])",
    "set in arguments": "x = x * (lambda *a: len(a[0]))(*words)",
    "set of constants": "for k in {'a', 'bb', 'ccc'}: x = x * 2 + len(k)",
    "frozen set": "for k in frozen: x = x * 2 + len(k)",
    "set's first": "x = x * len(next(iter(words)))",
    "any of a set": "x = x * len(words.copy().pop())",
    "text of a set": "x = x * len(f'{words}'.split(',')[0])",
    "set that is counted": "x = x * [k * len(w) for k, w in enumerate(set(words))][1]",
    "frozen set that is counted": "x = x * [k * len(w) for k, w in enumerate(frozen)][1]",
    "hash": "x = x * (hash('a') % 7)",
    "identity": "x = x * (id(thing) % 7)",
    "text of an object": "x = x * len(repr(thing))",
    "text of a function": "x = x * len(repr(top))",
}
SETS = """
words = {"a", "bb", "ccc"}
frozen = frozenset(words)
class Thing: pass
thing = Thing()
def top(x, y, n, o):
    LINE
    return x
"""


@pytest.mark.parametrize("what", OF_PROCESS)
def test_what_differs_in_each_process(what: str, options: dict[str, Any]) -> None:
    """Texts hash otherwise in each process, and sets have other orders."""
    frames.outcomes.clear()
    warm.called(Text(SETS.replace("LINE", OF_PROCESS[what])), Version(()), options)
    assert "another one in each process" in frames.outcomes[0].how


def test_sets_that_nothing_goes_through(options: dict[str, Any]) -> None:
    text = SETS.replace("LINE", "if words and 'a' in words and words != frozen - {'a'}: x = x * 2")
    assert check(text, options) == "kept" and check(text, options) == "warm"
    assert check(text.replace("ccc", "cc"), options) == "kept"


def test_identities_that_python_looks_at(options: dict[str, Any]) -> None:
    line = "x = x * (2 if inspect.unwrap(top) is top else 3)"
    text = "import inspect" + SETS.replace("LINE", line)
    assert check(text, options) == "kept" and check(text, options) == "warm"


@pytest.mark.parametrize(
    ("place", "is_own"),
    [("json/decoder.py", True), ("site-packages/other/a.py", False),
     ("dist-packages/a.py", False), ("sitecustomize.py", False)],
)  # fmt: skip
def test_packages_beside_pythons_library(place: str, is_own: bool) -> None:
    """Without a virtual environment they lie in its folder; who patches torch from there is not
    PyTorch."""
    code = check.__code__.replace(co_filename=f"{sysconfig.get_path('stdlib')}/{place}")
    assert is_library_code(code) == is_own
    ours = code.replace(co_filename=torch.nn.functional.softmax.__code__.co_filename)
    assert is_library_code(ours) and not is_library_code(check.__code__)


def test_functions_of_torch_made_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `python -c`: their code is a part of the key."""
    texts = {torch_functions()}
    for number in (3, 5):
        scope: dict[str, Any] = {}
        text = f"def softmax(x, *a, **k): return x * {number}"
        exec(compile(text, "<string>", "exec"), scope)
        monkeypatch.setattr(torch.nn.functional, "softmax", scope["softmax"])
        texts.add(torch_functions())
    assert len(texts) == 3


def test_arguments_that_cannot_be_looked_at(options: dict[str, Any]) -> None:
    """They run as without warm starts: layers without sizes, and classes whose methods raise."""
    from torch.nn.parameter import UninitializedParameter

    def lazy() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.LazyLinear(5))

    class Odd(dict[str, float]):
        def items(self) -> Any:
            raise RuntimeError

    class Layer(torch.nn.Module):
        def named_buffers(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError

        def forward(self, x: torch.Tensor, more: Odd) -> torch.Tensor:
            return x * more["k"]

    x = torch.ones(2, 3)
    assert isinstance(next(lazy().parameters()), UninitializedParameter)
    torch.testing.assert_close(
        torch.compile(lazy(), backend="plait", options=options)(x), lazy()(x)
    )
    run = torch.compile(Layer().forward, backend="plait", options=options)
    assert run(x, Odd(k=2.0)).tolist() == (x * 2).tolist()
    odd = torch.compile(lambda x, d: x * d["k"], backend="plait", options=options)
    assert odd(x, Odd(k=2.0)).tolist() == (x * 2).tolist()


def test_environment(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not there is a key of bytes that a dict has not."""
    text = """
import os
def top(x, y, n, o):
    return x * (2 if os.environ.get("PLAIT_OF_NO_USE") else 3)
"""
    assert check(text, options) == "kept"
    assert check(text, options) == "warm"
    monkeypatch.setenv("PLAIT_OF_NO_USE", "1")
    assert check(text, options) != "warm"


def test_a_trace_that_is_given_up(options: dict[str, Any]) -> None:
    """Dynamo traces `top` as far as the break, and then without `inner`: what only the first trace
    called, which nothing names, does not count."""
    text = """
made = eval("lambda x: x * 2")
def inner(x):
    y = made(x)
    torch._dynamo.graph_break()
    return y
def top(x, y, n, o):
    return inner(x) + y
"""
    assert check(text, options) == "kept"
    assert check(text, options) == "warm"


def _gpt2() -> Callable[[], Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model, ids = GPT2LMHeadModel(config).train(), torch.randint(50, (1, 8))
    return lambda: model(input_ids=ids, labels=ids).loss


def _llama() -> Callable[[], Any]:
    from benchmarks.first_cases import llama

    model, inputs = llama(2)
    return lambda: model(*inputs)


@pytest.mark.parametrize("build", [_gpt2, _llama])
def test_models(build: Callable[[], Callable[[], Any]], options: dict[str, Any]) -> None:
    """What transformers' models look at on their way is kept, and so is a training step's loss."""
    run = build()
    for how in ("kept", "warm"):
        frames.outcomes.clear()
        torch._dynamo.reset()
        torch.compile(run, backend="plait", options=options)().sum().backward()
        assert {o.how for o in frames.outcomes} <= {how, "skipped"}, frames.outcomes
        assert how in {o.how for o in frames.outcomes}


@pytest.mark.parametrize("seed", [30002, pytest.param(range(400), marks=pytest.mark.slow)])
def test_fuzzed(seed: int | range) -> None:
    """`python -m tests.fuzz.warm` goes on."""
    told = Told()
    for s in [seed] if isinstance(seed, int) else seed:
        run_seed(s, told)
    assert not told.bad, json.dumps(told.bad)
    if isinstance(seed, range):
        assert told.counts["pairs"] > 2000 and told.counts["unedited, warm"] > 400, told.counts


# ------------------------------------------------------------------------------------ folders
SUM = "def top(x, y, n, o): return x + y"


def test_a_full_disk(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for others, the results are right, and nobody is warned of what this process
    does not need."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with warnings.catch_warnings():
            warnings.simplefilter("error", CacheWarning)
            assert "No space left" in check(SUM, options)
    assert check(SUM, options) == "kept"


def test_a_folder_that_others_write_to(options: dict[str, Any], tmp_path: Path) -> None:
    """Entries of anybody are not read."""
    assert check(SUM, options) == "kept"
    (entry,) = tmp_path.glob("warm/*/*.frame")
    entry.parent.chmod(0o777)
    with pytest.warns(CacheWarning, match="does not use"):
        assert check(SUM, options) != "warm"


def test_each_byte_counts(options: dict[str, Any], tmp_path: Path) -> None:
    """An entry that is cut or in which a bit is another one is compiled again."""
    assert check(SUM, options) == "kept"
    (path,) = tmp_path.glob("warm/*/*.frame")
    data = path.read_bytes()
    store = Store.of(Config().with_options(options), STARTS)
    with pytest.warns(CacheWarning, match="damaged"):
        for at in range(0, len(data), len(data) // 50):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert store.find(path.stem) is None, at
            path.write_bytes(data[:at])
            assert store.find(path.stem) is None, at
    assert check(SUM, options) == "kept" and check(SUM, options) == "warm"


def test_two_writers(options: dict[str, Any], tmp_path: Path) -> None:
    """Both write entries that are whole."""
    assert check(SUM, options) == "kept"
    (path,) = tmp_path.glob("warm/*/*.frame")
    store = Store.of(Config().with_options(options), STARTS)
    whole = store.read(path.stem)
    assert whole is not None, "nothing was kept"
    threads = [
        threading.Thread(target=lambda: [store.put(path.stem, whole) for _ in range(20)])
        for _ in range(2)
    ]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        assert store.read(path.stem) == whole
    assert check(SUM, options) == "warm"


# ------------------------------------------------------------------------------------ processes
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1024))
def test_processes(seed: int, tmp_path: Path) -> None:
    """Pairs of real ones, with kernels: the same version twice, then others."""
    env = {**os.environ, "PLAIT_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    hows = []
    for k in (0, 0, 1, 2, 0):
        args = ["-m", "tests.fuzz.warm", "--seed", str(seed), "--version", str(k), "--once"]
        run = processes.run(*args, env=env, cwd=Path(__file__).parent.parent)
        assert run.returncode == 0, run.stderr[-2000:]
        found = json.loads(run.stdout.splitlines()[-1])
        assert not found["wrong"], found
        hows.append(found["how"])
    if set(hows[0]) == {"kept"}:
        assert set(hows[1]) == set(hows[4]) == {"warm"}, hows


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
