"""DDP and FSDP2 over two and four processes: the losses, weights and checkpoints of one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.training.parallel_cases import (
    COMPILED,
    REORDERED,
    SAME_BITS,
    STEPS,
    Case,
    checkpoint_steps,
    make_trainer,
    run_config,
    train_case,
)
from tests.training.test_distributed import environment
from tra.config import RunConfig
from tra.model import Decoder
from tra.runs import RunFolder
from tra.tasks import Batch, stream_seed
from tra.text import load_tokenizer
from tra.text.store import StoreWriter, TokenPart
from tra.training.checkpoint import checkpoints, load_checkpoint
from tra.training.distributed import Ranks

ENGINES = ("ddp", "fsdp")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes: with more threads sums are split otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases over four processes, then over two, in the same folder."""
    folder = tmp_path_factory.mktemp("parallel")
    with StoreWriter(folder / "store", load_tokenizer("bytes")) as writer:
        for document in range(40):  # of some 25 tokens, so that rows of 33 hold several
            ids = np.random.default_rng(document).integers(0, 256, 20 + document % 10)
            writer.add(TokenPart(True, ids, len(ids), 1))
        writer.seal([])
    checkpoint_steps(Ranks(), folder, "up", 2)
    for world in (4, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [*launcher, "-m", "tests.training.parallel_cases", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
    return folder


def of_processes(results: Path, engine: str, world: int, name: str) -> dict[str, Tensor]:
    found = load_file(results / f"{engine}, {world}, {name}.safetensors")
    return {name: tensor for name, tensor in found.items() if not name.startswith("sent.")}


def of_one_process(results: Path, case: Case, pieces: int) -> dict[str, Tensor]:
    config = run_config(case, results / "store", f"train.accumulate={pieces}", "train.compile=off")
    found = train_case(case, config, results / "no-run")
    return {name: tensor for name, tensor in found.items() if not name.startswith("sent.")}


@pytest.mark.parametrize("name", SAME_BITS)
def test_two_processes_are_one_with_two_pieces_to_the_bit(results: Path, name: str) -> None:
    """Losses of four steps and the weights after five: a sum of two is the same in either order."""
    expected = of_one_process(results, SAME_BITS[name], pieces=2)
    assert expected["losses"][0] > expected["losses"][-1]
    for engine in ENGINES:
        found = of_processes(results, engine, 2, name)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), f"{engine}: {key}"


def exact_run(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """Train in float64, without the trainer's step."""
    source = make_trainer(config, folder)
    torch.manual_seed(stream_seed(config.train.seed, "initialisation"))
    model = Decoder(config.model).double()
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
    )
    losses = []
    for step in range(STEPS + 1):
        source.step = step
        batch: Batch = source.next_batch()
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask])
        optimizer.zero_grad()
        loss.backward()
        if optim.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.rate(step, config.train.steps)
        optimizer.step()
        losses.append(loss.detach())
    return dict(model.state_dict()) | {"losses": torch.stack(losses[:STEPS])}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Root mean square over all numbers, each relative to its tensor."""
    parts = [((found[name] - exact[name]) / exact[name].square().mean().sqrt()).flatten() for name in exact]
    return float(torch.cat(parts).square().mean().sqrt())


@pytest.mark.parametrize("name", [*REORDERED, *COMPILED])
def test_another_order_of_sums_has_no_larger_error(results: Path, name: str) -> None:
    """At most twice the error of one process that takes the same pieces one after another, both against float64."""
    case = (REORDERED | COMPILED)[name]
    config = run_config(case, results / "store")
    exact = exact_run(config, results / "no-run")
    for world in (2, 4) if name in REORDERED else (2,):
        plain = of_one_process(results, case, pieces=world * config.train.accumulate)
        for engine in ENGINES:
            found = of_processes(results, engine, world, name)
            for part, keys in parts(exact).items():
                reached, allowed = (error({k: x[k] for k in keys}, {k: exact[k] for k in keys}) for x in (found, plain))
                assert 0 < reached <= 2 * allowed, f"{engine}, {world} processes, {part}: {reached} > 2 * {allowed}"


def parts(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    return {"losses": ["losses"], "weights": [name for name in tensors if name != "losses"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_pieces_of_a_batch_are_exchanged_once(results: Path, engine: str) -> None:
    def sent(name: str) -> dict[str, int]:
        found = load_file(results / f"{engine}, 2, {name}.safetensors")
        return {key: int(value) for key, value in found.items() if "reduce" in key}

    whole, pieces = sent("padded rows"), sent("in pieces")
    assert sum(whole.values()) > 2  # more than the count and the sums of a step
    assert whole.keys() == pieces.keys()
    buckets = {key: number for key, number in pieces.items() if "scatter" in key or engine == "ddp"}
    assert buckets == {key: whole[key] for key in buckets}


def test_a_sharded_run_goes_on_with_fewer_processes_and_with_more(results: Path) -> None:
    """Four, two, one; and one, two. What is restored is what was saved, to the bit."""
    for run, step, world in (("down", 3, 2), ("up", 2, 2)):
        saved, restored = (load_file(results / name) for name in (
            f"{run}-saved-{step}.safetensors", f"{run}-restored-{step}-{world}.safetensors"
        ))  # fmt: skip
        assert saved.keys() == restored.keys()
        assert all(torch.equal(saved[name], restored[name]) for name in saved)
    assert [path.name for path in checkpoints(results / "down" / "checkpoints")] == ["step-00000003", "step-00000006"]
    names = [path.name for path in checkpoints(results / "up" / "checkpoints")]
    assert names == ["step-00000002.safetensors", "step-00000003"]
    trainer = make_trainer(run_config(SAME_BITS["padded rows"], results, "train.parallel=fsdp"), results / "down")
    assert trainer.step == 6
    saved, restored = load_file(results / "down-saved-6.safetensors"), trainer._tensors()
    assert saved.keys() == restored.keys()
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    trainer.window.zero_()
    trainer.one_step()
    assert 0 < trainer.window[0] < load_file(results / "ddp, 2, padded rows.safetensors")["losses"][0]
    state = load_checkpoint(RunFolder(results / "down").checkpoint_folder)
    assert state is not None
    assert state.step == 6
