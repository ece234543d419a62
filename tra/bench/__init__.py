"""Speed and memory, as ratios, to JSON."""
