"""A private name that torch lacks switches a feature off, and ends no training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from private_names import longest, used
from replays import text_of
from torch import nn
from training import Net, batches, both, loss_of, sgd

from pygraph_train import GraphedStep, PyGraphError, versions
from pygraph_train.diagnosis.doctor import check
from pygraph_train.graphs import make_engine
from pygraph_train.torch_private import names
from pygraph_train.torch_private.names import private


@pytest.mark.quick
def test_the_list_has_each_private_name_that_the_sources_use() -> None:
    listed = {name for name, _, _ in names.listed()}
    read = set(longest(used()))
    assert not read - listed, "add them to names.py"
    of_objects = {
        "torch.Tensor._version",
        "torch.nn.Module._call_impl",
        "torch.nn.Module._compiled_call_impl",
    }
    assert listed - read <= of_objects, "nothing uses these any more"


@pytest.mark.quick
@pytest.mark.passes_without_graphs("it is about trainings without graphs, too")
def test_training_goes_on_without_any_of_the_names() -> None:
    """A sample; `make missing-names` tries all."""
    everywhere = ["torch._C._storage_Use_Count", "torch._subclasses.fake_tensor.FakeTensor"]
    sample = [*everywhere, *longest(used())[3::20]]
    run = subprocess.run(
        [sys.executable, "-m", "tests.missing_names", "--json", *sample],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((".", "tests")), "OMP_NUM_THREADS": "1"},
    )
    rows = json.loads(run.stdout.splitlines()[-1]) if run.stdout else pytest.fail(run.stderr[-3000:])
    assert [row["name"] for row in rows] == ["", *sample]
    assert [row for row in rows if not row["good"]] == []
    assert rows[0]["steps"] > 5, "nothing was missing"
    assert rows[1]["steps"] == rows[2]["steps"] == 0, "all graphs need these"


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the library find that torch lacks a name, and say what happens instead."""

    def lacks(name: str, instead: str) -> None:
        module, _, last = name.rpartition(".")
        purposes = names.NAMES[instead] | {"a test": f"{module}: {last}"}
        monkeypatch.setitem(names.NAMES, instead, purposes)
        names.lacking.cache_clear()

    names.lacking.cache_clear()
    yield lacks  # type: ignore[misc]
    monkeypatch.undo()
    names.lacking.cache_clear()


def script(diary: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    step = diary.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches(30):
        diary.write("loss", step(batch))
    diary.write_state(model, optimizer)


def test_all_is_plain_where_torch_lacks_what_every_graph_needs(missing: Any, caplog: Any) -> None:
    missing("torch._C._no_such_name", names.GRAPHS)
    said = f"torch {torch.__version__} lacks torch._C._no_such_name"
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        report = both(script, never="there is no engine")
    assert said in text_of(report)
    assert [record.getMessage().startswith(f"pygraph: {said}") for record in caplog.records] == [True]


@pytest.mark.passes_without_graphs("it captures nothing")
def test_doctor_lists_what_torch_lacks(missing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing("torch._dynamo.guards.no_such_guard", names.GROWING)
    found = check()
    assert dict(found.facts)["torch that was tried"] == ", ".join(versions.TRIED)
    assert any("torch lacks torch._dynamo.guards.no_such_guard" in sentence for sentence in found.lacks)
    assert not any("newer than" in sentence for sentence in found.lacks)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.99.0"))
    assert any("torch 2.99.0 is newer than" in sentence for sentence in check().lacks)


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.11.0", False),
        (f"{versions.TRIED[-1]}+cu130", False),
        ("2.15.9", False),
        ("2.16.0a0+git", True),
        ("3.0", True),
    ],
)
@pytest.mark.passes_without_graphs("it captures nothing")
def test_a_torch_that_is_newer_than_all_that_were_tried_is_told_once(
    version: str, newer: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    versions.tell_if_newer.cache_clear()
    with caplog.at_level(logging.WARNING, "pygraph_train"):
        for _ in range(2):
            assert make_engine("emulated", torch.device("cpu")) is not None
    assert len(caplog.records) == newer
    assert not newer or f"torch {version} is newer" in caplog.messages[0]


@pytest.mark.passes_without_graphs("it captures nothing")
def test_what_stands_in_for_a_missing_name_says_so_where_it_is_used() -> None:
    gone = private("torch._C._no_such_name")

    class Derived(gone):
        """As dispatch modes are derived."""

    for use in (gone, Derived, lambda: gone.of_it, lambda: isinstance(3, gone)):
        with pytest.raises(PyGraphError, match=r"lacks torch\._C\._no_such_name"):
            use()
    assert private("torch.nn.Linear") is nn.Linear and GraphedStep is not None
