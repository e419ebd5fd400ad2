"""What loops do to the model between steps."""

from __future__ import annotations

from .part import Part, by_name

__all__ = ["OF_MODEL"]

OF_MODEL = by_name(
    # parameters and buffers
    Part("data_replaced", once="model.last.weight.data = model.last.weight.data * 0.5"),
    Part(
        "data_cloned",
        once="""
for p in model.parameters():
    p.data = p.data.clone()
""",
    ),
    Part("data_scaled", once="model.last.weight.data.mul_(0.5)"),
    Part(
        "data_transposed",
        init="self.square = nn.Linear(8, 8)",
        forward="h = self.square(h).tanh()",
        once="model.square.weight.data = model.square.weight.data.t()",
    ),
    Part(
        "data_cut",
        init="self.words = nn.Embedding(20, 8)",
        forward="h = h + self.words((x[:, 0] > 0).long()) * self.words.weight.mean()",
        once="""
model.words.weight.data = model.words.weight.data[:10]
optimizer.state.pop(model.words.weight, None)
model.words.weight.grad = None
""",
    ),
    Part(
        "data_swapped",
        init="self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)",
        forward="h = self.left(h).tanh() + self.right(h)",
        once="""
a, b = model.left.weight, model.right.weight
a.data, b.data = b.data, a.data
""",
    ),
    Part(
        "data_of_other",
        once="""
other = Net().last
model.last.weight.data = other.weight.data
""",
        apart=("lazy",),
    ),
    Part(
        "data_double",
        once="""
model.double()
model.float()
""",
    ),
    Part(
        "copied",
        once="""
with torch.no_grad():
    model.last.bias.copy_(torch.ones(3))
""",
    ),
    Part("parameter_replaced", once="model.last.bias = nn.Parameter(torch.full((3,), 0.1))"),
    Part(
        "parameter_deleted",
        once="model.last.bias = None",
        back="model.last.bias = nn.Parameter(torch.zeros(3))",
    ),
    Part("module_replaced", once="model.first = nn.Linear(6, 8)"),
    Part(
        "module_added",
        once="model.last = nn.Sequential(model.last, nn.Tanh())",
        apart=(
            "moco",
            "ema_in_place",
            "moco_in_model",
            "extra_parameter",
            "clip_weights_data",
            "normalize_weights",
            "gradient_read",
            "weight_decay_loss",
            "parameter_deleted",
            "parameter_replaced",
            "data_replaced",
            "data_scaled",
            "data_of_other",
            "copied",
            "head_frozen",
            "swapped_tensors",
            "tied_later",
            "weights_tied_by_hand",
            "tensor_hook",
            "gradient_edited",
            "post_accumulate_hook",
            "node_hook",
            "gradient_none",
            "pruned",
        ),
    ),
    Part(
        "swapped_tensors",
        once="torch.utils.swap_tensors(model.last.bias, nn.Parameter(torch.full((3,), 0.2)))",
    ),
    Part(
        "tied_later",
        init="self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)",
        forward="h = self.two(self.one(h).tanh())",
        once="model.two.weight = model.one.weight",
    ),
    Part(
        "load_model",
        once="saved = copy.deepcopy(model.state_dict())",
        back="model.load_state_dict(saved)",
        apart=("lazy",),
    ),
    Part(
        "load_model_assign",
        once="model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)",
        apart=("lazy",),
    ),
    Part(
        "load_optimizer",
        once="stored = copy.deepcopy(optimizer.state_dict())",
        back="optimizer.load_state_dict(stored)",
    ),
    Part(
        "load_both",
        once="point = copy.deepcopy((model.state_dict(), optimizer.state_dict()))",
        back="""
model.load_state_dict(point[0])
optimizer.load_state_dict(point[1])
""",
        apart=("lazy",),
    ),
    Part(
        "frozen_first",
        once="model.first.requires_grad_(False)",
        back="model.first.requires_grad_(True)",
        weight=1.5,
    ),
    Part(
        "head_frozen",
        once="model.last.bias.requires_grad_(False)",
        back="model.last.bias.requires_grad_(True)",
    ),
    Part("reset_parameters", once="model.last.reset_parameters()", apart=("module_added",)),
    Part(
        "buffer_assigned",
        init="self.register_buffer('offset', torch.zeros(8))",
        forward="h = h + self.offset",
        once="model.offset = torch.ones(8) * 0.1",
    ),
    Part(
        "buffer_filled",
        init="self.register_buffer('level', torch.zeros(8))",
        forward="h = h + self.level",
        once="model.level.fill_(0.1)",
    ),
    Part(
        "buffer_data",
        init="self.register_buffer('height', torch.zeros(8))",
        forward="h = h + self.height",
        once="model.height.data = torch.ones(8) * 0.1",
    ),
    Part(
        "ema_by_data",
        setup="shadow = copy.deepcopy(model.last)",
        after="""
for a, b in zip(model.last.parameters(), shadow.parameters()):
    b.data.mul_(0.9).add_(a.data, alpha=0.1)
""",
        once="""
for a, b in zip(model.last.parameters(), shadow.parameters()):
    a.data, b.data = b.data, a.data
""",
        apart=("module_added", "parameter_deleted", "lazy"),
    ),
    # modules
    Part(
        "forward_replaced",
        once="""
old = Net.forward
Net.forward = lambda self, x: old(self, x) * 0.5
""",
    ),
    Part(
        "forward_of_instance",
        once="""
plain = model.last.forward
model.last.forward = lambda h: plain(h) * 0.5
""",
        back="del model.last.forward",
        apart=("module_added", "reset_parameters"),
    ),
    Part("eval_mode", once="model.eval()", back="model.train()", weight=1.5),
    Part(
        "eval_of_part",
        init="self.sometimes_norm = nn.BatchNorm1d(8)",
        forward="h = self.sometimes_norm(h)",
        once="model.sometimes_norm.eval()",
    ),
    Part(
        "validation",
        once="""
model.eval()
with torch.no_grad():
    loop.note('validated', model(probe))
model.train()
""",
        setup="probe = torch.linspace(-1, 1, 24).view(4, 6)",
        weight=1.5,
        apart=("lazy",),
    ),
    Part(
        "validation_with_step",
        once="""
model.eval()
with torch.no_grad():
    loop.note('checked', step_fn(batch))
model.train()
""",
        apart=(
            "lazy",
            "retain_grad",
            "hook_on_activation",
            "hook_halves_gradient",
            "fgsm",
            "gradient_penalty",
        ),
    ),
    Part(
        "attribute_changed",
        init="self.gain = 1.0",
        forward="h = h * self.gain",
        once="model.gain = 0.5",
        back="model.gain = 1.0",
    ),
    Part(
        "attribute_creeps",
        init="self.slope = 1.0",
        forward="h = h * self.slope",
        before="model.slope = 1.0 + 0.01 * i",
    ),
    Part("attribute_added", once="model.note = 'new'"),
    Part(
        "dropout_changed",
        init="self.drop = nn.Dropout(0.1)",
        forward="h = self.drop(h)",
        once="model.drop.p = 0.5",
        back="model.drop.p = 0.0",
    ),
    Part(
        "momentum_of_norm",
        init="self.bn = nn.BatchNorm1d(8)",
        forward="h = self.bn(h)",
        once="model.bn.momentum = 0.5",
    ),
    Part(
        "pruned",
        once="""
import torch.nn.utils.prune as prune
prune.l1_unstructured(model.last, 'weight', 0.5)
""",
        apart=(
            "module_added",
            "moco",
            "ema_in_place",
            "moco_in_model",
            "extra_parameter",
            "clip_weights_data",
            "normalize_weights",
            "data_replaced",
            "data_scaled",
            "data_of_other",
            "load_model",
            "load_both",
            "load_model_assign",
            "gradient_edited",
            "tensor_hook",
            "post_accumulate_hook",
            "node_hook",
            "ema_by_data",
            "reset_parameters",
            "gradient_none",
            "gradient_read",
        ),
    ),
    Part("training_of_part", once="model.first.eval()"),
)
