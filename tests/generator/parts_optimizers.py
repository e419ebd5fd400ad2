"""Optimizers, their groups and what moves their learning rates."""

from __future__ import annotations

from dataclasses import dataclass

from .part import Part, by_name

__all__ = ["GROUPS", "KINDS", "SCHEDULES", "OptimizerKind"]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer.

    Attributes:
        name: how a case calls it.
        make: its class and its arguments after the parameters.
        kernels: the kernels that it has on a CPU, "" for its own choice.
        module: lines at the top of the script.
        weight: how often it is taken, relative to others.
    """

    name: str
    make: tuple[str, str]
    kernels: tuple[str, ...] = ("",)
    module: str = ""
    weight: float = 1.0


_ALL = ("", "fused", "foreach", "for loop")
_SOME = ("", "foreach", "for loop")

_OWN = """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    LINE
"""
_SCHEDULED = """
class Schedule:
    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return 0.1 / (1 + 0.05 * self.n)

class Scheduled(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.schedule = Schedule()

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        lr = self.schedule()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-lr)
"""
_LION = """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, beta=0.9))

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                p.add_(m.lerp(p.grad, 1 - group["beta"]).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 0.01)
"""
_WITH_EMA = """
class Looking(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
"""

_KINDS = (
    OptimizerKind("sgd", ("torch.optim.SGD", "lr=0.1"), _ALL, weight=2),
    OptimizerKind("sgd_momentum", ("torch.optim.SGD", "lr=0.05, momentum=0.9"), _ALL, weight=3),
    OptimizerKind(
        "sgd_nesterov", ("torch.optim.SGD", "lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1"), _ALL
    ),
    OptimizerKind(
        "sgd_dampened", ("torch.optim.SGD", "lr=0.05, momentum=0.9, dampening=0.5, maximize=True"), _ALL
    ),
    OptimizerKind("adam", ("torch.optim.Adam", "lr=0.02"), _ALL, weight=2),
    OptimizerKind("adam_amsgrad", ("torch.optim.Adam", "lr=0.02, amsgrad=True, weight_decay=0.1"), _ALL),
    OptimizerKind("adamw", ("torch.optim.AdamW", "lr=0.02, weight_decay=0.1"), _ALL, weight=4),
    OptimizerKind("adamw_tensor_lr", ("torch.optim.AdamW", "lr=torch.tensor(0.02)"), ("", "fused")),
    OptimizerKind("rmsprop", ("torch.optim.RMSprop", "lr=0.01, momentum=0.5, centered=True"), _SOME),
    OptimizerKind("adagrad", ("torch.optim.Adagrad", "lr=0.05"), _ALL),
    OptimizerKind("adadelta", ("torch.optim.Adadelta", "lr=0.5"), _SOME),
    OptimizerKind("adamax", ("torch.optim.Adamax", "lr=0.02"), _SOME),
    OptimizerKind("nadam", ("torch.optim.NAdam", "lr=0.02"), _SOME),
    OptimizerKind("radam", ("torch.optim.RAdam", "lr=0.02"), _SOME),
    OptimizerKind("asgd", ("torch.optim.ASGD", "lr=0.05"), _SOME),
    OptimizerKind("rprop", ("torch.optim.Rprop", "lr=0.01"), _SOME, weight=0.5),
    OptimizerKind(
        "own", ("Own", "lr=0.1"), module=_OWN.replace("LINE", 'p.add_(p.grad, alpha=-group["lr"])')
    ),
    OptimizerKind(
        "own_data", ("Own", "lr=0.1"), module=_OWN.replace("LINE", 'p.data = p.data - group["lr"] * p.grad')
    ),
    OptimizerKind(
        "own_norm",
        ("Own", "lr=0.1"),
        module=_OWN.replace("LINE", 'p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])'),
    ),
    OptimizerKind(
        "own_noise",
        ("Own", "lr=0.1"),
        module=_OWN.replace("LINE", 'p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])'),
    ),
    OptimizerKind(
        "own_item",
        ("Own", "lr=0.1"),
        module=_OWN.replace("LINE", 'p.sub_(p.grad, alpha=group["lr"] / (1 + p.grad.norm().item()))'),
    ),
    OptimizerKind("scheduled", ("Scheduled", "lr=0.1"), module=_SCHEDULED),
    OptimizerKind("lion", ("Lion", "lr=0.01"), module=_LION),
    OptimizerKind("lookahead", ("Looking", "lr=0.1, momentum=0.9"), ("", "fused"), module=_WITH_EMA),
)
KINDS = {kind.name: kind for kind in _KINDS}

GROUPS = {
    "one": "model.parameters()",
    "list": "list(model.parameters())",
    "trained_only": "[p for p in model.parameters() if p.requires_grad]",
    "two": '[{"params": list(model.first.parameters())}, '
    '{"params": [p for n, p in model.named_parameters() if not n.startswith("first.")], "lr": 0.03}]',
    "no_decay": '[{"params": [p for p in model.parameters() if p.ndim > 1]}, '
    '{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]',
    "some": "model.first.parameters()",
    "each": '[{"params": [p], "name": n} for n, p in model.named_parameters()]',
    "named": "model.named_parameters()",
}

_EACH = "scheduler.step()"

SCHEDULES = by_name(
    Part("none", weight=5),
    Part(
        "exponential", ready="scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)", after=_EACH
    ),
    Part(
        "cosine",
        ready="scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)",
        after=_EACH,
        weight=2,
    ),
    Part(
        "one_cycle",
        ready="scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)",
        after=_EACH,
        apart=(
            "adagrad",
            "adadelta",
            "asgd",
            "rprop",
            "own",
            "own_data",
            "own_norm",
            "own_noise",
            "own_item",
            "scheduled",
            "lion",
            "sgd",
        ),
    ),
    Part(
        "lambda",
        ready="scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))",
        after=_EACH,
    ),
    Part(
        "every_sixth",
        ready="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
        after="if i % 6 == 5:\n    scheduler.step()",
    ),
    Part(
        "plateau",
        ready="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)",
        after="if i % 4 == 3:\n    scheduler.step(i)",
    ),
    Part(
        "warm_up",
        ready="""
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
], [4])
""",
        after=_EACH,
    ),
    Part("by_hand", before="for group in optimizer.param_groups:\n    group['lr'] = 0.1 / (1 + i)"),
    Part(
        "mid_run",
        ready="late = []",
        after="""
if i == 9:
    late.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
if late:
    late[0].step()
""",
    ),
    Part(
        "chained",
        ready="""
scheduler = torch.optim.lr_scheduler.ChainedScheduler([
    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=5),
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
])
""",
        after=_EACH,
    ),
)
