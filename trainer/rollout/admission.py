"""Which requests vLLM has, and which wait for the answers of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class Admission:
    """Lets requests into vLLM in the order in which they came: at once, or while all of them fit into one step, prompts and answers.

    A prompt that is longer than what is left of a step is read in parts. On CPUs vLLM cannot do that for a request with a seed of its
    own: it takes back the number that it drew after each part, which CPU generators cannot. As long as there is one, all must fit.
    """

    def __init__(self, limit: int):
        self.limit = limit  # tokens of a step
        self.inside: dict[str, tuple[int, bool]] = {}  # tokens of each request that vLLM has, and whether its prompt must be read whole
        self.tokens = 0  # of all of them
        self.whole_prompts = 0  # requests that are there or wait and whose prompt must be read whole
        self.waiting: deque[tuple[str, int, bool, Any]] = deque()

    def queue(self, name: str, tokens: int, whole_prompt: bool, request: Any) -> None:
        self.waiting.append((name, tokens, whole_prompt, request))
        self.whole_prompts += whole_prompt

    def admit(self) -> Iterator[tuple[str, Any]]:
        """Those whose turn it is. One that is too long for any step goes alone."""
        while self.waiting:
            name, tokens, whole_prompt, request = self.waiting[0]
            if self.whole_prompts and self.inside and self.tokens + tokens > self.limit:
                return
            self.waiting.popleft()
            self.inside[name] = (tokens, whole_prompt)
            self.tokens += tokens
            yield name, request

    def release(self, name: str) -> None:
        """vLLM has answered it."""
        tokens, whole_prompt = self.inside.pop(name)
        self.tokens -= tokens
        self.whole_prompts -= whole_prompt
