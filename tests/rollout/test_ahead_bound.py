"""Thousands of simulated steps: no token is older than the bound, and nothing is left out, whatever takes how long."""

import random
from collections import Counter

import pytest
from simulated_fleet import World

STEPS = 500


def heavy_tailed(name: str) -> int:
    """Tokens: Pareto, from 10 to 1,000."""
    return min(1000, int(10 * random.Random(name).paretovariate(0.8)))


def by_prompt(name: str) -> int:
    """20 tokens or 400, by the prompt."""
    return 400 if int(name.split("-")[1]) == 3 else 20


def check_bound(world: World) -> None:
    staleness = []
    for step, names in world.trained.items():
        for name in names:
            response = world.responses[name]
            if not response.error:
                versions = [version for version, _, _ in response.weight_versions]
                assert versions == sorted(set(versions)) and versions[-1] < step
                assert len(response.tokens) == response.weight_versions[-1][2] == world.length(name)
                staleness.append(step - 1 - versions[0])
    assert max(staleness) == world.staleness


@pytest.mark.parametrize("at_sync", ["partial", "drain"])
@pytest.mark.parametrize("staleness", [1, 4])
def test_no_token_is_older_than_the_bound(monkeypatch, staleness, at_sync):
    world = World(staleness, staleness, heavy_tailed, chaos=True, at_sync=at_sync)
    world.run(monkeypatch, STEPS)
    check_bound(world)
    assert world.hurt > 50 and len(world.responses) == 8 * STEPS


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_what_is_trained_has_the_lengths_of_what_was_dispatched(monkeypatch, staleness):
    """In 200 steps, at every one. In the order in which groups come it has not."""
    world = World(7, staleness, by_prompt, chaos=False)
    world.run(monkeypatch, 200)
    trained = Counter()
    for step in range(1, 200):
        trained.update(len(world.responses[name].tokens) for name in world.trained[step])
        assert trained == {20: 6 * step, 400: 2 * step}
    groups = list(dict.fromkeys(name[:-2] for name in reversed(world.finished)))[::-1]  # by their last rollout
    first = Counter(world.length(f"{name}-0") for name in groups[: 4 * 100])
    assert first[400] < 100
