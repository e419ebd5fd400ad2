"""What is done around a step from outside, of which a replay would show nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pygraph_train.problems import Problem
from pygraph_train.step.program import StepProgram
from pygraph_train.step.replaced_functions import ReplacedFunctions
from pygraph_train.step.turns import OTHER_THREAD, has_turn
from pygraph_train.torch_private.autograd import detects_anomalies
from pygraph_train.torch_private.hooks import global_module_hook_tables, saved_tensors_hooks_active
from pygraph_train.torch_private.switches import function_modes, is_dispatch_watched, is_function_watched
from pygraph_train.tracing.refusals import (
    ANOMALY,
    DISPATCH_MODE,
    FUNCTION_MODE,
    GLOBAL_HOOK,
    SAVED_TENSORS_HOOKS,
)

__all__ = ["Outside", "around_the_step", "uninitialized", "what_watches"]


def around_the_step() -> Iterator[Problem]:
    """Everything that is active now, and of which a replay would show nothing."""
    if detects_anomalies():
        yield ANOMALY
    if any(global_module_hook_tables()):
        yield GLOBAL_HOOK
    watcher = what_watches()
    if watcher is not None:
        yield watcher


def what_watches() -> Problem | None:
    """What sees, and may change, each operation or saved tensor of this thread now. Hot path.

    A replay shows it nothing. Compiled code shows it other operations than those of the model.
    """
    if saved_tensors_hooks_active():
        return SAVED_TENSORS_HOOKS
    if is_dispatch_watched():
        return DISPATCH_MODE
    if is_function_watched() and function_modes():
        return FUNCTION_MODE
    return None


def uninitialized(model: nn.Module) -> Problem | None:
    """The first parameter of a model that is still lazy, None where there is none."""
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is None:
        return None
    return Problem(f"{lazy} has no shape yet; the first call of its module gives it a shape")


class Outside:
    """Looks before each step whether it has to run as it is.

    Args:
        program: the step.

    Attributes:
        for_good: whether what was seen last holds for the rest of the run.
    """

    def __init__(self, program: StepProgram) -> None:
        self.for_good = False
        self._program = program
        self._global_hooks = global_module_hook_tables()
        self._replaced = ReplacedFunctions(program)
        self._settled = False

    def why_plain(self) -> Problem | None:
        """Why the present step has to run as it is. Hot path."""
        if not has_turn():
            return OTHER_THREAD
        if torch.is_anomaly_enabled() and detects_anomalies():
            self.for_good = True
            return ANOMALY
        if any(self._global_hooks):
            self.for_good = True
            return GLOBAL_HOOK
        watcher = what_watches()
        if watcher is not None:
            return watcher
        replaced = self._replaced.problem()
        if replaced is not None:
            return replaced
        return None if self._settled else self._at_first()

    def why_no_whole_step(self) -> Problem | None:
        """Why no graph can hold forward and backward of this step together, while regions can. Hot path."""
        return self._replaced.problem_of_optimizers()

    def _at_first(self) -> Problem | None:
        """What is looked at in the first steps."""
        problem = uninitialized(self._program.model)
        self._settled = problem is None
        return problem
