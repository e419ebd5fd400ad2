"""What code under Dynamo is told when it asks whether something compiles it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

__all__ = ["file_of", "nothing_compiles"]


def nothing_compiles(asked: list[str], but: Collection[str] = ()) -> tuple[Any, str, Any]:
    """A change of Dynamo: `torch.compiler.is_compiling()` and its kin are false in what it traces. (2.11, 2.13)

    Dynamo of 2.11 says that everything is exported, too.

    Args:
        asked: gets the place of each question, as `file:line`.
        but: files whose questions are answered as Dynamo does it.
    Returns:
        Owner, attribute and value.
    """
    from torch._dynamo.variables import torch as functions

    told = functions.tracing_state_functions
    questions = [
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_exporting,
        torch._utils.is_compiling,
        torch._dynamo.external_utils.is_compiling,
    ]

    class Answers(dict[Any, Any]):
        def __getitem__(self, question: Any) -> Any:
            if question not in questions:
                return super().__getitem__(question)
            asked.append(_place())
            return super().__getitem__(question) if file_of(asked[-1]) in but else False

    return functions, "tracing_state_functions", lambda: Answers(told())


def file_of(place: str | None) -> str:
    """The file of a place that is written as `file:line`."""
    return str(place or "").rpartition(":")[0]


def _place() -> str:
    """Where the traced code is, outside of functions whose name is a question themselves."""
    frames = list(torch._guards.TracingContext.extract_stack())
    named = [f for f in frames if not f.name.startswith("is_")] or frames
    return f"{named[-1].filename}:{named[-1].lineno}" if named else ""
