"""AIME 2024, MATH-500 and GSM8K of our own checkpoints, through lm-eval's evaluator in this process.

lm-eval costs six CPU seconds to import and the tasks a few more to load and self-check: both happen once per process,
so evaluate many checkpoints in one. The task files, the adapter and the grader are those of lm-eval's command line.
"""

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from jetrl_bench.config import EvaluateConfig
from jetrl_bench.record import SampleRow
from jetrl_bench.verify_text import normalise

MAX_ERROR_SHARE = 0.05
"""Above this share of answers that the grader failed on, no score is given."""
TASKS = Path(__file__).parent / "lm_eval_tasks"


@dataclass(frozen=True)
class Evaluation:
    rows: list[dict]
    """One per sample: task, problem, sample, status, tokens, finish_reason, answer."""
    scores: dict[str, float]
    """lm-eval's aggregate (avg@k) by benchmark; equal to the share of correct rows."""
    over_limit: int
    """Samples whose prompt left no room for an answer; their rows say truncated with 0 tokens."""


@cache
def _tasks(names: tuple[str, ...], data_dir: str, samples: int, temperature: float, max_tokens: int) -> dict:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval import utils
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    utils.env.from_string = cache(utils.env.from_string)  # lm-eval compiles the prompt's template anew for every row

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = {path.stem.removeprefix("jetrl_"): path for path in sorted(TASKS.glob("*.yaml"))}
    specs = []
    for name in names:
        if name not in known:
            raise ValueError(f"benchmark {name!r}: use one of {', '.join(known)}")
        spec = load_yaml(known[name])
        sampling = {"do_sample": temperature > 0, "temperature": temperature, "top_p": 1.0, "max_gen_toks": max_tokens}
        spec["generation_kwargs"] |= sampling
        specs.append(spec | {"repeats": samples, "dataset_kwargs": {"data_dir": data_dir}})
    return TaskManager(include_defaults=False).load(specs)


def evaluate_benchmarks(
    generate: Callable,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    data_dir: str | Path,
    tasks: Sequence[str],
    limit: int | None = None,
    max_tokens: int = 64,
    seed: int = 0,
    samples: int = 1,
    temperature: float = 1.0,
    stop_ids: tuple[int, ...] = (),
    bos_id: int | None = None,
    max_length: int | None = None,
) -> Evaluation:
    """`samples` answers to each of the first `limit` problems of each benchmark ("aime_2024", "math_500", "gsm8k").

    `data_dir` holds <name>.jsonl; nothing is downloaded. generate(prompts, max_tokens, seed, temperature, stop_ids)
    sees all prompts of a benchmark setting at once, samples of a problem side by side.
    """
    task_dict = _tasks(tuple(tasks), str(data_dir), samples, float(temperature), max_tokens)
    from lm_eval.evaluator import evaluate

    from jetrl_bench.lm_eval_model import EngineLM

    model = EngineLM(generate, encode, decode, seed=seed, stop_ids=stop_ids, bos_id=bos_id, max_length=max_length)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        results = evaluate(model, task_dict, limit=limit, bootstrap_iters=0, log_samples=True)
    rows, scores = [], {}
    for name in tasks:
        own = []
        for sample in results["samples"][f"jetrl_{name}"]:
            (replies,) = sample["filtered_resps"]
            if len(replies) != samples:
                raise ValueError(f"{name}: {sample['doc']['name']}: {len(replies)} of {samples} samples")
            for number, reply in enumerate(replies):
                own.append(
                    {
                        "task": name,
                        "problem": sample["doc"]["name"],
                        "sample": number,
                        "status": reply.verdict.status,
                        "tokens": reply.num_tokens,
                        "finish_reason": reply.finish_reason,
                        "answer": _spelling(reply.verdict.answer) if samples > 1 else None,
                    }
                )
        failed = [row for row in own if row["status"] == "error"]
        if len(failed) > MAX_ERROR_SHARE * len(own):
            first = ", ".join(f"{row['problem']} sample {row['sample']}" for row in failed[:10])
            raise ValueError(f"{name}: the grader failed on {len(failed)} of {len(own)} answers: {first}")
        scores[name] = float(results["results"][f"jetrl_{name}"]["accuracy,every_sample"])
        assert abs(scores[name] - sum(row["status"] == "correct" for row in own) / len(own)) < 1e-9
        rows += own
    return Evaluation(rows, scores, len(model.over_limit))


def _spelling(answer: str | None) -> str | None:
    """Canonical and short: equal spellings are one vote."""
    return None if answer is None else normalise(answer)[:200]


def _sample_rows(evaluation: Evaluation) -> list[SampleRow]:
    return [SampleRow(**row, flow="deployment") for row in evaluation.rows]


def evaluate_benchmark(unit, config: EvaluateConfig, data: Path) -> list[SampleRow]:
    """Rows of one evaluate.Unit (a checkpoint in one flow on one benchmark), sampled by the reference engine.

    Prompts are the task file's raw text, in the checkpoint's own tokens or in bytes; no chat template.
    """
    from jetrl_bench import tasks
    from jetrl_bench.evaluate import complete
    from jetrl_bench.rollout import Request
    from jetrl_bench.seeds import seed_of

    encode, decode, stop_ids = tasks.encode, tasks.decode, (tasks.EOS_ID,)
    tokenizer = tasks.load_tokenizer(unit.tokenizer)
    if tokenizer is not None:
        encode, decode = partial(tokenizer.encode, add_special_tokens=False), tokenizer.decode
        stop_ids = tuple(tokenizer.eos_token_id)

    def generate(prompts, max_tokens, seed, temperature, stop_ids):
        requests = []
        for index, prompt in enumerate(prompts):
            problem, sample = divmod(index, config.samples)
            requests.append(
                Request(
                    request_id=index,
                    problem_id=problem,
                    sample=sample,
                    token_ids=prompt,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=seed_of(seed, "evaluation", problem, sample),
                    stop_ids=stop_ids,
                )
            )
        return complete(unit, requests)

    shape = json.loads((Path(unit.weights) / "config.json").read_text(encoding="utf-8"))
    evaluation = evaluate_benchmarks(
        generate,
        encode,
        decode,
        data_dir=data,
        tasks=[unit.task],
        limit=config.limit_of(unit.task),
        max_tokens=config.max_tokens,
        seed=unit.seed,
        samples=config.samples,
        temperature=config.temperature,
        stop_ids=stop_ids,
        max_length=shape["max_position_embeddings"],
    )
    return _sample_rows(evaluation)


class Scripted(NamedTuple):
    token_ids: list[int]
    finish_reason: str = "stop"


def scripted(script: str, name: str, config: EvaluateConfig, data: Path) -> list[SampleRow]:
    """Rows of a model that answers every problem with its gold answer ("gold"), or with nothing ("empty").

    The first scores exactly 1, the second exactly 0, through the path that every checkpoint takes; ValueError if not.
    """
    from jetrl_bench.tasks import decode, encode

    max_tokens = max(config.max_tokens, 256)
    task_dict = _tasks((name,), str(data), config.samples, float(config.temperature), max_tokens)
    task = task_dict["tasks"][f"jetrl_{name}"]
    golds = {task.doc_to_text(document): document["gold"] for document in task.test_docs()}

    def generate(prompts, max_tokens, seed, temperature, stop_ids):
        texts = [rf"\boxed{{{golds[decode(prompt)]}}}" if script == "gold" else "" for prompt in prompts]
        return [Scripted(encode(text)) for text in texts]

    evaluation = evaluate_benchmarks(
        generate,
        encode,
        decode,
        data_dir=data,
        tasks=[name],
        limit=config.limit_of(name),
        max_tokens=max_tokens,
        samples=config.samples,
        temperature=config.temperature,
    )
    expected = {"gold": 1.0, "empty": 0.0}[script]
    if evaluation.scores[name] != expected:
        bad = next(row for row in evaluation.rows if (row["status"] == "correct") != bool(expected))
        raise ValueError(f"{name}: the {script} script scored {evaluation.scores[name]}, not {expected}: {bad}")
    return _sample_rows(evaluation)
