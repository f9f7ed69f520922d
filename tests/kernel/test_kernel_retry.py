import pytest

from loom.errors import ConfigError
from loom.kernel import NO_RETRY, RetryPolicy


def test_delays_grow_to_their_ceiling():
    policy = RetryPolicy(first_ms=200, factor=2.0, max_ms=1_000)
    assert [policy.delay_ms(n) for n in (1, 2, 3, 4, 1_000_000)] == [200, 400, 800, 1_000, 1_000]
    assert RetryPolicy(factor=1.0).delay_ms(10**6) == 200
    assert NO_RETRY.attempts == 1


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"first_ms": -1}, {"max_ms": -1}, {"factor": -1}])
def test_a_policy_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError):
        RetryPolicy(**bad)
