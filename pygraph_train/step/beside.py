"""Inductor's work for one kind of call, in a process of its own: ordered, looked at, and ended with the training."""

from __future__ import annotations

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
        worker: arguments of Python for the process, before the name of the file with the order.

    Attributes:
        why: it has failed, in words.
    """

    def __init__(self, worker: Sequence[str] | None = None) -> None:
        self.why = ""
        self._progress = WorkState.WANTED
        self._worker = tuple(worker or _WORKER)
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: Path | None = None
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
        folder = Path(tempfile.mkdtemp(prefix="pygraph_train_"))
        file, self._messages = folder / "order", folder / "messages"
        try:
            file.write_bytes(order)
            with self._messages.open("wb") as messages:
                process = subprocess.Popen(
                    [sys.executable, *self._worker, str(file)],
                    stdin=subprocess.PIPE,
                    stdout=messages,
                    stderr=messages,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C is for the training
                )
        except OSError as error:
            _remove(folder)
            return self.fail(str(error))
        self._process, self._began = process, time.monotonic()
        self._progress = WorkState.UNDER_WAY
        self._end = weakref.finalize(self, _end, process, folder, os.getpid())

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
        """That it has failed, for the report."""
        return Problem(f"Inductor did not compile beside the training: {self.why}")

    def _last_message(self) -> str:
        try:
            lines = self._messages.read_text(errors="replace").split("\n") if self._messages else []
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the training, whose process this is not
        return
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    _remove(folder)


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink(missing_ok=True)
    folder.rmdir()


def _environment() -> dict[str, str]:
    """Of the process: it finds the modules that this one finds, and has few threads."""
    threads = max(1, min(_MOST_THREADS, _processors() - 1))
    path = os.pathsep.join(place for place in sys.path if place)
    own = {"PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    return {**os.environ, **own}


def may_begin(program: StepProgram) -> bool:
    """Whether a process may work beside this training: it is the only one, and the host has room."""
    alone = program.replication.group is None and not program.replication.sharded
    return alone and os.name == "posix" and _processors() > 1 and _free_memory() >= MEMORY


def _processors() -> int:
    """So many processors may run this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_memory() -> float:
    """Bytes of the host's memory that this process may still take, as far as Linux says it."""
    found = [float("inf")]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            found.append(int(most) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found)
