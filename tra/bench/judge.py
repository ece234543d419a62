"""The rule by which results are judged: at most twice the error of plain PyTorch in the same dtype, against float64.

The rule is that of flash-attention's tests. TRA is discontinuous at the threshold, so it is applied where scores are
exact: queries and keys from multiples of 1/4 have the same scores in any order of summation and any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tra.ops.inputs import compute_dtype
from tra.ops.options import AttentionOptions


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    seen: Tensor | None = None,
    scale: float | None = None,
    threshold: float = 0.0,
    margin: float = 0.0,
    wide_products: bool = True,
) -> Tensor:
    """Return what one would write without thinking of precision: S and P rounded to the dtype, sums in float32.

    Args:
        seen: `[B, 1, Tq, Tk]` bool; by default causal, with queries at the end of the keys.
        wide_products: Whether products are taken in float32. Without it they have the inputs' dtype, which is faster
            and rounds once more: a form to be timed, not to judge by.
    """
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide = compute_dtype(dtype)
    products = wide if wide_products else dtype
    if seen is None:
        n_queries, n_keys = query.shape[2], key.shape[2]
        seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).tril(n_keys - n_queries)
    key, value = (x.repeat_interleave(group, 1).to(products) for x in (key, value))
    scores = (query.to(products) @ key.mT * scale).to(dtype).to(wide)
    counted, kept = (
        seen & (scores > threshold),
        seen & (scores > AttentionOptions(1.0, threshold, margin=margin).lower_cut),
    )
    distance = counted.flip(-1).cumsum(-1).flip(-1) + ~counted
    logits = (scores + log_forget[..., None] * distance).masked_fill(~kept, -torch.inf)
    weights = torch.softmax(logits, -1).masked_fill(~kept.any(-1, keepdim=True), 0.0)
    return (weights.to(dtype).to(products) @ value).to(dtype)


def rms(error: Tensor) -> float:
    """Return the root mean square over the whole tensor: a wrong row or block shows, a single rounding doesn't."""
    return float(error.double().square().mean().sqrt())


def errors(got: Tensor, plain: Tensor, exact: Tensor, floor: float = 0.0) -> tuple[float, float]:
    """Return the error of a result, and what the rule allows: twice plain PyTorch's, or `floor` if that is more."""
    error, usual = (rms(x.double() - exact.double()) for x in (got, plain))
    return error, max(2 * usual, floor)


def error_ratio(got: Tensor, plain: Tensor, exact: Tensor) -> float:
    """Return the error over what the rule allows; above 1, or NaN, it is broken."""
    error, allowed = errors(got, plain, exact)
    if allowed == 0:
        return 0.0 if error == 0 else float("inf")
    return round(error / allowed, 3)


def require(ratios: dict[str, float], what: str) -> dict[str, float]:
    """Return the ratios. A RuntimeError if one breaks the rule."""
    if not all(ratio <= 1 for ratio in ratios.values()):
        raise RuntimeError(f"{what}, nothing is measured: {ratios}")
    return ratios
