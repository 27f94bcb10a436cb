"""Thousands of simulated steps: no token is older than the bound, and nothing is left out, whatever takes how long."""

import random

import pytest
from simulated_fleet import Client, World

STEPS = 500


def heavy_tailed(name: str) -> int:
    """Tokens: Pareto, from 10 to 1,000."""
    return min(1000, int(10 * random.Random(name).paretovariate(0.8)))


@pytest.mark.parametrize("at_sync", ["partial", "drain"])
@pytest.mark.parametrize("bound", [1, 4])
def test_no_token_is_older_than_the_bound(monkeypatch, bound, at_sync):
    world = World(bound, bound, heavy_tailed, at_sync)
    world.run(monkeypatch, STEPS)
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
    assert world.hurt > 50 and len(world.responses) == 8 * STEPS


def test_servers_stay_where_the_rollout_process_is_held_up(monkeypatch):
    """For longer than rollout.health_timeout, while a server's answer to /health is under way, too."""
    world = World(5, 0, heavy_tailed, "partial", faults=["held up"])  # with other seeds one check is held up twice
    world.run(monkeypatch, STEPS)
    assert world.hurt > 50 and world.fleet.notes == []


@pytest.mark.parametrize("at_sync", ["partial", "drain"])
@pytest.mark.parametrize(("tokens", "checked"), [(100, False), (1000, True)])
def test_servers_that_answer_are_not_checked(monkeypatch, at_sync, tokens, checked):
    """SGLang begins no weight update in the second that a check takes. Responses of 1 s and of 10 s."""
    checks, healthy = [], Client.healthy

    async def counted(client, timeout):
        checks.append(client)
        return await healthy(client, timeout)

    monkeypatch.setattr(Client, "healthy", counted)
    World(0, 1, lambda name: tokens, at_sync, faults=["none"]).run(monkeypatch, 50)
    assert bool(checks) == checked
