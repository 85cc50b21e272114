"""In how many codes do two engines' scale rules differ? `python -m jetrl_bench.scale_rules` prints the table.

Two effects are told apart. With fp32 scales, engines that divide and engines that multiply by a reciprocal round some
quotients to different codes, at any amax. With power-of-two scales they never differ, until amax falls below an
engine's floor (vLLM 4.5e-8, DeepGEMM 1e-4): then its scale stops shrinking and codes lose bits, to zero in the end.
"""

import sys

import torch

from jetrl_bench.fp8 import RULES, spec
from jetrl_bench.quantizer import quantize_blocks

POW2 = ["te_pow2", "vllm_ue8m0", "deepgemm_ue8m0"]
FP32 = ["vllm_fp32", "deepgemm_fp32", "te_fp32", "torchao"]
GROUP = 128


def activations(groups: int, seed: int = 0) -> torch.Tensor:
    """bf16 [groups, 128]: normal values, each group with a magnitude of its own over six octaves."""
    generator = torch.Generator().manual_seed(seed)
    spread = 2.0 ** (6 * torch.rand(groups, 1, generator=generator) - 3)
    return (torch.randn(groups, GROUP, generator=generator) * spread).bfloat16()


def with_amax(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """The same values, each group's amax moved into [2^exponent, 2^(exponent + 1)) by a power of two."""
    shift = exponent - torch.floor(torch.log2(x.abs().amax(1, keepdim=True).double()))
    return (x.double() * 2.0**shift).bfloat16()


def codes(x: torch.Tensor, rule: str, format: str = "e4m3") -> tuple[torch.Tensor, torch.Tensor]:
    """(codes' values, dequantised values in fp64)."""
    values, scales = quantize_blocks(x, (1, GROUP), spec(format, rule=rule), dequantize=False, want_scales=True)
    return values, values.double() * scales.double()


def differing(x: torch.Tensor, rule: str, reference: str) -> tuple[float, float]:
    """Shares of codes, and of dequantised values, that differ between two rules."""
    (codes_a, values_a), (codes_b, values_b) = codes(x, rule), codes(x, reference)
    return float((codes_a != codes_b).double().mean()), float((values_a != values_b).double().mean())


def relative_error(x: torch.Tensor, rule: str) -> float:
    """RMS of the quantisation error over RMS of the values."""
    _, dequantised = codes(x, rule)
    return float(((dequantised - x.double()).square().mean() / x.double().square().mean()).sqrt())


def table(groups: int = 8192) -> str:
    """Markdown: fp32-scale rules against each other, then power-of-two rules by amax."""
    x = activations(groups)
    lines = ["| rule | scale | codes that differ from `vllm_fp32` | relative RMS error |", "|---|---|---|---|"]
    for rule in [*FP32, *POW2]:
        share = f"{differing(x, rule, 'vllm_fp32')[0]:.6f}" if rule in FP32 else "another scale"
        lines.append(f"| `{rule}` | {RULES[rule].scale} | {share} | {relative_error(x, rule):.5f} |")
    head = [f"`{rule}`: codes differ | values differ | error" for rule in POW2[1:]]
    lines += ["", "| amax | " + " | ".join([f"`{POW2[0]}`: error", *head]) + " |", "|---" * 8 + "|"]
    small = activations(groups // 8, seed=1)
    for exponent in [0, -10, -13, -14, -15, -16, -20, -24, -25, -26, -28, -30, -32, -36, -38, -40]:
        moved = with_amax(small, exponent)
        cells = [f"{relative_error(moved, POW2[0]):.4f}"]
        for rule in POW2[1:]:
            cells += [f"{share:.4f}" for share in differing(moved, rule, POW2[0])]
            cells.append(f"{relative_error(moved, rule):.4f}")
        lines.append(f"| 2^{exponent} ({2.0**exponent:.1e}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
