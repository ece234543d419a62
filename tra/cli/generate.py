"""`tra generate`: let a trained run continue a prompt."""

from __future__ import annotations

import argparse
import json
import sys

from tra.cli.options import add_device, add_json, add_list

DESCRIPTION = """Let a trained run continue a prompt, and show its text as it is generated.

A language model continues a text, a run of a task a sequence of its symbols:
  tra generate runs/text-demo-tra --prompt "Alice was" --temperature 0.8
  tra generate flipflop-tra --prompt w1i0i1r
  tra generate runs/copy-quick-tra --prompt '<bos> c a b <sep>'

Symbols of a task have spaces between them; only those of flip-flop need none.

In bounded memory at any length, with the windows of tra calibrate:
  tra generate runs/text-demo-tra --memory calibrated --max-new-tokens 9999

The most probable token is taken, so the result is always the same, unless
--temperature, --top-k, --top-p or --number ask for sampling."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or flipflop-tra, a run that comes with tra")
    parser.add_argument(
        "--prompt",
        type=str,
        metavar="TEXT",
        help="the text to continue; - reads it from standard input, without the line break at its end. Flip-flop: "
        "symbols in a row, as in w1i0i1r; other tasks: symbols with spaces between, as in '<bos> c a b <sep>'. By "
        "default a language model begins a document, and a task's run gets a test sequence up to its last answer",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="tokens at most. By default 128 for a language model, which also stops where a document ends; for a task "
        "one symbol or, if its answers end with <eos>, up to that: it has learnt nothing else",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the most probable token, 1 samples from the model's probabilities; lower is safer, higher "
        "wilder (default: 0, or 1 if another option asks for sampling)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most probable tokens that together reach P, as in 0.9"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of sampling and of test sequences; the same seed on the same kind of device gives the same text "
        "(default: 0)",
    )
    add_list(
        parser,
        "--stop",
        "TEXT",
        "stop before any of these texts, or before any of these symbols of a task; one that begins with - is "
        "written --stop=-TEXT",
    )
    parser.add_argument(
        "--number", type=int, default=1, metavar="N", help="continuations, or test sequences of a task (default: 1)"
    )
    parser.add_argument(
        "--memory",
        type=str,
        metavar="WINDOW",
        help="TRA and rope: each layer's cache keeps only this many of the newest tokens; calibrated takes the windows "
        "that tra calibrate wrote to the run's folder, FILE.json windows that it wrote elsewhere. At the end a line "
        "says for how many queries older keys may have mattered",
    )
    add_device(parser)
    add_json(
        parser,
        "print a JSON line for each continuation: prompt, continuation, tokens, seed, and the expected answer of a "
        "test sequence",
    )


def run(options: argparse.Namespace) -> int:
    from tra.cli.continuation import choose_prompts, choose_sampling, continue_prompt, output_format
    from tra.cli.memory import choose_memory, guard_line, guard_row, new_cache
    from tra.runs import RunFolder
    from tra.tasks import generator
    from tra.training import pick_device

    for option, value in (("--number", options.number), ("--max-new-tokens", options.max_new_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    device, run = pick_device(options.device), RunFolder.open(options.run)
    config = run.config()
    task = config.task.build()
    text = None if options.prompt is None else _read_prompt(options.prompt)
    output = output_format(task, options.stop)
    prompts, are_equal = choose_prompts(task, config.evaluate, text, options.number, options.seed)
    sampling = choose_sampling(options.temperature, options.top_k, options.top_p, are_equal)
    memory = None if options.memory is None else choose_memory(options.memory, run)
    model = run.load_model(device)
    for index, prompt in enumerate(prompts):
        if index and not options.json:
            print()
        new_tokens = options.max_new_tokens or prompt.answer_length or output.default_max_tokens
        cache = None if memory is None else new_cache(memory, config.model, len(prompt.tokens) + new_tokens)
        continued = continue_prompt(
            model,
            prompt,
            output,
            sampling,
            new_tokens,
            generator(options.seed, "generate", index, device),
            _show_nothing if options.json else _show,
            cache,
        )
        if options.json:
            kept = {} if cache is None or memory is None else {"memory": guard_row(memory, cache)}
            print(json.dumps({"run": options.run, **continued, "seed": options.seed, **kept}), flush=True)
            continue
        if prompt.answer is not None:
            print(f"expected {prompt.answer.strip()}")
        if cache is not None and memory is not None:
            print(guard_line(memory, cache), file=sys.stderr)
    return 0


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise ValueError("the prompt is not UTF-8 text") from None
    if not text:
        raise ValueError("the prompt is empty: it has at least one character")
    return text


def _show(text: str) -> None:
    """Print text without control characters: a model of bytes may generate any, and they act on a terminal."""
    sys.stdout.write("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))
    sys.stdout.flush()


def _show_nothing(text: str) -> None:
    """Leave standard output to the JSON lines."""
