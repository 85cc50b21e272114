"""An lm-eval model around any function that turns prompt tokens into completions: our engines, or a script.

    generate(prompts, max_tokens, seed, temperature, stop_ids) -> completions with token_ids and finish_reason

Token ids go in, never text that an engine would tokenise again. A prompt over the limit is not cut: its sample is
recorded as truncated with no tokens, and counted in `over_limit`. Stop strings of a task apply after the thought.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from lm_eval.api.model import LM

from jetrl_bench.verify import Verdict, after_thought


class Completed(Protocol):
    token_ids: Sequence[int]
    finish_reason: str


Generate = Callable[[list[list[int]], int, int, float, tuple[int, ...]], list[Completed]]


class Reply(str):
    """A reply's text, with what the engine knows about it; the grader of our tasks adds its verdict."""

    finish_reason: str
    num_tokens: int
    verdict: Verdict | None = None

    def __new__(cls, text: str, finish_reason: str, num_tokens: int):
        reply = super().__new__(cls, text)
        reply.finish_reason, reply.num_tokens = finish_reason, num_tokens
        return reply


class EngineLM(LM):
    """generate_until only: the tasks here generate."""

    tokenizer_name = "jetrl_bench"

    def __init__(
        self,
        generate: Generate,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        *,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        max_length: int | None = None,
    ):
        super().__init__()
        self.generate, self.encode, self.decode = generate, encode, decode
        self.seed, self.stop_ids, self.bos_id, self.max_length = seed, tuple(stop_ids), bos_id, max_length
        self.over_limit: list[str] = []
        """Heads of the prompts that left no room for an answer."""

    def generate_until(self, requests: list) -> list[Reply]:
        replies: list[Reply | None] = [None] * len(requests)
        batches: dict[tuple[int, float], list[tuple[int, list[int]]]] = {}
        for index, request in enumerate(requests):
            prompt, options = self.encode(request.args[0]), request.args[1]
            if self.bos_id is not None and prompt.count(self.bos_id) != 1:
                raise ValueError(
                    f"a prompt has {prompt.count(self.bos_id)} begin tokens, not one: {request.args[0][:60]!r}"
                )
            budget, temperature = int(options["max_gen_toks"]), float(options.get("temperature", 0.0))
            if self.max_length is not None and len(prompt) + budget > self.max_length:
                self.over_limit.append(request.args[0][:60])
                replies[index] = Reply("", "length", 0)
                continue
            batches.setdefault((budget, temperature), []).append((index, prompt))
        for (budget, temperature), batch in batches.items():
            completions = self.generate([prompt for _, prompt in batch], budget, self.seed, temperature, self.stop_ids)
            for (index, _), completion in zip(batch, completions, strict=True):
                replies[index] = self._reply(completion, requests[index].args[1].get("until") or [])
        return replies

    def _reply(self, completion: Completed, until: list[str]) -> Reply:
        token_ids = list(completion.token_ids)
        shown = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        text, reason = self.decode(shown), completion.finish_reason
        answer = after_thought(text)
        stops = [at for at in (answer.find(stop) for stop in until if stop) if at >= 0]
        if stops:
            text, reason = text[: text.rindex(answer) + min(stops)], "stop"
        return Reply(text, reason, len(token_ids))

    def loglikelihood(self, requests):
        raise NotImplementedError("this model generates; it does not score given continuations")

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError("this model generates; it does not score given texts")
