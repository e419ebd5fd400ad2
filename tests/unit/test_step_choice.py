"""Turns of the controller, counted and timed in real steps; results that keep no history."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable

import torch

from pygraph_train.selection.arms import NOTHING, WHOLE, Arm
from pygraph_train.selection.controller import Controller
from pygraph_train.selection.timing import StepTime
from pygraph_train.step.choice import Choice
from pygraph_train.step.outputs import Outputs

GRAPH, PLAIN = Arm(WHOLE), Arm(NOTHING)


class QueueingDevice:
    """A device behind a launch queue: it works `device` seconds a step, the host `host`, and may run ahead.

    Up to `room` launches wait in the queue; a host that finds it full waits too.
    """

    room = 1000

    def __init__(self) -> None:
        self.costs = {GRAPH: (1e-4, 45e-3, 50), PLAIN: (20e-3, 44e-3, 160)}  # host, device, launches
        self.now = self.free = 0.0
        self.queue: deque[tuple[float, int]] = deque()
        self.drained = 0
        self._began = 0.0
        self._arm = GRAPH

    def step(self, arm: Arm) -> None:
        self._arm = arm
        host, device, launches = self.costs[arm]
        self._wait_for_room(launches)
        self.now += host
        self.free = max(self.free, self.now) + device if host < device else max(self.free, self.now)
        self.queue.append((self.free, launches))

    def _wait_for_room(self, launches: int) -> None:
        while self.queue and (
            sum(n for _, n in self.queue) + launches > self.room or self.queue[0][0] <= self.now
        ):
            self.now = max(self.now, self.queue.popleft()[0])

    def start(self) -> None:
        self._began = self.now

    def add(self, seconds: float) -> None:
        self._began -= seconds

    def stop(self, arm: Arm, deliver: Callable[[StepTime], None]) -> None:
        host, device, _ = self.costs[arm]
        deliver(StepTime(self.now - self._began, max(host, device)))

    def collect(self) -> None:
        pass

    def drain(self) -> None:
        self.drained += 1
        self.now = max(self.now, self.free)
        self.queue.clear()


def test_an_arm_pays_nothing_for_the_queue_of_another() -> None:
    device = QueueingDevice()
    controller = Controller([GRAPH, PLAIN])
    choice = Choice(controller, device, {})
    for _ in range(300):
        if choice.quiet:
            choice.quiet -= 1
            device.step(choice.arm)
            continue
        choice.begin()
        choice.start()
        device.step(choice.arm)
        choice.stop()
        choice.end()
    assert controller.settled
    assert controller.times[PLAIN] == 44e-3 and controller.times[GRAPH] == 45e-3
    assert controller.best == PLAIN  # no graphs are the safe choice


def test_the_device_is_waited_for_only_where_the_arm_changes() -> None:
    device = QueueingDevice()
    choice = Choice(Controller([GRAPH]), device, {})
    for _ in range(100):
        choice.begin()
        choice.start()
        device.step(choice.arm)
        choice.stop()
        choice.end()
    assert device.drained == 0


def test_kept_results_hold_no_history() -> None:
    class Token:
        pass

    token = Token()
    loss = torch.ones(3, requires_grad=True).sum()
    loss.grad_fn.register_hook(lambda *_, token=token: None)  # type: ignore[union-attr]
    history = weakref.ref(token)
    outputs = Outputs({"loss": loss, "name": "a"}, [])
    del loss, token
    gc.collect()
    assert history() is None
    found = outputs([])
    assert found["loss"] == 3.0 and found["name"] == "a" and found["loss"].grad_fn is None
