"""What developers measure. Not part of the package; run as `python -m benchmarks.NAME`."""
