"""Makes a case that differs as small as it can be. Each attempt is two trainings, so that there is a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .case import Batches, Case, Loop, Optimizer

__all__ = ["shrunk"]


def shrunk(case: Case, differs: Callable[[Case], bool], *, budget: int = 60) -> Case:
    """The smallest case found in `budget` attempts for which `differs` holds, as it does for `case`."""
    tried = {case}
    progress = True
    while progress and budget:
        progress = False
        for smaller in _smaller(case):
            if smaller in tried or not budget:
                continue
            tried.add(smaller)
            budget -= 1
            if differs(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first."""

    def replaced(**values: Any) -> Case:
        return dataclasses.replace(case, **values)

    for name in ("blocks", "step", "changes"):
        found = getattr(case, name)
        if len(found) > 1:
            yield replaced(**{name: ()})
    plainest = Case()
    if case.loop.options or case.loop.accumulate > 1:
        yield replaced(loop=Loop(case.loop.kind))
    for name in ("batches", "optimizer", "loss", "seed"):
        if getattr(case, name) != getattr(plainest, name):
            yield replaced(**{name: getattr(plainest, name)})
    for name in ("blocks", "step", "changes"):
        found = getattr(case, name)
        for k in range(len(found)):
            yield replaced(**{name: found[:k] + found[k + 1 :]})
    for name, default in (("batches", Batches()), ("optimizer", Optimizer()), ("loop", Loop(case.loop.kind))):
        for field in dataclasses.fields(default):
            value = getattr(getattr(case, name), field.name)
            if value != getattr(default, field.name):
                yield replaced(
                    **{
                        name: dataclasses.replace(
                            getattr(case, name), **{field.name: getattr(default, field.name)}
                        )
                    }
                )
    if case.loop.kind != "lightning" and case.steps > 18:
        yield replaced(steps=18)
    for k, change in enumerate(case.changes):
        for at, until in ((10, 14), (10, max(change.until, 11)), (8, 9)):
            moved = dataclasses.replace(change, at=at, until=until)
            if moved != change and until < case.steps and abs(at - 10) < abs(change.at - 10):
                yield replaced(changes=(*case.changes[:k], moved, *case.changes[k + 1 :]))
