"""Checkpoints: whole or not at all, and never silently wrong."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tra.presets import preset
from tra.runs import RunFolder, write_atomically
from tra.training.checkpoint import (
    DamagedError,
    State,
    checkpoints,
    load_checkpoint,
    load_tensors,
    read_checkpoint,
    save_checkpoint,
    save_tensors,
)
from tra.training.distributed import Ranks
from tra.training.sharded_checkpoint import save_sharded_checkpoint


def state(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    return State(
        step,
        {
            "weight": torch.randn(64, 32, generator=generator),
            "half": torch.randn(5, generator=generator).bfloat16(),
            "count": torch.tensor(step),
        },
    )


def same(one: State, other: State | None) -> bool:
    return (
        other is not None
        and one.step == other.step
        and all(
            torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors.keys() | other.tensors.keys()
        )
    )


def test_round_trip_keeps_the_last_two(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    for step in (1, 20, 300):
        save_checkpoint(tmp_path, state(step))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020.safetensors", "step-00000300.safetensors"]
    assert same(state(300), load_checkpoint(tmp_path))


def flip_a_byte(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [0.001, 0.02, 0.3, 0.7, 0.999, "cut", "empty"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(tmp_path: Path, harm: float | str) -> None:
    for step in (1, 2):
        newest = save_checkpoint(tmp_path, state(step))
    if isinstance(harm, float):
        flip_a_byte(newest, harm)
    else:
        newest.write_bytes(newest.read_bytes()[: 5000 if harm == "cut" else 0])
    warnings: list[str] = []
    assert same(state(1), load_checkpoint(tmp_path, warnings.append))
    assert len(warnings) == 1
    assert "step-00000002.safetensors" in warnings[0]


def test_a_changed_step_is_damage_too(tmp_path: Path) -> None:
    path = tmp_path / "step-00000007.safetensors"
    save_tensors(path, {"x": torch.zeros(3)}, {"step": "7"})
    before = path.read_bytes()
    after = before.replace(rb"\"step\": \"7\"", rb"\"step\": \"8\"")
    assert after != before
    path.write_bytes(after)
    with pytest.raises(DamagedError, match="don't match its digest"):
        load_tensors(path)


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    paths = [save_checkpoint(tmp_path / str(i), state(5)) for i in range(4)]
    assert len({path.read_bytes() for path in paths}) == 1


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, "old")
    with pytest.raises(TypeError):
        write_atomically(file, 5)
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def save_sharded(folder: Path, step: int) -> Path:
    save_sharded_checkpoint(folder, step, state(step).tensors, Ranks())
    return checkpoints(folder)[-1]


def test_sharded_checkpoints_go_round_too_and_old_ones_go(tmp_path: Path) -> None:
    """Of either kind, the last two are kept."""
    save_checkpoint(tmp_path, state(1))
    save_sharded(tmp_path, 20)
    save_checkpoint(tmp_path, state(300))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000300.safetensors"]
    save_sharded(tmp_path, 4000)
    save_sharded(tmp_path, 5000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00004000", "step-00005000"]
    assert same(state(5000), load_checkpoint(tmp_path))


def _shard(path: Path) -> Path:
    (found,) = path.glob("*.safetensors")
    return found


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"step": 2, "fi'),
    "another step": lambda path: (path / "manifest.json").write_text('{"step": "2", "files": {}}'),
    "no shard": lambda path: _shard(path).unlink(),
    "half a shard": lambda path: _shard(path).write_bytes(_shard(path).read_bytes()[:3000]),
    "a changed byte": lambda path: flip_a_byte(_shard(path), 0.7),
    "a further shard": lambda path: _shard(path).with_name("more.safetensors").write_bytes(b""),
    "nothing": lambda path: [file.unlink() for file in path.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_sharded_checkpoint_is_noticed(tmp_path: Path, damage: str) -> None:
    save_sharded(tmp_path, 1)
    newest = save_sharded(tmp_path, 2)
    DAMAGE[damage](newest)
    warnings: list[str] = []
    assert same(state(1), load_checkpoint(tmp_path, warnings.append))
    assert len(warnings) == 1
    assert "step-00000002 is damaged" in warnings[0]


def test_missing_parts_are_damage_even_if_digests_are_right(tmp_path: Path) -> None:
    """As if one of several processes had written nothing; sizes are those that parts say, and bounded by files."""
    path = save_sharded(tmp_path, 2)
    shard, manifest = _shard(path), path / "manifest.json"
    content = shard.read_bytes()
    before = b'\\"saved_offsets\\": [0, 0]'
    assert content.count(before) == 1
    old = hashlib.sha256(content).hexdigest()
    shard.write_bytes(content.replace(before, b'\\"saved_offsets\\": [9, 0]'))
    manifest.write_text(manifest.read_text().replace(old, hashlib.sha256(shard.read_bytes()).hexdigest()))
    with pytest.raises(DamagedError, match="parts of weight are missing"):
        read_checkpoint(path)


def test_a_half_written_folder_is_no_checkpoint_and_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    run.start(preset("demo"), resume=False, overwrite=False)
    save_sharded(run.checkpoint_folder, 1)
    half = run.checkpoint_folder / ".step-00000002.saving"
    shutil.copytree(run.checkpoint_folder / "step-00000001", half / "new")
    removed = run.checkpoint_folder / ".step-00000000.removing"
    shutil.copytree(run.checkpoint_folder / "step-00000001", removed / "old")
    assert same(state(1), load_checkpoint(run.checkpoint_folder))
    with run.lock():
        assert [path.name for path in run.checkpoint_folder.iterdir()] == ["step-00000001"]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tra.training.sharded_checkpoint.write_atomically", fail)
    with pytest.raises(OSError, match="No space left"):
        save_sharded(run.checkpoint_folder, 2)
    assert [path.name for path in run.checkpoint_folder.iterdir()] == ["step-00000001"]
