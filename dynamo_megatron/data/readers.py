"""Reads the rows of prompt files, each with a text that names its place in the file."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line

DATASETS = "datasets:"
LONGEST_LINE = 64 << 20  # bytes; a prompt of that length has more tokens than any model takes
ROWS = 16  # of a Parquet file read at once: Arrow cannot read 2 GiB of a nested column at once
TEXT_OPTIONS = ("name", "split")  # not parsed as YAML, where the configuration "no" (Norwegian) would be False


def jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("path:line", value) of every line that is not empty, parsed by `plain_json.parse`. Raises ValueError (one
    line)."""
    if not path.is_file():
        raise InputError(f"data.source: there is no file {path}")
    with path.open("rb") as lines:
        for number in itertools.count(1):
            where, line = f"{path}:{number}", lines.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise InputError(f"{where}: a line of more than {LONGEST_LINE >> 20} MiB; write one JSON object a line")
            line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if line:
                yield where, plain_json.parse(line, where)


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("path row N", row) with N from 1, its values as plain Python. ROWS rows are in memory at a time.

    Raises ValueError (one line) where there is no such file, where it is not a valid parquet file, and for a row that
    cannot be converted to Python values.
    """
    import pyarrow.parquet

    if not path.is_file():
        raise InputError(f"data.source: there is no file {path}")
    unreadable = (OSError, ValueError, OverflowError, pyarrow.ArrowException)

    def plain(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
        return batch.to_pylist(maps_as_pydicts="lossy")

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                try:
                    rows: Iterable[dict[str, Any]] = plain(batch)
                except unreadable:  # row by row, so that the error names the row
                    rows = (plain(batch.slice(i, 1))[0] for i in range(len(batch)))
                for row in rows:
                    number += 1
                    yield f"{path} row {number}", row
    except unreadable as error:
        after = f" after row {number}" if number else ""
        raise InputError(f"data.source: cannot read {path} as parquet{after}: {error_line(error)}") from error


def dataset_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("source row N", row) with N from 1, of `datasets:NAME?split=SPLIT&key=value`. The default split is "train".

    NAME is a folder written by the `datasets` library's `save_to_disk`, or a name for its `load_dataset`, which gets
    the options. Raises ValueError (one line) where the package, dataset, split or configuration is missing, or an
    option is refused.
    """
    name, _, query = source.removeprefix(DATASETS).partition("?")
    options = {
        key: value if key in TEXT_OPTIONS else yaml_value(source, key, value)
        for key, value in query_options(source, query)
    }
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise InputError(f"data.source: {source}: {error}; pip install 'dynamo-megatron[datasets]'") from None
    saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name, **{"split": "train"} | options)
    except (OSError, ImportError, LookupError, RuntimeError, TypeError, ValueError, DatasetsError) as error:
        # When building a dataset fails, the library wraps the cause in an error that does not name it.
        raise InputError(f"data.source: {source}: {error_line(error.__cause__ or error)}") from error
    if saved:
        dataset = _saved_split(dataset, source, options)
    number = 0
    try:
        for number, row in enumerate(dataset, 1):
            yield f"{source} row {number}", row
    except (OSError, LookupError, TypeError, ValueError, OverflowError, DatasetsError) as error:
        raise InputError(f"data.source: {source}: cannot be read after row {number}: {error_line(error)}") from error


def _saved_split(dataset: Any, source: str, options: dict[str, Any]) -> Any:
    """The requested split of what `load_from_disk` returned: a dataset, or a dictionary of datasets by split."""
    if others := [key for key in options if key != "split"]:
        raise InputError(f"data.source: {source}: a dataset saved to disk takes no option {others[0]!r}, only split")
    if not isinstance(dataset, dict):
        if "split" in options:
            raise InputError(f"data.source: {source}: this dataset was saved without splits; leave split out")
        return dataset
    split = options.get("split", "train")
    if split not in dataset:
        raise InputError(f"data.source: {source}: there is no split {split!r}; there is {', '.join(dataset)}")
    return dataset[split]


def query_options(source: str, query: str) -> Iterator[tuple[str, str]]:
    """The (key, value) pairs of "key=value&key=value". Raises ValueError (one line) that names `source`."""
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"data.source: {source}: {item!r} is not of the form key=value")
        yield key, value


def yaml_value(source: str, key: str, value: str) -> Any:
    """The text `value` parsed as YAML. Raises ValueError (one line)."""
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"data.source: {source}: the value of {key!r} is not YAML: {value!r}") from None
