"""`python -m pygraph_train doctor`: what is installed here, and what of pygraph-train works with it. Never raises."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from pygraph_train.config import disabled_by_environment
from pygraph_train.diagnosis.explanation import filled
from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.nodes import driver
from pygraph_train.problems import first_line
from pygraph_train.torch_private.names import what_is_off
from pygraph_train.versions import TRIED

_PACKAGES = ("triton", "cuda-bindings", "lightning", "pytorch-lightning", "accelerate", "transformers")

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_NEEDED = (
    ("lightning", "PyGraphCallback and PyGraphFabric", "pip install 'pygraph-train[lightning]'"),
    ("accelerate", "the Accelerator and the plugin PyGraph", "pip install 'pygraph-train[accelerate]'"),
    (
        "transformers",
        "PyGraphTrainer and PyGraphTrainerCallback",
        "pip install 'pygraph-train[transformers]'",
    ),
    ("triton", "Inductor's kernels (compile=True)", "pip install triton"),
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
        for title, sentences in (("What works here:", self.works), ("What does not work here:", self.lacks)):
            if sentences:
                lines += ["", title, *(filled(sentence, "- ") for sentence in sentences)]
        verdict = "can" if self.usable else "cannot"
        return "\n".join([*lines, "", f"Training steps {verdict} run from CUDA graphs here."])


def check() -> Checkup:
    """Look at this machine. Allocates nothing on a GPU."""
    obstacle = _answer(_obstacle)
    works = [] if obstacle else ["Training steps can run from CUDA graphs."]
    lacks = [obstacle] if obstacle else []
    lacks += what_is_off()[0]
    if not disabled_by_environment():
        works.append(
            'engine="emulated" shows the mechanism on the CPU, where it is slower than plain training.'
        )
    for package, use, install in _NEEDED:
        if _installed(package):
            works.append(f"The package {package} is there, so {use} can be used.")
        else:
            lacks.append(f"The package {package} is missing, so {use} cannot be used. Install it: {install}")
    lacks += [
        f"{name} chooses the allocator cudaMallocAsync, with which pygraph-train was not tried. Its graphs use memory "
        "pools of torch's own allocator. Leave the setting out."
        for name in _ALLOCATOR
        if "cudamallocasync" in os.environ.get(name, "").lower()
    ]
    return Checkup(tuple(_facts()), tuple(works), tuple(lacks), obstacle is None)


def _answer(question: Callable[[], Any]) -> Any:
    """What was found, or a sentence about why it could not be found out."""
    try:
        return question()
    except Exception as error:
        return f"This could not be found out: {type(error).__name__}: {first_line(error)}"


def _facts() -> Iterator[tuple[str, str]]:
    facts: tuple[tuple[str, Callable[[], str]], ...] = (
        ("pygraph-train", lambda: _installed("pygraph-train") or "not installed as a package"),
        ("python", platform.python_version),
        ("torch", lambda: str(torch.__version__)),
        ("torch that was tried", lambda: ", ".join(TRIED)),
        ("CUDA of torch", lambda: torch.version.cuda or "none: torch was built without CUDA"),
        ("driver", _driver),
        ("NCCL", _nccl),
    )
    for name, fact in facts:
        yield name, _answer(fact)
    for package in _PACKAGES:
        yield package, _installed(package) or "not installed"
    count = _answer(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not isinstance(count, int) or count == 0:
        yield "device", "no CUDA device" if count == 0 else count
    for index in range(count if isinstance(count, int) else 0):
        yield f"device {index}", _answer(functools.partial(_device, index))
    for name in (*_ALLOCATOR, "PYGRAPH_DISABLE"):
        yield name, os.environ.get(name, "not set")


def _obstacle() -> str | None:
    """The sentence that says why nothing runs from CUDA graphs, None where it can."""
    if disabled_by_environment():
        return "PYGRAPH_DISABLE is set, so training runs as it is. Unset it to use graphs."
    if torch.__version__ < TRIED[0]:  # compares versions, not text
        return f"torch {torch.__version__} is too old: pygraph-train needs {TRIED[0]} or newer. Install that."
    if not what_is_off()[1]:
        return "torch lacks private names that all graphs need, so steps run as you wrote them."
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
    try:
        newest = int(driver().cuDriverGetVersion()[1])
    except IndirectionUnavailable as error:
        return f"unknown: {error}" if shutil.which("nvidia-smi") else "none"
    return f"for CUDA {newest // 1000}.{newest % 1000 // 10} and older"


def _nccl() -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "not part of this torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _device(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    memory = f"{found.total_memory / 2**30:.0f} GiB"
    return f"{found.name}, {memory}, compute capability {found.major}.{found.minor}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except Exception:  # it is not there, or what was installed is broken
        return None
