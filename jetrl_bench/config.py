"""Settings: strict, frozen, torch-free. Everything that decides a number stands here, and nothing else does.

`load(paths, overrides)` reads YAML files (later ones merge dictionaries and replace lists, as Snakemake does),
`runs(config)` resolves the selected experiments into `RunSettings`, one per (method, seed), and `RunSettings.digest()`
names the run: equal settings, equal digest, one run on disk.
"""

import functools
import hashlib
import importlib
import json
import pkgutil
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jetrl_bench.strict import Real, Strict, known_name, merge, read_yaml, validate

Format = Literal["e4m3", "e5m2", "e3m2", "e4m1", "e2m1"]
Groups = Literal["block", "row", "tensor"]
Benchmark = Literal["aime_2024", "math_500", "gsm8k"]


class ModelConfig(Strict):
    """A Qwen3/Qwen2/Llama-shaped decoder (one Hugging Face config.json, in our words)."""

    arch: Literal["llama", "qwen2", "qwen3"] = "llama"
    """qwen2 adds biases to q, k and v; qwen3 adds RMS norms on q and k."""
    hidden_size: int = Field(128, ge=16)
    num_layers: int = Field(2, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int = Field(4, ge=1)
    head_dim: int = Field(32, ge=8)
    intermediate_size: int = Field(256, ge=16)
    rope_theta: Real = Field(10000.0, gt=0)
    norm_eps: Real = Field(1e-6, gt=0)
    tie_embeddings: bool = True
    max_position: int = Field(4096, ge=16)
    """Longest sequence, prompt and response, in tokens."""

    @model_validator(mode="after")
    def _heads(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        return self


class TaskConfig(Strict):
    """The labelled modular chain: `v0 a +3 b *7 ... =` answered by `a +3 r0 b *7 r1 ...`; 3 tokens per step."""

    name: Literal["chain", "arithmetic"] = "chain"
    """chain: the toy task. arithmetic: one-step sums in text, for a pretrained model."""
    min_steps: int = Field(20, ge=1)
    """Fewest chain steps of a problem; steps are drawn uniformly from min_steps to max_steps."""
    max_steps: int = Field(20, ge=1)
    num_labels: int = Field(30, ge=1)
    """Step labels of the vocabulary; step i of a problem carries label i: no problem has more than num_labels steps."""
    cycles: int = Field(1, ge=1)
    """Times the response walks the chain: the response has 3 * steps * cycles + 1 tokens (long responses)."""

    @model_validator(mode="after")
    def _range(self):
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is above max_steps {self.max_steps}")
        if self.max_steps > self.num_labels:
            raise ValueError(
                f"max_steps {self.max_steps} is above num_labels {self.num_labels}: a label names one step"
            )
        return self


class BaseConfig(Strict):
    """The supervised warm-up that every method of a seed starts from."""

    checkpoint: str | None = None
    """A Hugging Face folder to start from instead of a warm-up (None: train one)."""
    task: TaskConfig = TaskConfig(min_steps=6, max_steps=22)
    """What the demonstrations look like (their length range covers every experiment's)."""
    lr: Real = Field(2e-3, gt=0)
    batch_size: int = Field(32, ge=1)
    demo_error: Real = Field(0.04, ge=0, lt=1)
    """Share of demonstrated steps that are wrong and consistently continued: it calibrates the starting pass@1."""
    stop_pass_at_1: Real = Field(0.33, gt=0, le=1)
    stop_steps: int = Field(20, ge=1)
    """Chain steps of the problems on which the stop criterion is measured."""
    check_every: int = Field(20, ge=1)
    check_problems: int = Field(128, ge=8)
    max_updates: int = Field(1200, ge=1)


class FlowConfig(Strict):
    """The precision flow: what is quantised, on which side, with which scale."""

    rollout: Literal["bf16", "fp8", "fp32"] = "bf16"
    """Linear layers of the rollout. fp32: everything on both sides, nothing rounded; slow, for comparisons."""
    train: Literal["bf16", "fp8", "fp32"] = "bf16"
    """Linear layers of training: all three GEMMs unless forward_only. fp32 with rollout fp32 only."""
    format: Format = "e4m3"
    """Format of the forward operands (weights and activations)."""
    grad_format: Format = "e4m3"
    """Format of the operands of dgrad and wgrad."""
    scale: Literal["pow2", "fp32"] = "pow2"
    """Power-of-two (UE8M0) or fp32 scales."""
    activation_groups: Groups = "block"
    """block: 1x128 along the reduction. row: one scale a token. tensor: one scale (breaks batch invariance)."""
    weight_groups: Groups = "block"
    """block: 128x128."""
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """fp8: K and V are quantised per token and head, in rollout, and in training too where train is fp8."""
    lm_head: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Output projection, the same on both sides."""
    train_kernels: Literal["same", "other"] = "same"
    """other: training uses another attention and reduction order than the rollout, as real stacks do."""
    forward_only: bool = False
    """Quantise only the forward GEMM of training; dgrad and wgrad stay bf16."""
    backend: Literal["emulated", "torch", "te"] = "emulated"
    """emulated: bit by bit on any device. torch: scaled_mm. te: Transformer Engine. Never a silent fallback."""
    rollout_rule: str = "default"
    """Scale rule preset of the rollout side (fp8.RULES); default: the textbook rule of `scale`."""
    train_rule: str = "default"
    """Scale rule preset of the training side."""
    wgrad_input: Literal["from_bf16", "from_saved_fp8"] = "from_bf16"
    """What wgrad quantises along tokens: the bf16 activation, or the FP8 one saved by the forward (Jet-RL, COAT)."""
    wgrad_output: Literal["fp32", "bf16"] = "fp32"
    grad_transport: Literal["bf16", "fp8"] = "bf16"
    """Gradient passed between operators."""
    master: Literal["fp32", "bf16", "bf16_sr"] = "fp32"
    """Master weights; bf16_sr rounds stochastically."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of gradients' codes (forward operands always round to nearest even)."""

    @model_validator(mode="after")
    def _fp32(self):
        if "fp32" in (self.rollout, self.train):
            if self.rollout != self.train:
                raise ValueError(
                    f"rollout {self.rollout!r} with train {self.train!r}: fp32 is one setting of both sides; "
                    "set both to 'fp32'"
                )
            for name, field in type(self).model_fields.items():
                if name not in ("rollout", "train") and getattr(self, name) != field.default:
                    raise ValueError(f"{name} {getattr(self, name)!r} has no place in an fp32 flow; leave it out")
        return self


class SyncConfig(Strict):
    """When the rollout engine receives weights."""

    schedule: Literal["barrier", "concurrent", "inflight"] = "barrier"
    """barrier: generate, then train. concurrent: generate the next batch meanwhile. inflight: swap mid-sequence."""
    updates_per_rollout: int = Field(4, ge=1)
    """G, optimizer steps per rollout batch (barrier and concurrent); in-flight runs train on every batch once."""
    kv: Literal["keep", "recompute"] | None = None
    """What happens to the KV cache of running sequences at an in-flight swap; required there, meaningless elsewhere."""
    max_lag: int | None = Field(None, ge=1)
    """Hard bound on lag in optimizer steps (in-flight): the trainer stalls rather than exceed it."""
    slots_per_batch: Real = Field(3.0, gt=0)
    """Running sequences of the in-flight engine as a multiple of samples_per_update (I x H / B)."""

    @model_validator(mode="after")
    def _kv(self):
        if (self.schedule == "inflight") != (self.kv is not None):
            raise ValueError("kv must be 'keep' or 'recompute' with schedule inflight, and is refused elsewhere")
        if self.schedule == "inflight" and self.max_lag is None:
            raise ValueError("schedule inflight needs max_lag, in optimizer steps")
        return self


class LossConfig(Strict):
    """The policy-gradient loss: anchor x correction x level x surrogate (loss.py)."""

    anchor: Literal["proximal", "rollout"] = "proximal"
    """Denominator of the ratio: the trainer's own recomputed log-probs, or the engine's."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """What multiplies the loss: nothing, min(w, cap), or w in [mask_low, mask_high]; w = exp(proximal - rollout)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """At which level the correction weight is formed (geometric: mask only)."""
    surrogate: Literal["reinforce", "ppo", "dual_clip", "cispo", "gspo"] = "ppo"
    clip_low: Real = Field(0.2, gt=0)
    clip_high: Real = Field(0.2, gt=0)
    dual_clip: Real = Field(3.0, gt=1)
    cap: Real = Field(2.0, gt=0)
    """Truncation of the correction weight (TIS) or of the clamped REINFORCE/CISPO weight."""
    mask_low: Real = Field(0.5, ge=0)
    mask_high: Real = Field(2.0, gt=0)
    normalizer: Literal["token", "sequence", "batch", "constant"] = "token"
    """token: valid tokens of the optimizer step. sequence: mean per sequence, then over sequences. batch: token sum
    over sequences. constant: token sum over sequences x max_tokens."""
    advantage: Literal["center", "center_scale", "leave_one_out"] = "center_scale"
    """Group baseline; center_scale divides by the group's standard deviation (GRPO)."""

    @model_validator(mode="after")
    def _pairs(self):
        if self.level == "geometric" and self.correction != "mask":
            raise ValueError("level geometric is defined for correction mask only")
        return self


class TrainConfig(Strict):
    group_size: int = Field(8, ge=1)
    """R, rollouts per prompt."""
    samples_per_update: int = Field(16, ge=1)
    """B, sequences per optimizer step; a rollout batch of a barrier schedule holds G * B sequences."""
    optimizer_steps: int = Field(280, ge=1)
    max_tokens: int = Field(64, ge=1)
    """Response limit in tokens."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are dropped and listed."""
    temperature: Real = Field(1.0, gt=0)
    """Applied before the softmax on both sides; top_p is 1 and top_k is off in training."""
    betas: tuple[Real, Real] = (0.9, 0.95)
    weight_decay: Real = Field(0.0, ge=0)
    grad_clip: Real = Field(1.0, gt=0)
    state_every: int = Field(40, ge=1)
    """Optimizer steps between two resumable states."""
    micro_batch_sequences: int = Field(64, ge=1)
    engine: Literal["reference", "vllm"] = "reference"
    gpus: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _groups(self):
        if self.samples_per_update % self.group_size:
            raise ValueError(
                f"samples_per_update {self.samples_per_update} is not a multiple of group_size {self.group_size}"
            )
        return self


class EvaluateConfig(Strict):
    problems: int = Field(2048, ge=1)
    """Held-out problems of the training task."""
    temperature: Real = Field(1.0, ge=0)
    """0 is greedy."""
    benchmarks: list[Benchmark] = ["aime_2024", "math_500"]
    samples: int = Field(1, ge=1)
    """k, samples per benchmark problem."""
    max_tokens: int = Field(64, ge=1)
    """Token budget of a benchmark answer."""
    limit: Annotated[int, Field(ge=1)] | dict[Benchmark, Annotated[int, Field(ge=1)]] | None = None
    """Use only the first problems: of each benchmark, or of those named here (the table says so)."""

    def limit_of(self, benchmark: str) -> int | None:
        return self.limit.get(benchmark) if isinstance(self.limit, dict) else self.limit


class CostConfig(Strict):
    """Modelled time of the training loop in normalised units (never hours of a larger model)."""

    preset: Literal["units"] = "units"
    accelerators: int = Field(8, ge=2)
    """Equal in every arm of a comparison."""
    generation_accelerators: int | None = Field(None, ge=1)
    """In-flight and concurrent: how many generate (None: the best split, found before the run)."""
    decode_base: Real = Field(1.0, gt=0)
    """a: units of a decode step whatever its batch."""
    decode_per_sequence: Real = Field(0.02, ge=0)
    """b: units a sequence adds, per accelerator."""
    train_per_token: Real = Field(0.035, gt=0)
    """Units of forward, backward and update per trained token on one accelerator."""
    transfer: Real = Field(0.5, ge=0)
    """Units a weight update pauses generation."""


class Method(Strict):
    """A method is data: a precision flow, a synchronisation schedule and a loss."""

    flow: FlowConfig = FlowConfig()
    sync: SyncConfig = SyncConfig()
    loss: LossConfig = LossConfig()
    summary: str = ""
    """One line for tables and the paper."""


class Experiment(Strict):
    methods: list[str] = Field(min_length=1)
    settings: dict[str, Any] = {}
    """Overrides of lr, task, train, cost for every run of the experiment."""
    problems: int | None = Field(None, ge=1)
    """Held-out problems of the experiment's runs, instead of evaluate.problems."""
    title: str = ""
    baseline: str | None = None
    """The method that ratios and paired differences are taken against."""


class RunSettings(Strict):
    """Everything that decides the numbers of one run; the method's name is not among them."""

    seed: int = Field(ge=0)
    base_index: int = Field(ge=0)
    replicate: int = Field(ge=0)
    lr: Real = Field(gt=0)
    model: ModelConfig
    task: TaskConfig
    base: BaseConfig
    train: TrainConfig
    cost: CostConfig
    method: Method

    @model_validator(mode="after")
    def _consistent(self):
        if self.task.name != self.base.task.name:
            raise ValueError(f"task.name {self.task.name!r} is not the warm-up's {self.base.task.name!r}")
        return self

    def digest(self) -> str:
        """First 12 hex digits of the settings' SHA-256; summaries and defaults' spelling do not enter."""
        return _digest(self.model_dump(mode="json"))

    def base_digest(self) -> str:
        return _digest(
            {
                "base": self.base.model_dump(mode="json"),
                "model": self.model.model_dump(mode="json"),
                "base_index": self.base_index,
            }
        )


class Config(Strict):
    """The whole suite (config/config.yaml)."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field([0, 1, 2], min_length=1)
    num_bases: int = Field(3, ge=1)
    """Seed n uses warm-up checkpoint n mod num_bases and replicate n div num_bases."""
    lr: Real = Field(2e-4, gt=0)
    strict: bool = False
    """Fail instead of printing "not evaluated" where a benchmark's data cannot be had."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    base: BaseConfig = BaseConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    cost: CostConfig = CostConfig()
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    """name: {kind: <file in methods/>, flow: {...}, sync: {...}, loss: {...}}: overrides on the kind's own settings."""
    experiments: dict[str, Experiment | list[str]] = Field(min_length=1)
    groups: dict[str, list[str]] = {}
    """Named lists of experiments."""
    select: list[str] = Field(min_length=1)
    """Experiments or groups to run; later config files replace this list."""

    @model_validator(mode="after")
    def _names(self):
        for name in [*self.methods, *self.experiments]:
            if not re.fullmatch(r"[a-z0-9_]+", name):
                raise ValueError(f"name {name!r} must match [a-z0-9_]+")
        for name in self.methods:
            self.method(name)
        for title, experiment in self.experiments.items():
            for name in _methods_of(experiment):
                known_name(name, self.methods, f"experiments.{title}: method")
            baseline = None if isinstance(experiment, list) else experiment.baseline
            if baseline is not None:
                known_name(baseline, _methods_of(experiment), f"experiments.{title}.baseline: method")
        for name in self.select:
            known_name(name, {**self.experiments, **self.groups}, "select: experiment")
        for group, members in self.groups.items():
            for name in members:
                known_name(name, self.experiments, f"groups.{group}: experiment")
        self.runs()
        return self

    def method(self, name: str) -> Method:
        entry = dict(self.methods[known_name(name, self.methods, "method")])
        kind = entry.pop("kind", None)
        if kind is None:
            raise ValueError(f"methods.{name}: key 'kind' is missing; nearest: one of {', '.join(sorted(registry()))}")
        base = registry()[known_name(kind, registry(), f"methods.{name}: kind")]
        return validate(Method, merge(base.model_dump(), entry), f"methods.{name}")

    def selected(self) -> dict[str, Experiment]:
        names: list[str] = []
        for name in self.select:
            names += [n for n in self.groups.get(name, [name]) if n not in names]
        return {n: _experiment(self.experiments[n]) for n in names}

    def experiment_runs(self, experiment: str) -> list[tuple[str, RunSettings]]:
        """(method name, settings) for every method and seed of one experiment."""
        entry = _experiment(self.experiments[experiment])
        common = self.model_dump(mode="json", include={"lr", "task", "train", "cost"})
        for key in entry.settings:
            known_name(key, common, f"experiments.{experiment}.settings: key")
        merged = merge(common, entry.settings)
        out = []
        for name in entry.methods:
            for seed in self.seeds:
                settings = {
                    **merged,
                    "seed": seed,
                    "base_index": seed % self.num_bases,
                    "replicate": seed // self.num_bases,
                    "model": self.model.model_dump(mode="json"),
                    "base": self.base.model_dump(mode="json"),
                    "method": self.method(name).model_dump(mode="json"),
                }
                settings["method"].pop("summary")
                run = validate(RunSettings, settings, f"experiments.{experiment}")
                rollout_batch = run.method.sync.updates_per_rollout
                if run.method.sync.schedule != "inflight" and run.train.optimizer_steps % rollout_batch:
                    raise ValueError(
                        f"experiments.{experiment}: train.optimizer_steps {run.train.optimizer_steps} is not a "
                        f"multiple of updates_per_rollout {rollout_batch} of method {name}"
                    )
                out.append((name, run))
        return out

    def runs(self) -> dict[tuple[str, int, str], RunSettings]:
        """All selected runs, keyed by (method, seed, digest)."""
        return {
            (name, run.seed, run.digest()): run for exp in self.selected() for name, run in self.experiment_runs(exp)
        }


def _methods_of(experiment: Experiment | list[str]) -> list[str]:
    return experiment if isinstance(experiment, list) else experiment.methods


def _experiment(entry: Experiment | list[str]) -> Experiment:
    return Experiment(methods=entry) if isinstance(entry, list) else entry


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


@functools.cache
def registry() -> dict[str, Method]:
    """Every method: one file in jetrl_bench/methods/, or an entry point of group jetrl_bench.methods."""
    from jetrl_bench import methods

    found = {}
    for info in pkgutil.iter_modules(methods.__path__):
        found[info.name] = importlib.import_module(f"jetrl_bench.methods.{info.name}").METHOD
    for point in entry_points(group="jetrl_bench.methods"):
        found[point.name] = point.load()
    return found


def load(paths: list[Path | str], overrides: dict | None = None) -> Config:
    """Read and merge config files and overrides; raise ValueError with one line that names file and key."""
    data: dict = {}
    for path in paths:
        data = merge(data, read_yaml(Path(path)))
    data = merge(data, overrides or {})
    return validate(Config, data, ", ".join([*map(str, paths), *(["--set"] if overrides else [])]) or "config")


def json_schema() -> dict:
    """The generated JSON schema (workflow/schemas/config.schema.json)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
