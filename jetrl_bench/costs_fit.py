"""Fit the time model's efficiencies and write costs_data/fitted.yaml: `python -m jetrl_bench.costs_fit`.

Reads kernel times measured by NVIDIA's AIConfigurator (kernels_*.csv, aic_step_times.csv; Apache-2.0, see NOTICE) and
the targets of class `calibration`; never a target of another class. Dirty kernel rows meet two rules: the padding
envelope (a matrix product of m rows costs no more than one of m' >= m rows, because it can be padded to it), and
attention rows that would need more than the datasheet's memory bandwidth are left out.

`python -m jetrl_bench.costs_fit --export FOLDER` re-creates the kernel files from an unpacked aiconfigurator-core
0.12.0 wheel (FOLDER/aiconfigurator_core/systems/data).
"""

import argparse
import functools
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import brentq, least_squares

from . import costs, validation
from .shapes import DATA, Precision, constants

SYSTEMS = {"a100_sxm": "A100", "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
VERSIONS = {
    ("a100_sxm", "sglang"): "0.5.10",
    ("a100_sxm", "trtllm"): "1.0.0",
    **{(s, "sglang"): "0.5.14" for s in ("h100_sxm", "h200_sxm", "b200_sxm")},
    **{(s, "trtllm"): "1.3.0rc20" for s in ("h100_sxm", "h200_sxm", "b200_sxm")},
}
# AIConfigurator's names of number formats, by engine, and ours. SGLang's fp8 kernel scales per row.
FORMATS = {
    "sglang": {"bfloat16": "bf16", "fp8": "fp8_row", "fp8_block": "fp8_block"},
    "trtllm": {"bfloat16": "bf16", "fp8": "fp8_tensor"},
}
GEMM_M = [1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 2048, 4096, 8192, 16384]
GEMM_NK = [
    (6144, 4096), (4096, 4096), (12288, 4096), (4096, 12288), (16384, 4096), (7168, 5120), (5120, 5120), (5120, 12288),
    (16384, 5120), (3584, 3584), (5120, 4096), (8192, 8192), (2560, 5120), (65536, 4096),
]  # fmt: skip
HEADS = [(32, 8), (40, 8), (64, 8), (16, 4)]
BATCHES = [1, 4, 16, 32, 64, 128, 256, 512]
CONTEXTS = [1024, 2048, 4096, 8192, 16384]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def export(folder: Path) -> None:
    """Thin the wheel's tables to the shapes the fit reads and write the three kernel CSV files."""
    gemm, attention, reduce = [], [], []
    for (system, engine), version in VERSIONS.items():
        base = folder / "aiconfigurator_core" / "systems" / "data" / system
        d = pd.read_parquet(base / "gemm" / engine / version / "gemm_perf.parquet")
        d = d.assign(format=d["gemm_dtype"].map(FORMATS[engine]), us=d["latency"] * 1e3).dropna(subset="format")
        d = d[pd.MultiIndex.from_frame(d[["n", "k"]]).isin(GEMM_NK)]
        d = d.groupby(["format", "n", "k", "m"], as_index=False)["us"].min().sort_values("m")
        d["us"] = d.groupby(["format", "n", "k"])["us"].transform(lambda us: us[::-1].cummin()[::-1])
        gemm.append(d[d["m"].isin(GEMM_M)].assign(system=system, engine=engine))
        for kind in ("generation", "context"):
            d = pd.read_parquet(base / "attention" / engine / version / f"{kind}_attention_perf.parquet")
            d = d[(d["head_dim"] == 128) & ~d["attn_dtype"].str.startswith("fp8")]
            if "window_size" in d:
                d = d[d["window_size"] == 0]
            length = d["step"] + 1 if kind == "generation" else d["isl"]
            kv = d["kv_cache_dtype"].str.startswith("fp8").map({True: "fp8", False: "bf16"})
            d = d.assign(us=d["latency"] * 1e3, length=length, kv=kv, kind=kind, heads=d["num_heads"])
            d = d.assign(kv_heads=d["num_key_value_heads"].where(d["num_key_value_heads"] > 0, d["num_heads"]))
            d = d[pd.MultiIndex.from_frame(d[["heads", "kv_heads"]]).isin(HEADS) & d["batch_size"].isin(BATCHES)]
            d = d[d["length"].isin(CONTEXTS if kind == "generation" else LENGTHS)]
            keys = ["kind", "kv", "heads", "kv_heads", "batch_size", "length"]
            attention.append(d.groupby(keys, as_index=False)["us"].min().assign(system=system, engine=engine))
        if engine == "sglang":
            d = pd.read_parquet(base / "comm" / engine / version / "custom_allreduce_perf.parquet")
            d = d[d["backend"].str.contains("graph")].assign(us=d["latency"] * 1e3)
            keys = ["num_gpus", "message_size"]
            reduce.append(d.groupby(keys, as_index=False)["us"].min().assign(system=system, engine=engine))
    for name, parts in (("gemm", gemm), ("attention", attention), ("all_reduce", reduce)):
        table = pd.concat(parts)
        order = ["system", "engine", *[c for c in table if c not in ("system", "engine", "us")], "us"]
        table[order].round({"us": 3}).to_csv(DATA / f"kernels_{name}.csv", index=False, lineterminator="\n")


def _robust(residual, start, bounds=(-np.inf, np.inf)):
    solution = least_squares(residual, start, bounds=bounds, loss="soft_l1", f_scale=0.05)
    return solution.x, residual(solution.x)


def _rounded(**values) -> dict:
    return {key: float(f"{value:.4g}") for key, value in values.items()}


def fit_gemm(table: pd.DataFrame, hw: dict, fmt: str) -> dict:
    width, peak = (2, hw["bf16_flops"]) if fmt == "bf16" else (1, hw["fp8_flops"])
    m, n, k = (table[c].to_numpy(float) for c in "mnk")
    rows = np.ceil(m / costs.MICROBATCH_PAD) * costs.MICROBATCH_PAD
    num_bytes, flops = width * (n * k + m * k) + 2 * m * n, 2 * rows * n * k

    def seconds(p):
        t_memory = num_bytes / (hw["memory_bw"] * p[1])
        t_compute = (flops + np.exp(p[3])) / (peak * p[2])
        norm = 1 + np.exp(p[4])
        return np.exp(p[0]) + (t_memory**norm + t_compute**norm) ** (1 / norm)

    bounds = ([-16, 0.2, 0.2, 13, -2], [-10, 1.1, 1.0, 25, 2])
    p, error = _robust(lambda p: np.log(seconds(p) * 1e6 / table["us"].to_numpy()), [-13, 0.8, 0.7, 20, 0.7], bounds)
    fitted = _rounded(launch=np.exp(p[0]), memory=p[1], compute=p[2], half_flops=np.exp(p[3]), norm=1 + np.exp(p[4]))
    return fitted | {"median_error": round(float(np.median(np.abs(error))), 3)}


def fit_decode_attention(table: pd.DataFrame, hw: dict, kv: str) -> dict:
    width = 1 if kv == "fp8" else 2
    num_bytes = (table["batch_size"] * table["length"] * table["kv_heads"]).to_numpy(float) * 256 * width
    possible = (num_bytes > 4e6) & (num_bytes / table["us"].to_numpy() * 1e6 < hw["memory_bw"])
    table, num_bytes = table[possible], num_bytes[possible]

    def residual(p):
        return np.log((np.exp(p[0]) + num_bytes / (hw["memory_bw"] * p[1])) * 1e6 / table["us"].to_numpy())

    p, error = _robust(residual, [-12, 0.8], ([-14, 0.2], [-9, 1.1]))
    return _rounded(launch=np.exp(p[0]), memory=p[1]) | {"median_error": round(float(np.median(np.abs(error))), 3)}


def fit_prefill_attention(table: pd.DataFrame, hw: dict) -> dict:
    length = table["length"].to_numpy(float)
    flops = 2 * table["batch_size"].to_numpy() * length**2 * table["heads"].to_numpy() * 128

    def residual(p):
        seconds = np.exp(p[0]) + flops / (hw["bf16_flops"] * p[1]) * (1 + np.exp(p[2]) / length)
        return np.log(seconds * 1e6 / table["us"].to_numpy())

    p, error = _robust(residual, [-12, 0.6, 6], ([-14, 0.1, 0], [-9, 1.0, 9]))
    fitted = _rounded(launch=np.exp(p[0]), compute=p[1], half_length=np.exp(p[2]))
    return fitted | {"median_error": round(float(np.median(np.abs(error))), 3)}


def fit_all_reduce(table: pd.DataFrame) -> list[float]:
    size, us = table["message_size"].to_numpy(float), table["us"].to_numpy()
    p, _ = _robust(lambda p: np.log((np.exp(p[0]) + size / np.exp(p[1])) * 1e6 / us), [-12, 25])
    return [float(f"{np.exp(value):.4g}") for value in p]


def fit_kernels() -> dict:
    gemm, attention = (pd.read_csv(DATA / f"kernels_{name}.csv") for name in ("gemm", "attention"))
    out: dict = {}
    for (system, engine), table in gemm.groupby(["system", "engine"]):
        hw = constants()["hardware"][SYSTEMS[system]]
        entry = {fmt: fit_gemm(part, hw, fmt) for fmt, part in table.groupby("format")}
        mine = attention[(attention["system"] == system) & (attention["engine"] == engine)]
        decode = mine[mine["kind"] == "generation"]
        entry |= {f"attention_{kv}": fit_decode_attention(part, hw, kv) for kv, part in decode.groupby("kv")}
        prefill = mine[(mine["kind"] == "context") & (mine["kv"] == "bf16")]
        if len(prefill):
            entry["attention_prefill"] = fit_prefill_attention(prefill, hw)
        out.setdefault(system, {})[engine] = entry
    for table in out.values():  # formats that only one engine measured stand for both
        for fmt in ("fp8_row", "fp8_block", "fp8_tensor"):
            have = next((e[fmt] for e in table.values() if fmt in e), None)
            if have:
                table["sglang"].setdefault(fmt, have)
    return out


def step_rows() -> pd.DataFrame:
    """AIConfigurator's decode-step times with SGLang's kernels [ms], which contain no host time."""
    table = pd.read_csv(DATA / "aic_step_times.csv")
    return table[(table["backend"] == "sglang") & (table["mode"] == "static_gen")]


def modelled_steps(table: pd.DataFrame) -> np.ndarray:
    """Decode-step seconds of the model for rows of aic_step_times.csv, host time left out."""
    formats = {"bfloat16": ("bf16", "bf16"), "fp8_block": ("fp8_block", "bf16"), "fp8_block+kv8": ("fp8_block", "fp8")}

    @functools.cache
    def price(model, system, tp, quant):
        linear, kv = formats[quant]
        return costs.Costs(model, SYSTEMS[system], tp=tp, engine="sglang", precision=Precision(linear, "bf16", kv))

    rows = zip(*(table[c] for c in ("model", "system", "tp", "quant", "batch", "ctx")))
    out = []
    for model, system, tp, quant, batch, context in rows:
        cost = price(model, system, tp, quant)
        out.append(cost.decode_step_s(batch, batch * context) - cost.host_s(batch))
    return np.array(out)


def fit_elementwise(state: dict) -> dict:
    """Launch time of a layer's elementwise kernels, and of its FP8 casts, from whole decode steps."""
    table = step_rows()

    def residual(p):
        state["elementwise"].update(layer=float(np.exp(p[0])), quantise=float(np.exp(p[1])))
        return np.log(modelled_steps(table) * 1e3 / table["ms"].to_numpy())

    p, error = _robust(residual, [-11.5, -12.0], ([-16, -18], [-9, -9]))
    state["step_error"] = round(float(np.median(np.abs(error))), 4)
    return _rounded(layer=np.exp(p[0]), quantise=np.exp(p[1]))


def fit_host(calibration: list[dict]) -> list[float]:
    """[a, b]: a decode step spends a + b x batch seconds outside kernels (vLLM)."""
    rows = [t for t in calibration if t["kind"] == "decode_itl"]
    batch = np.array([t["batch"] for t in rows])
    gap = np.array([t["published"] - validation.predict(t).modelled for t in rows]) * 1e-3
    weight = 1 / np.array([t["published"] for t in rows])
    p, *_ = np.linalg.lstsq(np.stack([np.ones_like(batch), batch], 1) * weight[:, None], gap * weight, rcond=None)
    return [float(f"{max(0.0, value):.3g}") for value in p]


def run() -> dict:
    calibration = [t for t in validation.targets() if t["class"] == "calibration"]
    state = {
        "kernels": fit_kernels(),
        "all_reduce": {
            system: {int(n): fit_all_reduce(part) for n, part in table.groupby("num_gpus")}
            for system, table in pd.read_csv(DATA / "kernels_all_reduce.csv").groupby("system")
        },
        "elementwise": {"layer": 0.0, "quantise": 0.0},
        "host": {"vllm": [0.0, 0.0], "sglang": [0.0, 0.0], "trtllm": [0.0, 0.0]},
        "train_overhead": 1.0,
        "clock": {"H100-500W": 1.0, "B200-limited": 1.0},
    }
    costs.use_fitted(state)
    state["elementwise"].update(fit_elementwise(state))
    state["host"]["vllm"] = state["host"]["sglang"] = fit_host(calibration)

    by_id = {t["id"]: t for t in calibration}

    def solve(path: tuple[str, ...], ids: list[str], low: float, high: float, digits: int = 4) -> None:
        """Set one number so that the mean log error of its calibration targets is zero (or to the nearest bound)."""
        *outer, last = path
        place = functools.reduce(lambda d, key: d[key], outer, costs.fitted())

        def error(value: float) -> float:
            place[last] = value
            return float(np.mean([np.log(validation.predict(by_id[i]).modelled / by_id[i]["published"]) for i in ids]))

        at_low, at_high = error(low), error(high)
        if at_low * at_high > 0:
            place[last] = low if abs(at_low) < abs(at_high) else high
            return
        place[last] = float(f"{brentq(error, low, high, xtol=(high - low) * 1e-4):.{digits}g}")

    solve(("train_overhead",), ["titan-8b-a100-bf16"], 1.0, 3.0)
    solve(("clock", "H100-500W"), ["ao-8b-h100-bf16"], 0.3, 1.0)
    solve(("clock", "B200-limited"), ["ao-8b-b200-bf16"], 0.2, 1.0)

    def set_trtllm(value: float) -> float:
        state["host"]["trtllm"] = [value, value / 256]
        ids = ("trt-8b-128-128-h100", "trt-8b-128-4096-h100")
        return float(np.mean([np.log(validation.predict(by_id[i]).modelled / by_id[i]["published"]) for i in ids]))

    value = 0.0 if set_trtllm(0.0) <= 0 else brentq(set_trtllm, 0.0, 0.01, xtol=1e-6)
    state["host"]["trtllm"] = [float(f"{value:.3g}"), float(f"{value / 256:.3g}")]
    return costs.fitted() | {"step_error": state["step_error"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="re-create the kernel files first")
    args = parser.parse_args(argv)
    if args.export:
        export(args.export)
    state = run()
    header = "# Generated by `python -m jetrl_bench.costs_fit`; do not edit. SI units.\n"
    (DATA / "fitted.yaml").write_text(header + yaml.safe_dump(state, sort_keys=True))
    print(f"decode-step tables reproduced with a median error of {100 * state['step_error']:.1f} %")
    for name in ("elementwise", "host", "train_overhead", "clock"):
        print(f"{name}: {state[name]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
