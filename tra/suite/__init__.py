"""Grids of runs: named cells, each a whole run config, trained, evaluated and diagnosed side by side."""

from tra.suite.suites import SUITES, Cell, suite

__all__ = ["SUITES", "Cell", "suite"]
