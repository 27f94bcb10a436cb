"""What makes a run the same run when it is resumed."""

import pytest

from dynamo_megatron.config.files import compose, identity, to_plain

NEEDED = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}
SETTINGS = {
    "format": "reward.format.tags=[answer]",
    "code": "reward.code.score=all",
    "judge": "reward.judge.template='{response}'",
    "reward_model": "reward.reward_model.range=[0.0,2.0]",
}
REACHED = ["reward.judge.url=http://h/v1", "reward.judge.model=j", "reward.reward_model.path=m"]
REACHED += ["reward.reward_model.urls=[http://h]"]


def identity_of(*words: str) -> dict:
    return identity(to_plain(compose([], [*REACHED, *words], NEEDED)[0]))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_reward_count_where_the_run_has_it(name):
    key = SETTINGS[name].partition("=")[0]
    assert identity_of(SETTINGS[name]) == identity_of()
    used = f"reward.functions=[math,{name}]"
    before, after = identity_of(used), identity_of(used, SETTINGS[name])
    assert {k for k in before if before[k] != after[k]} == {key}


def test_a_saved_config_of_another_shape_has_an_identity_too():
    assert identity({"reward": 3, "seed": 1})["seed"] == 1
    assert identity({"reward": {"functions": [{"math": 1}], "code": {"score": "all"}}})["reward.functions"]
