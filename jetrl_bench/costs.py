"""What a phase of RL training costs: seconds on a GPU from a roofline of its operators, or units of the training loop.

`Costs` prices prefill, decode steps, log-probability passes, optimizer steps, weight transfer and quantisation for a
model shape, a precision flow, a parallelism and a piece of hardware. Every operator is a roofline with a soft corner:

    t = launch + ((bytes / (bw e_m))^q + (flops / (peak e_c s))^q)^(1/q),    s = flops / (flops + half_flops)

`launch`, `e_m`, `e_c`, `half_flops` and `q` are fitted per GPU and number format by costs_fit.py; every other constant
stands in costs_data/costs.yaml with its source. `UnitCosts` has the same methods in the training loop's normalised
units (config.CostConfig). All of it is *modelled* time; docs/speed.md lists the limits.
"""

import functools
import math
from dataclasses import dataclass

import yaml

from .clock import Units
from .shapes import BF16, DATA, ModelShape, Precision, TrainLayout, constants, lookup

MICROBATCH_PAD = 64  # rows: a matrix product is padded to its tile height (PipelineRL, figure 8, and the kernel tables)

_fitted: dict = {}


def fitted() -> dict:
    """The fitted efficiencies (costs_data/fitted.yaml), read once."""
    if not _fitted:
        path = DATA / "fitted.yaml"
        if not path.exists():
            raise ValueError(f"{path}: missing; run `python -m jetrl_bench.costs_fit`")
        _fitted.update(yaml.safe_load(path.read_text()))
    return _fitted


def use_fitted(values: dict) -> None:
    """Price with `values` in place of fitted.yaml: the fit runs on what it has fitted so far."""
    _fitted.clear()
    _fitted.update(values)


@dataclass(frozen=True)
class Roofline:
    """One operator class on one device; `launch` in seconds, efficiencies as shares of the datasheet."""

    launch: float
    memory: float
    compute: float
    half_flops: float
    norm: float

    def seconds(self, num_bytes: float, flops: float, bandwidth: float, peak: float) -> float:
        t_memory = num_bytes / (bandwidth * self.memory)
        t_compute = (flops + self.half_flops) / (peak * self.compute) if flops else 0.0
        return self.launch + (t_memory**self.norm + t_compute**self.norm) ** (1 / self.norm)


class Costs:
    """Seconds of every phase for one model, GPU, engine and precision flow.

    `tp` is the tensor parallelism of one generation replica; training shards over all its accelerators (FSDP).
    """

    unit = "s"

    def __init__(
        self,
        model: ModelShape | str,
        hardware: str,
        *,
        precision: Precision = BF16,
        engine: str = "vllm",
        tp: int = 1,
        max_num_seqs: int | None = None,
        memory_utilization: float | None = None,
    ):
        self.model = model if isinstance(model, ModelShape) else ModelShape.named(model)
        self.hardware, self.engine_name, self.precision, self.tp = hardware, engine, precision, tp
        self.hw = lookup(constants()["hardware"], hardware, "hardware")
        self.engine = lookup(constants()["engines"], engine, "engine")
        if self.model.heads % tp:
            raise ValueError(f"tp {tp} does not divide the {self.model.heads} heads of {self.model.name}")
        for side in (precision.rollout, precision.train):
            if side != "bf16" and not self.hw["fp8_flops"]:
                raise ValueError(f"hardware {hardware} has no FP8 tensor cores; nearest: precision 'bf16'")
        self.max_num_seqs = max_num_seqs or self.engine["max_num_seqs"]
        self.max_batched_tokens = self.engine["max_batched_tokens"]
        self.memory_utilization = memory_utilization or self.engine["memory_utilization"]
        self.reserve_full = self.engine["admission"] == "reserve"
        clock = fitted()["clock"][hardware] if self.hw.get("clock") == "fitted" else 1.0
        self._peak = {"bf16": self.hw["bf16_flops"] * clock, "fp8": self.hw["fp8_flops"] * clock}
        self._bw = self.hw["memory_bw"]
        self._kernel = functools.cache(self._roofline)
        self._base = functools.cache(self._decode_base)
        self._prefill = functools.cache(self._forward_linear)

    # --- operators -------------------------------------------------------------------------------------------------

    def _table(self, op: str) -> dict:
        """Fitted efficiencies of an operator: the engine's own kernel table, or SGLang's where it has none."""
        if "kernels" not in self.hw:
            return self.hw["efficiency"]
        table = fitted()["kernels"][self.hw["kernels"]]
        return table.get(self.engine["kernels"], {}).get(op) or table["sglang"][op]

    def _roofline(self, fmt: str) -> Roofline:
        t = self._table(fmt)
        compute = self.hw.get("compute_efficiency", t["compute"])
        return Roofline(t["launch"], t["memory"], compute, t["half_flops"], t["norm"])

    def gemm_s(self, m: float, n: int, k: int, fmt: str = "bf16") -> float:
        """Y [m, n] = X [m, k] W [n, k]^T: weights and activations in `fmt`, output in bf16."""
        width = 2 if fmt == "bf16" else 1
        rows = math.ceil(m / MICROBATCH_PAD) * MICROBATCH_PAD
        num_bytes = width * (n * k + m * k) + 2 * m * n
        peak = self._peak["bf16" if fmt == "bf16" else "fp8"]
        return self._kernel(fmt).seconds(num_bytes, 2.0 * rows * n * k, self._bw, peak)

    def quantise_s(self, elements: float, num_bytes: float) -> float:
        """A cast pass that moves `num_bytes` per element."""
        return elements * num_bytes / (self._bw * constants()["elementwise"]["memory_efficiency"])

    def _elementwise_s(self, m: float, fmt: str) -> float:
        """Norms, rotary, activation and, in FP8, the quantisation of the four GEMM inputs of one layer."""
        c, s = constants()["elementwise"], self.model
        inter, qkv = s.intermediate / self.tp, (s.heads + 2 * s.kv_heads) * s.head_dim / self.tp
        num_bytes = m * (c["norm_bytes"] * s.hidden + c["act_bytes"] * inter + c["qkv_bytes"] * qkv)
        launches = fitted()["elementwise"]
        seconds = launches["layer"] + num_bytes / (self._bw * c["memory_efficiency"])
        if fmt != "bf16":
            inputs = 2 * s.hidden + s.heads * s.head_dim / self.tp + inter
            seconds += launches["quantise"] + self.quantise_s(m * inputs, 3)
        return seconds

    def _all_reduce_s(self, num_bytes: float) -> float:
        if self.tp == 1:
            return 0.0
        table = fitted()["all_reduce"].get(self.hw.get("kernels"), fitted()["all_reduce"]["h100_sxm"])
        sizes = sorted(table)
        latency, bandwidth = table[min((n for n in sizes if n >= self.tp), default=sizes[-1])]
        return latency + num_bytes / bandwidth

    def _forward_linear(self, m: float, fmt: str, head_rows: float) -> float:
        """One forward pass over m tokens on one replica, attention left out; `head_rows` tokens reach lm_head."""
        s, tp = self.model, self.tp
        (nq, kq), (no, ko), (ng, kg), (nd, kd) = s.linears
        layer = (
            self.gemm_s(m, nq // tp, kq, fmt)
            + self.gemm_s(m, no, ko // tp, fmt)
            + self.gemm_s(m, ng // tp, kg, fmt)
            + self.gemm_s(m, nd, kd // tp, fmt)
            + self._elementwise_s(m, fmt)
            + 2 * self._all_reduce_s(2 * m * s.hidden)
        )
        return s.layers * layer + self.gemm_s(head_rows, s.vocab // tp, s.hidden)

    def _attention_prefill_s(self, tokens: float, length: float, tp: int) -> float:
        """Causal attention of all layers over sequences of `length`, `tokens` in all, heads split over tp GPUs."""
        s = self.model
        flops = 2.0 * tokens * length * s.heads * s.head_dim / tp
        kernel = self._table("attention_prefill")
        slowdown = 1 + kernel["half_length"] / length  # short sequences fill fewer tiles
        return s.layers * (kernel["launch"] + flops / (self._peak["bf16"] * kernel["compute"]) * slowdown)

    # --- generation ------------------------------------------------------------------------------------------------

    def host_s(self, batch: int) -> float:
        """Scheduling, sampling and detokenising between two decode steps, on the host."""
        if "kernels" not in self.hw:
            return 0.0
        base, per_sequence = fitted()["host"][self.engine_name]
        return base + per_sequence * batch

    def _decode_base(self, batch: int) -> float:
        attention = self.model.layers * self._table(f"attention_{self.precision.kv}")["launch"]
        return self.host_s(batch) + attention + self._forward_linear(batch, self.precision.rollout, batch)

    @functools.cached_property
    def context_s(self) -> float:
        """Seconds that one token of live context adds to a decode step."""
        kernel = self._table(f"attention_{self.precision.kv}")
        kv_per_gpu = self.model.kv_bytes(self.precision.kv) / min(self.tp, self.model.kv_heads)
        return kv_per_gpu / (self._bw * kernel["memory"])

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        """One decode step of a replica: `batch` sequences with `context_tokens` of KV cache in all."""
        return self._base(int(batch)) + self.context_s * context_tokens

    def prefill_s(self, tokens: int, length: float) -> float:
        """Prefill of `tokens` prompt tokens in sequences of `length` on one replica, chunked at max_batched_tokens."""
        if tokens <= 0:
            return 0.0
        chunk = min(self.max_batched_tokens, tokens)
        rows = max(1.0, chunk / max(length, 1.0))
        linear = tokens / chunk * (self._prefill(chunk, self.precision.rollout, math.ceil(rows)) + self.host_s(0))
        return linear + self._attention_prefill_s(tokens, length, self.tp)

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one GPU of a generation replica."""
        s = self.model
        width = 2 if self.precision.rollout == "bf16" else 1
        return (s.linear_params * width + 2 * (s.num_params - s.linear_params)) / self.tp

    def kv_capacity(self) -> int:
        """Tokens of KV cache a replica holds; a ValueError when the weights do not fit."""
        room = (
            self.hw["memory"] * self.engine["memory_utilization"] - self.weight_bytes - constants()["reserve"]["value"]
        )
        if room <= 0:
            raise ValueError(f"{self.model.name} in {self.precision.rollout} does not fit {self.tp} x {self.hardware}")
        return int(room * min(self.tp, self.model.kv_heads) / self.model.kv_bytes(self.precision.kv))

    # --- training --------------------------------------------------------------------------------------------------

    def _cast_s(self, m: float) -> float:
        """FP8 operand casts of one layer's forward and backward: activations, gradients and weights."""
        t, fmt = constants()["training"], self.precision.train
        if fmt == "bf16":
            return 0.0
        activations = m * sum(n + k for n, k in self.model.linears)
        weights = sum(n * k for n, k in self.model.linears)
        return self.quantise_s(activations, t["quantise_bytes"][fmt]) + self.quantise_s(
            weights, t["weight_quantise_bytes"][fmt]
        )

    def _micro_s(self, m: float, length: float, recompute: str, backward: bool) -> float:
        """Kernels of one micro-batch of m tokens through the whole model, forward or forward and backward."""
        s, t, c, fmt = self.model, constants()["training"], constants()["elementwise"], self.precision.train
        forward = sum(self.gemm_s(m, n, k, fmt) for n, k in s.linears)
        attention = self._attention_prefill_s(m, length, 1) / s.layers
        moved = m * (c["norm_bytes"] * s.hidden + c["act_bytes"] * s.intermediate + c["qkv_bytes"] * s.linears[0][0])
        elementwise = self.quantise_s(moved, 1)
        layer = forward + attention + elementwise
        logits = self.gemm_s(m, s.vocab, s.hidden) + self.quantise_s(m * s.vocab, t["logits_bytes"]["value"])
        if not backward:
            casts = self.quantise_s(m * sum(k for _, k in s.linears), 3) if fmt != "bf16" else 0.0
            return s.layers * (layer + casts) + logits
        repeated = {"none": 0.0, "selective": t["selective_recompute"]["value"], "full": 1.0}[recompute] * layer
        gradients = sum(self.gemm_s(m, k, n, fmt) + self.gemm_s(n, k, m, fmt) for n, k in s.linears)
        gradients += attention * t["attention_backward"]["value"] + 2 * elementwise + self._cast_s(m)
        return s.layers * (layer + repeated + gradients) + 3 * logits

    def _gather_s(self, layout: TrainLayout, backward: bool) -> float:
        """Weights gathered on one GPU for one pass over the model, and the gradients reduced when training."""
        group = layout.shard or layout.gpus
        if group == 1:
            return 0.0
        t, s = constants()["training"], self.model
        width = t["gather_bytes"][self.precision.train]
        gather = s.linear_params * width + 2 * (s.num_params - s.linear_params)
        num_bytes = (2 * gather + 2 * s.num_params if backward else gather) / (layout.tensor * layout.pipeline)
        bandwidth = self.hw["nvlink_bw"] if group <= 8 else self.hw["network_bw"] * 8
        return num_bytes * (group - 1) / group / (bandwidth * t["network_efficiency"]["value"])

    def _tensor_parallel_s(self, m: float, layout: TrainLayout, passes: int) -> float:
        """Two all-reduces of the activations a layer and pass, over NVLink."""
        if layout.tensor == 1:
            return 0.0
        ring = 2 * (layout.tensor - 1) / layout.tensor
        bandwidth = self.hw["nvlink_bw"] * constants()["training"]["network_efficiency"]["value"] / ring
        return passes * self.model.layers * 2 * (2 * m * self.model.hidden) / bandwidth

    def _pass_s(self, tokens: float, length: float, layout: TrainLayout, backward: bool) -> float:
        """A pass of the busiest rank over its `tokens`. A rank is the `layout.split` GPUs that share its sequences."""
        if not tokens:
            return 0.0
        t = constants()["training"]
        micro = max(1, math.ceil(tokens / (layout.micro_tokens * layout.sequence)))
        m = math.ceil(tokens / micro)
        kernels = fitted()["train_overhead"] * self._micro_s(m, length, layout.recompute, backward) / layout.split
        passes = (3 if layout.recompute == "full" else 2) if backward else 1
        kernels += self._tensor_parallel_s(m, layout, passes) / layout.pipeline
        if layout.kind == "megatron":  # weights stay; gradients and parameters travel once a step
            comm, bubble = self._gather_s(layout, backward) / 2, (layout.pipeline - 1) * kernels
            return micro * kernels + bubble + max(0.0, comm - t["overlap"]["value"] * micro * kernels)
        comm = self._gather_s(layout, backward)
        return micro * (kernels + comm - min(t["overlap"]["value"] * comm, kernels))

    def logprob_s(self, tokens: float, length: float, layout: TrainLayout) -> float:
        """A log-probability pass; `tokens` are the busiest rank's, `length` the mean length its attention sees."""
        return self._pass_s(tokens, length, layout, backward=False)

    def train_step_s(self, tokens: float, length: float, layout: TrainLayout) -> float:
        """An optimizer step: forward, backward and AdamW on the sharded parameters."""
        update = self.model.num_params * constants()["training"]["optimizer_bytes"]["value"]
        return self._pass_s(tokens, length, layout, backward=True) + self.quantise_s(update / layout.gpus, 1)

    def transfer_s(self, gpus: int, colocated: bool) -> float:
        """New weights into every replica: quantise, then over NVLink (colocated) or the network (disaggregated)."""
        t, s = constants()["transfer"], self.model
        width = 2 if self.precision.rollout == "bf16" else 1
        num_bytes = s.linear_params * width + 2 * (s.num_params - s.linear_params)
        quantise = 0.0 if width == 2 else self.quantise_s(s.linear_params / max(1, gpus), t["quantise_bytes"]["value"])
        lanes = self.hw["nvlink_bw"] if colocated else self.hw["network_bw"] * self.tp
        return t["latency"]["value"] + quantise + num_bytes / self.tp / (lanes * t["network_efficiency"]["value"])


class UnitCosts:
    """The training loop's normalised units (clock.Units): one engine spread over `accelerators`, prompts free."""

    unit = "units"
    context_s = 0.0
    reserve_full = False

    def __init__(self, cost, accelerators: int, *, max_num_seqs: int):
        self.units = Units(cost)
        self.tp, self.max_num_seqs = accelerators, max_num_seqs

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        return self.units.decode_step(batch, self.tp)

    def prefill_s(self, tokens: int, length: float) -> float:
        return 0.0

    def kv_capacity(self) -> int:
        return 10**15

    def logprob_s(self, tokens: float, length: float, layout: TrainLayout) -> float:
        return 0.0

    def train_step_s(self, tokens: float, length: float, layout: TrainLayout) -> float:
        return self.units.train(tokens * layout.ranks, layout.gpus)

    def transfer_s(self, gpus: int, colocated: bool) -> float:
        return self.units.transfer()
