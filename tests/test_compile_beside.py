"""Inductor works beside the training: steps go on, its kernels are those of a compilation that was waited for."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from replays import text_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from training import Diary, Net, adamw, batches, both, differs, loss_of

from pygraph_train.config import PyGraphConfig
from pygraph_train.regions.inductor import compile_whole
from pygraph_train.regions.later import compile_later
from pygraph_train.selection import timing
from pygraph_train.selection.arms import WHOLE, Arm
from pygraph_train.step import beside, clock, decisions
from pygraph_train.step.beside import Beside, WorkState
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.ordering import Ordering
from pygraph_train.step.program import plain_call
from pygraph_train.torch_private.compile_beside import (
    Order,
    _set,
    _settings,
    _without_device,
    fill_caches,
    why_not_beside,
)
from pygraph_train.tracing.reproducing import ReproducingTrace

WORKER = """
import os, sys, time
while not os.path.exists({gate!r}) or not os.path.getsize({gate!r}):  # written after it was made
    time.sleep(0.01)
sys.exit(int(open({gate!r}).read()))
"""
"""Works until the test says how it ends."""

WAIT = 60.0
"""Seconds, on a busy machine."""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """On the CPU: Inductor's kernels are those of eager, declared to be faster. Write the worker's end to the file."""
    made, file = Decisions.__init__, tmp_path / "gate"

    def with_inductor(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.compiles = self.beside = True

    seconds = timing.declared_seconds
    monkeypatch.setattr(Decisions, "__init__", with_inductor)
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: seconds(arm) / (2 if arm.compiled else 1))
    monkeypatch.setattr(Capturing, "_call_of", lambda self, variant, makes_step=True: plain_call)
    monkeypatch.setattr(beside, "_WORKER", ("-c", WORKER.format(gate=str(file))))
    yield file
    file.write_text("0")


def besides_of(step: Any) -> list[Beside]:
    variants = step._runner._signatures.variants()
    return [variant.beside for variant in variants if variant.beside is not None]


def when_it_has_ended(step: Any, number: int) -> None:
    """In a step before the last ones, wait for the end of the process: steps are fast, and a machine may be busy."""
    if number == 100:
        until(lambda: all(work.progress is not WorkState.UNDER_WAY for work in besides_of(step)))


def script(during: Callable[[Any, int], None], steps: int) -> Callable[[Diary], None]:
    """Train; `during` looks at each graphed step."""

    def train(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(steps)):
            diary.write("loss", step(batch))
            if diary.graphed:
                during(step, number)
        diary.write_state(model, optimizer)

    return train


def test_steps_are_replayed_meanwhile_and_the_plan_changes_when_it_has_ended(gate: Path) -> None:
    seen: list[tuple[bool, int]] = []

    def during(step: Any, number: int) -> None:
        compiled = any(capture.compiled for capture in step.report().captures)
        seen.append((compiled, step.report().steps_replayed))
        if number == 119:
            (work,) = besides_of(step)
            assert work.progress is WorkState.UNDER_WAY, work.why
            gate.write_text("0")
            until(lambda: work.progress is WorkState.READY)

    report = both(script(during, 300), replays=250)
    assert not any(compiled for compiled, _ in seen[:120]), "its kernels were not there yet"
    assert seen[119][1] > 90, "steps go on from their graphs"
    assert seen[-1][0] and report.switches[-1].arm == Arm(WHOLE, compiled=True), str(report)


def test_what_is_tried_costs_one_step_and_no_more(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[int] = []
    order = Ordering.__call__

    def ordering(self: Any, step: Any, *args: Any) -> Any:
        orders.append(self._training.step)
        return order(self, step, *args)

    monkeypatch.setattr(Ordering, "__call__", ordering)
    report = both(script(lambda step, number: None, 150), replays=130)
    assert len(orders) == 1
    assert report.steps_replayed + 12 > report.steps


def test_a_crash_loses_nothing_and_is_told(gate: Path) -> None:
    gate.write_text("7")
    report = both(script(when_it_has_ended, 200), replays=150)
    assert "did not compile beside the training: the process ended with 7" in text_of(report), str(report)


def test_kernels_that_are_made_again_are_told(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = iter(range(1000))
    monkeypatch.setattr(clock, "cache_counts", lambda: (0, next(missed)))
    gate.write_text("0")
    report = both(script(when_it_has_ended, 200), replays=150)
    told = "its cache did not have 1 of the graphs that the process had compiled"
    assert any(told in note for note in report.notes), str(report)
    assert report.switches[-1].arm == Arm(WHOLE, compiled=True), "nothing else is lost"


@pytest.mark.quick
@pytest.mark.passes_without_graphs("an option is looked at")
def test_a_process_begins_only_where_options_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "may_begin", lambda program: True)
    program: Any = SimpleNamespace(replication=SimpleNamespace(sharded=False))
    engine: Any = SimpleNamespace(name="cuda", device=torch.device("cuda", 0))
    nothing: Any = None

    def begins(**options: Any) -> bool:
        config = PyGraphConfig(**options)
        return Decisions(program, config, engine, nothing, nothing, nothing, nothing).beside

    assert begins(compile_beside=True)
    assert not begins() and not begins(compile_beside=True, compile=True)


def test_a_training_that_ends_first_ends_the_process(gate: Path) -> None:
    found: list[Any] = []

    def during(step: Any, number: int) -> None:
        if number == 79:
            (work,) = besides_of(step)
            assert work.progress is WorkState.UNDER_WAY and work._process is not None
            found.extend((work, work._process))

    both(script(during, 80), replays=50)
    work, process = found
    assert process.poll() is not None and work.progress is WorkState.FAILED


def test_a_step_that_cannot_be_ordered_goes_on(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Order, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("it cannot be written down")

    monkeypatch.setattr(Order, "add", fails)
    report = both(script(lambda step, number: None, 200), replays=150)
    assert "it cannot be written down" in text_of(report), str(report)


@pytest.mark.passes_without_graphs("a process, without a training")
def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The order never comes: only the end of the pipe can end it."""
    order, never = os.pipe()
    command = [
        sys.executable,
        "-m",
        "pygraph_train.torch_private.compile_worker",
        str(order),
        str(os.getpid()),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[order]) as process:
        assert process.stdin is not None
        time.sleep(0.5)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(WAIT) == 3
    os.close(order)
    os.close(never)


TAKES = """
import sys
from pygraph_train.torch_private import compile_beside, compile_worker
compile_beside.has_device_context = lambda: {finds}
compile_worker.main(int(sys.argv[1]), int(sys.argv[2]))
"""
"""A worker that finds that it has a context on a device, or cannot tell."""


@pytest.mark.parametrize(
    ("finds", "says"), [("True", "taken memory of the device"), ("1 / 0", "ZeroDivision")]
)
@pytest.mark.passes_without_graphs("a process, without a training")
def test_a_worker_with_memory_of_the_device_ends(finds: str, says: str) -> None:
    work = Beside(("-c", TAKES.format(finds=finds)))
    work.begin(pickle.dumps({"graphs": [], "settings": _settings()}))
    until(lambda: work.progress is not WorkState.UNDER_WAY)
    assert work.progress is WorkState.FAILED and "ended with 4" in work.why and says in work.why, work.why


CROWD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", flush=True)
{then}
"""
"""Has begun a process of its own, as Inductor does."""


@pytest.mark.parametrize("then", ["time.sleep(600)", "raise SystemExit(0)"])
@pytest.mark.passes_without_graphs("a process, without a training")
def test_processes_that_the_worker_has_begun_end_with_it(then: str) -> None:
    work = Beside(("-c", CROWD.format(then=then)))
    work.begin(b"")
    process = work._process
    assert process is not None and work._messages is not None
    until(lambda: os.pread(work._messages.fileno(), 10, 0) == b"begun\n")  # type: ignore[union-attr]
    if "Exit" in then:
        until(lambda: work.progress is WorkState.READY)
    work.close()
    with pytest.raises(ProcessLookupError):
        until(lambda: os.killpg(process.pid, 0) is not None)  # once they are gone, there is no such group


@pytest.mark.passes_without_graphs("no process begins")
def test_a_share_of_processors_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(beside, "_GROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    free = beside._processors()
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert beside._processors() == 1 <= free


class Tiny(nn.Module):
    """Two layers, dropout, and a normalisation whose sums are saved for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2)
        return self.second(hidden).square().mean()


def run(trace: ReproducingTrace, model: nn.Module) -> list[Tensor]:
    """Loss and gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = trace(lambda x: model(x), (torch.ones(4, 8),), {})
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def ordered(model: nn.Module) -> tuple[Order, list[Tensor]]:
    order, failed = Order(), list[str]()
    trace = ReproducingTrace(
        torch.device("cpu"), compiler=lambda gm, inputs, left: compile_later(gm, inputs, order, failed)
    )
    found = run(trace, model)
    assert not failed and len(order.graphs) == 2
    return order, found


def compiled(model: nn.Module) -> list[Tensor]:
    return run(ReproducingTrace(torch.device("cpu"), compiler=compile_whole), model)


@pytest.mark.passes_without_graphs("what Inductor compiles is run as it is")
def test_what_is_ordered_has_the_keys_of_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So the caches that a worker fills are found, and whatever is not the same is compiled here."""
    from torch._inductor.codecache import compiled_fx_graph_hash
    from torch._inductor.compile_fx import get_input_idxs_to_check

    keys: list[str] = []

    def compile_fx_inner(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        kwargs.pop("compile_region_name", None)
        checked = get_input_idxs_to_check(inputs, kwargs.get("static_input_idxs", ()))
        keys.append(compiled_fx_graph_hash(gm, inputs, kwargs, checked)[0])
        counters["inductor"]["fxgraph_cache_miss"] += 1  # as if it was kept

        def eager(inputs: list[Any]) -> Any:
            return gm.forward(*inputs)

        eager._boxed_call = True  # type: ignore[attr-defined]
        return eager

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", compile_fx_inner)
    torch.manual_seed(0)
    model = Tiny()
    assert why_not_beside() is None
    order, found = ordered(model)
    assert not keys, "nothing was compiled"
    plain = run_plainly(model)
    assert differs(plain, found) is None, "such a step has eager kernels"
    fill_caches(order.dump())
    beside = keys.copy()
    keys.clear()
    compiled(model)
    assert beside == keys and len(keys) == 2


@pytest.mark.passes_without_graphs("settings are looked at")
def test_newer_names_of_a_switch_are_ordered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to say in older names what was set with newer ones."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        settings = _settings()
        products.fp32_precision = before
        _set(settings)
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before


@pytest.mark.passes_without_graphs("what Inductor compiles is not run")
def test_kernels_that_are_not_kept_on_disk_are_no_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, _ = ordered(Tiny())
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="does not keep these kernels on disk"):
        fill_caches(order.dump())


@pytest.mark.passes_without_graphs("what Inductor compiles is not run")
def test_a_step_that_holds_tensors_is_not_ordered() -> None:
    """Inductor would copy them to the device in the other process."""

    class Holds(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]))

    order, failed = Order(), list[str]()
    trace = ReproducingTrace(
        torch.device("cpu"), compiler=lambda gm, inputs, left: compile_later(gm, inputs, order, failed)
    )
    run(trace, Holds())
    assert failed and "it holds tensors" in failed[0]


def run_plainly(model: nn.Module) -> list[Tensor]:
    return run(lambda fn, args, kwargs: fn(*args, **kwargs), model)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.passes_without_graphs("what Inductor compiles is run as it is")
def test_kernels_of_a_worker_are_found_and_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    expected = compiled(model)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "beside"))
    order, _ = ordered(model)
    work = Beside()
    work.begin(order.dump())
    end = time.monotonic() + 600
    while work.progress is WorkState.UNDER_WAY and time.monotonic() < end:
        time.sleep(0.1)
    assert work.progress is WorkState.READY, work.why
    counters.clear()
    found = compiled(model)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2 and not counters["inductor"]["fxgraph_cache_miss"]
    assert differs(expected, found) is None
    work.close()


@pytest.mark.passes_without_graphs("no kernel is compiled")
def test_a_worker_hands_kernels_over_and_loads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one makes a context on the device. What is not handed over, Triton would look for in the training."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.triton_bundler import TritonBundler

    done: list[str] = []
    for name in ("_make_launchers", "_dynamic_scale_rblock", "_precompile_worker"):
        monkeypatch.setattr(CachingAutotuner, name, lambda self, name=name: done.append(name))
    monkeypatch.setattr(CachingAutotuner, "is_statically_launchable", lambda self: True)
    monkeypatch.setattr(TritonBundler, "put_static_autotuner", lambda key, kernel: done.append(key))
    kernel: Any = CachingAutotuner.__new__(CachingAutotuner)
    kernel.lock, kernel._plugins = contextlib.nullcontext(), []
    with _without_device():
        kernel.precompile(static_triton_bundle_key="handed over")
    assert done == ["_precompile_worker", "handed over"]
    kernel.precompile(static_triton_bundle_key="handed over")
    assert done[2:] == ["_precompile_worker", "handed over", "_make_launchers", "_dynamic_scale_rblock"]


@pytest.mark.quick
@pytest.mark.passes_without_graphs("settings are looked at")
def test_what_only_this_process_can_compile_is_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    with config.patch(max_autotune=True):
        assert why_not_beside() == "Inductor's setting max_autotune is on"
    with config.patch(post_grad_custom_pre_pass=lambda graph: None):
        assert "post_grad_custom_pre_pass is a function" in (why_not_beside() or "")
    with config.patch(fx_graph_cache=False):
        assert why_not_beside() == "Inductor's cache is off"
