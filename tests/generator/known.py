"""Features with differences that are known and not mended yet. Cases leave them out; empty is the goal.
"accelerate: step fgsm" is meant for that kind of loop only.

Whoever mends one deletes its line, and the generator holds the mend from then on.
"""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, str] = {
    "change forward_replaced": "torch.compile looks at no methods of classes (its backend eager neither)",
    "change node_prehook": "a hook on the node that adds to a gradient is not looked for in replays (docs/legality.md)",
    "change node_hook_from_start": "a hook on a node is not looked for in replays (docs/legality.md)",
    "change node_hook": "a hook on the node that adds to a gradient is not looked for in replays (docs/legality.md)",
    "step extra_nested": "replays hand out a copy of each result, also of those that share memory (docs/legality.md)",
    "step extra_views": "replays hand out a copy of each result, also of those that share memory (docs/legality.md)",
    "backend: block lazy": "torch.compile draws random numbers while it traces lazy modules (aot_eager does so)",
    "backend: step numpy_scalar": "torch.compile makes float64 tensors of NumPy scalars (aot_eager does so)",
    "backend: step numpy_sqrt": "torch.compile makes float64 tensors of NumPy scalars (aot_eager does so)",
    "backend: step random_numpy": "torch.compile draws other numbers for NumPy (aot_eager does so)",
    "backend: change data_cut": "torch.compile raises another error, and none on 2.11 (aot_eager does so)",
    "backend: change frozen_first": "torch 2.11 does not look at requires_grad again (aot_eager neither)",
    "backend: change saved_tensors_hooks": "torch.compile saves other tensors (so does aot_eager)",
    "accelerate: step twice_forward": "gradients of one weight are added in another order (docs/legality.md)",
    "accelerate: step ema_lerp": "gradients of one weight are added in another order (docs/legality.md)",
    "accelerate: change data_cut": "plain training raises as well, and the message names another function",
    "accelerate: step einsum": "AOTAutograd makes gradients of results contiguous before sums (aot_eager does so)",
    "backend: change forward_hook": "torch.compile looks at no later hooks (aot_eager neither)",
    "backend: change forward_hook_scales": "torch.compile looks at no later hooks (aot_eager neither)",
    "backend: change pre_hook": "torch.compile looks at no later hooks (aot_eager neither)",
    "backend: change backward_hook": "torch.compile looks at no later hooks (aot_eager neither)",
    "backend: change global_forward_hook": "torch.compile calls no hooks of compiled modules (Inductor neither)",
    "backend: step random_branch": "torch.compile itself warns that it cannot trace random.random",
    "backend: block layer_drop": "torch.compile itself warns that it cannot trace random.random",
}
