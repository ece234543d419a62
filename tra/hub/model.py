"""The decoder with transformers' signature: masks, caches, losses, checkpointing, saving and loading."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tra.attention import Mechanism
from tra.attention.shared.forget_gate import ForgetGate
from tra.hub._cache import adapt, real_keys
from tra.hub.config import TRAConfig
from tra.model import Decoder
from tra.runs import write_atomically

LONGEST_MAP = 4096
"""Tokens up to which attention maps, `[B, H, T, T]` per layer, are given."""

LOSS_ARGUMENTS = {"num_items_in_batch", "ignore_index", "shift_labels"}
IGNORED = {"cache_position", "token_type_ids", "tokenizer"}
"""What `generate` and tokenizers hand on to any model, and says nothing to this one."""
DIGESTS = "weights_sha256"
"""Key of config.json: the digest of each file of weights beside it."""


class TRAPreTrainedModel(PreTrainedModel):
    """What both models share."""

    config_class = TRAConfig
    config: TRAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - so transformers declares it
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True
    # Mechanisms have kernels of their own, and don't go through transformers' choice of attention.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Self:
        """See transformers. Weights are read from safetensors alone: no pickle is ever opened."""
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("weights are read from safetensors alone, so use_safetensors can't be False")
        if pretrained_model_name_or_path is not None and kwargs.get("state_dict") is None:
            _check_weights(Path(pretrained_model_name_or_path) / kwargs.get("subfolder", ""))
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, use_safetensors=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"the weights in {pretrained_model_name_or_path} can't be read: {error}") from None
        config = (loaded[0] if isinstance(loaded, tuple) else loaded).config
        vars(config).pop(DIGESTS, None)  # they are the files', not the model's
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """See transformers. config.json also tells the digests of the weights, by which damage shows later."""
        super().save_pretrained(save_directory, *args, **kwargs)
        folder, file = Path(save_directory), Path(save_directory) / "config.json"
        if file.is_file():
            digests = {path.name: _digest(path) for path in sorted(folder.glob("model*.safetensors"))}
            written = json.loads(file.read_text()) | {DIGESTS: digests}
            write_atomically(file, json.dumps(written, indent=2, sort_keys=True) + "\n")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: a saved folder points to this package, and holds no copy of its code."""

    def _init_weights(self, module: nn.Module) -> None:
        """What no checkpoint gave is as a new decoder has it. transformers calls this for every module of the tree."""
        if isinstance(module, Mechanism):
            fresh = self._new_decoder().blocks[0].get_submodule("attention")
            for name, own in (*fresh.named_parameters(recurse=False), *fresh.named_buffers(recurse=False)):
                init.copy_(getattr(module, name), own)
        elif isinstance(module, nn.Embedding):
            init.copy_(module.weight, self._new_decoder(module.num_embeddings).embedding.weight)
        elif isinstance(module, nn.Linear | nn.RMSNorm | nn.LSTM):
            module.reset_parameters()
            if isinstance(module, ForgetGate):
                init.constant_(module.bias, self.config.gate_bias)

    def _new_decoder(self, vocab_size: int = 1) -> Decoder:
        return Decoder(dataclasses.replace(self.config.to_decoder(), n_layers=1, vocab_size=vocab_size))


class TRAModel(TRAPreTrainedModel):
    """From tokens to what a head reads."""

    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012 - in a language model's folder

    def __init__(self, config: TRAConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.to_decoder())
        del self.decoder.head  # that of the language model is its own
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.decoder.embedding = value
        self.decoder.config = dataclasses.replace(self.decoder.config, vocab_size=value.num_embeddings)

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
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, hidden_size]`, after the last norm.

        Args:
            input_ids: `[B, T]`, or
            inputs_embeds: `[B, T, hidden_size]` in their place.
            attention_mask: `[B, cached + T]`, 0 at padding, which may stand anywhere. Places count real tokens. What
                comes out at padding means nothing.
            past_key_values: A `DynamicCache` or `StaticCache`, which takes the new tokens.
            use_cache: Make a cache where none is given; by default in evaluation, if the config says so.
            output_hidden_states: Also the input of every block; the last is what comes out.
            output_attentions: Also every layer's weights `[B, H, T, T]`, worked out beside the fast path, without
                gradients. Not with a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            self.decoder._check(input_ids)
            inputs_embeds = self.decoder.embedding(input_ids)
        assert inputs_embeds is not None
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not output_attentions
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if output_attentions:
            _check_map(inputs_embeds.shape[1], past_key_values)
        if past_key_values is None:
            cache, key_mask = None, real_keys(attention_mask, inputs_embeds.shape[0], inputs_embeds.shape[1])
        else:
            cache, key_mask = adapt(past_key_values, self.decoder.config, inputs_embeds, attention_mask)
        states: list[Any] = []
        maps: list[Any] = []

        def each(block: Any, x: Tensor, *others: Any) -> Tensor:
            if output_hidden_states:
                states.append(x)
            if output_attentions:
                maps.append(block.attention.attention_map(block.attention_norm(x), key_mask).weights)
            if self.gradient_checkpointing and self.training and cache is None:  # which would take its tokens twice
                return self._gradient_checkpointing_func(block.__call__, x, *others)
            return block(x, *others)

        hidden: Any = self.decoder.through(inputs_embeds, key_mask, cache, each=each)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=tuple(maps) if output_attentions else None,
        )


class TRAForCausalLM(TRAPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TRAConfig) -> None:
        super().__init__(config)
        self.model = TRAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if not config.use_cache:
            self.generation_config.use_cache = False

    @classmethod
    def from_decoder(cls, decoder: Decoder, **options: Any) -> Self:
        """A decoder's weights, copied; `options` as in `TRAConfig.from_decoder`."""
        if options.get("tie_word_embeddings"):
            raise ValueError("a decoder has a head of its own, which can't be tied")
        model = cls(TRAConfig.from_decoder(decoder.config, **options))
        tensors = decoder.state_dict()
        head = tensors.pop("head.weight")
        model.load_state_dict(
            {f"model.decoder.{name}": tensor for name, tensor in tensors.items()} | {"lm_head.weight": head}
        )
        return model.eval()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.copy_(module.weight, self._new_decoder(module.out_features).head.weight)
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab_size]` of the next token, and their loss where labels are given.

        Args:
            labels: `[B, T]`, the tokens themselves: they are shifted here. -100 doesn't count.
            logits_to_keep: The last so many positions, 0 for all; or positions `[P]`, or `[B, P]` per row, or a bool
                mask `[B, T]`, whose logits come flat.
            kwargs: Arguments of the loss, such as `num_items_in_batch`.

        The other arguments are those of `TRAModel`.
        """
        _check_others(kwargs)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.lm_head(_kept(out.last_hidden_state, logits_to_keep))
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

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: Cache, **_others: Any
    ) -> Tensor | None:
        """With a static cache, `generate` asks for a mask whose shape no step changes: one over all slots."""
        if attention_mask is None:
            return None
        free = past_key_values.get_max_length() - attention_mask.shape[1]
        return nn.functional.pad(attention_mask, (0, free), value=1)


def _kept(hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    if isinstance(logits_to_keep, int):
        return hidden[:, -logits_to_keep:] if logits_to_keep else hidden
    if logits_to_keep.ndim == 2 and logits_to_keep.dtype != torch.bool:
        return hidden.take_along_dim(logits_to_keep[..., None], dim=1)
    return hidden[logits_to_keep] if logits_to_keep.ndim == 2 else hidden[:, logits_to_keep]


def _check_map(tokens: int, cache: Cache | None) -> None:
    if cache is not None:
        raise ValueError("output_attentions is for whole sequences, not with a cache: use_cache=False")
    if tokens > LONGEST_MAP:
        raise ValueError(f"output_attentions holds whole maps, so up to {LONGEST_MAP:,} tokens, got {tokens:,}")


def _check_others(kwargs: dict[str, Any]) -> None:
    others = [name for name, value in kwargs.items() if value is not None and name not in LOSS_ARGUMENTS | IGNORED]
    if "position_ids" in others:
        raise ValueError("position_ids can't be given: places count the real tokens of attention_mask")
    if others:
        raise ValueError(f"unexpected arguments: {', '.join(others)}")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_weights(folder: Path) -> None:
    """A folder without weights, with pickles alone, or with other weights than were saved, is told as such."""
    if not folder.is_dir():
        return
    if any(folder.glob("model*.safetensors")):
        try:
            digests = json.loads((folder / "config.json").read_text()).get(DIGESTS) or {}
        except (OSError, ValueError, AttributeError):
            return  # transformers says what is wrong with it
        for name, digest in digests.items():
            file = folder / name
            if file.is_file() and _digest(file) != digest:
                raise ValueError(f"{file} is damaged or exchanged: its contents don't match {DIGESTS} in config.json")
        return
    pickles = sorted(path.name for ending in ("bin", "pt", "pth", "pkl") for path in folder.glob(f"*.{ending}"))
    if pickles:
        raise ValueError(f"{folder} has pickled weights alone ({', '.join(pickles)}), which are never opened")
    raise ValueError(f"{folder} has no weights: expected model.safetensors")
