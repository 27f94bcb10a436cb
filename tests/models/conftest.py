import importlib.util
from pathlib import Path

import pytest
from conversion_command import SIZES

from dynamo_megatron.checkpoint.convert import hf2mcore

TOOLS = Path(__file__).parents[2] / "tools"


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A factory of tiny Hugging Face folders, written once a session for the same arguments. Do not change them."""
    make = load_tool("tiny_model").make_tiny_model
    made = {}

    def tiny(family="qwen2", **arguments):
        key = (family, *sorted(arguments.items()))
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp(family) / "model", family, **arguments)
        return made[key]

    return tiny


@pytest.fixture
def tool():
    return load_tool


@pytest.fixture(scope="session")
def converted(tiny_model, tmp_path_factory):
    """(Hugging Face folder, what hf2mcore made of it). Do not change them."""
    folder = tiny_model("qwen2", **SIZES)
    mcore = tmp_path_factory.mktemp("converted") / "mcore"
    hf2mcore(folder, mcore)
    return folder, mcore
