"""Measured steps: the work is what it says, arms take turns, warm-up counts nowhere. No assertion on real seconds."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from jetrl_bench import (
    config,
    devices,
    speed,
    speed_arms,
    speed_linear,
    speed_report,
    speed_step,
    speed_sweep,
)
from jetrl_bench.__main__ import main
from jetrl_bench.config import FlowConfig, Method
from jetrl_bench.model import Decoder
from jetrl_bench.speed_step import Job, Measured, Stepper, Work

TINY = Job(hidden=32, layers=1, heads=2, kv_heads=1, vocab=64, prompts=4, group=2, prompt_len=4, new_tokens=6)
SIZE = ["--hidden", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--prompts", "4", "--group", "2"]
SIZE += ["--prompt-len", "4", "--new-tokens", "6", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(speed_linear, "COPY_SHAPE", (64, 256))


def stepper(method: Method) -> Stepper:
    return Stepper(TINY, TINY.settings(method, 2))


@pytest.fixture(scope="module")
def registry_record(tmp_path_factory):
    """Every method of the registry, on the engines that are here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_linear, "COPY_SHAPE", (64, 256))
        patch.setattr(devices, "installed", lambda name: None)
        arms = speed_arms.step_arms(TINY, "cpu", "emulated")
        methods = speed_arms.methods_of(None, None)
        scratch = tmp_path_factory.mktemp("scratch")
        arms += speed_arms.method_arms(TINY, methods, list(speed.ENGINES), "cpu", "emulated", scratch)
        found = speed_arms.measure(TINY, arms, rounds=3, warmup=1)
    return json.loads(json.dumps(found, sort_keys=True))


# --- one turn of one arm


@pytest.mark.parametrize("name", ["bf16", "jetrl", "concurrent", "pipelinerl"])
def test_phases_sum_to_the_step_and_the_policy_moves(name):
    arm = stepper(config.registry()[name])
    before = [p.detach().clone() for p in arm.trainer.model.parameters()]
    taken = arm.turn()
    phases = {k: v for k, v in taken.seconds.items() if k != "step"}
    assert set(phases) == set(speed_step.PHASES)
    assert sum(phases.values()) == pytest.approx(taken.seconds["step"])
    assert min(phases[p] for p in ("rollout", "train", "optimizer")) > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, arm.trainer.model.parameters()))
    arm.turn()
    assert arm.engine.policy_version > 0 and arm.turn().seconds["sync"] > 0


@pytest.mark.parametrize("name", ["bf16", "conventional", "concurrent", "pipelinerl"])
def test_tokens_are_those_that_were_made(name, monkeypatch):
    """Against a count of the completions themselves, and of what still runs in the engine."""
    arm = stepper(config.registry()[name])
    ended, trained = [], []
    collect, collate = arm.ledger.collect, speed_step.collate
    arm.ledger.collect = lambda completions: (ended.extend(completions), collect(completions))
    monkeypatch.setattr(speed_step, "collate", lambda cs, a: (trained.extend(cs), collate(cs, a))[1])

    def made() -> int:
        arm.engine._settle()
        return sum(len(c.token_ids) for c in ended) + sum(len(r.token_ids) for r in arm.engine._running.values())

    for _ in range(3):
        before = made()
        trained.clear()
        work = arm.turn().work
        assert work.rollout_tokens == made() - before
        assert work.train_tokens == sum(len(c.token_ids) for c in trained) == TINY.new_tokens * work.samples
        assert work.samples == len(trained)


def test_only_extra_passes_are_log_prob_passes():
    """GRPO with G = 4 scores three of four batches; a masking loss scores all; REINFORCE none."""
    registry = config.registry()
    masked = registry["bf16"].model_copy(
        update={"loss": registry["bf16"].loss.model_copy(update={"correction": "mask"})}
    )
    for method, share in ((registry["bf16"], 3 / 4), (masked, 1), (registry["conventional"], 0)):
        taken = stepper(method).turn()
        assert taken.work.logprob_tokens == share * 4 * 2 * TINY.new_tokens
        assert (taken.seconds["logprob"] > 0) == (share > 0)
        assert taken.work.flop["logprob"] == pytest.approx(share * taken.work.flop["train"] / 3)


def test_flop_are_those_torch_counts():
    """torch's counter on the plain module; it counts attention as a full square, a causal one needs (n+1)/2n of it."""
    cfg, n = Job(hidden=64, layers=2, heads=4, kv_heads=2).model(), 12
    model = Decoder(cfg, 64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, n, dtype=torch.int64))
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    square = sum(count for op, count in counts.items() if "bmm" in op or "attention" in op)
    assert square == 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * n * n
    expected = sum(counts.values()) - square + square * (n + 1) / (2 * n)
    assert speed_step.forward_flop(cfg, 64, 1, n) == expected


def test_a_rollout_computes_every_token_once_and_the_prompt_once_a_group():
    cfg = Job().model()
    assert speed_step.rollout_flop(cfg, 64, 5, 7, 1) == speed_step.forward_flop(cfg, 64, 5, 7)
    prompt = speed_step.forward_flop(cfg, 64, 4, 1) - 2 * 64 * cfg.hidden_size  # its four tokens, no head
    one = speed_step.rollout_flop(cfg, 64, 5, 7, 1)
    assert speed_step.rollout_flop(cfg, 64, 5, 7, 8) == 8 * one - 7 * prompt


def test_the_step_is_the_peers():
    arm = speed_arms.step_arms(TINY, "cpu", "emulated")[0]
    settings = Job().settings(arm.method)
    assert settings.train.samples_per_update == 64 and arm.method.sync.updates_per_rollout == 1
    model = settings.model
    assert (model.arch, model.hidden_size, model.intermediate_size, model.head_dim) == ("qwen2", 128, 512, 32)
    assert arm.method.loss.anchor == "rollout", "no proximal pass"
    assert arm.turn().work.optimizer_steps == 1


# --- arms and rounds


def scripted(name: str, seconds: list[float], engine="reference", kind="step", method=None):
    """An arm whose turns take what is written, half of it in training."""
    turns = iter(seconds)
    order = []

    def turn() -> Measured:
        order.append(name)
        total = next(turns)
        phases = dict.fromkeys(speed_step.PHASES, 0.0) | {"rollout": total / 2, "train": total / 2, "step": total}
        return Measured(phases, total, Work(TINY.samples, 1, 48, 48, 0, {"rollout": 1e9, "train": 3e9}, {"sync": 1e6}))

    return speed_arms.Arm(name, kind, engine, TINY, method or Method(), turn=turn), order


def test_warm_up_is_shown_and_counts_nowhere():
    a, _ = scripted("bf16", [100, 2, 4, 3])
    b, _ = scripted("e4m3", [900, 3, 5, 4])
    found = speed_arms.measure(TINY, [a, b], rounds=3, warmup=1)
    assert [row["bf16"]["step"] for row in found["warmup"]] == [100]
    assert [row["bf16"]["step"] for row in found["rounds"]] == [2, 4, 3]
    assert found["median"]["bf16"]["step"] == 3 and found["median"]["bf16"]["train"] == 1.5
    ratio = found["ratio"]["e4m3/bf16"]
    assert ratio["estimate"] == pytest.approx((3 / 2 * 5 / 4 * 4 / 3) ** (1 / 3))
    assert (ratio["min"], ratio["median"], ratio["max"]) == pytest.approx((5 / 4, 4 / 3, 3 / 2))
    assert ratio["low"] < ratio["estimate"] < ratio["high"] and ratio["n"] == 3
    row = speed_report.step_table(found).rows[0]
    assert row[-1] == 100 and row[5][:3] == (3, 2, 4)


def test_arms_take_turns_and_the_first_one_changes():
    order = []
    arms = [scripted(name, [1] * 9)[0] for name in "abc"]
    for arm in arms:
        arm.turn = (lambda name, turn: lambda: (order.append(name), turn())[1])(arm.name, arm.turn)
    speed_arms.play(arms, rounds=2, steps=2, warmup=1, device="cpu")
    assert "".join(order) == "abcabc" + "bcabca" + "cabcab"


def test_every_method_of_the_registry_has_a_row(registry_record):
    rows = {(row[0], row[1]): row for row in speed_report.step_table(registry_record).rows}
    files = {p.stem for p in (Path(config.__file__).parent / "methods").glob("*.py")} - {"__init__"}
    assert {name for name, engine in rows if engine == "reference"} == files | {"step, bf16", "step, e4m3"}
    assert rows["vllm", "vllm"][5] == "not installed"
    assert rows["transformers", "transformers"][5] == "not installed"
    for name, arm in registry_record["arms"].items():
        for row in registry_record["rounds"] + registry_record["warmup"]:
            if arm["status"] == "measured":
                assert sum(row[name][p] for p in speed_report.PHASES) == pytest.approx(row[name]["step"])
    assert set(speed_report.PHASES) == set(speed_step.PHASES)


def test_a_configuration_brings_the_methods_it_selects(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "methods: {a: {kind: bf16}, b: {kind: jetrl, flow: {format: e5m2}}, c: {kind: jetrl}}\n"
        "experiments: {one: [b, a], two: [a], three: [c]}\nselect: [one, two]\n"
    )
    found = speed_arms.methods_of([path], None)
    assert list(found) == ["b", "a"] and found["b"].flow.format == "e5m2"
    assert list(speed_arms.methods_of([path], ["c"])) == ["c"]


def test_ratios_are_taken_within_an_engine_and_contain_their_estimate(registry_record):
    pairs = registry_record["ratio"]
    assert {"e4m3/bf16", "reference:jetrl/reference:bf16"} <= pairs.keys()
    assert "reference:bf16/reference:bf16" not in pairs and len(pairs) == len(config.registry())
    for name, phases in registry_record["ratio_by_phase"].items():
        for ratio in [pairs[name], *phases.values()]:
            assert ratio["low"] <= ratio["estimate"] <= ratio["high"]
            assert ratio["min"] <= ratio["median"] <= ratio["max"]
    assert "logprob" in registry_record["ratio_by_phase"]["reference:jetrl/reference:bf16"]
    assert "logprob" not in registry_record["ratio_by_phase"]["reference:conventional/reference:bf16"]


def test_seconds_are_per_job_whatever_a_methods_batch(registry_record):
    for name, arm in registry_record["arms"].items():
        if arm["status"] == "measured":
            assert arm["work"]["train_tokens"] == TINY.samples * TINY.new_tokens, name
            assert arm["work"]["optimizer_steps"] == (1 if arm["kind"] == "step" else 4), name


def test_shares_of_ceilings():
    record = {"ceilings": {"product_flops": 1e12, "copy_bytes_s": 1e10}}
    work = {"flop": {"rollout": 1e9, "logprob": 0, "train": 2e9}, "bytes": {"optimizer": 1e8}}
    share = speed_report.share_reached(record, {"rollout": 0.01, "logprob": 0, "train": 0.004, "optimizer": 0.02}, work)
    assert share == pytest.approx({"rollout": 0.1, "train": 0.5, "optimizer": 0.5})


def test_fp8_on_a_gpu_takes_the_back_end_and_keeps_a_flows_own():
    unified = FlowConfig(rollout="fp8", train="fp8")
    assert speed_arms.with_backend(unified, "torch").backend == "torch"
    assert speed_arms.with_backend(unified, "te").wgrad_output == "bf16"
    assert speed_arms.with_backend(FlowConfig(), "torch").backend == "torch", "its bf16 products are torch's own"
    own = unified.model_copy(update={"backend": "te"})
    assert speed_arms.with_backend(own, "torch") == own
    arm = speed_arms.step_arms(TINY, "cpu", "torch")[1]
    assert arm.turn is None and "'torch' cannot run here: device 'cpu'" in arm.status


# --- another trainer's script


@pytest.fixture
def peer(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "args = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert args['--threads'] == '1' and args['--dtype'] == 'bf16' and args['--max-new'] == '6', args\n"
        "told = {'step': 100.0, 'generate': 40.0, 'loss_forward': 20.0, 'backward': 35.0}\n"
        "open(args['--json'], 'w').write(json.dumps({'cpu_s': told}))\n"
    )
    return script


def test_a_peer_stands_beside_the_steps(peer):
    arms = [scripted("bf16", [9, 1, 2])[0], scripted("e4m3", [9, 2, 4])[0]]
    found = speed_arms.measure(TINY, arms, rounds=2, warmup=1, peer=peer)
    assert found["rounds"][0]["peer"] == {"step": 100, "rollout": 40, "train": 55, "other": 5}
    assert found["ratio"]["e4m3/peer"]["median"] == pytest.approx(0.03)
    assert found["ratio_by_phase"]["bf16/peer"]["rollout"]["max"] == pytest.approx(1 / 40)
    text = speed_report.text(found)
    assert "| peer | peer |" in text and "measured, FP8 emulated on a CPU" in text


def test_a_peer_that_fails_is_named(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("raise SystemExit('no module named trl')\n")
    with pytest.raises(ValueError, match=r"bad\.py: ended with 1: no module named trl"):
        speed_arms.peer_turn(bad, sys.executable, TINY, 1)


# --- sweeps


def test_one_axis_varies_at_a_time():
    for axis, jobs in speed_sweep.points(Job(), list(speed_sweep.AXES)).items():
        field = speed_sweep.AXES[axis][0]
        assert Job() in jobs.values() and len(jobs) >= 3
        for value, job in jobs.items():
            assert value == (job.samples if axis == "batch" else getattr(job, field))
            assert {k for k in vars(job) if getattr(job, k) != getattr(Job(), k)} <= {field}


def test_a_sweep_measures_its_points_and_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(speed_sweep.AXES, "length", ("new_tokens", (4,), "new tokens a sequence"))
    monkeypatch.setitem(speed_sweep.AXES, "depth", ("layers", (2,), "layers"))
    out = tmp_path / "sweep.json"
    argv = ["speed", "sweep", "--axes", "length", "depth", *SIZE, "--pairs", "2", "--out", str(out)]
    assert main(argv) == 0
    record = speed_report.read(out)
    assert [p["value"] for p in record["axes"]["length"]["points"]] == [4, 6]
    shared = [next(p for p in record["axes"][a]["points"] if p["job"] == record["job"]) for a in ("length", "depth")]
    assert shared[0]["rounds"] == shared[1]["rounds"], "the common point is measured once"
    for axis in record["axes"].values():
        for point in axis["points"]:
            assert len(point["rounds"]) == 2 and len(point["warmup"]) == 1
            ratio = point["ratio"]["step"]
            assert ratio["low"] <= ratio["estimate"] <= ratio["high"]
    assert out.with_suffix(".md").read_text() == speed_report.text(record)
    for folder in ("a", "b"):
        assert main(["speed", "report", str(out), "--out", str(tmp_path / folder)]) == 0
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert {f"speed_sweep.{k}" for k in ("md", "csv", "tex")} <= set(names)
    assert {f"speed_sweep_figure.{k}" for k in ("pdf", "svg", "png", "csv")} <= set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert "measured, FP8 emulated on a CPU" in (tmp_path / "a" / "speed_sweep_figure.csv").read_text()


def test_phase_shares_sum_to_one(registry_record, tmp_path):
    names = speed_report.render(registry_record, tmp_path)
    assert names == ["speed_step", "speed_ratios", "speed_ceilings", "speed_phases_figure"]
    shares: dict[tuple, float] = {}
    for line in (tmp_path / "speed_phases_figure.csv").read_text().splitlines()[2:]:
        arm, engine, _, _, share = line.split(",")
        shares[arm, engine] = shares.get((arm, engine), 0.0) + float(share)
    assert len(shares) == len(config.registry()) + 2
    assert all(total == pytest.approx(1, abs=1e-4) for total in shares.values())


# --- bad input


@pytest.mark.parametrize(
    "argv, message",
    [
        (["step", "--methods", "jetrl_exakt"], "--methods 'jetrl_exakt' is unknown; did you mean 'jetrl_exact'?"),
        (["step", "--config", "config/config.yaml", "--methods", "fp8_rolout"], "did you mean 'fp8_rollout'?"),
        (["sweep", "--axes", "lenght"], "--axes 'lenght' is unknown; did you mean 'length'?"),
        (["step", "--pairs", "0", "--methods", "bf16"], "--pairs 0 is below 1"),
        (["step", "--new-tokens", "0"], "--new-tokens 0 is below 1"),
        (["step", "--prompts", "6"], "--prompts 6 is not a multiple of 4"),
        (["step", "--heads", "3"], "--hidden 32 is not a multiple of --heads 3"),
        (["step", "--device", "cuda"], "--device cuda: this machine has no CUDA device; nearest: 'cpu'"),
        (["report", "config/config.yaml"], "config/config.yaml"),
    ],
)
def test_refusals(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(devices, "gpus", lambda: ())
    if argv[0] == "report":
        argv = [*argv, "--out", str(tmp_path)]
    else:
        argv = [argv[0], *SIZE, "--engines", "reference", *argv[1:]] if argv[0] == "step" else [*argv, *SIZE]
    assert main(["speed", *argv]) == 2
    assert message in capsys.readouterr().err


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text('{"schema": 1, "what": "step"}')
    with pytest.raises(ValueError, match="not a record of `speed step` or `speed sweep`, schema 2"):
        speed_report.read(path)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_the_same_steps(tmp_path):
    methods = {name: config.registry()[name] for name in ("fp8_rollout", "pipelinerl")}
    job = replace(TINY, hidden=64)  # vLLM's attention on a CPU has heads of at least 32
    arms = speed_arms.method_arms(job, methods, ["vllm"], "cpu", "emulated", tmp_path)
    found = speed_arms.measure(job, arms, rounds=1, warmup=1)
    assert set(found["median"]) == {"vllm:fp8_rollout", "vllm:pipelinerl"}
    for name, median in found["median"].items():
        assert sum(median[phase] for phase in speed_step.PHASES) == pytest.approx(median["step"])
        assert min(median[phase] for phase in ("rollout", "sync", "train")) > 0
        assert found["arms"][name]["work"]["rollout_tokens"] == job.samples * job.new_tokens
