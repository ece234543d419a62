"""Each mechanism a second time: by other people's packages, or by loops over what the papers define.

An oracle takes a layer and its input and gives what the layer should: it uses the layer's weights, none of its code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from entmax import entmax15
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaConfig
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb
from x_transformers.attend import selective_attn
from x_transformers.x_transformers import AlibiPositionalBias, CoPE

Oracle = Callable[[Any, Tensor], Tensor]
Read = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]
Weigh = Callable[[Any, int, list[Tensor], Tensor | None], list[Tensor | float]]


@dataclass(frozen=True)
class Case:
    mechanism: str
    oracle: Oracle
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    rounds: bool = False
    """The oracle itself rounds to float32."""


def projected(read: Read, *, normed: bool = False, rotated: bool = False) -> Oracle:
    """`read` takes the layer, x and queries, keys and values `[B, H, T, D]`, with keys and values for every head."""

    def oracle(layer: Any, x: Tensor) -> Tensor:
        query, key, value = (
            (x @ part.weight.T).unflatten(-1, (-1, layer.head_width)).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if normed:
            query, key = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y in (query, key))
        if rotated:
            query, key = apply_rotary_pos_emb(query, key, *rotation(x, layer.head_width))
        key, value = (torch.repeat_interleave(y, query.shape[1] // y.shape[1], dim=1) for y in (key, value))
        read_by_heads = read(layer, x, query, key, value)
        return read_by_heads.transpose(1, 2).flatten(2) @ layer.o_proj.weight.T + layer.o_proj.bias

    return oracle


def rotation(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """transformers' cos and sin, `[1, T, D]`. Computed in float32."""
    theta = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(head_dim=width, rope_parameters=theta)
    return LlamaRotaryEmbedding(config)(x, torch.arange(x.shape[1])[None])


def causal_scores(query: Tensor, key: Tensor) -> Tensor:
    future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    return (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(future, -torch.inf)


def plain(layer: Any, x: Tensor) -> Tensor:
    """`torch.nn.MultiheadAttention`."""
    width, length = x.shape[-1], x.shape[1]
    module = nn.MultiheadAttention(width, layer.n_heads, batch_first=True, dtype=x.dtype)
    weights = {
        "in_proj_weight": torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]),
        "in_proj_bias": x.new_zeros(3 * width),
        "out_proj.weight": layer.o_proj.weight,
        "out_proj.bias": layer.o_proj.bias,
    }
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    out, _ = functional_call(module, weights, (x, x, x), {"attn_mask": future})
    return out


def softmax(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal_scores(query, key).softmax(-1) @ value


def alibi(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias = AlibiPositionalBias(layer.n_heads)(x.shape[1], x.shape[1])
    return (causal_scores(query, key) + bias).softmax(-1) @ value


def cope(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    width, positions = layer.embedding.shape
    content = causal_scores(query, key)
    bias = functional_call(CoPE(width, layer.n_heads, positions), {"pos_emb": layer.embedding.T}, (query, content))
    return (content + bias).softmax(-1) @ value


def log_forget(layer: Any, x: Tensor) -> Tensor:
    """`[B, T, H]`."""
    return (x @ layer.gate.linear.weight.T + layer.gate.linear.bias).sigmoid().log()


def forgetting(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla misses Triton
        from fla.ops.forgetting_attn.naive import naive_forgetting_attn
    read = naive_forgetting_attn(*(y.transpose(1, 2) for y in (query, key, value)), log_forget(layer, x))
    return read.to(x.dtype).transpose(1, 2)


def stickbreaking(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla misses Triton
        from fla.ops.stickbreaking_attn.naive import naive_stickbreaking_attn
    read, rest = naive_stickbreaking_attn(*(y.transpose(1, 2) for y in (query, key, value)))
    return read.transpose(1, 2) + rest.transpose(1, 2)[..., None] * value


def selective(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return selective_attn(causal_scores(query, key)).softmax(-1) @ value


def entmax(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return entmax15(causal_scores(query, key), dim=-1) @ value


def differential(layer: Any, x: Tensor) -> Tensor:
    """DiffLlama pairs head p with p + H/2 where ours are neighbours, and its norm has no scale: `out` takes it on."""
    config = DiffLlamaConfig(
        hidden_size=x.shape[-1],
        num_attention_heads=layer.n_heads,
        num_key_value_heads=layer.n_kv_heads,
        head_dim=layer.head_width,
        attention_bias=True,
        rms_norm_eps=1e-5,
    )
    config._attn_implementation = "eager"
    module = DiffLlamaAttention(config, layer_idx=3)
    pairs = layer.n_heads // 2
    weights: dict[str, Tensor] = {"o_proj.bias": layer.o_proj.bias}
    for name, part in (("q_proj", layer.q_proj), ("k_proj", layer.k_proj), ("v_proj", layer.v_proj)):
        by_head = part.weight.unflatten(0, (-1, layer.head_width))
        weights[f"{name}.weight"] = torch.cat([by_head[::2], by_head[1::2]]).flatten(0, 1)
        weights[f"{name}.bias"] = x.new_zeros(len(part.weight))
    weights["o_proj.weight"] = layer.o_proj.weight * layer.norm.weight.repeat(pairs)
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    weights |= dict(zip(names, layer.lambdas, strict=True))
    future = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
    out, _ = functional_call(module, weights, (x, rotation(x, layer.head_width), future))
    return out


def one_by_one(weigh: Weigh) -> Read:
    """Query by query and key by key, in scalars: `weigh` takes the layer, the head, a query's scores, and its δ."""

    def read(layer: Any, x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gates = log_forget(layer, x) if hasattr(layer, "gate") else None
        batch, heads, length, width = query.shape
        rows = []
        for b in range(batch):
            for h in range(heads):
                for i in range(length):
                    content = [query[b, h, i] @ key[b, h, j] / math.sqrt(width) for j in range(i + 1)]
                    theta, margin = getattr(layer, "threshold", 0.0), getattr(layer, "margin", 0.0)
                    cuts = {theta, theta - margin}
                    nearest = min(abs(float(score.detach()) - cut) for score in content for cut in cuts)
                    assert nearest > 1e-6, "so near the threshold, rounding decides on which side a score falls"
                    weights = weigh(layer, h, content, None if gates is None else gates[b, i, h])
                    rows.append(sum(weight * value[b, h, j] for j, weight in enumerate(weights)))
        return torch.stack(rows).unflatten(0, (batch, heads, length))

    return read


def shares(parts: list[Tensor | float]) -> list[Tensor | float]:
    total = sum(parts)
    return [part / total if total != 0 else 0.0 for part in parts]


def ssmax(layer: Any, head: int, content: list[Tensor], _: Tensor | None) -> list[Tensor | float]:
    in_sight = float(len(content))
    return shares([in_sight ** (layer.strength[head] * score) for score in content])


def tra(layer: Any, head: int, content: list[Tensor], delta: Tensor | None) -> list[Tensor | float]:
    """From the newest key to the oldest. Each has 1 + the keys counted so far as its distance."""
    assert delta is not None
    weights: list[Tensor | float] = []
    counted = 0
    for score in reversed(content):
        stays = bool(score > layer.threshold - layer.margin)
        weights.insert(0, (score + delta * (1 + counted)).exp() if stays else 0.0)
        counted += int(score > layer.threshold)
    return shares(weights)


def threshold_only(layer: Any, head: int, content: list[Tensor], _: Tensor | None) -> list[Tensor | float]:
    return shares([score.exp() if score > layer.threshold - layer.margin else 0.0 for score in content])


def distance_only(layer: Any, head: int, content: list[Tensor], delta: Tensor | None) -> list[Tensor | float]:
    assert delta is not None
    return shares([(score + delta * (len(content) - j)).exp() for j, score in enumerate(content)])


def plain_distance(layer: Any, head: int, content: list[Tensor], delta: Tensor | None) -> list[Tensor | float]:
    assert delta is not None
    n = len(content)
    cut = layer.threshold - layer.margin
    return shares([(score + delta * (n - j)).exp() if score > cut else 0.0 for j, score in enumerate(content)])


def lstm(layer: Any, x: Tensor) -> Tensor:
    cell = hidden = x.new_zeros(len(x), layer.recurrence.hidden_size)
    own = layer.recurrence
    read = []
    for t in range(x.shape[1]):
        gates = x[:, t] @ own.weight_ih_l0.T + own.bias_ih_l0 + hidden @ own.weight_hh_l0.T + own.bias_hh_l0
        enter, forget, new, leave = gates.chunk(4, dim=-1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        read.append(hidden)
    return torch.stack(read, 1) @ layer.o_proj.weight.T + layer.o_proj.bias


UNROTATED = {"rotary": False}
CASES = {
    "nope": Case("nope", plain),
    "sinusoidal": Case("sinusoidal", plain),
    "rope": Case("rope", projected(softmax, rotated=True), rounds=True),
    "rope-grouped": Case("rope", projected(softmax, rotated=True), {"n_kv_heads": 2}, rounds=True),
    "alibi": Case("alibi", projected(alibi)),
    "alibi-6-heads": Case("alibi", projected(alibi), {"d_model": 36, "n_heads": 6}),
    "alibi-float32": Case("alibi", projected(alibi), dtype=torch.float32),
    "cope": Case("cope", projected(cope)),
    "cope-clamped": Case("cope", projected(cope), {"cope_positions": 6}),
    "forgetting": Case("forgetting", projected(forgetting), rounds=True),
    "forgetting-grouped": Case("forgetting", projected(forgetting), {"n_kv_heads": 2}, rounds=True),
    "stickbreaking": Case("stickbreaking", projected(stickbreaking)),
    "selective": Case("selective", projected(selective, normed=True, rotated=True), rounds=True),
    "selective-unrotated": Case("selective", projected(selective, normed=True), UNROTATED),
    "differential": Case("differential", differential, {"layer": 3}, rounds=True),
    "differential-grouped": Case(
        "differential", differential, {"layer": 3, "n_heads": 8, "n_kv_heads": 4}, rounds=True
    ),
    "ssmax": Case("ssmax", projected(one_by_one(ssmax)), UNROTATED),
    "entmax": Case("entmax", projected(entmax, rotated=True), rounds=True),
    "entmax-unrotated": Case("entmax", projected(entmax), UNROTATED),
    "tra": Case("tra", projected(one_by_one(tra), normed=True)),
    "tra-threshold": Case("tra", projected(one_by_one(tra), normed=True), {"threshold": -0.5}),
    "tra-margin": Case("tra", projected(one_by_one(tra), normed=True), {"margin": 0.75}),
    "tra-margin-threshold": Case("tra", projected(one_by_one(tra), normed=True), {"margin": 0.5, "threshold": 0.25}),
    "tra-margin-inf": Case("tra", projected(one_by_one(tra), normed=True), {"margin": math.inf, "n_kv_heads": 2}),
    "tra-threshold-only": Case("tra-threshold-only", projected(one_by_one(threshold_only), normed=True)),
    "tra-threshold-only-margin": Case(
        "tra-threshold-only", projected(one_by_one(threshold_only), normed=True), {"margin": 0.5, "threshold": 0.25}
    ),
    "tra-distance-only": Case("tra-distance-only", projected(one_by_one(distance_only), normed=True)),
    "tra-plain-distance": Case("tra-plain-distance", projected(one_by_one(plain_distance), normed=True)),
    "tra-plain-distance-threshold": Case(
        "tra-plain-distance", projected(one_by_one(plain_distance), normed=True), {"threshold": -0.5}
    ),
    "tra-plain-distance-margin": Case(
        "tra-plain-distance", projected(one_by_one(plain_distance), normed=True), {"margin": 0.5, "threshold": 0.25}
    ),
    "tra-plain-distance-margin-inf": Case(
        "tra-plain-distance", projected(one_by_one(distance_only), normed=True), {"margin": math.inf}
    ),
    "lstm": Case("lstm", lstm),
}
