"""What a graph of Dynamo's may write to: nothing that it writes is missed, and what it only reads is not named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from pygraph_train.torch_private.dispatch import HigherOrderOperator
from pygraph_train.tracing.writes import maybe_written, written_arguments

Function = Callable[[Tensor, Tensor], Any]


def written(function: Function, *given: Tensor) -> set[int]:
    """Positions of the arguments that the traced function may write to, as the graph says."""
    found: list[set[int]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        names = [node.name for node in maybe_written(graph)]
        found.append({"ab".index(name.removeprefix("l_").removesuffix("_")) for name in names})
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*given)
    (only,) = found
    return only


def in_a_checkpoint(a: Tensor, b: Tensor) -> Tensor:
    def inner(x: Tensor, y: Tensor) -> Tensor:
        torch._foreach_add_([y], 1.0)
        return x * 2

    return checkpoint(inner, a, b, use_reentrant=False)


WAYS: dict[str, tuple[Function, set[int]]] = {
    "reads": (lambda a, b: nn.functional.linear(a, b) + a.view(-1)[0] + torch.cat([a, b]).sum(), set()),
    "a method": (lambda a, b: b.add_(a), {1}),
    "an operator of Python": (lambda a, b: b.__setitem__(0, a[0]), {1}),
    "out": (lambda a, b: torch.mul(a, 2, out=b), {1}),
    "a list": (lambda a, b: torch._foreach_mul_([a, b], 0.5), {0, 1}),
    "views in a list": (lambda a, b: torch._foreach_mul_([b.view(-1)[:2]], 0.5), {1}),
    "data in a list": (lambda a, b: torch._foreach_mul_([b.data], 0.5), {1}),
    "detached in a list": (lambda a, b: torch._foreach_copy_([b.detach()], [a]), {1}),
    "in place": (lambda a, b: nn.functional.relu(b, inplace=True), {1}),
    "an operator": (lambda a, b: torch.ops.aten.copy_(b, a), {1}),
    "statistics": (lambda a, b: nn.functional.batch_norm(a, b[0], b[1], training=True), {1}),
    "in a checkpoint": (in_a_checkpoint, {1}),
}


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("way", WAYS)
def test_the_arguments_that_a_graph_writes_to(way: str) -> None:
    function, expected = WAYS[way]
    assert written(function, torch.ones(3, 3), torch.ones(3, 3)) == expected


class Unseen(HigherOrderOperator):
    """As the one that launches kernels of Triton: nothing says what it writes to."""

    def __init__(self) -> None:
        super().__init__("unseen_by_pygraph_train")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("target", [Unseen(), lambda *args: None], ids=["higher order", "of somebody else"])
def test_what_is_not_known_counts_as_written(target: Any) -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    node = graph.call_function(target, (first,), {"more": [second]})
    assert written_arguments(node) == [first, second]
