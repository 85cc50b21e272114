"""Settings: strict, one meaning per value, one digest per run; generated files are fresh; shipped files are valid."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from jetrl_bench import plan, schema
from jetrl_bench.config import Config, Experiment, Method, RunSettings, load
from jetrl_bench.strict import merge, validate

ROOT = Path(__file__).parent.parent
DEFAULT = ROOT / "config" / "config.yaml"
LAYERS = [p for p in sorted((ROOT / "config").glob("*.yaml")) if p.name not in ("config.yaml", "claims.yaml")]


def loaded(**overrides) -> Config:
    return load([DEFAULT], overrides)


def digests(config: Config) -> set[str]:
    return {run.digest for run in plan.planned(config)}


def test_default_is_the_demonstration():
    config = loaded()
    assert config.lr == 2e-4
    assert [len(e.methods) for e in config.selected().values()] == [8, 6]
    assert len(plan.planned(config)) == 42
    for name, run in config.experiment_runs("precision"):
        assert (run.task.min_steps, run.task.max_steps, run.train.optimizer_steps) == (20, 20, 280)
        assert run.method.flow.format == ("e2m1" if name.endswith("e2m1") else "e4m3")
    for _, run in config.experiment_runs("inflight"):
        assert (run.task.min_steps, run.task.max_steps) == (6, 22)
        assert run.train.samples_per_update * run.train.optimizer_steps == 2048
    assert len({run.cost for _, run in config.experiment_runs("inflight")}) == 1, "one price list, equal hardware"
    assert {name for name, _ in config.experiment_runs("inflight")} >= {"inflight_keep", "inflight_recompute"}


@pytest.mark.parametrize("path", LAYERS, ids=lambda p: p.name)
def test_every_shipped_file_is_valid_and_plans(path):
    assert plan.planned(load([DEFAULT, path]))
    assert path.read_text().splitlines()[0].startswith("# yaml-language-server: $schema=../workflow/schemas/")


def test_smoke_sets_seeds_and_lr_and_selects_only_its_own():
    raw = yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text())
    assert {"seeds", "lr"} <= set(raw)
    assert all(name.startswith("smoke_") for name in load([DEFAULT, ROOT / "config" / "smoke.yaml"]).selected())


# Numbers: 1e-6 is one number however it is written


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "1E-06"])
def test_spellings_of_a_float_are_one_digest(text):
    assert digests(load([DEFAULT], yaml.safe_load(f"lr: {text}"))) == digests(loaded(lr=1e-6))
    assert digests(load([DEFAULT], plan.overrides([f"lr={text}"]))) == digests(loaded(lr=1e-6))


@given(st.floats(min_value=1e-12, max_value=1e3))
def test_a_float_survives_its_text(value):
    assert validate(RunSettings, {**_settings(), "lr": repr(value)}, "x").lr == value


def test_a_non_number_is_refused_and_named():
    with pytest.raises(ValueError, match=r"lr: .*not 'fast'"):
        loaded(lr="fast")
    with pytest.raises(ValueError, match="lr"):
        loaded(lr=float("nan"))


# Digests


def _settings() -> dict:
    return loaded().experiment_runs("precision")[0][1].model_dump(mode="json")


def _leaves(data: dict, path=()):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def test_every_setting_of_a_run_enters_its_digest():
    settings = _settings()
    before = RunSettings.model_validate(settings).digest()
    allowed = {"model.num_heads": 8, "model.num_kv_heads": 2, "task.min_steps": 7, "task.max_steps": 21}
    allowed |= {"base.task.min_steps": 7, "base.task.max_steps": 21, "train.samples_per_update": 32}
    seen = 0
    for path, value in _leaves(settings):
        name = ".".join(path)
        if path[-1] in ("summary", "kv", "max_lag", "level", "name", "preset", "schedule", "generation_accelerators"):
            continue
        if name in allowed:
            new = allowed[name]
        elif isinstance(value, bool):
            new = not value
        elif isinstance(value, int):
            new = value * 2 if value else 1
        elif isinstance(value, float):
            new = value * 0.5 + 0.0013
        elif isinstance(value, list):
            new = [0.8, 0.9]
        elif value is None:
            new = "some/folder"
        else:
            new = _other_literal(path, value)
        changed = json.loads(json.dumps(settings))
        inner = changed
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = new
        if name == "model.num_kv_heads":
            changed["model"]["num_heads"] = 4
        assert RunSettings.model_validate(changed).digest() != before, name
        seen += 1
    assert seen > 60


def _other_literal(path, value):
    model: type[BaseModel] = RunSettings
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    options = re.findall(r"'([^']*)'", str(model.model_fields[path[-1]].annotation))
    return next((o for o in options if o != value), "another")


def test_summaries_order_and_defaults_do_not_enter_the_digest():
    same = loaded(methods={"bf16": {"kind": "bf16", "summary": "other words", "flow": {"rollout": "bf16"}}})
    assert digests(same) == digests(loaded())
    assert digests(loaded(evaluate={"problems": 7})) == digests(loaded())


def test_a_changed_value_gives_only_its_runs_new_digests():
    before = {run.digest: run.method for run in plan.planned(loaded())}
    after = {run.digest for run in plan.planned(loaded(methods={"jetrl": {"flow": {"scale": "fp32"}}}))}
    assert {before[d] for d in set(before) - after} == {"jetrl"}
    assert len(set(before) - after) == 3


def test_the_warm_up_is_shared_by_all_methods_of_a_seed():
    bases = {}
    for run in plan.planned(loaded()):
        bases.setdefault(run.settings.seed, set()).add(run.base)
    assert [len(b) for b in bases.values()] == [1, 1, 1]
    assert len(set.union(*bases.values())) == 3
    assert loaded(seeds=[0, 1, 2, 3]).experiment_runs("precision")[3][1].base_index == 0


def test_resolved_settings_are_read_back_equal():
    for run in plan.planned(loaded()):
        again = validate(RunSettings, json.loads(run.text()), "settings.json")
        assert again == run.settings
        assert again.digest() == run.digest


def test_two_names_for_one_run_are_refused():
    methods = {"again": {"kind": "bf16"}}
    with pytest.raises(ValueError, match="'bf16' and 'again' are one run"):
        plan.planned(loaded(methods=methods, experiments={"x": ["bf16", "again"]}, select=["x"]))


# What is refused, in one line that names file, key and nearest valid value

REFUSED = [
    ({"lrr": 1}, "unknown key 'lrr'; did you mean 'lr'?"),
    ({"train": {"group_sise": 4}}, "unknown key 'group_sise' in train; did you mean 'group_size'?"),
    ({"methods": {"x": {"kind": "jetr"}}}, "methods.x: kind 'jetr' is unknown; did you mean 'jetrl'?"),
    ({"methods": {"x": {"kind": "bf16", "flow": {"format": "e4m4"}}}}, "did you mean 'e4m3'?"),
    ({"methods": {"x": {"kind": "bf16", "flo": {}}}}, "unknown key 'flo'; did you mean 'flow'?"),
    ({"methods": {"a-b": {"kind": "bf16"}}}, "name 'a-b' must match [a-z0-9_]+"),
    ({"methods": {"fp8.s1": {"kind": "bf16"}}}, "name 'fp8.s1' must match [a-z0-9_]+"),
    ({"experiments": {"x": ["bf61"]}}, "method 'bf61' is unknown; did you mean 'bf16'?"),
    ({"select": ["precison"]}, "experiment 'precison' is unknown; did you mean 'precision'?"),
    ({"train": {"samples_per_update": 12}}, "samples_per_update 12 is not a multiple of group_size 8"),
    ({"train": {"optimizer_steps": 281}}, "optimizer_steps 281 is not a multiple of updates_per_rollout 4"),
    ({"task": {"max_steps": 31}}, "max_steps 31 is above num_labels 30"),
    ({"model": {"num_kv_heads": 3}}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ({"seeds": []}, "seeds"),
    ({"seeds": [-1]}, "seeds"),
]


@pytest.mark.parametrize(("over", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_bad_settings_are_refused_in_one_line(over, message):
    with pytest.raises(ValueError) as caught:
        loaded(**over)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert "config.yaml" in text


def test_the_file_that_cannot_be_read_is_named(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1,\n")
    with pytest.raises(ValueError, match=r"bad\.yaml: not YAML"):
        load([DEFAULT, bad])
    with pytest.raises(ValueError, match=r"absent\.yaml: No such file"):
        load([DEFAULT, tmp_path / "absent.yaml"])
    bad.write_text("- a\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load([DEFAULT, bad])


_values = st.integers() | st.lists(st.integers(), max_size=2)
_trees = st.dictionaries(st.sampled_from("abc"), _values | st.dictionaries(st.sampled_from("xy"), _values))


@given(_trees, _trees)
def test_merge_keeps_what_is_not_overridden_and_replaces_lists(base, over):
    out = merge(base, over)
    assert set(out) == set(base) | set(over)
    for key, value in out.items():
        if key in over and isinstance(over[key], dict) and isinstance(base.get(key), dict):
            assert value == {**base[key], **over[key]}
        else:
            assert value == over.get(key, base.get(key))
    assert merge(out, over) == out


# Generated and hand-written descriptions keep up with the code


def test_generated_schema_is_fresh():
    assert (ROOT / "workflow" / "schemas" / "config.schema.json").read_text() == schema.text(), (
        "stale: python -m jetrl_bench schema --out workflow/schemas/config.schema.json"
    )


def test_schema_accepts_what_ships_and_refuses_an_unknown_key():
    validator = jsonschema.Draft202012Validator(json.loads(schema.text()))
    data = yaml.safe_load(DEFAULT.read_text())
    assert list(validator.iter_errors(data)) == []
    assert list(validator.iter_errors({**data, "lrr": 1})) != []


def _keys(model: type[BaseModel], prefix: str = "", instance=None):
    for name, field in model.model_fields.items():
        value = getattr(instance, name) if instance is not None else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            yield from _keys(type(value), f"{prefix}{name}.", value)
        else:
            yield prefix + name, "required" if field.is_required() and instance is None else value


def _documented() -> dict[str, str]:
    lines = (ROOT / "config" / "README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    rows = [(row[0].strip("`"), row[1]) for row in cells if not row[0].endswith(".yaml`")]
    assert len(rows) == len(dict(rows)), "a key stands twice"
    return {key: value.strip("`") for key, value in rows}


def test_generated_reference_has_every_key_with_its_default():
    documented = _documented()
    expected = dict(_keys(Config)) | dict(_keys(Method)) | dict(_keys(Experiment, "experiments."))
    assert set(documented) == set(expected)
    for key, value in expected.items():
        text = {"True": "true", "False": "false", "None": "null", "": '""'}.get(str(value), str(value))
        assert documented[key] == text, key
