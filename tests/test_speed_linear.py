"""The linear-layer benchmark: shapes, counts, correctness columns and refusals; no assertion on time."""

import argparse
import json

import pytest

from jetrl_bench import speed_linear
from jetrl_bench.config import FlowConfig


def cli(*argv):
    parser = argparse.ArgumentParser()
    speed_linear.add_arguments(parser)
    return speed_linear.run(parser.parse_args([str(a) for a in argv]))


def test_full_size_shapes_are_the_models():
    """Qwen3-8B: hidden 4096, 32 heads and 8 key heads of 128, feed-forward 12288 (its config.json)."""
    found = {s.layer: (s.N, s.K) for s in speed_linear.shapes(["Qwen3-8B"], 16, 1)}
    assert found == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    assert len(speed_linear.shapes(speed_linear.MODELS, 16, 8)) == 20
    assert all(s.N % 128 == 0 and s.K % 128 == 0 for s in speed_linear.shapes(speed_linear.MODELS, 16, 7))


def test_work_counts():
    shape = speed_linear.Shape("m", "o", 64, 256, 128)
    flop = 2 * 64 * 256 * 128
    assert speed_linear.work("FProp", shape, "bf16") == (flop, 2 * (64 * 128 + 256 * 128 + 64 * 256))
    # FP8 storage: one byte an operand, bf16 results, fp32 weight gradients
    assert speed_linear.work("FProp", shape, "torch_pow2") == (flop, 64 * 128 + 256 * 128 + 2 * 64 * 256)
    assert speed_linear.work("WGrad", shape, "torch_pow2") == (flop, 64 * 256 + 64 * 128 + 4 * 256 * 128)
    assert speed_linear.work("quantise X", shape, "emulated_pow2") == (0, 4 * 64 * 128)
    assert speed_linear.work("DGrad and WGrad", shape, "te_pow2")[0] == 2 * flop


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(speed_linear, "COPY_SHAPE", (64, 256))
    monkeypatch.setattr(speed_linear, "seconds", lambda call, device: call() is not None and 1e-3)


def test_products_are_right_and_quantisation_costs_what_it_costs(small):
    result = speed_linear.measure(["Qwen3-8B"], 48, 32, ["bf16", "emulated_pow2", "emulated_fp32"], 1, "cpu")
    rows = {(r["layer"], r["backend"], r["op"]): r for r in result["rows"]}
    assert len(rows) == 4 * (3 + 5 + 5)
    for (_, backend, op), row in rows.items():
        if op not in speed_linear.PRODUCTS:
            assert "error" not in row
            continue
        # bf16 results carry a rounding of up to 2^-9, fp32 weight gradients do not
        assert row["arithmetic_error"] < (2e-6 if op == "WGrad" else 2**-9)
        if backend == "bf16":
            assert row["error"] == row["arithmetic_error"]
        else:
            assert 0.02 < row["error"] < 0.06
    assert result["ceilings"].get("qdq_equal_bits", 1.0) == 1.0


def test_timing_repeats_until_there_is_enough_to_measure():
    calls = []
    taken = speed_linear.seconds(lambda: calls.append(sum(range(1000))), "cpu", least=0.002)
    assert len(calls) > 1 and 0 < taken < 0.01


def test_command_writes_its_table(small, tmp_path, capsys):
    cli("--model", "Qwen2.5-7B", "--tokens", 16, "--divide", 64, "--rounds", 1, "--out", tmp_path, "--device", "cpu")
    result = json.loads((tmp_path / "linear.json").read_text())
    assert result["widths_divided_by"] == 64 and result["kind"] == "measured; FP8 emulated"
    text = (tmp_path / "linear.md").read_text()
    assert "widths divided by 64" in text and text.strip() == capsys.readouterr().out.strip()
    assert len((tmp_path / "linear.csv").read_text().splitlines()) == 1 + len(result["rows"])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--backend", "torch_pow2", "--device", "cpu"], "'torch' cannot run here: device 'cpu'"),
        (["--tokens", 0], "--tokens 0 is below 1"),
        (["--divide", -1], "--divide -1 is below 1"),
        (["--model", "Qwen3-9B", "--device", "cpu"], "'Qwen3-9B' is unknown; nearest: 'Qwen3-8B'"),
    ],
)
def test_refusals(small, argv, message):
    with pytest.raises(ValueError, match=message):
        cli(*argv)


def test_back_ends_are_asked_for_nothing_but_their_machine():
    """The flows of the benchmark pass every check that is not about the machine."""
    assert speed_linear.flow_of("bf16") == FlowConfig()
    for name in ("torch_pow2", "te_pow2"):
        assert speed_linear.backends._settings(speed_linear.flow_of(name)) == []


def test_reference_is_blind_to_nothing():
    """Another grouping of WGrad's operands is far from the reference that the table compares with."""
    shape = speed_linear.Shape("m", "o", 200, 128, 128)
    o = speed_linear.operands(shape, "cpu")
    wanted = speed_linear.references(o, speed_linear.flow_of("emulated_pow2"))["WGrad"][1]
    bf16 = o.dy_TN.double().t() @ o.x_TK.double()
    assert speed_linear.relative(bf16, wanted) > 0.01
