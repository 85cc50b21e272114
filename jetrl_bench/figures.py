"""Figures, drawn from records alone: PDF, SVG and PNG with the plotted numbers as CSV beside them.

One style and one colour-blind palette (Okabe-Ito). The mean over seeds is thick, single seeds are thin, the band is
shaded (`band`). The files hold no time of day and no random identifiers: equal records give equal bytes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from jetrl_bench import stats  # noqa: E402
from jetrl_bench.quantities import deployed, schedules  # noqa: E402
from jetrl_bench.record import write_text  # noqa: E402
from jetrl_bench.render import save_figure
from jetrl_bench.strict import nearest
from jetrl_bench.study import RunRecord, Study, load, source_note  # noqa: E402

PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00"]
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "jetrl-bench",
    "axes.formatter.use_mathtext": True,
}
FAMILIES = ("bf16", "bare", "corrected", "unified", "unified, other kernels")
FORMATS = ("e4m3", "e5m2", "e3m2", "e4m1", "e2m1")
BAND_SEEDS = 5
SMOOTH = 5  # rollout steps of the running mean in reward curves


class Point(NamedTuple):
    """One plotted number: a CSV row."""

    panel: str
    arm: str
    seed: int | None
    x: float
    y: float


class Figure(NamedTuple):
    figure: "plt.Figure"
    points: list[Point]


def colours(arms) -> dict[str, tuple[str, object]]:
    """Arm -> (colour, dash); the same arm has the same look in every figure of an experiment."""
    return {
        arm: (PALETTE[i % len(PALETTE)], DASHES[(i // len(PALETTE) + i) % len(DASHES)]) for i, arm in enumerate(arms)
    }


def smooth(values: np.ndarray, width: int = SMOOTH) -> np.ndarray:
    """Trailing mean over up to `width` steps."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def band(ax, curves: list[tuple[np.ndarray, np.ndarray]], colour, dash, label: str) -> None:
    """Mean with a band over seeds on the shared x range, single seeds thin; a one-seed arm has no band.

    The band is the 95 % t interval from BAND_SEEDS seeds on; below, where that interval is wider than any seed and
    hides the picture, it is the range of the seeds (the tables give the interval).
    """
    for x, y in curves:
        ax.plot(x, y, color=colour, linewidth=0.5, alpha=0.35, zorder=2)
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, end, 200) if len(curves) > 1 else curves[0][0]
    stack = np.array([np.interp(grid, x, y) for x, y in curves])
    mean = stack.mean(0)
    ax.plot(grid, mean, color=colour, linestyle=dash, label=label, zorder=3)
    if len(curves) > 1:
        low, high = stack.min(0), stack.max(0)
        if len(curves) >= BAND_SEEDS:
            half = np.array([stats.mean_t(column).half_width for column in stack.T])
            low, high = np.maximum(mean - half, low), np.minimum(mean + half, high)
        ax.fill_between(grid, low, high, color=colour, alpha=0.05, linewidth=0, zorder=1)


def reward(study: Study) -> Figure:
    """Rollout reward against rollout step, samples and modelled time, one row per experiment."""
    axes_x = [("rollout_step", "rollout step"), ("samples", "samples trained on"), ("clock", "modelled time, units")]
    experiments = list(study.experiments.values())
    figure, axes = plt.subplots(
        len(experiments), 3, figsize=(8.6, 2.5 * len(experiments) + 0.4), sharey="row", squeeze=False
    )
    points: list[Point] = []
    for row, records in zip(axes, experiments):
        looks = colours(records.arms)
        for ax, (name, label) in zip(row, axes_x):
            drawn = False
            for arm, runs in records.arms.items():
                curves = _curves(runs, name, lambda run: run.column("reward"), smooth)
                if curves:
                    band(ax, [c[1:] for c in curves], *looks[arm], arm)
                    points += _points(f"{records.name}/{name}", arm, curves)
                    drawn = True
            ax.set_xlabel(label)
            _empty(ax, drawn)
        row[0].set_ylabel(f"reward, mean of {SMOOTH} steps")
        row[0].set_title(records.name, loc="left", fontweight="bold")
        if row[0].get_ylim()[0] > -0.1:  # rewards of ours are shares; imported ones may be negative
            row[0].set_ylim(bottom=0)
        _legend(row[2])
    _finish(figure)
    return Figure(figure, points)


def mismatch(study: Study) -> Figure:
    """Per-token mismatch (k3) and sequence ESS against rollout step; arms that are exactly 0 are listed, not drawn."""
    experiments = list(study.experiments.values())
    figure, axes = plt.subplots(len(experiments), 2, figsize=(8.6, 2.5 * len(experiments) + 0.4), squeeze=False)
    points: list[Point] = []
    for (left, right), records in zip(axes, experiments):
        looks = colours(records.arms)
        exact, drawn_left, drawn_right = [], False, False
        for arm, runs in records.arms.items():
            curves = _curves(runs, "rollout_step", lambda run: run.column("mismatch", "k3"))
            points += _points(f"{records.name}/k3", arm, curves)
            if curves and all((y == 0).all() for *_, y in curves):
                exact.append(arm)
            elif curves:
                positive = [(x, np.where(y > 0, y, np.nan)) for _, x, y in curves]
                band(left, [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in positive], *looks[arm], arm)
                drawn_left = True
            curves = _curves(runs, "rollout_step", lambda run: run.column("ess_sequence_proximal"))
            points += _points(f"{records.name}/ess_sequence_proximal", arm, curves)
            if curves:
                band(right, [c[1:] for c in curves], *looks[arm], arm)
                drawn_right = True
        left.set_title(records.name, loc="left", fontweight="bold")
        left.set_xlabel("rollout step")
        left.set_ylabel("mismatch k3 per token, nats")
        if drawn_left:
            left.set_yscale("log")
        if exact:
            words = "exactly 0: " + ", ".join(exact)
            left.text(0.02, -0.30, words, transform=left.transAxes, fontsize=6.5, color="#444444", va="top")
        right.set_xlabel("rollout step")
        right.set_ylabel("sequence ESS / n, proximal")
        right.set_ylim(-0.03, 1.05)
        _empty(left, drawn_left, "no mismatch" if exact else "no data")
        _empty(right, drawn_right)
        _legend(right)
    _finish(figure)
    return Figure(figure, points)


def dose(study: Study) -> Figure:
    """Final held-out accuracy against measured mismatch, every run a marker.

    Left: a run's own mismatch. Right: the dose, which is the mismatch that the run's format shows in the bare arm of
    the same seed, so that unified and corrected runs stand at the dose they were exposed to.
    """
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.1), sharey=True)
    points: list[Point] = []
    seen: dict[str, tuple] = {}
    runs = {run.folder: run for records in study.experiments.values() for run in records.runs if _barrier(run)}
    bare: dict[tuple, float] = {}
    for run in runs.values():
        if _family(run) == "bare":
            bare[(_format(run), run.seed)] = _early(run)
    for run in runs.values():
        accuracy, own, family = deployed(run), _early(run), _family(run)
        if accuracy is None or own is None or family is None:
            continue
        at_dose = 0.0 if family == "bf16" else bare.get((_format(run), run.seed))
        number_format = "bf16" if family == "bf16" else _format(run)
        colour = PALETTE[FAMILIES.index(family)]
        marker = MARKERS[("bf16", *FORMATS).index(number_format)]
        seen[("arm", family)] = (colour, "o")
        seen[("format", number_format)] = ("#777777", marker)
        for ax, panel, x in zip(axes, ("own", "dose"), (own, at_dose)):
            if x is not None:
                ax.plot(x, accuracy, marker, color=colour, markersize=5, alpha=0.85, markeredgewidth=0, clip_on=False)
                points.append(Point(panel, run.method, run.seed, x, accuracy))
    for ax, label in zip(axes, ("the run's own mismatch", "dose: mismatch of the format in the bare arm")):
        smallest = min((p.x for p in points if p.x > 0), default=1e-5)
        ax.set_xscale("symlog", linthresh=10 ** np.floor(np.log10(smallest)), linscale=0.5)
        largest = max((p.x for p in points), default=1e-1)
        ax.set_xlim(-(10 ** np.floor(np.log10(smallest))) * 0.15, max(largest, smallest) * 2)
        ax.set_xlabel(f"{label}\n(measured k3 per token, nats; mean of the first 10 steps)")
        ax.set_ylim(0, 1)
        _empty(ax, bool(points))
    axes[0].set_ylabel("held-out accuracy, deployment")
    for title, words, y in (("arm", FAMILIES, 0.98), ("format", ("bf16", *FORMATS), 0.42)):
        present = [word for word in words if (title, word) in seen]
        handles = [
            plt.Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=5, label=word)
            for word in present
            for colour, marker in [seen[(title, word)]]
        ]
        if handles:
            box = figure.legend(handles=handles, title=title, loc="upper left", bbox_to_anchor=(1.0, y))
            box._legend_box.align = "left"
    _finish(figure)
    return Figure(figure, points)


def lag(study: Study) -> Figure:
    """Lag by schedule: mean, p95 and max; first against second half of a response; k3 by lag."""
    experiments = schedules(study) or list(study.experiments.values())
    figure, axes = plt.subplots(len(experiments), 3, figsize=(8.6, 2.7 * len(experiments) + 0.3), squeeze=False)
    points: list[Point] = []
    for (left, middle, right), records in zip(axes, experiments):
        looks = colours(records.arms)
        drawn = False
        for index, (arm, runs) in enumerate(records.arms.items()):
            colour = looks[arm][0]
            offsets = np.linspace(-0.2, 0.2, len(runs)) if len(runs) > 1 else [0.0]
            for offset, run in zip(offsets, runs):
                values = {
                    name: run.column(f"lag_{name}") for name in ("mean", "p95", "max", "first_half", "second_half")
                }
                for name, marker in (("mean", "o"), ("p95", "_"), ("max", "^")):
                    if values[name] is not None:
                        value = float(values[name].max() if name == "max" else values[name].mean())
                        left.plot(index + offset, value, marker, color=colour, markersize=5)
                        points.append(Point(f"{records.name}/lag_{name}", arm, run.seed, index, value))
                        drawn = True
                if values["first_half"] is not None and values["second_half"] is not None:
                    halves = [float(values[name].mean()) for name in ("first_half", "second_half")]
                    middle.plot([0, 1], halves, color=colour, marker="o", markersize=3, linewidth=1, alpha=0.8)
                    for x, y in enumerate(halves):
                        points.append(Point(f"{records.name}/lag_by_position", arm, run.seed, x, y))
                by_lag = _kl_by_lag(run)
                if by_lag:
                    values = [y if y > 0 else np.nan for y in by_lag.values()]  # exactly 0 has no place on a log axis
                    right.plot(list(by_lag), values, color=colour, linewidth=0.9, marker=".", alpha=0.8)
                    points += [Point(f"{records.name}/k3_by_lag", arm, run.seed, x, y) for x, y in by_lag.items()]
        left.set_xticks(range(len(records.arms)), list(records.arms), rotation=35, ha="right")
        left.set_ylabel("lag, optimizer steps")
        left.set_title(records.name, loc="left", fontweight="bold", pad=16)
        handles = [
            plt.Line2D([], [], color="#555555", marker=marker, linestyle="none", markersize=5, label=name)
            for marker, name in (("o", "mean"), ("_", "p95"), ("^", "max"))
        ]
        left.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.03, 0.98), ncol=3, columnspacing=0.8)
        left.set_ylim(bottom=-0.1)
        middle.set_ylim(bottom=-0.1)
        middle.set_xticks([0, 1], ["first half", "second half"])
        middle.set_xlim(-0.3, 1.3)
        middle.set_xlabel("position in the response")
        middle.set_ylabel("mean lag, optimizer steps")
        right.set_xlabel("lag of the token, optimizer steps")
        right.set_ylabel("k3 of its tokens, nats")
        if any(p.y > 0 for p in points if p.panel.endswith("k3_by_lag")):
            right.set_yscale("log")
        arms = [plt.Line2D([], [], color=look[0], label=arm) for arm, look in looks.items()]
        right.legend(handles=arms, loc="center left", bbox_to_anchor=(1.02, 0.5))
        for ax in (left, middle, right):
            _empty(ax, drawn)
    _finish(figure)
    return Figure(figure, points)


BUILDERS: dict[str, Callable[[Study], Figure]] = {"reward": reward, "mismatch": mismatch, "dose": dose, "lag": lag}


def render(name: str, study: Study, out: Path) -> None:
    """OUT/<name>.pdf, .svg, .png and .csv, without dates or software versions in them."""
    with plt.rc_context(STYLE):
        built = BUILDERS[name](study)
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        note = source_note(study, f"figure {name}")
        save_figure(built.figure, out / name, note, bbox_inches="tight", pad_inches=0.04)
        plt.close(built.figure)
    lines = ["panel,arm,seed,x,y"]
    for point in built.points:
        lines.append(
            f"{point.panel},{point.arm},{'' if point.seed is None else point.seed},{point.x:.9g},{point.y:.9g}"
        )
    write_text(out / f"{name}.csv", f"# {note}\n" + "\n".join(lines) + "\n")


def _curves(runs: list[RunRecord], x: str, value, transform=None) -> list[tuple[int | None, np.ndarray, np.ndarray]]:
    out = []
    for run in runs:
        along, y = run.column(x), value(run)
        if along is not None and y is not None:
            out.append((run.seed, along, transform(y) if transform else y))
    return out


def _points(panel: str, arm: str, curves) -> list[Point]:
    return [Point(panel, arm, seed, float(a), float(b)) for seed, x, y in curves for a, b in zip(x, y)]


def _kl_by_lag(run: RunRecord) -> dict[int, float]:
    """Mean over rollout steps of the k3 of tokens with each lag."""
    sums: dict[int, list[float]] = {}
    for row in run.steps:
        for key, value in (row.kl_by_lag or {}).items():
            sums.setdefault(int(key), []).append(value)
    return {key: float(np.mean(values)) for key, values in sorted(sums.items())}


def _barrier(run: RunRecord) -> bool:
    return (
        run.setting("method", "sync", "schedule") == "barrier" and run.setting("method", "loss", "anchor") == "proximal"
    )


def _format(run: RunRecord) -> str:
    return run.setting("method", "flow", "format")


def _family(run: RunRecord) -> str | None:
    """Which answer to the precision question a run is."""
    flow = run.setting("method", "flow")
    if flow["rollout"] == "fp32":
        return None
    if flow["rollout"] == "bf16":
        return "bf16" if flow["train"] == "bf16" else None
    if flow["train"] == "bf16":
        return "bare" if run.setting("method", "loss", "correction") == "none" else "corrected"
    return "unified" if flow["train_kernels"] == "same" else "unified, other kernels"


def _early(run: RunRecord) -> float | None:
    column = run.column("mismatch", "k3")
    return None if column is None else float(column[:10].mean())


def _empty(ax, drawn: bool, words: str = "no data") -> None:
    if not drawn:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color="#888888")


def _legend(ax) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), handlelength=2.6)


def _finish(figure) -> None:
    figure.tight_layout(w_pad=1.2, h_pad=1.6)


def add_arguments(parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"figures to draw (default: all of {', '.join(BUILDERS)})"
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of records")
    parser.add_argument("--config", type=Path, help="resolved config; without it, every record under --runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for <name>.pdf, .svg, .png and .csv")
    parser.add_argument("--partial", action="store_true", help="draw the records that exist")


def run(args) -> int:
    for name in args.names:
        if name not in BUILDERS:
            raise ValueError(f"figure {name!r} is unknown; {nearest(name, BUILDERS)}")
    study = load(args.runs, args.config, args.partial)
    for name in args.names or BUILDERS:
        render(name, study, args.out)
    print(f"{len(args.names or BUILDERS)} figures in {args.out}")
    return 0
