"""Which source comes next: shares exact at every prefix, whatever ends, changes or is gone on with."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.inspect.audit.reference.reference_mixture import MixtureRule, ReferenceMixture
from orchestrator.planning.mixture import Mixture, whole_weights
from orchestrator.records.cursor import MixtureShare

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
    lambda weights: {"abcdef"[i]: weight for i, weight in enumerate(weights)}
)


def mixture(weights: dict[str, int], by: str = "tokens") -> Mixture:
    return Mixture.at(weights, dict.fromkeys(weights, 1), {}, by)


def drawn(mixed: Mixture, seq_lens: list[int]) -> list[str]:
    found = []
    for seq_len in seq_lens:
        source = mixed.next(seq_len)
        assert source is not None
        mixed.charge(source, seq_len)
        found.append(source)
    return found


def test_decimal_weights_become_the_smallest_whole_numbers_in_exactly_their_ratio() -> None:
    assert whole_weights({"a": Decimal("0.9"), "b": Decimal("0.1")}) == {"a": 9, "b": 1}
    assert whole_weights({"a": Decimal("0.25"), "b": Decimal("1.5"), "c": Decimal(2)}) == {
        "a": 1,
        "b": 6,
        "c": 8,
    }
    assert whole_weights({"a": Decimal("3E+2"), "b": Decimal("1E-3")}) == {"a": 300000, "b": 1}


def test_the_first_samples_of_two_mixtures() -> None:
    assert "".join(drawn(mixture({"a": 1, "b": 1}), [4] * 6)) == "ababab"
    assert "".join(drawn(mixture({"a": 9, "b": 1}), [4] * 20)) == "aaaaaaaaabaaaaaaaaab"
    assert "".join(drawn(mixture({"a": 2, "b": 3, "c": 5}), [1] * 10)) == "cbcacbcabc"


@given(
    weights=WEIGHTS,
    seq_lens=st.lists(st.integers(1, 9), max_size=60),
    by=st.sampled_from(["tokens", "samples"]),
)
def test_each_count_is_within_one_sample_of_its_share_at_every_prefix(
    weights: dict[str, int], seq_lens: list[int], by: str
) -> None:
    mixed, whole = mixture(weights, by), sum(weights.values())
    longest = total = 0
    counts = dict.fromkeys(weights, 0)
    for seq_len in seq_lens:
        units = seq_len if by == "tokens" else 1
        longest, total = max(longest, units), total + units
        (source,) = drawn(mixed, [seq_len])
        counts[source] += units
        for name, weight in weights.items():
            assert abs(counts[name] - Fraction(weight * total, whole)) <= longest
    assert {name: share.count for name, share in mixed.shares.items()} == counts


@given(
    weights=WEIGHTS.filter(lambda w: len(w) > 1),
    samples=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=50),
    by=st.sampled_from(["tokens", "samples"]),
)
def test_it_agrees_with_the_audits_rule_when_sources_end_and_it_is_opened_anew_at_any_place(
    weights: dict[str, int], samples: list[tuple[int, int]], by: str
) -> None:
    """Each source has some positions; (seq_len, which source gets more weight from here on; 0: as before)."""
    limits = dict.fromkeys(weights, 1)
    left = {name: 7 + 5 * i for i, name in enumerate(weights)}
    ours, reference = mixture(weights, by), None
    for seq_len, change in samples:
        if change and change <= len(weights):
            name = list(weights)[change - 1]
            weights = {**weights, name: weights[name] + 3}
        before = ours.shares
        ours = Mixture.at(weights, limits, before, by)
        rule = MixtureRule(
            weights={n: Fraction(w) / 10 for n, w in weights.items()},
            limits=limits,
            stops=False,
            by_samples=by == "samples",
        )
        whole = whole_weights({n: Decimal(w) for n, w in weights.items()})
        if whole != weights:  # the reference takes weights as the configuration has them
            ours = Mixture.at(whole, limits, before, by)
        reference = ReferenceMixture(rule, before)
        while (source := ours.next(seq_len)) is not None and left[source] == 0:
            ours.end(source, 1)
        if source is None:
            assert "gives 0 samples" in str(
                reference.turns(1, seq_len, seq_len, lambda n, k: min(k, left[n]))
            )
            return
        length = min(seq_len, left[source])
        assert reference.turns(1, length, seq_len, lambda n, k: min(k, left[n])) == [(source, length)]
        ours.charge(source, length)
        left[source] -= length
        assert reference.shares == ours.shares


def test_counts_begin_anew_where_weights_or_sources_change_and_go_on_where_they_do_not() -> None:
    weights, limits = {"a": 9, "b": 1}, {"a": 1, "b": 1}
    mixed = mixture(weights)
    drawn(mixed, [1] * 8000)
    same = Mixture.at(weights, limits, mixed.shares)
    assert same.shares == mixed.shares
    other = Mixture.at({"a": 1, "b": 1}, limits, mixed.shares)
    # counts that went on would give b alone for 6,400 samples
    assert "".join(drawn(other, [1] * 6)) == "ababab"
    assert other.shares["a"] == MixtureShare(weight=1, count=3, samples=7203, tokens=7203)
    more = Mixture.at({**weights, "c": 5}, {**limits, "c": 1}, mixed.shares)
    assert [share.count for share in more.shares.values()] == [0, 0, 0]


def test_a_source_that_ended_stays_so_until_its_limit_is_another() -> None:
    weights = {"a": 1, "b": 1}
    mixed = mixture(weights)
    drawn(mixed, [4] * 3)
    mixed.end("a", 1)
    assert mixed.live == ("b",)
    assert drawn(mixed, [4, 4]) == ["b", "b"]
    assert Mixture.at(weights, {"a": 1, "b": 1}, mixed.shares).shares == mixed.shares
    back = Mixture.at(weights, {"a": 2, "b": 2}, mixed.shares)
    assert back.live == ("a", "b")
    assert back.shares["a"] == MixtureShare(weight=1, samples=2, tokens=8)


def test_a_source_that_is_taken_away_keeps_its_totals_and_comes_back_with_them() -> None:
    mixed = mixture({"a": 1, "b": 1})
    drawn(mixed, [4] * 4)
    without = Mixture.at({"b": 1}, {"b": 1}, mixed.shares)
    assert without.shares["a"] == MixtureShare(weight=0, samples=2, tokens=8)
    assert drawn(without, [4]) == ["b"]
    back = Mixture.at({"a": 1, "b": 1}, {"a": 1, "b": 1}, without.shares)
    assert back.shares["a"] == MixtureShare(weight=1, samples=2, tokens=8)


@pytest.mark.parametrize("wrong", [{"a": Decimal(0)}, {"a": Decimal(-1)}])
def test_weights_are_above_zero(wrong: dict[str, Decimal]) -> None:
    with pytest.raises(AssertionError):
        whole_weights(wrong)
