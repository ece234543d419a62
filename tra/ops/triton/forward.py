"""The walk as a fused Triton kernel, which is in `_forward_kernel.py`, registered as an operator.

`fused_backward.py` has its gradients, `_tiles.py` the blocks' shapes. Few queries go to `decode.py`. Triton is imported
at the first call: who doesn't use it needn't have it.
"""

from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor

from tra.ops.block_layout import without_padding
from tra.ops.inputs import Visible, without_autocast
from tra.ops.raw_threshold import cut
from tra.ops.triton import backward as fused_backward  # noqa: F401 the latter registers its operator
from tra.ops.triton import block_shapes as _tiles
from tra.ops.triton import decode
from tra.ops.triton import launch as _launch
from tra.ops.triton.launch import (
    LOG2_E,
    drop_arguments,
    empty_made,
    limit,
    on,
    online,
    rows_contiguous,
    shape_options,
    steepest,
    together,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDEST_HEAD = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why the kernels can't take heads of a width, at most, in a dtype on a device; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not (device.type in ("cpu", "meta") and _interpreting()):
        return f"the tensors are on {device}: it needs a CUDA device, or TRITON_INTERPRET=1 for tests on a CPU"
    if dtype == torch.bfloat16 and device.type != "cuda":
        return "Triton's interpreter has no products of bfloat16"
    if dtype not in DTYPES:
        return f"it computes in float16, bfloat16 and float32, not in {dtype}"
    if width > WIDEST_HEAD:
        return f"heads are at most {WIDEST_HEAD} wide, got {width}"
    return None


def is_the_best_choice(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether "auto" takes the kernels: on NVIDIA GPUs since Ampere. AMD's are untested, so only by name."""
    if device.type != "cuda" or torch.version.hip is not None or why_not(device, dtype, width):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible | None,
    *,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    seed: Tensor | None,
    tolerance: float,
) -> Tensor:
    """Same result as `reference` up to rounding and `tolerance`. `visible` is None where all is plainly causal."""
    reason = why_not(query.device, query.dtype, max(query.shape[3], value.shape[3]))
    if reason is not None:
        raise RuntimeError(f"impl='triton' is not available: {reason}")
    inputs = (query, key, value, log_forget)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    decoding = not training and dropout == 0 and decode.takes(query, key, value)
    first, last, key_mask = visible or (None, None, None)
    if first is not None and last is not None:
        if key_mask is not None and not decoding:
            key, value, first, last = without_padding(key, value, first, last, key_mask)
        last = last.clamp(max=key.shape[2] - 1)  # lengths on a GPU aren't checked, and must not lead astray
        first, last = (x.to(torch.int32).contiguous() for x in (first, last))
    if scale < 0:
        query, scale = -query, -scale
    if key.shape[2] <= _launch.EARLY_ABOVE and not decoding:
        tolerance = 0.0
    if decoding:
        return torch.ops.tra.decode(
            query, key, value, log_forget, first, last, key_mask, scale, threshold, score_bound, tolerance
        )
    return torch.ops.tra.fused_forward(
        query, key, value, log_forget, first, last, seed, scale, threshold, score_bound, dropout, tolerance, training
    )[0]  # fmt: skip


def _longest(key: Tensor) -> Tensor:
    """The largest norm of each key head, `[B, Hkv]`; in float64, as squares of small float32 numbers are 0."""
    at_once = max(1, 2**24 // (key.shape[0] * key.shape[1] * key.shape[3]))  # 128 MiB
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).amax(-1) for part in key.split(at_once, 2)]
    return torch.stack(norms).amax(0).float()


@torch.library.custom_op("tra::fused_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    tolerance: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `Made`."""
    from tra.ops.triton.forward_kernel import forward_kernel

    batch, heads, n_queries, width = query.shape
    kv_heads, n_keys = key.shape[1:3]
    made = empty_made(query, value, training)
    early = tolerance > 0
    norms = early and score_bound is None
    longest = made.reference  # not read
    exact = query.dtype == torch.float32
    unit = 1.0 if exact else LOG2_E
    bound = 0.0 if score_bound is None else score_bound * unit
    if norms:
        longest = _longest(key)
        bound = scale * unit * (1 + (width + 16) * 2.0**-23)  # a computed product exceeds the norms' by D roundings
    q, k, v = (rows_contiguous(x) for x in (query, key, value))
    options = shape_options(query, value, first, dropout) | {
        "ONLINE": online(query.dtype, threshold, score_bound),
        "NORMS": norms,
        "EARLY": early,
        "EXACT": exact,
        "KEEP_LOW": training and not exact,
        "SHIFT": 15.0 if query.dtype == torch.float16 else 0.0,
        "STEEPEST": steepest(query.dtype),
    }

    def launch(tile: _tiles.Forward) -> None:
        blocks = -(-n_queries // tile.rows)
        forward_kernel[(blocks * batch * heads,)](
            q, k, v, log_forget, first, last, longest, seed, *made,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_forget.stride(), *made.out.stride()[:3],
            together(batch * heads, blocks, early, least=16),
            n_queries, n_keys, heads, heads // kv_heads, scale * unit, cut(scale, threshold), bound,
            math.log(tolerance) * unit if early else 0.0, *drop_arguments(dropout),
            **options, BM=tile.rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            **limit(tile.registers),
        )  # fmt: skip

    tiles = _tiles.candidates(_tiles.FORWARD, options["BD"], options["BDV"], q.element_size(), q.device)
    with on(q.device):
        _tiles.run((q.device, query.dtype, *options.values()), n_keys, tiles, launch)
    return tuple(made)  # type: ignore[return-value]


@_forward.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(empty_made(query, value, training=rest[9]))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, log_forget, first, last, seed, scale, threshold, score_bound, dropout, tolerance = inputs[:12]
    ctx.set_materialize_grads(False)  # of what nobody but backward sees
    ctx.save_for_backward(query, key, value, log_forget, first, last, seed, *output)
    ctx.options = (scale, threshold, score_bound, dropout, tolerance > 0)


def _autograd(ctx, grad_out, *_grads_of_the_rest):  # type: ignore[no-untyped-def]
    with without_autocast(grad_out.device):
        grads = torch.ops.tra.fused_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * 9


_forward.register_autograd(_autograd, setup_context=_setup_context)
