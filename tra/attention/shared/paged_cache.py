"""The base of caches in pages: rows whose tokens are written to the pages of a table."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tra.attention.shared.cache import PackedLayer, PackedRows
from tra.attention.shared.pages import PAGE_SIZE


class PagedRows(PackedRows):
    """Rows whose tokens are written to the pages of a table, one page after another."""

    def begin(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `PackedRows`."""
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        return super().begin(x, key_mask)

    def places(self, table: Tensor, pinned: int, padding_page: int) -> tuple[Tensor, Tensor]:
        """Return page and slot of each new token, `[B, T]`.

        They are the same for all layers whose tables have the same number of columns. The first `pinned` columns keep
        the first pages; the other columns are reused in turn.
        """
        kind = (table.shape[1], pinned)
        if kind not in self._places:
            position = self.new_positions.clamp(min=0)
            column = position // PAGE_SIZE
            turning = pinned + (column - pinned).remainder(table.shape[1] - pinned)
            column = torch.where(column < pinned, column, turning)
            page = table.long().gather(1, column).masked_fill(self.is_padding, padding_page)
            self._places[kind] = page, position % PAGE_SIZE
        return self._places[kind]


class PagedLayer(PackedLayer):
    """One layer of a cache in pages."""

    def write(self, key: Tensor, value: Tensor, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Write new keys and values `[B, Hkv, T, ·]`, and return the pools `[P, Hkv, page, ·]`."""
        assert self._buffers is not None
        page, slot = places
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            self.check(buffer, new)
            buffer[page, slot] = new.transpose(1, 2)
        key_pool, value_pool = (buffer.transpose(1, 2) for buffer in self._buffers)
        return key_pool, value_pool


def layer_windows(n_layers: int, windows: int | Sequence[int]) -> tuple[int, ...]:
    """Return a window for each layer, checked."""
    each = windows if isinstance(windows, Iterable) else (windows,) * n_layers
    windows = _whole_numbers(each, windows)
    _check_number(len(windows), n_layers)
    return windows


def windows_by_layer_or_head(
    n_layers: int, windows: int | Sequence[int | Sequence[int]]
) -> tuple[int | tuple[int, ...], ...]:
    """Return for each layer a window, or one for each of its heads, checked."""
    each = windows if isinstance(windows, Iterable) else (windows,) * n_layers
    found = tuple(
        _whole_numbers([layer], windows)[0] if _is_number(layer) else _whole_numbers(layer, windows)  # type: ignore[arg-type]
        for layer in each
    )
    _check_number(len(found), n_layers)
    return found


def _is_number(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _whole_numbers(numbers: Iterable[object], given: object) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(number) for number in numbers)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"windows must be whole numbers, got {given!r}") from None
    if not found or min(found) < 1:
        raise ValueError(f"windows must be at least 1, got {min(found) if found else given!r}")
    return found


def _check_number(found: int, n_layers: int) -> None:
    if found != n_layers:
        raise ValueError(f"windows must be one number or one for each of {n_layers} layers, got {found}")
