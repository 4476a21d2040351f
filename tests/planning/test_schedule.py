"""Lengths are turned into tokens once, and the learning rate follows consumed tokens alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.loading import parse_config
from orchestrator.errors import ConfigError
from orchestrator.json_form import decode, encode
from orchestrator.planning.schedule import Budgets, Length, Rate, budgets_for, learning_rate
from orchestrator.records.cursor import Cursor
from tests.planning.jobs import job
from tests.raising import raises

STEP = 16 * 256  # positions of one step of `job()`
WSD = ("train.schedule=wsd", "train.decay_steps=60")


def tokens(amount):
    """A length of so many positions, for budgets made by hand."""
    return Length(given=amount, unit="tokens", global_batch_size=1, seq_len=1, tokens=amount)


def test_lengths_in_steps_are_turned_into_tokens_at_the_shape_they_are_first_given_with():
    budgets = budgets_for(job(*WSD), None)
    assert budgets.stop_tokens == budgets.total_tokens == 300 * STEP
    assert budgets.warmup.tokens == 10 * STEP
    assert budgets.decay.tokens == 60 * STEP
    assert (budgets.max_steps.global_batch_size, budgets.max_steps.seq_len) == (16, 256)


@pytest.mark.parametrize(
    "change",
    [["train.global_batch_size=24"], ["pack.seq_len=128"], ["train.global_batch_size=5", "pack.seq_len=300"]],
)
def test_a_change_of_shape_leaves_every_budget_alone(change):
    first = budgets_for(job(*WSD), None)
    assert budgets_for(job(*WSD, *change), first) == first


def test_only_the_number_that_the_user_changes_is_turned_again_at_the_new_shape():
    first = budgets_for(job(*WSD), None)
    later = budgets_for(job(*WSD, "train.global_batch_size=24", "train.max_steps=200"), first)
    assert later.max_steps.tokens == 200 * 24 * 256
    assert (later.warmup, later.decay) == (first.warmup, first.decay)
    # and from then on it is frozen at that shape
    assert budgets_for(job(*WSD, "train.max_steps=200"), later) == later


def test_a_stop_in_samples_counts_samples_and_its_schedule_only_those_to_come():
    in_samples = ("train.max_steps=null", "train.max_samples=1000", "pack.seq_len=128")
    at = Cursor(consumed_samples=400, consumed_tokens=400 * 256)
    budgets = budgets_for(job(*in_samples), None, at)
    assert (budgets.stop_samples, budgets.stop_tokens) == (1000, None)
    assert budgets.total_tokens == 400 * 256 + 600 * 128


IN_SAMPLES = ("train.max_steps=null", "train.max_samples=1000")


def test_a_stop_in_samples_at_another_seq_len_moves_the_schedules_end_to_where_the_samples_end():
    first = budgets_for(job(*IN_SAMPLES), None)
    assert first.total_tokens == 1000 * 256
    at = Cursor(consumed_samples=400, consumed_tokens=400 * 256)
    shorter = job(*IN_SAMPLES, "pack.seq_len=128")
    later = budgets_for(shorter, first, at)
    assert later.total_tokens == 400 * 256 + 600 * 128
    last = learning_rate(shorter.train, later, 400 * 256 + 600 * 128)
    assert last == pytest.approx(shorter.train.lr * shorter.train.min_lr_ratio)
    # from then on it stands, wherever the run is taken up again
    again = Cursor(consumed_samples=700, consumed_tokens=400 * 256 + 300 * 128)
    assert budgets_for(shorter, later, again) == later
    assert budgets_for(job(*IN_SAMPLES, "train.global_batch_size=24"), first, at) == first


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (("train.warmup_steps=301",), ("train.warmup_steps=301", "train.max_steps=300")),
        (
            ("train.warmup_steps=301", "train.schedule=constant"),
            ("train.warmup_steps=301", "train.max_steps=300"),
        ),
        (("train.schedule=wsd", "train.decay_steps=301"), ("train.decay_steps=301", "train.max_steps=300")),
        (("train.max_samples=159",), ("train.warmup_steps=10", "train.max_samples=159")),
        (("train.max_tokens=40959",), ("train.warmup_steps=10", "train.max_tokens=40959")),
    ],
)
def test_a_warmup_or_decay_beyond_the_stop_is_refused_with_both_values(overrides, values):
    with raises(ConfigError, "config.beyond_stop", *values):
        budgets_for(job(*overrides), None)


def test_a_warmup_as_long_as_the_run_and_one_given_at_a_smaller_shape_are_taken():
    assert budgets_for(job("train.warmup_steps=300"), None).warmup.tokens == 300 * STEP
    first = budgets_for(job("train.warmup_steps=100"), None)
    larger = job("train.warmup_steps=100", "train.max_steps=60", "train.global_batch_size=32")
    assert budgets_for(larger, first).stop_tokens == 60 * 2 * STEP


def test_a_run_that_began_with_a_warmup_beyond_its_stop_goes_on_as_it_began():
    long = Length(given=400, unit="steps", global_batch_size=16, seq_len=256, tokens=400 * STEP)
    began = replace(budgets_for(job(), None), warmup=long)
    assert budgets_for(job("train.warmup_steps=400"), began) == began
    with raises(ConfigError, "config.beyond_stop", "train.warmup_steps=400", "train.max_steps=299"):
        budgets_for(job("train.warmup_steps=400", "train.max_steps=299"), began)


def test_the_first_of_several_stops_ends_the_schedule():
    stops = ("train.max_tokens=5000", "train.max_samples=2", "train.warmup_steps=0")
    budgets = budgets_for(job(*stops), None)
    assert (budgets.stop_tokens, budgets.stop_samples, budgets.total_tokens) == (5000, 2, 512)


def test_a_removed_stop_is_gone():
    first = budgets_for(job("train.schedule=constant"), None)
    later = budgets_for(job("train.schedule=constant", "train.max_steps=null"), first)
    assert later.stop_tokens is None
    assert later.warmup == first.warmup


def test_budgets_survive_their_json():
    budgets = budgets_for(job(*WSD), None)
    assert decode(Budgets, encode(budgets)) == budgets
    assert decode(Budgets, encode(Budgets())) == Budgets()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "power"])
def test_a_schedule_that_decays_without_an_end_is_refused(schedule):
    with raises(ConfigError, "config.no_stop", f"train.schedule={schedule}", "max_steps"):
        learning_rate(Rate(lr=1.0, min_lr_ratio=0.1, schedule=schedule), Budgets(decay=tokens(5)), 10)


def test_a_wsd_schedule_without_a_decay_is_refused():
    with raises(ConfigError, "config.missing_key", "train.decay_steps"):
        learning_rate(Rate(lr=1.0, min_lr_ratio=0.1, schedule="wsd"), Budgets(max_tokens=tokens(9)), 1)


BUDGETS = Budgets(max_tokens=tokens(1100), warmup=tokens(100), decay=tokens(200))


@pytest.mark.parametrize(
    ("schedule", "consumed", "expected"),
    [
        ("constant", 50, 1.0),
        ("constant", 100, 2.0),
        ("constant", 5000, 2.0),
        ("cosine", 0, 0.0),
        ("cosine", 25, 0.5),
        ("cosine", 100, 2.0),
        ("cosine", 600, 2.0 * 0.55),
        ("cosine", 1100, 0.2),
        ("cosine", 9999, 0.2),
        ("wsd", 99, 1.98),
        ("wsd", 900, 2.0),
        ("wsd", 1000, 2.0 * 0.55),
        ("wsd", 1100, 0.2),
        ("wsd", 9999, 0.2),
        ("linear", 25, 0.5),
        ("linear", 100, 2.0),
        ("linear", 350, 2.0 * (0.1 + 0.9 * 0.75)),
        ("linear", 1100, 0.2),
        ("linear", 9999, 0.2),
        ("power", 25, 0.5),
        ("power", 100, 2.0),
        ("power", 350, 2.0 * (0.1 + 0.9 * 0.75**3)),
        ("power", 1100, 0.2),
        ("power", 9999, 0.2),
    ],
)
def test_the_learning_rate_at_the_corners_of_each_schedule(schedule, consumed, expected):
    rate = Rate(lr=2.0, min_lr_ratio=0.1, schedule=schedule, decay_power=3.0)
    assert learning_rate(rate, BUDGETS, consumed) == pytest.approx(expected)


def test_a_constant_schedule_needs_no_budget():
    assert learning_rate(Rate(lr=2.0, min_lr_ratio=0.1, schedule="constant"), Budgets(), 10**9) == 2.0


def test_a_decay_longer_than_the_run_begins_after_the_warmup():
    budgets = Budgets(max_tokens=tokens(300), warmup=tokens(100), decay=tokens(1000))
    rate = Rate(lr=2.0, min_lr_ratio=0.0, schedule="wsd")
    assert learning_rate(rate, budgets, 100) == 2.0
    assert learning_rate(rate, budgets, 200) == pytest.approx(1.0)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd", "power"]),
    power=st.floats(0.1, 10),
    warmup=st.integers(0, 500),
    total=st.integers(1, 2000),
    decay=st.integers(1, 2000),
    at=st.integers(0, 3000),
)
def test_the_learning_rate_never_leaves_its_bounds_and_falls_after_the_warmup(
    schedule, power, warmup, total, decay, at
):
    budgets = Budgets(max_tokens=tokens(total), warmup=tokens(warmup), decay=tokens(decay))
    rate = Rate(lr=3.0, min_lr_ratio=0.1, schedule=schedule, decay_power=power)
    here, later = (learning_rate(rate, budgets, consumed) for consumed in (at, at + 1))
    assert 0.0 <= here <= 3.0
    if at >= warmup:
        assert here >= 0.3 - 1e-12
        assert later <= here


def check_no_jump(rate_at):
    """The property: re-starting with another shape does not move the learning rate."""
    first = budgets_for(job(), None)
    consumed = 100 * STEP
    changed = job("train.global_batch_size=24", "pack.seq_len=128")
    assert rate_at(changed, first, consumed) == learning_rate(job().train, first, consumed)


def test_the_learning_rate_does_not_jump_when_the_shape_changes():
    check_no_jump(
        lambda config, old, consumed: learning_rate(config.train, budgets_for(config, old), consumed)
    )


def test_a_schedule_over_step_labels_is_caught():
    def over_labels(config, old, consumed):
        return learning_rate(config.train, budgets_for(config, None), consumed)

    with pytest.raises(AssertionError):
        check_no_jump(over_labels)


def test_a_warmup_and_a_decay_that_do_not_fit_before_the_stop_together_are_refused_with_all_three_values():
    wsd = ("train.schedule=wsd", "train.warmup_steps=200")
    values = ("train.warmup_steps=200", "train.decay_steps=101", "train.max_steps=300")
    with raises(ConfigError, "config.beyond_stop", *values):
        budgets_for(job(*wsd, "train.decay_steps=101"), None)
    fits = budgets_for(job(*wsd, "train.decay_steps=100"), None)
    assert fits.warmup.tokens + fits.decay.tokens == fits.total_tokens
    # a run that began so before goes on as it began
    began = replace(fits, decay=replace(fits.decay, given=101, tokens=101 * STEP))
    assert budgets_for(job(*wsd, "train.decay_steps=101"), began) == began


POINTS = ((100, 0.0), (300, 1.0), (500, 1.0), (500, 0.25), (900, 0.5))


@pytest.mark.parametrize(
    ("consumed", "factor"),
    [
        *((0, 0.0), (100, 0.0), (150, 0.25), (300, 1.0), (400, 1.0)),
        *((500, 1.0), (501, 0.25 + 0.25 / 400), (700, 0.375), (900, 0.5), (10**9, 0.5)),
    ],
)
def test_points_give_straight_lines_and_a_jump_begins_after_the_step_that_ends_there(consumed, factor):
    rate = Rate(lr=2.0, min_lr_ratio=0.1, schedule=POINTS)
    assert learning_rate(rate, Budgets(), consumed) == pytest.approx(2.0 * factor)


def test_points_of_a_configuration_need_no_stop_and_give_the_same_rate_after_its_json():
    stopless = job("train.max_steps=null", "train.warmup_steps=0", "train.schedule=[[0, 1], [4096, .5]]")
    again = parse_config(stopless.to_json())
    assert again == stopless
    flat = stopless.flat()
    stored = Rate(lr=flat["train.lr"], min_lr_ratio=0.1, schedule=flat["train.schedule"])
    budgets = budgets_for(stopless, None)
    for consumed in (1, 2048, 4096, 5000):
        expected = 1e-3 * (1 - min(consumed, 4096) / 8192)
        assert learning_rate(stopless.train, budgets, consumed) == pytest.approx(expected)
        assert learning_rate(stored, budgets, consumed) == learning_rate(stopless.train, budgets, consumed)


def started(overrides, before=None, old=()):
    """The budgets of a start that continues what the job with the overrides `old` has trained."""
    return budgets_for(job(*overrides), before, Cursor(), None if before is None else job(*old).flat())


DOUBLED = ("train.global_batch_size=32",)


@pytest.mark.parametrize(("rule", "factor"), [("keep", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_a_changed_batch_scales_the_rate_by_its_rule(rule, factor):
    first = started(())
    scaled = started((*DOUBLED, f"train.lr_on_batch_change={rule}"), first)
    assert scaled.lr_factor == factor
    assert learning_rate(job().train, scaled, 100 * STEP) == pytest.approx(
        factor * learning_rate(job().train, first, 100 * STEP)
    )
    assert decode(Budgets, encode(scaled)) == scaled


def test_the_batch_is_counted_in_tokens():
    as_many = ("train.global_batch_size=32", "pack.seq_len=128", "train.lr_on_batch_change=linear")
    assert started(as_many, started(())).lr_factor == 1.0
    longer = ("pack.seq_len=1024", "train.lr_on_batch_change=sqrt")
    assert started(longer, started(())).lr_factor == 2.0


def test_a_resume_without_a_change_keeps_the_factor_and_a_batch_that_returns_gives_the_old_rate_back():
    rules = ("train.lr_on_batch_change=sqrt",)
    odd = ("train.global_batch_size=7", *rules)
    scaled = started(odd, started(rules), rules)
    assert scaled.lr_factor == pytest.approx((7 / 16) ** 0.5)
    assert started(odd, scaled, odd) == scaled
    assert started(rules, scaled, odd) == started(rules)


def test_a_factor_remains_under_keep_and_ends_with_a_rate_that_the_user_changes():
    linear = (*DOUBLED, "train.lr_on_batch_change=linear")
    scaled = started(linear, started(()))
    larger = ("train.global_batch_size=64",)
    assert started(larger, scaled, linear).lr_factor == 2.0
    fresh = started(("train.global_batch_size=64", "train.lr=0.005", *linear[1:]), scaled, linear)
    assert fresh.lr_factor == 1.0


def test_a_factor_alone_does_not_check_the_lengths_of_a_run_that_began_otherwise():
    long = Length(given=400, unit="steps", global_batch_size=16, seq_len=256, tokens=400 * STEP)
    began = replace(budgets_for(job(), None), warmup=long)
    linear = ("train.warmup_steps=400", *DOUBLED, "train.lr_on_batch_change=linear")
    scaled = started(linear, began, ("train.warmup_steps=400",))
    assert (scaled.warmup, scaled.lr_factor) == (long, 2.0)
