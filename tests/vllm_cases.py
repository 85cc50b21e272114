"""Engines of the real vLLM for tests, started as seldom as the tests allow."""

import torch
from engine_cases import CFG, VOCAB

from jetrl_bench.config import FlowConfig
from jetrl_bench.precision import make_flow

FP32 = 1e-4
"""Bound on every sampled token's log-prob in fp32; measured below 1e-5."""
FRESH = ("starts_empty", "warm_equals_cold", "closes")
"""Checks that must see an engine which has never held other weights, or which close it for good."""


def start(kind, folder, *, cfg=CFG, flow=None, **options):
    flow = flow or make_flow(FlowConfig(rollout="fp32", train="fp32"))
    return kind(cfg, VOCAB, flow, max_slots=8, max_len=128, folder=folder, **options)


class Pool:
    """Engines lent in turn, because starting one takes seconds. Each looks like one that was given no weights yet; one
    that comes back poisoned, or with requests, is replaced."""

    def __init__(self, *starts):
        self.starts, self.engines, self.turn = starts, [None] * len(starts), 0

    def __call__(self):
        i = self.turn % len(self.starts)
        self.turn += 1
        engine = self.engines[i]
        if engine is None or engine.poisoned or engine.num_unfinished():
            self.close(i)
            engine = self.engines[i] = self.starts[i]()
        engine.policy_version = -1
        return Borrowed(engine)

    def close(self, i: int):
        if self.engines[i] is not None:
            self.engines[i].close()


class Borrowed:
    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def close(self):
        """Its owner closes it."""


def subject_of(policies, make, **options):
    return policies.subject(make, dtype=torch.float32, tolerance=FP32, **options)


def third_bucket(engine, act):
    """Call `act(original)` in place of the third bucket's delivery."""
    original, count = engine._rpc, [0]

    def rpc(method, *args, **kwargs):
        if method == "update_weights":
            count[0] += 1
            if count[0] == 3:
                return act(lambda **changes: original(method, *args, **{**kwargs, **changes}), kwargs)
        return original(method, *args, **kwargs)

    engine._rpc = rpc
