"""Factors of sums with matrix products, which Inductor forgets: kernels of the backend have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pygraph_train.backend  # noqa: F401

SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product last": lambda x, a, b: x.add(a @ b, alpha=0.1),
    "product first": lambda x, a, b: (a @ b).add(x, alpha=0.1),
    "in place": lambda x, a, b: x.mul(0.9).add_(a @ b, alpha=-2),
    "no product": lambda x, a, b: x.add(x.sin(), alpha=0.1),
    "no factor": lambda x, a, b: x + a @ b,
}


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.passes_without_graphs("what the kernels compute is compared")
def test_a_factor_of_a_sum_with_a_product_is_kept(kind):
    torch.manual_seed(0)
    given = [torch.randn(8, 4), torch.randn(8, 8), torch.randn(8, 4)]
    expected = [x.clone().requires_grad_() for x in given]
    found = [x.clone().requires_grad_() for x in given]
    plain = SUMS[kind](*expected)
    compiled = torch.compile(SUMS[kind], backend="pygraph")(*found)
    plain.sum().backward()
    compiled.sum().backward()
    torch.testing.assert_close(compiled, plain)
    for mine, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, stock.grad)
