"""`python -m jetrl_bench.hardware_check [--out DIR]`: the torch back end on an FP8 GPU, in a few minutes.

In this order, and stopping at nothing: are the layouts accepted; how far are the three products from the emulated ones;
are they equal from run to run and row by row whatever the number of tokens (what exactness between rollout and training
would need); how fast are they at the layer shapes of real models. Exit code 1 if a check fails.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from jetrl_bench import backends, precision, speed_linear
from jetrl_bench.config import FlowConfig
from jetrl_bench.record import write_json, write_text
from jetrl_bench.speed_linear import Shape, operands, relative

SHAPES = [Shape("check", "odd", 333, 576, 1536), Shape("check", "one token", 1, 1024, 4096)]
SHAPES += [Shape("check", "square", 512, 4096, 4096)]
TOKENS = (1, 16, 17, 128, 333)
TOLERANCE = 3e-3
"""RMS: rounding of a bf16 result is 1.7e-3, what tensor cores drop inside a block 1.3e-4."""


def products(shape: Shape, config: FlowConfig, device: str) -> dict[str, Tensor]:
    """FProp, DGrad and WGrad of one layer through the flow's own back end."""
    o = operands(shape, device)
    x, weight = o.x_TK.clone().requires_grad_(), o.weight_NK.clone().requires_grad_()
    if config.backend == "emulated":
        flow = precision.make_flow(config)
        ready = precision.prepare_weight([weight], [], flow.train_side, quantized=True, masters=(weight,))
        y = precision.Linear.apply(x, ready, flow, False, weight)
    else:
        y = backends.make_linear(config)(x, weight)
    y.backward(o.dy_TN)
    return {"FProp": y.detach().cpu(), "DGrad": x.grad.cpu(), "WGrad": weight.grad.cpu()}


def checks(device: str) -> Iterator[tuple[str, bool, str]]:
    """(name, passed, detail)."""
    for scale in ("pow2", "fp32"):
        real = FlowConfig(rollout="fp8", train="fp8", scale=scale, backend="torch")
        emulated = real.model_copy(update={"backend": "emulated"})
        for shape in SHAPES:
            name = f"{scale} scales, {shape.T} x {shape.N} x {shape.K}"
            try:
                got = products(shape, real, device)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                yield f"layouts, {name}", False, " ".join(str(error).split())[:200]
                continue
            yield f"layouts, {name}", True, "accepted"
            wanted = products(shape, emulated, "cpu")
            errors = {op: relative(got[op], wanted[op].double()) for op in got}
            detail = ", ".join(f"{op} {error:.6f}" for op, error in errors.items())
            yield f"error against emulation, {name}", max(errors.values()) < TOLERANCE, detail
            again = products(shape, real, device)
            yield f"run to run, {name}", all(torch.equal(got[op], again[op]) for op in got), "equal bits expected"
        yield _rows(real, device, scale)


def _rows(config: FlowConfig, device: str, scale: str) -> tuple[str, bool, str]:
    o = operands(Shape("check", "rows", 512, 1024, 4096), device)
    linear = backends.make_linear(config)
    with torch.no_grad():
        whole = linear(o.x_TK, o.weight_NK)
        unlike = [T for T in TOKENS if not torch.equal(linear(o.x_TK[:T].contiguous(), o.weight_NK), whole[:T])]
    detail = f"rows differ from those of 512 tokens at {unlike} tokens" if unlike else "equal bits"
    return f"rows whatever the number of tokens, {scale} scales", not unlike, detail


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for check.json and linear.{json,md}")
    args = parser.parse_args(argv)
    try:
        backends.require(FlowConfig(rollout="fp8", train="fp8", backend="torch"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = []
    for name, passed, detail in checks("cuda"):
        found.append({"check": name, "passed": passed, "detail": detail})
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {detail}", flush=True)
    names = ["bf16", "torch_pow2"]
    speed = speed_linear.measure(speed_linear.MODELS, 4096, 1, names, 5, "cuda")
    print(speed_linear.markdown(speed))
    if args.out:
        write_json(args.out / "check.json", {"device": torch.cuda.get_device_name(), "checks": found})
        write_json(args.out / "linear.json", speed)
        write_text(args.out / "linear.md", speed_linear.markdown(speed))
    return 0 if all(row["passed"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
