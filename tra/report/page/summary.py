"""Put a section into plain words: what was trained, and which mechanisms stay exact on longer sequences.

It claims no more than the intervals of the results allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tra.report import curves
from tra.report.breakdowns import footnotes
from tra.report.curves import Split
from tra.report.groups import Group, Section, differing_settings
from tra.report.names import FAILURES, SPLIT_WORDS, overlap_text, task_sentence

LEARNT = 0.9
"""Exact match below which a mechanism hasn't learnt the task, so that length can't be judged."""

MAX_NAMED = 6
"""Groups that a sentence names one by one."""

MAIN_FAILURES = ("negative_mass", "reversed")
"""Failures that TRA is meant to prevent."""

SHARED_SETTINGS = (
    ("model", "n_layers", "{} layers"),
    ("model", "n_heads", "{} heads"),
    ("model", "d_model", "width {}"),
    ("train", "steps", "{} steps"),
    ("train", "batch_size", "batches of {}"),
)
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")

Paragraph = dict[str, Any]
"""`text`, and `items` that belong to it."""

Verdict = Literal["holds", "mixed", "falls", "not learnt", "not measured"]


def summary(section: Section) -> list[Paragraph]:
    """Return the paragraphs of a section: the one above its first chart, then those below."""
    found = [_introduction(section), *_cautions(section)]
    if splits := curves.splits_of(section.runs):
        found += _by_length(section, splits)
    found += [_by_window(section, text, overlap) for text, overlap in curves.texts_of(section.runs)]
    return found + _failures(section)


def _introduction(section: Section) -> Paragraph:
    """Return a sentence on the task, and one on the mechanisms that were trained."""
    groups, runs = section.groups, section.runs
    seeds, mechanisms = {len(group.runs) for group in groups}, {group.mechanism for group in groups}
    each = _number(min(seeds), "seed").lower() if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    found = _number(len(mechanisms), "mechanism")
    if len(groups) > len(mechanisms):
        found += f" in {_number(len(groups), 'setting').lower()}"
    text = f"{task_sentence(section.task)} {found}"
    if 1 < len(groups) <= MAX_NAMED:
        text += f" ({_labels(groups)})"
    text += f", {each} each, {'was' if len(mechanisms) == 1 else 'were'} trained"
    if trained := runs[0].trained_length:
        text += f" at length {trained:,}"
    shared = []
    for part, key, words in SHARED_SETTINGS:
        values = {_value(run.config.get(part, {}).get(key)) for run in runs}
        if len(values) == 1 and values != {_value(None)}:
            shared.append(words.format(*values))
    return {"text": f"{text}{': ' if shared else ''}{', '.join(shared)}.", "items": []}


def _cautions(section: Section) -> list[Paragraph]:
    """Return the cautions before comparing: differing settings, single seeds, and runs that broke down."""
    runs, seeds = section.runs, {len(group.runs) for group in section.groups}
    sentences = []
    if differences := [f"{key} ({_values(values)})" for key, values in differing_settings(runs).items()]:
        sentences.append(f"The runs differ in {'; '.join(differences)}.")
    if seeds == {1} and len(section.groups) > 1:
        sentences.append("With one seed each, nothing is known of what another seed would do.")
    sentences += footnotes(runs)
    return [{"text": " ".join(sentences), "items": []}] if sentences else []


def _by_length(section: Section, splits: Sequence[Split]) -> list[Paragraph]:
    base = next((split for split in splits if split.name == "iid"), splits[0])  # as the training set, else the shortest
    longest = curves.first_of_length(splits)[-1]
    found: list[Paragraph] = []
    if longest.length > base.length:
        is_trained = base.length == section.runs[0].trained_length
        text = (
            f"On the longest test set, {longest.name} ({longest.label}, {longest.length / base.length:.3g} times"
            f"{' the training length' if is_trained else f' that of {base.name}'}), "
            f"compared with {_named(base, base.label)}:"
        )
        found.append({"text": text, "items": _verdicts(section, splits, base, longest)})
    else:
        found.append({"text": "No test set is longer than the others, so length isn't judged.", "items": []})
    for split in (split for split in splits if split.length == base.length and split != base):
        judged = _judge(section.groups, base, split)
        worse = [group for group in section.groups if group in judged["falls"] + judged["mixed"]]
        items = [f"Less exact than on {base.name}: {_levels(worse, split)}."] if worse else []
        items += [f"No worse: {_labels(judged['holds'])}."] if judged["holds"] else []
        if items:
            found.append({"text": f"On {_named(split)}, of the same length:", "items": items})
    return found


def _named(split: Split, *facts: str) -> str:
    """Return a test set's name, with what it asks where the name doesn't say it."""
    words = [*filter(None, [SPLIT_WORDS.get(split.name)]), *facts]
    return f"{split.name} ({', '.join(words)})" if words else split.name


def _verdicts(section: Section, splits: Sequence[Split], base: Split, longest: Split) -> list[str]:
    judged = _judge(section.groups, base, longest)
    items = []
    if holding := judged["holds"]:
        words = f"Hold up, by every run's 95 % intervals on the two: {_levels(holding, longest)}."
        if any(len(group.runs) > 1 for group in holding):  # whose ranges are of seeds, and show no interval
            rows = [row for group in holding for run in group.runs for row in run.evaluation]
            lowest = min(row["low"] for row in rows if row["split"] == longest.name)
            words += f" The lowest bound of a run's interval there is {lowest:.3f}."
        items.append(words)
    if judged["mixed"]:
        items.append(f"Hold up with some seeds only: {_levels(judged['mixed'], longest)}.")
    for group in judged["falls"]:
        before, after = curves.exact_match(group.runs, base.name), curves.exact_match(group.runs, longest.name)
        assert before is not None
        assert after is not None
        longer = [split for split in splits if split.length > base.length]
        first = next((split for split in longer if _verdict(group, base, split) in ("falls", "mixed")), longest)
        where = f", first seen at {first.name} ({first.label})" if first != longest else ""
        items.append(f"Falls: {group.label}, from {before.text} to {after.text}{where}.")
    if judged["not learnt"]:
        items.append(f"Not learnt, with a run below {LEARNT} on {base.name}: {_levels(judged['not learnt'], base)}.")
    if judged["not measured"]:
        items.append(f"Not measured on both: {_labels(judged['not measured'])}.")
    return items


def _judge(groups: Sequence[Group], base: Split, split: Split) -> dict[Verdict, list[Group]]:
    found: dict[Verdict, list[Group]] = {"holds": [], "mixed": [], "falls": [], "not learnt": [], "not measured": []}
    for group in groups:
        found[_verdict(group, base, split)].append(group)
    return found


def _verdict(group: Group, base: Split, split: Split) -> Verdict:
    """Say whether runs stay as exact on a test set: a run falls if its 95 % intervals on the two don't overlap."""
    holds = []
    for run in group.runs:
        rows = {row["split"]: row for row in run.evaluation}
        if base.name in rows and split.name in rows:
            if rows[base.name]["exact"] < LEARNT:
                return "not learnt"
            holds.append(rows[split.name]["high"] >= rows[base.name]["low"])
    return "not measured" if not holds else "holds" if all(holds) else "mixed" if any(holds) else "falls"


def _by_window(section: Section, text: str, overlap: str) -> Paragraph:
    items = []
    for group in section.groups:
        if not (windows := curves.windows_of(group.runs, text, overlap)):
            continue
        trained, longest = section.runs[0].trained_length, windows[-1]
        base = trained if trained in windows else windows[0]
        before, after = (curves.perplexity(group.runs, text, overlap, window) for window in (base, longest))
        assert before is not None
        assert after is not None
        if longest == base:
            items.append(f"{group.label}: {before.text} at window {base:,}.")
            continue
        ratios = [found for run in group.runs if (found := curves.ratio_of(run, longest, run, base, text, overlap))]
        rises, falls = all(ratio.low > 1 for ratio in ratios), all(ratio.high < 1 for ratio in ratios)
        verb = "goes" if not ratios else "rises" if rises else "falls" if falls else "goes"
        words = f"{group.label} {verb} from {before.text} at window {base:,} to {after.text} at {longest:,}"
        if len(ratios) == 1:
            mean, low, high = ratios[0][:3]
            words += f", {mean:.3g} times ({low:.3g}-{high:.3g}, paired by document)"
        elif ratios:
            means = [ratio.mean for ratio in ratios]
            words += f", {min(means):.3g} to {max(means):.3g} times, by seed"
        items.append(f"{words}.")
    return {"text": f"Perplexity of {overlap_text(text, overlap)}:", "items": items}


def _failures(section: Section) -> list[Paragraph]:
    """Return what attention does wrong on the longest sequences that were diagnosed."""
    splits = curves.first_of_length(curves.splits_of(section.runs, diagnosed=True))[-1:]
    items = []
    for measure in MAIN_FAILURES:
        for split in splits:
            levels = [(group.label, curves.diagnosis(measure, group.runs, split.name)) for group in section.groups]
            found = sorted(((label, level) for label, level in levels if level), key=lambda pair: pair[1].mean)
            if not found:
                continue
            named = [f"{label} {level.text}" for label, level in found]
            words = "; ".join(named)
            if len(named) > MAX_NAMED:
                words = f"least {'; '.join(named[:3])}. Most: {'; '.join(reversed(named[-3:]))}"
            title = FAILURES[measure].split(";")[0].capitalize()
            items.append(f"{title}, at {split.name} (length {split.label}): {words}.")
    return [{"text": "What attention does, as a mean over layers and heads:", "items": items}] if items else []


def _levels(groups: Sequence[Group], split: Split) -> str:
    levels = [(group.label, curves.exact_match(group.runs, split.name)) for group in groups]
    return "; ".join(f"{label} {level.text}" for label, level in levels if level)


def _labels(groups: Sequence[Group]) -> str:
    return "; ".join(group.label for group in groups)  # labels have commas


def _number(count: int, noun: str) -> str:
    text = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{text} {noun}{'' if count == 1 else 's'}"


def _value(value: Any) -> str:
    return "default" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _values(values: Sequence[Any]) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numbers and len(values) > 3:
        return f"{min(values)} to {max(values)}"
    return ", ".join("default" if value is None else str(value) for value in (sorted(values) if numbers else values))
