"""`DecoderConfig` under the names that transformers uses, and a folder's pointer to this package."""

from __future__ import annotations

import dataclasses
import os
import shutil
import typing
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tra.attention import MECHANISMS
from tra.config import convert_json
from tra.model import DecoderConfig

FORMAT = 1
"""Of what a config and its weights mean. A newer one is refused, not guessed at."""

POINTER = Path(__file__).with_name("modeling_tra.py")
"""A module that leads from a saved folder to this package."""

AUTO_MAP = {
    "AutoConfig": "modeling_tra.TRAConfig",
    "AutoModel": "modeling_tra.TRAModel",
    "AutoModelForCausalLM": "modeling_tra.TRAForCausalLM",
}

THEIR_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
"""Fields of `DecoderConfig` that have another name in transformers."""


class TRAConfig(PreTrainedConfig):
    """Everything that shapes a decoder, see `tra.DecoderConfig`, and what only transformers asks for."""

    model_type: ClassVar[str] = "tra"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"attention_dropout": "dropout"}

    vocab_size: int = 50_304
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    mechanism: str = "tra"
    num_key_value_heads: int | None = None
    block: str = "pre"
    qk_norm: bool | None = None
    rotary: bool | None = None
    dropout: float = 0.0
    """On the attention weights and on the MLP's hidden representation."""
    embedding_init: str = "uniform"
    gate_bias: float = 0.0
    rope_theta: float = 500_000.0
    cope_positions: int = 64

    tie_word_embeddings: bool = False
    """The head is the embedding. A decoder of this package has one of its own."""
    use_cache: bool = True
    """Off for mechanisms whose cache holds more than keys and values, which caches of transformers don't."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tra_format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.tra_format, int):
            raise ValueError(f"tra_format must be a number, got {self.tra_format!r}: the config is damaged")
        if self.tra_format > FORMAT:
            raise ValueError(
                f"the config has format {self.tra_format!r}, this tra reads up to {FORMAT}: update tra to use it"
            )
        super().__post_init__(**kwargs)
        decoder = self.to_decoder()
        self.num_key_value_heads = decoder.n_heads if decoder.n_kv_heads is None else decoder.n_kv_heads
        self.use_cache = self.use_cache and not MECHANISMS[decoder.mechanism].caches_more

    def to_decoder(self) -> DecoderConfig:
        """The same in this package's words, checked."""
        hints = typing.get_type_hints(DecoderConfig)
        their = {field.name: THEIR_NAMES.get(field.name, field.name) for field in dataclasses.fields(DecoderConfig)}
        return DecoderConfig(
            **{name: convert_json(getattr(self, theirs), hints[name], theirs) for name, theirs in their.items()}
        )

    @classmethod
    def from_decoder(cls, decoder: DecoderConfig, **options: Any) -> TRAConfig:
        """Of a decoder; `options` are the fields that only transformers asks for."""
        return cls(
            **{THEIR_NAMES.get(name, name): value for name, value in dataclasses.asdict(decoder).items()} | options
        )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"auto_map": dict(AUTO_MAP)}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and beside it the module that it names."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(POINTER, folder / POINTER.name)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: a saved folder points to this package, and holds no copy of its code."""
