"""jetrl-bench: reinforcement learning of language models in low precision, measured reproducibly."""

__version__ = "0.1.0"
