"""`DecoderConfig` under transformers' names, and the module that points a saved folder to this package."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import typing
import warnings
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tra.attention import BUILT_IN_MECHANISMS, MECHANISMS
from tra.config import check_arguments, convert_json, finite_dict
from tra.model import DecoderConfig
from tra.runs.extensions import ChangedFileWarning, changed_sources, check_sources, register, sources

FORMAT = 3
"""Newest format of configs and weights. A newer one raises an error. Format 2 adds `threshold` and `margin`, format 3
`mechanism_arguments` and `imports`. A config is saved in the oldest format that can hold it, so that older versions of
this package can read it."""

POINTER = Path(__file__).with_name("modeling_tra.py")
"""A module, copied to saved folders, that imports this package."""

AUTO_MAP = {
    "AutoConfig": "modeling_tra.TRAConfig",
    "AutoModel": "modeling_tra.TRAModel",
    "AutoModelForCausalLM": "modeling_tra.TRAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_tra.TRAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_tra.TRAForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_tra.TRAForQuestionAnswering",
}

HUB_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "arguments": "mechanism_arguments",
}
"""Fields of `DecoderConfig` that have another name in transformers."""

SPLIT_BY_HEAD = {
    "tra", "rope", "nope", "sinusoidal", "forgetting", "stickbreaking", "entmax", "tra-distance-only",
    "tra-plain-distance",
}  # fmt: skip
"""Mechanisms whose heads can be spread over processes: no head reads another, and only projections and the gate have
parameters or constants per head."""


ADAPTED_MODULES = {
    "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj",
    "input_layernorm", "post_attention_layernorm", "norm",
}  # fmt: skip
"""Modules that are called as Llama's are, and do the same."""


def tensor_parallel_plan(mechanism: str) -> dict[str, str] | None:
    """Return how transformers splits the matrices of a base model over processes, None if it can't."""
    if mechanism not in SPLIT_BY_HEAD:
        return None
    kind: Any = MECHANISMS[mechanism]
    inward = ["q_proj", "k_proj", "v_proj", *(["gate.linear"] if "gate_bias" in kind.config_fields else [])]
    return {f"layers.*.self_attn.{name}": "colwise" for name in inward} | {
        "layers.*.self_attn.o_proj": "rowwise",
        # "packed_colwise" splits the two halves of a weight alike, but not those of a bias (transformers 5.22).
        "layers.*.mlp.up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_rep",
    }


class TRAConfig(PreTrainedConfig):
    """Everything that shapes a decoder, see `tra.DecoderConfig`, and fields that only transformers reads."""

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
    threshold: float = 0.0
    margin: float | str = 0.0
    """Margin of TRA. Infinity is written as the string "inf"."""
    rope_theta: float = 500_000.0
    cope_positions: int = 64
    mechanism_arguments: dict[str, Any] | None = None
    """The mechanism's own arguments, see `DecoderConfig.arguments`."""
    imports: dict[str, str] | None = None
    """Where a user's mechanism comes from, see `RunConfig.imports`. `tra.import_file` must have imported it."""
    fuse_projections: bool = False
    """Off, unlike in a decoder, so that adapters work: see `tra.attention.Attention`."""

    tie_word_embeddings: bool = False
    """Whether the head's weight is the embedding's. In a decoder of this package it is not."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tra_format: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.tra_format, int):
            raise ValueError(f"tra_format must be a number, got {self.tra_format!r}: the config is damaged")
        if self.tra_format > FORMAT:
            raise ValueError(
                f"the config has format {self.tra_format!r}, this tra reads up to {FORMAT}: update tra to use it"
            )
        kwargs.pop("weights_sha256", None)  # digests of files, which former versions wrote
        super().__post_init__(**kwargs)
        self.mechanism_arguments, self.imports = self.mechanism_arguments or {}, self.imports or {}
        imports = convert_json(self.imports, dict[str, str], "imports")
        check_sources(imports)
        for line in changed_sources(imports):
            warnings.warn(line, ChangedFileWarning, stacklevel=2)
        register("mechanism", self.mechanism)
        decoder = self.to_decoder()
        self.imports = sources({"mechanism": decoder.mechanism}, BUILT_IN_MECHANISMS) | imports
        self.num_key_value_heads = decoder.n_heads if decoder.n_kv_heads is None else decoder.n_kv_heads
        self.margin = decoder.margin
        self.tra_format = self._needed_format()
        self.base_model_tp_plan = tensor_parallel_plan(decoder.mechanism)  # type: ignore[misc]

    def to_decoder(self) -> DecoderConfig:
        """Return the decoder's config, checked."""
        hints = typing.get_type_hints(DecoderConfig, include_extras=True)
        hub = {field.name: HUB_NAMES.get(field.name, field.name) for field in dataclasses.fields(DecoderConfig)}
        values = {name: convert_json(getattr(self, ours), hints[name], ours) for name, ours in hub.items()}
        decoder = DecoderConfig(**values)
        check_arguments(decoder, "mechanism_arguments")
        return decoder

    @classmethod
    def from_decoder(cls, decoder: DecoderConfig, **options: Any) -> TRAConfig:
        """Return the config of a decoder, with `fuse_projections` off.

        Args:
            options: Fields that only transformers reads, and `fuse_projections`.
        """
        values = {HUB_NAMES.get(name, name): value for name, value in dataclasses.asdict(decoder).items()}
        return cls(**values | {"fuse_projections": False} | options)

    def to_dict(self) -> dict[str, Any]:
        _register_with_peft()
        values = super().to_dict() | {"auto_map": dict(AUTO_MAP), "tra_format": self._needed_format()}
        for name in ("mechanism_arguments", "imports"):  # unknown to formats before 3
            if not values.get(name):
                values.pop(name, None)
        return finite_dict(values.items())

    def _needed_format(self) -> int:
        """Return the oldest format that can hold this config."""
        if self.mechanism_arguments or self.imports:
            return FORMAT
        return 1 if self.threshold == self.margin == 0 else 2

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and the module that it names."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(POINTER, folder / POINTER.name)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: a saved folder points to this package and holds no copy of its code."""


def _register_with_peft() -> None:
    """Add default targets for adapters to PEFT's tables, which it looks up by `model_type`: those of a Llama.

    A model may be built before PEFT is imported, and importing it takes seconds. PEFT calls `to_dict` of the config
    right before it reads the tables.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING"):
            ours = [module for module in table.get("llama", ()) if module in ADAPTED_MODULES]
            if ours:
                table.setdefault(TRAConfig.model_type, ours)
