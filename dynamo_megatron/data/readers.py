"""Reads the rows of prompt files, each with a text that names its place in the file."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line

DATASETS = "datasets:"
ROWS = 16  # of a Parquet file read at once: Arrow cannot read 2 GiB of a nested column at once
TEXT_OPTIONS = ("name", "split")  # not parsed as YAML, where the configuration "no" (Norwegian) would be False


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("path:line", value) of every line that is not empty, parsed by `plain_json.parse`. Raises ValueError (one
    line)."""
    if not path.is_file():
        raise InputError(f"data.source: there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where, line = f"{path}:{number}", line.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                yield where, plain_json.parse(line, where)


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("path row N", row) with N from 1, its values as plain Python. ROWS rows are in memory at a time.

    Raises ValueError (one line) where there is no such file, where it is not a valid parquet file, and for rows that
    cannot be converted to Python values.
    """
    import pyarrow.parquet

    if not path.is_file():
        raise InputError(f"data.source: there is no file {path}")
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist(maps_as_pydicts="lossy"):
                    number += 1
                    yield f"{path} row {number}", row
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        after = f" after row {number}" if number else ""
        raise InputError(f"data.source: cannot read {path} as parquet{after}: {error_line(error)}") from error


def dataset_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("source row N", row) with N from 1, of `datasets:NAME?split=SPLIT&key=value`. The default split is "train".

    NAME is a folder written by the `datasets` library's `save_to_disk`, or a name for its `load_dataset`, which gets
    the options. Raises ValueError (one line) where the package or the dataset is missing, or an option is refused.
    """
    name, options = name_and_options(source.removeprefix(DATASETS), source)
    options = {"split": "train", **options}
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise InputError(f"data.source: {source}: {error}; pip install 'dynamo-megatron[datasets]'") from None
    number = 0
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            dataset = datasets.load_from_disk(name)
            if isinstance(dataset, dict):
                dataset = dataset[options["split"]]
        else:
            dataset = datasets.load_dataset(name, **options)
        for number, row in enumerate(dataset, 1):
            yield f"{source} row {number}", row
    except (OSError, ImportError, LookupError, RuntimeError, TypeError, ValueError, DatasetsError) as error:
        # When building a dataset fails, the library wraps the cause in an error that does not name it.
        after = f" after row {number}" if number else ""
        raise InputError(f"data.source: {source}{after}: {error_line(error.__cause__ or error)}") from error


def name_and_options(spec: str, source: str) -> tuple[str, dict[str, Any]]:
    """The parts of "name?key=value&key=value", the values parsed as YAML. Raises ValueError (one line) that names
    `source`."""
    name, _, query = spec.partition("?")
    options: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        key, _, value = item.partition("=")
        try:
            options[key] = value if key in TEXT_OPTIONS else yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"data.source: {source}: the value of {key!r} is not YAML: {value!r}") from None
    return name, options
