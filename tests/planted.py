"""Runs tests with a fault planted in the library, and lists those that pass although they promise to notice.

    python -m tests.planted                           # each fault, and the tests that are not slow
    python -m tests.planted --fault "guards always hold"
    python -m tests.planted tests/test_regions.py -n 2  # other arguments are pytest's
    python -m tests.planted -m slow

One run of pytest plants them all: a test runs once for each fault that it promises to notice. Where every
capture fails, each test promises to notice if it tries to capture something; one that has to pass all the
same is marked `passes_without_graphs("why")`, and is left out. Every other fault is noticed by the tests that
are marked `notices("name of the fault")`. Examples and scripts that a test runs in other processes have no
fault.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

NOTHING_CAPTURED = "nothing is captured"

_faults = pytest.StashKey[list[str]]()

# -- what pytest runs: `-p tests.planted --plant NAME --results FILE` ----------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", action="append", help="the name of a fault; without it each in turn")
    parser.addoption("--results", help="the file that gets a line for each test and fault")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from .faults import FAULTS

    only = config.getoption("plant")
    for item in items:
        faults = [name for mark in item.iter_markers("notices") for name in mark.args]
        for name in faults:
            if name not in FAULTS:
                raise pytest.UsageError(f"{item.nodeid} is to notice {name!r}, which is no fault")
        if item.get_closest_marker("passes_without_graphs") is None:
            faults.append(NOTHING_CAPTURED)
        item.stash[_faults] = [name for name in faults if only is None or name in only]
    items[:] = [item for item in items if item.stash[_faults]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for name in item.stash[_faults]:
        with _planted(name) as tried:
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        line = {
            "test": item.nodeid,
            "fault": name,
            "promised": tried() > 0,
            "noticed": any(report.failed for report in reports),
            "skipped": any(report.skipped for report in reports),
        }
        with Path(item.config.getoption("results")).open("a") as file:
            file.write(json.dumps(line) + "\n")
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@contextmanager
def _planted(name: str) -> Iterator[Callable[[], int]]:
    """Plants a fault. Gives a function that says whether a test came to the place: how often, or just 1."""
    from .faults import FAULTS, nothing_is_captured

    with pytest.MonkeyPatch.context() as patch:
        if name == NOTHING_CAPTURED:
            yield nothing_is_captured(patch)
        else:
            FAULTS[name](patch)
            yield lambda: 1


# -- the command --------------------------------------------------------------------------------------


def results(faults: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """Run pytest with these faults in turn, or with all: what became of each test and fault."""
    with tempfile.TemporaryDirectory(prefix="pygraph_planted_") as folder:
        path = Path(folder) / "results"
        own = ["-p", "tests.planted", "--results", str(path), *(f"--plant={fault}" for fault in faults)]
        quiet = ["-q", "--no-header", "--tb=no", "--no-summary", "-p", "no:cacheprovider", "-m", "not slow"]
        ended = subprocess.run([sys.executable, "-m", "pytest", *own, *quiet, *arguments], check=False)
        if ended.returncode not in (0, 1, 5):  # passed, failed, nothing to run
            sys.exit(f"pytest ended with {ended.returncode}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """The command."""
    from .faults import FAULTS

    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.splitlines()[0])
    choices = [NOTHING_CAPTURED, *FAULTS]
    parser.add_argument("--fault", choices=choices, action="append", default=[], help="only this one")
    args, arguments = parser.parse_known_args()
    lines = [line for line in results(args.fault, arguments) if line["promised"] and not line["skipped"]]
    promised = Counter(line["fault"] for line in lines)
    print()
    for fault, count in promised.items():
        passed = [line["test"] for line in lines if line["fault"] == fault and not line["noticed"]]
        print(f"{fault}: {count} tests promise to notice, {len(passed)} of them pass", *passed, sep="\n    ")
    return int(not all(line["noticed"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
