"""A section in plain words: what was trained, and who holds up with length. Says no more than the rows bear out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tra.report._names import FAILURES
from tra.report.page.charts import Split, exact_match, failure, overlap_text, perplexity, splits_of, texts, windows
from tra.report.page.groups import Group, Section, differing
from tra.report.page.read import PageRun

LEARNT = 0.9
"""Exact match below which a mechanism hasn't learnt the task, so that length can't be judged."""

DRAWS = 1000
SEVERAL = 6
"""Groups that a sentence names one by one."""

Paragraph = dict[str, Any]
"""`text`, and `items` that belong to it."""

Verdict = Literal["holds", "mixed", "falls", "not learnt"]


def summary(section: Section) -> list[Paragraph]:
    found = [_trained(section)]
    splits = splits_of(section.runs, lambda run: run.evaluation)
    if splits:
        found += _by_length(section, splits)
    for text, overlap in texts(section):
        found.append(_by_window(section, text, overlap))
    found += _failures(section)
    return found


def verdict(group: Group, base: Split, split: Split) -> Verdict | None:
    """Whether the 95 % intervals of a run on two test sets part, run by run; None where one wasn't measured."""
    holds = []
    for run in group.runs:
        rows = {row["split"]: row for row in run.evaluation}
        if base.name in rows and split.name in rows:
            if rows[base.name]["exact"] < LEARNT:
                return "not learnt"
            holds.append(rows[split.name]["high"] >= rows[base.name]["low"])
    return None if not holds else "holds" if all(holds) else "mixed" if any(holds) else "falls"


def base_of(section: Section, splits: Sequence[Split]) -> Split:
    """The test set that is as the training set, else the shortest."""
    return next((split for split in splits if split.name == "iid"), splits[0])


def _trained(section: Section) -> Paragraph:
    groups, runs = section.groups, section.runs
    mechanisms = len({group.mechanism for group in groups})
    seeds = {len(group.runs) for group in groups}
    each = f"{_number(min(seeds), 'seed')} each" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds each"
    settings = f", in {len(groups)} settings" if len(groups) > mechanisms else ""
    text = f"{_number(mechanisms, 'mechanism')}{settings}, {each}."
    configs = [run.config for run in runs]
    shared = []
    for part, key, words in (
        ("model", "n_layers", "{} layers"),
        ("model", "n_heads", "{} heads"),
        ("model", "d_model", "width {}"),
        ("train", "steps", "{} steps"),
        ("train", "batch_size", "batches of {}"),
    ):
        values = {_said(config.get(part, {}).get(key)) for config in configs}
        if len(values) == 1 and values != {_said(None)}:
            shared.append(words.format(*values))
    if shared:
        text += f" {', '.join(shared)}."
    if section.trained_length:
        text += f" Trained at length {section.trained_length:,}."
    differences = [f"{key} ({_values(values)})" for key, values in differing(runs).items()]
    if differences:
        text += f" The runs differ in {_listed(differences)}."
    if seeds == {1} and len(groups) > 1:
        text += " With one seed each, nothing is known of what another seed would do."
    return {"text": text, "items": []}


def _by_length(section: Section, splits: Sequence[Split]) -> list[Paragraph]:
    base = base_of(section, splits)
    found: list[Paragraph] = []
    longest = splits_at(splits, splits[-1].length)[0]
    if longest.length > base.length:
        times = longest.length / base.length
        trained = " the training length" if base.length == section.trained_length else f" that of {base.name}"
        text = (
            f"On the longest test set, {longest.name} ({longest.label}, {times:.3g} times{trained}), "
            f"compared with {base.name} ({base.label}):"
        )
        found.append({"text": text, "items": _verdicts(section, splits, base, longest)})
    else:
        found.append({"text": "No test set is longer than the others, so length isn't judged.", "items": []})
    beside = [split for split in splits if split.length == base.length and split != base]
    for split in beside:
        worse = [g for g in section.groups if verdict(g, base, split) in ("falls", "mixed")]
        same = [g for g in section.groups if verdict(g, base, split) == "holds"]
        items = [f"Less exact than on {base.name}: {_levels(worse, split)}."] if worse else []
        items += [f"No worse: {_listed([group.label for group in same])}."] if same else []
        if items:
            found.append({"text": f"On {split.name}, of the same length:", "items": items})
    return found


def splits_at(splits: Sequence[Split], length: int) -> list[Split]:
    return [split for split in splits if split.length == length]


def _verdicts(section: Section, splits: Sequence[Split], base: Split, longest: Split) -> list[str]:
    by: dict[str, list[Group]] = {}
    for group in section.groups:
        by.setdefault(verdict(group, base, longest) or "not measured", []).append(group)
    items = []
    if "holds" in by:
        words = f"Hold up, as no run's 95 % intervals on the two part: {_levels(by['holds'], longest)}."
        if any(len(group.runs) > 1 for group in by["holds"]):  # then ranges of seeds stand there, not intervals
            runs = [run for group in by["holds"] for run in group.runs]
            lowest = min(row["low"] for run in runs for row in run.evaluation if row["split"] == longest.name)
            words += f" The lowest bound of a run's interval there is {lowest:.3f}."
        items.append(words)
    if "mixed" in by:
        items.append(f"Hold up with some seeds only: {_levels(by['mixed'], longest)}.")
    for group in by.get("falls", []):
        before, after = exact_match(group, base.name), exact_match(group, longest.name)
        assert before is not None
        assert after is not None
        longer = [split for split in splits if split.length > base.length]
        first = next((split for split in longer if verdict(group, base, split) in ("falls", "mixed")), longest)
        where = f", first seen at {first.name} ({first.label})" if first != longest else ""
        items.append(f"Falls: {group.label}, from {before.text} to {after.text}{where}.")
    if "not learnt" in by:
        items.append(f"Not learnt, with a run below {LEARNT} on {base.name}: {_levels(by['not learnt'], base)}.")
    if "not measured" in by:
        items.append(f"Not measured on both: {_listed([group.label for group in by['not measured']])}.")
    return items


def _by_window(section: Section, text: str, overlap: str) -> Paragraph:
    items = []
    for group in section.groups:
        here = windows(group.runs, text, overlap)
        if not here:
            continue
        base = section.trained_length if section.trained_length in here else here[0]
        before, after = (perplexity(group, text, overlap, window) for window in (base, here[-1]))
        assert before is not None
        assert after is not None
        if here[-1] == base:
            items.append(f"{group.label}: {before.text} at window {base:,}.")
            continue
        times = [ratio for run in group.runs if (ratio := _times(run, text, overlap, base, here[-1])) is not None]
        lows, highs = [low for _, low, _ in times], [high for _, _, high in times]
        kind = "rises" if lows and min(lows) > 1 else "falls" if highs and max(highs) < 1 else "goes"
        words = f"{group.label} {kind} from {before.text} at window {base:,} to {after.text} at {here[-1]:,}"
        if len(times) == 1:
            words += f", {times[0][0]:.3g} times ({lows[0]:.3g}-{highs[0]:.3g}, paired by document)"
        elif times:
            middles = [middle for middle, _, _ in times]
            words += f", {min(middles):.3g} to {max(middles):.3g} times, by seed"
        items.append(f"{words}.")
    return {"text": f"Perplexity of {overlap_text(text, overlap)}:", "items": items}


def _times(run: PageRun, text: str, overlap: str, base: int, window: int) -> tuple[float, float, float] | None:
    """Perplexity at a window over that at another, with a 95 % interval: documents drawn anew, the same for both."""
    rows = {row["window"]: row for row in run.perplexity if (row["text"], row["overlap"]) == (text, overlap)}
    a, b = (_documents(rows.get(size, {}).get("by_document")) for size in (window, base))
    if a is None or b is None or a.shape != b.shape or (a[:, 1] != b[:, 1]).any():
        return None
    differences, counts = a[:, 0] - b[:, 0], a[:, 1]
    drawn = np.random.default_rng(0).integers(len(counts), size=(DRAWS, len(counts)))
    means = differences[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.exp(differences.sum() / counts.sum())), float(np.exp(low)), float(np.exp(high))


def _documents(rows: Any) -> npt.NDArray[np.float64] | None:
    """`[N, 2]`, the loss and the tokens of every document."""
    try:
        found = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return found if found.ndim == 2 and found.shape[1] == 2 and len(found) > 1 and (found[:, 1] > 0).all() else None


def _failures(section: Section) -> list[Paragraph]:
    """The two that the mechanism is meant to mend, on the longest sequences that were looked at."""
    splits = splits_of(section.runs, lambda run: run.diagnosis)
    items = []
    for measure in ("negative_mass", "reversed"):
        longest = splits_at(splits, splits[-1].length)[0] if splits else None
        found = [(level, g.label) for g in section.groups if longest and (level := failure(measure, g, longest.name))]
        if found and longest:
            found.sort(key=lambda pair: pair[0].mean)
            named = [f"{label} {level.text}" for level, label in found]
            title = FAILURES[measure].split(";")[0]
            if len(named) > SEVERAL:
                words = f"least {'; '.join(named[:3])}. Most: {'; '.join(reversed(named[-3:]))}"
            else:
                words = "; ".join(named)
            items.append(f"{title.capitalize()}, at {longest.name} (length {longest.label}): {words}.")
    return [{"text": "What attention does, as a mean over layers and heads:", "items": items}] if items else []


def _levels(groups: Sequence[Group], split: Split) -> str:
    named = [(group.label, level) for group in groups if (level := exact_match(group, split.name))]
    return "; ".join(f"{label} {level.text}" for label, level in named)  # labels have commas


def _number(count: int, word: str) -> str:
    small = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
    text = small[count] if count < len(small) else str(count)
    return f"{text if word == 'mechanism' else text.lower()} {word}{'' if count == 1 else 's'}"


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "default" if value is None else str(value)


def _values(values: Sequence[Any]) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numbers and len(values) > 3:
        return f"{min(values)} to {max(values)}"
    return ", ".join("default" if value is None else str(value) for value in (sorted(values) if numbers else values))


def _listed(parts: Sequence[str]) -> str:
    return "; ".join(parts)
