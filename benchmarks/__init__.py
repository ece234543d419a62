"""Measurements for developers. Not part of the package; run as `python -m benchmarks.NAME`."""
