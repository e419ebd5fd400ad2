"""The process beside a training in which Inductor works: `python -m pygraph_train.torch_private.compile_worker FILE`.

Its standard input is a pipe that nobody writes to. It ends when the pipe does, or its parent.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path

__all__: list[str] = []

_LOOK_EVERY = 1.0
"""Seconds."""


def _end_with(parent: int) -> None:
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], _LOOK_EVERY)
        if os.getppid() != parent or (ready and not os.read(sys.stdin.fileno(), 1)):
            os._exit(3)


def main(file: str) -> None:
    """Compile what the file orders. Only idle processors are used."""
    os.nice(19)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    path = Path(file)
    order = path.read_bytes()
    path.unlink()

    from pygraph_train.torch_private.compile_beside import fill_caches

    fill_caches(order)
    sys.stdout.flush()
    os._exit(0)  # worker threads of Inductor may take long to end, and all is on disk


if __name__ == "__main__":
    main(sys.argv[1])
