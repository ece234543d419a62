"""Settings shared by all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU, Triton's kernels run in its interpreter; it has to be asked for before Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tra.ops.triton import eager

# Tensors make first examples slow; the number of examples, not a clock, bounds a property test.
# On a build machine the examples are the same every time; HYPOTHESIS_EXAMPLES=500 searches further.
settings.register_profile(
    "tra",
    deadline=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "25")),
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tra")

# Workers side by side get one thread each, and so do their children: more threads than cores wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# Started in the background, a shell may have us ignore Ctrl-C, and so would every process that a test starts and stops.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    """On a GPU, let no test repeat the launches that another one's settings led to."""
    eager.SEEN.clear()
