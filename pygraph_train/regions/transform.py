"""CUDA-graph-aware code transformation: rewrite what keeps a region from being captured, and launch less.

The idea of the former is CGCT of PyGraph/GraCE (Ghosh et al., arXiv 2503.19779, OSDI'26).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pygraph_train.regions.passes.batch import batch, may_batch
from pygraph_train.regions.passes.blockers import blockers
from pygraph_train.regions.passes.draft import CPU, Change, Draft, Left, Refused, in_one_line, is_on, value
from pygraph_train.regions.passes.items import has_items, keep_items
from pygraph_train.regions.passes.relocate import has_cpu_tensors, relocate

__all__ = ["Change", "Left", "Transformed", "batched", "transform"]

# name, what it does, and whether that is worth a copy of the graph
_Pass = tuple[str, Callable[[Draft], None], Callable[[Draft], bool]]
_BATCH: _Pass = ("batch", batch, may_batch)
_PASSES: tuple[_Pass, ...] = (
    # a number that stays a tensor may then move with the rest
    ("items", keep_items, has_items),
    ("relocate", relocate, has_cpu_tensors),
    _BATCH,
)

_TRIES = 8


@dataclass(frozen=True)
class Transformed:
    """A region's graph after the transformation, and what its caller now owes it.

    Attributes:
        gm: the graph; the very same object where nothing applied.
        example_inputs: its fake inputs; staged ones are on the device.
        staged: indices of inputs that were CPU tensors and are expected on the device at every run.
        late: indices of outputs that were CPU tensors; the graph returns them on the device, and the
            caller copies them to the CPU after the region.
        passthrough: output index to input index: in this output the caller returns its own CPU tensor,
            the input as it was before staging.
        handed_over: names of CPU tensors saved for the backward that are now saved on the device; to be
            given as `arriving` when the backward is transformed. Empty unless `hand_over` was asked for.
        changes: what was rewritten.
        left: what still blocks a capture.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    staged: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    passthrough: Mapping[int, int] = field(default_factory=dict)
    handed_over: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    left: tuple[Left, ...] = ()


def transform(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    device: torch.device,
    *,
    arriving: Collection[str] = (),
    hand_over: bool = False,
) -> Transformed:
    """Rewrite what blocks the capture of one graph of AOTAutograd.

    Args:
        gm: an aten graph, functional but for `copy_` to inputs at its end, with fake tensors as
            `meta["val"]`. It is not modified.
        example_inputs: its fake inputs, in order.
        device: the accelerator that the region runs on, with its index.
        arriving: for a backward: names of inputs that the graph takes for CPU tensors and that the
            transformed forward hands over on the device.
        hand_over: for a forward: CPU tensors that are only saved for the backward may be returned on
            the device without being copied back. Whoever asks for it passes `handed_over` on as
            `arriving`; otherwise such outputs are among `late`.
    Returns:
        The number and order of inputs and outputs are those of `gm`. No exception escapes a pass: a pass
        that fails is undone and listed in `left`.
    """
    draft = Draft(gm, device, hand_over=hand_over)
    if not any(is_on(value(node), device) for node in gm.graph.nodes):
        return Transformed(gm, example_inputs)
    taken = frozenset(node.name for node in draft.placeholders if node.name in arriving)
    if taken:
        draft = _with_inputs_on_device(draft, taken)
    draft = _run(draft, _PASSES)
    left = _left(draft)
    if not draft.changes and not taken:
        return Transformed(gm, example_inputs, left=left)
    # a backward's inputs have the names that the forward's outputs had before the passes
    outputs = Draft(gm, device).outputs
    return _finished(draft, example_inputs, taken, left, [outputs[i].name for i in draft.handed_over])


def batched(gm: fx.GraphModule, device: torch.device) -> tuple[fx.GraphModule, tuple[Left, ...]]:
    """`gm`, or a copy of it in which small operations on `device` run together; and what failed."""
    draft = _run(Draft(gm, device), (_BATCH,))
    return draft.gm, draft.failures


def _run(draft: Draft, passes: Sequence[_Pass]) -> Draft:
    for name, rewrite, applies in passes:
        if applies(draft):
            draft = _attempt(draft, name, rewrite)
    return draft


def _attempt(draft: Draft, name: str, rewrite: Callable[[Draft], None]) -> Draft:
    """Run a pass on a copy, without the nodes it fails for; drop the copy where the pass changes nothing."""
    failure: Exception | None = None
    for _ in range(_TRIES):
        try:
            attempt = draft.copy()
            rewrite(attempt)
            attempt.graph.lint()
            attempt.gm.recompile()
        except Refused as refused:
            draft.excluded.update(dict.fromkeys(refused.names, f"was tried: {refused}"))
            failure = refused
        except Exception as error:  # a compile must never break for this
            failure = error
            break
        else:
            if attempt.changes != draft.changes:
                return attempt
            draft.why = attempt.why
            return draft
    assert failure is not None
    draft.failures += (_failure(name, failure),)
    return draft


def _left(draft: Draft) -> tuple[Left, ...]:
    try:
        return (*draft.failures, *blockers(draft))
    except Exception as error:
        return (*draft.failures, _failure("blockers", error))


def _failure(name: str, error: Exception) -> Left:
    return Left(f"pass {name}", None, f"was undone: {in_one_line(error)}")


def _with_inputs_on_device(draft: Draft, names: Collection[str]) -> Draft:
    """Inputs arrive on the device: their readers read a copy on the CPU, until a pass moves them."""
    draft = draft.copy()
    for node in draft.placeholders:
        if node.name in names and is_on(value(node), CPU):
            node.meta["val"] = draft.fake(node.meta["val"], draft.device)
            readers = [reader for reader in draft.graph.nodes if reader in node.users]
            if readers:
                copy = draft.emit(torch.ops.prims.device_put.default, node, CPU, at=readers[0])
                for reader in readers:
                    reader.replace_input_with(node, copy)
    draft.gm.recompile()
    return draft


def _finished(
    draft: Draft,
    example_inputs: Sequence[Any],
    taken: Collection[str],
    left: tuple[Left, ...],
    handed_over: Sequence[str],
) -> Transformed:
    inputs = list(example_inputs)
    staged = []
    for i, node in enumerate(draft.placeholders):
        if node.name in draft.staged or node.name in taken:
            inputs[i] = node.meta["val"]
        if node.name in draft.staged:
            staged.append(i)
    return Transformed(
        gm=draft.gm,
        example_inputs=inputs,
        staged=tuple(staged),
        late=draft.late,
        passthrough=draft.passthrough,
        handed_over=tuple(handed_over),
        changes=draft.changes,
        left=left,
    )
