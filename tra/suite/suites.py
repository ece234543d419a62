"""The suites that have a name: a function each, which returns the cells of its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tra.attention import BUILT_IN_MECHANISMS
from tra.config import RunConfig
from tra.presets import preset
from tra.suite.grid import Cell, Part, Suite, cells_of, load_suite

SEARCHED_RATES = (3e-4, 1e-3, 3e-3)
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


def _demo(mechanism: str, rate: float, seed: int) -> RunConfig:
    """Return the demo's config. It is not compiled: that would take longer than training so small a model."""
    return preset("demo").override(
        [f"model.mechanism={mechanism}", f"optim.lr={rate}", f"train.seed={seed}", "train.compile=off"]
    )


def rivals() -> Suite:
    """Every mechanism on the demo's flip-flop, three seeds each, at the rate that `rivals-rates` found for it."""
    cells = [
        Cell(f"{mechanism}-{seed}", _demo(mechanism, RATES[mechanism], seed))
        for mechanism in BUILT_IN_MECHANISMS
        for seed in (0, 1, 2)
    ]
    return {"rivals": Part(cells)}


def rivals_rates() -> Suite:
    """Every mechanism at three learning rates, with two seeds that `rivals` doesn't use."""
    cells = [
        Cell(f"{mechanism}-{rate}-{seed}", _demo(mechanism, rate, seed))
        for seed in (100, 101)
        for mechanism in BUILT_IN_MECHANISMS
        for rate in SEARCHED_RATES
    ]
    return {"rates": Part(cells, "rate")}


LANGUAGE_VARIANTS: dict[str, list[str]] = {
    "tra": [],
    "tra-slow": ["model.gate_bias=3"],  # gates that at first forget after hundreds of kept keys, not tens
    "rope": ["model.mechanism=rope", "model.qk_norm=false"],
    "rope-norm": ["model.mechanism=rope", "model.qk_norm=true"],
    "forgetting": ["model.mechanism=forgetting", "model.qk_norm=false"],
    "forgetting-norm": ["model.mechanism=forgetting", "model.qk_norm=true"],
    "cope": ["model.mechanism=cope"],
}
"""Variants that `language-rates` compares, as changes to `wikitext-quick`."""

LANGUAGE_RATES = (5e-4, 1e-3, 2e-3)


def language_rates() -> Suite:
    """Return searches for the paper's language models: rates, norms, blocks and gates, in 1,500 steps.

    Models are compared at the window that they train on.

    Results of pre-norm runs (1e-3 is best without norms, slow gates gain nothing) are not searched for again with the
    authors' block.
    """
    data = ["task.arguments.data=data/enwiki2015", "train.steps=1500", "train.seed=100", "evaluate.windows=[128]"]
    rates = dict.fromkeys(("tra", "rope-norm", "forgetting-norm"), LANGUAGE_RATES) | {"cope": (2.5e-4, *LANGUAGE_RATES)}
    cells = []
    for name, changes in LANGUAGE_VARIANTS.items():
        for rate in rates.get(name, (1e-3,)):
            settings = [*data, *changes, f"optim.lr={rate}"]
            cells.append(Cell(f"{name}-{rate}", preset("wikitext-quick").override(settings), f"{name}, {rate:g}"))
        for rate in LANGUAGE_RATES if name != "cope" else ():
            settings = [*data, *changes, "model.block=pre", f"optim.lr={rate}"]
            row = f"{name}, pre-norm, {rate:g}"
            cells.append(Cell(f"{name}-pre-{rate}", preset("wikitext-quick").override(settings), row))
    return {"rates": Part(cells, "perplexity")}


LENGTH_RATES = {
    "copy": {"tra": 1e-3, "rope": 3e-3},
    "induct": {"tra": 3e-4, "rope": 3e-4},
    "instruct": {"tra": 1e-3, "rope": 1e-3},
}
"""Learning rates of `lengths`: those with the lowest loss in the last line of the logs of `lengths-rates`.

By the mean of the last tenth, RoPE's on induct would be 1e-3 (0.0008 against 0.0011).
"""


def lengths() -> Suite:
    """Copy, induct and instruct at the paper's size, TRA and RoPE, one seed, at the rates of `lengths-rates`.

    On copy RoPE broke down at its rate after 5,000 steps, more than the search has; so the next lower rate is run too.
    """

    def cell(task: str, mechanism: str, rate: float, name: str, row: str = "") -> Cell:
        return Cell(name, preset(task).override([f"model.mechanism={mechanism}", f"optim.lr={rate}"]), row)

    tables = {
        task: [cell(task, mechanism, rate, f"{task}-{mechanism}") for mechanism, rate in rates.items()]
        for task, rates in LENGTH_RATES.items()
    }
    tables["copy"].append(cell("copy", "rope", 1e-3, "copy-rope-0.001", "rope, 0.001"))
    return {task: Part(cells) for task, cells in tables.items()}


def lengths_rates() -> Suite:
    """Return the tasks of `lengths` at three learning rates, in 4,000 steps, with a seed that `lengths` doesn't use."""
    return {
        task: Part(
            [
                _search_cell(task, mechanism, [f"model.mechanism={mechanism}"], rate, 100, 4000, 500)
                for mechanism in rates
                for rate in SEARCHED_RATES
            ],
            "rate",
        )
        for task, rates in LENGTH_RATES.items()
    }


def _search_cell(
    task: str, name: str, changes: Sequence[str], rate: float, seed: int, steps: int, examples: int
) -> Cell:
    """Return a cell of a search for learning rates: short and hardly evaluated, as only its training loss is used."""
    short = [f"train.steps={steps}", f"train.seed={seed}", f"evaluate.examples={examples}", 'evaluate.splits=["iid"]']
    return Cell(f"{task}-{name}-{rate}", preset(task).override([*short, *changes, f"optim.lr={rate}"]))


PAPER_VARIANTS = {
    "tra": ["model.mechanism=tra"],
    "rope": ["model.mechanism=rope"],
    "cope": ["model.mechanism=cope"],
    "forgetting": ["model.mechanism=forgetting"],
}
"""Mechanisms of the paper's tables, as changes to a preset."""


def paper_rates() -> Suite:
    """Return the tables' tasks at three learning rates, in a tenth of the steps, with a seed that the tables don't use.

    Gradients are clipped at 1, because without clipping the best rates may break down late.
    """
    return {
        task: Part(
            [
                _search_cell(
                    task,
                    name,
                    [*changes, "optim.clip=1", "evaluate.examples_of={}"],
                    rate,
                    100,
                    preset(task).train.steps // 10,
                    500,
                )
                for name, changes in PAPER_VARIANTS.items()
                for rate in SEARCHED_RATES
            ],
            "rate",
        )
        for task in ("flipflop", "copy", "induct", "instruct", "mqar")
    }


MARGINS = (0.0, 0.5, 1.0, 2.0, 4.0, math.inf)
MARGIN_TASKS = ("copy-quick", "induct-quick", "flipflop-quick", "instruct-quick", "mqar-quick")


def _margin_cell(task: str, margin: float, rate: float, seed: int, *changes: str) -> Cell:
    settings = [f"model.margin={margin:g}", f"optim.lr={rate}", f"train.seed={seed}", *changes]
    config = preset(task).override([*settings, "train.checkpoint_every=1000000"])
    return Cell(f"{task}-{margin:g}-{rate:g}-{seed}", config)


def margin_rates() -> Suite:
    """Return TRA at six margins and three learning rates on the quick tasks, compared by training loss."""
    few = ("evaluate.examples=200", "evaluate.examples_of={}", 'evaluate.splits=["iid"]')
    return {
        task: Part(
            [_margin_cell(task, margin, rate, 100, *few) for rate in SEARCHED_RATES for margin in MARGINS], "rate"
        )
        for task in MARGIN_TASKS
    }


def trainability() -> Suite:
    """Return the demo's task with ten seeds and four learning rates: how many runs learn it at all?

    Rates vary before seeds, so that a table of part of the cells compares all mechanisms.
    """
    variants = {
        "tra": ["model.mechanism=tra"],
        "tra-margin-2": ["model.mechanism=tra", "model.margin=2"],
        "rope": ["model.mechanism=rope"],
        "forgetting": ["model.mechanism=forgetting"],
    }
    cells = [
        Cell(
            f"{name}-{rate:g}-{seed}",
            preset("demo").override([*changes, f"optim.lr={rate}", f"train.seed={seed}", 'evaluate.splits=["iid"]']),
        )
        for seed in range(10)
        for rate in (*SEARCHED_RATES, 1e-2)
        for name, changes in variants.items()
    ]
    return {"demo": Part(cells, "solved")}


SEEDS = (0, 1, 2, 3)


def _grid_cells(
    presets: Sequence[str], seeds: Sequence[int] = SEEDS, changes: Sequence[str] = (), label: str = ""
) -> list[Cell]:
    """Return the cells of every mechanism on every preset."""
    return [
        Cell(
            f"{label or name}-{mechanism}-{seed}",
            preset(name).override([*changes, f"model.mechanism={mechanism}", f"train.seed={seed}"]),
            f"{label or name}, {mechanism}" if len(presets) > 1 else "",
        )
        for name in presets
        for mechanism in BUILT_IN_MECHANISMS
        for seed in seeds
    ]


def _cost_cells(name: str, sizes: dict[str, list[str]], changes: Sequence[str]) -> list[Cell]:
    return [
        Cell(
            f"cost-{size}-{mechanism}",
            preset(name).override([*changes, *shape, f"model.mechanism={mechanism}"]),
            f"{size}, {mechanism}",
        )
        for size, shape in sizes.items()
        for mechanism in ("rope", "tra")
    ]


TINY = ["model.n_layers=2", "model.n_heads=2", "model.d_model=128"]


def paper() -> Suite:
    """Return the paper's tables, every mechanism, four seeds: weeks of one GPU, all at the presets' rates."""
    window = ["task.arguments.window=256", "train.steps=20000", "evaluate.windows=[256]"]
    return {
        "flipflop": Part(_grid_cells(["flipflop"])),
        "copy-induct": Part(_grid_cells(["copy", "copy-small", "induct", "induct-small"])),
        "instruct": Part(_grid_cells(["instruct"])),
        "language": Part(_grid_cells(["wikitext"]), "perplexity"),
        "cost": Part(_cost_cells("wikitext", {"tiny": TINY, "medium": []}, window), "cost"),
    }


QUICK_NOTE = "60 steps of a tiny model: this shows the form of the table, and says nothing about the mechanisms."


def paper_quick() -> Suite:
    """Return the paper's tables in miniature, two seeds, for a CPU: the form of the tables, without their results."""
    small = ["model.d_model=32", "model.n_layers=1", "model.n_heads=2", "train.batch_size=16", "train.compile=off"]
    short = [*small, "train.steps=60", "train.log_every=20", "train.checkpoint_every=20", "evaluate.examples=20"]
    lengths = ["task.arguments.longest=8", "evaluate.examples_of={}", 'evaluate.splits=["iid","9-16","8x"]']
    flipflop = [*short, "task.arguments.length=16", "evaluate.examples_of={}"]
    few = (0, 1)
    text = [*short, "evaluate.windows=[128,256]"]
    instruct = [*short, "task.arguments.longest=8", 'evaluate.splits=["iid"]']
    tables = {
        "flipflop": Part(_grid_cells(["demo"], few, flipflop, "flipflop")),
        "copy-induct": Part(_grid_cells(["copy-quick", "induct-quick"], few, [*short, *lengths])),
        "instruct": Part(_grid_cells(["instruct-quick"], few, instruct)),
        "language": Part(_grid_cells(["text-demo"], few, text, "language"), "perplexity"),
        "cost": Part(
            _cost_cells(
                "text-demo",
                {"tiny": [], "wider": ["model.d_model=64"]},
                [*text, "task.arguments.window=256", "evaluate.windows=[256]"],
            ),
            "cost",
        ),
    }
    return {name: part._replace(note=QUICK_NOTE) for name, part in tables.items()}


SUITES: dict[str, Callable[[], Suite]] = {
    "paper": paper,
    "paper-rates": paper_rates,
    "paper-quick": paper_quick,
    "rivals": rivals,
    "rivals-rates": rivals_rates,
    "lengths": lengths,
    "lengths-rates": lengths_rates,
    "language-rates": language_rates,
    "margin-rates": margin_rates,
    "trainability": trainability,
}


def suite(name: str) -> Suite:
    """Return a suite by its name, by FILE.py:FUNCTION, or by the entry point of an installed package."""
    return load_suite(name, SUITES)


def cells(name: str, only: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of a suite, as `cells_of` chooses them."""
    return cells_of(suite(name), only)
