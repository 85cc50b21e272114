"""The parts of one training run, put together from its settings, and their common state."""

from pathlib import Path

from jetrl_bench.checkpoint import load_hf
from jetrl_bench.clock import Clock, Units
from jetrl_bench.config import RunSettings
from jetrl_bench.devices import device_of
from jetrl_bench.learner import Learner
from jetrl_bench.model import Decoder
from jetrl_bench.precision import make_flow
from jetrl_bench.record import StepRow, TimingRow
from jetrl_bench.rollout import ReferenceEngine
from jetrl_bench.schedule import Ledger, Submitter, best_split, expected_lengths
from jetrl_bench.tasks import load_tokenizer, make_task
from jetrl_bench.trainer import Trainer
from jetrl_bench.weight_sync import make_sync

EXACT_KL_VOCABULARY = 1024
"""Largest vocabulary for which the engine records whole distributions, so that KL(mu || pi) is exact."""


class Run:
    def __init__(self, settings: RunSettings, base: Path, scratch: Path):
        """base: folder of the warm-up checkpoint; scratch: a folder that an engine may write in."""
        train, self.settings = settings.train, settings
        config, vocab_size, weights = load_hf(base)
        if config != settings.model:
            raise ValueError(f"{base}/config.json: the checkpoint is not the model of the settings (key model)")
        self.task = make_task(settings.task, load_tokenizer(base))
        if self.task.longest_response() > train.max_tokens:
            raise ValueError(
                f"train.max_tokens {train.max_tokens} is below the {self.task.longest_response()} tokens of task "
                f"{self.task.name}'s longest response"
            )
        model = Decoder(config, vocab_size)
        model.load_state_dict(weights)
        device = device_of(train)
        model.to(device)
        flow = make_flow(settings.method.flow)
        self.trainer = Trainer(settings, model, flow)
        self.clock, self.ledger = Clock(), Ledger(train.group_size)
        self.split = best_split(settings, expected_lengths(self.task, train.max_tokens))
        self.sync = make_sync(settings.method.sync, train, Units(settings.cost), self.clock, self.split)
        record_full = vocab_size <= EXACT_KL_VOCABULARY and train.engine == "reference"
        max_len = min(self.task.longest_prompt(), train.max_prompt_tokens) + train.max_tokens
        if train.engine == "vllm":
            from jetrl_bench.rollout_vllm import make_vllm_engine

            self.engine = make_vllm_engine(
                config, vocab_size, flow, model.named_parameters(), version=0, max_slots=self.sync.max_slots,
                max_len=max_len, folder=Path(scratch) / "engine",
            )  # fmt: skip
        else:
            self.engine = ReferenceEngine(
                config,
                vocab_size,
                flow,
                max_slots=self.sync.max_slots,
                max_len=max_len,
                record_full=record_full,
                device=device,
            )
            self.engine.load_weights(self.trainer.named_weights(), version=0, kv="keep")
        self.submitter = Submitter(self.task, train, settings.seed, self.engine, self.ledger)
        self.learner = Learner(
            settings, self.task, self.trainer, self.engine, self.sync, self.ledger, self.clock, record_full=record_full
        )
        self.rows: list[StepRow] = []
        self.timing: list[TimingRow] = []
        self.saved_at = 0

    def save_is_due(self) -> bool:
        """Every state_every optimizer steps; an engine that cannot save running sequences is drained first."""
        due = self.trainer.version - self.saved_at >= self.settings.train.state_every
        self.sync.draining = due and not self.can_save()
        return due

    def can_save(self) -> bool:
        return self.engine.resume == "exact" or not self.engine.num_unfinished()

    def _parts(self) -> dict:
        names = ("trainer", "engine", "clock", "ledger", "sync", "submitter", "learner")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict:
        self.saved_at = self.trainer.version
        state = {name: part.state_dict() for name, part in self._parts().items()}
        rows = {name: [row.model_dump(mode="json") for row in getattr(self, name)] for name in ("rows", "timing")}
        return state | rows

    def load_state_dict(self, state: dict) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.rows = [StepRow.model_validate(row) for row in state["rows"]]
        self.timing = [TimingRow.model_validate(row) for row in state["timing"]]
        self.saved_at = self.trainer.version
