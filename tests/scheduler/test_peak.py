from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.scheduler.policies.peak import FOREVER, peak_tokens

#: (held, left, delay)
sequences = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 15), st.integers(0, 10)), max_size=6
)


def simulated_peak(sequences):
    """Grow all sequences in lockstep, each after its delay, and watch the sum."""
    end = max((left + delay for _, left, delay in sequences), default=0)
    sums = [
        sum(h + min(max(t - d, 0), left) for h, left, d in sequences if t <= d + left)
        for t in range(end + 1)
    ]
    return max(sums, default=0)


def peak(sequences):
    held, left, delay = zip(*sequences, strict=True) if sequences else ((), (), ())
    return peak_tokens(held, left, [each + more for each, more in zip(left, delay, strict=True)])


def test_nobody_needs_nothing():
    assert peak_tokens([], [], []) == 0


def test_a_short_one_makes_place_for_a_long_one():
    # After 2 steps the first is gone: 10 + 2 + 5 + 2, then 5 + 10.
    assert peak_tokens([10, 5], [2, 10], [2, 10]) == 19


def test_what_a_router_holds_counts_for_ever():
    assert peak_tokens([10, 4], [0, 20], [FOREVER, 20]) == 34


def test_what_is_taken_back_counts_until_its_own_end():
    # Of 10 tokens 6 last until 8, not until 3; 7 come at moment 5.
    assert peak_tokens([10, -6, 6, 0], [0, 0, 0, 7], [3, 3, 8, 7]) == 13


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(sequences)
def test_the_peak_is_the_largest_sum_at_an_end(drawn):
    ends = [(held, left, left + delay) for held, left, delay in drawn]
    sums = [sum(h + min(rest, t) for h, rest, end in ends if end >= t) for _, _, t in ends]
    assert peak(drawn) == max(sums, default=0)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(sequences)
def test_the_peak_is_that_of_lockstep_growth(drawn):
    decoding = [(held, left, 0) for held, left, _ in drawn]
    assert peak(decoding) == simulated_peak(decoding)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(sequences, st.data())
def test_a_delay_bounds_every_shorter_delay(drawn, data):
    sooner = [(held, left, data.draw(st.integers(0, delay))) for held, left, delay in drawn]
    assert simulated_peak(sooner) <= peak(drawn)
