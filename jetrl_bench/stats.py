"""Statistics of the suite: intervals over seeds and over problems, paired tests, rates, outcomes and verdict words.

Pure functions of numpy arrays. Random resampling draws from a fixed seed, so equal data give equal digits.

Shapes
    S   seeds (runs of one method)
    P   problems
    K   samples per problem
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats as sp

RESAMPLES = 4000
WINDOW = 5  # rollout steps
FINAL_WINDOWS = 3
LEARNED_MARGIN = 0.05  # reward

Verdict = Literal["better", "worse", "equal within margin", "not separable"]
Outcome = Literal["learned", "did not learn", "collapse", "NaN"]


class Interval(NamedTuple):
    """An estimate with its interval; low and high are None where one value has no spread."""

    estimate: float
    low: float | None
    high: float | None
    n: int
    level: float = 0.95

    @property
    def half_width(self) -> float | None:
        return None if self.low is None else (self.high - self.low) / 2


def mean_t(values_S: Sequence[float], level: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval; one seed has no interval."""
    values_S = _finite(values_S)
    n = len(values_S)
    mean = float(values_S.mean())
    if n < 2:
        return Interval(mean, None, None, n, level)
    half = float(sp.t.ppf(0.5 + level / 2, n - 1) * values_S.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n, level)


def mean_bootstrap(values_S: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """Mean with a percentile bootstrap interval (no normality; too narrow below about 8 seeds)."""
    values_S = _finite(values_S)
    n = len(values_S)
    mean = float(values_S.mean())
    if n < 2:
        return Interval(mean, None, None, n, level)
    draws_RS = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    return Interval(mean, *_percentiles(values_S[draws_RS].mean(1), level), n, level)


def hierarchical(scores_PK: np.ndarray, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean score with a two-level bootstrap: problems are drawn, then samples within each drawn problem.

    With one sample per problem this is the plain bootstrap over problems.
    """
    scores_PK = _scores(scores_PK)
    num_problems, k = scores_PK.shape
    rng = np.random.default_rng(seed)
    means_R = np.empty(RESAMPLES)
    if k == 1:
        counts = np.bincount(_levels(scores_PK[:, 0])[1])
        values = _levels(scores_PK[:, 0])[0]
        means_R[:] = rng.multinomial(num_problems, counts / num_problems, size=RESAMPLES) @ values / num_problems
    else:
        for r in range(RESAMPLES):
            problems = rng.integers(num_problems, size=num_problems)
            samples = rng.integers(k, size=(num_problems, k))
            means_R[r] = scores_PK[problems[:, None], samples].mean()
    return Interval(float(scores_PK.mean()), *_percentiles(means_R, level), num_problems, level)


def paired_by_problem(a_PK: np.ndarray, b_PK: np.ndarray, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean of a - b over the same problems, bootstrap over problems (an unpaired test would throw the pairing away)."""
    a_PK, b_PK = _scores(a_PK), _scores(b_PK)
    if a_PK.shape[0] != b_PK.shape[0]:
        raise ValueError(f"paired by problem: {a_PK.shape[0]} problems against {b_PK.shape[0]}")
    difference_P = a_PK.mean(1) - b_PK.mean(1)
    values, index_P = _levels(difference_P)
    n = len(difference_P)
    draws = np.random.default_rng(seed).multinomial(n, np.bincount(index_P) / n, size=RESAMPLES)
    return Interval(float(difference_P.mean()), *_percentiles(draws @ values / n, level), n, level)


def paired_by_seed(a_S: Sequence[float], b_S: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of a - b over paired seeds, t interval."""
    a_S, b_S = _paired(a_S, b_S)
    return mean_t(a_S - b_S, level)


def ratio_by_seed(a_S: Sequence[float], b_S: Sequence[float], level: float = 0.95) -> Interval:
    """Geometric mean of a / b over paired seeds, t interval of the log ratio; values must be positive."""
    a_S, b_S = _paired(a_S, b_S)
    if (a_S <= 0).any() or (b_S <= 0).any():
        raise ValueError("a ratio needs positive values on both sides")
    log = mean_t(np.log(a_S) - np.log(b_S), level)
    ends = [None if end is None else math.exp(end) for end in (log.low, log.high)]
    return Interval(math.exp(log.estimate), *ends, log.n, level)


def mcnemar(a_P: Sequence[bool], b_P: Sequence[bool]) -> tuple[int, int, float]:
    """(problems only a solves, problems only b solves, exact two-sided p) for one sample per problem."""
    a_P, b_P = np.asarray(a_P, bool), np.asarray(b_P, bool)
    if a_P.shape != b_P.shape:
        raise ValueError(f"paired by problem: {len(a_P)} problems against {len(b_P)}")
    only_a, only_b = int((a_P & ~b_P).sum()), int((~a_P & b_P).sum())
    n = only_a + only_b
    return only_a, only_b, 1.0 if n == 0 else float(sp.binomtest(only_a, n, 0.5).pvalue)


def fisher_greater(a: int, num_a: int, b: int, num_b: int) -> float:
    """One-sided exact p that the rate a / num_a is not above b / num_b."""
    return float(sp.fisher_exact([[a, num_a - a], [b, num_b - b]], alternative="greater").pvalue)


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Interval:
    """A rate with its exact interval: 0 of 3 still allows 71 %."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"a rate needs 0 <= successes <= n and n > 0, not {successes} of {n}")
    tail = (1 - level) / 2
    low = 0.0 if successes == 0 else float(sp.beta.ppf(tail, successes, n - successes + 1))
    high = 1.0 if successes == n else float(sp.beta.ppf(1 - tail, successes + 1, n - successes))
    return Interval(successes / n, low, high, n, level)


def tost(differences_S: Sequence[float], margin: float) -> float:
    """p of two one-sided t tests: small means |mean difference| < margin. Needs two seeds."""
    differences_S = _finite(differences_S)
    n = len(differences_S)
    if margin <= 0:
        raise ValueError(f"margin must be above 0, not {margin}")
    if n < 2:
        return 1.0
    mean, se = float(differences_S.mean()), float(differences_S.std(ddof=1)) / math.sqrt(n)
    if se == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return float(max(sp.t.sf((mean + margin) / se, n - 1), sp.t.cdf((mean - margin) / se, n - 1)))


def verdict(differences_S: Sequence[float], margin: float, alpha: float = 0.05) -> Verdict:
    """Words for a - b by seed: equivalence first, then the sign of the t interval, else not separable."""
    if tost(differences_S, margin) <= alpha:
        return "equal within margin"
    interval = mean_t(differences_S, 1 - alpha)
    if interval.low is not None and interval.low > 0:
        return "better"
    if interval.high is not None and interval.high < 0:
        return "worse"
    return "not separable"


# Scores of samples


def check_samples(samples_per_problem: dict[Hashable, int], asked: int) -> None:
    """Refuse missing and surplus samples: dividing by what was asked halves a score, dividing by less inflates it."""
    for problem, count in samples_per_problem.items():
        if count != asked:
            raise ValueError(f"problem {problem}: {count} samples, {asked} asked")


def avg_at_k(scores_PK: np.ndarray) -> float:
    """Mean over problems of the mean over samples."""
    return float(_scores(scores_PK).mean())


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c correct (arXiv 2107.03374)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n} c={c} k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_pass_at_k(scores_PK: np.ndarray, k: int) -> float:
    """Mean over problems of the unbiased estimate: an average of probabilities, not of yes and no."""
    scores_PK = _scores(scores_PK)
    return float(np.mean([pass_at_k(scores_PK.shape[1], int(c), k) for c in scores_PK.sum(1)]))


def maj_at_k(answers_PK: Sequence[Sequence[Hashable | None]], correct_PK: np.ndarray) -> float:
    """Majority vote per problem; answers are equivalence classes, None does not vote, ties count in proportion."""
    correct_PK = _scores(correct_PK)
    total = 0.0
    for answers, correct in zip(answers_PK, correct_PK, strict=True):
        votes: dict[Hashable, list[float]] = {}
        for answer, right in zip(answers, correct, strict=True):
            if answer is not None:
                votes.setdefault(answer, []).append(right)
        most = max((len(v) for v in votes.values()), default=0)
        leaders = [np.mean(v) for v in votes.values() if len(v) == most]
        total += float(np.mean(leaders)) if leaders else 0.0
    return total / len(correct_PK)


class Shares(NamedTuple):
    """What became of the answers. `finished` is the score over answers that were not cut off (None: all were)."""

    correct: float
    truncated: float
    no_answer: float
    failed: float
    finished: float | None


def shares(statuses: Sequence[str]) -> Shares:
    n = len(statuses)
    if n == 0:
        raise ValueError("no answers")
    count = {s: sum(x == s for x in statuses) for s in ("correct", "truncated", "no_answer", "timeout", "error")}
    finished = n - count["truncated"]
    return Shares(
        correct=count["correct"] / n,
        truncated=count["truncated"] / n,
        no_answer=count["no_answer"] / n,
        failed=(count["timeout"] + count["error"]) / n,
        finished=count["correct"] / finished if finished else None,
    )


# Runs


def windows(rewards_N: Sequence[float]) -> np.ndarray:
    """Mean reward of consecutive windows of 5 rollout steps that end at the horizon (a remainder is left out)."""
    rewards_N = _finite(rewards_N)
    num = len(rewards_N) // WINDOW
    return rewards_N[len(rewards_N) - num * WINDOW :].reshape(num, WINDOW).mean(1)


def outcome(rewards_N: Sequence[float], nan: bool = False) -> Outcome:
    """What became of a run that was trained to its fixed horizon.

    collapse: each of the last 3 windows of 5 rollout steps lies below half of the run's own best window.
    did not learn: no collapse, and the last 3 windows are not 0.05 above the first window.
    """
    if nan:
        return "NaN"
    means = windows(rewards_N)
    if len(means) <= FINAL_WINDOWS:
        raise ValueError(
            f"{len(rewards_N)} rollout steps are too few to tell an outcome; {WINDOW * (FINAL_WINDOWS + 1)} are needed"
        )
    if (means[-FINAL_WINDOWS:] < means.max() / 2).all():
        return "collapse"
    if means[-FINAL_WINDOWS:].mean() < means[0] + LEARNED_MARGIN:
        return "did not learn"
    return "learned"


class Steady(NamedTuple):
    mean: float
    counted: int
    drift: float
    """Second half's mean over the first half's, minus 1, of the counted steps: above 0.1 in size, warm up longer."""


def steady(seconds_N: Sequence[float], warmup: int) -> Steady:
    """Mean time of a step without the first `warmup` steps (compilation, caches)."""
    seconds_N = _finite(seconds_N)
    kept = seconds_N[warmup:]
    if len(kept) < 2:
        raise ValueError(f"{len(seconds_N)} steps with {warmup} of warm-up leave fewer than 2 to measure")
    half = len(kept) // 2
    return Steady(float(kept.mean()), len(kept), float(kept[-half:].mean() / kept[:half].mean() - 1))


def _finite(values) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no values")
    if not np.isfinite(array).all():
        raise ValueError("a value is missing, infinite or not a number")
    return array


def _scores(scores_PK) -> np.ndarray:
    array = _finite(scores_PK)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise ValueError(f"scores must be [problems, samples], not {array.shape}")
    return array


def _paired(a_S, b_S) -> tuple[np.ndarray, np.ndarray]:
    a_S, b_S = _finite(a_S), _finite(b_S)
    if a_S.shape != b_S.shape:
        raise ValueError(f"paired by seed: {len(a_S)} seeds against {len(b_S)}")
    return a_S, b_S


def _levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values and each entry's index: resampling counts of few values is far cheaper than of all entries."""
    return np.unique(values, return_inverse=True)


def _percentiles(draws_R: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(draws_R, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
