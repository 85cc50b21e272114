"""The mismatch probe's numbers, record, table and figure: what two policies say about the same sampled tokens.

mu is the rollout's distribution (the one that was sampled from), pi the trainer's; d = log pi - log mu of a sampled
token, in nats. With tokens sampled from mu, mean(-d) and mean(exp(d) - 1 - d) both estimate KL(mu || pi).

Shapes: T tokens of all sequences in order, S sequences.
"""

import csv
import io
import math
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from jetrl_bench.diagnostics import ess, mismatch, sequence_sums
from jetrl_bench.loss import MAX_EXPONENT, kl_k3
from jetrl_bench.record import Mismatch, write_json, write_text
from jetrl_bench.strict import Strict

NEEDS = "needs a checkpoint"
THRESHOLDS = [2.0**e for e in range(-24, 5)]
POSITION_EDGES = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


class Published(Strict):
    """A KL between rollout and trainer that somebody else measured and published, nats per token."""

    system: str
    low: float
    high: float
    estimator: str
    source: str
    seen: Literal["in the source", "second hand"]


PUBLISHED = [
    Published(system=system, low=low, high=high, estimator=estimator, source=source, seen=seen)
    for system, low, high, estimator, source, seen in [
        ("dense, other engines", 1e-5, 1e-3, "k3", "lmsys.org 2026-01-16", "in the source"),
        ("mixture of experts, other engines", 1e-3, 1e-1, "k3", "lmsys.org 2026-01-16", "in the source"),
        ("typical; alarm above 1", 1e-3, 3e-2, "k1", "verl docs/low_precision/fp8.md", "in the source"),
        ("8B, BF16 on both sides", 1e-3, 1e-3, "not stated", "ZhangDanyang-AMD/Lumen-RL", "in the source"),
        ("8B, FP8 rollout or FP8 both", 3e-3, 4e-3, "not stated", "ZhangDanyang-AMD/Lumen-RL", "in the source"),
        ("weights quantised from unlike masters", 8.7e-3, 8.7e-3, "k3", "InternLM/xtuner#2044", "second hand"),
        ("the same, aligned", 3.7e-4, 3.7e-4, "k3", "InternLM/xtuner#2044", "second hand"),
        ("quantised rollout, 1,000 steps", 2e-3, 2.5e-2, "not stated", "arXiv 2602.13953 (QuRL)", "second hand"),
    ]
]


class Numbers(Mismatch):
    """Two policies over a set of tokens: a record's Mismatch, and what the probe adds."""

    tokens: int
    mean_abs_se: float | None
    """Standard error over sequences (tokens of one sequence are not independent); None for one sequence."""
    kl_se: float | None
    """Of the exact KL, over sequences; None where the distributions are not known."""
    k3_se: float | None
    mean_weight: float
    """Mean of exp(d): 1 within its error if the tokens were sampled from mu."""
    mean_weight_se: float | None
    flips: float | None
    """Share of positions at which the two most likely tokens differ; None where the distributions are not known."""


class Position(Strict):
    first: int
    """First response position of the bin, from 0."""
    last: int
    numbers: Numbers


class Token(Strict):
    """One of the tokens with the largest |d|."""

    sequence: int
    position: int
    token_id: int
    rollout_logprob: float
    logprob: float


class Comparison(Strict):
    name: str
    term: Literal["total", "quantisation", "kernel"]
    mu: str
    pi: str
    sequences: int
    numbers: Numbers
    ess_token: float
    ess_sequence: float
    ess_by_length: list[tuple[int, float]]
    """(t, ESS / S of the weights of the sequences' first t tokens)."""
    positions: list[Position]
    tail: list[tuple[float, float]]
    """(x, share of tokens with |d| >= x)."""
    largest: list[Token]


class ProbeRecord(Strict):
    schema_version: Literal[1] = 1
    mode: Literal["logprobs", "checkpoint"]
    source: dict[str, str | int]
    comparisons: list[Comparison]
    notes: list[str]
    environment: dict[str, str] = {}


class Tokens(NamedTuple):
    """Sampled tokens under two policies; every field but the last two is [T], fp64 or int64."""

    rollout_T: Tensor
    proximal_T: Tensor
    sequence_ids_T: Tensor
    """0 to S - 1, each sequence contiguous."""
    positions_T: Tensor
    """Position in the response, from 0."""
    token_ids_T: Tensor
    kl_T: Tensor | None = None
    flips_T: Tensor | None = None


def numbers(tokens: Tokens) -> Numbers:
    ids_T = tokens.sequence_ids_T
    d_T = tokens.proximal_T - tokens.rollout_T
    weight_T = d_T.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    return Numbers(
        **mismatch(tokens.rollout_T, tokens.proximal_T, tokens.kl_T).model_dump(),
        tokens=len(d_T),
        mean_abs_se=clustered_se(d_T.abs(), ids_T),
        kl_se=None if tokens.kl_T is None else clustered_se(tokens.kl_T, ids_T),
        k3_se=clustered_se(kl_k3(tokens.rollout_T, tokens.proximal_T), ids_T),
        mean_weight=float(weight_T.mean()),
        mean_weight_se=clustered_se(weight_T, ids_T),
        flips=None if tokens.flips_T is None else float(tokens.flips_T.double().mean()),
    )


def clustered_se(values_T: Tensor, sequence_ids_T: Tensor) -> float | None:
    """Standard error of the token mean when whole sequences are the sampling unit (linearised ratio estimator)."""
    _, index_T = torch.unique(sequence_ids_T, return_inverse=True)
    num_sequences = int(index_T.max()) + 1
    if num_sequences < 2:
        return None
    residual_S = sequence_sums(values_T - values_T.mean(), index_T, num_sequences)
    return float((num_sequences / (num_sequences - 1) * residual_S.square().sum()).sqrt() / len(values_T))


def compare(name: str, term: str, mu: str, pi: str, tokens: Tokens, worst: int = 10) -> Comparison:
    d_T = tokens.proximal_T - tokens.rollout_T
    num_sequences = int(tokens.sequence_ids_T.max()) + 1
    longest = int(tokens.positions_T.max()) + 1
    lengths = sorted({*(2**i for i in range(longest.bit_length())), longest})
    by_length = []
    for length in lengths:
        prefix_T = torch.where(tokens.positions_T < length, d_T, 0.0)
        by_length.append((length, ess(sequence_sums(prefix_T, tokens.sequence_ids_T, num_sequences))))
    positions = []
    for first, end in pairwise(POSITION_EDGES):
        inside_T = (tokens.positions_T >= first) & (tokens.positions_T < end)
        if inside_T.any():
            part = Tokens(*(None if field is None else field[inside_T] for field in tokens))
            positions.append(Position(first=first, last=end - 1, numbers=numbers(part)))
    return Comparison(
        name=name,
        term=term,
        mu=mu,
        pi=pi,
        sequences=num_sequences,
        numbers=numbers(tokens),
        ess_token=ess(d_T),
        ess_sequence=by_length[-1][1],
        ess_by_length=by_length,
        positions=positions,
        tail=[(x, float((d_T.abs() >= x).double().mean())) for x in THRESHOLDS],
        largest=[
            Token(
                sequence=int(tokens.sequence_ids_T[i]),
                position=int(tokens.positions_T[i]),
                token_id=int(tokens.token_ids_T[i]),
                rollout_logprob=float(tokens.rollout_T[i]),
                logprob=float(tokens.proximal_T[i]),
            )
            for i in torch.sort(d_T.abs(), descending=True, stable=True).indices[:worst].tolist()
        ],
    )


# Rendering


def fixed(value: float | None, missing: str = NEEDS) -> str:
    """Fixed notation with at least 4 decimals and at least 3 significant digits: 0.0000 is zero and nothing else."""
    if value is None:
        return missing
    if value == 0:
        return "0.0000"
    return f"{value:.{max(4, 2 - math.floor(math.log10(abs(value))))}f}"


ROWS = [
    ("mean_abs", "mean of abs(d)"),
    ("mean_abs_se", "its standard error, over sequences"),
    ("p99_abs", "99th percentile of abs(d)"),
    ("max_abs", "largest abs(d)"),
    ("kl", "KL(mu, pi), exact, nats per token"),
    ("kl_se", "its standard error, over sequences"),
    ("k1", "k1: mean of -d"),
    ("k3", "k3: mean of exp(d) - 1 - d"),
    ("k3_se", "its standard error, over sequences"),
    ("mean_weight", "mean of exp(d); 1 if sampled from mu"),
    ("mean_weight_se", "its standard error, over sequences"),
    ("outside", "share of tokens with exp(d) outside [0.5, 2]"),
    ("nonzero", "share of tokens with d != 0"),
    ("ess_token", "effective sample size / n, token weights"),
    ("ess_sequence", "effective sample size / n, sequence weights"),
    ("flips", "share of positions whose most likely token differs"),
]
TERMS = {"total": "total", "quantisation": "quantisation term", "kernel": "kernel term"}


def value_of(comparison: Comparison, key: str) -> float | None:
    return getattr(comparison, key) if key.startswith("ess_") else getattr(comparison.numbers, key)


def cell(record: ProbeRecord, comparison: Comparison, key: str) -> str:
    """A number, or why there is none: only the exact KL and the flips of a log-probability file need a checkpoint."""
    unknown = NEEDS if record.mode == "logprobs" and key in ("kl", "kl_se", "flips") else "one sequence"
    return fixed(value_of(comparison, key), unknown)


def markdown(record: ProbeRecord) -> str:
    total = record.comparisons[0]
    lines = ["# Mismatch probe", ""]
    lines += [f"- {key}: {value}" for key, value in record.source.items()]
    lines += [f"- mu: {total.mu}", f"- pi: {total.pi}"]
    lines += [f"- {total.numbers.tokens} tokens of {total.sequences} sequences; d = log pi - log mu, nats"]
    lines += [""] + [f"Note: {note}" for note in record.notes] + ([""] if record.notes else [])
    lines += _table(["", *(TERMS[c.term] for c in record.comparisons)], _number_rows(record))
    lines += ["", "Split into quantisation and kernel term: " + NEEDS + ".", ""] if record.mode == "logprobs" else [""]
    lines += ["## By response position (total)", ""]
    head = ["positions", "tokens", "mean abs(d)", "p99", "largest", "KL exact", "k1", "k3", "outside [0.5, 2]"]
    body = []
    for row in total.positions:
        n = row.numbers
        values = [n.mean_abs, n.p99_abs, n.max_abs, n.kl, n.k1, n.k3, n.outside]
        body.append([f"{row.first} to {row.last}", str(n.tokens), *map(fixed, values)])
    lines += _table(head, body)
    lines += ["", "## Effective sample size of the sequences' first t tokens (total)", ""]
    lines += _table(["t", "ESS / S"], [[str(t), fixed(value)] for t, value in total.ess_by_length])
    lines += ["", "## Largest differences (total)", ""]
    head = ["sequence", "position", "token id", "log mu", "log pi", "d"]
    lines += _table(
        head,
        [
            [
                str(t.sequence),
                str(t.position),
                str(t.token_id),
                *map(fixed, (t.rollout_logprob, t.logprob, t.logprob - t.rollout_logprob)),
            ]
            for t in total.largest
        ],
    )
    lines += ["", "## KL between rollout and trainer elsewhere (published, nats per token)", ""]
    head = ["system (published)", "low", "high", "estimator", "source", "seen"]
    lines += _table(head, [[p.system, fixed(p.low), fixed(p.high), p.estimator, p.source, p.seen] for p in PUBLISHED])
    return "\n".join(lines) + "\n"


def _number_rows(record: ProbeRecord) -> list[list[str]]:
    return [[text, *(cell(record, c, key) for c in record.comparisons)] for key, text in ROWS]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def table_csv(record: ProbeRecord) -> str:
    """Long form: comparison, positions, quantity, value."""
    rows = [["comparison", "term", "positions", "quantity", "value"]]
    for c in record.comparisons:
        rows.append([c.name, c.term, "all", "tokens", str(c.numbers.tokens)])
        rows += [[c.name, c.term, "all", key, cell(record, c, key)] for key, _ in ROWS]
        for row in c.positions:
            span = f"{row.first}-{row.last}"
            rows.append([c.name, c.term, span, "tokens", str(row.numbers.tokens)])
            for key in ("mean_abs", "p99_abs", "max_abs", "kl", "k1", "k3", "outside", "nonzero", "flips"):
                rows.append([c.name, c.term, span, key, fixed(getattr(row.numbers, key))])
        rows += [[c.name, c.term, f"first {t}", "ess_sequence", fixed(value)] for t, value in c.ess_by_length]
    rows += [["published", "total", p.system, "kl_low", fixed(p.low)] for p in PUBLISHED]
    rows += [["published", "total", p.system, "kl_high", fixed(p.high)] for p in PUBLISHED]
    return to_csv(rows)


def to_csv(rows: list[list]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def write(record: ProbeRecord, out: Path) -> list[Path]:
    """probe.json, probe.md, probe.csv and the figure (.pdf .svg .png and its numbers as .csv)."""
    from jetrl_bench import probe_figure

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "probe.json", record)
    write_text(out / "probe.md", markdown(record))
    write_text(out / "probe.csv", table_csv(record))
    return [out / "probe.json", out / "probe.md", out / "probe.csv", *probe_figure.draw(record, out / "mismatch")]


def summary(record: ProbeRecord) -> str:
    """A few lines for the terminal."""
    lines = []
    for c in record.comparisons:
        n = c.numbers
        lines.append(
            f"{TERMS[c.term]:<18} abs(d) mean {fixed(n.mean_abs)} p99 {fixed(n.p99_abs)} max {fixed(n.max_abs)}   "
            f"KL exact {fixed(n.kl)} k1 {fixed(n.k1)} k3 {fixed(n.k3)}   ESS/n token {fixed(c.ess_token)} "
            f"sequence {fixed(c.ess_sequence)}   flips {fixed(n.flips)}"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in record.notes)])
