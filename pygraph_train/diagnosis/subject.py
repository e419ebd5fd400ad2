"""One training step that is to be explained, whoever wrote the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.diagnosis.explanation import Explanation
from pygraph_train.diagnosis.gain import gain_of
from pygraph_train.diagnosis.look import Findings, look
from pygraph_train.diagnosis.optimizer import look_at_optimizer
from pygraph_train.parallel.replication import RECORDER, Alone
from pygraph_train.parallel.sharing import replication_of
from pygraph_train.problems import Problem, defined_at
from pygraph_train.step.outside import around_the_step, uninitialized
from pygraph_train.torch_private.tracing import why_no_traces
from pygraph_train.tracing.gradient_hooks import backward_hooks
from pygraph_train.tracing.refusals import unsupported_leaves
from pygraph_train.tracing.signature import copied, flattened

__all__ = ["ON_CPU", "Subject", "explained"]

ON_CPU = (
    "The model is on the CPU. Tensors that stay on the CPU while the model is on a GPU are seen only when explain "
    "runs with the model on the GPU."
)
_NOT_LOOKED_AT = "The step itself was not looked at, so nothing is said against it."
_LATER = (
    "Values of Python that the step reads (a number, a flag, a shape) were taken as they are now. Whether they change "
    "from step to step is seen while training, and the report names them then."
)


_OF_STEPS_BY_HAND = (
    "What a graph would gain was not measured: the step makes its backwards and its updates itself, and explain "
    "changes nothing."
)


@dataclass
class Subject:
    """One call of a step.

    Attributes:
        name: how the text names it.
        fn, args, kwargs: the call.
        model: the module that is trained, None where it is not known.
        optimizers: what steps after the backward.
        device: where the step's tensors live.
        recorder: see `Trace`.
        context: makes the context of the call.
        problems: what is known to stand in the way already.
        notes: sentences for the reader.
        takes_loss_from: how the loss is found: "result" (a tensor, or a dict with "loss") or "" (not looked for).
        by_hand: whether the step makes its backwards and updates itself.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    model: nn.Module | None
    optimizers: list[torch.optim.Optimizer]
    device: torch.device
    recorder: str | tuple[str, ...] | None = RECORDER
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    takes_loss_from: str = "result"
    by_hand: bool = False


def explained(subject: Subject) -> Explanation:
    """Everything that keeps a step from being one graph."""
    if (lack := why_no_traces()) is not None:
        return Explanation(subject.name, (lack,), (_NOT_LOOKED_AT,), "")
    notes = list(subject.notes)
    if subject.model is None:
        notes.append(
            "No model was given and none was found, so hooks of modules and parameters were not looked for. "
            "Pass model=."
        )
    lazy = None if subject.model is None else uninitialized(subject.model)
    if lazy is not None:
        lazy = replace(lazy, fix="Call the model once, and explain the step then")
        return _told(subject, [lazy], notes, "")
    replication = Alone() if subject.model is None else replication_of(subject.model)
    context = subject.context if replication.group is None else replication.seen_through
    args, kwargs = _on_device((subject.args, subject.kwargs), subject.device)
    leaves = flattened((args, kwargs))[1]
    unsupported = unsupported_leaves(subject.fn, args, kwargs, leaves)
    found = [*subject.problems, *around_the_step(), *unsupported]
    if subject.model is not None:
        found += backward_hooks(subject.model)
    if replication.problem is not None:
        found.append(replication.problem)
    seen = look(
        subject.fn, args, kwargs, subject.device, subject.recorder, leaves, context, by_hand=subject.by_hand
    )
    found += seen.obstacles
    found += _of_result(subject, seen)
    notes += _of_look(seen)
    for optimizer in subject.optimizers:
        problems, more = look_at_optimizer(optimizer, subject.device)
        found += problems
        notes += more
    if not subject.optimizers:
        notes.append("No optimizer was given, so its step was not looked at. Pass optimizer=.")
    if subject.device.type == "cpu":
        notes.append(ON_CPU)
    notes.append(_LATER)
    gain = _OF_STEPS_BY_HAND
    if not subject.by_hand:
        gain = gain_of(subject.fn, args, kwargs, subject.model, subject.device, context, clean=not found)
    return _told(subject, found, notes, gain)


def _told(subject: Subject, found: list[Problem], notes: list[str], gain: str) -> Explanation:
    unique: dict[tuple[str, str | None], Problem] = {}
    for problem in found:
        unique.setdefault((problem.reason, problem.where), problem)
    files = [(p.where or "").rpartition(":")[0] for p in unique.values()]

    def place(problem: Problem) -> tuple[int, int]:
        file, _, line = (problem.where or "").rpartition(":")
        return files.index(file), int(line) if line.isdigit() else 0

    return Explanation(subject.name, tuple(sorted(unique.values(), key=place)), tuple(notes), gain)


def _on_device(tree: Any, device: torch.device) -> Any:
    """Loops move batches to the GPU, also those that are explained."""
    if device.type != "cuda":
        return tree
    try:
        return copied(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
    except TypeError:
        return tree


def _of_result(subject: Subject, seen: Findings) -> list[Problem]:
    kind = seen.returned
    if subject.takes_loss_from != "result" or kind in (None, "loss", "unknown"):
        return []
    return [
        Problem(
            f"{subject.name} returns {kind}, and not the loss",
            defined_at(subject.fn),
            "Return the loss, a tensor with one number that requires a gradient, or a dict with it under 'loss'",
        )
    ]


def _of_look(seen: Findings) -> Iterator[str]:
    if seen.decided:
        yield f"The value of a tensor decides which code runs at {', '.join(seen.decided)}. " + (
            "Each way was looked at, and not every combination of them."
            if seen.is_complete
            else "There are so many ways that some were not looked at."
        )
    for where in seen.ended:
        yield f"The code after {where} could not be examined. Remove the listed obstacles, and run explain again."
    if seen.obstacles:
        yield (
            "Obstacles that only follow from one that is listed are left out. Run explain again after the changes."
        )
