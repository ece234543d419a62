"""Suites by name: one function each, which returns its cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tra.attention import MECHANISMS
from tra.config import RunConfig
from tra.naming import unknown_name
from tra.presets import preset

RATES = {
    "tra": 3e-4,
    "rope": 3e-3,
    "cope": 1e-3,
    "forgetting": 3e-3,
    "nope": 1e-3,
    "sinusoidal": 3e-3,
    "alibi": 1e-3,
    "stickbreaking": 3e-3,
    "selective": 3e-3,
    "differential": 3e-3,
    "ssmax": 3e-3,
    "entmax": 3e-3,
    "tra-threshold-only": 3e-3,
    "tra-distance-only": 3e-3,
    "tra-plain-distance": 1e-3,
    "lstm": 3e-3,
}
"""Learning rates of `rivals`: those with the lowest final training loss in `rivals-rates`, mean over its seeds."""


class Cell(NamedTuple):
    """One run of a grid, whose folder has its name."""

    name: str
    config: RunConfig


def _demo(mechanism: str, rate: float, seed: int) -> RunConfig:
    """The demo's run. Not compiled: a model this small would wait longer for the compiler than it trains."""
    return preset("demo").override(
        [f"model.mechanism={mechanism}", f"optim.lr={rate}", f"train.seed={seed}", "train.compile=off"]
    )


def rivals() -> list[Cell]:
    """Every mechanism on the demo's flip-flop, three seeds each, at the rate that `rivals-rates` found for it."""
    return [
        Cell(f"{mechanism}-{seed}", _demo(mechanism, RATES[mechanism], seed))
        for mechanism in MECHANISMS
        for seed in (0, 1, 2)
    ]


def rivals_rates() -> list[Cell]:
    """Every mechanism at three learning rates, with two seeds that `rivals` doesn't use."""
    return [
        Cell(f"{mechanism}-{rate}-{seed}", _demo(mechanism, rate, seed))
        for seed in (100, 101)
        for mechanism in MECHANISMS
        for rate in (3e-4, 1e-3, 3e-3)
    ]


LANGUAGE_VARIANTS: dict[str, list[str]] = {
    "tra": [],
    "tra-slow": ["model.gate_bias=3"],  # gates that begin by forgetting after hundreds of kept keys, not tens
    "rope": ["model.mechanism=rope", "model.qk_norm=false"],
    "rope-norm": ["model.mechanism=rope", "model.qk_norm=true"],
    "forgetting": ["model.mechanism=forgetting", "model.qk_norm=false"],
    "forgetting-norm": ["model.mechanism=forgetting", "model.qk_norm=true"],
    "cope": ["model.mechanism=cope"],
}
"""What `language-rates` compares, as changes to `wikitext-quick`."""


SEARCHED = (5e-4, 1e-3, 2e-3)


def language_rates() -> list[Cell]:
    """The paper's language models in 1,500 steps, judged at the window they train on: rates, norms, blocks, gates.

    What was plain with pre-norm (1e-3 for those without norm, slow gates no gain) isn't searched again with the
    authors' block.
    """
    data = ["task.arguments.data=data/enwiki2015", "train.steps=1500", "train.seed=100", "evaluate.windows=[128]"]
    rates = {"tra": SEARCHED, "rope-norm": SEARCHED, "forgetting-norm": SEARCHED, "cope": (2.5e-4, 5e-4)}
    cells = []
    for name, changes in LANGUAGE_VARIANTS.items():
        for rate in rates.get(name, (1e-3,)):
            settings = [*data, *changes, f"optim.lr={rate}"]
            cells.append(Cell(f"{name}-{rate}", preset("wikitext-quick").override(settings)))
        for rate in SEARCHED if name != "cope" else ():
            settings = [*data, *changes, "model.block=pre", f"optim.lr={rate}"]
            cells.append(Cell(f"{name}-pre-{rate}", preset("wikitext-quick").override(settings)))
    return cells


SUITES: dict[str, Callable[[], list[Cell]]] = {
    "rivals": rivals,
    "rivals-rates": rivals_rates,
    "language-rates": language_rates,
}


def suite(name: str) -> list[Cell]:
    if name not in SUITES:
        raise ValueError(unknown_name("suite", name, SUITES))
    return SUITES[name]()
