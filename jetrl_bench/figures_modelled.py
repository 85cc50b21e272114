"""Figures and tables of modelled time: PDF, SVG and PNG with the numbers beside them as CSV.

`python -m jetrl_bench simulate --figures OUT` writes them all. Every title says modelled; a published number in such a
figure is a separate mark with its own label.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm

from jetrl_bench.render import save_figure

from . import throughput
from .cluster import generate, simulate
from .config import CostConfig
from .costs import Costs, UnitCosts
from .figures import DASHES, MARKERS, PALETTE, STYLE
from .record import write_text
from .shapes import Precision, TrainLayout
from .workload import Lengths, Schedule

FP8 = Precision("fp8_block", "fp8_block")
ROLLOUT_FP8 = Precision("fp8_block")
CAPS = (2048, 4096, 8192, 16384, 32768)
# one node of 8 H100; mean a third of the limit, cv 0.9; 1,536 sequences a rollout batch, 512 an optimizer step
MODELS = {"Qwen2.5-7B": 1, "Qwen3-8B": 1, "Qwen3-14B": 1, "Qwen3-32B": 2}
VERSIONS = [*PALETTE[:6], PALETTE[7]]  # a policy version's colour in the time line
NODE = "8 H100, 1,536 responses of mean limit/3, cv 0.9; 512 an optimizer step"


def _step(model: str, tp: int, precision: Precision, cap: int) -> dict[str, float]:
    """Seconds a rollout batch spends in each phase of a colocated conventional run."""
    cost = Costs(model, "H100", precision=precision, tp=tp)
    schedule = Schedule("conventional", 8, 512, updates_per_rollout=3)
    result = simulate(cost, Lengths(mean=cap / 3, cv=0.9, cap=cap), schedule, optimizer_steps=3)
    return result.phases


def phases() -> tuple[plt.Figure, pd.DataFrame]:
    """Share of a step that each phase takes, against the response limit (Jet-RL, figure 2, is of this kind)."""
    rows = []
    for label, precision in (("bf16", Precision()), ("unified fp8", FP8)):
        for cap in CAPS:
            spent = _step("Qwen3-8B", 1, precision, cap)
            for phase, seconds in spent.items():
                rows.append((label, cap, phase, seconds, seconds / sum(spent.values())))
    table = pd.DataFrame(rows, columns=["flow", "response_limit", "phase", "seconds", "share"])
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.7), sharey=True, layout="constrained")
    order = ["generation", "logprob", "train", "transfer"]
    for ax, (label, part) in zip(axes, table.groupby("flow", sort=False)):
        bottom = np.zeros(len(CAPS))
        for colour, phase in zip(PALETTE, order):
            share = part[part["phase"] == phase].set_index("response_limit")["share"].reindex(CAPS).to_numpy()
            ax.bar(range(len(CAPS)), 100 * share, 0.7, bottom=bottom, color=colour, label=phase)
            for x, (s, low) in enumerate(zip(100 * share, bottom)):
                if s > 6:
                    ax.text(x, low + s / 2, f"{s:.0f}", ha="center", va="center", color="white", fontsize=7)
            bottom += 100 * share
        ax.set_xticks(range(len(CAPS)), [f"{cap // 1024}k" for cap in CAPS])
        ax.set_xlabel("response limit, tokens")
        ax.set_title(label)
        ax.grid(False)
    axes[0].set_ylabel("share of a step, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle(f"Phase shares of a step, Qwen3-8B (modelled)\n{NODE}", fontsize=8.5)
    return figure, table


def speedup() -> tuple[plt.Figure, pd.DataFrame]:
    """Speed-up of unified FP8 over BF16 against the response limit, by model and phase."""
    rows = []
    for model, tp in MODELS.items():
        for cap in CAPS:
            base, fp8 = _step(model, tp, Precision(), cap), _step(model, tp, FP8, cap)
            rows.append((model, tp, cap, "rollout", base["generation"] / fp8["generation"]))
            rows.append((model, tp, cap, "training", base["train"] / fp8["train"]))
            rows.append((model, tp, cap, "step", sum(base.values()) / sum(fp8.values())))
    table = pd.DataFrame(rows, columns=["model", "tp", "response_limit", "phase", "speedup"])
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.7), sharey=True, layout="constrained")
    titles = {"rollout": "rollout", "training": "training", "step": "whole step"}
    for ax, (phase, title) in zip(axes, titles.items()):
        for i, model in enumerate(MODELS):
            part = table[(table["model"] == model) & (table["phase"] == phase)]
            ax.plot(part["response_limit"], part["speedup"], color=PALETTE[i], marker=MARKERS[i], ms=3.5, label=model)
        ax.axhline(1.0, color="#555555", lw=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks(CAPS, [f"{cap // 1024}k" for cap in CAPS])
        ax.set_xlabel("response limit, tokens")
        ax.set_title(title)
    axes[0].set_ylabel("unified FP8 over BF16")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(f"Speed-up of unified FP8 (modelled)\n{NODE}; 32B: two GPUs a replica", fontsize=8.5)
    return figure, table


def timeline() -> tuple[plt.Figure, pd.DataFrame]:
    """Who does what when, 8 accelerators in the training loop's units: conventional G = 4 and in-flight updates."""
    lengths, rows = Lengths(mean=60, cv=0.9, cap=240), []
    config = CostConfig(accelerators=8)
    for label, schedule in {
        "conventional, G = 4": Schedule("conventional", 8, 16, 4, logprob_passes=0, train={}),
        "in-flight": Schedule("inflight", 8, 16, generation_gpus=6, slots=8, logprob_passes=0, start="stationary"),
    }.items():
        cost = UnitCosts(config, 1, max_num_seqs=16)
        result = simulate(cost, lengths, schedule, prompt=0, optimizer_steps=8, trace=True, seed=3)
        for resource, start, end, what, version in result.timeline:
            rows.append((label, resource, start, end, what, version))
    table = pd.DataFrame(rows, columns=["schedule", "resource", "start", "end", "activity", "version"])
    figure, axes = plt.subplots(2, 1, figsize=(7.0, 3.7), sharex=True, layout="constrained")
    for ax, (label, part) in zip(axes, table.groupby("schedule", sort=False)):
        trains = part[part["resource"] == "trainer"]
        names = sorted(part["resource"][part["resource"].str.startswith("replica")].unique())
        count = 8 if label.startswith("conv") else 8 - len(names)
        for row in part.itertuples():
            colour = VERSIONS[row.version % len(VERSIONS)]
            if row.resource in names:
                ax.barh(names.index(row.resource), row.end - row.start, 0.8, row.start, color=colour, alpha=0.45)
        for row in trains.itertuples():
            places = range(8) if label.startswith("conv") else range(len(names), len(names) + count)
            for y in places:
                ax.barh(
                    y,
                    row.end - row.start,
                    0.8,
                    row.start,
                    color=VERSIONS[row.version % len(VERSIONS)],
                    ec="white",
                    lw=0.4,
                )
        ax.set_yticks(range(8), [str(i) for i in range(8)])
        ax.invert_yaxis()
        ax.set_ylabel("accelerator")
        ax.set_title(label)
        ax.grid(False)
    axes[1].set_xlabel(
        "time, units of the training loop (light: generation, solid: an optimizer step; colour: version)"
    )
    figure.suptitle(
        "Time line of two schedules on 8 accelerators, eight optimizer steps of 16 (modelled)", fontsize=8.5
    )
    return figure, table


def utilisation() -> tuple[plt.Figure, pd.DataFrame]:
    """U(h): share of peak of a (h x 4096)(4096 x 16384) product, from this project's kernel fit."""
    rows_h = np.unique(np.round(np.geomspace(1, 4096, 120)).astype(int))
    arms = {"H100 BF16": ("H100", "bf16"), "H100 FP8 blocks": ("H100", "fp8_block"), "H200 BF16": ("H200", "bf16")}
    rows = []
    for label, (hardware, fmt) in arms.items():
        u = throughput.utilisation(hardware, fmt=fmt)
        rows += [(label, int(h), u(h)) for h in rows_h]
    table = pd.DataFrame(rows, columns=["arm", "rows", "utilisation"])
    figure, ax = plt.subplots(figsize=(4.2, 2.9), layout="constrained")
    for i, (label, part) in enumerate(table.groupby("arm", sort=False)):
        ax.plot(part["rows"], part["utilisation"], color=PALETTE[i], ls=DASHES[i], label=label)
    ax.plot([192], [0.384], "k*", ms=8, ls="none", label="published: U(192), H100 BF16 (2509.19128)")
    ax.set_xscale("log", base=2)
    ticks = [1, 4, 16, 64, 256, 1024, 4096]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_xlabel("h, rows (sequences decoded together)")
    ax.set_ylabel("U(h), share of the format's peak")
    ax.set_title("Utilisation of a 4096 x 16384 product (modelled)")
    ax.legend(loc="upper left", bbox_to_anchor=(0.0, 1.0))
    ax.set_ylim(0, 1.05)
    return figure, table


def lag() -> tuple[plt.Figure, pd.DataFrame]:
    """Throughput against the maximum lag, N = B = 128, uniform lengths (PipelineRL, figure 9)."""
    lags = (1, 2, 4, 8, 16, 32, 64, 100, 133, 200)
    tau, limit, rows = throughput.identities()["pipelinerl-tau"], 512, []
    curves = {"linear U through 0.384": throughput.linear_utilisation(), "this project's U": throughput.utilisation()}
    for name, u in curves.items():
        for bound in lags:
            updates, rate = throughput.best_conventional(128, 128, limit, tau, u, bound)
            rows.append((f"conventional, {name}", bound, rate, updates))
            split = throughput.best_pipeline(128, 128, limit, (limit + 1) / 2, tau, u, bound)
            if split:
                rows.append((f"in-flight, {name}", bound, split.rate, split.generation))
    table = pd.DataFrame(rows, columns=["arm", "max_lag", "tokens_per_flash", "g_or_generation"])
    figure, ax = plt.subplots(figsize=(5.4, 2.9), layout="constrained")
    for i, (label, part) in enumerate(table.groupby("arm", sort=True)):
        look = {"color": PALETTE[i // 2], "ls": DASHES[i % 2], "marker": MARKERS[i // 2], "ms": 3.5}
        ax.plot(part["max_lag"], part["tokens_per_flash"], label=label, **look)
    ax.plot([133, 133], [16.9, 10.7], "k*", ms=7, ls="none", label="published: 16.9 and 10.7 at 133 (2509.19128)")
    ax.set_xscale("log", base=2)
    ticks = (1, 2, 4, 8, 16, 32, 64, 133)
    ax.set_xticks(ticks, [str(x) for x in ticks])
    ax.set_xlabel("bound on the lag, optimizer steps")
    ax.set_ylabel("tokens per flash")
    ax.set_ylim(bottom=0)
    ax.set_title("Throughput within a lag bound, N = B = 128 (modelled)")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncol=2)
    return figure, table


def break_even() -> tuple[plt.Figure, pd.DataFrame]:
    """When does FP8 pay: BF16 over FP8 time of a decode step, and of training, by shape and batch."""
    batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    contexts = [256, 1024, 4096, 16384, 65536]
    cases = [("Qwen3-8B", 1), ("Qwen3-8B", 8), ("Qwen3-32B", 4)]
    rows = []
    for model, tp in cases:
        for kind, precision in (("weights", ROLLOUT_FP8), ("KV cache", Precision("bf16", "bf16", "fp8"))):
            base, fp8 = Costs(model, "H100", tp=tp), Costs(model, "H100", tp=tp, precision=precision)
            for batch in batches:
                for context in contexts:
                    ratio = base.decode_step_s(batch, batch * context) / fp8.decode_step_s(batch, batch * context)
                    rows.append((f"decode, FP8 {kind}, {model} TP {tp}", batch, context, ratio))
    micro = [256, 512, 1024, 2048, 4096, 8192, 16384]
    recipes = {"fp8_tensor": "one scale a tensor", "fp8_row": "one a row", "fp8_block": "blocks"}
    for model in ("Qwen3-8B", "Qwen3-32B"):
        for recipe, label in recipes.items():
            for m in micro:
                layout = TrainLayout(8, kind="megatron", micro_tokens=m)
                step = [
                    Costs(model, "H100", precision=Precision("bf16", f)).train_step_s(65536, 2048, layout)
                    for f in ("bf16", recipe)
                ]
                rows.append((f"training, {label}, {model}", m, 2048, step[0] / step[1]))
    table = pd.DataFrame(rows, columns=["panel", "batch_or_micro_tokens", "context", "bf16_over_fp8"])
    figure, axes = plt.subplots(2, 4, figsize=(9.2, 4.6), layout="constrained", width_ratios=[1, 1, 1, 1.15])
    norm = TwoSlopeNorm(1.0, vmin=0.85, vmax=1.5)
    for row, kind in enumerate(("weights", "KV cache")):
        for ax, (model, tp) in zip(axes[row], cases):
            part = table[table["panel"] == f"decode, FP8 {kind}, {model} TP {tp}"]
            grid = part["bf16_over_fp8"].to_numpy().reshape(len(batches), len(contexts)).T
            image = ax.imshow(grid, origin="lower", aspect="auto", cmap="PuOr", norm=norm)
            for y, x in np.ndindex(*grid.shape):
                bold = "bold" if grid[y, x] < 0.995 else "normal"
                colour = "white" if abs(norm(grid[y, x]) - 0.5) > 0.3 else "black"
                ax.text(x, y, f"{grid[y, x]:.2f}", ha="center", va="center", fontsize=4.8, weight=bold, color=colour)
            ax.set_xticks(range(len(batches)), [str(b) for b in batches], fontsize=6)
            ax.set_yticks(range(len(contexts)), [f"{c // 1024}k" if c >= 1024 else str(c) for c in contexts])
            ax.set_title(f"decode, FP8 {kind}\n{model}, TP {tp}", fontsize=7.5)
            ax.grid(False)
            ax.set_xlabel("sequences of a replica")
        axes[row][0].set_ylabel("context, tokens")
        ax, model = axes[row][3], ("Qwen3-8B", "Qwen3-32B")[row]
        for i, label in enumerate(recipes.values()):
            part = table[table["panel"] == f"training, {label}, {model}"]
            ax.plot(micro, part["bf16_over_fp8"], color=PALETTE[i], marker=MARKERS[i], ms=3.5, label=label)
        ax.axhline(1.0, color="#555555", lw=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks(micro[::2], [str(m) for m in micro[::2]])
        ax.set_xlabel("tokens of a micro-batch")
        ax.set_title(f"training, {model}", fontsize=7.5)
        ax.set_ylim(0.5, 1.45)
        ax.legend(loc="lower right", fontsize=6)
    figure.colorbar(image, ax=axes[:, :3], location="bottom", shrink=0.5, aspect=40, label="BF16 time / FP8 time")
    figure.suptitle("When does FP8 pay? Time ratios on H100 (modelled); bold: FP8 is slower", fontsize=8.5)
    return figure, table


FIGURES: dict[str, Callable[[], tuple[plt.Figure, pd.DataFrame]]] = {
    "modelled_phases": phases,
    "modelled_speedup": speedup,
    "modelled_timeline": timeline,
    "modelled_utilisation": utilisation,
    "modelled_lag": lag,
    "modelled_break_even": break_even,
}


def speedup_table() -> pd.DataFrame:
    """Jet-RL's table as far as it can be modelled: rollout, training and step speed-up by model, TP and limit."""
    rows = []
    for model in ("Qwen2.5-7B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"):
        for tp in (1, 2, 4) if model != "Qwen3-32B" else (2, 4):
            for cap in (8192, 16384):
                lengths = Lengths(mean=cap / 3, cv=0.9, cap=cap)
                costs = [Costs(model, "H100", precision=p, tp=tp) for p in (Precision(), FP8)]
                run = {"replicas": 8 // tp, "sequences": 1536, "prompt": 256}
                rollout = [generate(c, lengths, **run) for c in costs]
                training = [c.train_step_s(512 / 8 * (cap / 3 + 256), cap / 2, TrainLayout(8)) for c in costs]
                step = [r + 3 * t for r, t in zip(rollout, training)]
                ratios = [a / b for a, b in (rollout, training, step)]
                rows.append(
                    (model, tp, cap, *[round(r, 3) for r in ratios], costs[0].kv_capacity(), costs[1].kv_capacity())
                )
    columns = ["model", "tp", "response_limit", "rollout_x", "training_x", "step_x", "kv_tokens_bf16", "kv_tokens_fp8"]
    return pd.DataFrame(rows, columns=columns)


def render(name: str, out: Path) -> None:
    """OUT/<name>.pdf, .svg, .png and .csv; equal inputs give equal bytes."""
    with plt.rc_context(STYLE):
        figure, table = FIGURES[name]()
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        save_figure(figure, out / name, f"modelled: {name}")
        plt.close(figure)
    write_text(out / f"{name}.csv", f"# modelled: {name}\n" + table.to_csv(index=False, float_format="%.6g"))


def markdown(table: pd.DataFrame, title: str) -> str:
    head = "| " + " | ".join(table.columns) + " |\n|" + "---|" * len(table.columns) + "\n"
    body = "".join("| " + " | ".join(str(v) for v in row) + " |\n" for row in table.itertuples(index=False))
    return f"{title}\n\n{head}{body}"


def render_all(out: Path) -> list[Path]:
    """Every modelled figure, and the speed-up table as CSV and Markdown."""
    for name in FIGURES:
        render(name, out)
    table = speedup_table()
    write_text(out / "modelled_speedups.csv", "# modelled: unified FP8 over BF16\n" + table.to_csv(index=False))
    title = f"Speed-up of unified FP8 over BF16, modelled ({NODE}). No number here was measured."
    write_text(out / "modelled_speedups.md", markdown(table, title))
    return sorted(out.glob("modelled_*"))
