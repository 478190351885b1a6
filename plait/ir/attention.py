"""Attention as one kernel, in which scores of queries and keys never reach memory.

`plait/lower/attention.py` records an `Attention` as the kernel of an `Extern`; the target writes
it (`Target.write_template`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir.body_text import Body, BodyReader, params_text
from plait.ir.calls import DeviceKernel, TensorArg
from plait.ir.expr import Expr
from plait.ir.expr.text import Scope, SymbolReader, tuple_text, wrong
from plait.ir.loops import Load, Node, walk


@dataclass(frozen=True, slots=True)
class Formula:
    """What is computed of one score.

    vars: the loop variables of batch, head, query and key.
    body: it loads `score` and `grad`, values of no dimension that the kernel has, and of `given0`,
        `given1`, ...: the last operands of the launch.
    """

    vars: tuple[Expr, ...]
    body: Node

    @property
    def is_score(self) -> bool:
        """Whether it is the score itself."""
        return isinstance(self.body.attr, Load) and self.body.attr.buf == "score"

    @property
    def loaded(self) -> frozenset[str]:
        """What it loads."""
        return _loaded((self.body,))


@dataclass(frozen=True, slots=True)
class Addition:
    """What each score adds to a tensor that scores were made of: to its gradient.

    to: which of the last operands of the launch, which it is given full of zeros.
    vars: as of a Formula.
    index: of the element, integers; outside of the tensor nothing is added.
    body: what is added. Both load what a Formula does.
    """

    to: int
    vars: tuple[Expr, ...]
    index: tuple[Node, ...]
    body: Node

    @property
    def loaded(self) -> frozenset[str]:
        """What it loads."""
        return _loaded((*self.index, self.body))


def _loaded(roots: Sequence[Node]) -> frozenset[str]:
    return frozenset(n.attr.buf for n in walk(roots) if isinstance(n.attr, Load))


@dataclass(frozen=True, slots=True)
class Attention(DeviceKernel):
    """A kernel of attention. Its operands: queries, keys and values; in a backward the gradient of
    the result, that times the result summed over a row, and what the forward pass gave as
    logarithms of sums; the tables of blocks; what formulas load; then what is added to.

    gives: "result" (and log2 of the sum of each row, its greatest score if there is a third),
        "queries" or "keys" (their gradients, and those of values).
    score, mask: what a score becomes, and whether it counts; None: it stays, all do.
    gradient: the gradient of `score` with respect to the product, of `grad`.
    scale: of products, before `score`.
    tables: how many kinds of blocks are listed: blocks with masked scores, and blocks without. Each
        kind has a table of numbers of blocks and one of blocks.
    block: queries and keys in a block.
    additions: what the kernel for the gradient of queries adds up beside it.
    heads: how many heads of queries are rows of one block; they share keys, and queries are few.
    parts: of a walk along keys, each with a result of its own: the first dimension of results.
    causal: a query sees keys up to its own position, where its walk may end, and a key queries from
        its own on. The mask says so too.
    by_row: a row of the result has the same bits in any batch, with keys behind it that do not
        count, however many: blocks do not depend on lengths.
    """

    gives: str
    score: Formula | None
    gradient: Formula | None
    mask: Formula | None
    scale: float
    tables: int
    block: tuple[int, int]
    additions: tuple[Addition, ...] = ()
    heads: int = 1
    parts: int = 1
    causal: bool = False
    by_row: bool = False

    @property
    def n_first(self) -> int:
        """How many operands come before those that formulas load."""
        return (3 if self.gives == "result" else 6) + 2 * self.tables

    @property
    def n_added(self) -> int:
        """How many operands, the last ones, are added to."""
        return 1 + max((a.to for a in self.additions), default=-1)

    def fault(self, n_operands: int, n_results: int) -> str:
        """Why it cannot be given these, in words; "" if it can."""
        formulas = (self.score, self.gradient, self.mask, *self.additions)
        known = [f for f in formulas if f is not None]
        given = {f"given{k}" for k in range(n_operands - self.n_first - self.n_added)}
        results = {"result": (2, 3), "queries": (1,), "keys": (2,)}.get(self.gives, ())
        if n_results not in results:
            return f"a kernel of attention that gives {n_results} {self.gives}"
        if (
            self.tables not in (0, 1, 2)
            or (self.gradient is None) != (self.gives == "result" or self.score is None)
            or (self.additions and self.gives != "queries")
        ):
            return "a kernel of attention of an unknown kind"
        if min(self.heads, self.parts) < 1 or (
            max(self.heads, self.parts) > 1 and self.gives != "result"
        ):
            return f"a kernel of {self.gives} over {self.heads} heads in {self.parts} parts"
        if self.causal and (self.tables or self.mask is None):
            return "a kernel of attention that ends early, and does not know where"
        if any(f.loaded - given - {"score", "grad"} for f in known):
            return "a kernel of attention whose formulas load what is no operand"
        return ""


FORMULAS = ("score", "gradient", "mask")


# --------------------------------------------------------------------------------------------- text
@dataclass(frozen=True, slots=True)
class HostAttention(DeviceKernel):
    """A kernel of attention on a host, in float32. Its operands: queries, keys and values, of
    batches, heads, rows and numbers, which lie side by side; maybe what is added to scores, which
    are many or 1 along batches, heads and queries. Heads and numbers of a row are known. Its sizes:
    batches, queries and keys; then how far batches, heads and rows lie apart, of each operand and
    of the result.

    causal: a query sees keys up to its own number.
    scale: of scores.
    """

    causal: bool
    scale: float

    def fault(self, operands: Sequence[TensorArg], n_sizes: int, n_results: int) -> str:
        """Why it cannot be given these, in words; "" if it can."""
        if len(operands) not in (3, 4) or n_results != 1:
            return "attention on a host with other operands than it takes"
        known = [n for a in operands[:3] for n in (a.shape[1], a.shape[3])]
        if not all(isinstance(n, int) for n in known) or any(a.strides[-1] != 1 for a in operands):
            return "attention on a host of what does not lie as it takes it"
        if n_sizes != 3 + 3 * (len(operands) + 1):
            return "attention on a host with other sizes than it takes"
        return ""


def attention_text(a: Attention, scope: Scope) -> str:
    """A kernel as an expression that `read_attention` reads."""
    facts = [f"name={a.name!r}", f"gives={a.gives!r}"]
    for name in FORMULAS:
        f: Formula | None = getattr(a, name)
        facts.append(f"{name}={f and formula_text(f, scope)!r}")
    added = [
        (x.to, [formula_text(Formula(x.vars, n), scope) for n in (*x.index, x.body)])
        for x in a.additions
    ]
    facts += [
        f"additions={added!r}",
        f"scale={a.scale!r}",
        f"tables={a.tables}",
        f"block={tuple_text([*map(str, a.block)])}",
        f"heads={a.heads}",
        f"parts={a.parts}",
        f"causal={a.causal}",
        f"by_row={a.by_row}",
    ]
    return f"Attention({', '.join(facts)})"


def formula_text(f: Formula, scope: Scope) -> str:
    """A formula as the text of a function that `read_formula` reads."""
    body = Body(scope, f.vars)
    value = body.value(f.body)
    lines = [f"def formula({params_text(f.vars, (), body)}):", *body.lines, f"return {value}"]
    return "\n    ".join(lines)


def read_attention(call: ast.Call, symbols: SymbolReader) -> Attention:
    """The kernel of an expression. Raises TextError."""
    facts = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
    for name in FORMULAS:
        if facts.get(name) is not None:
            facts[name] = read_formula(facts[name], call, symbols)
    facts["additions"] = tuple(
        _read_addition(to, [read_formula(text, call, symbols) for text in texts])
        for to, texts in facts["additions"]
    )
    return Attention(**facts)


def _read_addition(to: int, found: Sequence[Formula]) -> Addition:
    *index, body = (f.body for f in found)
    return Addition(to, found[-1].vars, tuple(index), body)


def read_formula(text: str, at: ast.Call, symbols: SymbolReader) -> Formula:
    """The formula of a text. Raises TextError."""
    (function,) = ast.parse(text).body
    if not isinstance(function, ast.FunctionDef) or not isinstance(function.body[-1], ast.Return):
        raise wrong(at, "a formula")
    body = BodyReader(symbols, function.args)
    for line in function.body[:-1]:
        body.line(line)
    end = function.body[-1].value
    if end is None:
        raise wrong(at, "a formula with a value")
    return Formula(body.vars, body.value(end))
