"""JSON and other plain data from outside sources (data rows, model folders, checkpoints): returns it or raises
ValueError."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError

DEEPEST = 100  # levels: what is done with a value later (hashing, copying, printing) recurses too
MOST_DIGITS, MOST_BITS = 4300, 14284  # of an integer: Python parses and prints no more digits
LARGEST_FILE = 256 << 20  # bytes; the largest tokenizer.json are below 40 MiB


def parse(text: str | bytes, where: str, nan: bool = False) -> Any:
    """Returns the value of JSON as defined in RFC 8259, in UTF-8 if it is bytes. Raises ValueError, one line that
    begins with `where`, for text that is not JSON, an object with a key twice, NaN or infinity (unless `nan`), and what
    `fault` finds."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        constant = float if nan else _constant
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=constant, parse_float=_number)
        why = fault(value)
    except RecursionError:
        why = f"nested more than {DEEPEST} deep"
    except UnicodeDecodeError as error:
        why = f"not UTF-8 text: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        why = f"not JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}"
    except _Refused as error:
        why = str(error)
    except ValueError:  # Python's limit on the digits of a number
        why = f"a number of more than {MOST_DIGITS:,} digits"
    if why is not None:
        raise InputError(f"{where}: {why}")
    return value


def read(file: Path) -> Any:
    """Returns the value in a JSON file. Raises ValueError, one line with the path."""
    return parse(read_bytes(file, LARGEST_FILE), str(file))


def read_object(file: Path) -> dict[str, Any]:
    """As `read`, for a file that must hold an object."""
    value = read(file)
    if not isinstance(value, dict):
        raise InputError(f"{file}: not a JSON object")
    return value


def read_bytes(file: Path, limit: int) -> bytes:
    """Returns all of a regular file. Raises ValueError, one line with the path, where the file cannot be read, is a
    pipe or a device, which may never end, or has more than `limit` bytes."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputError(f"{file}: not a regular file")
            content = stream.read(limit + 1)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    if len(content) > limit:
        raise InputError(f"{file}: more than {limit >> 20} MiB, too large for what it should be")
    return content


def fault(value: Any) -> str | None:
    """Returns why a value of dictionaries, lists, strings and numbers cannot be used in a run; None where it can.
    Values of other types (dates) are not checked."""
    level = [value]
    for _ in range(DEEPEST + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii() and not _encodable(item):
                    return "half of a surrogate pair in a text, which UTF-8 cannot encode"
            elif isinstance(item, dict):
                deeper += item
                deeper += item.values()
            elif isinstance(item, list | tuple):
                deeper += item
            elif isinstance(item, int) and item.bit_length() > MOST_BITS:
                return f"a number of more than {MOST_DIGITS:,} digits"
        if not deeper:
            return None
        level = deeper
    return f"nested more than {DEEPEST} deep"


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class _Refused(ValueError):
    """JSON's grammar or ours refuses something; the message is for the user."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object, for json's `object_pairs_hook`. Raises ValueError for a key that occurs twice: parsers differ in
    whether the first or the last one counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Refused(f"the key {twice[:80]!r} twice in one object")
    return made


def _constant(name: str) -> float:
    raise _Refused(f"{name}, which is not JSON; write null or a number")


def _number(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise _Refused(f"the number {text[:80]}, which is too large for a float of 64 bits")
    return number
