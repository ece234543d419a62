"""The call that runs all that needs a GPU: what it leaves when steps fail or the time is up."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu import STEPS, Step, main, run_steps


@pytest.mark.slow
def test_every_step_leaves_what_it_printed(tmp_path: Path) -> None:
    steps = {
        "good": Step(("-c", "import os; print(os.environ['TRA_DIRECT_CALL'])"), ("TRA_DIRECT_CALL=1",)),
        "bad": Step(("-c", "import sys; print('half', flush=True); sys.exit('why')")),
        "endless": Step(("-c", "import time; print('begun', flush=True); time.sleep(600)")),
        "late": Step(("-c", "print('never')")),
    }
    ended = run_steps(steps, tmp_path, 15)
    assert ended["good"].startswith("done in ")
    assert ended["bad"].startswith("failed with status 1 after ")
    assert ended["endless"].startswith("stopped after ")
    assert ended["late"] == "not begun"
    with tarfile.open(tmp_path / "on_gpu.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    found = {path.name: path.read_text() for path in (tmp_path / "unpacked").iterdir()}
    assert found["good.out"] == "1\n"
    assert (found["bad.out"], found["bad.log"]) == ("half\n", "why\n")
    assert found["endless.out"] == "begun\n"
    assert "late.out" not in found


def test_modules_and_tests_of_the_steps_exist() -> None:
    root = Path(__file__).parents[2]
    for step in STEPS.values():
        module = step.arguments[1]
        if module.startswith("benchmarks."):
            assert (root / f"{module.replace('.', '/')}.py").is_file()
        for path in (argument.removeprefix("--ignore=") for argument in step.arguments if "tests/" in argument):
            assert (root / path).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        main(["--out", str(tmp_path)])
