"""Accelerate's own tests, from the installed package, with our class in the stock class's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

PROGRAM = Path(__file__).parent / "accelerate_suite.py"


def run(script: str, processes: int) -> str:
    """What the script prints; it has to succeed."""
    command = [sys.executable, str(PROGRAM), script]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *launcher, str(PROGRAM), script]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_gradient_synchronisation_and_accumulation() -> None:
    assert "regions replayed" in run("test_sync", processes=1)


@pytest.mark.slow
def test_accelerator_dataloaders_optimizer_and_scheduler() -> None:
    """Trains against a plain baseline, among much else, which graphs have to reproduce."""
    assert "regions replayed" in run("test_script", processes=1)


@pytest.mark.slow
def test_gradient_synchronisation_in_two_processes() -> None:
    run("test_sync", processes=2)
