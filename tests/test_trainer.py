"""The trainer against an AdamW written out by hand, micro-batch invariance, masters, and the resumable state."""

import os
from dataclasses import replace

import pytest
import torch

from jetrl_bench import state
from jetrl_bench.config import (
    FlowConfig,
    LossConfig,
    Method,
    ModelConfig,
    RunSettings,
    TaskConfig,
    TrainConfig,
)
from jetrl_bench.errors import NotFinite
from jetrl_bench.model import init_model
from jetrl_bench.precision import make_flow
from jetrl_bench.rollout import Completion
from jetrl_bench.tasks import EOS_ID, VOCAB_SIZE
from jetrl_bench.trainer import Trainer, collate, round_stochastically

MODEL = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)


def make_trainer(seed=0, micro=64, flow=None, loss=None, temperature=1.0, lr=1e-3) -> Trainer:
    task = TaskConfig(min_steps=1, max_steps=2)
    settings = RunSettings(
        seed=seed, base_index=0, replicate=0, lr=lr, model=MODEL, task=task, base={"task": task}, cost={},
        train=TrainConfig(
            group_size=2, samples_per_update=4, max_tokens=8, micro_batch_sequences=micro, temperature=temperature,
            grad_clip=0.05, weight_decay=0.1,
        ),
        method=Method(flow=flow or FlowConfig(), loss=loss or LossConfig()),
    )  # fmt: skip
    return Trainer(settings, init_model(MODEL, VOCAB_SIZE, 7), make_flow(settings.method.flow))


def completions(count=5, seed=0) -> list[Completion]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, VOCAB_SIZE, (n,), generator=g).tolist()  # noqa: E731
    rows = []
    for i in range(count):
        length = 1 + int(torch.randint(0, 7, (1,), generator=g))
        rows.append(
            Completion(
                request_id=i,
                problem_id=i // 2,
                sample=i % 2,
                prompt_ids=draw(3 + i % 3),
                token_ids=draw(length),
                logprobs=(-5.5 - torch.rand(length, generator=g)).tolist(),
                versions=[0] * length,
                finish_reason="stop",
                log_softmax=None,
            )  # fmt: skip
        )
    return rows


ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0])


def gradients(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("normalizer", ["token", "sequence"])
def test_micro_batch_cuts_change_nothing(normalizer):
    batch = collate(completions(), ADVANTAGES)
    outcomes = []
    for micro in (64, 2, 1):
        trainer = make_trainer(micro=micro, loss=LossConfig(normalizer=normalizer))
        step = trainer.forward_backward(batch)
        outcomes.append((step, gradients(trainer)))
    for step, gradient in outcomes[1:]:
        assert torch.equal(step.forward.logprobs_T, outcomes[0][0].forward.logprobs_T)
        assert step.loss == pytest.approx(outcomes[0][0].loss, abs=1e-6)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=0.03, atol=2e-3 * gradient.abs().max().item())


def test_a_sequence_alone_and_among_others_has_equal_logprobs():
    rows = completions()
    trainer = make_trainer()
    together = trainer.logprobs(collate(rows, ADVANTAGES)).logprobs_T.split([len(c.token_ids) for c in rows])
    for row, among, advantage in zip(rows, together, ADVANTAGES, strict=True):
        assert torch.equal(trainer.logprobs(collate([row], advantage[None])).logprobs_T, among)


def test_first_training_pass_is_the_proximal_pass():
    batch = collate(completions(), ADVANTAGES)
    trainer = make_trainer()
    proximal = trainer.logprobs(batch, record_full=True)
    step = trainer.forward_backward(batch, record_full=True)
    assert torch.equal(step.forward.logprobs_T, proximal.logprobs_T)
    assert torch.equal(step.forward.log_softmax_TV, proximal.log_softmax_TV)


def test_masks_come_from_lengths_not_from_token_values():
    """A response that is all padding ids and end ids is trained on, token for token."""
    row = completions(1)[0]
    changes = {"token_ids": [0, 0, EOS_ID, 0], "logprobs": [-5.0] * 4, "versions": [0] * 4}
    row = replace(row, **changes)
    batch = collate([row, completions(2)[1]], torch.ones(2))
    assert batch.loss.loss_mask_T.all() and batch.lengths_B[0] == 4
    step = make_trainer().forward_backward(batch)
    assert step.valid_tokens == batch.num_tokens == 4 + len(completions(2)[1].token_ids)


def test_temperature_divides_logits_before_the_softmax():
    row = completions(1)[0]
    trainer = make_trainer(temperature=0.6)
    ours = trainer.logprobs(collate([row], torch.ones(1))).logprobs_T
    ids = torch.tensor([row.prompt_ids + row.token_ids])
    with torch.no_grad():
        logits = trainer.model(ids)[0, len(row.prompt_ids) - 1 : -1]
    plain = torch.log_softmax(logits / 0.6, -1).gather(-1, torch.tensor(row.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(ours, plain, atol=0.03, rtol=0)
    wrong = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.token_ids)[:, None])[:, 0] / 0.6
    assert (ours - wrong).abs().mean() > 0.5


def test_adamw_and_clipping_by_hand():
    """Two steps of AdamW (decoupled decay 0.1, betas .9 .95) on the clipped gradient, in fp64."""
    trainer = make_trainer()
    weights = [p.detach().double().clone() for p in trainer.model.parameters()]
    m = [torch.zeros_like(w) for w in weights]
    v = [torch.zeros_like(w) for w in weights]
    for step in (1, 2):
        trainer.forward_backward(collate(completions(seed=step), ADVANTAGES))
        grads = [p.grad.double().clone() for p in trainer.model.parameters()]
        norm = sum(g.square().sum() for g in grads).sqrt()
        assert trainer.optim_step() == step
        assert trainer.grad_norm == pytest.approx(norm.item(), rel=1e-5) and norm > 0.05
        for i, g in enumerate(grads):
            g = g * 0.05 / (norm + 1e-6)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            update = (m[i] / (1 - 0.9**step)) / ((v[i] / (1 - 0.95**step)).sqrt() + 1e-8)
            weights[i] = weights[i] * (1 - 1e-3 * 0.1) - 1e-3 * update
        for parameter, weight in zip(trainer.model.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-4, atol=1e-6)
            weight.copy_(parameter.detach())
        assert all(not p.grad.any() for p in trainer.model.parameters())


def is_bf16(x: torch.Tensor) -> bool:
    return torch.equal(x, x.bfloat16().float())


@pytest.mark.parametrize("master", ["fp32", "bf16", "bf16_sr"])
def test_masters(master):
    """Updates far below half a unit in the last place: bf16 masters lose them all, stochastic rounding keeps some."""
    trainer = make_trainer(flow=FlowConfig(master=master), lr=1e-7)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert all(is_bf16(p) for p in before) == (master != "fp32")
    trainer.forward_backward(collate(completions(), ADVANTAGES))
    trainer.optim_step()
    after = [p.detach() for p in trainer.model.parameters()]
    wide = [i for i, p in enumerate(before) if p.abs().min() > 1e-3]  # norms: all ones
    assert all(is_bf16(p) for p in after) == (master != "fp32")
    assert all(torch.equal(before[i], after[i]) == (master == "bf16") or master == "bf16_sr" for i in wide)


def test_stochastic_rounding_is_unbiased_and_picks_neighbours():
    x = torch.full((200_000,), 1.0 + 2**-7 * 0.3)  # 0.3 of the way from 1 to the next bf16 value
    y = round_stochastically(x, torch.Generator().manual_seed(0))
    assert set(y.tolist()) == {1.0, 1.0 + 2**-7}
    assert (y == 1.0).double().mean().item() == pytest.approx(0.7, abs=0.005)
    negative = round_stochastically(-x, torch.Generator().manual_seed(0))
    assert torch.equal(negative, -y)
    exact = torch.tensor([0.0, 1.0, -2.5])
    assert torch.equal(round_stochastically(exact, torch.Generator().manual_seed(1)), exact)


def test_a_nan_names_layer_and_step_and_touches_no_weight():
    trainer = make_trainer()
    with torch.no_grad():
        dict(trainer.model.named_parameters())["model.layers.0.mlp.up_proj.weight"].view(-1)[0] = float("nan")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NotFinite, match=r"optimizer step 1: NaN or inf .* qkv or gate_up, layer 0"):
        trainer.forward_backward(collate(completions(), ADVANTAGES))
    assert trainer.version == 0
    for a, b in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_an_infinite_gradient_is_refused():
    trainer = make_trainer()
    trainer.forward_backward(collate(completions(), ADVANTAGES))
    name, parameter = list(trainer.model.named_parameters())[-1]
    parameter.grad.view(-1)[0] = float("inf")
    with pytest.raises(NotFinite, match=f"optimizer step 1: NaN or inf in the gradient of {name}"):
        trainer.optim_step()
    assert trainer.version == 0


# State

IDENTITY = {"digest": "a" * 12, "base": "b" * 64, "source": "c" * 16}


def test_resume_is_exact(tmp_path):
    whole = make_trainer(flow=FlowConfig(master="bf16_sr"))
    for seed in range(4):
        whole.forward_backward(collate(completions(seed=seed), ADVANTAGES))
        whole.optim_step()
        if seed == 1:
            state.save(tmp_path, 2, {"trainer": whole.state_dict()}, IDENTITY)
    other = make_trainer(flow=FlowConfig(master="bf16_sr"))
    other.load_state_dict(state.load(tmp_path, IDENTITY)["trainer"])
    assert other.version == 2
    for seed in (2, 3):
        other.forward_backward(collate(completions(seed=seed), ADVANTAGES))
        other.optim_step()
    for a, b in zip(whole.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("key", ["digest", "base"])
def test_state_of_another_run_is_refused_in_one_line(tmp_path, key):
    state.save(tmp_path, 40, {"x": {"n": 1}}, IDENTITY)
    with pytest.raises(ValueError, match=f"its {key} is") as caught:
        state.load(tmp_path, IDENTITY | {key: "other"})
    assert "\n" not in str(caught.value) and "step-000040" in str(caught.value)
    assert state.load(tmp_path, IDENTITY) == {"x": {"n": 1}}


def test_state_of_other_source_starts_over(tmp_path, capsys):
    state.save(tmp_path, 40, {"x": {"n": 1}}, IDENTITY)
    assert state.load(tmp_path, IDENTITY | {"source": "other"}) is None
    assert "starting over" in capsys.readouterr().out


@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_kill_between_two_files_leaves_the_previous_state(tmp_path, monkeypatch, files):
    state.save(tmp_path, 1, {"a": {"n": 1}, "b": {"n": 1}}, IDENTITY)
    written = []
    save = torch.save

    def dying(value, file):
        if len(written) == files:
            raise KeyboardInterrupt
        written.append(value)
        save(value, file)

    monkeypatch.setattr(torch, "save", dying)
    if files == 2:
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        state.save(tmp_path, 2, {"a": {"n": 2}, "b": {"n": 2}}, IDENTITY)
    monkeypatch.undo()
    assert state.load(tmp_path, IDENTITY) == {"a": {"n": 1}, "b": {"n": 1}}
    state.save(tmp_path, 2, {"a": {"n": 2}, "b": {"n": 2}}, IDENTITY)
    assert state.load(tmp_path, IDENTITY)["a"] == {"n": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002"]


def test_without_a_done_marker_a_state_does_not_count(tmp_path):
    state.save(tmp_path, 1, {"a": {"n": 1}}, IDENTITY)
    folder = tmp_path / "step-000009"
    folder.mkdir()
    torch.save({"n": 9}, folder / "a.pt")
    assert state.load(tmp_path, IDENTITY) == {"a": {"n": 1}}


def test_attempts_are_counted(tmp_path):
    assert [state.next_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_named_weights_are_the_flow_s_export():
    trainer = make_trainer()
    sent = dict(trainer.named_weights())
    assert set(sent) >= {name for name, _ in trainer.model.named_parameters()}
    with torch.no_grad():
        next(iter(trainer.model.parameters())).add_(1.0)
    again = dict(trainer.named_weights())
    changed = [name for name in sent if not torch.equal(sent[name], again[name])]
    assert changed == [next(iter(trainer.model.named_parameters()))[0]]


def test_only_valid_response_tokens_are_counted_as_work():
    """Two answers of 3 and 9 tokens, padded to 9, are 12 tokens, not 18."""
    first, second = completions(2)
    answers = [
        replace(c, token_ids=[5] * n, logprobs=[-1.0] * n, versions=[0] * n) for c, n in ((first, 3), (second, 9))
    ]
    batch = collate(answers, torch.tensor([1.0, -1.0]))
    assert batch.num_tokens == 12
    assert batch.inputs.token_ids.shape[1] == max(len(c.prompt_ids) + len(c.token_ids) for c in answers)
