"""Inductor's work for one kind of call, in a process of its own: ordered, looked at, and ended with the training."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import IO

from pygraph_train.problems import Problem
from pygraph_train.step.program import StepProgram

__all__ = ["Beside", "WorkState", "may_begin"]

_WORKER = ("-m", "pygraph_train.torch_private.compile_worker")

_MOST_SECONDS = 1800.0
"""After that nothing will come of it."""

_MOST_THREADS = 4
"""Processes in which kernels are compiled at the same time: each takes memory of the host."""

MEMORY = 8 << 30
"""So much memory of the host has to be free: the process and those that it starts take up to half of it."""


_GROUP = Path("/sys/fs/cgroup")


class WorkState(Enum):
    """How far the work is. The values are words for messages."""

    WANTED = "wanted"
    """The next step shows what has to be compiled."""
    UNDER_WAY = "under way"
    """A process works on it."""
    READY = "ready"
    """Compiling takes as long as a look into Inductor's caches."""
    FAILED = "failed"
    """Compiling takes as long as it ever did."""


class Beside:
    """What a process beside the training compiles.

    Args:
        worker: arguments of Python for the process, before the number of the file with the order.

    Attributes:
        why: it has failed, in words.
        missing: so many graphs were not found in Inductor's cache afterwards.
    """

    def __init__(self, worker: Sequence[str] | None = None) -> None:
        self.why, self.missing = "", 0
        self._progress = WorkState.WANTED
        self._worker = tuple(worker or _WORKER)
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: IO[bytes] | None = None
        self._began = 0.0
        self._end = lambda: None

    @property
    def progress(self) -> WorkState:
        """How far it is now: a system call while a process works."""
        process = self._process
        if self._progress is WorkState.UNDER_WAY and process is not None:
            code = process.poll()
            if code is None and time.monotonic() - self._began > _MOST_SECONDS:
                self.fail(f"it had not ended after {_MOST_SECONDS:.0f} s")
            elif code == 0:
                self._progress = WorkState.READY
                self._end()
            elif code is not None:
                self.fail(f"the process ended with {code}: {self._last_message()}")
        return self._progress

    def begin(self, order: bytes) -> None:
        """Let a process work on it.

        Args:
            order: see `pygraph_train.torch_private.compile_beside`.
        """
        # neither file has a name, so that none is left behind whatever ends when
        try:
            with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as messages:
                file.write(order)
                file.seek(0)
                process = subprocess.Popen(
                    [sys.executable, *self._worker, str(file.fileno()), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=messages,
                    stderr=messages,
                    pass_fds=[file.fileno()],
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C is for the training
                )
                self._messages = os.fdopen(os.dup(messages.fileno()), "rb")
        except OSError as error:
            return self.fail(str(error))
        self._process, self._began = process, time.monotonic()
        self._progress = WorkState.UNDER_WAY
        self._end = weakref.finalize(self, _end, process, os.getpid())

    def nothing_to_do(self) -> None:
        """All that would be compiled is there."""
        self._progress = WorkState.READY

    def fail(self, why: str) -> None:
        """Nothing came of it."""
        self.why, self._progress = why, WorkState.FAILED
        self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._progress is WorkState.UNDER_WAY:
            self.why, self._progress = "the training has ended", WorkState.FAILED
        self._end()

    def problem(self) -> Problem:
        """That it has failed, or that something was not found, for the report."""
        if self.missing:
            return Problem(
                f"Inductor compiled beside the training, and again in it: its cache did not have {self.missing} of the "
                "graphs that the process had compiled. Please report this with the report's text"
            )
        return Problem(f"Inductor did not compile beside the training: {self.why}")

    def _last_message(self) -> str:
        if self._messages is None:
            return ""
        with self._messages as messages:
            messages.seek(0)
            lines = messages.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process and those that it has begun."""
    if os.getpid() != owner:  # a fork of the training, whose process this is not
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _environment() -> dict[str, str]:
    """Of the process: it finds the modules that this one finds, and has few threads."""
    others = 2  # the training, and the process itself
    threads = max(1, min(_MOST_THREADS, _processors() - others))
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    return {**os.environ, **own}


def may_begin(program: StepProgram) -> bool:
    """Whether a process may work beside this training: it is the only one, and the host has room."""
    alone = program.replication.group is None and not program.replication.sharded
    possible = os.name == "posix" and bool(sys.executable)
    return alone and possible and _processors() > 1 and _free_memory() >= MEMORY


def _processors() -> int:
    """So many processors may run this process. Where a container is given a share, low priority does not save it."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        most, period = (_GROUP / "cpu.max").read_text().split()
        return found if most == "max" else min(found, int(most) // int(period))
    except (OSError, ValueError):
        return found


def _free_memory() -> float:
    """Bytes of the host's memory that this process may still take, as far as Linux says it."""
    found = [float("inf")]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    try:
        most = (_GROUP / "memory.max").read_text().strip()
        if most != "max":
            found.append(int(most) - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found)
