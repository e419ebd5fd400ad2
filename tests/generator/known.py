"""Features with differences that are known and not mended yet. Cases leave them out; empty is the goal.
"accelerate: step fgsm" is meant for that kind of loop only.

Whoever mends one deletes its line, and the generator holds the mend from then on.
"""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, str] = {
    "backend: block lazy": "torch.compile itself initialises lazy modules while it traces (aot_eager does the same)",
    "backend: step numpy_scalar": "torch.compile itself makes tensors of NumPy scalars",
    "backend: step numpy_scalar_32": "torch.compile itself makes tensors of NumPy scalars",
    "backend: step numpy_sqrt": "torch.compile itself makes tensors of NumPy scalars",
    "backend: block attribute_numpy": "torch.compile itself makes tensors of NumPy scalars",
    "backend: step random_uniform": "torch.compile itself makes tensors of random numbers",
    "backend: step random_numpy": "torch.compile itself draws for NumPy",
    "backend: step random_numpy_scalar": "torch.compile itself draws for NumPy",
    "backend: change data_transposed": "torch 2.11 does not guard parameters whose dict is as it was",
    "backend: change data_cut": "torch 2.11 does not guard parameters whose dict is as it was",
    "backend: change frozen_first": "torch 2.11 does not guard parameters whose dict is as it was",
    "step saved_tensors": "compiled functions save other tensors than eager ones, so hooks see other numbers of them",
    "backend: change saved_tensors_hooks": "torch.compile saves other tensors (so does aot_eager)",
    "accelerate: change saved_tensors_hooks": "compiled functions save other tensors than eager ones",
    "accelerate: change data_cut": "plain training raises as well, and the message names another function",
    "change swapped_tensors": "memory that results share (issue 15, 11)",
    "option scaler_off": "GradScaler(enabled=False)",
    "step random_branch": "Dynamo's warnings",
    "block layer_drop": "Dynamo's warnings",
    "accelerate: change forward_hook": "hooks and forwards that compiled loops do not look at again",
    "backend: change forward_hook": "torch.compile looks at no later hooks (aot_eager neither)",
    "accelerate: change forward_hook_scales": "hooks and forwards that compiled loops do not look at again",
    "backend: change forward_hook_scales": "torch.compile looks at no later hooks (aot_eager neither)",
    "accelerate: change pre_hook": "hooks and forwards that compiled loops do not look at again",
    "backend: change pre_hook": "torch.compile looks at no later hooks (aot_eager neither)",
    "accelerate: change backward_hook": "hooks and forwards that compiled loops do not look at again",
    "backend: change backward_hook": "torch.compile looks at no later hooks (aot_eager neither)",
    "accelerate: change global_forward_hook": "hooks and forwards that compiled loops do not look at again",
    "backend: change global_forward_hook": "a fault: they are called less often than with aot_eager",
    "accelerate: change forward_replaced": "hooks and forwards that compiled loops do not look at again",
    "backend: change forward_replaced": "hooks and forwards that compiled loops do not look at again",
    "lightning: step extra_tensor": "returned extras lose requires_grad (issue 15, 11)",
    "lightning: step extra_activation": "returned extras lose requires_grad (issue 15, 11)",
    "lightning: step extra_parameter": "returned extras lose requires_grad (issue 15, 11)",
    "lightning: step gradient_read": "a failed capture loses gradients (issue 15, 9)",
    "step autocast": "bf16 in regions (issue 15, 11)",
    "change autocast": "bf16 in regions (issue 15, 11)",
    "option bf16": "bf16 in regions (issue 15, 11)",
}
