"""The probe's figure: tail of abs(d), KL by response position beside published values, ESS by sequence length."""

import math
from pathlib import Path

from jetrl_bench.probe_report import PUBLISHED, TERMS, ProbeRecord, to_csv
from jetrl_bench.record import write_text

SETTINGS = {"font.size": 8, "svg.hashsalt": "jetrl-bench", "axes.spines.top": False, "axes.spines.right": False}
GRID_MARKS = [("kl", "total", "o", 4), ("kl_quantisation", "quantisation", "s", 6), ("kl_kernel", "kernel", "D", 5)]
COLOURS = {"total": "#1b3a5c", "quantisation": "#c8553d", "kernel": "#4c956c"}


def draw(record: ProbeRecord, stem: Path) -> list[Path]:
    """Write stem.pdf, .svg, .png and .csv (the numbers that are drawn)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(SETTINGS):
        figure, ((tail, position), (ess, elsewhere)) = plt.subplots(2, 2, figsize=(8.5, 6))
        rows = [["panel", "series", "x", "y"]]
        rows += _tail(tail, record) + _kl(position, record) + _ess(ess, record) + _published(elsewhere, record)
        figure.tight_layout(w_pad=2, h_pad=2)
        paths = _save(figure, stem)
        plt.close(figure)
    write_text(stem.with_suffix(".csv"), to_csv(rows))
    return [*paths, stem.with_suffix(".csv")]


def draw_grid(rows: list[tuple[str, str, dict[str, float]]], stem: Path) -> list[Path]:
    """KL of every pair, total and by term, grouped by question; exactly 0 is written out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    questions = list(dict.fromkeys(question for question, *_ in rows))
    drawn = [n[key] for *_, n in rows for key, *_ in GRID_MARKS if n[key] > 0]
    floor = 10 ** (math.floor(math.log10(min(drawn, default=1e-3))) - 1)
    data = [["question", "pair", "kl", "kl_quantisation", "kl_kernel"]]
    with plt.rc_context(SETTINGS):
        figure, axes = plt.subplots(figsize=(8.5, 0.21 * (len(rows) + 2 * len(questions)) + 1))
        y, ticks = 0, []
        for question in questions:
            axes.annotate(
                question, (0, y), xycoords=("axes fraction", "data"), fontsize=7.5, fontweight="bold", va="center"
            )
            y += 1
            for asked, name, n in rows:
                if asked != question:
                    continue
                data.append([question, name, n["kl"], n["kl_quantisation"], n["kl_kernel"]])
                for key, term, marker, size in GRID_MARKS:
                    value = n[key]
                    if value == 0:
                        continue
                    axes.plot(
                        value,
                        y,
                        marker,
                        ms=size,
                        color=COLOURS[term],
                        mfc="none" if term != "total" else None,
                    )
                if n["kl"] == 0:
                    axes.annotate("exactly 0", (floor, y), fontsize=6.5, va="center")
                ticks.append((y, name))
                y += 1
        axes.set_xscale("log")
        axes.set_xlim(left=floor * 0.8)
        axes.set_ylim(y, -1)
        axes.set_yticks(*zip(*ticks), fontsize=7)
        axes.grid(axis="x", color="#dddddd", lw=0.5)
        axes.set(xlabel="exact KL(μ ‖ π), nats per token")
        for _, term, marker, size in GRID_MARKS:
            axes.plot(
                [], [], marker, ms=size, color=COLOURS[term], mfc="none" if term != "total" else None, label=TERMS[term]
            )
        axes.legend(frameon=False, loc="upper right", fontsize=7)
        figure.tight_layout()
        paths = _save(figure, stem)
        plt.close(figure)
    write_text(stem.with_suffix(".csv"), to_csv(data))
    return [*paths, stem.with_suffix(".csv")]


def _save(figure, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(suffix) for suffix in (".pdf", ".svg", ".png")]
    for path in paths:
        undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {"Software": None}}[path.suffix]
        figure.savefig(path, dpi=160, metadata=undated)
    return paths


def _tail(axes, record: ProbeRecord) -> list[list]:
    rows = []
    for c in record.comparisons:
        points = [(x, share) for x, share in c.tail if share > 0]
        rows += [["tail", c.term, x, share] for x, share in points]
        if points:
            axes.loglog(*zip(*points), color=COLOURS[c.term], label=TERMS[c.term])
    axes.set(xlabel="x, nats", ylabel="share of tokens with abs(d) ≥ x", title="tail of d = log π − log μ")
    if rows:
        axes.set_xlim(left=max(1e-6, min(x for _, _, x, share in rows if share > 0.5 * rows[0][3]) / 2))
        axes.legend(frameon=False, loc="lower left")
    else:
        _say(axes, "d = 0 for every token")
    return rows


def _kl(axes, record: ProbeRecord) -> list[list]:
    key = _kl_key(record)
    rows = [
        [f"{key}_by_position", c.term, p.first, getattr(p.numbers, key)]
        for c in record.comparisons
        for p in c.positions
    ]
    for c in record.comparisons:
        # drawn at the first position of a bin, counted from 1; exactly 0 has no place on a logarithmic axis
        points = [(p.first + 1, getattr(p.numbers, key)) for p in c.positions if getattr(p.numbers, key) > 0]
        if points:
            axes.loglog(*zip(*points), "o-", ms=3, color=COLOURS[c.term])
    axes.set(
        xlabel="response position (start of bin)", ylabel="nats per token", title=f"{_kl_name(record)} by position"
    )
    drawn = [row[3] for row in rows if row[3] > 0]
    if drawn:
        axes.set_ylim(10 ** math.floor(math.log10(min(drawn))), 10 ** (math.floor(math.log10(max(drawn))) + 1))
    else:
        _say(axes, "0 at every position")
    return rows


def _published(axes, record: ProbeRecord) -> list[list]:
    """Published ranges as bars, this record's values as lines."""
    key = _kl_key(record)
    for row, p in enumerate(PUBLISHED):
        axes.plot([p.low, p.high], [row, row], "o-", color="#999999", ms=3, lw=3)
        axes.annotate(f"  {p.source}", (p.high, row), fontsize=5, color="#777777", va="center", annotation_clip=False)
    axes.set_yticks(range(len(PUBLISHED)), [p.system for p in PUBLISHED], fontsize=6.5)
    axes.set_xscale("log")
    axes.invert_yaxis()
    for c in record.comparisons:
        value = getattr(c.numbers, key)
        if value > 0:
            axes.axvline(value, color=COLOURS[c.term], lw=1.2)
    axes.set(xlabel="nats per token", title=f"published KL (bars), this {_kl_name(record)} (lines)")
    axes.set_xlim(right=20)
    rows = [["published", p.system, p.low, p.high] for p in PUBLISHED]
    return rows + [["this", c.term, getattr(c.numbers, key), ""] for c in record.comparisons]


def _kl_key(record: ProbeRecord) -> str:
    return "k3" if record.comparisons[0].numbers.kl is None else "kl"


def _kl_name(record: ProbeRecord) -> str:
    return {"k3": "KL (k3)", "kl": "KL (exact)"}[_kl_key(record)]


def _ess(axes, record: ProbeRecord) -> list[list]:
    rows = []
    for c in record.comparisons:
        axes.semilogx(*zip(*c.ess_by_length), color=COLOURS[c.term])
        rows += [["ess_sequence", c.term, t, value] for t, value in c.ess_by_length]
    axes.set(xlabel="first t tokens of a sequence", ylabel="effective sample size / S", title="sequence-level weights")
    axes.set_ylim(0, 1.05)
    return rows


def _say(axes, text: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
