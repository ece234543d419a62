"""Parts that mechanisms share: projections, caches, masks, and the ways to compute attention."""
