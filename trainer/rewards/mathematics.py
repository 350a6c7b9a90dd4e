r"""The reward math_verify: mathematics compared by math-verify (https://github.com/huggingface/Math-Verify), with each side read whole.

The library reads LaTeX inside of $...$ and \boxed{} alone, and elsewhere the last number that it finds. Data sets have their answers
without either (MATH, DeepScaleR), so they go into a \boxed{} first; so does what follows on "the answer is" in a text without any.
What it reads as something else (bases, words, 1e-3, 3 1/2, 1 234, 0.\overline{3}) is written as it would have it, or compared here.
"""

# ruff: noqa: RUF001 - characters that look like others are what this reads
from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

from trainer.rewards import golds
from trainer.rewards.arguments import Positive
from trainer.rewards.bounded import Bounded
from trainer.rewards.boxes import boxes
from trainer.rewards.golds import of_mathematics
from trainer.rewards.numerals import unspaced

DEEPEST = 60  # brackets inside of each other: the grammar takes seconds over more
LONGEST = 10_000  # characters of a text without a box that are looked at, from its end: the library's patterns take long over more
CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "≤": r"\leq ", "≥": r"\geq "}
    | {"≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt", "°": r"^\circ", "∪": r"\cup "}
    | {"∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "²": "^2", "³": "^3", "⁴": "^4", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}"}
    | {"¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "⁄": "/", "∕": "/"}
    | dict.fromkeys(map(chr, (0xA0, 0x2009, 0x202F, 0x2007)), " ")
    | dict.fromkeys(map(chr, (0x200B, 0xFEFF)), "")
)
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.]\w?)")
MIXED = re.compile(r"(?<![\d/.^_{,])(\d+)(?:\\ |\s)+(\d+)\s*/\s*(\d+)(?![\d/.])")
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
BASE = re.compile(r"^\(?\s*(?:\\text\{)?([0-9A-Za-z]+)\}?\s*\)?\s*_\s*\{?\s*(?:\\text\{)?\s*(\w+)\s*\}*$")
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}
STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname|mbox|boldsymbol|emph|textsc|mathsf)\s*\{([^{}]*)\}")
WORDS = re.compile(r"[^\W\d_]+(?:[ '’.-]+[^\W\d_]+)*")
SHORT = {"no", "on", "up", "in", "or", "odd", "all", "yes"}  # words of fewer than four letters that are no products of variables
CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?[.:)]?\s*$|\(([A-Z])\)\s*\S")  # B, (B), B., (B) 12
CHOSEN = re.compile(r"\(?\s*([A-Za-z])\s*\)?[.:)]?\s*(?:$|(?<=[.:)\s])\S)")  # B: 12 too
LETTERS = tuple("ABCDEFGHIJ")
ANCHOR = re.compile(r"(?:answer|result)(?:\s+is)?\s*[:=]?\s*|####\s*", re.IGNORECASE)
NUMBERS = re.compile(r"[-\d.,/ %]+")  # the library reads those without LaTeX, and 1,5 as a decimal
MINERVA = re.compile(r"final answer is:?\s*(.{1,200}?)\.?\s*I hope it is correct", re.IGNORECASE)  # https://arxiv.org/abs/2206.14858
ENVIRONMENT = re.compile(r"\$|\\\(|\\\[|\\begin\{(?:equation|align)")


def math_verify(text: str, row: dict[str, Any], seconds: Positive = 5.0) -> float:
    """1 if math-verify finds text and answer, or one of several, equal as mathematics, and 0 too where that takes longer.

    `seconds` of processor time, in a process of its own (bounded.py): an answer of 9^{9^{9}} is 0 and costs no more than that.
    """
    return float(any(_bounded()(seconds, equal, gold, text) for gold in of_mathematics(row)))


def load() -> None:
    """What the first comparison would spend its time on: the library, its grammar, the process."""
    _bounded()(300.0, equal, r"\frac{1}{2}", r"\boxed{0.5}")


def read(row: dict[str, Any]) -> str:
    """What is compared with. Raises ValueError where it can be read as nothing."""
    golds.read(row)
    return " or ".join(f"{gold} -> {_bounded()(30.0, shown, gold) or 'no mathematics, compared as text'}" for gold in of_mathematics(row))


@cache
def _bounded() -> Bounded:
    equal(r"\frac{\pi}{2}", r"\boxed{2\sqrt{3}}")  # the library, its grammar and what it simplifies with are loaded before the fork
    return Bounded(_call)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def shown(gold: str) -> str:
    """A gold as it is compared."""
    whole = _whole(gold)
    word, base = _word(whole), _base(whole)
    if word is not None:
        return f"the text {word!r}"
    if base:
        return f"{base[0]} in base {base[1]}"
    return str(next(iter(_expressions(whole)), ""))


def equal(gold: str, text: str) -> bool:
    """Whether a text's result is this gold."""
    from math_verify import verify

    wanted, said = _whole(gold), _said(text)
    if said is not None and _tidied(said) == _tidied(wanted):
        return bool(_tidied(said))
    if max(_depth(wanted), _depth(said or "")) > DEEPEST:
        return False
    if (word := _word(wanted)) is not None:
        return _is_word(word, said, text)
    if said is not None and (bases := (_base(wanted), _base(said)))[0] and bases[1]:
        return bases[0] == bases[1]
    given = _expressions(said) if said is not None else _found(text)
    return verify(_expressions(wanted), given, allow_set_relation_comp=True, timeout_seconds=None)


def _whole(gold: str) -> str:
    """The answer itself, of a solution that ends with it too."""
    if "\\boxed" in gold:
        return _said(gold) or gold
    bare = gold.rpartition("####")[2].strip()
    inside = re.fullmatch(r"\$\$?([^$]+)\$?\$|\\\((.+)\\\)|\\\[(.+)\\\]", bare, re.DOTALL)
    return next(filter(None, inside.groups())).strip() if inside else bare


def _said(text: str) -> str | None:
    r"""A text's result: what stands in its last \boxed{}, or else behind "the answer is" or alone in bare LaTeX; None to search for it."""
    text = text.translate(CHARACTERS)
    if minerva := [*MINERVA.finditer(text)]:
        text = minerva[-1][1]
    if found := boxes(text):
        return ",".join(found)
    line = text.strip().rpartition("\n")[2]
    found = [*ANCHOR.finditer(line)]
    rest = (line[found[-1].end() :] if found else text).strip().strip("*").rstrip(".").strip()
    whole = re.fullmatch(r"\$\$?([^$]+)\$?\$|\\\((.+)\\\)|\\\[(.+)\\\]", rest, re.DOTALL)
    if whole:
        return next(filter(None, whole.groups())).strip()
    if not rest or len(rest) > 200 or "\n" in rest or ENVIRONMENT.search(rest) or NUMBERS.fullmatch(rest):
        return None
    prose = re.search(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}|[A-Za-z]{4,}", STYLE.sub("", re.sub(r"\\[A-Za-z]+(?!\s*\{)", "", rest)))
    return rest if not prose or (found and WORDS.fullmatch(rest)) else None


def _found(text: str) -> list[Any]:
    """What the library finds in a text of several sentences."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of deadlines that are off
    return parse(re.sub(r"(?<=\d)\.(?=\s|$)", "", _rewritten(text.translate(CHARACTERS)))[-LONGEST:], parsing_timeout=0)


def _expressions(latex: str) -> list[Any]:
    """A complete expression as the library reads it, and its text."""
    return [*_parsed(_tidied(latex))]


@lru_cache(maxsize=1000)  # a gold is that of a group's answers
def _parsed(latex: str) -> tuple[Any, ...]:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return tuple(parse(f"\\boxed{{{latex}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=0)) if latex else ()


def _tidied(latex: str) -> str:
    latex = _rewritten(latex.translate(CHARACTERS).replace(r"\varnothing", r"\emptyset").strip())
    latex = re.sub(r"\\text\s*\{\s*([-$]?[\d.,]+|-)\s*([^{}\d]*)\}", r"\1\\text{\2}", latex).replace(r"\text{}", "")
    latex = re.sub(r"(?<=\d)\.$", "", latex).rstrip("。").strip()
    return re.sub(r"\s+", " ", latex)


def _rewritten(latex: str) -> str:
    """With numbers as the library reads them."""
    latex = unspaced(latex)
    latex = SCIENTIFIC.sub(lambda found: f"{found[1]} \\times 10^{{{int(found[2])}}}", latex)
    latex = MIXED.sub(r"\1\\frac{\2}{\3}", latex)
    return REPEATING.sub(_fraction, latex)


def _fraction(found: re.Match[str]) -> str:
    whole, fixed, again = found.groups()
    value = Fraction(int((whole + fixed + again) or 0) - int((whole + fixed) or 0), 10 ** len(fixed) * (10 ** len(again) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _depth(latex: str) -> int:
    """How many brackets are open at most."""
    return max(accumulate((character in "({[") - (character in ")}]") for character in latex), default=0)


def _base(latex: str) -> tuple[str, int] | None:
    """Digits and base of a number such as 101_2."""
    found = BASE.match(latex.replace("$", "").strip())
    if not found:
        return None
    base = BASES.get(found[2].casefold()) or (int(found[2]) if found[2].isdecimal() else 0)
    return (found[1].casefold().lstrip("0") or "0", base) if 2 <= base <= 36 and re.search(r"\d", found[1]) else None


def _plain(latex: str) -> str:
    """Without commands of style, and white space in runs."""
    before = ""
    while before != latex:
        before, latex = latex, STYLE.sub(r"\1", latex)
    return re.sub(r"(?:\s|\\[ ,;!])+", " ", latex.replace("$", "").replace("\\%", "%")).strip(" .")


def _word(gold: str) -> str | None:
    """A gold that is text and no mathematics: a letter to choose, or words."""
    plain = _plain(gold)
    if choice := CHOICE.match(plain):
        return choice[1] or choice[2]
    styled = STYLE.search(gold) is not None
    bare = plain.strip("()").strip()
    if not WORDS.fullmatch(bare):
        return None
    return bare if len(bare) > 1 and (styled or " " in bare or len(bare) > 3 or bare.casefold() in SHORT) else None


def _is_word(word: str, said: str | None, text: str) -> bool:
    from math_verify import StringExtractionConfig, parse

    if said is not None:
        plain = _plain(said)
        if len(word) == 1:
            choice = CHOSEN.match(plain)
            return choice is not None and choice[1].casefold() == word.casefold()
        return _letters(plain) == _letters(word)
    if len(word) == 1:
        found = parse(text[-LONGEST:], [StringExtractionConfig(strings=LETTERS, lowercase=False)], parsing_timeout=0)
        return bool(found) and found[0] == word
    if _letters(text) == _letters(word):
        return True
    last = text.strip().rpartition("\n")[2]
    return bool(re.search(rf"(?:{ANCHOR.pattern})\W*{re.escape(word)}\W*$", last, re.IGNORECASE))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()
