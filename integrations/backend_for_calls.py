"""The compile backend as calls of a module use it that an integration has taken over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from pygraph_train.problems import NotLegal, Problem, user_line_in
from pygraph_train.regions.inductor import compile_graph
from pygraph_train.regions.options import BackendOptions
from pygraph_train.regions.unfit import of_other_class
from pygraph_train.report.backend_report import RegionRecord
from pygraph_train.step.activations import explained, handed_out
from pygraph_train.step.whole_loop import WholeLoop
from pygraph_train.torch_private.autograd import backwards_called_again
from pygraph_train.torch_private.side_effects import dynamo_side_effects
from pygraph_train.tracing.plain_parts import caught_operation
from pygraph_train.tracing.reasons import innermost
from pygraph_train.tracing.recompute import CHANGED_AGAIN, as_eager, eager_copy, write_in_checkpoint
from pygraph_train.tracing.uncounted import counted_as_eager, uncounted_changes

__all__ = ["backend_for_calls", "begins"]


def begins(name: str) -> str:
    """How the rows about a module without graphs begin."""
    return f"forward and backward of {name} get no graphs"


def backend_for_calls(
    name: str,
    tell: Callable[[Problem], None],
    late: Callable[[Problem], None],
    holders: Collection[type],
    whole: WholeLoop,
) -> Callable[..., Callable[..., Any]]:
    """The compile backend, but for graphs that compiled functions would not do justice.

    These are checkpoints that change buffers, activations whose gradient somebody may ask for, and tensors of other
    classes.

    Args:
        name: of the module.
        tell: called with the reason why something is not compiled; Dynamo keeps backends, and must not keep its owner.
        late: called with the reason why a call that ran as regions was the last one; the same goes for it.
        holders: classes of objects that results hold. Activations in them are treated like those that are returned.
        whole: gets the regions; the same as for `tell` goes for it.
    """
    records, bounds, memory = whole.records, whole.bounds, whole.memory
    teller, late_teller = weakref.WeakMethod(tell), weakref.WeakMethod(late)

    def found_late(problem: Problem) -> None:
        if (now := late_teller()) is not None:
            now(problem)

    def made(record: RegionRecord) -> None:
        records.append(record)
        if record.phase == "function" and record.where is not None and (now := teller()) is not None:
            now(Problem(f"{begins(name)}: {record.reason}", record.where))

    def eager(gm: torch.fx.GraphModule, problem: Problem) -> Callable[..., Any]:
        if (now := teller()) is not None:
            now(problem)
        return as_eager(gm).forward

    def regions(
        gm: torch.fx.GraphModule, inputs: list[Any], *, options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        write = write_in_checkpoint(gm)
        if write is not None:
            where = user_line_in(write.meta.get("stack_trace"))
            return eager(gm, Problem(f"{begins(name)}: {CHANGED_AGAIN}", where))
        other = of_other_class(inputs)
        if other is not None:
            return eager(gm, Problem(f"{begins(name)}: they take a {other}, which is no plain tensor"))
        caught = caught_operation(gm)
        if caught is not None:  # Dynamo leaves the function as it is, with its `try`
            raise NotLegal(caught)
        activations = handed_out(gm)
        kept = dynamo_side_effects() if activations else []
        kept = [effect for effect in kept if not effect.plain and effect.owner not in holders]
        if not kept:
            places, eager_copied = uncounted_changes(gm), eager_copy(gm)
            memory.begin()
            with backwards_called_again():  # which loops may begin with late
                compiled = compile_graph(gm, inputs, BackendOptions.of(options), made, bounds)
            compiled = counted_as_eager(compiled, places)
            return explained(compiled, activations, name, eager_copied, found_late)
        return eager(
            gm,
            Problem(
                f"{begins(name)}: it stores an activation that leads to its results, and compiled code has no "
                "gradient of this activation",
                innermost(kept[0].stack),
                "Store activation.detach(), unless you need its gradient",
            ),
        )

    return regions
