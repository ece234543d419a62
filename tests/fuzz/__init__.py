"""Hostile input of every kind: whatever comes, one line, no traceback, nothing lost. `make fuzz` runs it long."""
