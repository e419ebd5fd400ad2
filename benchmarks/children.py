"""Measurements in processes of their own, several at a time, of which one is measured alone.

The parent starts the processes and lets them set up side by side. A process that is ready to be measured waits until
the parent has stopped all others; they go on when it is done. So no other process uses the GPU or the processors while
one is measured, and most of the time of a run is spent by many processes together.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = ["Job", "Turns", "row_of_process", "run_jobs"]

READY, DONE = b"R", b"D"
PAUSE = 0.05
"""Seconds until what stopped processes have launched has left the GPU."""


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: for messages.
        arguments: of the Python interpreter.
        log: where its standard output and its errors go.
    """

    name: str
    arguments: Sequence[str]
    log: Path


class Turns:
    """The side of a process that is started: `with turns.alone(): ...` waits until no other process runs.

    Everything that is printed from now on goes to standard error. Without a parent nobody is waited for.
    """

    def __init__(self, with_parent: bool = True) -> None:
        self._to_parent: int | None = None
        if with_parent:
            self._to_parent = os.dup(1)
            os.dup2(2, 1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The only process of the run that goes on, inside."""
        if self._to_parent is None:
            yield
            return
        os.write(self._to_parent, READY)
        if not os.read(0, 1):
            raise SystemExit("the parent is gone")
        try:
            yield
        finally:
            os.write(self._to_parent, DONE)


@dataclass
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    limit: float  # on the clock of `_Pool.clock`
    waits: bool = False
    told: list[str] = field(default_factory=list)


def row_of_process(module: str, row: Sequence[str], options: Sequence[str], timeout_s: int) -> dict[str, Any]:
    """What one process writes, which begins with cold caches; a crash or a time-out is in "error".

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
        except subprocess.TimeoutExpired:
            return {"error": f"timed out after {timeout_s} s"}
        if done.returncode or not out.exists():
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:2000]}
        return {"error": None, **json.loads(out.read_text())}


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
        ended: called after each job, with what is wrong with its end: a time-out, a signal, or None.
        timeout_s: for one job. The time in which another one is measured is not counted.
        seconds: for all of them. A job that is not over by then is killed, and those that are left are not begun.

    Returns:
        The jobs that were not begun.
    """
    pool = _Pool(ended, timeout_s)
    left, end = deque(jobs), None if seconds is None else time.monotonic() + seconds
    before = signal.signal(signal.SIGTERM, _interrupted)  # or the children would outlive a run that is cut
    try:
        while left or pool.children:
            if end is not None and time.monotonic() > end:
                pool.stop_all("the time for the whole run was over")
                break
            while left and len(pool.children) < processes and pool.measured is None:
                pool.start(left.popleft())
            pool.listen()
            pool.expire()
    finally:
        pool.stop_all("interrupted")
        signal.signal(signal.SIGTERM, before)
    return list(left)


class _Pool:
    def __init__(self, ended: Callable[[Job, str | None], None], timeout_s: float) -> None:
        self.children: list[_Child] = []
        self.measured: _Child | None = None
        self._ended, self._timeout_s = ended, timeout_s
        self._stopped_s, self._stopped_at = 0.0, 0.0
        self._selector = selectors.DefaultSelector()

    def clock(self) -> float:
        """Seconds in which all children could run."""
        now = time.monotonic() if self.measured is None else self._stopped_at
        return now - self._stopped_s

    def start(self, job: Job) -> None:
        log = job.log.open("wb")
        process = subprocess.Popen(
            [sys.executable, *job.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # so that its own children are stopped with it
            bufsize=0,
        )
        child = _Child(job, process, log, self.clock() + self._timeout_s)
        self.children.append(child)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, child)

    def listen(self) -> None:
        """Wait a moment for what children say."""
        for key, _ in self._selector.select(0.2):
            child: _Child = key.data
            said = os.read(key.fd, 1)
            if said == READY:
                child.waits = True
            elif said == DONE and child is self.measured:
                self._all_go_on()
            elif not said:
                self._remove(child, None)
        if self.measured is None:
            waiting = next((child for child in self.children if child.waits), None)
            if waiting is not None:
                self._let_measure(waiting)

    def expire(self) -> None:
        """Kill children whose time is over."""
        if self.measured is not None:
            if time.monotonic() - self._stopped_at > self._timeout_s:
                self._remove(self.measured, f"timed out after {self._timeout_s} s while it was measured")
            return
        for child in [c for c in self.children if self.clock() > c.limit and not c.waits]:
            self._remove(child, f"timed out after {self._timeout_s} s")

    def stop_all(self, why: str) -> None:
        for child in list(self.children):
            self._remove(child, why)

    def _let_measure(self, child: _Child) -> None:
        child.waits = False
        self._stopped_at = time.monotonic()
        self.measured = child
        self._signal_others(signal.SIGSTOP)
        time.sleep(PAUSE)
        assert child.process.stdin is not None
        with contextlib.suppress(OSError):
            child.process.stdin.write(b"G")

    def _all_go_on(self) -> None:
        self._signal_others(signal.SIGCONT)
        self._stopped_s += time.monotonic() - self._stopped_at
        self.measured = None

    def _signal_others(self, what: signal.Signals) -> None:
        for child in self.children:
            if child is not self.measured:
                _signal(child.process, what)

    def _remove(self, child: _Child, why: str | None) -> None:
        assert child.process.stdout is not None and child.process.stdin is not None
        if child is self.measured:
            self._all_go_on()
        if why is not None:
            _signal(child.process, signal.SIGKILL)
        self._selector.unregister(child.process.stdout)
        code = child.process.wait()
        for stream in (child.process.stdout, child.process.stdin, child.log):
            stream.close()
        self.children.remove(child)
        if why is None and code:
            why = f"ended with status {code}: {_last_line(child.job.log)}"
        self._ended(child.job, why)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def _signal(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, what)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
