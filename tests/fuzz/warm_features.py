"""What programs of the warm-start fuzzer are made of: pieces of Python text that differ in places.

A place is written <<a||b||c>>: the versions of a program take one of the texts each. <<~a||b>>: it
makes no difference to what the program computes. `_K` stands for the number of the piece in its
program, NEXT for the step of another piece or for `ident`. Each piece defines
`step_K(x, y, n, o)`, which gives a tensor: x and y are float tensors of one shape, n is a number
and o a tensor or None. `state_K()`, where it is defined, tells what the step has changed.
`# AFTER` begins what runs when all modules are imported, `# LATER` what runs after the first call.
"""

from __future__ import annotations

FEATURES: dict[str, str] = {}


def _add(name: str, text: str) -> None:
    FEATURES[name] = text.strip("\n") + "\n"


_add("helper code", """
def help_K(x):
    <<pass||"a text"||...>>
    return x * <<2.0||3.0||-1.5>> <<+||->> 1.0
def step_K(x, y, n, o):
    return help_K(NEXT(x, y, n, o)) <<||+ y||* y>>
""")
_add("global number", """
G_K = <<2||3||2.0||True||-0.0||0.0>>
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * G_K if G_K != 3 else x / (G_K + 1)
# LATER
G_K = <<~G_K||7||7.5>>
""")
_add("global tuple and dict", """
T_K = (1.0, <<2.0||4.0>>, <<"a"||"b">>)
D_K = {"k": <<1.5||2.5>>, <<"m"||"l">>: {"deep": [0.5, <<1.0||2.0>>]}}
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o) * T_K[1] + (1 if T_K[2] == "a" else 2)
    return x * D_K["k"] + D_K.get("m", {"deep": [3.0, 4.0]})["deep"][1]
# LATER
D_K["k"] = <<~D_K["k"]||9.0>>
""")
_add("defaults", """
def help_K(x, a=<<2.0||3.0>>, b=<<(1, 2.0)||(1, 3.0)||[1, 3.0]>>, *, c=<<1.0||1.5>>, d=<<None||1.0>>):
    return x * a + b[1] * c + (0 if d is None else d)
def step_K(x, y, n, o, s=<<0.5||0.25>>):
    return help_K(NEXT(x, y, n, o)) * s
# AFTER
<<~pass||help_K.__doc__ = "a text">>
<<pass||help_K.__defaults__ = (5.0, (1, 7.0))||help_K.__kwdefaults__ = {"c": 4.0, "d": None}>>
""")
_add("closure", """
def make_K(a, fn):
    b = [a, <<1.0||2.0>>]
    def inner(x):
        return fn(x) * a + b[1]
    return inner
closed_K = make_K(<<2.0||3.0>>, lambda x: x <<+||->> 1)
def step_K(x, y, n, o):
    return closed_K(NEXT(x, y, n, o))
""")
_add("closure in a class", """
def make_K(a):
    def inner(x):
        return x * a
    return inner
class Holder_K:
    f = staticmethod(make_K(<<2.0||3.0>>))
    g = make_K(<<1.5||2.5>>)
    h = {"f": make_K(<<1.0||2.0>>)}
    p = property(lambda self, a=<<1.0||2.0>>: a)
def step_K(x, y, n, o):
    x = Holder_K.f(NEXT(x, y, n, o)) + Holder_K.g(x) - Holder_K.h["f"](x)
    return x * Holder_K().p
""")
_add("class attributes", """
class Base_K:
    k = <<2.0||3.0>>
    m = <<(1.0, 2.0)||(1.0, 3.0)>>
    def scale(self, x):
        return x * self.k <<+||->> self.m[1]
class Mixin_K:
    def scale(self, x):
        return super().scale(x) * <<1.0||0.5>>
class Obj_K(<<Mixin_K, Base_K||Base_K>>):
    <<pass||k = 5.0||def scale(self, x): return x + 1>>
    @classmethod
    def make(cls, x):
        return cls().scale(x) * cls.k
    @staticmethod
    def stat(x):
        return x <<+||->> 2.0
obj_K = Obj_K()
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    return obj_K.scale(x) + Obj_K.make(x) + Obj_K.stat(x) + type(obj_K).k
# AFTER
<<pass||Base_K.k = 7.0||Obj_K.stat = staticmethod(lambda x: x * 3)||obj_K.k = 4.0>>
# LATER
<<~pass||Base_K.k = 8.0||obj_K.k = 6.0||Obj_K.k = 6.0>>
""")
_add("properties", """
class Obj_K:
    def __init__(self):
        self._a = <<1.0||2.0>>
    @property
    def a(self):
        return self._a * <<2.0||3.0>>
    @functools.cached_property
    def b(self):
        return <<1.5||2.5>>
    def __getattr__(self, name):
        if name == "c":
            return <<2.0||4.0>>
        raise AttributeError(name)
obj_K = Obj_K()
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * obj_K.a + obj_K.b * obj_K.c
# AFTER
<<pass||obj_K.c = 9.0||Obj_K.a = property(lambda self: 5.0)>>
""")
_add("descriptor", """
class Desc_K:
    def __init__(self, k):
        self.k = k
    def __get__(self, obj, owner=None):
        return self.k * <<1.0||2.0>>
class Obj_K:
    d = Desc_K(<<2.0||3.0>>)
    e = functools.partialmethod(lambda self, a, x: x * a, <<2.0||3.0>>)
obj_K = Obj_K()
def step_K(x, y, n, o):
    return obj_K.e(NEXT(x, y, n, o)) * obj_K.d + Obj_K.d
""")
_add("metaclass", """
class Meta_K(type):
    k = <<2.0||3.0>>
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.extra = <<1.0||2.0>>
        return made
    def scaled(cls, x):
        return x * cls.k
class Obj_K(metaclass=Meta_K):
    def run(self, x):
        return type(self).scaled(x) + <<1.0||2.0>>
obj_K = Obj_K()
def step_K(x, y, n, o):
    return obj_K.run(NEXT(x, y, n, o)) * Obj_K.k + obj_K.extra
""")
_add("enum", """
class Mode_K(enum.Enum):
    A = <<1||2>>
    B = <<5||6>>
class Level_K(enum.IntEnum):
    LOW = <<1||3>>
    HIGH = <<7||9>>
mode_K = Mode_K.<<A||B>>
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o) * Mode_K.A.value
    if mode_K is Mode_K.A:
        x = x + Mode_K.B.value
    return x * Level_K.LOW + mode_K.value
""")
_add("dataclass", """
@dataclasses.dataclass(<<frozen=True||frozen=False>>)
class Cfg_K:
    a: float = <<1.0||2.0>>
    b: tuple = <<(1.0, 2.0)||(1.0, 3.0)>>
    c: list = dataclasses.field(default_factory=lambda: [<<1.0||2.0>>])
    def total(self):
        return self.a + self.b[1] * <<1.0||2.0>>
cfg_K = Cfg_K(<<||a=3.0>>)
def step_K(x, y, n, o):
    made = Cfg_K(b=(1.0, 4.0))
    return NEXT(x, y, n, o) * cfg_K.total() + made.a + made.c[0] + cfg_K.b[1]
""")
_add("named tuple", """
class Point_K(typing.NamedTuple):
    a: float
    b: float = <<2.0||3.0>>
    def both(self):
        return self.a <<+||->> self.b
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * Point_K(<<1.0||1.5>>).both()
""")
_add("functions as values", """
def one_K(x): return x + 1
def two_K(x): return x * <<2||3>>
pick_K = <<one_K||two_K>>
table_K = {"r": torch.<<relu||sigmoid||tanh>>, "l": [one_K, <<one_K||two_K>>]}
part_K = functools.partial(torch.<<add||sub>>, alpha=<<1||2>>)
def step_K(x, y, n, o):
    x = part_K(pick_K(NEXT(x, y, n, o)), y)
    for f in table_K["l"]:
        x = f(x)
    return table_K["r"](x)
""")
_add("decorated", """
def deco_K(k):
    def outer(fn):
        @functools.wraps(fn)
        def wrapped(*args, **kwargs):
            return fn(*args, **kwargs) * k <<+||->> 1
        return wrapped
    return outer
@deco_K(<<2.0||3.0>>)
def help_K(x):
    return x <<+||->> 2
def step_K(x, y, n, o):
    return help_K(NEXT(x, y, n, o))
""")
_add("cached function", """
@functools.lru_cache(maxsize=None)
def value_K(a):
    return a * <<2.0||3.0>>
@functools.cache
def func_K():
    return lambda x: x <<+||->> 1
def step_K(x, y, n, o):
    return func_K()(NEXT(x, y, n, o)) * value_K(1.5)
""")
_add("layers", """
class Block_K(nn.Module):
    scale = <<1.0||2.0>>
    def __init__(self, k):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=<<True||False>>)
        self.k = k
        self.act = nn.<<ReLU||GELU||Tanh>>()
        self.register_buffer("buf", torch.full((4,), <<1.0||2.0>>))
        self.drop = nn.Dropout(<<0.0||0.0>>)
    def forward(self, x):
        return self.drop(self.act(self.lin(x))) * self.k + self.buf * self.scale
torch.manual_seed(5)
net_K = nn.Sequential(Block_K(1.0), <<nn.Identity()||nn.LayerNorm(4)>>, Block_K(<<1.0||2.0>>))
<<pass||net_K[2].lin = net_K[0].lin||net_K[2].lin.weight = net_K[0].lin.weight>>
def step_K(x, y, n, o):
    return net_K(NEXT(x, y, n, o))
def state_K():
    return [p.grad for p in net_K.parameters()]
# AFTER
<<pass||net_K.eval()||net_K[0].requires_grad_(False)||net_K[0].k = 5.0||net_K[0].act = nn.Sigmoid()>>
<<pass||nn.Linear.forward = lambda self, x: x * 3||net_K[0].forward = lambda x: x * 2||Block_K.forward = lambda self, x: x>>
# LATER
<<~pass||net_K[0].k = 6.0||net_K[0].scale = 9.0||net_K[0].lin.weight.data.mul_(2)>>
""")
_add("lists of layers", """
torch.manual_seed(6)
list_K = nn.ModuleList([nn.Linear(4, 4) for _ in range(<<2||3||1>>)])
dict_K = nn.ModuleDict({<<"a"||"c">>: nn.Linear(4, 4), "b": nn.Tanh()})
pars_K = nn.ParameterList([nn.Parameter(torch.ones(4) * <<1.0||2.0>>)])
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    for layer in list_K:
        x = layer(x)
    for name, layer in dict_K.items():
        x = layer(x) + len(name)
    return x * pars_K[0] + ("a" in dict_K)
def state_K():
    return [p.grad for p in (*list_K.parameters(), *dict_K.parameters(), *pars_K)]
""")
_add("hooks", """
torch.manual_seed(7)
hooked_K = nn.Linear(4, 4)
def hook_K(m, args, out): return out * <<2.0||3.0>>
def pre_K(m, args): return (args[0] + <<1.0||2.0>>,)
def step_K(x, y, n, o):
    return hooked_K(NEXT(x, y, n, o))
# AFTER
<<pass||hooked_K.register_forward_hook(hook_K)||hooked_K.register_forward_pre_hook(pre_K)>>
<<pass||nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 4)||nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] * 4,))>>
# LATER
<<~pass||hooked_K.register_forward_hook(lambda m, a, o: o * 5)>>
""")
_add("autograd function", """
def back_K(g): return g * <<2.0||3.0>>
class Fn_K(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return x * k + <<1.0||2.0>>
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return back_K(g) * ctx.k <<+||->> x * <<0.0||0.1>>, None
def step_K(x, y, n, o):
    return Fn_K.apply(NEXT(x, y, n, o), <<2.0||4.0>>)
""")
_add("regions", """
def step_K(x, y, n, o):
    with torch.<<no_grad||enable_grad>>():
        z = NEXT(x, y, n, o) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=<<False||True>>):
        w = torch.mm(y, y.t())
    return z + x * 3 + w.float().sum() * 0.01
""")
_add("numbers and options", """
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    if n > 2:
        x = x * n
    if o is not None:
        x = x + o
    return x + n
""")
_add("state", """
class Count_K:
    def __init__(self):
        self.n = <<0||5>>
        self.seen = []
counts_K = [Count_K(), Count_K()]
<<pass||counts_K[1] = counts_K[0]>>
TOTAL_K = 0
def step_K(x, y, n, o):
    global TOTAL_K
    a, b = counts_K
    a.n = a.n + 1
    b.n = b.n * 2
    a.seen.append(<<1||2>>)
    TOTAL_K = TOTAL_K + <<1||2>>
    return NEXT(x, y, n, o) * a.n + b.n
def state_K():
    return [(c.n, c.seen) for c in counts_K], TOTAL_K
""")
_add("writes to inputs", """
def step_K(x, y, n, o):
    with torch.no_grad():
        y.mul_(<<2.0||3.0>>)
    return NEXT(x, y, n, o) + y
""")
_add("buffers that are written", """
torch.manual_seed(8)
norm_K = nn.BatchNorm1d(4, momentum=<<0.1||0.5>>, eps=<<1e-5||1e-1>>)
class Ema_K(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(4), persistent=<<~True||False>>)
    def forward(self, x):
        self.m.mul_(0.5).add_(x.detach().mean(0), alpha=<<1||2>>)
        return x + self.m
ema_K = Ema_K()
def step_K(x, y, n, o):
    return ema_K(norm_K(NEXT(x, y, n, o)))
def state_K():
    return norm_K.running_mean, norm_K.running_var, norm_K.num_batches_tracked, ema_K.m
# AFTER
<<pass||norm_K.eval()||norm_K.track_running_stats = False||norm_K.momentum = 0.9>>
""")
_add("patched torch", """
class Use_K(nn.Module):
    def forward(self, x):
        return F.relu(x) + F.gelu(x) + x.sigmoid() + torch.tanh(x) + F.linear(x, torch.eye(4)) + x.softmax(-1)
use_K = Use_K()
def step_K(x, y, n, o):
    return use_K(NEXT(x, y, n, o)) + math.sqrt(4.0) * math.pi + nn.init.calculate_gain("relu") + F.layer_norm(x, (4,))
# AFTER
<<pass||F.relu = lambda x, *a, **k: x * 3||F.gelu = torch.tanh||torch.Tensor.sigmoid = lambda self: self * 5||torch.tanh = lambda x: x * 2||math.sqrt = lambda x: 3.0||math.pi = 4.0||F.linear = lambda x, w, b=None: x * 3||torch.Tensor.__add__ = lambda a, b: torch.sub(a, b)||F.layer_norm = lambda x, s: x * 4||torch.layer_norm = lambda x, *a: x * 4||nn.Module._call_impl = lambda self, *a: self.forward(*a) * 2||nn.Module.__call__ = lambda self, *a: self.forward(*a) * 2||torch.Tensor.softmax = lambda self, d: self * 7>>
""")
_add("patched deeper", """
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    return F.softmax(x, -1) + F.relu6(x) + F.mse_loss(x, y) + torch.einsum("ij,kj->ik", x, x).sum() + F.threshold(x, 0.1, 0.0) + F.normalize(x)
# AFTER
<<pass||torch.Tensor.softmax = lambda self, *a: self * 3||torch._C._nn.mse_loss = lambda *a: torch.ones(())||torch._C._nn.relu6 = lambda x: x * 3||F.hardtanh = lambda *a: a[0]||torch._VF.threshold = lambda x, *a: x * 9||torch.Tensor.norm = lambda self, *a, **k: self * 2||F._threshold = lambda *a: a[0] * 9||torch.linalg.vector_norm = lambda x, *a, **k: x * 2>>
""")
_add("shadowed builtins", """
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * sum((1.0, 2.0)) + max(1.0, 2.0) + len((1, 2)) + abs(-2.0)
<<pass||def sum(v): return 10.0||def max(*v): return 11.0||def len(v): return 12.0>>
# AFTER
<<pass||abs = lambda v: 3.0||builtins.abs = lambda v: 4.0>>
""")
_add("allowed in graph", """
DEEP_K = <<2.0||3.0>>
def deeper_K(x): return x <<+||->> 1
@torch._dynamo.allow_in_graph
def opaque_K(x):
    return deeper_K(x) * DEEP_K * <<1.0||2.0>>
@torch._dynamo.assume_constant_result
def constant_K():
    return DEEP_K + <<1.0||2.0>>
def step_K(x, y, n, o):
    return opaque_K(NEXT(x, y, n, o)) * constant_K()
""")
_add("allowed by a call", """
DEEPER_K = <<2.0||3.0>>
def plain_K(x):
    return x * DEEPER_K + <<1.0||2.0>>
def step_K(x, y, n, o):
    return plain_K(NEXT(x, y, n, o))
# AFTER
<<~pass||torch._dynamo.allow_in_graph(plain_K)>>
""")
_add("nonstrict", """
NK_K = <<2.0||3.0>>
@torch._dynamo.nonstrict_trace
def loose_K(x):
    return x * NK_K + <<1.0||2.0>>
def step_K(x, y, n, o):
    return loose_K(NEXT(x, y, n, o))
""")
_add("disabled", """
@torch._dynamo.disable
def never_K(x):
    return x * <<2.0||3.0>>
def maybe_K(x):
    return x + <<1.0||2.0>>
<<pass||maybe_K = torch._dynamo.disable(maybe_K)>>
def step_K(x, y, n, o):
    return maybe_K(NEXT(x, y, n, o))
""")
_add("custom operator", """
LIB_K = torch.library.Library("warmfuzz", "FRAGMENT")
LIB_K.define("op_K(Tensor x) -> Tensor")
LIB_K.define("par_K(Tensor x) -> Tensor")
def composite_K(x): return x * <<2.0||3.0>> + <<1.0||2.0>>
def part_K(x): return x * <<2.0||3.0>>
LIB_K.impl("op_K", composite_K, "CompositeImplicitAutograd")
LIB_K.impl("par_K", part_K, "CPU")
LIB_K.impl("par_K", lambda x: torch.empty_like(x), "Meta")
torch.library.register_autograd("warmfuzz::par_K", lambda ctx, g: g * <<2.0||5.0>>, lib=LIB_K)
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    return torch.ops.warmfuzz.op_K(x) <<||+ torch.ops.warmfuzz.par_K(x)>>
""")
_add("overridden operator", """
def step_K(x, y, n, o):
    return torch.ops.aten.hardswish(NEXT(x, y, n, o)) + F.softplus(x) + F.dropout(x, 0.0)
# AFTER
ATEN_K = torch.library.Library("aten", "IMPL")
<<pass||ATEN_K.impl("hardswish", lambda x: x * 3, "CPU")||ATEN_K.impl("softplus", lambda x, *a: x * 3, "CPU")||ATEN_K.impl("silu", lambda x, *a: x * 3, "CompositeImplicitAutograd")>>
<<pass||torch._decomp.decomposition_table[torch.ops.aten.softplus.default] = lambda x, *a: x * 5>>
""")
_add("custom op", """
@torch.library.custom_op("warmfuzz::cop_K", mutates_args=())
def cop_K(x: torch.Tensor) -> torch.Tensor:
    return x * <<2.0||3.0>>
@cop_K.register_fake
def _(x):
    return torch.empty_like(x)
cop_K.register_autograd(lambda ctx, g: g * <<2.0||3.0>>)
def step_K(x, y, n, o):
    return cop_K(NEXT(x, y, n, o))
""")
_add("isinstance", """
class Abs_K(abc.ABC):
    pass
class Thing_K:
    pass
class Meta_K(type):
    def __instancecheck__(cls, obj):
        return <<True||False>>
class Never_K(metaclass=Meta_K):
    pass
things_K = [Thing_K()]
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    if isinstance(things_K[0], Abs_K):
        x = x + 2
    if issubclass(Thing_K, Abs_K):
        x = x + 4
    if isinstance(things_K[0], Never_K):
        x = x * 2
    return x * (3 if hasattr(things_K[0], "late") else 1) + getattr(things_K[0], "w", 0.5)
# AFTER
<<pass||Abs_K.register(Thing_K)>>
<<pass||things_K[0].late = 1||Thing_K.late = 1||things_K[0].w = 2.0||Thing_K.w = 3.0>>
# LATER
<<~pass||things_K[0].late = 1||things_K[0].w = 5.0||Thing_K.w = 6.0>>
""")
_add("looking at functions", """
def look_K(x: <<int||float>>, b: int = 1):
    "<<a||ab||abc>>"
    return x
class Doc_K:
    "<<a||ab>>"
    a: int = 1
    <<b: int = 2||pass>>
look_K.scale = <<2.0||3.0>>
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o) * look_K.scale
    x = x + len(look_K.__name__) + len(Doc_K.__annotations__)
    return x + <<1||len(Doc_K.__doc__)||len(look_K.__doc__)>>
# AFTER
<<pass||look_K.__name__ = "another_name">>
""")
_add("flags that are read", """
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    x = x + (1 if torch.is_grad_enabled() else 2) + (1 if torch.get_default_dtype() == torch.float32 else 2)
    x = x * (2 if torch.are_deterministic_algorithms_enabled() else 1)
    <<pass||x = x + torch.get_num_threads()||x = x + (5 if torch.backends.mkldnn.flags is None else 6)||x = x + (2 if torch.get_float32_matmul_precision() == "high" else 3)||x = x + (1 if torch.is_autocast_enabled("cpu") else 4)||x = x + (1 if torch.backends.mkldnn.enabled else 4)||x = x + (1 if torch.backends.cudnn.benchmark else 4)>>
    return x + torch.ones(4) + (1 if torch.compiler.is_compiling() else 1)
""")
_add("environment", """
os.environ["WARMFUZZ_K"] = <<"1"||"2">>
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * float(os.environ.get("WARMFUZZ_K", "3")) + (1 if sys.flags.optimize else 2)
""")
_add("made by exec", """
space_K = {"K": <<2.0||3.0>>, "__name__": <<"nowhere_K"||__name__>>}
exec("def run(x, a=1.0):\\n    return x * K + a", space_K)
run_K = space_K["run"]
def step_K(x, y, n, o):
    return run_K(NEXT(x, y, n, o))
""")
_add("module attributes", """
mod_K = types.ModuleType("warmfuzz_mod_K")
mod_K.k = <<2.0||3.0>>
mod_K.fn = lambda x: x <<+||->> mod_K.k
sys.modules["warmfuzz_mod_K"] = mod_K
import warmfuzz_mod_K as other_K
def step_K(x, y, n, o):
    import warmfuzz_mod_K as third
    return other_K.fn(NEXT(x, y, n, o)) * mod_K.k + third.k
""")
_add("global tensors", """
torch.manual_seed(9)
CONST_K = torch.ones(4) * <<2.0||3.0>>
NUMBER_K = torch.tensor(<<2||3>>)
ARRAY_K = np.array([1.0, <<2.0||3.0>>], dtype=np.float32)
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o) * CONST_K + torch.tensor([1.0, <<2.0||3.0>>, 3.0, 4.0])
    return x * NUMBER_K + <<0||torch.from_numpy(ARRAY_K).sum()||float(ARRAY_K[1])||np.sqrt(4.0)>>
# AFTER
<<pass||CONST_K.requires_grad_()||CONST_K.factor = 2.0||CONST_K = CONST_K.double().float().t()>>
# LATER
<<~pass||CONST_K.mul_(2)||CONST_K = torch.zeros(4)||NUMBER_K = torch.tensor(9)>>
""")
_add("attributes of tensors", """
buf_K = torch.ones(4)
buf_K.factor = <<2.0||3.0>>
def step_K(x, y, n, o):
    k = getattr(x, "factor", 1.5)
    return NEXT(x, y, n, o) * buf_K.factor * k + (2 if hasattr(buf_K, "late") else 1)
# AFTER
<<pass||buf_K.late = 1||del buf_K.factor; buf_K.factor = 4.0>>
""")
_add("shared memory", """
base_K = torch.ones(8)
a_K = base_K[:4] <<||.clone()>>
b_K = base_K[<<4:||:4||2:6>>]
def step_K(x, y, n, o):
    with torch.no_grad():
        a_K.add_(1)
        z = b_K * 2
        b_K.mul_(2)
    return NEXT(x, y, n, o) + a_K + z
def state_K():
    return a_K, b_K, base_K
""")
_add("views as results", """
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    return x.<<t().t()||view(-1).view(x.shape)||detach()||contiguous()||unsqueeze(0)[0]>>
""")
_add("random numbers", """
import random as rnd_K
rnd_K.seed(<<1||2>>)
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) + <<rnd_K.random()||rnd_K.randint(0, 9)||0>>
""")
_add("iteration", """
items_K = {"a": 1.0, "b": <<2.0||3.0>>}
set_K = {1, <<2||3>>}
deq_K = collections.deque([1.0, <<2.0||3.0>>])
dd_K = collections.defaultdict(lambda: <<1.0||2.0>>)
od_K = collections.OrderedDict([("x", <<1.0||2.0>>)<<||, ("y", 3.0)>>])
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    for k, v in items_K.items():
        x = x * v + len(k)
    <<x = x + (2 in set_K)||x = x + sum(set_K)||x = x + deq_K[1]||x = x + dd_K["q"]||pass>>
    for k in od_K:
        x = x + od_K[k]
    return x + sum(v for v in [1.0, 2.0] if v > <<0.5||1.5>>) + (3 if 2 in (1, <<2||5>>) else 4)
# AFTER
<<pass||items_K.pop("a"); items_K["a"] = 1.0||items_K["c"] = 4.0>>
# LATER
<<~pass||items_K["d"] = 4.0||items_K["a"] = 7.0||od_K["z"] = 1.0>>
""")
_add("identities", """
class Thing_K:
    v = 1.0
first_K, second_K = Thing_K(), Thing_K()
SENTINEL_K = object()
<<pass||second_K = first_K>>
value_K = <<SENTINEL_K||None>>
l_K = [1.0, 2.0]
m_K = <<l_K||[1.0, 2.0]>>
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    if first_K is second_K:
        x = x + 2
    if l_K is m_K:
        x = x * 3
    if x is y:
        x = x + 5
    <<first_K.v = 5.0||pass>>
    return x * second_K.v + (3 if value_K is SENTINEL_K else 4)
def state_K():
    return first_K.v, second_K.v
""")
_add("special methods", """
class Num_K:
    def __init__(self, v): self.v = v
    def __add__(self, other): return Num_K(self.v <<+||->> other.v)
    def __eq__(self, other): return <<True||self.v == other.v>>
    def __hash__(self): return 1
    def __bool__(self): return <<True||False>>
    def __len__(self): return <<1||2>>
    def __contains__(self, v): return v > <<1||3>>
    def __getitem__(self, k): return k * <<2.0||3.0>>
    def __call__(self, x): return x * self.v
    def __enter__(self): return <<1.0||2.0>>
    def __exit__(self, *a): return None
    def __iter__(self): yield from (1.0, <<2.0||3.0>>)
num_K = Num_K(<<1.0||2.0>>)
def step_K(x, y, n, o):
    x = num_K(NEXT(x, y, n, o)) + (num_K + num_K).v + num_K[2]
    if num_K:
        x = x * 2
    if 2 in num_K:
        x = x + 3
    with num_K as k:
        x = x + k
    for v in num_K:
        x = x + v
    return x + len(num_K) + (2 if num_K == Num_K(7.0) else 1)
""")
_add("transforms", """
W_K = <<2.0||3.0>>
def loss_K(x):
    return (x * x * W_K).sum() * <<1.0||2.0>>
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    return torch.func.<<grad(loss_K)(x)||vmap(lambda r: r * W_K)(x)||vmap(torch.sin)(x)>>
""")
_add("context managers", """
@contextlib.contextmanager
def scaled_K(k):
    yield k * <<2.0||3.0>>
def gen_K(k):
    for i in range(<<2||3>>):
        yield i * k
def step_K(x, y, n, o):
    with scaled_K(<<1.0||2.0>>) as k:
        x = NEXT(x, y, n, o) * k
    for v in gen_K(2.0):
        x = x + v
    return x
""")
_add("dispatch", """
@functools.singledispatch
def single_K(x): return x * <<2.0||3.0>>
@single_K.register
def _(x: torch.Tensor): return x * <<4.0||5.0>>
class Reg_K:
    table = {}
    def __init_subclass__(cls, k=1.0, **kw):
        super().__init_subclass__(**kw)
        cls.k = k
        Reg_K.table[cls.__name__] = cls
class Sub_K(Reg_K, k=<<2.0||3.0>>):
    def run(self, x): return x * self.k
def step_K(x, y, n, o):
    <<x = single_K(x)||pass>>
    return Reg_K.table["Sub_K"]().run(NEXT(x, y, n, o))
""")
_add("slots and modules' getattr", """
class Slot_K:
    __slots__ = ("a", "b")
    def __init__(self): self.a, self.b = <<1.0||2.0>>, <<3.0||4.0>>
slot_K = Slot_K()
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * slot_K.a + slot_K.b
# LATER
slot_K.a = <<~slot_K.a||8.0>>
""")
_add("classes made inside", """
def step_K(x, y, n, o):
    k = <<2.0||3.0>>
    def inner(v, m=<<1.0||2.0>>):
        return v * k + m
    f = lambda v: inner(v) <<+||->> 1
    class Local:
        a = <<1.0||2.0>>
    return f(NEXT(x, y, n, o)) + <<1.0||Local.a>>
""")
_add("text and formats", """
NAME_K = <<"relu"||"sigmoid"||"tanh">>
FMT_K = <<"{}_x"||"{}_yy">>
def step_K(x, y, n, o):
    x = getattr(torch, NAME_K)(NEXT(x, y, n, o))
    return x * len(FMT_K.format("a")) + len(f"{NAME_K}!") + len("%s" % <<"a"||"ab">>) + ("re" in NAME_K)
""")
_add("dtypes and devices", """
DT_K = torch.<<float32||float64||bfloat16>>
def step_K(x, y, n, o, dt=torch.<<float32||float16>>):
    x = NEXT(x, y, n, o)
    return x.to(DT_K).to(dt).to(torch.float32) + torch.finfo(DT_K).bits + torch.zeros(4, device=x.device, dtype=DT_K).float()
""")
_add("shapes that decide", """
SIZES_K = (<<3||5>>, 4)
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    if x.shape[0] in SIZES_K:
        x = x * 2
    if x.stride(0) == 4:
        x = x + 1
    if x.is_contiguous():
        x = x + 2
    if x.requires_grad:
        x = x * 1.5
    if x.storage_offset() == 0:
        x = x + 3
    return x + x.dim() + x.numel()
""")
_add("training step", """
torch.manual_seed(10)
w_K = nn.Parameter(torch.ones(4))
opt_K = torch.optim.<<SGD||Adam>>([w_K], lr=<<0.1||0.2>>)
def step_K(x, y, n, o):
    return NEXT(x, y, n, o) * w_K
def state_K():
    return w_K, w_K.grad
# AFTER
<<pass||w_K.requires_grad_(False)||w_K.register_hook(lambda g: g * 2)>>
# LATER
<<~pass||w_K.data.mul_(3)>>
""")
_add("hooks of tensors", """
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o) * 2
    if x.requires_grad:
        x.register_hook(lambda g: g * <<2.0||3.0>>)
    return x
""")
_add("torch function", """
class Sub_K(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * <<2.0||3.0>> if func is torch.Tensor.mul else out
sub_K = torch.ones(4) <<||.as_subclass(Sub_K)>>
class Mode_K(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + <<1.0||2.0>> if func is torch.sin else out
def step_K(x, y, n, o):
    with Mode_K():
        x = torch.sin(NEXT(x, y, n, o))
    return torch.Tensor.mul(sub_K, x).as_subclass(torch.Tensor)
""")
_add("wrapped by torch", """
@torch.<<no_grad()||enable_grad()>>
def quiet_K(x): return x * <<2.0||3.0>>
@torch.compile(backend="plait")
def compiled_K(x): return x + <<1.0||2.0>>
def step_K(x, y, n, o):
    return quiet_K(NEXT(x, y, n, o)) + compiled_K(x)
""")
_add("results that are objects", """
@dataclasses.dataclass
class Out_K:
    a: torch.Tensor
    b: float = <<1.0||2.0>>
def out_K(x):
    return Out_K(x * <<2.0||3.0>>)
def step_K(x, y, n, o):
    made = out_K(NEXT(x, y, n, o))
    return made.a + made.b
""")
_add("polyfilled", """
def sub_K(a, b): return a <<+||->> b
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    x = x + functools.reduce(sub_K, [1.0, 2.0, 4.0])
    x = x * functools.reduce(operator.<<mul||add>>, [1.0, 2.0, 4.0]) + all(v > <<0||1>> for v in (1, 2))
    for a, b in zip([1.0, 2.0], map(lambda v: v * <<1.0||2.0>>, [3.0, 4.0])):
        x = x + a * b
    return x + sorted([3.0, 1.0, 2.0], key=lambda v: <<v||-v>>)[0] + list(itertools.accumulate([1.0, 2.0], sub_K))[1]
""")
_add("errors that are caught", """
def fail_K(v):
    if v > <<1.0||9.0>>:
        raise ValueError(<<"a"||"bc">>)
    return v
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    try:
        x = x * fail_K(2.0)
    except ValueError as e:
        x = x + len(e.args[0])
    return x + (1 if n == 2 else 2)
""")
_add("bound methods", """
class Own_K:
    def __init__(self, k): self.k = k
    def run(self, x): return x * self.k + <<1.0||2.0>>
own_K = Own_K(<<2.0||3.0>>)
bound_K = own_K.run
lst_K = [Own_K(1.0).run, Own_K(<<2.0||3.0>>).run]
part_K = functools.partial(Own_K(<<2.0||3.0>>).run)
def step_K(x, y, n, o):
    x = bound_K(NEXT(x, y, n, o))
    for f in lst_K:
        x = f(x)
    return x + part_K(y)
# LATER
<<~pass||own_K.k = 7.0>>
""")
_add("looking at tensors", """
t_K = torch.ones(8)
v_K = <<t_K||t_K[:4]||t_K[4:]||torch.ones(16)[::2]>>
<<pass||v_K.add_(0)||v_K.requires_grad_()||v_K.grad = torch.ones_like(v_K)>>
def step_K(x, y, n, o):
    x = NEXT(x, y, n, o)
    <<pass||x = x * (2 if y._is_view() else 1)||x = x * (2 if y._base is None else 1)||x = x * (2 if v_K._base is None else 1)||x = x * (2 if v_K.grad is None else 1)||x = x + v_K.untyped_storage().nbytes()||x = x * (2 if v_K.is_leaf else 1)||x = x * (2 if v_K.grad_fn is None else 1)||x = x + v_K.storage_offset()||x = x + v_K.output_nr||x = x * (2 if v_K.retains_grad else 1)||x = x + v_K.element_size() + v_K.nbytes||x = x * (2 if v_K._backward_hooks is None else 1)||x = x * (2 if v_K.is_shared() else 1)||x = x + len(v_K.__dict__)>>
    return x * v_K.sum()
# AFTER
<<pass||v_K.register_hook(lambda g: g * 2) if v_K.requires_grad else 0||v_K.share_memory_()||v_K.name_of_mine = 3>>
""")
