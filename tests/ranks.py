"""Two processes that train together over gloo, for tests: each runs the same function, and tells what it found."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["RankFailed", "Ranks", "alone_in_a_group", "pair_of_ranks"]

START_SECONDS = 120.0
"""What a process takes to import torch on a busy machine."""


class RankFailed(Exception):
    """A rank raised, or said nothing in time. The message has the tracebacks."""


def _serve(rank: int, ranks: int, port: int, backend: str, orders: Any) -> None:
    """One rank: runs what it is told to, until it is told nothing more."""
    os.environ.update(
        TORCHELASTIC_RUN_ID="tests",  # as torchrun does: Lightning starts no processes of its own then
        GROUP_RANK="0",
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, rank=rank, world_size=ranks)
    orders.send(("ready", None))
    while (order := orders.recv()) is not None:
        name, timeout, kwargs = order
        faulthandler.dump_traceback_later(0.9 * timeout)  # says where a rank hangs
        module, _, function = name.rpartition(":")
        try:
            torch.manual_seed(0)
            result = getattr(importlib.import_module(module), function)(rank, **kwargs)
            orders.send(("done", result))
        except BaseException:
            orders.send(("raised", traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    distributed.destroy_process_group()


class Ranks:
    """Processes that wait for work. They are started anew after a failure.

    Args:
        ranks: how many.
        backend: of their process group; "nccl" gives each rank a GPU.
    """

    def __init__(self, ranks: int = 2, backend: str = "gloo") -> None:
        self._ranks, self._backend = ranks, backend
        self._processes: list[Any] = []
        self._orders: list[Any] = []

    def run(self, name: str, *, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `module:function` as `function(rank, **kwargs)` on all ranks.

        Args:
            timeout: seconds after which everything is ended.
        Returns:
            What each rank returned.
        Raises:
            RankFailed: a rank raised or was not done in time.
        """
        answers = self._ask(name, timeout, kwargs)
        failed = [f"rank {rank}: {told}" for rank, (kind, told) in enumerate(answers) if kind != "done"]
        if failed:
            self.stop()
            raise RankFailed("\n".join(failed))
        return [told for _, told in answers]

    def answers(
        self, name: str, *, timeout: float = 60.0, keep: bool = False, **kwargs: Any
    ) -> list[tuple[str, Any]]:
        """As `run`, for ranks that may fail: ("done", result), ("raised", traceback) or ("silent", "").

        Args:
            keep: let processes go on that are all done.
        """
        found = self._ask(name, timeout, kwargs)
        if not keep or any(kind != "done" for kind, _ in found):
            self.stop()
        return found

    def _ask(self, name: str, timeout: float, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        if not self._processes:
            self._start()
        for orders in self._orders:
            orders.send((name, timeout, kwargs))
        return [self._answer(orders, timeout) for orders in self._orders]

    def _answer(self, orders: Any, timeout: float) -> tuple[str, Any]:
        try:
            if not orders.poll(timeout):
                return "silent", f"not done after {timeout:.0f} s"
            kind, told = orders.recv()
            return str(kind), told
        except (EOFError, ConnectionResetError):
            return "ended", "the process has ended"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self._ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._ranks, port, self._backend, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._orders.append(mine)
        for orders in self._orders:
            kind, told = self._answer(orders, START_SECONDS)
            assert kind == "ready", told

    def stop(self) -> None:
        """End the processes."""
        for orders in self._orders:
            with suppress(OSError):
                orders.send(None)
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._orders = [], []


@contextmanager
def pair_of_ranks(ranks: int = 2, backend: str = "gloo") -> Iterator[Ranks]:
    """Processes for the tests of one module."""
    pool = Ranks(ranks, backend)
    try:
        yield pool
    finally:
        pool.stop()


@contextmanager
def alone_in_a_group() -> Iterator[None]:
    """A process group of this process."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
