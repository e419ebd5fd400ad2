"""What Dynamo tells of the graphs that it makes, and how it forgets them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pygraph_train.torch_private.stock_dynamo import without_advice

__all__ = ["end_of", "looking", "traced_again"]


def end_of(gm: torch.fx.GraphModule) -> tuple[str, list[tuple[str, int]]] | None:
    """Why a graph ends before its function does, and file and line of each frame there, the innermost last.

    To be asked inside a backend, with the graph that it is given. None where the function ends. (2.11 to 2.15)
    """
    end = getattr(gm, "compile_subgraph_reason", None)
    if end is None or not end.graph_break:
        return None
    return end.reason, [(frame.filename, frame.lineno) for frame in end.user_stack]


def traced_again() -> tuple[str, str | None] | None:
    """The condition that has failed when Dynamo has last traced something anew, and `file:line` of what it is of.

    None where nothing is known of it. (2.11 to 2.15)
    """
    for traced in reversed(torch._dynamo.utils.get_compilation_metrics()):
        if traced.recompile_reason:
            condition, *of = re.split(r"\s+# ", traced.recompile_reason.splitlines()[0].partition(": ")[2])
            place = re.match(r"(\S+):(\d+) in ", of[-1]) if of else None
            if place is None or not str(traced.co_filename).endswith(place.group(1)):
                return condition, None
            return condition, f"{traced.co_filename}:{place.group(2)}"
    return None


@contextmanager
def looking() -> Iterator[None]:
    """Context: Dynamo gives no advice, and what it compiles of new functions is forgotten in the end. (2.11 to 2.15)

    The garbage collection does not see compiled code: where it holds what holds it, nothing is ever freed.
    """
    from torch._dynamo.convert_frame import input_codes

    before = set(input_codes.seen_ids)
    try:
        with without_advice():
            yield
    finally:
        codes = [c for seen in input_codes.seen if (c := seen()) is not None and id(c) not in before]
        ids = set(map(id, codes))
        input_codes.seen[:] = [seen for seen in input_codes.seen if id(seen()) not in ids]
        input_codes.seen_ids -= ids
        for code in codes:
            torch._C._dynamo.eval_frame.reset_code(code)
