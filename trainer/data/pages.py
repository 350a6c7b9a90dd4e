"""Pages with tasks for the environment `screen`, for demos and tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from trainer.data.tasks import _at_least_one

BUTTONS = {"red": "#dc2828", "green": "#28b43c", "blue": "#3250e6"}


def buttons(rows: int = 1000, seed: int = 0, width: int = 320, height: int = 240) -> Iterator[dict[str, Any]]:
    """Click one of three coloured buttons, whose places are drawn; the first click counts. "answer" is its centre."""
    _at_least_one(rows=rows)
    rng = random.Random(seed)
    for _ in range(rows):
        asked, parts, answer = rng.choice([*BUTTONS]), [], ""
        for i, (name, colour) in enumerate(BUTTONS.items()):
            left, top, side = i * width // 3 + rng.randrange(width // 9), rng.randrange(height * 2 // 3), min(width, height) // 5
            style = f"left:{left}px;top:{top}px;width:{side}px;height:{side}px;background:{colour}"
            parts.append(f'<button style="{style}" onclick="clicked ||= {name!r}"></button>')
            answer = f"{left + side // 2} {top + side // 2}" if name == asked else answer
        head = "<style>body{margin:0}button{position:absolute;border:0}</style><script>var clicked = ''</script>"
        html = f"<!doctype html>{head}{''.join(parts)}"
        yield {"prompt": f"Click the {asked} button.", "answer": answer, "html": html, "score": f"clicked === {asked!r}"}
