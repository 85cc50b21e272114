"""Figures of measured steps and sweeps: phase shares of every arm, and cost against batch, length, width and depth."""

from matplotlib.ticker import NullLocator

from jetrl_bench.figures import DASHES, MARKERS, PALETTE, plt
from jetrl_bench.speed_report import PHASES, SWEPT, arms_of, axes_of, interval, label, spread
from jetrl_bench.stats import Interval


def phases_figure(record: dict):
    """Share of a step that each phase takes: an engine a panel, an arm a bar. -> figure, CSV."""
    arms = {n: a for n, a in arms_of(record).items() if {"step", *PHASES} <= record["median"].get(n, {}).keys()}
    engines = list(dict.fromkeys(arm["engine"] for arm in arms.values()))
    panels = [[name for name in arms if arms[name]["engine"] == engine] for engine in engines]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1.4 + 4.2 * len(panels), 0.9 + 0.23 * max(map(len, panels))), layout="constrained",
        squeeze=False, sharex=True,
    )  # fmt: skip
    lines = ["arm,engine,phase,seconds,share"]
    for ax, engine, names in zip(axes[0], engines, panels):
        for index, (phase, title) in enumerate(PHASES.items()):
            left = [100 * _before(record["median"][name], phase) for name in names]
            share = [record["median"][name][phase] / record["median"][name]["step"] for name in names]
            colour = PALETTE[index] if phase != "other" else "#999999"
            ax.barh(range(len(names)), [100 * s for s in share], 0.74, left=left, color=colour, label=title)
            for y, (s, x) in enumerate(zip(share, left)):
                if s > 0.06:
                    words = f"{100 * s:.0f}"
                    ax.text(x + 50 * s, y, words, ha="center", va="center", color="white", fontsize=6.5)
                name = label(names[y], arms[names[y]]).replace(",", "")
                lines.append(f"{name},{engine},{phase},{record['median'][names[y]][phase]:.6g},{s:.6g}")
        ticks = [f"{label(name, arms[name])}   {record['median'][name]['step']:.2f} s" for name in names]
        ax.set_yticks(range(len(names)), ticks)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_xlim(0, 100)
        ax.set_title(f"engine: {engine}", loc="left", fontweight="bold")
        ax.set_xlabel("share of a step, %")
        ax.grid(False)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES))
    figure.suptitle(f"Phase shares of an RL step ({record['kind']}); beside each name {record['unit']}", fontsize=8.5)
    return figure, "\n".join(lines) + "\n"


def _before(median: dict, phase: str) -> float:
    names = list(PHASES)
    return sum(median[name] for name in names[: names.index(phase)]) / median["step"]


def sweep_figure(record: dict):
    """Cost against each axis, and the ratio below it. -> figure, CSV."""
    figure, grid = plt.subplots(
        2, len(record["axes"]), figsize=(2.15 * len(record["axes"]) + 0.6, 4.2), layout="constrained", squeeze=False,
        sharex="col", sharey="row", height_ratios=[1.5, 1],
    )  # fmt: skip
    lines = ["axis,value,arm,phase,estimate,low,high"]
    for (top, bottom), (axis, found) in zip(grid.T, axes_of(record).items()):
        x = [point["value"] for point in found["points"]]
        for index, flow in enumerate(("bf16", "e4m3")):
            cells = [spread([row[flow] for row in point["rounds"]], "step") for point in found["points"]]
            _errors(top, x, cells, PALETTE[index], MARKERS[index], DASHES[index], flow)
            lines += [f"{axis},{v},{flow},step,{_csv(cell)}" for v, cell in zip(x, cells)]
        for index, (phase, words) in enumerate((("step", "whole step"), ("rollout", "rollout"), ("train", "training"))):
            cells = [interval(point["ratio"][phase]) for point in found["points"]]
            shifted = [v * 1.06 ** (index - 1) for v in x]
            _errors(bottom, shifted, cells, PALETTE[index + 2], MARKERS[index + 2], DASHES[index], words)
            lines += [f"{axis},{v},e4m3/bf16,{phase},{_csv(cell)}" for v, cell in zip(x, cells)]
        for ax in (top, bottom):
            ax.set_xscale("log")
            ax.set_xticks(x, [str(v) for v in x])
            ax.xaxis.set_minor_locator(NullLocator())
        top.set_yscale("log")
        top.set_title(axis, loc="left", fontweight="bold")
        bottom.axhline(1, color="#888888", linewidth=0.7, zorder=1)
        bottom.set_xlabel(found["counts"])
    grid[0][0].set_ylabel(f"{record['unit']}")
    grid[1][0].set_ylabel("e4m3 / bf16")
    estimates = [p["ratio"][phase]["estimate"] for f in record["axes"].values() for p in f["points"] for phase in SWEPT]
    if grid[1][0].get_ylim()[1] > 2 * max(estimates):  # few rounds: intervals leave the picture, the CSV has them
        grid[1][0].set_ylim(0, 2 * max(estimates))
    grid[0][0].legend(loc="upper left")
    grid[1][0].legend(loc="best")
    below = "above: median and range over rounds; below: geometric mean and 95 % t interval of paired rounds"
    figure.suptitle(f"What a step costs ({record['kind']})\n{below}", fontsize=8.5)
    return figure, "\n".join(lines) + "\n"


def _errors(ax, x, cells: list[Interval], colour, marker, dash, label: str) -> None:
    y = [cell.estimate for cell in cells]
    ax.plot(x, y, color=colour, marker=marker, markersize=3.5, linestyle=dash, linewidth=1.2, label=label)
    for at, cell in zip(x, cells):
        if cell.low is not None:
            ax.plot([at, at], [cell.low, cell.high], color=colour, linewidth=0.9)


def _csv(cell: Interval) -> str:
    return ",".join("" if v is None else f"{v:.6g}" for v in (cell.estimate, cell.low, cell.high))


FIGURES = {"step": ("speed_phases", phases_figure), "sweep": ("speed_sweep", sweep_figure)}
