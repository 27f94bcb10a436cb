"""Advantages and losses by functions of the user's: contracts, the tests of them, and what a config refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.advantages import group_advantages
from dynamo_megatron.algorithm.user_functions import AdvantageInputs, check_loss, custom_advantages, load_advantage
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.jobs.train import check_functions
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.runtime.user_code import UserFunction
from dynamo_megatron.types import Rollout, RolloutBatch

DEFAULTS = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}
FILE = str(Path(__file__))


def inputs(*rewards: float) -> AdvantageInputs:
    values, group = np.array(rewards), np.arange(len(rewards)) // 2
    names = tuple(f"p{g}" for g in group)
    return AdvantageInputs(values, values > 0, group, names, np.full(len(rewards), 5))


def rloo(inputs):
    return group_advantages(inputs.rewards, inputs.group, "rloo")


def known_prompts(inputs):
    return np.array([{"mine": 1.0}[p] for p in inputs.prompt_ids])


ADVANTAGES = {  # wrong ones
    "listed": (lambda i: i.rewards.tolist(), r"returned list, not a numpy array of float64 \(1,\)"),
    "nan": (lambda i: np.log(i.rewards - 9), "returned nan for rollout 0, of prompt 'p0'; give finite numbers"),
    "drawn": (lambda i: np.random.default_rng().normal(size=len(i.rewards)), "other advantages when called again"),
    "in place": (lambda i: np.negative(i.rewards, out=i.rewards), "failed: ValueError: .* read-only"),
    "raises": (lambda i: i.nothing, rf"failed: AttributeError: .* 'nothing' \({FILE}, line \d+\)$"),
}


def test_a_run_shows_the_users_frames_and_then_one_line(capsys):
    from dynamo_megatron.jobs.run import _report

    try:
        custom_advantages(load_advantage(f"{__name__}:known_prompts"), inputs(0.0, 1.0))
    except ValueError as error:
        assert _report(error, 0, None, lambda: "") == 1
    *frames, last = capsys.readouterr().err.splitlines()
    assert last.startswith(
        f"UserCodeError: algorithm.advantage.kind: {__name__}:known_prompts failed: KeyError: 'p0' ({FILE}, line "
    )
    assert len(frames) == 4 and all("Traceback" not in line for line in frames) and "known_prompts" in frames[0]


def test_advantages_of_no_rollouts_and_of_ranks_that_differ():
    function = load_advantage(f"{__name__}:rloo")
    assert custom_advantages(load_advantage(f"{__name__}:known_prompts"), inputs()).shape == (0,)
    got = custom_advantages(function, inputs(0.0, 1.0), lambda mine: [mine, mine])
    assert got.tolist() == [-1.0, 1.0]
    with pytest.raises(ValueError, match="rloo returned other advantages on rank 2 than on rank 0"):
        custom_advantages(function, inputs(0.0, 1.0), lambda mine: [mine, mine, "other"])


def batch() -> RolloutBatch:
    """A prompt that is two groups, of 1 and 3 rollouts, and another one between them."""
    made = []
    for i, (group, prompt) in enumerate([("1/a", "a"), ("2/b", "b"), ("2/b", "b"), *[("3/a", "a")] * 3]):
        length = 8 - i % 3
        fields = ([1] * (2 + length), [0, 0] + [1] * length, [-1.0] * length, [(0, 0, length)], "stop")
        made.append(Rollout(f"{group}-{i}", group, prompt, 1, *fields, float(i % 2), i % 2 == 1, {}))
    return RolloutBatch.from_rollouts(made)


seen: list[AdvantageInputs] = []


def remembers(inputs):
    seen.append(inputs)
    return rloo(inputs)


@pytest.mark.parametrize(
    "override", ["algorithm.advantage.positive_weight=0.3", "algorithm.advantage.overlong_buffer=0.5"]
)
def test_a_batch_of_the_same_advantages_is_the_same_batch(override):
    words = [override, "rollout.max_new_tokens=8"]
    config = [
        compose([], [*words, f"algorithm.advantage.kind={kind}"], DEFAULTS)[0]
        for kind in ("rloo", f"{__name__}:remembers")
    ]
    built_in, custom = (TrainBatch.build(batch(), c) for c in config)
    assert custom.advantages.dtype == np.float64
    assert custom.advantages.tobytes() == built_in.advantages.tobytes() and built_in.advantages.any()
    given = seen[-1]
    assert given.group.tolist() == [0, 1, 1, 2, 2, 2] and given.prompt_ids == ("a", "b", "b", "a", "a", "a")
    assert given.successes.tolist() == [False, True] * 3 and given.response_lengths.tolist() == [8, 7, 6] * 2
    overlong = "overlong" in override
    assert given.rewards.tolist() == ([-0.5, 0.625, -0.25, 0.5, -0.375, 0.75] if overlong else [0.0, 1.0] * 3)


def clipped(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(0.8, 1.2))


def of_responses(inputs):
    """GSPO's, of whole responses."""
    count = int(inputs.response.max()) + 1
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sums = torch.zeros(count).index_add(0, inputs.response, log_ratio)
    means = sums / inputs.response.bincount(minlength=count)
    return -inputs.advantages * means.exp()[inputs.response]


def with_reference(inputs):
    return clipped(inputs) + inputs.kl_coef * (inputs.logprobs - inputs.reference_logprobs) ** 2


def normalised(inputs):
    return clipped(inputs) / inputs.advantages.abs().max().clamp(min=1e-3)


LOSSES = {  # wrong ones
    "mean": (lambda i: clipped(i).mean(), r"returned float32 \[\] on cpu, not a tensor"),
    "drawn": (lambda i: clipped(i) * torch.rand(()), "gives a response other losses by itself"),
    "raises": (lambda i: i.nothing, rf"failed: AttributeError: .* 'nothing' \({FILE}, line \d+\)$"),
}


CHECKS = {
    "advantages": lambda user: custom_advantages(user, inputs(0.0)),
    "loss": lambda user: check_loss(user, reference=False, kl_coef=0.0, context_parallel=False),
}
WRONG = [("advantages", name, *given) for name, given in ADVANTAGES.items()]
WRONG += [("loss", name, *given) for name, given in LOSSES.items()]


@pytest.mark.parametrize(("check", "name", "function", "says"), WRONG)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_wrong_function_is_named_in_one_line(check, name, function, says):
    with pytest.raises(ValueError, match=says) as error:
        CHECKS[check](UserFunction(function, "mine"))
    assert str(error.value).startswith("mine ") and "\n" not in str(error.value)
    assert name != "raises" or 'in <lambda>\n    "raises"' in error.value.frames


def test_a_run_checks_its_loss_before_it_starts_anything():
    def config(*words: str):
        return compose([], ["algorithm.modulation=null", *words], DEFAULTS)[0]

    check_functions(config(f"algorithm.loss.kind={__name__}:of_responses"))
    check_functions(config(f"algorithm.loss.kind={__name__}:clipped", "parallel.cp=2"))
    kl = f"algorithm.loss.kind={__name__}:with_reference"
    check_functions(config(kl, "algorithm.kl={coef: 0.1, where: function}"))
    apart = "of_responses gives a response other losses whose tokens are apart: with parallel.cp"
    for words, says in {
        (f"algorithm.loss.kind={__name__}:of_responses", "parallel.cp=2"): apart,
        (kl,): "with_reference failed: TypeError: unsupported operand .*NoneType",
        (f"algorithm.loss.kind={__name__}:normalised",): "normalised gives .* by itself than .* micro_batch_tokens",
        ("algorithm.advantage.kind=no_module_like_this:f",): "cannot import 'no_module_like_this'",
    }.items():
        with pytest.raises(ValueError, match=says):
            check_functions(config(*words))


FUNCTION = ["algorithm.loss.kind=my:loss", "algorithm.modulation=null"]
OF_THE_LOSS = "an option of the built-in losses, which my:loss is not given; set it to"
OF_THE_KIND = "no option of kind my:a; set it to"
REFUSED = {
    "modulation={}": "algorithm: modulation: is a part of the built-in loss, which loss.kind my:loss takes",
    "loss.ratio=sequence": f"algorithm.loss: ratio: {OF_THE_LOSS} token",
    "loss.clip_cov={}": f"algorithm.loss: clip_cov: {OF_THE_LOSS} null",
    "loss.kind=my.py:l.x": "algorithm.loss.kind: 'my.py:l.x' is unknown; give clip, cispo or module:function",
    "kl={where: function}": "algorithm.kl: where: function is about the KL term, which only a coef above 0 turns on",
    "advantage={kind: 'my:a', singleton: raw}": f"algorithm.advantage: singleton: {OF_THE_KIND} zero",
    "advantage.kind=vtrace": "algorithm.advantage.kind: 'vtrace' is unknown; give grpo, dr_grpo, rloo, reinforce,",
}


@pytest.mark.parametrize("override", REFUSED)
def test_an_option_that_would_do_nothing_is_refused_by_name(override):
    with pytest.raises(ConfigError) as error:
        compose([], [*FUNCTION, f"algorithm.{override}"], DEFAULTS)
    (line,) = str(error.value).splitlines()
    assert line.removeprefix("the command line: ").startswith(REFUSED[override])
