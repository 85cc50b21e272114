"""Functions that the task files name: data, all samples kept, and our grader as the metric."""

from functools import cache

from jetrl_bench import data
from jetrl_bench.verify import RULES, Verdict, after_thought, self_check_once, verify_many


@cache
def _documents(name: str, folder: str | None):
    import datasets

    rows = data.load(name, folder).rows
    golds = data.golds(name, rows)
    self_check_once(golds, RULES[name])
    column = data.data_set(name).problem_column
    documents = [
        {"task": name, "name": row_name, "problem": row[column], "gold": gold}
        for row, (row_name, gold) in zip(rows, golds, strict=True)
    ]
    return datasets.Dataset.from_list(documents)


def _load(name: str, folder: str | None):
    try:
        return {"test": _documents(name, folder)}
    except data.Absent as absent:
        raise ValueError(f"{name} is absent: {absent}") from None


def aime_2024(data_dir: str | None = None, **metadata):
    return _load("aime_2024", data_dir)


def math_500(data_dir: str | None = None, **metadata):
    return _load("math_500", data_dir)


def gsm8k(data_dir: str | None = None, **metadata):
    return _load("gsm8k", data_dir)


def every_sample(responses, documents):
    """All repeats of a document, where lm-eval's default filter would keep the first."""
    return [list(samples) for samples in responses]


def verdicts(document: dict, replies: list[str]) -> list[Verdict]:
    """A reply may carry `finish_reason` (lm_eval_model.Reply); a plain string's is unknown."""
    rule = RULES[document["task"]]
    triples = []
    for reply in replies:
        text, reason = str(reply), getattr(reply, "finish_reason", None)
        if document["task"] == "gsm8k":  # a model may go on with a question of its own, engine stops or not
            text = text[: len(text) - len(after_thought(text))] + after_thought(text).partition("\nQuestion:")[0]
        triples.append((document["gold"], text, reason))
    return verify_many(triples, rule)


def process_results(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Means over the samples of one problem."""
    (replies,) = results
    found = verdicts(document, replies)
    for reply, verdict in zip(replies, found, strict=True):
        if hasattr(reply, "finish_reason"):
            reply.verdict = verdict

    def share(*statuses: str) -> float:
        return sum(verdict.status in statuses for verdict in found) / len(found)

    return {
        "accuracy": share("correct"),
        "no_answer": share("no_answer"),
        "truncated": share("truncated"),
        "ungraded": share("timeout", "error"),
    }
