"""What loops do between steps, at a step of the case's choice."""

from __future__ import annotations

from .part import Part, by_name
from .parts_changes_model import OF_MODEL
from .parts_changes_optimizer import OF_OPTIMIZER

__all__ = ["CHANGES"]

_AROUND = by_name(
    # hooks
    Part(
        "forward_hook",
        setup="seen = []",
        once="handle_f = model.last.register_forward_hook(lambda m, a, out: seen.append(1))",
        back="handle_f.remove()",
        end='loop.note("seen", len(seen))',
        apart=("module_added",),
    ),
    Part(
        "forward_hook_scales",
        once="handle_s = model.first.register_forward_hook(lambda m, a, out: out * 0.5)",
        back="handle_s.remove()",
        apart=("module_replaced",),
    ),
    Part(
        "forward_hook_from_start",
        setup="""
starts = []
model.first.register_forward_hook(lambda m, a, out: starts.append(out.shape))
""",
        end='loop.note("starts", len(starts))',
        weight=0.5,
    ),
    Part(
        "pre_hook",
        once="model.last.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))",
        apart=("module_added",),
    ),
    Part(
        "backward_hook",
        setup="backs = []",
        once="handle_b = model.last.register_full_backward_hook(lambda m, gi, go: backs.append(1))",
        back="handle_b.remove()",
        end='loop.note("backs", len(backs))',
        apart=("module_added",),
    ),
    Part(
        "tensor_hook",
        setup="told = []",
        once="handle_t = model.last.weight.register_hook(lambda g: told.append(1) or g * 0.5)",
        back="handle_t.remove()",
        end='loop.note("told", len(told))',
        apart=("module_added",),
    ),
    Part(
        "tensor_hook_from_start",
        setup="""
first_told = []
model.first.weight.register_hook(lambda g: first_told.append(1) or g * 2)
""",
        end='loop.note("first told", len(first_told))',
        apart=("data_double",),
        weight=0.5,
    ),
    Part(
        "node_hook",
        setup="nodes = []",
        once="""
node = model.last.weight.expand_as(model.last.weight).grad_fn.next_functions[0][0]
handle_n = node.register_hook(lambda *a: nodes.append(1))
""",
        back="handle_n.remove()",
        end='loop.note("nodes", len(nodes))',
        apart=("module_added", "frozen_head"),
    ),
    Part(
        "node_hook_from_start",
        setup="""
visits, alive = [], []
for p in model.first.parameters():
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    node.register_hook(lambda *a: visits.append(1))
    alive.append(node)
""",
        end='loop.note("visits", len(visits))',
        weight=0.5,
    ),
    Part(
        "node_prehook",
        setup="prevs, held_nodes = [], []",
        once="""
held_nodes.append(model.last.weight.view_as(model.last.weight).grad_fn.next_functions[0][0])
handle_v = held_nodes[0].register_prehook(lambda g: prevs.append(1))
""",
        back="handle_v.remove()",
        end='loop.note("prevs", len(prevs))',
        apart=("module_added", "pruned"),
    ),
    Part(
        "post_accumulate_hook",
        setup="posts = []",
        once="handle_p = model.last.weight.register_post_accumulate_grad_hook(lambda p: posts.append(1))",
        back="handle_p.remove()",
        end='loop.note("posts", len(posts))',
        apart=("module_added",),
    ),
    Part(
        "global_forward_hook",
        setup="globals_seen = []",
        once="""
handle_g = torch.nn.modules.module.register_module_forward_hook(lambda m, a, out: globals_seen.append(1))
""",
        back="handle_g.remove()",
        end='loop.note("globals seen", len(globals_seen))',
        weight=0.5,
    ),
    Part(
        "global_optimizer_hook",
        setup="""
from torch.optim.optimizer import register_optimizer_step_post_hook
global_steps = []
""",
        once="handle_o = register_optimizer_step_post_hook(lambda *a: global_steps.append(1))",
        back="handle_o.remove()",
        end='loop.note("global steps", len(global_steps))',
    ),
    # global switches
    Part("sdpa", around="sdpa_kernel(SDPBackend.MATH)"),
    Part(
        "sdpa_flag",
        once="torch.backends.cuda.enable_flash_sdp(False)",
        back="torch.backends.cuda.enable_flash_sdp(True)",
    ),
    Part("autocast", around="torch.autocast('cpu', dtype=torch.bfloat16)"),
    Part(
        "default_dtype",
        once="torch.set_default_dtype(torch.float64)",
        back="torch.set_default_dtype(torch.float32)",
        apart=("lazy",),
    ),
    Part(
        "deterministic",
        once="torch.use_deterministic_algorithms(True)",
        back="torch.use_deterministic_algorithms(False)",
    ),
    Part(
        "warn_only",
        once="torch.use_deterministic_algorithms(True, warn_only=True)",
        back="torch.use_deterministic_algorithms(False)",
    ),
    Part("anomaly", around="torch.autograd.detect_anomaly(check_nan=False)", weight=0.5),
    Part(
        "dispatch_mode",
        module="""
class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
""",
        around="Counting()",
    ),
    Part(
        "dispatch_mode_doubles",
        module="""
class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out
""",
        around="Doubling()",
    ),
    Part(
        "function_mode",
        module="""
class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
""",
        around="Functions()",
    ),
    Part(
        "function_mode_doubles",
        module="""
class Tanhs(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out
""",
        around="Tanhs()",
    ),
    Part(
        "saved_tensors_hooks",
        setup="""
packs = [0]
def pack_half(t):
    packs[0] += 1
    return t.bfloat16() if t.dtype == torch.float32 else t
def unpack_half(t):
    return t.float() if t.dtype == torch.bfloat16 else t
""",
        around="torch.autograd.graph.saved_tensors_hooks(pack_half, unpack_half)",
        end='loop.note("packs", packs[0])',
    ),
    Part("save_on_cpu", around="torch.autograd.graph.save_on_cpu()"),
    Part("seed", once="torch.manual_seed(3)"),
    Part(
        "random_state",
        once="state_of_random = torch.get_rng_state()",
        back="torch.set_rng_state(state_of_random)",
    ),
    Part(
        "random_between",
        before="""
torch.rand(i % 3)
np.random.rand()
random.random()
""",
    ),
    Part("default_device", around="torch.device('cpu')", weight=0.5),
    Part("grad_mode", once="torch.set_grad_enabled(True)", weight=0.3),
    Part(
        "mkldnn_off",
        once="torch.backends.mkldnn.enabled = False",
        back="torch.backends.mkldnn.enabled = True",
    ),
    Part(
        "matmul_precision",
        once="torch.set_float32_matmul_precision('medium')",
        back="torch.set_float32_matmul_precision('highest')",
    ),
    Part("num_threads", once="torch.set_num_threads(1)", weight=0.3),
    Part(
        "inference_mode_between",
        once="""
with torch.inference_mode():
    model(probe_i)
""",
        setup="probe_i = torch.linspace(-1, 1, 24).view(4, 6)",
        apart=("lazy",),
    ),
    Part("deep_copy", once="loop.note('copy', list(copy.deepcopy(model).parameters()))", apart=("lazy",)),
    Part(
        "pickled",
        once="""
import pickle
loop.note('pickled', len(pickle.dumps(model.state_dict())) > 0)
""",
    ),
    # the loop
    Part(
        "results_changed",
        after="""
if isinstance(result, torch.Tensor):
    result.mul_(2)
""",
    ),
    Part(
        "batch_changed",
        before="""
if i == 8:
    for leaf in leaves(batch):
        leaf.add_(leaf.to(torch.bool))
""",
        weight=0.7,
        apart=("expanded", "part_expanded", "requires_grad"),
    ),
    Part(
        "garbage",
        once="""
import gc
gc.collect()
""",
    ),
    Part(
        "threads",
        once="""
import threading
t = threading.Thread(target=lambda: torch.randn(4).sum())
t.start()
t.join()
""",
        weight=0.3,
    ),
)

CHANGES = {**OF_MODEL, **OF_OPTIMIZER, **_AROUND}
