"""Checkpoints: whole or not at all, and never silently wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tra.runs import write_atomically
from tra.training.checkpoint import (
    DamagedError,
    State,
    checkpoints,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
    save_tensors,
)


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
