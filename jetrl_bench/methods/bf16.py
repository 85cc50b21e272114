"""BF16 rollout and BF16 training: the baseline. PPO ratio (clip 0.2) against the trainer's own recomputed log-probs."""

from jetrl_bench.config import Method

METHOD = Method(summary="BF16 training, BF16 rollout")
