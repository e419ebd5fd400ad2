"""Tensors of the host that a step copies to the device. Copies to the CPU count as copies to a device here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_host_constants import DEVICE, Graph, problems
from torch import Tensor, fx, nn
from training import Diary, adamw, batches, both

from pygraph_train.tracing import host_constants
from pygraph_train.tracing.host_constants import make_once
from pygraph_train.tracing.host_tables import HostTables


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "build" not in request.fixturenames:

        def is_copied(constants: Any, node: fx.Node, example: Tensor) -> bool:
            return node.target in ("to", "type_as")

        monkeypatch.setattr(host_constants, "_ON_HOST", ())
        monkeypatch.setattr(host_constants._Constants, "_is_copied", is_copied)


class Schedule(nn.Module):
    """Adds as much noise as a table of the host says, for steps that are drawn on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.left = torch.linspace(0.1, 0.9, 50)  # no buffer
        self.other = {"weights": torch.linspace(1.0, 2.0, 6, dtype=torch.float64)}

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        steps = torch.randint(0, 50, (len(x),))
        left = self.left.to(x.device)[steps][:, None]
        rest = (1 - self.left).sqrt().to(x)[steps][:, None]
        noise = torch.randn_like(x)
        found = self.layer(left.sqrt() * x + rest * noise)
        return ((found - noise).square() * self.other["weights"].to(x)).mean()


def never(model: Any, number: int) -> None:
    pass


def in_place(model: Any, number: int) -> None:
    if number % 6 == 5:
        model.left.mul_(0.99)


def unseen(model: Any, number: int) -> None:
    if number % 6 == 5:
        model.left.data[7:] *= 0.9  # no version counts this
    if number % 6 == 2:
        np.asarray(model.other["weights"])[1] += 0.5


def another(model: Any, number: int) -> None:
    if number % 6 == 5:
        model.left = model.left * 0.99


def to_minus_zero(model: Any, number: int) -> None:
    if number >= 9:
        model.left.fill_(-0.0 if number % 2 else 0.0)


@pytest.mark.parametrize("change", [never, in_place, unseen, another, to_minus_zero])
def test_tables_of_the_host_are_copied_before_a_replay_where_they_have_changed(
    change: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = [], HostTables.take

    def noted(self: HostTables, *args: Any) -> None:
        take(self, *args)
        taken.append(sorted(self.names))

    monkeypatch.setattr(HostTables, "take", noted)

    def script(diary: Diary) -> None:
        model = Schedule()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(30)):
            change(model, number)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("tables", [model.left, model.other])

    both(script, replays=24, plan="{F B O}", compile=False, verify="first")
    assert taken and all(len(names) == 2 for names in taken), taken


@pytest.mark.passes_without_graphs("what is done to a table is found by tracing")
def test_only_what_changes_is_copied_again() -> None:
    made: list[int] = []
    host, table, frame = HostTables(takes=True), torch.arange(3.0), {"table": torch.arange(3.0)}
    host.names, host._copies = ["L['table']"], [torch.zeros(3)]
    from pygraph_train.tracing.host_tables import _bytes, _look

    host._looks, host._filled = [_look(table)], [_bytes(table)]
    host._compute = lambda x: (made.append(1), (x,))[1]
    host.fill(frame, {})
    assert not made and host._copies[0].sum() == 0
    frame["table"].data[1] = 7
    host.fill(frame, {})
    host.fill(frame, {})
    assert len(made) == 1 and host._copies[0].tolist() == [0, 7, 2]
    frame["table"] = torch.arange(4.0)  # the trace does not hold: nothing is done
    host.fill(frame, {})
    del frame["table"]
    host.fill(frame, {})
    assert len(made) == 1


class _Source:
    def __init__(self, name: str) -> None:
        self.name = name


class _Arg:
    def __init__(self, example: Tensor, name: str) -> None:
        self.example, self.source = example, _Source(name)


@pytest.fixture
def build() -> Graph:
    build = Graph()
    build.table = build.graph.placeholder("table")  # type: ignore[attr-defined]
    value = torch.arange(4.0)
    build.table.meta.update(example_value=value.clone(), grapharg=_Arg(value, "L['fn'].table"))  # type: ignore[attr-defined]
    return build


def found_by(build: Any, result: Any, **options: Any) -> tuple[list[str], HostTables]:
    build.graph.output((result,))
    module, host = fx.GraphModule(nn.Module(), build.graph), HostTables(takes=True)
    found = make_once(module, DEVICE, host, **options)
    return problems(module, found), host


def copied(build: Any) -> fx.Node:
    return build.call("add", build.x, build.call("to", build.table, DEVICE))  # type: ignore[no-any-return]


@pytest.mark.passes_without_graphs("graphs of Dynamo's are looked at")
class TestGraphs:
    def test_a_table_that_is_only_copied_is_taken(self, build: Any) -> None:
        told, host = found_by(build, copied(build))
        assert not told and host.names == ["L['fn'].table"]

    def test_an_index_of_the_host_is_copied_too(self, build: Any) -> None:
        index = build.call("long", build.table)
        told, host = found_by(build, build.call(torch.Tensor.__getitem__, build.x, index))
        assert told and not host.used  # only `x[index]` as Python writes it is known

    def test_a_table_of_the_batch_is_not_taken(self, build: Any) -> None:
        told, host = found_by(build, copied(build), is_of_batch=lambda name: True)
        assert len(told) == 1 and "is a tensor on cpu" in told[0] and not host.used

    def test_a_number_that_a_kernel_reads_on_the_host_is_not_taken(self, build: Any) -> None:
        number = build.call("sum", build.table)
        told, host = found_by(build, build.call("add", copied(build), number))
        assert "is a tensor on cpu" in told[0] and not host.used

    def test_a_table_that_the_step_changes_is_not_taken(self, build: Any) -> None:
        build.call("add_", build.call("view", build.table, 2, 2), 1)
        told, host = found_by(build, copied(build))
        assert "is a tensor on cpu" in told[0] and not host.used

    def test_a_table_that_is_returned_is_not_taken(self, build: Any) -> None:
        told, host = found_by(build, [copied(build), build.table])
        assert "is a tensor on cpu" in told[0] and not host.used

    def test_a_large_table_is_not_taken(self, build: Any) -> None:
        large = torch.zeros(1 << 19)
        build.table.meta.update(example_value=large.clone(), grapharg=_Arg(large, "L['fn'].table"))
        told, host = found_by(build, build.call("to", build.table, DEVICE))
        assert "is a tensor on cpu" in told[0] and not host.used

    def test_random_numbers_of_the_host_are_not_taken(self, build: Any) -> None:
        drawn = build.call(torch.bernoulli, build.call("mul", build.table, 0.1))
        told, host = found_by(build, build.call("to", drawn, DEVICE))
        assert told and not host.used
