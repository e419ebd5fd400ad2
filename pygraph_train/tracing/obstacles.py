"""What a traced graph and Dynamo's list of side effects show against a replay, one problem after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import Problem
from pygraph_train.torch_private.copies import kept_copies
from pygraph_train.torch_private.dynamic_shapes import is_size_of_tensor
from pygraph_train.torch_private.dynamo import placeholder_source
from pygraph_train.torch_private.guards import gradients_asked_for
from pygraph_train.torch_private.side_effects import SideEffect, dynamo_side_effects
from pygraph_train.tracing.plain_parts import plain_parts
from pygraph_train.tracing.reasons import first_use, innermost, line_of, read_on_host, readable

__all__ = [
    "BATCH_IN_STATE",
    "batch_changed",
    "batch_in_state",
    "copies_that_stay",
    "gradients_asked",
    "gradients_read",
    "kept_result",
    "on_host",
    "plain_parts",
    "problem_of_write",
    "side_effects",
    "written",
]

BATCH_IN_STATE = Problem(
    "a tensor of the batch lies in memory that the step may write (it is a buffer of the model, or a view of one), and "
    "a graph would read the values from before the step",
    fix="Pass a clone of the tensor",
)


def written(fn: Any, recorder: str | tuple[str, ...] | None) -> Iterator[Problem]:
    """Python objects that the step writes to; call inside a backend.

    Args:
        fn: the traced function.
        recorder: see `Trace`.
    """
    for effect in side_effects(recorder):
        yield problem_of_write(effect, fn)


def side_effects(recorder: str | tuple[str, ...] | None) -> list[SideEffect]:
    """What the step writes besides what the recorder gets; call inside a backend."""
    found = dynamo_side_effects()
    return [effect for effect in found if recorder is None or not effect.source.endswith(recorder)]


def problem_of_write(effect: SideEffect, fn: Any) -> Problem:
    """The step writes to a Python object."""
    name = readable(effect.source, fn) + (f".{effect.attribute}" if effect.attribute else "")
    if effect.kind == "group":
        return Problem(
            f"{name}, a parameter group of an optimizer, is written by the step, and a replay has made the update by "
            "then",
            innermost(effect.stack),
            "Set learning rates and the like before the step",
        )
    return Problem(
        f"{name} is written by the step, and replay runs no Python",
        innermost(effect.stack),
        "Move the write out of the step (to a hook that runs every step), or keep the value in a tensor buffer",
    )


def kept_result(effects: Iterable[SideEffect], fn: Any, reason: str) -> Problem | None:
    """For a capture that failed because results of an earlier step are kept with their autograd graph: who keeps them.

    Args:
        effects: what the step writes to Python.
        fn: the step's function.
        reason: the sentence so far.
    """
    for effect in effects:
        if (effect.simple and not effect.plain) or effect.kind in ("list", "dict", "set"):
            name = readable(effect.source, fn) + (f".{effect.attribute}" if effect.attribute else "")
            fix = f"Keep the result without its autograd graph: {name} gets x.detach()"
            return Problem(f"{reason}, as {name} may", innermost(effect.stack), fix)
    return None


def copies_that_stay() -> Iterator[Problem]:
    """Copies of objects that the step returns, or writes to Python; call inside a backend."""
    for name in kept_copies():
        yield Problem(
            f"the step keeps a copy.deepcopy() of a {name}, and a replay makes no other one",
            fix="Copy the object outside of the step",
        )


def on_host(
    graph: torch.fx.GraphModule,
    device: torch.device,
    fn: Any,
    constants: frozenset[torch.fx.Node] = frozenset(),
) -> Iterator[Problem]:
    """Tensors on another device, and inputs that are not tensors: a graph would bake their values in.

    Args:
        graph: from Dynamo.
        device: of the step.
        fn: the traced function.
        constants: whose values are the same in each step, or whose copies are made anew.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            if isinstance(value, Tensor):
                if value.device.type != device.type and node.users and node not in constants:
                    name = readable(placeholder_source(node) or node.name, fn)
                    yield Problem(
                        f"{name} is a tensor on {value.device.type}: its value would be baked into the graph",
                        first_use(node),
                        f"Register the tensor as a buffer, or move it to {device.type}",
                    )
            elif value is not None and not is_size_of_tensor(node):  # each size has a capture of its own
                name = readable(placeholder_source(node) or node.name, fn)
                yield Problem(f"{name} is a Python number that changes from step to step", first_use(node))
        elif node.op == "call_method" and node.target in ("item", "tolist"):
            yield read_on_host(line_of(node))
        elif (
            isinstance(value, Tensor)
            and value.device.type not in (device.type, "meta")
            and node not in constants
        ):
            yield Problem(
                f"{getattr(node.target, '__name__', node.target)} makes a tensor on {value.device.type} "
                "inside the step",
                line_of(node),
                f"Make the tensor on the device ({device.type}), or outside of the step",
            )


def gradients_read(graph: torch.fx.GraphModule, fn: Any, *, by_hand: bool = False) -> Iterator[Problem]:
    """Where graphs leave the gradients of a step, the next replay writes those of its own.

    Args:
        graph: of Dynamo.
        fn: the traced function.
        by_hand: whether it makes its backwards itself, which the trace does not have.
    """
    for node in graph.graph.nodes:
        source = placeholder_source(node) if node.op == "placeholder" else None
        if source is not None and source.endswith(".grad"):
            name = readable(source, fn)
            if by_hand:
                yield Problem(f"the step reads {name}", first_use(node), _NO_GRADIENTS)
            else:
                yield Problem(
                    f"{name}, a gradient of the previous step, is read by the step",
                    first_use(node),
                    "Read the gradient after the step that computes it",
                )


_NO_GRADIENTS = "Let clip_grad_norm_ and optimizers be all that reads gradients in the step"


def gradients_asked(fn: Any) -> Iterator[Problem]:
    """A trace without backwards sees what gradients were there before the step; call inside a backend."""
    for expression, where in gradients_asked_for():
        yield Problem(
            f"the step asks whether {readable(expression, fn)} exists",
            where,
            _NO_GRADIENTS,
        )


def batch_in_state(written: Sequence[torch.fx.Node]) -> Problem | None:
    """Tensors of the batch in which the step keeps the statistics of a normalisation."""
    users = [next(iter(node.users), node) for node in written]
    return dataclasses.replace(BATCH_IN_STATE, where=line_of(users[0])) if users else None


def batch_changed(name: str, where: str | None) -> Problem:
    """The step writes to a tensor of its batch."""
    return Problem(
        f"{name}: the step changes its batch in place, and a replay would change a copy instead", where
    )
