"""The simulation of what processes receive, against what they do receive."""

from __future__ import annotations

import pytest

from benchmarks import context_bytes
from benchmarks.context_bytes import Head, oldest_key, segments_read
from tests.ops import context_cases as cases
from tests.ops.context_cases import Case
from tests.ops.thread_ranks import ThreadTransport, run_ranks
from tra.ops import SequenceParts
from tra.ops.context import schedule
from tra.ops.context.schedule import segments_before


class Two:
    rank, ranks = 0, 2


@pytest.mark.parametrize("content", [None, "null rows"])
def test_the_simulation_asks_for_what_processes_ask_for(content: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SMALLEST_SEGMENT", cases.SEGMENT)
    monkeypatch.setattr(context_bytes, "KEYS", 1)
    case = Case(
        640,
        heads=1,
        kv_heads=1,
        flattest=-3.0,
        content=content or "dense",
        options={"scale": 0.25, "score_bound": 16.0},
    )
    query, key, _, log_forget = (x.detach()[0, 0] for x in case.inputs())
    parts = SequenceParts(case.length, Two())  # type: ignore[arg-type]
    expected = 0
    for part in range(1, parts.number):
        oldest = oldest_key(Head(query, key, log_forget, 0.0), parts.starts[part], parts.starts[part + 1], 0.0, 16.0)
        asked = segments_read(segments_before(parts, part), parts.starts, oldest)
        expected += sum(x.stop - x.start for x in asked if parts.owner(x.part) != parts.owner(part))

    def work(transport: ThreadTransport) -> int:
        return cases.run_shared(case, transport).forward.bytes

    assert sum(run_ranks(2, work)) == expected * 2 * 16 * 4
    everything = 4 * parts.size(0)  # of six pairs of parts two are of one process
    assert (expected == everything) == (content == "null rows")
