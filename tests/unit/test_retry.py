"""When a broken attempt is tried again."""

from __future__ import annotations

from streams.protocol import error_chunk
from streams.retry import RetryPolicy, pause_ms

BROKEN = error_chunk("connection_lost", "gone", recoverable=True)


def test_pauses_double_up_to_the_longest_and_then_it_gives_up() -> None:
    policy = RetryPolicy(tries=6)
    pauses = [pause_ms(BROKEN, failures=n, policy=policy, random=lambda: 1.0) for n in range(1, 7)]
    assert pauses == [250, 500, 1000, 2000, 2000, None]


def test_jitter_lies_below_the_nominal_pause_and_never_under_half() -> None:
    assert pause_ms(BROKEN, failures=1, random=lambda: 0.0) == 125
    assert pause_ms(BROKEN, failures=1, random=lambda: 0.999) == 249


def test_three_tries_are_the_default() -> None:
    assert pause_ms(BROKEN, failures=2, random=lambda: 0.0) is not None
    assert pause_ms(BROKEN, failures=3, random=lambda: 0.0) is None


def test_what_can_not_be_mended_is_not_tried_again() -> None:
    assert pause_ms(error_chunk("no", "no", recoverable=False), failures=1, random=lambda: 0.0) is None


def test_a_wait_the_provider_asked_for_is_kept_and_one_too_long_ends_it() -> None:
    asked = error_chunk("rate_limited", "later", recoverable=True, retry_after_ms=7_000)
    waited = pause_ms(asked, failures=1, random=lambda: 0.5)
    assert waited is not None
    assert 7_000 <= waited <= 7_250
    long = error_chunk("rate_limited", "later", recoverable=True, retry_after_ms=600_000)
    assert pause_ms(long, failures=1, random=lambda: 0.5) is None
