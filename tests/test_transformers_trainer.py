"""The transformers Trainer with our callback, and PyGraphTrainer: the same logs and parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate_training import fresh, fresh_state  # noqa: E402, F401
from replays import enough, text_of  # noqa: E402
from training import differs, frozen  # noqa: E402
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from pygraph_train import (  # noqa: E402
    PyGraphConfig,
    PyGraphTrainer,
    PyGraphTrainerCallback,
    PyGraphTrainerMixin,
)
from pygraph_train.torch_private.stock_dynamo import call_of  # noqa: E402

CONFIG = PyGraphConfig(engine="emulated", warmup_steps=2)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        # transformers asks whether it is traced, and then draws other dropout masks
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def tokens(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": t, "labels": t} for t in torch.randint(0, 64, (count, 8), generator=generator)]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def train(
    make: Callable[..., Trainer], folder: Path, count: int = 118, **options: Any
) -> tuple[Trainer, Any]:
    """One training, and what of it has to be equal: everything that was logged, and the parameters."""
    with fresh_state():
        args = arguments(folder, **options)
        trainer = make(model=bert(), args=args, train_dataset=tokens(count), eval_dataset=tokens(10))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        assert call_of(trainer.model) is None
        assert trainer.optimizer.step.__module__ == "accelerate.optimizer"
    timed = ("runtime", "per_second")
    logs = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    return trainer, [logs, frozen(dict(trainer.model.named_parameters()))]


def both(make: Callable[..., Any], folder: Path, *, replays: int, **options: Any) -> Any:
    """Train with the stock Trainer and with `make`; everything has to be equal, and graphs run so often."""
    _, expected = train(Trainer, folder, **options)
    trainer, found = train(make, folder, **options)
    difference = differs(frozen(expected), frozen(found))
    assert difference is None, difference
    enough([trainer.report()], replays)
    return trainer


def with_callback(**kwargs: Any) -> Trainer:
    callback = PyGraphTrainerCallback(CONFIG)
    trainer = Trainer(callbacks=[callback], **kwargs)
    trainer.report = callback.report
    return trainer


def whole(cls: type = PyGraphTrainer) -> Callable[..., Trainer]:
    return lambda **kwargs: cls(pygraph=CONFIG, **kwargs)


OPTIONS = {
    "plain": {},
    "no clipping": {"max_grad_norm": 0.0},
    "cosine": {"lr_scheduler_type": "cosine"},
    "bf16": {"bf16": True},
    "evaluation": {"num_train_epochs": 2, "eval_strategy": "epoch"},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trainer_whose_loss_is_traced_trains_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    report: Any = both(whole(), tmp_path, replays=20, **options).report()
    assert report.running_plan == "{F} {B} {O}" and report.steps_replayed > 18, str(report)


@pytest.mark.slow
def test_callback_with_accumulation(tmp_path: Path) -> None:
    # a step is four micro-batches here: seven of eight run forward and backward from graphs, and more the optimizer
    report: Any = both(with_callback, tmp_path, replays=9, gradient_accumulation_steps=4).report()
    assert report.phases_from_graphs["F"] == report.phases_from_graphs["B"] == 7, str(report)


@pytest.mark.parametrize(("fused", "clip"), [(True, 1.0), (True, 0.0), (False, 1.0)])
def test_a_scaler_skips_steps_with_overflow(fused: bool, clip: float, tmp_path: Path) -> None:
    """Without clipping the Trainer unscales gradients all the same, for the norm that it logs."""

    def scaled(make: Callable[..., Trainer]) -> Callable[..., Trainer]:
        def made(**kwargs: Any) -> Trainer:
            trainer = make(**kwargs)
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
            return trainer

        return made

    options = {"optim": "adamw_torch_fused" if fused else "sgd", "max_grad_norm": clip}
    plain, expected = train(scaled(Trainer), tmp_path, **options)
    trainer, found = train(scaled(whole()), tmp_path, **options)
    difference = differs(frozen(expected), frozen(found))
    assert difference is None, difference
    assert trainer.accelerator.scaler.state_dict() == plain.accelerator.scaler.state_dict()
    enough([trainer.report()], 20)
    plan = "{F} {B} {O}" if fused else "{F} {B} O"
    assert trainer.report().running_plan == plan, str(trainer.report())


@pytest.mark.parametrize("cls", [Trainer, PyGraphTrainer])
def test_the_history_and_trackers_get_what_was_measured(cls: Any, tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {"before": [], "behind": []}

    class Tracker(TrainerCallback):
        def __init__(self, place: str) -> None:
            self.place = place

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen[self.place].append("pygraph/share_from_graphs" in logs)

    def measured(**kwargs: Any) -> Trainer:
        config = CONFIG.of(CONFIG, {"log_metrics": True})
        ours = [PyGraphTrainerCallback(config)] if cls is Trainer else []
        options = {} if ours else {"pygraph": config}
        return cls(callbacks=[Tracker("before"), *ours, Tracker("behind")], **options, **kwargs)

    options = {"eval_strategy": "epoch"}
    _, expected = train(Trainer, tmp_path, **options)
    _, found = train(measured, tmp_path, **options)
    shares = [row.pop("pygraph/share_from_graphs", None) for row in found[0]]
    assert differs(frozen(expected), frozen(found)) is None, "and nothing else is in the history"
    assert shares[29] > 0.6 and all(0 <= share <= 1 for share in shares[:30])
    assert shares[30:] == [None, None], "those of the evaluation and of the whole training"
    assert seen["behind"] == [share is not None for share in shares]
    assert any(seen["before"]) == (cls is PyGraphTrainer)


def test_a_callback_before_the_optimizer_splits_the_step(tmp_path: Path) -> None:
    norms: list[float] = []

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
            norms.append(torch.stack([g.norm() for g in gradients]).norm().item())

    def make(cls: Any, **kwargs: Any) -> Trainer:
        return cls(callbacks=[Norms()], **kwargs)

    _, expected = train(lambda **kw: make(Trainer, **kw), tmp_path)
    trainer, found = train(lambda **kw: make(PyGraphTrainer, pygraph=CONFIG, **kw), tmp_path)
    assert differs(frozen(expected), frozen(found)) is None
    assert norms[:30] == norms[30:]
    report: Any = trainer.report()
    assert report.running_plan == "{F} {B} {O}" and report.steps_replayed > 18, str(report)


def test_a_trainer_of_the_users_own(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            return 0.5 * super().compute_loss(model, inputs, **kwargs)

    class Fused(PyGraphTrainerMixin, Weighted):
        pass

    _, expected = train(Weighted, tmp_path)
    trainer, found = train(whole(Fused), tmp_path)
    assert differs(frozen(expected), frozen(found)) is None
    assert trainer.report().steps_replayed > 18


def halved(base: Any) -> Any:
    class Halved(base):
        """Changes gradients behind the Trainer's own step."""

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = super().training_step(model, inputs, num_items_in_batch)
            for p in model.parameters():
                p.grad.mul_(0.5)
            return loss

    return Halved


def clipping(base: Any) -> Any:
    class Clips(base):
        """Reports another norm than it clips to."""

        def _clip_grad_norm(self, model: nn.Module) -> Any:
            return 2 * super()._clip_grad_norm(model)

    return Clips


@pytest.mark.parametrize("change", [halved, clipping])
@pytest.mark.parametrize("inside", [True, False])
def test_overridden_parts_of_the_step_run_on_every_step(change: Any, inside: bool, tmp_path: Path) -> None:
    _, expected = train(change(Trainer), tmp_path)
    ours = type("Ours", (PyGraphTrainerMixin, change(Trainer)), {}) if inside else change(PyGraphTrainer)
    trainer, found = train(whole(ours), tmp_path)
    assert differs(frozen(expected), frozen(found)) is None
    report = trainer.report()
    assert report.running_plan == "{F} {B} {O}", str(report)


def test_a_loss_that_reads_the_host_runs_in_regions(tmp_path: Path) -> None:
    class Nosy(Trainer):
        seen = 0.0

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, **kwargs)
            Nosy.seen += loss.item()
            return loss

    class Fused(PyGraphTrainerMixin, Nosy):
        pass

    _, expected = train(Nosy, tmp_path)
    trainer, found = train(whole(Fused), tmp_path)
    assert differs(frozen(expected), frozen(found)) is None
    report = trainer.report()
    assert report.running_plan == "{F} {B} {O}", str(report)


@pytest.mark.parametrize("make", [with_callback, whole()])
def test_torch_compile_of_the_trainer_and_ours_do_not_fight(make: Any, tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    report: Any = both(make, tmp_path, replays=10, **options).report()
    assert report.running_plan == "F B {O}", str(report)
    assert "torch_compile=True" in text_of(report)


def test_checkpoints_are_those_of_a_plain_run(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 20}
    train(Trainer, tmp_path / "plain", **options)
    trainer, _ = train(whole(), tmp_path / "graphed", **options)
    enough([trainer.report()], 10)
    files = [torch.load(tmp_path / n / "checkpoint-20" / "optimizer.pt") for n in ("plain", "graphed")]
    assert differs(frozen(files[0]), frozen(files[1])) is None
    # and a plain run goes on from it
    with fresh_state():
        plain = Trainer(
            model=bert(), args=arguments(tmp_path / "graphed", **options), train_dataset=tokens(118)
        )
        plain.train(resume_from_checkpoint=True)
    expected, found = (frozen(dict(t.model.named_parameters())) for t in (trainer, plain))
    assert differs(expected, found) is None


@pytest.mark.parametrize("trainer", [Trainer, PyGraphTrainer])
def test_a_callback_beside_another_one_does_nothing_and_says_so(
    trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = PyGraphTrainerCallback(CONFIG), PyGraphTrainerCallback(CONFIG)

    def make(**kwargs: Any) -> Trainer:
        if trainer is Trainer:
            made = Trainer(callbacks=[first], **kwargs)
            made.report = first.report
        else:
            made = PyGraphTrainer(pygraph=CONFIG, **kwargs)
        made.add_callback(second)
        return made

    _, expected = train(Trainer, tmp_path)
    capsys.readouterr()
    with caplog.at_level("WARNING", "pygraph_train"):
        made, found = train(make, tmp_path)
    difference = differs(frozen(expected), frozen(found))
    assert difference is None, difference
    enough([made.report()], 20)
    assert not second.report().steps and "Keep one of them" in second.report().notes[0]
    assert [r.getMessage() for r in caplog.records if "Keep one of them" in r.getMessage()] != []
    assert capsys.readouterr().out.count("training steps (") == 1
