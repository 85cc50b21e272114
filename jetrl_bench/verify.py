"""Answer checking: one function is both the reward of training and the score of evaluation.

    verify(gold, completion, extractor="boxed", kind="math", finish_reason=None) -> Verdict(status, answer, detail)

Status: correct; wrong; no_answer (nothing in the declared form); truncated (the token limit came before an answer);
timeout (more time than the limits allow, found by a cost gate or by the kernel); error (the checker failed: counted,
never paid). Reward is 1 for correct and 0 for everything else.

The strict extractor reads what follows the thought (the last </think>), and there the last box opener decides:
\\boxed{x}, \\boxed x, \\fbox{x}. If that box is empty or does not close there is no answer, whatever stood before; text
outside a box never counts. A closed final box is graded even if the reply was cut off after it.

Integers, fractions, decimals and identical strings are decided here; the rest goes to a pool of killable processes
(verify_pool.py). Rules: verify_math.py.

Command line: python -m jetrl_bench verify CASES.jsonl
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from jetrl_bench import cached
from jetrl_bench.record import Status
from jetrl_bench.verify_math import MAX_ANSWER, Undecided, compare, exact_value, gold_problem, has_letters, strip_units
from jetrl_bench.verify_number import TooCostly
from jetrl_bench.verify_pool import MATH_VERIFY, Pool, default_pool
from jetrl_bench.verify_text import normalise, split, to_ascii

REVISION = 1
"""Of these rules; a change that can change a score raises it."""


def grader_version() -> str:
    return f"jetrl-verify {REVISION}, math-verify {MATH_VERIFY}"


@dataclass(frozen=True)
class Verdict:
    status: Status
    answer: str | None = None
    """What the extractor found, before normalisation."""
    detail: str = ""

    @property
    def reward(self) -> float:
        return float(self.status == "correct")


@dataclass(frozen=True)
class Rule:
    """How a task's replies are read: the extractor, and "math" or "integer" (AIME: 0 to 999)."""

    extractor: str = "boxed"
    kind: str = "math"


RULES = {"aime_2024": Rule(kind="integer"), "math_500": Rule(), "gsm8k": Rule("last_number")}

_OPENER = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s$}]+")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
)
_TAIL = 20_000
"""Characters from the end in which last_number looks."""


def after_thought(text: str) -> str:
    """What follows the last </think>, up to an unfinished new thought."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _closing_braces(text: str) -> dict[int, int]:
    """Index of every closed opening brace to its closing one, in one pass. Escaped braces do not count."""
    pairs, opened = {}, []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def boxed(text: str) -> str | None:
    r"""Content of the last box after the thought; None where it is empty or does not close.

    A box inside a closed box belongs to the outer one: \boxed{\frac{\boxed{1}}{2}} is 1/2.
    """
    text, content, end = after_thought(text), None, 0
    first = _OPENER.search(text)
    braces = _closing_braces(text) if first else {}
    for opener in _OPENER.finditer(text):
        at = opener.end()
        if opener.start() < end:
            continue
        if text[at : at + 1] == "{":
            end = braces.get(at, at)
            content = text[at + 1 : end] if end > at else None
        else:
            bare = _BARE.match(text, at)
            content = bare[0].rstrip(".,;:") if bare else None
    if content and len(content) <= MAX_ANSWER:
        content = _unbox(content)
    return content if content and content.strip() else None


def _unbox(content: str) -> str:
    while (inner := _OPENER.search(content)) and (close := _closing_braces(content).get(inner.end())):
        body = content[inner.end() + 1 : close]
        whole = inner.start() == 0 and close == len(content) - 1
        content = body if whole else content[: inner.start()] + "{" + body + "}" + content[close + 1 :]
    return content


def last_number(text: str) -> str | None:
    """The last number after the thought: integer, decimal, a/b, thousands commas, any script's digits."""
    matches = list(_LAST_NUMBER.finditer(to_ascii(after_thought(text)[-_TAIL:])))
    return matches[-1][0].replace("$", "") if matches else None


EXTRACTORS = {"boxed": boxed, "last_number": last_number}


def _aime_integer(text: str) -> int | None:
    """0 to 999, however it is written (045, 45.0, m+n=45, 45^\\circ); None for everything else."""
    sides = split(normalise(text), "=")
    if len(sides) > 1 and not has_letters(sides[0]):
        return None
    value, percent = strip_units(sides[-1])
    number = exact_value(value)
    whole = number is not None and number.denominator == 1 and 0 <= number <= 999 and not percent
    return int(number) if whole else None


def _undecided(gold: str, answer: str) -> bool:
    raise Undecided


def _decide(gold: str, answer: str, kind: str, pool: Pool | None) -> tuple[Status, str]:
    if len(answer) > MAX_ANSWER:
        return "wrong", f"{len(answer)} characters, over the limit of {MAX_ANSWER}"
    try:
        if kind == "integer":
            number = _aime_integer(answer)
            return ("correct" if number is not None and number == _aime_integer(gold) else "wrong"), "integer"
        gold, answer = normalise(gold), normalise(answer)
        if not answer:
            return "no_answer", "nothing in the box"
        return ("correct" if compare(gold, answer, _undecided) else "wrong"), "rules"
    except TooCostly as error:
        return "timeout", f"cost gate: {error}"
    except RecursionError:
        return "error", "nested too deeply"
    except Undecided:
        reply = (pool or default_pool()).check(gold, answer)
        return reply["status"], reply["detail"]


def verify(
    gold: str,
    completion: str,
    *,
    extractor: str = "boxed",
    kind: str = "math",
    finish_reason: str | None = None,
    pool: Pool | None = None,
) -> Verdict:
    """Grade the response text alone (never the prompt) against a gold answer in LaTeX without $.

    finish_reason: "stop", "length", or None where an engine does not tell. Safe in threads; blocks for up to the
    pool's limits.
    """
    if extractor not in EXTRACTORS:
        raise ValueError(f"extractor {extractor!r}: use one of {', '.join(EXTRACTORS)}")
    if kind not in ("math", "integer"):
        raise ValueError(f"kind {kind!r}: use math or integer")
    if not isinstance(completion, str):
        return Verdict("error", None, f"the completion is {type(completion).__name__}, not text")
    answer = EXTRACTORS[extractor](completion)
    cut = finish_reason == "length"
    if answer is None or (cut and extractor == "last_number"):
        return Verdict("truncated" if cut else "no_answer", answer)
    status, detail = _decide(gold, answer, kind, pool)
    return Verdict(status, answer, detail)


def verify_many(pairs: Sequence[tuple[str, str, str | None]], rule: Rule, pool: Pool | None = None) -> list[Verdict]:
    """Verdicts of (gold, completion, finish_reason) triples in order, with every slot of the pool at work."""
    pool = pool or default_pool()

    def one(triple):
        gold, completion, reason = triple
        return verify(gold, completion, extractor=rule.extractor, kind=rule.kind, finish_reason=reason, pool=pool)

    if len(pairs) < 2:
        return [one(triple) for triple in pairs]
    with ThreadPoolExecutor(pool.size) as executor:
        return list(executor.map(one, pairs))


CANARIES = [
    ("30", r"30\%", True),
    (r"30\%", "0.3", True),
    ("52_8", "52_9", False),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"\sqrt{13}", "3.605551275463989", False),
    (r"\frac{1}{2^{80}}", r"\frac{1}{2^{81}}", False),
    ("x^2-5x+6", "(x-2)(x-3)", True),
    ("y=2x+1", "2x-y+1=0", True),
]
"""Pairs whose verdict moved between grader versions or is easily lost: checked before any model runs."""


def self_check(problems: Iterable[tuple[str, str]], rule: Rule, pool: Pool | None = None) -> int:
    """Grade every (name, gold) against itself; ValueError naming the first bad rows unless all are correct.

    Returns the number of golds. Also runs the canaries. Call it before a model does.
    """
    problems, pool, bad = list(problems), pool or default_pool(), []
    for gold, answer, expected in CANARIES:
        verdict = verify(gold, rf"\boxed{{{answer}}}", pool=pool)
        if verdict.status != ("correct" if expected else "wrong"):
            raise ValueError(f"grader self-test: {answer} against {gold} is {verdict.status}; {grader_version()}")

    def problem_of(pair: tuple[str, str]) -> str:
        name, gold = pair
        if rule.kind == "integer":
            readable = isinstance(gold, str) and _aime_integer(gold) is not None
            return "" if readable else f"{name}: gold {gold!r} is no integer from 0 to 999"
        try:
            problem = gold_problem(gold) or gold_problem(gold, _undecided)
        except TooCostly as error:
            problem = f"cost gate: {error}"
        except Undecided:
            problem = pool.check(gold, None)["detail"]
        reply = rf"\boxed{{{gold}}}" if rule.extractor == "boxed" else f"The answer is {gold}."
        if not problem and verify(gold, reply, extractor=rule.extractor, kind=rule.kind, pool=pool).status != "correct":
            problem = "not equal to itself"
        return f"{name}: gold {gold!r}: {problem}" if problem else ""

    with ThreadPoolExecutor(pool.size) as executor:
        bad = [problem for problem in executor.map(problem_of, problems) if problem]
    if bad:
        raise ValueError(f"gold_unparsable: {len(bad)} of {len(problems)} golds: " + "; ".join(bad[:5]))
    return len(problems)


def self_check_once(problems: Iterable[tuple[str, str]], rule: Rule) -> int:
    """self_check, remembered (cached.py) for these golds under this grader's very files.

    Many short processes evaluate; starting the grader's workers in each of them costs more CPU than sampling does.
    """
    problems = list(problems)
    key = hashlib.sha256("\0".join([repr(problems), repr(rule), grader_version()]).encode())
    for path in sorted(Path(__file__).parent.glob("verify*.py")):
        key.update(path.read_bytes())
    return int(cached.once(f"golds-{key.hexdigest()[:24]}", lambda: str(self_check(problems, rule))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", help="JSONL with gold, completion, expect; optional task, finish_reason, case")


def run(args: argparse.Namespace) -> int:
    """Print each failure and "N passed, M failed"; 1 where any failed."""
    passed = failed = 0
    try:
        lines = open(args.cases, encoding="utf-8").read().splitlines()
    except OSError as error:
        raise ValueError(f"{args.cases}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{args.cases}:{number}"
        try:
            case = json.loads(line)
            gold, completion, expect = case["gold"], case["completion"], case["expect"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: need an object with gold, completion and expect ({error})") from None
        if expect not in get_args(Status):
            raise ValueError(f"{where}: expect {expect!r}: use one of {', '.join(get_args(Status))}")
        task = case.get("task")
        if task is not None and task not in RULES:
            raise ValueError(f"{where}: task {task!r}: use one of {', '.join(RULES)}")
        rule = RULES[task] if task else Rule()
        verdict = verify(
            gold, completion, extractor=rule.extractor, kind=rule.kind, finish_reason=case.get("finish_reason")
        )
        if verdict.status == expect:
            passed += 1
            continue
        failed += 1
        found = f"{verdict.status} ({verdict.detail})" if verdict.detail else verdict.status
        print(
            f"{where} {case.get('case', '')}: gold {gold!r}, answer {verdict.answer!r}: expected {expect}, got {found}"
        )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0
