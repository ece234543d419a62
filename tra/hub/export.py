"""Export a trained run as a folder that transformers loads: weights, tokenizer, model card; all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging

from tra.hub._card import model_card
from tra.hub._tokenizer import run_tokenizer
from tra.hub.model import TRAForCausalLM
from tra.runs import RunFolder, clear_folder_beside, locked_folder_beside, replace_folder
from tra.tasks import Task, generator
from tra.text.prepare import NoSpaceError
from tra.text.task import Text

EXPORT_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|modeling_tra\.py|tokenizer(_config)?\.json|special_tokens_map\.json|README\.md"
)
"""Names of an export's files. A folder with any other file is not replaced."""


def export_run(
    run: RunFolder, folder: str | Path, *, overwrite: bool = False, tokenizer_files: Path | None = None
) -> TRAForCausalLM:
    """Write a run's model to `folder` and return it.

    Args:
        run: A run that has ended.
        folder: The folder to write.
        overwrite: Replace an exported model in `folder`.
        tokenizer_files: The folder of GPT-2's files, see `load_tokenizer`.
    """
    target = Path(folder).resolve()
    clear_folder_beside(target, "exporting")
    _check_target(target, overwrite)
    decoder = run.load_model()
    task = run.config().task.build()
    tokenizer = run_tokenizer(task, tokenizer_files)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = TRAForCausalLM.from_decoder(decoder, **special)
    # A language model's vocabulary is rounded up in training. Ids past the tokenizer's are cut off, not suppressed:
    # they are the first that `add_tokens` gives out.
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.generation_config = GenerationConfig(**special, use_cache=model.config.use_cache)
    try:
        with locked_folder_beside(target, "exporting", "written") as temporary, _no_progress_bar():
            written = temporary / "made"
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
            (written / "README.md").write_text(model_card(run, target.name, model.num_parameters(), *_prompt(task)))
            _flush(written)
            _check_target(target, overwrite)  # another process may have written it since
            replace_folder(written, target, temporary)
    except Exception as error:  # safetensors and tokenizers have kinds of their own for what the system reports
        number = _system_error(error)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpaceError(
                f"the disk is full ({os.strerror(number)}), writing {folder}; nothing is left of it"
            ) from None
        if number is not None or isinstance(error, SafetensorError):
            filename = getattr(error, "filename", None)
            raise ValueError(f"{filename or folder}: {os.strerror(number) if number else error}") from None
        raise
    return model


def _system_error(error: Exception) -> int | None:
    """Return the number of a system error, also where a library of Rust has put it into words."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _check_target(folder: Path, overwrite: bool) -> None:
    """Raise a ValueError if `folder` may not be written."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        is_ours = (
            json.loads((folder / "config.json").read_text())["model_type"] == TRAForCausalLM.config_class.model_type
        )
    except (OSError, ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"{folder} is not an exported model, so it is not overwritten")
    if others := [path.name for path in sorted(folder.iterdir()) if not EXPORT_FILES.fullmatch(path.name)]:
        raise ValueError(f"{folder} is not only an exported model ({others[0]} is in it), so it is not overwritten")
    if not overwrite:
        raise ValueError(f"{folder} exists already: use --overwrite to replace it")


def _prompt(task: Task) -> tuple[str, int]:
    """Return a prompt, up to the first position whose answer is scored, and the number of tokens of the answer."""
    if isinstance(task, Text):
        return "Alice was", 16
    batch = task.sample(task.splits[0], 1, generator(0, "prompt"))
    scored = batch.loss_mask[0].int()
    first = int(scored.argmax())
    return task.render(batch.tokens[0, : first + 1]), int(scored[first:].cumprod(0).sum())


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of saving, which has one step."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _flush(folder: Path) -> None:
    """Flush all files to the disk, and make weights as readable as the other files, which safetensors doesn't do."""
    for path in (*folder.iterdir(), folder):
        if path.suffix == ".safetensors":
            path.chmod((folder / "config.json").stat().st_mode)
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
