"""Perplexity by window: which tokens are scored, on what they are told, and what is made of their losses."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tra
from tra.evaluation.perplexity import (
    Losses,
    Overlap,
    WindowResult,
    evaluate_run_text,
    evaluate_text,
    pack_losses,
    spans,
    token_losses,
    unpack_losses,
    windows_that_fit,
)
from tra.runs import RunFolder, bootstrap_interval, read_rows, write_arrays
from tra.text.task import Stream

CPU = torch.device("cpu")
VOCABULARY, SEPARATOR = 320, 256
OVERLAPS: tuple[Overlap, ...] = ("none", "half")


def stream(*lengths: int, bytes_each: int = 1, words: Sequence[int] | None = None) -> Stream:
    """Documents of so many random ids."""
    chance = np.random.default_rng(0)
    parts = [np.append(SEPARATOR, chance.integers(0, 256, length)) for length in lengths]
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    table = [starts, [bytes_each * length for length in lengths], words or lengths]
    return Stream("drawn", np.concatenate(parts).astype(np.uint16), np.array(table).T, "bytes", SEPARATOR)


def decoder(mechanism: str = "tra", spread: float = 0.5) -> tra.Decoder:
    """One that is far from sure of the same thing everywhere."""
    torch.manual_seed(0)
    config = tra.DecoderConfig(VOCABULARY, d_model=32, n_layers=2, n_heads=2, mechanism=mechanism)
    model = tra.Decoder(config)
    torch.nn.init.normal_(model.embed_tokens.weight)
    torch.nn.init.normal_(model.lm_head.weight, std=spread)
    return model.eval()


@given(tokens=st.integers(2, 400), window=st.integers(1, 60), overlap=st.sampled_from(OVERLAPS))
def test_spans_score_every_token_but_the_first_once(tokens: int, window: int, overlap: Overlap) -> None:
    window = 2 * window if overlap == "half" else window
    cut = spans(tokens, window, overlap)
    assert [target for span in cut for target in range(span.scored, span.end + 1)] == list(range(1, tokens))
    for span in cut:
        assert 0 <= span.start < span.scored <= span.end
        assert span.end - span.start <= window
        told = span.scored - span.start  # tokens that the first scored one is told
        assert told == 1 if overlap == "none" or span.start == 0 else told == window // 2 + 1


def window_start(place: int, window: int, overlap: Overlap) -> int:
    """Where the window begins that scores a token: by counting on, not by cutting."""
    stride = window if overlap == "none" else window // 2
    start = 0
    while start + window < place:
        start += stride
    return start


@torch.no_grad()
def slow_losses(model: tra.Decoder, text: Stream, window: int, overlap: Overlap) -> Losses:
    """One token after another, on exactly the tokens that its window shows."""
    losses = np.full(len(text.tokens), np.nan)
    for place, token in enumerate(text.tokens.tolist()):
        if place > 0 and token != text.separator:
            start = window_start(place, window, overlap)
            shown = torch.from_numpy(text.tokens[start:place].astype(np.int64))[None]
            losses[place] = -model(shown)[0, -1].log_softmax(-1)[token]
    return losses


def error(found: Losses, exact: Losses) -> float:
    return float(np.sqrt(np.nanmean((found.astype(np.float64) - exact) ** 2)))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("mechanism", ["tra", "rope", "cope", "forgetting", "sinusoidal", "lstm"])
def test_losses_are_those_of_each_token_by_itself(mechanism: str, overlap: Overlap) -> None:
    """Error against float64 at most twice that of the slow way in float32; whole batches or row by row."""
    model, text, window = decoder(mechanism), stream(30, 0, 1, 40), 16
    exact = slow_losses(copy.deepcopy(model).double(), text, window, overlap)
    plain = slow_losses(model, text, window, overlap)
    one_rounding = float(np.finfo(np.float32).eps * np.sqrt(np.nanmean(exact**2)))
    for batch_tokens in (1, 48, 10_000):
        found = token_losses(model, text, window, overlap, batch_tokens=batch_tokens, device=CPU)
        assert np.array_equal(np.isnan(found), np.isnan(exact))
        assert error(found, exact) <= max(2 * error(plain, exact), one_rounding)


def test_the_same_tokens_at_every_window() -> None:
    """All but the separators."""
    text = stream(50, 0, 30, 20)
    results = list(evaluate_text(decoder(), text, (2, 16, 64, 102), OVERLAPS))
    assert [(result.window, result.overlap) for result, _ in results] == [
        (window, overlap) for overlap in OVERLAPS for window in (2, 16, 64, 102)
    ]
    for result, losses in results:
        assert np.array_equal(np.isnan(losses), text.tokens == SEPARATOR)
        assert (result.tokens, result.documents) == (100, 3)
    means = [result.loss for result, _ in results[:4]]
    assert len(set(means)) == 4  # what changes is what a token is told


def test_a_window_as_long_as_the_text_has_no_overlap() -> None:
    text = stream(63)
    (_, none), (_, half) = evaluate_text(decoder(), text, (62,), OVERLAPS)
    assert not np.array_equal(none, half, equal_nan=True)
    one, other = (token_losses(decoder(), text, 64, overlap, batch_tokens=1, device=CPU) for overlap in OVERLAPS)
    assert np.array_equal(one, other, equal_nan=True)


def test_units_by_hand() -> None:
    """A model that knows nothing gives every token log 320, whatever the units."""
    text = stream(40, 10, bytes_each=3, words=(15, 5))
    ((found, _),) = evaluate_text(decoder(spread=0.0), text, (16,))
    nats = 50 * math.log(VOCABULARY)
    expected = {
        "loss": nats / 50,
        "perplexity": VOCABULARY,
        "low": VOCABULARY,
        "high": VOCABULARY,
        "word_perplexity": math.exp(nats / 20),
        "byte_perplexity": math.exp(nats / 150),
        "bits_per_byte": math.log2(VOCABULARY) / 3,
    }
    row = dataclasses.asdict(found)
    # A loss is off by half a rounding of float32, which the exponent of a word multiplies by its nats.
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=nats / 20 * 2**-24)
    assert (found.text, found.tokens, found.documents) == ("drawn", 50, 2)
    assert (found.precision, found.device) == ("float32", "cpu")


def test_unknown_units_are_left_out() -> None:
    text = stream(40, 10, words=(15, -1))
    ((found, _),) = evaluate_text(decoder(), text, (16,))
    assert found.word_perplexity is None
    assert found.byte_perplexity is not None
    nothing = text._replace(documents=np.array([[0, -1, -1], [41, -1, -1]]))
    ((found, _),) = evaluate_text(decoder(), nothing, (16,))
    assert found.word_perplexity is found.byte_perplexity is found.bits_per_byte is None


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("window", [6, 16, 40])
def test_parts_sum_to_the_whole(window: int, overlap: Overlap) -> None:
    text = stream(50, 0, 33, 20)
    ((found, losses),) = evaluate_text(decoder(), text, (window,), (overlap,))
    total = float(np.nansum(losses, dtype=np.float64))
    assert found.loss == pytest.approx(total / 103)
    assert found.perplexity == pytest.approx(math.exp(total / 103))

    ends = [*text.documents[1:, 0], len(text.tokens)]
    by_hand = [losses[start:end][1:] for start, end in zip(text.documents[:, 0], ends, strict=True)]
    assert [count for _, count in found.by_document] == [50, 0, 33, 20]
    for (nats, _), part in zip(found.by_document, by_hand, strict=True):
        assert nats == pytest.approx(float(part.sum(dtype=np.float64)), abs=0.0006)  # kept to three digits

    places: dict[int, list[float]] = {}
    for target in np.flatnonzero(~np.isnan(losses)).tolist():
        place = target - window_start(target, window, overlap)
        end = min(2 ** math.ceil(math.log2(place)), window)
        places.setdefault(end, []).append(float(losses[target]))
    assert sum(count for *_, count in found.by_position) == found.tokens
    assert found.by_position[-1][0] == window
    for end, mean, count in found.by_position:
        assert count == len(places.get(end, []))
        assert (mean is None) == (count == 0)
        if mean is not None:
            assert mean == pytest.approx(sum(places[end]) / count, abs=6e-6)  # kept to five


def test_nobody_has_less_than_half_a_window_before_it() -> None:
    """With half an overlap, but for the first window."""
    (none, _), (half, _) = evaluate_text(decoder(), stream(500), (32,), OVERLAPS)
    assert [count for *_, count in none.by_position] == [16, 16, 32, 64, 128, 15 * 16 + 4]
    assert [count for *_, count in half.by_position] == [1, 1, 2, 4, 8, 16 + 468]


def documents(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of documents whose means spread by 0.5 around 3."""
    chance = np.random.default_rng(seed)
    counts = chance.integers(200, 400, count)
    return counts * chance.normal(3, 0.5, count), counts


def test_interval_is_that_of_the_documents_means() -> None:
    """For many documents of like size, 1.96 standard errors either way."""
    sums, counts = documents(400)
    low, high = bootstrap_interval(sums, counts)
    mean, error = sums.sum() / counts.sum(), (sums / counts).std() / math.sqrt(400)
    assert low < mean < high
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def test_interval_shrinks_with_more_documents() -> None:
    ends = [bootstrap_interval(*documents(count)) for count in (3, 30, 300)]
    widths = [high - low for low, high in ends]
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_interval_of_a_result() -> None:
    model = decoder()
    ((several, losses),) = evaluate_text(model, stream(20, 0, 30, 40), (16,))
    assert several.low is not None
    assert several.high is not None
    assert several.low < several.perplexity < several.high
    sums = np.array([np.nansum(part, dtype=np.float64) for part in np.split(losses, [22, 53])])
    assert np.log([several.low, several.high]) == pytest.approx(bootstrap_interval(sums, np.array([20, 30, 40])))
    ((filled, _),) = evaluate_text(model, stream(20, 0, 0), (16,))
    for single in (filled, next(evaluate_text(model, stream(90), (16,)))[0]):
        assert single.documents == 1
        assert single.low is single.high is None


@given(
    st.lists(
        st.floats(0, 20.5, width=32) | st.just(math.nan),
        min_size=1,
    )
)
def test_packed_losses_come_back_within_half_a_step(values: list[float]) -> None:
    losses = np.array(values, dtype=np.float32)
    packed = pack_losses(losses)
    found = unpack_losses(packed)
    assert packed.dtype == np.uint8
    assert found.dtype == np.float32
    assert np.array_equal(np.isnan(found), np.isnan(losses))
    seen = ~np.isnan(losses)
    off = np.abs(np.sqrt(found[seen].astype(np.float64)) - np.sqrt(losses[seen].astype(np.float64)))
    assert (off <= 0.5 / 56 + 1e-6).all()


def test_a_loss_too_large_to_pack_is_the_largest() -> None:
    found = unpack_losses(pack_losses(np.array([20.5, 30, np.inf], dtype=np.float32)))
    assert found == pytest.approx([(254 / 56) ** 2] * 3, abs=0.1)


def test_results_are_kept_as_they_come_and_once_per_key(tmp_path: Path) -> None:
    run, model, text = RunFolder(tmp_path), decoder(), stream(40, 30)

    def kept() -> list[tuple[int, str]]:
        return [(row["window"], row["overlap"]) for row in read_rows(run.perplexity_file)]

    first = evaluate_run_text(run, evaluate_text(model, text, (16, 32), OVERLAPS))
    for number in range(1, 5):
        next(first)
        assert len(kept()) == number
    list(evaluate_run_text(run, evaluate_text(model, text, (16, 8))))
    assert kept() == [(32, "none"), (16, "half"), (32, "half"), (16, "none"), (8, "none")]
    list(evaluate_run_text(run, evaluate_text(model, text._replace(name="other"), (8,))))
    list(evaluate_run_text(run, evaluate_text(model, text, (8,), precision="bfloat16")))
    rows = read_rows(run.perplexity_file)
    assert [(row["text"], row["precision"]) for row in rows[4:]] == [
        ("drawn", "float32"),
        ("other", "float32"),
        ("drawn", "bfloat16"),
    ]
    assert {field.name for field in dataclasses.fields(WindowResult)} == set(rows[0])
    assert json.loads(json.dumps(rows)) == rows
    assert not list(tmp_path.glob("*.npz"))


def test_losses_are_kept_on_request(tmp_path: Path) -> None:
    run, text = RunFolder(tmp_path), stream(40, 30)
    results = list(evaluate_text(decoder(), text, (16, 32), OVERLAPS))
    list(evaluate_run_text(run, iter(results), keep_losses=True))
    with np.load(tmp_path / "losses-drawn.npz") as arrays:
        assert list(arrays) == ["16/none", "32/none", "16/half", "32/half"]
        for result, losses in results:
            assert np.array_equal(arrays[f"{result.window}/{result.overlap}"], pack_losses(losses))


def test_losses_of_a_second_evaluation_join_the_first_s(tmp_path: Path) -> None:
    run, text = RunFolder(tmp_path), stream(40, 30)
    for window in (16, 32, 16):
        list(evaluate_run_text(run, evaluate_text(decoder(), text, (window,)), keep_losses=True))
    with np.load(tmp_path / "losses-drawn.npz") as arrays:
        assert sorted(arrays) == ["16/none", "32/none"]


def test_equal_arrays_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another day."""
    contents = []
    for now in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write_arrays(tmp_path / "a.npz", {"x": np.arange(1000), "y/z": np.ones(3)})
        contents.append((tmp_path / "a.npz").read_bytes())
    assert contents[0] == contents[1]


def test_what_the_products_may_round_is_put_back() -> None:
    """Also where not all results are asked for."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        results = evaluate_text(decoder(), stream(40), (16, 32))
        next(results)
        results.close()  # type: ignore[attr-defined]
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_progress_counts_every_token() -> None:
    said: list[tuple[str, int, int]] = []
    list(evaluate_text(decoder(), stream(99), (16,), OVERLAPS, batch_tokens=32, progress=lambda *x: said.append(x)))
    for label in ("drawn, 16", "drawn, 16, half"):
        done = [count for name, count, _ in said if name == label]
        assert done == sorted(set(done))
        assert done[-1] == 99
    assert {total for *_, total in said} == {99}


def test_default_windows_are_those_that_fit() -> None:
    assert windows_that_fit(stream(511)) == (128, 256)
    assert windows_that_fit(stream(512)) == (128, 256, 512)
    assert windows_that_fit(stream(100)) == ()
    assert windows_that_fit(stream(70_000))[-1] == 16_384


@pytest.mark.parametrize(
    ("windows", "overlaps", "message"),
    [
        ((16, 41), ("none",), "a window of 41 tokens is longer than drawn, which has 40"),
        ((15,), OVERLAPS, "even to overlap by half, got 15"),
        ((0,), ("none",), "a window must be at least 1"),
    ],
)
def test_bad_windows(windows: tuple[int, ...], overlaps: tuple[Overlap, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(evaluate_text(decoder(), stream(40), windows, overlaps))
    next(evaluate_text(decoder(), stream(40), (40, 15), ("none",)))


@pytest.mark.parametrize("wrong", [257, 319, 320])
def test_ids_that_no_text_has(wrong: int) -> None:
    """The model has some more than the tokenizer, rounded up: those too are refused."""
    text = stream(40)
    text.tokens[7] = wrong
    with pytest.raises(ValueError, match=rf"drawn holds the id {wrong}, outside of the vocabulary's 0\.\.256"):
        next(evaluate_text(decoder(), text, (16,)))
