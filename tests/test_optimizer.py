"""AdamW without torch's compiler: the same bits and state as torch's own, and no import of it."""

import subprocess
import sys

import torch

from jetrl_bench.optimizer import AdamW


def steps(optimizer, parameters, first: int, last: int) -> list[torch.Tensor]:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(bool((p.grad == 0).all()) for p in parameters)
    return [p.detach().clone() for p in parameters]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (64,), (33, 16))]


def test_the_bits_and_the_state_are_torchs():
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": True}
    ours, theirs = parameters(), parameters()
    a, b = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    for x, y in zip(steps(a, ours, 0, 5), steps(b, theirs, 0, 5)):
        assert torch.equal(x, y)
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]


def test_each_continues_from_the_others_state():
    options = {"lr": 3e-3, "foreach": True}
    ours, theirs = parameters(), parameters()
    a, b = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    steps(a, ours, 0, 3)
    steps(b, theirs, 0, 3)
    fresh_a, fresh_b = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    fresh_a.load_state_dict(b.state_dict())
    fresh_b.load_state_dict(a.state_dict())
    for x, y in zip(steps(fresh_a, ours, 3, 6), steps(fresh_b, theirs, 3, 6)):
        assert torch.equal(x, y)


SCRIPT = """
import sys
import torch
from jetrl_bench.optimizer import AdamW
p = torch.nn.Parameter(torch.ones(4))
optimizer = AdamW([p], lr=1e-3, foreach=True)
p.sum().backward()
torch.nn.utils.clip_grad_norm_([p], 1.0)
optimizer.step()
optimizer.zero_grad(set_to_none=False)
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


def test_a_step_does_not_import_the_compiler():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
