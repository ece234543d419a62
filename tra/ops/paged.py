"""The operator over keys and values in pages: a pool, with a table that says which pages each row has.

Logical page l of a row is at column `l % N` of its table. A table whose pages are reused in turn is thus a ring, and a
row may grow without limit as long as its queries see no further back than the table reaches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tra.ops import choice, inputs
from tra.ops.api import IMPLEMENTATIONS, attend
from tra.ops.full_map import full_attention_map
from tra.ops.newest_first import attend_newest_first, rows_done
from tra.ops.options import AttentionOptions
from tra.ops.triton.forward import check_availability
from tra.ops.visible import PagedKeys


def threshold_relative_attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    log_forget: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    threshold: float = 0.0,
    margin: float = 0.0,
    score_bound: float | None = None,
    tolerance: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return `threshold_relative_attention` over keys and values that lie in pages.

    Decoding (at most 16 queries) reads the pages in place, and only as many as a walk needs. For prompts, which have
    more queries, the pages that they see are first copied side by side.

    Args:
        query: `[B, H, Tq, D]`, the last tokens of their rows.
        key_pages: `[P, Hkv, page_size, D]`, shared by all rows; `page_size` is a multiple of 64. Slots that hold no
            key must be finite: a NaN there may reach the output as 0 · NaN.
        value_pages: `[P, Hkv, page_size, Dv]`.
        log_forget: `[B, H, Tq]`, as for `threshold_relative_attention`.
        block_table: `[B, N]` int32: key t of row b is in page `block_table[b, t // page_size % N]`, at
            `t % page_size`. Every entry is a page of the pool, also entries that are not in use.
        key_lengths: `[B]`: tokens that each row has had, the queries' included. Without a window at most
            `N · page_size`.
        window: Largest number of keys that a query sees, its own included; all by default. If a row has had more keys
            than its table holds, `window + Tq - 1` keys must fit the table.

    The other arguments are those of `threshold_relative_attention`.

    Returns:
        `[B, H, Tq, Dv]`. The same keys stay and count as in a call with contiguous keys.
    """
    inputs.check_paged(query, key_pages, value_pages, log_forget, block_table, key_lengths, window)
    options = AttentionOptions.resolve(
        query.shape[-1], query.dtype, scale, threshold, score_bound, 0.0, tolerance, margin
    )
    keys = PagedKeys(key_pages, value_pages, block_table, key_lengths, window)
    call = choice.Call(query, *keys.stand_ins(query.shape[2]), log_forget, options)
    if impl == "auto":
        impl = choice.choose(choice.AUTO, call)
    elif impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    with inputs.without_autocast(query.device):
        if impl == "triton" and choice.choose(choice.WITHIN_TRITON, call) == "decode":
            return _decode(query, keys, log_forget, options)
        if impl == "newest-first":
            visible, read, end = keys.newest_pages(query.shape[2])
            return attend_newest_first(query, read, end, log_forget, visible, options, key_pages.shape[2])
        visible, read, _ = keys.newest_pages(query.shape[2])
        return attend(query, *read(0), log_forget, visible, options, impl)


def _decode(query: Tensor, keys: PagedKeys, log_forget: Tensor, options: AttentionOptions) -> Tensor:
    check_availability(query, keys.value)
    first, last = keys.first_turn(query.shape[2])
    if options.scale < 0:  # the kernels take a positive one
        query = -query
    return torch.ops.tra.decode(
        query, keys.key, keys.value, log_forget, first, last, None, abs(options.scale), options.threshold,
        options.margin, options.score_bound, options.tolerance, keys.table, keys.most_keys(query.shape[2]),
    )  # fmt: skip


@torch.no_grad()
def windows_suffice(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    log_forget: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    window: int,
    score_bound: float,
    threshold: float = 0.0,
    margin: float = 0.0,
    tolerance: float | None = None,
) -> Tensor:
    """Return the queries, `[B, H, Tq]` bool, whose keys older than the window provably weigh less than the tolerance.

    This is the bound of the early stop at the window's end, for all older keys of the row. It computes the whole map
    of the window. The arguments are those of `threshold_relative_attention_paged`.
    """
    options = AttentionOptions.resolve(
        query.shape[-1], query.dtype, None, threshold, score_bound, 0.0, tolerance, margin
    )
    n_queries = query.shape[2]
    keys = PagedKeys(key_pages, value_pages, block_table, key_lengths, window)
    visible, read, _ = keys.newest_pages(n_queries)
    key, _ = read(0)
    with inputs.without_autocast(query.device):
        found = full_attention_map(query, key, log_forget, visible, options)
        older = keys.positions(n_queries) - window + 1
        return rows_done(found, log_forget, older.clamp(min=0)[:, None], options)
