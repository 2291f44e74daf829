"""What the target answered, on disk: parts of a few dozen answers, each written whole or not at all.

A part is one safetensors file: the tokens of all its answers behind one another, the hidden states in float16, and per
answer its number, prompt length, length and temperature. Reading maps the files into memory; nothing is copied until a
batch is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec.distill.answers import Answer
from treespec.errors import InputError
from treespec.files import check_regular, make_folder, read_json, write_json, write_whole

NUMBERED = re.compile(r"part-\d{1,9}\.safetensors")


@dataclass
class Text:
    """One stored answer.

    Attributes:
        index: its prompt's number.
        tokens: ``[n]`` int32, prompt and answer.
        prompt: how many of them are the prompt.
        temperature: 0 if greedy.
        features: ``[n - 1, H]`` float16, mapped from the file.
    """

    index: int
    tokens: Tensor
    prompt: int
    temperature: float
    features: Tensor


class AnswerStore:
    """A folder of answers that grows part by part.

    Args:
        folder: made if missing.
        about: what the answers depend on (target, seed, …); a folder that holds others' answers is refused.

    Raises:
        InputError: if the folder belongs to another run.
    """

    def __init__(self, folder: str | Path, about: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        if about is None and not (self.folder / "about.json").exists():
            raise InputError(f"{self.folder} holds no answers; run `treespec distill` first")
        make_folder(self.folder)
        note = self.folder / "about.json"
        if note.exists():
            was = read_json(note)
            if about is not None and was != about:
                odd = next(k for k in {**was, **about} if was.get(k) != about.get(k))
                raise InputError(
                    f"{self.folder} holds answers made with {odd}={was.get(odd)!r}, not {about.get(odd)!r}; "
                    "give another folder, or the same settings to go on"
                )
            about = was
        else:
            write_json(note, about)
        self.about: dict[str, Any] = about or {}

    @property
    def parts(self) -> list[Path]:
        """The finished parts, in order."""
        return sorted(p for p in self.folder.glob("part-*.safetensors") if NUMBERED.fullmatch(p.name))

    def done(self) -> set[int]:
        """Numbers of the prompts that have been answered."""
        out: set[int] = set()
        for part in self.parts:
            with _opened(part) as read:
                out |= set(read("index").tolist())
        return out

    def add(self, answers: Sequence[Answer]) -> None:
        """Write one part."""
        if not answers:
            return
        number = 1 + max((int(part.stem[5:]) for part in self.parts), default=-1)
        tensors = {
            "index": torch.tensor([a.job.index for a in answers]),
            "prompt": torch.tensor([len(a.job.prompt) for a in answers]),
            "length": torch.tensor([len(a.tokens) for a in answers]),
            "temperature": torch.tensor([a.job.temperature for a in answers]),
            "tokens": torch.cat([torch.tensor(a.tokens, dtype=torch.int32) for a in answers]),
            "features": torch.cat([a.features for a in answers]),
        }
        write_whole(self.folder / f"part-{number:05d}.safetensors", lambda path: save_file(tensors, path))

    def texts(self) -> list[Text]:
        """All answers, ordered by prompt number; features stay on disk until they are used."""
        out: dict[int, Text] = {}
        for part in self.parts:
            with _opened(part) as read:
                lengths, prompts, index, heat = (
                    read(name).tolist() for name in ("length", "prompt", "index", "temperature")
                )
                tokens, features = read("tokens"), read("features")
                _check_part(lengths, prompts, index, heat, tokens, features)
            at, row = 0, 0
            for n, p, i, t in zip(lengths, prompts, index, heat):
                out.setdefault(i, Text(i, tokens[at : at + n], p, t, features[row : row + n - 1]))
                at, row = at + n, row + n - 1
        return [out[i] for i in sorted(out)]


@contextmanager
def _opened(part: Path) -> Iterator[Callable[[str], Tensor]]:
    """A part as a function from names to tensors; whatever is wrong with it is one sentence."""
    try:
        check_regular(part)
        with safe_open(part, framework="pt") as file:
            yield file.get_tensor
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise InputError(f"{part} cannot be read ({error}); delete it and its answers are made again") from None


def _check_part(
    lengths: list[Any], prompts: list[Any], index: list[Any], heat: list[Any], tokens: Tensor, features: Tensor
) -> None:
    """Refuse a part whose tensors are not of the answers that it speaks of.

    Raises:
        ValueError: for any other number of anything.
    """
    columns = (lengths, prompts, index, heat)
    if any(not isinstance(column, list) or len(column) != len(lengths) for column in columns):
        raise ValueError("its tensors are of different numbers of answers")
    if not all(isinstance(n, int) for column in columns[:3] for n in column) or min([*index, 0]) < 0:
        raise ValueError("its numbers are no whole numbers")
    if any(not 0 < p < n for p, n in zip(prompts, lengths)):
        raise ValueError("an answer has no prompt, or nothing behind it")
    if tokens.shape != (sum(lengths),) or features.dim() != 2 or len(features) != sum(lengths) - len(lengths):
        raise ValueError("its tokens or features are not as many as it says")
