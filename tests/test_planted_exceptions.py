"""Functions of the library raise, a hundred of them, and no training ends or comes out differently (`make faults`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

for package in ("lightning.pytorch", "accelerate", "transformers"):
    pytest.importorskip(package)

FAULTS, IN_EACH = 100, 4


@pytest.mark.timeout(900)
def test_no_fault_of_the_library_ends_a_training_or_changes_it(tmp_path: Path) -> None:
    """Losses, parameters, state and Python values are those of plain training.

    A `PyGraphError` that says what state training is in is allowed, where a step had acted.
    """
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.planted_exceptions", "--out", str(out)]
    options = {"sample": FAULTS, "faults": IN_EACH, "seed": 45, "jobs": 2}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parent.parent
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = json.loads(out.read_text())
    wrong = [row for row in rows if row["outcome"] not in ("survived", "told", "not called")]
    assert not wrong, "\n\n".join(f"{row['outcome']}: {row['case']}\n{row['text'][-2000:]}" for row in wrong)
    counts = Counter(row["outcome"] for row in rows)
    raised = sum(int(found[1]) for row in rows if (found := re.match(r"(\d+) faults", row["text"])))
    assert counts["told"] <= len(rows) // 5 and raised >= FAULTS // 2, (counts, raised)
