"""A LightningModule as a step that `explain` looks at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from pygraph_train.diagnosis.subject import Subject
from pygraph_train.integrations.lightning.hooks import INSIDE_FORWARD_BACKWARD, INSIDE_UPDATE, overrides
from pygraph_train.integrations.lightning.log import Recorder
from pygraph_train.integrations.lightning.stand_ins import stand_ins
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem, defined_at
from pygraph_train.random_state import random_numbers_kept

__all__ = ["subject_of"]


def subject_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """`training_step` of a LightningModule, and the optimizer that it configures.

    Args:
        module: with or without a Trainer.
        args, kwargs: of `training_step`. Where the batch alone is given, its index is 0.
    """
    if (
        len(args) == 1
        and not kwargs
        and is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    ):
        args = (*args, 0)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    optimizers, notes = _optimizers(module)
    if getattr(module, "_trainer", None) is None:
        notes.append(
            "The module has no Trainer yet, so precision, strategy and other callbacks were not examined."
        )

    @contextmanager
    def recording() -> Iterator[None]:
        with standing_in([(module, "log", Recorder()), *by_hand]):
            yield

    by_hand = [] if module.automatic_optimization else stand_ins(module, optimizers)
    if by_hand:
        notes.append(
            "Stand-ins took the place of manual_backward, of the optimizers, of toggling and of clipping."
        )
    return Subject(
        f"{type(module).__name__}.training_step",
        MethodType(type(module).training_step, module),
        args,
        kwargs,
        module,
        optimizers if len(optimizers) == 1 or by_hand else [],
        device,
        recorder=(".log.records", ".manual_backward.losses"),
        context=recording,
        problems=list(_problems(module, optimizers)),
        notes=notes,
        takes_loss_from="" if by_hand else "result",
        by_hand=bool(by_hand),
    )


def _problems(module: Any, optimizers: list[Any]) -> Iterator[Problem]:
    if module.automatic_optimization and len(optimizers) > 1:
        yield Problem(
            f"the module has {len(optimizers)} optimizers under automatic optimization, and a graph holds one",
            defined_at(type(module).configure_optimizers),
        )
    inside = {
        "between forward and backward": INSIDE_FORWARD_BACKWARD,
        "between backward and the optimizer on every step": INSIDE_UPDATE,
    }
    for between, hooks in inside.items():
        for hook in hooks:
            if overrides(module, hook):
                yield Problem(
                    f"{type(module).__name__}.{hook} runs in Python {between}",
                    defined_at(getattr(module, hook)),
                    "Use on_train_batch_start or on_train_batch_end, which run outside of the graph",
                )


def _optimizers(module: Any) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """Those of the Trainer, or what `configure_optimizers` of a copy of the module returns."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None and trainer.optimizers:
        return list(trainer.optimizers), []
    kept = list(chain(module.parameters(), module.buffers(), [trainer]))
    try:
        with random_numbers_kept(), torch.random.fork_rng(devices=[]):
            # the copy has the same tensors: nothing of the module changes, and no memory is taken
            configured = copy.deepcopy(module, {id(thing): thing for thing in kept}).configure_optimizers()
    except Exception as error:
        return [], [f"configure_optimizers could not be examined: {type(error).__name__}: {error}"]
    note = "configure_optimizers ran once, on a copy of the module."
    return list(_found_in(configured)), [note]


def _found_in(configured: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in what `configure_optimizers` may return."""
    if isinstance(configured, torch.optim.Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _found_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _found_in(item)
