"""Training prompts for distillation, composed from the templates and slots of ``data/training/prompts.json``.

In a template ``{slot}`` stands for one value of that slot, the same one wherever it recurs, and ``{slot2}`` or
``{slot3}`` for other values of the same slot. A value may itself hold slots.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from treespec.errors import InputError
from treespec.prompts import Prompt, data_dir

_SLOT = re.compile(r"\{([a-z_0-9]+)\}")
_PATIENCE = 500  # repeated collisions after which a category counts as exhausted


def training_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Distinct one-turn prompts, in shuffled order, with categories in proportion to their shares.

    Args:
        count: how many prompts.
        seed: the same seed gives the same prompts.

    Returns:
        ``count`` prompts with ids such as ``train-writing-00012``.

    Raises:
        InputError: if ``count`` is negative, or more than the templates can give.
    """
    if count < 0:
        raise InputError(f"{count} training prompts were asked for; ask for 0 or more")
    rng = random.Random(seed)
    data: dict[str, Any] = json.loads((data_dir() / "training" / "prompts.json").read_text(encoding="utf-8"))
    shared: dict[str, list[str]] = data.pop("shared", {})
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for category, number in _allot(count, {name: int(entry["share"]) for name, entry in data.items()}).items():
        slots = {**shared, **data[category]["slots"]}
        for index in range(number):
            text = _fresh(data[category]["templates"], slots, seen, rng)
            if text is None:
                raise InputError(
                    f"category {category!r} gives no more than {index} of the {number} distinct training prompts "
                    "needed; ask for fewer, or add templates"
                )
            prompts.append(Prompt(f"train-{category}-{index:05d}", category, [text]))
    rng.shuffle(prompts)
    return prompts


def _allot(count: int, shares: dict[str, int]) -> dict[str, int]:
    """Splits ``count`` in proportion to the shares; what rounding leaves goes to the largest remainders."""
    total = sum(shares.values())
    numbers = {name: count * share // total for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: -(count * shares[name] % total))
    for name in by_remainder[: count - sum(numbers.values())]:
        numbers[name] += 1
    return numbers


def _fresh(templates: list[str], slots: dict[str, list[str]], seen: set[str], rng: random.Random) -> str | None:
    """A text not in ``seen``, added to it; none after ``_PATIENCE`` collisions."""
    for _ in range(_PATIENCE):
        text = _fill(rng.choice(templates), slots, rng)
        if text not in seen:
            seen.add(text)
            return text
    return None


def _fill(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """The template with every slot filled, including those inside values."""
    values: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            base = name if name in slots else name.rstrip("0123456789")
            used = {text for other, text in values.items() if other.rstrip("0123456789") == base}
            values[name] = rng.choice([text for text in slots[base] if text not in used] or slots[base])
        return values[name]

    while _SLOT.search(template):
        template = _SLOT.sub(value, template)
    return template
