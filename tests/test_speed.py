"""The measured RL step: the work is what it says, arms are interleaved, a peer is read and its failure named."""

import json
import sys

import pytest

from jetrl_bench import speed

TINY = speed.Job(hidden=32, layers=1, heads=2, kv_heads=1, vocab=64, prompts=2, group=2, prompt_len=4, new_tokens=6)


def test_a_step_does_its_work_and_learns():
    import torch

    arm = speed.Stepper(TINY, speed.ARMS["e4m3"])
    before = [p.detach().clone() for p in arm.trainer.model.parameters()]
    seconds = arm.step()
    assert seconds["step"] == pytest.approx(seconds["rollout"] + seconds["train"])
    assert min(seconds.values()) > 0
    assert arm.trainer.version == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, arm.trainer.model.parameters()))
    arm.step()
    assert arm.engine.policy_version == 1


def test_the_shape_is_the_peers():
    job = speed.Job()
    settings = job.settings(speed.ARMS["bf16"])
    assert settings.train.samples_per_update == 64
    assert (settings.model.arch, settings.model.hidden_size, settings.model.intermediate_size) == ("qwen2", 128, 512)
    assert settings.method.loss.anchor == "rollout", "no proximal pass"
    assert speed.ARMS["e4m3"].scale == "pow2"


@pytest.fixture
def peer(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "args = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert args['--threads'] == '1' and args['--dtype'] == 'bf16', args\n"
        "open(args['--json'], 'w').write(json.dumps({'cpu_s': {'step': 100.0}}))\n"
    )
    return script


def test_measure_reports_medians_and_ratios(peer):
    result = speed.measure(TINY, pairs=2, steps=1, peer=peer)
    assert len(result["rounds"]) == 2
    for row in result["rounds"]:
        assert row["peer"]["step"] == 100.0
    ratios = [row["e4m3"]["step"] / row["bf16"]["step"] for row in result["rounds"]]
    assert result["ratio"]["e4m3/bf16"]["median"] == pytest.approx(sum(ratios) / 2)
    assert result["ratio"]["bf16/peer"]["max"] < 0.05
    text = speed.summary(result)
    assert "e4m3, emulated" in text
    assert "measured" in text
    json.dumps(result)


def test_a_peer_that_fails_is_named(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("raise SystemExit('no module named trl')\n")
    with pytest.raises(ValueError, match=r"bad\.py: ended with 1: no module named trl"):
        speed.peer_step(bad, sys.executable, TINY, 1)
