"""The reward prime: what it needs, and that a run's identity has it."""

import pytest

from dynamo_megatron.config.files import ConfigError, compose, identity, to_plain

NEEDED = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["reward.functions=[prime]", "reward.prime.model=p"], "functions: prime rewards tokens, and whether"),
        (
            ["reward.functions=[prime,math]", "reward.prime.model=p"],
            "name another one before it, such as",
        ),
        (["reward.functions=[math,prime]"], "prime.model: name the folder of the implicit process reward model"),
        (["reward.prime.model=p"], "prime: is about the reward prime; put it into functions"),
        (["reward.functions=[math,prime]", "reward.prime={model: p, beta: 0}"], "reward.prime.beta: Input should be"),
    ],
)
def test_what_prime_lacks_is_said_in_one_line(words, says):
    with pytest.raises(ConfigError) as refusal:
        compose([], words, NEEDED)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_models_beside_the_policy():
    def of(*words):
        return compose([], list(words), NEEDED)[0].frozen_models

    assert of() == {} == of("reward.functions=[math]")
    assert of("algorithm.kl.coef=0.1") == {"algorithm.kl.reference": "m"}
    prime = ("reward.functions=[math,prime]", "reward.prime.model=p")
    assert of(*prime) == {"reward.prime.model": "p", "reward.prime.reference": "m"}
    both = of(*prime, "reward.prime.reference=r", "algorithm.kl={coef: 0.1, reference: k}")
    assert both == {"algorithm.kl.reference": "k", "reward.prime.model": "p", "reward.prime.reference": "r"}


def test_another_reward_model_is_another_run():
    words = ["reward.functions=[math,prime]", "reward.prime.model=p"]
    one, other = (compose([], [*words, *more], NEEDED)[0] for more in ([], ["reward.prime.beta=0.1"]))
    before, after = identity(to_plain(one)), identity(to_plain(other))
    assert {key for key in before if before[key] != after[key]} == {"reward.prime.beta"}
