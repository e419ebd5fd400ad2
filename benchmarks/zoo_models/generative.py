"""Diffusion, flows, autoencoders and adversarial networks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry
from benchmarks.zoo_models.physics import layers

Batch = dict[str, Tensor]

ENTRIES: list[Entry] = []


def _images(size: Size) -> Batch:
    return {"x": torch.randn(size.batch, 3, size.image // 2, size.image // 2)}


def _times(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of the numbers of steps."""
    rates = torch.exp(torch.arange(width // 2, device=steps.device) * (-math.log(10000) / (width // 2)))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class _Block(nn.Module):
    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(min(8, before), before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        found = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.second(F.silu(found)) + self.skip(x)


class _UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.start, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList([_Block(width, width, width), _Block(width, 2 * width, width)])
        self.middle = _Block(2 * width, 2 * width, width)
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.ModuleList([_Block(4 * width, width, width), _Block(2 * width, width, width)])

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time, found, kept = self.embedding(_times(steps, self.width)), self.start(x), []
        for block in self.down:
            found = block(found, time)
            kept.append(found)
            found = F.avg_pool2d(found, 2)
        found = self.middle(found, time)
        flat = found.flatten(2).transpose(1, 2)
        found = found + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(found)
        for block in self.up:
            found = block(torch.cat([F.interpolate(found, scale_factor=2.0), kept.pop()], 1), time)
        return self.end(found)


def _noise_left() -> Tensor:
    """The share of an image that is left at each step."""
    return torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)


def _denoising_loss(net: nn.Module, x: Tensor, left_at: Tensor) -> Tensor:
    steps = torch.randint(0, 1000, (len(x),), device=x.device)
    noise, left = torch.randn_like(x), left_at.to(x.device)[steps][:, None, None, None]
    return F.mse_loss(net(left.sqrt() * x + (1 - left).sqrt() * noise, steps), noise)


@entry(ENTRIES, "generative", "diffusion U-Net", compiled=True)
def _diffusion(size: Size) -> Parts:
    model = nn.ModuleDict({"net": _UNet(size.width // 4)}).train()
    model.register_buffer("left", _noise_left())

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return _denoising_loss(model.net, batch["x"], model.left)

    return Parts(model, lambda: _images(size), loss_of)


@entry(ENTRIES, "generative", "diffusion, schedule on the CPU")
def _schedule_on_host(size: Size) -> Parts:
    left_at = _noise_left()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return _denoising_loss(model, batch["x"], left_at)

    return Parts(_UNet(size.width // 4).train(), lambda: _images(size), loss_of)


@entry(ENTRIES, "generative", "diffusion transformer", compiled=True)
def _diffusion_transformer(size: Size) -> Parts:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(size.width, size.heads, batch_first=True)
            self.inner = nn.Sequential(
                nn.Linear(size.width, 2 * size.width), nn.GELU(), nn.Linear(2 * size.width, size.width)
            )
            self.norms = nn.ModuleList(nn.LayerNorm(size.width, elementwise_affine=False) for _ in range(2))
            self.modulation = nn.Linear(size.width, 6 * size.width)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            a, b, c, d, e, f = self.modulation(F.silu(time))[:, None].chunk(6, -1)
            found = self.norms[0](x) * (1 + a) + b
            x = x + c * self.attention(found, found, found, need_weights=False)[0]
            return x + d * self.inner(self.norms[1](x) * (1 + e) + f)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, size.width, 4, 4)
            self.layers = nn.ModuleList(Layer() for _ in range(size.depth))
            self.head = nn.Linear(size.width, 48)

        def forward(self, x: Tensor, steps: Tensor) -> Tensor:
            found, time = self.patches(x).flatten(2).transpose(1, 2), _times(steps, size.width)
            for layer in self.layers:
                found = layer(found, time)
            return F.fold(self.head(found).transpose(1, 2), x.shape[-2:], 4, stride=4)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x, noise = batch["x"], torch.randn_like(batch["x"])
        share = torch.rand(len(x), device=x.device)
        mixed = torch.lerp(x, noise, share[:, None, None, None])
        return F.mse_loss(model(mixed, 1000 * share), noise - x)

    return Parts(Transformer().train(), lambda: _images(size), loss_of)


class _Coupling(nn.Module):
    """A layer of RealNVP: one half of the numbers scales and shifts the other half."""

    def __init__(self, count: int, size: Size, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = layers(count // 2, size, count), flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, -1)[:: -1 if self.flip else 1]
        scale, shift = self.net(kept).chunk(2, -1)
        scale = scale.tanh()
        changed = changed * scale.exp() + shift
        halves = (changed, kept) if self.flip else (kept, changed)
        return torch.cat(halves, -1), scale.sum(-1)


@entry(ENTRIES, "generative", "RealNVP", compiled=True)
def _real_nvp(size: Size) -> Parts:
    model = nn.ModuleList(_Coupling(32, size, bool(n % 2)) for n in range(size.depth)).train()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        z, volume = batch["x"], torch.zeros(len(batch["x"]), device=batch["x"].device)
        for layer in model.children():
            z, change = layer(z)
            volume = volume + change
        return (0.5 * z.square().sum(-1) - volume).mean()

    return Parts(model, lambda: {"x": torch.randn(16 * size.batch, 32)}, loss_of)


@entry(ENTRIES, "generative", "neural spline flow of one dimension")
def _spline(size: Size) -> Parts:
    bins = 8

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        context, x = batch["context"], batch["x"]
        widths, heights = (p.softmax(-1) for p in model(context).chunk(2, -1))
        edges = F.pad(widths.cumsum(-1), (1, 0))
        place = torch.searchsorted(edges[:, 1:].contiguous(), x[:, None]).clamp(max=bins - 1)
        slope = heights.gather(1, place) / widths.gather(1, place)
        return -slope.log().mean()

    def make_batch() -> Batch:
        return {"context": torch.randn(16 * size.batch, 8), "x": torch.rand(16 * size.batch)}

    return Parts(layers(8, size, 2 * bins).train(), make_batch, loss_of)


@entry(ENTRIES, "generative", "VAE", compiled=True)
def _vae(size: Size) -> Parts:
    model = nn.ModuleDict({"encoder": layers(256, size, 32), "decoder": layers(16, size, 256)}).train()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        mean, spread = model.encoder(batch["x"]).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        found = F.binary_cross_entropy_with_logits(model.decoder(drawn), batch["x"], reduction="sum")
        return (found - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()) / len(mean)

    return Parts(model, lambda: {"x": torch.rand(8 * size.batch, 256)}, loss_of)


@entry(ENTRIES, "generative", "VQ-VAE")
def _quantized(size: Size) -> Parts:
    coders = {"encoder": layers(256, size, 16), "decoder": layers(16, size, 256)}
    model = nn.ModuleDict(coders | {"codes": nn.Embedding(64, 16)}).train()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = model.encoder(batch["x"])
        code = model.codes(torch.cdist(found, model.codes.weight).argmin(-1))
        straight = found + (code - found).detach()
        commitment = F.mse_loss(found, code.detach()) * 0.25 + F.mse_loss(code, found.detach())
        return F.mse_loss(model.decoder(straight), batch["x"]) + commitment

    return Parts(model, lambda: {"x": torch.rand(8 * size.batch, 256)}, loss_of)


def _critic(size: Size, norm: bool = False) -> nn.Sequential:
    wrap = nn.utils.parametrizations.spectral_norm if norm else lambda layer: layer
    width = size.width // 4
    return nn.Sequential(
        wrap(nn.Conv2d(3, width, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        wrap(nn.Conv2d(width, 2 * width, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        wrap(nn.Linear(2 * width * (size.image // 8) ** 2, 1)),
    )


def _generator(size: Size) -> nn.Sequential:
    width, side = size.width // 4, size.image // 8
    return nn.Sequential(
        nn.Linear(32, 2 * width * side**2),
        nn.Unflatten(1, (2 * width, side, side)),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    )


def _adversarial(name: str, *, norm: bool = False, compiled: bool = False) -> None:
    @entry(ENTRIES, "generative", name, compiled=compiled)
    def build(size: Size) -> Parts:
        model = nn.ModuleDict({"critic": _critic(size, norm), "generator": _generator(size)}).train()
        model["generator"].requires_grad_(False)

        def loss_of(model: nn.Module, batch: Batch) -> Tensor:
            critic, generator = model.children()
            real = batch["x"]
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 32, device=real.device))
            return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

        return Parts(model, lambda: _images(size), loss_of)


_adversarial("DCGAN, discriminator", compiled=True)
_adversarial("DCGAN, discriminator with spectral_norm", norm=True)
