"""Unified FP8 as real stacks run it: one precision on both sides, other kernels in training than in the rollout.

A last-bit difference of the attention flips FP8 roundings further on, so the mismatch is small but not zero.
"""

from jetrl_bench.config import FlowConfig, Method

METHOD = Method(
    flow=FlowConfig(rollout="fp8", train="fp8", train_kernels="other"), summary="unified FP8, other kernels"
)
