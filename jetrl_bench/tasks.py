"""Tasks: problems, prompts, and one function that is both the reward and the score.

The *labelled mod-10 chain* is the toy task. A problem starts from a digit and applies labelled operations modulo ten:

    prompt     v0  a +3  b *7  c +1 ... =
    response   a +3 r0  b *7 r1  c +1 r2 ... EOS        r0 = v0 + 3, r1 = r0 * 7, ... (mod 10)

Every symbol is one token, a step costs three tokens, and the reward is 1 when the last value before EOS is right. The
twelve operations (+1..+9, *3, *7, *9) are invertible, so one wrong step spoils the answer and pass@1 is about p^steps
(chance: 0.1). The labels make copying content-addressed: a two-layer model learns it. With `cycles` the response walks
the chain several times, value carried on, which makes responses long and of known length.

*Arithmetic* is for a pretrained model with a tokenizer of its own: one-step sums, products and differences as text
behind a four-shot raw prompt, graded by the last number before the line end.

The vocabulary is byte level (ids 0 to 255 are UTF-8 bytes, so any text has a prompt) plus the task's tokens.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jetrl_bench.config import TaskConfig
from jetrl_bench.record import Status
from jetrl_bench.seeds import seed_of

EOS_ID, BOS_ID, PAD_ID, EQUALS_ID = 256, 257, 258, 259
OPERATIONS = [("+", k) for k in range(1, 10)] + [("*", k) for k in (3, 7, 9)]
FIRST_OPERATION_ID = 260
FIRST_VALUE_ID = FIRST_OPERATION_ID + len(OPERATIONS)
FIRST_LABEL_ID = FIRST_VALUE_ID + 10
VOCAB_SIZE = 320
MAX_LABELS = VOCAB_SIZE - FIRST_LABEL_ID
HELDOUT_SHARE = 8
"""One problem in this many, chosen by its hash, is held out."""

Split = Literal["train", "heldout"]


class Verdict(NamedTuple):
    status: Status
    reward: float


@dataclass(frozen=True)
class Problem:
    """problem_id: position in the stream of its split and seed; name: a hash of the content, unique across splits."""

    problem_id: int
    name: str
    content: tuple
    answer: int


class Task(Protocol):
    name: str
    revision: str
    stop_ids: tuple[int, ...]

    def problem(self, split: Split, index: int, seed: int) -> Problem: ...
    def problems(self, split: Split, count: int, seed: int) -> list[Problem]: ...
    def prompt(self, problem: Problem) -> list[int]: ...
    def extract(self, token_ids: Sequence[int]) -> int | None: ...
    def verify(self, problem: Problem, completion: Any) -> Verdict: ...
    def response_tokens(self, problem: Problem) -> int: ...
    def longest_prompt(self) -> int: ...
    def longest_response(self) -> int: ...


def encode(text: str) -> list[int]:
    """UTF-8 bytes as token ids."""
    return list(text.encode("utf-8"))


def decode(token_ids: Sequence[int]) -> str:
    """The text of the byte tokens; task tokens are written in angle brackets, malformed UTF-8 as U+FFFD."""
    parts: list[bytes] = []
    for token in token_ids:
        parts.append(bytes([token]) if token < 256 else _SYMBOLS.get(int(token), f"<{int(token)}>").encode())
    return b"".join(parts).decode("utf-8", errors="replace")


def _symbols() -> dict[int, str]:
    names = {EOS_ID: "<eos>", BOS_ID: "<bos>", PAD_ID: "<pad>", EQUALS_ID: "<=>"}
    names |= {FIRST_OPERATION_ID + i: f"<{sign}{k}>" for i, (sign, k) in enumerate(OPERATIONS)}
    names |= {FIRST_VALUE_ID + v: f"<{v}>" for v in range(10)}
    return names | {FIRST_LABEL_ID + i: f"<l{i}>" for i in range(MAX_LABELS)}


_SYMBOLS = _symbols()


def split_of(name: str) -> Split:
    """The split a problem belongs to, from its hash: the two never share a problem, whatever the seed."""
    return "heldout" if int(name[-8:], 16) % HELDOUT_SHARE == 0 else "train"


def apply(operation: int, value: int) -> int:
    sign, k = OPERATIONS[operation]
    return (value + k) % 10 if sign == "+" else (value * k) % 10


class _Drawn:
    """Problems drawn one by one from a stream of (split, seed, index); a draw of the other split is thrown away."""

    name: str

    def _draw(self, generator: np.random.Generator) -> tuple[tuple, int]:
        raise NotImplementedError

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Problem `index` of the stream: equal arguments, equal problem."""
        generator = np.random.default_rng(seed_of(seed, f"problems-{split}", index))
        while True:
            content, answer = self._draw(generator)
            name = f"{self.name}-{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"
            if split_of(name) == split:
                return Problem(index, name, content, answer)

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """The first `count` problems of the stream; held-out ones are distinct (a repeated draw is skipped)."""
        if split == "train":
            return [self.problem(split, index, seed) for index in range(count)]
        found: dict[str, Problem] = {}
        for index in range(50 * count + 1000):
            if len(found) == count:
                return list(found.values())
            problem = self.problem(split, index, seed)
            found.setdefault(problem.name, problem)
        raise ValueError(f"task {self.name} has fewer than {count} distinct held-out problems; ask for {len(found)}")


class ChainTask(_Drawn):
    name = "chain"
    revision = "chain-2"
    stop_ids = (EOS_ID,)

    def __init__(self, config: TaskConfig):
        if config.num_labels > MAX_LABELS:
            raise ValueError(f"task.num_labels {config.num_labels} is above {MAX_LABELS}, the labels of the vocabulary")
        self.config = config

    def _draw(self, generator) -> tuple[tuple, int]:
        steps = int(generator.integers(self.config.min_steps, self.config.max_steps + 1))
        start = int(generator.integers(10))
        labels = tuple(range(steps))
        operations = tuple(generator.integers(len(OPERATIONS), size=steps).tolist())
        value = start
        for operation in operations * self.config.cycles:
            value = apply(operation, value)
        return (start, labels, operations), value

    def prompt(self, problem: Problem) -> list[int]:
        start, labels, operations = problem.content
        tokens = [FIRST_VALUE_ID + start]
        for label, operation in zip(labels, operations, strict=True):
            tokens += (FIRST_LABEL_ID + label, FIRST_OPERATION_ID + operation)
        return [*tokens, EQUALS_ID]

    def demonstration(self, problem: Problem, error: float, seed: int) -> list[int]:
        """A worked response; a step is wrong with probability `error`, and what follows continues from the wrong value.

        The noise calibrates the warm-up: a model that imitates it has pass@1 near (1 - error)^steps, where a clean
        demonstration would take it from chance to perfect within a few checks.
        """
        value, labels, operations = problem.content
        steps = list(zip(labels, operations, strict=True)) * self.config.cycles
        generator = np.random.default_rng(seed)
        shift = np.where(generator.random(len(steps)) < error, generator.integers(1, 10, size=len(steps)), 0).tolist()
        tokens = []
        for (label, operation), wrong in zip(steps, shift, strict=True):
            value = (apply(operation, value) + wrong) % 10
            tokens += (FIRST_LABEL_ID + label, FIRST_OPERATION_ID + operation, FIRST_VALUE_ID + value)
        return [*tokens, EOS_ID]

    def extract(self, token_ids: Sequence[int]) -> int | None:
        """The last value of the response, None where there is none."""
        for token in reversed([int(t) for t in token_ids]):
            if FIRST_VALUE_ID <= token < FIRST_VALUE_ID + 10:
                return token - FIRST_VALUE_ID
        return None

    def verify(self, problem: Problem, completion) -> Verdict:
        """Reward and score of a completion (token_ids, finish_reason); without EOS it is truncated, not graded."""
        if completion.finish_reason == "length":
            return Verdict("truncated", 0.0)
        return _grade(self.extract(completion.token_ids), problem.answer)

    def response_tokens(self, problem: Problem) -> int:
        return 3 * len(problem.content[1]) * self.config.cycles + 1

    def longest_prompt(self) -> int:
        return 2 * self.config.max_steps + 2

    def longest_response(self) -> int:
        return 3 * self.config.max_steps * self.config.cycles + 1


SHOTS = (("3 + 4", 7), ("6 * 7", 42), ("58 - 21", 37), ("9 + 5", 14))


class ArithmeticTask(_Drawn):
    """One-step arithmetic, kinds mixed so that a small pretrained model has groups with and without success."""

    name = "arithmetic"
    revision = "arithmetic-1"

    def __init__(
        self,
        config: TaskConfig,
        encode: Callable[[str], list[int]] = encode,
        decode: Callable[[Sequence[int]], str] = decode,
        eos_ids: Sequence[int] = (EOS_ID,),
    ):
        self.config, self._encode, self._decode = config, encode, decode
        line_ends = [ids[0] for ids in map(encode, ("\n", "\n\n")) if len(ids) == 1]
        self.stop_ids = tuple(dict.fromkeys([*map(int, eos_ids), *line_ends]))

    def _draw(self, generator) -> tuple[tuple, int]:
        kind = int(generator.integers(3))
        a, b = (int(x) for x in generator.integers(1, 10, size=2))
        if kind == 2:
            a, b = sorted((int(x) for x in generator.integers(10, 100, size=2)), reverse=True)
        sign, answer = (("+", a + b), ("*", a * b), ("-", a - b))[kind]
        return (a, sign, b), answer

    def prompt(self, problem: Problem) -> list[int]:
        shots = "".join(f"Question: What is {question}?\nAnswer: {answer}\n\n" for question, answer in SHOTS)
        return list(self._encode(f"{shots}Question: What is {' '.join(map(str, problem.content))}?\nAnswer:"))

    def extract(self, token_ids: Sequence[int]) -> int | None:
        """The last number of the first non-empty line."""
        numbers = re.findall(r"-?\d+", self._line(token_ids)[0])
        return int(numbers[-1]) if numbers else None

    def _line(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        text = self._decode([int(t) for t in token_ids if int(t) not in self.stop_ids[:1]]).lstrip()
        line, end, _ = text.partition("\n")
        return line, bool(end)

    def verify(self, problem: Problem, completion) -> Verdict:
        if completion.finish_reason == "length" and not self._line(completion.token_ids)[1]:
            return Verdict("truncated", 0.0)
        return _grade(self.extract(completion.token_ids), problem.answer)

    def response_tokens(self, problem: Problem) -> int:
        return len(self._encode(f" {problem.answer}\n"))

    def longest_prompt(self) -> int:
        """Numbers of a kind have equally many digits; a margin covers tokenizers that cut them unevenly."""
        return max(len(self.prompt(self.problem("train", index, 0))) for index in range(64)) + 8

    def longest_response(self) -> int:
        return len(self._encode(" 81\n"))


def _grade(value: int | None, answer: int) -> Verdict:
    if value is None:
        return Verdict("no_answer", 0.0)
    return Verdict("correct", 1.0) if value == answer else Verdict("wrong", 0.0)


def make_task(config: TaskConfig, tokenizer=None) -> Task:
    """The task of a config; `tokenizer` (encode, decode, eos_token_id): a pretrained model's, arithmetic only."""
    if config.name == "chain":
        if tokenizer is not None:
            raise ValueError("task.name 'chain' has its own vocabulary; with a tokenizer use task.name 'arithmetic'")
        return ChainTask(config)
    if tokenizer is None:
        return ArithmeticTask(config)

    def encode_raw(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    eos = tokenizer.eos_token_id
    return ArithmeticTask(config, encode_raw, tokenizer.decode, eos if isinstance(eos, list | tuple) else (eos,))


class _Tokenizer:
    """A tokenizer.json read with `tokenizers`, in the shape that make_task expects."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            if (folder / name).exists():
                eos = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
                ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not ids:
            raise ValueError(f"{folder}: neither generation_config.json nor config.json names an eos_token_id")
        self.eos_token_id = list(dict.fromkeys(ids))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


def load_tokenizer(folder: Path) -> _Tokenizer | None:
    """The tokenizer that stands in a checkpoint folder, None where the checkpoint uses the byte-level vocabulary."""
    return _Tokenizer(Path(folder)) if (Path(folder) / "tokenizer.json").exists() else None
