"""Which kernels an optimizer runs with, and its graph."""
