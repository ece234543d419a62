"""What every command line is held to: its status, its one line, and what it leaves of the files that were there."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.command import Outcome
from tests.fuzz.sandbox import Snapshot

REMADE = ("README.md", "*.png", "*.svg", "*.pdf", "*.csv", "*.html", "*.htm", "index.json", "*.npz", "*.tar.gz",
          "log.txt", "lock", "failed.json", "environment.json", "windows.json")  # fmt: skip
"""Files that a command makes anew each time it is asked to."""
ROW_KEYS = {
    "eval.jsonl": ("split",),
    "diagnose.jsonl": ("split", "text", "window"),
    "perplexity.jsonl": ("text", "window", "overlap"),
}
TEMPORARY = re.compile(
    r"(^|/)\.(?!cache)[^/]*(\.tmp|\.preparing|\.exporting|\.overwriting|\.saving|\.removing|merging-[^/]*|unpacked)$"
)

NOTICE = re.compile(
    r"(.+: )?warning: |conflict: |.+: (resuming at step [\d,]+$|heads \(layer\.head\) that keep no key)"
)
"""Lines on stderr that are no error: what a command found, and did in spite of it."""


def check(
    outcome: Outcome,
    before: Snapshot,
    after: Snapshot,
    intact: frozenset[bytes] = frozenset(),
    first: Snapshot | None = None,
) -> list[str]:
    """Return the signatures of all promises that a command broke.

    Args:
        intact: Contents of checkpoints that are as they were written: metrics up to their step stay.
        first: All files as they were before they were damaged.
    """
    arguments = outcome.arguments
    verb = " ".join(arguments[: 2 if arguments[:1] == ("suite",) else 1])
    broken = list(outcome.failures)
    if not outcome.failures:
        broken += _check_speech(outcome, verb)
    if before != after:
        damaged = {path for path in before if first is not None and before[path] != first.get(path)}
        broken += _check_files(outcome, verb, before, after, intact, damaged)
    if verb == "train" and outcome.status == 0:
        broken += _check_training(outcome, before, after)
    return list(dict.fromkeys(broken))


def _check_speech(outcome: Outcome, verb: str) -> list[str]:
    status = outcome.status
    if status not in (0, 1, 2, 130, 143):
        return [f"Status {status} of tra {verb}"]
    if "Traceback (most recent" in outcome.stderr:
        return [f"Traceback on stderr of tra {verb}"]
    if status in (0, 143):
        return []
    said = [line for line in outcome.stderr.splitlines() if not NOTICE.match(line)]
    if status == 130 or (verb in ("suite merge", "suite run") and status == 1):
        return []
    is_one_line = len(said) == 1 and said[0].startswith("tra: ") and len(said[0]) > len("tra: ")
    return [] if is_one_line else [f"Lines: {len(said)} on stderr of tra {verb}"]


def _check_files(
    outcome: Outcome, verb: str, before: Snapshot, after: Snapshot, intact: frozenset[bytes], damaged: set[str]
) -> list[str]:
    outputs = _outputs(outcome.arguments, before)
    may_replace = "--overwrite" in outcome.arguments or verb == "demo"
    broken = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        name = Path(path).name
        if name == "model.safetensors" and path in damaged and verb in ("train", "suite run"):
            continue  # training makes weights again that can't be read, or are of another model
        if old is None and (temporary := TEMPORARY.search(path)):
            broken.append(f"Leftover {temporary[2]} of tra {verb}")
        elif new is None and any(TEMPORARY.search(part) for part in Path(path).parts):
            continue  # left by an earlier command, and removed as it should be
        elif not _is_inside(path, outputs, is_folder=new == "folder"):
            if not any(path.startswith(f"{seen}/") for seen in before if before[seen] != after.get(seen)):
                done = "new file" if old is None else f"{'deleted' if new is None else 'changed'} {name}"
                broken.append(f"Outside: {done} by tra {verb}")
        elif old is not None and not may_replace and not _may_change(path, old, new, before, after, intact):
            broken.append(f"Lost {re.sub(r'[0-9]+', 'N', name)} by tra {verb}")
    return broken


def _check_training(outcome: Outcome, before: Snapshot, after: Snapshot) -> list[str]:
    """A run that is said to be done has weights that can be read, and losses that are numbers."""
    import safetensors.torch

    broken = []
    for output in _outputs(outcome.arguments, before):
        rows = [row for row in _lines(_bytes(after.get(f"{output}/metrics.jsonl"))) if isinstance(row, dict)]
        if rows and isinstance(rows[-1].get("loss"), float) and not math.isfinite(rows[-1]["loss"]):
            broken.append("Status 0 of tra train with a loss that is not finite")
        weights = after.get(f"{output}/model.safetensors")
        if isinstance(weights, bytes):
            try:
                safetensors.torch.load(weights)
            except Exception:
                broken.append("Status 0 of tra train with damaged weights")
    return broken


def _bytes(content: bytes | str | None) -> bytes:
    return content if isinstance(content, bytes) else b""


def _is_inside(path: str, outputs: Iterable[str], is_folder: bool) -> bool:
    for output in outputs:
        if output == "." or path == output or path.startswith(f"{output}/"):
            return True
        if is_folder and output.startswith(f"{path}/"):
            return True
    return False


def _outputs(arguments: tuple[str, ...], before: Snapshot) -> list[str]:
    """Return the paths below the sandbox that a command line may write to; none if it doesn't parse."""
    from tra.cli.main import VERBS, parser_of

    if not arguments or arguments[0] not in VERBS:
        return []
    try:
        options = parser_of(arguments[0]).parse(arguments[1:])
    except (ValueError, SystemExit):
        return []
    named = _named_outputs(arguments[0], options)
    found = [os.path.normpath(f"place/{path}") for path in named if path is not None and not str(path).startswith("/")]
    for output in list(found):  # what a link stands for was named too
        parts = Path(output).parts
        for count in range(2, len(parts) + 1):
            content = before.get("/".join(parts[:count]))
            if isinstance(content, str) and content.startswith("link to "):
                target = "/".join((*parts[: count - 1], content.removeprefix("link to "), *parts[count:]))
                found.append(os.path.normpath(target))
    return found


def _named_outputs(verb: str, options: argparse.Namespace) -> list[Path | str | None]:
    if verb == "train":
        return [options.out or "runs"]
    if verb == "evaluate":
        return [options.run]
    if verb == "calibrate":
        return [options.run, options.out, "windows.json"]
    if verb == "attend":
        out = options.out or Path("attend.png")
        return [out, *options.runs, *(f"{out.parent}/{out.stem}-{Path(run).name}.npz" for run in options.runs)]
    if verb == "prepare":
        return [options.paths[-1]] if options.paths else []
    if verb == "suite":
        if options.action == "run":
            return [options.out or "runs", options.pack]
        return [options.out] if options.action == "merge" else []
    if verb == "report":
        return [options.index or options.out]
    if verb == "export":
        return [options.folder]
    return [options.out] if verb == "demo" else []


def _may_change(
    path: str, old: bytes | str, new: bytes | str | None, before: Snapshot, after: Snapshot, intact: frozenset[bytes]
) -> bool:
    """Return whether nothing is lost by this change of what was there."""
    name = Path(path).name
    if new is not None and any(fnmatch.fnmatch(name, pattern) for pattern in REMADE):
        return True
    if name in ("failed.json", "lock") or any(TEMPORARY.search(part) for part in Path(path).parts):
        return True
    if old == "folder" and Path(path).parent.name == "checkpoints":
        return new is None and not _is_intact(path, before, intact)
    if isinstance(old, str):  # a link may become the file that it stood for; a folder stays
        return old.startswith("link") and isinstance(new, bytes)
    if "checkpoints" in Path(path).parts:
        return new is None or bytes(old) not in intact
    if name.endswith(".json") and isinstance(new, bytes) and _is_calibration(old) and _is_calibration(new):
        return True
    if name == "metrics.jsonl":
        return isinstance(new, bytes) and _keeps_metrics(path, old, new, before, intact)
    if name in ROW_KEYS:
        return isinstance(new, bytes) and _keeps_rows(old, new, ROW_KEYS[name])
    return isinstance(new, bytes) and new.startswith(old) and name == "log.txt"


def _lines(content: bytes) -> list[object]:
    found: list[object] = []
    for line in content.decode(errors="replace").splitlines():
        if not line.strip():
            continue  # a blank line says nothing that could be lost
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            found.append(line)
    return found


def _keeps_rows(old: bytes, new: bytes, keys: tuple[str, ...]) -> bool:
    """Return whether all rows are there still, or newer ones of the same split or window; a cut last line may go."""
    later = _lines(new)
    measured = [[row.get(key) for key in keys] for row in later if isinstance(row, dict)]
    lines = _lines(old)
    for index, row in enumerate(lines):
        if row in later or (isinstance(row, dict) and [row.get(key) for key in keys] in measured):
            continue
        if isinstance(row, str) and index == len(lines) - 1:
            continue
        if row != row:  # NaN
            continue
        return False
    return True


def _is_calibration(content: bytes) -> bool:
    return b'"weights_sha256": ' in content and b'"mean_windows": ' in content


def _is_intact(path: str, before: Snapshot, intact: frozenset[bytes]) -> bool:
    """Return whether the folder of a sharded checkpoint has all that its manifest names, as it was written."""
    files = {name.removeprefix(f"{path}/"): content for name, content in before.items() if name.startswith(f"{path}/")}
    if not all(content in intact for content in files.values()) or "manifest.json" not in files:
        return False
    return files.keys() - {"manifest.json"} == json.loads(_bytes(files["manifest.json"]))["files"].keys()


def _keeps_metrics(path: str, old: bytes, new: bytes, before: Snapshot, intact: frozenset[bytes]) -> bool:
    """Return whether rows up to the newest intact checkpoint are there still; later ones come again."""
    folder = f"{Path(path).parent}/checkpoints/step-"
    steps = [int(re.findall(r"step-(\d+)", name)[-1]) for name, content in before.items()
             if name.startswith(folder) and "/" not in name.removeprefix(folder)
             and (content in intact or (content == "folder" and _is_intact(name, before, intact)))]  # fmt: skip
    newest = max(steps, default=0)
    later = [json.dumps(row) for row in _lines(new)]
    for row in _lines(old):
        step = row.get("step") if isinstance(row, dict) else None
        if isinstance(step, int) and step <= newest and json.dumps(row) not in later:
            return False
    return True
