"""Rename parameters that have other names in files of former versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

RENAMED_PARAMETERS = {
    r"\bembedding\.weight": "embed_tokens.weight",
    r"\bhead\.weight": "lm_head.weight",
    r"\bblocks\.": "layers.",
    r"\battention_norm\.": "input_layernorm.",
    r"\bmlp_norm\.": "post_attention_layernorm.",
    r"\bmlp\.up\.": "mlp.up_proj.",
    r"\bmlp\.down\.": "mlp.down_proj.",
    r"\battention\.query\.": "self_attn.q_proj.",
    r"\battention\.key\.": "self_attn.k_proj.",
    r"\battention\.value\.": "self_attn.v_proj.",
    r"\battention\.out\.": "self_attn.o_proj.",
    r"\battention\.gate\.": "self_attn.gate.linear.",
    r"\battention\.": "self_attn.",
}
"""Former names of parameters, as patterns applied in this order, and their names now."""

T = TypeVar("T")


def rename_parameters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return tensors with former names of parameters replaced, whatever prefix the names have."""
    renamed = {}
    for name, tensor in tensors.items():
        for former, now in RENAMED_PARAMETERS.items():
            name = re.sub(former, now, name)
        renamed[name] = tensor
    return renamed
