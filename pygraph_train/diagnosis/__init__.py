"""Answers before training: what keeps a step from being one graph, and what works on this machine."""
