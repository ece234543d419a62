"""The walk as fused Triton kernels: forward and backward, registered as operators.

`_forward_kernel.py` and `_backward_kernels.py` have the kernels, `_tiles.py` their block shapes; here arguments are
prepared. Few queries go to `decode.py`. Triton is imported at the first call: who doesn't use it needn't have it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.ops import _tiles, decode
from tra.ops._cut import cut
from tra.ops._inputs import Visible, without_autocast
from tra.ops._layout import without_padding

HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDEST_HEAD = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRANSIENT_BYTES = 256 * 2**20
"""What backward may hold beside its results (a number per query row and key block, for a chunk of rows), at least."""
EARLY_ABOVE = 1024
"""Keys above which a walk is asked whether it may stop. Up to here asking costs more than what is left to read."""
TRANSIENT_SHARE = 16
"""It may hold this part of a GPU's memory: fewer chunks, fewer sums over chunks."""
LOG2_E = math.log2(math.e)


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
    if key.shape[2] <= EARLY_ABOVE and not decoding:
        tolerance = 0.0
    if decoding:
        return torch.ops.tra.decode(
            query, key, value, log_forget, first, last, key_mask, scale, threshold, score_bound, tolerance
        )
    return torch.ops.tra.fused_forward(
        query, key, value, log_forget, first, last, seed, scale, threshold, score_bound, dropout, tolerance, training
    )[0]  # fmt: skip


def _online(dtype: torch.dtype, threshold: float, score_bound: float | None) -> bool:
    """Whether the softmax needs a running maximum: without a promised bound, or with one that is too far from it.

    With the bound as fixed reference a row's sum may be as small as exp(max(threshold, -bound) - bound); in float16
    weights that small vanish earlier, and float32 loses digits to a reference far above the logits.
    """
    if score_bound is None or dtype == torch.float32:
        return True
    span = score_bound - max(threshold, -score_bound)
    return span > (20.0 if dtype == torch.float16 else 60.0)


def _steepest(dtype: torch.dtype) -> float:
    """The slope, in powers of two, beyond which a gate says nothing new where scores are bounded as `_online` asks.

    It has to exceed the span of the scores (87 powers; 29 in float16) by more than any tolerance shows, and powers up
    to it, in float16 raised by 15, must not overflow.
    """
    return 105.0 if dtype == torch.float16 else 120.0


def padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Gradients:
    """Laid out as these, but rows contiguous."""

    def alike(x: Tensor) -> Tensor:
        return torch.empty_like(
            x, memory_format=torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
        )

    return Gradients(alike(query), alike(key), alike(value), torch.empty_like(log_forget))


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _empty_out(query: Tensor, width: int) -> Tensor:
    """`[B, H, Tq, width]`, with heads beside each other in memory where the queries' are."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, length, width)


def _empty_low(query: Tensor, width: int, training: bool) -> Tensor:
    """float32 is exact enough as it is."""
    return _empty_out(query, width) if training and query.dtype != torch.float32 else query.new_empty(0)


def _shape_options(query: Tensor, value: Tensor, first: Tensor | None, dropout: float) -> dict[str, Any]:
    return {
        "D": query.shape[3],
        "DV": value.shape[3],
        "BD": padded(query.shape[3]),
        "BDV": padded(value.shape[3]),
        "RANGES": first is not None,
        "DROPOUT": dropout > 0,
        "PRECISION": "ieee",  # of float32; half precision has no other
    }


def _transient_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return TRANSIENT_BYTES
    return max(TRANSIENT_BYTES, torch.cuda.get_device_properties(device).total_memory // TRANSIENT_SHARE)


def _longest(key: Tensor) -> Tensor:
    """The largest norm of each key head, `[B, Hkv]`; in float64, as squares of small float32 numbers are 0."""
    at_once = max(1, 2**24 // (key.shape[0] * key.shape[1] * key.shape[3]))  # 128 MiB
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).amax(-1) for part in key.split(at_once, 2)]
    return torch.stack(norms).amax(0).float()


def _limit(registers: int) -> dict[str, int]:
    """Registers that a thread may have, as an option of a launch."""
    return {"maxnreg": registers} if registers and torch.version.hip is None else {}


def _drop_arguments(dropout: float) -> tuple[int, float]:
    return int(dropout * 2**32), 1 / (1 - dropout)


class Made(NamedTuple):
    """What a forward pass leaves.

    Without its low part a rounded output would be felt in the gradients: backward subtracts two numbers that it nearly
    makes equal. It is empty where gradients aren't wanted.
    """

    out: Tensor  # [B, H, Tq, Dv]
    low: Tensor  # what rounding cut off it, or empty
    reference: Tensor  # of the weights, [B, H, Tq]
    total: Tensor  # their sum, where it isn't part of the reference
    stop: Tensor  # the oldest key each row read


def empty_made(query: Tensor, value: Tensor, training: bool) -> Made:
    reference, total = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
    return Made(
        _empty_out(query, value.shape[3]),
        _empty_low(query, value.shape[3], training),
        reference,
        total,
        query.new_empty(query.shape[:3], dtype=torch.int32),
    )


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
    from tra.ops._forward_kernel import forward_kernel

    batch, heads, n_queries, width = query.shape
    kv_heads, n_keys = key.shape[1:3]
    made = empty_made(query, value, training)
    online = _online(query.dtype, threshold, score_bound)
    early = tolerance > 0
    norms = early and score_bound is None
    longest = made.reference  # not read
    exact = query.dtype == torch.float32
    unit = 1.0 if exact else LOG2_E
    bound = 0.0 if score_bound is None else score_bound * unit
    if norms:
        longest = _longest(key)
        bound = scale * unit * (1 + (width + 16) * 2.0**-23)  # a computed product exceeds the norms' by D roundings
    q, k, v = (_rows_contiguous(x) for x in (query, key, value))
    options = _shape_options(query, value, first, dropout) | {
        "ONLINE": online,
        "NORMS": norms,
        "EARLY": early,
        "EXACT": exact,
        "KEEP_LOW": training and not exact,
        "SHIFT": 15.0 if query.dtype == torch.float16 else 0.0,
        "STEEPEST": _steepest(query.dtype),
    }

    def launch(tile: _tiles.Forward) -> None:
        blocks = -(-n_queries // tile.rows)
        forward_kernel[(blocks * batch * heads,)](
            q, k, v, log_forget, first, last, longest, seed, *made,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_forget.stride(), *made.out.stride()[:3],
            n_queries, n_keys, heads, heads // kv_heads, scale * unit, cut(scale, threshold), bound,
            math.log(tolerance) * unit if early else 0.0, *_drop_arguments(dropout),
            **options, BM=tile.rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            **_limit(tile.registers),
        )  # fmt: skip

    tiles = _tiles.candidates(_tiles.FORWARD, options["BD"], options["BDV"], q.element_size(), q.device)
    with on(q.device):
        _tiles.run((q.device, query.dtype, *options.values()), n_keys, tiles, launch)
    return tuple(made)  # type: ignore[return-value]


@_forward.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(empty_made(query, value, training=rest[9]))


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    forget: Tensor


def run_backward(
    grads: Gradients,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    made: Made,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    early: bool,
    factors: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Into `grads`, by two kernels over chunks of query rows: what one leaves for the other stays within bounds.

    With `factors` `[B, H, Tq]` and `[B, Hkv, Tk]` queries and keys came from a norm that multiplied rows by these, and
    log_forget from log σ: gradients are those of what went in.
    """
    from tra.ops._backward_kernels import key_gradient_kernel, query_gradient_kernel

    batch, heads, n_queries, _ = query.shape
    kv_heads, n_keys = key.shape[1:3]
    q, k, v, g = (_rows_contiguous(x) for x in (query, key, value, grad_out))
    out, low, reference, total, stop = made
    inner, slopes = (torch.empty_like(reference) for _ in range(2))
    exact = query.dtype == torch.float32
    query_factor, key_factor = factors or (None, None)
    if low.numel() == 0 and not exact:  # whoever called didn't say that gradients are wanted
        low = torch.zeros_like(out)
    online = _online(query.dtype, threshold, score_bound)
    options = _shape_options(query, value, first, dropout) | {"ONLINE": online, "EXACT": exact}
    numbers = (scale, scale * (1.0 if exact else LOG2_E), cut(scale, threshold), *_drop_arguments(dropout))

    def launch(tile: _tiles.Backward) -> None:
        n_blocks = -(-n_keys // tile.keys)
        rows = max(1, _transient_bytes(q.device) // (4 * batch * heads * n_blocks * tile.rows)) * tile.rows
        once = rows >= n_queries
        grad_k, grad_v = (
            (grads.key, grads.value)
            if once
            else (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (grads.key, grads.value))
        )
        for chunk in range(0, n_queries, rows):
            blocks = -(-min(rows, n_queries - chunk) // tile.rows)
            n_rows = blocks * tile.rows
            # Keys beyond the chunk's last query: plainly causal rows don't see them, nobody has to visit them.
            seen = n_keys if once or first is not None else min(n_keys, n_keys - n_queries + chunk + n_rows)
            seen = -(-seen // tile.keys)
            offsets = torch.empty(batch * heads * n_blocks * n_rows, dtype=torch.float32, device=q.device)
            span = torch.empty(batch * heads * blocks * 2, dtype=torch.int32, device=q.device)
            sizes = (chunk, n_rows, n_blocks, n_queries, n_keys, heads, heads // kv_heads)
            query_gradient_kernel[(blocks * batch * heads,)](
                q, k, v, log_forget, first, last, seed, out, low, g, reference, total, stop, query_factor,
                grads.query, grads.forget, inner, slopes, offsets, span,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_forget.stride(), *out.stride()[:3],
                *g.stride()[:3], *grads.query.stride()[:3], *grads.forget.stride(), *sizes, *numbers,
                **options, EARLY=early, BEFORE=factors is not None, STEEPEST=_steepest(query.dtype),
                BM=tile.rows, BN=tile.query_keys, COARSER=tile.keys // tile.query_keys,
                num_warps=tile.query_warps, num_stages=tile.query_stages, **_limit(tile.query_registers),
            )  # fmt: skip
            key_gradient_kernel[(seen * batch * kv_heads,)](
                q, k, v, first, last, seed, g, total, key_factor, grad_k, grad_v, inner, slopes, offsets, span,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3],
                *grad_k.stride()[:3], *grad_v.stride()[:3], seen, *sizes, *numbers,
                **options, SKIP=early or first is not None, ACCUMULATE=not once,
                BEFORE=once and factors is not None,
                RATIO=tile.rows // tile.key_rows, EVEN=n_queries % tile.rows == 0,
                BM=tile.key_rows, BN=tile.keys, num_warps=tile.key_warps, num_stages=tile.key_stages,
            )  # fmt: skip
        if not once:
            grads.key.copy_(grad_k if key_factor is None else _before_norm(grad_k, k, key_factor))
            grads.value.copy_(grad_v)

    short = early or n_keys <= EARLY_ABOVE
    table = _tiles.BACKWARD_SHORT if short else _tiles.BACKWARD
    tiles = _tiles.candidates(table, options["BD"], options["BDV"], q.element_size(), q.device)
    with on(q.device):
        _tiles.run((q.device, query.dtype, early, short, *options.values()), n_keys, tiles, launch)


def _before_norm(grad: Tensor, normalised: Tensor, factor: Tensor) -> Tensor:
    """As the kernels' of that name."""
    return (grad - normalised * (grad * normalised).mean(-1, keepdim=True)) * factor[..., None]


@torch.library.custom_op("tra::fused_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    low: Tensor,
    reference: Tensor,
    total: Tensor,
    stop: Tensor,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `Gradients`."""
    grads = _empty_gradients(query, key, value, log_forget)
    run_backward(
        grads, grad_out, query, key, value, log_forget, first, last, seed, Made(out, low, reference, total, stop),
        scale, threshold, score_bound, dropout, early,
    )  # fmt: skip
    return tuple(grads)  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, query, key, value, log_forget, *_rest):  # type: ignore[no-untyped-def]
    return tuple(_empty_gradients(query, key, value, log_forget))


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
