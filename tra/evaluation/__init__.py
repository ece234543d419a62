"""Measure a trained run: exact match, perplexity, the two failures of attention, attention maps, windows."""

from tra.evaluation.attention_maps import attend, task_sequence, text_sequence, write_maps
from tra.evaluation.calibration import calibrate, measure_dropped_weight, task_sequences, text_sequences
from tra.evaluation.diagnosis import Diagnosis, diagnose_run, diagnose_task, diagnose_text
from tra.evaluation.exact_match import SplitResult, chosen_splits, evaluate_rows, evaluate_run, evaluate_task
from tra.evaluation.perplexity import WindowResult, evaluate_run_text, evaluate_text, windows_that_fit

__all__ = [
    "Diagnosis",
    "SplitResult",
    "WindowResult",
    "attend",
    "calibrate",
    "chosen_splits",
    "diagnose_run",
    "diagnose_task",
    "diagnose_text",
    "evaluate_rows",
    "evaluate_run",
    "evaluate_run_text",
    "evaluate_task",
    "evaluate_text",
    "measure_dropped_weight",
    "task_sequence",
    "task_sequences",
    "text_sequence",
    "text_sequences",
    "windows_that_fit",
    "write_maps",
]
