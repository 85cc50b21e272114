"""BF16 training with an FP8 rollout, bare: the uncorrected practice that Jet-RL (arXiv 2601.14243) reports to collapse.

The PPO ratio is formed against log-probs that the trainer recomputes in its own BF16 flow, so nothing in the loss
knows that another distribution was sampled from. The engine's log-probs in the ratio would themselves be a correction.
"""

from jetrl_bench.config import FlowConfig, LossConfig, Method

METHOD = Method(
    flow=FlowConfig(rollout="fp8", train="bf16"),
    loss=LossConfig(anchor="proximal", correction="none", surrogate="ppo"),
    summary="BF16 training, FP8 rollout, no correction",
)
