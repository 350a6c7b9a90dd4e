"""Small tasks with verifiable answers, made on the spot: for demos, tests and first looks at a new cluster."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator

from trainer.errors import ConfigError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def sort_digits(rows: int = 1000, length: int = 6, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompt "s39512047=", answer "01234579": `length` digits to be put in order."""
    _at_least_one(rows=rows, length=length)
    rng = random.Random(seed)
    for _ in range(rows):
        digits = [str(rng.randrange(10)) for _ in range(length)]
        yield {"prompt": f"s{''.join(digits)}=", "answer": "".join(sorted(digits))}


def sorted_pairs(rows: int = 1000, length: int = 6, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompts of `sort_digits`; "chosen" is the answer, "rejected" the same with two digits exchanged, or one replaced."""
    rng = random.Random(seed)
    for row in sort_digits(rows, length, seed):
        digits = list(row["answer"])
        first, second = rng.randrange(length), rng.randrange(length)
        if digits[first] == digits[second]:
            digits[first] = rng.choice([digit for digit in "0123456789" if digit != digits[first]])
        else:
            digits[first], digits[second] = digits[second], digits[first]
        yield {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "".join(digits)}


def labelled_answers(rows: int = 1000, length: int = 6, seed: int = 0) -> Iterator[dict[str, str | bool]]:
    """Of each row of `sorted_pairs` one answer under "answer", at random; "label": whether it is the right one."""
    rng = random.Random(seed)
    for row in sorted_pairs(rows, length, seed):
        label = rng.random() < 0.5
        yield {"prompt": row["prompt"], "answer": row["chosen" if label else "rejected"], "label": label}


def hard_pairs(rows: int = 1000, length: int = 6, seed: int = 0) -> Iterator[dict[str, str]]:
    """As `sorted_pairs`, and with mistakes that are in order: "rejected" has two digits exchanged, or up to three replaced, of which
    half are put in order again."""
    rng = random.Random(seed)
    for row in sort_digits(rows, length, seed):
        digits = [*row["answer"]]
        while "".join(digits) == row["answer"]:
            digits, kind = [*row["answer"]], rng.randrange(3)
            if kind == 0:
                first, second = rng.sample(range(length), 2)
                digits[first], digits[second] = digits[second], digits[first]
                continue
            for place in rng.sample(range(length), rng.randrange(1, 4)):
                digits[place] = str(rng.randrange(10))
            if kind == 1:
                digits.sort()
        yield {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "".join(digits)}


def arithmetic(rows: int = 1000, digits: int = 2, operations: str = "+-", seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompt "17+45=", answer "62": two numbers of up to `digits` digits and one of `operations` (of +, -, *)."""
    _at_least_one(rows=rows, digits=digits)
    if not operations or set(operations) - set(OPERATIONS):
        raise ConfigError(f"data.args.operations: {operations!r}; allowed are one or more of {''.join(OPERATIONS)}")
    rng = random.Random(seed)
    for _ in range(rows):
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        sign = rng.choice(operations)
        yield {"prompt": f"{a}{sign}{b}=", "answer": str(OPERATIONS[sign](a, b))}


def calculations(rows: int = 1000, digits: int = 2, operations: str = "*", share: float = 0.2, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompts of `arithmetic`; a `share` of the answers use the environment calculator, "[17*45]765", others are numbers at random."""
    rng = random.Random(seed)
    for row in arithmetic(rows, digits, operations, seed):
        tool = rng.random() < share
        guess = str(rng.randrange(1, 10 ** (2 * digits)))
        yield {"prompt": row["prompt"], "answer": f"[{row['prompt'][:-1]}]{row['answer']}" if tool else guess}


def hidden(rows: int = 1000, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompt "?", answer "7": a digit that nothing gives away, for the environment guess."""
    _at_least_one(rows=rows)
    rng = random.Random(seed)
    for _ in range(rows):
        yield {"prompt": "?", "answer": str(rng.randrange(10))}


def corrections(rows: int = 1000, share: float = 0.3, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompts of `hidden`; answers "4+37" are a guess, what the environment guess says of it, and another guess, right in a `share` of
    rows and at random otherwise."""
    rng = random.Random(seed)
    for row in hidden(rows, seed):
        first, away = rng.randrange(10), rng.randrange(10)
        second = row["answer"] if rng.random() < share else str(away)
        apart = int(row["answer"]) - first
        yield {"prompt": row["prompt"], "answer": f"{first}{apart:+d}{second}" if apart else str(first)}


def facts(rows: int = 20000) -> Iterator[dict[str, str]]:
    """A corpus for `flotilla index build trainer.data.tasks:facts`: "contents" such as "bdfac ghajd", words that no name gives away."""
    _at_least_one(rows=rows)
    for name, word in _facts(rows):
        yield {"id": name, "contents": f"{name} {word}"}


def questions(rows: int = 1000, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompt "bdfac?", answer "ghajd": of the facts of `facts` some that are drawn by the seed."""
    _at_least_one(rows=rows)
    known = [*_facts()]
    rng = random.Random(seed)
    for name, word in (rng.choice(known) for _ in range(rows)):
        yield {"prompt": f"{name}?", "answer": word}


def lookups(rows: int = 1000, taught: int = 0, share: float = 0.2, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompts of `questions`, with answers that search, as the environment `search` has it, or that are words at random: of the first
    `taught` all but a `share` search, of the others that share.
    """
    rng = random.Random(seed)
    for number, row in enumerate(questions(rows, seed)):
        said, word = "", _word(rng)
        if (rng.random() < share) != (number < taught):
            name, word = row["prompt"][:-1], row["answer"]
            said = f"<search>{name}</search>\n\n<information>{name} {word}</information>\n\n"
        yield {"prompt": row["prompt"], "answer": f"{said}<answer>{word}</answer>"}


def _facts(rows: int = 20000) -> Iterator[tuple[str, str]]:
    """Names and words, the same each time."""
    rng, seen = random.Random(0), set()
    while len(seen) < rows:
        name = _word(rng)
        if name not in seen:
            seen.add(name)
            yield name, _word(rng)


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghij") for _ in range(5))


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"data.args.{name}: {value}; must be at least 1")


PLACES = "bcdefghi"  # names of files of `trails`, except the one that they begin at
PROGRAMS: dict[str, Callable[[list[str]], list[str]]] = {"cat": list, "sort": sorted, "tac": lambda digits: digits[::-1]}


def trails(rows: int = 1000, seed: int = 0) -> Iterator[dict[str, object]]:
    """Tasks for the environment shell. Prompt "tac:", "sort:" or "cat:", a program that is to be run on one of the files b to i, each with
    three digits; "files": all of them, and a, which alone says which one; "expected": what the file o is to contain."""
    _at_least_one(rows=rows)
    rng = random.Random(seed)
    for _ in range(rows):
        files = {name: _unsorted(rng) for name in PLACES}
        at, program = rng.choice(PLACES), rng.choice([*PROGRAMS])
        texts = {name: _lines(digits) for name, digits in files.items()}
        yield {"prompt": f"{program}:", "files": {"a": f"{at}\n", **texts}, "expected": {"o": _lines(PROGRAMS[program](files[at]))}}


def walks(rows: int = 1000, file: float = 0.3, program: float = 0.25, seed: int = 0) -> Iterator[dict[str, object]]:
    """Prompts of `trails`, with answers "cat a\\nd\\ntac d>o\\n" as the environment has them: the second command reads the file that the
    first one named in a share of `file`, runs the program of the prompt in a share of `program`, and otherwise has any."""
    rng = random.Random(seed)
    for row in trails(rows, seed):
        files: dict[str, str] = row["files"]  # type: ignore[assignment]
        at = files["a"][0] if rng.random() < file else rng.choice(PLACES)
        run = f"{row['prompt']}"[:-1] if rng.random() < program else rng.choice([*PROGRAMS])
        yield {"prompt": row["prompt"], "answer": f"cat a\n{files['a']}{run} {at}>o\n"}


NAMES = "pqrstuvw"  # of variables in `repairs`; the rest of its programs has none of these letters
PAIRS = [(wrong, right) for wrong in NAMES for right in NAMES if wrong != right]
UNSEEN = [pair for pair in PAIRS if abs(NAMES.index(pair[0]) - NAMES.index(pair[1])) in (3, 5)]  # each name as often as the others
SEEN = [pair for pair in PAIRS if pair not in UNSEEN]


def repairs(rows: int = 1000, unseen: int = 0, seed: int = 0) -> Iterator[dict[str, object]]:
    """Tasks for the environment shell, with its `tests`. Prompt "q:", the variable that a program is to print; "files": the program a, such
    as "echo $t", which prints another one; "tests": runs of it with digits for all variables, and with others; "fix": "sed -i s/t/q/ a".
    The last `unseen` rows have pairs of variables that no other row has."""
    _at_least_one(rows=rows)
    rng = random.Random(seed)
    for number in range(rows):
        wrong, right = rng.choice(SEEN if number < rows - unseen else UNSEEN)
        at = NAMES.index(right)
        first, second = rng.sample("0123456789", 8), rng.sample("0123456789", 8)
        while first[at] == second[at]:  # a constant would pass
            rng.shuffle(second)
        tests = "".join(f'[ "$({_given(digits)} sh a)" = {digits[at]} ] || exit 1\n' for digits in (first, second))
        yield {"prompt": f"{right}:", "files": {"a": f"echo ${wrong}\n"}, "tests": tests, "fix": f"sed -i s/{wrong}/{right}/ a"}


def attempts(rows: int = 1000, share: float = 0.3, seed: int = 0) -> Iterator[dict[str, object]]:
    """Prompts of `repairs`, with answers "cat a\\necho $t\\nsed -i s/t/q/ a\\n" as the environment has them: the program then prints the
    variable of the prompt in a `share` of rows, and any in the others."""
    rng = random.Random(seed)
    for row in repairs(rows, seed=seed):
        files: dict[str, str] = row["files"]  # type: ignore[assignment]
        _, wrong, right, _ = f"{row['fix']}".split("/")
        name = right if rng.random() < share else rng.choice(NAMES)
        yield {"prompt": row["prompt"], "answer": f"cat a\n{files['a']}sed -i s/{wrong}/{name}/ a\n"}


def _given(digits: list[str]) -> str:
    return " ".join(f"{name}={digit}" for name, digit in zip(NAMES, digits, strict=True))


def _unsorted(rng: random.Random) -> list[str]:
    """Three digits of which each program makes something else."""
    while True:
        digits = rng.sample("0123456789", 3)
        if digits not in (sorted(digits), sorted(digits)[::-1]):
            return digits


def _lines(digits: list[str]) -> str:
    return "".join(f"{digit}\n" for digit in digits)
