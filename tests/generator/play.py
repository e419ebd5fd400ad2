"""Runs a script's `train(loop)` plainly and with the library, and notes all that can be observed.

It needs only `observe.py` beside it, so that a script that is handed to somebody can contain both.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pygraph_train
import pygraph_train.backend

from .observe import differs, frozen, mapped, overlap, switches, tensors_of, told

__all__ = ["Loop", "Observations", "difference", "play"]


@dataclass
class Observations:
    """What one run showed.

    Attributes:
        entries: names and copies of values, in the order in which they were seen.
        told: warnings, as a class and the beginning of its text.
        replays: graphs replayed, by the library's own report.
        compiled: whether compiled functions ran, which may add up in another order.
        reasons: why steps were not replayed, by that report.
    """

    entries: list[tuple[str, Any]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    replays: int = 0
    compiled: bool = False
    reasons: list[str] = field(default_factory=list)


class Loop:
    """What a script asks for its steps, and where it notes what it sees. This one is plain PyTorch."""

    def __init__(self, seen: Observations, options: tuple[str, ...] = ()) -> None:
        self.seen, self.options = seen, options
        self.model: Any = None
        self.optimizer: Any = None
        self._kept: list[Any] = []

    # -- what is noted ---------------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> None:
        """Note a copy of the present value."""
        self.seen.entries.append((name, frozen(value)))

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Name the model and the optimizer whose state is noted."""
        self.model, self.optimizer = model, optimizer

    def after(self, i: int, result: Any, batch: Any) -> None:
        """Note what a step left: results, the batch and its gradients, those of parameters, buffers, random state."""
        place = f"step {i}: "
        self.note(place + "result", result)
        self.note(place + "kind of result", self._looks(result, batch))
        self.note(place + "batch", batch)
        self.note(place + "gradients of the batch", [t.grad for t in tensors_of(batch) if t.is_leaf])
        self.note_model(place)
        self._kept.append(_detached(result))  # without its graph, as loops should keep it
        if i % 6 == 5:
            self.note(place + "optimizer", self.optimizer.state_dict())
            self.note_random(place)

    def note_model(self, place: str) -> None:
        """Note parameters, gradients and buffers."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        known = {n: p for n, p in parameters.items() if not nn.parameter.is_lazy(p)}
        self.note(place + "parameters", known)
        self.note(place + "requires_grad", {name: p.requires_grad for name, p in known.items()})
        self.note(place + "gradients", {name: p.grad for name, p in known.items()})
        buffers = dict(self.model.named_buffers())
        self.note(place + "buffers", {n: b for n, b in buffers.items() if not nn.parameter.is_lazy(b)})
        plain = (int, float, str, bool, list, type(None))
        self.note(
            place + "attributes",
            {
                f"{name}.{key}": value
                for name, module in self.model.named_modules()
                for key, value in vars(module).items()
                if isinstance(value, plain) and not key.startswith("_")
            },
        )

    def note_random(self, place: str) -> None:
        """Note the state of torch's, NumPy's and Python's random numbers."""
        self.note(place + "torch's random state", torch.get_rng_state())
        self.note(place + "NumPy's random state", hash(np.random.get_state()[1].tobytes()))
        self.note(place + "NumPy's random position", np.random.get_state()[2:])
        self.note(place + "Python's random state", hash(random.getstate()))

    def finish(self) -> None:
        """Note what is left after the last step, or after the exception that ended the run."""
        self.note_model("end: ")
        if self.optimizer is not None:
            self.note("end: optimizer", self.optimizer.state_dict())
            self.note("end: rates", [float(group["lr"]) for group in self.optimizer.param_groups])
        self.note_random("end: ")
        self.note("end: results that were kept", self._kept)
        self.note("end: switches", switches())

    def raised(self, error: Exception) -> str:
        """What stands for the result of a step that raised."""
        return told(error)

    def _looks(self, result: Any, batch: Any) -> list[Any]:
        """For each tensor of a result its layout, whether it requires a gradient, and whose memory it shows."""
        known = [(f"batch {k}", leaf) for k, leaf in enumerate(tensors_of(batch))]
        known += list(self.model.named_parameters()) + list(self.model.named_buffers())
        known = [(n, t) for n, t in known if not nn.parameter.is_lazy(t) and t.layout is torch.strided]
        looks = []
        for k, leaf in enumerate(tensors_of(result)):
            shown = [name for name, other in known if overlap(leaf, other)]
            looks.append([str(leaf.dtype), list(leaf.shape), list(leaf.stride()), leaf.requires_grad, shown])
            known.append((f"result {k}", leaf))
        return looks

    # -- what the script asks for ----------------------------------------------------------------------

    def graphed_step(self, step_fn: Callable[..., Any], **options: Any) -> Any:
        """The loop's step over a function that returns the loss."""
        return PlainStep(step_fn, **options)

    def compile(self, called: Any) -> Any:
        """A model or a function, compiled where the library is used."""
        return called

    def accelerator(self, **options: Any) -> Any:
        """An Accelerator on the CPU."""
        import accelerate

        return accelerate.Accelerator(cpu=True, **options)

    def graphed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The whole step of an Accelerate loop; its results are detached, too."""
        return lambda batch: _detached(step(batch))

    def callbacks(self) -> list[Any]:
        """Lightning's, before the script's own."""
        return []

    def fit(
        self,
        step_fn: Callable[..., Any],
        batches: list[Any],
        before: Callable[..., list[Any]],
        after: Callable[..., None],
        *,
        epochs: int,
        **options: Any,
    ) -> None:
        """Train with Lightning; `before` and `after` are called around each batch."""
        import lightning.pytorch as pl

        logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
        numbers = random.getstate()
        model, optimizer, loop = self.model, self.optimizer, self

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, index: int) -> Any:
                return step_fn(batch)

            def configure_optimizers(self) -> Any:
                return optimizer

        class Hooks(pl.Callback):
            stack = contextlib.ExitStack()
            count = -1

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
                self.count += 1
                if self.count == 0:
                    random.setstate(numbers)  # Lightning chooses a tip for its users with it
                for context in before(self.count, batch):
                    self.stack.enter_context(context)

            def on_train_batch_end(
                self, trainer: Any, module: Any, result: Any, batch: Any, index: int
            ) -> None:
                self.stack.close()
                loop.after(self.count, result, batch)
                after(self.count, result, batch)

        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        hooks = Hooks()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[*self.callbacks(), hooks],
            **quiet,
            **options,
        )
        loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        try:
            trainer.fit(Module(), loader)
        finally:
            hooks.stack.close()

    def close(self) -> None:
        """The script is over."""


class LibrarysLoop(Loop):
    """The same with pygraph-train, on its emulated engine."""

    def __init__(
        self,
        seen: Observations,
        options: tuple[str, ...] = (),
        *,
        graphs: bool = True,
        backend: str = "pygraph",
    ) -> None:
        super().__init__(seen, options)
        self._warmup, self._backend = 2 if graphs else 10**6, backend
        self._made: list[Any] = []
        self._reports: list[Callable[[], Any]] = []

    def _config(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"engine": "emulated", "warmup_steps": self._warmup, "verify": _sampled()}
        for option in self.options:  # "optimizer=off", say
            name, _, value = option.partition("=")
            if value:
                chosen[name] = value
        return chosen

    def graphed_step(self, step_fn: Callable[..., Any], **options: Any) -> Any:
        config = pygraph_train.PyGraphConfig(**self._config())
        step = pygraph_train.GraphedStep(step_fn, config=config, **options)
        self._made.append(step)
        self._reports.append(step.report)
        return step

    def compile(self, called: Any) -> Any:
        if self._backend != "pygraph":
            return torch.compile(called, backend=self._backend)
        options = {"engine": "emulated", "warmup_runs": self._warmup}
        return torch.compile(called, backend="pygraph", options=options)

    def accelerator(self, **options: Any) -> Any:
        plugin = pygraph_train.PyGraph(**self._config())
        made = pygraph_train.Accelerator(cpu=True, plugins=[plugin], **options)
        self._made.append(_Ending(made))
        self._reports.append(plugin.report)
        self._accelerator = made
        return made

    def graphed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self._accelerator.graphed_step(step)

    def callbacks(self) -> list[Any]:
        callback = pygraph_train.PyGraphCallback(**self._config())
        self._reports.append(callback.report)
        return [callback]

    def close(self) -> None:
        for report in (made() for made in self._reports):
            self.seen.replays += report.steps_replayed + report.optimizer_steps_replayed
            self.seen.reasons += [f.reason for f in report.fallbacks]
        self.seen.replays += sum(r.replays for r in pygraph_train.backend.report().regions)
        self.seen.compiled = any(r.replays + r.plain_runs for r in pygraph_train.backend.report().regions)
        for made in self._made:
            made.close()


class _Ending:
    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def close(self) -> None:
        self._accelerator.end_training()


class PlainStep:
    """The loop that a user would write in the place of a `GraphedStep`; its results are detached, too."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.step_fn, self.model, self.optimizer, self.scaler = step_fn, model, optimizer, scaler
        self.max_grad_norm, self.pending = max_grad_norm, False

    def __call__(self, *args: Any) -> Any:
        result = self.accumulate(*args)
        if self.optimizer is None:
            return result
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.pending = False
        return result

    def accumulate(self, *args: Any) -> Any:
        if self.optimizer is not None and not self.pending:
            self.optimizer.zero_grad()
        result = self.step_fn(*args)
        loss = result["loss"] if isinstance(result, Mapping) else result
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.pending = True
        return _detached(result)


def _detached(result: Any) -> Any:
    return mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


def play(
    train: Callable[[Loop], None],
    *,
    library: bool,
    graphs: bool = True,
    backend: str = "pygraph",
    options: tuple[str, ...] = (),
    seed: int = 0,
) -> Observations:
    """Run a script's `train` once; an exception that ends it is an observation, too.

    The library may be kept from making graphs, or have another backend of `torch.compile` in its backend's place.
    """
    seen = Observations()
    loop = LibrarysLoop(seen, options, graphs=graphs, backend=backend) if library else Loop(seen, options)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            train(loop)
        except Exception as error:
            loop.note("the run ended with", told(error))
        if loop.model is not None:
            loop.finish()
            loop.close()
            loop.note_model("closed: ")
            loop.note("closed: optimizer", loop.optimizer.state_dict())
    loop.note("printed", printed.getvalue().split("pygraph-train")[0])  # the report comes last
    loud = [w for w in caught if not issubclass(w.category, (DeprecationWarning, FutureWarning))]
    seen.told = {f"{w.category.__name__}: {str(w.message)[:80]}" for w in loud}  # the others are for authors
    return seen


def difference(plain: Observations, library: Observations, *, rounding: bool = False) -> str | None:
    """None where both runs showed the same (apart from `rounding`), else the first thing that differs."""
    for (name, expected), (other, found) in zip(plain.entries, library.entries, strict=False):
        if name != other:
            return f"{name} became {other}: {found if isinstance(found, str) else ''}"
        text = None if rounding and name == "printed" else differs(expected, found, rounding=rounding)
        if text is not None:
            return name + text
    if len(plain.entries) != len(library.entries):
        return f"{len(plain.entries)} observations became {len(library.entries)}"
    more = sorted(library.told - plain.told)
    return f"a warning that plain training does not give: {more[0]}" if more else None


def _sampled() -> str:
    """How replays are verified: in samples where this version can, else the first ones."""
    try:
        pygraph_train.PyGraphConfig(verify="sample")  # type: ignore[arg-type]
    except ValueError:
        return "first"
    return "sample"
