"""What the vLLM engine rests on and needs no vLLM: the manifest, the buckets, the flow's words, the refusals."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl_bench import vllm_flow, vllm_process
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.precision import make_flow
from jetrl_bench.vllm_transfer import (
    Channel,
    Entry,
    buckets,
    check_manifest,
    checksum,
    from_wire,
    open_receiver,
    to_wire,
    unpack,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def made(specs):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"t{i}.weight", (torch.randn(shape, generator=generator) * 3).to(dtype))
        for i, (shape, dtype) in enumerate(specs)
    ]


@given(tensors, st.sampled_from([1, 64, 100, 10_000]), st.sampled_from(["memory", "shm"]))
def test_buckets_arrive_bit_for_bit_through_every_local_channel(specs, limit, transport):
    named = made(specs)
    channel, arrived, sizes = Channel(transport), [], []
    receive = open_receiver(channel.init_info, 0, torch.device("cpu"))
    for bucket in buckets([Entry.of(n, t) for n, t in named], [t for _, t in named], limit):
        sizes.append((bucket.buffer_B.numel(), len(bucket.entries)))
        entries = from_wire(to_wire(bucket.entries))
        with channel.offer(bucket.buffer_B) as info:
            arrived += [(name, tensor.clone()) for name, tensor in unpack(receive(info), entries)]
    assert [name for name, _ in arrived] == [name for name, _ in named]
    for (_, sent), (_, got) in zip(named, arrived, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert torch.equal(got.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
    assert all(count == 1 or size <= limit + 64 for size, count in sizes)


def test_a_flipped_bit_is_noticed():
    tensor = torch.arange(100, dtype=torch.float32)
    (bucket,) = buckets([Entry.of("w", tensor)], [tensor])
    bucket.buffer_B[123] ^= 4
    with pytest.raises(RuntimeError, match="'w' arrived with other bits"):
        list(unpack(bucket.buffer_B, bucket.entries))


@given(st.integers(0, 4095))
def test_checksum_changes_with_any_bit(bit):
    tensor = torch.linspace(-3, 3, 128, dtype=torch.float32)
    other = tensor.clone()
    other.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
    assert checksum(tensor) != checksum(other)


def entries(**changes):
    named = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}
    named |= changes
    return [Entry.of(name, tensor) for name, tensor in named.items() if tensor is not None]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (entries(b=None), "'b' is missing"),
        (entries(b=None, c=None), "'b' and 1 more is missing"),
        (entries(d=torch.zeros(1)), "'d' is not in the engine's model"),
        (entries(a=torch.zeros(3, 2)), r"'a' has shape \[3, 2\], the engine's has \[2, 3\]"),
        (entries(a=torch.zeros(2, 3, dtype=torch.bfloat16)), "'a' is bfloat16, the engine's is float32"),
        ([*entries(), entries()[0]], "'a' is sent twice"),
    ],
)
def test_manifest_refuses_in_one_line(sent, words):
    with pytest.raises(ValueError, match=words) as caught:
        check_manifest(entries(), sent)
    assert "\n" not in str(caught.value)


def test_manifest_takes_any_order():
    check_manifest(entries(), reversed(entries()))


def test_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="known: memory, shm, gloo, nccl"):
        open_receiver({"transport": "pigeon"}, 0, torch.device("cpu"))


def test_an_untested_vllm_is_refused_with_the_tested_range(monkeypatch):
    monkeypatch.setattr(vllm_process, "installed", lambda name: "0.99.0" if name == "vllm" else None)
    with pytest.raises(ValueError, match=r"vllm 0.99.0 is outside the tested range >=0.32,<0.33"):
        vllm_process.probe()


def test_a_vllm_that_lacks_a_part_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(vllm_process, "installed", lambda name: "0.32.0")
    monkeypatch.setattr(vllm_process, "NEEDED", {"math": ("sqrt", "pause_generation.keep")})
    with pytest.raises(ValueError, match=r"vLLM 0.32.0 lacks math.pause_generation.keep"):
        vllm_process.probe()


def test_no_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_process, "installed", lambda name: None)
    with pytest.raises(ValueError, match="make vllm"):
        vllm_process.probe()


def test_importing_the_engine_does_not_import_vllm():
    code = "import sys, jetrl_bench.rollout_vllm_async; assert not {'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_that_never_returns_ends_the_process_with_3():
    code = "import time; from jetrl_bench.vllm_process import Watchdog\nwith Watchdog(0.4): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, timeout=50)
    assert done.returncode == 3 and "did not return within 0.4 s" in done.stderr


# ------------------------------------------------------------------------------------------------------ flows


def flow_of(**settings):
    """A flow's settings alone: the native back ends need a GPU to be made executable."""
    return SimpleNamespace(config=FlowConfig(**settings))


NATIVE = {"rollout": "fp8", "backend": "torch"}
CFG = ModelConfig()


def test_bf16_quantises_nothing():
    settings = vllm_flow.engine_settings(flow_of(), CFG, 304)
    assert "quantization_config" not in settings.hf_config and settings.engine_args == {"dtype": "bfloat16"}


def test_an_emulated_flow_travels_whole_in_the_config():
    flow = make_flow(FlowConfig(rollout="fp8", format="e2m1", scale="fp32"))
    sent = vllm_flow.engine_settings(flow, CFG, 304).hf_config["quantization_config"]
    assert sent["quant_method"] == "jetrl" and FlowConfig(**sent["flow"]) == flow.config


@pytest.mark.parametrize(("scale", "switch"), [("pow2", "1"), ("fp32", "0")])
def test_the_scale_rule_sets_deep_gemms_switch(scale, switch):
    settings = vllm_flow.engine_settings(flow_of(**NATIVE, scale=scale), CFG, 304)
    assert settings.environment["VLLM_USE_DEEP_GEMM_E8M0"] == switch
    sent = settings.hf_config["quantization_config"]
    assert sent["weight_block_size"] == [128, 128] and "lm_head" in sent["ignored_layers"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"format": "e2m1"}, "flow.format 'e2m1'"),
        ({"activation_groups": "row"}, "flow.activation_groups 'row'"),
        ({"kv_cache": "fp8"}, "flow.kv_cache 'fp8'"),
        ({"lm_head": "fp8"}, "flow.lm_head 'fp8'"),
    ],
)
def test_what_vllms_kernels_cannot_do_is_refused(settings, key):
    with pytest.raises(ValueError, match=key):
        vllm_flow.engine_settings(flow_of(**NATIVE, **settings), CFG, 304)


def test_a_part_without_whole_blocks_is_refused():
    with pytest.raises(ValueError, match=r"intermediate_size 200.*nearest: 256"):
        vllm_flow.engine_settings(flow_of(**NATIVE), ModelConfig(intermediate_size=200), 304)


def test_checkpoint_format_is_the_flows_own_quantisation():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    norm = torch.ones(300, dtype=torch.bfloat16)
    named = [("model.layers.0.mlp.up_proj.weight", weight), ("model.norm.weight", norm)]
    sent = dict(vllm_flow.checkpoint_format(flow_of(**NATIVE), named))
    assert list(sent) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.norm.weight",
    ]
    codes, scales = (sent[name] for name in list(sent)[:2])
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape
    assert scales.dtype == torch.float32 and scales.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].float()
            scale = torch.exp2(torch.ceil(torch.log2(block.abs().max() / 448)))
            assert scales[i, j] == scale
            expected = (block / scale).to(torch.float8_e4m3fn)
            got = codes[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def native_report(**changes):
    report = {
        "layer": "model.layers.0.self_attn.qkv_proj",
        "method": "Fp8LinearMethod",
        "kernel": "DeepGemmFp8BlockScaledMMKernel",
        "activations": "fp8",
        "scale": "pow2",
        "weight_dtype": "float8_e4m3fn",
        "weight_shape": [384, 200],
        "scale_shape": [3, 2],
    }
    return [[report | changes]]


def test_a_native_layer_that_runs_as_the_trainer_does_passes():
    vllm_flow.read_back(flow_of(**NATIVE), native_report())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "UnquantizedLinearMethod"}, "not in FP8"),
        ({"kernel": "CPUFp8BlockScaledMMKernel", "activations": "bf16"}, "leaves activations in bf16"),
        ({"scale": "fp32"}, "uses fp32 scales, the trainer pow2"),
        ({"scale_shape": [1, 1]}, r"not float8_e4m3fn with \[3, 2\]"),
        ({"layer": "model.layers.0.mlp.other"}, "no attention projection"),
    ],
)
def test_a_native_layer_that_runs_otherwise_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        vllm_flow.read_back(flow_of(**NATIVE), native_report(**changes))


def test_an_emulated_layer_must_be_this_flows():
    flow = flow_of(rollout="fp8")
    report = {"layer": "model.layers.0.self_attn.qkv_proj", "method": "FlowLinearMethod"}
    vllm_flow.read_back(flow, [[{**report, "flow": flow.config.model_dump(mode="json")}]])
    with pytest.raises(ValueError, match="for another flow"):
        vllm_flow.read_back(
            flow, [[{**report, "flow": FlowConfig(rollout="fp8", format="e5m2").model_dump(mode="json")}]]
        )
    with pytest.raises(ValueError, match="UnquantizedLinearMethod"):
        vllm_flow.read_back(flow, [[{**report, "method": "UnquantizedLinearMethod"}]])


def test_a_bf16_rollout_must_not_be_quantised():
    report = {"layer": "model.layers.0.self_attn.qkv_proj", "method": "Fp8LinearMethod"}
    with pytest.raises(ValueError, match="bf16 rollout"):
        vllm_flow.read_back(flow_of(), [[report]])
