"""Statistics against textbook values, brute force and statements of their own definition."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_bench import stats


def test_mean_t_is_the_textbook_interval():
    # 3 seeds: t quantile 4.302653 (tables), sd 0.05, se 0.0288675
    interval = stats.mean_t([0.70, 0.75, 0.80])
    assert interval.estimate == pytest.approx(0.75)
    assert interval.low == pytest.approx(0.75 - 4.302653 * 0.05 / math.sqrt(3), abs=1e-6)
    assert interval.half_width == pytest.approx(0.124207, abs=1e-5)


def test_one_seed_has_no_interval():
    assert stats.mean_t([0.5])[:3] == (0.5, None, None)
    assert stats.ratio_by_seed([2.0], [1.0])[:3] == (pytest.approx(2.0), None, None)
    assert stats.verdict([0.4], margin=0.05) == "not separable"


def test_missing_values_are_refused():
    with pytest.raises(ValueError, match="missing"):
        stats.mean_t([0.1, float("nan")])
    with pytest.raises(ValueError, match="no values"):
        stats.mean_t([])


def test_bootstrap_covers_like_the_normal_interval():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    interval = stats.mean_bootstrap(values)
    half = 1.96 * values.std(ddof=1) / 20
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)
    assert interval == stats.mean_bootstrap(values)


def test_nine_of_thirty_has_the_wide_interval_users_ask_about():
    scores = np.array([1] * 9 + [0] * 21)
    interval = stats.hierarchical(scores)
    assert interval.estimate == pytest.approx(0.3)
    # standard error sqrt(.3 * .7 / 30) = .0837; the percentile bootstrap lies near +-1.96 of it
    assert interval.low == pytest.approx(0.133, abs=0.04)
    assert interval.high == pytest.approx(0.467, abs=0.04)
    assert stats.clopper_pearson(9, 30).low == pytest.approx(0.1473, abs=5e-4)
    assert stats.clopper_pearson(9, 30).high == pytest.approx(0.4940, abs=5e-4)


def test_hierarchical_interval_has_the_analytic_width():
    rng = np.random.default_rng(3)
    rates = rng.beta(2, 2, size=120)
    scores = (rng.random((120, 8)) < rates[:, None]).astype(float)
    interval = stats.hierarchical(scores)
    between = scores.mean(1).var(ddof=1)
    within = (scores.var(1, ddof=0)).mean()
    se = math.sqrt(between / 120 + within / (120 * 8))  # resampling both levels adds the within variance again
    assert interval.half_width == pytest.approx(1.96 * se, rel=0.1)
    assert interval.half_width < stats.hierarchical(scores[:, :1]).half_width


def test_pairing_by_problem_finds_what_an_unpaired_interval_cannot():
    # two arms that differ on 6 of 40 problems, always one way
    a = np.array([1] * 20 + [0] * 20)
    b = a.copy()
    b[:6] = 0
    paired = stats.paired_by_problem(a, b)
    assert paired.estimate == pytest.approx(0.15) and paired.low > 0
    unpaired = math.sqrt(a.var() / 40 + b.var() / 40) * 1.96
    assert paired.estimate - unpaired < 0
    only_a, only_b, p = stats.mcnemar(a, b)
    assert (only_a, only_b, p) == (6, 0, pytest.approx(2 * 0.5**6))


def test_mcnemar_p_is_the_binomial_sum():
    a = [1] * 9 + [0] * 3
    b = [0] * 9 + [1] * 3
    expected = 2 * sum(math.comb(12, i) for i in range(4)) / 2**12
    assert stats.mcnemar(a, b)[2] == pytest.approx(expected)
    assert stats.mcnemar([1, 0], [1, 0])[2] == 1.0


def test_problem_sets_of_different_size_are_refused():
    with pytest.raises(ValueError, match="30 problems against 29"):
        stats.paired_by_problem(np.ones(30), np.ones(29))


def test_clopper_pearson_known_values():
    assert stats.clopper_pearson(0, 3).high == pytest.approx(1 - 0.025 ** (1 / 3))  # 0.7076
    assert stats.clopper_pearson(7, 7).low == pytest.approx(0.025 ** (1 / 7))
    one_of_seven = stats.clopper_pearson(1, 7)
    assert (round(one_of_seven.low, 3), round(one_of_seven.high, 3)) == (0.004, 0.579)
    with pytest.raises(ValueError, match="of 0"):
        stats.clopper_pearson(0, 0)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_fisher_is_the_hypergeometric_tail(num_a, num_b, data):
    a = data.draw(st.integers(0, num_a))
    b = data.draw(st.integers(0, num_b))
    total = a + b
    tail = sum(
        math.comb(num_a, x) * math.comb(num_b, total - x) for x in range(a, num_a + 1) if 0 <= total - x <= num_b
    ) / math.comb(num_a + num_b, total)
    assert stats.fisher_greater(a, num_a, b, num_b) == pytest.approx(tail)


def test_three_of_three_against_none_is_just_significant():
    assert stats.fisher_greater(3, 3, 0, 3) == pytest.approx(0.05)
    assert stats.fisher_greater(2, 3, 0, 3) > 0.05


def test_pass_at_k_is_exact_and_never_resampled():
    assert [stats.pass_at_k(4, 1, 4), stats.pass_at_k(4, 1, 1), stats.pass_at_k(4, 0, 4)] == [1.0, 0.25, 0.0]
    assert stats.pass_at_k(200, 1, 1) == pytest.approx(0.005)
    with pytest.raises(ValueError, match="k <= n"):
        stats.pass_at_k(4, 1, 8)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_subsets(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    hits = sum(any(i < c for i in subset) for subset in subsets)
    assert stats.pass_at_k(n, c, k) == pytest.approx(hits / len(subsets))


def test_four_repeats_with_one_right():
    scores = np.array([[1, 0, 0, 0]])
    assert stats.avg_at_k(scores) == 0.25
    assert stats.mean_pass_at_k(scores, 4) == 1.0


def test_missing_samples_are_refused():
    stats.check_samples({"a": 16, "b": 16}, asked=16)
    with pytest.raises(ValueError, match="problem b: 8 samples, 16 asked"):
        stats.check_samples({"a": 16, "b": 8}, asked=16)


def test_majority_vote_breaks_ties_in_proportion():
    answers = [["7", "7", "3"], ["1", "2", None], [None, None, None]]
    correct = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert stats.maj_at_k(answers, correct) == pytest.approx((1.0 + 0.5 + 0.0) / 3)


def test_shares_separate_the_cut_off_from_the_wrong():
    result = stats.shares(["correct"] * 3 + ["wrong"] * 2 + ["truncated"] * 4 + ["no_answer"])
    assert result == stats.Shares(0.3, 0.4, 0.1, 0.0, 0.5)
    assert stats.shares(["truncated"]).finished is None


def test_ratio_is_paired_and_inverts():
    slow, fast = [2.0, 4.0, 9.0], [1.0, 2.0, 3.0]
    ratio = stats.ratio_by_seed(slow, fast)
    assert ratio.estimate == pytest.approx((2 * 2 * 3) ** (1 / 3))
    inverse = stats.ratio_by_seed(fast, slow)
    assert inverse.low == pytest.approx(1 / ratio.high)
    with pytest.raises(ValueError, match="3 seeds against 2"):
        stats.ratio_by_seed(slow, fast[:2])


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.30, 0.32, 0.28], "better"),
        ([-0.30, -0.32, -0.28], "worse"),
        ([0.001, -0.002, 0.001], "equal within margin"),
        ([0.30, -0.25, 0.10], "not separable"),
        ([0.06, 0.02, 0.04], "not separable"),
    ],
)
def test_verdict_words(differences, word):
    assert stats.verdict(differences, margin=0.05) == word


def test_tost_is_the_90_percent_interval_inside_the_margin():
    for shift in np.linspace(-0.08, 0.08, 17):
        differences = np.array([0.01, -0.01, 0.02, 0.0]) + shift
        interval = stats.mean_t(differences, level=0.90)
        inside = -0.05 < interval.low and interval.high < 0.05
        assert (stats.tost(differences, 0.05) < 0.05) == inside


def test_outcomes():
    rise = np.linspace(0.35, 0.8, 70)
    assert stats.outcome(rise) == "learned"
    assert stats.outcome(np.full(70, 0.35)) == "did not learn"
    collapsed = np.concatenate([np.linspace(0.35, 0.6, 40), np.full(30, 0.1)])
    assert stats.outcome(collapsed) == "collapse"
    late = np.concatenate([np.linspace(0.35, 0.6, 58), np.full(12, 0.1)])
    assert stats.outcome(late) == "did not learn"  # two low windows are not three
    recovered = np.concatenate([np.linspace(0.35, 0.6, 40), np.full(20, 0.1), np.full(10, 0.6)])
    assert stats.outcome(recovered) != "collapse"
    assert stats.outcome([], nan=True) == "NaN"
    with pytest.raises(ValueError, match="too few"):
        stats.outcome(np.ones(19))


def test_windows_end_at_the_horizon():
    assert stats.windows(range(12)).tolist() == [4.0, 9.0]


def test_warm_up_is_not_measured_and_drift_is_seen():
    assert stats.steady([50, 5, 5, 5], warmup=1) == stats.Steady(5.0, 3, 0.0)
    assert abs(stats.steady([50, 20, 5, 5], warmup=1).drift) > 0.1
    with pytest.raises(ValueError, match="fewer than 2"):
        stats.steady([1.0, 2.0], warmup=1)
