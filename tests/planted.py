"""Runs tests with a fault planted in the library, and lists those that pass although they promise to notice.

    python -m tests.planted                           # each fault in turn
    python -m tests.planted --fault "guards always hold"
    python -m tests.planted tests/test_regions.py -n 2  # other arguments are pytest's

Where every capture fails, a test promises to notice when it tries to capture something; one that has to pass
all the same is marked `passes_without_graphs("why")`. Every other fault is noticed by the tests that are
marked `notices("name of the fault")`. Examples and scripts that a test runs in other processes have no fault.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

NOTHING_CAPTURED = "nothing is captured"

_tried: Callable[[], int] = lambda: 0  # noqa: E731
_before = pytest.StashKey[int]()
_failed = pytest.StashKey[bool]()

# -- what pytest runs: `-p tests.planted --plant NAME --results FILE` ----------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", help="the name of a fault")
    parser.addoption("--results", help="the file that gets a line for each test")


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(_planted(config.getoption("plant")))


def _planted(name: str) -> Callable[[], None]:
    global _tried
    from .faults import FAULTS, nothing_is_captured

    patch = pytest.MonkeyPatch()
    if name == NOTHING_CAPTURED:
        _tried = nothing_is_captured(patch)
    else:
        FAULTS[name](patch)
    return patch.undo


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from .faults import FAULTS

    name = config.getoption("plant")
    for item in items:
        for marked in _noticed(item):
            if marked not in FAULTS:
                raise pytest.UsageError(f"{item.nodeid} is to notice {marked!r}, which is no fault")
    if name != NOTHING_CAPTURED:
        items[:] = [item for item in items if name in _noticed(item)]


def _noticed(item: pytest.Item) -> list[str]:
    return [name for mark in item.iter_markers("notices") for name in mark.args]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.when == "setup":
        item.stash[_before] = item.stash.get(_before, _tried())
    item.stash[_failed] = item.stash.get(_failed, False) or not report.passed
    if report.when == "teardown":
        _write(item)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_before] = _tried()


def _write(item: pytest.Item) -> None:
    excuse = item.get_closest_marker("passes_without_graphs")
    promised = bool(_noticed(item))
    if item.config.getoption("plant") == NOTHING_CAPTURED:
        promised = _tried() > item.stash[_before]
    line = {
        "test": item.nodeid,
        "promised": promised,
        "noticed": item.stash[_failed],
        "excuse": None if excuse is None else excuse.args[0],
    }
    with Path(item.config.getoption("results")).open("a") as file:
        file.write(json.dumps(line) + "\n")


# -- the command --------------------------------------------------------------------------------------


def missed(fault: str, arguments: list[str]) -> tuple[int, list[str], dict[str, str]]:
    """Run pytest with a fault.

    Returns:
        How many tests promise to notice, those that do not, and those that need not with the reason.
    """
    with tempfile.TemporaryDirectory(prefix="pygraph_planted_") as folder:
        results = Path(folder) / "results"
        own = ["-p", "tests.planted", "--plant", fault, "--results", str(results)]
        quiet = ["-q", "--no-header", "--tb=no", "--no-summary", "-p", "no:cacheprovider"]
        ended = subprocess.run([sys.executable, "-m", "pytest", *own, *quiet, *arguments], check=False)
        if ended.returncode not in (0, 1, 5):  # passed, failed, nothing to run
            sys.exit(f"pytest ended with {ended.returncode}")
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    promised = [line for line in lines if line["promised"]]
    passed = [line for line in promised if not line["noticed"]]
    excused = {line["test"]: line["excuse"] for line in passed if line["excuse"] is not None}
    return len(promised), [line["test"] for line in passed if line["test"] not in excused], excused


def promised(faults: Iterable[str]) -> list[str]:
    """Those that a test is marked with; `tests/test_generator.py` looks for the others."""
    marked = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.notices":
                marked |= {ast.literal_eval(argument) for argument in node.args}
    return [fault for fault in faults if fault in marked]


def main() -> int:
    """The command."""
    from .faults import FAULTS

    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=[NOTHING_CAPTURED, *FAULTS], help="only this one")
    args, arguments = parser.parse_known_args()
    blind = 0
    told = []
    for fault in [NOTHING_CAPTURED, *promised(FAULTS)] if args.fault is None else [args.fault]:
        print(f"\nplanted: {fault}", flush=True)
        count, unnoticed, excused = missed(fault, arguments)
        blind += len(unnoticed)
        told.append(f"{fault}: {count} tests promise to notice, {len(unnoticed)} of them pass")
        told += [f"    {test}" for test in unnoticed]
        told += [f"    {test} has a reason to pass: {why}" for test, why in excused.items()]
    print("", *told, sep="\n")
    return int(blind > 0)


if __name__ == "__main__":
    sys.exit(main())
