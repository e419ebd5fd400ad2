"""A LightningModule as a step that `explain` looks at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from pygraph_train.diagnosis.subject import Subject, subject_of
from pygraph_train.patches import nothing
from pygraph_train.random_state import HostRandomState

_OF_THE_TRAINER = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients", "lr_schedulers")


def subject_of_module(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """`training_step` of a LightningModule, and the optimizer that it configures.

    Args:
        module: with or without a Trainer.
        args, kwargs: of `training_step`. Where the batch alone is given, its index is 0.
    """
    step = module.training_step
    if len(args) == 1 and not kwargs and is_param_in_hook_signature(step, "batch_idx", min_args=2):
        args = (*args, 0)
    optimizers, notes = _optimizers(module)
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        notes.append("The module has no Trainer yet, so precision, strategy and callbacks were not examined.")
    name, scaler = f"{type(module).__name__}.training_step", getattr(trainer, "scaler", None)
    subject = subject_of(name, step, args, kwargs, module, optimizers, scaler)
    left_out = subject.left_out = [(module, "log", nothing), (module, "log_dict", nothing)]
    if not module.automatic_optimization:
        given = optimizers[0] if len(optimizers) == 1 else optimizers
        left_out += [(module, name, nothing) for name in _OF_THE_TRAINER]
        left_out += [(o, name, nothing) for o in optimizers for name in ("step", "zero_grad")]
        left_out.append((module, "optimizers", lambda **_: given))
        left_out.append((module, "manual_backward", lambda loss, *args, **kw: loss.backward(*args, **kw)))
        notes.append(
            "Calls of the Trainer (toggling, clipping, schedulers) and of the optimizers were not made."
        )
    subject.notes = notes
    subject.program.by_hand = not module.automatic_optimization
    return subject


def _optimizers(module: Any) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """Those of the Trainer, or what `configure_optimizers` of a copy of the module returns."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None and trainer.optimizers:
        return list(trainer.optimizers), []
    kept, random_state = list(chain(module.parameters(), module.buffers(), [trainer])), HostRandomState()
    try:
        # the copy has the same tensors: nothing of the module changes, and no memory is taken
        configured = copy.deepcopy(module, {id(thing): thing for thing in kept}).configure_optimizers()
    except Exception as error:
        return [], [f"configure_optimizers could not be examined: {type(error).__name__}: {error}"]
    finally:
        random_state.restore()
    return list(_found_in(configured)), ["configure_optimizers ran once, on a copy of the module."]


def _found_in(configured: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in what `configure_optimizers` may return."""
    if isinstance(configured, torch.optim.Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _found_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _found_in(item)
