"""Steps that ask whether they are compiled compute what they compute without the library, as transformers' masks do."""

from __future__ import annotations

import contextvars
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import CONFIG, Diary, Net, PlainStep, adamw, batches, both, line_of, loss_of, sgd

from pygraph_train import GraphedStep
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.program import plain_call
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.trace import Trace

CPU = torch.device("cpu")


def scaled_if(question: Any) -> Any:
    return lambda x: x * 3 if question() else x * 2


@pytest.mark.parametrize(
    "question",
    [torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting],
)
def test_a_trace_with_eager_kernels_takes_the_branch_of_plain_training(question: Any) -> None:
    trace, step, x = Trace(CPU), scaled_if(question), torch.ones(3)
    assert torch.equal(trace(step, (x,), {}), x * 2)
    assert torch.equal(trace(step, (x,), {}), x * 2)
    assert trace.problem is None and trace.branches.compiled is None


def test_a_trace_for_a_compiler_takes_the_branch_of_compiled_code() -> None:
    trace, x = Trace(CPU, compiler=lambda graph, inputs, left: graph.forward), torch.ones(3)
    assert torch.equal(trace(scaled_if(torch.compiler.is_compiling), (x,), {}), x * 3)


def reads_unless_compiled(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and x.sum() > 0:
        return x * 2
    return x * 3


def test_a_branch_that_reads_the_host_gives_way_to_that_of_compiled_code() -> None:
    trace, x = Trace(CPU), torch.ones(3)
    assert torch.equal(trace(reads_unless_compiled, (x,), {}), x * 3)
    assert trace.branches.compiled == line_of(reads_unless_compiled, "is_compiling")
    assert torch.equal(trace(reads_unless_compiled, (x,), {}), x * 3)
    assert trace.problem is None


def test_a_step_without_a_graph_is_made_by_the_function_itself() -> None:
    """What was traced has the branch of compiled code, which is for graphs and what they are compared with."""

    def step(x: Tensor) -> Tensor:
        y = x.cumsum(0)
        if not torch.compiler.is_compiling() and torch.tanh(y @ y) > 0:  # not read ahead
            return x * 2
        return x * 3

    trace, x = ReproducingTrace(CPU), torch.ones(3)
    for _ in range(3):
        with trace.branches.in_steps():
            assert torch.equal(trace(step, (x,), {}), x * 2)
    assert trace.problem is None and trace.branches.compiled == line_of(step, "is_compiling")
    assert torch.equal(trace(step, (x,), {}), x * 3)


def test_an_exception_on_a_branch_of_compiled_code_is_not_the_reason() -> None:
    """The reason is what is in the way of the branch that plain training takes."""

    def step(x: Tensor) -> Tensor:
        y = x.cumsum(0)
        if torch.compiler.is_compiling():
            raise ValueError("nobody computes this")
        if torch.tanh(y @ y) > 0:
            y = y * 2
        return y

    with pytest.raises(NotLegal) as refused:
        Trace(CPU)(step, (torch.ones(3),), {})
    assert refused.value.problem.where == line_of(step, "if torch.tanh")
    assert "is read on the host" in refused.value.problem.reason


def test_a_step_that_asks_is_replayed_as_in_plain_training() -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y * 1.5 if torch.compiler.is_compiling() else y

    def script(diary: Diary) -> None:
        model: nn.Module = Asking()
        optimizer = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    report = both(script, replays=20, plan="{F B O}")
    assert "asks whether it is compiled" not in text_of(report)


class Stores:
    """As the context variables of transformers: Dynamo cannot trace how they store things in plain training."""

    def __init__(self) -> None:
        self.variable: contextvars.ContextVar[int] = contextvars.ContextVar("stored")

    def put(self) -> None:
        if not torch.compiler.is_compiling():
            self.variable.set(1)


def test_only_the_file_that_cannot_be_traced_takes_the_branch_of_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_elsewhere.py").write_text(
        "import torch\n\ndef scaled(x):\n    return x * 3 if torch.compiler.is_compiling() else x * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("asks_elsewhere")
    trace, stores, x = Trace(CPU), Stores(), torch.ones(3)

    def step(x: Tensor) -> Tensor:
        stores.put()
        scaled: Tensor = other.scaled(x)
        return scaled

    assert torch.equal(trace(step, (x,), {}), x * 2)
    assert trace.problem is None and trace.branches.compiled is None


@pytest.mark.parametrize("known", [True, False])
def test_a_file_that_is_known_to_store_is_traced_once(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stores_things.py").write_text(
        "import contextvars, torch\n\n"
        f"class {'CompileableContextVar' if known else 'Other'}:\n"
        "    variable = contextvars.ContextVar('stored')\n"
        "    def put(self):\n"
        "        if not torch.compiler.is_compiling():\n"
        "            self.variable.set(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("stores_things")
    monkeypatch.delitem(sys.modules, "stores_things")
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", module)
    stores = (module.CompileableContextVar if known else module.Other)()
    trace, x, given_up = Trace(CPU), torch.ones(3), 0

    def step(x: Tensor) -> Tensor:
        stores.put()
        return x * 2

    look = trace._is_worth_another_look

    def counted(refused: Problem) -> bool:
        nonlocal given_up
        given_up += 1
        return look(refused)

    monkeypatch.setattr(trace, "_is_worth_another_look", counted)
    assert not trace.branches.taken
    assert torch.equal(trace(step, (x,), {}), x * 2)
    assert given_up == (not known)
    assert trace.branches.taken and trace.branches.compiled is None and trace.problem is None


def is_tracing() -> bool:
    """As that of transformers."""
    if torch.compiler.is_compiling():
        return True
    try:
        return torch.cuda.is_current_stream_capturing()
    except Exception:  # without a driver
        return False


class Masked(nn.Module):
    """Makes a mask in one place, which plain training needs for padded batches only, and checks its size in another.

    The size is that of the tokens, and the check is made after half of them are gone: code that makes a mask because
    it is compiled raises there, as Informer and Autoformer of transformers do. Between the two, the host reads a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def mask(self, kept: Tensor) -> Tensor | None:
        return kept.float().log() if is_tracing() or not kept.all() else None

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            if mask.shape != x.shape[:1]:
                raise ValueError(f"the mask should be of size {x.shape[:1]}, but is {mask.shape}")
            x = x + mask[:, None]
        return x.tanh()

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mask = self.mask(kept)
        hidden = self.first(x).sin()
        print(hidden.mean().item(), file=io.StringIO())  # the host reads a value
        result: Tensor = self.last(self.attend(hidden[: len(x) // 2], mask))
        return result


@pytest.mark.parametrize("compile", [False, True, "auto"])
@pytest.mark.parametrize("within", ["function", "modules"])
def test_regions_raise_nothing_that_plain_training_does_not_raise(compile: bool | str, within: str) -> None:
    def script(diary: Diary) -> None:
        model, seen = Masked(), list[int]()
        optimizer, g = adamw(model), torch.Generator().manual_seed(1)

        def step_fn(x: Tensor, kept: Tensor, labels: Tensor) -> Tensor:
            if within == "modules":  # what changes in each step keeps Dynamo from the whole function
                seen.append(len(seen))
            return nn.functional.cross_entropy(model(x, kept), labels)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for _ in range(50):
            x, labels = torch.randn(12, 8, generator=g), torch.randint(4, (6,), generator=g)
            diary.write("loss", step(x, torch.ones(12, dtype=torch.bool), labels))
            diary.write_state(model, optimizer)

    report = both(script, compile=compile, replays=20)
    assert {r.phase for r in report.regions() if r.replays >= 20} >= {"forward", "backward"}, text_of(report)
    assert "the compiler failed" not in text_of(report)


READS: dict[str, Callable[[Tensor], Any]] = {
    "count": lambda x: range(int(torch.tanh(x) < 2)),
    "text of a number": lambda x: len(f"{x.item():.1f}") < 9,
    "text of a tensor": lambda x: len(f"{x:.1f}") < 9,
    "str": lambda x: len(str(x)) < 99,
    "numpy": lambda x: x.numpy() < 99,
    "print": lambda x: print(x, file=io.StringIO()) is None,
}


class Reading(Net):
    """Reads a value on the host, but not in compiled code, which computes something else."""

    def __init__(self, reads: str = "count", *, counts: bool = False) -> None:
        super().__init__()
        self.reads, self.counts, self.steps, self.seen = READS[reads], counts, 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        noise = torch.rand(len(y))
        if self.counts:
            self.steps += 1
            self.seen.append(self.steps)
        if not torch.compiler.is_compiling() and self.reads(y.detach().sum()):
            return y * (2 + noise[:, None])
        return y * (3 + noise[:, None])


def test_a_step_that_gets_no_graph_never_runs_the_branch_of_compiled_code() -> None:
    """The emulated engine captures the function itself, which reads on the host: the capture fails."""

    def script(diary: Diary) -> None:
        model: nn.Module = Reading()
        optimizer = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(20):
            diary.write("loss", step(batch))
            diary.write("random", torch.get_rng_state())
            diary.write_state(model, optimizer)

    report = both(script, replays=20)  # of parts of the step
    assert report.steps_replayed == 0 and "reads a tensor's value on the host" in text_of(report)
    assert "asks whether it is compiled" not in text_of(report)


@pytest.mark.parametrize("reads", READS)
def test_no_step_before_the_first_replay_runs_the_branch_of_compiled_code(reads: str) -> None:
    """Also where the step writes to Python, so that Dynamo's code is what is captured. The report says so then."""
    losses: dict[str, list[Tensor]] = {}
    for kind in ("plain", "graphed"):
        torch.manual_seed(0)
        model, found, first = Reading(reads, counts=True), list[Tensor](), 0
        given = {"model": model, "optimizer": sgd(model)}
        step = (
            GraphedStep(loss_of(model), config=CONFIG, **given)
            if kind == "graphed"
            else PlainStep(loss_of(model), **given)
        )
        for batch in batches(20):
            found.append(step(batch).detach().clone())
            if isinstance(step, GraphedStep) and not step.report().steps_replayed:
                first = len(found)  # of the steps that are replayed
        losses[kind] = found
        assert model.seen == list(range(1, 21))
    report = step.report()
    assert report.steps_replayed >= 10 and "asks whether it is compiled" in text_of(report), text_of(report)
    step.close()
    same = [torch.equal(a, b) for a, b in zip(losses["plain"], losses["graphed"], strict=True)]
    assert first >= 3 and all(same[:first]), same


@pytest.mark.parametrize("asks", [False, True])
def test_on_cuda_the_graph_of_compiled_code_is_for_captures_alone(asks: bool) -> None:
    """Where the function has plain training's branches in it, the steps of the warm-up run it as well."""
    trace = ReproducingTrace(CPU)
    trace.branches.compiled = "masks.py:1" if asks else None
    variant: Any = SimpleNamespace(trace=trace, compiled=None, arm=SimpleNamespace(compiled=False))
    capturing = object.__new__(Capturing)
    capturing._training = cast(Any, SimpleNamespace(engine=SimpleNamespace(name="cuda")))
    assert capturing._call_of(variant) is (plain_call if asks else trace)
    assert capturing._silent_call_of(variant) is trace
