"""Losses of reinforcement learning."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry
from benchmarks.zoo_models.physics import layers

Batch = dict[str, Tensor]

ENTRIES: list[Entry] = []

STATE, ACTIONS = 16, 4


def _actor_critic(size: Size) -> nn.ModuleDict:
    outputs = {"actor": ACTIONS, "critic": 1}
    return nn.ModuleDict({name: layers(STATE, size, n, nn.Tanh) for name, n in outputs.items()}).train()


def _experience(size: Size) -> Batch:
    count = 32 * size.batch
    return {
        "state": torch.randn(count, STATE),
        "next": torch.randn(count, STATE),
        "choice": torch.randint(0, ACTIONS, (count,)),
        "reward": torch.randn(count),
        "done": (torch.rand(count) < 0.1).float(),
        "log_prob": -torch.rand(count),
        "advantage": torch.randn(count),
        "value": torch.randn(count),
    }


@entry(ENTRIES, "reinforcement learning", "PPO", compiled=True)
def _ppo(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        policy = Categorical(logits=model.actor(batch["state"]))
        ratio = (policy.log_prob(batch["choice"]) - batch["log_prob"]).exp()
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value = model.critic(batch["state"]).squeeze(-1)
        return 0.5 * (value - batch["value"]).square().mean() - gain - 0.01 * policy.entropy().mean()

    return Parts(_actor_critic(size), lambda: _experience(size), loss_of)


def _with_target(size: Size) -> nn.ModuleDict:
    """A network, and a copy of it that is not trained."""
    net = layers(STATE, size, ACTIONS)
    return nn.ModuleDict({"net": net, "target": copy.deepcopy(net).requires_grad_(False)}).train()


@entry(ENTRIES, "reinforcement learning", "DQN, double", compiled=True)
def _dqn(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        value = model.net(batch["state"]).gather(1, batch["choice"][:, None]).squeeze(1)
        with torch.no_grad():
            best = model.net(batch["next"]).argmax(1, keepdim=True)
            later = model.target(batch["next"]).gather(1, best).squeeze(1)
            target = batch["reward"] + 0.99 * (1 - batch["done"]) * later
        return F.smooth_l1_loss(value, target)

    return Parts(_with_target(size), lambda: _experience(size), loss_of)


@entry(ENTRIES, "reinforcement learning", "DQN, target in the step")
def _soft_target(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            later = model.target(batch["next"]).max(1).values
        value = model.net(batch["state"]).gather(1, batch["choice"][:, None]).squeeze(1)
        return F.smooth_l1_loss(value, batch["reward"] + 0.99 * (1 - batch["done"]) * later)

    return Parts(_with_target(size), lambda: _experience(size), loss_of)


@entry(ENTRIES, "reinforcement learning", "SAC, actor", compiled=True)
def _sac_actor(size: Size) -> Parts:
    nets = {"actor": layers(STATE, size, 2 * ACTIONS), "critic": layers(STATE + ACTIONS, size, 1)}
    model = nn.ModuleDict(nets).train()
    model.critic.requires_grad_(False)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mean, spread = model.actor(batch["state"]).chunk(2, -1)
        policy = Normal(mean, spread.clamp(-5, 2).exp())
        drawn = policy.rsample()
        action = drawn.tanh()
        log_prob = (policy.log_prob(drawn) - (1 - action.square() + 1e-6).log()).sum(-1)
        value = model.critic(torch.cat([batch["state"], action], -1)).squeeze(-1)
        return (0.2 * log_prob - value).mean()

    return Parts(model, lambda: _experience(size), loss_of)


@entry(ENTRIES, "reinforcement learning", "REINFORCE with discounted returns")
def _reinforce(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        rewards = batch["reward"].view(size.batch, -1)[:, : size.length // 4]
        later, returns = torch.zeros_like(rewards[:, 0]), []
        for reward in reversed(rewards.unbind(1)):
            later = reward + 0.99 * later
            returns.append(later)
        gains = torch.stack(returns[::-1], 1)
        states = batch["state"].view(size.batch, -1, STATE)[:, : gains.shape[1]]
        choices = batch["choice"].view(size.batch, -1)[:, : gains.shape[1]]
        return -(Categorical(logits=model.actor(states)).log_prob(choices) * gains).mean()

    return Parts(_actor_critic(size), lambda: _experience(size), loss_of)
