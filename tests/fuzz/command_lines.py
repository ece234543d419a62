"""Command lines of every verb, drawn from the options that its parser has."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import values

VERBS = ("train",) * 6 + ("evaluate",) * 6 + ("generate",) * 5 + ("attend",) * 2 + ("prepare",) * 4 + ("suite",) * 5
VERBS += ("calibrate",) * 3
ODD_SUITES = ("suite.py:wrong", "suite.py:nothing", "suite.py:none", "a.txt:x", "bad.py:x", "cells", "cells.tar.gz")
RARE_VERBS = ("report", "export", "bench", "demo")


@cache
def parser_of(verb: str) -> argparse.ArgumentParser:
    from tra.cli import main

    return main.parser_of(verb)


@cache
def config_keys() -> tuple[str, ...]:
    from tra.config import dotted_keys
    from tra.presets import preset

    keys = [
        *dotted_keys(preset("demo").to_dict()),
        "task.arguments.length",
        "task.arguments.alphabet",
        "task.arguments",
    ]
    return (*keys, "task.arguments.data", "task.arguments.window", "evaluate.examples_of.iid", "model", "train", "x.y")


def overrides() -> st.SearchStrategy[str]:
    from tra.attention import MECHANISMS
    from tra.tasks import TASKS

    good = st.sampled_from(
        [f"model.mechanism={name}" for name in MECHANISMS]
        + [f"task.name={name}" for name in (*TASKS, "text")]
        + ["train.seed=3", "optim.clip=1", "model.n_layers=2", "model.block=authors", "optim.decay=none"]
        + ["train.precision=bfloat16", "model.qk_norm=true", "model.dropout=0.5", "evaluate.splits=[]", "train.steps=1"]
        + [
            "model.margin=2",
            "model.margin=inf",
            "model.threshold=-1",
            "train.parallel=fsdp",
            "model.arguments.window=3",
        ]
        + ["train.checkpoint_activations=true", "task.name=own_task.py:Reverse", "task.arguments={}"]
        + [f"model.mechanism={name}" for name in (*values.OWN_NAMES, "own_mechanism.py:Windowed")]
    )
    odd_value = st.one_of(values.number_texts(), values.texts(), values.json_values().map(values.as_json))
    odd = st.tuples(st.sampled_from(config_keys()), odd_value).map("=".join)
    return st.one_of(good, odd, odd, values.texts()).map(without_compiler)


def without_compiler(text: str) -> str:
    """Return text that doesn't ask for the compiler, which takes half a minute."""
    return text if "compile" not in text else text.replace('"on"', '"off"').replace("=on", "=off")


def _argument(action: argparse.Action) -> st.SearchStrategy[str]:
    """Return a strategy of values of one argument; one that comes later is known by its type alone."""
    from tra.attention import MECHANISMS
    from tra.presets import PRESETS
    from tra.suite import SUITES

    known: dict[str, Callable[[], st.SearchStrategy[str]]] = {
        "changes": overrides,
        "preset": lambda: st.sampled_from((*PRESETS, "demo", "demo", "none")),
        "device": lambda: st.sampled_from(("cpu",) * 6 + ("cuda", "meta", "mps", "xpu", "cpu:9", "gpu", "", "cuda:9")),
        "names": lambda: st.sampled_from(("suite.py:mine",) * 8 + (*SUITES, *ODD_SUITES)),
        "action": lambda: st.sampled_from(("run", "status", "table", "merge", "no")),
        "only": lambda: st.sampled_from((*MECHANISMS, "flip", "none")),
        "splits": lambda: st.sampled_from(("iid", "sparse", "dense", "4x", "train", "none", "")),
        "prompt": lambda: st.one_of(st.sampled_from(("w1i0r", "w1i0i1r", "-", "x", "")), values.texts()),
        "time_limit": lambda: st.sampled_from(("1s", "9m", "0", "1h30m", "x", "", "9" * 400 + "s", "-1")),
        "budget": lambda: st.sampled_from(("30s", "9m", "0", "x", "9" * 400 + "s")),
        "paths": values.paths,
        "runs": values.paths,
        "run": values.paths,
        "tokenizer": lambda: st.sampled_from(("bytes", "bytes", "bytes", "gpt2", "x")),
        "sequences": lambda: st.one_of(st.sampled_from(("2", "3")), values.number_texts()),
        "what": lambda: st.sampled_from(("decode", "x", "op", "step")),
        "imports": lambda: st.one_of(st.sampled_from(("own_mechanism.py", "own_task.py") * 4 + values.OWN_FILES)),
        "memory": lambda: st.one_of(st.sampled_from(values.MEMORIES), values.number_texts()),
        "tolerance": lambda: st.sampled_from(("0.001", "0.5", "1e-300", "0", "1", "nan", "inf", "-1", "1e400")),
        "length": lambda: st.one_of(st.sampled_from(("8", "16", "64")), values.number_texts()),
        "max_new_tokens": lambda: st.one_of(st.sampled_from(("1", "4")), values.number_texts()),
    }
    if action.dest in known:
        return known[action.dest]()
    odd = st.one_of(values.number_texts(), values.texts())
    if action.choices is not None:
        return st.one_of(st.sampled_from([str(choice) for choice in action.choices]), odd)
    if action.type is int:
        return st.one_of(st.sampled_from(("1", "2", "8")), values.number_texts(), odd)
    if action.type is float:
        return st.one_of(st.sampled_from(("0.5", "1")), values.number_texts())
    is_path = getattr(action.type, "__name__", "") == "Path" or action.metavar in ("FILE", "FOLDER", "RUN", "STORE")
    return values.paths() if is_path else odd


@st.composite
def command_lines(draw: st.DrawFn, verb: str | None = None) -> tuple[str, ...]:
    """Draw a verb, its positional arguments, and some of its options with values."""
    if verb is None:
        rare = draw(st.integers(0, 19)) == 0
        verb = draw(st.sampled_from(RARE_VERBS if rare else VERBS))
    words: list[list[str]] = []
    seen = set()
    actions = [action for action in parser_of(verb)._actions if action.dest != "help"]
    options = [action for action in actions if action.option_strings]
    for action in actions:
        if not action.option_strings:
            words.append(draw(st.lists(_argument(action), min_size=1, max_size=_most(action))))
    for action in draw(st.lists(st.sampled_from(options), max_size=4, unique_by=id)) if options else []:
        words.append(_option(draw, action))
        seen.add(action.dest)
    if verb == "train" and not seen & {"preset", "config", "resume"} and draw(st.integers(0, 9)):
        words.append(["--preset", "demo"])
    if verb == "evaluate" and "examples" not in seen and draw(st.integers(0, 9)):
        words.append(["--splits", "iid"])
    if draw(st.integers(0, 9)) == 0:
        words.append([draw(values.texts())])
    if draw(st.integers(0, 4)) == 0:
        words = list(draw(st.permutations(words)))
    return (verb, *(word.replace("\0", "") for group in words for word in group))


def _option(draw: st.DrawFn, action: argparse.Action) -> list[str]:
    option = draw(st.sampled_from(list(action.option_strings)))
    if action.nargs == 0:
        return [option]
    number = action.nargs if isinstance(action.nargs, int) else 1 if action.nargs is None else draw(st.integers(0, 2))
    given: list[Any] = [draw(_argument(action)) for _ in range(number)]
    return [f"{option}={given[0]}"] if number == 1 and draw(st.integers(0, 4)) == 0 else [option, *given]


def _most(action: argparse.Action) -> int:
    return 1 if action.nargs is None else 3
