"""Track the pages of a pool: which are free, how many texts use each, and which other texts may share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from tra.attention.shared.pages import PAGE_SIZE


class PagePool:
    """Allocates pages by number, and counts their users.

    A page that has a key keeps its contents when it has no users, so that another text may find it. Once no other page
    is free, the least recently used of these is allocated.

    Args:
        pages: Pages of the pool.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unused: dict[int, None] = {}
        """Pages with a key and without users, the least recently used first."""

    @property
    def available(self) -> int:
        """Number of pages that `take` could return."""
        return len(self._free) + len(self._unused)

    def take(self) -> int | None:
        """Return a page without users, and count one user for it; None if there is none."""
        if self._free:
            page = self._free.pop()
        elif self._unused:
            page = next(iter(self._unused))
            del self._unused[page], self._page_of[self._key_of.pop(page)]
        else:
            return None
        self._users[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        """Return the page with this key, and count one more user for it; None if there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._users[page] += 1
            self._unused.pop(page, None)
        return page

    def remember(self, page: int, key: bytes) -> None:
        """Set the key of a page, unless another page has this key."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, page: int) -> None:
        """Count one user less for a page."""
        self._users[page] -= 1
        assert self._users[page] >= 0
        if self._users[page] == 0:
            if page in self._key_of:
                self._unused[page] = None
            else:
                self._free.append(page)


def page_keys(tokens: Sequence[int], keys: list[bytes], pages: int) -> None:
    """Extend the list of keys of a text's first pages to `pages` keys: digests of all tokens up to each page's end."""
    for page in range(len(keys), pages):
        part = array("q", tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + part).digest())
