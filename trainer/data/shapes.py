"""Pictures of one to nine shapes with questions about them, drawn on the spot: for demos and tests of models that see."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

from trainer.data.tasks import _at_least_one
from trainer.errors import ConfigError

COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 230)}
ASKED = ("count", "colour", "more")
CELL, SIDE = 16, 3  # pixels of a cell, and cells of a side


def shapes(rows: int = 1000, seed: int = 0, asked: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows with one picture each. Prompt "count=": how many shapes there are, 1 to 9; "colour=": which of r, g, b all of them have;
    "more=": whether more are r or b."""
    _at_least_one(rows=rows)
    asked = list(ASKED) if asked is None else asked
    if not asked or not set(asked) <= set(ASKED):
        raise ConfigError(f"data.args.asked: {asked}; some of {', '.join(ASKED)}")
    rng = random.Random(seed)
    for i in range(rows):
        question = asked[i % len(asked)]
        if question == "more":
            fewer = rng.randrange(5)
            more = rng.randrange(fewer + 1, min(9 - fewer, 5) + 1)
            first, second = rng.sample(["r", "b"], 2)
            colours, answer = [first] * more + [second] * fewer, first
        else:
            count = rng.randrange(1, 10)
            colours = [rng.choice([*COLOURS])] * count if question == "colour" else rng.choices([*COLOURS], k=count)
            answer = str(count) if question == "count" else colours[0]
        yield {"prompt": f"{question}=", "answer": answer, "images": [drawn(colours, rng)]}


def colours(rows: int = 1000, seed: int = 0, seen: int = 4, asked: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """For the environment `peek`: the prompt is a colour of `asked`, which one of `seen` pictures has; "answer" is its place, from 0."""
    _at_least_one(rows=rows, seen=seen)
    asked = [*COLOURS] if asked is None else asked
    if not asked or not set(asked) <= set(COLOURS):
        raise ConfigError(f"data.args.asked: {asked}; some of {', '.join(COLOURS)}")
    rng = random.Random(seed)
    for _ in range(rows):
        colour, place = rng.choice(asked), rng.randrange(seen)
        found = [colour if i == place else rng.choice([other for other in COLOURS if other != colour]) for i in range(seen)]
        yield {"prompt": colour, "answer": place, "colours": found, "seed": rng.getrandbits(32)}


def moves(rows: int = 1000, seed: int = 0, seen: int = 4, asked: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The same as answers to learn the form from: some pictures, and "m" or "t", drawn without a look at them."""
    for row in colours(rows, seed, seen, asked):
        rng = random.Random(row["seed"])
        shown = [drawn([colour] * rng.randrange(3, 10), rng) for colour in row["colours"][: rng.randrange(seen) + 1]]
        yield {"prompt": row["prompt"] + "m".join(["<image>"] * len(shown)), "answer": rng.choice("mt"), "images": shown}


def drawn(colours: list[str], rng: random.Random) -> Image.Image:
    """A shape of each colour, in cells of their own."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), (245, 245, 245))
    draw = ImageDraw.Draw(image)
    for colour, cell in zip(colours, rng.sample(range(SIDE * SIDE), len(colours)), strict=True):
        size = rng.randrange(8, 13)
        x, y = cell % SIDE * CELL + rng.randrange(1, CELL - size), cell // SIDE * CELL + rng.randrange(1, CELL - size)
        box, fill = (x, y, x + size, y + size), COLOURS[colour]
        kind = rng.randrange(3)
        if kind == 0:
            draw.ellipse(box, fill)
        elif kind == 1:
            draw.rectangle(box, fill)
        else:
            draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill)
    return image


def shape_pairs(rows: int = 1000, seed: int = 0, asked: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The same with "chosen", the right answer, and "rejected", another one of the same kind, for train_rm and train_dpo."""
    rng = random.Random(f"{seed} pairs")
    for row in shapes(rows, seed, asked):
        right = row.pop("answer")
        kind = row["prompt"]
        others = [str(i) for i in range(1, 10)] if kind == "count=" else [*COLOURS] if kind == "colour=" else ["r", "b"]
        yield {**row, "chosen": right, "rejected": rng.choice([each for each in others if each != right])}
