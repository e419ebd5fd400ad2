"""The examples run as their docstrings say, and show what was replayed, once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import pair_of_ranks

pytest.importorskip("lightning.pytorch")

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, *options: str) -> str:
    """What the script prints; it has to succeed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--engine", "emulated", *options],
        capture_output=True,
        text=True,
        timeout=120,
        # a pipe is no terminal, so rich would wrap its table at 80 columns; threads only get in their way
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def replayed(output: str, share: float = 0.8) -> int:
    """The number of replayed steps in the one report that was printed."""
    (found,) = re.findall(r"from graphs\W+all phases in (\d+) of (\d+) steps", output)
    assert int(found[0]) > share * int(found[1])
    return int(found[0])


def test_digits():
    pytest.importorskip("sklearn")
    output = run("lightning_digits.py", "--epochs", "3")
    assert replayed(output) >= 50
    (accuracy,) = re.findall(r"validation accuracy: (\d\.\d+)", output)
    assert float(accuracy) > 0.9


def test_the_notebook_of_the_digits(tmp_path):
    """Its code, from the first cell to the last one."""
    pytest.importorskip("sklearn")
    cells = json.loads((EXAMPLES / "digits.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    script = tmp_path / "digits.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    output = run(str(script))
    assert replayed(output) >= 90
    assert "steps will run as {F} {B} {O}." in output
    (accuracy,) = re.findall(r"validation accuracy: (\d\.\d+)", output)
    assert float(accuracy) > 0.9


@pytest.mark.slow
def test_gan():
    pytest.importorskip("sklearn")
    output = run("lightning_gan.py", "--epochs", "5")
    assert replayed(output) >= 115
    (distance,) = re.findall(r"distance of the mean images: (\d\.\d+)", output)
    assert float(distance) < 0.15


@pytest.mark.slow
def test_fabric_in_whole_steps():
    pytest.importorskip("sklearn")
    output = run("fabric_loop.py", "--epochs", "3", "--whole")
    assert replayed(output) >= 56
    accuracies = re.findall(r"validation accuracy: (\d\.\d+)", output)
    assert float(accuracies[-1]) > 0.9


@pytest.mark.slow
def test_fabric_in_phases():
    pytest.importorskip("sklearn")
    output = run("fabric_loop.py", "--epochs", "3")
    assert replayed(output, share=0.7) >= 49  # the last batch of an epoch is smaller


@pytest.mark.slow
def test_gpt():
    output = run("lightning_gpt.py", "--size", "tiny", "--steps", "40")
    assert replayed(output) >= 33
    (loss,) = re.findall(r"last loss: (\d+\.\d+)", output)
    assert float(loss) < 4.5  # log(number of characters) at the start


@pytest.mark.slow
def test_accelerate_gpt():
    pytest.importorskip("accelerate")
    output = run("accelerate_gpt.py", "--steps", "40")
    assert replayed(output, share=0.7) >= 28
    (loss,) = re.findall(r"last loss: (\d+\.\d+)", output)
    assert float(loss) < 6  # log(number of tokens) = 7.6 at the start


@pytest.mark.slow
def test_accelerate_graphed_step():
    pytest.importorskip("accelerate")
    output = run("accelerate_graphed_step.py", "--steps", "60")
    assert replayed(output, share=0.7) >= 45


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--callback",)])
def test_hf_trainer(options):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    output = run("hf_trainer.py", "--steps", "40", *options)
    assert replayed(output, share=0.7) >= 28


@pytest.mark.slow
def test_ddp_in_two_processes():
    pytest.importorskip("sklearn")
    output = in_two_processes("lightning_ddp.py", "--engine", "emulated", "--epochs", "3")
    assert replayed(output) >= 40
    (accuracy,) = re.findall(r"validation accuracy: (\d\.\d+)", output)
    assert float(accuracy) > 0.9


@pytest.mark.slow
def test_fsdp2_in_two_processes():
    output = in_two_processes("lightning_fsdp2.py", "--engine", "emulated")
    assert replayed(output) >= 50
    (loss,) = re.findall(r"last loss: (\d+\.\d+)", output)
    assert float(loss) < 6  # log(number of tokens) = 7.6 at the start


@pytest.mark.slow
def test_tensor_parallelism_in_two_processes():
    output = in_two_processes("tensor_parallel.py", "--engine", "emulated", "--small", "--steps", "60")
    assert replayed(output) >= 50
    (loss,) = re.findall(r"last loss: (\d+\.\d+)", output)
    assert float(loss) < 3  # log(number of tokens) = 4.2 at the start


@pytest.mark.slow
def test_fsdp2_with_accelerate():
    pytest.importorskip("accelerate")
    with pair_of_ranks() as ranks:
        output, _ = ranks.run("tests.ranks_accelerate:runs_example", timeout=100.0)
    assert replayed(output, share=0.6) >= 80
    (loss,) = re.findall(r"last loss: (\d+\.\d+)", output)
    assert float(loss) < 7


def in_two_processes(script, *arguments):
    """What an example prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
