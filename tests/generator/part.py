"""A part of a training script: lines of Python for each of the places where a script can have some."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Part", "by_name"]


@dataclass(frozen=True)
class Part:
    """Lines for the places of a script, see `script.py`, in the words that a user would write.

    Attributes:
        name: how a case calls it.
        module: at the top of the script.
        init: in `Net.__init__`.
        forward: in `Net.forward`, where `h` is the hidden activation (rows, 8) and `x` the input.
        setup: after the model `model` was made.
        ready: after optimizer and step were made.
        begin: first in the step, where `x`, `y` and `batch` are known.
        context: an expression for a context manager around forward and loss.
        call: the forward, where it is another expression than `net(x)`.
        loss: after `loss` was computed from `out`.
        extra: more results, `"name": expression` each.
        before: in the loop, before each step `i` with `batch`.
        after: in the loop, after each step with `result`.
        once: in the loop, before the one step where a change happens.
        back: in the loop, before the step where a change ends.
        around: an expression for a context manager around the steps while a change lasts.
        end: after the last step.
        raises: the step may raise, and the loop goes on.
        loops: the kinds of loops that can have it; empty for all.
        apart: parts that it cannot stand beside.
        weight: how often it is taken, relative to others.
    """

    name: str
    module: str = ""
    init: str = ""
    forward: str = ""
    setup: str = ""
    ready: str = ""
    begin: str = ""
    context: str = ""
    call: str = ""
    loss: str = ""
    extra: str = ""
    before: str = ""
    after: str = ""
    once: str = ""
    back: str = ""
    around: str = ""
    end: str = ""
    raises: bool = False
    loops: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    weight: float = 1.0

    def fits(self, loop: str, taken: set[str]) -> bool:
        """Whether a case with this loop and these parts can have it, too."""
        return (
            (not self.loops or loop in self.loops) and self.name not in taken and not set(self.apart) & taken
        )


def by_name(*parts: Part) -> dict[str, Part]:
    """A table of parts; two of one name are a mistake."""
    table = {part.name: part for part in parts}
    assert len(table) == len(parts), "two parts have one name"
    return table
