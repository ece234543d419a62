"""`tra generate`: a run goes on where a prompt ends."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import tyro

from tra import unknown_name
from tra.attention import MECHANISMS
from tra.cli.options import Json
from tra.evaluation import exact_match as evaluation
from tra.generation import Sampling, continuation
from tra.model import Decoder
from tra.runs import RunFolder
from tra.tasks import FlipFlop, Task
from tra.tasks import generator as stream_of
from tra.text import load_tokenizer
from tra.text.task import Stream, Text
from tra.training import trainer as training

TEXT_TOKENS, ANSWER_TOKENS = 128, 512
"""New tokens by default: of a language model, and of a task's answer up to its <eos>."""
PREFILL = 2048
"""Tokens of a prompt that are read at a time."""


def generate(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None,
    max_new_tokens: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = None,
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None,
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None,
    seed: int = 0,
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")] = (),
    number: int = 1,
    device: str | None = None,
    as_json: Json = False,
) -> int:
    """Let a trained run go on from a prompt, and show its text as it comes.

    A language model continues a text: tra generate runs/text-demo-tra --prompt "Alice was" --temperature 0.8. A run of
    a task continues a sequence of its symbols: tra generate flipflop-tra --prompt w1i0i1r. The likeliest token is
    taken, always the same, unless --temperature, --top-k, --top-p or --number ask for sampling.

    Args:
        run: A run folder, or the name of a run that ships with the package (flipflop-tra).
        prompt: A text; - reads it from standard input, without the line break at its end. Of flip-flop symbols in a
            row, as in w1i0i1r; of other tasks symbols with spaces between, as in "<bos> c a b <sep>". By default a
            language model begins a document, and a task's run gets a test sequence up to its last answer.
        max_new_tokens: Tokens at most. By default 128 of a language model, which also stops where a document ends; of a
            task one symbol or, where its answers end with <eos>, up to that: nothing else of it was learnt.
        temperature: 0 takes the likeliest token, 1 draws as the model says, less is safer, more is wilder. 0 by
            default, 1 when sampling is asked for otherwise.
        top_k: Draw from the K likeliest tokens.
        top_p: Draw from the likeliest tokens that together have this probability, as in 0.9.
        seed: Of what is drawn, and of a task's test sequences. On one kind of device it gives the same text again.
        stop: End before any of these texts; of a task, before any of these symbols.
        number: How many continuations of the prompt, or test sequences of a task.
        device: cpu or cuda; a GPU by default if there is one.
        as_json: Print a JSON line for each instead: prompt, continuation, tokens (all that were said), seed, and of a
            test sequence the expected answer.
    """
    if number < 1:
        raise ValueError(f"--number must be at least 1, got {number}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    chosen, folder = training.pick_device(device), RunFolder.open(run)
    config = folder.config()
    task = config.task.build()
    given = None if prompt is None else _read(prompt)
    speaker = _text_speaker(task, stop) if isinstance(task, Text) else _task_speaker(task, stop)
    if isinstance(task, Text):
        prompts = [_text_prompt(task, given)] * number
    elif given is not None:
        prompts = [_task_prompt(task, given)] * number
    else:
        prompts = _test_prompts(task, next(iter(evaluation.chosen_splits(task, config.evaluate))), number, seed)
    repeated = number > 1 and prompts[0] is prompts[1]
    sampling = _sampling(temperature, top_k, top_p, repeated)
    model = folder.load_model(chosen)
    for index, asked in enumerate(prompts):
        if index and not as_json:
            print()
        row = _continue(
            model,
            asked,
            speaker,
            sampling,
            max_new_tokens or asked.due or speaker.most,
            stream_of(seed, "generate", index, chosen),
            (lambda _: None) if as_json else _print,
        )
        if as_json:
            print(json.dumps({"run": run, **row, "seed": seed}), flush=True)
        elif asked.expected is not None:
            print(f"expected {asked.expected.strip()}")
    return 0


class Prompt(NamedTuple):
    """Where a run begins."""

    tokens: list[int]
    text: str
    expected: str | None = None  # the answer of a test sequence
    due: int | None = None  # its length


class Speaker(NamedTuple):
    """How tokens are said, and what ends them."""

    bytes_of: Callable[[int], bytes]
    vocabulary: int
    ends: frozenset[int]  # tokens after which nothing comes
    silent: frozenset[int]  # tokens that aren't shown
    stops: tuple[str, ...]  # texts before which it ends
    most: int  # tokens, unless told


class Speech:
    """Text of tokens as they come: whole characters, and nothing that may be the beginning of a stop text.

    Args:
        stops: Texts that end it, and aren't part of it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.text, self.ended = "", False
        self._stops, self._held = stops, ""
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, piece: bytes) -> str:
        """What can be shown now."""
        self._held += self._characters.decode(piece)
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.ended = bool(found)
        begun = (
            size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size])
        )  # what may become a stop text
        return self._show(min(found) if found else len(self._held) - max(begun, default=0))

    def finish(self) -> str:
        """What was held back and didn't become a stop text. Half a character is left out."""
        return "" if self.ended else self._show(len(self._held))

    def _show(self, size: int) -> str:
        shown, self._held = self._held[:size], self._held[size:]
        self.text += shown
        return shown


def _continue(
    model: Decoder,
    prompt: Prompt,
    speaker: Speaker,
    sampling: Sampling,
    most: int,
    generator: torch.Generator,
    show: Callable[[str], None],
) -> dict[str, Any]:
    speech, said = Speech(speaker.stops), []
    static = generator.device.type == "cuda" and MECHANISMS[model.config.mechanism].takes_key_lengths
    columns = continuation(
        model,
        torch.tensor([prompt.tokens], device=generator.device),
        most,
        sampling=sampling,
        generator=generator,
        vocabulary=speaker.vocabulary,
        capacity="static" if static else None,
        prefill_chunk=PREFILL,
    )
    show(prompt.text)
    for column in columns:
        said.append(int(column))
        if said[-1] not in speaker.silent:
            show(speech.add(speaker.bytes_of(said[-1])))
        if said[-1] in speaker.ends or speech.ended:
            break
    show(speech.finish() + "\n")
    expected = {} if prompt.expected is None else {"expected": prompt.expected.strip()}
    return {"prompt": prompt.text, "continuation": speech.text, **expected, "tokens": said}


def _print(text: str) -> None:
    """Control characters, which a model of bytes may say, could do anything to a terminal."""
    sys.stdout.write("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))
    sys.stdout.flush()


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None, repeated: bool) -> Sampling:
    cuts = top_k is not None or top_p is not None
    if temperature is None:
        temperature = 1.0 if cuts or repeated else 0.0
    elif temperature == 0 and cuts:
        raise ValueError("--top-k and --top-p cut what is drawn from; at --temperature 0 nothing is drawn")
    elif temperature == 0 and repeated:
        raise ValueError("at --temperature 0 every continuation is the same: a --number of them needs more")
    return Sampling(temperature, top_k, top_p)


def _read(prompt: str) -> str:
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise ValueError("the prompt is not UTF-8 text") from None
    if not text:
        raise ValueError("the prompt is empty: it has at least one character")
    return text


def _text_speaker(task: Text, stop: tuple[str, ...]) -> Speaker:
    tokenizer = load_tokenizer(task.tokenizer)
    if "" in stop:
        raise ValueError("a --stop text has at least one character")
    ends = frozenset([tokenizer.separator])
    return Speaker(tokenizer.token_bytes.__getitem__, tokenizer.vocab_size, ends, ends, stop, TEXT_TOKENS)


def _text_prompt(task: Text, prompt: str | None) -> Prompt:
    """As a document, or the beginning of one."""
    tokenizer = load_tokenizer(task.tokenizer)
    tokens = [tokenizer.separator] if prompt is None else Stream.of_text("prompt", prompt, tokenizer).tokens.tolist()
    return Prompt(tokens, prompt or "")


def _task_speaker(task: Task, stop: tuple[str, ...]) -> Speaker:
    space = "" if isinstance(task, FlipFlop) else " "
    silent = frozenset(_symbols(task, stop))
    has_end = "<eos>" in task.vocabulary
    return Speaker(
        lambda token: (space + task.vocabulary[token]).encode(),
        len(task.vocabulary),
        silent | ({task.vocabulary.index("<eos>")} if has_end else set()),
        silent,
        (),
        ANSWER_TOKENS if has_end else 1,
    )


def _task_prompt(task: Task, prompt: str) -> Prompt:
    symbols = list("".join(prompt.split())) if isinstance(task, FlipFlop) else prompt.split()
    if not symbols:
        raise ValueError("the prompt is empty: it has at least one symbol")
    tokens = _symbols(task, symbols)
    if isinstance(task, FlipFlop):  # by the rules of a whole row, which an ignore or two don't break
        whole, rest = symbols[: len(symbols) // 2 * 2], symbols[len(symbols) // 2 * 2 :]
        if symbols[0] != "w":
            raise ValueError(f"a flip-flop sequence starts with w, got {symbols[0]!r}")
        if rest and rest[0] not in "wri":
            raise ValueError(f"expected w, r or i at symbol {len(whole)}, got {rest[0]!r}")
        task.parse("".join(whole or "w0") + "i0")
    return Prompt(tokens, task.render(torch.tensor(tokens)))


def _symbols(task: Task, symbols: Sequence[str]) -> list[int]:
    places = {symbol: place for place, symbol in enumerate(task.vocabulary)}
    for symbol in symbols:
        if symbol not in places:
            raise ValueError(unknown_name(f"symbol of {task.name}", symbol, task.vocabulary[:100]))
    return [places[symbol] for symbol in symbols]


def _test_prompts(task: Task, split: str, number: int, seed: int) -> list[Prompt]:
    """Test sequences up to where their last answer is due."""
    found = []
    for batch in evaluation.draw_test_set(task, split, number, seed, 1, torch.device("cpu")):
        due = batch.loss_mask[0].nonzero()[:, 0].tolist()
        end = first = due[-1]
        while first - 1 in due:
            first -= 1
        tokens, answer = batch.tokens[0, : first + 1], batch.targets[0, first : end + 1]
        found.append(Prompt(tokens.tolist(), task.render(tokens), task.render(answer), len(answer)))
    return found
