"""Lets functions of the library raise, one in each training or some, and looks at how the training ends.

    python -m tests.planted_exceptions                                  # a sample over all front ends
    python -m tests.planted_exceptions --front lightning --sample 50 --seed 1 --jobs 8
    python -m tests.planted_exceptions --front graphed_step --all --out found.json

A training is survived where it ends with the losses, parameters, state and Python values of plain training. A function
may also end it with a `PyGraphError` that says what state training is in, but only after the step had acted: a replay
was launched, or the user's own function had run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does for the tests

import front_ends
import planting
import torch
from front_ends import FRONT_ENDS
from planting import Function

K = TypeVar("K")

CALLS = (1, 2, 7)
SECONDS = 300

SURVIVED, TOLD, MISSED = "survived", "told", "not called"

# They are the boundary itself, or they stand for a device and for PyTorch's own allocator.
# Options are read when the user makes a callback or plugin, before anything of training.
LEFT_OUT = re.compile(r"pygraph_train/(boundary|problems|config)\.py|graphs/emulated")


class Case(NamedTuple):
    """A function that raises, and at which of its calls."""

    front: str
    function: Function
    at: int

    def __str__(self) -> str:
        return f"{self.front}: {self.function}, call {self.at}"


class Outcome(NamedTuple):
    """How a training has ended: `SURVIVED`, `TOLD`, `MISSED`, or else what is wrong."""

    what: str
    text: str = ""


def in_a_process(run: Any, seconds: float = SECONDS) -> Any:
    """What `run()` returns in a process of its own, which has all that this one has imported; else a text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        pid = os.fork()
        if pid == 0:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            try:
                made = run()
            except BaseException:
                made = traceback.format_exc()
            try:
                file.write_bytes(pickle.dumps(made))
            finally:
                os._exit(0)
        ended = time.monotonic() + seconds
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "it took too long"
            time.sleep(0.02)
        return pickle.loads(file.read_bytes()) if file.exists() else "the process ended"


def cases_of(front: str) -> list[Case]:
    """Each function of the library that a training passes through, at some of its calls."""
    calls = in_a_process(lambda: planting.library_calls(lambda: FRONT_ENDS[front](True)))
    if not isinstance(calls, dict):
        raise RuntimeError(f"the training of {front} has failed without any fault: {calls}")
    return [
        Case(front, function, at)
        for function, (count, outermost) in sorted(calls.items())
        for at in CALLS
        if at <= count and at not in outermost and not LEFT_OUT.search(function.short)
    ]


def plain_of(front: str) -> Any:
    """What the training gives without the library."""
    return in_a_process(lambda: FRONT_ENDS[front](False)[0])


def outcome_of(cases: Sequence[Case], plain: Any) -> Outcome:
    """Make the training in which these functions raise."""
    found = in_a_process(lambda: _train(cases, plain))
    return Outcome(*found) if isinstance(found, (tuple, Outcome)) else Outcome("crashed", found)


def _train(cases: Sequence[Case], plain: Any) -> Outcome:
    from pygraph_train import PyGraphError

    stack: list[str] = []

    def when_hit() -> None:
        stack.extend(traceback.format_stack(limit=40)[:-2])

    found = [planting.plant(case.function, case.at, when_hit) for case in cases]
    if not any(found):
        return Outcome(MISSED, "its code is nowhere")
    try:
        made, _ = FRONT_ENDS[cases[0].front](True)
    except BaseException as error:
        if not planting.hits():
            return Outcome("crashed", traceback.format_exc())
        text = traceback.format_exc()
        told = isinstance(error, PyGraphError) and "state" in str(error)
        return Outcome(TOLD if told else "ended", text)
    if not planting.hits():
        return Outcome(MISSED)
    different = front_ends.differs(plain, made)
    return (
        Outcome("different", different + "\n" + "".join(stack))
        if different
        else Outcome(SURVIVED, f"{planting.hits()} faults")
    )


def in_processes(
    runs: Iterable[tuple[K, Callable[[], Any]]], jobs: int, seconds: float = float("inf")
) -> Iterator[tuple[K, Any]]:
    """What these return, several at a time, each in a process; as many as begin within so many seconds."""
    end = time.monotonic() + seconds
    running: dict[int, tuple[K, Path]] = {}
    waiting = list(reversed(list(runs)))
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            if time.monotonic() > end:
                waiting.clear()
            while waiting and len(running) < jobs:
                key, run = waiting.pop()
                file = Path(folder) / str(len(waiting))
                pid = os.fork()
                if pid == 0:
                    try:
                        file.write_bytes(pickle.dumps(run()))
                        os._exit(0)
                    except BaseException:
                        traceback.print_exc()
                        os._exit(1)  # the folder is the parent's to remove
                running[pid] = key, file
            if not running:
                return
            pid, status = os.wait()
            key, file = running.pop(pid)
            if status:
                print(f"{key}: the process has failed, see above", flush=True)
            else:
                yield key, pickle.loads(file.read_bytes())


def outcomes(
    trainings: Sequence[Sequence[Case]], jobs: int, seconds: float = float("inf")
) -> Iterator[tuple[Sequence[Case], Outcome]]:
    """How these trainings end: see `in_processes`."""
    fronts = {cases[0].front for cases in trainings}
    plain = dict(in_processes([(front, partial(plain_of, front)) for front in fronts], jobs))
    runs = [
        (cases, partial(outcome_of, cases, plain[cases[0].front]))
        for cases in trainings
        if cases[0].front in plain
    ]
    return in_processes(runs, jobs, seconds)


def sample(count: int, seed: int, known_of: Mapping[str, Sequence[Case]]) -> list[Case]:
    """Some cases of each front end, drawn at random."""
    fronts = list(known_of)
    draws = random.Random(seed)
    drawn: list[Case] = []
    for k, (_, known) in enumerate(sorted(known_of.items())):
        share = count // len(fronts) + (k < count % len(fronts))
        drawn += draws.sample(known, min(share, len(known)))
    return drawn


def _together(cases: Iterable[Case], faults: int) -> Iterator[Sequence[Case]]:
    """Trainings with so many of the cases in each, in the order in which the last one of each comes."""
    open_: dict[str, list[Case]] = {}
    for case in cases:
        open_.setdefault(case.front, []).append(case)
        if len(open_[case.front]) == faults:
            yield open_.pop(case.front)
    yield from open_.values()


_JOINT = "; "


def named(row: Mapping[str, str]) -> list[str]:
    """The cases of a row of --out, without the lines of their functions."""
    return [re.sub(r"\.py:\d+ ", ".py ", case) for case in row["case"].split(_JOINT)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--front", action="append", choices=list(FRONT_ENDS))
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", help="only functions whose file or name has this in it")
    parser.add_argument("--faults", type=int, default=1, help="in each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out")
    parser.add_argument(
        "--without", action="append", default=[], help="what --out of an earlier run has tried"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    front_ends.quiet()
    planting.import_all()
    for package in ("accelerate", "lightning.pytorch", "transformers"):  # for all forks
        importlib.import_module(package)
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2, requires_grad=True))
    torch._dynamo.reset()
    fronts = options.front or list(FRONT_ENDS)
    known = dict(in_processes([(front, partial(cases_of, front)) for front in fronts], options.jobs))
    fronts = list(known)
    if options.all or options.only:
        cases = [case for front in fronts for case in known[front]]
    else:
        cases = sample(options.sample, options.seed, known)
    random.Random(options.seed).shuffle(cases)
    if options.only:
        cases = [case for case in cases if options.only in str(case.function)]
    tried = {
        case for file in options.without for row in json.loads(Path(file).read_text()) for case in named(row)
    }
    cases = [case for case in cases if not tried.issuperset(named({"case": str(case)}))]
    counts: Counter[tuple[str, str]] = Counter()
    rows = []
    trainings = list(_together(cases, options.faults))
    for planted, outcome in outcomes(trainings, options.jobs, options.seconds):
        counts[planted[0].front, outcome.what] += 1
        rows.append({"case": _JOINT.join(map(str, planted)), "outcome": outcome.what, "text": outcome.text})
        if outcome.what not in (SURVIVED, MISSED):
            print(f"{outcome.what}: {rows[-1]['case']}", flush=True)
    for front in fronts:
        print(front, {what: n for (f, what), n in sorted(counts.items()) if f == front})
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
