"""Strategies of hypothesis for cases: every feature beside every other one that it can stand beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import strategies as st

from .case import Batches, Case, Change, Loop, Optimizer
from .part import Part
from .parts_batches import KINDS as BATCHES
from .parts_changes import CHANGES
from .parts_model import BLOCKS
from .parts_numbers import NUMBERS
from .parts_optimizers import GROUPS, SCHEDULES
from .parts_optimizers import KINDS as OPTIMIZERS
from .parts_step import LOSSES, STEP

__all__ = ["LOOPS", "cases"]

LOOPS = ("graphed", "backend", "accelerate", "lightning")

_OPTIONS = {
    "graphed": [
        "clip",
        "no_optimizer",
        "scaler_off",
        "optimizer=off",
        "backward=off",
        "verify=always",
    ],
    "backend": ["step", "emptied_late"],
    "accelerate": ["graphed_step", "clip", "bf16", "kept_gradients"],
    "lightning": ["clip", "bf16"],
}
_ALONE = {"no_optimizer": {"clip", "scaler_off"}, "bf16": {"clip"}}  # fused optimizers unscale themselves

_SHORT = {"lightning": (12, 15)}


@st.composite
def cases(
    draw: st.DrawFn,
    loop: str | None = None,
    without: frozenset[str] = frozenset(),
    only: frozenset[str] = frozenset(),
) -> Case:
    """A training run.

    Args:
        draw: of hypothesis.
        loop: its kind of loop, None for any.
        without: features that it does not have; "accelerate: step fgsm" is meant for that kind of loop only.
        only: blocks, steps and changes of which it has one at least, if there are any.
    """
    kind = draw(st.sampled_from(LOOPS)) if loop is None else loop
    without |= {name.split(": ")[1] for name in without if name.startswith(f"{kind}: ")}
    blocks_left, step_left, changes_left = (
        [part for part in table.values() if f"{what} {part.name}" not in without]
        for what, table in (("block", BLOCKS), ("step", STEP | NUMBERS), ("change", CHANGES))
    )
    accumulate = draw(st.sampled_from([1, 1, 1, 1, 1, 2, 3]))
    options = _options(draw, kind, without)
    batches = _batches(draw, kind, without)
    optimizer, taken = _optimizer(draw, kind, without), {batches.kind}
    taken |= {optimizer.kind} | ({"GROUPS"} if optimizer.groups in ("each", "named") else set())
    blocks = _some(draw, blocks_left, kind, taken, [0, 1, 1, 1, 2, 3])
    step = _some(draw, step_left, kind, taken, [0, 0, 1, 1, 1, 2])
    steps = draw(st.integers(*_SHORT.get(kind, (16, 24))))
    changes = [
        Change(name, at := draw(st.integers(steps // 4, steps - 3)), draw(st.integers(at + 1, steps - 1)))
        for name in _some(draw, changes_left, kind, taken, [0, 1, 1, 1, 2, 3])
    ]
    if only:
        what, name = draw(st.sampled_from(sorted(only))).split(" ", 1)
        if what == "change" and name not in {change.what for change in changes}:
            changes.append(Change(name, 9, draw(st.integers(10, steps - 1))))
        elif what != "change" and name not in (blocks if what == "block" else step):
            (blocks if what == "block" else step).append(name)
    return Case(
        Loop(kind, accumulate, options),
        tuple(blocks),
        batches,
        draw(st.sampled_from([name for name in LOSSES if f"loss {name}" not in without])),
        tuple(step),
        optimizer,
        tuple(changes),
        steps,
        draw(st.integers(0, 9)),
    )


def _options(draw: st.DrawFn, kind: str, without: frozenset[str]) -> tuple[str, ...]:
    if not draw(st.booleans()):
        return ()
    options: list[str] = []
    left = [option for option in _OPTIONS[kind] if f"option {option}" not in without]
    for option in draw(st.lists(st.sampled_from(left), max_size=2, unique=True)):
        if not any(option in _ALONE.get(other, ()) or other in _ALONE.get(option, ()) for other in options):
            options.append(option)
    return tuple(options)


def _batches(draw: st.DrawFn, kind: str, without: frozenset[str]) -> Batches:
    fitting = {
        name: b.weight
        for name, b in BATCHES.items()
        if (not b.loops or kind in b.loops) and f"batches {name}" not in without
    }
    return Batches(
        draw(_weighted(fitting)),
        draw(st.sampled_from([(8,), (8,), (8,), (8,), (8, 5), (8, 5, 6)])),
        draw(st.sampled_from([0, 0, 0, 3])),
        draw(st.sampled_from([0, 0, 4, 7])),
    )


def _optimizer(draw: st.DrawFn, kind: str, without: frozenset[str]) -> Optimizer:
    chosen = draw(_weighted({n: o.weight for n, o in OPTIMIZERS.items() if f"optimizer {n}" not in without}))
    fitting = {
        name: s.weight
        for name, s in SCHEDULES.items()
        if chosen not in s.apart and f"schedule {name}" not in without
    }
    if kind != "graphed":  # these see a scheduler's step of each micro-batch, too
        fitting.pop("one_cycle", None)
    weights = {name: 4.0 if name == "one" else 0.7 for name in GROUPS}
    if chosen.startswith(("own", "scheduled", "lookahead", "lion")):
        weights.pop("named")
    if "decay" not in chosen and chosen.split("_")[0] not in ("sgd", "adam", "adamw", "rmsprop"):
        weights.pop("no_decay")
    return Optimizer(
        chosen,
        draw(st.sampled_from(_prefer_fused(OPTIMIZERS[chosen].kernels))),
        draw(_weighted(weights)),
        draw(_weighted(fitting)),
    )


def _prefer_fused(kernels: tuple[str, ...]) -> list[str]:
    """Only fused kernels of these can be inside a graph; the others prove less."""
    return [*(["fused"] * (2 * len(kernels)) if "fused" in kernels else []), *kernels]


def _some(draw: st.DrawFn, parts: Iterable[Part], kind: str, taken: set[str], counts: list[int]) -> list[str]:
    names: list[str] = []
    table = {part.name: part for part in parts}
    for _ in range(draw(st.sampled_from(counts))):
        fitting = {
            name: part.weight
            for name, part in table.items()
            if part.fits(kind, taken) and not any(name in table[other].apart for other in names)
        }
        names.append(draw(_weighted(fitting)))
        taken.add(names[-1])
    return names


def _weighted(weights: Mapping[str, float]) -> st.SearchStrategy[Any]:
    """A name, by weight; shrinks towards the first one."""
    return st.sampled_from(
        [name for name, weight in weights.items() for _ in range(max(1, round(weight * 3)))]
    )
