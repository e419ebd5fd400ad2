"""Runs thousands of cases in several processes, and tells which differ and of which likely causes.

python -m tests.generator.hunt --cases 5000 --seed 1 --processes 4 [--loop graphed] [--json FILE] [--save FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .again import self_contained
from .case import Case
from .known import KNOWN
from .run import Outcome, case_from, compare
from .script import script_of
from .shrink import shrunk
from .strategies import LOOPS
from .suite import Tally, cause, each_case

_CHUNK = 40  # cases of one process; a new one starts with a clean compiler and no memory of the old one
_SHRINKS = 45  # attempts for one failing case
_HANG = "hangs"


@dataclass(frozen=True)
class _Task:
    """What a process does: cases of a seed, or one case made smaller."""

    seed: int
    count: int = 0
    case: str = ""
    difference: str = ""


@dataclass
class _Worker:
    """A process, and the case that it is at."""

    task: _Task
    process: Any
    pipe: Any
    case: str = ""
    since: float = field(default_factory=time.monotonic)
    done: int = 0


def _work(task: _Task, pipe: Any, loop: str | None, without: frozenset[str], only: frozenset[str]) -> None:
    """In the process."""
    torch.set_num_threads(1)  # there are as many processes as cores

    def one(case: Case) -> Outcome:
        pipe.send(("begin", str(case), None))
        try:
            outcome = compare(case)
        except Exception as error:  # the generator's own mistake: a script that is no Python, say
            outcome = Outcome(
                f"the generator failed: {type(error).__name__}: {error}", False, 0, (), None, 0.0
            )
        return outcome

    if task.case:
        alike = cause(task.difference)
        smallest = shrunk(
            case_from(task.case),
            lambda c: (found := one(c).difference) is not None and cause(found) == alike,
            budget=_SHRINKS,
        )
        pipe.send(("shrunk", str(smallest), one(smallest)))
    else:
        each_case(
            loop,
            task.count,
            task.seed,
            lambda case: pipe.send(("end", str(case), one(case))),
            without=without,
            only=only,
        )
    pipe.send(("over", "", None))


class Hunt:
    """The work that is left, the processes at work, and what they found.

    Args:
        count: cases to run.
        seed: of the choice of all cases.
        processes: that work at the same time.
        limit: seconds after which a case counts as hanging.
        minutes: after which no more cases are run.
        loop: the kind of loop, None for all.
        without, only: features that no case has, and of which each case has one.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        processes: int,
        *,
        limit: float = 120.0,
        minutes: float = math.inf,
        loop: str | None = None,
        without: frozenset[str] = frozenset(),
        only: frozenset[str] = frozenset(),
    ) -> None:
        rng = random.Random(seed)
        self.count, self.limit = count, limit
        self.tally = Tally()
        self.slowest: list[tuple[float, str]] = []
        self.causes: dict[
            str, tuple[Case, str, int]
        ] = {}  # of the smallest case: case, difference, found so often
        self._given = (loop, without, only)
        self._waiting = [_Task(rng.randrange(2**31), min(_CHUNK, count - k)) for k in range(0, count, _CHUNK)]
        self._workers: list[_Worker] = []
        self._processes = processes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._started = time.monotonic()
        self._until = self._started + 60 * minutes

    def run(self) -> None:
        """Work until nothing or no time is left."""
        shown = 0.0
        while self._waiting or self._workers:
            if time.monotonic() > self._until:
                return self._stop()
            while self._waiting and len(self._workers) < self._processes:
                self._start(self._waiting.pop(0))
            pipes = [worker.pipe for worker in self._workers]
            for pipe in multiprocessing.connection.wait(pipes, timeout=1.0):
                self._hear(next(w for w in self._workers if w.pipe is pipe))
            for worker in list(self._workers):
                if time.monotonic() - worker.since > self.limit:
                    self._give_up(worker, f"{_HANG} for more than {self.limit:.0f} s")
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(self.progress(), flush=True)

    def progress(self) -> str:
        """One line."""
        minutes = (time.monotonic() - self._started) / 60
        rate = self.tally.cases / max(minutes, 1e-9)
        return f"{self.tally}, {len(self.causes)} causes, {minutes:.1f} min, {rate:.0f} cases/min"

    def _start(self, task: _Task) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(task, theirs, *self._given), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(task, process, ours))

    def _hear(self, worker: _Worker) -> None:
        try:
            what, text, outcome = worker.pipe.recv()
        except (EOFError, ConnectionError):
            return self._give_up(worker, "the process died")
        worker.since = time.monotonic()
        if what == "begin":
            worker.case = text
        elif what == "end":
            worker.done += 1
            self._note(case_from(text), outcome)
        elif what == "shrunk":
            self._found(case_from(text), outcome.difference or worker.task.difference)
        else:
            self._end(worker)

    def _note(self, case: Case, outcome: Outcome) -> None:
        self.tally.add(case, outcome)
        self.slowest = sorted([*self.slowest, (outcome.seconds, str(case))], reverse=True)[:5]
        if outcome.difference is None:
            return
        features = set(case.features())
        for name, (smallest, difference, count) in self.causes.items():
            if cause(difference) == cause(outcome.difference) and features >= _special(smallest):
                self.causes[name] = (smallest, difference, count + 1)
                return
        self._waiting.insert(0, _Task(0, case=str(case), difference=outcome.difference))

    def _found(self, case: Case, difference: str) -> None:
        name = f"{cause(difference)} | {', '.join(sorted(_special(case))) or 'plainest case'}"
        known = self.causes.get(name)
        if known is None:
            print(f"\n{name}\n  {difference[:200]}\n  {case}\n", flush=True)
        self.causes[name] = (case, difference, known[2] + 1 if known else 1)

    def _give_up(self, worker: _Worker, why: str) -> None:
        """The case of this process hangs or has killed it."""
        worker.process.kill()
        if worker.task.case:  # while it was made smaller: the case itself is told
            self._found(case_from(worker.task.case), worker.task.difference)
        elif worker.case:
            self.tally.add(case_from(worker.case), Outcome(why, False, 0, (), None, self.limit))
            self._found(case_from(worker.case), why)
            left = worker.task.count - worker.done - 1
            if left > 0:
                self._waiting.append(_Task(worker.task.seed + 1, left))
        self._end(worker)

    def _stop(self) -> None:
        """The time is over. Cases that are under way do not count; what is being made smaller is told as it is."""
        for task in [*self._waiting, *(worker.task for worker in self._workers)]:
            if task.case:
                self._found(case_from(task.case), task.difference)
        for worker in list(self._workers):
            worker.process.kill()
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join()


def _special(case: Case) -> set[str]:
    """What sets a small case apart from the plainest one."""
    return set(case.features()) - set(Case(case.loop).features()[1:]) - {"loop graphed"}


def main() -> int:
    """The command. Its exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.generator.hunt", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--loop", choices=LOOPS, default=None)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a case hangs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no more cases are run")
    parser.add_argument("--without", default="", help='features, comma-separated: "step moco,change sdpa"')
    parser.add_argument("--only", default="", help="cases with one of these features")
    parser.add_argument("--all", action="store_true", help="known differences, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", type=Path, help="a folder for one self-contained script per cause")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: at least one process has to work")
    names = {name for name in args.without.split(",") if name} | (set() if args.all else set(KNOWN))
    only = frozenset(name for name in args.only.split(",") if name)
    hunt = Hunt(
        args.cases,
        args.seed,
        args.processes,
        limit=args.limit,
        minutes=args.minutes,
        loop=args.loop,
        without=frozenset(names),
        only=only,
    )
    hunt.run()
    _tell(hunt)
    if args.json is not None:
        args.json.write_text(json.dumps(_as_data(hunt, vars(args)), indent=1))
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        for k, (name, (case, difference, _)) in enumerate(hunt.causes.items()):
            text = f"# {name}\n# {difference[:200]}\n{self_contained(case)}"
            (args.save / f"cause_{k:02d}.py").write_text(text)
    return int(bool(hunt.causes))


def _tell(hunt: Hunt) -> None:
    print(f"\n{hunt.progress()}\n\nfeatures: cases, of these with replays")
    for name, count in sorted(hunt.tally.features.items()):
        print(f"  {name:<36} {count:5d} {hunt.tally.replays[name]:5d}")
    print("\nslowest", *(f"{seconds:6.1f} s  {case}" for seconds, case in hunt.slowest), sep="\n  ")
    for name, (case, difference, count) in sorted(hunt.causes.items(), key=lambda item: -item[1][2]):
        print(f"\n{'-' * 100}\n{name}: {count} times\n{difference[:300]}\n\n{script_of(case)}")
        print(f"python -m tests.generator.again {shlex.quote(str(case))}")


def _as_data(hunt: Hunt, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "options": {name: str(value) for name, value in options.items()},
        "cases": hunt.tally.cases,
        "replayed": hunt.tally.replayed,
        "rounded": hunt.tally.rounded,
        "features": Counter(hunt.tally.features),
        "replays": Counter(hunt.tally.replays),
        "causes": [
            {"name": name, "case": str(case), "difference": difference, "count": count}
            for name, (case, difference, count) in hunt.causes.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
