"""One training step: phases, plans, guards, static inputs, optimizer preparation."""
