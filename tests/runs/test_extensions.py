"""Mechanisms, tasks and suites of users, by file and by installed package, through every command."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tra
from tests.own import IMPORTS, MECHANISM, SUITE, TASK, TINY, command, forget, nothing_stays, train
from tests.slow import slow
from tra.config import RunConfig
from tra.model import DecoderConfig
from tra.presets import preset
from tra.runs import ChangedFileWarning, RunFolder, import_file, import_named, read_rows, variant_of, write_rows
from tra.runs.extensions import imported_paths
from tra.runs.processes import python_command
from tra.suite.grid import Cell, Part, load_suite
from tra.suite.local import run_suite
from tra.tasks import generator

__all__ = ["nothing_stays"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A trained run of the examples, in a process that has forgotten them."""
    train(tmp_path / "run")
    forget()
    return tmp_path / "run"


def test_config_json_names_the_files_with_their_digests(run: Path) -> None:
    values = json.loads((run / "config.json").read_text())
    assert (values["model"]["mechanism"], values["task"]["name"]) == (
        "own_mechanism.py:Windowed",
        "own_task.py:Reverse",
    )
    assert values["model"]["arguments"] == {"window": 3}
    assert values["imports"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (MECHANISM, TASK)}
    assert "imports" not in preset("demo").to_dict()


def test_verbs_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("evaluate", run, *IMPORTS, "--diagnose") == 0
    assert [row["split"] for row in read_rows(run / "eval.jsonl")] == ["2x"]
    assert command("generate", run, *IMPORTS, "--prompt", "<bos> a b c <sep>", "--max-new-tokens", "2") == 0
    assert command("attend", run, *IMPORTS, "--out", tmp_path / "attend.png") == 0
    assert command("report", run, "--out", tmp_path / "report.html") == 0  # which reads files alone
    assert "own_mechanism.py:Windowed (window 3)" in (tmp_path / "report.html").read_text()
    assert command("report", run, "--out", tmp_path / "report") == 0
    assert "warning" not in capsys.readouterr().err


VERBS_OF_RUNS = [
    ("evaluate", "RUN"),
    ("generate", "RUN"),
    ("attend", "RUN"),
    ("export", "RUN", "OUT"),
    ("train", "--resume", "--out", "RUN"),
    ("train", "--config", "RUN/config.json", "--out", "OUT"),
    ("suite", "merge", "RUN/..", "--out", "OUT"),
    ("report", "RUN", "--out", "OUT"),
    ("report", "RUN", "--out", "OUT.html"),
]


@pytest.mark.parametrize("arguments", VERBS_OF_RUNS, ids="-".join)
def test_no_verb_imports_a_file_that_a_run_names(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the run's folder, the one around it, or the working folder. One line says what to type."""
    runs, work = tmp_path / "runs", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    run = RunFolder(runs / "run")
    run.start(own_config(), resume=False, overwrite=False)
    run.note_environment(torch.device("cpu"))
    run.weights_file.touch()
    result = {"split": "2x", "shortest": 8, "longest": 8, "examples": 4, "exact": 0.0, "low": 0.0, "high": 0.5}
    write_rows(run.evaluation_file, [result | {"seed": 0, "precision": "float32", "seconds": 1.0, "device": "cpu"}])
    write_rows(run.metrics_file, [{"step": 2, "loss": 1.0, "accuracy": 0.5, "exact": 0.0, "tokens_per_second": 9}])
    for file in (MECHANISM, TASK):
        for folder in (runs, run.path, work):
            (folder / file.name).write_text(f"raise SystemExit('imported {file.name}')")
    line = [text.replace("RUN", str(run.path)).replace("OUT", str(tmp_path / "out")) for text in arguments]
    if arguments[0] in ("suite", "report"):  # which look at files alone
        assert command(*line) == 0
        return
    message = r"own_mechanism\.py and own_task\.py.*--import FOLDER/own_mechanism\.py"
    with pytest.raises(ValueError, match=message) as found:
        command(*line)
    assert "\n" not in str(found.value)


def own_config(*changes: str, mechanism: Path = MECHANISM) -> RunConfig:
    names = (f"model.mechanism={mechanism}:Windowed", f"task.name={TASK}:Reverse")
    return preset("copy-quick").override([*names, *TINY, *changes])


def changed_copy(file: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    copy = folder / file.name
    copy.write_text(file.read_text() + "\n# changed\n")
    return copy


def test_a_changed_file_is_a_warning_in_measuring_and_an_error_in_training(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = changed_copy(MECHANISM, tmp_path / "new")
    old, new = (hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in (MECHANISM, changed))
    imports = ("--import", str(changed), "--import", str(TASK))
    with pytest.warns(ChangedFileWarning, match=rf"own_mechanism\.py has changed: its SHA-256 was {old}.*is {new}"):
        assert command("evaluate", run, *imports) == 0
    resume = ("train", "--resume", "--out", run, *imports, "--device", "cpu")
    assert command(*resume) == 0  # nothing is left to train
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"can't go on: own_mechanism\.py has changed.*{old}.*{new}.*--changed-files"):
        command(*resume)
    assert command(*resume, "--changed-files") == 0
    sessions = RunFolder(run).sessions()
    assert "changed_imports" not in sessions[0]
    assert old in sessions[-1]["changed_imports"][0]
    assert json.loads((run / "config.json").read_text())["imports"][MECHANISM.name].startswith(old)


def test_a_run_is_resumed_and_started_anew_with_its_file(run: Path, tmp_path: Path) -> None:
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").unlink()
    assert command("train", "--resume", "--out", run, *IMPORTS, "--device", "cpu") == 0
    assert (run / "model.safetensors").read_bytes() == weights
    changed = changed_copy(MECHANISM, tmp_path / "new")
    imports = ("--import", str(changed), "--import", str(TASK))
    again = ("train", "--config", run / "config.json", *imports, "--device", "cpu", "--out", tmp_path / "again")
    assert command(*again) == 0  # a new run has the file as it is now
    digest = json.loads((tmp_path / "again" / "config.json").read_text())["imports"][MECHANISM.name]
    assert digest == hashlib.sha256(changed.read_bytes()).hexdigest()


@pytest.mark.slow
def test_an_exported_model_needs_its_file(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert command("export", run, tmp_path / "out", *IMPORTS) == 0
    assert "tra.import_file('own_mechanism.py')" in (tmp_path / "out" / "README.md").read_text()
    forget()
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"needs own_mechanism\.py of your own.*tra\.import_file"):
        load(tmp_path / "out")
    tra.import_file(MECHANISM)
    model = load(tmp_path / "out")
    tra.import_file(TASK)
    assert model.config.mechanism_arguments == {"window": 3}
    assert model.config.tra_format == 3
    tokens = RunFolder(run).config().task.build().sample("train", 2, generator(0, "x")).tokens
    assert model(tokens).logits.equal(RunFolder(run).load_model()(tokens))
    forget()
    tra.import_file(changed_copy(MECHANISM, tmp_path / "new"))
    with pytest.warns(ChangedFileWarning, match=r"own_mechanism\.py has changed"):
        load(tmp_path / "out")


def small_grid(folder: Path) -> Path:
    """The example's suite in a few steps, in a folder of its own, as one copies it."""
    text = (
        SUITE.read_text().replace("train.steps=200", "train.steps=4").replace("train.log_every=20", "train.log_every=2")
    )
    text = text.replace("Path(__file__).parent", f"Path({str(SUITE.parent)!r})").replace("in (0, 1)", "in (0,)")
    text = text.replace('"evaluate.examples_of={}"', '"evaluate.examples_of={}", "evaluate.examples=2"')
    (folder / "grid.py").write_text(text.replace('"model.d_model=32"', '"model.d_model=32", "model.n_layers=1"'))
    return folder / "grid.py"


def test_the_suite_s_cells_name_their_files() -> None:
    cells = load_suite(f"{SUITE}:grid", {})["reverse"].cells
    assert [cell.name for cell in cells] == ["tra-0", "tra-1", "windowed-0", "windowed-1"]
    assert [set(cell.config.imports) for cell in cells[1:3]] == [{TASK.name}, {TASK.name, MECHANISM.name}]
    assert variant_of(cells[2].config.to_dict()["model"]) == "own_mechanism.py:Windowed"


@pytest.mark.slow
def test_cells_get_files_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, out = f"{small_grid(tmp_path)}:grid", tmp_path / "out"
    assert command("suite", "run", suite, "--out", out, "--jobs", "2", "--device", "cpu") == 0
    assert "2 of 2 runs" in capsys.readouterr().out
    assert command("suite", "table", suite, "--out", out, "--only", f"{MECHANISM}:Windowed") == 0
    assert "own_mechanism.py:Windowed" in capsys.readouterr().out
    assert command("suite", "run", suite, "--out", out, "--device", "cpu") == 0
    assert "2 of 2 runs" in capsys.readouterr().out  # found again, and skipped
    assert command("suite", "merge", out, "--out", tmp_path / "merged", *IMPORTS) == 0


@pytest.mark.slow
def test_ray_workers_get_files_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from tra.suite.ray_engine import run_on_ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cells = load_suite(f"{small_grid(tmp_path)}:grid", {})["reverse"].cells[1:]
    reports = run_on_ray(cells, tmp_path / "out", device="cpu")
    assert [(report.status, report.last_lines) for report in reports] == [("done", "")]


@pytest.mark.slow
def test_a_cell_without_its_file_fails_in_one_line(tmp_path: Path) -> None:
    cell = Cell("one", own_config())
    forget()
    (report,) = run_suite([cell], tmp_path, device="cpu")
    assert report.status == "failed"
    assert "config.json: the config needs own_mechanism.py and own_task.py of your own" in report.last_lines
    assert "\n" not in report.last_lines


def test_another_file_is_another_cell(tmp_path: Path) -> None:
    one = Cell("one", own_config())
    forget()
    other = Cell("one", own_config(mechanism=changed_copy(MECHANISM, tmp_path / "new")))
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise KeyError('x')", r"mine\.py can't be imported: KeyError: 'x' \(line 1\)"),
        ("def f(:", r"mine\.py can't be imported: SyntaxError"),
        ("x = 1", r"mine\.py has no Windowed, which should be a mechanism"),
        ("Windowed = 1", r"'mine\.py:Windowed' must be a subclass of Mechanism, got 1"),
        (None, r"there is no file .*mine\.py"),
    ],
)
def test_a_wrong_file_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        preset("demo").override([f"model.mechanism={tmp_path}/mine.py:Windowed"])


def test_two_files_of_one_name_are_refused_and_one_that_changes_is_read_again(tmp_path: Path) -> None:
    changed = changed_copy(MECHANISM, tmp_path / "new")
    before = import_file(changed)
    assert import_file(changed) is before
    with pytest.raises(ValueError, match=r"two different files are called own_mechanism\.py"):
        import_file(MECHANISM)
    changed.write_text(changed.read_text() + "\nAGAIN = 1\n")
    assert import_file(changed).AGAIN == 1
    assert import_named("own_mechanism.py:Windowed") == "own_mechanism.py:Windowed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.arguments.windw=3"], r"unknown argument of own_mechanism\.py:Windowed 'windw': did you mean 'window'"),
        (["model.arguments.window=wide"], r"model\.arguments\.window must be of type int, got 'wide'"),
        (["model.mechanism=rope"], "rope has no arguments of its own, got 'window'"),
        (["task.arguments.size=3"], r"unknown argument of own_task\.py:Reverse 'size'"),
    ],
)
def test_arguments_are_checked_against_the_constructor(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_config(*changes)


def test_an_argument_without_default_must_be_given(tmp_path: Path) -> None:
    text = MECHANISM.read_text().replace("window: int = 8", "window: int")
    (tmp_path / "needs.py").write_text(text)
    import_file(tmp_path / "needs.py")
    with pytest.raises(
        ValueError, match=r"needs\.py:Windowed needs its argument window: give model\.arguments\.window"
    ):
        DecoderConfig(vocab_size=5, mechanism="needs.py:Windowed")
    config = DecoderConfig(vocab_size=5, mechanism="needs.py:Windowed", arguments={"window": 2})
    assert tra.Decoder(config).layers[0].self_attn.window == 2
    assert hash(config) == hash(config)


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of an installed package stand for themselves; the config says of which package and version."""
    package = tmp_path / "their_package-1.2.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.2\n")
    (package / "entry_points.txt").write_text(
        "[tra.mechanisms]\nwindowed = their_package:Windowed\n[tra.tasks]\nreverse = their_package:Reverse\n"
        "[tra.suites]\ntheirs = their_package:grid\n"
    )
    (tmp_path / "their_package.py").write_text(
        f"{MECHANISM.read_text()}\n{TASK.read_text().partition('annotations')[2]}\n"
        "from tra.presets import preset\nfrom tra.suite import Cell, Part\n"
        "def grid():\n    return {'t': Part([Cell('one', preset('demo'))])}\n"
    )
    names = ["model.mechanism=windowed", "task.name=reverse"]
    with pytest.raises(ValueError, match="unknown mechanism 'windowed'"):
        preset("copy-quick").override(names[:1])
    monkeypatch.syspath_prepend(tmp_path)
    config = preset("copy-quick").override([*names, *TINY])
    assert config.imports == {
        "tra.mechanisms:windowed": "their-package 1.2",
        "tra.tasks:reverse": "their-package 1.2",
    }
    assert RunConfig.from_dict(config.to_dict()) == config
    assert isinstance(load_suite("theirs", {})["t"], Part)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.3\n")
    importlib.invalidate_caches()
    assert "windowed has changed: it was of their-package 1.2" in config.changed_imports()[0]
    monkeypatch.undo()
    sys.modules.pop("their_package")
    for registry in (tra.attention.MECHANISMS, tra.tasks.TASKS):
        for name in ("windowed", "reverse"):
            registry.pop(name, None)
    with pytest.raises(ValueError, match=r"needs the mechanism 'windowed' of the package 'their-package 1\.2'"):
        RunConfig.from_dict(config.to_dict())


@pytest.mark.slow
def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that measure import the file, too."""
    from tra.bench import step

    monkeypatch.setattr(step, "COST_SHAPES", (step.Shape("tiny", 2, 16),))
    assert command("bench", "cost", "--only", f"{MECHANISM}:Windowed", "--device", "cpu", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert "error" not in row


def test_compiled_code_beside_a_file_is_neither_run_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes code from `__pycache__`, and by its own choice compares it with nothing."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    file.write_text(MECHANISM.read_text())
    import_file(file)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    forget()
    source = tmp_path / "hidden.py"
    source.write_text("raise RuntimeError('this is not what mine.py says')")
    compiled = Path(importlib.util.cache_from_source(str(file)))
    py_compile.compile(str(source), str(compiled), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert import_file(file).Windowed
    (tmp_path / "grid.py").write_text(SUITE.read_text())
    compiled.rename(compiled.with_name(compiled.name.replace("mine", "grid")))
    monkeypatch.setattr(tra.runs.extensions, "_SourceLoader", importlib.machinery.SourceFileLoader)
    with pytest.raises(ValueError, match="this is not what"):  # as it would without care
        load_suite(f"{tmp_path / 'grid.py'}:grid", {})


def test_a_link_is_known_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(MECHANISM.read_text())
    (tmp_path / "linked.py").symlink_to("text.txt")
    (tmp_path / "again.py").symlink_to(MECHANISM)
    for name in ("linked.py", "again.py"):
        config = preset("demo").override([f"model.mechanism={tmp_path / name}:Windowed"])
        assert config.model.mechanism == f"{name}:Windowed"
        assert config.imports == {name: hashlib.sha256(MECHANISM.read_bytes()).hexdigest()}
        assert imported_paths(config.imports) == [str(tmp_path / name)]


@pytest.mark.parametrize("name", ["DenseAttention", "Attention", "Mechanism"])
def test_a_class_to_derive_from_is_no_mechanism(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tra.attention import *\nfrom tra.tasks import Task")
    with pytest.raises(ValueError, match=f"'mine.py:{name}' is no mechanism, but a class of this package"):
        preset("demo").override([f"model.mechanism={tmp_path / 'mine.py'}:{name}"])
    with pytest.raises(ValueError, match=r"'mine\.py:Task' is no task, but a class"):
        preset("demo").override([f"task.name={tmp_path / 'mine.py'}:Task", "task.arguments={}"])


def plant(folder: Path) -> None:
    """Put packages into a working folder that would be imported from there, as runs unpacked there may be named."""
    for name in ("numpy", "rich", "evil"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of the working folder was imported')")
    (folder / "evil-1.0.dist-info").mkdir()
    (folder / "evil-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / "evil-1.0.dist-info" / "entry_points.txt").write_text("[tra.mechanisms]\nevil = evil:Evil\n")


COMMANDS_OF_PYTHON = (
    (("-m", "tra", "evaluate", "none"), "tra: none doesn't exist"),
    (("-c", "import tra.runs"), ""),
    *slow(
        (("-m", "tra", "generate", "run"), "unknown mechanism 'evil'"),
        (("-m", "tra.suite.cell", "run"), "unknown mechanism 'evil'"),
    ),
)


@pytest.mark.parametrize(("arguments", "said"), COMMANDS_OF_PYTHON)
def test_nothing_is_imported_from_the_working_folder(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path)
    (tmp_path / "run").mkdir()
    config = preset("demo").to_dict()
    config["model"]["mechanism"] = "evil"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run" / "model.safetensors").touch()
    monkeypatch.setenv("PYTHONPATH", str(Path(tra.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, *arguments] if "tra" in arguments else python_command(*arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in done.stdout + done.stderr
    assert "working folder" not in done.stdout + done.stderr
