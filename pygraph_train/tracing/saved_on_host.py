"""A part of what steps with eager kernels save waits in host memory, so that they need no more than compiled ones.

A step that is to be compiled is looked at with eager kernels first, which save more for the backward than Inductor's
do. A part of the tensors that autograd saves is copied to host memory, and back when the backward reads it: the same
bytes, in the same shape and strides and with the same alignment, so the same kernels compute the same.

A step that is compared with a graph's replay runs beside the graph, whose memory holds all that it saves. There all of
it may wait on the host.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pygraph_train.graphs.memory import ALIGNMENT, extent, span
from pygraph_train.torch_private.memory import storages
from pygraph_train.torch_private.modes import leaving_no_mode
from pygraph_train.tracing.recompute import as_eager
from pygraph_train.tracing.writes import NORMALISATIONS, written_arguments

__all__ = ["SHARE_OF_WARM_UP", "SavedOnHost", "eager_forward"]

_LEAST = 1 << 20
"""Bytes of a tensor that is worth a copy."""

SHARE_OF_WARM_UP = 0.6
"""Of what a step saves: eager steps of eight models need at most 1.4 times the memory of compiled ones. Two fifths
would do, but for holes between blocks (324 MiB of 978 for MobileNetV3 on an H200)."""

_MOST = 8 << 30
"""Bytes a step. They cross the bus twice."""


class SavedOnHost:
    """Where a part of what steps save for the backward lies, while `waiting()`.

    Args:
        in_warm_up: whether steps that are watched wait, because Inductor compiles later ones.
    """

    def __init__(self, *, in_warm_up: bool) -> None:
        self.in_warm_up = in_warm_up
        self.moved = 0
        """Bytes of the last step that has waited."""
        self._share = 0.0

    @contextmanager
    def waiting(self, share: float = SHARE_OF_WARM_UP) -> Iterator[None]:
        """Inside, forwards of steps leave this share of what they save on the host."""
        self._share = share
        try:
            yield
        finally:
            self._share = 0.0

    def __call__(self, forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run `forward(*inputs)`. Its inputs live longer than the step, and stay where they are."""
        if not self._share:
            return forward(*inputs)
        standing = frozenset(storages(inputs))
        most, share, seen = min(_MOST, _free_on_host() // 4), self._share, 0
        moves: dict[Hashable, bool] = {}  # by storage: nothing is gained where another part of it stays
        self.moved = 0

        def pack(tensor: Tensor) -> Tensor | _OnHost:
            nonlocal seen
            if not _may_move(tensor):
                return tensor
            (memory,) = storages([tensor])
            if memory in standing:
                return tensor
            if memory not in moves:
                seen += tensor.nbytes
                moves[memory] = self.moved + tensor.nbytes <= min(most, share * seen)
                self.moved += tensor.nbytes if moves[memory] else 0
            return _OnHost(tensor) if moves[memory] else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _back):
            return forward(*inputs)


class _OnHost:
    """A tensor whose values lie in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.device = tensor.shape, tensor.stride(), tensor.device
        self.offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
        with torch.no_grad():
            self.values = span(tensor.detach()).to("cpu", copy=True)

    @torch.no_grad()
    def back(self) -> Tensor:
        whole = torch.empty(self.offset + self.values.numel(), dtype=self.values.dtype, device=self.device)
        whole[self.offset :].copy_(self.values)
        return whole.as_strided(self.shape, self.stride, self.offset)


def _back(packed: Tensor | _OnHost) -> Tensor:
    return packed.back() if isinstance(packed, _OnHost) else packed


def _may_move(tensor: Tensor) -> bool:
    """Whether it is plain memory of some size without much of others in between."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < _LEAST:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    aligned = tensor.data_ptr() % ALIGNMENT % tensor.element_size() == 0
    return aligned and extent(tensor.shape, tensor.stride()) == tensor.numel()


def _free_on_host() -> int:
    """Bytes of host memory that nobody uses, as far as the system tells."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def eager_forward(graph: torch.fx.GraphModule, saved: SavedOnHost | None) -> Callable[..., Any]:
    """A graph of Dynamo's with eager kernels. It changes the graph.

    Args:
        saved: takes a part of what the forward saves, where that shows nobody.
    """
    plain = saved is not None and _is_plain(graph)
    forward = leaving_no_mode(graph, as_eager(graph).forward)
    if saved is None or not plain:
        return forward
    return lambda *inputs: saved(forward, inputs)


def _is_plain(graph: torch.fx.GraphModule) -> bool:
    """Whether nothing in a graph minds that saved tensors pass through hooks.

    Autograd does not notice then that a tensor was changed after it was saved, and raises no error: what changes in
    place may be nothing that anybody saves. Transforms of functions refuse hooks, and graphs within (checkpoints) have
    their own.
    """
    if any(isinstance(child, torch.fx.GraphModule) for child in graph.children()):
        return False
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method") and not _is_plain_call(node):
            return False
    return True


def _is_plain_call(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    where = getattr(node.target, "__module__", None) or ""
    if "functorch" in where or where == "torch.autograd" or node.kwargs.get("out") is not None:
        return False
    if (
        where == "torch.nn.functional" and name in NORMALISATIONS
    ):  # the backward of a training step does not read the statistics
        return True
    written = written_arguments(node)
    if any(target is not node.args[0] for target in written):  # in a list, or by an operator of somebody else
        return False
    in_place = (
        bool(written)
        or name in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
        or _asks_for_in_place(node)
    )
    return not in_place or _changes_what_nobody_saves(node)


def _changes_what_nobody_saves(node: torch.fx.Node) -> bool:
    """Whether an operation changes whole numbers, or the result of one that does not save it, and that is all its use.

    Activations in place after convolutions and norms are such operations, and sums with what goes past these.
    """
    changed = node.args[0] if node.args else None
    if not isinstance(changed, torch.fx.Node):
        return False
    value = changed.meta.get("example_value")
    if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
        return True
    maker = getattr(changed.target, "__name__", "") if changed.op == "call_function" else ""
    return maker in _SAVE_NO_RESULT and len(changed.users) == 1


_SAVE_NO_RESULT = frozenset(
    ("conv1d", "conv2d", "conv3d", "linear", "batch_norm", "layer_norm", "group_norm", "add", "iadd", "sub")
)
"""Functions that save their arguments for the backward, or nothing, and return no view."""

_IN_PLACE = frozenset(
    name for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)
) | {"setitem"}
"""Names of the operators that change what is on their left."""


def _asks_for_in_place(node: torch.fx.Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    if isinstance(node.target, str) or True not in [x for x in node.args if isinstance(x, bool)]:
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # of a function in C
        return False
    return bool(given.get("inplace"))
