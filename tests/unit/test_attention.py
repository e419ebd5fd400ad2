"""Seed and offset of attention's dropout: graphs of aten operations hand them on as tensors of the device."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from pygraph_train.torch_private import attention
from pygraph_train.torch_private.attention import keep_dropout_on_device

FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

pytestmark = pytest.mark.passes_without_graphs("it is about what a graph is made of")


def test_what_a_forward_hands_on_lies_on_the_device_of_its_query() -> None:
    graph = fx.Graph()
    query = graph.placeholder("query")
    made = graph.call_function(FORWARD, (query, query, query, None, True, 0.1))
    got = [graph.call_function(operator.getitem, (made, i)) for i in range(4)]
    end = graph.output(tuple(got))
    keep_dropout_on_device(graph)
    graph.lint()
    out, logarithms, seed, offset = end.args[0]
    assert (out, logarithms) == tuple(got[:2])
    for state, before in ((seed, got[2]), (offset, got[3])):
        assert state.target is attention._on_device and state.args == (before, query)


def test_a_backward_reads_both_where_its_kernels_do() -> None:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("gradient", "q", "k", "v", "out", "log", "seed", "offset")]
    gradient, q, k, v, out, logarithms, seed, offset = given
    arguments = (gradient, q, k, v, None, out, logarithms, seed, offset, 0.1, [True, True, True, False])
    made = graph.call_function(BACKWARD, arguments)
    graph.output(made)
    keep_dropout_on_device(graph)
    graph.lint()
    for place, state in ((7, seed), (8, offset)):
        read = made.args[place]
        assert isinstance(read, fx.Node)
        assert read.target is attention._where_it_is_read and read.args == (state,)
    assert made.args[:7] == arguments[:7] and made.args[9:] == arguments[9:]


def test_other_operations_stay_as_they_are() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.sin.default, (x,)))
    before = [node.name for node in graph.nodes]
    keep_dropout_on_device(graph)
    assert [node.name for node in graph.nodes] == before
