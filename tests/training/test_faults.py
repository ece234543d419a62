"""What a run must not do: share its folder, end on damaged weights, or go on with numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs.test_locks import held_by_another
from tests.training.test_trainer import assert_same_run, small
from tra.config import OptimConfig, RunConfig
from tra.runs import LockedError, RunFolder, read_rows
from tra.training import NonFiniteError, Progress, train
from tra.training.checkpoint import checkpoints, load_checkpoint, load_tensors, save_tensors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(small("train.steps=25"), folder, device=CPU)
    return folder


def copy(folder: Path, target: Path) -> Path:
    import shutil

    shutil.copytree(folder, target)
    return target


def resume(folder: Path, config: RunConfig | None = None) -> list[str]:
    """Go on with a run to its end, and return what it reported."""
    messages: list[str] = []

    def note(progress: Progress) -> None:
        messages.extend([progress.message] if progress.message else [])

    assert train(config, folder, resume=True, device=CPU, progress=note).done
    return messages


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}])
def test_a_second_training_is_refused(trained: Path, tmp_path: Path, how: dict[str, bool]) -> None:
    run = copy(trained, tmp_path / "run")
    with held_by_another(run), pytest.raises(LockedError, match="is being written by another process"):
        train(small("train.steps=25"), run, device=CPU, **how)
    assert_same_run(trained, run)


def test_what_a_killed_process_left_of_a_checkpoint_is_removed(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "model.safetensors").unlink()
    for name in ("checkpoints/.step-00000030.safetensors.999.tmp", ".model.safetensors.999.tmp", ".eval.jsonl.9.tmp"):
        (run / name).write_bytes(b"half")
    resume(run)
    assert not list(run.rglob("*.tmp"))
    assert_same_run(trained, run)


def test_overwriting_replaces_the_folder_as_a_whole(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "eval.jsonl").write_text("{}\n")
    train(small("train.steps=25"), run, overwrite=True, device=CPU)
    assert not (run / "eval.jsonl").exists()
    assert_same_run(trained, run)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_left_without_a_config_is_not_taken_for_the_run(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has weights or checkpoints, but no config\.json"):
        train(small("train.steps=30"), run, resume=True, device=CPU)


def test_damaged_weights_are_trained_again(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (run / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        RunFolder(run).load_model()
    messages = resume(run)
    assert "model.safetensors is damaged" in messages[0]
    assert "resuming at step 20" in messages[-1]
    assert_same_run(trained, run)


def test_a_bad_line_of_metrics_is_named_and_nothing_is_lost(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "model.safetensors").unlink()
    metrics = run / "metrics.jsonl"
    first, *others = metrics.read_bytes().splitlines(keepends=True)
    assert others
    content = first + b'{"step": 1, "lo\n' + b"".join(others)
    metrics.write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is damaged: "):
        resume(run)
    assert metrics.read_bytes() == content


def test_a_link_in_place_of_checkpoints_is_not_followed(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "model.safetensors").unlink()
    (run / "checkpoints").rename(tmp_path / "precious")
    (tmp_path / "precious" / ".step-00000001.safetensors.1.tmp").touch()
    before = sorted(path.name for path in (tmp_path / "precious").iterdir())
    (run / "checkpoints").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="checkpoints is a link, which is not followed"):
        resume(run)
    with RunFolder(run).lock():
        pass
    assert sorted(path.name for path in (tmp_path / "precious").iterdir()) == before


@pytest.mark.parametrize("target", ["new", "precious"])
def test_a_link_in_place_of_metrics_leads_nowhere(trained: Path, tmp_path: Path, target: str) -> None:
    run = copy(trained, tmp_path / "run")
    (tmp_path / "precious").write_text('{"step": 1}\n')
    for file in (run / "model.safetensors", run / "metrics.jsonl"):
        file.unlink()
    (run / "metrics.jsonl").symlink_to(tmp_path / target)
    if target == "new":  # there would be one
        with pytest.raises(OSError, match=r"symbolic links.*metrics\.jsonl"):
            resume(run)
    else:
        resume(run)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "precious").read_text() == '{"step": 1}\n'


def test_a_checkpoint_of_another_model_is_passed_over(trained: Path, tmp_path: Path) -> None:
    run, other = copy(trained, tmp_path / "run"), tmp_path / "other"
    train(small("train.steps=25", "model.d_model=16"), other, device=CPU)
    (run / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    first, last = checkpoints(run / "checkpoints")
    last.write_bytes((other / "checkpoints" / last.name).read_bytes())
    messages = resume(run)
    assert "doesn't fit" in messages[0]
    assert f"{last.name} is of another model" in messages[1]
    assert messages[2] == "resuming at step 10"
    assert_same_run(trained, run)
    (run / "model.safetensors").unlink()
    for path in (first, *checkpoints(run / "checkpoints")):
        path.write_bytes((other / "checkpoints" / last.name).read_bytes())
    with pytest.raises(ValueError, match="is of another model than the run's"):
        resume(run)


@pytest.mark.parametrize(("logged", "step"), [(1, 25), (3, 35)])
def test_a_loss_that_is_not_finite_ends_the_run(trained: Path, tmp_path: Path, logged: int, step: int) -> None:
    """Weights turn bad after a checkpoint; it is kept, and no other is written over it."""
    run = copy(trained, tmp_path / "run")
    config = small("train.steps=100", f"train.max_nonfinite_steps={logged}")
    RunFolder(run).config_file.unlink()
    (run / "model.safetensors").unlink()
    RunFolder(run)._write_config(config)
    last = checkpoints(run / "checkpoints")[-1]
    tensors, _ = load_tensors(last)
    tensors["model.embed_tokens.weight"][:] = torch.nan
    save_tensors(last, tensors, {"step": "20"})
    with pytest.raises(NonFiniteError, match=f"the loss is not finite at step {step}, so the run has ended"):
        resume(run)
    assert [row["loss"] for row in read_rows(run / "metrics.jsonl")][-3:] != [0, 0, 0]
    assert checkpoints(run / "checkpoints")[-1] == last
    assert not (run / "model.safetensors").exists()


def test_a_run_does_not_end_with_weights_that_are_not_finite(tmp_path: Path) -> None:
    changes = ("train.steps=8", "optim.lr=9e18", "optim.warmup=0", "optim.decay=none", "model.mechanism=rope")
    with pytest.raises(NonFiniteError, match=r"the weights are not finite at step 8, .* there is no checkpoint"):
        train(small(*changes), tmp_path / "run", device=CPU)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert load_checkpoint(tmp_path / "run" / "checkpoints") is None


def test_gates_that_overflow_end_the_run(tmp_path: Path) -> None:
    changes = ("train.steps=8", "optim.lr=9e18", "optim.warmup=0", "optim.decay=none")
    with pytest.raises(NonFiniteError, match="log_forget must be finite, got -inf"):
        train(small(*changes), tmp_path / "run", device=CPU)


@pytest.mark.parametrize("bad", [{"lr": float("inf")}, {"lr": float("nan")}, {"clip": float("nan")}])
def test_rates_are_finite(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="optim"):
        OptimConfig(**bad)
