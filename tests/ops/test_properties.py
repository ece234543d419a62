"""What must hold whatever the input: causality, irrelevance of irrelevant keys, null rows, neighbours, NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tra
from tests.ops.compare import Inputs, exact_inputs

IMPLS = pytest.mark.parametrize("impl", ["reference", "blockwise"])
seeds = st.integers(0, 2**20)
lengths = st.integers(1, 300)


def attend(inputs: Inputs | tuple[Tensor, ...], impl: str, **options: object) -> Tensor:
    return tra.threshold_relative_attention(*inputs, impl=impl, tolerance=0.0, **options).detach()


def random_rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@IMPLS
@given(seed=seeds, length=lengths, data=st.data())
def test_causality(impl: str, seed: int, length: int, data: st.DataObject) -> None:
    """Keys and values after a query don't touch it, to the bit."""
    inputs = exact_inputs(seed, batch=1, n_queries=length)
    cut = data.draw(st.integers(0, length))
    key, value = inputs.key.detach().clone(), inputs.value.detach().clone()
    key[:, :, cut:] = random_rows(seed, *key[:, :, cut:].shape)
    value[:, :, cut:] = random_rows(seed + 1, *value[:, :, cut:].shape)
    before, after = attend(inputs, impl), attend((inputs.query, key, value, inputs.log_forget), impl)
    assert torch.equal(before[:, :, :cut], after[:, :, :cut])


@IMPLS
@given(seed=seeds, length=st.integers(1, 80), extra=st.integers(1, 80), at_threshold=st.booleans())
def test_keys_at_or_below_the_threshold_change_nothing(
    impl: str, seed: int, length: int, extra: int, at_threshold: bool
) -> None:
    """The point of TRA: insert irrelevant keys anywhere, and neither weights nor distances move.

    Queries have a positive first coordinate and keys share none of the others with the distractors, so that a
    distractor's score is exactly 0 (at the threshold) or negative for every query.
    """
    query, key, value, log_forget = exact_inputs(seed, batch=1, n_queries=1, n_keys=length, dtype=torch.float64)
    query = F.pad(query.detach(), (1, 0), value=1.0)
    key = F.pad(key.detach(), (1, 0), value=0.0)
    generator = torch.Generator().manual_seed(seed)
    distractor = torch.zeros(1, 2, extra, key.shape[3], dtype=torch.float64)
    distractor[..., 0] = 0.0 if at_threshold else -torch.rand(1, 2, extra, generator=generator).double() - 0.1
    noise = torch.randn(1, 2, extra, value.shape[3], generator=generator).double()
    # Where each of the old keys goes among the new ones: a random, order-preserving insertion.
    places = torch.randperm(length + extra, generator=generator)[:length].sort().values
    others = torch.ones(length + extra, dtype=torch.bool)
    others[places] = False
    new_key = key.new_empty(1, 2, length + extra, key.shape[3])
    new_value = value.new_empty(1, 2, length + extra, value.shape[3])
    new_key[:, :, places], new_key[:, :, others] = key, distractor
    new_value[:, :, places], new_value[:, :, others] = value.detach(), noise
    short = attend((query, key, value, log_forget), impl)
    long = attend((query, new_key, new_value, log_forget), impl)
    torch.testing.assert_close(long, short, rtol=1e-13, atol=1e-13)


@IMPLS
@given(seed=seeds, length=lengths)
def test_a_row_that_keeps_nothing_is_zero_with_zero_gradient(impl: str, seed: int, length: int) -> None:
    query, key, value, log_forget = exact_inputs(seed, batch=1, n_queries=length)
    query = query.detach().abs().neg().requires_grad_()
    key = key.detach().abs().requires_grad_()  # all scores at most 0
    leaves = (query, key, value, log_forget)
    out = tra.threshold_relative_attention(*leaves, impl=impl)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
        assert torch.equal(grad, torch.zeros_like(grad))


@IMPLS
@given(seed=seeds, length=st.integers(1, 150))
def test_one_null_row_among_others(impl: str, seed: int, length: int) -> None:
    query, key, value, log_forget = exact_inputs(seed, batch=1, n_queries=length)
    row = seed % length
    query = query.detach().clone()
    query[:, :, row] = 0.0  # every score is 0: at the threshold, not above
    query.requires_grad_()
    out = tra.threshold_relative_attention(query, key, value, log_forget, impl=impl)
    grads = torch.autograd.grad(out.sum(), (query, key, value, log_forget))
    assert torch.equal(out[:, :, row], torch.zeros_like(out[:, :, row]))
    assert torch.equal(grads[0][:, :, row], torch.zeros_like(grads[0][:, :, row]))
    assert torch.equal(grads[3][:, :, row], torch.zeros_like(grads[3][:, :, row]))
    assert all(not grad.isnan().any() for grad in grads)


@IMPLS
@given(seed=seeds, length=lengths, neighbours=st.integers(1, 3))
def test_batch_neighbours_change_nothing(impl: str, seed: int, length: int, neighbours: int) -> None:
    inputs = exact_inputs(seed, batch=1 + neighbours, n_queries=length)
    alone = attend(tuple(x[:1] for x in inputs), impl)
    together = attend(inputs, impl)[:1]
    if impl == "blockwise":
        assert torch.equal(alone, together)
    else:  # the reference leaves the order of summation to the matrix library
        torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)


@given(seed=seeds, length=st.integers(1, 200), left=st.integers(0, 90), right=st.integers(0, 90))
def test_padding_changes_nothing_to_the_bit(seed: int, length: int, left: int, right: int) -> None:
    query, key, value, log_forget = (x.detach() for x in exact_inputs(seed, batch=1, n_queries=length))
    sides = (0, 0, left, right)
    padded = (
        F.pad(query, sides, value=1.0),
        F.pad(key, sides, value=torch.nan),  # what stands in a masked slot is never read
        F.pad(value, sides, value=torch.nan),
        F.pad(log_forget, (left, right), value=-0.5),
    )
    mask = F.pad(torch.ones(1, length, dtype=torch.bool), (left, right))
    alone = attend((query, key, value, log_forget), "blockwise")
    inside = attend(padded, "blockwise", key_mask=mask)[:, :, left : left + length]
    assert torch.equal(alone, inside)


@IMPLS
@pytest.mark.parametrize("which", ["query", "key", "value", "log_forget"])
def test_nan_in_nan_out(impl: str, which: str) -> None:
    inputs = exact_inputs(0, batch=1, heads=1, n_queries=40)
    poisoned = inputs._replace(**{which: getattr(inputs, which).detach().clone()})
    if which == "log_forget":
        poisoned.log_forget[0, 0, 30] = torch.nan
    else:
        getattr(poisoned, which)[0, 0, 30] = torch.nan
    out = attend(poisoned, impl)
    assert out[0, 0, 30].isnan().all()
    clean = attend(inputs, impl)
    unaffected = slice(0, 30) if which != "value" else slice(0, 0)  # 0 · NaN in P·V is NaN too
    assert torch.equal(out[:, :, unaffected], clean[:, :, unaffected])
