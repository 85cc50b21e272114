"""The mismatch probe on log-probability files: numbers against their definitions, faults against file and line."""

import argparse
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_bench import probe, probe_report


def write_dump(path, sequences):
    rows = [{"token_ids": list(range(len(r))), "rollout_logprobs": r, "logprobs": p, "reward": 1} for r, p in sequences]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_dump(path, seed=0, sequences=12, spread=0.05):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(sequences):
        rollout = -rng.exponential(1.0, int(rng.integers(1, 90)))
        out.append((rollout.tolist(), np.minimum(rollout + spread * rng.standard_t(4, len(rollout)), 0).tolist()))
    return write_dump(path, out), out


def run(*argv):
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    return probe.run(parser.parse_args([str(a) for a in argv]))


def test_numbers_are_their_definitions(tmp_path):
    path, sequences = random_dump(tmp_path / "dump.jsonl", spread=0.4)
    total = probe.from_logprobs(path).comparisons[0]
    rollout = np.concatenate([r for r, _ in sequences])
    d = np.concatenate([p for _, p in sequences]) - rollout
    n = total.numbers
    assert n.tokens == len(d) and total.sequences == len(sequences)
    assert n.mean_abs == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert n.max_abs == np.abs(d).max()
    # the smallest value that at least 99 % of the tokens do not exceed
    assert n.p99_abs == np.sort(np.abs(d))[math.ceil(0.99 * len(d)) - 1]
    assert n.k1 == pytest.approx(-d.mean(), rel=1e-12)
    assert n.k3 == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-9)
    assert n.mean_weight == pytest.approx(np.exp(d).mean(), rel=1e-12)
    assert n.outside == np.mean((np.exp(d) > 2) | (np.exp(d) < 0.5)) > 0
    assert n.nonzero == np.mean(d != 0)
    weights = np.exp(d)
    assert total.ess_token == pytest.approx(weights.sum() ** 2 / (len(d) * (weights**2).sum()), rel=1e-12)
    of_sequence = np.exp([sum(p) - sum(r) for r, p in sequences])
    ess = of_sequence.sum() ** 2 / (len(of_sequence) * (of_sequence**2).sum())
    assert total.ess_sequence == pytest.approx(ess, rel=1e-9)
    assert n.kl is None and n.flips is None


def test_standard_errors_take_the_sequence_as_the_unit(tmp_path):
    """Copying every token of every sequence k times leaves the clustered error alone; a token-wise one would shrink."""
    _, sequences = random_dump(tmp_path / "a.jsonl", sequences=40)
    path = write_dump(tmp_path / "a.jsonl", sequences)
    repeated = write_dump(tmp_path / "b.jsonl", [(r * 5, p * 5) for r, p in sequences])
    once, often = (probe.from_logprobs(p).comparisons[0].numbers for p in (path, repeated))
    assert often.mean_abs_se == pytest.approx(once.mean_abs_se, rel=1e-9)
    equal_lengths = [([-1.0] * 20, [-1.0 - 0.01 * s] * 20) for s in range(10)]
    n = probe.from_logprobs(write_dump(tmp_path / "c.jsonl", equal_lengths)).comparisons[0].numbers
    # equal lengths: the ordinary standard error of the sequence means
    assert n.mean_abs_se == pytest.approx(np.std(0.01 * np.arange(10), ddof=1) / math.sqrt(10), rel=1e-6)


def test_positions_partition_the_tokens(tmp_path):
    path, sequences = random_dump(tmp_path / "dump.jsonl")
    total = probe.from_logprobs(path).comparisons[0]
    assert sum(row.numbers.tokens for row in total.positions) == total.numbers.tokens
    second = next(row for row in total.positions if row.first == 16)
    d = np.concatenate([np.array(p[16:32]) - np.array(r[16:32]) for r, p in sequences])
    assert second.last == 31 and second.numbers.mean_abs == pytest.approx(np.abs(d).mean(), rel=1e-9)
    weights = np.exp([sum(p[:8]) - sum(r[:8]) for r, p in sequences])
    expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert dict(total.ess_by_length)[8] == pytest.approx(expected, rel=1e-9)


def test_known_policies_give_their_known_kl(tmp_path):
    """Sampled from mu over 3 tokens, k1 and k3 find KL(mu || pi), and exp(d) has mean 1."""
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    rng = np.random.default_rng(1)
    draws = [rng.choice(3, 200, p=mu) for _ in range(300)]
    path = write_dump(tmp_path / "d.jsonl", [(np.log(mu)[t].tolist(), np.log(pi)[t].tolist()) for t in draws])
    record = probe.from_logprobs(path)
    n = record.comparisons[0].numbers
    exact = float((mu * np.log(mu / pi)).sum())
    assert abs(n.k3 - exact) < 4 * n.k3_se and n.k3 == pytest.approx(exact, rel=0.05)
    assert n.k1 == pytest.approx(exact, rel=0.1)
    assert abs(n.mean_weight - 1) < 4 * n.mean_weight_se and not record.notes


def test_tokens_of_another_policy_are_noticed(tmp_path):
    rng = np.random.default_rng(2)
    greedy = [([-0.5] * 30, (-0.3 - 0.01 * rng.random(30)).tolist()) for _ in range(20)]
    record = probe.from_logprobs(write_dump(tmp_path / "d.jsonl", greedy))
    assert any("do not look sampled" in note for note in record.notes)


@given(st.lists(st.lists(st.floats(-50, 0), min_size=1, max_size=6), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_equal_columns_are_exactly_zero(tmp_path_factory, rows):
    path = write_dump(tmp_path_factory.mktemp("dump") / "d.jsonl", [(row, row) for row in rows])
    record = probe.from_logprobs(path)
    n = record.comparisons[0].numbers
    assert n.mean_abs == n.max_abs == n.k1 == n.k3 == n.nonzero == 0 and n.mean_weight == 1
    assert record.comparisons[0].ess_sequence == 1
    assert "one column was written twice" in record.notes[0]
    assert "| largest abs(d) | 0.0000 |" in probe_report.markdown(record)


def test_absurd_ratios_stay_finite(tmp_path):
    path = write_dump(tmp_path / "d.jsonl", [([-900.0, -1.0], [0.0, -1.0]), ([-1.0], [-900.0])])
    record = probe.from_logprobs(path)
    assert "nan" not in probe_report.markdown(record).lower() and record.comparisons[0].ess_sequence == 0.5


def test_masked_tokens_are_left_out(tmp_path):
    line = {"token_ids": [5, 6, 7], "rollout_logprobs": [-1, -9, -2], "logprobs": [-1.5, 0, -2], "loss_mask": [1, 0, 1]}
    (tmp_path / "d.jsonl").write_text(json.dumps(line) + "\n")
    record = probe.from_logprobs(tmp_path / "d.jsonl")
    total = record.comparisons[0]
    assert total.numbers.tokens == 2 and total.numbers.mean_abs == 0.25
    assert [t.position for t in total.largest] == [0, 2] and record.notes[0].startswith("1 tokens have loss_mask 0")


GOOD = '{"token_ids": [1, 2], "rollout_logprobs": [-1, -2], "logprobs": [-1, -2]}'


@pytest.mark.parametrize(
    "line, message",
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[1]", "expected an object"),
        ("{}", "key 'token_ids' is missing"),
        (GOOD.replace("rollout_logprobs", "rollout_log_probs"), "did you mean 'rollout_log_probs'"),
        (GOOD.replace("[1, 2]", "[1, 2.5]"), "token_ids[1] is 2.5: expected a token id"),
        (GOOD.replace("[1, 2]", "[]"), "token_ids must be a list"),
        (GOOD.replace('"logprobs": [-1, -2]', '"logprobs": [-1]'), "logprobs has 1 values, token_ids has 2"),
        (GOOD.replace('"logprobs": [-1, -2]', '"logprobs": -1'), "logprobs must be a list"),
        (GOOD.replace('"rollout_logprobs": [-1', '"rollout_logprobs": [null'), "leave the prompt out"),
        (GOOD.replace("-1", "NaN"), "expected a finite log-probability"),
        (GOOD.replace("-1", "-Infinity"), "expected a finite log-probability"),
        (GOOD.replace("-1", '"-1"'), "expected a finite log-probability"),
        (GOOD.replace("-1", "true"), "expected a finite log-probability"),
        (GOOD.replace("-1", "0.4"), "never positive"),
        (GOOD.replace("}", ', "loss_mask": [0, 0]}'), "no token has loss_mask 1"),
        (GOOD.replace("}", ', "loss_mask": [0, 2]}'), "expected 0 or 1"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}:2: ") + ".*" + re.escape(message)) as error:
        probe.from_logprobs(path)
    assert "\n" not in str(error.value)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        probe.from_logprobs(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="empty.jsonl: no lines"):
        probe.from_logprobs(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="latin.jsonl:1: not JSON"):
        probe.from_logprobs(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match="--help"):
        run()


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6))
def test_fixed_notation(value):
    text = probe_report.fixed(value)
    assert re.fullmatch(r"-?\d+\.\d{4,}", text)
    assert float(text) == pytest.approx(value, rel=0.006) and (float(text) == 0) == (value == 0)


def test_command_writes_record_table_and_figure(tmp_path, capsys):
    path, _ = random_dump(tmp_path / "dump.jsonl")
    assert run("--logprobs", path, "--out", tmp_path / "out") == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    figure = {f"mismatch.{suffix}" for suffix in ("pdf", "svg", "png", "csv")}
    assert names == {"probe.json", "probe.md", "probe.csv"} | figure
    record = probe_report.ProbeRecord.model_validate_json((tmp_path / "out" / "probe.json").read_text())
    text = (tmp_path / "out" / "probe.md").read_text()
    assert f"| k3: mean of exp(d) - 1 - d | {probe_report.fixed(record.comparisons[0].numbers.k3)} |" in text
    assert "| KL(mu, pi), exact, nats per token | needs a checkpoint |" in text
    assert "Split into quantisation and kernel term: needs a checkpoint." in text
    assert "(published" in text and "| typical; alarm above 1 | 0.00100 | 0.0300 |" in text
    assert not re.search(r"\d[eE][-+]?\d", text), "fixed notation only"
    first = {name: (tmp_path / "out" / name).read_bytes() for name in names}
    assert run("--logprobs", path, "--out", tmp_path / "out") == 0
    assert first == {name: (tmp_path / "out" / name).read_bytes() for name in names}, "same input, same bytes"
    assert probe.new_folder(tmp_path, "mine") == tmp_path / "mine"
    assert probe.new_folder(tmp_path, "out") == tmp_path / "out-2", "nothing is overwritten by default"
    assert "KL exact needs a checkpoint" in capsys.readouterr().out


def test_verb_and_exit_codes(tmp_path, cli):
    (tmp_path / "bad.jsonl").write_text(GOOD + "\n" + GOOD.replace("-1", "null") + "\n")
    done = cli("probe", "--logprobs", tmp_path / "bad.jsonl", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"error: {tmp_path / 'bad.jsonl'}:2: ") and done.stderr.count("\n") == 1
