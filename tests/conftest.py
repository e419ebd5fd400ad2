"""What all tests share: no switch of torch is left changed, and some cases are for `make test-all` only."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.guards
import torch._dynamo.utils


def pytest_configure() -> None:
    """A tenth of the time of the tests went into what none of them looks at."""
    gc.set_threshold(20_000, 20, 50)  # half a million objects live as long as the process
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        torch._dynamo.config.run_gc_after_compile = False
    # for a log: empties the caches of the processor to time the guards of each trace, then checks them once
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
    # copies all settings of Dynamo and Inductor into a row for each trace
    if hasattr(torch._dynamo.utils, "get_metrics_context"):
        torch._dynamo.utils.get_metrics_context()._on_exit = lambda *arguments: None
    # Dynamo writes down each trace as JSON where this logger has a handler, and pytest gives one to each
    # logger that passes nothing on
    traces = logging.getLogger("torch.__trace")
    traces.handlers.clear()
    traces.propagate = True


def _settings() -> tuple[object, ...]:
    return (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test's combinations of parameters one is not slow, and the others are.

    A test that is marked `slow_after(count)` has so many that are not, and one that is marked `quick` so many that
    each value is there.
    """
    values: dict[tuple[str, int], list[str]] = {}
    for item in items:
        for place, value in _values(item):
            if value not in values.setdefault(place, []):
                values[place].append(value)
    kept: Counter[str] = Counter()
    for item in items:
        found = [(values[place].index(value), len(values[place])) for place, value in _values(item)]
        rounds = range(max((count for _, count in found), default=1))
        mark, test = item.get_closest_marker("slow_after"), item.nodeid.partition("[")[0]
        quick = mark is None and item.get_closest_marker("quick") is not None
        most = len(items) if quick else mark.args[0] if mark is not None else 1
        if kept[test] >= most or not any(all(index == n % count for index, count in found) for n in rounds):
            item.add_marker(pytest.mark.slow)
        else:
            kept[test] += 1


def _values(item: pytest.Item) -> list[tuple[tuple[str, int], str]]:
    """What each `parametrize` of a test gives to a case, by test and `parametrize`."""
    callspec = getattr(item, "callspec", None)
    names = () if callspec is None else callspec._idlist
    return [((item.nodeid.partition("[")[0], number), name) for number, name in enumerate(names)]


@pytest.fixture(scope="module", autouse=True)
def _what_was_imported_is_not_looked_through_for_garbage() -> None:
    """Half a million objects: without this, a third of a second for each `gc.collect()` of a Trainer."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    if torch.cuda.is_available():
        torch.cuda.init()  # `settled_switches` needs it
    before = _settings()
    yield
    assert _settings() == before, "the test left a switch of torch changed"
