"""JSON from outside sources (data rows, model folders, checkpoints): returns it or raises InputError."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import on_one_line

LARGEST_FILE = 256 << 20  # bytes; the largest tokenizer.json are below 40 MiB


def parse(text: str | bytes, where: str, nan: bool = False) -> Any:
    """Returns the value of JSON, in UTF-8 if it is bytes. Raises InputError, one line that begins with `where`, for
    text that is not JSON, is nested too deep, or has NaN or infinity (unless `nan`)."""
    try:
        return from_json(text.decode() if isinstance(text, bytes) else text, allow_inf_nan=nan)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, TypeError) as error:  # TypeError: half of a surrogate pair in a str
        raise InputError(f"{where}: not JSON: {on_one_line(str(error), 200)}") from None


class ReadObject(dict[str, Any]):
    """An object that was JSON text: printed or joined with text, as DeepSeek's chat template does, it is this text."""

    def __init__(self, text: str, read: dict[str, Any]) -> None:
        super().__init__(read)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


def object_in(value: Any) -> Any:
    """Returns the object whose JSON the text `value` is, as a ReadObject; `value` itself where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value, str) and isinstance(read := json.loads(value), dict):
            return ReadObject(value, read)
    return value


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises InputError, one line with the path."""
    value = parse(read_bytes(file, LARGEST_FILE), str(file))
    if not isinstance(value, dict):
        raise InputError(f"{file}: not a JSON object")
    return value


def read_bytes(file: Path, limit: int) -> bytes:
    """Returns all of a file. Raises InputError, one line with the path, where it cannot be read or has more than
    `limit` bytes."""
    try:
        with open(file, "rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    if len(content) > limit:
        raise InputError(f"{file}: more than {limit >> 20} MiB, too large for what it should be")
    return content
