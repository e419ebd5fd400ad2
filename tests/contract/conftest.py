"""What the tests of the contract share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # threads that wait for each other take longer than these models
