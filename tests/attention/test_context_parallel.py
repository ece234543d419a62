"""The layer and the decoder on a sequence that several ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tests.ops.context_cases import SEGMENT
from tests.ops.thread_ranks import ThreadTransport, run_ranks
from tests.slow import slow
from tra.ops import SequenceParts
from tra.ops.context import schedule
from tra.training.loss import masked_cross_entropy


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SMALLEST_SEGMENT", SEGMENT)


def gradients(model: tra.Decoder, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("mechanism", ["tra", *slow("tra-threshold-only")])
@pytest.mark.parametrize("margin", [2.0, *slow(0.0)])
def test_a_decoder_has_the_logits_and_the_gradients_of_one_process(mechanism: str, margin: float) -> None:
    """In float64, where no score falls on another side of the threshold. Each rank's loss is its tokens'."""
    torch.manual_seed(0)
    config = tra.DecoderConfig(
        19, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, mechanism=mechanism, margin=margin, embedding_init="normal"
    )
    model = tra.Decoder(config).double()
    tokens, targets = torch.randint(19, (2, 2, 75))
    key_mask = torch.ones(2, 75, dtype=torch.bool)
    key_mask[1, :20] = False
    scored = torch.rand(2, 75) < 0.6
    expected = model(tokens, key_mask)
    expected_gradients = gradients(model, masked_cross_entropy(expected, targets, scored, scored.sum()))

    def work(transport: ThreadTransport) -> tuple[Tensor, list[Tensor]]:
        parts = SequenceParts(75, transport)
        own = [parts.take(x, 1) for x in (tokens, key_mask, targets, scored)]
        logits = model(own[0], own[1], parts=parts)
        loss = masked_cross_entropy(logits, own[2], own[3], scored.sum())
        return parts.join(logits, 1), gradients(model, loss)

    results = run_ranks(3, work)
    for logits, _ in results:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-9)
    for expected_gradient, *found in zip(expected_gradients, *(grads for _, grads in results), strict=True):
        torch.testing.assert_close(sum(found), expected_gradient.double(), rtol=1e-5, atol=1e-8)


class Alone:
    rank, ranks = 0, 1


def test_what_cannot_be_shared_is_an_error() -> None:
    parts = SequenceParts(8, Alone())  # type: ignore[arg-type]
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="rope can't attend to a sequence that processes share: use tra"):
        tra.Decoder(tra.DecoderConfig(4, d_model=8, n_layers=1, n_heads=2, mechanism="rope"))(tokens, parts=parts)
    model = tra.Decoder(tra.DecoderConfig(4, d_model=8, n_layers=1, n_heads=2, dropout=0.5))
    with pytest.raises(ValueError, match=r"has no dropout, got 0\.5: set it to 0"):
        model(tokens, parts=parts)
    with pytest.raises(ValueError, match="goes neither with a cache nor with document_ids"):
        model(tokens, document_ids=tokens, parts=parts)
    with pytest.raises(ValueError, match="goes neither with a cache nor with document_ids"):
        model.eval()(tokens, cache=model.new_cache(), parts=parts)
    layer = tra.ThresholdRelativeAttention(8, 2, rotary=True)
    with pytest.raises(ValueError, match="rotary=True needs positions"):
        layer(torch.zeros(1, 8, 8), parts=parts)
    with pytest.raises(ValueError, match="with_map needs the whole sequence"):
        layer(torch.zeros(1, 8, 8), with_map=True, parts=parts)
