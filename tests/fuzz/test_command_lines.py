"""Command lines of every verb."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tests.fuzz.campaign import Examples, examine, shards
from tests.fuzz.command_lines import command_lines, overrides
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.tampering import Tamper, tampers


@shards("command lines", quick=40, slow=200, share=0.52, time_share=0.33)
def test_command_lines(examples: Examples, sandbox: Sandbox) -> None:
    examples.run(command_lines(), lambda line: examine("command lines", sandbox, line))


@shards("overrides", quick=25, slow=120, share=0.14, time_share=0.07)
def test_overrides(examples: Examples, sandbox: Sandbox) -> None:
    def train(changes: list[str]) -> None:
        examine("overrides", sandbox, ("train", "--preset", "demo", "--out", "new", *changes))

    examples.run(st.lists(overrides(), min_size=1, max_size=3), train)


@shards("config files", quick=25, slow=120, share=0.14, time_share=0.07)
def test_config_files(examples: Examples, sandbox: Sandbox) -> None:
    def train(damage: list[Tamper]) -> None:
        examine(
            "config files",
            sandbox,
            ("train", "--config", "config.json", "--out", "new"),
            lambda place: [tamper.apply(place) for tamper in damage],
            "; ".join(map(str, damage)),
        )

    examples.run(st.lists(tampers(("config.json",)), min_size=1, max_size=3), train)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",), ("trian",), ("train", "--help"), ("", "x")])
def test_command_lines_without_a_verb(arguments: tuple[str, ...], sandbox: Sandbox) -> None:
    examine("command lines", sandbox, arguments)
