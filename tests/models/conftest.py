import pytest


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model, tmp_path_factory):
    """tiny_model(family, **options) -> its folder, made once a session. Do not change it."""
    made = {}

    def tiny(family="qwen2", **options):
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family) / "model", family, **options)
        return made[key]

    return tiny
