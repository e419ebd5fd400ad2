"""Whether the processes that train together may compare plans."""

from __future__ import annotations

from torch import distributed

__all__ = ["why_no_comparison"]


def why_no_comparison() -> str | None:
    """Why plans are not compared; None where they may be.

    Ranks of a loop that the user wrote exchange nothing with each other. Steps that get ready are not counted, and each
    rank gets ready in its own time.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "several processes: the first plan is kept, without a comparison"
    return None
