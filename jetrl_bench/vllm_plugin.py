"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`): the worker's side of a weight
update, and the suite's precision flow as a quantisation method.

Importing this module imports vLLM; nothing else of the suite imports it.
"""

import os
from dataclasses import dataclass, field

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from jetrl_bench import quantizer
from jetrl_bench.config import FlowConfig
from jetrl_bench.precision import Weight, head, linear, make_flow, prepare_weight
from jetrl_bench.strict import validate
from jetrl_bench.vllm_transfer import check_manifest, from_wire, open_receiver, unpack

BACKEND = "jetrl"
"""Name of the weight transfer backend and of the quantisation method."""


def register() -> None:
    """Called by vLLM in the main process, in the engine's and in every worker's; calling it twice changes nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TransferEngine)
        register_quantization_config(BACKEND)(FlowQuantConfig)


# ---------------------------------------------------------------------------------------------------- quantisation


class FlowQuantConfig(QuantizationConfig):
    """The rollout side of a precision flow. Its settings travel in the model's config.json, so that every process reads
    the same ones: {"quant_method": "jetrl", "flow": FlowConfig as JSON}."""

    def __init__(self, flow: dict):
        super().__init__()
        self.flow = make_flow(validate(FlowConfig, flow, "config.json: quantization_config.flow"))
        self.side = self.flow.rollout_side

    def get_name(self) -> str:
        return BACKEND

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict) -> "FlowQuantConfig":
        return cls(config["flow"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return FlowLinearMethod(self) if self.side.fp8 else UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return FlowHeadMethod(self) if self.side.lm_head == "fp8" else UnquantizedEmbeddingMethod()
        if isinstance(layer, Attention) and self.side.kv is not None and not layer._forward_pre_hooks:
            layer.register_forward_pre_hook(self._quantize_kv)
        return None

    def _quantize_kv(self, layer, arguments):
        """Keys and values as the flow's attention reads them: one group per token and head, kept in bf16."""
        query, *kv = arguments
        size = layer.head_size
        kv = [quantizer.quantize_blocks(t.reshape(-1, size), (1, size), self.side.kv)[0].view_as(t) for t in kv]
        return (query, *kv)


class FlowLinearMethod(UnquantizedLinearMethod):
    """precision.linear in place of vLLM's GEMM: each part of a fused layer is quantised by itself, as in training."""

    def __init__(self, config: FlowQuantConfig):
        super().__init__()
        self.config = config

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *args, **kwargs):
        layer.flow_parts = list(output_partition_sizes)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.flow_weight = _prepared(layer.weight.data.split(layer.flow_parts), self.config.side)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = linear(x.reshape(-1, x.shape[-1]), layer.flow_weight._replace(bias=bias), self.config.side)
        return y.view(*x.shape[:-1], y.shape[-1])


class FlowHeadMethod(UnquantizedEmbeddingMethod):
    """The output projection of a flow with lm_head fp8; a tied embedding is still looked up in bf16."""

    def __init__(self, config: FlowQuantConfig):
        self.config = config

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # vLLM pads the vocabulary; the padding is no part of the matrix that is quantised.
        layer.flow_weight = _prepared([layer.weight.data[: layer.org_vocab_size]], self.config.side)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = head(x, layer.flow_weight._replace(bias=bias), self.config.side)
        return torch.nn.functional.pad(logits, (0, layer.weight.shape[0] - logits.shape[1]))


def _prepared(parts, side) -> Weight:
    """prepare_weight under torch's own default dtype: vLLM loads models with bf16 as the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return prepare_weight(list(parts), [], side, quantized=True)
    finally:
        torch.set_default_dtype(before)


# -------------------------------------------------------------------------------------------------- weight transfer


@dataclass
class InitInfo(WeightTransferInitInfo):
    channel: dict
    """`Channel.init_info` of the trainer's end."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    fetch: dict
    entries: list = field(default_factory=list)


class TransferEngine(WeightTransferEngine):
    """vLLM's transfer interface: prepare (check), start, any number of buckets, finish.

    Between start and finish the layers hold no usable weights. Anything that goes wrong there is raised, and whoever
    drives the engine must not let it generate again.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.expected = None
        self.updates = 0
        self._receive = None
        self._pending: dict[str, object] = {}
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self._receive = open_receiver(init_info.channel, rank, self.device)

    def prepare(self, manifest: list[dict]) -> int:
        """Compare the whole update with the first one; nothing is touched. Returns the number of tensors to come."""
        sent = from_wire(manifest)
        check_manifest(self.expected if self.expected is not None else sent, sent)
        self._pending = {entry.name: entry for entry in sent}
        return len(sent)

    def start_weight_update(self) -> None:
        self._loaded = set()
        self._parameters = {name for name, _ in self.model.named_parameters()}
        self._tied = _tied_layers(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        entries = from_wire(update_info.entries)
        for entry in entries:
            announced = self._pending.pop(entry.name, None)
            if announced is None or (announced.shape, announced.dtype) != (entry.shape, entry.dtype):
                raise RuntimeError(f"tensor {entry.name!r} of this bucket is not the one that was announced")
        buffer_B = self._receive(update_info.fetch)
        # Clones: layers keep what they are given until they are complete, which may be after this buffer is gone.
        self._loaded |= set(self.model.load_weights((name, t.clone()) for name, t in unpack(buffer_B, entries)))

    def finish_weight_update(self) -> None:
        if self._pending:
            raise RuntimeError(
                f"{len(self._pending)} announced tensors never came, first {next(iter(self._pending))!r}"
            )
        missing = sorted(self._parameters - self._loaded)
        if missing:
            raise RuntimeError(f"{len(missing)} parameters were not loaded, first {missing[0]!r}")
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            own = any(True for _ in layer.parameters(recurse=False)) and not is_deferred_attention_layer(layer)
            if own and info.can_load() and not info.load_numel and name not in self._tied:
                raise RuntimeError(f"layer {name!r} got no weights")
        finalize_layerwise_reload(self.model, self.model_config)
        for name in self._tied:
            # A tied head gets no weights of its own; what it derived from the old ones (packed copies) is made anew.
            layer = self.model.get_submodule(name)
            layer.quant_method.process_weights_after_loading(layer)
        if _tied_layers(self.model) != self._tied:
            raise RuntimeError(f"the reload untied {sorted(self._tied)}")
        self.updates += 1

    def confirm(self, manifest: list[dict]) -> dict:
        """After finish: what this worker holds now. Fixes what later updates must look like."""
        if self.expected is None:
            self.expected = from_wire(manifest)
        return {"updates": self.updates, "tensors": len(self._loaded), "manifest": len(self.expected)}

    def shutdown(self) -> None:
        self._receive = None


def _tied_layers(model: torch.nn.Module) -> set[str]:
    """Layers whose parameters all belong to another layer that comes before them (a tied output projection)."""
    owner, tied = {}, set()
    for name, layer in model.named_modules():
        parameters = list(layer.parameters(recurse=False))
        if parameters and all(owner.setdefault(id(p), name) != name for p in parameters):
            tied.add(name)
    return tied


def describe_layers(model: torch.nn.Module) -> list[dict]:
    """Of every linear layer: what runs it, on what, with which scales (vllm_flow.layers_to_refuse reads it)."""
    out = []
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        method = layer.quant_method
        report = {"layer": name, "method": type(method).__name__}
        if isinstance(method, FlowLinearMethod):
            report["flow"] = method.config.flow.config.model_dump(mode="json")
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor):
            report |= {"weight_dtype": str(weight.dtype).removeprefix("torch."), "weight_shape": list(weight.shape)}
        kernel = getattr(method, "fp8_linear", None)
        if kernel is not None:
            scale = getattr(layer, "weight_scale_inv", None)
            quantises = getattr(kernel, "apply_input_quant", True)
            rule = getattr(getattr(kernel, "quant_fp8", None), "use_ue8m0", None)
            report |= {
                "kernel": type(kernel).__name__,
                "activations": "fp8" if quantises else "bf16",
                "scale": "pow2" if rule else "fp32",
                "scale_shape": None if scale is None else list(scale.shape),
            }
        out.append(report)
    return out


class WorkerExtension:
    """Methods that land on every vLLM worker (worker_extension_cls)."""

    def jetrl_prepare(self, manifest: list[dict]) -> int:
        return self.weight_transfer_engine.prepare(manifest)

    def jetrl_confirm(self, manifest: list[dict]) -> dict:
        return {**self.jetrl_status(), **self.weight_transfer_engine.confirm(manifest)}

    def jetrl_layers(self) -> list[dict]:
        return describe_layers(self.model_runner.get_model())

    def jetrl_status(self) -> dict:
        return {"pid": os.getpid(), "rank": self.rank, "updates": self.weight_transfer_engine.updates}


register()
