"""The decoder: its size, its forms, and that decoding is the full pass in pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tra
from tra.attention import MECHANISMS
from tra.training.loss import masked_cross_entropy

MECHANISM = pytest.mark.parametrize("mechanism", list(MECHANISMS))
BLOCK = pytest.mark.parametrize("block", ["pre", "authors"])
VOCABULARY = 11


def decoder(mechanism: str, **changes: object) -> tra.Decoder:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2} | changes
    return tra.Decoder(tra.DecoderConfig(VOCABULARY, mechanism=mechanism, **sizes)).double().eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_medium_has_the_paper_s_parameters() -> None:
    with torch.device("meta"):
        model = tra.Decoder(tra.DecoderConfig.medium(vocab_size=50_257, block="authors"))
    assert sum(p.numel() for p in model.parameters()) == 72_500_800


@pytest.mark.parametrize(("size", "expected"), [("tiny", (2, 2, 128)), ("mini", (4, 4, 256)), ("medium", (8, 8, 512))])
def test_sizes(size: str, expected: tuple[int, int, int]) -> None:
    config = getattr(tra.DecoderConfig, size)(vocab_size=5, mechanism="rope")
    assert (config.n_layers, config.n_heads, config.d_model) == expected
    assert config.mechanism == "rope"


def test_initialisation_and_biases() -> None:
    torch.manual_seed(0)
    model = tra.Decoder(tra.DecoderConfig(500, gate_bias=3.0))
    assert float(model.embed_tokens.weight.detach().abs().max()) <= 0.01
    assert abs(float(model.embed_tokens.weight.detach().std()) - 0.01 / 3**0.5) < 1e-4
    assert abs(float(model.lm_head.weight.detach().std()) - 0.02) < 1e-3
    assert model.lm_head.bias is None
    attention = model.layers[0].self_attn
    assert isinstance(attention, tra.ThresholdRelativeAttention)
    assert attention.q_proj.bias is attention.k_proj.bias is attention.v_proj.bias is None
    assert attention.o_proj.bias is not None
    assert attention.gate.linear.bias.tolist() == [3.0] * 4
    normal = tra.Decoder(tra.DecoderConfig(500, embedding_init="normal"))
    assert abs(float(normal.embed_tokens.weight.detach().std()) - 0.02) < 1e-3


@pytest.mark.parametrize("block", ["pre", "authors"])
def test_block_forms_by_hand(block: str) -> None:
    model = decoder("tra", block=block, n_layers=1)
    x = model.embed_tokens(tokens(1, 9))
    layer = model.layers[0]
    normed = layer.input_layernorm(x)
    x = (normed if block == "authors" else x) + layer.self_attn(normed)
    normed = layer.post_attention_layernorm(x)
    up = layer.mlp.up_proj(normed)
    hidden = up[..., :64] * F.silu(up[..., 64:])
    x = (normed if block == "authors" else x) + layer.mlp.down_proj(hidden)
    torch.testing.assert_close(model(tokens(1, 9)), model.lm_head(model.norm(x)))


@MECHANISM
@BLOCK
def test_token_by_token_equals_the_full_pass(mechanism: str, block: str) -> None:
    model, ids = decoder(mechanism, block=block), tokens(3, 40)
    full = model(ids)
    for chunks in ([1] * 40, [17, 1, 1, 21], [40]):
        cache, pieces = model.new_cache(), []
        with torch.no_grad():
            for piece in ids.split(chunks, dim=1):
                pieces.append(model(piece, cache=cache))
        assert cache.length == 40
        torch.testing.assert_close(torch.cat(pieces, 1), full)


@MECHANISM
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(mechanism: str, side: str) -> None:
    """Three lengths in one batch, each equal to itself alone; whole, and token by token."""
    model = decoder(mechanism)
    lengths, width = [12, 7, 3], 12
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        where = {
            "left": torch.arange(width - length, width),
            "right": torch.arange(length),
            "middle": torch.cat([torch.arange(2), torch.arange(width - length + 2, width)]),
        }[side]
        ids[row, where] = tokens(1, length, seed=row)[0]
        mask[row, where] = True
    cache, pieces = model.new_cache(), []
    with torch.no_grad():
        whole = model(ids, mask)
        for t in range(width):
            pieces.append(model(ids[:, t : t + 1], mask[:, : t + 1], cache))
    stepwise = torch.cat(pieces, 1)
    for row, length in enumerate(lengths):
        alone = model(tokens(1, length, seed=row))[0]
        torch.testing.assert_close(whole[row, mask[row]], alone)
        torch.testing.assert_close(stepwise[row, mask[row]], alone)


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "lstm"])
def test_packed_documents_do_not_see_each_other(mechanism: str) -> None:
    model = decoder(mechanism)
    ids, lengths = tokens(2, 20), ([5, 9, 6], [1, 19])
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    packed = model(ids, document_ids=documents)
    for row, sizes in enumerate(lengths):
        alone = torch.cat([model(part[None])[0] for part in ids[row].split(sizes)])
        torch.testing.assert_close(packed[row], alone)
    # ids name documents, they don't order them, and an id may come back
    torch.testing.assert_close(model(ids, document_ids=documents % 2 * -7), packed)


@MECHANISM
@pytest.mark.parametrize("side", ["left", "right"])
def test_generate_equals_the_loop_without_a_cache(mechanism: str, side: str) -> None:
    model, lengths = decoder(mechanism), [6, 4]
    ids, mask = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.bool)
    prompts = [tokens(1, length, seed=5 + row)[0] for row, length in enumerate(lengths)]
    for row, prompt in enumerate(prompts):
        where = slice(6 - len(prompt), 6) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, True
    together = model.generate(ids, 8, key_mask=mask)
    for row, prompt in enumerate(prompts):
        text = prompt[None]
        for _ in range(8):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        assert together[row].tolist() == text[0, len(prompt) :].tolist()


def test_sampling_obeys_the_generator() -> None:
    model = decoder("tra")
    first, again, other = (
        model.generate(tokens(4, 3), 20, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@MECHANISM
@torch.no_grad()
def test_a_refused_token_leaves_the_cache_as_it_was(mechanism: str) -> None:
    model, ids = decoder(mechanism), tokens(2, 9)
    cache = model.new_cache()
    model(ids[:, :8], cache=cache)
    with pytest.raises(ValueError, match="batch of 2, got one of 1"):
        model(ids[:1, 8:], cache=cache)
    if mechanism != "lstm":
        with pytest.raises(ValueError, match=r"the cache holds torch.float64, got torch.float32"):
            model.float()(ids[:, 8:], cache=cache)
    assert [layer.length for layer in cache.layers] == [8, 8]
    torch.testing.assert_close(model.double()(ids[:, 8:], cache=cache), model(ids)[:, 8:], rtol=1e-5, atol=1e-5)


@MECHANISM
def test_dropout_acts_in_training_only(mechanism: str) -> None:
    model, ids = decoder(mechanism, dropout=0.2), tokens(2, 10)
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@MECHANISM
def test_bfloat16_autocast_stays_near(mechanism: str) -> None:
    """A dozen roundings of 2^-9 in a row. Without a threshold, at which a rounded score may fall on the other side."""
    model, ids = decoder(mechanism).float(), tokens(2, 30)
    for block in model.layers:
        if hasattr(block.self_attn, "threshold"):
            block.self_attn.threshold = -torch.inf
    exact = model(ids).detach()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(ids)
    assert rough.dtype == torch.bfloat16
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(error) < 12 * 2**-9


@MECHANISM
def test_gradients_reach_every_parameter(mechanism: str) -> None:
    model, ids = decoder(mechanism).train(), tokens(2, 10)
    masked_cross_entropy(model(ids), ids, torch.ones_like(ids, dtype=torch.bool)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name


def test_loss_counts_masked_positions_alone() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, 2, 3], [4, 0, 1]])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    expected = F.cross_entropy(logits[mask], targets[mask])
    torch.testing.assert_close(masked_cross_entropy(logits, targets, mask), expected)
    assert float(masked_cross_entropy(logits, targets, torch.zeros_like(mask))) == 0.0
    logits[~mask], targets[~mask] = torch.nan, -1  # whatever stands there
    torch.testing.assert_close(masked_cross_entropy(logits, targets, mask), expected)


def test_statistics_show_a_dead_head() -> None:
    model = decoder("tra")
    attention = model.layers[1].self_attn
    with torch.no_grad():  # head 0 of layer 1: its queries point away from every key
        attention.q_proj.weight[:8] = -attention.k_proj.weight[:8]
    first, second = model.statistics(tokens(2, 30))
    assert first["kept"].shape == first["null"].shape == first["log_forget"].shape == (4,)
    own = 1 / 30
    assert float(second["null"][0]) > own
    assert 0 < float(first["kept"].mean()) < 1
    assert decoder("rope").statistics(tokens(1, 4)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "ropе"}, "unknown mechanism"),
        ({"mechanism": "rop"}, "did you mean 'rope'"),
        ({"d_model": 30}, "multiple of n_heads"),
        ({"n_kv_heads": 3}, "multiple of n_kv_heads"),
        ({"n_layers": 0}, "at least 1"),
        ({"n_kv_heads": 0}, "must be at least 1"),
        ({"block": "post"}, "'pre' or 'authors'"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_bad_configs(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tra.Decoder(tra.DecoderConfig(**{"vocab_size": 5, "d_model": 32, "n_heads": 4} | change))


def test_bad_calls() -> None:
    model, ids = decoder("tra"), tokens(2, 5)
    for call, message in (
        (lambda: model(ids[0]), r"\[B, T\]"),
        (lambda: model(ids + 20), "must lie in 0..10"),
        (lambda: model(ids, torch.ones(2, 4, dtype=torch.bool)), "key_mask must be bool"),
        (lambda: model(ids, torch.ones(2, 5, dtype=torch.bool), document_ids=ids), "either key_mask or document_ids"),
        (lambda: model.generate(ids, 0), "at least 1"),
        (lambda: model.generate(ids, 1, temperature=-1.0), "temperature must be finite and at least 0"),
        (lambda: model(ids.to(torch.uint8)), "int64 or int32"),
        (lambda: decoder("sinusoidal")(ids, torch.ones(2, 4, dtype=torch.bool)), "key_mask must be bool"),
        (lambda: decoder("lstm")(ids, document_ids=ids), "one document per row"),
        (lambda: model(ids, cache=model.new_cache(), document_ids=ids), "don't go with a cache"),
        (lambda: tra.ThresholdRelativeAttention(32, 4, impl="tritn"), "did you mean 'triton'"),
        (lambda: tra.ThresholdRelativeAttention(32, 4, tolerance=-1.0), "tolerance must lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="no_grad"):
        model(ids, cache=model.new_cache())


@pytest.mark.slow
@MECHANISM
def test_compiles_as_one_graph(mechanism: str) -> None:
    """All but the LSTM, around which the compiler breaks its graph."""
    torch._dynamo.reset()
    model, ids = decoder(mechanism).float(), tokens(2, 24)
    compiled = torch.compile(model, fullgraph=mechanism != "lstm")
    torch.testing.assert_close(compiled(ids), model(ids))
    if mechanism == "lstm":
        return
    documents = torch.arange(24).expand(2, -1) // 7
    torch.testing.assert_close(compiled(ids, document_ids=documents), model(ids, document_ids=documents))
