"""The operator's input contract, and the precision of its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, sums and log_forget: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which scores have one precision, in forward and backward, whatever autocast says.

    If autocast is off, the context does nothing, because entering autocast costs as much as two operators.
    """
    if device.type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type)):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts x to in a layer; None if it does not cast."""
    if x.dtype == torch.float64 or x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


LAYOUTS = {
    "query": "[B, H, Tq, D]",
    "key": "[B, Hkv, Tk, D]",
    "value": "[B, Hkv, Tk, Dv]",
    "log_forget": "[B, H, Tq]",
    "key_mask": "[B, Tk]",
    "key_lengths": "[B]",
}
PAGED_LAYOUTS = {
    "query": "[B, H, Tq, D]",
    "key_pages": "[P, Hkv, page, D]",
    "value_pages": "[P, Hkv, page, Dv]",
    "log_forget": "[B, H, Tq]",
    "block_table": "[B, N]",
    "key_lengths": "[B]",
}
PAGE_UNIT = 64
"""Number of keys of which a page holds a multiple, so that pages are whole blocks of every kernel."""
PACKED_LAYOUTS = {
    "query": "[total_q, H, D]",
    "key": "[total_k, Hkv, D]",
    "value": "[total_k, Hkv, Dv]",
    "log_forget": "[total_q, H]",
    "cu_seqlens_q": "1-D int32 [Sq + 1]",
    "cu_seqlens_k": "1-D int32 [Sk + 1]",
}
"""A letter is one size in all tensors of a call."""

SIZE_RULES = {
    "key": "must share query's batch and width",
    "value": "must match key in all but width",
    "key_pages": "must share query's width",
    "value_pages": "must match key_pages in all but width",
    "log_forget": "must match query in all but width",
}
INTEGERS = (torch.int32, torch.int64)
INDEX_DTYPES = {
    "key_mask": (torch.bool,),
    "block_table": (torch.int32,),
    **dict.fromkeys(("key_lengths", "cu_seqlens_q", "cu_seqlens_k"), INTEGERS),
}


def reading_is_free(device: torch.device) -> bool:
    """Return whether values can be read without waiting for a device."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_forget: Tensor,
    key_mask: Tensor | None,
    key_lengths: Tensor | None,
) -> None:
    """Check shapes, dtypes and devices; values only where reading them needs no device sync."""
    values_are_free = _check_tensors(LAYOUTS, (query, key, value, log_forget, key_mask, key_lengths))
    n_queries, n_keys = query.shape[2], key.shape[2]
    if n_queries > n_keys:
        raise ValueError(
            f"more queries than keys: got Tq = {n_queries}, Tk = {n_keys}; queries stand at the end of keys"
        )
    if key_lengths is not None and values_are_free:
        shortest, longest = int(key_lengths.min()), int(key_lengths.max())
        if shortest < 0 or longest > n_keys:
            raise ValueError(f"key_lengths must lie in 0..{n_keys} (Tk), got {shortest}..{longest}")


def check_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    log_forget: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    window: int | None,
) -> None:
    """Raise a ValueError unless keys and values in pages are valid, and all keys that queries may see fit the table."""
    tensors = (query, key_pages, value_pages, log_forget, block_table, key_lengths)
    values_are_free = _check_tensors(PAGED_LAYOUTS, tensors)
    n_queries, page_size = query.shape[2], key_pages.shape[2]
    capacity = block_table.shape[1] * page_size
    if page_size % PAGE_UNIT:
        raise ValueError(f"pages must hold a multiple of {PAGE_UNIT} keys, got {page_size}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if n_queries > capacity:
        raise ValueError(f"more queries than keys: got Tq = {n_queries}, and a table of {capacity} keys")
    fits = window is not None and window + n_queries - 1 <= capacity
    if not values_are_free:
        return
    shortest, longest = int(key_lengths.min()), int(key_lengths.max())
    if shortest < 0 or (longest > capacity and not fits):
        seen = "no window" if window is None else f"a window of {window}"
        raise ValueError(
            f"key_lengths must lie in 0..{capacity} (the table's keys) with {seen} and {n_queries} queries, "
            f"got {shortest}..{longest}"
        )
    lowest, highest = int(block_table.min()), int(block_table.max())
    if lowest < 0 or highest >= key_pages.shape[0]:
        raise ValueError(f"block_table must lie in 0..{key_pages.shape[0] - 1} (the pages), got {lowest}..{highest}")


def check_packed(
    query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    """Check packed sequences: `[total, H, D]` and their cumulative lengths."""
    values_are_free = _check_tensors(PACKED_LAYOUTS, (query, key, value, log_forget, cu_seqlens_q, cu_seqlens_k))
    if len(cu_seqlens_q) < 2 or len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must name as many sequences, at least 1: "
            f"got {len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    if not values_are_free:
        return
    for name, cu, total in (("cu_seqlens_q", cu_seqlens_q, len(query)), ("cu_seqlens_k", cu_seqlens_k, len(key))):
        if int(cu[0]) != 0 or int(cu[-1]) != total or bool((cu.diff() < 0).any()):
            raise ValueError(f"{name} must rise from 0 to {total}, got {cu.tolist()}")
    if bool((cu_seqlens_q.diff() > cu_seqlens_k.diff()).any()):
        raise ValueError("a packed sequence has more queries than keys; queries stand at the end of the keys")


def _check_tensors(layouts: dict[str, str], tensors: Sequence[Any]) -> bool:
    """Check each tensor by its layout, and all together. Return whether reading values needs no device sync."""
    query, _, _, log_forget, *_ = tensors
    sizes: dict[str, int] = {}
    for (name, layout), tensor in zip(layouts.items(), tensors, strict=True):
        if tensor is None and name in ("value", "key_mask", "key_lengths"):
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got a {type(tensor).__name__}")
        letters, shape = layout[layout.index("[") + 1 : -1].split(", "), tuple(tensor.shape)
        if len(shape) != len(letters):
            raise ValueError(f"{name} must be {layout}, got {len(shape)} dimensions: {shape}")
        expected = tuple(sizes.setdefault(letter, size) for letter, size in zip(letters, shape, strict=True))
        if dtypes := INDEX_DTYPES.get(name):
            if tensor.dtype not in dtypes or shape != expected:
                kind = str(dtypes[0]).removeprefix("torch.")
                raise ValueError(f"{name} must be {kind} of shape {expected}, got {tensor.dtype} {shape}")
        elif 0 in shape:
            raise ValueError(f"{name} is empty: got shape {shape}, expected every dimension to be at least 1")
        elif shape != expected:
            raise ValueError(f"{name} {SIZE_RULES[name]}: got {shape}, expected {expected}")
        if tensor.device != query.device:
            raise ValueError(
                f"all tensors must be on one device: query is on {query.device}, {name} on {tensor.device}"
            )
        if name == "query" and query.dtype not in DTYPES:
            raise ValueError(f"query must be a floating-point tensor, got {query.dtype}")
        if name.startswith(("key", "value")) and name not in INDEX_DTYPES and tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype, got {tensor.dtype}, expected {query.dtype}")
    if sizes["H"] % sizes["Hkv"]:
        raise ValueError(f"query heads must be a multiple of key heads, got {sizes['H']} and {sizes['Hkv']}")
    if log_forget.dtype != (wide := compute_dtype(query.dtype)):
        raise ValueError(f"log_forget must be {wide} for {query.dtype} queries, got {log_forget.dtype}")
    values_are_free = reading_is_free(query.device)
    if values_are_free:
        positive = log_forget.detach() > 0
        if bool(positive.any()):
            highest = float(log_forget.detach()[positive].max())
            raise ValueError(f"log_forget must be at most 0 (it is log sigmoid of the gate), got {highest:g}")
        if bool((log_forget.detach() == -math.inf).any()):
            raise ValueError("log_forget must be finite, got -inf")
    return values_are_free
