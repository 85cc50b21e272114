"""doctor and the checks at a job's start: what is asked for and absent is one line, and planning never asks."""

import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_bench import config as configs
from jetrl_bench import devices

ROOT = Path(__file__).parent.parent
DEFAULT, H100 = ROOT / "config" / "config.yaml", ROOT / "config" / "h100.yaml"


def run_settings(**overrides):
    return configs.load([DEFAULT], overrides).experiment_runs("precision")[0][1]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: ())


def test_the_default_needs_nothing_special(no_gpu):
    devices.require(run_settings())
    assert devices.missing_for(configs.load([DEFAULT])) == []


def test_a_gpu_asked_for_where_none_is_refused_in_one_line(no_gpu):
    with pytest.raises(ValueError, match="train.gpus 1 asks for a GPU, this machine has none") as caught:
        devices.require(run_settings(train={"gpus": 1}))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="train.gpus 8 asks for 8 GPUs"):
        devices.require(run_settings(train={"gpus": 8}))


def test_a_gpu_that_is_there_is_enough(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: ("H100, capability 9.0",))
    devices.require(run_settings(train={"gpus": 1}))
    with pytest.raises(ValueError, match="this machine has 1"):
        devices.require(run_settings(train={"gpus": 2}))


def test_an_engine_or_backend_that_is_not_installed_is_refused(no_gpu, monkeypatch):
    monkeypatch.setattr(devices, "installed", lambda name: None)
    with pytest.raises(ValueError, match="train.engine 'vllm' needs vLLM"):
        devices.require(run_settings(train={"engine": "vllm"}))
    lines = devices.missing_for(configs.load([DEFAULT, H100]))
    assert any("Transformer Engine" in line for line in lines)
    assert any("train.gpus" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "found", "inside"),
    [
        ("vllm", "0.32.0", True),
        ("vllm", "0.32.5+cpu", True),
        ("vllm", "0.31.9", False),
        ("vllm", "0.33.0", False),
        ("vllm", "1.0", False),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.14.1", True),
        ("torch", "2.15.0", False),
    ],
)
def test_versions_outside_the_tested_range_are_said(name, found, inside):
    assert (devices.outside_tested(name, found) is None) is inside


def test_an_engine_version_outside_the_tested_range_is_refused(no_gpu, monkeypatch):
    monkeypatch.setattr(devices, "installed", lambda name: "0.99.0" if name == "vllm" else None)
    with pytest.raises(ValueError, match=r"vllm 0\.99\.0 is outside the tested range >=0\.32,<0\.33"):
        devices.require(run_settings(train={"engine": "vllm"}))


def test_doctor_has_a_line_for_everything(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("JETRL_DATA_DIR", raising=False)
    assert [f.name for f in devices.findings()] == [
        *("cores", "instruction set", "torch", "compiler", "GPU", "vLLM", "Transformer Engine", "data", "hub")
    ]
    for finding in devices.findings():
        assert finding.text, finding
        assert "\n" not in finding.text
        assert finding.ok or any(word in finding.text for word in ("no", "not", "must", "lacks", "outside")), finding


def test_doctor_without_a_compiler_says_what_it_costs(monkeypatch):
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert devices._compiler() == (False, devices._compiler()[1])
    assert "same bits" in devices._compiler()[1]


def test_doctor_with_data_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("JETRL_DATA_DIR", str(tmp_path))
    (tmp_path / "aime_2024.jsonl").write_text("")
    assert devices._data() == (False, "JETRL_DATA_DIR lacks math_500.jsonl, gsm8k_test.jsonl")


def test_doctor_fails_on_a_configuration_this_machine_cannot_run(cli):
    gpu = ["--config", "config/config.yaml", "config/h100.yaml"]
    done = cli("doctor", *gpu, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "train.gpus 1 asks for a GPU" in done.stdout
    assert cli("doctor", "--config", "config/config.yaml", HF_HUB_OFFLINE="1").returncode == 0


def test_isa_caps_are_told(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "capped by ONEDNN_MAX_CPU_ISA=AVX2" in devices._instruction_set()[1]


def test_planning_a_gpu_configuration_never_asks_for_a_gpu():
    code = (
        "import sys; from jetrl_bench import plan, config;"
        f"assert plan.planned(config.load([{str(DEFAULT)!r}, {str(H100)!r}]));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_torch_obeys_the_thread_count_of_the_job():
    code = "import os; os.environ['OMP_NUM_THREADS'] = '1'; import torch; print(torch.get_num_threads())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "1"
