"""Calibrated windows on the text that they were measured on, where nothing differs, and on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tra
from benchmarks.held_out_windows import bench_held_out_windows
from tra.evaluation import calibrate, text_sequences
from tra.presets import preset
from tra.runs import RunFolder, write_windows
from tra.text.task import Text


def test_the_same_text_and_another(tmp_path: Path) -> None:
    config = preset("text-demo").override(["model.d_model=32"])
    run = RunFolder(tmp_path / "run")
    run.start(config, resume=False, overwrite=False)
    torch.manual_seed(0)
    run.save_weights(tra.Decoder(config.model), 0)
    stream = Text().stream("train")
    found = calibrate(run, run.load_model(), text_sequences(stream, 257, 256, 4), 0.05)
    write_windows(run.windows_file, found)
    same = bench_held_out_windows(run, stream, sequences=4)["rows"]
    assert len(same) == 4 - len(found.open_heads)
    assert same
    for row in same:
        assert row["held_out"] == pytest.approx(row["calibrated"], rel=1e-3)
        assert row["within"]
        assert row["beyond"] == row["beyond_calibrated"]
    other = bench_held_out_windows(run, Text().stream("valid"), sequences=4)["rows"]
    assert [row["window"] for row in other] == [row["window"] for row in same]
    assert any(row["held_out"] != row["calibrated"] for row in other)
