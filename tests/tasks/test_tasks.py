"""Samplers against independent slow readings, symbol by symbol; probabilities; lengths; seeds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from tests.tasks import slow_generators
from tra.runs import wilson_interval
from tra.tasks import TASKS, Copy, FlipFlop, Induct, Instruct, Latest, MultiQueryRecall, Task, generator

VARIANTS = {
    "flipflop": FlipFlop(),
    "flipflop short": FlipFlop(length=6),
    "copy": Copy(),
    "copy small": Copy(alphabet=4),
    "copy exact": Copy(shortest=50),
    "induct": Induct(),
    "induct small": Induct(alphabet=4),
    "instruct": Instruct(),
    "latest": Latest(),
    "latest small": Latest(noise=2, stores=3, keys=3, values=2),
    "mqar": MultiQueryRecall(),
    "mqar small": MultiQueryRecall(length=32, pairs=3, keys=5, values=4),
}


def expected(task: Task, line: list[str]) -> slow_generators.Scored:
    if isinstance(task, Instruct):
        plain = task.vocabulary[11 : 11 + task.alphabet]
        return slow_generators.instruct(line, {s: plain[task.permutation[i]] for i, s in enumerate(plain)})
    if isinstance(task, MultiQueryRecall):
        return slow_generators.mqar(line, task.pairs)
    return getattr(slow_generators, task.name)(line)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_split_symbol_by_symbol(name: str) -> None:
    task = VARIANTS[name]
    assert task.splits[0] == "train"
    for split in task.splits:
        rows = 64 if task.size(split) < 2000 else 2
        batch = task.sample(split, rows, generator(1, split))
        assert all(x.shape == (rows, task.size(split)) for x in batch)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.loss_mask.dtype == torch.bool
        assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
        assert not batch.loss_mask[:, -1].any()
        for row in range(rows):
            line = slow_generators.symbols(task, batch.tokens[row])
            assert slow_generators.scored(task, batch, row) == expected(task, line)


def lengths_seen(task: Task, split: str, rows: int = 3000) -> set[int]:
    separator, first = task.vocabulary.index("<sep>"), 2 if isinstance(task, Instruct) else 1
    batch = task.sample(split, rows, generator(2, split))
    return set(((batch.tokens == separator).int().argmax(1) - first).tolist())


@pytest.mark.parametrize("name", ["copy", "copy exact", "induct", "instruct"])
def test_lengths_fill_their_range_and_no_more(name: str) -> None:
    task = VARIANTS[name]
    for split in task.splits:
        shortest, longest = task.lengths(split)
        if longest <= 500:
            assert lengths_seen(task, split) == set(range(shortest, longest + 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_out_of_distribution_lengths_are_disjoint(name: str) -> None:
    task = VARIANTS[name]
    trained = task.lengths("train")
    for split in task.splits:
        lengths = task.lengths(split)
        same = split in ("train", "iid", "sparse", "dense")
        assert lengths == trained if same else lengths.shortest > trained.longest


@pytest.mark.parametrize(
    ("split", "ignore"), [("train", 0.8), ("iid", 0.8), ("sparse", 0.98), ("dense", 0.1), ("2x", 0.8)]
)
def test_flipflop_probabilities(split: str, ignore: float) -> None:
    """Within five standard errors of what the paper says."""
    tokens = FlipFlop().sample(split, 400, generator(3, split)).tokens
    inner = tokens[:, 2:-2:2].flatten()
    for symbol, probability in ((2, ignore), (0, (1 - ignore) / 2), (1, (1 - ignore) / 2)):
        low, high = wilson_interval(int((inner == symbol).sum()), len(inner), z=5.0)
        assert low <= probability <= high
    bits = tokens[:, 1::2][tokens[:, ::2] != 1]  # after a write or an ignore
    low, high = wilson_interval(int((bits == 4).sum()), len(bits), z=5.0)
    assert low <= 0.5 <= high


def test_other_choices_are_uniform() -> None:
    copy = Copy(alphabet=4, shortest=50).sample("train", 500, generator(4, "x")).tokens[:, 1:51].flatten()
    for symbol in range(4, 8):
        low, high = wilson_interval(int((copy == symbol).sum()), len(copy), z=5.0)
        assert low <= 1 / 4 <= high
    operations = Instruct().sample("train", 7000, generator(4, "x")).tokens[:, 1]
    for operation in range(4, 11):
        low, high = wilson_interval(int((operations == operation).sum()), 7000, z=5.0)
        assert low <= 1 / 7 <= high
    task = Induct(shortest=50)
    tokens = task.sample("train", 8000, generator(4, "x")).tokens
    places = (tokens[:, 1:51] == tokens[:, 52:53]).int().argmax(1)
    for place in range(49):
        low, high = wilson_interval(int((places == place).sum()), 8000, z=5.0)
        assert low <= 1 / 49 <= high
    assert int(places.max()) == 48


@pytest.mark.parametrize("name", VARIANTS)
def test_seeds_and_streams(name: str) -> None:
    task = VARIANTS[name]
    first, again, other_stream, other_index, other_seed = (
        task.sample("train", 8, generator(*key))
        for key in ((7, "train", 3), (7, "train", 3), (7, "test/iid", 3), (7, "train", 4), (8, "train", 3))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (other_stream, other_index, other_seed):
        assert not torch.equal(first.tokens, other.tokens)


def test_every_task_builds_without_arguments() -> None:
    for name, task in TASKS.items():
        built = task()
        assert built.name == name
        assert len(set(built.vocabulary)) == len(built.vocabulary)


@pytest.mark.parametrize(("split", "noise"), [("train", range(17)), ("64x", [1024])])
def test_latest_has_16_stores_whatever_the_noise(split: str, noise: Collection[int]) -> None:
    task = Latest()
    tokens = task.sample(split, 1000 if split == "train" else 4, generator(2, "x")).tokens
    before = (tokens == task.vocabulary.index("<sep>")).cumsum(1) == 0
    blanks = ((tokens == task.vocabulary.index(".")) & before).sum(1)
    keys = [task.vocabulary.index(f"k{i}") for i in range(4)]
    assert set(blanks.tolist()) == set(noise)
    assert (sum(((tokens == key) & before).sum(1) for key in keys) == 16).all()


def test_render() -> None:
    assert FlipFlop().render(torch.tensor([0, 4, 2, 3, 1, 4])) == "w1i0r1"
    assert Copy().render(torch.tensor([1, 4, 5, 2])) == "<bos> a b <sep>"


def test_flipflop_reads_rows_as_the_hub_writes_them(tmp_path: Path) -> None:
    task = FlipFlop(length=12)
    tokens = task.sample("iid", 20, generator(5, "x")).tokens
    file = tmp_path / "rows.txt"
    file.write_text("\n".join(task.render(row) for row in tokens) + "\n\n")
    assert torch.equal(task.read_rows(file), tokens)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("w1r1\nw1x0r1", "line 2: expected w, r or i and a bit"),
        ("w1r0", "line 1: the read at symbol 2 gives 0"),
        ("r1w1", "starts with w"),
        ("w1r", "even length"),
        ("w1r1\nw1i0r1", "line 2: 6 symbols, the rows before have 4"),
        ("\n", "has no rows"),
    ],
)
def test_bad_rows(tmp_path: Path, rows: str, message: str) -> None:
    file = tmp_path / "rows.txt"
    file.write_text(rows)
    with pytest.raises(ValueError, match=message):
        FlipFlop().read_rows(file)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FlipFlop(length=7), "even length"),
        (lambda: FlipFlop(length=2), "at least 4"),
        (lambda: Copy(shortest=0), "1 <= shortest"),
        (lambda: Copy(shortest=60), "shortest <= longest"),
        (lambda: Copy(alphabet=1), "at least 2 symbols"),
        (lambda: Induct(shortest=1), "2 <= shortest"),
        (lambda: Instruct(longest=0), "at least 1"),
        (lambda: MultiQueryRecall(length=30), r"4 · pairs"),
        (lambda: MultiQueryRecall(keys=3), "at least 8 keys"),
        (lambda: FlipFlop().sample("sparce", 1, generator(0, "x")), "did you mean 'sparse'"),
        (lambda: FlipFlop().sample("iid", 0, generator(0, "x")), "batch_size"),
    ],
)
def test_bad_arguments(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
