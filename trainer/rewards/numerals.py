r"""The reward numeric: numbers as people and models write them.

1,234.5 and 1 234.5 and 1{,}234; 3/4 and \frac34 and 3\frac{1}{2} and 3 1/2; 1.2e-3 and 1.2 \times 10^{-3}; 50 %, $5, 3 cm, 30^\circ, x = 5;
minus signs of every kind. 1,5 and 1,2,3 are several numbers, so none.
"""

# ruff: noqa: RUF001 - characters that look like others are what this reads
from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from trainer.rewards import golds
from trainer.rewards.arguments import NotNegative
from trainer.rewards.boxes import boxes
from trainer.rewards.golds import of_mathematics

CHARACTERS = str.maketrans(
    dict.fromkeys("−–—‐‑﹣－", "-")
    | dict.fromkeys(map(chr, (0xA0, 0x2009, 0x202F, 0x2007)), " ")
    | {
        "×": "*",
        "·": "*",
        "⁄": "/",
        "∕": "/",
        "÷": "/",
        "½": " 1/2",
        "¼": " 1/4",
        "¾": " 3/4",
        "⅓": " 1/3",
        "⅔": " 2/3",
        "²": "^2",
        "³": "^3",
        "％": "%",
    }
)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+)"  # thousands have three digits, in India after pairs
SPACED, SPACED_IN_PROSE = (  # 1 234, 1\,234, 1{,}234, 1'234; in prose a space may be between two numbers
    re.compile(rf"(?<![\d.,])\d{{1,3}}(?:(?:\\[,;:! ]|\{{,\}}|,\\!|{between})\d{{3}})+(?![\d/])") for between in ("[ ']", "'")
)
DECIMAL = rf"(?:(?:{DIGITS})(?:\.\d+)?|\.\d+)"
POWER = r"(?:[eE][+-]?\d{1,3}(?![\d.])|\s*\*\s*10\^\{?[+-]?\d{1,3}\}?)"  # short: 1e999999999 would fill the memory
# 3 1/2, 3/4, 1.2e-3. No part of a word, nor of a list without spaces such as 1,5.
NUMBER = re.compile(
    rf"(?<![\w.])(?<!\d,)(?:(?P<whole>\d+)\s+(?P<part>\d+/\d+)|(?P<above>{DECIMAL}{POWER}?)(?:\s*/\s*(?P<below>-?\s*{DECIMAL}))?)(?!,?\d|[eE][+-]?\d)"
)
SIGN = re.compile(r"(-)(\s*)[$€£¥₹]?\s*$")
OPERATES = re.compile(r"[\w)\]}]$")  # a minus that stands at it is an operation
OPERAND = re.compile(r"(?:\d|[)\]}]|(?<![A-Za-z])[A-Za-z])\s*$")  # and one with white space on both sides behind these
FRACTION = re.compile(r"(\d*)\s*\\[dtc]?frac\s*(?:\{\s*(-?)\s*([\d.,]+)\s*\}|(\d))\s*(?:\{\s*(-?)\s*([\d.,]+)\s*\}|(\d))")
STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boldsymbol)\s*\{([^{}]*)\}")
ONES = "cm|mm|km|dm|nm|kg|mg|ml|mL|ft|yd|mi|lb|lbs|oz|hr|hrs|min|mins|sec|secs|kWh|km/h|mph|m/s|Hz|kHz|MB|GB|USD|EUR|k?J|k?W|k?Pa|k?N"
POWERED = r"(?:\s*\^\s*\{?[23]\}?)?"
UNIT = re.compile(
    rf"(?<=[\d.])(?:\s*(?:{ONES})|\s+[mgshlLKJNWVA]|\s+(?:[A-Za-zµΩ]{{2,}}[./-]?\s*)+)\s*{POWERED}$|(?<=\d)\s*(?:\^\s*\{{?\\circ\}}?|°|\\degree)\s*[CF]?$"
)
NAMED = re.compile(r"^\s*(?:\\?[A-Za-z][\w\\{}()',\s]*?\s*)?(?:=|\\approx|≈)(?!.*[=≈])\s*")


def numeric(text: str, row: dict[str, Any], tolerance: NotNegative = 1e-6) -> float:
    r"""1 if the text's result equals the answer's, or that of one of several, as numbers within a relative `tolerance`, or else as text.

    The result is what stands in the last \boxed{}; where there is none, the last number. 50% is 50 and 0.5.
    """
    given = result(text)
    return float(any(_equal(given, result_of_gold(gold), tolerance, text, gold) for gold in of_mathematics(row)))


def read(row: dict[str, Any]) -> str:
    """What is compared with. Raises ValueError where an answer has no number, nor a box."""
    golds.read(row)
    found = []
    for gold in of_mathematics(row):
        value = result_of_gold(gold)
        if not isinstance(value, Fraction) and not boxes(gold):
            raise ValueError(f"the answer {gold!r} has no number; math_verify, exact or contains compare texts")
        found.append(f"{gold} -> {value}")
    return " or ".join(found)


def _equal(given: Fraction | str | None, wanted: Fraction | str | None, tolerance: float, text: str, gold: str) -> bool:
    if not isinstance(given, Fraction) or not isinstance(wanted, Fraction):
        return given is not None and str(given).casefold() == str(wanted).casefold()
    a, b = _is_percent(text), _is_percent(gold)
    pairs = [(given, wanted)] + [(given / 100, wanted)] * (a and not b) + [(given, wanted / 100)] * (b and not a)
    return any(abs(x - y) <= Fraction(tolerance) * max(abs(y), 1) for x, y in pairs)


def result(text: str) -> Fraction | str | None:
    r"""The last \boxed{} as a number, or as text without white space; without one, the last number; None where there is neither."""
    found = boxes(text)
    if found and found != [""]:
        return _value(found[-1]) if len(found[-1]) else None
    whole = _value(text) if len(text) < 80 else None
    if isinstance(whole, Fraction):
        return whole
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def result_of_gold(gold: str) -> Fraction | str | None:
    """That of a text, a solution's behind its ####; a gold without a number is itself."""
    if boxes(gold):
        return result(gold)
    bare = gold.rpartition("####")[2].strip()
    value = _value(bare)
    found = result(bare) if not isinstance(value, Fraction) and " " in bare else value
    return value if found is None else found


def _value(inside: str) -> Fraction | str:
    """A number, with its unit or name or without; else the text without white space."""
    plain = unspaced(inside.translate(CHARACTERS))
    before = ""
    while before != plain:
        before, plain = plain, STYLE.sub(r"\1", plain)
    text = re.sub(r"\\[,;:! ]|[\s$%]|\\(?=[$%])", "", plain)
    plain = re.sub(r"\\?[$%]|[€£¥₹]|^\s*(?:US|Rs\.?|USD|EUR)\s*(?=[\d-])", "", re.sub(r"\\[,;:! ]|~", " ", plain))
    plain = NAMED.sub("", _fractions(plain)).strip().rstrip(".").strip()
    plain = UNIT.sub("", re.sub(r"^\{(.*)\}$", r"\1", plain)).strip()
    sign, bare = ("-", plain[1:].strip()) if plain.startswith("-") else ("", plain.lstrip("+").strip())
    found = NUMBER.fullmatch(bare)
    value = _number(found, sign) if found else None
    return text if value is None else value


def _numbers(text: str) -> list[Fraction]:
    text = _fractions(unspaced(text.translate(CHARACTERS), SPACED_IN_PROSE))
    found = (_number(match, _sign(text[max(0, match.start() - 40) : match.start()])) for match in NUMBER.finditer(text))
    return [number for number in found if number is not None]


def unspaced(text: str, spaced: re.Pattern[str] = SPACED) -> str:
    """With thousands that something else than a comma parts as plain digits."""
    return spaced.sub(lambda found: re.sub(r"\D", "", found[0]), text)


def _fractions(text: str) -> str:
    r"""With \frac{3}{4} as 3/4, and 3\frac{1}{2} as 3 1/2."""

    def plain(found: re.Match[str]) -> str:
        whole, minus, above, digit, below_minus, below, below_digit = found.groups(default="")
        minus = "-" if bool(minus) != bool(below_minus) else ""
        return f"{minus}{whole} {above or digit}/{below or below_digit}" if whole else f" {minus}{above or digit}/{below or below_digit}"

    text = text.replace(r"\times", "*").replace(r"\cdot", "*")
    return re.sub(r"-\s+(?=\d+/)", "-", FRACTION.sub(plain, text)) if "frac" in text else text


def _sign(before: str) -> str:
    """Whether what stands before a number is its minus."""
    found = SIGN.search(before)
    if not found:
        return ""
    head = before[: found.start()]
    return "" if (OPERAND if found[2] else OPERATES).search(head) else "-"


def _number(found: re.Match[str], sign: str) -> Fraction | None:
    try:
        if found["whole"]:
            value = Fraction(found["whole"]) + Fraction(found["part"])
        else:
            value = _decimal(found["above"]) / _decimal(re.sub(r"\s", "", found["below"] or "1"))
    except (ValueError, ZeroDivisionError):
        return None
    return -value if sign else value


def _decimal(text: str) -> Fraction:
    value, _, power = re.sub(r"\s|[{}]", "", text.replace(",", "")).partition("*10^")
    return Fraction(value) * Fraction(10) ** int(power or 0)


def _is_percent(text: str) -> bool:
    found = boxes(text)
    return bool(re.search(r"\d\s*\\?(?:%|％|percent)", found[-1] if found else text[-40:]))
