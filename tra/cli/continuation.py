"""How `tra generate` turns prompts into tokens, and tokens into text."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tra import unknown_name
from tra.attention import MECHANISMS, BoundedCache
from tra.config import EvalConfig
from tra.evaluation.exact_match import chosen_splits, draw_test_set
from tra.generation import Sampling, continuation
from tra.model import Decoder
from tra.tasks import FlipFlop, Task
from tra.text import load_tokenizer
from tra.text.task import Stream, Text

DEFAULT_TEXT_TOKENS, DEFAULT_ANSWER_TOKENS = 128, 512
"""New tokens by default: of a language model, and of a task's answer up to its <eos>."""
PREFILL_TOKENS = 2048
"""Tokens of a prompt that are read at a time."""


class Prompt(NamedTuple):
    """The tokens that a run continues."""

    tokens: list[int]
    text: str
    answer: str | None = None  # of a test sequence
    answer_length: int | None = None


class OutputFormat(NamedTuple):
    """How generated tokens become text, and what ends it."""

    token_bytes: Callable[[int], bytes]
    vocabulary: int
    end_tokens: frozenset[int]
    hidden_tokens: frozenset[int]  # not shown
    stop_texts: Sequence[str]
    default_max_tokens: int


class TextStream:
    """Turn the bytes of tokens into text that can be shown: whole characters, and no part of a stop text.

    Args:
        stop_texts: Texts that end the stream, and aren't part of it.
    """

    def __init__(self, stop_texts: Sequence[str] = ()) -> None:
        self.text, self.ended = "", False
        self._stop_texts, self._pending = stop_texts, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: bytes) -> str:
        """Add a token; return the text that can be shown now."""
        self._pending += self._decoder.decode(token)
        found = [start for stop in self._stop_texts if (start := self._pending.find(stop)) >= 0]
        if found:
            self.ended = True
            return self._release(min(found))
        # The end of the text may be the beginning of a stop text.
        begun = (n for stop in self._stop_texts for n in range(1, len(stop)) if self._pending.endswith(stop[:n]))
        return self._release(len(self._pending) - max(begun, default=0))

    def finish(self) -> str:
        """Return the rest, which didn't become a stop text. Half a character is left out."""
        return "" if self.ended else self._release(len(self._pending))

    def _release(self, length: int) -> str:
        released, self._pending = self._pending[:length], self._pending[length:]
        self.text += released
        return released


def continue_prompt(
    model: Decoder,
    prompt: Prompt,
    output: OutputFormat,
    sampling: Sampling,
    max_tokens: int,
    generator: torch.Generator,
    show: Callable[[str], None],
    cache: BoundedCache | None = None,
) -> dict[str, Any]:
    """Continue one prompt, and call `show` with its text and every new piece of text; return the row for --json.

    Args:
        cache: An empty bounded cache to use; by default a cache that holds all tokens.
    """
    stream, tokens = TextStream(output.stop_texts), []
    is_static = generator.device.type == "cuda" and MECHANISMS[model.config.mechanism].takes_key_lengths
    columns = continuation(
        model,
        torch.tensor([prompt.tokens], device=generator.device),
        max_tokens,
        sampling=sampling,
        generator=generator,
        vocabulary=output.vocabulary,
        capacity="static" if is_static and cache is None else None,
        cache=cache,
        prefill_chunk=PREFILL_TOKENS if cache is None else cache.chunk,
    )
    show(prompt.text)
    for column in columns:
        token = int(column)
        tokens.append(token)
        if token not in output.hidden_tokens:
            show(stream.add(output.token_bytes(token)))
        if token in output.end_tokens or stream.ended:
            break
    show(stream.finish() + "\n")
    expected = {} if prompt.answer is None else {"expected": prompt.answer.strip()}
    return {"prompt": prompt.text, "continuation": stream.text, **expected, "tokens": tokens}


def choose_sampling(temperature: float | None, top_k: int | None, top_p: float | None, are_equal: bool) -> Sampling:
    """Return how tokens are chosen; several continuations of equal prompts need sampling."""
    is_limited = top_k is not None or top_p is not None
    if temperature is None:
        temperature = 1.0 if is_limited or are_equal else 0.0
    elif temperature == 0 and is_limited:
        raise ValueError("--top-k and --top-p limit what is drawn; at --temperature 0 nothing is drawn")
    elif temperature == 0 and are_equal:
        raise ValueError("at --temperature 0 every continuation is the same: a --number of them needs more")
    return Sampling(temperature, top_k, top_p)


def output_format(task: Task, stop: Sequence[str]) -> OutputFormat:
    """Return how a run of the task shows its tokens; `stop` is texts of a language model, symbols of a task."""
    if isinstance(task, Text):
        tokenizer = load_tokenizer(task.tokenizer)
        if "" in stop:
            raise ValueError("a --stop text has at least one character")
        ends = frozenset([tokenizer.separator])
        token_bytes = tokenizer.token_bytes.__getitem__
        return OutputFormat(token_bytes, tokenizer.vocab_size, ends, ends, stop, DEFAULT_TEXT_TOKENS)
    space = "" if isinstance(task, FlipFlop) else " "
    stop_tokens = frozenset(_token_ids(task, stop))
    has_end = "<eos>" in task.vocabulary
    return OutputFormat(
        lambda token: (space + task.vocabulary[token]).encode(),
        len(task.vocabulary),
        stop_tokens | ({task.vocabulary.index("<eos>")} if has_end else set()),
        stop_tokens,
        (),
        DEFAULT_ANSWER_TOKENS if has_end else 1,
    )


def choose_prompts(
    task: Task, config: EvalConfig, text: str | None, number: int, seed: int
) -> tuple[Iterator[Prompt], bool]:
    """Return `number` prompts, which are the same text or, without one, test sequences; and whether they are equal."""
    if text is None and not isinstance(task, Text):
        return _test_prompts(task, next(iter(chosen_splits(task, config))), number, seed), False
    prompt = _text_prompt(task, text) if isinstance(task, Text) else _task_prompt(task, text or "")
    return itertools.repeat(prompt, number), number > 1


def _text_prompt(task: Text, text: str | None) -> Prompt:
    """Return the text as a document, or the beginning of one."""
    tokenizer = load_tokenizer(task.tokenizer)
    tokens = [tokenizer.separator] if text is None else Stream.of_text("prompt", text, tokenizer).tokens.tolist()
    return Prompt(tokens, text or "")


def _task_prompt(task: Task, text: str) -> Prompt:
    symbols = list("".join(text.split())) if isinstance(task, FlipFlop) else text.split()
    if not symbols:
        raise ValueError("the prompt is empty: it has at least one symbol")
    tokens = _token_ids(task, symbols)
    if isinstance(task, FlipFlop):
        _check_flipflop(task, symbols)
    return Prompt(tokens, task.render(torch.tensor(tokens)))


def _check_flipflop(task: FlipFlop, symbols: list[str]) -> None:
    """Check the beginning of a sequence by the rules of a whole one, which an added ignore doesn't break."""
    pairs = len(symbols) // 2 * 2
    if symbols[0] != "w":
        raise ValueError(f"a flip-flop sequence starts with w, got {symbols[0]!r}")
    if len(symbols) > pairs and symbols[pairs] not in "wri":
        raise ValueError(f"expected w, r or i at symbol {pairs}, got {symbols[pairs]!r}")
    task.parse("".join(symbols[:pairs] or "w0") + "i0")


def _token_ids(task: Task, symbols: Sequence[str]) -> list[int]:
    ids = {symbol: index for index, symbol in enumerate(task.vocabulary)}
    for symbol in symbols:
        if symbol not in ids:
            if all(part in ids for part in symbol):
                raise ValueError(f"{symbol!r} is no symbol of {task.name}: write {' '.join(symbol)!r}, with spaces")
            line = unknown_name(f"symbol of {task.name}", symbol, task.vocabulary[:100])
            raise ValueError(line if isinstance(task, FlipFlop) else f"{line}; symbols have spaces between them")
    return [ids[symbol] for symbol in symbols]


def _test_prompts(task: Task, split: str, number: int, seed: int) -> Iterator[Prompt]:
    """Yield test sequences, each up to where its last answer begins."""
    for batch in draw_test_set(task, split, number, seed, 1, torch.device("cpu")):
        scored = batch.loss_mask[0].nonzero()[:, 0].tolist()
        first = last = scored[-1]
        while first - 1 in scored:
            first -= 1
        tokens, answer = batch.tokens[0, : first + 1], batch.targets[0, first : last + 1]
        yield Prompt(tokens.tolist(), task.render(tokens), task.render(answer), len(answer))
