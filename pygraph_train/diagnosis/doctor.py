"""`python -m pygraph_train doctor`: what is installed here, and what of pygraph-train works with it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from pygraph_train.config import disabled_by_environment
from pygraph_train.diagnosis.explanation import filled
from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.nodes import driver
from pygraph_train.parallel.settings import SETTINGS, setting_problems
from pygraph_train.problems import first_line
from pygraph_train.torch_private.cuda import driver_version
from pygraph_train.torch_private.names import (
    DYNAMO,
    FORWARD_AND_BACKWARD,
    GRAPHS,
    NAMES,
    TRIED,
    Feature,
    is_newer_than_tried,
)
from pygraph_train.torch_private.tracing import why_no_traces

__all__ = ["Checkup", "check"]

_SOME = "Updates of optimizers can run from CUDA graphs, and so can what torch.compile(backend='pygraph') compiles."

_PACKAGES = ("triton", "cuda-bindings", "lightning", "pytorch-lightning", "accelerate", "transformers")

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_ADAPTERS = (
    ("lightning", "PyGraphCallback and PyGraphFabric", "pip install 'pygraph-train[lightning]'"),
    ("accelerate", "the Accelerator and the plugin PyGraph", "pip install 'pygraph-train[accelerate]'"),
    (
        "transformers",
        "PyGraphTrainer and PyGraphTrainerCallback",
        "pip install 'pygraph-train[transformers]'",
    ),
)
"""A package, what it is needed for, and how to get it."""


@dataclass(frozen=True)
class Checkup:
    """What was found on this machine. Prints as plain text.

    Attributes:
        facts: names with versions or settings.
        works: sentences about what works here.
        lacks: sentences about what does not, each with what to do about it.
        usable: whether training steps can run from CUDA graphs here.
    """

    facts: tuple[tuple[str, str], ...]
    works: tuple[str, ...]
    lacks: tuple[str, ...]
    usable: bool

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists and strings, for `json.dumps`."""
        return {
            "usable": self.usable,
            "facts": dict(self.facts),
            "works": list(self.works),
            "lacks": list(self.lacks),
        }

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.facts) + 2
        lines = [f"{name:{width}}{value}" for name, value in self.facts]
        for title, sentences in (
            ("What works here:", self.works),
            ("What does not work here:", self.lacks),
        ):
            if sentences:
                lines += ["", title, *(filled(sentence, "- ") for sentence in sentences)]
        verdict = "can" if self.usable else "cannot"
        lines += ["", f"Training steps {verdict} run from CUDA graphs here."]
        return "\n".join(lines)


def check() -> Checkup:
    """Look at this machine. Allocates nothing on a GPU."""
    missing = [(names, name) for names in NAMES for name in names.missing()]
    off = {names.off for names, _ in missing}
    obstacle = _obstacle(off)
    works, lacks = [], []
    if is_newer_than_tried(torch.__version__):
        lacks.append(f"Nobody knows what works here: {_untried()}")
    for names, name in missing:
        lacks.append(f"torch lacks {name} ({names.purpose}), so {names.off.instead}.")
    if not off and (why := why_no_traces()) is not None:
        lacks.append(str(why))
        off.add(FORWARD_AND_BACKWARD)
    whole = not off & {DYNAMO, FORWARD_AND_BACKWARD}
    if obstacle is None:
        works.append("Training steps can run from CUDA graphs." if whole else _SOME)
        if _installed("triton"):
            works.append("Graphs can hold Inductor's kernels (compile=True).")
        else:
            lacks.append(
                "Graphs hold eager kernels only: Inductor needs the package triton. Install it: pip install triton"
            )
        try:
            driver()
            works.append(
                "Regions of the compile backend can take inputs where they lie (pointer indirection)."
            )
        except IndirectionUnavailable as error:
            lacks.append(f"Regions of the compile backend copy their inputs: {error}")
    else:
        lacks.append(obstacle)
    if not disabled_by_environment():
        works.append(
            'engine="emulated" shows the mechanism on the CPU, where it is slower than plain training.'
        )
    for package, use, install in _ADAPTERS:
        if _installed(package):
            works.append(f"The package {package} is there, so {use} can be imported.")
        else:
            lacks.append(
                f"The package {package} is missing, so {use} cannot be imported. Install it: {install}"
            )
    settings = [f"{problem.reason}. {problem.fix}." for problem in setting_problems()]
    lacks += [
        f"Steps under DistributedDataParallel with NCCL have no graph. {sentence}" for sentence in settings
    ]
    if not settings and obstacle is None and torch.distributed.is_available():
        works.append("The settings of NCCL let graphs hold the collectives of DistributedDataParallel.")
    lacks += _allocator_doubts()
    return Checkup(tuple(_facts()), tuple(works), tuple(lacks), obstacle is None and whole)


def _facts() -> Iterator[tuple[str, str]]:
    yield "pygraph-train", _installed("pygraph-train") or "not installed as a package"
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "torch that was tried", ", ".join(TRIED)
    yield "CUDA of torch", str(torch.version.cuda or "none: torch was built without CUDA")
    yield "driver", _driver()
    yield "NCCL", _nccl()
    for package in _PACKAGES:
        yield package, _installed(package) or "not installed"
    yield from _devices()
    for name in (*_ALLOCATOR, *(name for name, _, _ in SETTINGS), "PYGRAPH_DISABLE"):
        yield name, os.environ.get(name, "not set")


def _untried() -> str:
    return (
        f"torch {torch.__version__} is newer than {TRIED[-1]}, the newest that pygraph-train was tried with."
    )


def _obstacle(off: set[Feature]) -> str | None:
    """The sentence that says why nothing runs from CUDA graphs, None where it can."""
    if disabled_by_environment():
        return "PYGRAPH_DISABLE is set, so training runs as it is. Unset it to use graphs."
    if torch.__version__ < TRIED[0]:  # compares versions, not text
        return f"torch {torch.__version__} is too old: pygraph-train needs {TRIED[0]} or newer. Install that."
    if GRAPHS in off:
        return "torch lacks private names that all graphs need, so training runs as you wrote it."
    if torch.version.hip is not None:
        return "torch was built for ROCm, and pygraph-train knows CUDA graphs only."
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            "torch was built without CUDA, so there is nothing to make graphs of. Install a build for CUDA: "
            "https://pytorch.org/get-started/locally"
        )
    return f"torch finds no CUDA device, so training runs as it is. torch says: {_why_no_device()}"


def _why_no_device() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, AssertionError, DeferredCudaCallError
        return first_line(error)
    return (
        "CUDA_VISIBLE_DEVICES hides all devices"
        if "CUDA_VISIBLE_DEVICES" in os.environ
        else "no device is there"
    )


def _driver() -> str:
    newest = driver_version()
    if newest is not None:
        return f"for CUDA {newest} and older"
    return "none that torch can use" if shutil.which("nvidia-smi") else "none"


def _nccl() -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "not part of this torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _devices() -> Iterator[tuple[str, str]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        yield "device", "no CUDA device"
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield f"device {index}", f"{found.name}, {memory}, compute capability {found.major}.{found.minor}"


def _allocator_doubts() -> Iterator[str]:
    for name in _ALLOCATOR:
        if "cudamallocasync" in os.environ.get(name, "").lower():
            yield (
                f"{name} chooses the allocator cudaMallocAsync, with which pygraph-train was not tried. Its graphs use "
                "memory pools of torch's own allocator. Leave the setting out."
            )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
