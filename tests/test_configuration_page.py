"""docs/configuration.md has every key with its default."""

import runpy
from pathlib import Path

import yaml

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import compose, to_plain

TABLE = runpy.run_path(str(Path(__file__).with_name("configuration_table.py")))
NEEDED = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}


def leaves(node, mappings, at=()):
    """(dotted key, value); `mappings`: keys whose values are mappings."""
    if isinstance(node, dict) and node and ".".join(at) not in mappings:
        for name, value in node.items():
            yield from leaves(value, mappings, (*at, name))
    else:
        yield ".".join(at), node


def test_the_page_has_the_keys_and_defaults_of_the_code():
    text = TABLE["DOCUMENT"].read_text(encoding="utf-8")
    assert text == TABLE["document"](text), "python -P tests/configuration_table.py rewrites it"


def test_every_key_of_a_default_config_is_in_the_table_with_its_value():
    """Read back from the page as YAML, so that a mistake of the table's maker shows."""
    rows = [line.split(" | ") for line in TABLE["generated"]().splitlines()[2:]]
    stated = {row[0].strip("| `"): row[2].strip("`") for row in rows}
    config = Config.model_validate(NEEDED)
    mappings = {row[0].strip("| `") for row in rows if row[1] == "mapping"}
    for key, value in leaves(to_plain(config), mappings):
        assert key in stated, key
        if stated[key] != "required":
            assert yaml.safe_load(stated[key]) == value, key


def test_every_key_of_the_table_is_one():
    keys = [line.split("`")[1] for line in TABLE["generated"]().splitlines()[2:]]
    for key in keys:
        assert "unknown key" not in _refusal(f"{key}=[{{}}]")
    assert len(keys) == len(set(keys)) > 100


def _refusal(override: str) -> str:
    try:
        compose([], [override], NEEDED)
    except ValueError as error:
        return str(error)
    return ""
