"""Numbers of the host that graphs read from tensors: kernels give the same bits as with the numbers themselves."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pygraph_train.tracing.reproducing import ReproducingTrace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPERATIONS = {
    "product": lambda t, w: t * w,
    "quotient": lambda t, w: t / w,
    "sum": lambda t, w: w + t,
    "difference": lambda t, w: t - w,
    "difference from": lambda t, w: w - t,
    "quotient of": lambda t, w: w / t,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.passes_without_graphs("it is about kernels")
def test_a_kernel_gives_the_same_bits(operation, dtype):
    if dtype in (torch.bfloat16, torch.float16) and operation not in ("product", "quotient"):
        pytest.skip("no graph takes it")
    fn, drawn = OPERATIONS[operation], random.Random(0)
    numbers = [0.3, -0.0, math.inf, 1e-42, 1e30, 3, -7, 0.99**77]
    numbers += [drawn.gauss(0, 1) * 10 ** drawn.uniform(-6, 6) for _ in range(40)]
    if operation == "quotient":
        numbers.remove(-0.0)
    for shape in ((), (1000,), (64, 129)):
        trace = ReproducingTrace(torch.device("cuda"))
        trace.take_as_inputs((), ("L['args'][1]",))
        given = torch.randn(shape, device="cuda", dtype=torch.float64) * 10
        trace(fn, (given.to(dtype).requires_grad_(), 0.5), {})
        assert trace.live.used
        for w in numbers:
            w = float(w)
            plain, live = given.to(dtype).requires_grad_(), given.to(dtype).requires_grad_()
            expected, found = fn(plain, w), trace.silently(fn, (live, w), {})
            upstream = torch.randn_like(expected)
            expected.backward(upstream)
            found.backward(upstream)
            for one, other in ((expected, found), (plain.grad, live.grad)):
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), (operation, dtype, shape, w)
