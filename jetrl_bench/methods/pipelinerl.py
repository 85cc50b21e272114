"""PipelineRL (arXiv 2509.19128): weights change in flight, while sequences are being generated; any precision flow.

REINFORCE with the clamped weight min(pi / mu, 5) of the paper, mu being the engine's log-probs, so the denominator is
exact even for sequences written by several policies.
"""

from jetrl_bench.config import LossConfig, Method, SyncConfig

METHOD = Method(
    sync=SyncConfig(schedule="inflight", updates_per_rollout=1, kv="keep", max_lag=8),
    loss=LossConfig(anchor="rollout", surrogate="reinforce", cap=5.0, normalizer="batch", advantage="center"),
    summary="in-flight weight updates, KV cache kept",
)
