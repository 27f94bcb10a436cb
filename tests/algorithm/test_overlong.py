import numpy as np
import pytest

from dynamo_megatron.algorithm.overlong import overlong_penalty


def test_the_published_sizes():
    """L_max 20480, L_cache 4096 (arXiv 2503.14476, Eq. 13)."""

    def published(length):
        if length <= 16384:
            return 0.0
        return (16384 - length) / 4096 if length <= 20480 else -1.0

    lengths = np.array([0, 1, 16384, 16385, 18432, 20479, 20480, 30000])
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 0.2), [published(n) for n in lengths], rtol=1e-12)


def test_a_short_limit_has_a_buffer_of_a_fraction_of_a_token():
    np.testing.assert_allclose(overlong_penalty(np.array([4, 5, 6]), 6, 0.2), [0, -1 / 6, -1], atol=1e-12)
    assert overlong_penalty(np.array([3]), 6, 1.0)[0] == pytest.approx(-0.5)
