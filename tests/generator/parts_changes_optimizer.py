"""What loops do to the optimizer and to gradients between steps."""

from __future__ import annotations

from .part import Part, by_name

__all__ = ["OF_OPTIMIZER"]

OF_OPTIMIZER = by_name(
    # the optimizer
    Part(
        "lr_changed",
        once="""
for group in optimizer.param_groups:
    group['lr'] = 0.003
""",
        weight=1.5,
    ),
    Part(
        "lr_zero",
        once="""
for group in optimizer.param_groups:
    group['lr'] = 0.0
""",
        back="""
for group in optimizer.param_groups:
    group['lr'] = 0.01
""",
    ),
    Part(
        "lr_tensor",
        once="""
for group in optimizer.param_groups:
    group['lr'] = torch.tensor(0.003)
""",
        weight=0.5,
    ),
    Part("lr_of_one_group", once="optimizer.param_groups[0]['lr'] *= 0.1"),
    Part(
        "decay_changed",
        once="""
for group in optimizer.param_groups:
    group['weight_decay'] = 0.3
""",
    ),
    Part(
        "decay_creeps",
        before="""
for group in optimizer.param_groups:
    group['weight_decay'] = 0.01 * i
""",
    ),
    Part(
        "betas_changed",
        once="""
for group in optimizer.param_groups:
    if 'betas' in group:
        group['betas'] = (0.5, 0.9)
""",
    ),
    Part(
        "momentum_changed",
        once="""
for group in optimizer.param_groups:
    if 'momentum' in group and group['momentum']:
        group['momentum'] = 0.5
""",
    ),
    Part("state_cleared", once="optimizer.state.clear()"),
    Part(
        "state_scaled",
        once="""
for held in optimizer.state.values():
    for value in held.values():
        if torch.is_tensor(value) and value.dim():
            value.mul_(0.5)
""",
    ),
    Part(
        "group_added",
        init="self.late = None",
        forward="""
if self.late is not None:
    h = h + self.late
""",
        once="""
model.late = nn.Parameter(torch.zeros(8))
optimizer.add_param_group({'params': [model.late], 'lr': 0.01})
""",
    ),
    Part(
        "group_joined",
        init="self.joined = [nn.Parameter(torch.ones(8))]",  # no parameter of the model's, so not the optimizer's
        forward="h = h * self.joined[0]",
        once="optimizer.add_param_group({'params': model.joined, 'lr': 0.01})",
        loops=("graphed", "backend"),
    ),
    Part(
        "group_grows",
        init="self.extra_bias = nn.Parameter(torch.zeros(8))",
        forward="h = h + self.extra_bias",
        once="optimizer.param_groups[-1]['lr'] = 0.02",
    ),
    Part(
        "maximize",
        once="""
for group in optimizer.param_groups:
    if 'maximize' in group:
        group['maximize'] = not group['maximize']
""",
    ),
    Part(
        "step_hook",
        setup="calls = []",
        once="handle = optimizer.register_step_post_hook(lambda *a: calls.append(1))",
        end='loop.note("calls", len(calls))',
        loops=("graphed", "backend", "lightning"),
    ),
    Part(
        "step_pre_hook",
        setup="pre_calls = []",
        once="handle_pre = optimizer.register_step_pre_hook(lambda *a: pre_calls.append(1))",
        back="handle_pre.remove()",
        end='loop.note("pre calls", len(pre_calls))',
        loops=("graphed", "backend", "lightning"),
    ),
    # gradients
    Part(
        "gradient_edited",
        after="""
if model.last.weight.grad is not None:
    model.last.weight.grad.mul_(0.5)
""",
        apart=("module_added",),
    ),
    Part(
        "gradient_none",
        before="""
if i % 3 == 0:
    model.last.bias.grad = None
""",
        apart=("parameter_deleted",),
    ),
    Part(
        "gradient_zero",
        before="""
if i % 4 == 1:
    optimizer.zero_grad(set_to_none=False)
""",
    ),
    Part(
        "gradient_emptied",
        before="""
if i % 3 == 1:
    optimizer.zero_grad()
""",
    ),
    Part(
        "gradient_given",
        once="""
for p in model.parameters():
    p.grad = torch.ones_like(p)
""",
        apart=("lazy",),
    ),
    Part(
        "backward_between",
        once="model(probe_x).sum().backward()",
        setup="probe_x = torch.linspace(-1, 1, 24).view(4, 6)",
        apart=("lazy",),
    ),
)
