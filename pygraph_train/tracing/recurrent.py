"""Recurrent networks of torch (`nn.LSTM`, `nn.GRU`, `nn.RNN`) in graphs of Dynamo's: one operation each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["draws_of_cudnn", "recurrent_networks"]

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

_DROPOUT, _TRAINS = 5, 6
"""Places among the arguments, where the input is no packed sequence."""


def recurrent_networks(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The operations of a graph, and of those that it holds, that are recurrent networks."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.target in _RECURRENT)


def draws_of_cudnn(graph: torch.fx.GraphModule, device: torch.device) -> list[torch.fx.Node]:
    """Networks with dropout between their layers: cuDNN draws from a generator of its own for them.

    Args:
        graph: from Dynamo.
        device: of the step.
    """
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return []
    nodes = recurrent_networks(graph)
    return [n for n in nodes if len(n.args) > _TRAINS and n.args[_DROPOUT] and n.args[_TRAINS]]
