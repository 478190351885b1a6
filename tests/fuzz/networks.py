"""Layers in a row: convolutions of every kind, batch norms and pooling in several layouts; products
with what is computed before and behind them; concatenations and what reads them; reductions at very
different sizes; states that go through rows, which are written one by one.

A maker adds several statements, each of which reads the last one. What a program's weights are is
noted in `Maker.weights`: a module may hold them as parameters, and as constants.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.maker import Maker, name_of

LAYOUTS = ("plain", "plain", "channels_last", "channels_last", "transposed", "rotated")
CHANNELS = (1, 2, 3, 4, 8, 12, 16, 17, 32)
SHARP = ("relu()", "clamp(-1, 6)", "abs()", "neg()", "mul(2)")
"""What keeps whole numbers whole."""
SMOOTH = ("sigmoid()", "tanh()", "square()", "exp().log1p()")
ACTIVATIONS = (
    "F.gelu({})", "F.silu({})", "F.hardswish({})", "F.leaky_relu({}, 0.1)", "F.elu({})",
    "F.mish({})", "F.gelu({}, approximate='tanh')", "F.hardsigmoid({})", "F.softplus({})",
)  # fmt: skip


def weight(m: Maker, shape: tuple[object, ...], dtype: str, layout: str = "plain") -> str:
    """A new operand whose sizes are numbers."""
    name = m.operand(tuple(map(str, shape)), dtype, m.rng.choice(("whole", "normal")), "0", layout)
    m.weights.append(name)
    return name


def _float(m: Maker) -> str:
    return m.rng.choices(("float32", "bfloat16", "float16", "float64"), (7, 2, 1, 1))[0]


def _activated(m: Maker, x: str) -> str:
    way = m.rng.random()
    if way < 0.4:
        return m.add("epilogues", f"{x}.{m.rng.choice(SHARP)}", exact="whole") or x
    if way < 0.55:
        return m.add("epilogues", f"{x}.{m.rng.choice(SMOOTH)}", exact="no") or x
    return m.add("epilogues", m.rng.choice(ACTIVATIONS).format(x), exact="no") or x


# ----------------------------------------------------------------------------------- convolutions
def images(m: Maker) -> str:
    """An input of a convolution: batch, channels and one to three dimensions of space."""
    d = m.rng.choices((1, 2, 3), (2, 7, 1))[0]
    space = [m.rng.choice((*m.calls[0].sizes, "1", "5", "7", "8", "13")) for _ in range(d)]
    if d == 3:
        space = [m.rng.choice(("2", "3", "5")) for _ in range(d)]
    batch, channels = m.rng.choice(("1", "2", "3")), str(m.rng.choice(CHANNELS))
    layout = m.rng.choice(LAYOUTS if d == 2 else ("plain", "plain", "rotated", "transposed"))
    values = m.rng.choice(("whole", "normal"))
    return m.operand((batch, channels, *space), _float(m), values, "0", layout)


def _numbers(m: Maker, d: int, choices: tuple[int, ...]) -> str:
    """One number for all dimensions, or one for each."""
    if m.rng.random() < 0.6:
        return str(m.rng.choice(choices))
    return f"({', '.join(str(m.rng.choice(choices)) for _ in range(d))},)"


def convolution(m: Maker, x: str) -> str:
    """Of any kind; "" where eager refuses it."""
    v = m.value(x)
    d, c, dtype = v.ndim - 2, v.shape[1], name_of(v.dtype)
    if d not in (1, 2, 3) or c == 0:
        return ""
    groups = m.rng.choice([1, 1, 1, c, *(g for g in (2, 4) if c % g == 0)])
    out = groups * m.rng.choice((1, 1, 2, 3, 8, 16, 17)) if groups < 5 else groups
    out = out if out <= 64 else groups
    kernel = [m.rng.choice((1, 1, 2, 3, 3, 5) if d < 3 else (1, 2, 3)) for _ in range(d)]
    kernel = [1] * d if m.rng.random() < 0.2 else kernel
    transposed = m.rng.random() < 0.25
    given = (c, out // groups, *kernel) if transposed else (out, c // groups, *kernel)
    layout = "channels_last" if d == 2 and m.rng.random() < 0.2 else "plain"
    w = weight(m, given, dtype, layout)
    bias = weight(m, (out,), dtype) if m.rng.random() < 0.6 else "None"
    stride = _numbers(m, d, (1, 1, 2, 3))
    more = f", {stride}, {_numbers(m, d, (0, 1, 1, 2))}"
    if transposed:
        more += f", {m.rng.choice((0, 0, 1))}, {groups}, {_numbers(m, d, (1, 1, 2))}"
        return m.add("convolutions", f"F.conv_transpose{d}d({x}, {w}, {bias}{more})", exact="whole")
    more += f", {_numbers(m, d, (1, 1, 1, 2))}, {groups}"
    return m.add("convolutions", f"F.conv{d}d({x}, {w}, {bias}{more})", exact="whole")


def _batch_norm(m: Maker, x: str) -> str:
    c, dtype = m.value(x).shape[1], name_of(m.value(x).dtype)
    mean, var, one, two = (weight(m, (c,), dtype) for _ in range(4))
    if m.grads or m.rng.random() < 0.2:
        text = f"F.batch_norm({x}, None, None, {one}, {two}, training=True, eps=0.1)"
    else:
        text = f"F.batch_norm({x}, {mean}, {var}.abs(), {one}, {two}, eps=0.1)"
    return m.add("convolutions", text, exact="no")


def _sampled(m: Maker, x: str) -> str:
    """x at positions that an operand says, inside of it and a little outside: eighths, which no
    arithmetic rounds, for behind a rounded position lie other elements."""
    v, d = m.value(x), m.value(x).ndim - 2
    dtype = name_of(v.dtype)
    if d not in (2, 3) or dtype not in ("float32", "float64"):
        return ""
    shape = (v.shape[0], *v.shape[3:], 4, d)
    grid = m.operand(tuple(map(str, shape)), dtype, "whole", "0", "plain")
    mode = m.rng.choice(("bilinear", "bilinear", "nearest", "bicubic" if d == 2 else "bilinear"))
    how = f"'{mode}', '{m.rng.choice(('zeros', 'border', 'reflection'))}', {m.rng.random() < 0.5}"
    # Eager crashes in the gradient at positions that are no numbers.
    text = f"F.grid_sample({x}, {grid}.nan_to_num().clamp(-2, 2) * 0.625, {how})"
    return m.add("convolutions", text, exact="no")


def _behind(m: Maker, x: str, before: str) -> str:
    """What comes behind a convolution. before: a tensor that may be added to it."""
    v, d = m.value(x), m.value(x).ndim - 2
    c, k = v.shape[1], m.rng.choice((2, 3))
    way = m.rng.choice(
        ("norm", "norm", "activation", "activation", "activation", "sum", "sum", "scale", "pool",
         "average", "resize", "pad", "shuffle", "branches", "mean", "chunk", "group", "sample")
    )  # fmt: skip
    if way == "sample":
        return _sampled(m, x)
    if way == "norm":
        return _batch_norm(m, x)
    if way == "sum":
        other = before if m.value(before).shape == v.shape else m.other(x, name_of(v.dtype), True)
        return m.add("convolutions", f"{x} + {other}", exact="whole") if other else ""
    if way == "scale":
        s = weight(m, (c, *[1] * d), name_of(v.dtype))
        return m.add("convolutions", f"{x} * {s}", exact="whole")
    if way == "branches":
        other = convolution(m, before) or convolution(m, before)
        return m.add("convolutions", f"torch.cat([{x}, {other}], 1)") if other else ""
    texts = {
        "pool": f"F.max_pool{d}d({x}, {k}, {m.rng.choice((1, 2))}, {k // 2})",
        "average": f"F.avg_pool{d}d({x}, {k}, {m.rng.choice((1, 2))}, {k // 2})",
        "resize": f"F.interpolate({x}, scale_factor=2)",
        "pad": f"F.pad({x}, (1, {m.rng.choice((0, 2))}))",
        "shuffle": f"F.pixel_shuffle({x}, 2)" if c % 4 == 0 else f"F.pixel_unshuffle({x}, 2)",
        "mean": f"{x} * {x}.mean({tuple(range(2, 2 + d))}, keepdim=True)",
        "chunk": f"{x}.chunk(2, 1)[{m.rng.choice((0, 1))}]",
        "group": f"F.group_norm({x}, {2 if c % 2 == 0 else 1}, eps=0.1)",
    }
    if way == "activation":
        return _activated(m, x)
    exact = {"pool": "bits", "resize": "bits", "pad": "bits", "shuffle": "bits", "chunk": "bits"}
    return m.add("convolutions", texts[way], exact=exact.get(way, "no"), jumpy=way == "pool")


def network(m: Maker) -> str:
    """Convolutions in a row, and perhaps what classifies their last result."""
    x = before = images(m)
    for _ in range(m.rng.randint(1, 3)):
        made = convolution(m, x) or convolution(m, x)
        if not made:
            break
        before, x = x, made
        for _ in range(m.rng.randint(0, 3)):
            x = _behind(m, x, before) or x
        if m.value(x).numel() == 0:
            return x
    if m.rng.random() < 0.25:
        flat = m.add("convolutions", f"{x}.mean({tuple(range(2, m.value(x).ndim))})", exact="no")
        if flat:
            w = weight(m, (m.rng.choice((5, 17, 33)), m.value(flat).shape[1]), _dtype(m, flat))
            return m.add("products", f"F.linear({flat}, {w})", exact="no")
    return x


# --------------------------------------------------------------------------------------- products
def _dtype(m: Maker, x: str) -> str:
    return name_of(m.value(x).dtype)


def _before(m: Maker, x: str) -> str:
    """What comes before a product."""
    way = m.rng.random()
    if way < 0.5:
        return x
    if way < 0.7:
        return _activated(m, x)
    if way < 0.8:
        return m.add("products", f"F.layer_norm({x}, ({m.value(x).shape[-1]},), eps=0.1)",
                     exact="no") or x  # fmt: skip
    other = m.other(x, _dtype(m, x))
    return (m.add("products", f"{x} + {other}", exact="whole") if other else "") or x


def _epilogues(m: Maker, x: str) -> str:
    """What comes behind a product, and further results of it."""
    for _ in range(m.rng.randint(0, 3)):
        v, way = m.value(x), m.rng.randrange(9)
        other = m.other(x, _dtype(m, x), same=way == 0) if way < 3 else None
        texts = (
            f"{x} + {other}", f"{x} * {other}", f"{other} - {x}",
            f"{x}.to(torch.{m.rng.choice(('float32', 'bfloat16', 'float16'))})",
            f"{x} * {m.rng.choice(('0.5', '2', '-3'))}", f"F.softmax({x}.float(), -1)",
            f"{x}.sum(-1)", f"F.layer_norm({x}, ({v.shape[-1] if v.ndim else 1},), eps=0.1)",
            f"{x}.amax(-1, keepdim=True)",
        )  # fmt: skip
        exact = {5: "no", 7: "no"}.get(way, "whole")
        if way < 3 and other is None or v.ndim == 0:
            made = _activated(m, x)
        else:
            made = m.add("epilogues", texts[way], exact=exact)
        x = made or x
    return x


def products(m: Maker) -> str:
    """One product or several of one operand, of matrices or of batches of them, of odd sizes
    too."""
    sizes = (*m.calls[0].sizes, "1", "2", "7", "16", "33")
    depth = m.rng.choice((1, 2, 3, 5, 8, 16, 17, 33, 64))
    columns = m.rng.choice((1, 2, 5, 7, 8, 16, 17, 31, 33, 64, 65))
    lead = tuple(m.rng.choice(("1", "2", "3", "4")) for _ in range(m.rng.choice((0, 0, 1, 1, 2))))
    layout = m.rng.choice(("plain", "plain", "plain", "transposed", "stepped", "expanded"))
    values = m.rng.choice(("whole", "normal"))
    a = m.operand((*lead, m.rng.choice(sizes), str(depth)), _float(m), values, "0", layout)
    dtype = _dtype(m, a)
    x = _before(m, a)
    dtype = _dtype(m, x)
    made = []
    for _ in range(m.rng.choice((1, 1, 1, 2, 3))):
        text = _product(m, x, lead, depth, columns, dtype)
        y = m.add("products", text, exact="whole")
        if y:
            made.append(_epilogues(m, y))
    if len(made) > 1 and m.value(made[0]).shape == m.value(made[1]).shape:
        how = m.rng.choice(("F.silu({}) * {}", "F.gelu({}) * {}", "{} + {}", "torch.cat([{}, {}])"))
        return m.add("products", how.format(*made[:2]), exact="no")
    return made[-1] if made else ""


def _product(m: Maker, x: str, lead: tuple[str, ...], depth: int, columns: int, dtype: str) -> str:
    """A product of x, of shape (*lead, rows, depth), with weights or with another tensor."""
    way = m.rng.randrange(10)
    if way < 4:
        w = weight(m, (columns, depth), dtype)
        bias = weight(m, (columns,), dtype) if way < 2 else "None"
        return f"F.linear({x}, {w}, {bias})"
    if way < 6 or not lead:
        w = weight(m, (depth, columns), dtype, m.rng.choice(("plain", "plain", "transposed")))
        if not lead and way % 2:
            bias, beta = weight(m, (columns,), dtype), m.rng.choice(("1", "0.5", "0"))
            return f"torch.addmm({bias}, {x}, {w}, beta={beta}, alpha={m.rng.choice((1, 2))})"
        return f"{x} @ {w}"
    shape = (*lead, str(depth), str(columns))
    if way < 7:
        shape = tuple("1" if k == 0 else s for k, s in enumerate(shape))
    b = m.operand(shape, dtype, m.rng.choice(("whole", "normal")), "0",
                  m.rng.choice(("plain", "transposed", "rotated")))  # fmt: skip
    if way == 9 and len(lead) == 1:
        bias = weight(m, (columns,), dtype)
        return f"torch.baddbmm({bias}, {x}, {b}, beta={m.rng.choice(('1', '0.5', '0'))})"
    return f"{x} @ {b}"


TURNED = (
    "torch.cat([-{x}[..., {n}:], {x}[..., :{n}]], -1)",
    "torch.cat([{x}[..., {n}:], -{x}[..., :{n}]], -1)",
    "torch.stack([-{x}[..., 1::2], {x}[..., ::2]], -1).flatten(-2)",
    "{x}.unflatten(-1, (2, {n})).flip(-2).flatten(-2)", "{x}.roll({n}, -1)", "{x}.flip(-1)",
    "torch.cat([{x}[..., {n}:] * 2, {x}[..., {n}:]], -1)", "{x}.roll(1, -1)",
)  # fmt: skip
"""Columns of which each is beside another, which is in most of them its partner in a pair."""
GATES = (
    "F.silu({x}.chunk(2, -1)[0]) * {x}.chunk(2, -1)[1]", "{x}[..., ::2] * {x}[..., 1::2].tanh()",
    "torch.cat([{x}.chunk(2, -1)[1].relu(), {x}.chunk(2, -1)[0]], -1)", "F.glu({x}, -1)",
)  # fmt: skip


def heads(m: Maker) -> str:
    """A product with a head in each group of columns, a part of which is mixed in pairs, as by a
    rotary embedding, or opens the other part."""
    half, count = m.rng.choice((1, 2, 4, 5, 8, 16)), m.rng.choice((1, 2, 3, 4))
    first = m.rng.choice((0, 0, 0, half, 2 * half, 3))
    width = first + 2 * half + m.rng.choice((0, 0, 0, 2 * half, 3, 8))
    count = max(count, -(-64 // width))
    depth, rows = m.rng.choice((128, 136)), m.rng.choice((*m.calls[0].sizes, "1", "3", "16"))
    lead = tuple(m.rng.choice(("1", "2")) for _ in range(m.rng.choice((0, 0, 1))))
    dtype = m.rng.choices(("bfloat16", "float16", "float32"), (4, 2, 1))[0]
    x = m.operand((*lead, rows, str(depth)), dtype, m.rng.choice(("whole", "normal")), "0", "plain")
    w = weight(m, (count * width, depth), dtype)
    bias = weight(m, (count * width,), dtype) if m.rng.random() < 0.4 else "None"
    y = m.add("products", f"F.linear({x}, {w}, {bias})", exact="whole")
    y = m.add("views", f"{y}.unflatten(-1, ({count}, {width}))") if y else ""
    if y and m.rng.random() < 0.5:
        y = m.add("views", f"{y}.transpose(-2, -3)")
    for _ in range(m.rng.choice((1, 1, 1, 2)) if y else 0):
        made = _mixed(m, y, first, half)
    if y and m.rng.random() < 0.2:
        m.add("products", f"{y}.sum(-1)", exact="whole")
    return made if y else ""


def _mixed(m: Maker, y: str, first: int, half: int) -> str:
    """A part of a head's columns, mixed, and the rest of them as they are, or gone."""
    last, width, dtype = first + 2 * half, m.value(y).shape[-1], _dtype(m, y)
    x = y
    if width > 2 * half:
        x = m.add("views", f"{y}[..., {first}:{last}]")
    if m.rng.random() < 0.25:
        return m.add("products", m.rng.choice(GATES).format(x=x), exact="no") if x else ""
    turned = m.add("views", m.rng.choice(TURNED).format(x=x, n=half)) if x else ""
    shape = m.shape_of(x) if turned else None
    if shape is None:
        return ""
    cos, sin = (
        m.operand(tuple("1" if m.rng.random() < 0.3 else n for n in shape), dtype, values)
        for values in ("normal", m.rng.choice(("whole", "normal")))
    )
    made = m.add("products", f"{x} * {cos} + {turned} * {sin}", exact="whole")
    if not made or x == y or m.rng.random() < 0.3:
        return _activated(m, made) if made else ""
    parts = f"{y}[..., :{first}], {made}, {y}[..., {last}:]"
    return m.add("concatenations", f"torch.cat([{parts}], -1)")


SPREAD = (
    "({a}[:, :, None] * {b}[:, None]).sum(-1)",
    "({a}[:, :, None] * {b}[:, None]).sum((-1,), True)",
    "({a}.mT[..., None] * {b}.mT[:, :, None]).sum(1)",
    "({b}[:, None] * {a}[:, :, None]).sum(3)",
    "({a}.permute(1, 0, 2)[:, None] * {b}.permute(1, 0, 2)).sum(3)",
    "({a}[:, :, None].expand(-1, -1, {b}.shape[1], -1) * {b}[:, None]).sum(-1, keepdim=True)",
    "({a}[:, :, None] * {b}[:, None]).float().sum(-1)",
    "({a}[:, :, None] * {b}[:, None]).sum(-1, dtype=torch.float64)",
    "({a}[0, :, None] * {b}).sum((0, 2))",
    "({a}[:, :, None] * {b}[:, None]).sum((0, 3))",
    "({a}[:, :, None] * {b}[:1, None]).sum(-1)",
    "({a}[:, :, None] * {b}[:, None] * 0.5).sum(-1)",
    "({a}[0, :, None] * {b}[0]).sum(-1)",
)


def written_out(m: Maker) -> str:
    """A product of matrices as an elementwise product and its sum, and what reads it."""
    sizes = (*m.calls[0].sizes, "1", "2", "7", "16", "33")
    batch, depth = m.rng.choice((*m.calls[0].sizes, "1", "3")), m.rng.choice(sizes)
    dtype, values = _float(m), m.rng.choice(("whole", "normal", "special"))
    layouts = ("plain", "plain", "transposed", "stepped", "expanded")
    a = m.operand((batch, m.rng.choice(sizes), depth), dtype, values, "0", m.rng.choice(layouts))
    a = _before(m, a) if m.rng.random() < 0.5 else a
    other = _dtype(m, a) if m.rng.random() < 0.85 else m.rng.choice(("int64", "bool", "float64"))
    b = m.operand((batch, m.rng.choice(sizes), depth), other, "", "0", m.rng.choice(layouts))
    x = m.add("products", m.rng.choice(SPREAD).format(a=a, b=b), exact="whole")
    if x and m.rng.random() < 0.3:
        return m.add("views", f"{x}{m.rng.choice(('.diagonal(1)', '[1:]', '.mT', '[..., 1:]'))}")
    return _activated(m, x) if x and m.rng.random() < 0.6 else x


# -------------------------------------------------------------------------------- concatenations
def concatenation(m: Maker) -> str:
    """A long one, of parts that are computed, and several readers."""
    n, d = m.rng.choice((2, 2, 3, 5, 9)), m.rng.choice((0, 1))
    sizes = (*m.calls[0].sizes, "1", "3", "8", "17")
    rest, dtype, parts = m.rng.choice(sizes), _float(m), []
    for _ in range(n):
        shape = [m.rng.choice(("1", "2", "3", "5", "16", *m.calls[0].sizes)), rest]
        x = m.operand(
            tuple(shape if d == 0 else shape[::-1]), dtype, m.rng.choice(("whole", "normal"))
        )
        parts.append(_activated(m, x) if m.rng.random() < 0.6 else x)
        if m.rng.random() < 0.1:
            parts.append(parts[0])
    whole = m.add("concatenations", f"torch.cat([{', '.join(parts)}], {d})")
    made = whole
    for _ in range(m.rng.randint(1, 3) if whole else 0):
        made = _read(m, whole, d) or made
    return made


def _read(m: Maker, x: str, d: int) -> str:
    n = m.value(x).shape[d]
    k = m.rng.randint(0, max(n - 1, 0))
    part = f"{x}.narrow({d}, {k}, {max(min(n - k, 7), 0)})"
    other = m.other(x, _dtype(m, x), same=True)
    texts = [
        f"{part} * 2", f"{x}.sum({d})", f"{x}.sum({1 - d})", f"F.softmax({x}, {d})", f"{x}.mT + 1",
        f"{x}.amax({1 - d})", f"{x} * {other}" if other else f"{x} * 3", f"{x}.cumsum({d})",
        f"torch.cat([{x}, {part}], {d}) + 1", f"F.pad({x}, (1, 2)) + 1", f"{x}.flip({d}) - {x}",
        f"{x}.chunk(2, {d})[0].relu()", f"F.layer_norm({x}, ({m.value(x).shape[1]},), eps=0.1)",
    ]  # fmt: skip
    k = m.rng.randrange(len(texts))
    return m.add("concatenations", texts[k], exact="no" if k in (3, 12) else "whole")


# ------------------------------------------------------------------------------------- reductions
def reduction(m: Maker) -> str:
    """Over any dimension, of sizes of which one may be large in some calls and small in others."""
    n = m.rng.choice(tuple(m.calls[0].sizes))
    shape = [m.rng.choice(("1", "2", "3", "7", "16")), n, m.rng.choice(("1", "1", "2", "3"))]
    m.rng.shuffle(shape)
    # The mean of equal numbers may be off by a bit of them, of which nothing is left in float64.
    values = m.rng.choice(("whole", "normal", "special"))
    x = m.operand(tuple(shape), _float(m), values)
    x = _activated(m, x) if m.rng.random() < 0.4 else x
    d = m.rng.randrange(3)
    texts = (
        f"{x}.sum({d})", f"{x}.amax({d})", f"{x}.sum()", f"F.softmax({x}, {d})", f"{x}.var({d})",
        f"F.log_softmax({x}, {d})", f"{x} - {x}.mean({d}, keepdim=True)", f"{x}.logsumexp({d})",
        f"F.layer_norm({x}, {x}.shape[2:], eps=0.1)", f"{x}.norm(dim={d})",
    )  # fmt: skip
    k = m.rng.choice((0, 1, 2, 10, 11)) if values == "special" else m.rng.randrange(12)
    if k >= len(texts):
        return m.add("reductions", f"{x}.{('argmax', 'argmin')[k % 2]}({d})", jumpy=True)
    made = m.add("reductions", texts[k], exact="whole" if k < 3 else "no")
    return _activated(m, made) if made and m.rng.random() < 0.3 else made


STEPS = (
    ("{h} + {x}", "whole"), ("({h} + {x}).relu()", "whole"), ("{h} * {w} + {x}", "whole"),
    ("torch.maximum({h}, {x} * 2)", "whole"), ("torch.tanh({h} * {w} + {x})", "no"),
    ("{h} * {x}.sigmoid() + {w}", "no"), ("F.silu({x}) - {h}", "no"),
)  # fmt: skip


def recurrence(m: Maker) -> str:
    """A state that goes through the rows of a tensor, each of which is written where another has
    its rows: mostly all, in any order, perhaps twice, or read on the way."""
    d, n = m.rng.choice((0, 1, 1, 2)), m.rng.randint(1, 6)
    shape = [m.rng.choice((*m.calls[0].sizes, "1", "3", "16")) for _ in range(3)]
    rest, shape[d] = shape[:d] + shape[d + 1 :], str(n)
    dtype, values = _float(m), m.rng.choice(("whole", "normal"))
    x = m.operand(tuple(shape), dtype, values)
    h, w = m.operand(tuple(rest), dtype, values), weight(m, (1,), dtype)
    other = dtype if m.rng.random() < 0.8 else m.rng.choice(("float32", "float16", "float64"))
    start = f"torch.{m.rng.choice(('zeros', 'ones'))}_like({x}, dtype=torch.{other})"
    out = m.add("recurrences", start)
    at = [*range(n), *(m.rng.randrange(n) for _ in range(m.rng.choice((0, 0, 1))))]
    if m.rng.random() < 0.5:
        at = at[::-1] if m.rng.random() < 0.5 else m.rng.sample(at, len(at))
    text, exact = m.rng.choice(STEPS)
    for k in at[m.rng.random() < 0.1 :] if out else ():
        row = f"{x}.select({d}, {k})"
        h = m.add("recurrences", text.format(h=h, x=row, w=w), exact=exact) or h
        to = k - n if m.rng.random() < 0.1 else k
        ways = (f"{out}.select({d}, {to}).copy_({h})", f"{out}[{':, ' * d}{to}] = {h}")
        m.add("in place", m.rng.choice(ways), out="")
        if m.rng.random() < 0.05:
            h = m.add("recurrences", f"{out}.select({d}, {k}).to({x}.dtype) + {h}") or h
    if out and m.rng.random() < 0.3:
        return (
            m.add("recurrences", f"{out}{m.rng.choice(('.mT', ' * 2', '[:1]', '.sum(0)'))}") or out
        )
    return out


MAKERS: tuple[tuple[float, Callable[[Maker], str]], ...] = (
    (4, network), (4, products), (2, heads), (2, written_out), (2, concatenation), (2, reduction),
    (2, recurrence),
)  # fmt: skip
