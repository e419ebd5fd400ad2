"""Batches of changing shapes: few traces, a graph for a shape that pays for it, and nothing computed differently."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import CONFIG, Diary, Net, adamw, batches, both, loss_of

from pygraph_train import GraphedStep, StepReport
from pygraph_train.regions import inductor
from pygraph_train.step import families
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.families import Family
from pygraph_train.step.inputs import InputMemory, StaticInputs
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.tracing.trace import Trace


@contextmanager
def traces() -> Iterator[list[Trace]]:
    """What is traced inside, once for each time that Dynamo's backend is called."""
    found: list[Trace] = []
    backend = Trace._backend

    def counted(self: Trace, *args: Any) -> Any:
        found.append(self)
        return backend(self, *args)

    Trace._backend = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Trace._backend = backend  # type: ignore[method-assign]


class Text(nn.Module):
    """A small encoder: positions from `arange`, an attention mask, `view(-1, n)`, dropout."""

    def __init__(self, words: int = 11, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(256, width)
        self.heads = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        count, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        q, k, v = self.heads(x).view(count, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm(x + self.dropout(attended.transpose(1, 2).reshape(count, length, -1)))
        return self.out(x).view(count * length, -1)


def text_loss(model: nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A loss over the tokens that the mask leaves."""

    def step_fn(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["tokens"], batch["mask"])
        loss = nn.functional.cross_entropy(logits, batch["labels"].view(-1), ignore_index=-100)
        return {"loss": loss, "mean": logits.mean()}

    return step_fn


def text(length: int, count: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """A batch with padding; the default random state is left alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (count, length), generator=generator)
    used = torch.randint(1, length + 1, (count, 1), generator=generator) if length else torch.zeros(count, 1)
    mask = torch.arange(length)[None] < used
    return {"tokens": tokens, "mask": mask, "labels": tokens.masked_fill(~mask, -100)}


def train(lengths: list[int], counts: list[int] | None = None, **options: Any) -> Callable[[Diary], None]:
    """A script that trains on texts of these lengths."""

    def script(diary: Diary) -> None:
        model = Text()
        optimizer = adamw(model)
        step = diary.step(text_loss(model), model=model, optimizer=optimizer, **options)
        for index, length in enumerate(lengths):
            count = 4 if counts is None else counts[index]
            diary.write("loss", step(text(length, count, seed=index)))
            if index % 20 == 0:
                diary.write_state(model, optimizer)
        diary.write_state(model, optimizer)

    return script


def drawn(lengths: range | list[int], steps: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(list(lengths), k=steps)


def fused_captures(report: StepReport) -> int:
    return sum(capture.plan == "{F B O}" for capture in report.captures)


def test_49_lengths_have_two_traces() -> None:
    with traces() as found:
        report = both(train(drawn(range(16, 65), 400)), replays=60, plan="{F B O}")
    assert len(found) == 2
    assert report.shapes.met == 49
    assert fused_captures(report) == report.shapes.with_graphs <= 49
    assert not report.fallbacks, str(report)


def test_few_lengths_replay_nearly_always() -> None:
    with traces() as found:
        report = both(train(drawn([16, 24, 32, 40, 48], 150)), replays=115, plan="{F B O}")
    assert len(found) == 2
    assert fused_captures(report) == 5


def test_ever_new_lengths_cost_nothing() -> None:
    """No shape comes back: nothing is captured, and what is remembered is bounded."""

    def script(diary: Diary) -> None:
        model = Net(dropout=0.0)
        step = diary.step(loss_of(model), model=model, optimizer=adamw(model))
        x, y = batches(1, size=2100)[0]
        for length in range(2, 2100):
            loss = step((x[:length], y[:length]))
        diary.write("loss", loss)
        if diary.graphed:
            assert len(step._runner._signatures._by_key) <= 1024

    with traces() as found:
        report = both(script, never="every shape is there once")
    assert len(found) <= 3
    assert not report.captures
    assert report.shapes.met == 2098


def test_a_shape_has_to_come_back_before_it_is_captured() -> None:
    """As often as the second shape of a run is made without a look: with the kernels that its graph will hold."""
    lengths = [8] * 8 + [9] * 9 + [10] * 6 + [11] * 4
    with traces() as found:
        report = both(train(lengths), replays=6, warmup_steps=3)
    assert len(found) == 2
    steps = [capture.step for capture in report.captures if capture.plan == "{F B O}"]
    assert steps == [6, 17, 21, 27]
    assert report.shapes.to_dict() == {"met": 4, "with_graphs": 4, "rare_steps": 6}


@pytest.mark.slow
def test_batch_size_and_length_change_together() -> None:
    lengths, counts = drawn([8, 12, 16], 160), drawn([2, 4, 5], 160, seed=1)
    with traces() as found:
        both(train(lengths, counts), replays=80, plan="{F B O}")
    assert len(found) <= 3


@pytest.mark.slow
def test_a_last_batch_that_is_smaller() -> None:
    """Both sizes change in the end: the trace for many lengths was bound to the size of a batch."""
    lengths, counts = [], []
    for epoch in range(8):
        lengths += [*drawn([8, 12, 16], 9, seed=epoch), 12]
        counts += [4] * 9 + [3]
    with traces() as found:
        both(train(lengths, counts), replays=35, plan="{F B O}")
    assert len(found) <= 3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("odd", [1, 0])
def test_a_size_of_zero_or_one_turns_up(odd: int) -> None:
    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
        step = diary.step(lambda batch: model(batch[0]).square().sum(), model=model, optimizer=adamw(model))
        for index in range(90):
            size = odd if index % 5 == 4 else 3 + index % 3
            diary.write("loss", step(batches(1, size=size)[0]))
            diary.write_state(model)

    with traces() as found:
        both(script, replays=35, plan="{F B O}")
    assert len(found) <= 4


class Branching(Text):
    """Takes another Python branch for long texts, and loops over short ones."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        result = super().forward(tokens, mask)
        if tokens.shape[1] > 16:
            return result * 2
        return result.tanh()


@pytest.mark.slow
def test_another_branch_of_python_is_another_trace() -> None:
    def script(diary: Diary) -> None:
        model = Branching()
        step = diary.step(text_loss(model), model=model, optimizer=adamw(model))
        for index, length in enumerate(drawn([8, 12, 20, 24], 120)):
            diary.write("loss", step(text(length, seed=index)))
        diary.write_state(model)

    with traces() as found:
        both(script, replays=75, plan="{F B O}")
    assert len(found) == 3


@pytest.mark.slow
def test_a_step_that_loops_over_its_length_has_few_traces() -> None:
    """Each trace is for one length. There are no more of them than replays have paid for, and a row says why."""

    def script(diary: Diary) -> None:
        model = nn.GRUCell(4, 4)
        generator = torch.Generator().manual_seed(0)

        def step_fn(x: Tensor) -> Tensor:
            state = torch.zeros(x.shape[0], 4)
            for k in range(x.shape[1]):
                state = model(x[:, k], state)
            return state.square().mean()

        step = diary.step(step_fn, model=model, optimizer=adamw(model))
        for length in drawn(range(2, 14), 200):
            diary.write("loss", step(torch.randn(3, length, 4, generator=generator)))
        diary.write_state(model)

    with traces() as found:
        report = both(script, replays=10)
    assert len(found) <= 6
    assert any("no trace is for the next one" in f.reason for f in report.fallbacks), str(report)


def test_sizes_that_a_tensor_is_made_of() -> None:
    """Numbers that follow from sizes are arguments of operations: each capture holds those of its shape."""

    def script(diary: Diary) -> None:
        model = Net(dropout=0.3)

        def step_fn(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
            logits = model(batch[0]) / len(batch[0]) ** 0.5 + torch.full((3,), float(len(batch[0])))
            loss = nn.functional.cross_entropy(logits, batch[1], reduction="sum") / batch[0].shape[0]
            return {"loss": loss, "count": len(batch[0]), "shape": batch[0].shape, "share": 1 / len(batch[0])}

        step = diary.step(step_fn, model=model, optimizer=adamw(model))
        for index, size in enumerate(drawn([4, 6, 7, 9], 120)):
            diary.write("result", step(batches(index % 3 + 1, size=size)[-1]))
        diary.write_state(model)

    with traces() as found:
        both(script, replays=80, plan="{F B O}")
    assert len(found) == 2


@pytest.mark.slow
def test_accumulation_over_batches_of_changing_length() -> None:
    def script(diary: Diary) -> None:
        model = Text()
        optimizer = adamw(model)
        step = diary.step(text_loss(model), model=model, optimizer=optimizer)
        for index, length in enumerate(drawn([8, 12, 16], 160)):
            call = step if index % 2 else step.accumulate
            diary.write("loss", call(text(length, seed=index)))
        diary.write_state(model, optimizer)

    with traces() as found:
        both(script, replays=90)
    assert len(found) == 2


@pytest.mark.slow
def test_layers_are_frozen_in_mid_run() -> None:
    """What a trace was made for is over: the shapes share the next one as well."""

    def script(diary: Diary) -> None:
        model = Text()
        optimizer = adamw(model)
        step = diary.step(text_loss(model), model=model, optimizer=optimizer)
        for index, length in enumerate(drawn([8, 12, 16, 20], 240)):
            if index == 120:
                model.words.requires_grad_(False)
            diary.write("loss", step(text(length, seed=index)))
        diary.write_state(model, optimizer)

    with traces() as found:
        both(script, replays=150, plan="{F B O}")
    assert len(found) <= 4


def test_marks_are_taken_off_the_batch() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        step = diary.step(loss_of(model), model=model, optimizer=adamw(model))
        for index in range(40):
            x, y = batches(1, size=4 + index % 3)[0]
            names = set(vars(x))
            diary.write("loss", step((x, y)))
            assert set(vars(x)) == names

    both(script, replays=15, plan="{F B O}")


@pytest.mark.slow
def test_an_evicted_shape_earns_its_graph_anew_for_a_doubled_price() -> None:
    """A new favourite each 20 steps, with room for two: no shape is captured again and again."""
    lengths = [8 + 2 * (index // 20 % 4) for index in range(400)]
    report = both(train(lengths), replays=180, plan="{F B O}", max_signatures=2)
    assert fused_captures(report) <= 20


@pytest.mark.slow
def test_most_captures_are_compared_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    reference = CaptureMaker.reference

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(None)
        return reference(self, *args, **kwargs)

    monkeypatch.setattr(CaptureMaker, "reference", counted)
    lengths = drawn(range(8, 20), 250)
    report = both(train(lengths), replays=100, plan="{F B O}", verify="sample")
    assert fused_captures(report) == 12
    # the first capture, the second, the fourth and the eighth; and the third, of the shape that was traced
    assert len(runs) == 5
    runs.clear()
    both(train(lengths), replays=100, plan="{F B O}", verify="first")
    assert len(runs) == 12


@pytest.mark.slow
@pytest.mark.passes_without_graphs("what Inductor compiles is run as it is")
def test_inductor_compiles_once_for_many_lengths() -> None:
    """The same trace with Inductor's kernels, on the CPU: where its guards hold it is for that length as well."""
    from pygraph_train.regions.inductor import compile_whole

    torch.manual_seed(0)
    model = Text(dropout=0.0)
    step_fn = text_loss(model)
    dims = {0: frozenset({1}), 1: frozenset({1}), 2: frozenset({1})}
    with traces() as found:
        trace = Trace(torch.device("cpu"), compiler=compile_whole, dynamic=dims)
        for length in (9, 12, 16, 31):
            batch = text(length, seed=length)
            assert not trace.traced or trace.holds(step_fn, (batch,), {})
            loss = trace(step_fn, (batch,), {})["loss"]
            loss.backward()
            compiled = [p.grad for p in model.parameters()]
            model.zero_grad()
            expected = step_fn(batch)["loss"]
            expected.backward()
            torch.testing.assert_close(loss, expected)
            for p, gradient in zip(model.parameters(), compiled, strict=True):
                torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-5)
            model.zero_grad()
    assert len(found) == 1 and trace.problem is None


@pytest.mark.slow
def test_lightning_trains_on_changing_lengths() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from pygraph_train import PyGraphCallback

    lengths = drawn([8, 12, 16], 60)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Text()
            self.losses: list[Tensor] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = text_loss(self.model)(batch)["loss"]
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(outputs["loss"].clone())

        def configure_optimizers(self) -> Any:
            return adamw(self)

    def fit(*callbacks: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        module = Module()
        data: Any = torch.utils.data.DataLoader(
            [text(length, seed=k) for k, length in enumerate(lengths)], batch_size=None
        )
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=list(callbacks), **quiet
        )
        trainer.fit(module, data)
        return module.losses, module.state_dict()

    callback = PyGraphCallback(engine="emulated", warmup_steps=2)
    with traces() as found:
        (losses, state), (graphed, after) = fit(), fit(callback)
    assert len(found) == 2
    assert callback.report().steps_replayed >= 25, str(callback.report())
    assert all(map(torch.equal, losses, graphed))
    assert all(torch.equal(state[name], after[name]) for name in state)


def let_inductor_compile(monkeypatch: pytest.MonkeyPatch, *, asks: bool) -> None:
    """On the CPU as well. Where it `asks`, its code is for even sizes or for odd ones."""
    made, compile_whole = Decisions.__init__, inductor.compile_whole

    def with_inductor(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.compiles = True

    def asking(graph: Any, inputs: Any, left: list[str]) -> Any:
        for value in inputs if asks else ():
            if isinstance(value, torch.SymInt):
                bool(value % 2 == 0)  # kernels for attention ask in this way whether rows are aligned
        # the caches on disk know a compilation by its graph, and code that has asked is nothing for who has not
        with torch.compiler.config.patch(cache_key_tag=f"asks: {asks}"):
            return compile_whole(graph, inputs, left)

    monkeypatch.setattr(Decisions, "__init__", with_inductor)
    monkeypatch.setattr(families, "STEPS_BEFORE_COMPILING", 10)
    monkeypatch.setattr(inductor, "compile_whole", asking)


def train_on_lengths(lengths: Iterable[int]) -> tuple[GraphedStep, nn.Module, nn.Module, list[Any]]:
    """Train a model with Inductor's kernels, and its twin plainly; each loss is compared.

    Returns:
        The step, both models, and all traces.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG, compile=True)
    x, y = batches(1, size=200)[0]
    with traces() as found:
        for length in lengths:
            loss = step((x[:length], y[:length]))
            other.zero_grad()
            expected = loss_of(twin)((x[:length], y[:length]))
            expected.backward()
            other.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=1e-5)
    return step, model, twin, found


@pytest.mark.slow
@pytest.mark.passes_without_graphs("no shape comes back")
@pytest.mark.parametrize("codes", [1, 2])
def test_lengths_that_never_return_run_with_kernels_for_all_lengths(
    codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `torch.compile`: Inductor compiles once for all lengths, or once for each kind that its guards make."""
    with_code = UngraphedSteps.with_code
    with_kernels: list[int] = []

    def counted(self: Any, step: Any, *args: Any) -> Any:
        with_kernels.append(step.position)
        return with_code(self, step, *args)

    let_inductor_compile(monkeypatch, asks=codes == 2)
    monkeypatch.setattr(Family, "compiled_is_faster", lambda self: True)
    monkeypatch.setattr(UngraphedSteps, "with_code", counted)
    step, model, twin, found = train_on_lengths(random.Random(0).sample(range(3, 60), 57))
    x, y = batches(1, size=200)[0]
    compiled = found[2:]
    assert len(compiled) == codes, "after a trace of the first length, and a trace of all lengths"
    function = step._runner._training.program.function()
    for size in (77, 78):
        fit = [trace.holds(function, ((x[:size], y[:size]),), {}) for trace in compiled]
        assert all(trace.dynamic for trace in compiled) and sum(fit) == 1
    assert len(with_kernels) > 15, "steps of either kind"
    assert step.report().compile_seconds > 0 and not step.report().captures
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    step.close()


def test_input_buffers_of_the_largest_shape_serve_smaller_ones() -> None:
    memory = InputMemory()
    made = [
        StaticInputs([torch.arange(n), torch.ones(n, 3)[:, ::2], torch.ones(n + 1)[1:]], [True] * 3, memory)
        for n in (16, 8, 12, 20)
    ]
    first, *smaller, larger = ([t.untyped_storage().data_ptr() for t in inputs.tensors] for inputs in made)
    assert len(set(first)) == 3 and all(place == first for place in smaller)
    assert not set(first) & set(larger)
    for n, inputs in zip((16, 8, 12, 20), made, strict=True):
        leaves = [torch.arange(n) * 2, torch.full((n, 3), 0.5)[:, ::2], torch.arange(n + 1.0)[1:]]
        inputs.load(leaves)
        for buffer, leaf in zip(inputs.tensors, leaves, strict=True):
            assert torch.equal(buffer, leaf) and buffer.stride() == leaf.stride()
            assert buffer.data_ptr() % 16 == leaf.data_ptr() % 16
