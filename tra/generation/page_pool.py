"""Which pages of a pool are free, how many texts use each, and which hold a beginning that another text may share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from tra.attention.shared.pages import PAGE_SIZE


class PagePool:
    """Hands out the numbers of pages and takes them back.

    A page that was given a key keeps its contents when nobody uses it any more, until no page is free: then the one
    that was used longest ago is handed out.

    Args:
        pages: Pages of the pool.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unused: dict[int, None] = {}
        """Pages with a key that nobody uses, the longest unused first."""

    @property
    def available(self) -> int:
        """Pages that `take` could hand out."""
        return len(self._free) + len(self._unused)

    def take(self) -> int | None:
        """Return a page that nobody uses, which then has one user; None if there is none."""
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
        """Return the page with this key, which then has one user more; None if there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._users[page] += 1
            self._unused.pop(page, None)
        return page

    def remember(self, page: int, key: bytes) -> None:
        """Give a page a key, unless another page has it already."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, page: int) -> None:
        """Take a page back from one of its users."""
        self._users[page] -= 1
        assert self._users[page] >= 0
        if self._users[page] == 0:
            if page in self._key_of:
                self._unused[page] = None
            else:
                self._free.append(page)


def page_keys(tokens: Sequence[int], keys: list[bytes], pages: int) -> None:
    """Extend the keys of a text's first pages to `pages` of them: each a digest of all tokens up to the page's end."""
    for page in range(len(keys), pages):
        part = array("q", tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]).tobytes()
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + part).digest())
