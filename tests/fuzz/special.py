"""Statements beyond templates: sizes that depend on data, functions of sizes, writes in place,
dtype views, products of mixed dtypes, layers."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.maker import Maker, name_of


def _texts(text: str) -> tuple[str, ...]:
    """What ";" parts."""
    return tuple(t.strip() for t in text.split(";"))


# ------------------------------------------------------------------------ sizes that depend on data
def selected(m: Maker) -> str:
    """A tensor with as many elements as data say, and what computes with it."""
    x = m.pick("nb", 1, exact=True)
    shape = m.shape_of(x)
    if shape is None or m.value(x).ndim > 3:
        return ""
    texts = [
        f"{x}[{x} > 0]", f"torch.masked_select({x}, {x} > 0)", f"{x}.nonzero()",
        f"torch.unique({x})", f"{x}[{x} != 0]", f"torch.nonzero({x} > 0)[..., 0]",
        f"{x}[{x}.reshape({x}.shape[0], -1).amax(1) > 0]", f"torch.unique_consecutive({x})",
        f"torch.argwhere({x} > 0)", f"torch.where({x} > 0)[0]",
    ]  # fmt: skip
    if m.value(x).ndim == 1:
        n = m.operand(shape, "int64", "index", "3")
        texts += [f"torch.repeat_interleave({x}, {n})", f"{x}.repeat_interleave({n}, 0)"] * 2
    t = m.add("data-dependent size", m.rng.choice(texts), jumpy=True)
    for _ in range(m.rng.randint(0, 2)):
        if t and m.value(t).ndim:
            t = _after(m, t) or t
    return t


def _after(m: Maker, t: str) -> str:
    v = m.value(t)
    count = v.shape[0]
    dtype = name_of(v.dtype)
    other = m.operand((str(count), *map(str, v.shape[1:])), dtype, layout="plain")
    flat = [
        f"{t}.sum(0)",
        f"{t} * 2",
        f"{t} + {other}",
        f"{other} * {t}",
        f"{t}.view({count})",
        f"{t}.view({count}, -1)",
    ]
    flat += [
        f"torch.cat([{t}, {t}])",
        f"{t}.cumsum(0)",
        f"{t}[:1]",
        f"{t}.reshape(2, -1)",
        f"{t} - {t}.sum()",
    ]
    if v.ndim == 1:
        w = m.operand((str(count), "3"), dtype)
        flat += [
            f"{t} @ {w}",
            f"torch.cat([{t}, {t}]).view(2, {count})",
            f"torch.stack([{t}, {other}])",
        ]
    if m.rng.random() < 0.3:
        check = m.rng.choice(
            (f"{t}.size(0) == {count}", f"{t}.size(0) <= {max(count, 2)}", f"{t}.size(0) >= 2")
        )
        if not m.add("check", f"torch._check({check})", out="") and not m.ended:
            m.unruly(f"torch._check({check})")
    else:
        text = m.rng.choice(flat)
        return m.add("data-dependent size", text, exact="whole") or m.unruly(text)
    return ""


ITEMS = _texts("""
    {x}[{k}];  {x}.select(1, {k});  {x}.narrow(0, {k}, 1);  {x}[:{k}];  {x} * {k};  {x}[{k}:];
    torch.zeros({k}, device={x}.device);  torch.arange({k}, device={x}.device);
    {x}[:, {k}].sum(0);  torch.full((2,), {k}, device={x}.device);  {x}.roll({k}, 0);
    {x}.narrow(0, 0, {k});  {x}[{k}] + {x}[0];  torch.ones({k}, 3, device={x}.device).sum(0)
""")


def item(m: Maker) -> str:
    """A number out of a tensor, and what computes with it."""
    x = m.pick("n", 2)
    bound = min(min(e[x].shape[:2]) for e in m.env) if m.value(x).ndim >= 2 else 0
    if bound == 0:
        return ""
    i = m.operand((), "int64", "index", str(bound))
    k = m.add("item", f"{i}.item()", out="u")
    if not k:
        return ""
    if m.rng.random() < 0.4:
        m.add("check", f"torch._check({k} >= 0)", out="")
        m.add("check", f"torch._check({k} < {bound})", out="")
    if m.rng.random() < 0.3:
        c = m.add("in place", f"{x}.clone()")
        m.add(
            "in place", m.rng.choice((f"{c}[{k}] = 5", f"{c}[{k}] += 1", f"{c}[:{k}] = 2")), out=""
        ) if c else ""
        return c
    return m.add("item", m.rng.choice(ITEMS).format(x=x, k=k), exact="whole")


# ------------------------------------------------------------------------------ functions of sizes
SIZES = _texts("""
    int(math.sqrt({}));  int({} ** 0.5);  {} ** 1.5;  math.log2({} + 1);  math.sin({});
    round({} / 2);  {} // 2;  round({} * 0.37, 1);  2 ** ({} // 4);  {} & 5;  {} | 3;  {} ^ 6;
    {} % 3;  -{} // 3;  {} / 4;  max({}, 3);  min({}, 4);  abs({} - 4);  math.ceil({} / 3);
    math.floor({} * 0.3);  int({} * 0.5);  {} * {} - 1;  {} >> 1;  {} << 1;  math.exp(-{});
    float({});  int(math.log2({} + 1));  {} ** 2;  math.isqrt({});  {} // (-2);  {} % -3;
    math.prod([{}, 2]);  math.trunc({} / 2);  divmod({}, 3)[0];  int({} > 3);  2.0 ** {};
    {} ** -1
""")


def size_function(m: Maker) -> str:
    x = m.pick("n", 1)
    d = m.rng.randrange(m.value(x).ndim)
    n = m.add("sizes", f"{x}.shape[{d}]", out="s")
    if not n:
        return ""
    f = m.rng.choice(SIZES).replace("{}", n)
    s = m.add("sizes", f, out="s")
    if not s:
        return ""
    texts = [
        f"{x} * {s}",
        f"{x} + {s}",
        f"{x}.sum({d}) / ({s} + 1)",
        f"torch.full((2,), float({s}), device={x}.device)",
    ]
    if isinstance(m.value(s), int):
        texts += [
            f"torch.zeros(abs({s}), device={x}.device)",
            f"{x}.narrow({d}, 0, {s})",
            f"torch.arange({s}, device={x}.device)",
            f"{x}[..., :{s}]",
        ] * 2
        texts += [
            f"{x}.reshape({s}, -1)",
            f"{x}.roll({s}, {d})",
            f"torch.ones(3, {s}, device={x}.device).sum(1)",
            f"F.pad({x}, (0, {s}))",
        ]
    return m.add(
        "sizes",
        m.rng.choice(texts),
        exact="no" if " / " in f or "**" in f or "math" in f else "whole",
    )


# ------------------------------------------------------------------------------ in place
IN_PLACE = _texts("""
    {x}.add_({y});  {x}.mul_(2);  {v}.zero_();  {v}.fill_(3);  {v}.add_(1);  {x}.copy_({y});
    {v}.neg_();  {x}.relu_();  {x}.clamp_(-1, 1);  {x}.sub_({x});  {x}[..., ::2] = 1;
    {x}[0] = {x}[-1];  {v}.mul_({v});  {x}.expand(2, *{x}.shape).add_(1);
    {x}[1:].copy_({x}[:-1]);  {x}.masked_fill_({x} > 0, 1);  {x}.cumsum_(0);
    {x}.index_fill_(0, torch.tensor([0], device={x}.device), 2)
""")


def in_place(m: Maker) -> str:
    """A write into an argument, an intermediate or a view of one."""
    x = m.pick("n", 1)
    y = m.other(x, name_of(m.value(x).dtype)) or "2"
    v = m.rng.choice(
        (
            x,
            f"{x}[:1]",
            f"{x}[..., 0]",
            f"{x}.t()" if m.value(x).ndim == 2 else x,
            f"{x}.view(-1)",
            f"{x}[1:]",
        )
    )
    how = m.rng.choice(IN_PLACE).format(x=x, y=y, v=v)
    return m.add("in place", how, out="", exact="whole")


READ_BEFORE = _texts("""
    {b}.exp();  {b}.neg().relu();  {b}.sigmoid() + 1;  {b}.t().exp().t();  {b}.cos();
    {b}.amax(0);  {b}.amax(1, keepdim=True);  {b}.add_(1).exp();  {b}.softmax(-1)
""")
CHANGES = _texts("""
    {b}.mul_(0.5);  {b}.add_({x}.detach());  {b}[:1].fill_(3);  {b}.copy_({x}.detach());
    {b}.data.neg_();  {b}.zero_()
""")


def changed_later(m: Maker) -> str:
    """A value of an argument that changes behind it, as statistics and code books do in training:
    gradients are of the value that was read."""
    x = m.operand((m.dim(), m.dim()), "float32")
    b = m.operand(m.operands[-1].shape, "float32")
    read = m.add("changed later", m.rng.choice(READ_BEFORE).format(b=b), exact="no")
    made = read and m.add("changed later", f"{x} * {read}", exact="no")
    if made:
        m.add("changed later", m.rng.choice(CHANGES).format(b=b, x=x), out="", exact="no")
    return made


ALIASES = _texts("""
    {x}[1:];  {x}.view({x}.shape);  {x}.unfold(0, 2, 1);  {x}.mT;  {x}[...];  {x}.detach();
    {x}.expand(2, *{x}.shape);  {x}.reshape(-1);  {x}.unfold(-1, 2, 1);  {x}.diagonal();
    {x}.as_strided((2,), (1,), 1);  {x}.squeeze();  {x}.chunk(2)[1]
""")


def alias(m: Maker) -> str:
    """Outputs that share memory with each other or with an argument."""
    x = m.pick("a", 1)
    t = m.add("aliases", m.rng.choice(ALIASES).format(x=x))
    if t and m.rng.random() < 0.5:
        m.add(
            "aliases",
            m.rng.choice((f"{t}[:1]", f"{t}.unfold(0, 2, 1)", f"{x}[:2]", f"{t}.unsqueeze(0)")),
        )
    return t


# ------------------------------------------------------------------------------ dtype views
def dtype_view(m: Maker) -> str:
    x = m.pick("nb", 1, exact=True)
    if any(bool(e[x].isnan().any()) for e in m.env):  # which of its bits are set, nobody says
        return ""
    bits = m.value(x).element_size() * 8
    same = {
        8: ("int8", "uint8"),
        16: ("int16", "float16", "bfloat16"),
        32: ("int32", "float32"),
        64: ("int64", "float64"),
    }
    to = m.rng.choice(same[bits] * 3 + ("uint8", "int32", "int64", "int16", "float16"))
    high = max(min(e[x].shape[0] for e in m.env) - 1, 0)
    k = m.integer(0, min(high, 6))
    part = m.rng.choice(
        ("", f"[{k}]", f"[{k}:]", "[1:]", f"[..., {k}:]", ".mT", f"[{k}]", f"[{k}:]")
    )
    then = m.rng.choice(("", "", " + 0", ".clone()", f".view(torch.{name_of(m.value(x).dtype)})"))
    if "float" in to or "float" in then:
        then = "" if then == " + 0" else then
    return m.add("dtype views", f"{x}{part}.view(torch.{to}){then}")


# ------------------------------------------------------------------------------ products and layers
def product(m: Maker) -> str:
    a = m.pick("nb", 2)
    shape = m.shape_of(a)
    if shape is None or len(shape) > 3:
        return ""
    d = name_of(m.value(a).dtype)
    d2 = (
        d
        if m.rng.random() < 0.75
        else m.rng.choice(("float32", "float64", "float16", "int64", "bfloat16"))
    )
    b = m.operand((shape[-1], m.dim()), d2)
    n = m.operands[-1].shape[1]
    bias = m.operand((n,), d if m.rng.random() < 0.9 else "float16")
    w, v = m.operand((n, shape[-1]), d2), m.operand((shape[-1],), d2)
    texts = [
        f"{a} @ {b}",
        f"F.linear({a}, {w})",
        f"F.linear({a}, {w}, {bias})",
        f"{a} @ {v}",
        f"torch.matmul({b}.mT, {a}.mT)",
    ]
    if len(shape) == 2:
        texts += [
            f"torch.addmm({bias}, {a}, {b})",
            f"torch.mv({a}, {v})",
            f"torch.mm({a}, {b})",
            f"torch.addmv({a}[:, 0], {a}, {v})",
            f"torch.einsum('ij,jk->k', {a}, {b})",
        ]
    texts += [
        f"{v} @ {v}",
        f"torch.outer({v}, {bias})",
        f"torch.baddbmm({bias}, {a}, {b}[None])",
        f"torch.dot({v}, {v})",
    ]
    return m.add("products", m.rng.choice(texts), exact="whole")


def layer(m: Maker) -> str:
    d = m.rng.choice(("float32", "float32", "float32", "float64", "bfloat16"))
    d2 = d if m.rng.random() < 0.85 else m.rng.choice(("float32", "float64", "float16"))
    n, c = m.dim(), m.rng.choice(("1", "2", "3", "4"))
    h, w = m.dim(), m.rng.choice(("0", "1", "3", "5", "8"))
    way = m.rng.randrange(11)
    if way < 4:
        x = m.operand((n, h), d)
        one, two = m.operand((h,), d2, layout="plain"), m.operand((h,), d2, layout="plain")
        text = (
            f"F.layer_norm({x}, ({x}.shape[1],), {one}, {two})",
            f"F.batch_norm({x}, {one}, {two}.abs(), training=False)",
            f"F.batch_norm({x}, None, None, {one}, {two}, training=True)",
            f"F.rms_norm({x}, ({x}.shape[1],), {one})",
        )[way]
        return m.add("layers", text, exact="no")
    x = m.operand((m.rng.choice(("1", "2", n)), c, h, w), d)
    k = m.rng.choice((1, 2, 3, 9))
    weight, bias = (
        m.operand(("3", c, "2", "2"), d2, layout="plain"),
        m.operand(("3",), d2, layout="plain"),
    )
    texts = {
        4: f"F.conv2d({x}, {weight}, {bias}, padding=1)",
        5: f"F.max_pool2d({x}, {k}, stride=1, padding={k // 2})",
        6: f"F.avg_pool2d({x}, {k}, stride=2, padding={k // 2}, ceil_mode={m.rng.random() < 0.5})",
        7: f"F.adaptive_avg_pool2d({x}, ({k}, 2))",
        8: f"F.interpolate({x}, scale_factor=2, mode='nearest')",
        9: f"F.group_norm({x}, 1)",
        10: f"F.conv_transpose2d({x}, {weight}.transpose(0, 1), stride=2)",
    }
    exact = {4: "whole", 5: "bits", 8: "bits", 10: "whole"}.get(way, "no")
    return m.add("layers", texts[way], exact=exact, jumpy=way == 5)


def model(m: Maker) -> str:
    """Attention, classes' losses, lookups, and layers of images."""
    d = m.rng.choice(("float32", "float32", "float64", "bfloat16"))
    n, c, h = m.dim(), m.rng.choice(("1", "2", "4")), m.rng.choice(("1", "2", "5", "8"))
    way = m.rng.randrange(16)
    rows = m.rng.choice((h, m.dim())) if way < 3 else h
    x = m.operand((m.rng.choice(("1", "2", n)), c, rows, m.rng.choice(("1", "3", "4", "8"))), d)
    if way < 3:
        shape = m.operands[-1].shape
        # Eager leaves results unwritten where elements of a query share memory.
        query = f"{x}.contiguous()" if m.operands[-1].layout in ("overlapping", "windows") else x
        keys = (*shape[:2], m.rng.choice((rows, "3", m.dim())), shape[3])
        k, v = m.operand(keys, d), m.operand(keys, d)
        mask = m.operand((rows, keys[2]), m.rng.choice(("bool", d)))
        how = ("", ", is_causal=True", f", {mask}")[way]
        return m.add(
            "models", f"F.scaled_dot_product_attention({query}, {k}, {v}{how})", exact="no"
        )
    if way < 6:
        y, t = m.operand((n, c), d), m.operand((n,), "int64", "index", c)
        w = m.operand((c,), d, "whole", layout="plain")
        more = m.rng.choice(
            (
                "",
                ", ignore_index=0",
                f", weight={w}.abs()",
                ", reduction='sum'",
                ", reduction='none'",
            )
        )
        if way == 3 and m.rng.random() < 0.5:
            more += ", label_smoothing=0.1"
        loss = (f"cross_entropy({y}, ", f"nll_loss({y}, ", f"cross_entropy({y}.log_softmax(1), ")[
            way - 3
        ]
        return m.add("models", f"F.{loss}{t}{more})", exact="no")
    if way < 8:
        table, at = m.operand((c, h), d), m.operand((n, "3"), "int64", "index", c)
        mode = m.rng.choice(("sum", "mean", "max"))
        text = (
            f"F.embedding({at}, {table}, padding_idx=0)",
            f"F.embedding_bag({at}, {table}, mode={mode!r})",
        )[way - 6]
        return m.add("models", text, exact="no")
    k, w1 = m.rng.choice((1, 2, 3)), m.operand(("4", c, "3"), d, layout="plain")
    mode = m.rng.choice(("bilinear", "bicubic", "area", "nearest-exact"))
    corners = m.rng.choice(("", ", align_corners=True")) if mode[:2] == "bi" else ""
    texts = {
        8: (
            f"F.conv1d({x}[0].mT.transpose(0, 1).flatten(2)[None, :, 0], {w1}, padding=1, "
            "dilation=1)"
        ),
        9: f"F.conv1d({x}.flatten(2), {w1}, stride={k}, padding={k}, dilation={k})",
        10: f"F.interpolate({x}, size=({k + 2}, 5), mode={mode!r}{corners})",
        11: f"F.unfold({x}, {k}, padding=1, stride=2)",
        12: f"F.max_pool2d({x}, 2, ceil_mode=True, return_indices=True)[1]",
        13: f"F.instance_norm({x}, eps=0.1)",
        14: f"F.adaptive_max_pool2d({x}, ({k}, 2))",
        15: f"F.lp_pool2d({x}, 2, 2)",
    }
    exact = {8: "whole", 9: "whole", 11: "bits", 14: "bits"}.get(way, "no")
    return m.add("models", texts[way], exact=exact, jumpy=way in (12, 14))


REFUSED = _texts("""
    {b}.argmax();  {b}.argmax(1);  {b} - {b};  F.binary_cross_entropy({x} * 3, {x});
    torch.cdist({x}, {x}.half());  F.layer_norm({x}, (3,));  F.linear({x}, {y});
    torch.dot({y}, {y}.float());  {x}.expand(3, *{x}.shape).add_(1);  torch.mv({x}, {y});
    {x} @ {x}.mT.half();  -{b};  {y}.view(3);
    {b}.cumsum(0).index_add(0, {y}.long(), {y});  {x}[{y}.float()];  torch.stack([{x}, {y}]);
    torch.cat([{x}, {y}[:, None, None]]);  F.one_hot({y}.long().abs(), 2);  {y}.sum(3);
    {x}.t().copy_({x}.expand(2, *{x}.shape));  F.embedding({y}.float(), {x});
    torch.index_select({x}, 0, {y});  {y}.int().lerp({y}.int(), 0.5);  F.nll_loss({x}, {y});
    torch.zeros(4).index_add_(0, torch.tensor([1]), torch.ones(1).double());  {x}.mm({y});
    F.batch_norm({x}.float(), {y}.half(), {y}.half());  F.cross_entropy({x}.float(), {y}.int());
    torch.zeros(4, 4).index_put_((torch.tensor([1, 2]),), torch.ones(3, 4));
    torch.bmm({x}, {x});  torch.zeros(4).copy_({y}[None].expand(3, 4));  {b}.cumprod(0).chunk(0);
    {x}.long().mul_(2.5);  {y}.long()[1:].add_({x}[0, 0]);  {b}.clone().mul_(3);  {b}.t().add_({y});
    {x}.int().addcmul_({x}, {x});  torch.sqrt({y}.int(), out={y}.int());  {y}.long().logit_()
""")


def refused(m: Maker) -> str:
    """What eager refuses for the dtypes or values of its arguments (kept only as the last
    statement)."""
    x = m.pick("n", 2)
    y = m.operand(("4",), m.rng.choice(("float16", "float64", "int64")))
    b = m.operand(("5", "4"), "bool")
    text = m.rng.choice(REFUSED).format(x=x, y=y, b=b)
    errors, m.errors = m.errors, float(m.errors > 0)
    made = m.add("refused", text, exact="no")
    m.errors = errors
    return made


MAKERS: tuple[tuple[float, Callable[[Maker], str]], ...] = (
    (5, selected), (3, item), (4, size_function), (4, in_place), (2, alias), (4, dtype_view),
    (4, product), (3, layer), (3, model), (2, refused),
)  # fmt: skip
