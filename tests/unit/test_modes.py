"""An error in the middle of a step leaves no mode of torch behind, and the caller goes on training."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import Diary, Net, adamw, batches, both

from pygraph_train.core import passes

cross_entropy = nn.functional.cross_entropy


def without_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model(x), y.clamp(max=2))
    with torch.no_grad():
        cross_entropy(model(x), y)
    return loss


@torch.no_grad()
def _decorated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y)


def in_a_decorated_function(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    _decorated(model, x, y)
    return cross_entropy(model(x), y.clamp(max=2))


def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Autocast keeps casts of weights as long as a block with it goes on."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cross_entropy(model(x).float(), y)


def with_kernels_of_attention(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        attended = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return cross_entropy(model(x + attended), y)


@pytest.mark.parametrize(
    "step", [without_gradients, in_a_decorated_function, under_autocast, with_kernels_of_attention]
)
def test_an_error_leaves_no_mode_behind(step: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        made = diary.step(lambda x, y: step(model, x, y), model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(30)):
            try:
                diary.write("loss", made(x, y + 3 if number in (0, 2, 3, 4, 12, 13) else y))
            except (IndexError, RuntimeError) as error:
                diary.write("raised", [type(error).__name__, str(error)])
            autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            diary.write("modes", [torch.is_grad_enabled(), *autocast])
            diary.write("attention", torch.backends.cuda.flash_sdp_enabled())
            diary.write_state(model, optimizer)

    try:
        both(script, replays=10, plan="{F} {B} {O}")
    finally:  # a test that fails does not take others with it
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)


def test_what_catches_exceptions_is_seen_by_indentation() -> None:
    """Only a file in which a block may catch is parsed; no line in such a block is missed."""
    files = [*Path(__file__).parents[1].glob("*/*.py"), Path(torch.nn.functional.__file__)]
    within = seen = 0
    for file in map(str, files):
        caught = passes._lines_in_try(file)
        for number, text in enumerate(linecache.getlines(file), 1):
            if text.strip() and number in caught:
                within += 1
                seen += passes._may_catch(file, number)
    assert within == seen >= 10
    code = torch.nn.Linear.forward.__code__
    assert not passes._may_catch(code.co_filename, code.co_firstlineno + 4)
