"""Recurrent networks of torch (`nn.LSTM`, `nn.GRU`, `nn.RNN`) in graphs of Dynamo's: one operation each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from pygraph_train.problems import Problem
from pygraph_train.tracing.reasons import line_of

__all__ = ["draws_of_cudnn", "recurrent_networks"]

DROPOUT_OF_LAYERS = Problem(
    "cuDNN draws for the dropout between the layers of a recurrent network, and nobody can put its generator back",
    fix="Make a module of each layer, with nn.Dropout between them, or set torch.backends.cudnn.enabled to False",
)

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

_DROPOUT, _TRAINS = 5, 6
"""Places among the arguments, where the input is no packed sequence."""


def recurrent_networks(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The operations of a graph, and of those that it holds, that are recurrent networks."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.target in _RECURRENT)


def draws_of_cudnn(graph: torch.fx.GraphModule, device: torch.device) -> Iterator[Problem]:
    """Why networks with dropout between their layers have no graph: cuDNN draws from a generator of its own for them.

    Args:
        graph: from Dynamo.
        device: of the step.
    """
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return
    for node in recurrent_networks(graph):
        if len(node.args) > _TRAINS and node.args[_DROPOUT] and node.args[_TRAINS]:
            yield dataclasses.replace(DROPOUT_OF_LAYERS, where=line_of(node))
