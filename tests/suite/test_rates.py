"""The learning rates of the comparison are those that the search found."""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from pathlib import Path

from tra.config import RunConfig
from tra.suite import cells
from tra.suite.suites import RATES

LOGS = Path(__file__).parents[2] / "results/rivals/rates.tar.gz"


def test_rates_are_those_of_the_lowest_training_loss() -> None:
    files: dict[str, str] = {}
    with tarfile.open(LOGS) as archive:
        for member in archive.getmembers():
            if member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                files[member.name] = file.read().decode()
    losses: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells("rivals-rates"):
        config = RunConfig.from_dict(json.loads(files[f"rates/{cell.name}/config.json"]))
        assert config == cell.config
        last = json.loads(files[f"rates/{cell.name}/metrics.jsonl"].splitlines()[-1])
        assert last["step"] == cell.config.train.steps
        losses[cell.config.model.mechanism][cell.config.optim.lr].append(last["loss"])
    best = {name: min(rates, key=lambda rate: sum(rates[rate])) for name, rates in losses.items()}
    assert best == RATES
