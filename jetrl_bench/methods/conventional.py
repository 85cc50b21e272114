"""Conventional RL: generate a whole batch, then take G optimizer steps on it (all accelerators do both in turn).

PipelineRL's baseline: the same clamped REINFORCE as in flight, so that the arms differ in the schedule alone.
"""

from jetrl_bench.config import LossConfig, Method, SyncConfig

METHOD = Method(
    sync=SyncConfig(schedule="barrier", updates_per_rollout=4),
    loss=LossConfig(anchor="rollout", surrogate="reinforce", cap=5.0, normalizer="batch", advantage="center"),
    summary="generate, then train; G optimizer steps per batch",
)
