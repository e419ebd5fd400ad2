"""Parts of a step that a graph would not run as plain training does, with whatever kernels.

These are operations that raise for some values, where the step itself catches that: a graph would raise past its `try`.
And what the user has compiled: Dynamo goes into it as if it were not.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from typing import Any

import torch

from pygraph_train.problems import Problem, frames_in
from pygraph_train.torch_private.guards import traces_compiled_parts

__all__ = ["COMPILED_PART", "caught_operation", "plain_parts"]

COMPILED_PART = Problem(
    "a part is compiled already (torch.compile), and a graph would have other kernels and other random numbers there",
    fix="Leave torch.compile away: pygraph-train compiles by itself where that is faster",
)

_RAISES = ("linalg_", "cholesky", "inverse", "multinomial")
"""How the names of operations begin that look at their results, or at their inputs, before they return."""

_WHOLE = (
    "cholesky_ex",
    "inv_ex",
    "lu_factor_ex",
    "ldl_factor_ex",
    "solve_ex",
    "norm",
    "vector_norm",
    "matrix_norm",
)
"""Of `torch.linalg`, and raise nothing for values."""


def plain_parts(graph: torch.fx.GraphModule) -> Problem | None:
    """Why no graph holds this, with no kernels at all: the user's `try` or `torch.compile`. Call inside a backend."""
    return caught_operation(graph) or (COMPILED_PART if traces_compiled_parts() else None)


def caught_operation(graph: torch.fx.GraphModule) -> Problem | None:
    """Why a graph of Dynamo cannot raise as the step does, None where it can."""
    modules = (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
    for node in (node for module in modules for node in module.graph.nodes):
        name = _name(node.target) if node.op in ("call_function", "call_method") else ""
        if not name.removeprefix("linalg_").startswith(_WHOLE) and name.startswith(_RAISES):
            for path, line in reversed(frames_in(node.meta.get("stack_trace"))):
                if any(line in lines for lines in _tries(path)):
                    return Problem(
                        f"the step catches what torch.{name.replace('linalg_', 'linalg.')} raises for some values, and "
                        "a graph would raise it elsewhere",
                        f"{path}:{line}",
                        "Use an operation that says so instead, as torch.linalg.cholesky_ex does",
                    )
    return None


def _name(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return str(name).strip("_")


@functools.lru_cache(maxsize=64)
def _tries(path: str) -> tuple[range, ...]:
    """Lines of a file whose exceptions are caught."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):  # not Python's own text
        return ()
    return tuple(_ranges(tree))


def _ranges(tree: ast.AST) -> Iterator[range]:
    for node in ast.walk(tree):
        if (isinstance(node, ast.Try) and node.handlers) or (
            isinstance(node, ast.With) and _suppresses(node)
        ):
            yield range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1)


def _suppresses(node: ast.With) -> bool:
    return any("suppress" in ast.unparse(item.context_expr) for item in node.items)
