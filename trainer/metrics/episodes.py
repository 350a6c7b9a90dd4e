"""What episodes.db keeps of a step: a line for each episode, and `log.episodes` of them whole, with what is known of each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainer.episodes import Episode, Turn
from trainer.metrics.pictures import Thumbnails
from trainer.page.record import START, Record

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

HELD_OUT = "held out"  # the set of an evaluation that has no name
BROKEN = "\ufffd"  # of a token that is a part of a character
LONGEST = 200_000  # characters of a prompt or of what an environment said that are kept
SHOWN = 3  # sandboxes that are named


class Episodes:
    """Writer of one run's record. `keep`: how many of a step are kept whole; `done`: steps in the checkpoint that is resumed."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, keep: int, prompt_column: str, done: int = 0):
        self.record, self.keep, self.pictures = Record(folder, done), keep, Thumbnails(folder)
        self.prompt_column, self.pieces = prompt_column, Pieces(tokenizer)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self.writing: Future[None] = self.writer.submit(lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self.writer.shutdown()
            self.record.close()

    def flush(self) -> None:
        """Returns once all is written: before a checkpoint, whose steps no resumed run computes again."""
        self.writing.result()

    def log(self, step: int, episodes: Sequence[Episode], kept: Iterable[int], known_N: Mapping[str, torch.Tensor]) -> None:
        """Of a step that was learned from. `kept`: positions of episodes that it learned from or compared with; `known_N` [N] over the
        tokens of all episodes: advantages, mask, and policy, its log-probabilities before it learned. Written while the run goes on."""
        self.flush()
        self.writing = self.writer.submit(self._log, step, episodes, set(kept), known_N)

    def evaluated(self, step: int, by_set: Mapping[str, Sequence[Episode]]) -> None:
        """Of evaluations after a step: of each set some episodes whole."""
        self.flush()
        self.writing = self.writer.submit(self._evaluated, step, by_set)

    def _log(self, step: int, episodes: Sequence[Episode], learned: set[int], known_N: Mapping[str, torch.Tensor]) -> None:
        lengths = [len(e.response_ids) for e in episodes]
        known = {name: iter(values.split(lengths)) for name, values in known_N.items()}
        whole = set(chosen([e.group for e in episodes], self.keep, step)) | {i for i, e in enumerate(episodes) if e.failed and self.keep}
        rows = []
        for place, episode in enumerate(episodes):
            tokens = {name: next(values).tolist() for name, values in known.items()}
            row = self._row(episode, tokens, step, whole=place in whole)
            rows.append(row | {"kind": "", "learned": int(place in learned)})
        self.record.add(step, rows)
        self._compare(step, episodes)

    def _compare(self, step: int, episodes: Sequence[Episode]) -> None:
        """Whether sandboxes did the same as before, where a resumed run plays a step again."""
        places: Counter[int] = Counter()
        commands = []
        for episode in episodes:
            if episode.part == 0:
                if episode.commands:
                    commands.append((episode.group, places[episode.group], episode.commands))
                places[episode.group] += 1
        if differ := self.record.add_commands(step, commands):
            rows = {episode.group: episode.prompt.index for episode in episodes}
            named = "; ".join(f"row {rows[group]}: {asked}" for group, asked in differ[:SHOWN])
            print(f"step {step}: {len(differ)} of {len(commands)} sandboxes did not do what they did before: {named}", flush=True)

    def _evaluated(self, step: int, by_set: Mapping[str, Sequence[Episode]]) -> None:
        for name, episodes in by_set.items():
            whole = set(chosen([e.group for e in episodes], self.keep, 0))
            rows = (self._row(e, {}, step, whole=i in whole) | {"kind": name or HELD_OUT, "learned": 0} for i, e in enumerate(episodes))
            self.record.add(step, rows)

    def _row(self, episode: Episode, tokens: Mapping[str, list[float]], step: int, *, whole: bool) -> dict[str, Any]:
        mask, logprobs = episode.mask, episode.logprobs
        ages = [step - 1 - version for turn in episode.turns if turn.sampled for version in turn.versions]
        row = {
            "prompt": episode.prompt.index,
            "source": episode.prompt.row.get("mix"),
            "grp": episode.group,
            "reward": None if episode.failed else episode.reward,
            "advantage": mean(tokens.get("advantages"), mask),
            "tokens": len(mask),
            "turns": sum(turn.sampled for turn in episode.turns),
            "finish": "limit" if episode.limited else episode.finish_reason,
            "failed": int(episode.failed),
            "difference": mean([abs(p - q) for p, q in zip(tokens["policy"], logprobs, strict=True)], mask) if "policy" in tokens else None,
            "staleness": sum(ages) / len(ages) if ages else None,
            "engine": next((turn.engine for turn in reversed(episode.turns) if turn.engine), None),
            "terms": episode.terms,
            "start": episode.text[:START],
        }
        return row | ({"whole": self._whole(episode, tokens)} if whole else {})

    def _whole(self, episode: Episode, tokens: Mapping[str, list[float]]) -> dict[str, Any]:
        turns, at = [], 0
        for turn in episode.turns:
            where = slice(at, at := at + len(turn.token_ids))
            turns.append(self._turn(turn, {name: values[where] for name, values in tokens.items()}))
        prompt = episode.prompt.row.get(self.prompt_column)
        self.pictures.keep(episode.pictures)
        return {
            "prompt": prompt[:LONGEST] if isinstance(prompt, str) else prompt,
            **_shown(episode.prompt.pictures),
            "turns": turns,
            "metrics": episode.metrics,
            "text": episode.text[:LONGEST],
        }

    def _turn(self, turn: Turn, tokens: Mapping[str, list[float]]) -> dict[str, Any]:
        if not turn.sampled:
            ids = self.pieces.without_repeats(turn.token_ids) if turn.pictures else turn.token_ids
            return {"sampled": False, "text": "".join(self.pieces(ids))[:LONGEST], **_shown(turn.pictures)}
        found = {"sampled": True, "finish": turn.finish, "pieces": self.pieces(turn.token_ids), "logprobs": rounded(turn.logprobs)}
        found["versions"] = [[0, turn.version], *(list(switch) for switch in turn.switches)]
        found |= {name: rounded(tokens[name]) for name in ("policy", "advantages") if name in tokens}
        return found | ({"learned": [int(one) for one in tokens["mask"]]} if "mask" in tokens else {})


def _shown(pictures: Sequence[Any]) -> dict[str, Any]:
    return {"pictures": [picture.described() for picture in pictures]} if pictures else {}


def chosen(groups: Sequence[int], keep: int, step: int) -> Iterator[int]:
    """Positions of so many episodes, whole groups first; other groups at other steps."""
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    order, left = [*members.values()], keep
    for i in range(len(order)):
        mine = order[(step + i) % len(order)][: max(0, left)]
        yield from mine
        left -= len(mine)


class Pieces:
    """Texts of tokens, which together are the text: a character that takes several tokens stands at its last."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.known = tokenizer, dict[int, str]()
        anchor = tokenizer.encode("a", add_special_tokens=False)
        self.special = frozenset(tokenizer.all_special_ids)
        self.anchor, self.before = anchor[-1:], str(tokenizer.decode(anchor[-1:]))  # alone some tokenizers take a word's space away

    def __call__(self, ids: Sequence[int]) -> list[str]:
        pieces, open_from = [], 0
        for place, token in enumerate(ids):
            if (text := self.known.get(token)) is None:
                text = self.known[token] = self._text([token])
            if BROKEN in text and len(together := self._text(ids[open_from : place + 1])) and not together.endswith(BROKEN):
                text = together.removeprefix("".join(pieces[open_from:]).rstrip(BROKEN))
                pieces[open_from:] = [""] * (place - open_from)
            pieces.append(text)
            open_from = place + 1 if BROKEN not in text else open_from
        return pieces

    def without_repeats(self, ids: Sequence[int]) -> list[int]:
        """With one in place of many special tokens that are the same, such as those of a picture."""
        return [each for each, before in zip(ids, (None, *ids), strict=False) if each != before or each not in self.special]

    def _text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode([*self.anchor, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text).removeprefix(self.before)


def mean(values: Sequence[float] | None, mask: Sequence[int]) -> float | None:
    """Over what the policy wrote."""
    chosen = [value for value, own in zip(values or (), mask, strict=False) if own]
    return sum(chosen) / len(chosen) if chosen else None


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]
