"""The loss against hand-computed values, an independent per-sequence reference in plain Python, and public reports."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_bench import diagnostics
from jetrl_bench.config import LossConfig
from jetrl_bench.loss import (
    LossBatch,
    Totals,
    advantages,
    formula,
    group_spread,
    kl_k1,
    kl_k2,
    kl_k3,
    policy_loss,
    reject,
    totals_of,
)

CONFIGS = [
    LossConfig(anchor=anchor, correction=correction, level=level, surrogate=surrogate, normalizer=normalizer, cap=1.5)
    for anchor, (correction, level), surrogate, normalizer in itertools.product(
        ["proximal", "rollout"],
        [
            ("none", "token"),
            ("truncate", "token"),
            ("truncate", "sequence"),
            ("mask", "token"),
            ("mask", "sequence"),
            ("mask", "geometric"),
        ],
        ["reinforce", "ppo", "dual_clip", "cispo", "gspo"],
        ["token", "sequence", "batch", "constant"],
    )
]


def one(logprobs, rollout=None, proximal=None, adv=None, lengths=None, mask=None) -> tuple[torch.Tensor, LossBatch]:
    """A batch from lists; one sequence unless `lengths` says otherwise."""
    current = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    n = len(logprobs)
    lengths = lengths or [n]
    tensor = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return current, LossBatch(
        rollout_logprobs_T=tensor(rollout or logprobs),
        proximal_logprobs_T=None if proximal is None else tensor(proximal),
        advantages_T=tensor(adv or [1.0] * n),
        loss_mask_T=torch.tensor(mask or [True] * n),
        sequence_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
    )


def reference(current, rollout, proximal, adv, config: LossConfig, max_tokens: int) -> tuple[float, list[list[float]]]:
    """Loss and d loss / d current by hand: lists of sequences, plain floats."""
    clip = lambda x, low, high: min(max(x, low), high)  # noqa: E731
    low, high = 1 - config.clip_low, 1 + config.clip_high
    keep, factor = [], []
    for mu, prox in zip(rollout, proximal, strict=True):
        d = [p - m for p, m in zip(prox, mu, strict=True)]
        level = {
            "token": d,
            "sequence": [sum(d)] * len(d),
            "geometric": [sum(d) / len(d)] * len(d),
        }[config.level]
        w = [math.exp(x) for x in level]
        masked = config.correction == "mask"
        keep.append([config.mask_low <= x <= config.mask_high if masked else True for x in w])
        factor.append([min(x, config.cap) if config.correction == "truncate" else 1.0 for x in w])
    valid = sum(map(sum, keep))
    sequences = sum(any(k) for k in keep)
    loss, gradient = 0.0, []
    for cur, mu, prox, a, k, f in zip(current, rollout, proximal, adv, keep, factor, strict=True):
        anchor = prox if config.anchor == "proximal" else mu
        n = sum(k)
        logs = [c - x for c, x in zip(cur, anchor, strict=True)]
        mean = sum(x for x, ok in zip(logs, k, strict=True) if ok) / max(n, 1)
        values, slopes, ratio_slopes = [], [0.0] * len(cur), []
        for t in range(len(cur)):
            r = math.exp(mean if config.surrogate == "gspo" else logs[t])
            if config.surrogate in ("reinforce", "cispo"):
                weight = min(r, config.cap) if config.surrogate == "reinforce" else clip(r, low, high)
                values.append(weight * a[t] * cur[t])
                slopes[t] += weight * a[t] * f[t] * k[t]
                ratio_slopes.append(0.0)
                continue
            free, cut = r * a[t], clip(r, low, high) * a[t]
            value, slope = min(free, cut), a[t] * r if free <= cut else 0.0
            if config.surrogate == "dual_clip" and a[t] < 0 and value < config.dual_clip * a[t]:
                value, slope = config.dual_clip * a[t], 0.0
            values.append(value)
            ratio_slopes.append(slope * f[t] * k[t])
        for t in range(len(cur)):
            if config.surrogate == "gspo":
                slopes[t] += sum(ratio_slopes) * k[t] / max(n, 1)
            else:
                slopes[t] += ratio_slopes[t]
        scale = {
            "token": 1 / max(valid, 1),
            "sequence": 1 / (max(n, 1) * max(sequences, 1)),
            "batch": 1 / max(sequences, 1),
            "constant": 1 / (max(sequences, 1) * max_tokens),
        }[config.normalizer]
        loss -= scale * sum(v * g * ok for v, g, ok in zip(values, f, k, strict=True))
        gradient.append([-scale * s for s in slopes])
    return loss, gradient


def random_sequences(seed: int, lengths: list[int]):
    g = torch.Generator().manual_seed(seed)
    draw = lambda scale: [(-torch.rand(n, generator=g) * scale).tolist() for n in lengths]  # noqa: E731
    rollout = draw(3.0)
    near = lambda base, s: [  # noqa: E731
        [x + s * (torch.rand(1, generator=g).item() - 0.5) for x in row] for row in base
    ]
    proximal = near(rollout, 1.5)
    current = near(proximal, 0.8)
    adv = [[torch.randn(1, generator=g).item()] * n for n in lengths]
    return current, rollout, proximal, adv


def run(sequences, order, cuts, config, max_tokens=16):
    """Loss and gradient per sequence of an optimizer step cut into micro-batches of whole sequences."""
    current, rollout, proximal, adv = sequences
    batches = []
    for cut in cuts:
        ids = [order[i] for i in cut]
        flat = lambda rows, ids=ids: [x for i in ids for x in rows[i]]  # noqa: E731
        cur, batch = one(flat(current), flat(rollout), flat(proximal), flat(adv), [len(current[i]) for i in ids])
        batches.append((ids, cur, reject(batch, config)))
    totals = sum((totals_of(b, max_tokens) for _, _, b in batches), Totals(0, 0, max_tokens))
    loss, gradient = 0.0, {}
    for ids, cur, batch in batches:
        part, _ = policy_loss(cur, batch, config=config, totals=totals)
        part.backward()
        loss += part.item()
        for i, g in zip(ids, cur.grad.split([len(current[i]) for i in ids]), strict=True):
            gradient[i] = g
    return loss, torch.cat([gradient[i] for i in range(len(current))])


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.anchor}-{c.correction}-{c.level}-{c.surrogate}-{c.normalizer}"
)
def test_equals_the_reference_in_plain_python(config):
    sequences = random_sequences(3, [1, 5, 9])
    loss, gradient = run(sequences, [0, 1, 2], [[0, 1, 2]], config)
    expected, slopes = reference(*sequences, config, 16)
    assert loss == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, torch.tensor([x for row in slopes for x in row], dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_independent_of_cuts_and_order(data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=6))
    config = data.draw(st.sampled_from(CONFIGS))
    sequences = random_sequences(data.draw(st.integers(0, 99)), lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    edges = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1))))
    cuts = [list(range(a, b)) for a, b in itertools.pairwise([0, *edges, len(lengths)])]
    whole = run(sequences, list(range(len(lengths))), [list(range(len(lengths)))], config)
    parts = run(sequences, order, cuts, config)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-10, atol=1e-13)


def test_token_mean_over_micro_batches():
    """Lengths 1 and 9, losses 1 and 0: 0.1, not 0.5."""
    config = LossConfig(anchor="proximal", surrogate="ppo", normalizer="token", advantage="center")
    sequences = ([[0.0], [0.0] * 9], [[0.0], [0.0] * 9], [[0.0], [0.0] * 9], [[-1.0], [0.0] * 9])
    assert run(sequences, [0, 1], [[0], [1]], config)[0] == pytest.approx(0.1)
    assert run(sequences, [0, 1], [[0, 1]], config)[0] == pytest.approx(0.1)


def test_mask_and_denominator_move_together():
    """Ratios 1, .9, 3, .1, kept inside [.5, 2], A = 1: 0.95, not 0.475."""
    ratios = [1.0, 0.9, 3.0, 0.1]
    config = LossConfig(
        anchor="rollout", correction="mask", surrogate="ppo", normalizer="token", clip_low=0.9, clip_high=9
    )
    proximal = [math.log(r) for r in ratios]
    current, batch = one(proximal, rollout=[0.0] * 4, proximal=proximal)
    kept = reject(batch, config)
    assert kept.loss_mask_T.tolist() == [True, True, False, False]
    loss, metrics = policy_loss(current, kept, config=config, totals=totals_of(kept, 4))
    assert -loss.item() == pytest.approx(0.95)
    loss.backward()
    assert current.grad[2:].tolist() == [0.0, 0.0] and (current.grad[:2] != 0).all()
    assert metrics["weight_sum"] == pytest.approx(1.9)


def test_raw_weights_are_recorded_not_the_truncated_ones():
    """Four weights with mean 1.25 and cap 2: the recorded mean is 1.25."""
    proximal = [math.log(r) for r in [1.0, 0.9, 3.0, 0.1]]
    config = LossConfig(correction="truncate", cap=2.0)
    current, batch = one(proximal, rollout=[0.0] * 4, proximal=proximal)
    _, metrics = policy_loss(current, batch, config=config, totals=totals_of(batch, 4))
    assert metrics["weight_sum"] / 4 == pytest.approx(1.25) and metrics["truncated"] == 1


def test_bare_loss_never_reads_the_rollout():
    """anchor proximal, correction none: any rollout log-probabilities give the same loss and gradient."""
    config = LossConfig(anchor="proximal", correction="none")
    outcomes = []
    for rollout in ([-1.0, -2.0], [-9.0, -0.1]):
        current, batch = one([-1.1, -2.2], rollout=rollout, proximal=[-1.0, -2.0], adv=[1.0, -1.0])
        loss, _ = policy_loss(current, batch, config=config, totals=totals_of(batch, 4))
        loss.backward()
        outcomes.append((loss.item(), current.grad.tolist()))
    assert outcomes[0] == outcomes[1]


def test_first_pass_stands_in_for_the_proximal_one():
    for config in CONFIGS:
        if config.correction == "mask":
            continue
        logs, mu = [-0.5, -1.5, -0.2], [-0.7, -1.0, -0.2]
        current, batch = one(logs, rollout=mu, proximal=logs, adv=[1.0, 1.0, 1.0])
        explicit, _ = policy_loss(current, batch, config=config, totals=totals_of(batch, 4))
        implicit, _ = policy_loss(
            current, replace(batch, proximal_logprobs_T=None), config=config, totals=totals_of(batch, 4)
        )
        assert explicit.item() == implicit.item()


@pytest.mark.parametrize("config", CONFIGS[::4], ids=lambda c: f"{c.anchor}-{c.correction}-{c.level}-{c.surrogate}")
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_extreme_gaps_are_finite_in_value_and_gradient(config, gap):
    for dtype in (torch.float32, torch.bfloat16):
        current = torch.tensor([gap / 2, -1.0], dtype=dtype, requires_grad=True)
        zero = torch.zeros(2, dtype=dtype)
        batch = LossBatch(
            zero - gap / 2, torch.tensor([-1.0, 1.0], dtype=dtype), torch.ones(2, dtype=torch.bool),
            torch.tensor([0, 1]), 2, zero,
        )  # fmt: skip
        loss, _ = policy_loss(current, batch, config=config, totals=Totals(2, 2, 4))
        loss.backward()
        assert loss.isfinite() and current.grad.isfinite().all()


def test_ppo_on_rollout_ratios_is_unbounded_and_dual_clip_is_not():
    log_ratio = 11.0
    losses = {}
    for surrogate in ("ppo", "dual_clip"):
        current, batch = one([0.0], rollout=[-log_ratio], adv=[-1.0])
        config = LossConfig(anchor="rollout", surrogate=surrogate)
        loss, metrics = policy_loss(current, batch, config=config, totals=totals_of(batch, 4))
        losses[surrogate] = loss.item()
    assert losses["ppo"] == pytest.approx(math.exp(11)) and losses["dual_clip"] == pytest.approx(3.0)
    assert metrics["clipped"] == 1


def test_end_token_keeps_its_gradient():
    """Masks come from lengths: the last response token is trained although its id may be the padding id."""
    current, batch = one([-1.0, -1.0, -1.0])
    loss, _ = policy_loss(current, batch, config=LossConfig(), totals=totals_of(batch, 4))
    loss.backward()
    assert (current.grad != 0).all()


def test_everything_rejected_is_a_zero_loss():
    config = LossConfig(correction="mask", level="sequence", normalizer="sequence")
    current, batch = one([-1.0, -1.0], rollout=[-3.0, -3.0], proximal=[-1.0, -1.0])
    kept = reject(batch, config)
    loss, _ = policy_loss(current, kept, config=config, totals=totals_of(kept, 4))
    loss.backward()
    assert loss.item() == 0 and current.grad.tolist() == [0, 0]


# Advantages


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0])
    groups = torch.tensor([7, 7, 7, 7, 3])
    assert advantages(rewards, groups, "center").tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]
    std = math.sqrt(1 / 3)
    assert advantages(rewards, groups, "center_scale").tolist() == pytest.approx(
        [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std, 0]
    )
    assert advantages(rewards, groups, "leave_one_out").tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0])


@pytest.mark.parametrize("mode", ["center", "center_scale", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.95] * 8, [0.1], [1 / 3] * 7], ids=str)
def test_zero_spread_is_exactly_zero(mode, rewards):
    values = torch.tensor(rewards)
    assert advantages(values, torch.zeros(len(rewards), dtype=torch.int64), mode).tolist() == [0.0] * len(rewards)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12), st.randoms())
def test_groups_are_found_by_id_not_stride(rows, random):
    """Partial groups in any order give each row the advantage of its own group."""
    shuffled = list(enumerate(rows))
    random.shuffle(shuffled)
    for mode in ("center", "center_scale", "leave_one_out"):

        def at(pairs, mode=mode):
            return advantages(torch.tensor([r for _, r in pairs]), torch.tensor([g for g, _ in pairs]), mode)

        straight, mixed = at(rows), at([row for _, row in shuffled])
        for position, (index, (group, _)) in enumerate(shuffled):
            assert mixed[position].item() == pytest.approx(straight[index].item(), abs=1e-6)
            alone = [r for r in rows if r[0] == group]
            place = [i for i, r in enumerate(rows) if r[0] == group].index(index)
            assert straight[index].item() == pytest.approx(at(alone)[place].item(), abs=1e-6)


def test_group_spread():
    spread, flat = group_spread(torch.tensor([1.0, 0.0, 0.3, 0.3]), torch.tensor([5, 5, 2, 2]))
    assert spread.tolist() == pytest.approx([0.0, math.sqrt(0.5)]) and flat.tolist() == [True, False]


# KL estimators and diagnostics


def test_estimators_agree_with_the_exact_kl():
    mu, pi = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.45, 0.25, 0.3])
    exact = float((mu * (mu / pi).log()).sum())
    draws = torch.multinomial(mu, 100_000, replacement=True, generator=torch.Generator().manual_seed(1))
    log_mu, log_pi = mu.log()[draws], pi.log()[draws]
    assert float(kl_k1(log_mu, log_pi).mean()) == pytest.approx(exact, abs=0.004)
    assert float(kl_k3(log_mu, log_pi).mean()) == pytest.approx(exact, abs=0.001)
    assert float(kl_k2(log_mu, log_pi).mean()) == pytest.approx(exact, rel=0.15)
    assert float(diagnostics.exact_kl(mu.log(), pi.log())) == pytest.approx(exact, rel=1e-5)


def test_estimators_are_finite_at_a_gap_of_200():
    for gap, dtype in itertools.product([200.0, -200.0], [torch.float32, torch.bfloat16]):
        policy = torch.tensor([gap], dtype=dtype, requires_grad=True)
        value = kl_k3(torch.zeros(1, dtype=dtype), policy)
        value.backward()
        assert value.isfinite().all() and policy.grad.isfinite().all()
    assert kl_k3(torch.tensor(-1.0), torch.tensor(-1.0)).item() == 0


def test_sequence_weight_grows_with_length_and_token_weight_does_not():
    """Per-token gaps of +0.01 over 1, 100 and 1000 tokens."""
    for n in (1, 100, 1000):
        gap = torch.full((n,), 0.01)
        log_sequence = diagnostics.sequence_sums(gap, torch.zeros(n, dtype=torch.int64), 1)
        assert log_sequence.item() == pytest.approx(0.01 * n, rel=1e-4)
    config = LossConfig(correction="truncate", level="sequence", cap=2.0)
    current, batch = one([0.0] * 1000, rollout=[-0.01] * 1000, proximal=[0.0] * 1000)
    loss, metrics = policy_loss(current, batch, config=config, totals=totals_of(batch, 1000))
    assert -loss.item() == pytest.approx(2.0) and metrics["truncated"] == 1000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20), st.one_of(st.none(), st.floats(0.5, 8)))
def test_ess_equals_its_definition(logs, cap):
    weights = [min(math.exp(x), cap) if cap else math.exp(x) for x in logs]
    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert diagnostics.ess(torch.tensor(logs, dtype=torch.float64), cap) == pytest.approx(expected, rel=1e-9)


def test_ess_of_enormous_weights_is_finite():
    assert diagnostics.ess(torch.tensor([900.0, 900.0, -900.0, -900.0])) == pytest.approx(0.5)


def test_mismatch_by_hand():
    rollout = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    row = diagnostics.mismatch(rollout, torch.tensor([-1.0, -1.0, -0.5, -3.1]), None)
    assert row.max_abs == 1.0 and row.nonzero == 0.5 and row.outside == 0.25 and row.kl is None
    assert row.mean_abs == pytest.approx(1.1 / 4) and row.k1 == pytest.approx((-1.0 + 0.1) / 4, abs=1e-6)
    same = diagnostics.mismatch(rollout, rollout, torch.zeros(4))
    assert (same.mean_abs, same.p99_abs, same.max_abs, same.kl, same.k3, same.nonzero) == (0, 0, 0, 0, 0, 0)


def test_exact_kl_of_equal_inputs_is_zero_and_ignores_impossible_tokens():
    log_mu = torch.log_softmax(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), -1)
    assert (diagnostics.exact_kl(log_mu, log_mu) == 0).all()
    log_mu[0, 0] = -torch.inf
    assert diagnostics.exact_kl(log_mu, log_mu.clamp(min=-50)).isfinite().all()


def test_lag_metrics_by_hand():
    """Two sequences: versions 3 3 4 5 and 5 5, trained at version 6."""
    versions = torch.tensor([3, 3, 4, 5, 5, 5])
    rollout = torch.zeros(6)
    current = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    tokens = diagnostics.StepTokens(
        rollout, current, 6 - versions, versions, torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([4, 2])
    )
    row = diagnostics.lag_metrics(tokens)
    assert row["lag_mean"] == pytest.approx(11 / 6) and row["lag_max"] == 3 and row["lag_p95"] == 3
    assert row["lag_first_half"] == pytest.approx((3 + 3 + 1) / 3) and row["lag_second_half"] == pytest.approx(4 / 3)
    assert row["versions_per_sequence"] == 2.0
    assert row["kl_by_lag"] == pytest.approx({"1": 0.0, "2": 0.0, "3": math.e - 2})


def test_formula_names_every_choice():
    texts = {formula(c) for c in CONFIGS}
    assert len(texts) == len(CONFIGS)
    assert formula(LossConfig(advantage="center")) != formula(LossConfig(advantage="center_scale"))
