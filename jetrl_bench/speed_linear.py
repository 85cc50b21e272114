"""One linear layer at the shapes of real models: speed and correctness in one table, beside the machine's own ceilings.

For every back end that runs here: FProp, DGrad and WGrad as the precision flow runs them (activations and gradients
are quantised inside, the weight was prepared before), and the quantisation of X and W alone. On a CPU the widths are
divided by a stated factor and FP8 is emulated, so its times are the price of emulation and say nothing about FP8
hardware.

    time         median over interleaved rounds: CPU seconds of this process, or CUDA events
    of ceiling   products: FLOP/s over the best bf16 product measured in this run; quantisation: bytes/s over a copy's
    error        RMS over the RMS of the float64 product of the bf16 operands: what quantisation costs
    arithmetic   the same against the float64 product of the dequantised operands: what the sum and its rounding cost

T tokens, K inputs, N outputs.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl_bench import backends, fp8, native, precision, quantizer
from jetrl_bench.config import FlowConfig
from jetrl_bench.probe_report import to_csv
from jetrl_bench.record import write_json, write_text
from jetrl_bench.shapes import ModelShape

MODELS = ["Qwen2.5-7B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-8B"]
LAYERS = ["qkv", "o", "gate_up", "down"]
PRODUCTS = ["FProp", "DGrad", "WGrad"]
BACKENDS = ["bf16", "emulated_pow2", "emulated_fp32", "torch_pow2", "te_pow2"]
COPY_SHAPE = (16384, 4096)


class Shape(NamedTuple):
    model: str
    layer: str
    T: int
    N: int
    K: int


class Operands(NamedTuple):
    x_TK: Tensor
    weight_NK: Tensor
    """fp32 master."""
    dy_TN: Tensor


def shapes(models: list[str], tokens: int, divide: int) -> list[Shape]:
    """Fused layers of each model, both widths divided and rounded up to 128."""

    def scaled(size: int) -> int:
        return math.ceil(size / divide / fp8.BLOCK) * fp8.BLOCK

    found = []
    for model in models:
        for layer, (n, k) in zip(LAYERS, ModelShape.named(model).linears):
            found.append(Shape(model, layer, tokens, scaled(n), scaled(k)))
    return found


def operands(shape: Shape, device: str) -> Operands:
    """Activations with outliers in every 64th channel, as trained models have; gradients four orders smaller."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape.T, shape.K, generator=g)
    x[:, ::64] *= 8
    weight = torch.randn(shape.N, shape.K, generator=g) * 0.02
    dy = torch.randn(shape.T, shape.N, generator=g) * 1e-4
    return Operands(x.bfloat16().to(device), weight.to(device), dy.bfloat16().to(device))


def flow_of(name: str) -> FlowConfig:
    backend, _, scale = name.partition("_")
    if backend == "bf16":
        return FlowConfig()
    wgrad = "bf16" if backend == "te" else "fp32"
    return FlowConfig(rollout="fp8", train="fp8", scale=scale, backend=backend, wgrad_output=wgrad)


def operators(name: str, o: Operands) -> dict[str, Callable[[], Tensor]]:
    """What is timed for one back end, each a call without arguments."""
    config = flow_of(name)
    if config.backend == "emulated":
        flow = precision.make_flow(config)
        side = flow.train_side
        weight = precision.prepare_weight([o.weight_NK], [], side, quantized=side.fp8)
        found = {
            "FProp": lambda: precision.linear(o.x_TK, weight, side),
            "DGrad": lambda: precision.dgrad(o.dy_TN, weight, flow, quantized=side.fp8),
        }
        if not side.fp8:
            return found | {"WGrad": lambda: fp8.gemm_tokens(o.dy_TN, o.x_TK)}
        return found | {
            "WGrad": lambda: precision.wgrad(o.dy_TN, o.x_TK, weight, flow),
            "quantise X": lambda: quantizer.quantize_blocks(o.x_TK, (1, fp8.BLOCK), side.forward)[0],
            "quantise W": lambda: quantizer.quantize_blocks(weight.bf16, (fp8.BLOCK, fp8.BLOCK), side.forward)[0],
        }
    if config.backend == "torch":
        rule = fp8.spec("e4m3", config.scale)
        weight_bf16 = o.weight_NK.bfloat16()
        weight = backends.block_weight(weight_bf16, rule)
        forward, backward = weight.operand(), weight.transposed().operand()

        def wgrad() -> Tensor:
            dy, x = (backends.row_operand(t.t(), rule) for t in (o.dy_TN, o.x_TK))
            return backends.product(dy, x, torch.float32)

        return {
            "FProp": lambda: backends.product(backends.row_operand(o.x_TK, rule), forward, torch.bfloat16),
            "DGrad": lambda: backends.product(backends.row_operand(o.dy_TN, rule), backward, torch.bfloat16),
            "WGrad": wgrad,
            "quantise X": lambda: backends.row_operand(o.x_TK, rule).codes,
            "quantise W": lambda: backends.block_weight(weight_bf16, rule).codes,
        }
    linear = backends.make_linear(config)
    x, weight = o.x_TK.clone().requires_grad_(), o.weight_NK.clone().requires_grad_()
    y = linear(x, weight)
    return {
        "FProp": lambda: linear(x.detach(), weight.detach()),
        "DGrad and WGrad": lambda: torch.autograd.grad(y, (x, weight), o.dy_TN, retain_graph=True)[0],
    }


def references(o: Operands, config: FlowConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """product -> (float64 product of the bf16 operands, of the dequantised ones)."""
    x, w, dy = o.x_TK.cpu(), o.weight_NK.cpu().bfloat16(), o.dy_TN.cpu()

    def hat(t: Tensor, block: tuple[int, int]) -> Tensor:
        if config.train == "bf16":
            return t.double()
        q = fp8.quantize(t.contiguous(), "e4m3", block, scale=config.scale, rule=config.train_rule)
        return q.values().double() * fp8.expand_scales(q.scales, q.block, t.shape).double()

    row, square = (1, fp8.BLOCK), (fp8.BLOCK, fp8.BLOCK)
    w_hat = hat(w, square)
    return {
        "FProp": (x.double() @ w.double().t(), hat(x, row) @ w_hat.t()),
        "DGrad": (dy.double() @ w.double(), hat(dy, row) @ w_hat),
        "WGrad": (dy.double().t() @ x.double(), hat(dy.t(), row) @ hat(x.t(), row).t()),
    }


def relative(actual: Tensor, wanted: Tensor) -> float:
    """RMS of the difference over the RMS of what is wanted."""
    return float(((actual.double().cpu() - wanted).square().mean() / wanted.square().mean()).sqrt())


def work(op: str, s: Shape, name: str) -> tuple[int, int]:
    """(FLOP, bytes): bytes of the operands read and the result written once, in this back end's own storage."""
    flop = 2 * s.T * s.N * s.K
    size = 1 if name.startswith(("torch", "te")) else 2
    if op == "quantise X":
        return 0, s.T * s.K * (2 + size)
    if op == "quantise W":
        return 0, s.N * s.K * (2 + size)
    operand = 2 if name == "bf16" else size
    products = {
        "FProp": operand * (s.T + s.N) * s.K + 2 * s.T * s.N,
        "DGrad": operand * (s.T + s.K) * s.N + 2 * s.T * s.K,
        "WGrad": operand * (s.N + s.K) * s.T + 4 * s.N * s.K,
    }
    return (2 * flop, products["DGrad"] + products["WGrad"]) if op == "DGrad and WGrad" else (flop, products[op])


def seconds(call: Callable[[], object], device: str, least: float = 0.01) -> float:
    """Seconds of one call: CPU time of this process, or CUDA events; repeated until `least` seconds are filled."""
    repeats = 1
    while True:
        if device == "cpu":
            start = time.process_time()
            for _ in range(repeats):
                call()
            taken = time.process_time() - start
        else:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            taken = start.elapsed_time(end) / 1000
        if taken >= least:
            return taken / repeats
        repeats *= 2


def machine(device: str, rounds: int) -> dict[str, float]:
    """Best of `rounds`: FLOP/s of a square bf16 product, bytes/s (read and written) of a copy in place."""
    x = torch.ones(COPY_SHAPE, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    side = 4096 if device != "cpu" else 1024
    a = torch.randn(side, side, device=device).bfloat16()
    return {
        "product_flops": 2 * side**3 / min(seconds(lambda: a @ a, device) for _ in range(rounds)),
        "copy_bytes_s": 2 * x.nbytes / min(seconds(lambda: out.copy_(x), device) for _ in range(rounds)),
    }


def ceilings(device: str, rounds: int) -> dict[str, float]:
    """`machine`, and best of `rounds`: bytes/s (read and written) of a copy into a new array, and of quantising and
    dequantising into a new array and (compiled) into one that exists."""
    x = torch.randn(COPY_SHAPE, device=device).bfloat16()
    rule = fp8.spec("e4m3")
    moved = 2 * x.nbytes
    found = machine(device, rounds) | {
        "clone_bytes_s": moved / min(seconds(lambda: x.clone(), device) for _ in range(rounds)),
    }
    quantise = lambda: quantizer.quantize_blocks(x, (1, fp8.BLOCK), rule)[0]  # noqa: E731
    if device == "cpu" and native.backend() == "compiled":
        out = torch.empty_like(x)
        filled = lambda: quantizer.quantize_blocks(x, (1, fp8.BLOCK), rule, out=out)  # noqa: E731
        found["qdq_in_place_bytes_s"] = moved / min(seconds(filled, device) for _ in range(rounds))
        found["qdq_compiled_bytes_s"] = moved / min(seconds(quantise, device) for _ in range(rounds))
        fast = quantise()
        with native.eager():
            slow = quantise()
            found["qdq_portable_bytes_s"] = moved / seconds(quantise, device)
        found["qdq_equal_bits"] = float(torch.equal(fast.view(torch.int16), slow.view(torch.int16)))
    else:
        found["qdq_portable_bytes_s"] = moved / min(seconds(quantise, device) for _ in range(rounds))
    return found


def measure(models: list[str], tokens: int, divide: int, names: list[str], rounds: int, device: str) -> dict:
    top = ceilings(device, rounds)
    rows = []
    for shape in shapes(models, tokens, divide):
        o = operands(shape, device)
        calls = {(name, op): call for name in names for op, call in operators(name, o).items()}
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(rounds):
            for key, call in calls.items():
                taken[key].append(seconds(call, device))
        wanted = {name: references(o, flow_of(name)) for name in names}
        for (name, op), call in calls.items():
            t = statistics.median(taken[name, op])
            flop, moved = work(op, shape, name)
            row = {**shape._asdict(), "backend": name, "op": op, "seconds": t, "flop_s": flop / t, "bytes": moved}
            row["of_ceiling"] = flop / t / top["product_flops"] if flop else moved / t / top["copy_bytes_s"]
            if op in PRODUCTS:
                out = call()
                exact, dequantised = wanted[name][op]
                out = out[: exact.shape[0], : exact.shape[1]]
                row |= {"error": relative(out, exact), "arithmetic_error": relative(out, dequantised)}
            rows.append(row)
    return {
        "kind": "measured" if device != "cpu" else "measured; FP8 emulated",
        "unit": "CPU seconds of this process" if device == "cpu" else "CUDA event seconds",
        "tokens": tokens,
        "widths_divided_by": divide,
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} thread(s)",
        "environment": {"torch": torch.__version__, "kernels": native.backend(), "gemm": fp8.gemm_isa()},
        "ceilings": top,
        "rows": rows,
    }


COLUMNS = ["model", "layer", "T", "N", "K", "backend", "op", "microseconds", "gflop_s", "mbytes", "of_ceiling"]
COLUMNS += ["error", "arithmetic_error"]


def cells(row: dict) -> list[str]:
    values = {
        **row,
        "microseconds": f"{row['seconds'] * 1e6:.0f}",
        "gflop_s": f"{row['flop_s'] / 1e9:.1f}" if row["flop_s"] else "",
        "mbytes": f"{row['bytes'] / 1e6:.2f}",
        "of_ceiling": f"{row['of_ceiling']:.2f}",
        "error": f"{row['error']:.5f}" if "error" in row else "",
        "arithmetic_error": f"{row['arithmetic_error']:.6f}" if "error" in row else "",
    }
    return [str(values[key]) for key in COLUMNS]


def markdown(result: dict) -> str:
    top = result["ceilings"]
    lines = [f"# One linear layer ({result['kind']})", ""]
    how, env = f"{result['device']}; {result['unit']}; {result['tokens']} tokens", result["environment"]
    how += f"; widths divided by {result['widths_divided_by']}; median of {result['rounds']} rounds"
    lines.append(f"{how}; kernels {env['kernels']}, bf16 products {env['gemm']}.")
    lines += ["", "| ceiling of this run | |", "|---|---|"]
    lines.append(f"| bf16 product | {top['product_flops'] / 1e9:.1f} GFLOP/s |")
    size = f"bf16 {COPY_SHAPE[0]} x {COPY_SHAPE[1]}"
    lines.append(f"| copy in place, {size} | {top['copy_bytes_s'] / 1e9:.2f} GB/s |")
    lines.append(f"| copy into a new array | {top['clone_bytes_s'] / 1e9:.2f} GB/s |")
    if "qdq_in_place_bytes_s" in top:
        share = top["qdq_in_place_bytes_s"] / top["copy_bytes_s"]
        rate = f"{top['qdq_in_place_bytes_s'] / 1e9:.2f} GB/s, {share:.3f} of its copy"
        lines.append(f"| quantise-dequantise in place, compiled | {rate} |")
    for key, name in (("qdq_compiled_bytes_s", "compiled"), ("qdq_portable_bytes_s", "portable (torch)")):
        if key in top:
            share = top[key] / top["clone_bytes_s"]
            lines.append(
                f"| quantise-dequantise into a new array, {name} | {top[key] / 1e9:.2f} GB/s, {share:.3f} of its copy |"
            )
    if "qdq_equal_bits" in top:
        lines.append(f"| both give equal bits | {'yes' if top['qdq_equal_bits'] else 'NO'} |")
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.description = argparse.RawDescriptionHelpFormatter, __doc__
    parser.add_argument(
        "--model", nargs="+", default=MODELS, metavar="NAME", help=f"of {', '.join(MODELS)}, or a folder"
    )
    parser.add_argument("--tokens", type=int, default=256, help="rows of X (default %(default)s)")
    parser.add_argument("--divide", type=int, help="divide both widths by this (default: 8 on a CPU, 1 on a GPU)")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, help="default: all that run on the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for linear.json, linear.md and linear.csv")


def run(args: argparse.Namespace) -> int:
    divide = args.divide or (8 if args.device == "cpu" else 1)
    for name, value in (("--tokens", args.tokens), ("--divide", divide), ("--rounds", args.rounds)):
        if value < 1:
            raise ValueError(f"{name} {value} is below 1")
    names = args.backend or [name for name in BACKENDS if _runs(name, args.device)]
    for name in names:
        backends.require(flow_of(name), args.device)
    torch.set_num_threads(1)
    result = measure(args.model, args.tokens, divide, names, args.rounds, args.device)
    text = markdown(result)
    print(text)
    if args.out:
        write_json(args.out / "linear.json", result)
        write_text(args.out / "linear.md", text)
        write_text(args.out / "linear.csv", to_csv([COLUMNS, *map(cells, result["rows"])]))
    return 0


def _runs(name: str, device: str) -> bool:
    try:
        backends.require(flow_of(name), device)
    except ValueError:
        return False
    return True
