"""One sequence over several processes."""
