"""Scatters into what strides say of a tensor whose elements overlap: into a copy of it, whose
elements lie apart."""

from __future__ import annotations

import pytest
import torch

from tests.against_eager import compiled

WAYS = {
    "rows": (lambda x: x.expand(3, 4), (4,)),
    "columns": (lambda x: x.expand(3, 4), (3, 1)),
    "made": (lambda x: (x * 2).expand(3, -1), (4,)),
    "turned": (lambda x: x.t().expand(2, 4, 3), (3, 4)),
}


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_expanded_tensors(wrapper: str) -> None:
    for name, (make, shape) in WAYS.items():

        def fn(x: torch.Tensor, y: torch.Tensor, make=make) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return torch.as_strided_scatter(make(x), y, (2, 2), (2, 1), 0)

        x, y = torch.randn(shape), torch.randn(2, 2)
        got, want = compiled(fn, options={"wrapper": wrapper})(x, y), fn(x, y)
        assert torch.equal(got, want) and got.stride() == want.stride(), name
