"""Checking a replay against the step without a graph."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.memory import local_tensor

_SAMPLES = 256

_PART = 1 << 21
"""Elements that are looked at together, where torch makes a copy of them for that."""

SAFETY = 4.0
"""A replay may differ from runs without the graph by this many times what they differ by themselves."""

_ORDER, _MOST_OF_ORDER = 256, 1e-3
"""What adding in another order changes: so many times what one rounding does, relative, and at most so much. Runs of a
noisy kernel may agree in a tensor again and again, and a replay may not.
"""

_AGAIN, _RARE = 2, 2
"""Further replays that have to be like plain runs where one is not, and how many may not where a kernel adds in no
fixed order. Kernels of a replay follow each other at once, and meet orders that those of a plain run, which wait for
the host, hardly meet: with cuDNN's attention on an H200, 2 of 48 runs without gaps were 1.7e-3 from all others, and
none of 24 with gaps.
"""

_MOST_NOISE = 0.05
"""Runs that differ by more, relative to all tensors together, show nothing."""


@dataclass(frozen=True)
class Fingerprint:
    """Of tensors what is small enough to keep while a graph is captured.

    Attributes:
        exact: per tensor the sum of its bytes as integers: equal bytes give equal sums.
        norms: per tensor its norm, float64.
        samples: per tensor 256 values spread over it, float64, in a row; zeros where it has fewer.
        rounding: per tensor what one rounding changes, relative. float64.
    """

    exact: Tensor
    norms: Tensor
    samples: Tensor
    rounding: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, tensors: Sequence[Tensor | None], *, distances: bool = True) -> Fingerprint:
        """Compute it on the device.

        Args:
            tensors: of any shape, or None where there is no gradient.
            distances: whether more is to be asked than `same_bits`, which takes twice as long.
        Raises:
            NotLegal: one is sparse.
        """
        present = [local_tensor(t.detach()) for t in tensors if t is not None]
        if any(g.layout is not torch.strided for g in present):
            raise NotLegal(
                Problem(
                    "a gradient is sparse, as Embedding(sparse=True) makes it: its size is known only on the host",
                    fix="Embedding(sparse=False) with an optimizer for dense gradients can be in a graph",
                )
            )
        real = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in present]
        exact, norms, samples = [], [], []
        # one after the other, and in parts: a copy of all gradients would be as large as the model
        for g in real:
            flat = _in_memory(g)
            sums = (part.sum(dtype=torch.int64) for part in _integers(flat))
            exact.append(functools.reduce(torch.add, sums))
            if distances:
                norms.append(_norm(flat.split(_PART)))
                samples.append(_sampled(g))
        empty = torch.zeros(0)
        rounding = [torch.finfo(t.dtype).eps if t.dtype.is_floating_point else 0.0 for t in real if distances]
        return cls(
            exact=torch.stack(exact) if exact else empty,
            norms=torch.stack(norms) if norms else empty,
            samples=torch.stack(samples) if samples else empty,
            rounding=torch.tensor(rounding, dtype=torch.float64, device=norms[0].device) if norms else empty,
        )

    def same_bits(self, other: Fingerprint) -> bool:
        """Whether all tensors are equal bit for bit."""
        return self.exact.shape == other.exact.shape and torch.equal(self.exact, other.exact)

    def distances(self, other: Fingerprint) -> Tensor:
        """How far each tensor of another run is from that of this one, relative to its size.

        Infinite where a value is finite in one run only. Both have the same tensors, and at least one.
        """
        floor = 1e-6  # of the largest gradient: sums of cancelling terms have noise of the size of the terms
        scales = self.samples.nan_to_num(0.0, 0.0, 0.0).norm(dim=1)
        of_samples = _apart(self.samples, other.samples).norm(dim=1)
        by_sample = of_samples / (scales + scales.max() * floor).clamp(min=1e-300)
        norms = self.norms.nan_to_num(0.0, 0.0, 0.0)
        by_norm = _apart(self.norms, other.norms) / (norms + norms.max() * floor).clamp(min=1e-300)
        return torch.maximum(by_sample, by_norm)


class PlainRuns:
    """Runs of one step without a graph, all from the same state.

    What they differ by is what a replay may differ by: kernels that add in no fixed order differ in every run. Where
    they do not differ, a replay must not either.

    Args:
        first: the run that a replay was found to differ from.
        kind: what the tensors are that were compared.
        unordered: whether runs that agree do so by chance, because some kernels add in no fixed order.
    """

    ENOUGH = 3
    MOST_THAT_AGREE = 6
    MOST = 10

    def __init__(self, first: Fingerprint, kind: str = "gradient", *, unordered: bool = False) -> None:
        self._runs = [first]
        self._kind, self._unordered = kind, unordered

    def add(self, run: Fingerprint) -> None:
        self._runs.append(run)

    @property
    def first(self) -> Fingerprint:
        return self._runs[0]

    def same(self, found: Fingerprint) -> bool:
        """Whether a replay is equal to one of them bit for bit."""
        return any(run.same_bits(found) for run in self._runs)

    def enough(self, found: Fingerprint) -> bool:
        """Whether no further run is needed to judge a replay.

        Runs of rare noise agree now and then, as a whole or in some gradients.
        """
        count = len(self._runs)
        if self.agree:
            return count >= self.MOST_THAT_AGREE
        return count >= self.MOST or (count >= self.ENOUGH and self.refuse(found) is None)

    @property
    def agree(self) -> bool:
        """Whether all of them are equal bit for bit."""
        return all(self._runs[0].same_bits(run) for run in self._runs[1:])

    def refuse(self, found: Fingerprint) -> str | None:
        """Why a replay is not one more run of this kind, with both figures; None where it is."""
        first = self._runs[0]
        if any(run.exact.shape != first.exact.shape for run in (*self._runs, found)):
            return "it has other gradients, or runs without the graph have"
        if self.same(found):
            return None
        if self.agree:
            if self._unordered and bool((self._nearest(found) <= self._order).all()):
                return None
            return f"{self._told(self._nearest(found))}, and {len(self._runs)} runs without the graph agree bit for bit"
        noise = self._spread()
        weights = first.norms.nan_to_num(0.0, 0.0, 0.0)
        overall = (noise * weights).norm() / weights.norm().clamp(min=1e-300)
        if not float(overall) <= _MOST_NOISE:
            return f"{self._told(self._nearest(found))}, and runs without the graph by too much: {self._told(noise)}"
        over, apart, usual = self._beyond(found)
        worst = int(over.argmax())
        if float(over[worst]) <= 1.0:
            return None
        return f"{self._told(apart, worst)}, and runs without the graph by {float(usual[worst]):.1e}"

    @property
    def _order(self) -> Tensor:
        """What adding in another order changes."""
        return (_ORDER * self.first.rounding).clamp(max=_MOST_OF_ORDER)

    def again(self, found: Iterator[str | None], agree: Callable[[bool], bool] = bool) -> str | None:
        """Why a graph is refused after further replays, None where it is not.

        Args:
            found: makes one after the other, and tells what each and plain runs differ by, None where it is like them.
            agree: whether all processes say so.
        """
        alike, rare = 0, _RARE
        while alike < _AGAIN:
            if (difference := next(found)) is None:
                alike += 1
            elif rare and agree(self._unordered or not self.agree):
                rare -= 1
            else:
                return difference
        return None

    def _spread(self) -> Tensor:
        pairs = itertools.combinations(self._runs, 2)
        return torch.stack([one.distances(other) for one, other in pairs]).amax(0)

    def _beyond(self, found: Fingerprint) -> tuple[Tensor, Tensor, Tensor]:
        """How many times what it may a replay differs, how much that is, and by how much runs differ."""
        noise = self._spread()
        noisy = noise[noise > 0]
        typical = noisy.median() if noisy.numel() else noise.new_zeros(())
        # few values may agree by chance where the others differ
        usual = torch.where(noise > 0, torch.maximum(noise, typical), noise)
        rounding = self._runs[0].rounding
        allowed = torch.maximum(SAFETY * torch.maximum(usual, rounding), self._order)
        apart = self._nearest(found)
        return apart / allowed.clamp(min=1e-300), apart, usual

    def _told(self, distances: Tensor, which: int | None = None) -> str:
        """One of these distances in words, the largest one where none is named."""
        which = int(distances.argmax()) if which is None else which
        return f"{self._kind} {which} differs by {float(distances[which]):.1e} of its size"

    def _nearest(self, found: Fingerprint) -> Tensor:
        return torch.stack([run.distances(found) for run in self._runs]).amin(0)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Absolute differences: 0 where neither is finite, infinite where one is."""
    here, there = torch.isfinite(a), torch.isfinite(b)
    apart = torch.where(here & there, (a - b).abs(), torch.zeros_like(a))
    return torch.where(here ^ there, torch.full_like(a, math.inf), apart)


def _in_memory(tensor: Tensor) -> Tensor:
    """All elements in one dimension, in the order in which they lie in memory. A copy where others lie in between."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


def _sampled(tensor: Tensor) -> Tensor:
    """Values spread over a tensor, in the order of its shape."""
    step = max(1, -(-tensor.numel() // _SAMPLES))
    if tensor.is_contiguous():
        values = tensor.view(-1)[::step]
    else:
        values = tensor.take(torch.arange(0, tensor.numel(), step, device=tensor.device))
    return pad(values.double(), (0, _SAMPLES - len(values)))


def _norm(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].numel() < 1 << 20:
        return parts[0].double().norm()
    return torch.stack([part.float().norm() for part in parts]).double().norm()


def _integers(flat: Tensor) -> Iterator[Tensor]:
    """The same memory as integers: of 8 bytes, which torch adds up without a copy, and what is left of it."""
    size = flat.element_size()
    whole = flat.numel() * size // 8 * 8 // size
    aligned = flat.data_ptr() % 8 == flat.storage_offset() * size % 8 == 0
    for part in (flat[:whole],) if aligned else flat[:whole].split(_PART):
        yield (part if aligned else part.clone()).view(torch.int64)
    if whole < flat.numel():
        yield flat[whole:].view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])


class Audits:
    """When a graph whose first replay was right is compared with a plain step once more.

    With `verify="sample"` the number of replays from one audit to the next doubles, and audits take at most `SHARE`
    of the time since the graph was made.

    Args:
        verify: see `PyGraphConfig`.
        now: seconds, of any clock that goes on: when the graph was made.

    Attributes:
        left: replays until `due` is to be asked. The caller counts them down.
    """

    SHARE = 0.002
    FIRST = 64

    def __init__(self, verify: str, now: float) -> None:
        self._verify = verify
        self._every = {"always": 0, "sample": self.FIRST}.get(verify, sys.maxsize)
        self.left = self._every
        self._made, self._spent, self._last = now, 0.0, 0.0

    def due(self, now: float) -> bool:
        """Whether the next replay is to be compared. Where audits would take too long, the question is put off."""
        if self.left > 0:
            return False
        next_one = 1.5 * self._last  # it may take longer than the one before
        if self._verify == "always" or self._spent + next_one <= self.SHARE * (now - self._made):
            return True
        self.left = self._every
        return False

    def took(self, seconds: float, *, first: bool) -> None:
        """Note what a comparison has cost; the one right after the capture is no audit."""
        self._last = seconds
        if not first:
            self._spent += seconds
            self._every *= 2
        self.left = self._every
