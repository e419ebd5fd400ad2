"""Runs of plain loops, with `GraphedStep` or the compile backend. A step is a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.recipes.run import Run
from pygraph_train import GraphedStep


def step_of(
    run: Run,
    loss_of: Callable[..., Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None = None,
) -> Any:
    """The body of the loop; for the library `GraphedStep`."""
    if run.ours:
        return GraphedStep(
            loss_of, model=model, optimizer=optimizer, max_grad_norm=max_grad_norm, **run.options
        )

    def step(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        return loss.detach()

    return step


def forever(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


class Agent(nn.Module):
    """CleanRL's actor and critic for continuous actions."""

    def __init__(self, seen: int, actions: int, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.critic = nn.Sequential(*layers, nn.Linear(width, 1))
        layers = [nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.actor = nn.Sequential(*layers, nn.Linear(width, actions))
        self.log_std = nn.Parameter(torch.zeros(1, actions))


def ppo(run: Run) -> Any:
    """PPO's updates on minibatches of rollouts that were made before, with clipping and a rate that is annealed."""
    seen, actions, width, rows = run.sized((48, 12, 256, 65_536), (6, 2, 16, 512))
    agent = Agent(seen, actions, width).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    shapes = {
        "obs": (seen,),
        "actions": (actions,),
        "logprob": (),
        "advantage": (),
        "returns": (),
        "values": (),
    }
    rollout = {name: torch.randn(rows, *shape, device=run.device) for name, shape in shapes.items()}
    critic = torch.compile(agent.critic) if run.compiled else agent.critic
    actor = torch.compile(agent.actor) if run.compiled else agent.actor

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        mean = actor(batch["obs"])
        policy = torch.distributions.Normal(mean, agent.log_std.expand_as(mean).exp(), validate_args=False)
        ratio = (policy.log_prob(batch["actions"]).sum(1) - batch["logprob"]).clamp(-10, 10).exp()
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        value = critic(batch["obs"]).view(-1)
        clipped = batch["values"] + (value - batch["values"]).clamp(-0.2, 0.2)
        value_loss = torch.max((value - batch["returns"]) ** 2, (clipped - batch["returns"]) ** 2).mean()
        return policy_loss - 0.01 * policy.entropy().sum(1).mean() + 0.25 * value_loss

    step = step_of(run, loss_of, agent, optimizer, max_grad_norm=0.5)
    minibatch, update = rows // 32, 0
    run.clock.start()
    while True:
        optimizer.param_groups[0]["lr"] = 3e-4 * max(0.0, 1 - update / (run.steps / 32 + 1))
        update += 1
        for rows_of_batch in torch.randperm(rows, device=run.device).split(minibatch):
            loss = step({name: value[rows_of_batch] for name, value in rollout.items()})
            if run.clock.step(loss):
                return step.report() if run.ours else None
