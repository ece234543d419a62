"""Every kernel in its variants, once, on small shapes: for `compute-sanitizer python -m benchmarks.sanitize`."""

from __future__ import annotations

import torch

import tra
from tests.ops.compare import exact_inputs, padding


def main() -> None:
    for dtype, width, options in (
        (torch.bfloat16, 64, {"score_bound": 64.0}),
        (torch.bfloat16, 64, {"score_bound": 8.0, "scale": 2**-5}),
        (torch.bfloat16, 64, {"score_bound": 8.0, "scale": 2**-5, "tolerance": 0.0}),
        (torch.bfloat16, 64, {"dropout": 0.1}),
        (torch.bfloat16, 128, {"score_bound": 8.0, "scale": 2**-6}),
        (torch.bfloat16, 128, {"score_bound": 8.0, "scale": 2**-6, "tolerance": 0.0}),
        (torch.float16, 80, {}),
        (torch.float32, 32, {}),
    ):
        for length, masked in ((257, False), (200, True), (1100, False)):  # whole walks, ranges, walks that may stop
            inputs = exact_inputs(length, heads=4, kv_heads=2, n_queries=length, width=width, dtype=dtype).on("cuda")
            mask = padding("left", 2, length).cuda() if masked else None
            out = tra.threshold_relative_attention(*inputs, key_mask=mask, impl="triton", **options)
            torch.autograd.grad(out.float().square().sum(), inputs)
            torch.cuda.synchronize()
    for dtype, width, options in (
        (torch.bfloat16, 64, {"score_bound": 8.0, "scale": 2**-5}),
        (torch.bfloat16, 64, {"score_bound": 64.0}),
        (torch.bfloat16, 128, {"score_bound": 8.0, "scale": 2**-6, "tolerance": 0.0}),
        (torch.float16, 80, {"score_bound": 8.0, "scale": 2**-6}),
        (torch.float32, 32, {"score_bound": 8.0, "scale": 2**-5}),
    ):
        for length, masked in ((30, False), (1500, True), (9001, False)):  # one piece, one phase, two phases
            inputs = exact_inputs(length, heads=4, kv_heads=2, n_queries=3, n_keys=length, width=width, dtype=dtype)
            mask = padding("left", 2, length).cuda() if masked else None
            with torch.no_grad():
                tra.threshold_relative_attention(*inputs.on("cuda"), key_mask=mask, impl="triton", **options)
            torch.cuda.synchronize()
    print("all variants ran")


if __name__ == "__main__":
    main()
