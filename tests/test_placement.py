"""Where tensors live: what a run on a GPU puts there, checked on the meta device, which every machine has."""

import pytest
import torch

from jetrl_bench.config import FlowConfig, ModelConfig, TrainConfig
from jetrl_bench.devices import device_of
from jetrl_bench.logprobs import Batch
from jetrl_bench.loss import LossBatch
from jetrl_bench.model import Decoder
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import Completion, ReferenceEngine
from jetrl_bench.trainer import _joined, collate, round_stochastically

SHAPE = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, LossBatch) or hasattr(value, "inputs"):
        yield from tensors(vars(value))


def batch(recorded=True):
    full = torch.zeros(2, 8) if recorded else None
    rows = [Completion(i, i, 0, [1, 2], [3, 4], [-1.0, -2.0], [0, 0], "stop", full) for i in range(3)]
    return collate(rows, torch.tensor([1.0, 0.0, -1.0]))


def test_a_run_without_gpus_stays_on_the_cpu():
    assert device_of(TrainConfig()) == "cpu" and device_of(TrainConfig(gpus=1)) == "cuda"


@pytest.mark.parametrize("recorded", [True, False])
def test_every_tensor_of_a_batch_moves(recorded):
    here = batch(recorded)
    there = here.with_proximal(None).to("meta")
    found = list(tensors(there))
    assert len(found) == len(list(tensors(here))) == (3 + 4 + 1 + recorded)
    assert {t.device.type for t in found} == {"meta"}
    assert there.loss.num_sequences == 3
    assert {t.device.type for t in Batch(*here.inputs).to("meta")} == {"meta"}


def test_the_reference_engine_keeps_everything_on_its_device():
    engine = ReferenceEngine(SHAPE, 8, make_flow(FlowConfig()), max_slots=2, max_len=16, device="meta")
    found = list(tensors({k: v for k, v in vars(engine).items() if k != "_manifest"}))
    assert len(found) >= 10 and {t.device.type for t in found} == {"meta"}


def test_rotary_tables_follow_the_model():
    assert {t.device.type for t in Decoder(SHAPE, 8).to("meta").rope} == {"meta"}


def test_results_come_back_to_the_cpu_in_order():
    from jetrl_bench.trainer import Pass

    one, two = Pass(torch.ones(2), torch.zeros(2), None), Pass(torch.full((1,), 3.0), torch.zeros(1), None)
    joined = _joined([one, two])
    assert joined.logprobs_T.tolist() == [1.0, 1.0, 3.0] and joined.log_softmax_TV is None
    assert all(t.device.type == "cpu" for t in tensors(tuple(joined)))


def test_rounding_noise_is_the_cpus_on_every_device():
    generator = torch.Generator().manual_seed(0)
    assert round_stochastically(torch.ones(3, device="meta"), generator).device.type == "meta"
    again = torch.Generator().manual_seed(0)
    torch.randint(0, 1 << 16, (3,), generator=again, dtype=torch.int32)
    assert torch.equal(generator.get_state(), again.get_state())
