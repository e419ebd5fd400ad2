"""What batches are: objects of many kinds, and shapes that change."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .compare import Run, same_as_plain
from .models import DEVICE, Net, adamw, batches, cross_entropy, loss_of

# -- objects -------------------------------------------------------------------------------------------------------


class Data:
    """Like a batch of PyTorch Geometric: tensors as attributes, in a store that `__getattr__` looks into."""

    def __init__(self, **stored: Any) -> None:
        self.__dict__["_store"] = dict(stored)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value

    @property
    def num_nodes(self) -> int:
        return len(self.x)


class Encoding(UserDict):
    """Like transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


@dataclasses.dataclass
class Example:
    x: Tensor
    y: Tensor
    name: str = "example"


@dataclasses.dataclass(frozen=True)
class Nested:
    parts: dict[str, list[Tensor]]


Pair = namedtuple("Pair", "x y")

FORMS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": y, "id": "a"}, lambda b: (b["x"], b["y"])),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Example, lambda b: (b.x, b.y)),
    "nested": (lambda x, y: Nested({"in": [x], "out": [y]}), lambda b: (b.parts["in"][0], b.parts["out"][0])),
    "Data": (lambda x, y: Data(x=x, y=y), lambda b: (b.x, b.y)),
    "Encoding": (lambda x, y: Encoding(x=x, y=y), lambda b: (b["x"], b.y)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick
@same_as_plain(replays=12)
def test_a_batch_is_an_object(run: Run, form: str) -> None:
    """The step counts its rows as well: the object's other attributes are there."""
    make, parts = FORMS[form]
    model, rows = Net(), []

    def step_fn(batch: Any) -> Tensor:
        x, y = parts(batch)
        rows.append(getattr(batch, "num_nodes", len(x)))
        return cross_entropy(model(x), y)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for x, y in batches():
        step(make(x, y))
    run.note("rows", rows)


@same_as_plain(replays=12)
def test_a_graph_network_over_objects_with_edges(run: Run) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, data: Data) -> Tensor:
            sender, receiver = data.edges
            hidden = self.first(data.x)
            mixed = torch.zeros_like(hidden).index_add(0, receiver, hidden[sender])
            data.hidden = mixed.detach()  # written into the batch
            return self.second(torch.relu(mixed))

    model = Graph()
    step = run.step(lambda data: cross_entropy(model(data), data.y), model=model, optimizer=adamw(model))
    for x, y in batches():
        data = Data(x=x, y=y, edges=torch.stack([y, (y + 3) % 8]))
        step(data)
        run.note("written", data.hidden)


@pytest.mark.notices("batches that a step changes are not written back")
@same_as_plain(replays=12)
def test_a_batch_is_changed_in_place_by_the_step(run: Run) -> None:
    """The caller sees it changed; a dict loses what the step takes out of it."""
    model = Net()

    def step_fn(batch: dict[str, Tensor]) -> Tensor:
        y = batch.pop("y")
        batch["x"].mul_(2.0)
        batch["logits"] = out = model(batch["x"])
        return cross_entropy(out, y)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for x, y in batches():
        batch = {"x": x.clone(), "y": y}
        step(batch)
        run.note("batch", batch)


@same_as_plain(replays=12)
def test_other_arguments_beside_the_batch(run: Run) -> None:
    """Numbers, texts, None and keywords; a text that changes decides what runs."""
    model = Net()

    def step_fn(batch: Any, scale: float, *, kind: str, mask: Tensor | None = None) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1]) * scale
        return loss if kind == "plain" else loss + 0.1 * model.first.weight.square().sum()

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(36)):
        step(batch, 0.5, kind="decayed" if number % 4 == 3 else "plain")


@same_as_plain(replays=12)
def test_the_same_tensors_in_every_step(run: Run) -> None:
    """One batch that is refilled in place, as a loop without a loader has it."""
    model = Net()
    x, y = batches(1)[0]
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for new_x, new_y in batches():
        x.copy_(new_x)
        y.copy_(new_y)
        step((x, y))


# -- shapes --------------------------------------------------------------------------------------------------------


@same_as_plain(replays=20)
def test_the_last_batch_is_smaller(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for _ in range(4):
        for x, y in batches(10)[:-1]:
            step((x, y))
        step((x[:3], y[:3]))


@same_as_plain(replays=12)
def test_lengths_come_from_a_few_buckets(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))
    draw = torch.Generator(DEVICE).manual_seed(1)

    def step_fn(tokens: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(tokens).mean(1), y)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number in range(45):
        tokens = torch.randint(0, 20, (4, (4, 6, 8)[number % 3]), generator=draw)
        step(tokens, tokens[:, 0] % 3)


@same_as_plain(replays=0)
def test_every_batch_has_another_length(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))
    step = run.step(
        lambda tokens: cross_entropy(model(tokens).mean(1), tokens[:, 0] % 3),
        model=model,
        optimizer=adamw(model),
    )
    for length in range(3, 33):
        step(torch.arange(4 * length).view(4, length) % 20)


@same_as_plain(replays=12, max_signatures=1)
def test_further_shapes_run_without_graphs_of_their_own(run: Run) -> None:
    """They compute where graphs do: running statistics, random numbers and sums of micro-batches stay right."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    kept = []
    for number, (x, y) in enumerate(batches(60)):
        rows = 8 if number < 20 or number % 3 else 5
        small = step.accumulate if number % 7 == 6 else step
        kept.append(small((x[:rows], y[:rows])))
    run.note("losses", kept)


@same_as_plain(replays=8, updates=0, max_signatures=1)
def test_further_shapes_in_a_loop_that_keeps_graphs(run: Run) -> None:
    """Two forwards before their backward, a backward that is asked for twice, and one that nobody calls."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    call, optimizer = run.compile(model), adamw(model)
    for number, (x, y) in enumerate(batches(50)):
        rows = 8 if number < 20 or number % 3 else 5
        one, other = (cross_entropy(call(x[k : k + rows]), y[k : k + rows]) for k in (0, 8 - rows))
        if number % 5 == 4:
            one.backward(retain_graph=True)
        (one + other).backward()
        call(x[:rows])
        optimizer.step()
        run.note("losses", (one, other))
        optimizer.zero_grad()


@same_as_plain(replays=12)
def test_the_number_of_rows_enters_the_loss(run: Run) -> None:
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": cross_entropy(model(x), y, reduction="sum") / x.shape[0], "rows": x.shape[0]}

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(batches(40)):
        rows = 8 if number % 2 else 5
        step(x[:rows], y[:rows])


@same_as_plain(replays=12)
def test_other_dtypes_and_strides_of_the_same_shape(run: Run) -> None:
    model = Net()
    step = run.step(lambda x, y: cross_entropy(model(x.float()), y), model=model, optimizer=adamw(model))
    for number, (x, y) in enumerate(batches(40)):
        kinds = [x, x, x.double(), x.t().contiguous().t()]
        step(kinds[number % 4], y)


# -- what else a step is given ---------------------------------------------------------------------------------------


@same_as_plain(replays=12)
def test_the_model_is_an_argument(run: Run) -> None:
    model = Net()
    step = run.step(lambda model, batch: loss_of(model)(batch), model=model, optimizer=adamw(model))
    for batch in batches():
        step(model, batch)


@same_as_plain(replays=8)
def test_a_batch_that_requires_a_gradient_gets_it(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for x, y in batches(30):
        x = x.clone().requires_grad_()
        step((x, y))
        run.note("gradient", x.grad)


@same_as_plain(replays=8)
def test_an_input_is_trained_and_the_model_is_not(run: Run) -> None:
    model, image = Net().eval().requires_grad_(False), torch.randn(8, 6).requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.1, fused=True)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for _, y in batches(30):
        step((image, y))
        run.note("image", image)


class Image(Tensor):
    """As torchvision has them."""


@same_as_plain(refused="its class may override operations")
def test_a_batch_of_another_class_of_tensors(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for x, y in batches():
        step((x.as_subclass(Image), y))


@same_as_plain(replays=8)
def test_attributes_and_keys_come_and_go(run: Run) -> None:
    model, settings, weights = Net(), SimpleNamespace(), {}

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        if hasattr(settings, "scale"):
            loss = loss * settings.scale
        if "decay" in weights:
            loss = loss + weights["decay"] * model.first.weight.square().sum()
        return loss * weights.get("factor", 1.0)

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(48)):
        if number == 14:
            settings.scale = 0.5
        if number in (24, 34):
            weights["decay" if number == 24 else "factor"] = 0.1
        if number == 40:
            del settings.scale
        step(*batch)
