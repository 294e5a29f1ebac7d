"""Previews of training files for the page."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.engine.prompts import end_tokens_of
from coserve.errors import DataError
from coserve.jobs.datasets.preview import Preview, read_preview
from coserve.server.text.prompts import Prompts
from coserve.tuning.training_files import TrainingFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes that are read of a file of lines, and of a JSON array, which must be read completely.
_MAX_BYTES, _MAX_ARRAY_BYTES = 1 << 18, 1 << 22


class Previews:
    """Reader of training files, one at a time, with a tokenizer of its own."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._lock = threading.Lock()
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def read(self, path: Path, *, name: str, max_sequence_length: int, objective: str) -> Preview:
        """Return the first examples of a training file, and how many more its first quarter of a
        megabyte has.

        Blocks.

        Args:
            path: The file.
            name: The client's name for the file; `.csv` at its end decides how it is read.
            max_sequence_length: Maximum number of tokens of an example.
            objective: Objective of the job, which decides what an example is.

        Raises:
            DataError: No example can be read, or the model has no tokenizer.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._prompts.tokenizer
            if self._tokenizer is None:
                raise DataError("the model has no tokenizer, so that files cannot be trained on")
            try:
                return read_preview(
                    TrainingFile(path, name),
                    self._tokenizer,
                    max_sequence_length=max_sequence_length,
                    objective=objective,
                    end_tokens=end_tokens_of(self._prompts.source, self._tokenizer),
                    most_bytes=_most_bytes(path),
                )
            except OSError as error:
                raise DataError(f"the file cannot be read: {error.strerror}") from None


def _most_bytes(path: Path) -> int:
    """Return the number of bytes of a file to read.

    Raises:
        DataError: The file is an array that is too long.
    """
    if not _begins_with_bracket(path):
        return _MAX_BYTES
    if (num_bytes := path.stat().st_size) > _MAX_ARRAY_BYTES:
        raise DataError(
            f"the file is one JSON array of {num_bytes} bytes; a job reads it, the page shows at "
            f"most {_MAX_ARRAY_BYTES}: write one example a line"
        )
    return _MAX_ARRAY_BYTES


def _begins_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
