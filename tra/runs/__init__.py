"""A run is a folder of files: their names, how they are read and written, and the intervals of what they hold.

Needs no torch: a report, or a script over many runs, starts at once.
"""

from tra.runs.attention_file import LEVELS, AttentionMaps, read_attention, weights_of
from tra.runs.calibration_file import (
    STATISTICS,
    Calibration,
    check_replaceable,
    model_identity,
    read_windows,
    write_windows,
)
from tra.runs.environment import environment
from tra.runs.extensions import ChangedFileWarning, import_file, import_named, register
from tra.runs.files import (
    TEMPORARY,
    UNREADABLE_ARRAYS,
    atomic_file,
    flush_folder,
    name_in_errors,
    open_to_append,
    remove_stale_files,
    write_arrays,
    write_atomically,
)
from tra.runs.folder import SHIPPED, RunFolder
from tra.runs.former_names import RENAMED_PARAMETERS, rename_parameters
from tra.runs.intervals import bootstrap_interval, permutation_p, perplexity_ratio, wilson_interval
from tra.runs.locks import LOCK, LockedError, folder_lock
from tra.runs.replacing import (
    clear_folder_beside,
    locked_folder_beside,
    new_locked_folder,
    remove_unlocked_folder,
    replace_folder,
)
from tra.runs.row_checks import is_finite, row_problem
from tra.runs.rows import exact_digits, exact_text, length_text, mean_over_heads, put_row, read_rows, write_rows
from tra.runs.variants import mechanism_of, settings_of, variant_of

__all__ = [
    "LEVELS",
    "LOCK",
    "RENAMED_PARAMETERS",
    "SHIPPED",
    "STATISTICS",
    "TEMPORARY",
    "UNREADABLE_ARRAYS",
    "AttentionMaps",
    "Calibration",
    "ChangedFileWarning",
    "LockedError",
    "RunFolder",
    "atomic_file",
    "bootstrap_interval",
    "check_replaceable",
    "clear_folder_beside",
    "environment",
    "exact_digits",
    "exact_text",
    "flush_folder",
    "folder_lock",
    "import_file",
    "import_named",
    "is_finite",
    "length_text",
    "locked_folder_beside",
    "mean_over_heads",
    "mechanism_of",
    "model_identity",
    "name_in_errors",
    "new_locked_folder",
    "open_to_append",
    "permutation_p",
    "perplexity_ratio",
    "put_row",
    "read_attention",
    "read_rows",
    "read_windows",
    "register",
    "remove_stale_files",
    "remove_unlocked_folder",
    "rename_parameters",
    "replace_folder",
    "row_problem",
    "settings_of",
    "variant_of",
    "weights_of",
    "wilson_interval",
    "write_arrays",
    "write_atomically",
    "write_rows",
    "write_windows",
]
