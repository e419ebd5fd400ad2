"""Measurements in processes of their own, several at a time, of which one is measured alone.

The parent starts the processes and lets them set up side by side. A process that is ready to be measured waits until
the parent has stopped all others; they go on when it is done. So no other process uses the GPU or the processors while
one is measured, and most of the time of a run is spent by many processes together.

Processes of one group are measured together, when all of them that have not ended are ready: the parent asks them in
turns, and each of them runs only until it has answered. What was measured may call for more processes of the group;
those that were not told to end wait for them, and are measured again with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = [
    "CUT",
    "END",
    "LAST_S",
    "OVER",
    "Ask",
    "Job",
    "TimeOver",
    "Turns",
    "end_with_parent",
    "row_of_process",
    "run_jobs",
]

READY, GO, DONE, END = "ready", "go", "done", "end"
CUT = OVER, INTERRUPTED = "the time for the whole run was over", "interrupted"
"""Ends of a job of which nothing is wrong."""
PAUSE = 0.05
"""Seconds until what stopped processes have launched has left the GPU."""
LAST_S = 20.0
"""Seconds after the time for the whole run in which processes that are ready by then are measured."""
WAITING = 4
"""Groups are begun as long as all of their processes are at most so many times those that may run at a time."""


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: for messages; no other job has it.
        arguments: of the Python interpreter.
        log: where its standard output and its errors go.
        group: of jobs that are measured together, and follow each other. Without one a job is measured by itself.
        after: the name of a job of the group. Until that one is ready, or has ended, this one is not begun.
    """

    name: str
    arguments: Sequence[str]
    log: Path
    group: str | None = None
    after: str | None = None

    @property
    def team(self) -> str:
        """The group; of a job without one, its name."""
        return self.group or self.name


class TimeOver(Exception):
    """Nothing more can be asked, because the time for the whole run is over."""


Ask = Callable[[Job, str], str | None]
"""Lets the process of a job answer a line, while no other process runs; None if it has ended."""


class Turns:
    """The side of a process that is started. Everything that is printed from now on goes to standard error."""

    def __init__(self) -> None:
        self._to_parent = os.dup(1)
        os.dup2(2, 1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The only process of the run that goes on, inside."""
        self._say(READY)
        self._hear()
        try:
            yield
        finally:
            self._say(DONE)

    def answer(self, answer: Callable[[str], str]) -> None:
        """Answer each line of the parent, until it asks for the end."""
        self._say(READY)
        while (asked := self._hear()) != END:
            self._say(answer(asked))
        self._say(DONE)

    def _say(self, line: str) -> None:
        os.write(self._to_parent, f"{line}\n".encode())

    def _hear(self) -> str:
        if not (line := sys.stdin.readline()):
            raise SystemExit("the parent is gone")
        return line.rstrip("\n")


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


def _begin(job: Job, log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *job.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # so that its own children are ended with it
        preexec_fn=end_with_parent,
        bufsize=0,
    )


def _go(jobs: Sequence[Job], ask: Ask) -> None:
    """Each job makes what it has in `Turns.alone`."""
    for job in jobs:
        ask(job, GO)


def run_jobs(
    jobs: Sequence[Job],
    ended: Callable[[Job, str | None], None],
    *,
    processes: int,
    timeout_s: float,
    ready_s: float = math.inf,
    seconds: float | None = None,
    measure: Callable[[Sequence[Job], Ask], Sequence[Job] | None] = _go,
    begin: Callable[[Job, IO[bytes]], Any] = _begin,
) -> list[Job]:
    """Run all jobs, at most `processes` at a time. For the main thread.

    Jobs that wait for others of their group are not counted, or these might never begin.

    Args:
        ended: called after each job, with what is wrong with its end: a time-out, a signal, or None.
        timeout_s: for one group. The time in which a job waits, or others are measured, is not counted.
        ready_s: for one job, until it is ready to be measured; and for each of its answers.
        seconds: for all of them. A job that is not ready by then is killed, and those that are left are not begun.
        measure: called for each group, with those of its jobs that are ready when the others have ended. The jobs that
            it returns are begun next; it is called again when they are ready, with those that were not told to end.
        begin: starts the process of a job, in a group of processes of its own; has what `subprocess.Popen` has.

    Returns:
        The jobs that were not begun.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    pool = _Pool(ended, measure, begin, timeout_s, min(ready_s, timeout_s), end + LAST_S)
    pool.left += jobs
    not_begun: list[Job] = []
    before = signal.signal(signal.SIGTERM, _interrupted)  # or the children would outlive a run that is cut
    try:
        while pool.left or pool.children:
            if time.monotonic() > end:
                not_begun += pool.left
                pool.left.clear()
                pool.stop([c for c in pool.children if not (c.waits or c.measured)], OVER)
            if time.monotonic() > end + LAST_S:
                pool.stop(pool.children, OVER)
            pool.start(processes)
            pool.listen()
            pool.take_turn()
            pool.expire()
    finally:
        pool.stop(pool.children, INTERRUPTED)
        signal.signal(signal.SIGTERM, before)
    return not_begun


@dataclass(eq=False)
class _Child:
    job: Job
    process: Any  # subprocess.Popen[bytes], or alike
    log: IO[bytes]
    limit: float  # on the clock of `_Pool.clock`
    why: str  # what is wrong when it is over
    lines: deque[str] = field(default_factory=deque)
    waits: bool = False
    waits_since: float = 0.0
    measured: bool = False
    told_to_end: bool = False
    rest: str = ""

    def hear(self) -> bool:
        """Keep what it says; whether it can say more."""
        assert self.process.stdout is not None
        said = os.read(self.process.stdout.fileno(), 4096).decode(errors="replace")
        *lines, self.rest = (self.rest + said).split("\n")
        self.lines += lines
        return bool(said)


class _Pool:
    def __init__(
        self,
        ended: Callable[[Job, str | None], None],
        measure: Callable[[Sequence[Job], Ask], Sequence[Job] | None],
        begin: Callable[[Job, IO[bytes]], Any],
        timeout_s: float,
        ready_s: float,
        last: float,
    ) -> None:
        self.left: deque[Job] = deque()
        self.children: list[_Child] = []
        self._ended, self._measure, self._begin = ended, measure, begin
        self._timeout_s, self._ready_s, self._last = timeout_s, ready_s, last
        self._begun: dict[str, float] = {}  # groups
        self._stopped_s = 0.0
        self._selector = selectors.DefaultSelector()

    def clock(self) -> float:
        """Seconds in which all children could run."""
        return time.monotonic() - self._stopped_s

    def start(self, processes: int) -> None:
        """Start what may run now."""
        while (job := self._next(processes)) is not None:
            self.left.remove(job)
            self._start(job)

    def _next(self, processes: int) -> Job | None:
        """The first job that may begin. Those that wait take no processor; but they hold memory."""
        if sum(not child.waits for child in self.children) >= processes:
            return None
        begun = {child.job.team for child in self.children}
        unready = {job.name for job in self.left}
        unready |= {child.job.name for child in self.children if not (child.waits or child.measured)}
        sizes = Counter(job.team for job in self.left)
        room = WAITING * processes - len(self.children) - sum(sizes[team] for team in begun)
        for job in self.left:
            if job.after not in unready and (job.team in begun or not begun or sizes[job.team] <= room):
                return job
        return None

    def _start(self, job: Job) -> None:
        log = job.log.open("wb")
        process = self._begin(job, log)
        begun = self._begun.setdefault(job.team, self.clock())
        limits = {self.clock() + self._ready_s: self._ready_s, begun + self._timeout_s: self._timeout_s}
        limit = min(limits)
        child = _Child(job, process, log, limit, f"timed out after {limits[limit]:g} s")
        self.children.append(child)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, child)

    def listen(self) -> None:
        """Wait a moment for what children say."""
        for key, _ in self._selector.select(0.2):
            child: _Child = key.data
            if not child.hear():
                self._remove(child, None)
        for child in self.children:
            if READY in child.lines:
                child.waits, child.waits_since = True, self.clock()
                child.lines.clear()

    def take_turn(self) -> None:
        """Measure a group whose processes are ready, while all others are stopped."""
        for team in dict.fromkeys(child.job.team for child in self.children):
            group = [child for child in self.children if child.job.team == team]
            if all(child.waits for child in group) and all(job.team != team for job in self.left):
                self._take_turn(group)
                break

    def _take_turn(self, group: Sequence[_Child]) -> None:
        begun, waited_until = time.monotonic(), self.clock()
        of_job = {child.job.name: child for child in group}
        all_of_them = _groups_of([child.process.pid for child in self.children])
        _signal(all_of_them, signal.SIGSTOP)
        time.sleep(PAUSE)
        more: Sequence[Job] | None = None
        try:
            more = self._measure([c.job for c in group], lambda job, line: self._ask(of_job[job.name], line))
        except TimeOver:
            pass
        finally:
            _signal(all_of_them, signal.SIGCONT)
        self._stopped_s += time.monotonic() - begun
        for child in group:
            if child.told_to_end or not more:
                child.waits, child.measured = False, True
                child.limit += waited_until - child.waits_since
        if more:
            self.left.extendleft(reversed(more))
            self._begun[more[0].team] = self.clock()

    def _ask(self, child: _Child, line: str) -> str | None:
        if child not in self.children:
            return None
        assert child.process.stdin is not None
        child.lines.clear()
        child.told_to_end = line == END
        _signal([child.process.pid], signal.SIGCONT)
        with contextlib.suppress(OSError):  # it has ended
            child.process.stdin.write(f"{line}\n".encode())
        limit = time.monotonic() + self._ready_s
        while not child.lines:
            left = min(limit, self._last) - time.monotonic()
            if left < 0 and limit > self._last:
                raise TimeOver
            if left < 0:
                self._remove(child, f"timed out after {self._ready_s:g} s while it was measured")
                return None
            if select.select([child.process.stdout], [], [], min(left, 1.0))[0] and not child.hear():
                self._remove(child, None)
                return None
        _signal([child.process.pid], signal.SIGSTOP)
        return child.lines.popleft()

    def expire(self) -> None:
        """Kill children whose time is over."""
        for child in [c for c in self.children if self.clock() > c.limit and not c.waits]:
            self._remove(child, child.why)

    def stop(self, children: Iterable[_Child], why: str) -> None:
        """Kill these children."""
        for child in list(children):
            self._remove(child, why)

    def _remove(self, child: _Child, why: str | None) -> None:
        assert child.process.stdout is not None and child.process.stdin is not None
        if why is not None:
            _signal([child.process.pid], signal.SIGKILL)
        with contextlib.suppress(KeyError):  # an interrupt came in the midst of this before
            self._selector.unregister(child.process.stdout)
        code = child.process.wait()
        for stream in (child.process.stdout, child.process.stdin, child.log):
            stream.close()
        self.children.remove(child)
        if why is None and code:
            why = f"ended with status {code}: {_last_line(child.job.log)}"
        self._ended(child.job, why)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SIGNAL_WHEN_THE_PARENT_DIES = 1  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """A process whose parent is killed would go on, or stay stopped."""
    if _LIBC is not None:
        _LIBC.prctl(_SIGNAL_WHEN_THE_PARENT_DIES, signal.SIGKILL)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def _groups_of(pids: Sequence[int]) -> set[int]:
    """Process groups of these and of all that they have begun."""
    below: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, group = path.read_text().rpartition(")")[2].split()[:3]
            below.setdefault(int(parent), []).append((int(path.parent.name), int(group)))
    found, queue = set(pids), list(pids)
    for pid in queue:
        for child, group in below.get(pid, ()):
            queue.append(child)
            found.add(group)
    return found


def _signal(groups: Iterable[int], what: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, what)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
