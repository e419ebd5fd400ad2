"""`python -m pygraph_train explain` and `doctor`: what they print, and their exit statuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pygraph_train.__main__ import main
from pygraph_train.diagnosis import doctor
from pygraph_train.diagnosis.bench import Comparison

pytestmark = pytest.mark.passes_without_graphs("nothing is trained")

SCRIPT = """
import torch
from pygraph_train import explain

model = torch.nn.Linear(4, 3)
tables = [dict.fromkeys(range(n), n) for n in range(64)]
calls = []
optimizer = torch.optim.AdamW(model.parameters())

def step_fn(x):
    y = model(x)
    print("largest", y.max().item())
    return y.sin().square().mean()

def grows(x):
    calls.append(1)
    weight = sum(tables[len(calls)].values())
    return model(x).square().mean() * weight

def clean_fn(x):
    return model(x).square().mean()

def example():
    return step_fn, torch.randn(6, 4)

def changing():
    return grows, torch.randn(6, 4)

def with_optimizer():
    return explain(clean_fn, torch.randn(6, 4), model=model, optimizer=optimizer)

def nothing():
    return 3

def no_step():
    return 3, torch.randn(6, 4)

if __name__ == "__main__":
    raise SystemExit("training began")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "train_of_somebody.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules)
    monkeypatch.delitem(sys.modules, "train_of_somebody", raising=False)
    return path


def test_explain_of_a_script(script: Path) -> None:
    command = [sys.executable, "-m", "pygraph_train", "explain", f"{script}:example"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert run.stdout.startswith("1 obstacle keeps step_fn from being one graph.")
    assert "{F} {B} O, where the forward is 2 graphs" in run.stdout
    assert f'{script}:12\n       print("largest", y.max().item())\n   Why: the graph breaks' in run.stdout
    assert "   Change: Move the line behind" in run.stdout
    assert all(line.startswith("largest ") for line in run.stderr.splitlines()), run.stderr


def test_what_changes_in_each_call_is_named_with_its_line(script: Path) -> None:
    command = [sys.executable, "-m", "pygraph_train", "explain", f"{script}:changing", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = json.loads(run.stdout)
    assert run.returncode == 1 and found["plan"] == "F B O", run.stdout
    assert [o for o in found["obstacles"] if str(o["where"]) == f"{script}:17"], found


def test_explain_of_a_function_that_explains_a_step_with_its_optimizer(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{script}:with_optimizer", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_one_graph"] and found["name"] == "clean_fn" and found["obstacles"] == []
    assert not any("No optimizer" in note for note in found["notes"])


@pytest.mark.slow_after(9)
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{}", "names no function; write script.py:function. The function takes no arguments. It returns"),
        ("{}:absent", "has no function absent"),
        ("{}:step_fn", "cannot be called without arguments: missing a required argument"),
        ("{}:nothing", "returned a value of the type int. The function takes no arguments."),
        ("{}:no_step", "explain takes a function that computes the loss"),
        ("absent.py:example", "there is no file absent.py"),
        ("absent_module:example", "there is no module absent_module"),
    ],
)
def test_a_wrong_call_is_told_in_a_sentence(
    script: Path, capsys: pytest.CaptureFixture[str], target: str, words: str
) -> None:
    assert main(["explain", target.format(script)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and not printed.out


def test_a_module_is_found_by_its_name(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    assert main(["explain", "train_of_somebody:example"]) == 1
    assert "train_of_somebody.py:12" in capsys.readouterr().out


@pytest.fixture
def without_settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYGRAPH_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def with_device(without_settings: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if there were a GPU."""
    monkeypatch = without_settings
    properties = SimpleNamespace(name="A GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return monkeypatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_doctor_without_a_device(
    without_settings: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    lines = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in text.splitlines()}
    assert lines["torch"] == torch.__version__ and lines["device"] == "no CUDA device"
    for name in (
        "python",
        "driver",
        "NCCL",
        "triton",
        "cuda-bindings",
        "lightning",
        "accelerate",
        "transformers",
    ):
        assert lines[name], text
    for name in (
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYGRAPH_DISABLE",
    ):
        assert lines[name] == "not set", text
    assert text.rstrip().endswith("Training steps cannot run from CUDA graphs here.")
    assert "torch was built without CUDA" in text or "torch finds no CUDA device" in text


def test_doctor_with_a_device(with_device: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] and found["facts"]["device 0"] == "A GPU, 80 GiB, compute capability 9.0"
    works = " ".join(found["works"])
    assert "Training steps can run from CUDA graphs." in works
    assert str(doctor.check()).endswith("Training steps can run from CUDA graphs here.")


@pytest.mark.slow_after(9)
@pytest.mark.parametrize(
    ("name", "value", "words", "usable"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "was not tried", True),
        ("PYGRAPH_DISABLE", "1", "PYGRAPH_DISABLE is set", False),
    ],
)
def test_doctor_tells_of_settings(
    with_device: pytest.MonkeyPatch, name: str, value: str, words: str, usable: bool
) -> None:
    with_device.setenv(name, value)
    found = doctor.check()
    assert (name, value) in found.facts
    assert found.usable is usable
    assert [sentence for sentence in found.lacks if words in sentence and sentence.endswith(".")], found.lacks


def test_doctor_tells_of_packages_that_are_missing(with_device: pytest.MonkeyPatch) -> None:
    with_device.setattr(doctor, "_installed", lambda package: None)
    found = doctor.check()
    text = " ".join(found.lacks)
    assert found.usable
    for words in ("triton", "pip install 'pygraph-train[lightning]'", "[accelerate]"):
        assert words in text, text


def test_doctor_tells_of_a_torch_that_is_too_old(with_device: pytest.MonkeyPatch) -> None:
    with_device.setattr(torch, "__version__", type(torch.__version__)("2.10.1"))
    found = doctor.check()
    assert not found.usable and "torch 2.10.1 is too old" in found.lacks[0]


def test_doctor_never_raises(with_device: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("the driver is broken")

    for name in ("is_available", "device_count", "get_device_properties"):
        with_device.setattr(torch.cuda, name, fails)
    found = doctor.check()
    assert not found.usable and "the driver is broken" in str(found)


TRAINING = """
import sys
import torch
from pygraph_train import GraphedStep
from beside import SIZE

steps = int(sys.argv[1])
if sys.argv[2:] == ["--raises"]:
    raise ValueError("no data")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(SIZE, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

def loss_of(x):
    return model(x).square().mean()

step = GraphedStep(loss_of, model=model, optimizer=optimizer, engine="emulated", warmup_steps=2)
print("training", __name__)
for x in torch.randn(steps, 4, SIZE):
    try:
        step(x)
    except Exception:
        print("the script has caught it")
"""

UNUSED = """
import torch

parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=1e-2)
print("training")
for _ in range(9):
    parameter.square().sum().backward()
    optimizer.step()
"""


@pytest.fixture
def training(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("SIZE = 6\n")
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return str(path)


def test_bench_runs_a_script_without_and_with_the_library(
    training: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    assert main(["bench", "--json", "--steps", "24", training, "1000"]) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    without, graphed = found["without"], found["with"]
    assert without["steps"] == graphed["steps"] == 24
    assert without["last_loss"] == graphed["last_loss"] > 0
    for run in (without, graphed):
        assert 0 < run["ms_per_step"] < 1e3 * run["seconds"] and run["peak_mib"] > 100
    assert found["ratio"] == without["ms_per_step"] / graphed["ms_per_step"]
    assert "run of bench without the library, so steps run as you wrote them." in without["headline"]
    assert "of 24 training steps" in graphed["headline"] and "{F} {B} {O}" in graphed["headline"]
    marks = r"== run 1 of 2: without .*?training.*?== run 2 of 2: with .*?training.*?== both runs have ended"
    assert re.search(marks, printed.err, re.DOTALL) and printed.err.count("training __main__") == 2
    assert "has caught it" not in printed.err and "PYGRAPH_DISABLE" not in printed.err


def test_bench_prints_both_runs_side_by_side() -> None:
    of_both = {"seconds": 9.0, "last_loss": None, "steps": 9, "peak_mib": 512, "peak_of": "device"}
    runs = [{"ms_per_step": ms, **of_both, "graphs": 3, "headline": f"headline {ms}"} for ms in (4.0, 2.0)]
    text = str(Comparison(*runs))
    assert " ".join(text.split()).startswith(
        "pygraph-train: A step takes 2.00 ms with the library and 4.00 ms without (2.00 times as fast), "
        "and the whole run 9.0 s and 9.0 s (1.00 times as fast). without with"
    )
    table = dict(re.findall(r"^(\S.*?) {2,}(\S.*)$", text, re.MULTILINE))
    assert table["ms per optimizer step"].split() == ["4.0", "2.0"] and table["optimizer steps"].split() == [
        "9",
        "9",
    ]
    assert table["peak mib"].split() == ["512", "512"] and table["report with the library"] == "headline 2.0"
    assert text.endswith("headline 2.0") and "headline 4.0" not in text


@pytest.mark.parametrize(
    ("ms", "seconds", "ratios", "rest"),
    [
        (1.6, 24.0, ("1.25 times as fast", "1.20 times as long"), " The run gains from some 20000 steps on."),
        (1.6, 19.0, ("1.25 times as fast", "1.05 times as fast"), ""),
        (2.5, 18.0, ("1.25 times as long", "1.11 times as fast"), ""),
        (2.5, 22.0, ("1.25 times as long", "1.10 times as long"), ""),
    ],
)
def test_bench_tells_of_a_step_and_of_the_whole_run(
    ms: float, seconds: float, ratios: tuple[str, str], rest: str
) -> None:
    runs = {"ms_per_step": 2.0, "seconds": 20.0}, {"ms_per_step": ms, "seconds": seconds}
    text = Comparison(*({**run, "steps": 9600, "graphs": 3, "headline": "h"} for run in runs)).headline()
    assert text == (
        f"A step takes {ms:.2f} ms with the library and 2.00 ms without ({ratios[0]}), "
        f"and the whole run {seconds:.1f} s and 20.0 s ({ratios[1]}).{rest}"
    )


def test_bench_credits_no_run_without_graphs_with_a_gain(
    training: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Path(training)
    script.write_text(script.read_text().replace('"emulated"', '"auto"'))
    assert main(["bench", training, "24"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "No step ran from a graph, so both runs are the same work" in text and "as fast" not in text
    assert "emulation" not in text
    script.write_text(UNUSED)
    assert main(["bench", training]) == 2
    printed = capfd.readouterr()
    assert "train.py uses nothing of pygraph-train, so a run with it would be the same work" in printed.err
    assert printed.err.count("training\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{}", "9", "--raises"], "train.py with PYGRAPH_DISABLE=1 failed with exit status 1"),
        (["{}", "1"], "made fewer than two steps with optimizers"),
        (["absent.py"], "pygraph: there is no file absent.py"),
        (["{}", "1", "--steps", "5"], "--steps stands behind the script, so it is the script's"),
    ],
)
@pytest.mark.quick
def test_a_bench_without_figures_is_told_in_a_sentence(
    training: str, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["bench", *(a.format(training) for a in arguments)]) == 2
    printed = capfd.readouterr()
    assert words in printed.err and not printed.out
    assert ("ValueError: no data" in printed.err) is ("--raises" in arguments)
