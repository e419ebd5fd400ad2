"""What a training run is made of: frozen, printable, and written as `Case(...)` it can be run again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["Batches", "Case", "Change", "Loop", "Optimizer"]


@dataclass(frozen=True)
class Loop:
    """How the steps are driven.

    Attributes:
        kind: "graphed" (`GraphedStep`), "backend" (`torch.compile`), "accelerate" or "lightning".
        accumulate: micro-batches for one update.
        options: names of variants of this loop, see `loops.py`.
    """

    kind: str = "graphed"
    accumulate: int = 1
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batches:
    """What the steps are called with.

    Attributes:
        kind: name of a part in `parts_batches.KINDS`.
        lengths: rows of the batches, used in turn.
        last: rows of the very last batch, 0 for no exception.
        kept: so many different batches exist and are used again and again; 0 for a new one on every step.
    """

    kind: str = "pair"
    lengths: tuple[int, ...] = (8,)
    last: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Optimizer:
    """Which optimizer, with which kernels and groups, and what moves its learning rate.

    Attributes:
        kind: name of a part in `parts_optimizers.KINDS`.
        kernels: "" for its own choice, "fused", "foreach" or "for loop".
        groups: name of a part in `parts_optimizers.GROUPS`.
        schedule: name of a part in `parts_optimizers.SCHEDULES`.
    """

    kind: str = "sgd"
    kernels: str = "fused"
    groups: str = "one"
    schedule: str = "none"


@dataclass(frozen=True)
class Change:
    """Something that the loop does between two steps.

    Attributes:
        what: name of a part in `parts_changes`.
        at: the first step that sees it.
        until: the first step that does not any more, where the change is one that ends.
    """

    what: str
    at: int = 10
    until: int = 14


@dataclass(frozen=True)
class Case:
    """A training run: everything that is not named here is the plainest that there is.

    Attributes:
        loop: who calls the step.
        blocks: names of parts of the model, in the order of its forward.
        batches: what the step gets.
        loss: name of a loss.
        step: names of what else the step does.
        optimizer: what updates the parameters.
        changes: what happens between steps.
        steps: training steps, micro-batches included.
        seed: of all random numbers.
    """

    loop: Loop = Loop()
    blocks: tuple[str, ...] = ()
    batches: Batches = Batches()
    loss: str = "cross_entropy"
    step: tuple[str, ...] = ()
    optimizer: Optimizer = Optimizer()
    changes: tuple[Change, ...] = ()
    steps: int = 18
    seed: int = 0

    def __str__(self) -> str:
        """As short as it can be: only what differs from the plainest case."""
        return _short(self)

    def features(self) -> list[str]:
        """Names of everything in it, for counting."""
        names = [f"loop {self.loop.kind}", *(f"option {o}" for o in self.loop.options)]
        if self.loop.accumulate > 1:
            names.append("accumulation")
        names += [f"block {name}" for name in self.blocks] + [f"step {name}" for name in self.step]
        names += [f"change {change.what}" for change in self.changes]
        names += [f"batches {self.batches.kind}", f"loss {self.loss}"]
        names += [f"lengths {len(self.batches.lengths)}"] if len(self.batches.lengths) > 1 else []
        names += ["last batch smaller"] if self.batches.last else []
        names += ["batches kept"] if self.batches.kept else []
        chosen = self.optimizer
        names += [f"optimizer {chosen.kind}", f"groups {chosen.groups}", f"schedule {chosen.schedule}"]
        return names


def _short(value: object) -> str:
    if not dataclasses.is_dataclass(value):
        if isinstance(value, tuple):
            inner = ", ".join(map(_short, value))
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return repr(value)
    told = []
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if field.default is dataclasses.MISSING or found != field.default:
            told.append(f"{field.name}={_short(found)}")
    return f"{type(value).__name__}({', '.join(told)})"
