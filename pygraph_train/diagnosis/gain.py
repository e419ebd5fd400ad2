"""How long the GPU waits for the host in one step: the time that a graph can save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.putting_back import ScratchState

__all__ = ["gain_of"]

_RUNS = 5

_NO_DEVICE = (
    "What a graph would gain is the time that a GPU waits for the host. "
    "There is no CUDA device to measure it on."
)
_NOT_RUN = (
    "What a graph would gain was not measured: that takes runs of the step, and runs of this one could change values "
    "of Python. Run explain again once nothing stands in the way."
)


def gain_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module | None,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    clean: bool,
) -> str:
    """A sentence about the idle time of the GPU in forward and backward.

    On a CUDA device, and only where nothing stands in the way of a graph, forward and backward run a few times. They
    write no gradients. Parameters, buffers and random states are put back.

    Args:
        fn, args, kwargs: the call.
        model: whose parameters and buffers are put back.
        device: of the model.
        context: makes the context of a call.
        clean: whether tracing has shown the step to be a function of tensors alone.
    """
    if device.type != "cuda":
        return _NO_DEVICE
    if not clean or model is None:
        return _NOT_RUN
    try:
        with _state_kept(model, device), context():
            wall, busy = _measured(lambda: _forward_backward(fn, args, kwargs, model))
    except Exception as error:
        return f"What a graph would gain was not measured: the step raised {type(error).__name__}: {error}"
    return _in_words(wall, busy)


def _in_words(wall: float, busy: float) -> str:
    idle = max(0.0, 1 - busy / wall)
    return (
        f"Forward and backward took {wall * 1e3:.2f} ms, and the GPU waited for the host for {idle:.0%} of that time. "
        f"A graph can save at most {max(0.0, wall - busy) * 1e3:.2f} ms of each step, besides what it saves in the "
        f"optimizer. To measure this, forward and backward ran {2 * _RUNS + 1} times. No gradients were written, and "
        "parameters, buffers and random states were put back."
    )


def _forward_backward(fn: Callable[..., Any], args: Any, kwargs: Any, model: nn.Module) -> None:
    result = fn(*args, **kwargs)
    loss = result if isinstance(result, Tensor) else result["loss"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, parameters, allow_unused=True)


def _measured(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds that one run takes, and seconds of it in which the device works."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_RUNS):
        run()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / _RUNS
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_RUNS):
            run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type.name == "CUDA"
    ]
    return wall, _covered(spans) * 1e-6 / _RUNS


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _state_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    state = ScratchState(device, [*model.parameters(), *model.buffers()])
    try:
        yield
    finally:
        state.restore()
