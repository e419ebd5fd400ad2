"""What is done around a step from outside, of which a replay would show nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pygraph_train.problems import Problem
from pygraph_train.torch_private.switches import (
    function_modes,
    has_hooks_on_all_modules,
    is_dispatch_watched,
    saved_tensors_hooks_active,
)

_UNSEEN = "and would see nothing of a replay, so the step runs without a graph"
_GLOBAL_HOOK = Problem(
    "a hook on all modules (register_module_forward_hook and the like) runs in Python, and a replay would not call it"
)
_DISPATCH_MODE = Problem(f"a TorchDispatchMode is active around the step {_UNSEEN}")
_FUNCTION_MODE = Problem(f"a TorchFunctionMode is active around the step {_UNSEEN}")
_SAVED_TENSORS_HOOKS = Problem(f"saved_tensors_hooks are active around the step {_UNSEEN}")
_ANOMALY = Problem(
    "anomaly detection reads every gradient on the host", fix="Turn anomaly detection off (detect_anomaly)"
)


def what_watches() -> Problem | None:
    """What sees, and may change, each operation or saved tensor of this thread now. Hot path.

    A replay shows it nothing.
    """
    if saved_tensors_hooks_active():
        return _SAVED_TENSORS_HOOKS
    if is_dispatch_watched():
        return _DISPATCH_MODE
    if function_modes():
        return _FUNCTION_MODE
    return None


def around_the_step() -> Iterator[Problem]:
    """Everything that is active now, and of which a replay would show nothing. Hot path."""
    if torch.is_anomaly_enabled():
        yield _ANOMALY
    if has_hooks_on_all_modules():
        yield _GLOBAL_HOOK
    if (watcher := what_watches()) is not None:
        yield watcher


def uninitialized(model: nn.Module) -> Problem | None:
    """The first parameter of a model that is still lazy, None where there is none."""
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is None:
        return None
    return Problem(f"{lazy} has no shape yet; the first call of its module gives it a shape")
