"""Measure what a call costs the host, on a CPU and without launches: `python -m benchmarks.host_cost [--profile CASE]`.

This is a proxy for machines without a GPU; its numbers are not those of a GPU. Triton binds, specialises and looks up
kernels as for Hopper, but launches a function that does nothing. PyTorch's other operators compute on small tensors on
the CPU. The CUDA driver's launches and the caching allocator are missing. The log is `results/bench/host-proxy.json`;
it also has the time of each call when all calls go through PyTorch's dispatcher. On a GPU, `tra bench host` measures
the real cost.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import tra
from tra.attention import MECHANISMS
from tra.attention.shared.cache import StaticCache
from tra.ops import inputs as operator_inputs
from tra.ops.triton import backward_kernels, decode_kernels, eager, forward_kernel
from tra.runs import environment

KERNELS = {
    "forward": (forward_kernel.forward_kernel,),
    "backward": (backward_kernels.query_gradient_kernel, backward_kernels.key_gradient_kernel),
    "decode": (decode_kernels.decode_kernel, decode_kernels.merge_kernel),
}
CALLS, ROUNDS = 200, 9
BOUND = 8 * (1 + 2**-7)


class KernelStub:
    """A compiled kernel whose launch does nothing."""

    function, packed_metadata = 1, (4, 1, 0)

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        pass


def stub_driver() -> None:
    """Make Triton work as if there were a Hopper GPU, and make the kernels take tensors on the CPU."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(driver)
    vars(triton.compiler)["compile"] = lambda *_, **__: KernelStub()
    eager.takes = lambda _: True
    vars(operator_inputs)["reading_is_free"] = lambda _: False  # as on a GPU
    os.environ["TRITON_INTERPRET"] = "1"  # read by our availability check; the kernels are imported already
    os.environ["TRA_DIRECT_LAUNCH"] = "1"


def operator_cases(length: int = 128) -> dict[str, Callable[[], object]]:
    """Return calls of the operator, 8 heads of 64."""
    inputs = [torch.randn(1, 8, length, 64, dtype=torch.float16) for _ in range(3)]
    inputs.append(F.logsigmoid(torch.randn(1, 8, length)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad_out = torch.randn_like(inputs[2])
    cache = [torch.randn(1, 1024, 8, 64, dtype=torch.float16).transpose(1, 2) for _ in range(2)]
    lengths = torch.tensor([1000], dtype=torch.int32)
    token = [inputs[0][:, :, :1].contiguous(), *cache, inputs[3][:, :, :1].contiguous()]
    growing = iter(range(64, 1 << 60))

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        return tra.threshold_relative_attention(*tensors, impl="triton", score_bound=BOUND, **options)

    def grow() -> Tensor:
        size = 64 + next(growing) % 900
        return attend(token[0], cache[0][:, :, :size], cache[1][:, :, :size], token[3])

    return {
        "forward": lambda: attend(*inputs),
        "forward, training": lambda: attend(*leaves),
        "forward and backward": lambda: torch.autograd.grad(attend(*leaves), leaves, grad_out),
        "one token, static cache": lambda: attend(*token, key_lengths=lengths),
        "one token, growing cache": grow,
    }


def layer_cases(length: int = 16) -> dict[str, Callable[[], object]]:
    """Return calls of layers with 8 heads of 16: small, because their products are really computed."""
    cases: dict[str, Callable[[], object]] = {}
    x = torch.randn(1, length, 128)
    for name in ("tra", "rope"):
        options = {"impl": "triton"} if name == "tra" else {}
        layer = MECHANISMS[name](128, 8, **options)
        cases[f"{name} layer, forward"] = lambda layer=layer: without_gradients(layer, x)  # type: ignore[misc]
        cases[f"{name} layer, forward and backward"] = lambda layer=layer: layer(x).sum().backward()  # type: ignore[misc]
    layer = MECHANISMS["tra"](128, 8, impl="triton").eval()
    cases["tra layer, one token, static cache"] = token_step(layer, x[:, :1])
    return cases


def without_gradients(layer: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def token_step(layer: torch.nn.Module, x: Tensor) -> Callable[[], object]:
    cache = StaticCache(1, 1024)

    def step() -> None:
        cache.length, cache.lengths = 0, None
        with torch.no_grad():
            token, _ = cache.begin(x, None)
            cache.end(layer(token, None, cache.layers[0]))

    return step


def launch_cases() -> dict[str, Callable[[], object]]:
    """Return plain Triton launches of every kernel, with arguments like those of the operator."""
    tensor = torch.randn(1, 8, 128, 64, dtype=torch.float16)
    cases: dict[str, Callable[[], object]] = {}
    for name, kernels in KERNELS.items():
        for kernel in kernels:
            arguments = [
                1 if p.is_constexpr else tensor if p.name.isupper() else 8192 if "stride" in p.name else 64
                for p in kernel.params
            ]
            label = f"Triton's launch, {name}, {len(arguments)} arguments"
            cases[label] = lambda kernel=kernel, arguments=arguments: kernel[(8,)](  # type: ignore[misc]
                *arguments, num_warps=4, num_stages=3
            )
    return cases


def microseconds(call: Callable[[], object]) -> float:
    """Return the process time of a call, the median over rounds."""
    for _ in range(20):
        call()
    rounds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.process_time() - begun) / CALLS)
    return round(statistics.median(rounds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="CASE", help="print where the host's time goes in one case")
    options = parser.parse_args()
    stub_driver()
    torch.set_num_threads(1)
    cases = operator_cases() | layer_cases() | launch_cases()
    if options.profile:
        call = cases[options.profile]
        microseconds(call)
        with cProfile.Profile() as profile:
            for _ in range(CALLS):
                call()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    found: dict[str, dict[str, float]] = {}
    for name, call in cases.items():
        found[name] = {"us": microseconds(call)}
        if not name.startswith(("rope", "Triton")):
            eager.takes = lambda _: False
            found[name]["through_dispatcher_us"] = microseconds(call)
            eager.takes = lambda _: True
    about = {"what": "CPU proxy: kernel launches do nothing, other operators run on the CPU; not a GPU's time"}
    about |= {"unit": "process time a call, median of rounds", "triton": triton.__version__}
    print(json.dumps(about | {"environment": environment(torch.device("cpu")), "calls": found}, indent=2))


if __name__ == "__main__":
    main()
