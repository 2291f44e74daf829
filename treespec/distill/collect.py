"""The first half of ``treespec distill``: training prompts in, a store of the target's answers out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from treespec.distill.answers import Answer, AnswerWriter, Job
from treespec.distill.store import AnswerStore
from treespec.pairs import chat_ids
from treespec.prompts import Prompt

# of five answers, three are greedy: that is what most people decode with, and what the draft is measured on
TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.9)
WINDOW = 512  # prompts of similar length answer together: a batch attends as far as its longest text
PART = 64  # answers per file


def make_jobs(prompts: list[Prompt], tokenizer: Any, longest: int, seed: int) -> list[Job]:
    """Number the prompts, give each a temperature, leave out what is too long, and put like lengths together.

    Args:
        prompts: in the order of their numbers.
        tokenizer: the target's.
        longest: most prompt tokens.
        seed: of the temperatures.
    """
    draw = random.Random(seed)
    jobs = []
    for index, prompt in enumerate(prompts):
        job = Job(index, chat_ids(tokenizer, prompt.turns[:1]), draw.choice(TEMPERATURES))
        if len(job.prompt) <= longest:
            jobs.append(job)
    windows = [jobs[i : i + WINDOW] for i in range(0, len(jobs), WINDOW)]
    # up and down in turn, so that neighbours across windows are alike too
    return [
        job
        for number, window in enumerate(windows)
        for job in sorted(window, key=lambda j: len(j.prompt), reverse=number % 2 == 1)
    ]


def collect(
    model: Any,
    jobs: list[Job],
    folder: str | Path,
    about: dict[str, Any],
    *,
    slots: int = 64,
    new_tokens: int = 144,
    seed: int = 0,
) -> AnswerStore:
    """Answer what has not been answered yet. Ctrl-C keeps every finished answer.

    Args:
        model: the target.
        jobs: all of them; those in the store are skipped.
        folder: of the store.
        about: what identifies the answers.
        slots: answers under way at once.
        new_tokens: most tokens per answer.
        seed: of sampled answers.
    """
    store = AnswerStore(folder, about)
    done = store.done()
    left = [job for job in jobs if job.index not in done]
    if not left:
        return store
    writer = AnswerWriter(model, slots, new_tokens, seed)
    left = [job for job in left if len(job.prompt) + new_tokens <= writer.context]
    finished: list[Answer] = []
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(left), unit="answer", desc="answers", smoothing=0.05)
    tokens = 0
    try:
        with bar:
            for answer in writer.run(left):
                finished.append(answer)
                tokens += len(answer.tokens) - len(answer.job.prompt)
                bar.update()
                bar.set_postfix(tokens=tokens, refresh=False)
                if len(finished) >= PART:
                    part, finished = finished, []
                    store.add(part)
    finally:
        store.add(finished)
    return store
