"""The workflow: it plans every shipped configuration, replans only what changed, and bad input stops it in one line.

Nothing here trains: the runs are planned, or their outputs are stood in for by empty files (`--touch` semantics).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from jetrl_bench import config as configs
from jetrl_bench import figures, locks, paper, plan, tables

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "config" / "smoke.yaml"


def snakemake(folder: Path, *args, **environment) -> subprocess.CompletedProcess:
    """From the folder's own Snakefile where it has one, in an environment without an activated shell."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "JETRL_DATA_DIR")}
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", *map(str, args)],
        cwd=folder,
        env={**kept, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def suite(tmp_path) -> Path:
    """The workflow in a folder of its own whose name has a space and a quote."""
    folder = tmp_path / "my runs'é"
    folder.mkdir()
    for name in ("Snakefile", "workflow", "config", "profiles", "paper"):
        source = ROOT / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder / name)
    (folder / "results").mkdir()
    shutil.copy(ROOT / "results" / "published.yaml", folder / "results")
    return folder


def jobs(done: subprocess.CompletedProcess) -> dict[str, int]:
    """rule -> jobs of a dry run's statistics."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).split("Job stats:")[1].split("\n\n")[0].splitlines()[3:]
    return {line.split()[0]: int(line.split()[1]) for line in lines if line.strip()}


def test_bare_dry_run_plans_the_default():
    counts = jobs(snakemake(ROOT, "-n"))
    assert counts["train"] == 42
    assert counts["base"] == 3
    assert counts["total"] == sum(v for k, v in counts.items() if k != "total")
    assert sum(name.startswith("evaluate_") for name in counts) == 14 + 2


def test_a_pretrained_model_is_made_before_what_starts_from_it(suite):
    """config/smollm2.yaml: one rule writes the folder; nothing of it is planned where a warm-up is trained."""
    counts = jobs(snakemake(suite, "-n", "--configfile", "config/smollm2.yaml"))
    assert counts["smollm2"] == counts["base"] == counts["evaluate_base"] == 1
    assert counts["train"] == 3 and {"tables", "figures", "claims", "compare"} <= set(counts)
    own = snakemake(suite, "-n", "--configfile", "config/smollm2.yaml", "--config", 'base={"checkpoint": "my/model"}')
    assert own.returncode != 0 and "my/model/model.safetensors" in own.stdout + own.stderr
    assert "smollm2" not in jobs(snakemake(suite, "-n"))


@pytest.mark.parametrize("layer", ["smoke.yaml", "h100.yaml"])
def test_every_shipped_configuration_plans_on_this_machine(layer):
    config = configs.load([ROOT / "config" / "config.yaml", ROOT / "config" / layer])
    counts = jobs(snakemake(ROOT, "-n", "--configfile", ROOT / "config" / layer))
    assert counts["train"] == len(plan.planned(config))


def test_every_method_of_the_configuration_is_used():
    config = configs.load([ROOT / "config" / "config.yaml"])
    assert {run.method for run in plan.planned(config)} == set(config.methods)


def test_lint_is_clean():
    done = snakemake(ROOT, "--lint")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good condition" in done.stdout + done.stderr


def test_snakefmt_is_clean():
    files = [ROOT / "Snakefile", *sorted((ROOT / "workflow" / "rules").glob("*.smk"))]
    done = subprocess.run(
        [sys.executable, "-m", "snakefmt", "--check", *files], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_every_rule_has_a_log_and_none_uses_what_the_design_forbids():
    for path in sorted((ROOT / "workflow" / "rules").glob("*.smk")):
        lines = [line.strip() for line in path.read_text().splitlines() if not line.strip().startswith("#")]
        rules = [line for line in lines if line.startswith("rule ") or line == "rule:"]
        text = "\n".join(lines)
        assert lines.count("log:") == len(rules), path
        assert text.count("> {log:q} 2>&1") + text.count("2> {log:q}") >= len(rules), path
        assert not {"checkpoint", "benchmark:", "ruleorder:", "script:"} & set(text.split()), path
        if path.name != "common.smk":
            assert "def " not in text, f"{path}: functions stand in common.smk"


def test_only_rule_data_reads_the_data_folder():
    files = [ROOT / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]
    named = [p.name for p in files if "JETRL_DATA_DIR" in p.read_text()]
    assert named == ["data.smk"]


# Replanning. Stand-ins for the outputs: `--touch` marks what a run would have written.


@pytest.fixture
def finished(suite) -> Path:
    """The smoke workflow as if it had run: the cheap rules for real, empty files for the outputs of the dear ones."""
    smoke = ["--configfile", "config/smoke.yaml"]
    done = snakemake(suite, *smoke, "--until", "run_config", "base_config", "evaluate_config", "study_config")
    assert done.returncode == 0, done.stderr
    config = configs.load([suite / "config" / "config.yaml", suite / "config" / "smoke.yaml"])
    for run in plan.planned(config):
        folder = suite / run.folder
        tasks = [run.settings.task.name, *config.evaluate.benchmarks]
        for name in ["manifest.json", "train.jsonl", "timing.jsonl", "checkpoint/config.json"]:
            _stand_in(folder / name)
        _stand_in(folder / "checkpoint" / "model.safetensors")
        for task in tasks:
            _stand_in(folder / "eval" / f"{task}.jsonl")
        _stand_in(suite / run.base_folder / "base.json")
        _stand_in(suite / "results" / "bases" / f"{run.base}.evaluated")
    for name in config.evaluate.benchmarks:
        _stand_in(suite / "data" / f"{name}.json")
    for name in [*tables.BUILDERS, "claims", "published", "comparison"]:
        for kind in ("md", "csv", "tex"):
            _stand_in(suite / "results" / "tables" / f"{name}.{kind}")
    for name in figures.BUILDERS:
        for kind in ("pdf", "svg", "png", "csv"):
            _stand_in(suite / "results" / "figures" / f"{name}.{kind}")
    for name in ("phases", "speedup", "timeline", "utilisation", "lag", "break_even"):
        for kind in ("pdf", "svg", "png", "csv"):
            _stand_in(suite / "results" / "modelled" / f"modelled_{name}.{kind}")
    for name in ("modelled_speedups.md", "modelled_speedups.csv", "validation.txt", "validation.json"):
        _stand_in(suite / "results" / "modelled" / name)
    _stand_in(suite / "results" / "scripted" / "gold" / "aime_2024.jsonl")
    for name in ("speed.json", "speed.md", "paper/paper.pdf"):
        _stand_in(suite / "results" / name)
    done = snakemake(suite, *smoke, "--touch", "--forceall")
    assert done.returncode == 0, done.stderr
    return suite


def _stand_in(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("stand-in\n")


def replanned(folder: Path, *args, **environment) -> dict[str, int]:
    done = snakemake(folder, "-n", "--configfile", "config/smoke.yaml", *args, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {} if "Nothing to be done" in done.stdout + done.stderr else jobs(done)


def test_what_is_replanned_after_an_edit(finished):
    assert replanned(finished) == {}, "a second run has nothing to do"
    assert replanned(finished, "--cores", "1") == {}
    assert replanned(finished, HF_HOME="elsewhere") == {}

    smoke = finished / "config" / "smoke.yaml"
    before = smoke.read_text()
    smoke.write_text(before + "\n# a comment\n")
    assert replanned(finished) == {}, "a comment retrains nothing"

    edited = yaml.safe_load(before) | {"methods": {"jetrl_exact_e2m1": {"flow": {"scale": "fp32"}}}}
    smoke.write_text(yaml.safe_dump(edited))
    counts = replanned(finished)
    assert counts["train"] == 1, "one method's value retrains its runs alone"
    assert counts["evaluate_jetrl_exact_e2m1"] == 1
    assert "evaluate_bf16" not in counts
    assert "base" not in counts

    added = yaml.safe_load(before)
    added["methods"] = {"new": {"kind": "jetrl"}}
    added["experiments"]["smoke_precision"]["methods"].append("new")
    smoke.write_text(yaml.safe_dump(added))
    counts = replanned(finished)
    assert counts["train"] == 1
    assert {name for name in counts if name.startswith("evaluate_")} == {"evaluate_new", "evaluate_base"}

    smoke.write_text(before.replace("lr: 3.0e-4", "lr: 4.0e-4"))
    counts = replanned(finished)
    assert counts["train"] == 5
    assert "base" not in counts
    smoke.write_text(before.replace("lr: 3.0e-4", "lr: 3e-4"))
    assert replanned(finished) == {}, "another spelling of one number"
    smoke.write_text(before)
    assert replanned(finished, "--config", "lr=3e-4") == {}

    common = finished / "workflow" / "rules" / "train.smk"
    common.write_text(common.read_text().replace("jetrl_bench train --settings", "jetrl_bench  train --settings"))
    assert replanned(finished) == {}, "an edited shell line does not retrain a study"


def test_data_supplied_later_replan_evaluation_and_tables_only(finished, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "aime_2024.jsonl").write_text("{}\n")
    counts = replanned(finished, JETRL_DATA_DIR=str(folder))
    assert {"data", "scripted", "tables", "figures", "claims", "evaluate_bf16"} <= set(counts)
    assert not {"train", "base"} & set(counts)


# Bad input: one clear line, not zero


def errors(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in done.stderr.splitlines() if "error:" in line.lower()]


def test_unknown_key_through_snakemake(suite):
    done = snakemake(suite, "-n", "--config", "lrr=1e-6")
    assert done.returncode != 0
    assert errors(done) == ["error: config/config.yaml, --config: unknown key 'lrr'; did you mean 'lr'?"]
    assert "Traceback" not in done.stderr


def test_unknown_key_and_method_in_a_file_through_snakemake(suite):
    smoke = suite / "config" / "smoke.yaml"
    smoke.write_text(SMOKE.read_text() + "\nlrr: 3\n")
    done = snakemake(suite, "-n", "--configfile", "config/smoke.yaml")
    assert done.returncode != 0
    assert "unknown key 'lrr'; did you mean 'lr'?" in errors(done)[0]
    smoke.write_text(SMOKE.read_text().replace("[bf16, fp8_rollout_tis", "[bf61, fp8_rollout_tis"))
    done = snakemake(suite, "-n", "--configfile", "config/smoke.yaml")
    assert done.returncode != 0
    assert "method 'bf61' is unknown; did you mean 'bf16'?" in errors(done)[0]


def test_unknown_key_through_make(suite):
    """make's recipe with this interpreter in place of .venv: the exit code and the line come through."""
    shutil.copy(ROOT / "Makefile", suite)
    shutil.copy(ROOT / "pyproject.toml", suite)
    shutil.copytree(ROOT / "constraints", suite / "constraints")
    (suite / "stub").mkdir()
    (suite / "stub" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (suite / "stub" / "python").chmod(0o755)
    (suite / ".venv").mkdir()
    (suite / ".venv" / "installed").write_text("")
    done = subprocess.run(
        ["make", "run", "BIN=stub", "ARGS=-n --config lrr=1e-6"],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert any(line.startswith("error: ") and "did you mean 'lr'?" in line for line in done.stderr.splitlines())


# The lock of a dead Snakemake


@pytest.fixture
def locked(tmp_path) -> Path:
    (tmp_path / ".snakemake" / "locks").mkdir(parents=True)
    (tmp_path / ".snakemake" / "locks" / "0.output.lock").write_text("x\n")
    return tmp_path


def owner(folder: Path, **changes) -> None:
    process = psutil.Process()
    facts = {"host": locks.socket.gethostname(), "pid": process.pid, "started": process.create_time(), **changes}
    path = folder / locks.OWNERS / f"{facts['host']}-{facts['pid']}-{facts['started']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts))


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_dead_owners_lock_is_cleared(locked):
    owner(locked, pid=dead_pid())
    assert "which is dead" in locks.unlock(locked)
    assert not any((locked / locks.LOCKS).glob("*"))
    assert locks.unlock(locked) == ""


def test_a_reused_pid_is_not_the_owner(locked):
    owner(locked, started=psutil.Process().create_time() - 1000)
    assert "which is dead" in locks.unlock(locked)


@pytest.mark.parametrize("changes", [{}, {"host": "another-node", "pid": 1}], ids=["alive", "another host"])
def test_a_lock_whose_owner_may_live_is_kept(locked, changes):
    owner(locked, pid=dead_pid())
    owner(locked, **changes)
    with pytest.raises(ValueError, match="locked by snakemake pid"):
        locks.unlock(locked)
    assert any((locked / locks.LOCKS).glob("*.lock"))


def test_a_lock_of_unknown_origin_is_kept(locked):
    with pytest.raises(ValueError, match="unknown process"):
        locks.unlock(locked)
    assert any((locked / locks.LOCKS).glob("*.lock"))


def test_registering_forgets_the_dead_and_names_this_process(tmp_path):
    owner(tmp_path, pid=dead_pid())
    locks.register(tmp_path)
    (only,) = locks.owners(tmp_path)
    assert (only["pid"], only["alive"]) == (os.getpid(), True)


def test_unlock_refuses_a_live_lock_with_exit_code_2(cli, locked):
    owner(locked)
    done = cli("unlock", "--folder", locked)
    assert done.returncode == 2
    assert f"snakemake pid {os.getpid()}" in done.stderr


def test_declared_tables_and_figures_are_those_that_are_rendered():
    """The rules name their outputs one by one; a new table or figure must be declared."""
    text = (ROOT / "workflow" / "rules" / "common.smk").read_text()
    declared = {}
    for name in ("TABLES", "FIGURES"):
        lines = re.findall(rf"^{name} \+?= (.*)$", text, re.M)
        declared[name] = set(re.findall(r'"(\w+)"', "".join(lines)))
    assert declared == {"TABLES": set(tables.BUILDERS), "FIGURES": set(figures.BUILDERS)}
    assert set(paper.TABLES) <= declared["TABLES"] | {"claims", "published", "comparison"}
    assert set(paper.FIGURES) <= declared["FIGURES"]


def test_command_line_overrides_have_the_types_of_the_model(suite):
    """Snakemake hands lists and mappings over as strings; they become what the model says."""
    counts = jobs(snakemake(suite, "-n", "--config", "seeds=[0,1]", "select=[inflight]", "train={state_every: 8}"))
    assert counts["train"] == 12
    assert counts["base"] == 2


def test_a_failing_job_leaves_its_error_in_the_log(suite, tmp_path):
    """An altered data file: the job ends, its one line stands in the rule's log, and the exit code is not zero."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "aime_2024.jsonl").write_text('{"problem": "1 + 1?", "answer": "3"}\n')
    done = snakemake(suite, "--until", "data", JETRL_DATA_DIR=str(folder))
    assert done.returncode != 0
    log = (suite / "logs" / "data.log").read_text()
    assert log.startswith("error: ")
    assert "aime_2024.jsonl: refused" in log
    assert log.strip() in done.stderr, "a failed job's log is shown"
    assert not (suite / "data" / "aime_2024.json").exists()


def test_a_nested_snakemake_has_a_lock_of_its_own(suite, tmp_path):
    inner = f"{shlex.quote(sys.executable)} -m snakemake --cores 1 --directory {shlex.quote(str(suite))}"
    (tmp_path / "Snakefile").write_text(
        "rule all:\n"
        '    output: "done"\n'
        "    params:\n"
        f"        command={inner + ' --snakefile ' + shlex.quote(str(suite / 'Snakefile')) + ' evaluate_config'!r},\n"
        '    shell: "{params.command} && touch {output}"\n'
    )
    done = snakemake(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (suite / "results" / "evaluate.json").exists()
