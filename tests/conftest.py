"""Settings shared by all tests."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# Tensors make first examples slow; the number of examples, not a clock, bounds a property test.
settings.register_profile("tra", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tra")
torch.set_num_threads(min(2, torch.get_num_threads()))
