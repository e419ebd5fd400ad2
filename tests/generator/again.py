"""Runs one case again: `python -m tests.generator.again 'Case(...)' [--save FILE]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .case import Case
from .run import case_from, compare
from .script import script_of
from .suite import explained

__all__ = ["main", "self_contained"]

_COMPARE = """

if __name__ == "__main__":
    runs = [play(train, library=library, options={options!r}, seed={seed}) for library in (False, True)]
    print(difference(*runs) or "EQUAL")
    print("replays:", runs[1].replays, *runs[1].reasons, sep="\\n  ")
"""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.generator.again", description=__doc__)
    parser.add_argument("case", help="as it was printed")
    parser.add_argument("--save", type=Path, help="write a script that needs torch and pygraph_train only")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller case that differs, too")
    args = parser.parse_args()
    case = case_from(args.case)
    if args.save is not None:
        args.save.write_text(self_contained(case))
    outcome = compare(case)
    print(script_of(case))
    print("DIFFERENT:" if outcome.difference else "EQUAL", outcome.difference or "")
    print(f"replays: {outcome.replays}", *outcome.reasons, sep="\n  ")
    if outcome.difference and args.shrink:
        print(explained(case, outcome.difference))
    return int(outcome.difference is not None)


def self_contained(case: Case) -> str:
    """The script of a case with what runs and compares it."""
    here = Path(__file__).parent
    observe = (here / "observe.py").read_text().replace("from __future__ import annotations\n", "")
    lines = (here / "play.py").read_text().split("\n")
    played = "\n".join(line for line in lines if not line.startswith(("from .", "from __future__")))
    options = tuple(option for option in case.loop.options if "=" in option)
    # compiled code is looked up by line: the script comes first
    return script_of(case) + observe + played + _COMPARE.format(options=options, seed=case.seed)


if __name__ == "__main__":
    sys.exit(main())
