"""Losses with derivatives of derivatives: physics, molecules, penalties on gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry

Batch = dict[str, Tensor]

ENTRIES: list[Entry] = []


def layers(before: int, size: Size, after: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of one width."""
    found: list[nn.Module] = [nn.Linear(before, size.width), activation()]
    for _ in range(size.depth - 1):
        found += [nn.Linear(size.width, size.width), activation()]
    return nn.Sequential(*found, nn.Linear(size.width, after))


def _derivative(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def _points(size: Size) -> int:
    return 32 * size.length


@entry(ENTRIES, "second derivatives", "PINN, heat equation", compiled=True)
def _heat(size: Size) -> Parts:
    def make_batch() -> Batch:
        return {"x": torch.rand(_points(size), 1), "t": torch.rand(_points(size), 1)}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x, t = batch["x"].clone().requires_grad_(), batch["t"].clone().requires_grad_()
        u = model(torch.cat([x, t], 1))
        residual = _derivative(u, t) - 0.1 * _derivative(_derivative(u, x), x)
        start = model(torch.cat([batch["x"], torch.zeros_like(t)], 1)) - torch.sin(torch.pi * batch["x"])
        return residual.square().mean() + start.square().mean()

    return Parts(layers(2, size, 1, nn.Tanh).train(), make_batch, loss_of)


@entry(ENTRIES, "second derivatives", "PINN, Burgers' equation, inputs that require gradients")
def _burgers(size: Size) -> Parts:
    def make_batch() -> Batch:
        points = [torch.rand(_points(size), 1).requires_grad_() for _ in range(2)]
        return dict(zip(("x", "t"), points, strict=True))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x, t = batch["x"], batch["t"]
        u = model(torch.cat([x, t], 1))
        u_x = _derivative(u, x)
        return (_derivative(u, t) + u * u_x - 0.01 * _derivative(u_x, x)).square().mean()

    return Parts(layers(2, size, 1, nn.Tanh).train(), make_batch, loss_of)


@entry(ENTRIES, "second derivatives", "PINN with torch.func")
def _functional(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        def value(x: Tensor) -> Tensor:
            return model(x[None]).squeeze()

        second = torch.func.vmap(torch.func.grad(lambda x: torch.func.grad(value)(x).sum()))(batch["x"])
        return (second.squeeze(-1) - torch.sin(batch["x"]).squeeze(-1)).square().mean()

    model = layers(1, size, 1, nn.Tanh).train()
    return Parts(model, lambda: {"x": torch.rand(_points(size), 1)}, loss_of)


@entry(ENTRIES, "second derivatives", "molecular energies and forces", compiled=True)
def _molecules(size: Size) -> Parts:
    atoms = 16

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, size.width)
            self.filters = layers(16, size, size.width, nn.SiLU)
            self.head = layers(size.width, size, 1, nn.SiLU)
            self.register_buffer("centres", torch.linspace(0, 4, 16))

        def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
            offsets = places[:, :, None] - places[:, None]
            distances = (offsets.square().sum(-1) + 1e-4).sqrt()
            found = self.embedding(kinds)
            weights = self.filters(torch.exp(-(distances[..., None] - self.centres).square()))
            found = found + (weights * found[:, None]).sum(2)
            return self.head(found).sum((1, 2))

    def make_batch() -> Batch:
        return {
            "kinds": torch.randint(0, 10, (size.batch, atoms)),
            "places": torch.randn(size.batch, atoms, 3),
            "energy": torch.randn(size.batch),
            "forces": torch.randn(size.batch, atoms, 3),
        }

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        places = batch["places"].detach().requires_grad_()
        energy = model(batch["kinds"], places)
        forces = -_derivative(energy, places)
        return (energy - batch["energy"]).square().mean() + (forces - batch["forces"]).square().mean()

    return Parts(Energy().train(), make_batch, loss_of)


@entry(ENTRIES, "second derivatives", "critic with a gradient penalty", compiled=True)
def _penalty(size: Size) -> Parts:
    def make_batch() -> Batch:
        return {name: torch.randn(8 * size.batch, 64) for name in ("real", "fake")}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        real, fake = batch["real"], batch["fake"]
        share = torch.rand(len(real), 1, device=real.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        penalty = (_derivative(model(mixed), mixed).norm(dim=1) - 1).square().mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty

    return Parts(layers(64, size, 1).train(), make_batch, loss_of)


@entry(ENTRIES, "second derivatives", "adversarial training (FGSM)")
def _adversarial(size: Size) -> Parts:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        first = nn.functional.cross_entropy(model(x), batch["y"])
        (slope,) = torch.autograd.grad(first, x)
        return nn.functional.cross_entropy(model((x + 0.1 * slope.sign()).detach()), batch["y"])

    def make_batch() -> Batch:
        return {"x": torch.randn(8 * size.batch, 64), "y": torch.randint(0, 10, (8 * size.batch,))}

    return Parts(layers(64, size, 10).train(), make_batch, loss_of)


@entry(ENTRIES, "second derivatives", "Fourier neural operator")
def _operator(size: Size) -> Parts:
    class Operator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, modes = size.width // 4, 8
            self.modes = modes
            self.lift, self.head = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
            self.weights = nn.ParameterList(
                torch.randn(width, width, modes, 2) / width for _ in range(size.depth)
            )
            self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(size.depth))

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x)
            for weight, local in zip(self.weights, self.local, strict=True):
                spectrum = torch.fft.rfft(x)
                mixed = torch.einsum(
                    "bim,iom->bom", spectrum[..., : self.modes], torch.view_as_complex(weight)
                )
                padded = nn.functional.pad(mixed, (0, spectrum.shape[-1] - self.modes))
                x = nn.functional.gelu(torch.fft.irfft(padded, n=x.shape[-1]) + local(x))
            return self.head(x)

    def make_batch() -> Batch:
        return {name: torch.randn(size.batch, 1, size.length) for name in ("x", "y")}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    return Parts(Operator().train(), make_batch, loss_of)
