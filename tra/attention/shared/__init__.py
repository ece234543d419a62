"""What mechanisms share: projections, caches, masks, and the ways they run."""
