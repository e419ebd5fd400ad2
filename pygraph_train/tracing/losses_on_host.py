"""Why steps with a CTC loss are not one graph, and others that change switches of torch while they compute.

This is about steps of several processes, and those with Inductor's kernels: other graphs leave gaps for the loss, see
`torch_private/ctc_loss.py`. Models of transformers switch cuDNN off around it.
"""

from __future__ import annotations

import linecache
import re

from pygraph_train.problems import Problem

__all__ = ["of_ctc_loss", "of_switches"]

_SWITCHES = "_GeneratorContextManager; op: call_function; target: <function flags at"
"""Of Dynamo's message about `flags` of a backend of torch. (2.11, 2.13)"""

_LINES = 40
"""How many lines of a block are looked at."""


def of_ctc_loss(where: str | None) -> Problem:
    """The step computes a CTC loss."""
    return Problem(
        "torch.nn.functional.ctc_loss reads the lengths of its inputs and targets on the host, and copies them to the "
        "device again, which no CUDA graph can hold",
        where,
        "Leave the loss as it is. With compile=True the model before it gets graphs of its own; with other settings, "
        "in one process, the whole step gets a graph with gaps for the loss",
    )


def of_switches(message: str, where: str | None) -> Problem | None:
    """The reason, where Dynamo has stopped at `with torch.backends.cudnn.flags(...)` or the like.

    Args:
        message: of Dynamo.
        where: the innermost line of the user's.
    """
    if _SWITCHES not in message:
        return None
    if (line := _line_in_block(where, "ctc_loss(")) is not None:
        return of_ctc_loss(line)
    return Problem(
        "the step is not one graph: it changes switches of torch.backends while it computes (flags()), and Dynamo does "
        "not trace this",
        where,
        "Set the switches before the training",
    )


def _line_in_block(where: str | None, words: str) -> str | None:
    """`file:line` of these words in the block that begins at a line, if they are in it."""
    file, _, number = (where or "").rpartition(":")
    first = int(number) if number.isdigit() else 0
    depth = _depth(linecache.getline(file, first)) if first else 0
    for line in range(first + 1, first + _LINES if first else 0):
        text = linecache.getline(file, line)
        if not text or (text.strip() and _depth(text) <= depth):
            return None
        if words in text:
            return f"{file}:{line}"
    return None


def _depth(text: str) -> int:
    found = re.match(r"\s*", text)
    return len(found[0]) if found is not None else 0
