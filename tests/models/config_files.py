"""What tests of config.json share: files, what is refused, and published models."""

import json

import pytest

from dynamo_megatron.models import FAMILIES
from dynamo_megatron.models.published import PUBLISHED


def write(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refusal(call, *arguments) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def published_spec(name: str):
    config = PUBLISHED[name]["config"]
    return FAMILIES[config["model_type"]].read(config)
