"""The supervised warm-up that every method of a seed starts from.

RL needs a start at which some answers are right and some wrong. Demonstrations whose steps are wrong with probability
`demo_error`, and consistently continued, calibrate it: a model that imitates them perfectly still has pass@1 near
(1 - demo_error)^steps. Training stops at the first check at which pass@1, sampled at temperature 1 through the rollout
engine, reaches `stop_pass_at_1`. Demonstrations cover the lengths of base.task, so that one checkpoint serves
experiments with short and with long chains; the check has its own number of steps.

OUT gets a Hugging Face checkpoint (fp32) and base.json.
"""

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch

from jetrl_bench import devices, record
from jetrl_bench.checkpoint import load_hf, save_hf
from jetrl_bench.config import BaseConfig, FlowConfig, ModelConfig, RunSettings, TaskConfig, TrainConfig
from jetrl_bench.logprobs import Batch, sequence_logprobs
from jetrl_bench.model import Decoder, init_model
from jetrl_bench.optimizer import AdamW
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import ReferenceEngine, Request
from jetrl_bench.seeds import seed_of
from jetrl_bench.strict import Strict, read_yaml, validate
from jetrl_bench.tasks import VOCAB_SIZE, ChainTask, load_tokenizer, make_task

BETAS = (0.9, 0.95)
GRAD_CLIP = 1.0


class BaseSettings(Strict):
    """What decides a warm-up checkpoint (the matching part of RunSettings)."""

    base_index: int
    base: BaseConfig
    model: ModelConfig

    def digest(self) -> str:
        from jetrl_bench.config import _digest

        return _digest(self.model_dump(mode="json"))


def warm_up(settings: BaseSettings | RunSettings, out: Path, device: str = "cpu") -> dict:
    """Train (or copy) the base checkpoint into `out`; returns what base.json says."""
    base, index, out = settings.base, settings.base_index, Path(out)
    if base.checkpoint is not None:
        return _copy(settings, out)
    task = make_task(base.task)
    if not isinstance(task, ChainTask):
        raise ValueError(f"base.task.name {base.task.name!r} has no demonstrations; give base.checkpoint")
    flow = make_flow(FlowConfig())
    model = init_model(settings.model, VOCAB_SIZE, seed_of(index, "base"))
    widen_(model)
    model.to(device)
    optimizer = AdamW(model.parameters(), lr=base.lr, betas=BETAS, weight_decay=0.0, foreach=True)
    pass_at_1, updates = 0.0, 0
    while updates < base.max_updates:
        batch = demonstrations(task, base, index, updates).to(device)
        loss = -sequence_logprobs(model, flow, batch, 1.0)[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        updates += 1
        if updates % base.check_every == 0 or updates == base.max_updates:
            pass_at_1 = check(model, settings, updates)
            print(f"base {index}: update {updates} loss {loss.item():.4f} pass@1 {pass_at_1:.3f}", flush=True)
            if pass_at_1 >= base.stop_pass_at_1:
                break
    if pass_at_1 < base.stop_pass_at_1:
        print(f"base {index}: pass@1 {pass_at_1:.3f} is below base.stop_pass_at_1 after base.max_updates {updates}")
    return _write(model, settings, out, {"pass_at_1": pass_at_1, "updates": updates, "task": task.revision})


def widen_(model: Decoder) -> None:
    """Rescale Normal(0, 0.02), made for wide models, to a narrow one: 1/sqrt(fan in), embeddings twice that.

    At width 128 the chain is learned in a few hundred updates from here and not in 1200 from 0.02.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                gain = 2.0 if "embed_tokens" in name else 1.0
                parameter.mul_(gain * parameter.shape[1] ** -0.5 / 0.02)


def demonstrations(task: ChainTask, base: BaseConfig, index: int, update: int) -> Batch:
    """Demonstrations of one update: a function of base index and update alone."""
    rows, prompt_lens = [], []
    for row in range(base.batch_size):
        number = update * base.batch_size + row
        problem = task.problem("train", number, seed_of(index, "base", 0))
        prompt = task.prompt(problem)
        rows.append(
            torch.tensor(prompt + task.demonstration(problem, base.demo_error, seed_of(index, "base", 1, number)))
        )
        prompt_lens.append(len(prompt))
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(token_ids, torch.tensor(prompt_lens), torch.tensor([len(row) for row in rows]))


def check(model: Decoder, settings: BaseSettings | RunSettings, update: int) -> float:
    """pass@1 at temperature 1 on `check_problems` problems of `stop_steps` steps, sampled by the engine in BF16."""
    base = settings.base
    steps = {"min_steps": base.stop_steps, "max_steps": base.stop_steps}
    task = make_task(TaskConfig.model_validate(base.task.model_dump() | steps))
    problems = task.problems("train", base.check_problems, seed_of(settings.base_index, "base", 2))
    prompts = [task.prompt(problem) for problem in problems]
    longest = task.longest_response()
    flow = make_flow(FlowConfig())
    engine = ReferenceEngine(
        settings.model, VOCAB_SIZE, flow, max_slots=len(problems), max_len=max(map(len, prompts)) + longest,
        device=model.head_weight.device,
    )  # fmt: skip
    engine.load_weights(flow.export(model.named_parameters()), version=0, kv="keep")
    for number, prompt in enumerate(prompts):
        seed = seed_of(settings.base_index, "base", 3, update, number)
        engine.add(Request(number, number, 0, prompt, longest, 1.0, seed, task.stop_ids))
    rewards = []
    while engine.num_unfinished():
        rewards += [task.verify(problems[c.problem_id], c).reward for c in engine.step()]
    engine.close()
    return sum(rewards) / len(rewards)


def read_base(folder: Path, settings: RunSettings) -> dict:
    """base.json of a checkpoint; ValueError where it is absent, altered, or another settings' warm-up."""
    path = Path(folder) / "base.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: run `base` first") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if facts.get("digest") != settings.base_digest():
        raise ValueError(f"{path}: digest {facts.get('digest')} is not the settings' {settings.base_digest()}")
    if facts.get("sha256") != _sha256(Path(folder)):
        raise ValueError(f"{path}: altered: the weights' SHA-256 is not the one written here")
    return facts


def _copy(settings: BaseSettings | RunSettings, out: Path) -> dict:
    """Start from a given Hugging Face folder; its tokenizer comes along, its pass@1 is not measured here."""
    source = Path(settings.base.checkpoint)
    try:
        config, _, _ = load_hf(source)
    except OSError as error:
        raise ValueError(f"base.checkpoint {source}: {error}") from None
    if config != settings.model:
        raise ValueError(f"base.checkpoint {source}: config.json is not the model of the settings (key model)")
    load_tokenizer(source)
    temporary = _fresh(out)
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    return _finish(temporary, settings, out, {"pass_at_1": None, "updates": 0, "task": settings.base.task.name})


def _write(model: Decoder, settings: BaseSettings | RunSettings, out: Path, facts: dict) -> dict:
    temporary = _fresh(out)
    save_hf(model, settings.model, temporary)
    return _finish(temporary, settings, out, facts)


def _fresh(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def _finish(temporary: Path, settings: BaseSettings | RunSettings, out: Path, facts: dict) -> dict:
    digest = settings.base_digest() if isinstance(settings, RunSettings) else settings.digest()
    facts = {"digest": digest, "base_index": settings.base_index, "sha256": _sha256(temporary), **facts}
    record.write_json(temporary / "base.json", facts)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
    return facts


def _sha256(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors in it")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", type=Path, required=True, help="base_index, base and model of a run (JSON)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--gpus", type=int, default=0, help="train.gpus: where the warm-up runs, no part of the result's name"
    )


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(int(os.environ.get("JETRL_THREADS", "1")))
    settings = validate(BaseSettings, read_yaml(args.settings), str(args.settings))
    train = TrainConfig(gpus=args.gpus)
    for line in devices.missing(train, set()):
        raise ValueError(line)
    warm_up(settings, args.out, devices.device_of(train))
    return 0
