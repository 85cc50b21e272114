"""Publish complete, clean records with the tables and figures drawn from them, and compare records with each other.

`publish` copies the selected runs to results/reference: manifest, train.jsonl and timing.jsonl as they are, evaluation
rows packed (study.pack_samples), the resolved config, scripted answers, tables and figures, and, where they stand
beside the runs, the measured speed report, the modelled tables and figures, and the paper. It refuses uncommitted code,
missing runs, absent benchmarks (unless told) and more than 30 MB. Everything that renders from results/runs renders
from results/reference/runs.
`diff A B` (diff.py) compares what must be equal.
"""

import shutil
from pathlib import Path

from jetrl_bench import config as configs
from jetrl_bench import figures, tables
from jetrl_bench.record import Manifest, SampleRow, read_rows, write_json
from jetrl_bench.study import BENCHMARKS, RunRecord, Study, load, pack_samples, unpack_samples

LIMIT_BYTES = 30 * 10**6
BESIDE = ("speed.json", "speed.md", "paper/paper.pdf")


def check(study: Study, allow_absent: bool) -> None:
    """Raise ValueError where a record may not be published."""
    benchmarks = study.config.evaluate.benchmarks
    for run in study.runs:
        if not isinstance(run.manifest, Manifest):
            raise ValueError(f"{run.folder}: an imported log is not a record of this suite")
        if run.manifest.source.get("dirty") is not False:
            raise ValueError(f"{run.folder}: trained with uncommitted changes; commit and train again")
        if not run.manifest.source.get("git_sha"):
            raise ValueError(f"{run.folder}: the commit it was trained at is unknown")
        if run.task is None or run.scores(run.task, "deployment") is None:
            raise ValueError(f"{run.folder}: the final checkpoint was not evaluated")
        for task in benchmarks:
            if run.answers(task, "deployment") is None and not allow_absent:
                raise ValueError(
                    f"{run.folder}: {BENCHMARKS[task]} is absent ({run.absent(task)}); supply the data and evaluate, "
                    "or publish with --allow-absent"
                )


def copy_run(run: RunRecord, out: Path) -> None:
    """One record with its evaluation rows packed; what is written is read back and compared."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("manifest.json", "train.jsonl", "timing.jsonl"):
        if (run.folder / name).exists():
            shutil.copyfile(run.folder / name, out / name)
    packed = out / "eval"
    packed.mkdir(exist_ok=True)
    for path in sorted((run.folder / "eval").iterdir()):
        if path.suffix == ".jsonl":
            _pack(path, packed / f"{path.name}.gz")
        elif path.suffix in (".absent", ".gz"):
            shutil.copyfile(path, packed / path.name)


def _pack(source: Path, out: Path) -> None:
    rows = read_rows(source, SampleRow)
    out.write_bytes(pack_samples(rows))
    back = unpack_samples(out.read_bytes(), out)
    if sorted(map(repr, back)) != sorted(map(repr, rows)):
        raise ValueError(f"{source}: packing does not give back the same rows (a row stands twice?)")


def publish(
    runs: Path,
    config: Path,
    table_folder: Path,
    figure_folder: Path,
    out: Path,
    scripted: Path | None = None,
    allow_absent: bool = False,
) -> int:
    """Write into OUT, replacing what it wrote before once everything has been checked; return its size in bytes."""
    study = load(runs, config)
    check(study, allow_absent)
    for folder, names, kinds in (
        (table_folder, tables.BUILDERS, "md csv tex"),
        (figure_folder, figures.BUILDERS, "pdf svg png csv"),
    ):
        for name in names:
            for kind in kinds.split():
                if not (Path(folder) / f"{name}.{kind}").exists():
                    raise ValueError(f"{folder}/{name}.{kind}: missing; render all tables and figures first")
    out = Path(out)
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for run in study.runs:
        copy_run(run, fresh / "runs" / run.method / run.folder.name)
    write_json(fresh / "config.json", configs.load([config]).model_dump(mode="json"))
    for source, name in ((table_folder, "tables"), (figure_folder, "figures")):
        _copy_flat(Path(source), fresh / name)
    if scripted is not None:
        if not Path(scripted).is_dir():
            raise ValueError(f"{scripted}: no such folder; evaluate the scripted models first")
        for folder in sorted(path for path in Path(scripted).iterdir() if path.is_dir()):
            _copy_flat(folder, fresh / "scripted" / folder.name)
    for name in BESIDE:
        path = Path(runs).parent / name
        if path.exists():
            shutil.copyfile(path, fresh / path.name)
    if (modelled := Path(runs).parent / "modelled").is_dir():
        _copy_flat(modelled, fresh / "modelled")
    size = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        shutil.rmtree(fresh)
        raise ValueError(
            f"{out}: {size / 1e6:.1f} MB, the limit is {LIMIT_BYTES / 1e6:.0f} MB; select fewer experiments"
        )
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(fresh.iterdir()):  # other ftargeters of OUT htarget other measurements and stay
        target = out / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    fresh.rmdir()
    return size


def _copy_flat(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            shutil.copyfile(path, out / path.name)


def add_arguments(parser) -> None:
    results = Path("results")
    parser.add_argument("--runs", type=Path, default=results / "runs", help="folder of records")
    parser.add_argument(
        "--config", type=Path, default=results / "config.json", help="resolved config: selects the runs"
    )
    parser.add_argument("--tables", type=Path, default=results / "tables")
    parser.add_argument("--figures", type=Path, default=results / "figures")
    parser.add_argument("--scripted", type=Path, default=results / "scripted", help="answers of the scripted models")
    parser.add_argument("--out", type=Path, default=results / "reference")
    parser.add_argument("--allow-absent", action="store_true", help="publish although a benchmark has no data")


def run(args) -> int:
    size = publish(args.runs, args.config, args.tables, args.figures, args.out, args.scripted, args.allow_absent)
    print(f"{args.out}: {size / 1e6:.2f} MB")
    return 0
