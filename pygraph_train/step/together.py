"""Steps that the ranks of one training make together: each says what it can do, and all do the same.

Every step of every rank has one vote, before anything of it runs. Steps that are captured or compared have further
votes, so that a rank on which something fails stops all others, and none waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from pygraph_train.parallel.agreement import Agreement, Said, Word, agreement, versions
from pygraph_train.parallel.replication import Replication
from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.variants import Capture
from pygraph_train.tracing.refusals import problem_of

__all__ = ["Together", "facts_of", "out_of_step"]

R = TypeVar("R")

_WAITS, _OPEN = 1, 2
"""Numbers of `Word.PLAIN`: whether the rank has found that its device waits for the host."""

UNEVEN = Problem("Join lets each rank make its own number of steps, so the ranks cannot vote on each step")

_MOST_APART = 3
"""Steps in a row in which this rank could replay a capture that another one no longer has, before it is given up."""


@contextmanager
def out_of_step() -> Iterator[None]:
    """Around a run in which each rank needs the others: what fails on one ends the training, as without graphs.

    Raises:
        PyGraphError: anything has failed. The others wait for a collective, or are ended by it.
    """
    try:
        yield
    except Exception as error:
        raise PyGraphError(
            f"a training step failed on this rank ({type(error).__name__}: {error}). The other ranks are in this "
            "step and need this rank, because the ranks share their parameters. Start the training again"
        ) from error


class Together:
    """The votes of one rank.

    Args:
        training: of the runner.
        replication: of the model.

    Attributes:
        ended: why no step is voted on any more: another rank replays nothing, or there is no agreement.
        open: whether the device of some rank waits for the host.
    """

    def __init__(self, training: TrainingRun, replication: Replication) -> None:
        self.ended: Problem | None = None
        self.open = False
        self.replication = replication
        self._training = training
        self._agreement: Agreement | None = None
        self._number = 0
        self._voted = self._announced = False
        self._plain = Said(Word.PLAIN)
        self._apart: dict[int, int] = {}
        self._differed = False

    def begin(self) -> None:
        """A step begins. The first one begins with the ranks' meeting.

        Raises:
            PyGraphError: the ranks differ in their options or versions, or one has ended.
        """
        self._voted = False
        self._plain = Said(Word.PLAIN)
        if self.ended is None and self.replication.uneven():
            self.ended = UNEVEN
        if self._agreement is None and self.ended is None:
            found = agreement(self.replication.group, facts_of(self._training))
            if isinstance(found, Problem):
                self.ended = found
            else:
                self._agreement = found

    def waits_for_host(self, open_: bool) -> None:
        """Say with the present step whether this rank's device waits for its host."""
        self._plain = Said(Word.PLAIN, _OPEN if open_ else _WAITS)

    def voted_first(self, run: Callable[..., R], off: Callable[[], Problem | None]) -> Callable[..., R]:
        """`run`, which makes the step without a graph of it, after a vote that tells the others.

        Args:
            off: why this rank replays nothing any more, None while it may.
        """

        def after_the_vote(call: Any) -> R:
            if not self._voted and self.ended is None:
                why = off()
                if why is not None:
                    self._tell(why)
                self._vote(self._plain if why is None else Said(Word.OFF))
            return run(call)

        return after_the_vote

    def replays(self, capture: Capture, *, audit: bool = False) -> Word:
        """Vote for a replay. Returns what all ranks do: `REPLAY`, `AUDIT`, or `PLAIN`.

        Args:
            audit: this rank wants it to be compared with a plain step.
        """
        if self._voted:
            return Word.PLAIN
        number = capture.number
        said = self._vote(Said(Word.AUDIT if audit else Word.REPLAY, number))
        if all(s.number == number and s.word in (Word.REPLAY, Word.AUDIT) for s in said):
            self._apart.pop(number, None)
            return Word.AUDIT if any(s.word is Word.AUDIT for s in said) else Word.REPLAY
        if any(s.word is Word.CAPTURE for s in said):
            self._apart[number] = self._apart.get(number, 0) + 1
        self._note_difference(said)
        return Word.PLAIN

    def is_lost(self, capture: Capture) -> bool:
        """Whether another rank has lost its part of this capture, and wants a new one."""
        return self._apart.get(capture.number, 0) >= _MOST_APART

    def captures(self, position: PositionInAccumulation, *, fused: bool, compiled: bool) -> bool:
        """Vote for a capture. Returns whether all ranks make the same one now."""
        if self._voted:
            return False
        what = zlib.crc32(repr((position, fused, compiled)).encode())
        said = self._vote(Said(Word.CAPTURE, what))
        if all(s == said[0] for s in said):
            self._number += 1
            return True
        return False

    @property
    def number(self) -> int:
        """Of the capture that is being made: the same on all ranks."""
        return self._number

    @contextmanager
    def making(self) -> Iterator[None]:
        """Around all of a capture or comparison: what fails between its stages is told in the others' next vote."""
        self._announced = False
        try:
            yield
        except PyGraphError:
            raise  # nobody can vote any more
        except Exception as error:
            if not self._announced:
                self.confirm(problem_of(error))
            raise

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Around a part of a capture or comparison in which one rank may fail, and none waits for another one.

        Raises:
            NotLegal: another rank has failed.
        """
        try:
            yield
        except Exception as error:
            self.confirm(problem_of(error))
            raise
        if (problem := self.confirm(None)) is not None:
            raise NotLegal(problem)

    def confirm(self, problem: Problem | None) -> Problem | None:
        """Say whether this rank's part of a capture or comparison is done. Returns why not all ranks' parts are."""
        if problem is not None:
            self._tell(problem)
        said = self._vote(Said(Word.DONE if problem is None else Word.FAILED))
        failed = [rank for rank, s in enumerate(said) if s.word is not Word.DONE]
        self._announced |= bool(failed)
        if problem is not None:
            return problem
        return self._problem_of(failed[0], said[failed[0]].word) if failed else None

    def anywhere(self, flag: bool) -> bool:
        """In the midst of a capture or comparison: whether something holds on any rank.

        Args:
            flag: whether it holds on this one.
        Raises:
            NotLegal: another rank has failed.
        """
        said = self._vote(Said(Word.DONE, int(flag)))
        failed = [rank for rank, s in enumerate(said) if s.word is not Word.DONE]
        if failed:
            self._announced = True
            raise NotLegal(self._problem_of(failed[0], said[failed[0]].word))
        return any(s.number for s in said)

    def share(self, flag: bool) -> list[bool] | None:
        """Between steps: what all ranks say, by rank. None where the ranks have no agreement; then nobody has voted."""
        if self._agreement is None or self.ended is not None:
            return None
        return [s == (Word.DONE, 1) for s in self._vote(Said(Word.DONE, int(flag)))]

    def leave(self) -> None:
        """This rank makes no more steps."""
        if self._agreement is not None:
            self._agreement.leave()
            self._agreement.close()
            self._agreement = None
        self.ended = self.ended or Problem("the runner was closed")

    def _vote(self, said: Said) -> list[Said]:
        self._voted = True
        if self._agreement is None:
            return [said]
        heard = self._agreement.vote(said, self._training.step)
        for rank, other in enumerate(heard):
            if other.word in (Word.OFF, Word.LEFT) and self.ended is None:
                self.ended = self._problem_of(rank, other.word)
            self.open |= other == (Word.PLAIN, _OPEN)
        return heard

    def _tell(self, problem: Problem) -> None:
        if self._agreement is not None:
            self._agreement.tell(str(problem))

    def _problem_of(self, rank: int, word: Word) -> Problem:
        if word not in (Word.OFF, Word.FAILED) or self._agreement is None:
            return Problem(f"rank {rank} makes no more steps, or other steps than this rank")
        return Problem(f"rank {rank} runs without graphs, so all ranks do: {self._agreement.told(rank)}")

    def _note_difference(self, said: list[Said]) -> None:
        """This rank could have replayed the step: say once which one could not."""
        if self._differed or self._agreement is None:
            return
        self._differed = True
        mine = said[self._agreement.rank]
        rank = next(
            rank for rank, other in enumerate(said) if other.number != mine.number or other.word != mine.word
        )
        self._training.report.note(
            f"rank {rank} could not replay step {self._training.step}, so all ranks run steps of this kind "
            "without a graph"
        )


def facts_of(training: TrainingRun) -> dict[str, str]:
    """What has to be the same on all ranks."""
    options = {f"the option {name}": repr(value) for name, value in vars(training.config).items()}
    return {
        **versions(),
        "the engine": training.engine.name,
        "the parameters of the model": _in_words(training.program.model),
        **options,
    }


def _in_words(model: nn.Module) -> str:
    """How many parameters a model has, and a checksum of their names, shapes and types."""
    looks = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return f"{len(looks)} (checksum of names, shapes and types: {zlib.crc32(repr(looks).encode()):08x})"
