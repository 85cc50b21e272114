"""The repository: pins agree, package data ships, tracked files name no machine, no heavy import sneaks in."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jetrl_bench import provenance

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
        if line and line[0] != "#"
    )
}


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_dependency_is_pinned_within_its_range():
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in PINS, f"constraints/cpu.txt lacks {name}"
        assert requirement.specifier.contains(PINS[name]), f"{name} {PINS[name]} is outside {requirement.specifier}"


def test_pins_are_whole_versions_of_public_packages():
    assert PINS["torch"] == "2.13.0"
    for name, version in PINS.items():
        assert re.fullmatch(r"[\w.!]+", version), f"{name}: {version}"


def test_the_conda_environment_installs_the_same_package_with_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-c constraints/cpu.txt", "-e .[dev]"]}
    assert "python=3.11" in conda


def test_the_workflow_environment_has_the_pins_of_every_core_dependency():
    environment = yaml.safe_load((ROOT / "workflow" / "envs" / "cpu.yaml").read_text())
    here = {}
    for text in environment["dependencies"][-1]["pip"]:
        requirement = Requirement(text)
        here[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    wanted = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert here == {name: PINS[name] for name in wanted}


def test_package_data_covers_every_file_of_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["jetrl_bench"]
    for path in tracked():
        if path.is_relative_to(ROOT / "jetrl_bench") and path.suffix != ".py":
            assert any(path.match(pattern) for pattern in patterns), path
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {p.parent.relative_to(ROOT).as_posix().replace("/", ".") for p in (ROOT / "jetrl_bench").rglob("*.py")}
    assert found == set(packages)


def test_the_makefile_installs_with_pip_and_the_pins_alone():
    text = (ROOT / "Makefile").read_text()
    assert "pip install -c constraints/cpu.txt -e '.[dev]'" in text
    for target in ("run", "smoke", "test", "figures", "publish"):
        assert re.search(rf"^{target}: .*(install|run)", text, re.M), target
    body = re.search(r"^figures:.*\n((?:\t.*\n)+)", text, re.M).group(1)
    assert "snakemake" not in body.lower(), "make figures must never be able to start training"


def test_no_file_names_a_machine():
    home = re.compile(r"(^|[^a-z.\w])/(tmp|work|root|home)/[a-z]")
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            assert not home.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"


LIGHT = {"vllm", "transformer_engine", "triton", "transformers", "lm_eval", "datasets"}


def top_level_imports(path: Path) -> set[str]:
    out = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            out |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            out.add(node.module.split(".")[0])
    return out


@pytest.mark.parametrize("path", sorted((ROOT / "jetrl_bench").rglob("*.py")), ids=lambda p: p.stem)
def test_nothing_heavy_is_imported_until_asked(path):
    if not path.stem.startswith(("vllm", "rollout_vllm", "lm_eval")) and path.parent.name != "lm_eval_tasks":
        assert not top_level_imports(path) & LIGHT


def test_loop_stays_small_and_knows_no_method_by_name():
    path = ROOT / "jetrl_bench" / "loop.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    names = {p.stem for p in (ROOT / "jetrl_bench" / "methods").glob("*.py")} - {"__init__"}
    strings = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not strings & (names - {"concurrent"})


def test_profiles_agree_on_what_reruns_and_resumes():
    shared = ("rerun-triggers", "rerun-incomplete", "keep-going", "show-failed-logs", "scheduler")
    profiles = [yaml.safe_load(p.read_text()) for p in sorted((ROOT / "profiles").glob("*/profile.v9+.yaml"))]
    assert len(profiles) == 2
    for key in shared:
        assert profiles[0][key] == profiles[1][key]
    assert profiles[0]["rerun-triggers"] == ["mtime", "params", "input", "software-env"]


def test_the_slurm_profile_gives_memory_once():
    profile = yaml.safe_load((ROOT / "profiles" / "slurm" / "profile.v9+.yaml").read_text())
    asked = " ".join(map(str, profile["default-resources"]))
    assert asked.count("mem_mb") == 1
    assert "mem_mb_per_cpu" not in asked
    rules = "".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    assert "mem_mb" not in rules
    assert "retries" not in profile, "retries stand at the rules that resume, and nowhere else"


def test_the_source_hash_covers_what_training_really_loads():
    code = "import sys, jetrl_bench.loop, jetrl_bench.base; print(*[m for m in sys.modules if m[:6] == 'jetrl_'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.split(".")[1] for name in done.stdout.split() if "." in name} - {"methods"}
    covered = {path.stem for path in provenance.numerical_files() if path.suffix == ".py"}
    assert len(loaded) > 20 and loaded - covered == set(provenance.LEFT_OUT) & loaded
    assert set((ROOT / "jetrl_bench" / "csrc").iterdir()) <= set(provenance.numerical_files())


def test_the_source_hash_changes_with_code_alone(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(ROOT / "jetrl_bench", package, ignore=shutil.ignore_patterns("__pycache__"))
    source_hash = provenance.source_hash.__wrapped__
    before = source_hash(package)
    for name, text in [
        ("loss.py", "\n# a remark\n"),
        ("tables.py", "\nx = 1\n"),
        ("csrc/gemm.c", "\n/* a remark */\n"),
    ]:
        with open(package / name, "a") as file:
            file.write(text)
        assert source_hash(package) == before
    for name, text in [("layers.py", "\nx = 1\n"), ("csrc/scales.h", "\nint x;\n"), ("vllm_transfer.py", "\nx = 1\n")]:
        with open(package / name, "a") as file:
            file.write(text)
        changed, before = before, source_hash(package)
        assert changed != before, name
