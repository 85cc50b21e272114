"""BF16 training, FP8 rollout, repaired by truncated importance sampling (TIS; fengyao.notion.site/off-policy-rl).

Every token's loss is multiplied by min(exp(proximal - rollout), cap), detached; cap 2 as in verl's FP8 recipe.
"""

from jetrl_bench.config import FlowConfig, LossConfig, Method

METHOD = Method(
    flow=FlowConfig(rollout="fp8", train="bf16"),
    loss=LossConfig(anchor="proximal", correction="truncate", level="token", cap=2.0, surrogate="ppo"),
    summary="BF16 training, FP8 rollout, token-level TIS",
)
