"""lm-eval with our tasks: the adapter, the scripted models, and lm-eval's own command line, all without a network.

The data here are a few hand-written problems whose hashes stand in for the manifest's; tests marked data use the real
sets.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jetrl_bench import benchmarks, data
from jetrl_bench.config import EvaluateConfig
from jetrl_bench.record import SampleRow
from jetrl_bench.verify import RULES, grader_version, verify

TASKS = Path(benchmarks.__file__).parent / "lm_eval_tasks"
URL = "https://example.org/2024_AIME_I_Problems/Problem_{}"
SMALL = {
    "aime_2024": [
        {"id": 60 + i, "problem": f"Find the value of {i} + 40.", "answer": f"{40 + i:03d}", "url": URL.format(i + 1)}
        for i in range(3)
    ],
    "math_500": [
        {"unique_id": f"test/{i}", "problem": f"Problem {i}.", "answer": answer}
        for i, answer in enumerate([r"\frac{1}{2}", r"\cot x", "52_8", "(2,9)"])
    ],
    "gsm8k_test": [{"question": f"How much is {i} and 1000?", "answer": f"work\n#### 1,00{i}"} for i in range(3)],
}


def manifest_of(small):
    return {
        name: dataclasses.replace(
            data.MANIFEST[name], rows=len(rows), content_sha256=data.content_sha256(name, rows), columns=()
        )
        for name, rows in small.items()
    }


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    for name, rows in SMALL.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setitem(data.MANIFEST, name, manifest_of(SMALL)[name])
    monkeypatch.delenv("JETRL_DATA_DIR", raising=False)
    return tmp_path


def encode(text):
    return list(text.encode())


def decode(token_ids):
    return bytes(token_ids).decode(errors="replace")


class Scripted:
    """Answers from a function of (prompt text, sample index within its problem)."""

    def __init__(self, answer, samples=1):
        self.answer, self.samples, self.calls = answer, samples, []

    def __call__(self, prompts, max_tokens, seed, temperature, stop_ids):
        self.calls.append((prompts, max_tokens, seed, temperature, stop_ids))
        out = []
        for index, prompt in enumerate(prompts):
            ids = encode(self.answer(decode(prompt), index % self.samples))
            cut = len(ids) > max_tokens
            out.append(SimpleNamespace(token_ids=ids[:max_tokens], finish_reason="length" if cut else "stop"))
        return out


def evaluate(generate, folder, tasks=("aime_2024",), **options):
    return benchmarks.evaluate_benchmarks(generate, encode, decode, data_dir=folder, tasks=list(tasks), **options)


@pytest.mark.parametrize("name", ["aime_2024", "math_500", "gsm8k"])
def test_task_files_say_what_they_are(name):
    text = (TASKS / f"jetrl_{name}.yaml").read_text().replace("!function ", "")
    task, kind = yaml.safe_load(text), data.data_set(name)
    assert task["task"] == f"jetrl_{name}" and name in RULES
    assert task["metadata"]["data_sha256"] == kind.content_sha256
    assert kind.hub_id in task["metadata"]["data_set"] and kind.hub_revision in task["metadata"]["data_set"]
    assert task["metadata"]["grader"] == grader_version() and "version" in task["metadata"]
    assert {"max_gen_toks", "until", "do_sample", "temperature"} <= set(task["generation_kwargs"])
    assert task["repeats"] >= 1 and "dataset_path" not in task


@pytest.mark.parametrize(("script", "score"), [("gold", 1.0), ("empty", 0.0)])
@pytest.mark.parametrize("name", ["aime_2024", "math_500", "gsm8k"])
def test_scripted_models_score_exactly(small_data, name, script, score):
    rows = benchmarks.scripted(script, name, EvaluateConfig(samples=2), small_data)
    assert all(isinstance(row, SampleRow) for row in rows)
    assert len(rows) == 2 * len(SMALL[data.data_set(name).name])
    assert {row.status for row in rows} == {"correct" if score else "no_answer"}


@pytest.mark.data
@pytest.mark.parametrize("name", ["aime_2024", "math_500"])
def test_scripted_models_score_exactly_on_the_real_sets(name):
    folder = Path(os.environ["JETRL_DATA_DIR"])
    for script, status in (("gold", "correct"), ("empty", "no_answer")):
        rows = benchmarks.scripted(script, name, EvaluateConfig(samples=1), folder)
        assert len(rows) == data.MANIFEST[name].rows and {row.status for row in rows} == {status}


def test_rows_name_problem_sample_and_reason(small_data):
    def answer(prompt, sample):
        if "value of 0" in prompt:
            return r"\boxed{40}"
        if "value of 1" in prompt:
            return r"\boxed{40}" if sample else "thinking " * 20
        return "nothing"

    result = evaluate(Scripted(answer, samples=2), small_data, samples=2, max_tokens=40, seed=3)
    assert [(row["problem"], row["sample"], row["status"], row["finish_reason"]) for row in result.rows] == [
        ("2024-I-1", 0, "correct", "stop"),
        ("2024-I-1", 1, "correct", "stop"),
        ("2024-I-2", 0, "truncated", "length"),
        ("2024-I-2", 1, "wrong", "stop"),
        ("2024-I-3", 0, "no_answer", "stop"),
        ("2024-I-3", 1, "no_answer", "stop"),
    ]
    assert [row["tokens"] for row in result.rows] == [10, 10, 40, 10, 7, 7]
    assert result.scores == {"aime_2024": pytest.approx(2 / 6)}


def test_all_repeats_count(small_data):
    """EleutherAI/lm-evaluation-harness#3248: repeats generated, only the first scored."""
    script = Scripted(lambda prompt, sample: r"\boxed{40}" if sample == 3 else "no", samples=4)
    result = evaluate(script, small_data, samples=4, limit=1)
    assert result.scores == {"aime_2024": 0.25}
    assert [row["status"] for row in result.rows] == ["no_answer"] * 3 + ["correct"]
    assert [row["answer"] for row in result.rows] == [None] * 3 + ["40"], "kept for majority votes"


def test_one_process_many_checkpoints(small_data):
    """Equal weights give equal step-0 rows (verl#7519), and one checkpoint leaves nothing for the next."""
    good, bad = Scripted(lambda prompt, sample: r"\boxed{40}"), Scripted(lambda prompt, sample: "")
    first = evaluate(good, small_data)
    assert evaluate(bad, small_data).scores == {"aime_2024": 0.0}
    assert evaluate(good, small_data) == first and first.scores["aime_2024"] == pytest.approx(1 / 3)
    assert good.calls[0] == good.calls[1]


def test_the_prompt_is_ours_and_earns_nothing(small_data):
    """A prompt that shows \\boxed{} pays nothing; its golden text is kept here."""
    script = Scripted(lambda prompt, sample: "")
    result = evaluate(script, small_data, ["aime_2024", "gsm8k"], seed=5, temperature=0.7, stop_ids=(7,))
    assert set(result.scores.values()) == {0.0}
    prompts = [decode(prompt) for call in script.calls for prompt in call[0]]
    assert prompts[0] == (
        "Find the value of 0 + 40.\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
    )
    assert prompts[3] == (
        "Question: How much is 0 and 1000?\nReason step by step and end with the final number.\nAnswer:"
    )
    assert [call[1:] for call in script.calls] == [(64, 5, 0.7, (7,))]


def test_stops_apply_after_the_thought(small_data):
    """EleutherAI/lm-evaluation-harness#3700."""

    def answer(prompt, sample):
        number = prompt.split("How much is ")[1][0]
        text = "<think>Let me restate.\nQuestion: what is 5?</think>" if number == "0" else ""
        return f"{text}It is 100{number}.\nQuestion: How much is 7?\nAnswer: 7"

    result = evaluate(Scripted(answer), small_data, ["gsm8k"], max_tokens=200)
    assert [row["status"] for row in result.rows] == ["correct"] * 3


def test_over_long_prompts_are_counted_not_cut(small_data):
    """verl-project/verl#1015: a prompt is answered whole or listed."""
    script = Scripted(lambda prompt, sample: r"\boxed{40}")
    result = evaluate(script, small_data, ["aime_2024"], max_length=64 + 104, max_tokens=64)
    lengths = {len(prompt) for call in script.calls for prompt in call[0]}
    assert result.over_limit == 0 and max(lengths) <= 104
    result = evaluate(script, small_data, ["aime_2024"], max_length=64 + 50, max_tokens=64)
    assert result.over_limit == 3
    assert {(row["status"], row["tokens"], row["finish_reason"]) for row in result.rows} == {("truncated", 0, "length")}


def test_one_begin_token(small_data):
    """huggingface/trl#3853: token ids go to the engine, with exactly one begin token."""
    script = Scripted(lambda prompt, sample: "")

    def run(encode):
        return benchmarks.evaluate_benchmarks(
            script,
            encode,
            lambda ids: decode([i for i in ids if i]),
            data_dir=small_data,
            tasks=["aime_2024"],
            bos_id=0,
        )

    run(lambda text: [0, *text.encode()])
    for begin in ([], [0, 0]):
        with pytest.raises(ValueError, match=f"{len(begin)} begin tokens"):
            run(lambda text, begin=begin: [*begin, *text.encode()])


def test_missing_samples_and_names_are_refused(small_data):
    short = Scripted(lambda prompt, sample: "")
    with pytest.raises(ValueError, match="shorter"):
        evaluate(lambda *arguments: short(*arguments)[:-1], small_data)
    with pytest.raises(ValueError, match="aime24.*use one of aime_2024, gsm8k, math_500"):
        evaluate(short, small_data, ["aime24"])


def test_bad_data_stop_before_a_model_runs(small_data, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    script = Scripted(lambda prompt, sample: "")
    empty = tmp_path / "nothing"
    empty.mkdir()
    with pytest.raises(ValueError, match="aime_2024 is absent"):
        evaluate(script, empty)
    bad = [row | {"answer": "1045"} for row in SMALL["aime_2024"]]
    (empty / "aime_2024.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    with pytest.raises(ValueError, match="refused"):
        evaluate(script, empty)
    monkeypatch.setitem(data.MANIFEST, "aime_2024", manifest_of({"aime_2024": bad})["aime_2024"])
    with pytest.raises(ValueError, match="gold_unparsable: 3 of 3.*2024-I-1"):
        evaluate(script, empty)
    assert script.calls == []


def test_a_failing_grader_gives_no_score(small_data, monkeypatch):
    """verl-project/verl#1312: exceptions are counted, and too many of them stop the run with their answers named."""

    def broken(*arguments):
        raise RecursionError

    script = Scripted(lambda prompt, sample: r"\boxed{7}")
    assert evaluate(script, small_data, ["math_500"]).scores == {"math_500": 0.0}
    monkeypatch.setattr("jetrl_bench.verify.compare", broken)
    with pytest.raises(ValueError, match="math_500: the grader failed on 4 of 4 answers: test/0 sample 0"):
        evaluate(script, small_data, ["math_500"])


def test_one_antlr_and_no_hydra(repository):
    """lm-eval's mathematics tasks assert antlr 4.11, hydra wants 4.9, and math-verify must parse with what is there."""
    assert metadata.version("antlr4-python3-runtime").startswith("4.11.")
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("hydra", "omegaconf", "antlr4"))]
    assert verify(r"\cot x", r"\boxed{\frac{\cos x}{\sin x}}").status == "correct"


def test_a_checkpoint_through_the_reference_engine(small_data, tmp_path, capfd):
    """A checkpoint in a byte vocabulary and one with a tokenizer of its own; equal seeds, equal rows."""
    from jetrl_bench.checkpoint import save_hf
    from jetrl_bench.config import FlowConfig, ModelConfig
    from jetrl_bench.evaluate import Unit
    from jetrl_bench.model import init_model
    from jetrl_bench.tasks import EOS_ID, VOCAB_SIZE

    shape = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)
    save_hf(init_model(shape, VOCAB_SIZE, 0), shape, tmp_path / "bytes", eos_token_id=EOS_ID)
    (tmp_path / "plain").mkdir()
    tiny_tokenizer().save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text('{"eos_token_id": [1, 300]}')
    config = EvaluateConfig(samples=2, max_tokens=8, limit=2)

    def rows(tokenizer, seed):
        unit = Unit(tmp_path / "bytes", tmp_path / tokenizer, FlowConfig(), "math_500", seed, 64, 8)
        return benchmarks.evaluate_benchmark(unit, config, small_data)

    first = rows("plain", 0)
    assert [(row.problem, row.sample) for row in first] == [(f"test/{i}", k) for i in (0, 1) for k in (0, 1)]
    assert {row.status for row in first} <= {"truncated", "no_answer"} and all(row.tokens <= 8 for row in first)
    assert rows("plain", 0) == first
    assert len(rows("own", 0)) == 4
    assert capfd.readouterr().err == ""


NO_NETWORK = """
import dataclasses, json, os, socket, sys
def refuse(*arguments, **options):
    os.write(2, b"NETWORK TOUCHED\\n")
    os._exit(97)
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import jetrl_bench.data as data
for name, (rows, digest) in json.loads(os.environ["SMALL_MANIFEST"]).items():
    data.MANIFEST[name] = dataclasses.replace(data.MANIFEST[name], rows=rows, content_sha256=digest)
"""


def tiny_tokenizer():
    """Byte level, 258 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def tiny_model(folder):
    """A random two-layer Llama with the byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, bos_token_id=0, eos_token_id=1, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_lm_evals_own_command_line(small_data, tmp_path, repository):
    """All three tasks, any model lm-eval can load, no network, the data from JETRL_DATA_DIR."""
    tiny_model(tmp_path / "model")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_NETWORK)
    small = {name: (kind.rows, kind.content_sha256) for name, kind in manifest_of(SMALL).items()}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "16"]
    command += ["--model_args", f"pretrained={tmp_path / 'model'},dtype=float32", "--include_path", str(TASKS)]
    command += [
        "--tasks",
        "jetrl_aime_2024,jetrl_math_500,jetrl_gsm8k",
        "--limit",
        "1",
        "--gen_kwargs",
        "max_gen_toks=8",
    ]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'site'}:{repository}",
        "SMALL_MANIFEST": json.dumps(small),
        "JETRL_DATA_DIR": str(small_data),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    samples = {"jetrl_aime_2024": 32, "jetrl_math_500": 4, "jetrl_gsm8k": 1}
    for task, repeats in samples.items():
        assert 0 <= results["results"][task]["accuracy,every_sample"] < 0.5
        assert results["configs"][task]["metadata"]["grader"] == grader_version()
        assert results["versions"][task] == 1
        (rows,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        (row,) = [json.loads(line) for line in rows.read_text().splitlines()]
        assert len(row["filtered_resps"][0]) == repeats
