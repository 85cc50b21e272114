"""costs.py and throughput.py against independent arithmetic, the kernel tables and PipelineRL's printed numbers."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jetrl_bench import costs_fit, throughput
from jetrl_bench.costs import Costs, UnitCosts
from jetrl_bench.shapes import DATA, ModelShape, Precision, TrainLayout, constants

FORMATS = ("bf16", "fp8_block", "fp8_tensor", "fp8_row")


@pytest.mark.parametrize(
    ("name", "billions", "linear", "kv_kib"),
    [  # published parameter counts and the shapes' own arithmetic
        ("Qwen2.5-7B", 7.616, 6.525, 56),
        ("Qwen3-8B", 8.191, 6.946, 144),
        ("Llama-3.1-8B", 8.030, 6.979, 128),
        ("Qwen3-14B", 14.768, 13.212, 160),
        ("Qwen2.5-32B", 32.764, 31.206, 256),
        ("Qwen3-32B", 32.762, 31.206, 256),
    ],
)
def test_shapes_have_the_published_sizes(name, billions, linear, kv_kib):
    shape = ModelShape.named(name)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.linear_params / 1e9 == pytest.approx(linear, rel=1e-3)
    assert shape.kv_bytes("bf16") == kv_kib * 1024 == 2 * shape.kv_bytes("fp8")


def test_a_hugging_face_config_is_the_same_shape(tmp_path):
    named = ModelShape.named("Qwen3-8B")
    config = {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.named(str(tmp_path)).linears == named.linears
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 128}))
    with pytest.raises(ValueError, match="mixture-of-experts"):
        ModelShape.named(str(tmp_path))


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'H100'"):
        Costs("Qwen3-8B", "H10")
    with pytest.raises(ValueError, match="'Qwen3-8B'"):
        Costs("Qwen3-8", "H100")
    with pytest.raises(ValueError, match="no FP8 tensor cores"):
        Costs("Qwen3-8B", "A100", precision=Precision("fp8_block"))
    with pytest.raises(ValueError, match="does not fit"):
        Costs("Llama-3.1-70B", "A100").kv_capacity()


@pytest.mark.parametrize("hardware", sorted(constants()["hardware"]))
def test_every_hardware_prices_every_phase(hardware):
    cost = (
        Costs("Qwen2.5-7B", hardware)
        if hardware != "cpu"
        else Costs(ModelShape("tiny", 4, 256, 4, 4, 64, 512, 512), "cpu")
    )
    layout = TrainLayout(1)
    for seconds in (
        cost.decode_step_s(8, 8000),
        cost.prefill_s(4096, 512),
        cost.logprob_s(8192, 1024, layout),
        cost.train_step_s(8192, 1024, layout),
        cost.transfer_s(8, colocated=True),
    ):
        assert 0 < seconds < 3600


def test_every_constant_has_a_source():
    def walk(node, path=""):
        if isinstance(node, dict):
            if "source" in node:
                assert node["source"].strip(), path
                return
            for key, value in node.items():
                walk(value, f"{path}/{key}")
        else:
            raise AssertionError(f"{path} has no source")

    walk({k: v for k, v in constants().items() if k != "models"})


def test_decode_step_is_bounded_by_the_memory_it_must_read():
    """Weights and KV cache at the datasheet's bandwidth: an independent floor, and twice that is a loose ceiling."""
    for batch, context in ((1, 1024), (32, 8192), (64, 8192)):
        cost = Costs("Qwen3-8B", "H100", engine="sglang")
        floor = (2 * (6.946e9 + 151936 * 4096) + batch * context * 144 * 1024) / 3.35e12
        seconds = cost.decode_step_s(batch, batch * context) - cost.host_s(batch)
        assert floor < seconds < 2 * floor


def test_decode_steps_reproduce_the_kernel_simulators_table():
    table = costs_fit.step_rows()
    error = np.abs(costs_fit.modelled_steps(table) * 1e3 / table["ms"].to_numpy() - 1)
    assert len(table) > 150
    assert np.median(error) < 0.04
    assert np.quantile(error, 0.9) < 0.12


def test_fp8_gain_follows_amdahl_at_long_context():
    """The bytes bound of an FP8-linear step: (2N + 2Vh + KV) / (N + 2Vh + KV); 8B, 64 sequences at 8k: 1.08."""
    bf16, fp8 = (Costs("Qwen3-8B", "H100", engine="sglang", precision=Precision(f)) for f in ("bf16", "fp8_block"))
    head, kv = 2 * 151936 * 4096, 64 * 8192 * 144 * 1024
    bound = (2 * 6.946e9 + head + kv) / (6.946e9 + head + kv)
    kernels = [c.decode_step_s(64, 64 * 8192) - c.host_s(64) for c in (bf16, fp8)]
    assert kernels[0] / kernels[1] == pytest.approx(bound, abs=0.03)
    assert bound == pytest.approx(1.08, abs=0.005)


def test_fp8_can_be_slower():
    def gain(tp, fmt, batch):
        a, b = Costs("Qwen3-8B", "H100", tp=tp), Costs("Qwen3-8B", "H100", tp=tp, precision=Precision(fmt))
        return a.decode_step_s(batch, batch * 512) / b.decode_step_s(batch, batch * 512)

    assert gain(1, "fp8_block", 8) > 1.2
    assert gain(8, "fp8_block", 8) < 0.97
    layout = TrainLayout(8, kind="megatron", micro_tokens=512)
    step = [
        Costs("Qwen3-8B", "H100", precision=Precision("bf16", f)).train_step_s(65536, 1024, layout) for f in FORMATS
    ]
    assert step[FORMATS.index("fp8_row")] > step[0]


@given(st.sampled_from(FORMATS), st.integers(1, 4096), st.integers(1, 4096))
def test_cost_grows_with_batch_and_context(fmt, batch, more):
    cost = Costs("Qwen3-14B", "H200", precision=Precision(fmt, fmt))
    assert cost.decode_step_s(batch, 0) <= cost.decode_step_s(batch + more, 0)
    assert cost.decode_step_s(batch, 1000 * batch) < cost.decode_step_s(batch, (1000 + more) * batch)
    layout = TrainLayout(8)
    assert cost.train_step_s(batch, 1000, layout) <= cost.train_step_s(batch + 8192 * more, 1000, layout)


def test_kv_capacity_is_memory_over_bytes_per_token():
    bf16 = Costs("Qwen3-32B", "H100", tp=2)
    weights = (2 * 31.206e9 + 2 * 2 * 151936 * 5120) / 2
    per_gpu = 0.90 * 80e9 - weights - constants()["reserve"]["value"]
    assert bf16.kv_capacity() == pytest.approx(2 * per_gpu / (256 * 1024), rel=2e-3)
    fp8 = Costs("Qwen3-32B", "H100", tp=2, precision=Precision("fp8_block"))
    assert fp8.kv_capacity() / bf16.kv_capacity() > 1.3  # freed weights become cache


def test_training_flops_bound():
    """6 (N + V h) + attention FLOPs per token at the BF16 peak is a floor; a third of the peak a loose ceiling."""
    cost, tokens, length = Costs("Llama-3.1-8B", "H100"), 65536, 8192
    flops = tokens * (6 * (6.979e9 + 128256 * 4096) + 6 * 32 * 32 * 128 * length)
    seconds = cost.train_step_s(tokens, length, TrainLayout(8, recompute="none"))
    assert flops / 989e12 < seconds < 3 * flops / 989e12


def test_training_layouts():
    with pytest.raises(ValueError, match="does not divide"):
        TrainLayout(10, kind="megatron", tensor=4)
    with pytest.raises(ValueError, match="megatron"):
        TrainLayout(8, pipeline=2)
    cost = Costs("Qwen3-8B", "H100")
    plain = cost.train_step_s(40960, 2048, TrainLayout(8, kind="megatron"))
    piped = cost.train_step_s(40960, 2048, TrainLayout(8, kind="megatron", pipeline=2))
    assert piped == pytest.approx(plain / 2 * (1 + 1 / 5), rel=0.1)  # five micro-batches: a bubble of a fifth


def test_transfer_time_is_bytes_over_the_slowest_link():
    cost = Costs("Qwen3-8B", "H100")
    network = 2 * cost.model.num_params / (50e9 * 0.75) + constants()["transfer"]["latency"]["value"]
    assert cost.transfer_s(16, colocated=False) == pytest.approx(network, rel=1e-6)
    fp8 = Costs("Qwen3-8B", "H100", precision=Precision("fp8_block"))
    assert fp8.transfer_s(16, colocated=False) < network < 1.0


def test_units_are_the_training_loops():
    from jetrl_bench.config import CostConfig

    config = CostConfig(decode_base=2.0, decode_per_sequence=0.5, train_per_token=0.1, transfer=3.0)
    cost = UnitCosts(config, 4, max_num_seqs=64)
    assert cost.decode_step_s(10, 0) == 2.0 + 0.5 * 3  # ceil(10 / 4) sequences on the busiest accelerator
    assert cost.train_step_s(100, 7, TrainLayout(4)) == pytest.approx(0.1 * 100)  # 400 tokens over 4
    assert cost.transfer_s(8, colocated=False) == 3.0


# --- PipelineRL's appendix -------------------------------------------------------------------------------------------


def test_pipelinerl_identities():
    """arXiv 2509.19128, appendix A, case study N = B = 128, by independent arithmetic from the printed rates."""
    tau = 84 / 17.08
    assert tau == pytest.approx(128 / 26.02, rel=1e-3) == pytest.approx(4.92, abs=0.005)
    assert 16.9 / 44 == pytest.approx(0.384, abs=5e-4)
    conventional = 18.3 * 26.02 / (18.3 + 26.02)
    assert conventional == pytest.approx(10.7, abs=0.05)
    assert 16.9 / conventional == pytest.approx(1.57, abs=0.01)
    values = throughput.identities()
    assert values["pipelinerl-tau"] == pytest.approx(tau)
    assert values["pipelinerl-u192"] == pytest.approx(0.384, abs=5e-4)
    assert values["pipelinerl-r-conv"] == pytest.approx(conventional, rel=1e-3)
    assert values["pipelinerl-r-pipe"] == pytest.approx(16.9)
    assert values["pipelinerl-speedup"] == pytest.approx(1.57, abs=0.01)
    assert values["pipelinerl-gmax-128"] == math.ceil(192 * 44 * 2 / 128) == 132
    assert values["pipelinerl-gmax-2048"] == math.ceil(192 * 44 * 2 / 2048) == 9


def test_draining_generation_rate_reproduces_the_case_study():
    """Linear U through U(192) = 0.384 and uniform lengths, G = 133: 128 U(133)-ish = 17.0 of the paper's 18.3; written
    out once more as a plain sum over decode steps."""
    u = throughput.linear_utilisation()
    rate = 128 * throughput.rate_generation_draining(133, 512, u)
    slope, limit = 0.384 / 192, 512
    flashes = sum(1 / slope for step in range(limit))  # h / U(h) is constant while U is linear
    assert rate == pytest.approx(128 * 133 * (limit + 1) / 2 / flashes, rel=1e-9)
    assert rate == pytest.approx(17.0, abs=0.1)


def test_search_stays_within_the_lag_bound_and_grows_with_it():
    u, rates = throughput.linear_utilisation(), []
    for lag in (4, 16, 64, 133):
        split = throughput.best_pipeline(128, 128, 512, 256.5, 4.918, u, lag)
        assert split.lag <= lag
        assert split.lag == math.ceil(split.slots * split.generation * 512 / (256.5 * 128))
        assert split.rate == pytest.approx(min(u(split.slots) * split.generation, (128 - split.generation) / 4.918))
        rates.append(split.rate)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(16.9, rel=0.03)  # the paper's case: 16.9 at 133


def test_own_utilisation_is_monotone_and_near_the_published_point():
    u = throughput.utilisation("H100")
    values = [u(h) for h in (1, 16, 64, 128, 192, 256, 512, 2048)]
    assert values == sorted(values)
    assert values[-1] < 0.9
    assert u(192) == pytest.approx(0.384, rel=0.5)  # paper 0.384, its own kernel


# --- the fit ---------------------------------------------------------------------------------------------------------


def test_the_committed_fit_is_reproducible():
    """One GPU's kernels refitted from the committed tables give the committed numbers."""
    gemm = pd.read_csv(DATA / "kernels_gemm.csv")
    part = gemm[(gemm["system"] == "h100_sxm") & (gemm["engine"] == "sglang") & (gemm["format"] == "fp8_block")]
    fresh = costs_fit.fit_gemm(part, constants()["hardware"]["H100"], "fp8_block")
    stored = yaml.safe_load((DATA / "fitted.yaml").read_text())["kernels"]["h100_sxm"]["sglang"]["fp8_block"]
    assert fresh == pytest.approx(stored, rel=0.02)


def test_smoothed_kernel_rows_never_fall_with_more_rows():
    """The padding envelope: time is non-decreasing in m for every matrix."""
    gemm = pd.read_csv(DATA / "kernels_gemm.csv").sort_values("m")
    groups = gemm.groupby(["system", "engine", "format", "n", "k"])["us"]
    assert groups.apply(lambda us: (us.diff().dropna() >= 0).all()).all()


def test_kernel_files_carry_their_licence():
    notice = (DATA / "NOTICE").read_text()
    for path in (*DATA.glob("kernels_*.csv"), DATA / "aic_step_times.csv"):
        assert path.name in notice
    assert "Apache License" in notice
