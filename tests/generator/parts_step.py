"""What a step computes: losses, and everything else that steps do beside forward and loss."""

from __future__ import annotations

from .part import Part, by_name

__all__ = ["LOSSES", "STEP"]

LOSSES = {
    "cross_entropy": "F.cross_entropy(out, y)",
    "smoothed": "F.cross_entropy(out, y, label_smoothing=0.1)",
    "weighted": "F.cross_entropy(out, y, weight=torch.tensor([0.2, 0.5, 1.0]))",
    "nll": "F.nll_loss(F.log_softmax(out, -1), y)",
    "mse": "F.mse_loss(out, torch.eye(3)[y])",
    "huber": "F.smooth_l1_loss(out, x[:, :3])",
    "bce": "F.binary_cross_entropy_with_logits(out, (y[:, None] == torch.arange(3)).float())",
    "module": "criterion(out, y)",
    "sum": "out.pow(2).sum() / len(y)",
    "one_hot": "F.mse_loss(out, F.one_hot(y, 3).float())",  # reads the host, on a CPU
    "cosine": "1 - F.cosine_similarity(out, x[:, 3:]).mean()",
}

_AUTOGRAD = ("graphed", "accelerate", "lightning")  # a compiled model has no second derivatives

STEP = by_name(
    # what is returned
    Part("extra_tensor", extra='"double": loss * 2'),
    Part("extra_detached", extra='"accuracy": (out.argmax(1) == y).float().mean().detach()'),
    Part("extra_activation", extra='"out": out'),
    Part("extra_view_of_batch", extra='"part": x[:2]'),
    Part("extra_batch", extra='"x": x, "y": y'),
    Part("extra_views", extra='"row": out.detach()[0], "all": out.detach()'),
    Part("extra_parameter", extra='"first": model.first.weight'),
    Part("extra_constants", extra='"none": None, "name": "train", "number": 3, "pair": (1, 2.5)'),
    Part("extra_shape", extra='"shape": x.shape'),
    Part("extra_integer", extra='"index": out.argmax(1)'),
    Part("extra_loss_twice", extra='"again": loss'),
    Part("extra_nested", extra='"more": {"list": [loss.detach(), None], "tuple": (out.sum(),)}'),
    Part("extra_float", extra='"value": loss.item()', weight=0.4),
    Part("extra_numpy", extra='"array": out.detach().numpy().copy()', weight=0.4),
    # numbers
    Part("numpy_scalar", module="WEIGHT = np.float64(0.3)", loss="loss = loss * WEIGHT"),
    Part("numpy_scalar_32", module="SMALL = np.float32(0.3)", loss="loss = loss * float(SMALL)"),
    Part("numpy_sqrt", loss="loss = loss * np.sqrt(0.1)"),
    Part("python_number", module="ALPHA = 0.4", loss="loss = ALPHA * loss"),
    Part("closure_number", setup="factor = 0.6", loss="loss = loss * factor"),
    Part("tensor_constant", loss="loss = loss * torch.tensor(0.5)"),
    Part(
        "numpy_maths", begin="x = x + torch.from_numpy(np.tanh(np.arange(6, dtype=np.float32)))", weight=0.6
    ),
    # random numbers
    Part("random_uniform", begin="x = x * random.uniform(0.9, 1.1)", weight=0.6),
    Part(
        "random_branch",
        begin="""
if random.random() < 0.3:
    x = -x
""",
        weight=0.4,
    ),
    Part(
        "random_choice",
        begin="""
x = x * random.choice([1.0, 0.5])
if np.random.rand() < 0.2:
    x = x + 1
""",
        weight=0.4,
    ),
    Part("random_numpy", begin="x = x + torch.from_numpy(np.random.randn(6).astype(np.float32))", weight=0.6),
    Part("random_numpy_scalar", begin="x = x * float(np.random.uniform(0.9, 1.1))", weight=0.6),
    Part("random_noise", begin="x = x + 0.1 * torch.randn_like(x)"),
    Part(
        "random_mixup",
        begin="""
order = torch.randperm(len(x))
x = 0.7 * x + 0.3 * x[order]
""",
    ),
    Part("random_dropout", begin="x = F.dropout(x, 0.2)"),
    Part(
        "random_generator",
        setup="generator = torch.Generator().manual_seed(3)",
        begin="x = x + torch.randn(6, generator=generator)",
        weight=0.5,
    ),
    # the host
    Part(
        "item",
        loss="""
if loss.item() > 1e6:
    loss = loss * 0.1
""",
        weight=0.7,
    ),
    Part(
        "read_batch",
        begin="""
if y.max() > 1:
    x = x * 2
    if x[0, 0].item() > 0:
        x = x + 1
""",
        weight=0.7,
    ),
    Part(
        "read_state",
        begin="x = x * 2 if bool((model.last.weight > 0).float().mean() > 0.5) else x",
        weight=0.5,
    ),
    Part("read_unused", begin="count_of_labels = int((y == 1).sum())", weight=0.3),
    Part("print", loss="print(round(loss.item(), 4))", weight=0.4),
    Part("print_text", begin='print("step")', weight=0.4),
    Part(
        "log_list", setup="log = []", loss="log.append(loss.item())", end='loop.note("log", log)', weight=0.5
    ),
    Part(
        "log_tensors",
        setup="losses = []",
        loss="losses.append(loss.detach())",
        end='loop.note("losses", losses)',
        weight=0.5,
    ),
    Part("counter", setup="count = [0]", begin="count[0] += 1", end='loop.note("count", count)', weight=0.5),
    Part(
        "counter_used",
        setup="state = {'n': 0}",
        begin="state['n'] += 1",
        loss="loss = loss * min(1.0, state['n'] / 5)",
        weight=0.5,
    ),
    Part("boolean_index", begin="chosen = y > 0", loss="loss = loss + out[chosen].sum() * 0.01", weight=0.7),
    Part("nonzero", loss="loss = loss + len(torch.nonzero(y)) * 0.01", weight=0.4),
    # parameters and buffers written by the step
    Part(
        "moco",
        setup="teacher = copy.deepcopy(model.last).requires_grad_(False)",
        begin="""
with torch.no_grad():
    for a, b in zip(model.last.parameters(), teacher.parameters()):
        b.data = b.data * 0.9 + a.data * 0.1
""",
        loss="loss = loss + teacher.weight.pow(2).mean()",
        end='loop.note("teacher", list(teacher.parameters()))',
    ),
    Part(
        "moco_in_model",
        init="self.slow = nn.Linear(8, 3).requires_grad_(False)",
        begin="""
with torch.no_grad():
    for a, b in zip(model.last.parameters(), model.slow.parameters()):
        b.data = b.data * 0.9 + a.data * 0.1
""",
        loss="loss = loss + F.mse_loss(out, model.slow(torch.ones(1, 8)).expand_as(out)) * 0.1",
    ),
    Part(
        "ema_in_place",
        setup="ema = copy.deepcopy(model.last).requires_grad_(False)",
        loss="""
with torch.no_grad():
    for a, b in zip(model.last.parameters(), ema.parameters()):
        b.mul_(0.9).add_(a, alpha=0.1)
loss = loss + 0.1 * ema.weight.sum()
""",
        end='loop.note("ema", list(ema.parameters()))',
    ),
    Part(
        "ema_lerp",
        setup="mean_model = copy.deepcopy(model.first).requires_grad_(False)",
        begin="""
with torch.no_grad():
    for a, b in zip(model.first.parameters(), mean_model.parameters()):
        b.copy_(b.lerp(a, 0.1))
""",
        loss="loss = loss + F.mse_loss(model.first(x), mean_model(x))",
    ),
    Part(
        "clip_weights",
        begin="""
for p in model.parameters():
    p.data = p.data.clamp(-0.3, 0.3)
""",
        apart=("lazy",),
    ),
    Part(
        "clip_weights_in_place",
        begin="""
with torch.no_grad():
    for p in model.parameters():
        p.clamp_(-0.4, 0.4)
""",
        apart=("lazy",),
    ),
    Part("clip_weights_data", begin="model.last.weight.data.clamp_(-0.3, 0.3)"),
    Part(
        "normalize_weights",
        begin="""
with torch.no_grad():
    model.last.weight.copy_(F.normalize(model.last.weight))
""",
    ),
    Part(
        "queue",
        init="self.register_buffer('queue', torch.zeros(4, 3))",
        loss="""
loss = loss + (out.detach().mean(0) - model.queue).pow(2).mean()
with torch.no_grad():
    model.queue.copy_(torch.cat([out.detach()[:1], model.queue[:-1]]))
""",
    ),
    Part(
        "weight_decay_loss", loss="loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.last.parameters())"
    ),
    # the batch written by the step
    Part(
        "batch_in_place",
        begin="""
if x.is_leaf and not x.requires_grad:
    x.mul_(0.9)
""",
        apart=("expanded",),
        weight=0.7,
    ),
    Part("batch_data_in_place", begin="x.data.mul_(0.9)", apart=("expanded",), weight=0.7),
    Part(
        "batch_copy_in_place",
        begin="""
x = x.clone()
x[:, 0] = 0
""",
    ),
    # gradients inside
    Part(
        "fgsm",
        begin="""
delta = torch.zeros_like(x, requires_grad=True)
direction, = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
x = x + 0.1 * direction.sign()
""",
        loops=_AUTOGRAD,
        weight=0.4,
    ),
    Part(
        "gradient_penalty",
        begin="points = x.detach().clone().requires_grad_()",
        loss="""
slope, = torch.autograd.grad(model(points).sum(), points, create_graph=True)
loss = loss + (slope.norm(dim=1) - 1).pow(2).mean()
""",
        loops=_AUTOGRAD,
        weight=0.4,
    ),
    Part(
        "functional_grad",
        begin="""
f = torch.func.grad(lambda a: (a * a).sum())
x = x + 0.01 * f(x)
""",
        weight=0.4,
    ),
    Part(
        "gradient_read",
        extra='"norm": torch.zeros(()) if model.last.weight.grad is None else model.last.weight.grad.norm()',
        weight=0.5,
    ),
    Part(
        "hook_on_activation",
        setup="touched = []",
        loss="loss.register_hook(lambda g: touched.append(1))",
        end='loop.note("touched", len(touched))',
        weight=0.5,
    ),
    Part("hook_halves_gradient", loss="out.register_hook(lambda g: g * 0.5)", weight=0.5),
    Part("retain_grad", loss="out.retain_grad()", weight=0.3),
    Part("checkpoint_model", call="checkpoint(net, x, use_reentrant=False)", weight=0.7),
    # how it is computed
    Part("autocast", context="torch.autocast('cpu', dtype=torch.bfloat16)"),
    Part("autocast_off", context="torch.autocast('cpu', enabled=False)"),
    Part("sdpa_math", context="sdpa_kernel(SDPBackend.MATH)"),
    Part(
        "saved_tensors",
        setup="""
packed = [0]
def pack(t):
    packed[0] += 1
    return t
""",
        context="torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)",
        end='loop.note("packed", packed)',
        weight=0.4,
    ),
    Part("twice_forward", loss="loss = loss + 0.5 * net(x * 0.5).pow(2).mean()"),
    Part(
        "consistency",
        loss="""
with torch.no_grad():
    target = net(x)
loss = loss + F.mse_loss(out, target)
""",
    ),
    Part(
        "eval_inside",
        loss="""
model.eval()
with torch.no_grad():
    calm = net(x)
model.train()
loss = loss + 0.1 * (out - calm).pow(2).mean()
""",
        weight=0.5,
    ),
    Part(
        "helper",
        module="""
def helper(a, *, power=2):
    return (a**power).mean()
""",
        loss="loss = loss + 0.1 * helper(out)",
    ),
    Part(
        "closure_tensor",
        setup="prior = torch.tensor([0.1, 0.2, 0.7])",
        loss="loss = loss + (out.softmax(-1) - prior).pow(2).mean()",
    ),
    Part(
        "dictionary_of_options",
        setup="options = {'alpha': 0.3, 'names': ['a', 'b']}",
        loss="loss = loss * options['alpha'] * len(options['names'])",
    ),
    Part("einsum", loss="loss = loss + 0.01 * torch.einsum('ij,kj->ik', out, out).mean()"),
    Part("sort", loss="loss = loss + 0.1 * out.sort(0).values[0].sum()"),
    Part("double_loss", loss="loss = loss.double()", weight=0.5),
    Part("vmap", loss="loss = loss + torch.vmap(lambda row: row.dot(row))(out).mean() * 0.1", weight=0.5),
    Part(
        "raises_sometimes",
        setup="fuse = {'blown': False}",
        begin="""
if fuse['blown']:
    raise ValueError('blown')
""",
        before="fuse['blown'] = i in (6, 13)",
        raises=True,
        loops=("graphed", "backend"),
        weight=0.7,
    ),
    Part(
        "raises_late",
        setup="guard = {'bad': False}",
        loss="""
if guard['bad']:
    raise RuntimeError('after the forward')
""",
        before="guard['bad'] = i == 11",
        raises=True,
        loops=("graphed", "backend"),
        weight=0.7,
    ),
    # several losses
    Part(
        "alternating_heads",
        init="self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))",
        setup="task = [0]",
        before="task[0] = i % 2",
        loss="loss = loss + F.cross_entropy(model.heads[task[0]](x), y)",
        weight=0.7,
    ),
    Part(
        "heads_computed_both",
        init="self.both = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))",
        setup="turn = [0]",
        before="turn[0] = i % 2",
        loss="""
parts = [F.cross_entropy(k(x), y) for k in model.both]
loss = loss + parts[turn[0]]
""",
        weight=0.7,
    ),
    Part(
        "auxiliary_loss_later",
        init="self.extra_head = nn.Linear(6, 3)",
        setup="phase = {'aux': False}",
        before="phase['aux'] = i >= 9",
        loss="""
if phase['aux']:
    loss = loss + F.cross_entropy(model.extra_head(x), y)
""",
    ),
    Part(
        "schedule_by_closure",
        setup="warm = {'w': 0.0}",
        before="warm['w'] = i // 6 / 3",
        loss="loss = loss + warm['w'] * out.pow(2).mean()",
    ),
    Part(
        "schedule_by_tensor",
        setup="ramp = torch.zeros(())",
        before="ramp.fill_(i / 10)",
        loss="loss = loss + ramp * out.pow(2).mean()",
    ),
    Part(
        "schedule_by_attribute",
        init="self.beta = 0.0",
        before="model.beta = float(i >= 9)",
        loss="loss = loss + model.beta * out.pow(2).mean()",
    ),
)
