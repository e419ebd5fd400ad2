"""`copy.deepcopy` of a plain object in a step: each step has a copy of what the object holds then."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from training import Diary, adamw, batches, both

from pygraph_train.torch_private import copies
from pygraph_train.tracing.reproducing import ReproducingTrace


@pytest.fixture(params=["as torch 2.11 has it", "as this torch has it"], autouse=True)
def dynamo(request: Any, monkeypatch: Any) -> None:
    """Dynamo of torch 2.13 follows `copy.deepcopy`; that of 2.11 takes it for a built-in function."""
    if request.param == "as torch 2.11 has it" and torch.__version__ >= "2.13":
        monkeypatch.setattr(copies, "mends", lambda: (copies.copying(),))


class Settings:
    """As configurations of transformers: an attribute may have another name, and names may be deleted."""

    names: ClassVar[dict[str, str]] = {"hidden": "width"}

    def __init__(self) -> None:
        self.width, self.decoder_layers, self.scale = 8, 2, 0.5
        self.dtype, self.kinds, self.nested = torch.float32, ["a", "b"], {"p": {"q": (1, [2])}}
        self.inner: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in super().__getattribute__("names"):
            name = super().__getattribute__("names")[name]
        super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        if name != "names" and name in super().__getattribute__("names"):
            name = super().__getattribute__("names")[name]
        return super().__getattribute__(name)

    def to_dict(self) -> dict[str, Any]:
        found = copy.deepcopy(self.__dict__)
        for key, value in found.items():
            found[key] = list(value) if isinstance(value, tuple) else value
        return found

    def for_decoder(self) -> Settings:
        made = copy.deepcopy(self)
        for key in made.to_dict():
            if key.startswith("decoder"):
                value = getattr(made, key)
                delattr(made, key)
                setattr(made, key[len("decoder_") :], value)
        return made


class Net(nn.Module):
    """A model with settings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.settings = Settings()
        self.settings.inner = Settings()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def loss_of(net: Net, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def test_a_step_that_reads_a_copy_of_its_settings():
    """Also when the settings change, in what is read of the copy and in what is only copied."""

    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)

        def step_fn(batch: Any) -> Tensor:
            made = net.settings.for_decoder()
            made.scale = made.scale * made.layers
            made.kinds.append("c")
            made.nested["p"]["q"][1].append(3)
            made.inner.scale += 1
            factor = made.scale + len(made.kinds) + made.nested["p"]["q"][1][-1] + made.inner.scale
            return loss_of(net, batch) * (factor + made.hidden)

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 20:
                net.settings.scale = 0.25
            if index == 30:
                net.settings.nested["p"]["q"][1].append(4)
            if index == 40:
                net.settings.added = 1
            diary.write("result", step(batch).detach())
            diary.write("settings", [vars(net.settings.inner), net.settings.to_dict()["kinds"]])
        diary.write_state(net, optimizer)

    both(script, replays=30, plan="{F B O}")


def checking(field: dataclasses.Field[Any]) -> Callable[[Any], None]:
    """A function that holds a field of a dataclass."""

    def check(value: Any) -> None:
        if not isinstance(value, field.type):  # type: ignore[arg-type]
            raise TypeError(f"{field.name} is no {field.type}")

    return check


Sizes = dataclasses.make_dataclass("Sizes", [("layers", int)])


class CheckedSettings(Settings):
    """As configurations of transformers 5: functions of the class check what is set, and the class has defaults."""

    factor: Any = 1.0
    checks: ClassVar[dict[str, list[Any]]] = {"layers": [checking(dataclasses.fields(Sizes)[0])]}

    def __setattr__(self, name: str, value: Any) -> None:
        for check in self.checks.get(name, []):
            try:
                check(value)
            except (TypeError, ValueError) as error:
                raise ValueError(name) from error
        super().__setattr__(name, value)


def test_a_copy_that_is_checked_by_functions_of_its_class(monkeypatch: Any):
    """What the class has is found there, and has guards."""

    def script(diary: Diary) -> None:
        net = Net()
        net.settings = CheckedSettings()
        optimizer = adamw(net)
        monkeypatch.setattr(CheckedSettings, "factor", 1.0)

        def step_fn(batch: Any) -> Tensor:
            made = net.settings.for_decoder()
            factor = made.layers if made.factor is None else made.layers * made.factor
            return loss_of(net, batch) * factor

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 20:
                CheckedSettings.factor = None
            if index == 35:
                CheckedSettings.factor = 0.5
            if index == 50:
                net.settings.decoder_layers = 3
            diary.write("result", step(batch).detach())
        diary.write_state(net, optimizer)

    both(script, replays=20, plan="{F B O}")


def test_one_object_in_two_places_is_one_object_in_the_copy():
    def script(diary: Diary) -> None:
        net = Net()
        shared = [1.0]
        holder = {"a": shared, "b": shared, "c": [shared]}

        def step_fn(batch: Any) -> Tensor:
            made = copy.deepcopy(holder)
            made["a"].append(2.0)
            assert made["a"] is made["b"] and made["c"][0] is made["a"] and made["a"] is not shared
            return loss_of(net, batch) * sum(made["b"])

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(30):
            diary.write("result", step(batch).detach())
            diary.write("shared", shared)

    both(script, replays=15, plan="{F B O}")


@pytest.mark.passes_without_graphs("on torch 2.11 such a copy ends graphs")
def test_a_copy_that_the_step_keeps_is_a_new_one_each_time(request):
    def script(diary: Diary) -> None:
        net = Net()
        seen: list[Any] = []

        def step_fn(batch: Any) -> Tensor:
            net.kept = copy.deepcopy(net.settings)
            return loss_of(net, batch)

        step = diary.step(step_fn, model=net, optimizer=adamw(net))
        for batch in batches(25):
            diary.write("result", step(batch).detach())
            diary.write("kept", [net.kept.kinds, net.kept.scale, net.kept.inner.width])
            diary.write("new", all(net.kept is not one for one in seen) and net.kept is not net.settings)
            net.kept.kinds.append("mine")
            seen.append(net.kept)

    report = both(script, replays=1)
    if "2.11" in request.node.name:
        assert any("keeps a copy.deepcopy() of a Settings" in f.reason for f in report.fallbacks), str(report)


class WithCopier(Settings):
    """A class that says itself how it is copied."""

    def __deepcopy__(self, memo: Any) -> WithCopier:
        made = WithCopier()
        made.scale = self.scale + 1
        return made


@pytest.mark.passes_without_graphs("such a copy may end graphs")
def test_an_object_that_is_copied_in_a_way_of_its_own():
    def script(diary: Diary) -> None:
        net = Net()
        net.settings = WithCopier()
        step = diary.step(
            lambda batch: loss_of(net, batch) * copy.deepcopy(net.settings).scale,
            model=net,
            optimizer=adamw(net),
        )
        for batch in batches(25):
            diary.write("result", step(batch).detach())

    both(script, replays=1)


@pytest.mark.passes_without_graphs("it only traces")
def test_a_model_that_copies_its_configuration_is_traced() -> None:
    """T5 makes a cache in each step, and the cache asks for the part of the configuration that is the decoder's."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(1, 32, (2, 4))

    def loss(x: Tensor) -> Tensor:
        result: Tensor = model(input_ids=x, labels=x).loss
        return result

    trace = ReproducingTrace(torch.device("cpu"))
    assert torch.equal(trace(loss, (ids,), {}), loss(ids))
    assert trace.problem is None and trace.holds(loss, (ids,), {})
    model.decoder.config.num_layers = 2
    assert not trace.holds(loss, (ids,), {})
