"""Memory of the whole run: does a training with the library need more than the training that its user had?

    python -m benchmarks.memory --json memory.json --seconds 560             # one CUDA GPU
    python -m benchmarks.memory --json memory.json --seconds 560 --resume    # what the first run did not reach
    python -m benchmarks.memory --models bert,swin --arms eager,graphed-eager
    python -m benchmarks.memory --scale tiny                                 # does the script work? (CPU)

Each model is trained in each arm by a process of its own. benchmarks/README.md says what is measured, and how.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Job, run_jobs
from benchmarks.command import new_record, settle_choices, settle_defaults, settle_device
from benchmarks.contenders import LASTING, Contender, Setting, start
from benchmarks.memory_phases import PHASES, Phases
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import WORKLOADS, Scale, WorkloadUnavailable, build
from benchmarks.zoo_models import FULL, TINY, NotInstalled, Parts
from benchmarks.zoo_models.cases import CASES

Row = dict[str, Any]

NO_CLAIM = (
    "NO MEMORY CLAIM (a CPU has no such figures, and tiny models say nothing): only that the script runs"
)

OF_ZOO = {"swin": "case: Swin-T", "deberta": "case: DeBERTa-v2"}
MODELS = (*WORKLOADS, *OF_ZOO)

PLAIN_LOOP = (
    "eager",
    "compile",
    "reduce-overhead",
    "graphed-eager",
    "graphed-compiled",
    "accelerate",
    "backend",
)
LIGHTNING = ("lightning", "lightning-compile", "lightning-graphed-eager", "lightning-graphed-compiled")
ARMS = (*PLAIN_LOOP, *LIGHTNING)

_COLUMNS = (
    *("model", "arm", "run", "replaying"),
    *("plain", "optimizer", "compile", "capture", "second", "compare", "audit", "allocated"),
)

ALLOWED: dict[str, tuple[str, float, float | None]] = {
    "graphed-eager": ("eager", 1.05, None),
    "graphed-compiled": ("compile", 1.10, 1.00),
    "accelerate": ("compile", 1.10, 1.00),
    "backend": ("compile", 1.10, 1.00),
    "lightning-graphed-eager": ("lightning", 1.05, None),
    "lightning-graphed-compiled": ("lightning-compile", 1.10, 1.00),
}
"""Of what each arm may need how much: in the whole run, and while it replays."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: all)")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated (default: all)")
    parser.add_argument("--processes", type=int, help="at a time (default: 4; CPU: 1)")
    parser.add_argument("--seconds", type=float, help="for the whole run: what is done by then is kept")
    parser.add_argument("--timeout-s", type=float, default=300, help="for one row")
    parser.add_argument("--settle-s", type=float, default=60, help="at most, until plans are chosen")
    parser.add_argument("--steps", type=int, help="while replaying (default: 100; CPU: 5)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--resume", action="store_true", help="keep the finished rows of the --json file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle_choices(parser, args, models=MODELS, arms=ARMS)
    settle_device(parser, args)
    settle_defaults(args, processes=(4, 1), steps=(100, 5))
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE, the record of the run to go on with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if an arm crashed or ran out of time."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.child:
        be_child(args.models[0], args.arms[0], args)
        return 0
    record = _measured(args, argv)
    claims = record["memory_claim"]
    title = "Peak reserved memory, MiB" if claims else NO_CLAIM
    print_table(
        title,
        _COLUMNS,
        list(map(_cells, record["rows"])),
    )
    for claim in record["claims"]:
        print(
            "{model} {arm}: {ratio:.2f}x of {than} {when}, at most {allowed:.2f}x{missed}".format(
                **claim, missed="" if claim["met"] else ": MISSED"
            )
        )
    return int(any(row["error"] for row in record["rows"]))


def be_child(model: str, arm: str, args: argparse.Namespace) -> None:
    """Train one model in one arm, and write the row to `args.child`."""
    row = _no_row(model, arm)
    phases = Phases(torch.device(args.device))
    try:
        phases.watch()
        train = _lightning if arm in LIGHTNING else _plain_loop
        row |= train(model, arm, args, phases)
        row["stage"] = "done"
    except (NotInstalled, WorkloadUnavailable) as reason:
        row |= {"skipped": str(reason), "stage": "done"}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:1000]
        row["error_at"] = traceback.format_exc().strip().splitlines()[-8:]
    phases.note()
    row |= {
        "phases": phases.peaks,
        "reserved_mib": phases.most("reserved"),
        "allocated_mib": phases.most("allocated"),
        "replaying_mib": phases.most("reserved", ("replaying",)),
    }
    write_json(args.child, row)


# -- training ---------------------------------------------------------------------------------------------


def _plain_loop(model: str, arm: str, args: argparse.Namespace, phases: Phases) -> Row:
    setting = Setting(
        lambda: _parts(model, args.scale),
        torch.device(args.device),
        autocast=True,
        engine="cuda" if args.device == "cuda" else "emulated",
    )
    contender = start(arm, setting)
    phases.go_on("plain steps")
    taught = _Steps(args, phases, _of_regions if arm == "backend" else contender.state, arm)
    loss = torch.zeros(())
    while not taught.enough():
        loss = contender.step()
        taught.made()
    return taught.told() | _of_report(contender) | {"last_loss": float(loss)}


def _lightning(model: str, arm: str, args: argparse.Namespace, phases: Phases) -> Row:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from benchmarks.lightning_step import CycledBatches, TrainedModule
    from benchmarks.zoo_models.entry import seed
    from pygraph_train import PyGraphCallback

    seed(0)
    workload = _workload(model, args.scale)
    module = TrainedModule(workload, "compile" if arm == "lightning-compile" else "eager")
    pygraph: PyGraphCallback | None = None
    if "graphed" in arm:
        engine: Any = "cuda" if args.device == "cuda" else "emulated"
        pygraph = PyGraphCallback(compile=arm.endswith("compiled"), engine=engine)
    contender = Contender(arm, lambda: torch.zeros(()), None if pygraph is None else pygraph.report)
    taught = _Steps(args, phases, contender.state, arm)

    class Watch(pl.Callback):
        loss: Any = None

        def on_train_start(self, *_: Any) -> None:
            phases.go_on("plain steps")

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
            self.loss = outputs["loss"]
            taught.made()
            trainer.should_stop = taught.enough()

    watch = Watch()
    trainer = pl.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=10_000,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[c for c in (pygraph, watch) if c is not None],
    )
    trainer.fit(module, DataLoader(CycledBatches(workload.batches), batch_size=None))
    return taught.told() | _of_report(contender) | {"last_loss": float(watch.loss)}


class _Steps:
    """How many steps are made: until the library has chosen, and then those that only replay."""

    def __init__(
        self, args: argparse.Namespace, phases: Phases, state: Callable[[], object], arm: str
    ) -> None:
        self._phases, self._state = phases, state
        self._least = 5 if arm not in ALLOWED else 15 if args.device == "cpu" else 40
        self._most = 30 if args.device == "cpu" else 400
        self._end, self._steps = time.monotonic() + args.settle_s, args.steps
        self._seen: list[object] = []
        self._count = 0
        self._chosen: int | None = None

    def made(self) -> None:
        """One more step."""
        self._count += 1
        if self._chosen is not None:
            return
        self._seen = [*self._seen, self._state()][-LASTING:]
        rests = self._seen == self._seen[:1] * LASTING and self._count >= self._least
        if rests or self._count >= self._most or time.monotonic() > self._end:
            self._chosen = self._count
            self._phases.go_on("replaying")

    def enough(self) -> bool:
        return self._chosen is not None and self._count >= self._chosen + self._steps

    def told(self) -> Row:
        return {"steps": self._count, "chosen_after": self._chosen}


def _of_report(contender: Contender) -> Row:
    if contender.report is None:
        return {}
    told = contender.report().to_dict()
    names = ("headline", "running_plan", "steps_from_graphs", "fallbacks", "notes", "first_replay_step")
    return {name: told[name] for name in names}


def _of_regions() -> object:
    """Changes as long as the compile backend tries things out."""
    from pygraph_train import backend

    rows = backend.report().regions
    return [(r.name, r.captures, r.decision if r.settled else r.replays + r.plain_runs) for r in rows]


def _workload(model: str, scale: Scale) -> Any:
    if model in WORKLOADS:
        return build(model, scale)
    from benchmarks.workloads import Workload, make_batches

    parts = CASES[OF_ZOO[model]].build(FULL if scale == "full" else TINY)
    return Workload(parts.model, make_batches(parts.make_batch), parts.loss_of)


def _parts(model: str, scale: Scale) -> Parts:
    if model in OF_ZOO:
        return CASES[OF_ZOO[model]].build(FULL if scale == "full" else TINY)
    workload = build(model, scale)
    batches = iter(workload.batches)
    return Parts(workload.module, lambda: next(batches), workload.loss)


# -- all rows ---------------------------------------------------------------------------------------------


def _measured(args: argparse.Namespace, argv: Sequence[str]) -> Row:
    record = new_record("memory", args)
    record |= {"memory_claim": record.pop("timing_claim"), "rows": [], "claims": [], "not_run": []}
    rows: list[Row] = record["rows"]
    if args.resume and args.json.exists():
        rows += [row for row in json.loads(args.json.read_text())["rows"] if row["stage"] == "done"]
    done = {(row["model"], row["arm"]) for row in rows}
    wanted = [(m, a) for m in args.models for a in args.arms if (m, a) not in done]
    with tempfile.TemporaryDirectory() as made:
        jobs = {}
        for model, arm in wanted:
            log = Path(made) / f"{model}-{arm}.log"
            own = ["--models", model, "--arms", arm, "--child", str(log.with_suffix(".json"))]
            job = Job(f"{model} {arm}", ["-W", "ignore", "-m", "benchmarks.memory", *argv, *own], log)
            jobs[job.name] = (job, model, arm)

        def ended(job: Job, why: str | None) -> None:
            _, model, arm = jobs[job.name]
            path = job.log.with_suffix(".json")
            row = json.loads(path.read_text()) if path.exists() else _no_row(model, arm)
            row["error"] = row["error"] or why
            rows.append(row)
            record["claims"] = claims_of(rows)
            write_json(args.json, record)
            print(f"{job.name}: {row['error'] or '  '.join(_cells(row)[2:])}", flush=True)

        all_jobs = [job for job, _, _ in jobs.values()]
        left = run_jobs(
            all_jobs, ended, processes=args.processes, timeout_s=args.timeout_s, seconds=args.seconds
        )
    record["not_run"] = [job.name for job in left]
    rows.sort(key=lambda row: (MODELS.index(row["model"]), ARMS.index(row["arm"])))
    record["claims"] = claims_of(rows)
    write_json(args.json, record)
    return record


def claims_of(rows: Sequence[Row]) -> list[Row]:
    """What arms need of what another one needs, where both were measured on a GPU."""
    by_name = {
        (row["model"], row["arm"]): row for row in rows if row.get("reserved_mib") and not row["error"]
    }
    found = []
    for (model, arm), row in by_name.items():
        than, run, replaying = ALLOWED.get(arm, ("", math.inf, None))
        other = by_name.get((model, than))
        for when, key, allowed in (
            ("in the whole run", "reserved_mib", run),
            ("while replaying", "replaying_mib", replaying),
        ):
            if other is None or allowed is None or not row.get(key):
                continue
            ratio = row[key] / other["reserved_mib"]
            claim = {"model": model, "arm": arm, "than": than, "when": when, "ratio": ratio}
            found.append(claim | {"allowed": allowed, "met": ratio <= allowed})
    return found


def _no_row(model: str, arm: str) -> Row:
    return {"model": model, "arm": arm, "stage": "began", "error": None, "skipped": None, "phases": {}}


def _cells(row: Row) -> list[str]:
    def cell(value: Any) -> str:
        return DASH if value is None else str(value)

    if row["error"] or row["skipped"]:
        said = (row["error"] or "skipped").splitlines()[0][:40]
        return [row["model"], row["arm"], said, *[""] * (len(PHASES) + 1)]
    whole = [row.get("reserved_mib"), row.get("replaying_mib")]
    # without a GPU: whether there was such a phase
    phases = [row["phases"].get(name) for name in PHASES[1:8]]
    of_phases = [None if p is None else p.get("reserved_mib", "yes") for p in phases]
    return [row["model"], row["arm"], *map(cell, [*whole, *of_phases, row.get("allocated_mib")])]


if __name__ == "__main__":
    raise SystemExit(main())
