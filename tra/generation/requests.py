"""What is asked of a server, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tra.generation.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt, and how it goes on."""

    tokens: Sequence[int]
    """The prompt's ids, at least one."""
    max_new_tokens: int
    """Tokens after which it is finished."""
    sampling: Sampling = GREEDY
    """How a token is chosen."""
    seed: int | None = None
    """Of what is drawn: the text is then that of `Decoder.generate` with a generator of this seed. None is any."""
    stop_tokens: Sequence[int] = ()
    """It is finished after the first of them."""


class Completion(NamedTuple):
    """A finished request."""

    number: int
    """Its number, in the order in which requests came."""
    request: Request
    tokens: list[int]
    """The new tokens, a stop token included."""


@dataclass(eq=False)
class Text:
    """A request on its way."""

    number: int
    request: Request
    generator: torch.Generator | None
    tokens: list[int]
    """Prompt and new tokens."""
    stored: int = 0
    """Tokens whose keys and values are in pages. All but the last where it decodes."""
    pages: dict[int, int] = field(default_factory=dict)
    """Page of the pool for each page of the text, without those beyond every window."""
    keys: list[bytes] = field(default_factory=list)
    """Of its first full pages, see `page_keys`."""

    @property
    def reads_prompt(self) -> bool:
        """Whether more than the last token is to be read: of the prompt, or again after it had to wait."""
        return len(self.tokens) - self.stored > 1

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.tokens) :]
