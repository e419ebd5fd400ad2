"""One recorded forward of a region with its saved activations, and its backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pygraph_train.graphs.engine import Graph
from pygraph_train.graphs.memory import span
from pygraph_train.torch_private.memory import copy_all
from pygraph_train.verification import Audits

if TYPE_CHECKING:
    from pygraph_train.core.region import PhaseRegion

__all__ = ["RecordedRegion", "Unrecordable"]


def _without_version(saved: Tensor) -> Tensor:
    return saved.data


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


class Unrecordable(Exception):
    """A region cannot be recorded. The message is the reason."""


class _Backward(NamedTuple):
    """A recorded backward of some outputs.

    Attributes:
        seeds: the gradient of each of these outputs, which `graph` reads.
        inputs: the same tensors.
        gradients: of `leads`, None where there is none. Each replay overwrites them.
    """

    graph: Graph
    seeds: dict[int, Tensor]
    inputs: list[Tensor]
    gradients: list[Tensor | None]


class RecordedRegion:
    """A forward and a backward at fixed addresses.

    The forward is recorded with autograd on, and the backward is the one of that autograd graph: the kernels and their
    order are those of plain training.

    Args:
        region: whose graph it is.
        given: the inputs of the call in which it is recorded.

    Attributes:
        leads: positions of inputs that get gradients.
        differ: positions of outputs that require gradients.
        generation: grows with each replay of the forward.
        audits: when it is compared once more; set by who has recorded it.
    """

    audits: Audits

    def __init__(self, region: PhaseRegion, given: Sequence[Any]) -> None:
        self.generation = 0
        self._region, self._engine = region, region.owner.engine
        self._token: weakref.ref[Any] | None = None
        tensors = [i for i, t in enumerate(given) if isinstance(t, Tensor)]
        self._moving = [i for i in tensors if i not in region.fixed]
        self._static = [self._static_of(t, i in region.fixed) for i, t in enumerate(given)]
        # without a version: autograd must not take a new batch for a change of what it has saved
        self._targets = [span(self._static[i].data) for i in self._moving]
        self._written_back = [i for i in self._moving if i in region.written]
        self.leads = [i for i in tensors if given[i].requires_grad]
        self._keys = [id(given[i]) if i in region.fixed else None for i in self.leads]
        self._graphs: list[Graph] = []
        self._backwards: dict[frozenset[int], _Backward] = {}
        try:
            self._record(given)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _static_of(value: Any, fixed: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if fixed:
            static = value.detach()
        else:
            place = torch.empty_like(span(value.detach()))
            static = place.as_strided(value.shape, value.stride(), 0)
        return static.requires_grad_(value.requires_grad)

    def _record(self, given: Sequence[Any]) -> None:
        region, engine = self._region, self._engine
        self._load(given)
        graph, outputs = engine.capture(self._run_forward)
        self._graphs.append(graph)
        self._forward, self._outputs = graph, outputs
        if engine.name == "emulated":  # its capture of the backward computes with what the forward has saved
            graph.replay()
        self.differ = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]
        self._hand_out = [self._how(o) for o in outputs]
        if region.owner.config.backward != "off":
            for asked in region.asked:
                if asked.issubset(self.differ):
                    self._backwards[asked] = self._record_backward(asked)

    def _record_backward(self, asked: frozenset[int]) -> _Backward:
        seeds = {i: torch.zeros_like(self._outputs[i].detach()) for i in self.differ if i in asked}
        graph, gradients = self._engine.capture(functools.partial(self._run_backward, seeds))
        self._graphs.append(graph)
        return _Backward(graph, seeds, list(seeds.values()), gradients)

    def _how(self, output: Any) -> int | None:
        """The position of the input that an output is, None for one with memory of its own."""
        if not isinstance(output, Tensor):
            return None
        where = output.untyped_storage().data_ptr()
        for i, static in enumerate(self._static):
            if isinstance(static, Tensor) and static.untyped_storage().data_ptr() == where and where:
                same = (static.shape, static.stride()) == (output.shape, output.stride())
                if not same or static.data_ptr() != output.data_ptr() or output.requires_grad:
                    raise Unrecordable("it returns a view of one of its inputs")
                return i
        return None

    def _run_forward(self) -> Sequence[Any]:
        # each replay writes what was saved anew, which no version has to tell
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_without_version, _as_it_is):
            made: Sequence[Any] = self._region.run(*self._static)
        return made

    def _run_backward(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        leads = [self._static[i] for i in self.leads]
        outputs = [self._outputs[i] for i in seeds]
        torch.autograd.backward(outputs, list(seeds.values()), retain_graph=True, inputs=leads)
        found = [self._region.owner.placed(i, lead.grad) for i, lead in zip(self._keys, leads, strict=True)]
        for lead in leads:
            lead.grad = None
        return found

    def _load(self, given: Sequence[Any]) -> None:
        if self._moving:
            copy_all(self._targets, [span(given[i].detach()) for i in self._moving])

    # -- replays --------------------------------------------------------------------------------------

    def replay_forward(self, given: Sequence[Any], token: Any) -> tuple[Any, ...]:
        """Run the forward. Hot path.

        Args:
            given: as recorded, moving inputs with other values.
            token: lives as long as a backward may come.
        """
        self.generation += 1
        self._token = weakref.ref(token)
        self._load(given)
        self._forward.replay()
        for i in self._written_back:
            given[i].detach().copy_(self._static[i].detach())
        return tuple(
            (o.detach().clone() if isinstance(o, Tensor) else o) if how is None else given[how]
            for o, how in zip(self._outputs, self._hand_out, strict=True)
        )

    def backward_of(self, seeds: dict[int, Tensor]) -> _Backward | None:
        """The recorded backward of these outputs, None where there is none. Hot path."""
        return self._backwards.get(frozenset(seeds))

    def replay_backward(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        """Run the backward. Hot path.

        Args:
            seeds: the gradient of each output that has one.
        Returns:
            The gradients of `leads`, which the next replay overwrites.
        """
        backward = self.backward_of(seeds)
        if backward is None:
            return self._another_backward(seeds)
        copy_all(backward.inputs, [seeds[i] for i in backward.seeds])
        backward.graph.replay()
        return backward.gradients

    def _another_backward(self, seeds: dict[int, Tensor]) -> list[Tensor | None]:
        """A backward of other outputs than the recorded ones, by autograd on what the forward has saved."""
        outputs = [self._outputs[i] for i in seeds]
        leads = [self._static[i] for i in self.leads]
        return list(
            torch.autograd.grad(outputs, leads, list(seeds.values()), retain_graph=True, allow_unused=True)
        )

    @property
    def free(self) -> bool:
        """Whether no backward can come any more."""
        return self._token is None or self._token() is None

    def close(self) -> None:
        """Release its graphs."""
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        self._outputs = self._static = []
        self._backwards.clear()

    # -- comparison -----------------------------------------------------------------------------------

    def plain(self, given: Sequence[Any], seeds: dict[int, Tensor]) -> tuple[list[Any], list[Tensor | None]]:
        """What the same work gives without a graph: outputs and gradients."""
        inputs = [self._copied(t, i) for i, t in enumerate(given)]
        with torch.enable_grad():
            outputs = self._region.run(*inputs)
            leads = [inputs[i] for i in self.leads]
            torch.autograd.backward([outputs[i] for i in seeds], list(seeds.values()), inputs=leads)
        written = [inputs[i].detach() for i in self._written_back]
        return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *written], [
            lead.grad for lead in leads
        ]

    def _copied(self, value: Any, position: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.detach() if position not in self._written_back else value.detach().clone()
        return copy.requires_grad_(value.requires_grad)

    def replayed(
        self, given: Sequence[Any], seeds: dict[int, Tensor]
    ) -> tuple[list[Any], list[Tensor | None]]:
        """The same from the graphs. What the region has written of the caller's stays as it was."""
        self._load(given)
        self._forward.replay()
        outputs = [o.detach().clone() if isinstance(o, Tensor) else o for o in self._outputs]
        written = [self._static[i].detach().clone() for i in self._written_back]
        gradients = self.replay_backward(seeds)
        return [*outputs, *written], gradients

    def sample_seeds(self) -> list[dict[int, Tensor]]:
        """Gradients of outputs for comparisons of each backward: small numbers that differ."""
        return [
            {
                i: (torch.arange(s.numel(), device=s.device) % 5 + 1).to(s.dtype).view(s.shape)
                for i, s in backward.seeds.items()
            }
            for backward in self._backwards.values()
        ]
