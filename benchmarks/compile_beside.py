"""What `compile_beside=True` saves and costs: Inductor works in a process beside the training, or in the training.

    python -m benchmarks.compile_beside --json beside.json             # one CUDA GPU
    python -m benchmarks.compile_beside --scale tiny --device cpu      # does the script work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import NO_CLAIM, new_record, settle_device
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import WORKLOADS, build_training
from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.selection import timing
from pygraph_train.step import decisions
from pygraph_train.step.beside import Beside, WorkState
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.program import plain_call
from pygraph_train.torch_private.compile_beside import cache_counts

ARMS = ("beside", "here")
MIB = 1 << 20
STOPPED_EVERY = 3
"""Of so many windows, the process beside the training is stopped in one, to see what its work costs the others."""
STOPPED_MOST = 10
WINDOWS_AFTER = 8
"""So many more once there is a graph of compiled kernels: the plans are compared."""
COMPARED = 20
"""Losses that are compared: the first ones, and those of compiled steps from the same state."""

Row = dict[str, Any]


class Measurement:
    """One training with one of the arms."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        self._args = args
        self._device = torch.device(args.device)
        self._training = build_training(args.model, args.scale, self._device)
        self._start = copy.deepcopy(self._training.module.state_dict())
        on_gpu = self._device.type == "cuda"
        config = PyGraphConfig(compile_beside=arm == "beside", engine="cuda" if on_gpu else "emulated")
        training = self._training
        self.step = GraphedStep(
            training.loss, model=training.module, optimizer=training.optimizer, config=config
        )
        self._made = 0
        self._stalls: list[float] = []
        self.windows: dict[str, list[float]] = {"worked": [], "stopped": []}
        self._others_mib: dict[str, list[int]] = {"before": [], "meanwhile": []}
        self._host_mib, self._processes = 0, 0

    def run(self) -> Row:
        """Train until steps are replayed with Inductor's kernels, and a little longer."""
        began = time.perf_counter()
        torch.manual_seed(0)
        first = [float(self._one()) for _ in range(COMPARED)]
        hits, misses = cache_counts()
        worker_s, ready, after = 0.0, False, 0
        while after < WINDOWS_AFTER and time.perf_counter() - began < self._args.seconds:
            after += self._tried()
            beside, state = self._beside(), self._state()
            number = len(self.windows["worked"]) + len(self.windows["stopped"])
            stopped = state is WorkState.UNDER_WAY and number % STOPPED_EVERY == STOPPED_EVERY - 1
            stopped &= len(self.windows["stopped"]) < STOPPED_MOST
            if stopped:
                _signal(beside, signal.SIGSTOP)
            seconds, ms = self._window()
            self._look(state, beside)
            if stopped:
                _signal(beside, signal.SIGCONT)
            if state is self._state() is WorkState.UNDER_WAY:
                self.windows["stopped" if stopped else "worked"].append(ms)
            worker_s += seconds if state is WorkState.UNDER_WAY and not stopped else 0.0
            ready = ready or self._state() is WorkState.READY
            if ready and self._device.type != "cuda":  # the emulation has no graph of Inductor's kernels
                break
        found = [now - then for now, then in zip(cache_counts(), (hits, misses), strict=True)]
        report, steps = self.step.report(), self._made
        row: Row = {
            "compiled": self._compiled(),
            "ready": ready,
            "stalls_s": [round(s, 2) for s in self._stalls],
            "compile_s": report.compile_seconds,
            "worker_s": worker_s if ready else None,
            "cache_hits": found[0],
            "cache_misses": found[1],
            "windows_ms": self.windows,
            "host_mib": self._host_mib,
            "processes": self._processes,
            "others_mib": self._others_mib,
            "first_losses": first,
            "compiled_losses": self._losses_again() if self._compiled() else None,
            "steps": steps,
            "wall_s": time.perf_counter() - began,
            "notes": list(report.notes),
            "report": report.to_dict(),
        }
        beside = self._beside()
        if beside is not None and not ready and (beside.why or self._device.type == "cuda"):
            row["error"] = beside.why or f"the process had not ended after {self._args.seconds:.0f} s"
        return row

    def _one(self) -> torch.Tensor:
        training, report = self._training, self.step.report()
        before, began = report.compile_seconds, time.perf_counter()
        loss = self.step(training.batches[self._made % len(training.batches)])
        self._made += 1
        if self.step.report().compile_seconds > before:  # the training has waited for a trace or for Inductor
            self._synchronize()
            self._stalls.append(time.perf_counter() - began)
        return loss

    def _window(self) -> tuple[float, float]:
        """Its seconds, and milliseconds a step."""
        self._synchronize()
        if self._device.type != "cuda":
            time.sleep(self._args.window_s)  # the emulation leaves no processor idle
        began, made = time.perf_counter(), self._made
        while time.perf_counter() - began < self._args.window_s:
            for _ in range(10):
                self._one()
            self._synchronize()
        seconds = time.perf_counter() - began
        return seconds, seconds * 1e3 / (self._made - made)

    def _losses_again(self) -> list[float]:
        """Losses of the first batches from the first state, with the plan that was chosen."""
        training = self._training
        training.module.load_state_dict(self._start)
        for state in training.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        torch.manual_seed(1)
        self._made = 0
        return [float(self._one()) for _ in range(COMPARED)]

    def _tried(self) -> bool:
        return any(capture.compiled for capture in self.step.report().captures)

    def _compiled(self) -> bool:
        switches = self.step.report().switches
        return bool(switches) and switches[-1].arm.compiled

    def _beside(self) -> Beside | None:
        variants = self.step._runner._signatures.variants()
        return next((v.beside for v in variants if v.beside is not None), None)

    def _state(self) -> WorkState | None:
        return None if (beside := self._beside()) is None else beside.progress

    def _look(self, state: WorkState | None, beside: Beside | None) -> None:
        """At memory: of the device without what this process's allocator has, and of the host."""
        meanwhile = state is WorkState.UNDER_WAY
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            others = (total - free - torch.cuda.memory_reserved()) // MIB
            self._others_mib["meanwhile" if meanwhile else "before"].append(others)
        if meanwhile and beside is not None and beside._process is not None:
            found = _of_session(beside._process.pid)
            self._host_mib, self._processes = (
                max(self._host_mib, sum(found) // MIB),
                max(self._processes, len(found)),
            )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _signal(beside: Beside | None, number: int) -> None:
    if beside is not None and beside._process is not None and beside._process.poll() is None:
        os.killpg(beside._process.pid, number)


def _of_session(session: int) -> list[int]:
    """Bytes of the host's memory of each process of a session; shared pages count in equal parts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                found += [int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")]
        except (OSError, ValueError, IndexError):
            continue
    return found


def _try_early(args: argparse.Namespace) -> None:
    """Let Inductor be worth it soon: in a loop without an end it would wait for as many steps as make up for it."""
    decisions.compile_seconds = lambda operations: args.declared_s
    if args.device == "cuda":
        return
    made, seconds = decisions.Decisions.__init__, timing.declared_seconds

    def on_cpu(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self.compiles, self.beside = True, self._config.compile_beside

    def call(self: Any, variant: Any, *, makes_step: bool = True) -> Callable[..., Any]:
        return plain_call

    decisions.Decisions.__init__ = on_cpu  # type: ignore[method-assign]
    timing.declared_seconds = lambda arm: seconds(arm) / (2 if arm.compiled else 1)
    Capturing._call_of = call  # type: ignore[method-assign]


def measure(arm: str, args: argparse.Namespace) -> Row:
    """One row. A crash is part of the row, never raised."""
    row: Row = {"arm": arm, "model": args.model, "error": None}
    _try_early(args)
    try:
        row.update(Measurement(arm, args).run())
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    return row


def measured_apart(arm: str, args: argparse.Namespace, argv: Sequence[str]) -> Row:
    """The row of a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.compile_beside", *argv, "--child", arm, str(result)]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(command, env={**os.environ, **caches}, check=False)
        if not result.exists():
            return {"arm": arm, "model": args.model, "error": f"the process ended with {done.returncode}"}
        row: Row = json.loads(result.read_text())
        return row


def summarize(rows: Sequence[Row]) -> Row:
    """What the two rows say together; None where one of them does not say it."""
    found = {row["arm"]: row for row in rows}
    beside, here = found.get("beside", {}), found.get("here", {})
    windows = beside.get("windows_ms") or {}
    others = beside.get("others_mib") or {}
    worked, stopped = windows.get("worked"), windows.get("stopped")
    return {
        "graphs_found": beside.get("cache_hits"),
        "graphs_missing": beside.get("cache_misses"),
        "stalls_beside_s": beside.get("stalls_s"),
        "stalls_here_s": here.get("stalls_s"),
        "worker_s": beside.get("worker_s"),
        "meanwhile_over_stopped": (
            statistics.median(worked) / statistics.median(stopped) if worked and stopped else None
        ),
        "worker_device_mib": (
            max(others["meanwhile"]) - others["meanwhile"][0] if others.get("meanwhile") else None
        ),
        "worker_host_mib": beside.get("host_mib"),
        "first_losses_equal": _equal(beside, here, "first_losses"),
        "compiled_losses_equal": _equal(beside, here, "compiled_losses"),
        "compiled_losses_differ_by": _difference(beside, here),
    }


def _equal(one: Row, other: Row, name: str) -> bool | None:
    return one[name] == other[name] if one.get(name) and other.get(name) else None


def _difference(one: Row, other: Row) -> float | None:
    """The largest one, relative to the loss. Inductor times its kernels anew in each process."""
    pairs = zip(one.get("compiled_losses") or (), other.get("compiled_losses") or (), strict=False)
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=None)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="bert", choices=sorted(WORKLOADS))
    parser.add_argument("--arms", default=",".join(ARMS), help="in this order (default: both)")
    parser.add_argument("--window-s", type=float, default=0.5, help="seconds of a window of steps")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of one training")
    parser.add_argument("--declared-s", type=float, default=0.5, help="what compiling is said to cost")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--child", nargs=2, metavar=("ARM", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle_device(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed or something was not found."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    if args.child:
        arm, file = args.child
        write_json(Path(file), measure(arm, args))
        return 0
    signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(143))  # so that the child ends, too
    rows: list[Row] = []
    record = new_record("compile_beside", args) | {"rows": rows}
    for arm in args.arms.split(","):
        rows.append(measured_apart(arm, args, argv))
        record["summary"] = summarize(rows)
        write_json(args.json, record)
    summary = record["summary"]
    title = f"Inductor beside the training, {args.model}" if record["timing_claim"] else NO_CLAIM
    print_table(title, ["", "measured"], [[name, _cell(value)] for name, value in summary.items()])
    for row in rows:
        if row["error"]:
            print(f"{row['arm']}: {row['error'].splitlines()[0]}")
    return int(any(row["error"] for row in rows) or bool(summary["graphs_missing"]))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or DASH
    if isinstance(value, float):
        return f"{value:.3g}"
    return DASH if value is None else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
