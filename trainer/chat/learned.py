"""Which tokens of a conversation, or of an answer, are learned: those that a policy would have to write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat.messages import IMAGE, Message, Unreadable, placed, read, shows
from trainer.chat.pictures import Picture
from trainer.chat.processor import processor_of
from trainer.chat.template import SAYS, Chat
from trainer.chat.tokens import alone, following

Span = tuple[int, int]


def conversation(
    chat: Chat, messages: Sequence[Message], authors: Collection[str], pictures: Sequence[Picture] = ()
) -> tuple[list[int], list[float]]:
    """Token ids, and 1 for each that a message of one of these authors wrote, the token that ends it included. Raises Unreadable.

    What a message wrote is what the template adds for it to the text that stands before, with the words that begin an answer. Tokens of
    pictures are nobody's.
    """
    messages = [closed(chat, message, i) for i, message in enumerate(messages)]
    text = chat.text(messages)
    spans = [_span(chat, messages, i, text) for i, message in enumerate(messages) if message["role"] in authors]
    processor = processor_of(chat.tokenizer)
    if processor:
        text, spans = processor.expanded_spans(text, spans, pictures)
    encoded: Any = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [float(any(begin < until and end > start for start, until in spans)) for begin, end in encoded["offset_mapping"]]
    ids: list[int] = encoded["input_ids"]
    if processor:
        mask = [0.0 if i in processor.own.image_token_ids else known for i, known in zip(ids, mask, strict=True)]
    last = messages[-1]["role"]
    if last == "assistant" and last in authors and not (chat.ends and text[: spans[-1][1]].endswith(chat.ends)):
        ids, mask = [*ids, chat.tokenizer.convert_tokens_to_ids(chat.end)], [*mask, 1.0]  # type: ignore[list-item]
    return ids, mask


def answer(chat: Chat, messages: Sequence[Message], text: str) -> list[int]:
    """What follows on a prompt of these messages: the answer as the template writes it, or as it is where the template would leave a part
    out, and the token that ends it. Raises Unreadable."""
    opening, said = chat.opening(messages), closed(chat, {"role": "assistant", "content": text}, len(messages))
    whole = chat.text(joined(messages, said))
    written = whole[len(opening) :] if whole.startswith(opening) else ""
    body = chat.up_to_end(written)
    end = chat.special_at(written, len(body)) or chat.end
    ids = following(body if _letters(body).endswith(_letters(said["content"])) else said["content"], chat.tokenizer, opening)
    return [*ids, chat.tokenizer.convert_tokens_to_ids(end)]  # type: ignore[list-item]


def judged(chat: Chat | None, tokenizer: PreTrainedTokenizerBase, prompt: Any, text: str, pictures: Sequence[Any] = ()) -> Any:
    """What a classifier reads of a prompt and an answer, as a tokenizer returns it: by the chat template, or as a pair of texts.

    With the tokens of the prompt's `pictures`. Raises Unreadable.
    """
    if not chat and not isinstance(prompt, str):
        raise Unreadable("the prompt is chat messages, and the tokenizer has no chat template")
    if pictures:
        return _judged_by_sight(chat, tokenizer, prompt, text, pictures)
    if not chat and tokenizer.sep_token is None:  # then what some put between the two, and behind, would be the end of a text
        return {"input_ids": [*alone([prompt], tokenizer)[0], *following(text, tokenizer)]}
    if not chat:
        return tokenizer(prompt, text)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read(prompt)
    return tokenizer(chat.text(joined(messages, {"role": "assistant", "content": text})), add_special_tokens=False)


def _judged_by_sight(chat: Chat | None, tokenizer: PreTrainedTokenizerBase, prompt: Any, text: str, pictures: Sequence[Any]) -> Any:
    processor = processor_of(tokenizer)
    if processor is None:
        raise Unreadable(f"{len(pictures)} pictures, and the model reads text only")
    shown = placed(prompt, len(pictures)) if isinstance(prompt, str) else prompt
    if not chat:
        opening = "".join(processor.mark if part == IMAGE else part["text"] for part in shown)
        return {"input_ids": [*alone([processor.expanded(opening, pictures)], tokenizer)[0], *following(text, tokenizer)]}
    messages = [{"role": "user", "content": shown}] if isinstance(prompt, str) else read(prompt, pictures=True)
    whole = chat.text(joined(messages, {"role": "assistant", "content": text}))
    return tokenizer(processor.expanded(whole, pictures), add_special_tokens=False)


def joined(messages: Sequence[Message], answer: Message) -> list[Message]:
    """With an answer, which goes on with the last message where that is the assistant's."""
    if messages[-1]["role"] != "assistant":
        return [*messages, answer]
    return [*messages[:-1], {**answer, "content": messages[-1]["content"] + answer["content"]}]


def closed(chat: Chat, message: Message, i: int) -> Message:
    """Without the token that ends it, which the template writes. Raises Unreadable where it stands elsewhere in the text."""
    if message["role"] != "assistant":
        return message
    if shows(message["content"]):
        raise Unreadable(f"message {i} is the assistant's and has a picture; models that see write text alone")
    text, ends = message["content"], {*chat.ends, chat.end, str(chat.tokenizer.eos_token)}
    while end := next((end for end in ends if text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    if inside := next((end for end in ends if end in text), ""):
        raise Unreadable(f"message {i} has {inside!r} in its text, the token that ends a turn; remove it, or split the message there")
    return {**message, "content": text}


def _span(chat: Chat, messages: Sequence[Message], i: int, text: str) -> Span:
    """Where in the text what the message wrote begins and ends. Raises Unreadable where that cannot be told."""
    before = _before(chat, messages, i)
    body = _body(chat, messages[: i + 1], before, text[len(before) :])
    if not text.startswith(before + body):
        raise Unreadable(
            f"the chat template writes message {i} otherwise when others follow it, so it cannot be told which tokens it is; split the "
            "conversation into one row per answer, with data.prompt and data.answer"
        )
    if _letters(messages[i]["content"]) not in _letters(body):
        what = f"a part of message {i} out, such as thoughts or a text beside calls"
        raise Unreadable(f"the chat template leaves {what}; give data.prompt and data.answer")
    begin, stop = len(before), len(before + body)
    return (begin, stop if messages[i]["role"] != "assistant" else _behind_end(chat, text, stop, i, last=i == len(messages) - 1))


def _body(chat: Chat, messages: Sequence[Message], before: str, rest: str) -> str:
    """What the last of these wrote, by what the template makes of them alone, and where a token ends it by what it made of all."""
    until = chat.text(messages)
    alone = chat.up_to_end(until[len(before) :]) if until.startswith(before) else ""
    if not chat.ends or messages[-1]["role"] != "assistant":
        return until[len(before) :]
    found = chat.up_to_end(rest)
    return alone if alone and found.startswith(alone) else found


def _before(chat: Chat, messages: Sequence[Message], i: int) -> str:
    if messages[i]["role"] != "assistant":
        return chat.text(messages[:i]) if i else ""
    if i:
        return chat.text(messages[:i], answer=True)
    return chat.text([{"role": "assistant", "content": SAYS}, *messages[1:]]).partition(SAYS)[0]


def _behind_end(chat: Chat, text: str, stop: int, i: int, *, last: bool) -> int:
    end = chat.special_at(text, stop)
    end = end if end in chat.ends else ""
    if not end and not last:
        raise Unreadable(
            f"the chat template writes no token that ends message {i}, so a model would learn not to stop; split the conversation into one "
            "row per answer, with data.prompt and data.answer"
        )
    return text.index(end, stop) + len(end)


def _letters(text: str | list[Message]) -> str:
    return "".join((text if isinstance(text, str) else "".join(part.get("text", "") for part in text)).split())
