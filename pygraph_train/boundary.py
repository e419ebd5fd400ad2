"""The one boundary between the library and the training: nothing of ours ends a step that the user's code can make.

A piece of a step is made by the library (`ours`) or as the user wrote it (`plain`). While `ours` runs, it notes how far
it has come: `executes` just before something is executed that cannot be made twice (the user's function, a replay), and
`done` once the piece is made. `Boundary.make` reads that where an exception of the library comes out:

| noted         | what follows |
|---|---|
| nothing       | nothing has happened: `plain` makes the piece |
| `done`        | the piece is made: its result is returned |
| `executes` only | a `PyGraphError` says what state training is in |

What the user's code raises goes through unchanged.
"""

from __future__ import annotations

import dis
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from pygraph_train.problems import NotLegal, Problem, PyGraphError, first_line, is_library_file

log = logging.getLogger("pygraph_train")

R = TypeVar("R")
E = TypeVar("E", bound=Exception)

STEP = "a step without a graph"
REPLAY = "a replay"
UPDATE = "the optimizer's update"
FORWARD, BACKWARD = "the forward of a region", "the backward of a region"
SETTING_UP = "setting up"

_MOST_FAILURES = 3
"""Faults of the library in one training, after which its steps are the user's alone."""


class _Progress:
    """How far the present piece has come.

    Attributes:
        began: what cannot be made twice and has begun, in words; None while nothing has.
        made: whether the piece is made, with `result`.
    """

    began: str | None = None  # here, so that making one calls nothing
    made = False
    result: Any = None


class _Here(threading.local):
    progress: _Progress | None = None


here = _Here()
"""Of this thread. Who calls `executes` most often looks here himself."""


def executes(what: str) -> None:
    """What follows cannot be made twice. Hot path.

    Args:
        what: it, in words that end the sentence "pygraph-train failed during ...".
    """
    if (progress := here.progress) is not None:
        progress.began = what


def done(result: R) -> R:
    """The present piece is made, and this is its result, which is returned. Hot path."""
    if (progress := here.progress) is not None:
        progress.made, progress.result = True, result
    return result


@contextmanager
def rehearsal() -> Iterator[None]:
    """Around what executes nothing, or puts everything back: a capture, a run that is compared with."""
    before, here.progress = here.progress, None
    try:
        yield
    finally:
        here.progress = before


def taken_back() -> None:
    """What has begun was taken back: everything is as before the piece."""
    if (progress := here.progress) is not None:
        progress.began, progress.made, progress.result = None, False, None


def put_back(*actions: Callable[[], object]) -> None:
    """Make each of these, which put back what a run has changed. One that fails is made once more, after the others.

    Raises:
        PyGraphError: one has failed twice.
    """
    failed: list[Callable[[], object]] = []
    for action in actions:
        try:
            action()
        except Exception:
            failed.append(action)
    for action in failed:
        try:
            action()
        except Exception as error:
            raise _unfinished("putting a run back that was to change nothing", error) from error


def surely(make: Callable[[], R], what: str, *_: object) -> R:
    """What `make` makes, which training cannot do without: it is made once more where the library fails.

    Args:
        what: it, in words that end the sentence "pygraph-train failed during ...".
        *_: what a caller of its own passes to a callback, which nobody reads.
    Raises:
        PyGraphError: it has failed twice.
        ValueError, TypeError: of what the user gave.
    """
    try:
        return make()
    except Exception as error:
        if _for_the_user(error):
            raise
    try:
        return make()
    except Exception as error:
        if _for_the_user(error):
            raise
        raise _unfinished(what, error) from error


def once(body: Callable[[], R]) -> Callable[[], R]:
    """An optimizer's update, which says that it is executed, and that it is done."""

    def made() -> R:
        executes(UPDATE)
        return done(body())

    return made


def theirs(error: E) -> E:
    """Mark an exception as one for the user, which no boundary takes for a fault of the library; return it."""
    error.__pygraph_theirs__ = True  # type: ignore[attr-defined]
    return error


def _for_the_user(error: Exception) -> bool:
    """Whether the user's code has raised it, or the library on purpose: the user can mend it, or has asked for it."""
    wanted = isinstance(error, (PyGraphError, NotLegal)) or hasattr(error, "__pygraph_theirs__")
    return wanted or (isinstance(error, (ValueError, TypeError)) and _is_raised_here(error.__traceback__))


_quiet: set[str] = set()
"""What `quietly` has said."""


def quietly(*calls: Callable[[], object]) -> None:
    """Make calls that no step needs: a report, a logger, giving something back. None of them ends anything."""
    for call in calls:
        try:
            call()
        except PyGraphError:  # on_failure="raise" asks for it
            raise
        except Exception as error:
            not_needed(error)


def not_needed(error: Exception) -> None:
    """Say what has failed of what no step needs, once."""
    sentence = _sentence(error)
    if sentence not in _quiet:
        _quiet.add(sentence)
        _log(Problem(f"something that no step needs has failed in pygraph-train: {sentence}"))


def tried(make: Callable[[], bool]) -> bool:
    """Whether `make` has made what there is another way for; False where the library fails. Hot path."""
    try:
        return make()
    except Exception as error:
        not_needed(error)
        return False


def arranged(
    make: Callable[[], R],
    tell: Callable[[Problem], object] = lambda problem: None,
    *,
    within_dynamo: bool = False,
) -> R | None:
    """What `make` makes before training begins, for steps to gain by; None where the library fails.

    Args:
        tell: called with a sentence then.
        within_dynamo: Dynamo calls it, and what torch raises there may be its way to begin a trace anew.
    Raises:
        PyGraphError, ValueError, TypeError: of the options, which the user can mend.
    """
    try:
        return make()
    except Exception as error:
        if _for_the_user(error) or (within_dynamo and not _of_ours(error.__traceback__)):
            raise
        problem = Problem(
            f"pygraph-train failed while it was set up, and training runs as it is written: {_sentence(error)}. Please "
            "report this as a bug"
        )
        _log(problem)
        quietly(lambda: tell(problem))
        return None


class Boundary:
    """Makes the pieces of the steps of one training.

    Args:
        tell: called with a sentence for each fault.
        rest: called when there have been too many: let go of graphs.
    """

    def __init__(
        self,
        tell: Callable[[Problem], object] = lambda problem: None,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        self._tell, self._rest = tell, rest
        self._failures = 0

    def make(self, ours: Callable[..., Any], plain: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Make a piece of a step exactly once, by `ours` or by `plain` with these arguments. Hot path.

        Raises:
            PyGraphError: the library failed after it had begun what cannot be made twice.
        """
        if self._failures >= _MOST_FAILURES:
            return plainly(partial(plain, *given, **named))
        outer, here.progress = here.progress, (progress := _Progress())
        try:
            return ours(*given, **named)
        except Exception as error:
            if isinstance(error, (PyGraphError, NotLegal)) or hasattr(error, "__pygraph_theirs__"):
                raise
            if progress.began is not None and not progress.made and not _of_ours(error.__traceback__):
                raise
            failed = error
        finally:
            here.progress = outer
            if outer is not None and progress.began is not None:
                outer.began = progress.began
        try:
            if progress.made:
                self._failed(failed)
                return progress.result
            if progress.began is None:
                result = plainly(partial(plain, *given, **named))
                self._failed(failed)
                return result
            raise _unfinished(progress.began, failed) from failed
        finally:
            del failed  # its frames hold this one, and tensors

    def _failed(self, error: Exception) -> None:
        """Say what has failed, and rest after too many."""
        self._failures += 1
        rests = " No further step of this training has graphs." * (self._failures >= _MOST_FAILURES)
        problem = Problem(
            f"pygraph-train failed in itself, and the step ran as it is written: {_sentence(error)}.{rests} Please "
            "report this as a bug"
        )
        _log(problem)
        quietly(lambda: self._tell(problem))
        if rests:
            quietly(self._rest)


def plainly(plain: Callable[[], Any]) -> Any:
    """The piece as the user wrote it, which raises by itself what the user's code raises."""
    try:
        return plain()
    except Exception as error:
        if _for_the_user(error) or not _of_ours(error.__traceback__):
            raise
        raise _unfinished(STEP, error) from error


def _unfinished(what: str, error: Exception) -> PyGraphError:
    return PyGraphError(
        f"pygraph-train failed during {what} ({_sentence(error)}). The state of training is that of a step that has "
        "not ended: parameters, gradients and random numbers may have changed. Go on from a checkpoint, with "
        "PYGRAPH_DISABLE=1 in the environment. Please report this as a bug"
    )


def _log(problem: Problem) -> None:
    with suppress(Exception):
        log.warning("pygraph: %s", problem)


def _frames(tb: TracebackType | None) -> Iterator[tuple[str, int]]:
    while tb is not None:
        yield tb.tb_frame.f_code.co_filename, tb.tb_lineno
        tb = tb.tb_next


def _of_ours(tb: TracebackType | None) -> bool:
    """Whether the innermost frame is one of the library."""
    *_, (file, _) = _frames(tb)
    return is_library_file(file)


def _is_raised_here(tb: TracebackType | None) -> bool:
    """Whether a `raise` of the library has made it, and no call that failed."""
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or not is_library_file(tb.tb_frame.f_code.co_filename):
        return False
    return dis.opname[tb.tb_frame.f_code.co_code[tb.tb_lasti]] == "RAISE_VARARGS"


def _sentence(error: Exception) -> str:
    """What was raised, and the innermost line of the library that it went through."""
    ours = [place for place in _frames(error.__traceback__) if is_library_file(place[0])]
    where = f" at {ours[-1][0]}:{ours[-1][1]}" if ours else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"
