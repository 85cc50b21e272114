"""Three small policies and an independent account of what an engine must say of them: transformers in fp32."""

import torch

from jetrl_bench.checkpoint import hf_config
from jetrl_bench.config import ModelConfig
from jetrl_bench.conformance import Subject
from jetrl_bench.model import Decoder, init_model

CFG = ModelConfig(max_position=256)
VOCAB = 304
SPREAD = 4.0
"""Matrices are scaled up, so that policies differ by far more than number formats do."""


def policy(seed: int, cfg: ModelConfig = CFG) -> Decoder:
    model = init_model(cfg, VOCAB, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(SPREAD)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


class Policies:
    """Policies 0, 1, 2 of one shape (their weights are bf16 values), and their log-probs by transformers."""

    def __init__(self, cfg: ModelConfig = CFG):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.cfg = cfg
        self.models = [policy(seed, cfg) for seed in range(3)]
        raw = hf_config(cfg, VOCAB)
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        self.hf = []
        for model in self.models:
            copy = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
            missing = copy.load_state_dict(model.state_dict(), strict=False).missing_keys
            assert set(missing) <= {"lm_head.weight"}
            copy.tie_weights()
            self.hf.append(copy)

    @torch.no_grad()
    def logprobs(self, policies, prompt, response, temperature, kv) -> list[float]:
        """See conformance.Subject.logprobs: runs of one policy, each on the cache that the one before left."""
        from transformers import DynamicCache

        ids = torch.tensor([prompt + response])
        cache, fed, out, i = DynamicCache(), 0, [], 0
        while i < len(policies):
            j = i
            while j < len(policies) and policies[j] == policies[i]:
                j += 1
            if kv == "recompute" and i:
                cache, fed = DynamicCache(), 0
            end = len(prompt) + j - 1
            logits = self.hf[policies[i]](ids[:, fed:end], past_key_values=cache).logits[0, i - j :]
            targets = ids[0, len(prompt) + i : len(prompt) + j, None]
            out += (logits / temperature).log_softmax(-1).gather(-1, targets)[:, 0].tolist()
            fed, i = end, j
        return out

    def named(self, index: int, dtype=torch.float32):
        return [(name, p.detach().to(dtype)) for name, p in self.models[index].named_parameters()]

    def subject(self, make, *, dtype, tolerance: float, stepwise: bool = True) -> Subject:
        return Subject(make, lambda n: self.named(n, dtype), self.logprobs, VOCAB, tolerance, stepwise)
