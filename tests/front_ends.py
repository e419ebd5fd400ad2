"""One small training for each front end, as a user writes it: with the library, or without it.

Each makes the same model and the same batches, and returns what has to be equal: losses, parameters, buffers, the
optimizer's state, the random state, what was logged, and what the step wrote to Python.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph_train as pt

__all__ = ["FRONT_ENDS", "Result", "differs"]

STEPS = 14
OPTIONS: dict[str, Any] = {"engine": "emulated", "warmup_steps": 2}

Result = dict[str, Any]


class Net(nn.Module):
    """Dropout, batch norm, and a number that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.seen, self.counts = 0, True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen += 1
        return self.last(F.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training))


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def result(net: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float], **more: Any) -> Result:
    state = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "model": {name: t.detach().clone() for name, t in net.state_dict().items()},
        "optimizer": {(i, k): v for i, s in state.items() for k, v in s.items()},
        "random": torch.get_rng_state(),
        **more,
    }


def graphed_step(ours: bool) -> tuple[Result, Any]:
    """`GraphedStep`, with clipping and a schedule."""
    net, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    losses = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    step = pt.GraphedStep(
        loss_of, model=net, optimizer=optimizer, max_grad_norm=1.0, config=pt.PyGraphConfig(**OPTIONS)
    )
    for x, y in batches():
        if ours:
            loss = step(x, y)
        else:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.item())
        schedule.step()
    report = step.report()
    step.close()
    return result(net, optimizer, losses, seen=net.seen), report


def _lightning(ours: bool, *, manual: bool) -> tuple[Result, Any]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.automatic_optimization = Net(), [], not manual

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    torch.manual_seed(0)
    module = Module()
    callback = pt.PyGraphCallback(**OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder,
            max_epochs=1,
            accelerator="cpu",
            callbacks=[callback] if ours else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # the report
            trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    optimizer = trainer.optimizers[0]
    return result(module, optimizer, module.losses, seen=module.net.seen, metrics=metrics), callback.report()


def lightning(ours: bool) -> tuple[Result, Any]:
    """`PyGraphCallback` under automatic optimization."""
    return _lightning(ours, manual=False)


def lightning_manual(ours: bool) -> tuple[Result, Any]:
    """`PyGraphCallback` under manual optimization."""
    return _lightning(ours, manual=True)


def _accelerate(ours: bool, *, whole: bool) -> tuple[Result, Any]:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    kind = pt.Accelerator if ours else accelerate.Accelerator
    plugins = [pt.PyGraph(compile=None if whole else True, **OPTIONS)] if ours and not whole else None
    if ours and whole:
        plugins = [pt.PyGraph(**OPTIONS)]
    accelerator: Any = kind(cpu=True, plugins=plugins) if ours else kind(cpu=True)
    plain, optimizer = made()
    net, optimizer = accelerator.prepare(plain, optimizer)
    losses = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    if ours and whole:
        step = accelerator.graphed_step(step)
    losses = [step(x, y).item() for x, y in batches()]
    report = accelerator.pygraph.report() if ours else None
    if ours:
        accelerator.free_memory()
    return result(plain, optimizer.optimizer, losses, seen=plain.seen), report


def accelerate_stock(ours: bool) -> tuple[Result, Any]:
    """Accelerate's loop as it is, compiled."""
    return _accelerate(ours, whole=False)


def accelerate_graphed(ours: bool) -> tuple[Result, Any]:
    """`accelerator.graphed_step`."""
    return _accelerate(ours, whole=True)


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _transformers(ours: bool, *, whole: bool) -> tuple[Result, Any]:
    import transformers

    torch.manual_seed(0)
    model = _Classifier()
    rows = [{"x": a, "labels": b} for x, y in batches() for a, b in zip(x, y, strict=True)]
    callback = pt.PyGraphTrainerCallback(compile=True, **OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            logging_steps=1,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            optim="adamw_torch_fused",
        )
        options: dict[str, Any] = {"model": model, "args": arguments, "train_dataset": rows}
        if ours and whole:
            trainer = pt.PyGraphTrainer(pygraph=pt.PyGraphConfig(**OPTIONS), **options)
        else:
            trainer = transformers.Trainer(callbacks=[callback] if ours else [], **options)
        trainer.remove_callback(transformers.PrinterCallback)
        with contextlib.redirect_stdout(io.StringIO()):  # the report
            trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    report = trainer.report() if ours and whole else callback.report()
    return result(model, optimizer, losses, seen=model.net.seen), report


def transformers_trainer(ours: bool) -> tuple[Result, Any]:
    """`PyGraphTrainer`."""
    return _transformers(ours, whole=True)


def transformers_callback(ours: bool) -> tuple[Result, Any]:
    """`PyGraphTrainerCallback` in a stock Trainer, compiled."""
    return _transformers(ours, whole=False)


def _fabric(ours: bool, *, whole: bool) -> tuple[Result, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    pygraph = pt.PyGraphFabric(compile="auto" if whole else True, **OPTIONS) if ours else None
    if pygraph is not None:
        pygraph.attach(fabric)
    plain, stock = made()
    net, optimizer = fabric.setup(plain, stock)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    graphed = pygraph.graphed_step(loss_of, model=net, optimizer=optimizer) if pygraph and whole else None
    losses = []
    for x, y in batches():
        if graphed is not None:
            losses.append(graphed(x, y).item())
            continue
        optimizer.zero_grad()
        loss = loss_of(x, y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    report = pygraph.report() if pygraph is not None else None
    if pygraph is not None:
        pygraph.detach()
    return result(plain, stock, losses, seen=plain.seen), report


def fabric_stock(ours: bool) -> tuple[Result, Any]:
    """Fabric's loop as it is, compiled."""
    return _fabric(ours, whole=False)


def fabric_graphed(ours: bool) -> tuple[Result, Any]:
    """`PyGraphFabric.graphed_step`."""
    return _fabric(ours, whole=True)


def backend(ours: bool) -> tuple[Result, Any]:
    """`torch.compile(model, backend="pygraph")`."""
    import pygraph_train.backend as pygraph

    net, optimizer = made()
    net.counts = False  # torch.compile traces it anew for each number
    call = pygraph.compile(net, engine="emulated", warmup_runs=2) if ours else net
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result(net, optimizer, losses, seen=net.seen), pygraph.report()


FRONT_ENDS: dict[str, Callable[[bool], tuple[Result, Any]]] = {
    f.__name__: f
    for f in (
        graphed_step,
        lightning,
        lightning_manual,
        accelerate_stock,
        accelerate_graphed,
        transformers_trainer,
        transformers_callback,
        fabric_stock,
        fabric_graphed,
        backend,
    )
}


def quiet() -> None:
    """Say only what is wrong."""
    warnings.simplefilter("ignore")
    import accelerate  # noqa: F401
    import transformers

    transformers.utils.logging.set_verbosity_error()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pygraph_train", "torch._dynamo"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def differs(plain: Result, other: Result, *, close: bool = False) -> str | None:
    """The first thing that is not equal; `close` allows for kernels of Inductor."""
    for name, expected in plain.items():
        found = other[name]
        if isinstance(expected, dict):
            if expected.keys() != found.keys():
                return f"{name}: {sorted(map(str, expected.keys() ^ found.keys()))}"
            pairs = [(f"{name}[{key}]", expected[key], found[key]) for key in expected]
        else:
            pairs = [(name, expected, found)]
        for where, a, b in pairs:
            if not _equal(a, b, close):
                return f"{where}: {a} and {b}"
    return None


def _equal(a: Any, b: Any, close: bool) -> bool:
    if not close or isinstance(a, int):
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-5, rtol=1e-4)
