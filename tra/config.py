"""One run, described whole: frozen dataclasses, JSON and back, and dotted overrides."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tra import unknown_name
from tra.model import DecoderConfig
from tra.tasks import TASKS, Task
from tra.text.task import Text

VERSION = 1
"""Of the config's form. A file of a newer version is refused, not guessed at."""


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt."""

    name: str = "flipflop"
    """A name from `tra.tasks.TASKS`, or "text"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task, where they aren't the paper's."""

    def build(self) -> Task:
        known = TASKS | {Text.name: Text}
        if self.name not in known:
            raise ValueError(unknown_name("task", self.name, known))
        task = known[self.name]
        hints = typing.get_type_hints(task.__init__)
        del hints["return"]
        for argument, value in self.arguments.items():
            if argument not in hints:
                raise ValueError(unknown_name(f"argument of {self.name}", argument, hints))
            _fit(value, hints[argument], f"task.arguments.{argument}")
        return task(**self.arguments)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, linear warm-up, cosine decay."""

    lr: float = 1e-4
    """Highest learning rate, reached after warm-up."""
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    warmup: float = 0.05
    """Fraction of the steps over which the rate rises."""
    decay: Literal["cosine", "none"] = "cosine"
    """Down to 0 over the remaining steps, or not at all."""
    clip: float | None = None
    """Largest norm of the gradients; None doesn't clip."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.warmup <= 1 or self.weight_decay < 0:
            raise ValueError(f"optim needs lr > 0, 0 <= warmup <= 1 and weight_decay >= 0, got {self}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"optim.clip must be above 0 or null, got {self.clip}")

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of step 0, 1, … `steps - 1`."""
        warm = round(self.warmup * steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        if self.decay == "none":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and what is written down."""

    steps: int = 1000
    batch_size: int = 64
    """Sequences per step, over all of `accumulate`."""
    accumulate: int = 1
    """Pieces a batch is cut into, one after another, to save memory."""
    seed: int = 0
    """Of initialisation, data and dropout."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast over float32 weights; "auto" takes it on a GPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile and, on a GPU, the whole step as one CUDA graph; "auto" does so on a GPU."""
    log_every: int = 100
    """Steps between lines of metrics.jsonl."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last two are kept."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"train.batch_size must be a multiple of train.accumulate, got {self.batch_size} and {self.accumulate}"
            )


@dataclass(frozen=True)
class EvalConfig:
    """What `tra evaluate` looks at unless told otherwise."""

    examples: int = 1000
    """Test sequences per split."""
    examples_of: dict[str, int] = field(default_factory=dict)
    """Splits with another number of them."""
    splits: tuple[str, ...] = ()
    """All but "train" when empty."""
    batch_tokens: int = 65_536
    """Tokens in one forward pass."""
    windows: tuple[int, ...] = ()
    """Of text: windows at which perplexity is measured; of 128, 256, … 16,384 those that fit, when empty."""


@dataclass(frozen=True)
class RunConfig:
    """A whole run: `config.json` of a run folder."""

    task: TaskConfig
    model: DecoderConfig
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvalConfig = EvalConfig()
    version: int = VERSION

    def resolved(self) -> RunConfig:
        """Checked, and with the vocabulary of its task."""
        task = self.task.build()
        for split in (*self.evaluate.splits, *self.evaluate.examples_of):
            task.lengths(split)
        model = dataclasses.replace(self.model, vocab_size=task.vocab_size)
        return dataclasses.replace(self, model=model)

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        version = values.get("version", VERSION)
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(
                f"the config has version {version!r}, this tra reads up to {VERSION}: update tra to use it"
            )
        return _build(cls, values, "").resolved()

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no config file {path}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got a {type(values).__name__}")
        return cls.from_dict(values)

    def override(self, assignments: typing.Sequence[str]) -> RunConfig:
        """Apply `train.steps=100`, `model.mechanism=rope`, `task.arguments.length=64`, …"""
        values = self.to_dict()
        for assignment in assignments:
            dotted, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"an override reads section.key=value, got {assignment!r}")
            _assign(values, dotted, _read(text))
        return RunConfig.from_dict(values)


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what differs between two configs."""
    found = []
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(prefix + key)
    return found


def _read(text: str) -> Any:
    """A JSON value where it is one, else the text itself: `64`, `true`, `null`, `rope`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    node = values
    for depth, key in enumerate(path):
        if not isinstance(node.get(key), dict):
            raise ValueError(unknown_name("key", ".".join(path[: depth + 1]), _dotted(values)))
        node = node[key]
    open_ended = path[-1:] in (["arguments"], ["examples_of"])
    if last not in node and not open_ended:
        raise ValueError(unknown_name("key", dotted, _dotted(values)))
    if isinstance(node.get(last), dict) and not isinstance(value, dict):
        raise ValueError(
            f"{dotted} is a section: set one of its keys, such as {dotted}.{next(iter(node[last]), 'key')}"
        )
    node[last] = value


def _dotted(values: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in values.items():
        names += _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return names


def _build(cls: Any, values: dict[str, Any], prefix: str) -> Any:
    """A dataclass from JSON, with every key and type checked."""
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ValueError(unknown_name("key", prefix + key, [prefix + name for name in hints]))
    arguments = {}
    for key, value in values.items():
        hint, name = hints[key], prefix + key
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"{name} must be a section, got {value!r}")
            arguments[key] = _build(hint, value, name + ".")
        else:
            arguments[key] = _fit(value, hint, name)
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ValueError(f"the config is incomplete: {error}") from None


def _fit(value: Any, hint: Any, name: str) -> Any:
    """`value` as `hint`, or a ValueError that says what was expected."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, inner))}, got {value!r}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _fit(value, next(option for option in inner if option is not type(None)), name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(item, inner[0], name) for item in value)
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    expected = getattr(hint, "__name__", str(hint))
    raise ValueError(f"{name} must be of type {expected}, got {value!r}")
