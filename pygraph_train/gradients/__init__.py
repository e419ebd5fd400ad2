"""Where gradients lie."""
