"""Unified FP8 with one kernel set: rollout and training run the same quantised operators, bit for bit.

Jet-RL (arXiv 2601.14243, section 4) asks that the rollout's precision graph be a subgraph of training's forward graph;
here the kernels agree too, so the log-probs of unchanged weights are equal to the last bit.
"""

from jetrl_bench.config import FlowConfig, Method

METHOD = Method(flow=FlowConfig(rollout="fp8", train="fp8", train_kernels="same"), summary="unified FP8, same kernels")
