"""The README and the pages of docs/: length, links, snippets and quoted messages."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pygraph_train
from benchmarks.pictures import FOLDER, pictures
from pygraph_train.config import BackendOptions, PyGraphConfig
from pygraph_train.versions import TRIED

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PAGES.append(ROOT / "benchmarks" / "README.md")

pytestmark = pytest.mark.passes_without_graphs("what pages say")

_SNIPPET = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$", re.S | re.M)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.S | re.M)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets() -> Iterator[Any]:
    """Each block of Python, with the reason where it cannot run."""
    for page in PAGES:
        for number, (reason, code) in enumerate(_SNIPPET.findall(page.read_text(encoding="utf-8"))):
            yield pytest.param(code, reason, id=f"{named(page)}-{number}")


def anchors(page: Path) -> set[str]:
    """Those of the headings of a page, as the usual viewers make them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) < 1200, "all that stands between blanks is a word, code and tables included"


def test_the_site_is_short() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "api.md"]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 12_000


def test_the_glossary_has_few_words() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [word for row in re.findall(r"^\| (.+?) \|", page, re.M)[1:] for word in row.split(", ")]
    assert 5 < len(words) <= 12


def test_the_differences_fit_on_a_screen() -> None:
    section = (ROOT / "docs" / "legality.md").read_text(encoding="utf-8").split("## What is different")[1]
    rows = re.findall(r"^\| .+", section.partition("\n## ")[0], re.M)
    assert 10 < len(rows) <= 18 and max(len(row.split()) for row in rows) <= 45


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{named(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{named(page)}: {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = [link.partition("#")[0] for link in _LINK.findall(page.read_text(encoding="utf-8"))]
        left += [(page.parent / link).resolve() for link in links if link and "://" not in link]
    assert set(PAGES) <= seen


def test_pictures_are_drawn_from_the_results() -> None:
    drawn = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert drawn == pictures(), "python -m benchmarks.pictures draws them again"
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^!\[.+?\]\(pictures/(.+)\)$", page, re.M)) == sorted(drawn)


def test_tests_that_pages_name_are_there() -> None:
    named = [found for page in PAGES for found in re.findall(r"(test_\w+\.py)::(test_\w+)", page.read_text())]
    assert len(named) > 10
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / "contract" / file).read_text(encoding="utf-8"), name


_NO_TRAINING_SAYS = (
    "pygraph_train/__main__.py",
    "pygraph_train/diagnosis",  # doctor and explain
    "explained.py",
    "pygraph_train/graphs/indirection.py",  # told at the level of INFO: copies take the place of pointers
    "pygraph_train/graphs/nodes.py",
    "pygraph_train/report/table.py",  # rows, which docs/report.md explains
    "pygraph_train/report/printing.py",
    "pygraph_train/report/backend_report.py",
    "pygraph_train/torch_private/stock_dynamo.py",  # a pattern of what Dynamo says
)


class Messages(ast.NodeVisitor):
    """Each string of four words or more in a file of the library, with … in the place of what it is told.

    Left out are docstrings, what a built-in exception says (a wrong call, or a fault, which comes out in a sentence of
    the boundary), what is passed as `fix` or behind the first argument, and parts of the sentence about private names.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[str] = []
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        fixes = [k.value for call in calls for k in call.keywords if k.arg == "fix"]
        fixes += [
            a
            for call in calls
            if _called(call) in ("Problem", "outside_of_graphs", "refuse")
            for a in call.args[1:]
        ]
        left_out = [*fixes, *filter(_of_python, calls)]
        self._left_out = {n.id for part in left_out for n in ast.walk(part) if isinstance(n, ast.Name)}
        self.visit(tree)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        left_out = self._left_out | {"NAMES"}
        if not any(isinstance(target, ast.Name) and target.id in left_out for target in node.targets):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in self._left_out and not node.name.startswith("advice"):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _of_python(node):
            return
        kept = node.args[1:2] if ast.unparse(node.func) == "log.log" else node.args[:1]
        for part in (node.func, *kept, *(k.value for k in node.keywords if k.arg != "fix")):
            self.visit(part)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._note(re.sub(r"%\.?\w+", "…", node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._note("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def _note(self, text: str) -> None:
        if sum(bool(re.search("[A-Za-z]", word)) for word in text.split()) >= 4:
            self.found.append(text)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _of_python(call: ast.Call) -> bool:
    """Whether it makes a built-in exception."""
    name = _called(call)
    return name.endswith("Error") and hasattr(builtins, name)


def messages() -> list[str]:
    """What the library may say while it trains."""
    files = [file for folder in ("pygraph_train", "integrations") for file in (ROOT / folder).rglob("*.py")]
    trees = [
        ast.parse(f.read_text(encoding="utf-8"))
        for f in files
        if not any(no in named(f) for no in _NO_TRAINING_SAYS)
    ]
    return [message for tree in trees for message in Messages(tree).found]


def quoted_messages() -> list[str]:
    """Those that the rows of the page on troubleshooting begin with."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return [
        text for cell in re.findall(r"^\| (`.+?`) \|", page, re.M) for text in re.findall(r"`([^`]+)`", cell)
    ]


def test_quoted_messages_are_in_the_source() -> None:
    said, quoted = messages(), quoted_messages()
    assert len(quoted) > 60
    assert [text for text in quoted if not any(text in message for message in said)] == []


def test_every_message_has_its_row() -> None:
    said, quoted = messages(), quoted_messages()
    assert len(said) > 120
    assert [message for message in said if not any(text in message for text in quoted)] == []


@pytest.mark.parametrize(
    ("heading", "options"), [("Options", PyGraphConfig), ("The compile backend", BackendOptions)]
)
def test_the_page_of_options_has_each_with_its_default(heading: str, options: Any) -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    section = next(s for s in re.split(r"^#+ ", page, flags=re.M) if s.startswith(f"{heading}\n"))
    rows = re.findall(r"^\| `(\w+)` \| .+? \| `(.+?)` \|", section, re.M)
    stock = options()
    defaults = [(field.name, getattr(stock, field.name)) for field in dataclasses.fields(options)]
    assert [(name, ast.literal_eval(default)) for name, default in rows] == defaults


def test_the_api_page_has_every_exported_name() -> None:
    places = re.findall(r"^::: (.+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert set(pygraph_train.__all__) <= {place.rpartition(".")[2] for place in places}
    for place in places:
        module, _, name = place.rpartition(".")
        file = ROOT / (module.replace(".", "/") + ".py")
        assert re.search(rf"^(class|def) {name}\b", file.read_text(encoding="utf-8"), re.M), place


def test_the_changelog_has_a_section_for_each_version_and_no_others() -> None:
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert titles[0].split()[0] == pygraph_train.__version__
    assert all(re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)? \(.+\)", title) for title in titles)


def test_hooks_of_the_site_make_text_of_links_and_label_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a cache in docs/ would be a part of the site
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    links = "[a file](../benchmarks/README.md), [a page](report.md), ![a picture](pictures/steps.svg)"
    assert hooks.on_page_markdown(links) == links.replace("[a file](../benchmarks/README.md)", "a file")

    def table(*titles: str, style: str = "") -> str:
        head = "".join(f"<th>{title}</th>" for title in titles)
        cells = "".join(f"<td{style}>{n}</td>" for n in range(len(titles)))
        return f"<table><tr>{head}</tr><tr>{cells}</tr></table>"

    labelled = hooks.on_page_content(table("message", "why", "<code>fix</code>"))
    assert '<td>0</td><td data-label="why">1</td><td data-label="fix">2</td>' in labelled
    figures = table("model", "plain, ms", "with graphs, ms", style=' style="text-align: right;"')
    assert hooks.on_page_content(figures) == figures


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_versions_of_the_compatibility_page_are_those_of_the_project() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    needed = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tested = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (torch|lightning|accelerate|transformers) \| (\S+) (?:or newer|to [\d.]+) \| ([\d.]+)",
        page,
        re.M,
    )
    assert len(rows) == 4
    for package, oldest, version in rows:
        assert re.search(rf'"{package}>={re.escape(oldest)}[",]', needed), package
        assert re.search(rf"^{package}=={re.escape(version)}(;|$)", tested, re.M), package


def test_versions_of_torch_are_the_same_everywhere() -> None:
    """The bounds of the package, what the library takes for tried, and what the documents say."""
    oldest, newest = (tuple(map(int, version.split("."))) for version in (TRIED[0], TRIED[-1]))
    needed = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert f'"{bounds}"' in needed
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"OLDEST_TORCH ?= {TRIED[0]}\n" in makefile and f"NEWEST_TORCH ?= {TRIED[-1]}\n" in makefile
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\d., ]+) \| (?:no graphs|graphs|a graph) ?", page, re.M)
    assert ", ".join(listed) == ", ".join(TRIED)
    for name in ("README.md", "docs/installing.md"):
        told = f"torch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        assert told in (ROOT / name).read_text(encoding="utf-8"), name


class Batches(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Small enough that a snippet takes a second."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=draw), torch.randn(1, generator=draw)


def surroundings(code: str) -> dict[str, Any]:
    """What the snippets take for granted: a model, its optimizer and batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True)
    loader = torch.utils.data.DataLoader(Batches(), batch_size=4)
    found: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "train_loader": loader,
        "loss_fn": F.mse_loss,
        "step_fn": lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        "batch": next(iter(loader)),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
    }
    if "lightning_module" in code:
        found["lightning_module"] = _lightning_module(model)
    if "hf_model" in code:
        found |= _of_transformers()
    return found


def _lightning_module(model: nn.Module) -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2.0**-9, fused=True)

    return Module()


def _of_transformers() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    ids = torch.randint(0, 64, (64, 8))
    dataset = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
    arguments = transformers.TrainingArguments(
        max_steps=24, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
    )
    return {
        "hf_model": transformers.BertForSequenceClassification(config),
        "training_args": arguments,
        "dataset": dataset,
        "tokenizer": _tokenizer(),
    }


def _tokenizer() -> Any:
    """One that pads."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


def emulate(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have options of this class ask for the emulated engine, where nothing else is asked for."""
    stock = cls.__init__

    def emulated(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **{"engine": "emulated", **options})

    monkeypatch.setattr(cls, "__init__", emulated)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("code", "reason"), snippets())
def test_snippets_run_as_they_stand(
    code: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if reason:
        pytest.skip(reason)
    for package in re.findall(r"^(?:from|import) (peft|torch_geometric)\b", code, re.M):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for options in (PyGraphConfig, BackendOptions):
        emulate(options, monkeypatch)
    torch._dynamo.reset()
    script = types.ModuleType(f"snippet_{abs(hash(code))}")  # where Dynamo looks for globals of functions
    monkeypatch.setitem(sys.modules, script.__name__, script)
    vars(script).update(surroundings(code))
    exec(compile(code, "<snippet>", "exec"), vars(script))
    captured = capsys.readouterr()
    counted = re.findall(r"(\d+) of \d+ (?:training steps|runs of compiled)", captured.out + captured.err)
    if re.search(r"report\(\)|\.fit\(|\.train\(\)", code):
        assert counted, "the snippet prints its report"
    assert "print(explain(" not in code or "will run as {F} {B} {O}" in captured.out
    assert all(int(steps) > 0 for steps in counted), "and nothing was replayed"
