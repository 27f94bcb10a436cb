"""`model.source: bridge` in an environment with other versions than those it is made for."""

import importlib.metadata
from pathlib import Path

import pytest

from dynamo_megatron.bridge.environment import PINS, check_versions
from dynamo_megatron.errors import InputError


def test_the_pinned_versions_are_those_that_make_bridge_installs():
    installed = (Path(__file__).parents[2] / "requirements" / "bridge.txt").read_text()
    assert all(f"\n{package}=={version}\n" in installed for package, version in PINS.items())


@pytest.mark.parametrize("package", PINS)
def test_another_version_is_refused_by_its_name(monkeypatch, package):
    found = PINS | {package: "0.16.1"}
    monkeypatch.setattr(importlib.metadata, "version", found.get)
    why = rf"^model\.source: bridge needs {package} {PINS[package]}, here: 0\.16\.1; `make bridge` sets up "
    with pytest.raises(InputError, match=why):
        check_versions()
    found[package] = PINS[package]
    check_versions()
