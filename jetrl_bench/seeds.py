"""Seeds: every random draw is a pure function of (seed, stream, counters), never of a method, a flow or a digest.

That is what pairs the arms of a comparison: two methods of seed n see the same problems in the same order and draw
sample k of a problem from the same stream of uniforms. Streams in use: "base" (warm-up; from the base index),
"problems", "rollout" (problem, sample), "shuffle" (rollout step), "rounding" (optimizer step), "evaluation".
"""

import hashlib
import json


def seed_of(seed: int, stream: str, *counters: int) -> int:
    """A 63-bit seed: the first eight bytes of the SHA-256 of the tuple, without the sign bit."""
    text = json.dumps([int(seed), stream, *map(int, counters)], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
