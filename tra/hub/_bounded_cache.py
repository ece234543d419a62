"""A cache for transformers that wraps a decoder's `BoundedCache`: its size doesn't grow with the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from tra.attention import MECHANISMS, BoundedCache
from tra.hub.config import TRAConfig


class TRABoundedCache(TransformersCache):
    """A cache of the last tokens only, for `past_key_values` of TRA's models: memory stays the same at any length.

    Tokens can't be removed from it again, so assisted generation is refused. The guard's counts are in `bounded`.

    Args:
        config: That of the model.
        windows: Tokens that queries see, as for `tra.BoundedCache`: for all layers, by layer, or by layer and head.
        options: Further arguments of `tra.BoundedCache`: `chunk`, `guard`, and `sinks` for rope.
    """

    def __init__(self, config: TRAConfig, windows: int | Sequence[int | Sequence[int]], **options: Any) -> None:
        if not MECHANISMS[config.mechanism].takes_pages:
            raise ValueError(f"{config.mechanism} can't use a bounded cache: it is for TRA and rope")
        self._arguments = config.num_hidden_layers, windows, options
        self.bounded = BoundedCache(config.num_hidden_layers, windows, **options)
        """The decoder's cache, which has all keys and values."""
        super().__init__(layers=[_Layer(self) for _ in self.bounded.layers])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens received so far, including padding and overwritten tokens."""
        return self.bounded.length

    def reset(self) -> None:
        n_layers, windows, options = self._arguments
        self.bounded = BoundedCache(n_layers, windows, **options)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.bounded.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.bounded.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        lengths = self.bounded.lengths
        if lengths is not None:
            self.bounded.select_rows(torch.arange(len(lengths), device=lengths.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a bounded cache can't be cropped: overwritten tokens are gone")


class _Layer(CacheLayerMixin):
    """A layer of the cache as transformers expects it. Keys and values are in the decoder's cache."""

    supports_early_init = False

    def __init__(self, whole: TRABoundedCache) -> None:
        super().__init__()
        self._whole = whole

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the decoder's cache makes its own buffers")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("a TRABoundedCache is for models of TRA: others can't read keys in pages")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._whole.get_seq_length()

    def get_max_length(self) -> int:
        return -1


def run_in_chunks(
    run: Callable[[Tensor, Tensor | None], Tensor], embeds: Tensor, key_mask: Tensor | None, chunk: int
) -> Tensor:
    """Return the output of `run` on a long prompt `[B, T, width]`, which is read in chunks that fit the ring.

    Args:
        key_mask: `[B, cached + T]`.
    """
    length = embeds.shape[1]
    found = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        mask = None if key_mask is None else key_mask[:, : key_mask.shape[1] - length + end]
        found.append(run(embeds[:, start:end], mask))
    return torch.cat(found, dim=1)
