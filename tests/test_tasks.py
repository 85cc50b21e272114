"""Tasks: the chain against an interpreter of its own text, splits, verdicts, demonstrations."""

import hashlib
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_bench import tasks
from jetrl_bench.config import TaskConfig
from jetrl_bench.seeds import seed_of

CHAIN = tasks.make_task(TaskConfig(min_steps=3, max_steps=6))


def completion(token_ids, finish_reason="stop"):
    return SimpleNamespace(token_ids=token_ids, finish_reason=finish_reason)


def interpret(prompt_text: str, cycles: int) -> tuple[int, int]:
    """Answer and steps from the prompt's text alone: `<v0><la><+3>...<=>`."""
    start, *rest = re.findall(r"<([^>]+|=)>", prompt_text.replace("<=>", ""))
    value = int(start)
    steps = list(zip(rest[::2], rest[1::2], strict=True))
    assert len({label for label, _ in steps}) == len(steps)
    for _, operation in steps * cycles:
        value = (value + int(operation[1:])) % 10 if operation[0] == "+" else value * int(operation[1:]) % 10
    return value, len(steps)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500), st.integers(0, 5), st.integers(1, 3))
def test_chain_answers_are_what_the_prompt_says(index, seed, cycles):
    task = tasks.make_task(TaskConfig(min_steps=3, max_steps=6, cycles=cycles))
    problem = task.problem("train", index, seed)
    answer, steps = interpret(tasks.decode(task.prompt(problem)), cycles)
    assert answer == problem.answer and 3 <= steps <= 6
    clean = task.demonstration(problem, 0.0, 1)
    assert len(clean) == 3 * steps * cycles + 1 == task.response_tokens(problem) and clean[-1] == tasks.EOS_ID
    assert task.verify(problem, completion(clean)) == ("correct", 1.0)


def test_default_chain_has_the_published_lengths():
    task = tasks.make_task(TaskConfig())
    problem = task.problem("train", 0, 0)
    assert len(task.prompt(problem)) == 42 and task.response_tokens(problem) == 61 == task.longest_response()


def test_operations_are_invertible():
    for operation in range(len(tasks.OPERATIONS)):
        assert sorted(tasks.apply(operation, v) for v in range(10)) == list(range(10))


def test_wrong_steps_continue_consistently_and_at_the_stated_rate():
    task = tasks.make_task(TaskConfig())
    wrong = right = answers = 0
    for index in range(400):
        problem = task.problem("train", index, 3)
        start, labels, operations = problem.content
        tokens = task.demonstration(problem, 0.04, seed_of(0, "base", index))
        value = start
        for step, operation in enumerate(operations):
            label, op, result = tokens[3 * step : 3 * step + 3]
            assert (label, op) == (tasks.FIRST_LABEL_ID + labels[step], tasks.FIRST_OPERATION_ID + operation)
            result -= tasks.FIRST_VALUE_ID
            ok = result == tasks.apply(operation, value)
            right, wrong = right + ok, wrong + (not ok)
            value = result
        answers += task.verify(problem, completion(tokens)).reward
    assert 0.03 < wrong / (wrong + right) < 0.05
    assert 0.40 < answers / 400 < 0.56  # 0.96^20 = 0.44, and some errors cancel


def test_splits_are_disjoint_deterministic_and_seeded():
    small = tasks.make_task(TaskConfig(min_steps=1, max_steps=1, num_labels=2))
    train = small.problems("train", 400, 0) + small.problems("train", 400, 1)
    held = small.problems("heldout", 5, 0)
    assert not {p.name for p in train} & {p.name for p in held}
    assert len({p.name for p in held}) == 5
    assert CHAIN.problems("train", 20, 5) == CHAIN.problems("train", 20, 5)
    assert CHAIN.problems("train", 20, 5)[:10] == CHAIN.problems("train", 10, 5)
    assert CHAIN.problems("train", 20, 5) != CHAIN.problems("train", 20, 6)
    with pytest.raises(ValueError, match="fewer than 500 distinct"):
        small.problems("heldout", 500, 0)


def test_verdicts():
    problem = CHAIN.problem("train", 0, 0)
    right = tasks.FIRST_VALUE_ID + problem.answer
    other = tasks.FIRST_VALUE_ID + (problem.answer + 1) % 10
    assert CHAIN.verify(problem, completion([other, right, tasks.EOS_ID])) == ("correct", 1.0)
    assert CHAIN.verify(problem, completion([right, other, tasks.EOS_ID])) == ("wrong", 0.0)
    assert CHAIN.verify(problem, completion([tasks.EOS_ID])) == ("no_answer", 0.0)
    assert CHAIN.verify(problem, completion([])) == ("no_answer", 0.0)
    assert CHAIN.verify(problem, completion([right], "length")) == ("truncated", 0.0)


def test_text_round_trip_and_vocabulary():
    text = "Let $x = \\frac{1}{2}$, ünïcödé \U0001f600.\n"
    assert tasks.decode(tasks.encode(text)) == text
    assert max(tasks.encode(text)) < 256 and tasks.VOCAB_SIZE % 16 == 0
    assert tasks.FIRST_LABEL_ID + tasks.MAX_LABELS == tasks.VOCAB_SIZE
    ids = [tasks.EOS_ID, tasks.BOS_ID, tasks.PAD_ID, tasks.EQUALS_ID]
    assert len(set(ids)) == 4 and max(ids) < tasks.FIRST_OPERATION_ID


def test_too_many_labels_is_one_line():
    with pytest.raises(ValueError, match=r"task\.num_labels 160 is above 38"):
        tasks.make_task(TaskConfig(num_labels=160))


def test_arithmetic():
    task = tasks.make_task(TaskConfig(name="arithmetic"))
    kinds = set()
    for problem in task.problems("train", 60, 0):
        text = tasks.decode(task.prompt(problem))
        assert text.count("Question:") == 5 and text.endswith("?\nAnswer:")
        a, sign, b = re.findall(r"What is (\d+) ([-+*]) (\d+)\?", text)[-1]
        kinds.add(sign)
        assert problem.answer == {"+": int(a) + int(b), "*": int(a) * int(b), "-": int(a) - int(b)}[sign]
        reply = tasks.encode(f" {problem.answer}\n\nQ")
        assert task.verify(problem, completion(reply, "length")) == ("correct", 1.0)
        assert task.verify(problem, completion(tasks.encode(f" {problem.answer + 1}\n"))) == ("wrong", 0.0)
        assert task.verify(problem, completion(tasks.encode(f" {problem.answer}"), "length")).status == "truncated"
        assert task.verify(problem, completion(tasks.encode(" hm\n"))).status == "no_answer"
    assert kinds == {"+", "-", "*"}
    assert task.stop_ids == (tasks.EOS_ID, 10)


def test_arithmetic_with_a_tokenizer_of_its_own():
    """Every end id of the model is known, and line ends that are single tokens stop too."""

    class Toy:
        eos_token_id = [2, 3]

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [5] if text == "\n\n" else [100 + ord(c) for c in text]

        def decode(self, ids):
            return "".join("\n\n" if i == 5 else chr(i - 100) for i in ids)

    task = tasks.make_task(TaskConfig(name="arithmetic"), Toy())
    assert task.stop_ids == (2, 3, 110, 5)
    problem = task.problem("train", 1, 0)
    answer = [100 + ord(c) for c in f" {problem.answer}"]
    assert task.verify(problem, completion([*answer, 5])) == ("correct", 1.0)
    assert task.verify(problem, completion([*answer, 2])) == ("correct", 1.0)
    with pytest.raises(ValueError, match="own vocabulary"):
        tasks.make_task(TaskConfig(), Toy())


def test_seeds_are_stable_and_separate():
    assert seed_of(0, "rollout", 1, 2) == seed_of(0, "rollout", 1, 2)
    draws = {
        seed_of(n, stream, p, s) for n in range(3) for stream in ("rollout", "base") for p in range(9) for s in range(8)
    }
    assert len(draws) == 3 * 2 * 9 * 8 and all(0 <= d < 2**63 for d in draws)
    digest = hashlib.sha256(b'[3,"rollout",1,2]').hexdigest()
    assert seed_of(3, "rollout", 1, 2) == int(digest[:16], 16) >> 1
