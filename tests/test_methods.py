"""The registry: every file is a method, torch-free, documented, and says which policies its loss compares."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_bench.config import Config, LossConfig, Method, SyncConfig, registry
from jetrl_bench.strict import validate

METHODS = Path(__file__).parent.parent / "jetrl_bench" / "methods"


def test_every_file_is_a_method_with_a_summary_and_a_docstring():
    files = {p.stem for p in METHODS.glob("*.py")} - {"__init__"}
    assert files <= set(registry())
    for name, method in registry().items():
        assert isinstance(method, Method), name
        assert method.summary, name
    for path in METHODS.glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_configuration_imports_no_heavy_library():
    code = (
        "import sys; from jetrl_bench.config import registry; registry();"
        "bad = {'torch', 'vllm', 'transformers', 'lm_eval', 'transformer_engine'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bare_methods_have_no_correction_and_never_use_the_engines_logprobs():
    for name in ("bf16", "fp8_rollout", "jetrl", "jetrl_exact"):
        loss = registry()[name].loss
        assert (loss.anchor, loss.correction) == ("proximal", "none"), name
    assert registry()["fp8_rollout_tis"].loss.correction == "truncate"


def test_unified_methods_run_one_precision_on_both_sides():
    for name in ("jetrl", "jetrl_exact"):
        flow = registry()[name].flow
        assert flow.rollout == flow.train == "fp8"
    assert registry()["jetrl_exact"].flow.train_kernels == "same"
    assert registry()["jetrl"].flow.train_kernels == "other"


def test_an_inflight_method_must_say_what_happens_to_the_kv_cache():
    with pytest.raises(ValueError, match="kv must be"):
        SyncConfig(schedule="inflight", max_lag=4)
    with pytest.raises(ValueError, match="kv must be"):
        SyncConfig(schedule="barrier", kv="keep")
    with pytest.raises(ValueError, match="max_lag"):
        SyncConfig(schedule="inflight", kv="keep")


def test_geometric_weights_are_refused_outside_masks():
    with pytest.raises(ValueError, match="mask only"):
        LossConfig(level="geometric", correction="truncate")


def _config(**changes):
    data = {"methods": {"bf16": {"kind": "bf16"}}, "experiments": {"p": ["bf16"]}, "select": ["p"], **changes}
    return validate(Config, data, "config")


def test_a_new_method_entry_adds_runs_and_changes_no_other():
    before = _config().runs()
    extra = {"bf16": {"kind": "bf16"}, "bare": {"kind": "fp8_rollout"}}
    after = _config(methods=extra, experiments={"p": ["bf16", "bare"]}).runs()
    assert set(before) < set(after)
    assert {name for name, _, _ in set(after) - set(before)} == {"bare"}


def test_the_digest_depends_on_values_not_on_spelling_names_or_summaries():
    digests = {lr: next(iter(_config(lr=lr).runs()))[2] for lr in ("1e-6", 1e-6, "1.0e-6")}
    assert len(set(digests.values())) == 1
    assert next(iter(_config(lr=2e-6).runs()))[2] not in digests.values()
    renamed = _config(methods={"mine": {"kind": "bf16", "summary": "other words"}}, experiments={"p": ["mine"]})
    assert {d for _, _, d in renamed.runs()} == {d for _, _, d in _config().runs()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lrr": 1}, "unknown key 'lrr'; did you mean 'lr'?"),
        ({"methods": {"bf16": {"kind": "bf17"}}}, "did you mean 'bf16'?"),
        ({"methods": {"bf16": {"kind": "bf16", "flow": {"fromat": "e4m3"}}}}, "did you mean 'format'?"),
        ({"methods": {"bf16": {"kind": "bf16", "flow": {"format": "e4m4"}}}}, "did you mean"),
        ({"methods": {"b-f": {"kind": "bf16"}}}, r"must match \[a-z0-9_\]\+"),
        ({"experiments": {"p": ["bf61"]}}, "did you mean 'bf16'?"),
        ({"select": ["q"]}, "select"),
        ({"task": {"min_steps": 30, "max_steps": 40}}, "num_labels"),
        ({"train": {"samples_per_update": 12}}, "multiple of group_size"),
        ({"train": {"optimizer_steps": 7}}, "multiple of updates_per_rollout"),
        ({"lr": "fast"}, "lr"),
        ({"lr": float("nan")}, "lr"),
    ],
)
def test_bad_settings_are_refused_in_one_line_that_names_the_key(change, message):
    with pytest.raises(ValueError, match=message) as error:
        _config(**change)
    assert "\n" not in str(error.value)


def test_seeds_share_warm_ups_by_index():
    runs = _config(seeds=[0, 1, 5], num_bases=3).runs().values()
    assert [(r.seed, r.base_index, r.replicate) for r in runs] == [(0, 0, 0), (1, 1, 0), (5, 2, 1)]
    bases = {r.seed: r.base_digest() for r in runs}
    assert len(set(bases.values())) == 3
