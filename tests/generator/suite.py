"""Runs many cases of hypothesis in this process, and tells of those that differ."""

from __future__ import annotations

import gc
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from .case import Case
from .known import KNOWN
from .run import Outcome, compare
from .script import script_of
from .shrink import shrunk
from .strategies import cases

__all__ = ["Tally", "cause", "check", "each_case", "explained"]


@dataclass
class Tally:
    """What came out of many cases.

    Attributes:
        cases: how many ran.
        replayed: how many of them replayed something; the others prove nothing.
        rounded: how many differ as `torch.compile` does, in last bits mostly.
        ended: how many were ended by an exception in plain training.
        short: how many of these replayed nothing, because the exception came first.
        features: how often each feature was there.
        replays: how often it was there in a case that replayed.
        failed: cases that differ, and how.
    """

    cases: int = 0
    replayed: int = 0
    rounded: int = 0
    ended: int = 0
    short: int = 0
    features: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[Case, str]] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count a case."""
        self.cases += 1
        self.replayed += outcome.replays > 0
        self.rounded += outcome.rounded
        self.ended += outcome.raised is not None
        self.short += outcome.raised is not None and not outcome.replays
        self.features.update(case.features())
        if outcome.replays:
            self.replays.update(case.features())
        if outcome.difference is not None:
            self.failed.append((case, outcome.difference))

    @property
    def share(self) -> float:
        """Of cases that replayed something, among those that were long enough."""
        return self.replayed / max(1, self.cases - self.short)

    def __str__(self) -> str:
        told = f"{self.cases} cases, {self.share:.0%} replayed something, {len(self.failed)} differ"
        told += f", {self.rounded} as torch.compile itself" if self.rounded else ""
        return f"{told}, {self.ended} ended by an exception in plain training"


def each_case(
    loop: str | None,
    count: int,
    seed: int,
    body: Callable[[Case], None],
    *,
    without: frozenset[str] = frozenset(KNOWN),
    only: frozenset[str] = frozenset(),
) -> None:
    """Call `body` with `count` cases; the same ones for the same arguments."""

    seen: set[Case] = set()
    errors: list[BaseException] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # `shrunk` has a budget, which shrinking by hypothesis has not
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(loop, without, only))
    def one(case: Case) -> None:
        if errors or case in seen:  # hypothesis runs a case that raised again
            return
        seen.add(case)
        try:
            body(case)
        except BaseException as error:  # a time limit of pytest, too
            errors.append(error)

    gc.collect()
    gc.freeze()  # each case collects garbage, and need not go through what the process had before
    try:
        one()
    finally:
        gc.unfreeze()
    if errors:
        raise errors[0]


def check(loop: str, count: int, seed: int, *, share: float) -> Tally:
    """Compare `count` cases; fails with the smallest script of the first one that differs.

    Args:
        loop: the kind of loop.
        count: how many cases.
        seed: of the choice of cases.
        share: of the cases that have to replay something.
    """
    tally = Tally()
    each_case(loop, count, seed, lambda case: tally.add(case, compare(case)))
    print(f"generator, {loop}, seed {seed}: {tally}")
    assert not tally.failed, f"{tally}\n{explained(*tally.failed[0])}"
    assert tally.share >= share, f"too few cases prove anything: {tally}"
    return tally


def explained(case: Case, difference: str) -> str:
    """The smallest case that differs like this one: its script, and how to run it again."""
    alike = cause(difference)
    smallest = shrunk(case, lambda c: (found := compare(c).difference) is not None and cause(found) == alike)
    told = compare(smallest).difference or difference
    return (
        f"{told}\n\n{script_of(smallest)}\n"
        f"Run it again with\n    python -m tests.generator.again {shlex.quote(str(smallest))}\n"
        f"It was found as\n    {case}"
    )


def cause(difference: str) -> str:
    """What stays of a difference without its numbers: cases of one cause have it in common, mostly."""
    if " became the run ended with: " in difference:
        return "ended with " + difference.split(" became the run ended with: ")[1][:60]
    name = difference.split(": tensor(")[0]
    if name.startswith("a warning"):
        return name[:110]
    place, _, rest = name.partition(": ")
    if place.startswith(("step", "end", "closed")):
        return "values" if rest.split("[")[0] in _STATE else rest.split("[")[0][:60]
    return place[:60]


_STATE = ("result", "parameters", "gradients", "buffers", "optimizer", "results that were kept")
