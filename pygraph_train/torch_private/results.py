"""What AOTAutograd gets wrong of the function that it compiles now, told by its own metadata. (2.11, 2.13)"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gets_other_memory", "layout", "offset", "results_are_misplaced"]


def results_are_misplaced() -> bool:
    """Whether results end up in the places of others.

    The new values of some inputs are written at the end of the graph, those of others are returned in front of the
    results and written later. A result that is an input of the former kind is put in its place, and that is counted
    without what is in front.
    """
    from torch._functorch._aot_autograd.schemas import MutationType, OutputType

    metadata = _metadata()
    if metadata is None or not metadata.num_mutated_inp_runtime_indices:
        return False
    return any(
        result.output_type is OutputType.is_input
        and metadata.input_info[result.base_idx].mutation_type is MutationType.MUTATED_IN_GRAPH
        for result in metadata.output_info
    )


def gets_other_memory(place: int, inputs: int) -> bool:
    """Whether it is known of the input at a place, of so many, that the function gives it the memory of another."""
    metadata = _metadata()
    known = metadata.input_info if metadata is not None else []
    return len(known) == inputs and bool(known[place].mutates_storage_metadata)


def layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, strides and type; of a symbol, the number that it stands for now. Adds no guard."""
    return (*map(_number, (*tensor.size(), *tensor.stride())), tensor.dtype)


def offset(tensor: torch.Tensor) -> object:
    """Where in its memory it begins, as `layout`."""
    return _number(tensor.storage_offset())


def _number(size: Any) -> object:
    if isinstance(size, int):
        return size
    node = size.node
    return node.hint if node.has_hint() else str(node)


def _metadata() -> Any:
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata if context is not None else None
