"""The wheel and the source distribution: what is in them, what they ask for, and that the wheel works alone."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import tra

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKAGE = "threshold_relative_attention"
OF_IMPORTS = {"PIL": "pillow"}
"""Distributions whose name is not that of what is imported."""
OPTIONAL = {
    "accelerate": "transformers' Trainer needs it",
    "datasets": "a source hub:NAME of `tra prepare` needs it, and says so",
    "lm_eval": "EleutherAI's harness is what imports the task",
    "ray": "the extra scale",
    "transformers": "the extra hub",
    "triton": "comes with torch where there is a GPU for it",
}
DATA = {
    "tra/py.typed",
    "tra/hub/lm_eval/tra_text.yaml",
    "tra/report/page/template.html",
    "tra/report/page/page.css",
    *(f"tra/report/page/{name}.js" for name in ("base", "charts", "tables", "maps", "page")),
    *(f"tra/runs/shipped/flipflop-tra/{name}" for name in ("config.json", "environment.json", "model.safetensors")),
    "tra/text/alice.txt",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from the working tree, with the backend that is installed."""
    if importlib.util.find_spec("hatchling") is None and "CI" not in os.environ:
        pytest.skip("building the package needs hatchling")
    out = tmp_path_factory.mktemp("dist")
    return build(ROOT, out)


def build(source: Path, out: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *options]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def wheel(folder: Path) -> zipfile.ZipFile:
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


def source_files(folder: Path) -> set[str]:
    (found,) = folder.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    names = set(wheel(built).namelist())
    outside = {name for name in names if not name.startswith(("tra/", f"{PACKAGE}-{tra.__version__}.dist-info/"))}
    assert outside == set()
    tracked = subprocess.run(["git", "ls-files", "tra"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name for name in names if name.startswith("tra/")} >= set(tracked.splitlines()) >= DATA
    assert names >= DATA
    assert f"{PACKAGE}-{tra.__version__}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_the_source_has_what_a_build_needs(built: Path, tmp_path: Path) -> None:
    names = source_files(built)
    assert names >= DATA | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    assert not [name for name in names if name.startswith(("tests/", "results/", "build/"))]
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    again = build(tmp_path / f"{PACKAGE}-{tra.__version__}", tmp_path / "dist", "-t", "wheel")
    assert sorted(wheel(again).namelist()) == sorted(wheel(built).namelist())


def test_it_asks_for_what_it_imports(built: Path) -> None:
    """All that is imported anywhere in the package, lazily or not, is a dependency, or optional for a reason."""
    imported = set()
    for path in (ROOT / "tra").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0])
    needed = {OF_IMPORTS.get(name, name) for name in imported - set(sys.stdlib_module_names) - set(OPTIONAL) - {"tra"}}
    metadata = message_from_bytes(wheel(built).read(f"{PACKAGE}-{tra.__version__}.dist-info/METADATA"))
    asked = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {re.split(r"[<>=!~; \[]", line)[0] for line in asked} == needed
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_wheel_works_alone(built: Path, tmp_path: Path) -> None:
    """Unpacked somewhere else: the command, the run that ships, and the page with its scripts."""
    wheel(built).extractall(tmp_path / "site")
    code = """
import sys, pathlib, tra
from tra.cli.main import parse
from tra.report.page import write_page
assert pathlib.Path(tra.__file__).is_relative_to(sys.argv[1]), tra.__file__
assert parse(["generate", "flipflop-tra", "--prompt", "w1i0i1r"])() == 0
write_page([pathlib.Path(sys.argv[2])], pathlib.Path("report.html"))
"""
    arguments = [str(tmp_path / "site"), str(ROOT / "results/demo/tra")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "w1i0i1r1" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 1e6


def test_the_citation_has_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {tra.__version__}\n" in citation


def test_constraints_name_what_is_asked_for() -> None:
    """Every direct dependency, of all extras, has an exact version, and each version fits what is asked for."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    asked = [Requirement(line) for line in lines]
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if requirement := line.partition("#")[0].strip():
            name, _, version = requirement.partition("==")
            pinned[name] = version
    for requirement in asked:
        if requirement.name != project["name"]:
            assert requirement.name in pinned, requirement
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
