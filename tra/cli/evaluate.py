"""`tra evaluate`: exact match, or the perplexity of a language model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from tra.attention import MECHANISMS
from tra.cli.display import (
    EvaluationDisplay,
    diagnosis_table,
    perplexity_table,
    results_table,
)
from tra.cli.options import Json
from tra.evaluation import diagnosis, perplexity
from tra.evaluation import exact_match as evaluation
from tra.evaluation.attention_maps import write_maps
from tra.model import Decoder
from tra.runs import SHIPPED, RunFolder
from tra.text import TokenStore
from tra.text.task import Stream, Text
from tra.training import trainer as training


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
