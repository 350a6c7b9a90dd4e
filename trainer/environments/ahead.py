"""Episodes that are played while the loop learns from those before: rollout.mode=one_step."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from trainer.environments.pool import Rounds
from trainer.episodes import Episode


class Ahead:
    """Rounds in a thread: they want somebody who has all episodes go on after each. No more than a thread, for the work is in processes."""

    def __init__(self, rounds: Rounds):
        self.rounds = rounds
        self._play()

    def _play(self) -> None:
        self.done: Future[list[Episode]] = Future()
        threading.Thread(target=self._run, args=(self.done,), daemon=True).start()

    def _run(self, done: Future[list[Episode]]) -> None:
        try:
            done.set_result(self.rounds.result())
        except BaseException as error:
            done.set_exception(error)

    def result(self) -> list[Episode]:
        """Wait for them. Raises as `Rounds.result` does."""
        return self.done.result()

    def settle(self) -> None:
        """Wait until no turn is to be sampled any more, or an engine died: weights that come before would change what is sampled."""
        self.done.exception()

    def owed(self) -> list[int]:
        """See `Rounds.owed`; after an error of `result`."""
        return self.rounds.owed()

    def ask(self, engines: list[int]) -> None:
        """Have these do their parts of the round for a second time, and go on."""
        self.rounds.ask(engines)
        self._play()
