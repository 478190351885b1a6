"""A product of matrices as one kernel, and what is computed of it, which never reaches memory.

`plait/lower/product.py` and `plait/lower/packed.py` record a `Product` as the kernel of an
`Extern`, `plait/schedule/join_readers.py` gives it loops that read it, and the target writes it
(`Target.write_template`).
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir.calls import DeviceKernel, Extern, Operator
from plait.ir.loops import Load, Pointwise, walk

PRODUCT = "product"
"""What results load of the product: an element in float32, or in int32 where the factors are
integers of 8 bits, of no dimension."""
PARTNER = "partner"
"""The same of the element beside it in a pair: of columns that are `Product.half` apart."""
_LARGE_ROWS = 128
RIGHT = "right"
"""What the elements of a right matrix load of the second operand."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is shared by programs.

    rows, columns: of a tile. depth: how far a step walks along k
    parts: of k, in which each tile is computed
    tf32: so many products of factors rounded to 10 bits stand for one of factors in float32: 1,
        where users let them be rounded, or 3, whose sum is as near as sums in float32; 0: none
    matrices: so many right matrices are multiplied each by some rows of the left one, which follow
        those of the matrix before: the first thing that results may load says where they end.
        Rows behind the last end are the last one's. 0: each row by each matrix
    """

    rows: int
    columns: int
    depth: int
    parts: int = 1
    tf32: int = 0
    matrices: int = 0

    @property
    def is_large(self) -> bool:
        """Whether tiles are those of a product that takes all of a device for long."""
        return self.rows >= _LARGE_ROWS

    def fault(self) -> str:
        """What is wrong with it, in words; "" if nothing is."""
        powers = all(n >= 16 and n & (n - 1) == 0 for n in (self.rows, self.columns, self.depth))
        one = self.parts == 1 or not self.matrices
        known = powers and one and min(self.parts, self.matrices + 1) >= 1
        return "" if known else "a kernel of a product of an unknown kind"


@dataclass(frozen=True, slots=True)
class Window:
    """The points of an image that a filter is laid over."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def is_point(self) -> bool:
        """Whether every point of the image is met once, by itself."""
        return (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))


@dataclass(frozen=True, slots=True)
class Part:
    """Columns of a product that one of its results goes over: j, where first <= j % period < first
    + length. In groups of `period` columns each head has its query, its key and its value."""

    first: int
    length: int
    period: int

    def fault(self, columns: int) -> str:
        """What is wrong with it, in words; "" if nothing is. columns: of the product."""
        inside = 0 <= self.first and 1 <= self.length and self.first + self.length <= self.period
        return "" if inside and columns % self.period == 0 else "a part of other columns"


_WINOGRAD = (3, 3), (1, 1), (1, 1)
"""Kernel, stride and dilation of convolutions by Winograd's method."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A right matrix that was packed into panels, or that threads pack a panel at a time. The left
    one is row-major, or an image with channels innermost, whose windows are rows. All numbers are
    f32, but those of both factors, and of a product that is rounded, where the right matrix is not
    packed.

    depth: numbers of a row of the left matrix, or channels of the image.
    columns: of the right matrix.
    width: columns of a panel.
    window: over an image; None for rows.
    form: what the right matrix is. "dense": a matrix, or filters with a row for each point and
        channel. "winograd": filters of 3x3 with a row for each of 16 sums of their points and
        channel. "depthwise": a filter for each column, which sees that column of the image alone,
        with a row for each point. "loose": a matrix that is not packed, or a batch of such, each
        for as many rows of the left one.
    scaled: the image, which is one and whose windows are its points, is multiplied before by a
        number for each channel: the operand after the right matrix, which results do not load.
    """

    depth: int
    columns: int
    width: int
    window: Window | None = None
    form: str = "dense"
    scaled: bool = False

    @property
    def n_sizes(self) -> int:
        """How many sizes a launch is given."""
        return 5 if self.window is not None else 2 if self.form == "loose" else 1

    def fault(self) -> str:
        """What is wrong with it, in words; "" if nothing is."""
        w = self.window
        if self.form not in ("dense", "winograd", "depthwise", "loose"):
            return "a packed product of an unknown form"
        if self.form == "loose" and w is not None:
            return "a convolution with filters that are not packed"
        if self.form not in ("dense", "loose") and w is None:
            return "a convolution without a window"
        if w and self.form == "winograd" and (w.kernel, w.stride, w.dilation) != _WINOGRAD:
            return "a convolution that Winograd's method does not compute"
        if self.scaled and not (self.form == "dense" and w and w.is_point):
            return "numbers for channels of what is no image of points"
        return "" if min(self.depth, self.columns, self.width) >= 1 else "a product of nothing"


@dataclass(frozen=True, slots=True)
class Product(DeviceKernel):
    """A kernel of a product of matrices. Its operands: left (m, k) and right (k, n), or a batch of
    each; then what results load, `given0`, `given1`, ... Its sizes, where the right matrix is
    packed: rows of the result; of an image the height and width, then those of the result, each
    row of which is one of its points; of matrices that are not packed, the rows that each is for.

    results: loops over part, batch, row and column of the product, which they load as PRODUCT. A
        result of the launch is made by one of them, or a piece of it by each of several.
    how: into which tiles it is cut, and parts of the sum over k, each of which is a product of its
        own; or how the right matrix is packed. What a packed one stores, it stores in rows, one
        after the other, and it loads in rows: `given0` at [row, column].
    right: what makes an element of the right matrix of one that is cut, over batch, k and column;
        it loads the second operand as RIGHT, and others as results do. None: the operand is that
        matrix.
    operator: what computes it where no kernel does, if there is one.
    half: columns are in groups of 2 * half, and each of the first half of a group makes a pair with
        the one half further on: rotary embeddings mix the two. Results load an element's PARTNER
        too, and one program computes both. 0: there are no pairs.
    parts: the columns that each of the results goes over, where that is not all of them for each;
        None: all.
    """

    results: tuple[Pointwise, ...]
    how: Cut | Panels
    right: Pointwise | None = None
    operator: Operator | None = None
    half: int = 0
    parts: tuple[Part | None, ...] = ()

    @property
    def pieces(self) -> list[tuple[Pointwise, Part | None]]:
        """Results with the columns that each goes over. Two that differ in these may be equal."""
        return list(zip(self.results, self.parts or (None,) * len(self.results), strict=True))

    def fault(self, n_operands: int, n_sizes: int, outs: tuple[str | None, ...]) -> str:
        """Why it cannot be given so many operands and sizes, and these results, in words; "" if it
        can."""
        if isinstance(self.how, Panels) and n_sizes != self.how.n_sizes:
            return "a packed product with other sizes than one has"
        more = self.how.scaled if isinstance(self.how, Panels) else self.how.matrices != 0
        if n_operands < 2 + more or not self.results:
            return "a kernel of a product of an unknown kind"
        if outs != tuple(dict.fromkeys(r.out for r in self.results)):
            return "a kernel of a product that gives other results than it computes"
        if fault := self._fault_of_columns():
            return fault
        known = {PRODUCT, *(f"given{k}" for k in range(n_operands - 2))}
        known |= {PARTNER} if self.half else set()
        for r in self.results:
            loaded = {n.attr.buf for n in walk((r.body,)) if isinstance(n.attr, Load)}
            if len(r.vars) != 4 or r.index is None or loaded - known:
                return "a kernel of a product whose results load what is no operand"
        if self.right is not None:
            loaded = {n.attr.buf for n in walk((self.right.body,)) if isinstance(n.attr, Load)}
            if len(self.right.vars) != 3 or loaded - known - {RIGHT}:
                return "a kernel of a product whose right matrix loads what is no operand"
            if loaded & {PRODUCT, PARTNER} or not isinstance(self.how, Cut):
                return "a kernel of a product that makes its right matrix of itself, or of panels"
        return self.how.fault()

    def _fault_of_columns(self) -> str:
        """What is wrong with pairs and parts of columns, in words; "" if nothing is."""
        if not (self.half or self.parts):
            return ""
        last = self.results[0].vars[-1].symbol
        columns = last.extent if last else None
        if not (isinstance(columns, int) and isinstance(self.how, Cut) and not self.how.is_large):
            return "a kernel of a product with pairs or parts that it does not compute"
        if self.half < 0 or (self.half and columns % (2 * self.half)):
            return "a kernel of a product with other pairs than it has columns"
        if len(self.parts) not in (0, len(self.results)):
            return "a kernel of a product with other parts than results"
        return next((f for p in self.parts if p and (f := p.fault(columns))), "")


@dataclass(frozen=True, slots=True)
class Pair(DeviceKernel):
    """Two products with packed weights in one launch: rows that the first has made are the left
    operand of the second while they are in a core's cache. Its operands: the first's, and the
    second's but for that one; its size: rows. Its results: the first's, which holds no more than
    what rows are passed on in, and the second's.

    first, second: of rows.
    operands: so many are the first's.
    """

    first: Product
    second: Product
    operands: int

    def fault(self, n_operands: int, n_sizes: int, outs: tuple[str | None, ...]) -> str:
        """As of a product."""
        both = self.first, self.second
        if len(outs) != 2 or any(not is_of_rows(p) for p in both):
            return "a pair of what are no two products of rows"
        counts = self.operands, n_operands - self.operands + 1
        return next(
            (
                fault
                for p, n, out in zip(both, counts, outs, strict=True)
                if (fault := p.fault(n, n_sizes, (out,)))
            ),
            "",
        )


def is_large_product(op: object) -> bool:
    """Whether an op is a product of large tiles, by a kernel of ours."""
    how = op.kernel.how if isinstance(op, Extern) and isinstance(op.kernel, Product) else None
    return isinstance(how, Cut) and how.is_large


def is_of_rows(p: Product) -> bool:
    """Whether a product has packed weights, multiplies the rows of a matrix, and gives one."""
    packed = isinstance(p.how, Panels) and p.how.window is None and p.how.form == "dense"
    return packed and len(p.results) == 1
