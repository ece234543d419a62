"""The decoder with transformers' signature: masks, documents, caches, losses, checkpointing, saving and loading."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tra.attention import MECHANISMS, Mechanism
from tra.hub._bounded_cache import TRABoundedCache, run_in_chunks
from tra.hub._cache import adapt, is_static, real_keys
from tra.hub._continuous_batching import PackedRequests, check_support
from tra.hub._packing import check_not_packed, document_ids
from tra.hub.config import TRAConfig
from tra.model import Block, Decoder, check_tokens, run_layers
from tra.runs import RENAMED_PARAMETERS

MAX_MAP_TOKENS = 4096
"""Largest number of tokens for which attention maps, `[B, H, T, T]` per layer, are returned."""

LOSS_ARGUMENTS = {"num_items_in_batch", "ignore_index", "shift_labels"}
IGNORED_ARGUMENTS = {"cache_position", "token_type_ids", "tokenizer"}
"""Arguments that `generate` and tokenizers pass to any model; this one doesn't use them."""
PACKING_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""Arguments by which collators describe packed documents, besides `position_ids`, which are enough."""
HUB_RENAMED_PARAMETERS = {r"\bdecoder\.": ""} | RENAMED_PARAMETERS
"""Former names of parameters and their names now, see `tra.runs.RENAMED_PARAMETERS`."""


class TRADecoderLayer(GradientCheckpointingLayer, Block):
    """A block of the decoder whose input alone can be kept for the backward pass."""

    def __call__(self, x: Tensor, key_mask: Tensor | None, cache: Any, *others: Any) -> Any:
        if cache is None:
            return super().__call__(x, key_mask, cache, *others)
        return nn.Module.__call__(self, x, key_mask, cache, *others)  # called again, it would add its tokens twice


class TRAPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, for all models."""

    config_class = TRAConfig
    config: TRAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TRADecoderLayer"]  # noqa: RUF012 - so transformers declares it
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    # Mechanisms have kernels of their own and don't use transformers' attention interface.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Self:
        """See transformers. Weights are read from safetensors only, never from pickles.

        Folders with former names of parameters load too, and are saved under the names now.
        """
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("weights are read from safetensors alone, so use_safetensors can't be False")
        key_mapping = HUB_RENAMED_PARAMETERS | (kwargs.pop("key_mapping", None) or {})
        if pretrained_model_name_or_path is not None and kwargs.get("state_dict") is None:
            _refuse_pickles(Path(pretrained_model_name_or_path) / kwargs.get("subfolder", ""))
        try:
            return super().from_pretrained(
                pretrained_model_name_or_path, *args, use_safetensors=True, key_mapping=key_mapping, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"the weights in {pretrained_model_name_or_path} can't be read: {error}") from None

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """See transformers. Parameters are saved under their names now, also if they were loaded from former ones."""
        super().save_pretrained(save_directory, *args, **{"save_original_format": False} | kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: a saved folder points to this package and holds no copy of its code."""

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module as in a new decoder. transformers calls this for every module of the model."""
        if isinstance(module, Mechanism):
            fresh = self._new_decoder().layers[0].get_submodule("self_attn")
            for name, own in (*fresh.named_parameters(recurse=False), *fresh.named_buffers(recurse=False)):
                init.copy_(getattr(module, name), own)
        elif isinstance(module, nn.Embedding):
            init.copy_(module.weight, self._new_decoder(module.num_embeddings).embed_tokens.weight)
        elif isinstance(module, nn.Linear | nn.RMSNorm | nn.LSTM):
            module.reset_parameters()

    def _new_decoder(self, vocab_size: int = 1) -> Decoder:
        return Decoder(dataclasses.replace(self.config.to_decoder(), n_layers=1, vocab_size=vocab_size))


class TRAModel(TRAPreTrainedModel):
    """From tokens to hidden states: embeddings, layers and the last norm."""

    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012 - in a language model's folder

    def __init__(self, config: TRAConfig) -> None:
        super().__init__(config)
        decoder = config.to_decoder()
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.d_model)
        self.layers = nn.ModuleList([TRADecoderLayer(decoder, layer) for layer in range(decoder.n_layers)])
        self.norm = nn.RMSNorm(decoder.d_model, eps=1e-6)
        self.post_init()

    def get_decoder(self) -> nn.Module:
        return self

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states `[B, T, hidden_size]`, after the last norm.

        Args:
            input_ids: `[B, T]`, or
            inputs_embeds: `[B, T, hidden_size]` in their place.
            attention_mask: `[B, cached + T]`, 0 at padding, which may stand anywhere. Positions count real tokens.
                Outputs at padding have no meaning.
            past_key_values: A `DynamicCache` or, for mechanisms that can use one, a `StaticCache` or a
                `TRABoundedCache`; the new tokens are added.
            use_cache: Make a cache if none is given; by default in evaluation, if the config says so.
            output_hidden_states: Also return the input of every layer, and the output.
            output_attentions: Also return every layer's weights `[B, H, T, cached + T]`, with gradients. The output is
                then computed from these weights: slower than the fast path, and equal to it up to rounding. Not with a
                static cache.
            position_ids: `[B or 1, T]`. Where they start again at 0, another document begins, and tokens see only their
                own. Positions themselves are counted here; other position_ids raise a ValueError, but not in a compiled
                graph. With a cache they aren't used, nor in an exported graph with a mask.
            kwargs: What tokenizers, collators, losses and continuous batching pass to any model. Other arguments raise
                a ValueError.
        """
        requests = None
        if "write_index" in kwargs:  # a step of continuous batching, whose masks and positions aren't needed
            requests, kwargs = PackedRequests(kwargs), {}
            attention_mask, position_ids, use_cache = None, None, False
        _check_others(kwargs, position_ids)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            # an adapter in the embedding's place doesn't say how many rows it has
            check_tokens(input_ids, getattr(self.embed_tokens, "num_embeddings", self.config.vocab_size))
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not output_attentions
        batch, length = inputs_embeds.shape[:2]
        cache, documents = None, None
        if past_key_values is None:
            key_mask = real_keys(attention_mask, batch, length)
            documents = document_ids(position_ids, key_mask, batch, length)
            if documents is not None:
                key_mask = None  # padding is a document of its own
            elif use_cache:
                past_key_values = DynamicCache(config=self.config)
        else:
            check_not_packed(position_ids, attention_mask)
        if output_attentions:
            _check_map(length, past_key_values)
        if requests is not None and (output_attentions or output_hidden_states):
            raise ValueError("continuous batching doesn't go with output_attentions or output_hidden_states")
        layers = self.layers[: self.config.num_hidden_layers]  # early exit sets fewer
        if past_key_values is not None:
            cache, key_mask = adapt(past_key_values, self.config, len(layers), inputs_embeds, attention_mask)
        states: list[Any] = []
        maps: list[Any] = []

        def call_layer(layer: Any, x: Tensor, *others: Any) -> Tensor:
            if output_hidden_states:
                states.append(x)
            if not output_attentions:
                return layer(x, *others)
            x, weights = layer(x, *others, True)
            maps.append(weights)
            return x

        def run(embeds: Tensor, mask: Tensor | None, cache: Any = cache) -> Tensor:
            return run_layers(embeds, layers, self.norm, mask, cache, documents, call_layer)

        hidden: Any
        if requests is not None:
            hidden = requests.run(lambda rows, cache: run(rows, None, cache), inputs_embeds)
        elif isinstance(past_key_values, TRABoundedCache) and length > past_key_values.bounded.chunk:
            if output_hidden_states:
                raise ValueError("output_hidden_states doesn't go with a prompt longer than a bounded cache's chunk")
            hidden = run_in_chunks(run, inputs_embeds, key_mask, past_key_values.bounded.chunk)
        else:
            hidden = run(inputs_embeds, key_mask)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=tuple(maps) if output_attentions else None,
        )


class TRAForCausalLM(TRAPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: TRAConfig) -> None:
        super().__init__(config)
        self.model = TRAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if not config.use_cache:
            self.generation_config.use_cache = False

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]
        """Whether tokens can't be taken out of the cache again, as assisted generation must."""
        return MECHANISMS[self.config.mechanism].keeps_state

    @classmethod
    def from_decoder(cls, decoder: Decoder, **options: Any) -> Self:
        """Return a model with a copy of a decoder's weights; `options` as in `TRAConfig.from_decoder`."""
        if options.get("tie_word_embeddings"):
            raise ValueError("a decoder has a head of its own, which can't be tied")
        model = cls(TRAConfig.from_decoder(decoder.config, **options))
        tensors = decoder.state_dict()
        model.load_state_dict(
            {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in tensors.items()}
        )
        return model.eval()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.copy_(module.weight, self._new_decoder(module.out_features).lm_head.weight)
        else:
            super()._init_weights(module)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits `[B, T, vocab_size]` of the next token, and their loss if labels are given.

        Args:
            labels: `[B, T]`, the tokens themselves: they are shifted here. -100 doesn't count.
            logits_to_keep: Number of last positions, 0 for all; or positions `[P]`, or `[B, P]` per row, or a bool
                mask `[B, T]`, whose logits come flat.
            kwargs: Arguments of the loss, such as `num_items_in_batch`, and those of `TRAModel`.

        The other arguments are those of `TRAModel`.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(_select_positions(out.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if kwargs.get("shift_labels") is None and labels.shape != logits.shape[:-1]:
                raise ValueError(f"labels must be {tuple(logits.shape[:-1])}, as the logits, got {tuple(labels.shape)}")
            options = {name: value for name, value in kwargs.items() if name in LOSS_ARGUMENTS}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers. Continuous batching is for TRA and rope, with pages of 64, 128, ... tokens."""
        manager = super().init_continuous_batching(*args, **kwargs)
        check_support(self.config.mechanism, manager.continuous_batching_config)
        return manager

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """See transformers. "paged|eager", which continuous batching asks for, changes nothing.

        It would only make transformers build a mask of all slots of its cache.
        """
        if attn_implementation != "paged|eager":
            super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: Cache, **_others: Any
    ) -> Tensor | None:
        """Return a mask over all slots of a static cache, whose shape doesn't change from step to step."""
        if attention_mask is None:
            return None
        free = past_key_values.get_max_length() - attention_mask.shape[1]
        return nn.functional.pad(attention_mask, (0, free), value=1)


def _select_positions(hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    if isinstance(logits_to_keep, int):
        return hidden[:, -logits_to_keep:] if logits_to_keep else hidden
    if logits_to_keep.ndim == 2 and logits_to_keep.dtype != torch.bool:
        return hidden.take_along_dim(logits_to_keep[..., None], dim=1)
    return hidden[logits_to_keep] if logits_to_keep.ndim == 2 else hidden[:, logits_to_keep]


def _check_map(tokens: int, cache: Cache | None) -> None:
    """Raise a ValueError if attention maps of these tokens can't be returned."""
    if cache is not None and is_static(cache):
        raise ValueError("output_attentions doesn't go with a static cache: use a dynamic one")
    if isinstance(cache, TRABoundedCache):
        raise ValueError("output_attentions doesn't go with a bounded cache: use a dynamic one")
    if tokens > MAX_MAP_TOKENS:
        raise ValueError(f"output_attentions holds whole maps, so up to {MAX_MAP_TOKENS:,} tokens, got {tokens:,}")


def _check_others(kwargs: dict[str, Any], position_ids: Tensor | None) -> None:
    """Raise a ValueError for arguments that this model doesn't take."""
    known = LOSS_ARGUMENTS | IGNORED_ARGUMENTS | (set() if position_ids is None else PACKING_ARGUMENTS)
    others = [name for name, value in kwargs.items() if value is not None and name not in known]
    if PACKING_ARGUMENTS & set(others):
        raise ValueError(f"{', '.join(others)} need position_ids, which tell where documents begin")
    if others:
        raise ValueError(f"unexpected arguments: {', '.join(others)}")


def _refuse_pickles(folder: Path) -> None:
    """Raise a ValueError if a folder has no weights in safetensors, but pickles, or none at all."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for ending in ("bin", "pt", "pth", "pkl") for path in folder.glob(f"*.{ending}"))
    if pickles:
        raise ValueError(f"{folder} has pickled weights alone ({', '.join(pickles)}), which are never opened")
    raise ValueError(f"{folder} has no weights: expected model.safetensors")
