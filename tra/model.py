"""The decoder: one implementation for training, decoding and export, whatever the mechanism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra import unknown_name
from tra.attention import MECHANISMS, Cache, LayerCache, StaticCache, ThresholdRelativeAttention
from tra.attention.shared.base import check_masks
from tra.attention.shared.cache import StaticLayerCache
from tra.attention.shared.positions import places
from tra.generation import Sampling, collect, continuation


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that shapes a decoder."""

    vocab_size: int
    """Symbols it reads and writes."""
    d_model: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Blocks of attention and MLP."""
    n_heads: int = 4
    """Query heads per layer."""
    mechanism: str = "tra"
    """A name from `tra.attention.MECHANISMS`."""
    n_kv_heads: int | None = None
    """Key and value heads; as many as query heads by default."""
    block: Literal["pre", "authors"] = "pre"
    """"pre" is x + f(norm(x)); "authors" keeps the normalised stream as residual: x = norm(x), x + f(x)."""
    qk_norm: bool | None = None
    """Normalise queries and keys; None is the mechanism's published choice."""
    rotary: bool | None = None
    """Rotate queries and keys by their place; None is the mechanism's published choice."""
    dropout: float = 0.0
    """Rate on the attention weights and on the MLP's hidden representation."""
    embedding_init: Literal["uniform", "normal"] = "uniform"
    """"uniform" is the authors' U(-0.01, 0.01), "normal" N(0, 0.02); sinusoidal has N(0, 1/√d_model), as published."""
    gate_bias: float = 0.0
    """Initial bias of the forget gate, where there is one: at 0 TRA at width 64 forgets after some 37 kept keys."""
    rope_theta: float = 500_000.0
    """Base of the rotation's wavelengths."""
    cope_positions: int = 64
    """Positions that cope has embeddings for (npos_max)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mechanism not in MECHANISMS:
            raise ValueError(unknown_name("mechanism", self.mechanism, MECHANISMS))
        if self.block not in ("pre", "authors"):
            raise ValueError(f"block must be 'pre' or 'authors', got {self.block!r}")
        if self.embedding_init not in ("uniform", "normal"):
            raise ValueError(f"embedding_init must be 'uniform' or 'normal', got {self.embedding_init!r}")

    @classmethod
    def tiny(cls, vocab_size: int, **changes: Any) -> DecoderConfig:
        """2 layers, 2 heads, width 128 (Turc et al. 2019)."""
        return cls(**{"vocab_size": vocab_size, "n_layers": 2, "n_heads": 2, "d_model": 128} | changes)

    @classmethod
    def mini(cls, vocab_size: int, **changes: Any) -> DecoderConfig:
        """4 layers, 4 heads, width 256."""
        return cls(**{"vocab_size": vocab_size, "n_layers": 4, "n_heads": 4, "d_model": 256} | changes)

    @classmethod
    def medium(cls, vocab_size: int, **changes: Any) -> DecoderConfig:
        """8 layers, 8 heads, width 512."""
        return cls(**{"vocab_size": vocab_size, "n_layers": 8, "n_heads": 8, "d_model": 512} | changes)


class MLP(nn.Module):
    """SwiGLU with biases: d -> 4d, split into a linear and a gate half, 2d -> d."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(2 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        linear, gate = self.up(x).chunk(2, dim=-1)
        return self.down(self.dropout(linear * F.silu(gate)))


class Block(nn.Module):
    """Attention, then MLP, each with its norm, around one of two residual streams. An LSTM takes the place of both."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.kind = config.block
        mechanism: Any = MECHANISMS[config.mechanism]
        own = {name: layer if name == "layer" else getattr(config, name) for name in mechanism.config_fields}
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.attention = mechanism(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            qk_norm=config.qk_norm,
            rotary=config.rotary,
            rope_theta=config.rope_theta,
            dropout=config.dropout,
            **own,
        )
        self.has_mlp = not mechanism.replaces_mlp
        if self.has_mlp:
            self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-6)
            self.mlp = MLP(config.d_model, config.dropout)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        cache: LayerCache | StaticLayerCache | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        normed = self.attention_norm(x)
        residual = normed if self.kind == "authors" else x
        x = residual + self.attention(normed, key_mask, cache, document_ids)
        if not self.has_mlp:
            return x
        normed = self.mlp_norm(x)
        residual = normed if self.kind == "authors" else x
        return residual + self.mlp(normed)


class Decoder(nn.Module):
    """A decoder-only language model. The head is untied, without bias; `sinusoidal` alone marks its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.n_layers)])
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if MECHANISMS[config.mechanism].marks_input:  # as published, since it is multiplied by √d_model
            nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        elif config.embedding_init == "uniform":
            nn.init.uniform_(self.embedding.weight, -0.01, 0.01)
        else:
            nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        cache: Cache | StaticCache | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, `[B, T]` -> `[B, T, V]`. Arguments as for `hidden`."""
        return self.head(self.hidden(tokens, key_mask, cache, document_ids))

    def hidden(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        cache: Cache | StaticCache | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """What the head reads, `[B, T]` -> `[B, T, d_model]`.

        Args:
            tokens: `[B, T]` integer ids.
            key_mask: `[B, cached + T]` bool, False at padding on either side or in between.
            cache: From `new_cache`; takes the new tokens, however many.
            document_ids: `[B, T]`: documents packed into one row, which don't see each other.
        """
        self._check(tokens)
        return self.through(self.embedding(tokens), key_mask, cache, document_ids)

    def through(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: Cache | StaticCache | None = None,
        document_ids: Tensor | None = None,
        each: Callable[..., Tensor] = lambda block, *inputs: block(*inputs),
    ) -> Tensor:
        """From embeddings `[B, T, d_model]` to what the head reads.

        Args:
            each: Calls a block with its inputs: whoever wants to checkpoint blocks, or look at what they say, can.

        The other arguments are those of `hidden`.
        """
        past = 0 if cache is None else cache.length
        check_masks(x, key_mask, past, document_ids)
        if cache is not None:
            x, key_mask = cache.begin(x, key_mask)
        mechanism = MECHANISMS[self.config.mechanism]
        if mechanism.marks_input:
            place = places(x, key_mask, past, document_ids) if cache is None else cache.layers[0].places(x, key_mask)
            x = mechanism.mark_input(x, place)
        for index, block in enumerate(self.blocks):
            x = each(block, x, key_mask, None if cache is None else cache.layers[index], document_ids)
        return self.norm(x if cache is None else cache.end(x))

    def new_cache(self, capacity: int | None = None) -> Cache | StaticCache:
        """An empty KV cache: growing, or static with room for `capacity` tokens."""
        if capacity is None:
            return Cache(self.config.n_layers)
        if not MECHANISMS[self.config.mechanism].takes_key_lengths:
            raise ValueError(f"{self.config.mechanism} can't use a static cache: decode with a growing one")
        return StaticCache(self.config.n_layers, capacity)

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        key_mask: Tensor | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        vocabulary: int | None = None,
        capacity: int | Literal["static"] | None = None,
        prefill_chunk: int | None = None,
        graph: bool | None = None,
        stream: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Continue `[B, T]` prompts -> `[B, max_new_tokens]`, or fewer columns where all rows say a stop token before.

        Args:
            key_mask: `[B, T]` bool, False at padding, which may stand anywhere: rows go on as they would alone.
            temperature: 0 takes the likeliest token; otherwise logits are divided by it, then cut by `top_k`, then by
                `top_p`, and a token is drawn from what is left.
            generator: Source of randomness, on the device of the tokens.
            top_k: Draw from the k likeliest tokens.
            top_p: Draw from the smallest set of tokens whose mass reaches it; at least one.
            stop_tokens: A row that has said one of them is finished; it keeps the token, which also fills its later
                places. When all rows are finished, generation ends.
            vocabulary: Ids below it can be said; all by default. For a head that is wider than its vocabulary.
            capacity: Room of a static cache, in tokens of the prompt (padding included) and new ones; "static" is as
                much as they need. By default the cache grows.
            prefill_chunk: Prompts are read so many tokens at a time, so that a long one takes little memory; whole by
                default.
            graph: Decode with a CUDA graph, which takes a static cache; by default where that is possible and pays.
            stream: Is given each new column `[B]` as it comes, on the device of the tokens.
        """
        self._check(tokens)
        columns = continuation(
            self,
            tokens,
            max_new_tokens,
            key_mask=key_mask,
            sampling=Sampling(temperature, top_k, top_p),
            generator=generator,
            stop_tokens=stop_tokens,
            vocabulary=vocabulary,
            capacity=capacity,
            prefill_chunk=prefill_chunk,
            graph=graph,
        )
        return collect(columns, stop_tokens, stream)

    @torch.no_grad()
    def statistics(self, tokens: Tensor) -> list[dict[str, Tensor]]:
        """Per TRA layer: kept fraction, rate of null rows and mean δ, each `[H]`. Empty for other mechanisms."""
        if not issubclass(MECHANISMS[self.config.mechanism], ThresholdRelativeAttention):
            return []
        return [layer.statistics(x) for layer, x in self.attention_inputs(tokens)]

    @torch.no_grad()
    def attention_inputs(self, tokens: Tensor) -> list[tuple[Any, Tensor]]:
        """Every layer's mechanism with the input it gets, `[B, T, d_model]`."""
        found: list[tuple[Any, Tensor]] = []

        def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.append((layer, inputs[0]))

        layers = [block.get_submodule("attention") for block in self.blocks]
        hooks = [layer.register_forward_pre_hook(look) for layer in layers]
        try:
            self.hidden(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _check(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64) or tokens.numel() == 0:
            raise ValueError(
                f"tokens must be ids [B, T] of int64 or int32, not empty; got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            lowest, highest = int(tokens.min()), int(tokens.max())
            if lowest < 0 or highest >= self.config.vocab_size:
                raise ValueError(f"token ids must lie in 0..{self.config.vocab_size - 1}, got {lowest}..{highest}")
