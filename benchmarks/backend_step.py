"""The compile backend "pygraph" against torch.compile and mode="reduce-overhead", without a Trainer.

    python -m benchmarks.backend_step --json backend.json                     # one CUDA GPU, the main modes
    python -m benchmarks.backend_step --models speech,dlrm --modes all --kinds fb
    python -m benchmarks.backend_step --json backend.json --resume            # the workloads that it lacks
    python -m benchmarks.backend_step --scale tiny --models mlp               # does the script work? (CPU)

The loss function of a workload is compiled as one function of the batch, with bf16 autocast inside; backward is
called outside of it. `fb` is forward, loss and backward with gradients set to None in between, as the GraCE paper
times it; `step` adds a fused AdamW. Batches are on the device and are taken in turn: inputs move.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks.backend_summary import (
    LOSS_TOLERANCE,
    disagreements,
    ratio_table,
    summarize,
    time_table,
    verdicts,
)
from benchmarks.backend_trial import Trial, memory_mib, profile_kind, settle, time_kind
from benchmarks.limit import StepTimeout, time_limit
from benchmarks.paper_workloads import ALL_WORKLOADS, build
from benchmarks.record import environment, print_table, scrub, write_json
from benchmarks.workloads import WorkloadUnavailable
from pygraph_train.torch_private.cuda import clear_cublas_workspaces

Row = dict[str, Any]

# arguments of torch.compile; None: not compiled
MODES: dict[str, dict[str, Any] | None] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "pygraph": {"backend": "pygraph", "options": {}},
    # Inductor's own switches, off by default in every mode
    "pygraph-combo": {"backend": "pygraph", "options": {"inductor": {"combo_kernels": True}}},
    "pygraph-pdl": {"backend": "pygraph", "options": {"inductor": {"triton.enable_pdl": True}}},
    "reduce-overhead-combo": {"options": {"triton.cudagraphs": True, "combo_kernels": True}},
    "eager": None,
}
MAIN_MODES = {"cuda": ("default", "reduce-overhead", "pygraph"), "cpu": ("default", "eager", "pygraph")}
KINDS = ("fb", "step")
ROOT = Path(__file__).parents[1]


def _compile_options(mode: str, device: torch.device) -> dict[str, Any] | None:
    options = MODES[mode]
    if options is None or "backend" not in options or device.type == "cuda":
        return options
    return {**options, "options": {**options["options"], "engine": "emulated"}}


def measure(model: str, mode: str, args: argparse.Namespace) -> list[Row]:
    """One row a kind of iteration. A crash or a time-out is part of a row, never raised."""
    reason = _skip_reason(mode, args.device)
    names = {"model": model, "mode": mode, "caches": args.caches}
    rows: list[Row] = [{**names, "kind": kind, "error": None, "skipped": reason} for kind in args.kinds]
    if reason:
        return rows
    started = time.perf_counter()
    left = list(rows)
    try:
        with time_limit(args.timeout_s), cold_caches(args.device if args.caches == "cold" else "cpu"):
            forget(args.device)
            _measure(model, mode, args, left)
    except WorkloadUnavailable as unavailable:
        _fill(left, skipped=str(unavailable))
    except StepTimeout:
        _fill(left, error=f"timed out after {args.timeout_s} s")
    except Exception as error:
        _fill(left, error=f"{type(error).__name__}: {error}"[:2000])
    _fill(rows, seconds=round(time.perf_counter() - started, 1))
    with contextlib.suppress(RuntimeError):  # of a lost CUDA context: main() finds out
        forget(args.device)
    return rows


def _measure(model: str, mode: str, args: argparse.Namespace, left: list[Row]) -> None:
    """Fill the rows and take those that are complete from `left`."""
    device = torch.device(args.device)
    trial = Trial(build(model, args.scale), _compile_options(mode, device), device)
    trial.synchronize()
    before = memory_mib("memory_reserved", device)
    ours = "pygraph" in mode
    facts = settle(trial, _choices if ours else lambda: "none to make")
    _fill(left, reserved_before_mib=before, **facts)
    if not trial.parameters:
        unfit = [row for row in left if row["kind"] == "step"]
        _fill(unfit, skipped="nothing to optimize: the workload has no parameters")
        left[:] = [row for row in left if row not in unfit]
    for row in left:
        row.update(time_kind(trial, row["kind"], windows=args.windows, window_s=args.window_s))
        if ours:
            row.update(_graph_facts())
    while left:
        left[0].update(profile_kind(trial, left[0]["kind"], left[0]["iterations_a_window"]))
        left.pop(0)


def _fill(rows: Iterable[Row], **facts: Any) -> None:
    for row in rows:
        row.update(facts)


@contextlib.contextmanager
def cold_caches(device: str) -> Iterator[None]:
    """On a GPU, Inductor and Triton find nothing that was compiled before, and leave nothing behind."""
    if device == "cpu":  # where no time is claimed
        yield
        return
    from torch._inductor import utils

    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache  # the name before torch 2.8
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh(dir=folder):
        yield


def forget(device: str) -> None:
    """Drop compiled code, graphs and cached memory of the mode before."""
    torch._dynamo.reset()
    if (reset := getattr(sys.modules.get("pygraph_train.backend"), "reset", None)) is not None:
        reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        clear_cublas_workspaces()  # else one mode uses them, and another one keeps them next to its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def warm_compiler(model: str, device: str) -> None:
    """Compile the workload once at its tiny scale: the first mode alone would pay for imports and workers."""
    with contextlib.suppress(Exception), cold_caches(device):  # whatever is wrong, the rows will say it
        Trial(build(model, "tiny"), {}, torch.device(device)).iterate()
    forget(device)


def _skip_reason(mode: str, device: str) -> str | None:
    if mode.startswith("reduce-overhead") and device == "cpu":
        return "needs CUDA"
    if "pygraph" in mode:
        try:
            from pygraph_train.backend import (
                report,  # noqa: F401  registers the name with Dynamo
                reset,  # noqa: F401  registers the name with Dynamo
            )
        except ImportError as error:
            return f"backend not there: {error}"
        if "pygraph" not in torch.compiler.list_backends():
            return "backend not there: importing pygraph_train.backend does not register it"
    return None


def _choices() -> object:
    """Decisions and captures of all regions, None while something is still being measured."""
    report = _report()
    return [(r["decision"], r["captures"]) for r in report["regions"]] if report["settled"] else None


def _report() -> dict[str, Any]:
    from pygraph_train.backend import report

    return report().to_dict()


def _graph_facts() -> Row:
    """What pygraph did with the regions."""
    report = _report()
    regions = report["regions"]
    return {
        "settled": report["settled"],
        "decisions": dict(Counter(str(region["decision"]) for region in regions)),
        "regions": regions,
    }


def measure_here(model: str, modes: Sequence[str], args: argparse.Namespace) -> Iterator[list[Row]]:
    """All `modes` in this process. Ends early when the CUDA context is lost."""
    if args.compile_warmup and any(MODES[mode] is not None for mode in modes):
        warm_compiler(model, args.device)
    for mode in modes:
        rows = measure(model, mode, args)
        for row in rows:
            print(_line(row), flush=True)
        yield rows
        if _lost_device(args.device):
            return


def measure_apart(
    model: str, modes: Sequence[str], args: argparse.Namespace, gpu: int = 0
) -> Iterator[list[Row]]:
    """Each mode in a process of its own: what one leaves behind (a profiler slows launches) meets no other."""
    for mode in modes:
        rows, status = _child(model, mode, args, gpu=gpu)
        if not rows:
            ended = {"model": model, "mode": mode, "skipped": None, "error": f"process ended: {status}"}
            rows = [{**ended, "kind": kind} for kind in args.kinds]
            print(_line(rows[-1]), flush=True)
        yield rows


def measured(args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of everything that was asked for, as they come."""
    if args.gpus > 1:
        yield from measure_spread(args)
        return
    for model in args.models:
        yield from (measure_here if args.in_process else measure_apart)(model, args.modes, args)
        if args.in_process and _lost_device(args.device):
            print("the CUDA context is lost: run the other workloads again, without --in-process")
            return


def measure_spread(args: argparse.Namespace) -> Iterator[list[Row]]:
    """A workload on each of `args.gpus` GPUs at a time: its modes follow each other on the same one.

    A GPU has its share of the processors.
    """
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(args.gpus):
        free.put(gpu)
    processors = sorted(os.sched_getaffinity(0))

    def measure_model(model: str) -> list[Row]:
        gpu = free.get()
        # of this thread and its processes; halves of a core, often numbered far apart, stay together
        os.sched_setaffinity(0, processors[gpu :: args.gpus])
        try:
            return [row for new in measure_apart(model, args.modes, args, gpu) for row in new]
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(args.gpus) as pool:
        for done in as_completed([pool.submit(measure_model, model) for model in args.models]):
            yield done.result()


def compile_ahead(args: argparse.Namespace) -> None:
    """Compile every workload in every mode, several at a time, for the processes that measure them."""
    jobs = [(model, mode) for model in args.models for mode in args.modes if MODES[mode] is not None]
    with ThreadPoolExecutor(args.compile_jobs) as pool:
        gpus = itertools.cycle(range(args.gpus))
        for _ in pool.map(lambda job, gpu: _child(*job, args, gpu=gpu, compile_only=True), jobs, gpus):
            pass  # whatever is wrong, the rows will say it


def _child(
    model: str, mode: str, args: argparse.Namespace, *, gpu: int = 0, compile_only: bool = False
) -> tuple[list[Row], int | str]:
    """Rows and exit status (or why it was ended) of a process that measures `mode`."""
    limit = args.timeout_s * 2 if args.timeout_s else None  # the process's own limit comes first
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        own = {"models": model, "modes": mode, "kinds": ",".join(args.kinds), "child": path}
        same = ("scale", "device", "windows", "window_s", "timeout_s", "compile_warmup", "caches")
        own |= {name: getattr(args, name) for name in same}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
        command = [sys.executable, "-m", "benchmarks.backend_step", *options]
        output = subprocess.DEVNULL if compile_only else None
        environ = dict(os.environ)
        if args.gpus > 1:
            visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus))))
            environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu]
        if compile_only:
            command.append("--compile-only")
        try:
            status: int | str = subprocess.run(
                command, cwd=ROOT, timeout=limit, stdout=output, stderr=output, env=environ
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"did not end after {limit} s"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows, status


@contextlib.contextmanager
def shared_caches() -> Iterator[None]:
    """The processes started meanwhile find what others of them compiled, and nothing older."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {name: str(Path(folder) / name.lower()) for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _lost_device(device: str) -> bool:
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def _line(row: Row) -> str:
    name = f"{row['model']} {row['mode']} {row['kind']}:"
    if row["skipped"]:
        return f"{name} skipped: {row['skipped']}"
    if row["error"]:
        return f"{name} {row['error'].splitlines()[0]}"
    times = f"{row['ms']:.3f} ms, compile {row['compile_s']:.1f} s, settle {row['settle_s']:.1f} s"
    coverage = "" if row.get("coverage") is None else f", {row['coverage']:.1%} of kernels in graphs"
    return f"{name} {times}{coverage}, {row['seconds']} s in all"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(ALL_WORKLOADS), help="comma-separated (default: all)")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}, or all (default: the first three)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="fb, step (default: both)")
    parser.add_argument("--windows", type=int, help="timed windows (default: 5; CPU: 2)")
    parser.add_argument("--window-s", type=float, help="seconds a window (default: 0.3; CPU: 0)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--timeout-s", type=int, default=300, help="limit of one mode; 0: none")
    parser.add_argument("--compile-warmup", type=int, choices=(0, 1), help="compile the tiny scale first")
    parser.add_argument(
        "--caches",
        choices=("cold", "shared"),
        default="cold",
        help="shared: processes share compiled kernels; saves time, no compile times compared",
    )
    parser.add_argument(
        "--compile-jobs",
        type=int,
        default=0,
        help="with --caches shared: compile so many at a time beforehand",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="measure workloads on so many GPUs at a time, each one on one of them",
    )
    parser.add_argument("--in-process", action="store_true", help="no process for each mode")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each mode")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows of the --json file; measure the other workloads"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and args.scale == "full":
        parser.error("--scale full needs a CUDA GPU; --scale tiny tries the script on a CPU")
    args.modes = {None: ",".join(MAIN_MODES[args.device]), "all": ",".join(MODES)}.get(args.modes, args.modes)
    for name, known in (("models", list(ALL_WORKLOADS)), ("modes", list(MODES)), ("kinds", list(KINDS))):
        chosen = list(dict.fromkeys(getattr(args, name).split(",")))
        if unknown := [c for c in chosen if c not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
        setattr(args, name, chosen)
    args.kinds.sort()  # fb first: it leaves the weights as they are
    on_cpu = args.device == "cpu"
    warmup = int(args.scale == "full" and args.caches == "cold")
    defaults = {"windows": (5, 2), "window_s": (0.3, 0.0), "compile_warmup": (warmup, 0)}
    for name, values in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, values[on_cpu])
    if args.scale == "full" and args.windows < 3:
        parser.error("--scale full: a median needs at least 3 windows")
    if args.gpus > 1 and (args.in_process or args.device != "cuda"):
        parser.error("--gpus needs CUDA, and processes")
    if args.compile_jobs and (args.caches != "shared" or args.in_process):
        parser.error("--compile-jobs needs --caches shared, and processes")
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, the record of the run to go on with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON. Returns 1 if any mode crashed or timed out."""
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    if args.child:
        return _be_child(args)
    claim = args.device == "cuda" and args.scale == "full"
    title = "Training iteration, ms"
    if not claim:
        title = "NO TIMING CLAIM (tiny models, emulated on a CPU or too small for a GPU): only that the script runs"
        print(title)
    record: dict[str, Any] = {"benchmark": "backend_step", "timing_claim": claim, "device": args.device}
    record |= {"environment": environment(), "rows": [], "summary": {}, "loss_tolerance": LOSS_TOLERANCE}
    wanted = args.models
    order = {model: i for i, model in enumerate(wanted)}
    rows: list[Row] = record["rows"]
    if args.resume and args.json.exists():
        rows += _rows_so_far(args, record["environment"])
        args.models = [model for model in wanted if all(row["model"] != model for row in rows)]
        record["summary"] = summarize(rows, args.device)
    with shared_caches() if args.caches == "shared" else contextlib.nullcontext():
        if args.compile_jobs:
            compile_ahead(args)
        for new in measured(args):
            rows += new
            rows.sort(key=lambda row: order.get(row["model"], -1))
            record["summary"] = summarize(rows, args.device)
            write_json(args.json, record)
    _print_results(title, rows, record["summary"], args.device)
    return int(any(row["error"] for row in rows))


def _rows_so_far(args: argparse.Namespace, here: dict[str, Any]) -> list[Row]:
    """The rows of the workloads that the run in `args.json` ended with all of `args.modes`.

    Ends the program where another machine, version or commit measured them.
    """
    before = json.loads(args.json.read_text())
    free = ("date", "argv")
    theirs = before["environment"]
    if other := [
        name for name, value in scrub(here).items() if name not in free and theirs.get(name) != value
    ]:
        raise SystemExit(
            f"--resume: {args.json} was measured with another {', '.join(other)}; name another --json file"
        )
    rows: list[Row] = before["rows"]
    measured = {(row["model"], row["mode"], row["kind"]) for row in rows}
    asked = set(itertools.product(args.modes, args.kinds))
    return [row for row in rows if all((row["model"], *one) in measured for one in asked)]


def _be_child(args: argparse.Namespace) -> int:
    if args.compile_only:
        device = torch.device(args.device)
        Trial(build(args.models[0], args.scale), _compile_options(args.modes[0], device), device).iterate()
        return 0
    rows: list[Row] = []
    for new in measure_here(args.models[0], args.modes, args):
        rows += new
        write_json(args.child, {"rows": rows})
    return int(any(row["error"] for row in rows))


def _print_results(title: str, rows: Sequence[Row], summary: dict[str, Any], device: str) -> None:
    print_table(title, *time_table(rows, summary))
    if device == "cpu":  # no ratios, and the emulation draws other dropout masks than Inductor
        return
    print_table("Ratios", *ratio_table(rows, summary))
    for line in verdicts(summary["totals"]) + disagreements(summary["entries"]):
        print(line)


if __name__ == "__main__":
    raise SystemExit(main())
