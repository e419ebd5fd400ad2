"""What runs without a graph holds no tensor longer than the compiled function alone: allocation by allocation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_bytes import changes_in_bytes
from torch import Tensor, fx, nn

import pygraph_train.backend as backend
from pygraph_train.regions import inductor
from pygraph_train.regions import pair as pair_module
from pygraph_train.torch_private.aot import compile_with_aten

WORDS = 50


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Regions get graphs where these pay, as on a GPU."""
    torch.compiler.reset()
    backend.reset()
    monkeypatch.setattr(inductor, "Pair", lambda *_: pair_module.Pair("auto", True))
    yield
    torch.compiler.reset()


class Reader(nn.Module):
    """A small model of text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(self.words(words)))
        return found


class Normed(Reader):
    """It changes buffers: its calls go through AOTAutograd's runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(super().forward(words).flatten(0, 1)).unflatten(0, words.shape)


def alone(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend's kernels without its regions."""
    return compile_with_aten(
        gm, example_inputs, lambda compile_kernels, gm, inputs, _: compile_kernels(gm, inputs)
    )


def changes(model: nn.Module, call: Callable[..., Any], amp: bool, retained: bool) -> list[list[int]]:
    """Of two steps, after six others; no two batches are of the same length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, WORDS, (4, n), generator=draws) for n in range(8, 16)]

    def step(words: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(call(words).flatten(0, 1), words.flatten())
        if retained:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch._functorch.config.patch(donated_buffer=not retained):
        for words in batches[:-2]:
            step(words)
        gc.collect()
        gc.disable()
        try:
            return [changes_in_bytes(lambda: None, lambda _, x=words: step(x))[1] for words in batches[-2:]]
        finally:
            gc.enable()


def of_both(kind: type[nn.Module], amp: bool, retained: bool, **options: Any) -> list[list[list[int]]]:
    found = []
    for of in (alone, "pygraph"):
        torch.compiler.reset()
        backend.reset()
        torch.manual_seed(0)
        model = kind()
        more = {"options": {"engine": "emulated", **options}} if of == "pygraph" else {}
        found.append(changes(model, torch.compile(model, backend=of, **more), amp, retained))
    rows = backend.report().regions
    assert len(rows) == 4 and all(row.captures == 0 for row in rows)  # two for the first length
    return found


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", [Reader, Normed])
def test_shapes_that_never_return_take_the_memory_of_the_compiled_function(
    kind: type[nn.Module], direct: bool, amp: bool, retained: bool
) -> None:
    theirs, ours = of_both(kind, amp, retained, direct=direct, transform=False)
    assert all(len(step) > 200 for step in theirs)
    assert ours == theirs


@pytest.mark.parametrize("direct", [True, False])
def test_small_kernels_that_run_together_do_not_raise_the_peak(direct: bool) -> None:
    def peak(step: list[int]) -> int:
        return max(sum(step[:end]) for end in range(len(step)))

    theirs, ours = of_both(Reader, True, False, direct=direct)
    assert any("casts of" in change for row in backend.report().regions for change in row.changes)
    assert list(map(peak, ours)) == list(map(peak, theirs))
    assert ours != theirs
