"""Failures that are known and tolerated for now; to become empty as they are mended."""

from __future__ import annotations

STALE = "temporary files of a killed process stay for good"
BESIDE = "killed after its result took its place, a command leaves the folder in which it was made"
OLD_FIRST = "the old folder is moved away before the new one takes its place"
IN_PLACE = "figures, pages and READMEs are written in place"
TRACEBACK = "a full disk is a traceback"
NO_LOCK = "training takes no lock"
MERGE_UNLOCKED = "two merges share .unpacked, and each copies into what the other has made"
DELETES = "--overwrite deletes the old run file by file, config.json first, and then refuses what is left"
ADOPTS = "after a killed --overwrite, --resume takes what is left of the old run for the new one's"
DAMAGED_ROWS = "a damaged row, and all that follow it, are dropped when the file is rewritten"
LOST_ROWS = "two evaluations at once: the rows of one are lost"
LINK = "a link in place of the folder beside the target is followed"

KNOWN: dict[tuple[str, str, str], str] = {
    ("train*", "*", "litter"): STALE,
    ("evaluate*", "*", "litter"): STALE,
    ("attend*", "*", "litter"): STALE,
    ("suite-*", "*", "litter"): STALE,
    ("prepare*", "kill", "litter"): BESIDE,
    ("export*", "kill", "litter"): BESIDE,
    ("prepare-overwrite", "kill", "kept"): OLD_FIRST,
    ("export-overwrite", "kill", "kept"): OLD_FIRST,
    ("attend*", "*", "kept"): IN_PLACE,
    ("report*", "*", "kept"): IN_PLACE,
    ("evaluate*", "full", "line"): TRACEBACK,
    ("attend*", "full", "line"): TRACEBACK,
    ("report*", "full", "line"): TRACEBACK,
    ("suite-*", "full", "line"): TRACEBACK,
    ("export*", "full", "line"): "a full disk under safetensors is status 2, as if it were bad input",
    ("train*", "hold", "*"): NO_LOCK,
    ("evaluate-rival", "hold", "same"): LOST_ROWS,
    ("suite-merge*", "hold", "*"): MERGE_UNLOCKED,
    ("train-overwrite*", "*", "kept"): DELETES,
    ("train-overwrite-resume", "*", "same"): ADOPTS,
    ("train-overwrite", "*", "again"): DELETES,
    ("*-damaged-rows", "planted", "kept"): DAMAGED_ROWS,
    ("prepare-link", "planted", "kept"): LINK,
    ("export-link", "planted", "kept"): LINK,
    ("merge-link", "planted", "line"): "a link named .unpacked is a traceback",
}
"""Scenario, kind of fault and property (patterns) -> what is wrong."""
