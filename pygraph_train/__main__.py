"""`python -m pygraph_train explain train.py:example`, `... bench train.py` and `... doctor`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pygraph_train import __version__

_CONVENTION = (
    "The function takes no arguments. It returns the step and what the step is called with, as a tuple: "
    "(lightning_module, batch), (graphed_step, batch) or (step_fn, batch). Or it calls pygraph_train.explain itself, "
    "with model= and optimizer=, and returns the result."
)


class _Mistake(Exception):
    """The command was called wrongly. The message is a sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands.

    Args:
        arguments: those of the command line; None takes them from `sys.argv`.

    Returns:
        The exit status. `explain`: 0 where nothing keeps the step from being one graph, else 1. `doctor`: 0 where
        steps can run from CUDA graphs on this machine, else 1. `bench`: 0 where both runs were measured. All: 2
        where the command was called wrongly, or a run of `bench` failed.
    """
    parser = argparse.ArgumentParser(prog="python -m pygraph_train")
    parser.add_argument("--version", action="version", version=f"pygraph-train {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="say how a training step will run, and what stands in the way",
        description=_CONVENTION,
    )
    explain.add_argument(
        "target", metavar="script.py:function", help="a file or module, and a function in it"
    )
    doctor = commands.add_parser("doctor", help="list versions and settings, and say what works here")
    bench = commands.add_parser(
        "bench", help="run a training script without and with pygraph-train, and compare"
    )
    bench.add_argument("--steps", type=int, default=0, help="end runs after so many optimizer steps")
    for command in (explain, bench, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("script", metavar="script.py", help="a file, which runs as python script.py runs it")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script; those of bench precede it")
    options = parser.parse_args(arguments)
    try:
        if options.command == "bench":
            result, good = _bench(options), True
        else:
            result, good = _doctor() if options.command == "doctor" else _explain(options.target)
    except _Mistake as mistake:
        print(f"pygraph: {mistake}", file=sys.stderr)
        return 2
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)
    return 0 if good else 1


def _doctor() -> tuple[Any, bool]:
    try:
        from pygraph_train.diagnosis.doctor import check
    except ImportError as error:
        raise _Mistake(f"a package that pygraph-train needs cannot be imported: {error}") from error
    found = check()
    return found, found.usable


def _bench(options: argparse.Namespace) -> Any:
    from pygraph_train.diagnosis.bench import compare

    if "--steps" in options.arguments:
        print("pygraph: --steps stands behind the script, so it is the script's", file=sys.stderr)
    try:
        return compare(options.script, options.arguments, options.steps)
    except ValueError as error:
        raise _Mistake(str(error)) from error


def _explain(target: str) -> tuple[Any, bool]:
    with contextlib.redirect_stdout(sys.stderr):  # what the step prints
        return _explained(_function(target)(), target)


def _explained(made: Any, target: str) -> tuple[Any, bool]:
    from pygraph_train import Explanation, explain

    if isinstance(made, tuple) and made and not isinstance(made[0], Explanation):
        try:
            made = explain(*made)
        except TypeError as error:
            raise _Mistake(f"{target} returned something that cannot be explained: {error}") from error
    if not isinstance(made, Explanation):
        raise _Mistake(f"{target} returned a value of the type {type(made).__name__}. {_CONVENTION}")
    return made, made.is_one_graph


def _function(target: str) -> Any:
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise _Mistake(f"{target!r} names no function; write script.py:function. {_CONVENTION}")
    module = _loaded(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise _Mistake(f"{place} has no function {name}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise _Mistake(f"{target} cannot be called without arguments: {error}. {_CONVENTION}") from error
    return function


def _loaded(place: str) -> ModuleType:
    """The module of a file or of a dotted name. What stands under `if __name__ == "__main__"` does not run."""
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise _Mistake(f"there is no module {place}: {error}") from error
    path = Path(place).resolve()
    if not path.is_file():
        raise _Mistake(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))  # for what the script imports beside it, as python script.py does
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_explained"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
