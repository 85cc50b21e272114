"""The command line: every verb dispatches, bad input is one line and exit code 2, and light verbs stay light."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_bench import __main__ as command
from jetrl_bench.errors import WorkerDied

ROOT = Path(__file__).parent.parent


def test_every_verb_lives_in_a_module_with_the_pair():
    for verb, (name, text) in command.VERBS.items():
        spec = importlib.util.find_spec(f"jetrl_bench.{name}")
        assert spec is not None, verb
        module = importlib.import_module(spec.name)
        assert callable(module.add_arguments), verb
        assert callable(module.run), verb
        assert text, verb


@pytest.mark.parametrize("verb", sorted(command.VERBS))
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([verb, "--help"])
    assert ended.value.code == 0
    assert f"jetrl-bench {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("file: key:\n nearest"), 2), (WorkerDied("worker 3 died"), 3)], ids=["bad", "died"]
)
def test_errors_are_one_line_with_their_exit_code(error, code, monkeypatch, capsys):
    from jetrl_bench import schema

    def fail(args):
        raise error

    monkeypatch.setattr(schema, "run", fail)
    assert command.main(["schema"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")


def test_a_bug_keeps_its_traceback(monkeypatch):
    from jetrl_bench import schema

    def fail(args):
        raise KeyError("bug")

    monkeypatch.setattr(schema, "run", fail)
    with pytest.raises(KeyError):
        command.main(["schema"])


def test_a_failed_check_is_exit_code_1(tmp_path, capsys):
    stale = tmp_path / "schema.json"
    stale.write_text("{}")
    assert command.main(["schema", "--check", str(stale)]) == 1


def test_unknown_verb_names_the_nearest(capsys):
    assert command.main(["tarin"]) == 2
    assert "unknown verb 'tarin'; did you mean 'train'?" in capsys.readouterr().err


def test_unknown_key_through_the_command_line(cli):
    done = cli("resolve", "--set", "lrr=1e-6")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: config/config.yaml, --set: unknown key 'lrr'; did you mean 'lr'?\n"


def test_resolve_writes_what_the_workflow_writes(cli, tmp_path):
    done = cli("resolve", "--config", "config/config.yaml", "config/smoke.yaml", "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5
    for row in rows:
        assert json.loads((tmp_path / row["folder"] / "settings.json").read_text()) == row["settings"]


@pytest.mark.parametrize("verb", ["resolve", "schema", "unlock", "table", "figure", "claims", "diff", "publish"])
def test_verbs_that_do_no_mathematics_import_no_torch(verb):
    code = (
        "import sys; from jetrl_bench import __main__ as m; import importlib, argparse;"
        f"importlib.import_module('jetrl_bench.' + m.VERBS[{verb!r}][0]).add_arguments(argparse.ArgumentParser());"
        "bad = {'torch', 'transformers', 'lm_eval', 'vllm', 'transformer_engine', 'triton'} & set(sys.modules);"
        "sys.exit(f'imports {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version_and_exit_codes_are_told(cli):
    assert cli("--version").stdout.startswith("jetrl-bench ")
    help_text = cli("--help").stdout
    assert "3 dead worker" in help_text
    assert all(verb in help_text for verb in command.VERBS)


def test_a_gpu_asked_for_where_none_is_ends_the_job_before_it_starts(cli, tmp_path):
    from jetrl_bench import config

    settings = config.load([ROOT / "config" / "config.yaml"], {"train": {"gpus": 1}}).experiment_runs("precision")[0][1]
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    job = ("--settings", tmp_path / "settings.json", "--method", "bf16", "--base", tmp_path / "absent")
    out = ("--out", tmp_path / "out", "--state", tmp_path / "state")
    done = cli("train", *job, *out, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "train.gpus 1 asks for a GPU, this machine has none" in done.stderr
    assert not (tmp_path / "out").exists()


def test_drawing_needs_no_display():
    code = "import jetrl_bench.figures, matplotlib.pyplot as plt; plt.figure(); print(plt.get_backend())"
    environment = {key: value for key, value in os.environ.items() if key != "DISPLAY"} | {"MPLBACKEND": "TkAgg"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.strip().lower()) == (0, "agg"), done.stderr
