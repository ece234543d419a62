"""The proxy of the host's cost, and by its means: plans launch what Triton launches, with the same arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMPARISON = """
import json, torch
from benchmarks import host_cost
from benchmarks.host_cost import KernelStub
from tra.ops.triton import eager

launches = []

def note(stub, x, y, z, stream, function, metadata, _, enter, leave, *arguments):
    def plain(value):  # where tensors lie differs from call to call
        is_pointer = isinstance(value, torch.Tensor) or (isinstance(value, int) and value > 2**40)
        return "pointer" if is_pointer else value
    launches.append([id(stub), x, y, z, *map(plain, arguments)])

host_cost.stub_driver()
KernelStub.run = note
torch.set_num_threads(1)
found = {}
for name, call in host_cost.operator_cases().items():
    counts = []
    for takes in (False, True):
        eager.takes = lambda _, takes=takes: takes
        runs = []
        for turn in range(3):  # Triton compiles, plans are recorded, plans are used
            launches.clear()
            call()
            runs.append([list(launch) for launch in launches])
        counts.append(runs)
    by_triton, planned = counts[0][-1], counts[1][-1]
    growing = "growing" in name  # its key is one longer at every call
    same = [[a for a, b in zip(x, y) if a != b] for x, y in zip(by_triton, planned)]
    found[name] = {
        "launches": [len(by_triton), len(planned)],
        "different": max(map(len, same)),
        "kernels": [x[0] for x in by_triton] == [x[0] for x in planned],
        "plans": sum(call.plan is not None for call in eager.SEEN.values()),
    }
print(json.dumps(found))
"""


@pytest.mark.slow
def test_plans_launch_what_triton_launches() -> None:
    """The same compiled kernels, grids and numbers, and pointers where Triton has tensors."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARISON], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 5
    for name, case in found.items():
        by_triton, planned = case["launches"]
        assert by_triton == planned >= 1
        assert case["kernels"], name
        assert case["different"] == (1 if "growing" in name else 0), name  # the number of keys
        assert case["plans"] > 0
