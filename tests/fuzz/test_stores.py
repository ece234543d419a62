"""Damaged token stores and sources."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.campaign import Examples, examine, shards
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.tampering import Tamper, tampers

FILES = tuple(f"{store}/{file}" for store in ("store", "stores/train", "stores/valid")
              for file in ("manifest.json", "tokens.bin", "documents.npy"))  # fmt: skip
TEMPORARY = (".store.preparing", ".stores.preparing", ".new.preparing")
SOURCES = ("a.txt", "b.jsonl", "store", "stores/train", "stores/valid")
TRAIN = ("train", "--preset", "text-demo", "task.arguments.window=8", "--out", "new")
COMMANDS = (
    (*TRAIN, "task.arguments.data=store"),
    (*TRAIN, "task.arguments.data=stores"),
    ("train", "--resume", "--out", "text"),
    ("evaluate", "text", "--text", "store", "--windows", "8", "--losses"),
    ("evaluate", "text", "--text", "store", "--windows", "8", "16", "--overlap", "half", "none", "--json"),
    ("evaluate", "text", "--windows", "8", "--diagnose"),
    ("attend", "text", "--text", "store", "--window", "8", "--out", "new.svg"),
    ("prepare", "a.txt", "store", "--tokenizer", "bytes", "--overwrite"),
    ("prepare", "a.txt", "b.jsonl", "stores", "--tokenizer", "bytes", "--overwrite", "--hold-out", "1"),
    ("prepare", "store/tokens.bin", "new", "--tokenizer", "bytes"),
    ("prepare", "a.txt", "b.jsonl", "new", "--tokenizer", "bytes", "--json"),
)

Example = tuple[list[Tamper], tuple[str, ...]]


@shards("stores", quick=20, slow=100, share=0.04, time_share=0.08)
def test_stores(examples: Examples, sandbox: Sandbox) -> None:
    damaged = st.tuples(
        st.lists(tampers((*FILES, *FILES, *SOURCES, *TEMPORARY)), min_size=1, max_size=2), st.sampled_from(COMMANDS)
    )

    def attack(example: Example) -> None:
        damage, arguments = example
        told = "; ".join(map(str, damage))
        examine("stores", sandbox, arguments, lambda place: [tamper.apply(place) for tamper in damage], told)

    examples.run(damaged, attack)
