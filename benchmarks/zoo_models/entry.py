"""What an entry of the zoo is: a model with random weights, its batches, its loss; nothing downloaded."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import torch
from torch import Tensor, nn


class NotInstalled(RuntimeError):
    """An entry needs a package that cannot be imported."""


@dataclass(frozen=True)
class Size:
    """How large the models of a run are.

    Attributes:
        width: of hidden layers; a multiple of `heads`.
        heads: of attention.
        depth: layers.
        batch: examples in a batch.
        length: tokens or points of time in an example.
        vocabulary: number of tokens.
        image: pixels of an image's side.
        audio: samples of a sound.
    """

    width: int
    heads: int
    depth: int
    batch: int
    length: int
    vocabulary: int
    image: int
    audio: int


FULL = Size(width=256, heads=4, depth=4, batch=8, length=64, vocabulary=1000, image=64, audio=8000)
TINY = Size(width=32, heads=2, depth=2, batch=2, length=16, vocabulary=100, image=32, audio=2000)


class Parts(NamedTuple):
    """One entry, made.

    Attributes:
        model: in train mode, on the CPU.
        make_batch: draws a batch of tensors on the CPU, in a dict, tuple or list.
        loss_of: the loss of the model on a batch, a tensor of no dimension.
    """

    model: nn.Module
    make_batch: Callable[[], Any]
    loss_of: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: as in the table.
        family: the part of the table.
        build: makes it.
        compiled: whether it is among those that are measured with Inductor's kernels as well.
    """

    name: str
    family: str
    build: Callable[[Size], Parts]
    compiled: bool = False


def entry(
    entries: list[Entry], family: str, name: str, *, compiled: bool = False
) -> Callable[[Callable[[Size], Parts]], Callable[[Size], Parts]]:
    """Decorate a function that makes an entry: it joins `entries`."""

    def add(build: Callable[[Size], Parts]) -> Callable[[Size], Parts]:
        entries.append(Entry(name, family, build, compiled))
        return build

    return add


def package(name: str) -> ModuleType:
    """Import a package.

    Raises:
        NotInstalled: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that is broken is as good as none
        raise NotInstalled(f"{name.partition('.')[0]}: {type(error).__name__}: {error}"[:200]) from error


def ids(size: Size, *, vocabulary: int | None = None, length: int | None = None) -> Tensor:
    """Random tokens. The first five of the vocabulary, which are special tokens of many models, are left out."""
    shape = (size.batch, size.length if length is None else length)
    return torch.randint(5, size.vocabulary if vocabulary is None else vocabulary, shape)


def seed(number: int) -> None:
    """Start all random numbers that entries draw."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
