"""Measured seconds on this machine: whole RL steps by phase, what they cost as a step grows, one linear layer.

`speed step` times every method of the registry (or of a configuration) on every engine, and beside them one step of
fixed work in bf16 and e4m3, transformers' generate, and another trainer's script. `speed sweep` varies batch, length,
width and depth, one at a time. `speed report` draws tables and figures from their records. Arms take turns within a
round, rounds of warm-up are kept apart, and ratios are paired by round (speed_arms.py); what a phase holds and how
tokens, FLOP and bytes are counted stands in speed_step.py.

On a CPU seconds are CPU seconds of one thread and FP8 is emulated: its ratio to BF16 is the price of emulation, and
says nothing about FP8 hardware. With --device cuda they are GPU seconds, FP8 runs on --backend torch or te, and the
same table is FP8 over BF16 (never run: docs/hardware.md).

--peer SCRIPT is started as `SCRIPT --hidden 128 --layers 4 --heads 4 --kv 2 --vocab 64 --prompts 8 --group 8
--prompt-len 16 --max-new 64 --threads 1 --dtype bf16 --steps N --json FILE` and answers with {"cpu_s": {"step": s}};
with generate, loss_forward and backward beside it, its phases are shown too.
"""

import argparse
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

SIZES = ("hidden", "layers", "heads", "kv_heads", "vocab", "prompts", "group", "prompt_len", "new_tokens")
ENGINES = ("reference", "vllm", "transformers")
BACKENDS = ("emulated", "torch", "te")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, __doc__
    what = parser.add_subparsers(dest="what", required=True)
    step = what.add_parser("step", help="whole RL steps by phase, for every method and engine")
    step.add_argument(
        "--config", nargs="+", type=Path, metavar="FILE", help="the methods it selects (default: the registry)"
    )
    step.add_argument("--methods", nargs="+", metavar="NAME", help="only these")
    step.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all installed")
    step.add_argument("--peer", type=Path, metavar="SCRIPT", help="another trainer's script, run beside ours")
    step.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="its interpreter")
    sweep = what.add_parser("sweep", help="cost against batch, length, width and depth, bf16 and e4m3")
    sweep.add_argument("--axes", nargs="+", metavar="AXIS", help="of batch, length, width, depth (default: all)")
    for one, pairs in ((step, 5), (sweep, 6)):
        _add_rounds(one, pairs)
    report = what.add_parser("report", help="tables and figures from records of step and sweep")
    report.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="JSON written by step or sweep")
    report.add_argument("--out", type=Path, required=True, help="folder for tables and figures")
    from jetrl_bench import speed_linear

    speed_linear.add_arguments(what.add_parser("linear", help="CPU or GPU seconds of one quantised linear layer"))


def _add_rounds(parser: argparse.ArgumentParser, pairs: int) -> None:
    parser.add_argument("--pairs", type=int, default=pairs, help="counted rounds (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="turns of each arm in a round (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted (default %(default)s)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--backend", choices=BACKENDS, help="who multiplies FP8 (default: emulated; torch on cuda)")
    for size in SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the record there as JSON, its tables beside it as Markdown")
    parser.epilog = f"The size of a step: {', '.join('--' + s.replace('_', '-') for s in SIZES)} N."


def run(args: argparse.Namespace) -> int:
    from jetrl_bench import speed_report

    if args.what == "linear":
        from jetrl_bench import speed_linear

        return speed_linear.run(args)
    if args.what == "report":
        for record in [speed_report.read(path) for path in args.records]:
            print(f"{', '.join(speed_report.render(record, args.out))} in {args.out}")
        return 0
    found = measure(args)
    text = speed_report.text(found)
    print(text, end="")
    if args.out:
        from jetrl_bench import record

        record.write_json(args.out, found)
        record.write_text(args.out.with_suffix(".md"), text)
    return 0


def measure(args: argparse.Namespace) -> dict:
    from jetrl_bench import devices, speed_arms, speed_sweep
    from jetrl_bench.speed_step import Job

    device = args.device or ("cuda" if devices.gpus() else "cpu")
    if device != "cpu" and not devices.gpus():
        raise ValueError(f"--device {device}: this machine has no CUDA device; nearest: 'cpu'")
    backend = args.backend or ("emulated" if device == "cpu" else "torch")
    assert SIZES == tuple(f.name for f in fields(Job))
    job = Job(**{size: value for size in SIZES if (value := getattr(args, size)) is not None})
    rounds = {"rounds": args.pairs, "steps": args.steps, "warmup": args.warmup, "device": device}
    if args.what == "sweep":
        return speed_sweep.measure(job, args.axes or list(speed_sweep.AXES), backend=backend, **rounds)
    methods = speed_arms.methods_of(args.config, args.methods)
    with tempfile.TemporaryDirectory() as scratch:
        arms = speed_arms.step_arms(job, device, backend)
        arms += speed_arms.method_arms(job, methods, args.engines, device, backend, Path(scratch))
        return speed_arms.measure(job, arms, peer=args.peer, python=args.peer_python, **rounds)
