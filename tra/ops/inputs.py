"""The operator's input contract, and the precision of its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, sums and log_forget: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which scores have one precision, in forward and backward, whatever autocast says."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts x to in a layer; None if it does not cast."""
    if x.dtype == torch.float64 or x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_forget: Tensor,
    key_mask: Tensor | None,
    key_lengths: Tensor | None,
) -> None:
    """Check shapes, dtypes and devices; values only where reading them needs no device sync."""
    given = {"query": query, "key": key, "value": value, "log_forget": log_forget}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    _check_tensors(tensors | {"key_mask": key_mask, "key_lengths": key_lengths})
    _check_rank(query, "query", "[B, H, Tq, D]", 4)
    _check_rank(key, "key", "[B, Hkv, Tk, D]", 4)
    _check_rank(log_forget, "log_forget", "[B, H, Tq]", 3)
    _check_not_empty(tensors)
    batch, n_heads, n_queries, width = query.shape
    _, n_kv_heads, n_keys, _ = key.shape
    if key.shape[0] != batch or key.shape[3] != width:
        raise ValueError(
            f"key must share query's batch and width: got key {_shape(key)}, expected ({batch}, Hkv, Tk, {width})"
        )
    if value is not None:
        _check_rank(value, "value", "[B, Hkv, Tk, Dv]", 4)
        if value.shape[:3] != key.shape[:3]:
            raise ValueError(f"value must match key in all but width: got value {_shape(value)}, key {_shape(key)}")
    _check_heads(n_heads, n_kv_heads)
    if n_queries > n_keys:
        raise ValueError(
            f"more queries than keys: got Tq = {n_queries}, Tk = {n_keys}; queries stand at the end of keys"
        )
    if log_forget.shape != (batch, n_heads, n_queries):
        raise ValueError(
            f"log_forget has the wrong shape: got {_shape(log_forget)}, expected {(batch, n_heads, n_queries)}"
        )
    if key_mask is not None:
        tensors["key_mask"] = key_mask
        if key_mask.dtype != torch.bool or key_mask.shape != (batch, n_keys):
            raise ValueError(
                f"key_mask must be bool of shape {(batch, n_keys)}, got {key_mask.dtype} {_shape(key_mask)}"
            )
    if key_lengths is not None:
        tensors["key_lengths"] = key_lengths
        if key_lengths.dtype not in (torch.int32, torch.int64) or key_lengths.shape != (batch,):
            raise ValueError(
                f"key_lengths must be int32 of shape {(batch,)}, got {key_lengths.dtype} {_shape(key_lengths)}"
            )
    _check_dtypes_and_devices(tensors)
    _check_log_forget_values(log_forget)
    if key_lengths is not None and _values_are_free(key_lengths):
        shortest, longest = int(key_lengths.min()), int(key_lengths.max())
        if shortest < 0 or longest > n_keys:
            raise ValueError(f"key_lengths must lie in 0..{n_keys} (Tk), got {shortest}..{longest}")


def check_packed(
    query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    """Check packed sequences: `[total, H, D]` and their cumulative lengths."""
    _check_tensors({"query": query, "key": key, "value": value, "log_forget": log_forget})
    _check_tensors({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    _check_rank(query, "query", "[total_q, H, D]", 3)
    _check_rank(key, "key", "[total_k, Hkv, D]", 3)
    _check_rank(value, "value", "[total_k, Hkv, Dv]", 3)
    _check_not_empty({"query": query, "key": key, "value": value})
    if key.shape[2] != query.shape[2] or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"query, key and value don't fit: got query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
        )
    _check_heads(query.shape[1], key.shape[1])
    if log_forget.shape != query.shape[:2]:
        raise ValueError(f"log_forget has the wrong shape: got {_shape(log_forget)}, expected {tuple(query.shape[:2])}")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu.ndim != 1 or len(cu) < 2 or cu.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be a 1-D int32 tensor of at least 2 entries, got {cu.dtype} {_shape(cu)}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must name as many sequences: "
            f"got {len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    _check_dtypes_and_devices(
        {
            "query": query,
            "key": key,
            "value": value,
            "log_forget": log_forget,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
        }
    )
    _check_log_forget_values(log_forget)
    if not _values_are_free(cu_seqlens_q):
        return
    for name, cu, total in (("cu_seqlens_q", cu_seqlens_q, len(query)), ("cu_seqlens_k", cu_seqlens_k, len(key))):
        if int(cu[0]) != 0 or int(cu[-1]) != total or bool((cu.diff() < 0).any()):
            raise ValueError(f"{name} must rise from 0 to {total}, got {cu.tolist()}")
    if bool((cu_seqlens_q.diff() > cu_seqlens_k.diff()).any()):
        raise ValueError("a packed sequence has more queries than keys; queries stand at the end of the keys")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check_tensors(given: Mapping[str, object]) -> None:
    for name, tensor in given.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got a {type(tensor).__name__}")


def _check_rank(tensor: Tensor, name: str, layout: str, rank: int) -> None:
    if tensor.ndim != rank:
        raise ValueError(f"{name} must be {layout}, got {tensor.ndim} dimensions: {_shape(tensor)}")


def _check_not_empty(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise ValueError(f"{name} is empty: got shape {_shape(tensor)}, expected every dimension to be at least 1")


def _check_heads(n_heads: int, n_kv_heads: int) -> None:
    if n_heads % n_kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {n_heads} and {n_kv_heads}")


def _check_dtypes_and_devices(tensors: dict[str, Tensor]) -> None:
    query = tensors["query"]
    if query.dtype not in DTYPES:
        raise ValueError(f"query must be a floating-point tensor, got {query.dtype}")
    for name, tensor in tensors.items():
        if tensor.device != query.device:
            raise ValueError(
                f"all tensors must be on one device: query is on {query.device}, {name} on {tensor.device}"
            )
        if name in ("key", "value") and tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype, got {tensor.dtype}, expected {query.dtype}")
    expected = compute_dtype(query.dtype)
    if tensors["log_forget"].dtype != expected:
        raise ValueError(f"log_forget must be {expected} for {query.dtype} queries, got {tensors['log_forget'].dtype}")


def _check_log_forget_values(log_forget: Tensor) -> None:
    if not _values_are_free(log_forget):
        return
    log_forget = log_forget.detach()
    positive = log_forget > 0
    if bool(positive.any()):
        highest = float(log_forget[positive].max())
        raise ValueError(f"log_forget must be at most 0 (it is log sigmoid of the gate), got {highest:g}")
    if bool((log_forget == -math.inf).any()):
        raise ValueError("log_forget must be finite, got -inf")


def _values_are_free(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
