"""Concurrent generation and training, one batch apart: the next batch is generated while this one is trained on.

Weights change only between rollout batches; the loss is the in-flight one, for a like-for-like comparison.
"""

from jetrl_bench.config import LossConfig, Method, SyncConfig

METHOD = Method(
    sync=SyncConfig(schedule="concurrent", updates_per_rollout=1),
    loss=LossConfig(anchor="rollout", surrogate="reinforce", cap=5.0, normalizer="batch", advantage="center"),
    summary="generation and training overlap, one batch apart",
)
