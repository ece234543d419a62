"""Presets: functions that return the whole config of a run, by name.

`flipflop`, `copy`, `induct` and `instruct` have the paper's sizes, steps and batches. The paper doesn't give learning
rates for the last three, so those are our choice, and so is everything of `mqar`, `latest` and `demo`. `wikitext` is
the paper's language model; `text-demo` is one that needs no data. Most have a smaller, faster version with `-quick` at
the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tra import unknown_name
from tra.config import EvalConfig, OptimConfig, RunConfig, TaskConfig, TrainConfig
from tra.model import DecoderConfig
from tra.tasks.copy import SMALL


def _mini_as_published(task: TaskConfig, optim: OptimConfig, train: TrainConfig, evaluate: EvalConfig) -> RunConfig:
    """Return a run of the paper's mini model: the authors' block, dropout 0.01."""
    model = DecoderConfig.mini(vocab_size=len(task.build().vocabulary), block="authors", dropout=0.01)
    return RunConfig(task, model, optim, train, evaluate)


def flipflop() -> RunConfig:
    """Return flip-flop as published: mini, 512 symbols, batch 64, 20,000 steps, lr 1e-4."""
    return _mini_as_published(
        TaskConfig("flipflop"),
        OptimConfig(lr=1e-4),
        TrainConfig(steps=20_000, batch_size=64, checkpoint_every=2000),
        EvalConfig(
            examples_of={
                "iid": 16_000,
                "sparse": 160_000,
                "dense": 4_000,
                "2x": 4_000,
                "4x": 2_000,
                "16x": 500,
                "64x": 100,
            },
            batch_tokens=131_072,
        ),
    )


def flipflop_quick() -> RunConfig:
    """Return a small flip-flop: tiny, 128 symbols, 3,000 steps."""
    config = flipflop()
    return dataclasses.replace(
        config,
        task=TaskConfig("flipflop", {"length": 128}),
        model=DecoderConfig.tiny(vocab_size=5, block="authors", dropout=0.01),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=3000, batch_size=64),
        evaluate=EvalConfig(examples=2000, examples_of={"64x": 100}),
    )


def _input_up_to_50(name: str, arguments: dict[str, int] | None = None) -> RunConfig:
    """Return a run on a task whose training inputs have up to 50 symbols."""
    return _mini_as_published(
        TaskConfig(name, arguments or {}),
        OptimConfig(lr=3e-4),
        TrainConfig(steps=100_000, batch_size=128, checkpoint_every=5000),
        EvalConfig(examples=2000, examples_of={} if name == "instruct" else {"64x": 200}),
    )


def _quick(config: RunConfig, steps: int = 5000) -> RunConfig:
    """Return a run with fewer steps at a higher learning rate, evaluated on fewer sequences."""
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=1e-3),
        train=dataclasses.replace(config.train, steps=steps, checkpoint_every=1000),
        evaluate=dataclasses.replace(config.evaluate, examples=500),
    )


def copy() -> RunConfig:
    """Return copy, inputs of 1-50 symbols from 64: mini, batch 128, 100,000 steps."""
    return _input_up_to_50("copy")


def copy_small() -> RunConfig:
    """Return copy with an alphabet of 4, in which symbols repeat."""
    return _input_up_to_50("copy", {"alphabet": SMALL})


def copy_exact() -> RunConfig:
    """Return copy with every training input exactly 50 long: another way to read the paper."""
    return _input_up_to_50("copy", {"shortest": 50})


def induct() -> RunConfig:
    """Return induct, inputs of 2-50 symbols from 64: mini, batch 128, 100,000 steps."""
    return _input_up_to_50("induct")


def induct_small() -> RunConfig:
    """Return induct with an alphabet of 4."""
    return _input_up_to_50("induct", {"alphabet": SMALL})


def induct_exact() -> RunConfig:
    """Return induct with every training input exactly 50 long."""
    return _input_up_to_50("induct", {"shortest": 50})


def instruct() -> RunConfig:
    """Return instruct, seven operations on 0-50 symbols: mini, batch 128, 100,000 steps."""
    return _input_up_to_50("instruct")


def mqar() -> RunConfig:
    """Return multi-query associative recall: mini, 64 tokens, batch 128, 20,000 steps."""
    config = _input_up_to_50("mqar")
    evaluate = EvalConfig(examples=1000, examples_of={"16384": 100, "65536": 20})
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=20_000), evaluate=evaluate)


def latest() -> RunConfig:
    """Return latest, with 16 stores: mini, batch 128, 20,000 steps."""
    config = _input_up_to_50("latest")
    evaluate = EvalConfig(examples=1000, examples_of={"256x": 100})
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=20_000), evaluate=evaluate)


def demo() -> RunConfig:
    """Return the run of `tra demo`: flip-flop of 64 symbols, a minute on a CPU. 2 layers, 2 heads, width 64."""
    return RunConfig(
        TaskConfig("flipflop", {"length": 64}),
        DecoderConfig(vocab_size=5, d_model=64, n_layers=2, n_heads=2, embedding_init="normal"),
        OptimConfig(lr=1e-3, clip=1.0),
        TrainConfig(steps=1000, batch_size=64, log_every=50, checkpoint_every=500),
        EvalConfig(examples=500, examples_of={"16x": 200}, splits=("iid", "sparse", "dense", "4x", "16x")),
    )


def wikitext() -> RunConfig:
    """Return WikiText-103 as published: medium, GPT-2's tokenizer, window 128, batch 64, 100,000 steps.

    The text must be in data/wikitext-103, where `tra prepare` puts it. Learning rate and clipping are our choice.
    """
    task = TaskConfig("text", {"data": "data/wikitext-103", "tokenizer": "gpt2", "window": 128})
    return RunConfig(
        task,
        DecoderConfig.medium(vocab_size=task.build().vocab_size, block="authors", dropout=0.01),
        OptimConfig(lr=1e-3, clip=1.0),
        TrainConfig(steps=100_000, batch_size=64, checkpoint_every=5000),
    )


def wikitext_quick() -> RunConfig:
    """Return the same in 15,000 steps without dropout: minutes on one GPU."""
    config = wikitext()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dropout=0.0),
        train=dataclasses.replace(config.train, steps=15_000),
    )


def text_demo() -> RunConfig:
    """Return the text that ships with the package, byte by byte: tiny, window 128, a minute or two on a CPU."""
    task = TaskConfig("text")
    return RunConfig(
        task,
        DecoderConfig.tiny(vocab_size=task.build().vocab_size, embedding_init="normal"),
        OptimConfig(lr=3e-3, clip=1.0),
        TrainConfig(steps=600, batch_size=32, log_every=50, checkpoint_every=300),
        EvalConfig(windows=(128, 256, 512, 1024, 2048), batch_tokens=8192),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "flipflop": flipflop,
    "flipflop-quick": flipflop_quick,
    "copy": copy,
    "copy-small": copy_small,
    "copy-exact": copy_exact,
    "copy-quick": lambda: _quick(copy()),
    "induct": induct,
    "induct-small": induct_small,
    "induct-exact": induct_exact,
    "induct-quick": lambda: _quick(induct()),
    "instruct": instruct,
    "instruct-quick": lambda: _quick(instruct()),
    "latest": latest,
    "latest-quick": lambda: _quick(latest(), steps=3000),
    "mqar": mqar,
    "mqar-quick": lambda: _quick(mqar(), steps=3000),
    "wikitext": wikitext,
    "wikitext-quick": wikitext_quick,
    "text-demo": text_demo,
}


def preset(name: str) -> RunConfig:
    """Return the config of a preset, checked."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]().resolved()
