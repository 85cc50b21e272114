"""From a batch of complete groups to optimizer steps and one StepRow."""

import torch

from jetrl_bench.clock import Clock
from jetrl_bench.config import RunSettings
from jetrl_bench.loss import advantages, needs_proximal
from jetrl_bench.progress import Stopwatch
from jetrl_bench.record import StepRow
from jetrl_bench.schedule import Group, Ledger
from jetrl_bench.seeds import seed_of
from jetrl_bench.step_row import Taken, step_row
from jetrl_bench.tasks import Task
from jetrl_bench.trainer import Trainer, collate


class Learner:
    def __init__(
        self, settings: RunSettings, task: Task, trainer: Trainer, engine, sync, ledger: Ledger, clock: Clock, *,
        record_full: bool,
    ):  # fmt: skip
        self.settings, self.task, self.trainer, self.engine = settings, task, trainer, engine
        self.sync, self.ledger, self.clock, self.record_full = sync, ledger, clock, record_full
        self.samples = 0
        """Sequences trained on so far."""
        self._generated = 0

    def learn(self, rollout_step: int, groups: list[Group], watch: Stopwatch) -> StepRow:
        """Score a batch, shuffle it, take its optimizer steps of samples_per_update sequences each."""
        loss, train, trainer = self.settings.method.loss, self.settings.train, self.trainer
        order = [(group, group.completions[sample]) for group in groups for sample in range(train.group_size)]
        problems = {g.problem_id: self.task.problem("train", g.problem_id, self.settings.seed) for g in groups}
        rewards_B = torch.tensor([self.task.verify(problems[g.problem_id], c).reward for g, c in order])
        group_ids_B = torch.tensor([group.problem_id for group, _ in order])
        advantages_B = advantages(rewards_B, group_ids_B, loss.advantage)
        shuffle = torch.Generator().manual_seed(seed_of(self.settings.seed, "shuffle", rollout_step))
        parts = torch.randperm(len(order), generator=shuffle).split(train.samples_per_update)
        batches = [collate([order[i][1] for i in part.tolist()], advantages_B[part]) for part in parts]

        # No step was taken yet when the first one's forward pass runs, so that pass is its proximal one, unless a mask
        # must be known before it. Where the loss reads no proximal log-probs, the others need none.
        proximal = [None] * len(batches)
        if needs_proximal(loss):
            first = 0 if loss.correction == "mask" else 1
            proximal[first:] = [trainer.logprobs(batch, record_full=self.record_full) for batch in batches[first:]]
        watch.lap("logprob")

        taken = []
        for index, (batch, own) in enumerate(zip(batches, proximal, strict=True)):
            version, reuse = trainer.version, index == 0 and own is None
            step = trainer.forward_backward(batch.with_proximal(own), record_full=self.record_full and reuse)
            trainer.optim_step()
            taken.append(Taken(batch, step.forward if reuse else own, step, version, trainer.grad_norm))
            self.sync.after_optim_step(trainer, self.engine, trainer.version, batch.num_tokens)
            self.ledger.trained_tokens += step.valid_tokens
            self.ledger.filtered_tokens += batch.num_tokens - step.valid_tokens
        self.samples += len(order)
        self._check(taken)
        watch.lap("train")
        watch.train_tokens = sum(batch.num_tokens for batch in batches)
        watch.rollout_tokens = self.ledger.generated_tokens - self._generated
        self._generated = self.ledger.generated_tokens
        return step_row(
            rollout_step,
            taken,
            rewards_B,
            group_ids_B,
            sum(completion.finish_reason == "length" for _, completion in order),
            ledger=self.ledger,
            clock=self.clock,
            samples=self.samples,
            cap=loss.cap,
            contains_lag=self.sync.contains_lag,
        )

    def _check(self, taken: list[Taken]) -> None:
        """Conservation of tokens, and the lag bound."""
        unfinished = self.ledger.in_flight_tokens() - self.ledger.waiting_tokens()
        most = self.engine.num_unfinished() * self.settings.train.max_tokens
        assert 0 <= unfinished <= most, f"{unfinished} tokens are in no sequence, trained, filtered or dropped"
        bound = self.settings.method.sync.max_lag
        if bound is not None:
            worst = max(int((t.version - t.batch.versions_T).max()) for t in taken)
            assert worst <= bound, f"lag {worst} is above max_lag {bound}"

    def state_dict(self) -> dict:
        return {"samples": self.samples, "generated": self._generated}

    def load_state_dict(self, state: dict) -> None:
        self.samples, self._generated = state["samples"], state["generated"]
