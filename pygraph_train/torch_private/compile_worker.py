"""The process beside a training in which Inductor works.

`python -m pygraph_train.torch_private.compile_worker FILE PARENT`: the number of an open file that has the order, and
the process that gives it. Standard input is a pipe that nobody writes to. The process ends when the pipe does, or its
parent, or when it has a context on a CUDA device: that takes memory which the training may need.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback

__all__: list[str] = []

_LOOK_EVERY = 0.25
"""Seconds."""


def _watch(parent: int) -> None:
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], _LOOK_EVERY)
        if os.getppid() != parent or (ready and not os.read(sys.stdin.fileno(), 1)):
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)  # those that Inductor has begun, too
            os._exit(3)
        _end_with_context()


def _end_with_context() -> None:
    beside = sys.modules.get("pygraph_train.torch_private.compile_beside")
    has_context = getattr(beside, "has_device_context", None)  # while it is imported there is none
    try:
        if has_context is None or not has_context():
            return
        print("it has taken memory of the device", flush=True)
    except Exception:  # what cannot be told cannot be promised
        traceback.print_exc()
    os._exit(4)


def main(file: int, parent: int) -> None:
    """Compile what the file orders. Only idle processors are used."""
    os.nice(19)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    with os.fdopen(file, "rb") as opened:
        order = opened.read()

    from pygraph_train.torch_private.compile_beside import fill_caches

    try:
        fill_caches(order)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    _end_with_context()
    sys.stdout.flush()
    os._exit(0)  # worker threads of Inductor may take long to end, and all is on disk


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
