"""What modules hold is not read again where nothing has changed, and every change is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, adamw, both

from pygraph_train import dict_versions
from pygraph_train.dict_versions import Versions, changed, versions_are_known


class Block(nn.Module):
    """With constants of its own, and constants of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.0)
        self.second = nn.Linear(8, 8)
        self.factor = 2.0
        self.kind = "plain"
        self.sizes = (8,)
        self.on = True
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x))) * self.factor + self.shift
        if self.on:
            x = x + 1
        if hasattr(self, "extra"):
            x = x * self.extra
        if self.kind == "plain":
            x = self.second(x).relu()
        return x.reshape(-1, *self.sizes)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.Linear(8, 4)) for _ in range(3)])
        self.wide = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * 3 if self.wide else x


def block_of(model: Stack) -> Any:
    return model.blocks[1][0]


class Louder(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 5


def _other_table(block: Any) -> None:
    block._parameters = dict(block._parameters)
    block._parameters["bias"] = None


def _other_attributes(block: Any) -> None:
    block.__dict__ = {**vars(block), "factor": 7.0}


def _extra_of_class(model: Stack) -> None:
    block_of(model).__class__ = type("Other", (Block,), {})
    type(block_of(model)).extra = 3.0


CHANGES: dict[str, Callable[[Stack], Any]] = {
    "float": lambda m: setattr(block_of(m), "factor", 3.0),
    "float_to_int": lambda m: setattr(block_of(m), "factor", 3),
    "bool": lambda m: setattr(block_of(m), "on", False),
    "text": lambda m: setattr(block_of(m), "kind", "other"),
    "eps": lambda m: setattr(block_of(m).norm, "eps", 0.5),
    "tuple": lambda m: setattr(block_of(m), "sizes", (1, 8)),
    "outermost": lambda m: setattr(m, "wide", True),
    "in_dict": lambda m: vars(block_of(m)).update(factor=4.0),
    "object_setattr": lambda m: object.__setattr__(block_of(m), "factor", 5.0),
    "other_module": lambda m: setattr(block_of(m), "second", nn.Linear(8, 8, bias=False)),
    "table_of_modules": lambda m: block_of(m)._modules.update(drop=nn.Tanh()),
    "bias_goes": lambda m: setattr(block_of(m).second, "bias", None),
    "other_parameter_object": lambda m: setattr(
        block_of(m).second, "bias", nn.Parameter(torch.full((8,), 0.5))
    ),
    "buffer": lambda m: setattr(block_of(m), "shift", torch.ones(8)),
    "other_class": lambda m: setattr(block_of(m), "__class__", Louder),
    "method": lambda m: setattr(block_of(m), "forward", lambda x: Block.forward(block_of(m), x) * 2),
    "other_table": lambda m: _other_table(block_of(m).second),
    "other_attributes": lambda m: _other_attributes(block_of(m)),
    "layer_goes": lambda m: m.blocks.__setitem__(1, nn.Linear(4, 4)),
    "new_attribute": lambda m: setattr(block_of(m), "extra", 3.0),
    "new_parameter": lambda m: block_of(m).register_parameter("extra", nn.Parameter(torch.ones(8) * 3)),
    "new_buffer": lambda m: block_of(m).register_buffer("extra", torch.ones(8) * 3),
    "of_class": _extra_of_class,
    "dropout": lambda m: setattr(block_of(m).drop, "p", 0.5),
    "frozen": lambda m: block_of(m).second.requires_grad_(False),
}
SEEN_ELSEWHERE = ("tuple", "layer_goes", "frozen")
"""Changes of no consequence, and those that something else notices as well."""


@pytest.mark.slow_after(10)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[] if kind in SEEN_ELSEWHERE else pytest.mark.notices("modules are always still")
        )
        for kind in CHANGES
    ],
)
def test_each_change_of_a_module_between_steps_is_seen(kind: str) -> None:
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(k)) for k in range(24)]

    def script(diary: Diary) -> None:
        torch.manual_seed(3)
        model = Stack()
        optimizer = adamw(model)
        step = diary.step(lambda x: model(x).square().mean(), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches):
            if number == 12:
                CHANGES[kind](model)
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    both(script, replays=5)


@pytest.mark.notices("modules are always still")
def test_an_attribute_that_the_class_of_a_module_gets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(diary: Diary) -> None:
        model = Stack()
        optimizer = adamw(model)
        step = diary.step(lambda x: model(x).square().mean(), model=model, optimizer=optimizer)
        with monkeypatch.context() as patch:
            for k in range(24):
                if k == 12:
                    patch.setattr(Block, "extra", 3.0, raising=False)
                diary.write("loss", step(torch.full((6, 4), 1.0 + k)))
        diary.write_state(model, optimizer)

    both(script, replays=5)


def test_a_module_that_counts_beside_the_step_is_still_replayed_as_often() -> None:
    """Whoever writes attributes that the step does not read."""

    def script(diary: Diary) -> None:
        model = Stack()
        optimizer = adamw(model)
        model.seen = 0
        step = diary.step(lambda x: model(x).square().mean(), model=model, optimizer=optimizer)
        for k in range(24):
            model.seen += 1
            model.eval()
            model.train()
            model.blocks[0][0].factor = float("2.0")  # another object of the same value
            diary.write("loss", step(torch.full((6, 4), 1.0 + k)))
        diary.write_state(model, optimizer)

    both(script, replays=15, plan="{F B O}")


@pytest.mark.skipif(not versions_are_known(), reason="this Python has no versions of dicts")
def test_reading_does_not_change_versions_and_every_change_does() -> None:
    modules = [nn.Linear(2, 2) for _ in range(5)]
    dicts = [table for m in modules for table in (vars(m), m._parameters)]
    versions = Versions(modules, dicts)
    before = versions.read()
    for module in modules:
        module(torch.ones(2)).sum().backward()
        repr(vars(module))
        module.train()
    assert versions.read() == before
    modules[3].training = False
    modules[1].weight = nn.Parameter(torch.ones(2, 2))
    assert changed(before, versions.read()) == [3, 6]
    assert dict_versions._numbers_follow_changes()


def test_a_python_without_versions_reads_all_and_leaves_constants_to_dynamo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dict_versions, "_KNOWN", False)
    test_each_change_of_a_module_between_steps_is_seen("float")
    test_each_change_of_a_module_between_steps_is_seen("other_module")
