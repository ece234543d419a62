"""Rows that processes share in training: the losses and weights of one process, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.training.context_cases import CASES, RESUMED, SHARING
from tests.training.parallel_cases import make_trainer, run_config, train_case
from tests.training.test_distributed import environment
from tests.training.test_parallel import error, exact_run, parts
from tra.presets import preset
from tra.text import load_tokenizer
from tra.text.store import StoreWriter, TokenPart
from tra.training.distributed import Ranks

ENGINES = ("ddp", "fsdp")
HALF_UNIT = 2.0**-24
"""What rounding to float32 loses of a loss in any case."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Train all cases over four processes, then over two, in the same folder."""
    folder, threads = tmp_path_factory.mktemp("context"), torch.get_num_threads()
    with StoreWriter(folder / "store", load_tokenizer("bytes")) as writer:
        for document in range(40):  # of some 25 tokens, so that rows of 33 hold several
            ids = np.random.default_rng(document).integers(0, 256, 20 + document % 10)
            writer.add(TokenPart(True, ids, len(ids), 1))
        writer.seal([])
    for world in (4, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [*launcher, "-m", "tests.training.context_cases", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_losses_and_weights_are_those_of_one_process(results: Path, name: str) -> None:
    """At most twice the error of one process that takes a row at a time, both against float64, after five steps."""
    config = run_config(CASES[name], results / "store")
    exact = exact_run(config, results / "no-run")
    plain = train_case(CASES[name], config.override(["train.accumulate=8"]), results / "no-run")
    for world, sharing in ((world, sharing) for world, several in SHARING.items() for sharing in several):
        for engine in ENGINES:
            found = load_file(results / f"{engine}, {sharing} of {world}, {name}.safetensors")
            for part, keys in parts(exact).items():
                reached, allowed = (error({k: x[k] for k in keys}, {k: exact[k] for k in keys}) for x in (found, plain))
                allowed = max(allowed, HALF_UNIT)
                said = f"{engine}, {sharing} of {world}, {part}: {reached} > 2 * {allowed}"
                assert 0 < reached <= 2 * allowed, said


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes(results: Path) -> None:
    """Rows shared by four, then by two, then whole in one process."""
    saved, restored = (load_file(results / f"down-{name}.safetensors") for name in ("saved-2", "restored-2-2"))
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    trainer = make_trainer(run_config(RESUMED, results, "train.parallel=fsdp"), results / "down")
    assert trainer.step == 4
    saved = load_file(results / "down-saved-4.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer._tensors().items())
    # counts of a row are added once, whoever has its parts: loss, right tokens, scored tokens, right rows, rows
    alone = make_trainer(run_config(RESUMED, results), results / "alone")
    for _ in range(4):
        alone.one_step()
    assert trainer.window[4] == 4 * 8
    assert torch.equal(trainer.window[1:], alone.window[1:])
    trainer.one_step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.mechanism=rope"], r"train.context_parallel is for TRA: rope can't attend to a row in parts"),
        (["model.dropout=0.1"], r"train.context_parallel=2 needs model.dropout=0, got 0.1"),
        (["model.rotary=true"], r"train.context_parallel=2 needs model.rotary=false, got true"),
        (["train.context_parallel=40"], r"train.context_parallel=40 needs rows of at least 80 tokens, got 64"),
        (["train.context_parallel=0"], r"train.context_parallel must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("demo").override(["train.context_parallel=2", *changes])


def test_how_processes_are_dealt() -> None:
    config = preset("demo").override(["train.context_parallel=4", "train.batch_size=6"]).train
    assert [Ranks(0, world).sharing(config) for world in (1, 2, 4, 8)] == [1, 2, 4, 4]
    for world in (1, 2, 3, 4, 8):
        Ranks(0, world).check(config)
    with pytest.raises(ValueError, match="needs a multiple of 4 processes, torchrun started 6"):
        Ranks(0, 6).check(config)
    with pytest.raises(ValueError, match="a batch of 6 can't be dealt to 4 groups of 4 processes in 1 pieces each"):
        Ranks(0, 16).check(config)
