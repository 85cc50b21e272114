"""Whole runs of a tiny model: determinism, kills, resume, schedules, outcomes; nothing here asks that it learns."""

import json
import os
import signal

import pytest
import torch

from jetrl_bench import __main__ as cli_main
from jetrl_bench import base, learner, loop, record, state
from jetrl_bench.checkpoint import load_hf, save_hf
from jetrl_bench.config import Method, ModelConfig, RunSettings
from jetrl_bench.methods import concurrent, conventional, fp8_rollout_tis, jetrl, pipelinerl
from jetrl_bench.model import Decoder, init_model
from jetrl_bench.rollout import ReferenceEngine
from jetrl_bench.strict import merge
from jetrl_bench.tasks import VOCAB_SIZE, ChainTask, Verdict

MODEL = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=32)
BF16 = Method()
TASK = {"min_steps": 1, "max_steps": 4, "num_labels": 4}


def settings_of(method: Method = BF16, seed: int = 0, **changes) -> RunSettings:
    data = {
        "seed": seed, "base_index": 0, "replicate": 0, "lr": 1e-3, "model": MODEL.model_dump(), "task": TASK,
        "base": {"task": TASK, "stop_steps": 2, "check_problems": 16, "max_updates": 2, "check_every": 1},
        "train": {"group_size": 2, "samples_per_update": 4, "optimizer_steps": 8, "max_tokens": 16, "state_every": 2},
        "cost": {}, "method": method.model_dump(mode="json"),
    }  # fmt: skip
    return RunSettings.model_validate(merge(data, changes))


@pytest.fixture(autouse=True)
def parity(monkeypatch):
    """Reward the parity of a response's ids, so that an untrained model has a signal."""
    reward = lambda task, problem, completion: Verdict("correct", float(sum(completion.token_ids) % 2))  # noqa: E731
    monkeypatch.setattr(ChainTask, "verify", reward)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    base.warm_up(settings_of(), folder)
    return folder


def run(tmp_path, checkpoint, settings, name="run", **paths) -> record.Run:
    out = tmp_path / name
    loop.train(
        settings, method="some_method", base=checkpoint, out=out, state=paths.get("state", tmp_path / f"{name}-s")
    )
    return record.read_run(out)


SCHEDULES = {
    "barrier": BF16,
    "tis": fp8_rollout_tis.METHOD,
    "other_kernels": jetrl.METHOD,
    "conventional": conventional.METHOD,
    "concurrent": concurrent.METHOD,
    "keep": pipelinerl.METHOD,
    "recompute": Method.model_validate(merge(pipelinerl.METHOD.model_dump(), {"sync": {"kv": "recompute"}})),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_records(tmp_path, checkpoint, name):
    """A record is complete, conserves tokens, and has the lag of its schedule."""
    settings = settings_of(SCHEDULES[name])
    result = run(tmp_path, checkpoint, settings)
    manifest, rows = result.manifest, result.steps
    assert manifest.outcome == "finished" and manifest.digest == settings.digest()
    assert rows[-1].optimizer_steps == 8 and rows[-1].samples == 32
    assert manifest.base["sha256"] == base.read_base(checkpoint, settings)["sha256"]
    for row in rows:
        parts = row.trained_tokens + row.filtered_tokens + row.dropped_tokens + row.in_flight_tokens
        assert row.generated_tokens == parts
        assert row.proximal_contains_lag == (name in ("concurrent", "keep", "recompute"))
        assert row.mismatch.kl is not None and row.mismatch.kl >= -1e-6
    lags = [row.lag_max for row in rows]
    if name in ("keep", "recompute"):
        assert 0 < max(lags) <= 8 and max(row.versions_per_sequence for row in rows) > 1
    elif name == "concurrent":
        assert lags == [0] + [1] * (len(rows) - 1)
    else:
        assert lags == [3] * len(rows) and all(row.in_flight_tokens == 0 for row in rows)
        assert set(rows[0].kl_by_lag) == {"0", "1", "2", "3"}
    if name in ("barrier", "conventional"):
        assert all(row.mismatch.max_abs == 0 and row.mismatch.kl == 0 for row in rows)
        assert all(row.ess_token_proximal == 1 for row in rows)
    config, vocab_size, weights = load_hf(tmp_path / "run" / "checkpoint")
    assert (config, vocab_size) == (MODEL, VOCAB_SIZE)
    Decoder(config, vocab_size).load_state_dict(weights)
    timing = record.read_rows(tmp_path / "run" / "timing.jsonl", record.TimingRow)
    assert [t.rollout_step for t in timing] == [r.rollout_step for r in rows] and {t.attempt for t in timing} == {1}
    assert sum(t.rollout_tokens for t in timing) == rows[-1].generated_tokens
    assert not (tmp_path / "run-s").exists()


@pytest.mark.parametrize("name", ["barrier", "keep"])
def test_equal_bytes_twice_and_other_bytes_for_another_seed(tmp_path, checkpoint, name):
    settings = settings_of(SCHEDULES[name])
    for folder in ("a", "b"):
        run(tmp_path, checkpoint, settings, folder)
    run(tmp_path, checkpoint, settings_of(SCHEDULES[name], seed=3), "c")
    read = lambda folder, file: (tmp_path / folder / file).read_bytes()  # noqa: E731
    for file in ("train.jsonl", "manifest.json", "checkpoint/model.safetensors"):
        assert read("a", file) == read("b", file) != read("c", file)


def killed_child(action) -> int:
    """Run `action` in a forked child; returns the signal or exit status that ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except SystemExit as error:
            os._exit(error.code)
        except BaseException:
            os._exit(99)
    return os.waitpid(child, 0)[1]


def kill_at(owner, name: str, call: int, sign=signal.SIGKILL):
    """Replace owner.name by itself, preceded by a signal to this process at the given call."""
    original, calls = getattr(owner, name), iter(range(10**9))

    def wrapper(*args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), sign)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


KILLS = [
    (learner.Learner, "learn", 5),  # between two states
    (torch, "save", 9),  # inside a state write
    (os, "replace", 3),  # between a finished state and its rename, or a record's file and the next
    (record, "write_json", 0),  # between data and manifest
]


@pytest.mark.parametrize("name", ["barrier", "concurrent", "keep"])
def test_sigkill_at_any_moment_resumes_to_the_same_bytes(tmp_path, checkpoint, name):
    settings = settings_of(SCHEDULES[name], train={"optimizer_steps": 32, "state_every": 4})
    whole = run(tmp_path, checkpoint, settings, "whole")
    for number, (owner, attribute, call) in enumerate(KILLS):
        folder = f"killed{number}"

        def work(owner=owner, attribute=attribute, call=call, folder=folder):
            kill_at(owner, attribute, call)
            run(tmp_path, checkpoint, settings, folder)

        assert killed_child(work) == signal.SIGKILL
        assert not (tmp_path / folder / "manifest.json").exists()
        again = run(tmp_path, checkpoint, settings, folder)
        assert again.steps == whole.steps and again.manifest == whole.manifest
        attempts = {t.attempt for t in record.read_rows(tmp_path / folder / "timing.jsonl", record.TimingRow)}
        assert max(attempts | {1}) <= 2


def test_sigterm_saves_and_leaves_with_143(tmp_path, checkpoint):
    settings = settings_of(pipelinerl.METHOD, train={"optimizer_steps": 12, "state_every": 1000})
    whole = run(tmp_path, checkpoint, settings, "whole")

    def work():
        kill_at(learner.Learner, "learn", 7, signal.SIGTERM)
        run(tmp_path, checkpoint, settings, "ended")

    assert os.waitstatus_to_exitcode(killed_child(work)) == 143
    assert (tmp_path / "ended-s" / "step-000008" / "DONE").exists()
    assert run(tmp_path, checkpoint, settings, "ended").steps == whole.steps


def test_a_drained_engine_is_emptied_before_it_is_saved(tmp_path, checkpoint, monkeypatch):
    saves = []
    state_dict = ReferenceEngine.state_dict

    def drained(self):
        assert self.num_unfinished() == 0
        saves.append(self.policy_version)
        return state_dict(self)

    monkeypatch.setattr(ReferenceEngine, "resume", "drained")
    monkeypatch.setattr(ReferenceEngine, "state_dict", drained)
    settings = settings_of(pipelinerl.METHOD, train={"optimizer_steps": 12, "state_every": 4})
    result = run(tmp_path, checkpoint, settings)
    assert len(saves) >= 2 and result.steps[-1].optimizer_steps == 12
    assert result.manifest.resume == "drained"


def test_methods_of_a_seed_see_the_same_problems_and_draws(tmp_path, checkpoint):
    """Before any step, a bare FP8 rollout and another loss see the very same first batch of problems."""
    seen = {}
    for name in ("barrier", "conventional", "keep"):
        submitted = seen[name] = []
        add = ReferenceEngine.add

        def spy(self, request, submitted=submitted, add=add):
            submitted.append((request.problem_id, request.sample, request.seed, tuple(request.token_ids)))
            add(self, request)

        ReferenceEngine.add = spy
        try:
            run(tmp_path, checkpoint, settings_of(SCHEDULES[name], train={"optimizer_steps": 4}), name)
        finally:
            ReferenceEngine.add = add
    common = min(map(len, seen.values()))
    assert common >= 16 and len({tuple(s[:common]) for s in seen.values()}) == 1
    assert len({request[2] for request in seen["keep"]}) == len(seen["keep"])


def test_samples_of_a_group_differ(tmp_path, checkpoint):
    settings = settings_of(train={"group_size": 4, "samples_per_update": 4, "optimizer_steps": 4})
    groups = []
    original = learner.Learner.learn
    try:
        learner.Learner.learn = lambda self, n, batch, watch: (groups.extend(batch), original(self, n, batch, watch))[1]
        run(tmp_path, checkpoint, settings)
    finally:
        learner.Learner.learn = original
    assert any(len({tuple(c.token_ids) for c in g.completions.values()}) > 1 for g in groups)


def test_no_signal_is_visible(tmp_path, checkpoint, monkeypatch):
    """All answers wrong: every group is without signal, and the gradient is exactly zero."""
    monkeypatch.setattr(ChainTask, "verify", lambda self, problem, completion: Verdict("wrong", 0.0))
    rows = run(tmp_path, checkpoint, settings_of(train={"optimizer_steps": 4})).steps
    assert [(r.groups_without_signal, r.reward_std_within, r.grad_norm, r.loss) for r in rows] == [(1, 0, 0, 0)]


def test_a_nan_keeps_the_rows_and_says_where(tmp_path, checkpoint, monkeypatch, capsys):
    from jetrl_bench import trainer

    original, calls = trainer.policy_loss, iter(range(100))

    def poisoned(*args, **kwargs):
        loss, metrics = original(*args, **kwargs)
        return (loss * float("nan") if next(calls) == 5 else loss), metrics

    monkeypatch.setattr(trainer, "policy_loss", poisoned)
    result = run(tmp_path, checkpoint, settings_of())
    assert result.manifest.outcome == "nan" and len(result.steps) == 1
    assert "optimizer step 6" in capsys.readouterr().err


def test_prompts_over_the_limit_are_dropped_and_listed(tmp_path, checkpoint):
    result = run(tmp_path, checkpoint, settings_of(train={"max_prompt_tokens": 8}))
    assert result.manifest.dropped_prompts and all(
        name.startswith("chain-") for name in result.manifest.dropped_prompts
    )
    with pytest.raises(ValueError, match="1000 prompts in a row are longer"):
        run(tmp_path, checkpoint, settings_of(train={"max_prompt_tokens": 2}), "none")


def test_a_token_limit_below_the_answer_is_refused(tmp_path, checkpoint):
    with pytest.raises(ValueError, match=r"train\.max_tokens 9 is below the 13 tokens"):
        run(tmp_path, checkpoint, settings_of(train={"max_tokens": 9}))


def command(tmp_path, checkpoint, settings) -> list[str]:
    path = tmp_path / "settings.json"
    path.write_text(record.dumps(settings))
    paths = {"settings": path, "base": checkpoint, "out": tmp_path / "out", "state": tmp_path / "st"}
    return ["train", "--method", "m", *(str(x) for k, v in paths.items() for x in (f"--{k}", v))]


def test_a_dead_engine_is_exit_code_3(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(ReferenceEngine, "step", lambda self: 1 / 0)
    assert cli_main.main(command(tmp_path, checkpoint, settings_of())) == 3
    assert "the rollout engine died at version 0: division by zero" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_input_is_exit_code_2(tmp_path, checkpoint, capsys):
    line = command(tmp_path, checkpoint, settings_of(base={"demo_error": 0.5}))
    assert cli_main.main(line) == 2 and "is not the settings'" in capsys.readouterr().err
    line = command(tmp_path, tmp_path / "nowhere", settings_of())
    assert cli_main.main(line) == 2 and "run `base` first" in capsys.readouterr().err
    altered = tmp_path / "altered"
    config, vocab_size, weights = load_hf(checkpoint)
    save_hf(init_model(config, vocab_size, 99), config, altered)
    (altered / "base.json").write_bytes((checkpoint / "base.json").read_bytes())
    assert cli_main.main(command(tmp_path, altered, settings_of())) == 2 and "altered" in capsys.readouterr().err


def test_state_of_another_digest_is_refused(tmp_path, checkpoint):
    state.save(tmp_path / "st", 2, {"x": {}}, {"digest": "other", "base": "", "source": ""})
    with pytest.raises(ValueError, match="state of another run: its digest is other"):
        run(tmp_path, checkpoint, settings_of(), state=tmp_path / "st")


# The warm-up


def test_warm_up_is_deterministic_and_checks_what_it_writes(tmp_path, checkpoint, monkeypatch):
    monkeypatch.undo()
    facts = base.warm_up(settings_of(), tmp_path / "again")
    assert facts == json.loads((checkpoint / "base.json").read_text())
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert facts["digest"] == settings_of().base_digest() and facts["updates"] == 2


def test_warm_up_reads_what_the_workflow_writes(tmp_path):
    settings = settings_of()
    path = tmp_path / "base.json"
    path.write_text(record.dumps(settings.model_dump(mode="json", include={"base_index", "base", "model"})))
    assert cli_main.main(["base", "--settings", str(path), "--out", str(tmp_path / "b")]) == 0
    assert base.read_base(tmp_path / "b", settings)["digest"] == settings.base_digest()


def test_warm_up_lowers_the_loss_and_can_start_from_a_folder(tmp_path, checkpoint):
    longer = settings_of(base={"max_updates": 40, "check_every": 40, "lr": 5e-3})
    base.warm_up(longer, tmp_path / "longer")
    task = base.make_task(longer.base.task)
    batch = base.demonstrations(task, longer.base, 0, 10**6)
    losses = []
    for folder in (checkpoint, tmp_path / "longer"):
        config, vocab_size, weights = load_hf(folder)
        model = Decoder(config, vocab_size)
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(batch.token_ids).log_softmax(-1)[:, :-1]
        picked = logits.gather(-1, batch.token_ids[:, 1:, None])[..., 0]
        place = torch.arange(1, batch.token_ids.shape[1])
        response = (place >= batch.prompt_lens[:, None]) & (place < batch.total_lens[:, None])
        losses.append(-picked[response].mean().item())
    assert losses[1] < losses[0] - 1
    given = settings_of(base={"checkpoint": str(tmp_path / "longer")})
    assert base.warm_up(given, tmp_path / "copy")["pass_at_1"] is None
    assert run(tmp_path, tmp_path / "copy", given).manifest.outcome == "finished"
