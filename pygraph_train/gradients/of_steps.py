"""Gradients of captured steps: fixed addresses, shared by all graphs of a step."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from pygraph_train.identity import identities
from pygraph_train.torch_private.memory import copy_all
from pygraph_train.torch_private.sharding import local_tensor

__all__ = ["Gradients", "Snapshot"]

Snapshot = list[Tensor | None]

_grad = operator.attrgetter("grad")


class Gradients:
    """The `.grad` of the parameters that one captured step can reach.

    The first capture that starts from empty gradients owns them: autograd allocates them inside its
    graph, which costs nothing. Graphs captured later copy theirs there as their last operation, so
    whatever was replayed, `p.grad` is the same tensor with the gradients of the last step, and graphs of
    accumulating micro-batches find each other's sums. A gradient of another shape, dtype or strides takes
    that place over, and graphs that were captured before keep the old one. Gradients that the step cannot
    reach are never touched: they may belong to another step.

    Args:
        parameters: all of them.
        emptied: those whose gradients are emptied before forward; the others carry theirs over.
        canonical: the tensors that graphs write to, by parameter. Shared between captures.
    """

    def __init__(
        self, parameters: Iterable[Tensor], emptied: Iterable[Tensor], canonical: dict[Tensor, Tensor]
    ) -> None:
        self.parameters = list(parameters)
        self.emptied = list(emptied)
        ids = set(map(id, self.emptied))
        self.carried = [p for p in self.parameters if id(p) not in ids]
        self._canonical = canonical
        self._began: Snapshot = []
        self._final: Snapshot = []
        self._final_identities = b""

    def snapshot(self) -> Snapshot:
        """The present `.grad` objects (not their contents)."""
        return list(map(_grad, self.parameters))

    def restore(self, snapshot: Snapshot) -> None:
        """Put `.grad` objects back."""
        for p, grad in zip(self.parameters, snapshot, strict=True):
            p.grad = grad

    # -- making a capture ---------------------------------------------------------------------------

    def empty(self) -> None:
        """What `zero_grad(set_to_none=True)` does before a fresh micro-batch."""
        for p in self.emptied:
            p.grad = None

    def isolate(self) -> None:
        """Let the next backward add to copies, so that `restore` undoes it."""
        for p in self.carried:
            if p.grad is not None:
                p.grad = p.grad.clone()

    def begin(self) -> None:
        """Before a capture: carried gradients lie where graphs find them."""
        for p in self.carried:
            if p.grad is not None:
                self._keep_if_alike(p, p.grad)
        self._adopt([self._canonical.get(p, p.grad) for p in self.carried])
        self._began = list(map(_grad, self.carried))

    def settle(self) -> None:
        """Inside a capture, after the last use of `.grad`: leave the gradients in the canonical tensors."""
        sources, targets = [], []
        for p, began in zip(self.carried, self._began, strict=True):
            if began is not None and p.grad is not None and p.grad is not began:
                self._canonical.setdefault(p, began)  # where the next replay reads it
        for p in self.parameters:
            if p.grad is not None:
                self._keep_if_alike(p, p.grad)
            canonical = self._canonical.get(p)
            if p.grad is not None and canonical is not None and canonical is not p.grad:
                sources.append(local_tensor(p.grad))
                targets.append(local_tensor(canonical))
                p.grad = canonical
        if targets:
            copy_all(targets, sources)

    def claim(self) -> None:
        """After a successful capture: new tensors become canonical."""
        for p in self.parameters:
            if p.grad is not None:
                self._canonical.setdefault(p, p.grad)
        self._note_final()
        if self.emptied:
            self._leave_out_what_is_only_read()
        for p, grad in zip(self.carried, self._began, strict=True):  # no value was computed yet
            p.grad = grad
        self.empty()  # what is not replayed after all adds to nothing

    def _leave_out_what_is_only_read(self) -> None:
        """Forget parameters of others that the step reads and does not differentiate: their gradients may come and go.

        Where nothing is emptied, a later micro-batch, those without a gradient are the optimizer's: an update in the
        graph has left them out, and must not do so once they have one.
        """
        began = dict(zip(map(id, self.carried), self._began, strict=True))
        read = {id(p) for p in self.carried if began[id(p)] is None and p.grad is None}
        self.parameters = [p for p in self.parameters if id(p) not in read]
        self.carried = [p for p in self.carried if id(p) not in read]
        self._began = [began[id(p)] for p in self.carried]
        self._note_final()

    def _note_final(self) -> None:
        self._final = self.snapshot()
        self._final_identities = identities(tuple(self._final))

    # -- replaying it -------------------------------------------------------------------------------

    @property
    def final(self) -> Snapshot:
        """The `.grad` objects that the graph writes, None where it leaves none."""
        return self._final

    def fit(self) -> bool:
        """True when the gradients that are carried over look as in the capture."""
        if not self.carried:
            return True
        now = list(map(_grad, self.carried))
        same = all(map(operator.is_, now, self._began))
        return same or list(map(_look, now)) == list(map(_look, self._began))

    def before_replay(self) -> None:
        """Carried gradients go where the graph adds to them."""
        if self.carried and not all(map(operator.is_, map(_grad, self.carried), self._began)):
            self._adopt(self._began)

    def after_replay(self) -> None:
        """`.grad` is what the graph has written."""
        if not self._in_place():
            self.restore(self._final)

    def _in_place(self) -> bool:
        return identities(tuple(map(_grad, self.parameters))) == self._final_identities

    def _adopt(self, places: Snapshot) -> None:
        """Let carried gradients lie in these tensors."""
        for p, place in zip(self.carried, places, strict=True):
            if p.grad is not None and place is not None and place is not p.grad:
                local_tensor(place).copy_(local_tensor(p.grad))
                p.grad = place

    def _keep_if_alike(self, parameter: Tensor, gradient: Tensor) -> None:
        """Forget the canonical tensor where a copy of this gradient in it would look different."""
        canonical = self._canonical.get(parameter)
        if canonical is not None and _look(canonical) != _look(gradient):
            del self._canonical[parameter]


def _look(gradient: Tensor | None) -> tuple[object, ...]:
    if gradient is None:
        return ()
    strides = gradient.stride() if gradient.layout is torch.strided else ()
    # the stride of a single element means nothing
    steps = tuple(stride for size, stride in zip(gradient.shape, strides, strict=False) if size != 1)
    return gradient.shape, gradient.dtype, gradient.layout, steps
