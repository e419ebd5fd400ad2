"""The frameworks, each without and with the library: what a user passes to them, and what is compared."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .compare import Run
from .models import DEVICE, Net, adamw, batches, cross_entropy

__all__ = [
    "ACCELERATOR",
    "Listed",
    "accelerator",
    "attach_to",
    "bert",
    "fabric",
    "fit",
    "graphed_step",
    "loader",
    "memory_logger",
    "sentences",
    "train",
    "train_compiled",
    "trainer",
]

ACCELERATOR = "cpu" if DEVICE == "cpu" else "gpu"
"""For Lightning."""


class Listed(Dataset):
    """These items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def loader(batches: list[Any]) -> DataLoader:
    """Yields these batches as they are."""
    return DataLoader(Listed(batches), batch_size=None)


def train_compiled(run: Run, prepare: Any, backward: Any) -> None:
    """A stock loop around a model with our compile backend.

    Args:
        prepare, backward: those of an Accelerator or a Fabric that knows nothing of the library.
    """
    compiled, optimizer = prepare(run.compile(model := Net()), adamw(model))
    for x, y in run.each(batches(16)):
        optimizer.zero_grad()
        backward(cross_entropy(compiled(x), y))
        optimizer.step()


# -- Lightning ----------------------------------------------------------------------------------------------


def fit(
    run: Run,
    module: Any,
    train: Any,
    *,
    validation: Any = None,
    ckpt_path: Any = None,
    package: Any = None,
    **options: Any,
) -> Any:
    """`Trainer(**options).fit(module)`, with the callback in the run with the library. Returns the Trainer.

    After every batch all metrics, the module and the optimizers are compared, and at the end which attributes
    objects of the user and of Lightning have: nothing of the library is left on them. With `package`, which is
    Lightning under its other name, that is all: the module compares what it wants.
    """
    import lightning.pytorch as pl

    from pygraph_train import PyGraphCallback

    callbacks = [*options.pop("callbacks", []), *([] if package else [_diary(run)])]
    if run.ours:
        ours = PyGraphCallback(run.config)
        run.reports(ours.report)
        callbacks.insert(0, ours)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    machine = {"accelerator": ACCELERATOR, "devices": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
    made = (package or pl).Trainer(
        **{**quiet, **machine, "log_every_n_steps": 5, **options}, callbacks=callbacks
    )
    unsafe = {"weights_only": False} if ckpt_path else {}
    made.fit(module, train, validation, ckpt_path=ckpt_path, **unsafe)
    loop = made.fit_loop
    owners = [
        made,
        made.strategy,
        made.precision_plugin,
        loop.epoch_loop,
        *module.modules(),
        *made.optimizers,
    ]
    if made.world_size == 1:  # a wrapper for several processes leaves a method of its own on the module
        run.note("attributes at the end", [sorted(vars(owner)) for owner in owners])
    for logger in made.loggers:
        run.note("received by a logger", getattr(logger, "received", []))
    return made


@functools.cache
def _diary_class() -> type:
    import lightning.pytorch as pl

    class Diary(pl.Callback):
        """Compares what a callback can see."""

        def __init__(self, run: Run) -> None:
            self.run = run

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.run.note(f"outputs of batch {batch_idx}", outputs)
            self.metrics(trainer, bar=DEVICE == "cpu")  # on CUDA it shows the step before
            self.run.note("global step", trainer.global_step)
            self.run.watch(pl_module, *trainer.optimizers)
            self.run.snapshot(f"after batch {batch_idx} of epoch {trainer.current_epoch}")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.metrics(trainer)
            self.run.note("progress", trainer.fit_loop.state_dict())

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.metrics(trainer, bar=DEVICE == "cpu")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.metrics(trainer)
            self.run.note("schedulers", [config.scheduler for config in trainer.lr_scheduler_configs])

        def metrics(self, trainer: Any, *, bar: bool = True) -> None:
            for name in ("callback_metrics", "logged_metrics", *["progress_bar_metrics"] * bar):
                self.run.note(name, getattr(trainer, name))

    return Diary


def _diary(run: Run) -> Any:
    return _diary_class()(run)


@functools.cache
def memory_logger() -> type:
    """A logger that keeps what it is given in `received`."""
    from lightning.pytorch.loggers.logger import Logger

    class MemoryLogger(Logger):
        name = "memory"
        version = 0

        def __init__(self) -> None:
            super().__init__()
            self.received: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.received.append([step, dict(metrics)])

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            """Nothing of interest."""

    return MemoryLogger


# -- Accelerate and Fabric --------------------------------------------------------------------------------------


def forget_accelerators() -> None:
    """Accelerate keeps the state of the last one in class attributes."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator(run: Run, *, attach: bool = False, **options: Any) -> Any:
    """Accelerate's class, or ours with the plugin; with `attach` it gets that from `attach_to` later."""
    import accelerate

    from pygraph_train import Accelerator, PyGraph

    forget_accelerators()
    if not run.ours or attach:
        return accelerate.Accelerator(cpu=DEVICE == "cpu", **options)
    made = Accelerator(cpu=DEVICE == "cpu", plugins=[PyGraph(run.config)], **options)
    run.reports(made.pygraph.report)
    return made


def attach_to(run: Run, accelerator: Any) -> None:
    """Attach the plugin in the run with the library."""
    from pygraph_train import PyGraph

    if run.ours:
        run.reports(PyGraph(run.config).attach(accelerator).report)


def graphed_step(run: Run, accelerator: Any, step_fn: Any) -> Any:
    """The step function as it is, or `accelerator.graphed_step` of it; its results are compared."""
    return run.noted(accelerator.graphed_step(step_fn) if run.ours else step_fn)


def fabric(run: Run, **options: Any) -> Any:
    """A Fabric, with `PyGraphFabric` attached in the run with the library."""
    from lightning.fabric import Fabric

    from pygraph_train import PyGraphFabric

    made = Fabric(accelerator=ACCELERATOR, **{"devices": 1, **options})
    if run.ours:
        ours = PyGraphFabric(run.config).attach(made)
        made.pygraph = ours
        run.reports(ours.report)
        run.at_end(ours.detach)
    made.launch()
    return made


# -- transformers -----------------------------------------------------------------------------------------------


class Words(nn.Module):
    """The smallest language model that the Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.dropout(torch.tanh(self.embedding(input_ids))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def bert() -> nn.Module:
    """Without dropout: transformers asks whether it is traced, and draws other masks then."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = {"intermediate_size": 32, "max_position_embeddings": 16}
    return BertForMaskedLM(
        BertConfig(**sizes, **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def sentences(count: int = 64, length: int = 8) -> list[dict[str, Tensor]]:
    """Of tokens below 64, which are their own labels."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(0, 64, (count, length), generator=generator, device="cpu")
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def train(run: Run, made: Any, resume: Any = None) -> None:
    """Train with a Trainer of transformers, or one that derives from it; what it leaves is compared."""
    from transformers import PrinterCallback

    made.remove_callback(PrinterCallback)
    made.train(resume_from_checkpoint=resume)
    timed = ("runtime", "per_second")
    run.note("log", [{k: v for k, v in r.items() if not k.endswith(timed)} for r in made.state.log_history])
    run.note("model", made.model)
    run.note("optimizer", made.optimizer)


def trainer(run: Run, way: str, *, model: nn.Module | None = None, base: Any = None, **options: Any) -> Any:
    """A Trainer of transformers that has trained.

    Args:
        way: "callback" for `PyGraphTrainerCallback`, "trainer" for `PyGraphTrainer`.
        base: the user's own Trainer class, which PyGraphTrainer stands before then.
        **options: `data` (items, or a data set), `callbacks` and what TrainingArguments take.
    """
    import transformers

    from pygraph_train import PyGraphTrainer, PyGraphTrainerCallback

    usual = {"per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3, "report_to": []}
    quiet = {
        "use_cpu": DEVICE == "cpu",
        "disable_tqdm": True,
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
    }
    data, callbacks = options.pop("data", None) or sentences(), options.pop("callbacks", [])
    resume = options.pop("resume", None)
    forget_accelerators()
    cls, more = base or transformers.Trainer, {}
    if run.ours and way == "trainer":
        bases = (PyGraphTrainer,) if base is None else (PyGraphTrainer, base)
        cls, more = type("Ours", bases, {}), {"pygraph": run.config}
    if run.ours and way == "callback":
        callbacks = [PyGraphTrainerCallback(run.config), *callbacks]
    args = transformers.TrainingArguments(
        str(run.folder), **{**usual, **quiet, "num_train_epochs": 1, **options}
    )
    made = cls(
        model=model or Words(),
        args=args,
        train_dataset=data if isinstance(data, Dataset) else Listed(data),
        eval_dataset=Listed(sentences(10)),
        callbacks=callbacks,
        **more,
    )
    if run.ours:
        run.reports(callbacks[0].report if way == "callback" else made.report)
    train(run, made, resume)
    run.note("attributes at the end", [sorted(vars(m)) for m in made.model.modules()])
    return made
