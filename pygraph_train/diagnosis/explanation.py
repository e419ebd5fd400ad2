"""What `explain` found, as an object and as text."""

from __future__ import annotations

import linecache
import textwrap
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_train.problems import Problem

_WIDTH = 100


@dataclass(frozen=True)
class Explanation:
    """How the phases of one training step will run, and what stands in the way. Prints as plain text.

    Attributes:
        name: the name of the function that was explained.
        obstacles: what keeps a phase from having a graph, and each line that cuts the forward into several graphs.
            Empty where nothing stands in the way.
        notes: sentences about what could not be seen, and about what was run.
        gain: a sentence about the time that graphs save, or about why that was not measured.
        plan: which phases will run from graphs, as reports name it.
        graphs_of_forward: how many graphs the forward is; each has a backward of its own.
    """

    name: str
    obstacles: tuple[Problem, ...]
    notes: tuple[str, ...]
    gain: str
    plan: str = ""
    graphs_of_forward: int = 0

    @property
    def is_one_graph(self) -> bool:
        """Whether no obstacle was found."""
        return not self.obstacles

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and None, for `json.dumps`."""
        rows = [
            {"reason": p.reason, "where": p.where, "line": source_line(p.where), "fix": p.fix}
            for p in self.obstacles
        ]
        return {
            "name": self.name,
            "is_one_graph": self.is_one_graph,
            "plan": self.plan,
            "graphs_of_forward": self.graphs_of_forward,
            "obstacles": rows,
            "notes": list(self.notes),
            "gain": self.gain,
        }

    def __str__(self) -> str:
        blocks = [self._headline(), self._plan()]
        blocks += [_block(number, problem) for number, problem in enumerate(self.obstacles, start=1)]
        blocks.append("\n".join(filled(note, "- ") for note in (*self.notes, self.gain) if note))
        return "\n\n".join(block for block in blocks if block)

    def _headline(self) -> str:
        count = len(self.obstacles)
        if count == 0:
            return f"No obstacle was found in {self.name}."
        obstacles = "1 obstacle keeps" if count == 1 else f"{count} obstacles keep"
        return f"{obstacles} {self.name} from being one graph."

    def _plan(self) -> str:
        steps = "Its steps will" if torch.cuda.is_available() else "On a GPU its steps will"
        if self.graphs_of_forward < 2:
            return f"{steps} run as {self.plan}." if self.plan else ""
        return f"{steps} run as {self.plan}, where the forward is {self.graphs_of_forward} graphs."


def source_line(where: str | None) -> str | None:
    """The line of source at `file:line` without its indentation, None where the file does not have it."""
    if where is None:
        return None
    file, _, number = where.rpartition(":")
    return (linecache.getline(file, int(number)).strip() or None) if number.isdigit() else None


def _block(number: int, problem: Problem) -> str:
    lines = [f"{number}. {problem.where or 'no single line'}"]
    source = source_line(problem.where)
    if source is not None:
        lines.append(f"       {source}")
    lines.append(filled(_sentence(problem.reason), "   Why: "))
    if problem.fix:
        lines.append(filled(_sentence(problem.fix), "   Change: "))
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text + ("" if text.endswith((".", "!", "?")) else ".")


def filled(text: str, start: str) -> str:
    """A paragraph in lines of at most 100 characters. The first one begins with `start`, the others are indented."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
