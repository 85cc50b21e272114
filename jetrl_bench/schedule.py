"""Driving an engine and a trainer through a schedule: `batches` is the loop that every method runs, model or no model.

`Ledger` knows where every group and every token is. `LengthEngine` is an engine without a model whose responses have
known lengths; with it a whole run's schedule costs milliseconds, and `best_split` finds how many accelerators should
generate before the run starts. Deterministic: it depends on the settings alone, not on the seed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from jetrl_bench.clock import Clock, Units
from jetrl_bench.config import RunSettings, TrainConfig
from jetrl_bench.errors import WorkerDied
from jetrl_bench.rollout import Completion, Request
from jetrl_bench.seeds import seed_of
from jetrl_bench.tasks import Problem, Task
from jetrl_bench.weight_sync import WeightSync, make_sync


@dataclass
class Group:
    """All samples of one problem."""

    problem_id: int
    version: int
    """The engine's version at submission: no token of the group is older."""
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass
class Ledger:
    """Every group between submission and training, and every token since the start of the run."""

    group_size: int
    running: dict[int, Group] = field(default_factory=dict)
    finished: deque[Group] = field(default_factory=deque)
    """Complete groups that wait for the trainer, in order of completion."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    filtered_tokens: int = 0
    """Tokens that the loss's mask rejected."""
    dropped_tokens: int = 0

    @property
    def live(self) -> int:
        return len(self.running) + len(self.finished)

    def submit(self, problem_id: int, version: int) -> None:
        self.running[problem_id] = Group(problem_id, version)

    def collect(self, completions: list[Completion]) -> None:
        for completion in completions:
            group = self.running[completion.problem_id]
            assert completion.sample not in group.completions, completion.request_id
            group.completions[completion.sample] = completion
            if len(group.completions) == self.group_size:
                self.finished.append(self.running.pop(completion.problem_id))

    def take(self, count: int) -> list[Group]:
        return [self.finished.popleft() for _ in range(count)]

    def waiting_tokens(self) -> int:
        """Tokens of completed responses that the trainer has not taken."""
        groups = [*self.running.values(), *self.finished]
        return sum(len(c.token_ids) for group in groups for c in group.completions.values())

    def in_flight_tokens(self) -> int:
        """Generated = trained + filtered + dropped + in flight."""
        return self.generated_tokens - self.trained_tokens - self.filtered_tokens - self.dropped_tokens

    def state_dict(self) -> dict:
        state = {name: value for name, value in vars(self).items() if name not in ("running", "finished")}
        for name, groups in (("running", self.running.values()), ("finished", self.finished)):
            state[name] = [
                (
                    g.problem_id,
                    g.version,
                    [vars(c) if hasattr(c, "__dict__") else asdict(c) for c in g.completions.values()],
                )
                for g in groups
            ]
        return state

    def load_state_dict(self, state: dict) -> None:
        for name, value in state.items():
            if name not in ("running", "finished"):
                setattr(self, name, value)
        groups = {
            name: [Group(i, v, {c["sample"]: Completion(**c) for c in rows}) for i, v, rows in state[name]]
            for name in ("running", "finished")
        }
        self.running = {group.problem_id: group for group in groups["running"]}
        self.finished = deque(groups["finished"])


class Submitter:
    """Hands the problems of a seed to the engine, in order, each once; the next one is a cursor in the run's state."""

    def __init__(self, task: Task, train: TrainConfig, seed: int, engine, ledger: Ledger):
        self.task, self.train, self.seed, self.engine, self.ledger = task, train, seed, engine, ledger
        self.next_problem = 0
        self.dropped: list[str] = []
        """Names of problems whose prompt is over the limit."""

    def submit(self) -> None:
        problem, prompt = self._next()
        self.ledger.submit(problem.problem_id, self.engine.policy_version)
        for sample in range(self.train.group_size):
            self.engine.add(
                Request(
                    request_id=problem.problem_id * self.train.group_size + sample,
                    problem_id=problem.problem_id,
                    sample=sample,
                    token_ids=prompt,
                    max_tokens=self.train.max_tokens,
                    temperature=self.train.temperature,
                    seed=seed_of(self.seed, "rollout", problem.problem_id, sample),
                    stop_ids=self.task.stop_ids,
                )
            )

    def _next(self) -> tuple[Problem, list[int]]:
        for _ in range(1000):
            problem = self.task.problem("train", self.next_problem, self.seed)
            self.next_problem += 1
            prompt = self.task.prompt(problem)
            if len(prompt) <= self.train.max_prompt_tokens:
                return problem, prompt
            self.dropped.append(problem.name)
        raise ValueError(f"train.max_prompt_tokens {self.train.max_prompt_tokens}: 1000 prompts in a row are longer")

    def state_dict(self) -> dict:
        return {"next_problem": self.next_problem, "dropped": list(self.dropped)}

    def load_state_dict(self, state: dict) -> None:
        self.next_problem, self.dropped = state["next_problem"], list(state["dropped"])


def batches(sync: WeightSync, engine, trainer, ledger: Ledger, submit: Callable[[], None]) -> Iterator[list[Group]]:
    """Run the engine and yield each batch of complete groups that the trainer takes, for ever.

    The caller takes its optimizer steps on a batch, calling sync.after_optim_step after each, before it asks for the
    next. `submit()` hands the next problem's requests to engine and ledger. With sync.draining set, an empty batch is
    yielded once nothing runs (the moment at which an engine that cannot save its KV cache may be saved). All state is
    in the arguments: a new call goes on where the last one stopped.
    """
    while True:
        sync.between_steps(trainer, engine)
        if sync.draining and not engine.num_unfinished():
            sync.draining = False
            yield []
        if sync.may_step(engine, ledger, trainer.version):
            sync.before_batch(trainer, engine)
            yield ledger.take(sync.batch_groups)
            continue
        for _ in range(sync.admit(engine, ledger, trainer.version)):
            submit()
        decoding = min(engine.num_unfinished(), sync.max_slots)
        if decoding:
            try:
                completions = engine.step()
            except Exception as error:
                raise WorkerDied(f"the rollout engine died at version {engine.policy_version}: {error}") from error
            ledger.generated_tokens += decoding
            ledger.collect(completions)
        sync.decoded(decoding)


class LengthEngine:
    """An engine without a model: a response has max_tokens tokens, one a step, each stamped with the version."""

    resume = "exact"

    def __init__(self, max_slots: int):
        self.max_slots, self.policy_version = max_slots, 0
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[Request, int]] = []
        """Request and the step at which it ends."""
        self.history: list[int] = []
        """The version of every decode step."""

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Completion]:
        now = len(self.history)
        while self.waiting and len(self.running) < self.max_slots:
            request = self.waiting.popleft()
            self.running.append((request, now + request.max_tokens))
        self.history.append(self.policy_version)
        done = [request for request, end in self.running if end == now + 1]
        if done:
            self.running = [entry for entry in self.running if entry[1] > now + 1]
        return [self._completion(request) for request in done]

    def _completion(self, request: Request) -> Completion:
        length = request.max_tokens
        return Completion(
            request_id=request.request_id,
            problem_id=request.problem_id,
            sample=request.sample,
            prompt_ids=request.token_ids,
            token_ids=[0] * length,
            logprobs=[0.0] * length,
            versions=self.history[len(self.history) - length :],
            finish_reason="stop",
            log_softmax=None,
        )

    def load_weights(self, named, *, version: int, kv: str) -> None:
        self.policy_version = version

    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def num_running(self) -> int:
        return len(self.running)


class _NullTrainer:
    version = 0

    def named_weights(self):
        return ()


def dry_run(settings: RunSettings, split: tuple[int, int], lengths: list[int], optimizer_steps: int) -> Clock:
    """The clock after `optimizer_steps` of a schedule whose n-th problem has responses of lengths[n] tokens."""
    train, clock = settings.train, Clock()
    sync = make_sync(settings.method.sync, train, Units(settings.cost), clock, split)
    engine, ledger, trainer = LengthEngine(sync.max_slots), Ledger(train.group_size), _NullTrainer()
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        length = lengths[submitted % len(lengths)]
        ledger.submit(submitted, engine.policy_version)
        for sample in range(train.group_size):
            engine.add(Request(submitted * train.group_size + sample, submitted, sample, [], length, 1.0, 0, ()))
        submitted += 1

    for batch in batches(sync, engine, trainer, ledger, submit):
        for start in range(0, len(batch), sync.step_groups):
            groups = batch[start : start + sync.step_groups]
            trainer.version += 1
            tokens = sum(len(c.token_ids) for group in groups for c in group.completions.values())
            sync.after_optim_step(trainer, engine, trainer.version, tokens)
        if trainer.version >= optimizer_steps:
            return clock
    raise AssertionError


def expected_lengths(task: Task, max_tokens: int, count: int = 512) -> list[int]:
    """Response lengths of a fixed stream of problems, the same for every seed."""
    return [min(task.response_tokens(problem), max_tokens) for problem in task.problems("train", count, 0)]


def best_split(settings: RunSettings, lengths: list[int]) -> tuple[int, int]:
    """(generating, training) accelerators: all for both where they alternate, else the fastest split of a dry run."""
    cost, sync = settings.cost, settings.method.sync
    if sync.schedule == "barrier":
        return cost.accelerators, cost.accelerators
    if cost.generation_accelerators is not None:
        if cost.generation_accelerators >= cost.accelerators:
            raise ValueError(
                f"cost.generation_accelerators {cost.generation_accelerators} leaves none of {cost.accelerators} to "
                "train"
            )
        return cost.generation_accelerators, cost.accelerators - cost.generation_accelerators
    steps = max(32 // sync.updates_per_rollout, 2) * sync.updates_per_rollout
    splits = [(count, cost.accelerators - count) for count in range(1, cost.accelerators)]
    return min(splits, key=lambda split: dry_run(settings, split, lengths, steps).now["trainer"])
