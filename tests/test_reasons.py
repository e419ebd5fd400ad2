"""What the report says of steps that are not one graph: a true sentence, and the line that it is about."""

from __future__ import annotations

import dataclasses
import enum
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_training import parity
from torch import Tensor, nn
from training import CONFIG, Diary, batches, both, line_of

from pygraph_train import GraphedStep
from pygraph_train.graphs.cuda import _reason as cuda_reason
from pygraph_train.graphs.engine import CaptureError
from pygraph_train.report.step_report import Fallback
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.tracing.dry_trace import DryTrace
from pygraph_train.tracing.refusals import problem_of
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.trace import Trace


def nonzero(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y.square().mean() + y.gt(0).nonzero().float().mean()  # here


def masked(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y[y > -9].sum()  # here


def own_generator(model: nn.Module, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=torch_generator)  # here
    return model(x + noise).square().mean()  # type: ignore[no-any-return]


def transformed(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: model(row).square().sum())(x).mean()  # type: ignore[no-any-return]  # here


def ctc(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x).log_softmax(-1)[None].repeat(6, 1, 1)
    ends = torch.full((6,), 2)
    with torch.backends.cudnn.flags(enabled=False):
        loss = nn.functional.ctc_loss(found, torch.ones(6, 2).long(), 3 * ends, ends)  # here
    return loss


def ctc_as_it_is(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x).log_softmax(-1)[None].repeat(6, 1, 1)
    return nn.functional.ctc_loss(found, torch.ones(6, 2).long(), (6,) * 6, (2,) * 6)  # here


def switched(model: nn.Module, x: Tensor) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):  # here
        return model(x).square().mean()  # type: ignore[no-any-return]


READ = "the value of a tensor is read on the host"

torch_generator = torch.Generator().manual_seed(0)


def host_float(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss = model(x).square().mean()
    return {"loss": loss * float(loss)}  # here


def host_item(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss = model(x).square().mean()
    value = loss.item()  # here
    return {"loss": loss * value, "deep": {"deeper": [(value,)], "computed": 2 * value + 1}}


def host_int(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss = model(x).square().mean()
    count = int((model(x) > 0).sum())  # here
    return {"loss": loss * count, "count": count}


def host_bool(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss = model(x).square().mean()
    return {"loss": loss, "large": bool(loss > 1)}  # here


def host_bool_item(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss = model(x).square().mean()
    return {"loss": loss, "large": (loss > 1).item()}  # here


def decided(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    if loss.item() > 1000:  # here
        loss = loss / 2
    return loss


def counted(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    for _ in range(int((x > 0).sum())):  # here
        loss = loss * 1.01
    return loss


def drawn_and_returned(model: nn.Module, x: Tensor) -> dict[str, Any]:
    mask = torch.rand(len(x)) < 0.5
    count = int(mask.sum())  # here
    loss = model(x).square().mean()
    return {"loss": loss, "count": count}


def compared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss if torch.equal(x, x + 1) else loss * 2  # here


def to_numpy(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss = model(x).square().mean()
    return {"loss": loss, "value": float(loss.detach().numpy())}  # here


def printed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    print(loss)  # here
    return loss


def printed_with_words(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    print("loss", loss.item())  # here
    return loss


def made_a_string(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    str(loss)  # here
    return loss


def percent(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    "%.2f" % loss.item()  # noqa: UP031  # here
    return loss


def percent_of_float(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    "loss %s" % float(loss)  # noqa: UP031  # here
    return loss


def percent_of_count(model: nn.Module, x: Tensor) -> Tensor:
    "%d" % int((x > 0).sum())  # noqa: UP031  # here
    return model(x).square().mean()  # type: ignore[no-any-return]


def percent_of_several(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    "%d: %.2f" % (1, loss.item())  # noqa: UP031  # here
    return loss


def row_of(model: nn.Module, fn: Callable[[nn.Module, Tensor], Any], **config: Any) -> tuple[str, str | None]:
    row = whole_row_of(model, fn, **config)
    return row.reason, row.where


def whole_row_of(model: nn.Module, fn: Callable[[nn.Module, Tensor], Any], **config: Any) -> Fallback:
    torch.compiler.reset()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    asked = dataclasses.replace(CONFIG, **config)
    step = GraphedStep(lambda x: fn(model, x), model=model, optimizer=optimizer, config=asked)
    for _ in range(6):
        step(torch.randn(6, 4))
    if fn is transformed and not step.report().fallbacks:  # torch 2.11 traces it
        assert step.report().steps_replayed
        pytest.skip("this torch traces transforms of torch.func")
    return step.report().fallbacks[0]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (printed, "print() reads the value of a tensor on the host"),
        (printed_with_words, "print() reads the value of a tensor on the host"),
        (made_a_string, "str() reads the value of a tensor on the host"),
        (percent, "puts a tensor into a text"),
        (percent_of_float, "puts a tensor into a text"),
        (percent_of_count, "puts a tensor into a text"),
        (percent_of_several, "formats a text with %"),
    ],
)
def test_a_value_that_is_shown_is_told_as_a_read_on_the_host(
    fn: Callable[[nn.Module, Tensor], Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = whole_row_of(nn.Linear(4, 3), fn)
    assert words in row.reason, row
    assert "after the step" in row.fix, row
    file, _, line = str(row.where).rpartition(":")
    assert file == __file__ and "# here" in linecache.getline(file, int(line)), row
    assert len(capsys.readouterr().out.splitlines()) == (6 if fn in (printed, printed_with_words) else 0)


class Tagged(Tensor):
    """Its operations are its own in Python only."""


def of_a_class(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.as_subclass(Tagged)).as_subclass(Tensor).mean()


@pytest.mark.passes_without_graphs("the reason is found by tracing")
def test_what_dynamo_does_not_support_has_a_name() -> None:
    reason, where = row_of(nn.Linear(4, 3), of_a_class)
    assert "as_subclass" in reason and where == line_of(of_a_class, "as_subclass")


@pytest.mark.passes_without_graphs("what is printed is found by tracing")
def test_a_text_that_is_printed_is_told_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def greets(model: nn.Module, x: Tensor) -> Tensor:
        print("hello")  # here
        return model(x).square().mean()  # type: ignore[no-any-return]

    row = whole_row_of(nn.Linear(4, 3), greets)
    assert "it calls print()" in row.reason and "outside of the step" in row.fix, row
    assert "# here" in linecache.getline(__file__, int(str(row.where).rpartition(":")[2])), row
    assert capsys.readouterr().out == "hello\n" * 6


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (nonzero, "shape of a tensor depends on the values"),
        (masked, "shape of a tensor depends on the values"),
        (own_generator, "its own torch.Generator"),
        (ctc, "ctc_loss reads the lengths"),
        (ctc_as_it_is, "ctc_loss reads the lengths"),
        (switched, "changes switches of torch.backends"),
        (transformed, "torch.func"),
        (host_float, READ),
        (host_item, READ),
        (host_int, READ),
        (host_bool, READ),
        (host_bool_item, READ),
        (decided, READ),
        (counted, READ),
        (drawn_and_returned, "torch draws a number on the host"),
        (compared, READ),
        (to_numpy, "Tensor.numpy()"),
    ],
)
def test_the_reason_names_what_it_is_and_its_line(fn: Callable[[nn.Module, Tensor], Any], words: str) -> None:
    only_eager = fn in (ctc, ctc_as_it_is, switched, decided)
    reason, where = row_of(nn.Linear(4, 3), fn, compile=True if only_eager else "auto")
    assert words in reason and "BatchNorm" not in reason, reason
    file, _, line = str(where).rpartition(":")
    assert "# here" in linecache.getline(file, int(line)), where


def test_batch_norm_without_momentum_is_told_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    reason, where = row_of(model, lambda model, x: model(x).square().mean() + model(x)[0].sum())
    assert "on the device" in reason and "momentum=None" in reason and str(where)[-1].isdigit(), (
        reason,
        where,
    )


class LogsItsLoss(pl.LightningModule):
    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.read = nn.Linear(6, 3), read

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        value = self.read(loss)
        self.log("x", value)
        return loss * value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.parametrize("read", [lambda loss: loss.item(), float], ids=["item", "float"])
def test_a_loss_that_is_weighted_with_a_number_is_told_as_a_read_on_the_host(
    read: Callable[..., Any],
) -> None:
    _, graphed = parity(lambda: LogsItsLoss(read), replays=5, max_epochs=1)
    assert graphed.report is not None
    row = graphed.report.fallbacks[0]
    file, _, line = str(row.where).rpartition(":")
    assert file == __file__ and "loss" in linecache.getline(file, int(line)), row
    assert "after the step" in row.fix


@pytest.mark.passes_without_graphs("what changes on every step is found by tracing")
def test_a_value_that_changes_in_a_module_of_torch_has_the_line_of_the_user_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nn" / "modules").mkdir(parents=True)
    (tmp_path / "nn" / "modules" / "dropout.py").write_text("# of the user\n" * 200)
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))

    def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])  # here

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = GraphedStep(step_fn, model=model, optimizer=optimizer, config=CONFIG)
    for k, batch in enumerate(batches(40)):
        model[1].p = 0.5 + k / 100
        step(batch)
    row = step.report().fallbacks[0]
    assert row.where == line_of(step_fn, "# here") and ".p is no longer " in row.reason, row


@pytest.mark.passes_without_graphs("what changes on every step is found by tracing")
def test_a_value_that_changes_has_its_line_in_a_folder_with_a_space(tmp_path: Path) -> None:
    file = tmp_path / "my project" / "train.py"
    file.parent.mkdir()
    file.write_text("def step_fn(x):\n    return model(x).square().mean() * model.factor\n")
    model = nn.Linear(4, 3)
    namespace: dict[str, Any] = {"model": model}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = GraphedStep(namespace["step_fn"], model=model, optimizer=optimizer, config=CONFIG)
    for k in range(40):
        model.factor = 1.0 + k / 100
        step(torch.randn(6, 4))
    row = step.report().fallbacks[0]
    assert row.where == f"{file}:2" and "model.factor" in row.reason, row


class Scaled(nn.Module):
    """Its result depends on what is in `value`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 3)
        self.value: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def row_of_changes(change: Callable[[Scaled, int], None], factor: Callable[[Any], Any]) -> Fallback:
    """What is said of a step that is multiplied with the factor of a value, which `change` changes before each step."""
    found = []

    def script(diary: Diary) -> None:
        torch.compiler.reset()
        model = Scaled()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            return loss * factor(model.value)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for k, batch in enumerate(batches(12)):
            change(model, k)
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)
        if diary.graphed:
            found.extend(step.report().fallbacks)

    both(script, compile=False, never="a change on every step")
    return found[0]


def freeze_in_turn(model: Scaled, k: int) -> None:
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(not k >> index & 1)


@pytest.mark.passes_without_graphs("a change on every step leaves no graphs")
def test_layers_frozen_in_turn_are_named_with_what_to_do() -> None:
    row = row_of_changes(freeze_in_turn, float)
    assert "layers.0.weight has requires_grad True now" in row.reason, row
    assert "frozen layers" in row.fix and "rarely" in row.fix


@pytest.mark.passes_without_graphs("a change on every step leaves no graphs")
def test_layers_frozen_in_turn_are_named_also_where_a_number_changes_at_the_same_time() -> None:
    def change(model: Scaled, k: int) -> None:
        freeze_in_turn(model, k)
        model.value = 1.0 if k < 4 else 2.0

    row = row_of_changes(change, float)
    assert "model.value is no longer 1.0" in row.reason, row
    assert "requires_grad" in row.reason and "Keep values that change in tensors" in row.fix, row
    assert "frozen layers" in row.fix


Color = enum.Enum("Color", [f"COLOR{k}" for k in range(12)])


@pytest.mark.passes_without_graphs("a change on every step leaves no graphs")
@pytest.mark.parametrize(
    ("value", "factor", "words"),
    [
        (
            lambda k: {str(n): 1.0 for n in range(k + 1)},
            lambda x: sum(x.values()),
            "len(model.value) is no longer 4",
        ),
        (lambda k: type(f"Of{k}", (), {"v": 1.0})(), lambda x: x.v, "model.value is no longer of the class "),
        (list(Color).__getitem__, lambda x: x.value, "model.value is no longer the same object"),
        (lambda k: torch.ones(k + 1), Tensor.sum, "model.value has shape (5,) now"),
    ],
    ids=["dict", "class", "enum", "tensor"],
)
def test_a_value_of_any_kind_that_changes_is_told_in_words(
    value: Callable[[int], Any], factor: Callable[[Any], Any], words: str
) -> None:
    def change(model: Scaled, k: int) -> None:
        model.value = value(k)

    row = row_of_changes(change, factor)
    assert words in row.reason and "___" not in row.reason and row.fix, row


@pytest.mark.passes_without_graphs("it only traces")
def test_a_trace_that_runs_nothing_names_arguments_as_the_function_does() -> None:
    def step_fn(x: Tensor, factor: float) -> Tensor:
        return x * factor if factor > 1 else x

    trace, x = DryTrace(torch.device("cpu")), torch.ones(3)
    trace.look(step_fn, x, 2.0)
    assert trace.refused is None and trace.still_holds(step_fn, x, 2.0)
    assert trace.what_changed(step_fn, x, 3.0).reason.startswith("factor is no longer 2.0")


@pytest.mark.passes_without_graphs("it only traces")
def test_a_trace_that_runs_nothing_takes_branches_of_compiled_code_with_the_same_arguments() -> None:
    """The first look at plain training's branches fails, and another one follows."""

    def step_fn(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.sum() > 0:
            x = x + 1
        rows, columns = x.size()
        return x.sum() / (rows * columns)

    trace, x = DryTrace(torch.device("cpu")), torch.ones(3, 2)
    trace.look(step_fn, x)
    assert trace.branches.taken and trace.refused is None, trace.refused
    assert trace.still_holds(step_fn, x) and not trace.still_holds(step_fn, torch.ones(4, 2))


@pytest.mark.passes_without_graphs("it only traces")
def test_a_trace_for_many_sizes_names_what_it_needs_of_them() -> None:
    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum() if x.size(0) % 8 == 0 else x.sum()

    dims = {0: frozenset({0}), 1: frozenset({0})}
    trace = Trace(torch.device("cpu"), dynamic=dims)
    trace(step_fn, (torch.ones(16, 3), torch.ones(32, 3)), {})
    assert trace.holds(step_fn, (torch.ones(24, 3), torch.ones(40, 3)), {})
    problem = trace.why_not(step_fn, (torch.ones(25, 3), torch.ones(40, 3)), {})
    assert problem.reason == "x.size()[0] % 8 is no longer 0: the step is traced for other sizes", problem
    assert problem.fix


def test_an_error_of_cuda_about_the_default_stream_says_what_belongs_to_it() -> None:
    said = cuda_reason(
        RuntimeError(
            "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
        )
    )
    assert "made steps before pygraph-train met it" in said


@pytest.mark.passes_without_graphs("it only traces")
def test_a_capture_that_meets_kept_results_says_who_keeps_them() -> None:
    class Keeping(nn.Linear):
        calls = 0
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = super().forward(x)
            self.state = y
            return y

    model = Keeping(3, 3)

    def step_fn(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        return loss

    trace = ReproducingTrace(torch.device("cpu"))
    trace(step_fn, (torch.ones(2, 3),), {})
    reason = cuda_reason(RuntimeError("CUDA error: it would make the legacy stream depend on another"))
    problem = problem_of(CaptureError(reason), trace, step_fn)
    assert problem.reason == f"{reason}, as model.state may" and "detach()" in problem.fix
    assert problem.where == line_of(Keeping, "self.state = y")


def test_an_error_of_cuda_about_pinned_memory_says_what_copies() -> None:
    said = cuda_reason(
        RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless it is pinned")
    )
    assert "between the device and memory of the host" in said and ".tolist()" in said


@pytest.mark.quick
@pytest.mark.passes_without_graphs("a sentence")
def test_what_a_loop_sets_is_told_in_words() -> None:
    assert PositionInAccumulation(constants=(2, None, "value", ("step",))).told().endswith("now 2, value)")
    assert PositionInAccumulation(constants=(None, ("step",))).told() == ""
