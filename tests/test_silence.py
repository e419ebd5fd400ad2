"""A loop without graphs of forward and backward has a row that says why, but none while its regions wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate_training import Script, both, fresh, run  # noqa: F401
from torch import Tensor, nn
from training import Net, differs, sgd

from pygraph_train import PyGraph
from pygraph_train.integrations import regioned_call
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.integrations.silence import Silence
from pygraph_train.torch_private.dynamo import compiled_call
from pygraph_train.tracing.dry_trace import DryTrace


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were traced to find out why there are no graphs."""
    found: list[Any] = []
    look = DryTrace.look

    def noted(trace: DryTrace, fn: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(getattr(fn, "__self__", None), nn.Module):  # and no optimizer
            found.append(args)
        look(trace, fn, *args, **kwargs)

    monkeypatch.setattr(DryTrace, "look", noted)
    return found


def rows(report: LoopReport) -> list[str]:
    return [f.reason for f in report.fallbacks if "forward and backward" in f.reason]


def training(
    counts: Iterable[int],
    make: Callable[[], nn.Module] = Net,
    each: Callable[[Script, int, nn.Module], None] = lambda script, step, model: None,
) -> Callable[[Script], None]:
    """Batches of so many points, one after the other."""

    def script(script: Script) -> None:
        generator = torch.Generator().manual_seed(1)
        model = make()
        model, optimizer = script.accelerator.prepare(model, sgd(model))
        for step, count in enumerate(counts, 1):
            x = torch.randn(count, 6, generator=generator)
            y = torch.randint(0, 3, (count,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), y)
            script.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
            each(script, step, model)
        script.write_state(model, optimizer)

    return script


def test_nothing_is_explained_while_shapes_may_come_back(looks: list[Any]) -> None:
    """Each of seventy lengths comes once before the first one comes again: silence for longer than three looks."""
    aside = list[bool]()

    def each(script: Script, step: int, model: nn.Module) -> None:
        if step > 10 and getattr(script.accelerator, "pygraph", None) is not None:
            aside.append(compiled_call(model) is None)

    counts = [*range(2, 72), *range(2, 72), *range(2, 72)]
    report = both(training(counts, each=each), replays=20, compiled_reference=True)
    assert sum(r.replays for r in report.regions()) >= 40, str(report)
    assert not rows(report) and not looks, str(report)
    assert aside and not any(aside)


def test_nothing_is_explained_in_warm_up(looks: list[Any]) -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=50)
    plain, ours = run(training([8] * 90), None), run(training([8] * 90), plugin)
    pairs = list(zip(plain.entries, ours.entries, strict=True))
    assert pairs and all(differs(expected[1], found[1]) is None for expected, found in pairs)
    report = plugin.report()
    assert sum(r.replays for r in report.regions()) >= 40, str(report)
    assert not rows(report) and not looks, str(report)


class Counting(Net):
    """Computes with a number that is another one in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 0.5
        return super().forward(x * self.count)


def test_other_shapes_are_no_python_state_that_changes(looks: list[Any]) -> None:
    """The trace is compared with a call that has its shapes."""
    counts = [8, 6, 5] * 24
    report = both(training(counts, Counting), replays=15, compiled_reference=True)
    assert looks and len(rows(report)) == 1, str(report)
    assert "self.count is no longer" in rows(report)[0] and "size" not in rows(report)[0], str(report)


def test_shapes_that_never_come_back_are_the_reason_and_the_module_stays(
    looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silence, "_regions_wait", lambda self: False)
    monkeypatch.setattr(regioned_call, "_LOOKS", 8)
    kept = list[bool]()

    def each(script: Script, step: int, model: nn.Module) -> None:
        if step == 110 and getattr(script.accelerator, "pygraph", None) is not None:
            kept.append(compiled_call(model) is not None)

    report = both(training(range(2, 122), each=each), replays=15, compiled_reference=True)
    assert looks and len(rows(report)) == 1, str(report)
    assert "a graph is for shapes that come back" in rows(report)[0] and kept == [True, True], str(report)
