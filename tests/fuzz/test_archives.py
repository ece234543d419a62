"""Archives that someone else made."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.archives import Archive, archives
from tests.fuzz.campaign import Examples, examine, shards
from tests.fuzz.sandbox import Sandbox

COMMANDS = (
    ("suite", "merge", "hostile.tar.gz", "--out", "merged"),
    ("suite", "merge", "hostile.tar.gz", "cells", "--out", "merged"),
    ("suite", "merge", "hostile.tar.gz", "--out", "cells"),
    ("suite", "merge", "hostile.tar.gz", "--out", "with space"),
)


@shards("archives", quick=10, slow=50, share=0.012, time_share=0.04)
def test_archives(examples: Examples, sandbox: Sandbox) -> None:
    def attack(example: tuple[Archive, tuple[str, ...]]) -> None:
        archive, arguments = example
        examine("archives", sandbox, arguments, archive.write, str(archive))

    examples.run(st.tuples(archives(), st.sampled_from(COMMANDS)), attack)
