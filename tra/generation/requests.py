"""Requests to a server, and their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tra.generation.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued."""

    tokens: Sequence[int]
    """The prompt's ids, at least one."""
    max_new_tokens: int
    """Most new tokens."""
    sampling: Sampling = GREEDY
    """How tokens are chosen."""
    seed: int | None = None
    """Seed of sampling: the text is that of `Decoder.generate` with a generator of this seed. None is random."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end the text."""


class Completion(NamedTuple):
    """A finished request."""

    number: int
    """The request's number, in the order in which requests were submitted."""
    request: Request
    tokens: list[int]
    """The new tokens, including the stop token."""


@dataclass(eq=False)
class Text:
    """The state of an unfinished request."""

    number: int
    request: Request
    generator: torch.Generator | None
    tokens: list[int]
    """Prompt and new tokens so far."""
    stored: int = 0
    """Number of tokens whose keys and values are in pages: while decoding, all but the last token."""
    pages: dict[int, int] = field(default_factory=dict)
    """Page of the pool for each page of the text, except pages that no window reaches any more."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the text's first full pages, see `page_keys`."""

    @property
    def reads_prompt(self) -> bool:
        """Whether more than the last token has to be read: the prompt, or the whole text after it lost its pages."""
        return len(self.tokens) - self.stored > 1

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.tokens) :]
