"""The learning rates of the comparison are those that the search found."""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest

from tra.config import RunConfig
from tra.suite import cells
from tra.suite.suites import LENGTH_RATES, RATES

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", ["rivals", "lengths"])
def test_rates_are_those_of_the_lowest_training_loss(name: str) -> None:
    files: dict[str, str] = {}
    with tarfile.open(RESULTS / name / "rates.tar.gz") as archive:
        for member in archive.getmembers():
            if member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                files[member.name] = file.read().decode()
    losses: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells(f"{name}-rates"):
        config = RunConfig.from_dict(json.loads(files[f"rates/{cell.name}/config.json"]))
        assert config == cell.config
        last = json.loads(files[f"rates/{cell.name}/metrics.jsonl"].splitlines()[-1])
        assert last["step"] == config.train.steps
        losses[config.task.name, config.model.mechanism][config.optim.lr].append(last["loss"])
    best = {key: min(rates, key=lambda rate: sum(rates[rate])) for key, rates in losses.items()}
    if name == "rivals":
        assert {mechanism: rate for (_, mechanism), rate in best.items()} == RATES
    else:
        assert best == {(task, who): rate for task, rates in LENGTH_RATES.items() for who, rate in rates.items()}
