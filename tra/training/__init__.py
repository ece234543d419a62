"""Train one run: steps, checkpoints, processes."""
