"""`model.source: bridge` in an environment with other versions than those it is made for."""

import importlib.metadata

import pytest

from dynamo_megatron.bridge.environment import PINS, check_versions
from dynamo_megatron.errors import InputError


@pytest.mark.parametrize("package", PINS)
def test_another_version_is_refused_by_its_name(monkeypatch, package):
    found = PINS | {package: "0.16.1"}
    monkeypatch.setattr(importlib.metadata, "version", found.get)
    why = rf"^model\.source: bridge needs {package} {PINS[package]}, here: 0\.16\.1; `make bridge` sets up "
    with pytest.raises(InputError, match=why):
        check_versions()
    found[package] = PINS[package]
    check_versions()
