"""A run is a folder of files: their names, how they are read and written, and the intervals of what they hold.

Needs no torch: a report, or a script over many runs, starts at once.
"""

from tra.runs.attention_file import LEVELS, AttentionMaps, read_attention, weights_of
from tra.runs.environment import environment
from tra.runs.files import locked_folder_beside, write_arrays, write_atomically
from tra.runs.folder import SHIPPED, RunFolder
from tra.runs.intervals import bootstrap_interval, perplexity_ratio, wilson_interval
from tra.runs.json_files import is_finite, read_json, read_sessions, row_problem
from tra.runs.rows import exact_digits, exact_text, length_text, mean_over_heads, put_row, read_rows, write_rows

__all__ = [
    "LEVELS",
    "SHIPPED",
    "AttentionMaps",
    "RunFolder",
    "bootstrap_interval",
    "environment",
    "exact_digits",
    "exact_text",
    "is_finite",
    "length_text",
    "locked_folder_beside",
    "mean_over_heads",
    "perplexity_ratio",
    "put_row",
    "read_attention",
    "read_json",
    "read_rows",
    "read_sessions",
    "row_problem",
    "weights_of",
    "wilson_interval",
    "write_arrays",
    "write_atomically",
    "write_rows",
]
