"""Recurrent networks, and other networks for sequences, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, ids

Batch = dict[str, Tensor]

ENTRIES: list[Entry] = []


def _tokens(size: Size) -> Batch:
    return {"x": ids(size), "y": ids(size)}


def _token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a token at each place."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


class _Recurrent(nn.Module):
    """An embedding, one of the recurrent networks of torch, and a head."""

    def __init__(self, kind: type[nn.RNNBase], size: Size, *, both: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.rnn = kind(size.width, size.width, 2, batch_first=True, bidirectional=both, dropout=0.1)
        self.head = nn.Linear((1 + both) * size.width, size.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0])


def _recurrent(name: str, kind: type[nn.RNNBase], *, both: bool = False, compiled: bool = False) -> None:
    @entry(ENTRIES, "recurrent", name, compiled=compiled)
    def build(size: Size) -> Parts:
        return Parts(_Recurrent(kind, size, both=both).train(), lambda: _tokens(size), _token_loss)


_recurrent("LSTM", nn.LSTM, compiled=True)
_recurrent("GRU", nn.GRU, compiled=True)
_recurrent("bidirectional LSTM", nn.LSTM, both=True)


@entry(ENTRIES, "recurrent", "LSTM with packed sequences")
def _packed(size: Size) -> Parts:
    class Packed(_Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.arange(size.length - size.batch + 1, size.length + 1).flip(0)
            packed = nn.utils.rnn.pack_padded_sequence(self.embedding(x), lengths, batch_first=True)
            found, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.head(found)

    return Parts(Packed(nn.LSTM, size).train(), lambda: _tokens(size), _token_loss)


@entry(ENTRIES, "recurrent", "LSTM cell in a loop")
def _cells(size: Size) -> Parts:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.width)
            self.cell = nn.LSTMCell(size.width, size.width)
            self.head = nn.Linear(size.width, size.vocabulary)

        def forward(self, x: Tensor) -> Tensor:
            state, found = None, []
            for token in self.embedding(x).unbind(1):
                state = self.cell(token, state)
                found.append(state[0])
            return self.head(torch.stack(found, 1))

    return Parts(Cells().train(), lambda: _tokens(size), _token_loss)


@entry(ENTRIES, "recurrent", "seq2seq with attention", compiled=True)
def _translation(size: Size) -> Parts:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.width)
            self.encoder = nn.GRU(size.width, size.width, batch_first=True)
            self.cell = nn.GRUCell(2 * size.width, size.width)
            self.head = nn.Linear(size.width, size.vocabulary)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            memory, last = self.encoder(self.embedding(x))
            state, found = last[0], []
            for token in self.embedding(y).unbind(1):
                weights = torch.softmax((memory @ state[:, :, None]).squeeze(-1), -1)
                context = (weights[:, None] @ memory).squeeze(1)
                state = self.cell(torch.cat([token, context], -1), state)
                found.append(state)
            return self.head(torch.stack(found, 1))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        target = batch["y"][:, : size.length // 4]
        return F.cross_entropy(model(batch["x"], target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    return Parts(Translation().train(), lambda: _tokens(size), loss_of)


@entry(ENTRIES, "recurrent", "nn.Transformer", compiled=True)
def _transformer(size: Size) -> Parts:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.width)
            self.core = nn.Transformer(
                size.width, size.heads, size.depth, size.depth, 2 * size.width, batch_first=True
            )
            self.head = nn.Linear(size.width, size.vocabulary)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
            found = self.core(self.embedding(x), self.embedding(y), tgt_mask=mask, tgt_is_causal=True)
            return self.head(found)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        y = batch["y"]
        return F.cross_entropy(model(batch["x"], y[:, :-1]).flatten(0, 1), y[:, 1:].flatten())

    return Parts(Translation().train(), lambda: _tokens(size), loss_of)


@entry(ENTRIES, "recurrent", "speech with CTC loss")
def _speech(size: Size) -> Parts:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(16, size.width, 5, stride=2, padding=2)
            self.rnn = nn.GRU(size.width, size.width, batch_first=True)
            self.head = nn.Linear(size.width, 32)

        def forward(self, x: Tensor) -> Tensor:
            found = F.relu(self.convolution(x)).transpose(1, 2)
            return self.head(self.rnn(found)[0]).log_softmax(-1)

    def make_batch() -> Batch:
        labels = torch.randint(1, 32, (size.batch, 5))
        return {"x": torch.randn(size.batch, 16, size.length), "y": labels}

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch["x"]).transpose(0, 1)
        lengths = torch.full((size.batch,), found.shape[0], device=found.device)
        targets = torch.full((size.batch,), batch["y"].shape[1], device=found.device)
        return F.ctc_loss(found, batch["y"], lengths, targets)

    return Parts(Speech().train(), make_batch, loss_of)
