"""Grids of runs: tables made of named cells, each a whole run config, trained and measured on one machine or many."""

from tra.suite.grid import Cell, Part, Suite
from tra.suite.suites import SUITES, cells, suite

__all__ = ["SUITES", "Cell", "Part", "Suite", "cells", "suite"]
