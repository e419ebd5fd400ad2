"""Batches and results that are objects of the user's own classes: opened to their tensors, and put together again."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, batches, both, sgd

STEPS = 24


class Result:
    """What a step returns."""

    def __init__(self, loss: Tensor, logits: Tensor, **others: Any) -> None:
        self.loss = loss
        self.logits = logits
        self.parts = {"mean": logits.mean(), "all": [logits, (logits * 2, None)]}
        for name, value in others.items():
            setattr(self, name, value)


class Slots:
    """An object without `__dict__`."""

    __slots__ = ("kind", "logits", "unset")

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.kind = type(logits)


class Outer:
    """An object in an object, beside a base class with a slot."""

    def __init__(self, logits: Tensor) -> None:
        self.inner = [Slots(logits), Slots(logits + 1)]
        self.same = logits


@dataclass
class Point:
    loss: Any
    inside: Any


def opened(value: Any) -> Any:
    """What is compared of an object: its class, and what it holds."""
    if isinstance(value, (Result, Outer)):
        return [type(value).__name__, {name: opened(part) for name, part in vars(value).items()}]
    if isinstance(value, Slots):
        return [value.kind, value.logits, hasattr(value, "unset")]
    if isinstance(value, Point):
        return [opened(value.loss), opened(value.inside)]
    if isinstance(value, dict):
        return {name: opened(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [opened(part) for part in value]
    return value


def losses(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = net(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), logits


RESULTS: dict[str, Any] = {
    "an object": lambda loss, logits: {"loss": loss, "out": Result(loss, logits)},
    "slots": lambda loss, logits: {"loss": loss, "out": Slots(logits)},
    "objects in an object": lambda loss, logits: {"loss": loss, "out": Outer(logits)},
    "in a dataclass": lambda loss, logits: {"loss": loss, "out": Point(loss, Result(loss, logits))},
    "numbers inside": lambda loss, logits: {"loss": loss, "out": Result(loss, logits, n=len(logits), k=0.5)},
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", RESULTS)
def test_objects_that_a_step_makes_and_returns(kind):
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = sgd(net)
        step = diary.step(lambda batch: RESULTS[kind](*losses(net, batch)), model=net, optimizer=optimizer)
        kept = []
        for batch in batches(STEPS):
            kept.append(step(batch))
            diary.write("result", opened(kept[-1]))
        diary.write("all results, at the end", opened(kept))
        diary.write("different objects", len({id(result["out"]) for result in kept}))
        diary.write_state(net, optimizer)

    both(script, replays=18, plan="{F} {B} {O}")


def test_what_an_object_holds_is_never_stale():
    """A number that is only passed on, an attribute that comes later, and the history of a tensor."""

    def script(diary: Diary) -> None:
        net = Net()
        net.epoch, net.more = 0, False
        optimizer = sgd(net)

        def step_fn(batch: Any) -> dict[str, Any]:
            result = Result(*losses(net, batch), epoch=net.epoch)
            if net.more:
                result.further = result.loss * 2
            return {"loss": result.loss, "out": result}

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(2 * STEPS)):
            net.epoch, net.more = index // STEPS, index >= 12
            result = step(batch)["out"]
            diary.write("result", opened(result))
            diary.write("requires a gradient", result.logits.requires_grad)
            result.logits.detach().zero_()
            result.parts["mean"] = None

    both(script, replays=30, plan="{F} {B} {O}")


def the_same_object(net: Any, batch: Any) -> dict[str, Any]:
    return {"loss": losses(net, batch)[0], "out": net.known}


def an_object_twice(net: Any, batch: Any) -> dict[str, Any]:
    loss, logits = losses(net, batch)
    out = Slots(logits)
    return {"loss": loss, "out": out, "again": out}


def an_object_that_is_stored(net: Any, batch: Any) -> dict[str, Any]:
    loss, logits = losses(net, batch)
    net.known = Slots(logits)
    return {"loss": loss, "out": net.known}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("write", [an_object_that_is_stored, an_object_twice, the_same_object])
def test_an_object_that_is_somewhere_else_as_well_is_in_no_graph_of_the_whole_step(write):
    def script(diary: Diary) -> None:
        net: Any = Net()
        net.known = Slots(torch.zeros(2))
        step = diary.step(lambda batch: write(net, batch), model=net, optimizer=sgd(net))
        for batch in batches(STEPS):
            result = step(batch)
            diary.write("result", opened(result))
            diary.write("the same", [result["out"] is net.known, result.get("again") is result["out"]])

    both(script, replays=5)


def test_a_counter_beside_an_object():
    def script(diary: Diary) -> None:
        net: Any = Net()
        net.count = 0

        def step_fn(batch: Any) -> dict[str, Any]:
            net.count += 1
            loss, logits = losses(net, batch)
            return {"loss": loss, "out": Slots(logits)}

        step = diary.step(step_fn, model=net, optimizer=sgd(net))
        for batch in batches(STEPS):
            diary.write("result", [opened(step(batch)), net.count])

    both(script, replays=16, plan="{F} {B} {O}")


# -- batches -----------------------------------------------------------------------------------------


class Data:
    """As graph libraries have it: any attributes, and `to`."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to(self, device: Any) -> Data:
        return Data(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()})


class Store:
    """Holds the values of a `Stored`, and knows it."""

    def __init__(self, parent: Any, values: dict[str, Any]) -> None:
        self._parent = weakref.ref(parent)
        self._mapping = values


class Stored:
    """Attributes are items of an object inside, which leads back."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_store"] = Store(self, values)
        self.__dict__["itself"] = self

    @property
    def x(self) -> Any:
        return self._store._mapping["x"]

    @property
    def y(self) -> Any:
        return self._store._mapping["y"]


class InSlots:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Pair(NamedTuple):
    x: Any
    y: Any


class Items(dict):  # type: ignore[type-arg]
    """A dict of a class of the user's."""

    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


BATCHES: dict[str, Any] = {
    "attributes": lambda x, y, i: Data(x=x, y=y, name="a"),
    "an object inside": lambda x, y, i: Stored(x=x, y=y),
    "slots": lambda x, y, i: InSlots(x, y),
    "nested": lambda x, y, i: Data(x=x, y=y, more=[Data(x=x)], n=i),
    "named tuple": lambda x, y, i: Pair(x, y),
    "dict class": lambda x, y, i: Items(x=x, y=y),
    "other attributes": lambda x, y, i: Data(x=x, y=y, **({"z": x} if i % 2 else {})),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", BATCHES)
def test_objects_as_batches(kind):
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = sgd(net)
        made = []

        def step_fn(batch: Any) -> dict[str, Any]:
            loss = nn.functional.cross_entropy(net(batch.x), batch.y)
            return {"loss": loss, "x": batch.x}

        step = diary.step(step_fn, model=net, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(STEPS)):
            batch = BATCHES[kind](x, y, index)
            result = step(batch)
            made.append(batch)
            diary.write("loss", result["loss"])
            diary.write(
                "the batch is as it was", [batch.x is x, result["x"].data_ptr() == x.data_ptr(), batch.y is y]
            )
        diary.write_state(net, optimizer)

    both(script, replays=12, plan="{F} {B} {O}")


def test_a_step_that_writes_to_its_batch_object():
    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> Tensor:
            batch.x = batch.x * 2
            batch.logits = net(batch.x)
            batch.seen = True
            return nn.functional.cross_entropy(batch.logits, batch.y)

        step = diary.step(step_fn, model=net, optimizer=sgd(net))
        for x, y in batches(STEPS):
            batch = Data(x=x, y=y)
            diary.write("loss", step(batch))
            diary.write("batch", {k: v for k, v in vars(batch).items() if k != "logits"})
            diary.write("logits", batch.logits)

    both(script, replays=12, plan="{F} {B} {O}")


def test_a_tensor_inside_of_an_object_that_is_not_opened_is_named():
    """A module holds it: a model among the arguments stays what it is."""

    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.inside = nn.Module()
            self.inside.x = x

    def script(diary: Diary) -> None:
        net = Net()
        step = diary.step(
            lambda batch, y: nn.functional.cross_entropy(net(batch.inside.x), y),
            model=net,
            optimizer=sgd(net),
        )
        for x, y in batches(STEPS):
            diary.write("loss", step(Holder(x), y))

    both(script, replays=5)


@dataclass
class Declared:
    """A dataclass with an attribute that is no field."""

    loss: Any

    def __post_init__(self) -> None:
        self.twice = self.loss * 2


class Named(list):  # type: ignore[type-arg]
    """A list with an attribute."""


def named(loss: Tensor) -> Any:
    made = Named([loss])
    made.twice = loss * 2
    return made


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("make", [Declared, named, lambda loss: Slots(Declared(loss))])
def test_an_attribute_that_is_no_field_of_a_result_is_never_stale(make):
    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> dict[str, Any]:
            loss = losses(net, batch)[0]
            return {"loss": loss, "out": make(loss)}

        step = diary.step(step_fn, model=net, optimizer=sgd(net))
        kept = []
        for batch in batches(STEPS):
            kept.append(step(batch)["out"])
        for out in kept:
            diary.write("twice", (out.logits if isinstance(out, Slots) else out).twice)

    both(script, replays=5)


def test_a_deque_in_a_result_keeps_its_length():
    def script(diary: Diary) -> None:
        net = Net()

        def step_fn(batch: Any) -> dict[str, Any]:
            loss, logits = losses(net, batch)
            return {"loss": loss, "last": deque([logits], maxlen=3)}

        step = diary.step(step_fn, model=net, optimizer=sgd(net))
        for batch in batches(STEPS):
            result = step(batch)
            diary.write("last", [type(result["last"]).__name__, result["last"].maxlen, *result["last"]])

    # Dynamo of torch 2.11 does not trace a deque in a result
    both(script, replays=13, plan="{F} {B} {O}")


def seen_by_the_model(batch: Any, net: Any) -> Tensor:
    weight = 2 if batch is net.known else 3
    return nn.functional.cross_entropy(net(batch["x"]), batch["y"]) * weight


def another_name_of_a_tensor(batch: Any, net: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch["x"]), batch.target) + batch["y"].sum() * 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("loss_of_batch", [seen_by_the_model, another_name_of_a_tensor])
def test_a_batch_that_a_copy_cannot_stand_for(loss_of_batch):
    def script(diary: Diary) -> None:
        net: Any = Net()
        step = diary.step(lambda batch: loss_of_batch(batch, net), model=net, optimizer=sgd(net))
        for x, y in batches(STEPS):
            net.known = Items(x=x, y=y)
            net.known.target = y
            diary.write("loss", step(net.known))

    report = both(script, replays=5)
    assert report.running_plan == "{F} {B} {O}", str(report)


def test_what_a_class_does_when_an_object_dies_is_done_once_for_each():
    gone: list[int] = []

    class Counted(Data):
        def __del__(self) -> None:
            gone.append(1)

    def script(diary: Diary) -> None:
        gone.clear()
        net = Net()
        step = diary.step(
            lambda batch: nn.functional.cross_entropy(net(batch.x), batch.y), model=net, optimizer=sgd(net)
        )
        for x, y in batches(STEPS):
            diary.write("loss", step(Counted(x=x, y=y)))
        step.close()
        gc.collect()
        diary.write("gone", len(gone))

    both(script, replays=5)


def test_the_cache_of_a_language_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=8,
        vocab_size=11,
        n_positions=16,
        use_cache=True,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )

    def script(diary: Diary) -> None:
        model = transformers.GPT2LMHeadModel(config)
        optimizer = sgd(model)
        step = diary.step(lambda ids: model(input_ids=ids, labels=ids), model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(2)
        for _ in range(16):
            result = step(torch.randint(0, 11, (2, 6), generator=generator))
            cache = result.past_key_values
            diary.write("result", [type(result).__name__, type(cache).__name__, result.loss, result.logits])
            layers = [[type(x).__name__, x.keys, x.values, sorted(vars(x))] for x in cache.layers]
            diary.write("cache", [layers, sorted(vars(cache)), cache.get_seq_length()])
        diary.write_state(model, optimizer)

    both(script, replays=9, plan="{F} {B} {O}")
