"""Damage to files: every kind has a name and a number, so that a failure can be written down and done again."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.fuzz import values
from tests.fuzz.command_lines import without_compiler


class Tamper(NamedTuple):
    """One damage: what is done to which file, where, and with what value."""

    path: str
    kind: str
    where: int = 0
    value: Any = None

    def apply(self, place: Path) -> None:
        with contextlib.suppress(Exception):  # an earlier damage may leave nothing for this one
            KINDS[self.kind](place / self.path, self)


def tampers(paths: tuple[str, ...]) -> st.SearchStrategy[Tamper]:
    """Draw damages of some files, each of a kind that suits it."""

    def of_path(path: str) -> st.SearchStrategy[Tamper]:
        kinds = list(COMMON)
        if path.endswith((".json", ".jsonl")):
            kinds += ["leaf", "leaf", "leaf", "leaf", "drop", "whole", "line", "digits"]
        if path.endswith("config.json"):
            kinds += ["names", "names", "names"]
        if path.endswith(".safetensors"):
            kinds += ["tensors", "tensors", "tensors", "header"]
        if path.endswith((".npz", ".npy")):
            kinds += ["array", "array", "array"]
        return st.builds(
            Tamper,
            st.just(path),
            st.sampled_from(kinds),
            st.integers(0, 2**16),
            values.json_values() | st.integers(0, 9),
        )

    return st.sampled_from(paths).flatmap(of_path)


def _write(path: Path, content: bytes) -> None:
    if path.is_symlink() or path.is_dir():
        _remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flip(path: Path, tamper: Tamper) -> None:
    content = bytearray(path.read_bytes())
    for index in range(1 + tamper.where % 3):
        if content:
            position = (tamper.where * 7919 + index * 104729) % min(len(content), 1 << (4 + tamper.where % 16))
            content[position] ^= 1 << (tamper.where % 8)
    _write(path, bytes(content))


def _truncate(path: Path, tamper: Tamper) -> None:
    content = path.read_bytes()
    _write(path, content[: len(content) * (tamper.where % 100) // 100])


def _folder(path: Path, tamper: Tamper) -> None:
    _remove(path)
    path.mkdir()
    if tamper.where % 2:
        (path / "kept.txt").write_text("kept\n")


def _link(path: Path, tamper: Tamper) -> None:
    beside = ("../apart", "../../beside/run", "../../beside/sentinel.txt", "../../beside/run/" + path.name,
              "../../../beside/sentinel.txt")  # fmt: skip
    target = ("nowhere", path.name, "/dev/null", "../other/" + path.name, *beside)[tamper.where % 9]
    _remove(path)
    path.symlink_to(target)


def _swap(path: Path, tamper: Tamper) -> None:
    names = ("other", "text", "store", "stores/train", "run")
    for name in (*names[tamper.where % 5 :], *names):
        source = path.parents[0].parent / name / path.name
        if source.is_file() and source != path:
            return _write(path, source.read_bytes())
    source = path.parents[2] / "other" / path.parent.name / path.name
    return _write(path, source.read_bytes()) if source.is_file() else None


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += _leaves(item, (*at, key))
    return found


def _edit_json(path: Path, edit: Callable[[Any, tuple[Any, ...]], None], tamper: Tamper) -> None:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    line = tamper.where % max(1, len(lines))
    value = json.loads(lines[line])
    leaves = _leaves(value)
    at = leaves[(tamper.where // 7) % len(leaves)]
    node = value
    for key in at[:-1]:
        node = node[key]
    edit(node, at)
    lines[line] = values.as_json(value)
    _write(path, without_compiler("\n".join(lines) + "\n").encode(errors="surrogatepass"))


def _leaf(path: Path, tamper: Tamper) -> None:
    def edit(node: Any, at: tuple[Any, ...]) -> None:
        node[at[-1]] = tamper.value

    _edit_json(path, edit, tamper)


def _drop(path: Path, tamper: Tamper) -> None:
    def edit(node: Any, at: tuple[Any, ...]) -> None:
        del node[at[-1]]

    _edit_json(path, edit, tamper)


def _names(path: Path, tamper: Tamper) -> None:
    """Let a config name code that lies about, as if it were needed."""
    config = json.loads(path.read_text())
    name = values.OWN_NAMES[tamper.where % len(values.OWN_NAMES)]
    file = name.rpartition(":")[0].rpartition("/")[2] or name
    digest = hashlib.sha256((path.parents[1] / file).read_bytes()).hexdigest() if file == "evil.py" else "0" * 64
    imports = ({file: digest}, {}, {name: digest}, {"evil.py": digest, "own_mechanism.py": digest}, {"../evil.py": ""},
               {"tra.mechanisms:evil": "evil 1.0"}, {"tra.mechanisms:x": "y"})[tamper.where // 20 % 7]  # fmt: skip
    config["imports"] = imports
    if "model" in config and tamper.where // 140 % 3:
        config["model"]["mechanism"] = name
    elif "task" in config:
        config["task"]["name"] = name
    else:  # of an exported model
        config |= {"mechanism": name, "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    _write(path, json.dumps(config).encode(errors="surrogatepass"))


def _digits(path: Path, tamper: Tamper) -> None:
    """Write numbers with more digits than Python reads."""
    _write(path, path.read_bytes().replace(b"1", b"1" * 5000, 1 + tamper.where % 2))


def _line(path: Path, tamper: Tamper) -> None:
    lines = path.read_bytes().split(b"\n")
    bad = (
        b"{",
        b"\xff\xfe",
        b"null",
        b"",
        b"[]",
        b"{}",
        b"\x00" * 100,
        b"[" * 20000,
        values.as_json(tamper.value).encode(),
    )
    lines.insert(tamper.where % len(lines), bad[tamper.where // 5 % len(bad)])
    _write(path, b"\n".join(lines))


def _tensors(path: Path, tamper: Tamper) -> None:
    """Write a file that is whole, with the digest of what it holds, and holds something else."""
    import torch

    from tra.training.checkpoint import load_tensors, save_tensors

    tensors, metadata = load_tensors(path)
    name = sorted(tensors)[tamper.where % len(tensors)]
    kind = tamper.where // 3 % 9
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors["more"] = torch.zeros(2)
    elif kind == 2:
        tensors[name] = torch.zeros(3, 2)
    elif kind == 3:
        tensors[name] = torch.full_like(tensors[name], float("nan") if tensors[name].is_floating_point() else 1)
    elif kind == 4:
        tensors[name] = tensors[name].to(torch.int8)
    elif kind == 5:
        metadata.clear()
    elif kind == 6:
        metadata["step"] = ("-1", "x", "9" * 400, "")[tamper.where % 4]
    elif kind == 7:
        tensors.clear()
    else:
        tensors[name] = tensors[name].to(torch.complex64)
    save_tensors(path, tensors, metadata)


def _header(path: Path, tamper: Tamper) -> None:
    content = path.read_bytes()
    length = (0, 2**63, 2**64 - 1, 10**8, 5)[tamper.where % 5]
    _write(path, length.to_bytes(8, "little") + content[8:])


def _array(path: Path, tamper: Tamper) -> None:
    strange = (
        np.zeros(0), np.zeros((2, 3, 4)), np.array(7), np.array([2**62] * 3), np.full((3, 3), -5), np.array(["x"]),
        np.array([1.5, float("nan")]), np.array([{"a": 1}], dtype=object), np.zeros((1, 3), dtype="<c16"),
        np.array([[0, 2**62, 2**62]]), np.zeros((3, 3), dtype="V4"),
    )[tamper.where % 11]  # fmt: skip
    content = io.BytesIO()
    if path.suffix == ".npy":
        np.save(content, strange, allow_pickle=True)
    else:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        name = sorted(arrays)[tamper.where // 11 % len(arrays)]
        if tamper.where % 13 == 0:
            del arrays[name]
        elif tamper.where % 13 == 1:
            arrays["more"] = strange
        elif tamper.where % 13 == 2:
            arrays = {key: array[:0] if array.ndim else array for key, array in arrays.items()}
        else:
            arrays[name] = strange
        np.savez(content, **arrays)  # type: ignore[arg-type]
    _write(path, content.getvalue())


def _empty(path: Path, tamper: Tamper) -> None:
    _write(path, b"")


def _garbage(path: Path, tamper: Tamper) -> None:
    _write(path, np.random.default_rng(tamper.where).bytes(tamper.where % 3000))


def _append(path: Path, tamper: Tamper) -> None:
    _write(path, path.read_bytes() + (b"\n", b"\x00", b"x" * 3000, b"{}\n", b'{"step": 1')[tamper.where % 5])


def _twice(path: Path, tamper: Tamper) -> None:
    _write(path, path.read_bytes() * 2)


def _whole(path: Path, tamper: Tamper) -> None:
    _write(path, (values.as_json(tamper.value) + "\n").encode(errors="surrogatepass"))


def _delete(path: Path, tamper: Tamper) -> None:
    _remove(path)


def _pipe(path: Path, tamper: Tamper) -> None:
    """Put a named pipe in its place: who opens it waits for a writer."""
    _remove(path)
    os.mkfifo(path)


KINDS: dict[str, Callable[[Path, Tamper], Any]] = {
    "flip": _flip, "truncate": _truncate, "empty": _empty, "garbage": _garbage, "append": _append, "twice": _twice,
    "delete": _delete, "folder": _folder, "link": _link, "swap": _swap, "leaf": _leaf, "drop": _drop, "digits": _digits,
    "whole": _whole, "names": _names, "line": _line, "tensors": _tensors, "header": _header, "array": _array,
    "pipe": _pipe,
}  # fmt: skip
COMMON = (
    "flip",
    "flip",
    "truncate",
    "truncate",
    "empty",
    "garbage",
    "append",
    "twice",
    "delete",
    "folder",
    "link",
    "swap",
)
