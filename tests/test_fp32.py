"""The fp32 flow against transformers and the plain decoder: what an engine that computes in fp32 is compared with."""

import pytest
import torch
from engine_cases import CFG, VOCAB, Policies, policy
from test_model import SHAPES, random_batch, random_model

from jetrl_bench import check, conformance
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.logprobs import sequence_logprobs
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import ReferenceEngine

FP32 = FlowConfig(rollout="fp32", train="fp32")


@pytest.fixture(scope="module")
def policies():
    torch.set_num_threads(1)
    return Policies()


def engine():
    return ReferenceEngine(CFG, VOCAB, make_flow(FP32), max_slots=8, max_len=128)


def test_every_sampled_token_has_transformers_logprob(policies):
    """Within 1e-5, in prefill and decode, on policies whose log-probs spread over many nats."""
    subject = policies.subject(engine, dtype=torch.float32, tolerance=1e-5)
    conformance.CHECKS["logprobs_are_the_sampling_distributions"](subject)


@pytest.mark.parametrize("name", ["swaps_on_the_kept_cache", "swaps_and_recomputes", "saves_and_resumes"])
def test_the_fp32_engine_conforms(policies, name):
    conformance.CHECKS[name](policies.subject(engine, dtype=torch.float32, tolerance=1e-4))


@pytest.mark.parametrize("batch_size", [1, 5, 67])
def test_rollout_and_training_are_bit_equal(batch_size):
    gap, tokens, cuts = check.exactness(FP32, ModelConfig(), batch_size=batch_size, max_tokens=12, seed=0)
    assert gap == 0 and cuts and tokens


@pytest.mark.parametrize("kernels", ["same", "other"])
@pytest.mark.parametrize("arch", SHAPES)
def test_logprobs_and_gradients_are_the_plain_decoders(arch, kernels):
    model, batch = random_model(SHAPES[arch]), random_batch()
    got = sequence_logprobs(model, make_flow(FP32), batch, 0.7, kernels)[0]
    got.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    logp = (model(batch.token_ids)[:, :-1] / 0.7).log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
    column = torch.arange(1, batch.token_ids.shape[1])
    expected = logp[(column >= batch.prompt_lens[:, None]) & (column < batch.total_lens[:, None])]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_weights_arrive_unrounded_and_other_dtypes_are_refused():
    flow = make_flow(FP32)
    model = policy(0)
    with torch.no_grad():
        model.model.norm.weight.fill_(1 + 2**-20)
    assert dict(flow.export(model.named_parameters()))["model.norm.weight"][0] == 1 + 2**-20
    bf16 = make_flow(FlowConfig()).export(model.named_parameters())
    with pytest.raises(ValueError, match=r"is torch.bfloat16, expected torch.float32"):
        engine().load_weights(bf16, version=0, kv="keep")
    assert set(flow.describe().values()) == {"fp32", "same", "emulated", "yes, by construction"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout": "fp32"}, "fp32 is one setting of both sides"),
        ({"rollout": "fp8", "train": "fp32"}, "fp32 is one setting of both sides"),
        ({"rollout": "fp32", "train": "fp32", "kv_cache": "fp8"}, "kv_cache 'fp8' has no place in an fp32 flow"),
    ],
)
def test_half_an_fp32_flow_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        FlowConfig(**settings)
