"""Runs of a Lightning Trainer. A step is a batch."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.recipes.run import Run, images
from pygraph_train import PyGraphCallback


def fit(run: Run, module: pl.LightningModule, *loaders: Any, callbacks: Any = (), **options: Any) -> Any:
    """What each script ends with; for the library `PyGraphCallback()` among the callbacks."""
    ours = [PyGraphCallback(**run.options)] if run.ours else []
    model: Any = torch.compile(module) if run.compiled and module.automatic_optimization else module

    def ended(trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        run.step(lambda: outputs["loss"] if outputs else trainer.callback_metrics.get("g_loss"))

    clock = LambdaCallback(on_train_start=lambda *_: run.start(), on_train_batch_end=ended)
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": run.steps, "max_epochs": -1, "logger": CSVLogger(folder), **options}
        options |= {"enable_checkpointing": False, "enable_progress_bar": False, "devices": 1}
        options |= {"accelerator": "gpu" if run.cuda else "cpu"}
        pl.Trainer(callbacks=[clock, *callbacks, *ours], **options).fit(model, *loaders)
    return ours[0] if ours else None


class Module(pl.LightningModule):
    """What the modules have in common; each of them has its `loss(batch)`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class GPT(Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        options = {"batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, F.gelu, **options)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def loss(self, batch: Any) -> Tensor:
        (text,) = batch
        x = self.tokens(text[:, :-1]) + self.positions.weight
        logits = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1}]
        groups += [{"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps, 6e-5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def nanogpt(run: Run) -> Any:
    """nanoGPT under bf16, with clipping, a schedule and its groups of weight decay."""
    vocabulary, length, width, layers = run.sized((50304, 512, 768, 12), (100, 16, 64, 2))
    data = TensorDataset(torch.randint(vocabulary, (run.sized(4000, 64), length + 1)))
    loader, module = run.loader(data, run.sized(8, 4)), GPT(vocabulary, length, width, layers)
    return fit(run, module, loader, gradient_clip_val=1.0, precision="bf16-mixed")


class Tabular(Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(100, 16) for _ in range(8))
        layers: list[nn.Module] = []
        for before in [144, *[width] * 3]:
            layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def loss(self, batch: Any) -> Tensor:
        categories, numbers, labels = batch
        embedded = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        logits = self.layers(torch.cat([*embedded, numbers], dim=1)).squeeze(1)
        if not self.training:
            self.log("val_acc", ((logits > 0) == (labels > 0.5)).float().mean(), prog_bar=True)
        return F.binary_cross_entropy_with_logits(logits, labels)


def tabular(run: Run) -> Any:
    """A perceptron on 8 categories and 16 numbers in float32; each epoch ends with a ragged batch and a validation."""
    count, width, batch = run.sized((25_000, 256, 256), (300, 32, 32))
    categories, numbers = torch.randint(100, (count, 8)), torch.randn(count, 16)
    data = TensorDataset(categories, numbers, (numbers[:, 0] + categories[:, 0] / 50 > 1).float())
    val = TensorDataset(*(column[: count // 5] for column in data.tensors))
    return fit(run, Tabular(width), run.loader(data, batch), run.loader(val, 4 * batch))


class Classifier(Module):
    def __init__(self, net: nn.Module, metric: nn.Module) -> None:
        super().__init__()
        self.net, self.train_acc = net, metric

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.max_steps + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def resnet_metrics(run: Run) -> Any:
    """ResNet-18 with a torchmetrics object that `self.log` is given, a cycle of learning rates and averaged weights."""
    import timm
    from torchmetrics.classification import MulticlassAccuracy

    name, size, count, batch = run.sized(("resnet18", 64, 6000, 64), ("resnet10t", 32, 48, 4))
    module = Classifier(timm.create_model(name, num_classes=10), MulticlassAccuracy(10))
    precision = run.sized("bf16-mixed", "32-true")  # a CPU takes long for convolutions in bf16
    loader, averages = run.loader(images(count, size, 10), batch), [EMAWeightAveraging(decay=0.999)]
    return fit(run, module, loader, callbacks=averages, precision=precision)


class Forecaster(Module):
    def __init__(self, channels: int, width: int, future: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head, self.future = nn.Linear(width, future), future

    def loss(self, batch: Any) -> Tensor:
        (rows,) = batch
        hidden, _ = self.lstm(rows[:, : -self.future])
        return F.huber_loss(self.head(hidden[:, -1]), rows[:, -self.future :, 0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def lstm_forecast(run: Run) -> Any:
    """An LSTM predicts the end of windows of a series; clipping, validation and a rate that follows it."""
    count, future, width, batch = run.sized((10_000, 24, 256, 64), (120, 4, 16, 8))
    windows = (torch.randn(count, 8).cumsum(0) / 30).unfold(0, 4 * future, 1).transpose(1, 2)
    train, val = (TensorDataset(part) for part in (windows[: count * 3 // 4], windows[count * 3 // 4 :]))
    loaders = run.loader(train, batch), run.loader(val, 4 * batch)
    return fit(run, Forecaster(8, width, future), *loaders, gradient_clip_val=0.5)


class GraphNetwork(Module):
    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        from torch_geometric.nn import MLP, GINConv, global_mean_pool

        sizes = [features, *[width] * (layers - 1)]
        self.layers = nn.ModuleList(GINConv(MLP([before, width, width])) for before in sizes)
        self.pool, self.head = global_mean_pool, nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index).relu()
        loss = F.l1_loss(self.head(self.pool(x, batch.batch)).squeeze(1), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss


def graph_network(run: Run) -> Any:
    """A network on batches of graphs; each batch has another number of nodes and edges."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    count, width, layers, batch = run.sized((2000, 128, 5, 64), (64, 16, 2, 8))
    graphs = []
    for nodes in torch.randint(9, 30, (count,)).tolist():
        x, edges = torch.randn(nodes, 16), torch.randint(nodes, (2, 2 * nodes))
        graphs.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=x.mean().view(1)))
    loader = DataLoader(graphs, batch, shuffle=True, pin_memory=run.cuda)
    return fit(run, GraphNetwork(16, width, layers), loader)


class GAN(Module):
    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("fixed", torch.randn(16, latent, 1, 1))
        up = [nn.ConvTranspose2d(latent, 8 * width, 4), nn.BatchNorm2d(8 * width), nn.ReLU()]
        down = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for n in (width, 2 * width, 4 * width):
            down += [nn.Conv2d(n, 2 * n, 4, 2, 1), nn.BatchNorm2d(2 * n), nn.LeakyReLU(0.2)]
            m = 4 * width * width // n
            up += [nn.ConvTranspose2d(2 * m, m, 4, 2, 1), nn.BatchNorm2d(m), nn.ReLU()]
        self.generator = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        self.discriminator = nn.Sequential(*down, nn.Conv2d(8 * width, 1, 4), nn.Flatten(0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.randn(len(batch[0]), *self.fixed.shape[1:], device=self.device)
        self.toggle_optimizer(optimizer_d)
        real, fake = self.discriminator(batch[0]), self.discriminator(self.generator(noise).detach())
        loss_d = F.softplus(-real).mean() + F.softplus(fake).mean()
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.log_dict({"g_loss": loss_g, "d_loss": loss_d}, prog_bar=True)
        if batch_idx % 50 == 0:
            with torch.no_grad():
                self.samples = self.generator(self.fixed).cpu()

    def configure_optimizers(self) -> Any:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in networks]


def dcgan(run: Run) -> Any:
    """DCGAN in manual optimization, with images after every fiftieth batch; both networks are compiled."""
    width, count, batch = run.sized((64, 4000, 64), (2, 64, 4))
    module = GAN(run.sized(100, 8), width)
    if run.compiled:
        module.generator = torch.compile(module.generator)
        module.discriminator = torch.compile(module.discriminator)
    return fit(run, module, run.loader(images(count, 64), batch), max_steps=2 * run.steps)
