"""Distinct answers and n-grams of groups, and the factors of rare right rollouts, against sets of tuples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_megatron.algorithm.diversity import NGRAM, distinct_ngrams, diversity_factors, unique_answers

# (group, right, answer, response) of each rollout; few tokens, so that n-grams repeat
ROLLOUTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from("xy"), st.lists(st.integers(0, 2), max_size=12)),
    max_size=14,
)


def ngrams(response: list[int]) -> list[tuple]:
    windows = [tuple(response[i : i + NGRAM]) for i in range(len(response) - NGRAM + 1)]
    return windows or ([tuple(response)] if response else [])


def arrays(rollouts) -> tuple:
    """right, answers, tokens, lengths, group_ids"""
    groups, right, answers, responses = zip(*rollouts, strict=True) if rollouts else ((), (), (), ())
    tokens, lengths = np.array([t for r in responses for t in r], np.int64), [len(r) for r in responses]
    return np.array(right, bool), answers, tokens, np.array(lengths, np.int64), groups


def reference(weight: float, rollouts) -> list[float]:
    """Pair by pair."""
    rarity = {}
    for j, (group, right, answer, response) in enumerate(rollouts):
        own, distances = set(ngrams(response)), []
        for k, (other, also, its, text) in enumerate(rollouts):
            if j != k and group == other and right and also:
                apart = len(own - set(ngrams(text))) / len(own) if own else 0.0
                distances.append(1.0 if answer != its else apart)
        if distances:
            rarity[j] = float(np.mean(distances))
    found = []
    for j, (group, *_) in enumerate(rollouts):
        same = [rarity[k] for k in rarity if rollouts[k][0] == group]
        found.append(1 + weight * (rarity[j] - np.mean(same)) if j in rarity else 1.0)
    return found


@settings(deadline=None)
@given(ROLLOUTS, st.sampled_from([0.3, 1.0]), st.randoms(use_true_random=False))
def test_factors_are_those_of_all_pairs_in_any_order(rollouts, weight, rng):
    factors = diversity_factors(weight, *arrays(rollouts))
    np.testing.assert_allclose(factors, reference(weight, rollouts), rtol=0, atol=1e-12)
    assert (factors >= 1 - weight - 1e-12).all()
    order = rng.sample(range(len(rollouts)), len(rollouts))
    shuffled = diversity_factors(weight, *arrays([rollouts[i] for i in order]))
    np.testing.assert_allclose(shuffled, factors[order] if order else factors, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(ROLLOUTS)
def test_shares_of_distinct_answers_and_ngrams_are_by_group(rollouts):
    _, answers, tokens, lengths, groups = arrays(rollouts)
    by_group = {g: [r for r in rollouts if r[0] == g] for g in dict.fromkeys(groups)}
    several = [its for its in by_group.values() if len(its) > 1]
    shares = [len({answer for _, _, answer, _ in its}) / len(its) for its in several]
    np.testing.assert_allclose(unique_answers(answers, groups), shares)
    grams = [[g for r in its for g in ngrams(r[3])] for its in several]
    np.testing.assert_allclose(distinct_ngrams(tokens, lengths, groups), [len(set(g)) / len(g) for g in grams if g])
