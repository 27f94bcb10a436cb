import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.page.rollouts import (
    MOST_TEXT,
    MOST_TOKENS,
    STEPS,
    Shown,
    advantages_of,
    chosen_steps,
    rollout_view,
    shown_rollouts,
)
from dynamo_megatron.rollout.store import tokens_file
from dynamo_megatron.tracking.token_rows import response_hash, write_token_rows


def plain_config(**sections) -> dict:
    return to_plain(Config(**{"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o", **sections}))


def test_advantages_of_the_groups(new_rollout):
    """rloo: the reward less the mean of the group's others; what failed is in no group."""
    rollouts = [new_rollout(1, 0, i, reward=r) for i, r in enumerate([1.0, 0.0, 0.0])]
    rollouts += [new_rollout(1, 1, i, reward=r, status=s) for i, (r, s) in enumerate([(1.0, "ok"), (0.0, "failed")])]
    found = advantages_of(rollouts, plain_config(algorithm={"advantage": {"kind": "rloo"}}))
    values = [1.0, -0.5, -0.5, 0.0]
    assert found == pytest.approx({r.rollout_id: v for r, v in zip(rollouts, values, strict=False)})


def test_an_overlong_response_pays(new_rollout):
    long, short = new_rollout(1, 0, 0), new_rollout(1, 0, 1, tokens=[20, 21, 30], response_mask=[0, 0, 1])
    config = plain_config(
        rollout={"max_new_tokens": 2},
        algorithm={"advantage": {"kind": "rloo", "overlong_buffer": 0.5, "overlong_penalty": 0.5}},
    )
    assert list(advantages_of([long, short], config).values()) == [-0.5, 0.5]


@pytest.mark.parametrize("advantage", [{"kind": "history"}, {"kind": "otb"}, {"kind": "my_own:function"}])
def test_no_advantage_is_made_up(new_rollout, advantage):
    config = plain_config()
    config["algorithm"]["advantage"] |= advantage
    assert advantages_of([new_rollout(1, 0, 0), new_rollout(1, 0, 1, reward=1.0)], config) == {}


def test_no_advantage_is_made_up_of_process_rewards(new_rollout):
    """Training adds a return to each token's; without weight, and of rollouts that are not trained, it adds nothing."""
    config = plain_config()
    plain, failed = new_rollout(1, 0, 0), new_rollout(1, 0, 2, status="failed", step_rewards=[(0, 2, 0.5)])
    steps, known = new_rollout(1, 0, 1, reward=1.0, step_rewards=[(0, 2, 0.5)]), [-1.0, 1.0]
    assert advantages_of([plain, steps], config) == {}
    assert list(advantages_of([plain, new_rollout(1, 0, 1, reward=1.0), failed], config).values()) == known
    config["algorithm"]["advantage"]["process"]["weight"] = 0.0
    assert list(advantages_of([plain, steps], config).values()) == known
    prime = plain_config(reward={"functions": ["math", "prime"], "prime": {"model": "m"}})
    assert advantages_of([plain, new_rollout(1, 0, 1, reward=1.0)], prime) == {}


def test_steps_are_spread_over_the_run():
    assert chosen_steps(list(range(1, 101))) == [1, 17, 33, 49, 65, 81, 97, 100]
    assert all(len(chosen_steps(list(range(n)))) <= STEPS for n in range(1, 300))
    assert chosen_steps([3, 4]) == [3, 4] and chosen_steps([5]) == [5] and chosen_steps([]) == []
    stay = {*chosen_steps(list(range(1, 51)))} & {*chosen_steps(list(range(1, 60)))}
    assert len(stay) > 5


def labels_of(shown: list[Shown]) -> dict[str, set[str]]:
    return {s.rollout.rollout_id: set(s.labels) for s in shown}


def test_which_rollouts_are_shown(make_run, new_rollout):
    """Best and worst of different groups; truncated, rejected and failed ones; the group whose rewards vary most."""
    rollouts = [new_rollout(2, g, k, reward=(g + 4 * k) / 10) for g in range(4) for k in range(3)]
    rollouts += [new_rollout(2, 0, 7, reward=0.4, finish_reason="length", status="ok")]
    rollouts += [new_rollout(2, 1, 8, status="rejected"), new_rollout(2, 1, 9, status="failed")]
    rollouts += [new_rollout(2, 2, 9, reward=9.0), new_rollout(3, 0, 0, reward=7.0)]
    run = make_run("run", rollouts)
    shown = shown_rollouts(run, run, 2, plain_config(), ["000002-0003-001"])
    found = labels_of(shown)
    assert found["000002-0002-009"] == {"best", "group"} and found["000002-0003-002"] == {"best"}
    assert found["000002-0000-000"] == {"worst"} and found["000002-0001-000"] == {"worst"}
    assert found["000002-0000-007"] == {"truncated"} and found["000002-0001-008"] == {"rejected"}
    assert found["000002-0001-009"] == {"not scored"} and found["000002-0002-001"] == {"group"}
    assert shown[0].rollout.rollout_id == "000002-0003-001" and "asked for" in shown[0].labels
    assert not any(name.startswith("000003") for name in found)  # of a step that is not in metrics.jsonl yet


@pytest.mark.parametrize("name", ["000002-0000-009", "000009-0000-000", "nonsense"])
def test_a_rollout_that_is_not_there(make_run, new_rollout, name):
    run = make_run("run", [new_rollout(2, 0, 0)])
    with pytest.raises(InputError, match=name):
        shown_rollouts(run, run, 2, plain_config(), [name])


def decode(ids) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def test_the_numbers_of_each_token(make_run, new_rollout):
    spans = {"weight_versions": [(3, 0, 1), (5, 1, 2)]}
    run = make_run("run", [new_rollout(6, 0, 0, **spans), new_rollout(6, 0, 1, reward=1.0)])
    lists = {"logprob": [-1.25, -2.0], "entropy": [0.5, 0.0], "advantage": [-1.0, -0.75], "modulation": [1.0, 0.6]}
    row = {"rollout_id": "000006-0000-000", "response": response_hash([30, 31])}
    write_token_rows(tokens_file(run, 6), [{**row, **lists}])
    shown = {s.rollout.rollout_id: s for s in shown_rollouts(run, run, 6, plain_config(), [])}
    measured = rollout_view(shown["000006-0000-000"], decode)
    assert measured["values"] == {"engine_logprob": [-1.0, -2.0], "version": [3, 5], "gap": [-0.25, 0.0], **lists}
    assert measured["ids"] == [30, 31] and measured["texts"] == ["e", "f"] and "token statistics" in measured["labels"]
    other = rollout_view(shown["000006-0000-001"], None)
    assert other["values"]["advantage"] == 1.0 and "entropy" not in other["values"] and other["texts"] is None


@pytest.mark.parametrize(("ids", "numbers"), [([30, 99], 2), ([30, 31, 32], 3), ([30, 31], 3), ([30, 31], 1)])
def test_statistics_of_another_response_are_not_shown(make_run, new_rollout, ids, numbers):
    """Of a step that was sampled anew, as the rollout_id does not tell."""
    run = make_run("run", [new_rollout(6, 0, 0)])
    row = {"rollout_id": "000006-0000-000", "response": response_hash(ids), "entropy": [0.5] * numbers}
    write_token_rows(tokens_file(run, 6), [row])
    (shown,) = shown_rollouts(run, run, 6, plain_config(), [])
    assert "entropy" not in rollout_view(shown, None)["values"]


def test_long_rollouts_are_cut_and_say_so(new_rollout):
    n = MOST_TOKENS + 5
    rollout = new_rollout(
        1, 0, 0, tokens=[1] + [2] * n, response_mask=[0] + [1] * n, engine_logprobs=[-1.0] * n, response="x" * 30_000
    )
    view = rollout_view(Shown(rollout, [], None, {"entropy": [0.5] * n}), None)
    assert len(view["values"]["entropy"]) == MOST_TOKENS
    assert len(view["ids"]) == len(view["values"]["version"]) == MOST_TOKENS and view["length"] == n
    assert view["response"] == "x" * MOST_TEXT + "\n[cut: 10,000 more characters]"
