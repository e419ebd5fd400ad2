"""Runs of plain loops, with `GraphedStep` or the compile backend. A step is a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import pygraph_train.backend
from benchmarks.recipes.run import Run, images, texts
from pygraph_train import GraphedStep


def step_of(run: Run, loss_of: Any, model: nn.Module, optimizer: Any, clip: float) -> Any:
    """The body of the loop; for the library `GraphedStep`."""
    if run.ours:
        return GraphedStep(loss_of, model=model, optimizer=optimizer, max_grad_norm=clip, **run.options)

    def step(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return step


def ppo(run: Run) -> Any:
    """PPO's updates on minibatches of rollouts that were made before, with clipping and a rate that is annealed."""
    seen, actions, width, rows = run.sized((48, 12, 256, 65_536), (6, 2, 16, 512))
    nets = {}
    for name, out in (("actor", actions), ("critic", 1)):
        hidden = [nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        net = nn.Sequential(*hidden, nn.Linear(width, out))
        nets[name] = torch.compile(net) if run.compiled else net
    agent = nn.ModuleDict(nets).to(run.device)
    agent.log_std = nn.Parameter(torch.zeros(1, actions, device=run.device))
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    shapes = {"obs": (seen,), "actions": (actions,), "logp": (), "advantage": (), "returns": (), "values": ()}
    rollout = {name: torch.randn(rows, *shape, device=run.device) for name, shape in shapes.items()}

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        mean = agent["actor"](batch["obs"])
        policy = torch.distributions.Normal(mean, agent.log_std.expand_as(mean).exp(), validate_args=False)
        ratio = (policy.log_prob(batch["actions"]).sum(1) - batch["logp"]).clamp(-10, 10).exp()
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        value = agent["critic"](batch["obs"]).view(-1)
        clipped = batch["values"] + (value - batch["values"]).clamp(-0.2, 0.2)
        value_loss = torch.max((value - batch["returns"]) ** 2, (clipped - batch["returns"]) ** 2).mean()
        return policy_loss - 0.01 * policy.entropy().sum(1).mean() + 0.25 * value_loss

    step = step_of(run, loss_of, agent, optimizer, clip=0.5)
    for n in run.batches(range(32)):
        if n == 0:  # the next update
            optimizer.param_groups[0]["lr"] = 3e-4 * (1 - run.made / run.steps)
            order = torch.randperm(rows, device=run.device).split(rows // 32)
        run.step(step({name: value[order[n]] for name, value in rollout.items()}))
    return step


def vit_backend(run: Run) -> Any:
    """A small ViT in a plain loop with a schedule; for the library `torch.compile(model, backend="pygraph")`."""
    import timm

    name, size, count, batch = run.sized(("vit_small_patch16_224", 224, 640, 32), ("test_vit", 160, 32, 2))
    model = timm.create_model(name, num_classes=100, drop_rate=0.1).to(run.device)
    if run.ours:
        model = torch.compile(model, backend="pygraph", options=run.options or None)
    elif run.compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    for rows in run.batches(run.loader(images(count, size), batch)):
        x, y = (part.to(run.device, non_blocking=True) for part in rows)
        optimizer.zero_grad()
        with torch.autocast(run.device, torch.bfloat16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.step(loss)
    return pygraph_train.backend


class Speech(nn.Module):
    """Two strided convolutions over spectra (batch, time, bands), and a transformer: (batch, time / 4, letters)."""

    def __init__(self, bands: int, width: int, layers: int, letters: int) -> None:
        super().__init__()
        convolutions = [nn.Conv1d(n, width, 3, stride=2, padding=1) for n in (bands, width)]
        self.convolutions = nn.Sequential(convolutions[0], nn.GELU(), convolutions[1], nn.GELU())
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, spectra: Tensor, lengths: Tensor) -> Tensor:
        x = self.convolutions(spectra.transpose(1, 2)).transpose(1, 2)
        padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def speech_ctc(run: Run) -> Any:
    """Speech recognition with a CTC loss; each batch is padded to its longest utterance."""
    bands, width, layers, frames, count, batch = run.sized((80, 256, 6, 400, 1000, 16), (8, 32, 2, 64, 64, 4))
    model = Speech(bands, width, layers, 32).to(run.device)
    compiled = torch.compile(model) if run.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data = [(torch.randn(8 * len(text), bands), text) for text in texts(count, 32, frames // 8)]

    def collate(rows: Any) -> list[Tensor]:
        lengths = torch.tensor([[(len(x) + 3) // 4, len(text)] for x, text in rows]).unbind(1)
        return [*(pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True)), *lengths]

    def loss_of(spectra: Tensor, text: Tensor, lengths: Tensor, letters: Tensor) -> Tensor:
        with torch.autocast(run.device, torch.bfloat16):
            logits = compiled(spectra, lengths)
        scores = logits.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, text, lengths, letters, zero_infinity=True)

    step = step_of(run, loss_of, model, optimizer, clip=1.0)
    for rows in run.batches(run.loader(data, batch, collate_fn=collate)):
        run.step(step(*(part.to(run.device, non_blocking=True) for part in rows)))
    return step
