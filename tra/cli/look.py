"""`tra attend` and `tra report`: what there is to look at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from tra.evaluation import exact_match as evaluation
from tra.evaluation.attention_maps import WINDOW, task_sequence, text_sequence
from tra.evaluation.attention_maps import attend as attend_to
from tra.runs import SHIPPED, RunFolder, write_arrays
from tra.text.task import Text
from tra.training import trainer as training


def attend(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")],
    /,
    split: str | None = None,
    seed: int | None = None,
    text: str | None = None,
    prompt: str | None = None,
    start: int | None = None,
    window: int | None = None,
    layers: tuple[int, ...] = (),
    heads: tuple[int, ...] = (),
    rows: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="FROM TO")] = None,
    keys: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="FROM TO")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    device: str | None = None,
) -> int:
    """Draw what runs attend to on one sequence, layer by layer and head by head; several runs side by side.

    White is a key that was dropped, grey one that comes later. Queries at which an answer is due are framed, those
    that keep no key have a cross. The numbers go to attend.npz in each run's folder.

    Args:
        runs: Run folders, or the name of a run that ships with the package (flipflop-tra). Several must know the same
            task, or text by the same tokenizer.
        split: Of a task: the split whose first test sequence is shown; the first that evaluation looks at by default.
        seed: Of a task: of its test sequences; 0 by default.
        text: Of flip-flop: a sequence, as in w1i0r1. Of a language model: a token store (tra prepare); the run's
            validation text by default.
        prompt: Of a language model: a text, written out.
        start: Of a language model: the token of the store or text that comes first; 0 by default.
        window: Of a language model: tokens to look at; 256 by default.
        layers: Layers to show, counted from 0; all by default.
        heads: Heads to show, counted from 0; all by default.
        rows: Queries to show, TO not included; all by default, of more than 256 tokens the last 64.
        keys: Keys to show; those up to the last query by default, beyond 256 tokens the same as rows.
        out: The figure, .png, .svg or .pdf; attend.png by default, in the run's folder where that can be.
        device: cpu or cuda; a GPU by default if there is one.
    """
    from tra.report.heatmaps import check_figure, draw_attention

    if not runs:
        raise ValueError("name at least one run")
    chosen, folders = training.pick_device(device), [RunFolder.open(run) for run in runs]
    ships = [SHIPPED in folder.path.resolve().parents for folder in folders]  # what ships stays as it is
    if out is None:
        out = Path("attend.png") if len(folders) > 1 or ships[0] else folders[0].path / "attend.png"
    check_figure(out)
    configs = [folder.config() for folder in folders]
    tasks = [config.task.build() for config in configs]
    if len({(task.name, task.tokenizer if isinstance(task, Text) else task.vocabulary) for task in tasks}) > 1:
        raise ValueError("the runs learnt different tasks: attend to one at a time")
    if isinstance(task := tasks[0], Text):
        if split is not None or seed is not None:
            raise ValueError("--split and --seed are for tasks; this run learnt text")
        if prompt is not None and (text, start, window) != (None, None, None):
            raise ValueError("give either --prompt or a window of a text")
        store = None if text is None else Path(text)
        size = WINDOW if window is None else window
        shown = text_sequence(task, store=store, prompt=prompt, start=start or 0, window=size)
    else:
        if (prompt, start, window) != (None, None, None):
            raise ValueError(f"--prompt, --start and --window are for language models; this run learnt {task.name}")
        if text is not None and (split, seed) != (None, None):
            raise ValueError("give either --text or a --split with its --seed")
        split = split or next(iter(evaluation.chosen_splits(task, configs[0].evaluate)))
        shown = task_sequence(task, split, seed or 0, text)
    found = []
    for folder, is_shipped in zip(folders, ships, strict=True):
        model = folder.load_model(chosen)
        found.append(attend_to(model, shown, rows=rows, keys=keys, layers=layers, heads=heads))
        file = out.with_name(f"{out.stem}-{folder.path.name}.npz") if is_shipped else folder.path / "attend.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(file, found[-1]._asdict())
        print(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_attention(found, out)
    print(out)
    return 0


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    out: Path = Path("report"),
    index: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Tables and figures of evaluated runs of one task: one run per mechanism, or a comparison over several seeds.

    Or a page: one HTML file, of runs of any tasks, with curves, tables and attention maps to look into.

    Args:
        runs: Run folders, each with an eval.jsonl.
        out: Where README.md and the figures go. A notes.md that lies there becomes part of a comparison. A name that
            ends in .html is the page; attend.npz of a run (tra attend) becomes maps on it.
        index: Write README.md of a folder of reports instead: a line for all that its index.json describes.
    """
    if index is None and out.suffix.lower() in (".html", ".htm"):
        from tra.report.page import write_page

        for problem in write_page(runs, out):
            print(f"{problem.run} {problem.why}", file=sys.stderr)
        print(out)
        return 0
    from tra.report.comparison import write_comparison
    from tra.report.index import write_index
    from tra.report.language import write_language
    from tra.report.runs import read_runs
    from tra.report.summary import write_summary

    if index is not None:
        if runs:
            raise ValueError("give either runs or --index")
        print(write_index(index))
        return 0
    found = read_runs(runs)
    several = len({run.mechanism for run in found}) < len(found)
    write = write_language if found[0].is_text else write_comparison if several else write_summary
    for path in write(found, out):
        print(path)
    return 0
