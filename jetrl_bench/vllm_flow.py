"""A precision flow in vLLM's words: what the engine is started with, what it is sent, and what it must report back.

Three ways to run a flow's rollout side:

    bf16 (or fp32)        vLLM's own kernels, nothing quantised
    fp8, emulated         the suite's quantisation plugin (vllm_plugin.py), bit by bit the flow's own linear layer
    fp8, torch or te      vLLM's block FP8 on a GPU: E4M3 weights in checkpoint format with `weight_scale_inv`
                          [ceil(N/128), ceil(K/128)], activations quantised by the kernel

In the third, what decides the scale rule is set here (DeepGEMM's UE8M0 switch: with it scales are powers of two,
without it fp32), and read back layer by layer after the first weights: a kernel that leaves activations in bf16,
another scale rule or another layout than the trainer's is refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetrl_bench.checkpoint import hf_config
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.fp8 import BLOCK, quantize

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The same seven in vLLM's modules."""


@dataclass(frozen=True)
class EngineSettings:
    hf_config: dict
    """What becomes config.json."""
    engine_args: dict = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def is_native(config: FlowConfig) -> bool:
    """vLLM's own FP8 kernels run the rollout."""
    return config.rollout == "fp8" and config.backend != "emulated"


def engine_settings(flow, cfg: ModelConfig, vocab_size: int) -> EngineSettings:
    """ValueError, one line, for a flow that vLLM cannot run as the trainer does."""
    config: FlowConfig = flow.config
    hf = hf_config(cfg, vocab_size)
    arguments: dict = {"dtype": "float32" if config.rollout == "fp32" else "bfloat16"}
    if config.lm_head == "fp32":
        hf["head_dtype"] = "float32"
    if is_native(config):
        _require_native(config, cfg)
        ignored = [f"model.layers.{i}.{part}" for i in range(cfg.num_layers) for part in ("input_layernorm",)]
        hf["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "ignored_layers": ["lm_head", "model.embed_tokens", *ignored],
        }
        pow2 = "1" if config.scale == "pow2" else "0"
        return EngineSettings(hf, arguments, {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": pow2})
    if config.rollout == "fp8" or config.kv_cache == "fp8" or config.lm_head == "fp8":
        hf["quantization_config"] = {"quant_method": "jetrl", "flow": config.model_dump(mode="json")}
    return EngineSettings(hf, arguments)


def _require_native(config: FlowConfig, cfg: ModelConfig) -> None:
    fixed = {"format": "e4m3", "activation_groups": "block", "weight_groups": "block", "kv_cache": "bf16"}
    for key, value in fixed.items():
        if getattr(config, key) != value:
            raise ValueError(
                f"flow.{key} {getattr(config, key)!r} does not run in vLLM's FP8 kernels; "
                f"nearest: {value!r}, or backend 'emulated'"
            )
    if config.lm_head == "fp8":
        raise ValueError("flow.lm_head 'fp8' does not run in vLLM's FP8 kernels; nearest: 'bf16'")
    widths = {
        "num_heads * head_dim": cfg.num_heads * cfg.head_dim,
        "num_kv_heads * head_dim": cfg.num_kv_heads * cfg.head_dim,
        "intermediate_size": cfg.intermediate_size,
    }
    for key, width in widths.items():
        if width % BLOCK:
            near = max(BLOCK, round(width / BLOCK) * BLOCK)
            raise ValueError(
                f"model {key} {width} is not a multiple of {BLOCK}: a part of a fused layer; nearest: {near}"
            )


def layers_to_refuse(config: FlowConfig, reports: Iterable[dict]) -> Iterator[str]:
    """One line for every layer that does not run as the flow says. `reports`: vllm_plugin.describe_layers."""
    for report in reports:
        name, part = report["layer"], report["layer"].rsplit(".", 1)[-1]
        if part not in FUSED:
            continue
        if config.rollout != "fp8":
            if report["method"] != "UnquantizedLinearMethod":
                yield f"{name}: runs as {report['method']} in a {config.rollout} rollout"
        elif not is_native(config):
            if report["method"] != "FlowLinearMethod":
                yield f"{name}: runs as {report['method']}, not as the flow's emulated layer"
            elif report["flow"] != config.model_dump(mode="json"):
                yield f"{name}: was built for another flow"
        else:
            yield from _native_problems(config, name, report)


def _native_problems(config: FlowConfig, name: str, report: dict) -> Iterator[str]:
    rows, columns = report["weight_shape"]
    blocks = [-(-rows // BLOCK), -(-columns // BLOCK)]
    if report["method"] != "Fp8LinearMethod":
        yield f"{name}: runs as {report['method']}, not in FP8"
    elif report["activations"] != "fp8":
        yield f"{name}: kernel {report['kernel']} leaves activations in {report['activations']}, the trainer does not"
    elif report["scale"] != config.scale:
        yield f"{name}: kernel {report['kernel']} uses {report['scale']} scales, the trainer {config.scale}"
    elif report["weight_dtype"] != "float8_e4m3fn" or report["scale_shape"] != blocks:
        held = f"{report['weight_dtype']} with scales {report['scale_shape']}"
        yield f"{name}: holds {held}, not float8_e4m3fn with {blocks}"


def read_back(flow, workers: list[list[dict]]) -> None:
    """ValueError, one line, where any layer of any worker does not run as the flow says."""
    for reports in workers:
        if not any(r["layer"].endswith("qkv_proj") for r in reports):
            raise ValueError("vLLM reports no attention projection: unknown model layout")
        for problem in layers_to_refuse(flow.config, reports):
            raise ValueError(f"vLLM does not run this flow: {problem}")


def checkpoint_format(flow, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """What vLLM's block FP8 loads: E4M3 codes and fp32 `weight_scale_inv` of the linears, the rest as it comes."""
    config: FlowConfig = flow.config
    for name, tensor in named:
        if name.endswith(".weight") and name.split(".")[-2] in LINEARS:
            weight = quantize(tensor, config.format, (BLOCK, BLOCK), scale=config.scale, rule=config.rollout_rule)
            yield name, weight.codes.view(torch.float8_e4m3fn)
            yield f"{name}_scale_inv", weight.scales
        else:
            yield name, tensor
