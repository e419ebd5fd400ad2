"""Processes that begin with everything imported: copies of one that has imported it and has not touched the GPU.

Imports of torch, transformers and the compiler take some eight seconds of a processor, in each of the hundreds of
processes of a run. A process that waits here imports them once, and forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.children import Job, end_with_parent

__all__ = ["Nursery"]

MODULES = (
    *(
        "benchmarks.never_slower",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch._inductor.codegen.triton",
    ),
    *(
        "triton",
        "transformers",
        "transformers.modeling_utils",
        "transformers.masking_utils",
        "timm",
        "accelerate",
    ),
)
"""What contenders import, as far as it is installed."""


class _Forked:
    """What `subprocess.Popen` has for a process of its own."""

    def __init__(self, nursery: Nursery, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._nursery, self.pid, self.stdin, self.stdout = nursery, pid, stdin, stdout

    def wait(self) -> int:
        return self._nursery.code_of(self.pid)


class Nursery:
    """A process that forks jobs; for one thread."""

    def __init__(self, device: str) -> None:
        self._codes: dict[int, int] = {}
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.nursery", str(its.fileno()), device],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,
                start_new_session=True,
                # asks the driver's library, which leaves the GPU usable for copies of the process
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        self.works = False
        """Whether copies of it can use the device."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.works = self._hear() == {"works": True}

    def begin(self, job: Job, log: IO[bytes]) -> Any:
        """The process of a job, whose arguments are `-m`, a module and what its `main` gets."""
        stdin, to_child = os.pipe()
        from_child, stdout = os.pipe()
        asked = json.dumps(list(job.arguments)).encode()
        socket.send_fds(self._socket, [asked], [stdin, stdout, log.fileno()])
        os.close(stdin)
        os.close(stdout)
        while "pid" not in (told := self._hear()):
            self._note(told)
        return _Forked(self, told["pid"], os.fdopen(to_child, "wb", 0), os.fdopen(from_child, "rb", 0))

    def code_of(self, pid: int) -> int:
        """The status with which a process has ended; waits for it."""
        while pid not in self._codes:
            self._note(self._hear())
        return self._codes.pop(pid)

    def close(self) -> None:
        """End it, and what it has forked."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _hear(self) -> dict[str, Any]:
        said = self._socket.recv(1 << 16)
        if not said:
            raise RuntimeError("the process that forks contenders has ended")
        told: dict[str, Any] = json.loads(said)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        self._codes[told["ended"]] = told["code"]


def _serve(parent: socket.socket, device: str) -> int | None:
    """Fork what the parent asks for. In a copy: the status of its job."""
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK")
    _say(parent, works=_copies_work(device))
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([parent, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            _tell_who_ended(parent)
        if parent not in ready:
            continue
        asked, files, _, _ = socket.recv_fds(parent, 1 << 20, 3)
        if not asked:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            os.setpgid(0, 0)
            for number, file in enumerate(files):
                os.dup2(file, number)
            for file in (*files, wakes, wake):
                os.close(file)
            parent.close()
            return _work(json.loads(asked))
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whichever of both is first
        for file in files:
            os.close(file)
        _say(parent, pid=pid)


def _say(parent: socket.socket, **what: Any) -> None:
    parent.send(json.dumps(what).encode())


def _tell_who_ended(parent: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            _say(parent, ended=pid, code=os.waitstatus_to_exitcode(status))


def _copies_work(device: str) -> bool:
    """Whether a copy of this process can use the device."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            import torch

            code = int(torch.ones(8, device=device).sum().item() != 8)
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _work(arguments: Sequence[str]) -> int:
    warnings.filterwarnings("ignore")
    name, *argv = arguments[arguments.index("-m") + 1 :]
    sys.argv = [name, *argv]
    sys.stdin = os.fdopen(0, closefd=False)
    try:
        return int(importlib.import_module(name).main(argv) or 0)
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    raise SystemExit(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]))
