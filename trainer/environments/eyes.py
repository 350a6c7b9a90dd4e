"""Pictures that an environment, or a client of the endpoint, puts into a conversation with the policy; in any turn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from PIL import Image
from transformers import PreTrainedTokenizerBase

from trainer.chat.messages import IMAGE, MARK, TEXTS, Message, Unreadable, placed
from trainer.chat.pictures import Limits, Picture, picture
from trainer.chat.processor import processor_of
from trainer.data.pictures import KINDS, of_part
from trainer.environments.limits import Misuse

BLIND = "the policy has no processor that reads pictures; give a model that sees (docs/training/vision.md)"
Said = str | bytes | Image.Image | Mapping[str, Any] | Sequence[Any]  # a text, a picture, or several of both in turn


class Eyes:
    """Of one episode: each picture is decoded once, however often a client sends it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Sequence[Picture] = (), limits: Limits | None = None, most: int = 16):
        """`shown`: pictures of the data's prompt; `most`: that a sequence may have."""
        self.processor, self.limits, self.most, self.shown = processor_of(tokenizer), limits or Limits(), most, tuple(shown)
        self.place: int = tokenizer.convert_tokens_to_ids(self.processor.place) if self.processor else -1  # type: ignore[assignment]
        self.known = {each.hash: each for each in shown}
        self.came: dict[bytes, Picture] = {}  # by what they were given as

    def read(self, said: Said, where: str) -> tuple[str, list[Picture]]:
        """As text with the processor's mark for each picture. Raises Unreadable, Misuse."""
        found, text = list[Picture](), ""
        for each in said if _is_several(said) else [said]:
            kind = each.get("type") if isinstance(each, Mapping) else None
            if isinstance(each, str):
                text += self._text(each, where)
            elif isinstance(each, Mapping) and kind in TEXTS:
                text += self._text(str(each.get("text", "")), where)
            else:
                found.append(self._picture(each, where))
                text += self.processor.mark if self.processor else ""
        return text, found

    def read_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[Picture]]:
        """As `chat.messages.read` takes them, and their pictures in order. Raises Unreadable, Misuse."""
        found, pictures = list[Message](), list[Picture]()
        for i, message in enumerate(messages):
            content, where = message.get("content"), f"message {i}"
            if isinstance(content, str):
                self._text(content, where)
            elif _is_several(content) or isinstance(content, Image.Image):
                content = [self._part(part, where, pictures) for part in (content if _is_several(content) else [content])]
                if message.get("role") == "assistant" and IMAGE in content:
                    raise Unreadable(f"{where} is the assistant's and has a picture; models that see write text alone")
            found.append({**message, "content": content} if "content" in message else dict(message))
        return found, pictures

    def looked(self, content: str | list[Any], where: str) -> str | list[Any]:
        """A message's content with its pictures decoded. Raises Unreadable, Misuse."""
        if isinstance(content, str):
            return self._text(content, where)
        found = list[Picture]()
        parts, shown = [self._part(part, where, found) for part in content], iter(found)
        return [{"type": "image", "image": next(shown)} if part == IMAGE else part for part in parts]

    def parts(self, text: Any) -> Any:
        """A prompt of the data as an environment finds it in its row: a text becomes parts where the row has pictures."""
        if not isinstance(text, str) or not self.shown:
            return text
        parts, rest = placed(text, len(self.shown)), iter(self.shown)
        if (places := parts.count(IMAGE)) > len(self.shown):
            raise Unreadable(f"{places} times {MARK} in the prompt, which has {len(self.shown)} pictures")
        return [{"type": "image", "image": next(rest)} if part == IMAGE else part for part in parts]

    def expanded(self, text: str, pictures: Sequence[Picture]) -> str:
        """With all tokens of the pictures. Raises Unreadable where there are not as many places for them."""
        return self.processor.expanded(text, pictures) if self.processor else text

    def require(self, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        """Raises Unreadable where token ids stand for other pictures than there are: what the model would see is something else."""
        if self.processor is None:
            return
        own = self.processor.own.tokenizer
        needed = sum(own.encode(self.processor.tokens(each), add_special_tokens=False).count(self.place) for each in pictures)
        if (there := ids.count(self.place)) != needed:
            raise Unreadable(
                f"{there} tokens that stand for pictures, where {len(pictures)} pictures have {needed}; give pictures, and not their tokens"
            )

    def _part(self, part: Any, where: str, pictures: list[Picture]) -> Any:
        if isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") not in KINDS):
            self._text(part if isinstance(part, str) else str(part.get("text", "")), where)
            return part
        pictures.append(self._picture(part, where))
        return IMAGE

    def _text(self, text: str, where: str) -> str:
        if self.processor and self.processor.place in text:
            raise Unreadable(f"{where}: its text has the token that stands for a picture; remove it, or give the picture")
        return text

    def _picture(self, given: Any, where: str) -> Picture:
        """Raises Unreadable, Misuse."""
        if isinstance(given, Mapping):
            own = of_part(given, where)
            if own is None or "hash" in given:  # of the row, as the environment has it
                if (one := self.known.get(str(given.get("hash")))) is None:
                    raise Unreadable(f"{where}: a part of type image without a picture; give one as image, path, or image_url with data")
                given = one
            else:
                given = own
        if self.processor is None:
            raise Misuse(f"{where} has a picture: {BLIND}")
        if isinstance(given, Picture):
            return self.known.setdefault(given.hash, given)
        key = hashlib.sha256(given if isinstance(given, bytes) else given.encode()).digest() if isinstance(given, bytes | str) else None
        found = self.came.get(key) if key else None
        if found is None:
            found = picture(given, where, self.limits)
            found = self.known.setdefault(found.hash, found)
        if key:
            self.came[key] = found
        return found


def _is_several(said: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(said, Sequence) and not isinstance(said, str | bytes)
