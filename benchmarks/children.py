"""Measurements in processes of their own: one after the other, or several that set up side by side.

Of those that set up side by side, one is measured at a time: a process that is ready waits until the parent has stopped
all others, and they go on when it is done. So nothing else uses the GPU or the processors while it is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAUSE = 0.05
"""Seconds until what stopped processes have launched has left the GPU."""


def row_of_process(module: str, row: Sequence[str], options: Sequence[str], timeout_s: int) -> dict[str, Any]:
    """What one process writes, which begins with cold caches; a crash or a time-out is in "error".

    What a process has written before it was cut is kept.

    Args:
        module: is run with `--row`, the names of the row and the JSON file that it writes, and these options.
        timeout_s: 0 for none.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, "--row", *row, str(out), *options],
                capture_output=True,
                text=True,
                timeout=timeout_s or None,
                env={**os.environ, **caches},
                cwd=Path(__file__).parents[1],
            )
            error = None
            if done.returncode or not out.exists():
                last = (done.stderr.strip().splitlines() or ["no output"])[-1][:2000]
                error = last if done.returncode > 0 else f"ended with status {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            error = f"timed out after {timeout_s} s"
        row = json.loads(out.read_text()) if out.exists() else {}
        return {"error": None, **row, **({"error": error} if error else {})}


class Turn:
    """The side of a process that is started. Everything that is printed from now on goes to standard error."""

    def __init__(self) -> None:
        self._to_parent = os.dup(1)
        os.dup2(2, 1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The only process of the run that goes on, inside."""
        os.write(self._to_parent, b"ready\n")
        if not sys.stdin.readline():
            raise SystemExit("the parent is gone")
        try:
            yield
        finally:
            os.write(self._to_parent, b"done\n")


@dataclass(frozen=True)
class Job:
    """One process, with arguments of the Python interpreter, and a file for what it prints."""

    name: str
    arguments: Sequence[str]
    log: Path


class _Child:
    """The process of a job, in a group of processes of its own."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        self.job, self.limit = job, time.monotonic() + timeout_s
        with job.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *job.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                bufsize=0,
            )

    def fileno(self) -> int:
        """Where it is heard, for `select`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def hear(self) -> bytes:
        """What it says; nothing when it has ended."""
        return os.read(self.fileno(), 4096)

    def go(self) -> None:
        """Let it measure, until it says that it is done, has ended, or its time is over."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(b"go\n")
        select.select([self], [], [], max(0.0, self.limit - time.monotonic()))

    def signal(self, what: signal.Signals) -> None:
        """To it and to all that it has begun."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, what)

    def end(self, why: str | None) -> str | None:
        """Wait for its end, or make one if there is a reason; what was wrong with it."""
        if why is not None:
            self.signal(signal.SIGKILL)
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        if why is None and code:
            lines = self.job.log.read_text(errors="replace").strip().splitlines() or [""]
            why = f"ended with status {code}: {lines[-1][:300]}"
        return why


def run_jobs(
    jobs: Sequence[Job],
    ended: Callable[[Job, str | None], None],
    *,
    processes: int,
    timeout_s: float,
    seconds: float | None = None,
) -> list[Job]:
    """Run all jobs, at most `processes` at a time. For the main thread.

    Args:
        ended: called after each job, with what is wrong with its end: a time-out, a status, or None.
        timeout_s: for one job. The time in which others are measured is not counted.
        seconds: for all of them. Jobs that are not done by then are killed, and those that are left are not begun.

    Returns:
        The jobs that were not begun.
    """
    left, children = deque(jobs), list[_Child]()
    end = math.inf if seconds is None else time.monotonic() + seconds

    def remove(child: _Child, why: str | None) -> None:
        children.remove(child)
        ended(child.job, child.end(why))

    before = signal.signal(signal.SIGTERM, _interrupted)  # or the children would outlive a run that is cut
    why = "interrupted"
    try:
        while (left or children) and time.monotonic() < end:
            while left and len(children) < processes:
                children.append(_Child(left.popleft(), timeout_s))
            for child in select.select(children, [], [], 0.2)[0]:
                said = child.hear()
                if not said:
                    remove(child, None)
                elif b"ready" in said:
                    _measure(child, [other for other in children if other is not child])
            for child in [c for c in children if time.monotonic() > c.limit]:
                remove(child, f"timed out after {timeout_s:g} s")
        why = "the time for the whole run was over"
    finally:
        for child in list(children):
            remove(child, why)
        signal.signal(signal.SIGTERM, before)
    return list(left)


def _measure(child: _Child, others: Sequence[_Child]) -> None:
    """Let one child go on while all others are stopped."""
    begun = time.monotonic()
    for other in others:
        other.signal(signal.SIGSTOP)
    try:
        time.sleep(PAUSE)
        child.go()
    finally:
        for other in others:
            other.limit += time.monotonic() - begun
            other.signal(signal.SIGCONT)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SIGNAL_WHEN_THE_PARENT_DIES = 1  # PR_SET_PDEATHSIG


def _end_with_parent() -> None:
    """A process whose parent is killed would go on, or stay stopped."""
    if _LIBC is not None:
        _LIBC.prctl(_SIGNAL_WHEN_THE_PARENT_DIES, signal.SIGKILL)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt
