"""What a tool returns, as the content of a message: a text, or parts where it has pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from PIL import Image

from trainer.chat.messages import TEXTS
from trainer.data.pictures import KINDS

Content = str | list[Any]


def content_of(value: Any) -> Content:
    """A text as it is, pictures as parts, anything else as JSON. Raises TypeError for what is none of these."""
    if isinstance(value, str):
        return value
    several = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_picture, several)):
        return json.dumps(value)
    return [_part(each) for each in several]


def shortened(content: Content, longest: int) -> Content:
    """Without the middle of a text that is longer than so many characters; of parts, each text."""
    if isinstance(content, str):
        if len(content) <= longest:
            return content
        return f"{content[: longest // 2]}\n... {len(content) - longest} characters left out ...\n{content[-(longest - longest // 2) :]}"
    return [{**part, "text": shortened(part["text"], longest)} if part["type"] in TEXTS else part for part in content]


def _is_picture(value: Any) -> bool:
    return isinstance(value, Image.Image | bytes) or (isinstance(value, Mapping) and value.get("type") in KINDS)


def _part(value: Any) -> Any:
    if isinstance(value, Image.Image | bytes):
        return {"type": "image", "image": value}
    if isinstance(value, Mapping) and value.get("type") in (*KINDS, *TEXTS):
        return dict(value)
    return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value)}
