"""Prompt files: JSON Lines with ``{"id", "category", "turns": [..]}`` (``question_id`` is accepted for ``id``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.files import parse_json, read_text


@dataclass
class Prompt:
    """One prompt: its id, its category, and the user's turns."""

    id: str
    category: str
    turns: list[str]


def data_dir() -> Path:
    """The repo's ``data/``, or the copy inside an installed package.

    Raises:
        InputError: if neither exists.
    """
    here = Path(__file__).resolve().parent
    for place in (here / "data", here.parent / "data"):
        if (place / "prompts").is_dir():
            return place
    raise InputError(f"treespec's data folder is missing beside {here}; reinstall the package")


def mixed_prompts() -> Path:
    """The repo's own prompts."""
    return data_dir() / "prompts" / "mixed.jsonl"


def read_prompts(path: str | Path) -> list[Prompt]:
    """All prompts of a file.

    Raises:
        InputError: if the file is missing, empty or malformed, or an id comes twice, with the line number.
    """
    try:
        lines = read_text(path).split("\n")  # not splitlines: a text may hold U+2028
    except InputError as error:
        raise InputError(f"prompt file: {error}") from None
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for n, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_parse(line, f"{path}, line {n}"))
            if seen.setdefault(prompts[-1].id, n) != n:  # recordings and results are told apart by it
                raise InputError(
                    f"{path}, line {n}: the id {prompts[-1].id} is that of line {seen[prompts[-1].id]} too; "
                    "give every prompt an id of its own"
                )
    if not prompts:
        raise InputError(f"prompt file {path} is empty; expected one JSON object per line")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    expected = 'expected {"id": …, "category": …, "turns": ["…"]}'
    try:
        row: Any = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); {expected}") from None
    if not isinstance(row, dict) or not isinstance(row.get("turns"), list) or not row["turns"]:
        raise InputError(f"{where}: no turns; {expected}")
    if not all(isinstance(turn, str) and turn.strip() for turn in row["turns"]):
        raise InputError(f"{where}: every turn must be non-empty text; {expected}")
    name, category = row.get("id", row.get("question_id")), row.get("category") or ""
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise InputError(f"{where}: no id; {expected}")
    if not isinstance(category, str):
        raise InputError(f"{where}: the category must be text; {expected}")
    prompt = Prompt(str(name), category, row["turns"])
    if not all(map(is_text, (prompt.id, category, *prompt.turns))):
        raise InputError(f"{where}: half a surrogate pair is no text; {expected}")
    return prompt


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: tokenizers and files speak nothing else."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def filler_ids(prompts: list[Prompt], tokenizer: Any, length: int, start: int = 0) -> list[int]:
    """Exactly ``length`` token ids of the prompts' first turns, one after another and round again.

    Args:
        prompts: whose text it is.
        tokenizer: the target's.
        length: tokens wanted.
        start: prompt to begin with.
    """
    ids: list[int] = []
    while len(ids) < length:
        text = prompts[start % len(prompts)].turns[0]
        ids += tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"]
        start += 1
    return ids[:length]


def lengthened(prompt: Prompt, filler: list[int], tokenizer: Any, count: Callable[[str], int], length: int) -> str:
    """The prompt's first turn with other text before it, so that it has at most ``length`` tokens, most often exactly.

    Args:
        prompt: asked last, so that it is what gets answered.
        filler: ids of the text before it.
        tokenizer: the target's.
        count: tokens of a user's turn, the chat template's included.
        length: tokens wanted.

    Raises:
        InputError: if the prompt alone is longer.
    """
    own = prompt.turns[0]
    room = length - count(own)
    if room < 0:
        raise InputError(f"prompt {prompt.id} alone has {count(own)} tokens, more than an input length of {length}")
    text, take = own, min(room, len(filler))
    while take > 0:  # text is not cut where tokens are, so a few more or fewer may come out
        text = tokenizer.decode(filler[:take]) + "\n\n" + own
        over = count(text) - length
        if over <= 0:
            return text
        take -= over
    return own


def digest(prompts: Sequence[Prompt]) -> str:
    """What tells sets of prompts apart in a trace: 16 hexadecimal digits."""
    asked = json.dumps([(p.id, p.category, p.turns[0]) for p in prompts])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
