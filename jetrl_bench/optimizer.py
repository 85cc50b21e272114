"""torch's AdamW without the import of torch's compiler.

Optimizer's methods are wrapped in guards that matter inside torch.compile only, and the first call of a guard imports
torch._dynamo: 1.2 CPU seconds of every training job, for nothing. The methods below are the same ones, unwrapped.
"""

import inspect

import torch
from torch.optim import Optimizer


class AdamW(torch.optim.AdamW):
    """Same arithmetic, bits and state as torch.optim.AdamW."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
