"""Accelerate and the transformers Trainer on a GPU: the same training from graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parents[1]))
from accelerate_training import fresh, fresh_state  # noqa: E402, F401

from pygraph_train import Accelerator, PyGraph  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("same_block_sizes", "matmul_precision_put_back"),
]


STEPS = 60


def model_of(width: int = 64) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(16, width)]
    for _ in range(6):
        layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 16, generator=generator).cuda(),
            torch.randint(0, 8, (32,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def train(make: Callable[..., Any], *, whole: bool = False, clip: bool = False, **options: Any) -> Any:
    """Losses and parameters of one training, and its Accelerator."""
    with fresh_state():
        torch.manual_seed(0)
        accelerator = make(**options)
        # a power of two: the learning rate is a float32 in graphs
        accumulation = options.get("gradient_accumulation_steps", 1)
        optimizer = torch.optim.AdamW((model := model_of()).parameters(), lr=2.0**-8, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with accelerator.accumulate(model):
                out = model(x)
                loss = nn.functional.cross_entropy(out, y)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        run = accelerator.graphed_step(step) if whole else step
        losses = []
        for index, (x, y) in enumerate(batches()):
            # PyGraph compiles a module after the first step: so does what it is compared with
            first = isinstance(accelerator, CompiledAfterTheFirstStep) and index < accumulation
            with torch.compiler.set_stance("force_eager") if first else nullcontext():
                losses.append(run(x, y))
        found = [torch.stack(losses).float().cpu(), *(p.detach().cpu() for p in model.parameters())]
        report = accelerator.pygraph.report() if getattr(accelerator, "pygraph", None) else None
        accelerator.end_training()
        return found, report


def graphed(**options: Any) -> Callable[..., Any]:
    return lambda **kwargs: Accelerator(plugins=[PyGraph(**options)], **kwargs)


class CompiledAfterTheFirstStep(accelerate.Accelerator):
    """`train` runs its first step without the compiler."""


def compiled(**kwargs: Any) -> Any:
    return CompiledAfterTheFirstStep(dynamo_backend="inductor", **kwargs)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [False, True])
def test_stock_loop_equals_the_compiled_one(precision: str, accumulation: int, clip: bool) -> None:
    """Among them the loops of accelerate #2645 (bf16 outputs become fp32) and pytorch #169545 (accumulation)."""
    options = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation, "clip": clip}
    expected, _ = train(compiled, **options)
    # what is asked for is not compared with the loop as it was, whose kernels are eager
    found, report = train(graphed(forward="on", optimizer="on"), **options)
    assert same(expected, found), str(report)
    assert any(region.replays for region in report.regions()), str(report)
    if accumulation == 1:
        assert report.optimizer_steps_replayed > 20, str(report)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [False, True])
def test_graphed_step_equals_the_eager_one(precision: str, accumulation: int, clip: bool) -> None:
    options = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation, "clip": clip}
    expected, _ = train(accelerate.Accelerator, **options)
    found, report = train(graphed(compile=False), whole=True, **options)
    assert same(expected, found), str(report)
    (step,) = report.whole_steps.values()
    assert step.steps_replayed > 20 and step.plan == "{F B O}", str(report)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_fp16_with_a_scaler(whole: bool, clip: bool) -> None:
    """The loop of accelerate #2645: fp16 outputs become fp32."""
    make = accelerate.Accelerator if whole else compiled
    expected, _ = train(make, mixed_precision="fp16", clip=clip)
    found, report = train(graphed(compile=not whole), whole=whole, mixed_precision="fp16", clip=clip)
    assert same(expected, found), str(report)
    if whole:
        (step,) = report.whole_steps.values()
        assert step.steps_replayed > 20, str(report)
    else:
        assert any(region.replays for region in report.regions()), str(report)


def test_memory_of_a_released_loop_is_returned() -> None:
    train(graphed())
    torch.compiler.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    train(graphed())
    torch.compiler.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + (16 << 20)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Without it two plain runs of an embedding differ in their gradients."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("whole", [False, True])
def test_transformers_trainer_logs_the_same_losses(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # the Trainer would take all: DataParallel
    from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback

    def run(make: Callable[..., Any], **options: Any) -> tuple[Any, list[Any]]:
        with fresh_state():
            torch.manual_seed(0)
            config = transformers.BertConfig(
                vocab_size=128,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=128,
                max_position_embeddings=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
            generator = torch.Generator().manual_seed(1)
            rows = torch.randint(0, 128, (4 * STEPS, 16), generator=generator)
            arguments = transformers.TrainingArguments(
                str(tmp_path),
                per_device_train_batch_size=4,
                num_train_epochs=1,
                logging_steps=1,
                learning_rate=2.0**-10,
                lr_scheduler_type="constant",
                optim="adamw_torch_fused",
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                **options,
            )
            trainer = make(
                model=transformers.BertForMaskedLM(config),
                args=arguments,
                train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            )
            trainer.train()
            return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row]

    if whole:
        _, expected = run(transformers.Trainer)
        trainer, found = run(lambda **kw: PyGraphTrainer(pygraph=PyGraphConfig(compile=False), **kw))
        step = trainer.report().whole_steps["training_step"]
        assert step.steps_replayed > 20, str(step)
    else:

        class CompiledAfterTheFirstStep(transformers.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                torch.compiler.set_stance("force_eager")

            def on_step_end(self, *_: Any, **__: Any) -> None:
                torch.compiler.set_stance("default")

        after: Any = CompiledAfterTheFirstStep()
        _, expected = run(lambda **kw: transformers.Trainer(callbacks=[after], **kw), torch_compile=True)
        callback = PyGraphTrainerCallback(forward="on", optimizer="on")
        _, found = run(lambda **kw: transformers.Trainer(callbacks=[callback], **kw))
        assert any(region.replays for region in callback.report().regions()), str(callback.report())
    assert found == pytest.approx(expected, rel=1e-5)
