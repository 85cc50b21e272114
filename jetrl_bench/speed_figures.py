"""Figures of measured steps and sweeps: phase shares of every arm, and cost against batch, length, width and depth."""

from matplotlib.ticker import NullLocator

from jetrl_bench.figures import DASHES, MARKERS, PALETTE, plt
from jetrl_bench.speed_report import PHASES, SWEPT, arms_of, axes_of, interval, label, spread
from jetrl_bench.stats import Interval


def phases_figure(record: dict):
    """Share of a step that each phase takes, an arm a bar. -> figure, CSV."""
    arms = arms_of(record)
    named = [n for n in arms if {"step", *PHASES} <= record["median"].get(n, {}).keys()]

    def words(name: str) -> str:
        engine = arms[name]["engine"]
        return label(name, arms[name]) + (f", {engine}" if arms[name]["kind"] == "method" else "")

    figure, ax = plt.subplots(figsize=(6.8, 0.9 + 0.24 * len(named)), layout="constrained")
    lines = ["arm,engine,phase,seconds,share"]
    for index, (phase, title) in enumerate(PHASES.items()):
        left = [_before(record["median"][name], phase) for name in named]
        share = [record["median"][name][phase] / record["median"][name]["step"] for name in named]
        ax.barh(range(len(named)), [100 * s for s in share], 0.72, left=[100 * x for x in left],
                color=PALETTE[index] if phase != "other" else "#999999", label=title)  # fmt: skip
        for y, (s, x) in enumerate(zip(share, left)):
            if s > 0.045:
                ax.text(100 * (x + s / 2), y, f"{100 * s:.0f}", ha="center", va="center", color="white", fontsize=6.5)
            name, engine = label(named[y], arms[named[y]]).replace(",", ""), arms[named[y]]["engine"]
            lines.append(f"{name},{engine},{phase},{record['median'][named[y]][phase]:.6g},{s:.6g}")
    ax.set_yticks(
        range(len(named)),
        [f"{words(name)}   {record['median'][name]['step']:.2f} s" for name in named],
    )
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel(f"share of a step, %   (beside each name: {record['unit']})")
    ax.grid(False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center")
    ax.set_title(f"Phase shares of an RL step ({record['kind']})", loc="left")
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
