"""pygraph-train takes the CPU out of PyTorch training steps.

```python
trainer = Trainer(callbacks=[PyGraphCallback()])                # Lightning
accelerator = Accelerator(plugins=[PyGraph()])                  # Accelerate
pygraph = PyGraphFabric().attach(fabric)                        # Lightning Fabric
trainer = transformers.Trainer(..., callbacks=[PyGraphTrainerCallback()])
step = GraphedStep(step_fn, model=model, optimizer=optimizer)   # a plain PyTorch loop
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygraph_train.backend import compile
    from pygraph_train.config import PyGraphConfig
    from pygraph_train.diagnosis.explanation import Explanation
    from pygraph_train.integrations.accelerate import Accelerator, PyGraph
    from pygraph_train.integrations.explained import explain
    from pygraph_train.integrations.fabric import PyGraphFabric
    from pygraph_train.integrations.lightning import PyGraphCallback
    from pygraph_train.integrations.transformers import (
        PyGraphTrainer,
        PyGraphTrainerCallback,
        PyGraphTrainerMixin,
    )
    from pygraph_train.problems import PyGraphError
    from pygraph_train.report.step_report import StepReport
    from pygraph_train.step.graphed import GraphedStep

__version__ = "1.0.0rc1"

__all__ = [
    "Accelerator",
    "Explanation",
    "GraphedStep",
    "PyGraph",
    "PyGraphCallback",
    "PyGraphConfig",
    "PyGraphError",
    "PyGraphFabric",
    "PyGraphTrainer",
    "PyGraphTrainerCallback",
    "PyGraphTrainerMixin",
    "StepReport",
    "compile",
    "explain",
]

# read on first use: importing pygraph_train imports no framework
_HOMES = {
    "compile": "pygraph_train.backend",
    "explain": "pygraph_train.integrations.explained",
    "Accelerator": "pygraph_train.integrations.accelerate",
    "Explanation": "pygraph_train.diagnosis.explanation",
    "GraphedStep": "pygraph_train.step.graphed",
    "PyGraph": "pygraph_train.integrations.accelerate",
    "PyGraphCallback": "pygraph_train.integrations.lightning",
    "PyGraphConfig": "pygraph_train.config",
    "PyGraphError": "pygraph_train.problems",
    "PyGraphFabric": "pygraph_train.integrations.fabric",
    "PyGraphTrainer": "pygraph_train.integrations.transformers",
    "PyGraphTrainerCallback": "pygraph_train.integrations.transformers",
    "PyGraphTrainerMixin": "pygraph_train.integrations.transformers",
    "StepReport": "pygraph_train.report.step_report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
