"""The fused kernels and their launchers."""
