"""Regions that hand large tensors on: outputs in place, read where they are by the next region.

On the hostile engine of test_backend.py, and with every output of more than a few numbers counting as large.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_training import emptied_after_the_forward
from test_backend import (  # noqa: F401 - these tests once more, with outputs handed out in place
    Broken,
    Net,
    accumulating,
    batches,
    compiled,
    hostile,
    regions,
    replays,
    same_as_plain,
    test_a_backward_that_never_comes,
    test_a_cache_given_as_argument_is_written_in_place,
    test_a_compiled_function_reads_what_another_returned_pytorch_122192,
    test_many_pending_forwards_are_all_correct,
    test_outputs_that_share_memory_still_share_it,
    test_training_equals_plain_training_bit_for_bit,
    test_two_forwards_before_the_first_backward,
    test_validation_after_training_and_training_again_pytorch_128218,
    update,
)
from torch import nn

import pygraph_train.backend as backend
from pygraph_train.regions import inductor
from pygraph_train.regions import pair as pair_module
from pygraph_train.regions import region_capture as capture_module
from pygraph_train.regions.arena import Arena
from pygraph_train.regions.blocks import block_of
from pygraph_train.regions.measurements import Cost, Measurements


@pytest.fixture(autouse=True)
def nearly_every_output_is_large(hostile: Arena, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(capture_module, "LARGE", 20)  # a loss of one number is none


class Tanh(nn.Module):
    """The output is saved for the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(F.gelu(self.first(x))))


def criterion(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.log_softmax(-1) * 2, y)


def loss_for(model: nn.Module, call: Any, **options: Any) -> Any:
    return compiled(criterion, **options) if call is not model else criterion


def chained(steps: int = 24, **options: Any) -> Any:
    """A model region, then a loss region."""

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        loss_of = loss_for(model, call, **options)
        return [update(loss_of(call(x), y), opt) for x, y in batches(steps)]

    return body


@pytest.mark.parametrize("kind", [Net, Tanh])
@pytest.mark.parametrize("indirection", ["copy", "device"])
def test_what_one_region_hands_to_the_next_is_not_copied(kind: type[nn.Module], indirection: str) -> None:
    same_as_plain(chained(indirection=indirection), kind, indirection=indirection, least=70)
    of_model, of_loss = regions("forward")
    back_of_model, back_of_loss = sorted(regions("backward"), key=lambda r: int(r.name.split()[1]))
    labels = batches(1)[0][1]
    assert back_of_model.copied_bytes == 0, back_of_model
    assert of_loss.copied_bytes == (labels.nbytes if indirection == "copy" else 0), of_loss
    assert back_of_loss.copied_bytes <= 4, back_of_loss
    assert of_model.captures == of_loss.captures == 1, (of_model, of_loss)
    for region in backend.report().regions:
        assert region.replays >= 20, region


def test_outputs_kept_changed_and_viewed_keep_their_values() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        loss_of, kept, values = loss_for(model, call), [], []
        for step, (x, y) in enumerate(batches(28)):
            out = call(x)  # the one of before is alive during this call
            values.append(update(loss_of(out, y), opt))
            if step % 3 == 0:
                kept.append(out[1:, :2])
            with torch.no_grad():
                out.mul_(2)
        return values + kept

    for kind in (Net, Tanh):
        same_as_plain(body, kind, least=80)
        assert sum(r.captures for r in regions("forward")) <= 6
        assert replays("forward") >= 40


def test_an_output_is_changed_where_the_graph_wrote_it() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        with torch.no_grad():
            for x, _ in batches(24):
                values.append(call(x).add_(1).sum())
        return values

    same_as_plain(body, Tanh, least=18)
    (region,) = regions("inference")
    assert region.captures == 1 and region.replays >= 20, region


def test_an_output_in_the_way_is_copied_from_then_on(hostile: Arena) -> None:  # noqa: F811
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values, kept = [], []
        for step, (x, y) in enumerate(batches(30)):
            if step < 10:
                values.append(update(F.cross_entropy(call(x), y), opt))
            else:  # alive during the backward, and the next forward
                out = call(x)
                values.append(update(F.cross_entropy(out, y), opt))
                kept.append(out)
        return values + kept

    for kind in (Net, Tanh):
        same_as_plain(body, kind, least=40)
        (forward,), (backward,) = regions("forward"), regions("backward")
        assert forward.captures == backward.captures == 2, forward
        assert forward.replays >= 26 and backward.replays >= 26, (forward, backward)
        assert not any(o.visible for o in hostile._occupants)


@pytest.mark.parametrize("kind", [Net, Tanh])
def test_two_forwards_before_the_first_backward_of_a_chain(kind: type[nn.Module]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        loss_of, values = loss_for(model, call), []
        data = batches(44)
        for (x1, y1), (x2, y2) in zip(data[::2], data[1::2], strict=True):
            first, second = loss_of(call(x1), y1), loss_of(call(x2), y2)
            first.backward()
            values += [first.detach(), update(second, opt)]
        return values

    same_as_plain(body, kind, least=130)
    assert replays("forward") >= 60 and replays("backward") >= 60


def test_a_gradient_that_is_read_in_place_is_kept_by_the_graph_that_reads_it(hostile: Arena) -> None:  # noqa: F811
    body = chained(24)
    same_as_plain(body, least=70)
    readers = [c for o in hostile._occupants if o.owner.spec.phase == "backward" for c in graphs(o.owner)]
    (reader,) = {c for c in readers if any(p().owner.spec.phase == "backward" for p in c.producers.values())}
    (tangent,) = reader.settled
    assert not reader.copied_bytes
    (producer,) = [p() for p in reader.producers.values()]
    assert {block_of(t) for t in producer.tensors.values()} <= reader.occupant.keeps
    assert reader.addresses[reader.fixed.index(tangent)] in {t.data_ptr() for t in producer.tensors.values()}
    model_backward, loss_backward = (o for o in hostile.owners() if o.spec.phase == "backward")  # type: ignore[attr-defined]
    assert model_backward.feeds != loss_backward.feeds, "one hands the other its gradient"
    assert producer.owner.feeds and not any(o.owner.feeds for o in reader.occupants)


def graphs(region: Any) -> list[capture_module.RegionCapture]:
    return [capture for key in region._keys.values() for capture in key.captures]


def test_a_region_follows_the_one_before_that_is_captured_again(hostile: Arena) -> None:  # noqa: F811
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        loss_of, values = loss_for(model, call), []
        for step, (x, y) in enumerate(batches(24)):
            if step in (8, 16):
                for owner in {o.owner for o in hostile._occupants if o.owner.record is regions("forward")[0]}:
                    owner.capture_again()
            values.append(update(loss_of(call(x), y), opt))
        return values

    same_as_plain(body, least=70)
    for region in backend.report().regions:
        assert region.captures == 3 and region.replays >= 20, region
        assert region.copied_bytes <= batches(1)[0][0].nbytes, region


def test_batches_in_turn_are_copied_and_cost_no_further_capture() -> None:
    data = [x for x, _ in batches(4)]
    same_as_plain(
        lambda model, call, opt: [
            F.mse_loss(call(data[i % 4]), call(data[i % 4])).detach() for i in range(24)
        ],
        Tanh,
        least=35,
    )
    data = batches(4)
    same_as_plain(
        lambda model, call, opt: [update(F.cross_entropy(call(x), y), opt) for x, y in data * 6],
        Tanh,
        least=35,
    )
    for region in backend.report().regions:
        assert region.captures == 1, region
    assert regions("forward")[0].copied_bytes == data[0][0].nbytes


def test_gradient_accumulation_in_a_chain() -> None:
    same_as_plain(accumulating(24), least=30)
    assert replays("forward") >= 20 and replays("backward") >= 18


def test_a_saved_view_of_an_input_as_another_type_is_of_the_input_of_this_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.embedding(x.view(torch.int64), self.table)

    given: list[Any] = []
    views: list[int] = []
    recast = capture_module._recast

    def recorded(*arguments: Any) -> torch.Tensor:
        view = recast(*arguments)
        views.append(view.untyped_storage()._cdata)
        return view

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        copy = compiled(torch.clone) if call is not model else torch.clone
        losses = []
        for _, y in batches(24):
            given.append(copy(y.view(torch.float64)))
            losses.append(update(call(given[-1]).square().sum(), opt))
            given[-1] = given[-1].untyped_storage()._cdata
        return losses

    monkeypatch.setattr(capture_module, "_recast", recorded)
    same_as_plain(body, Bits, least=55)
    assert len(views) >= 12
    assert views == given[-len(views) :]


@pytest.mark.parametrize("kind", [Net, Tanh, Broken])
def test_gradients_that_are_emptied_after_the_forward_are_not_copied(kind: type[nn.Module]) -> None:
    """Lightning's order: those of the step before are alive during a forward."""
    addresses: list[list[int]] = []
    same_as_plain(emptied_after_the_forward(batches(16), addresses), kind, least=20)
    assert all(r.captures <= 2 and r.replays >= 8 for r in (*regions("forward"), *regions("backward")))
    assert addresses[-1] == addresses[-4]  # where the graph writes them


def test_an_input_that_is_saved_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving inputs are served by indirection, which turns out to be slower than copies."""
    monkeypatch.setattr(pair_module, "WORTH_POINTING", 1)
    monkeypatch.setattr(inductor, "Pair", lambda indirection, *_: pair_module.Pair(indirection, True))
    seconds = {"plain": 4.0, "graph": 1.0, "indirect": 2.0}
    monkeypatch.setattr(
        Measurements,
        "cost",
        lambda self, way: Cost(seconds[way], seconds[way]) if len(self._costs[way]) >= self.samples else None,
    )

    captures_when_settled: list[int] = []

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for x, y in batches(40):
            losses.append(update(F.cross_entropy(call(x), y), opt))
            found = backend.report()
            if call is not model and found.settled:
                captures_when_settled.append(min(r.captures for r in found.regions))
        return losses

    same_as_plain(body, Tanh, least=55)
    assert captures_when_settled and set(captures_when_settled) == {2}
    (forward,), (backward,) = regions("forward"), regions("backward")
    assert forward.decision == backward.decision == "graph" and "with indirection" in forward.reason
    x, _ = batches(1)[0]
    assert forward.copied_bytes == x.nbytes
    assert backward.copied_bytes < x.nbytes  # the gradient of the output
    assert forward.replays >= 20 and forward.captures == backward.captures == 2
