"""The config of a run: frozen dataclasses, their JSON form, and overrides such as `train.steps=100`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tra import unknown_name
from tra.attention import BUILT_IN_MECHANISMS, MECHANISMS, constructor_arguments
from tra.model import Decoder, DecoderConfig, NumberOrInfinity
from tra.runs.extensions import changed_sources, check_sources, import_named, register, sources
from tra.tasks import BUILT_IN_TASKS, TASKS, Task
from tra.text.task import Text

VERSION = 1
"""Version of the JSON form. A file of a newer version is refused."""
MAX_NUMBER = 2**63 - 1
"""Largest number of a config: seeds and sizes have 64 bits in torch."""

MAX_LAYERS = 10_000
MAX_PARAMETERS = 10**12
MAX_BATCH_TOKENS = 2**36
"""Sizes beyond these are mistakes: no memory holds them."""


@dataclass(frozen=True)
class TaskConfig:
    """The task that a run learns."""

    name: str = "flipflop"
    """A name from `tra.tasks.TASKS`, "text", of an installed package, or FILE.py:NAME of an imported file."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task that differ from the paper's."""

    def build(self) -> Task:
        if self.name != Text.name:
            register("task", self.name, [Text.name])
        task: type[Task] = Text if self.name == Text.name else TASKS[self.name]
        known = constructor_arguments(task)
        for argument, value in self.arguments.items():
            if argument not in known:
                raise ValueError(unknown_name(f"argument of {self.name}", argument, known))
            convert_json(value, known[argument].annotation, f"task.arguments.{argument}")
        missing = [name for name, one in known.items() if one.default is one.empty and name not in self.arguments]
        if missing:
            raise ValueError(f"{self.name} needs its argument {missing[0]}: give task.arguments.{missing[0]}")
        make: Any = task
        return make(**self.arguments)


@dataclass(frozen=True)
class OptimConfig:
    """Settings of AdamW and of the learning rate over the steps."""

    lr: float = 1e-4
    """Highest learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    warmup: float = 0.05
    """Fraction of the steps in which the rate rises linearly."""
    decay: Literal["cosine", "none"] = "cosine"
    """How the rate falls after the warm-up: to 0 along a cosine, or not at all."""
    clip: float | None = None
    """Largest norm of the gradients; None: no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf or not 0 <= self.warmup <= 1 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optim needs lr > 0, 0 <= warmup <= 1 and weight_decay >= 0, all finite, got {self}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"optim.clip must be above 0 or null, got {self.clip}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optim.beta1 and optim.beta2 must lie in [0, 1), got {self.beta1} and {self.beta2}")

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup_steps = round(self.warmup * steps)
        if step < warmup_steps:
            return self.lr * (step + 1) / warmup_steps
        if self.decay == "none":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2


@dataclass(frozen=True)
class TrainConfig:
    """Length, batches, precision and records of training."""

    steps: int = 1000
    batch_size: int = 64
    """Sequences per step, all `accumulate` pieces together."""
    accumulate: int = 1
    """Pieces of a batch that are computed one after another, to save memory."""
    seed: int = 0
    """Seed of initialisation, data and dropout."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast with float32 weights; "auto" is bfloat16 on a GPU, else float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Use torch.compile and, on a GPU, one CUDA graph for the whole step; "auto" is "on" on a GPU, else "off". Several
    processes compile each layer alone, without a graph."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """How the processes that torchrun starts share a step: "ddp" keeps all weights in each, "fsdp" a part of them;
    "auto" is "ddp", and "none" refuses more than one. A single process is the same with any of them."""
    context_parallel: int = 1
    """Processes that share each row, a part of its tokens in each: for rows too long for one. They are neighbours, and
    groups of them share the batch by `parallel`. For TRA. Where there are fewer processes, all of them share."""
    checkpoint_activations: bool = False
    """Keep only the inputs of layers for the backward pass, and compute the rest again: less memory, more time."""
    log_every: int = 100
    """Steps between lines of metrics.jsonl."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last two are kept."""
    max_nonfinite_steps: int = 3
    """Logged steps in a row whose loss is not finite, at which the run ends. Its last good checkpoint is kept."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulate", "context_parallel", "log_every", "checkpoint_every")
        for name in (*counts, "max_nonfinite_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"train.batch_size must be a multiple of train.accumulate, got {self.batch_size} and {self.accumulate}"
            )


@dataclass(frozen=True)
class EvalConfig:
    """Defaults of `tra evaluate`."""

    examples: int = 1000
    """Test sequences per split."""
    examples_of: dict[str, int] = field(default_factory=dict)
    """Another number for some splits."""
    splits: tuple[str, ...] = ()
    """Splits to measure; empty: all but "train"."""
    batch_tokens: int = 65_536
    """Tokens in one forward pass."""
    windows: tuple[int, ...] = ()
    """Windows at which a language model's perplexity is measured; empty: 128, 256, … 16,384 as far as they fit."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run: `config.json` of a run folder."""

    task: TaskConfig
    model: DecoderConfig
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvalConfig = EvalConfig()
    version: int = VERSION
    imports: dict[str, str] = field(default_factory=dict)
    """Where the user's mechanism and task come from: SHA-256 digests of files, versions of packages."""

    def resolved(self) -> RunConfig:
        """Check task, splits and the mechanism's arguments; return the config with its vocabulary size and imports."""
        task = self.task.build()
        check_arguments(self.model, "model.arguments")
        for split in (*self.evaluate.splits, *self.evaluate.examples_of):
            task.lengths(split)
        model = dataclasses.replace(self.model, vocab_size=task.vocab_size)
        _check_size(model, task.size("train") * self.train.batch_size)
        if self.train.context_parallel > 1:
            _check_shared_rows(model, self.train.context_parallel, task.size("train"))
        found = sources(
            {"mechanism": model.mechanism, "task": self.task.name}, (*BUILT_IN_MECHANISMS, *BUILT_IN_TASKS, Text.name)
        )
        imports = {source: self.imports.get(source, version) for source, version in found.items()}
        return dataclasses.replace(self, model=model, imports=imports)

    def with_current_imports(self) -> RunConfig:
        """Return the config with the current digests of files and versions of packages, for a run that begins now."""
        return dataclasses.replace(self, imports={}).resolved()

    def changed_imports(self) -> list[str]:
        """Return a line for each file or package that has changed since this config was made."""
        return changed_sources(self.imports)

    def check_model(self) -> None:
        """Raise a ValueError if no model can be made of the config. Needs no memory for its weights."""
        few_layers = dataclasses.replace(self.model, n_layers=min(2, self.model.n_layers))
        with torch.device("meta"):
            Decoder(few_layers)

    def to_dict(self) -> dict[str, Any]:
        values = json.loads(json.dumps(dataclasses.asdict(self, dict_factory=finite_dict), allow_nan=False))
        if not self.imports:
            del values["imports"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        version = convert_json(values.get("version", VERSION), int, "version")
        if version > VERSION:
            raise ValueError(f"the config has version {version}, this tra reads up to {VERSION}: update tra to use it")
        imports = convert_json(values.get("imports", {}), dict[str, str], "imports")
        check_sources(imports)  # first, since names mean nothing without their files
        model = values.get("model")
        if isinstance(model, dict) and isinstance(model.get("mechanism"), str):
            register("mechanism", model["mechanism"])
        return _build(cls, values, "").resolved()

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no config file {path}") from None
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, thousands of digits, nested too deeply
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got a {type(values).__name__}")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def override(self, assignments: Sequence[str]) -> RunConfig:
        """Return the config with `train.steps=100`, `model.mechanism=rope`, `task.arguments.length=64`, … applied.

        The file of `model.mechanism=FILE.py:NAME` or `task.name=FILE.py:NAME` is imported.
        """
        values = self.to_dict()
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"an override reads section.key=value, got {assignment!r}")
            value = _parse_value(text)
            if key in ("model.mechanism", "task.name") and isinstance(value, str):
                value = import_named(value)
                values.get("imports", {}).pop(value.partition(":")[0], None)  # so that the current file is taken
            _assign(values, key, value)
        return RunConfig.from_dict(values)


def check_arguments(model: DecoderConfig, prefix: str) -> None:
    """Check the types of the mechanism's own arguments. `DecoderConfig` has checked their names."""
    own = MECHANISMS[model.mechanism].own_arguments()
    for name, value in model.arguments.items():
        convert_json(value, own[name].annotation, f"{prefix}.{name}")


def _check_size(model: DecoderConfig, tokens: int) -> None:
    """Raise a ValueError for sizes that no memory holds."""
    if model.n_layers > MAX_LAYERS:
        raise ValueError(f"model.n_layers must be at most {MAX_LAYERS:,}, got {model.n_layers:,}")
    parameters = 12 * model.n_layers * model.d_model**2 + 2 * model.vocab_size * model.d_model
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"the model would have about {parameters:.1e} parameters, more than {MAX_PARAMETERS:.0e}")
    if tokens > MAX_BATCH_TOKENS:
        raise ValueError(f"a batch would have {tokens:.1e} tokens, more than {MAX_BATCH_TOKENS:.1e}")


def _check_shared_rows(model: DecoderConfig, processes: int, length: int) -> None:
    """Refuse rows that processes can't share."""
    if not MECHANISMS[model.mechanism].takes_parts:
        raise ValueError(f"train.context_parallel is for TRA: {model.mechanism} can't attend to a row in parts")
    if model.dropout > 0:
        raise ValueError(f"train.context_parallel={processes} needs model.dropout=0, got {model.dropout}")
    if model.rotary:
        raise ValueError(f"train.context_parallel={processes} needs model.rotary=false, got true")
    if length < 2 * processes:
        raise ValueError(
            f"train.context_parallel={processes} needs rows of at least {2 * processes} tokens, got {length}"
        )


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys in which two configs differ."""
    found = []
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(prefix + key)
    return found


def _parse_value(text: str) -> Any:
    """Return a JSON value where the text is one (`64`, `true`, `null`), else the text itself (`rope`)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    section = values
    for depth, name in enumerate(sections, start=1):
        if not isinstance(section.get(name), dict):
            raise ValueError(unknown_name("key", ".".join(sections[:depth]), dotted_keys(values)))
        section = section[name]
    takes_any_key = sections[-1:] in (["arguments"], ["examples_of"])
    if key not in section and not takes_any_key:
        raise ValueError(unknown_name("key", dotted, dotted_keys(values)))
    if isinstance(section.get(key), dict) and not isinstance(value, dict):
        example = next(iter(section[key]), "key")
        raise ValueError(f"{dotted} is a section: set one of its keys, such as {dotted}.{example}")
    section[key] = value


def dotted_keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += dotted_keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return keys


def _build(cls: Any, values: dict[str, Any], prefix: str) -> Any:
    """Return a dataclass made of JSON values, every key and type checked."""
    types_of = typing.get_type_hints(cls, include_extras=True)
    arguments = {}
    for key, value in values.items():
        if key not in types_of:
            raise ValueError(unknown_name("key", prefix + key, [prefix + name for name in types_of]))
        arguments[key] = convert_json(value, types_of[key], prefix + key)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ValueError(f"the config is incomplete: {error}") from None


def finite_dict(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict in which infinity is the string "inf", as JSON has no infinite numbers."""
    return {name: "inf" if value == math.inf else value for name, value in pairs}


def convert_json(value: Any, expected: Any, name: str) -> Any:
    """Return a JSON value as the expected type; if it isn't, a ValueError says what `name` must be."""
    origin, inner = typing.get_origin(expected) or expected, typing.get_args(expected)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = reprlib.repr(value)  # shortened: a wrong value can be thousands of characters long
    if expected == NumberOrInfinity:
        if value in ("inf", math.inf):
            return math.inf
        if not is_number:
            raise ValueError(f"{name} must be a number or inf, got {shown}")
        return convert_json(value, float, name)
    if dataclasses.is_dataclass(origin):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a section, got {shown}")
        return _build(origin, value, f"{name}.")
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, inner))}, got {shown}")
        return value
    if origin in (types.UnionType, typing.Union):
        options = [option for option in inner if option is not type(None)]
        if value is None and type(None) in inner:
            return None
        for option in options[:-1]:
            with contextlib.suppress(ValueError):
                return convert_json(value, option, name)
        return convert_json(value, options[-1], name)
    if origin is tuple and inner and isinstance(value, list | tuple):
        return tuple(convert_json(item, inner[0], name) for item in value)
    if origin is dict and inner and isinstance(value, dict):
        return {key: convert_json(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    if origin in (int, float) and is_number and not -MAX_NUMBER <= value <= MAX_NUMBER:  # also infinity and NaN
        raise ValueError(f"{name} must be a number of at most 64 bits, got {shown}")
    if origin is float and is_number:
        return float(value)
    if origin is Any or (isinstance(value, origin) and (origin is bool or not isinstance(value, bool))):
        return value
    raise ValueError(f"{name} must be of type {origin.__name__}, got {shown}")
