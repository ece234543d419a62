"""The decoder: one implementation of training, decoding and export for every mechanism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra import unknown_name
from tra.attention import (
    MECHANISMS,
    Cache,
    LayerCache,
    Mechanism,
    StaticCache,
    ThresholdRelativeAttention,
)
from tra.attention.shared.cache import PackedLayer, PackedRows
from tra.attention.shared.inputs import check_masks
from tra.attention.shared.paged_cache import PagedRows
from tra.attention.shared.positions import positions
from tra.generation import Sampling, collect, continuation
from tra.ops.context.parts import SequenceParts

NumberOrInfinity = Annotated[float, "may be infinite"]
"""Type of a setting that may be infinite. JSON files have the string "inf" for it."""


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that shapes a decoder."""

    vocab_size: int
    """Number of symbols it reads and writes."""
    d_model: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Blocks of attention and MLP."""
    n_heads: int = 4
    """Query heads per layer."""
    mechanism: str = "tra"
    """A name from `tra.attention.MECHANISMS` or an installed package, or FILE.py:NAME of an imported file."""
    n_kv_heads: int | None = None
    """Key and value heads; as many as query heads by default."""
    block: Literal["pre", "authors"] = "pre"
    """"pre" is x + f(norm(x)); "authors" keeps the normalised stream as residual: x = norm(x), x + f(x)."""
    qk_norm: bool | None = None
    """Normalise queries and keys; None is the mechanism's published choice."""
    rotary: bool | None = None
    """Rotate queries and keys by their position; None is the mechanism's published choice."""
    dropout: float = 0.0
    """Rate on the attention weights and on the MLP's hidden representation."""
    embedding_init: Literal["uniform", "normal"] = "uniform"
    """"uniform" is the authors' U(-0.01, 0.01), "normal" N(0, 0.02); sinusoidal has N(0, 1/√d_model), as published."""
    gate_bias: float = 0.0
    """Initial bias of the forget gate, if any: at 0, TRA of width 64 forgets after some 37 kept keys."""
    threshold: float = 0.0
    """TRA: a key counts as distance when its scaled score is above it."""
    margin: NumberOrInfinity = 0.0
    """TRA: a key stays in the softmax when its score is above threshold - margin. 0 is the paper's TRA, and at infinity
    every key stays."""
    rope_theta: float = 500_000.0
    """Base of the rotation's wavelengths."""
    cope_positions: int = 64
    """Positions that cope has embeddings for (npos_max)."""
    fuse_projections: bool = True
    """Multiply by the weights of projections in training where that is faster, see `Attention`. False for adapters."""
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the mechanism's constructor that have no field here: settings of your own mechanism."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mechanism not in MECHANISMS:
            raise ValueError(unknown_name("mechanism", self.mechanism, MECHANISMS))
        mechanism = MECHANISMS[self.mechanism]
        if self.block not in ("pre", "authors"):
            raise ValueError(f"block must be 'pre' or 'authors', got {self.block!r}")
        if self.embedding_init not in ("uniform", "normal"):
            raise ValueError(f"embedding_init must be 'uniform' or 'normal', got {self.embedding_init!r}")
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {self.threshold}")
        if not self.margin >= 0:
            raise ValueError(f"margin must be at least 0, got {self.margin}")
        for name in ("threshold", "margin"):
            if getattr(self, name) != 0 and name not in mechanism.config_fields:
                raise ValueError(f"{self.mechanism} has no {name}: leave it at 0, got {getattr(self, name)}")
        self._check_arguments(mechanism)

    def _check_arguments(self, mechanism: type[Mechanism]) -> None:
        own = mechanism.own_arguments()
        for name in self.arguments:
            if not own:
                raise ValueError(f"{self.mechanism} has no arguments of its own, got {name!r}")
            if name not in own:
                raise ValueError(unknown_name(f"argument of {self.mechanism}", name, own))
        missing = [name for name, one in own.items() if one.default is one.empty and name not in self.arguments]
        if missing:
            raise ValueError(f"{self.mechanism} needs its argument {missing[0]}: give model.arguments.{missing[0]}")

    @classmethod
    def tiny(cls, vocab_size: int, **changes: Any) -> DecoderConfig:
        """Return a config of 2 layers, 2 heads, width 128 (Turc et al. 2019)."""
        return cls(**{"vocab_size": vocab_size, "n_layers": 2, "n_heads": 2, "d_model": 128} | changes)

    @classmethod
    def mini(cls, vocab_size: int, **changes: Any) -> DecoderConfig:
        """Return a config of 4 layers, 4 heads, width 256."""
        return cls(**{"vocab_size": vocab_size, "n_layers": 4, "n_heads": 4, "d_model": 256} | changes)

    @classmethod
    def medium(cls, vocab_size: int, **changes: Any) -> DecoderConfig:
        """Return a config of 8 layers, 8 heads, width 512."""
        return cls(**{"vocab_size": vocab_size, "n_layers": 8, "n_heads": 8, "d_model": 512} | changes)


class MLP(nn.Module):
    """SwiGLU with biases: d -> 4d, split into a linear and a gate half, 2d -> d."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, 4 * d_model)
        self.down_proj = nn.Linear(2 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        linear, gate = self.up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.dropout(linear * F.silu(gate)))


class Block(nn.Module):
    """Attention, then MLP, each with its norm, around one of two residual streams. An LSTM replaces both."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.normed_residual = config.block == "authors"
        mechanism: Any = MECHANISMS[config.mechanism]
        own_options = {name: layer if name == "layer" else getattr(config, name) for name in mechanism.config_fields}
        self.input_layernorm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.self_attn = mechanism(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            qk_norm=config.qk_norm,
            rotary=config.rotary,
            rope_theta=config.rope_theta,
            dropout=config.dropout,
            fuse_projections=config.fuse_projections,
            **own_options,
            **config.arguments,
        )
        self.has_mlp = not mechanism.replaces_mlp
        if self.has_mlp:
            self.post_attention_layernorm = nn.RMSNorm(config.d_model, eps=1e-6)
            self.mlp = MLP(config.d_model, config.dropout)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        cache: LayerCache | PackedLayer | None,
        document_ids: Tensor | None,
        with_map: bool = False,
        parts: SequenceParts | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the new residual stream, and the attention weights `[B, H, Tq, Tk]` if asked for."""
        normed = self.input_layernorm(x)
        residual = normed if self.normed_residual else x
        weights = None
        if with_map:
            attended, weights = self.self_attn(normed, key_mask, cache, document_ids, with_map)
        elif parts is not None:
            attended = self.self_attn(normed, key_mask, cache, document_ids, parts=parts)
        else:
            attended = self.self_attn(normed, key_mask, cache, document_ids)
        x = residual + attended
        if self.has_mlp:
            normed = self.post_attention_layernorm(x)
            residual = normed if self.normed_residual else x
            x = residual + self.mlp(normed)
        return x if weights is None else (x, weights)


class Decoder(nn.Module):
    """A decoder-only language model. Its head is not tied to its embeddings and has no bias."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.n_layers)])
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if MECHANISMS[config.mechanism].marks_input:  # as published, since it is multiplied by √d_model
            nn.init.normal_(self.embed_tokens.weight, std=config.d_model**-0.5)
        elif config.embedding_init == "uniform":
            nn.init.uniform_(self.embed_tokens.weight, -0.01, 0.01)
        else:
            nn.init.normal_(self.embed_tokens.weight, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        cache: Cache | PackedRows | None = None,
        document_ids: Tensor | None = None,
        parts: SequenceParts | None = None,
    ) -> Tensor:
        """Return logits of the next token, `[B, T]` -> `[B, T, V]`. Arguments as for `hidden`."""
        return self.lm_head(self.hidden(tokens, key_mask, cache, document_ids, parts=parts))

    def hidden(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        cache: Cache | PackedRows | None = None,
        document_ids: Tensor | None = None,
        *,
        parts: SequenceParts | None = None,
        call_layer: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, which the head reads: `[B, T]` -> `[B, T, d_model]`.

        Args:
            tokens: `[B, T]` integer ids.
            key_mask: `[B, cached + T]` bool, False at padding on either side or in between.
            cache: From `new_cache`, or a `BoundedCache`; the new tokens are added.
            document_ids: `[B, T]`: tokens see only their own document, which ends where the id changes.
            parts: How processes share the sequence, of which tokens, `key_mask` and `document_ids` are this one's part.
            call_layer: Calls a layer with its inputs, as to checkpoint activations.
        """
        check_tokens(tokens, self.config.vocab_size)
        x = self.embed_tokens(tokens)
        if parts is not None:
            if not MECHANISMS[self.config.mechanism].takes_parts:
                raise ValueError(f"{self.config.mechanism} can't attend to a sequence that processes share: use tra")
            if document_ids is not None:
                parts, document_ids = parts.with_documents(document_ids), None
            call_layer = functools.partial(_call_with_parts, parts, call_layer)
        return run_layers(x, self.layers, self.norm, key_mask, cache, document_ids, call_layer)

    def new_cache(self, capacity: int | None = None) -> Cache | StaticCache:
        """Return an empty KV cache: growing, or static with room for `capacity` tokens."""
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
        cache: Cache | PackedRows | None = None,
        prefill_chunk: int | None = None,
        graph: bool | None = None,
        stream: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Continue prompts `[B, T]` -> `[B, max_new_tokens]`, or fewer columns if all rows reach a stop token before.

        Args:
            key_mask: `[B, T]` bool, False at padding, which may stand anywhere and changes no result.
            temperature: 0 takes the likeliest token; otherwise logits are divided by it and limited by `top_k`, then
                by `top_p`, and a token is drawn from the rest.
            generator: Source of randomness, on the device of the tokens.
            top_k: Draw from the k likeliest tokens.
            top_p: Draw from the smallest set of tokens whose mass reaches it; at least one.
            stop_tokens: Tokens that finish a row, which then repeats its stop token. Generation ends when all rows are
                finished.
            vocabulary: Only ids below it are generated, for a head that is wider than the vocabulary; all by default.
            capacity: Tokens that a static cache has room for: those of the prompt (padding included) and new ones.
                "static" is as many as needed. By default the cache grows.
            cache: An empty cache to use instead: with a `BoundedCache`, memory doesn't grow with the text.
            prefill_chunk: Tokens of the prompts that are read at a time, to save memory. All by default; with a bounded
                cache, as many as its `chunk`.
            graph: Decode with a CUDA graph, which needs a static or bounded cache; by default if possible and faster.
            stream: Called with each new column `[B]`, on the device of the tokens.
        """
        check_tokens(tokens, self.config.vocab_size)
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
            cache=cache,
            prefill_chunk=prefill_chunk,
            graph=graph,
        )
        return collect(columns, stop_tokens, stream)

    @torch.no_grad()
    def statistics(self, tokens: Tensor) -> list[dict[str, Tensor]]:
        """Return `ThresholdRelativeAttention.statistics` of every layer, `[H]` each; nothing for other mechanisms.

        They are computed while the layer runs, because FSDP gathers a layer's weights only for that time.
        """
        found: list[dict[str, Tensor]] = []
        if issubclass(MECHANISMS[self.config.mechanism], ThresholdRelativeAttention):
            self._visit_attention(tokens, lambda mechanism, x: found.append(mechanism.statistics(x)))
        return found

    @torch.no_grad()
    def attention_inputs(self, tokens: Tensor) -> list[tuple[Any, Tensor]]:
        """Return every layer's mechanism with its input, `[B, T, d_model]`."""
        found: list[tuple[Any, Tensor]] = []
        self._visit_attention(tokens, lambda mechanism, x: found.append((mechanism, x)))
        return found

    def _visit_attention(self, tokens: Tensor, visit: Callable[[Any, Tensor], None]) -> None:
        """Call `visit` with every layer's mechanism and its input, before it runs."""

        def hook(mechanism: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            visit(mechanism, inputs[0])

        hooks = [block.get_submodule("self_attn").register_forward_pre_hook(hook) for block in self.layers]
        try:
            self.hidden(tokens)
        finally:
            for handle in hooks:
                handle.remove()


def run_layers(
    x: Tensor,
    layers: Iterable[nn.Module],
    norm: nn.Module,
    key_mask: Tensor | None = None,
    cache: Any = None,
    document_ids: Tensor | None = None,
    call_layer: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return hidden states of embeddings x `[B, T, d_model]`, after all layers and the last norm.

    Args:
        layers: Each a `Block`.
        cache: A `Cache`, or an object with its methods.
        call_layer: Calls a layer with its inputs; for checkpointing, or to record inputs.

    The other arguments are those of `Decoder.hidden`.
    """
    layers = list(layers)
    mechanism: Any = layers[0].self_attn
    if isinstance(cache, PagedRows) and not mechanism.takes_pages:
        raise ValueError(
            f"{type(mechanism).__name__} can't use keys in pages: bounded caches and serving need tra or rope"
        )
    past = 0 if cache is None else cache.length
    if key_mask is not None or document_ids is not None:
        check_masks(x, key_mask, past, document_ids)
    if cache is not None:
        x, key_mask = cache.begin(x, key_mask)
    if mechanism.marks_input:
        if cache is None:
            x = mechanism.mark_input(x, positions(x, key_mask, past, document_ids))
        else:
            x = mechanism.mark_input(x, cache.layers[0].positions(x, key_mask))
    for index, layer in enumerate(layers):
        inputs = (x, key_mask, None if cache is None else cache.layers[index], document_ids)
        x = layer(*inputs) if call_layer is None else call_layer(layer, *inputs)
    return norm(x if cache is None else cache.end(x))


def _call_with_parts(
    parts: SequenceParts, call_layer: Callable[..., Tensor] | None, layer: nn.Module, *inputs: Any
) -> Tensor:
    """Return a layer's output for a process's part of a sequence."""
    part_of_layer = functools.partial(layer, parts=parts)
    return part_of_layer(*inputs) if call_layer is None else call_layer(part_of_layer, *inputs)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise a ValueError if tokens are not ids `[B, T]`. Their values are checked on a CPU, where that is cheap."""
    if tokens.ndim != 2 or tokens.dtype not in (torch.int32, torch.int64) or tokens.numel() == 0:
        raise ValueError(
            f"tokens must be ids [B, T] of int64 or int32, not empty; got {tokens.dtype} {tuple(tokens.shape)}"
        )
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(f"token ids must lie in 0..{vocab_size - 1}, got {lowest}..{highest}")
