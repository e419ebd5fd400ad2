"""What people read of the report: the first sentence of each kind of training, at widths of terminals."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import Net, adam, adamw, batches, loss_of

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.plans import NOTHING, SEPARATE, graphs_apart
from pygraph_train.report import step_report, table
from pygraph_train.report.backend_report import BackendReport, RegionRecord
from pygraph_train.report.headline import Headline
from pygraph_train.report.printing import shortened
from pygraph_train.report.step_report import Fallback
from tests.ranks import pair_of_ranks

DOCUMENT = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")

EMULATED = {"engine": "emulated", "warmup_steps": 2}

FORWARD_BACKWARD, OPTIMIZER = graphs_apart(True, True, False), graphs_apart(False, False, True)


class Sparse(Net):
    """Sizes of sparse gradients are known on the host only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(model: nn.Module, made: Any = adamw, steps: int = 40, **config: Any) -> StepReport:
    step = GraphedStep(
        loss_of(model),
        model=model,
        optimizer=made(model),
        config=PyGraphConfig(**{**EMULATED, **config}),
    )
    for batch in batches(steps):
        step(batch)
    return step.report()


def accelerated(*, epochs: int = 3, moves: bool = False) -> StepReport:
    """A stock loop; `moves`: each step has its gradients elsewhere."""
    accelerate_training = pytest.importorskip("accelerate_training", exc_type=ImportError)
    from pygraph_train import PyGraph

    gradients = []

    def script(made: Any) -> None:
        model = Net()
        loader = DataLoader(accelerate_training.Numbers(), batch_size=8)
        model, optimizer, loader = made.accelerator.prepare(model, adamw(model), loader)
        for _ in range(epochs):
            for batch in itertools.islice(loader, 12 if moves else None):
                made.accelerator.backward(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))
                for p in model.parameters() if moves else ():
                    gradients.append(p.grad)
                    p.grad = p.grad.clone()
                optimizer.step()
                optimizer.zero_grad()

    plugin = PyGraph(**EMULATED)  # type: ignore[arg-type]
    accelerate_training.run(script, plugin)
    return plugin.report()


KINDS: dict[str, tuple[Callable[[], StepReport], str]] = {
    "steps with a graph for each phase": (
        lambda: trained(Net()),
        r"35 of 40 training steps \(88%\) ran from graphs, as plan {F} {B} {O} on the emulated engine. "
        r"Nothing stands in the way of more.",
    ),
    "an optimizer that torch cannot capture": (
        lambda: trained(Net(), adam),
        r"Forward and backward ran from graphs in 38 of 40 training steps \(95%\), the optimizer in none, as plan "
        r"{F} {B} O on the emulated engine. In the way of more: the optimizer runs outside of graphs: Adam's CPU "
        r"kernels .*",
    ),
    "an optimizer that is left out": (
        lambda: trained(Net(), optimizer="off"),
        r"Forward and backward ran from graphs in 38 of 40 training steps \(95%\), the optimizer in none, as plan "
        r"{F} {B} O on the emulated engine. optimizer='off' is set, so it runs without a graph.",
    ),
    "a layer that no graph holds": (
        lambda: trained(Sparse(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        r"None of the 40 training steps ran from graphs. In the way of graphs: a part of the step runs without a "
        r"graph: a gradient is sparse, .*",
    ),
    "a stock loop": (
        accelerated,
        r"\d\d of 90 training steps \(9\d%\) ran from graphs, as plan {F} {B} {O} on the emulated engine. Nothing "
        r"stands in the way of more.",
    ),
    "gradients that move": (
        lambda: accelerated(epochs=1, moves=True),
        r"\d\d? of 12 training steps \(\d\d%\) ran from graphs, as plan {F} {B} {O} .*",
    ),
    "graphs off": (
        lambda: trained(Net(), engine="off"),
        r"Graphs are off: steps run as you wrote them.",
    ),
    "too few steps": (
        lambda: trained(Net(), steps=2),
        r"None of the 2 training steps ran from graphs. Graphs begin after a warm-up, and it has not ended.",
    ),
    "steps for little more than the warm-up": (
        lambda: trained(Net(), steps=6),
        r"Forward and backward ran from graphs in 4 of 6 .* The run is short, and the warm-up took most of its steps.",
    ),
    "no steps": (StepReport, r"No training step was counted."),
}


def printed(report: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `print` and `rich.print` show, one after the other."""
    import rich.console

    monkeypatch.setenv("COLUMNS", str(width))
    console = rich.console.Console(width=width, file=io.StringIO())
    console.print(report)
    return [str(report), console.file.getvalue()]  # type: ignore[attr-defined]


def looks_well(report: StepReport, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the report begins with this sentence, fits its width, and has no row that says nothing."""
    monkeypatch.chdir(os.path.dirname(__file__))
    assert re.fullmatch(sentence, report.headline()), report.headline()
    assert report.to_dict()["headline"] == report.headline()
    for width in (80, 120):
        for text in printed(report, width, monkeypatch):
            assert max(map(len, text.splitlines())) <= width, text
            (start,) = re.findall(r"\S+", shortened(report.headline()))[:1]
            assert text.startswith(f"pygraph-train: {start}"), text
            assert os.path.dirname(__file__) not in text, "paths are short"
    for name, text in report.rows():
        assert documented(name), name
        assert name.strip() and text.strip() and not text.rstrip().endswith((":", ",", "-")), (name, text)
    assert len(report.rows()) <= 6, report.rows()
    texts = [text for name, text in report.rows() if name in ("without a graph", "note")]
    assert len(set(texts)) == len(texts)
    assert not any(text in report.headline() for text in texts), "the first line has said it"


@pytest.mark.passes_without_graphs("the sentence says how much ran from graphs")
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_line_is_a_sentence_to_act_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train, sentence = KINDS[kind]
    looks_well(train(), sentence, monkeypatch)


@pytest.mark.slow
def test_the_report_of_one_of_two_processes() -> None:
    with pair_of_ranks() as ranks:
        found = ranks.run("tests.ranks_training:graphed_step")
    for rank in found:
        told = " ".join(rank["printed"].split())
        assert re.match(
            r"pygraph-train: \d\d of 32 training steps \(\d\d%\) ran from graphs, as plan {F} {B} {O} on",
            told,
        ), told


def test_micro_batches_count_as_steps_without_an_optimizer() -> None:
    report = StepReport(engine="emulated")
    for index in range(8):
        report.step_began()
        update = index % 2 == 1
        report.step_ended(FORWARD_BACKWARD if index < 2 or not update else SEPARATE, updated=update)
    assert report.steps_from_graphs == 7, "four micro-batches, and three of four updates"
    assert dict(report.rows())["from graphs"] == (
        "all phases in 7 of 8 steps (forward 8, backward 8, optimizer 3 of 4)"
    )
    assert report.to_dict()["phases_from_graphs"] == {"F": 8, "B": 8, "O": 3}
    assert report.running_plan == str(SEPARATE)


def test_steps_without_graphs_are_named_by_their_numbers() -> None:
    report = trained(Net(), steps=20)
    first = report.steps - report.steps_from_graphs
    assert dict(report.rows())["other steps"] == f"1-{first} (warm-up and recordings)"

    def others(*plain: int, steps: int = 40) -> str | None:
        report = StepReport(engine="emulated")
        for number in range(1, steps + 1):
            report.step_began()
            if number % 2 or number not in plain:  # an even one of these has raised
                report.step_ended(NOTHING if number in plain else SEPARATE, updated=True)
        return dict(report.rows()).get("other steps")

    assert others() is None and others(*range(1, 41)) is None
    assert others(1, 2, 7, 8, 9, 30, 40) == "1-2 (warm-up and recordings), 7-9, 30, 40"
    assert others(3, 12) == "3, 12"
    many = [1, *range(5, 40, 3)]
    assert others(*many) == "1 (warm-up and recordings), 5, 8, 11, 14, 17, and 7 later ones"


def test_the_reason_of_the_phase_without_a_graph_is_named_first() -> None:
    report = StepReport(engine="emulated")
    for _ in range(9):
        report.step_began()
        report.step_ended(FORWARD_BACKWARD, updated=True)
    report.fell_back(Fallback("the batch has another shape", "a.py:1", "", 3, count=9))
    report.fell_back(Fallback("the optimizer counts on the host", "a.py:2", "use another one", 4))
    assert (
        "In the way of more: the optimizer counts on the host (a.py:2). Use another one." in report.headline()
    )
    assert [text for name, text in report.rows() if name == "without a graph"] == [
        "the batch has another shape (from step 3)\n  at a.py:1"
    ]
    assert len(report.to_dict()["fallbacks"]) == 2


def test_names_of_code_keep_their_letters() -> None:
    report = StepReport(engine="emulated", steps=1)
    report.fell_back(Fallback("it is not supported", "a.py:1", "fully_shard of torch can be in a graph", 1))
    assert report.headline().endswith("it is not supported (a.py:1). fully_shard of torch can be in a graph.")


def test_paths_are_short_for_people_and_complete_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    monkeypatch.chdir(os.path.dirname(here))
    package = os.path.join(os.sep, "opt", "lib", "site-packages", "timm", "layers.py")
    report = StepReport(engine="emulated")
    report.fell_back(Fallback("a counter is written", f"{__file__}:7", "", 1))
    report.note(f"a module at {package}:12 is traced anew")
    text = str(report)
    assert f"(tests{os.sep}{os.path.basename(__file__)}:7)" in text, text
    assert " timm/layers.py:12 " in " ".join(text.split()) and here not in text, text
    assert report.to_dict()["fallbacks"][0]["where"] == f"{__file__}:7"
    assert f"{__file__}:7" in report.to_dict()["headline"] and package in report.to_dict()["notes"][0]


def test_a_note_that_repeats_a_reason_is_left_out() -> None:
    report = StepReport(engine="emulated", steps=1)
    report.fell_back(Fallback("forward='off' is set, so there is no graph", None, "", 1))
    report.note("forward='off' is set")
    report.note("something else")
    assert [text for name, text in report.rows() if name == "note"] == ["something else"]
    assert Headline(report).text.count("forward='off'") == 1


def test_a_loop_without_an_optimizer_says_so_first() -> None:
    from pygraph_train.report.loop_report import LoopReport

    report = LoopReport()
    report.began("emulated")
    assert report.headline().startswith("No step is counted, because no prepared optimizer made a step")


def documented(name: str) -> bool:
    """Whether docs/report.md has a row of this name, in which "..." stands for anything."""
    rows = re.findall(r"^\| (`.*?) \| ", DOCUMENT, re.MULTILINE)
    names = [each for row in rows for each in re.findall(r"`([^`]+)`", row)]
    return any(name == each or (each.endswith(" ...") and name.startswith(each[:-3])) for each in names)


@pytest.mark.passes_without_graphs("events of graphs are given to the report by hand")
def test_every_row_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step_report, table):
        monkeypatch.setattr(
            module, "peak_memory_mib", lambda: {"peak_reserved_mib": 1, "peak_allocated_mib": 1}
        )
    report = trained(Net(), adam)
    report.engine = "cuda"
    report.note("a note")
    report.fell_back(Fallback("a reason", "a.py:1", "", 1))
    report.timed(0.1, 0.5, 0.4)
    report.replay_intervals.append(0.1)
    names = {name for name, _ in report.rows()}
    assert {"peak memory", "speed-up", "without a graph", "note"} <= names
    assert not [name for name in sorted(names) if not documented(name)]
    assert not documented("peak") and not documented("something else")


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_graph_of_the_update_comes_when_the_option_says(steps: int) -> None:
    model = Net()
    step = GraphedStep(
        loss_of(model), model=model, optimizer=adamw(model), engine="emulated", warmup_steps=steps
    )
    for batch in batches(20):
        step(batch)
    assert [capture.step for capture in step.report().captures if capture.plan == "{O}"] == [steps + 3]


@pytest.mark.parametrize("counted", [0, 20], ids=["Accelerate", "GraphedStep"])
def test_a_report_without_graphs_has_the_same_rows_in_each_loop(counted: int) -> None:
    report = trained(Net(), steps=counted, engine="off") if counted else StepReport()
    assert [name for name, _ in report.rows()] == ["engine", "plan"] and report.steps == counted


def test_a_notebook_shows_a_table() -> None:
    report = StepReport(engine="emulated", steps=1)
    report.fell_back(Fallback("Tensor<int> & others are <b>slow</b>", "a.py:1", "", 1))
    report.note("first\n  <script>")
    regions = [RegionRecord("forward 0", "forward", None, "plain", "a <reason>", 0, 0, 3)]
    for shown in (report, BackendReport(regions)):
        html = ElementTree.fromstring(f"<body>{shown._repr_html_()}</body>")
        assert {each.tag for each in html.iter()} == {"body", "p", "table", "tr", "th", "td"}
        assert html.findtext("p") == f"pygraph-train: {shown.headline()}"
        cells = [(row.findtext("th"), row.findtext("td")) for row in html.iter("tr")]
        assert cells == list(shown.rows()) != []
