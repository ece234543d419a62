"""How implementations are compared: exact scores, and an allowed error that plain PyTorch sets.

TRA is discontinuous at the threshold. Queries and keys from multiples of 1/4 in [-2, 2] have the same scores in any
order of summation and any dtype, ties included, so kept masks agree to the bit. The rule is that of `tra.bench.judge`:
twice the error of plain PyTorch in the same dtype, both against float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

import tra
from tra.bench.judge import errors, plain_attention, rms
from tra.ops.inputs import compute_dtype


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    log_forget: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers as leaves of another dtype."""
        dtypes = (dtype, dtype, dtype, compute_dtype(dtype))
        return Inputs(*(x.detach().to(d).requires_grad_() for x, d in zip(self, dtypes, strict=True)))

    def on(self, device: str) -> Inputs:
        return Inputs(*(x.detach().to(device).requires_grad_() for x in self))


def exact_inputs(
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    n_queries: int = 64,
    n_keys: int | None = None,
    width: int = 16,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Scores exact in any dtype; gates as at initialisation."""
    generator = torch.Generator().manual_seed(seed)
    n_keys = n_queries if n_keys is None else n_keys
    kv_heads = heads if kv_heads is None else kv_heads

    def grid(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator) / 4

    gate = torch.randn(batch, heads, n_queries, generator=generator)
    return Inputs(
        grid(batch, heads, n_queries, width),
        grid(batch, kv_heads, n_keys, width),
        torch.randn(batch, kv_heads, n_keys, value_width or width, generator=generator).to(dtype).float(),
        torch.nn.functional.logsigmoid(gate),
    ).to(dtype)


def run(inputs: Inputs, grad_out: Tensor, impl: str, **options: object) -> tuple[Tensor, ...]:
    """Output and all four gradients."""
    out = tra.threshold_relative_attention(*inputs, impl=impl, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(out.dtype))


def run_plain(inputs: Inputs, grad_out: Tensor, seen: Tensor, **options: float) -> tuple[Tensor, ...]:
    out = plain_attention(*inputs, seen, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(out.dtype))


def rounding_floor(inputs: Inputs, grad_out: Tensor, dtype: torch.dtype | None = None) -> tuple[float, ...]:
    """One rounding of a typical term of each result, in the precision of the sums or in `dtype`.

    Where plain PyTorch happens to be exact, or nearly (a single key: weight 1, gradient 0), twice its error is nothing,
    yet an implementation may round `dP - sum(P dP)` once.
    """
    query, key, value, _ = (x.detach().double() for x in inputs)
    group = query.shape[1] // key.shape[1]
    grad_score = rms(grad_out.double() @ value.repeat_interleave(group, 1).mT)
    grad_logit = grad_score * query.shape[-1] ** -0.5
    terms = (rms(value), grad_logit * rms(key), grad_logit * rms(query), rms(grad_out.double()), grad_score)
    return tuple(torch.finfo(dtype or compute_dtype(inputs.query.dtype)).eps * term for term in terms)


def assert_within_rule(
    got: tuple[Tensor, ...],
    plainly: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    floor: tuple[float, ...],
) -> None:
    """Error at most twice plain PyTorch's, for the output and every gradient."""
    names = ("output", "query", "key", "value", "log_forget")
    for name, ours, theirs, truth, least in zip(names, got, plainly, exact, floor, strict=True):
        error, allowed = errors(ours, theirs, truth, least)
        assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g}"


def causal(n_queries: int, n_keys: int) -> Tensor:
    """`[1, 1, Tq, Tk]`: queries at the end of the keys."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)[None, None]


def check(
    inputs: Inputs,
    seen: Tensor,
    impl: str,
    plain_options: dict[str, float] | None = None,
    floor: torch.dtype | None = None,
    **options: object,
) -> None:
    """Output and all gradients of an implementation by the rule; `floor` as in `rounding_floor`."""
    grad_out = torch.randn(*inputs.query.shape[:3], inputs.value.shape[3], generator=torch.Generator().manual_seed(9))
    grad_out = grad_out.to(inputs.query)
    assert_within_rule(
        run(inputs, grad_out, impl, **options),
        run_plain(inputs, grad_out, seen.to(inputs.query.device), **(plain_options or {})),
        run(inputs.to(torch.float64), grad_out, "reference", **options),
        rounding_floor(inputs, grad_out, floor),
    )


def padding(side: str, batch: int, length: int) -> Tensor:
    """`[B, T]`: a different third of each row is padding."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    for row in range(batch):
        size = length * (row + 1) // (3 * batch)
        start = {"left": 0, "right": length - size, "middle": length // 3}[side]
        mask[row, start : start + size] = False
    return mask


def contents(kind: str, seed: int, length: int, heads: int = 2, kept: float = 0.01) -> tuple[Tensor, Tensor]:
    """Queries and keys `[1, heads, T, 16]` whose scores are exact, of a kind that an early stop has to cope with."""
    query, key, _, _ = (x.detach() for x in exact_inputs(seed, batch=1, heads=heads, n_queries=length))
    generator = torch.Generator().manual_seed(seed)
    if kind == "sparse":  # few keys have a positive score
        query, key = query.abs(), -key.abs()
        lonely = torch.rand(length, generator=generator) < kept
        key[:, :, lonely] = key[:, :, lonely].abs()
    elif kind == "null rows":
        query[:, :, torch.rand(length, generator=generator) < 0.1] = 0.0
    elif kind == "far and strong":  # weak keys near, the strongest at the far end: what a bound must fear
        query, key = torch.full_like(query, 2.0), torch.full_like(key, 0.25)
        key[:, :, : length // 2] = 2.0
    return query, key


def check_checkpointing_repeats_dropout(inputs: Inputs, impl: str) -> None:
    """Check that gradients with activation checkpointing, which draws dropout again, are those without."""

    def attend(*args: Tensor) -> Tensor:
        return tra.threshold_relative_attention(*args, dropout=0.3, impl=impl)

    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        out = (
            torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False) if checkpointed else attend(*inputs)
        )
        grads.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
