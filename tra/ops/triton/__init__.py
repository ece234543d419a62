"""The fused kernels and their launchers: `forward`, `backward`, `decode`, `projections`, and what they share."""
