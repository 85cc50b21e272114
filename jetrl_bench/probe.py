"""The mismatch probe: how far apart are a rollout's and a trainer's log-probabilities of the same tokens?

From anybody's stack (`--logprobs FILE.jsonl`), or measured on a checkpoint under two precision flows.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path

from jetrl_bench.strict import nearest

HELP = """\
How far apart are a rollout engine and a trainer on the same tokens?

(a) A CHECKPOINT, ours or any Llama, Qwen2 or Qwen3 folder of Hugging Face: sample in one flow, score in another.

      python -m jetrl_bench probe --checkpoint DIR --rollout fp8_rollout --prompts prompts.txt
      python -m jetrl_bench probe --checkpoint DIR --rollout fp8_rollout,scale=fp32 --prompts chat.jsonl --chat
      python -m jetrl_bench probe --checkpoint DIR --rollout format=e2m1 --train jetrl_exact --prompts chain
      python -m jetrl_bench probe --checkpoint DIR --grid --prompts prompts.txt     (formats, scales, rules, kernels)

    A flow is PRESET[,key=value...]; presets are the methods (bf16, fp8_rollout, jetrl, jetrl_exact, ...), keys those of
    `flow` in config/README.md; key=value alone starts from jetrl_exact. --rollout uses the flow's rollout side, --train
    (default: the same flow) its training side. The difference is split into a quantisation and a kernel term.

(b) YOUR STACK: write one JSON line per sampled response, response tokens only (no prompt):

      {"token_ids": [310, 264, 2], "rollout_logprobs": [-0.31, -2.20, -0.01], "logprobs": [-0.33, -2.11, -0.01]}

    rollout_logprobs  what the engine returned for the tokens it sampled      (natural log, temperature applied:
                      vLLM: SamplingParams(logprobs=0), logprobs_mode="processed_logprobs"; verl: rollout_log_probs)
    logprobs          what the trainer recomputes for them with the same weights, before any optimizer step
                      (verl: old_log_probs; TRL: old_per_token_logps)
    loss_mask         optional, 0 for tokens that nobody sampled (tool output)
    Other keys are ignored. A few hundred responses are enough. Then:

      python -m jetrl_bench probe --logprobs dump.jsonl --out results/probe/mine

OUT receives probe.md (the table), probe.csv, probe.json (the record) and mismatch.png/.pdf/.svg/.csv (the figure).
"""

READING = """\
how to read it: mean of exp(d) must be 1 within its error, else the tokens were not sampled from rollout_logprobs
(temperature, top-p, stale weights). k3 estimates KL(mu || pi) in nats per token. Published values: one precision in
other engines 1e-5 to 1e-3 (dense), an FP8 rollout of a BF16 trainer 3e-3 to 4e-3; one kernel set on both sides gives
exactly 0. The sequence-level effective sample size is the share of responses that an importance-corrected update still
uses; docs/numerics.md discusses what was seen on SmolLM2-135M."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = HELP, READING
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--logprobs", type=Path, metavar="FILE.jsonl", help="log-probabilities of any engine and trainer")
    what.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a Hugging Face folder (Llama, Qwen2, Qwen3; ours)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: a new one in results/probe)")
    of = parser.add_argument_group("with --checkpoint")
    of.add_argument("--rollout", metavar="FLOW", help="the flow whose rollout side samples")
    of.add_argument("--train", metavar="FLOW", help="the flow whose training side scores (default: the --rollout flow)")
    of.add_argument("--grid", action="store_true", help="all pairs of flows that docs/numerics.md discusses")
    of.add_argument("--prompts", metavar="FILE", help=".txt, .jsonl (prompt, question, problem, token_ids), or: chain")
    of.add_argument("--chat", action="store_true", help="wrap each prompt in the checkpoint's chat template")
    of.add_argument(
        "--num-prompts", type=_positive, default=32, metavar="N", help="use the first N (default %(default)s)"
    )
    of.add_argument("--max-tokens", type=_positive, default=64, metavar="N", help="per response (default %(default)s)")
    of.add_argument("--temperature", type=float, default=1.0, help="above 0 (default %(default)s)")
    of.add_argument("--seed", type=int, default=0, help="of the sampling (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    from jetrl_bench import probe_report

    if args.logprobs is not None:
        record, name = from_logprobs(args.logprobs), args.logprobs.stem
    elif args.checkpoint is not None:
        return from_checkpoint(args)
    else:
        raise ValueError("probe needs --logprobs FILE.jsonl or --checkpoint DIR; see probe --help")
    out = args.out or new_folder(Path("results/probe"), name)
    paths = probe_report.write(record, out)
    print(probe_report.summary(record))
    print(f"wrote {', '.join(path.name for path in paths)} to {out}")
    return 0


def from_checkpoint(args: argparse.Namespace) -> int:
    from jetrl_bench import probe_checkpoint, probe_grid, probe_report

    if args.prompts is None:
        raise ValueError("probe --checkpoint needs --prompts FILE (or: --prompts chain for our own checkpoints)")
    if args.grid == (args.rollout is not None):
        raise ValueError("probe --checkpoint needs either --rollout FLOW or --grid")
    if args.temperature <= 0:
        raise ValueError(f"--temperature {args.temperature} is not above 0")
    checkpoint = probe_checkpoint.load(args.checkpoint)
    prompts = probe_checkpoint.read_prompts(args.prompts, checkpoint, args.num_prompts, args.chat)
    sampling = probe_checkpoint.Sampling(args.max_tokens, args.temperature, args.seed)
    source = {"prompts_from": Path(args.prompts).name, "chat_template": "yes" if args.chat else "no"}
    out = args.out or new_folder(Path("results/probe"), args.checkpoint.resolve().name)
    if args.grid:
        probe_grid.run(checkpoint, prompts, sampling, source, out)
    else:
        record = probe_checkpoint.probe(checkpoint, args.rollout, args.train or args.rollout, prompts, sampling, source)
        probe_report.write(record, out)
        print(probe_report.summary(record))
    print(f"wrote {out}")
    return 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def new_folder(parent: Path, name: str) -> Path:
    """parent/name, or parent/name-2, -3, ...: nothing is ever overwritten by default."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def from_logprobs(path: Path):
    """The record of a log-probability file."""
    from jetrl_bench.probe_report import ProbeRecord, compare

    tokens, lines, ignored = read_logprobs(path)
    total = compare("total", "total", f"rollout_logprobs of {path.name}", f"logprobs of {path.name}", tokens)
    notes = []
    if ignored:
        notes.append(f"{ignored} tokens have loss_mask 0 and are left out.")
    if total.numbers.nonzero == 0:
        notes.append(
            "Both columns are equal for every token: the stack is exact, or one column was written twice. Were the "
            "logprobs recomputed by the trainer?"
        )
    error = total.numbers.mean_weight_se
    if error is not None and abs(total.numbers.mean_weight - 1) > 4 * error + 1e-6:
        notes.append(
            "The mean of exp(d) is more than 4 standard errors from 1: the tokens do not look sampled from "
            "rollout_logprobs (temperature, top-p, other weights), or a few tokens carry nearly all weight. "
            "k1 and k3 then do not estimate the KL."
        )
    source = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "lines": lines}
    return ProbeRecord(mode="logprobs", source=source, comparisons=[total], notes=notes)


def read_logprobs(path: Path):
    """(Tokens, lines, tokens masked out); ValueError names file and line."""
    import torch

    from jetrl_bench.probe_report import Tokens

    columns = {"token_ids": [], "rollout_logprobs": [], "logprobs": [], "sequence": [], "position": []}
    ignored = number = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}:{number}"
                row = _parse(raw, where)
                keep = [i for i, mask in enumerate(row["loss_mask"]) if mask]
                if not keep:
                    raise ValueError(f"{where}: no token has loss_mask 1")
                ignored += len(row["loss_mask"]) - len(keep)
                for key in ("token_ids", "rollout_logprobs", "logprobs"):
                    columns[key] += [row[key][i] for i in keep]
                columns["sequence"] += [number - 1] * len(keep)
                columns["position"] += keep
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not number:
        raise ValueError(f"{path}: no lines")
    return (
        Tokens(
            rollout_T=torch.tensor(columns["rollout_logprobs"], dtype=torch.float64),
            proximal_T=torch.tensor(columns["logprobs"], dtype=torch.float64),
            sequence_ids_T=torch.tensor(columns["sequence"]),
            positions_T=torch.tensor(columns["position"]),
            token_ids_T=torch.tensor(columns["token_ids"]),
        ),
        number,
        ignored,
    )


def _parse(raw: bytes, where: str) -> dict:
    try:
        row = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        text = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise ValueError(f"{where}: not JSON: {text}") from None
    except RecursionError:
        raise ValueError(f"{where}: not JSON: nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with token_ids, rollout_logprobs and logprobs")
    out = {}
    for key in ("token_ids", "rollout_logprobs", "logprobs", "loss_mask"):
        if key not in row:
            if key != "loss_mask":
                raise ValueError(
                    f"{where}: key {key!r} is missing; {nearest(key, row) if row else 'the line is empty'}"
                )
            out[key] = [1] * len(out["token_ids"])
            continue
        values = row[key]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}: {key} must be a list with one number per token")
        if key != "token_ids" and len(values) != len(out["token_ids"]):
            raise ValueError(f"{where}: {key} has {len(values)} values, token_ids has {len(out['token_ids'])}")
        for position, value in enumerate(values):
            fault = _fault(key, value)
            if fault:
                raise ValueError(f"{where}: {key}[{position}] is {json.dumps(value)[:40]}: {fault}")
        out[key] = values
    return out


def _fault(key: str, value) -> str:
    if key == "token_ids":
        return "" if type(value) is int and 0 <= value < 2**31 else "expected a token id"
    if key == "loss_mask":
        return "" if value in (0, 1) else "expected 0 or 1"
    if value is None:
        return "expected a log-probability (engines write null for prompt tokens: leave the prompt out)"
    if type(value) not in (int, float) or not math.isfinite(value):
        return "expected a finite log-probability"
    # the log-softmax of one sure token may round to slightly above 0 in low precision
    return "a log-probability is never positive (natural log, not probabilities)" if value > 1e-3 else ""
