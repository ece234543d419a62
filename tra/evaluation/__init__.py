"""Measure a trained run: exact match, perplexity, the two failures of attention, attention maps."""

from tra.evaluation.attention_maps import attend, task_sequence, text_sequence, write_maps
from tra.evaluation.diagnosis import Diagnosis, diagnose_run, diagnose_task, diagnose_text
from tra.evaluation.exact_match import SplitResult, chosen_splits, evaluate_rows, evaluate_run, evaluate_task
from tra.evaluation.perplexity import WindowResult, evaluate_run_text, evaluate_text, windows_that_fit

__all__ = [
    "Diagnosis",
    "SplitResult",
    "WindowResult",
    "attend",
    "chosen_splits",
    "diagnose_run",
    "diagnose_task",
    "diagnose_text",
    "evaluate_rows",
    "evaluate_run",
    "evaluate_run_text",
    "evaluate_task",
    "evaluate_text",
    "task_sequence",
    "text_sequence",
    "windows_that_fit",
    "write_maps",
]
