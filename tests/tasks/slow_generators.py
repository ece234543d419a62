"""Independent, slow readings of the tasks: each checks one example symbol by symbol, with loops and strings.

They share nothing with the vectorised samplers but the vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from tra.tasks import Batch, Task

Scored = list[tuple[int, str]]
"""Positions whose next symbol is scored, with that symbol."""


def scored(task: Task, batch: Batch, row: int) -> Scored:
    """What the batch says is scored."""
    return [
        (place, task.vocabulary[int(batch.targets[row, place])])
        for place in batch.loss_mask[row].nonzero().flatten().tolist()
    ]


def symbols(task: Task, tokens: Tensor) -> list[str]:
    return [task.vocabulary[token] for token in tokens.tolist()]


def flipflop(line: list[str]) -> Scored:
    assert len(line) % 2 == 0
    assert line[0] == "w"
    assert line[-2] == "r"
    memory, result = "", []
    for place in range(0, len(line), 2):
        instruction, bit = line[place], line[place + 1]
        assert instruction in "wri"
        assert bit in "01"
        if instruction == "w":
            memory = bit
        if instruction == "r":
            assert bit == memory
            result.append((place, bit))
    return result


def _body(line: list[str]) -> tuple[list[str], list[str], int]:
    """What stands between <bos> and <sep>, what follows up to padding, and where <sep> is."""
    assert line[0] == "<bos>"
    assert line.count("<sep>") == 1
    middle = line.index("<sep>")
    end = line.index("<pad>") if "<pad>" in line else len(line)
    assert set(line[end:]) <= {"<pad>"}
    assert not set(line[1:middle]) & {"<pad>", "<bos>", "<eos>"}
    return line[1:middle], line[middle + 1 : end], middle


def copy(line: list[str]) -> Scored:
    x, y, middle = _body(line)
    assert y == [*x, "<eos>"]
    return [(middle + offset, symbol) for offset, symbol in enumerate(y)]


def induct(line: list[str]) -> Scored:
    x, (question, answer), middle = _body(line)
    assert x.count(question) == 1
    assert answer == x[x.index(question) + 1]
    return [(middle + 1, answer)]


def instruct(line: list[str], permutation: dict[str, str]) -> Scored:
    (operation, *x), y, middle = _body(line)
    expected: list[str] = []
    if operation == "copy":
        expected = x
    elif operation == "reverse":
        expected = x[::-1]
    elif operation == "first":
        expected = x[:1]
    elif operation == "last":
        expected = x[-1:]
    elif operation == "swap":
        for place in range(0, len(x), 2):
            expected += reversed(x[place : place + 2])
    elif operation == "map":
        expected = [permutation[symbol] for symbol in x]
    elif operation == "keep":
        expected = [symbol[:-1] for symbol in x if symbol.endswith("*")]
    else:
        raise AssertionError(operation)
    if operation != "keep":
        assert not any(symbol.endswith("*") for symbol in x)
    assert y == [*expected, "<eos>"]
    return [(middle + offset, symbol) for offset, symbol in enumerate(y)]


def mqar(line: list[str], pairs: int) -> Scored:
    dictionary: dict[str, str] = {}
    for place in range(0, 2 * pairs, 2):
        assert line[place] not in dictionary
        dictionary[line[place]] = line[place + 1]
    result, asked = [], set()
    for place in range(2 * pairs, len(line), 2):
        question, answer = line[place : place + 2]
        if question == ".":
            assert answer == "."
            continue
        assert answer == dictionary[question]
        asked.add(question)
        result.append((place, answer))
    assert asked == set(dictionary)
    assert len(result) == pairs
    return result


def latest(line: list[str]) -> Scored:
    middle = line.index("<sep>")
    assert line[0] == "<bos>"
    assert middle % 2 == 1
    line = [symbol for symbol in line if symbol != "<pad>"]
    stored: dict[str, str] = {}
    for place in range(1, middle, 2):
        key, value = line[place : place + 2]
        assert value.startswith("v")
        if key != ".":
            assert key.startswith("k")
            stored[key] = value
    result = []
    for place in range(middle + 1, len(line), 2):
        question, answer = line[place : place + 2]
        assert answer == stored[question]
        result.append((place, answer))
    assert {line[place] for place, _ in result} == set(stored)
    assert len(result) == len(stored)
    return result
