"""The training loop of both kinds of draft: seeded order, warm-up and decay, checkpoints, a bar that can be stopped.

A checkpoint holds weights, optimiser states and the step; the order of the batches follows from seed and epoch alone,
so a run that was stopped and resumed sees the same batches as one that was not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from treespec.distill.store import Text
from treespec.errors import InputError, TreespecError
from treespec.files import check_regular, make_folder, write_whole

EVERY = 100  # steps between checkpoints
WARM_UP = 0.03  # shares of the run
DECAY = 0.4


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        epochs: passes over the texts.
        tokens: answer tokens per batch, about.
        rate: highest learning rate.
        weight_decay: of matrices.
        seed: of weights and order.
    """

    epochs: float = 4.0
    tokens: int = 600
    rate: float = 5e-4
    weight_decay: float = 0.05
    seed: int = 0


def held_out(text: Text) -> bool:
    """Every fiftieth prompt measures and never trains."""
    return text.index % 50 == 0


def batches(texts: Sequence[Text], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the texts of each batch: like lengths together, batches in random order."""
    draw = random.Random(f"{seed}/{epoch}")
    order = sorted(range(len(texts)), key=lambda i: (texts[i].prompt // 16, draw.random()))
    out: list[list[int]] = [[]]
    for i in order:
        rows = [*out[-1], i]
        if len(out[-1]) and max(len(texts[r].tokens) - texts[r].prompt for r in rows) * len(rows) > tokens:
            out.append([i])
        else:
            out[-1].append(i)
    draw.shuffle(out)
    return out


def optimiser(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in trained if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=plan.rate, betas=(0.9, 0.95), fused=True)


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, a plateau, then down to zero."""
    warm, decay = max(1, math.ceil(WARM_UP * steps)), max(1, math.ceil(DECAY * steps))
    return min(1.0, (step + 1) / warm, (steps - step) / decay)


def train(
    model: nn.Module,
    texts: Sequence[Text],
    loss: Callable[[list[int], float], tuple[Tensor, dict[str, float]]],
    plan: Plan,
    folder: Path,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Train to the end, going on from ``folder/checkpoint.pt`` if there is one.

    Args:
        model: trained in place.
        texts: what is learnt from.
        loss: of a batch (indices into ``texts``) at a share of the run (0 to 1), and figures to show.
        plan: how.
        folder: for the checkpoint.
        about: what else the run depends on; a checkpoint of another run is refused.

    Returns:
        ``steps``, ``losses`` (every EVERY steps, smoothed).

    Raises:
        InputError: if there is nothing to learn from.
    """
    if not texts:
        raise InputError("there are no answers to learn from; collect some first")
    per_epoch = len(batches(texts, plan.tokens, plan.seed, 0))
    steps = max(1, round(plan.epochs * per_epoch))
    made = optimiser(model, plan)
    about = {**about, "steps": steps, "plan": str(plan)}
    start, losses, smooth = _resume(model, made, folder / "checkpoint.pt", about)
    bar = tqdm(total=steps, initial=start, desc="training", unit="step", smoothing=0.05)
    with bar:
        for step, rows in _order(texts, plan, start, steps):
            for group in made.param_groups:
                group["lr"] = plan.rate * rate_factor(step, steps)
            torch.manual_seed((plan.seed * 1_000_003 + step) % 2**64)  # of whatever noise the loss draws
            value, figures = loss(rows, step / steps)
            value.backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            made.step()
            made.zero_grad(set_to_none=True)
            now = value.item()
            smooth = now if smooth is None else 0.98 * smooth + 0.02 * now
            bar.update()
            bar.set_postfix(loss=f"{smooth:.3f}", **{k: f"{v:.3f}" for k, v in figures.items()}, refresh=False)
            if (step + 1) % EVERY == 0 or step + 1 == steps:
                losses.append((step + 1, round(smooth, 4)))
                _save(model, made, folder / "checkpoint.pt", step + 1, about, losses, smooth)
    return {"steps": steps, "losses": losses}


def _order(texts: Sequence[Text], plan: Plan, start: int, steps: int) -> Iterator[tuple[int, list[int]]]:
    step = epoch = 0
    while step < steps:
        for rows in batches(texts, plan.tokens, plan.seed, epoch):
            if step >= start:
                yield step, rows
            step += 1
            if step >= steps:
                return
        epoch += 1


def _save(
    model: nn.Module, made: Any, path: Path, step: int, about: dict[str, Any], losses: list[Any], smooth: float
) -> None:
    state = {
        "model": {n: p.detach() for n, p in model.named_parameters() if p.requires_grad},
        "optimiser": made.state_dict(),
        "step": step,
        "about": about,
        "losses": losses,
        "smooth": smooth,
    }
    write_whole(path, lambda temporary: torch.save(state, temporary))


def _resume(model: nn.Module, made: Any, path: Path, about: dict[str, Any]) -> tuple[int, list[Any], float | None]:
    if not path.exists():
        make_folder(path.parent)
        return 0, [], None
    try:
        check_regular(path)
        return _restored(model, made, path, about)
    except TreespecError:
        raise
    except Exception as error:  # whatever a broken archive or a wrong state may raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"{path} is no checkpoint that can be gone on with ({type(error).__name__}: {reason[:160]}); delete it to "
            "start again"
        ) from None


def _restored(model: nn.Module, made: Any, path: Path, about: dict[str, Any]) -> tuple[int, list[Any], float | None]:
    state = torch.load(path, weights_only=True, map_location="cpu")  # numbers, strings and tensors; no code
    odd = next((k for k in {**state["about"], **about} if state["about"].get(k) != about.get(k)), None)
    if odd is not None:
        raise InputError(
            f"{path} belongs to another run ({odd} was {state['about'].get(odd)!r}, now {about.get(odd)!r}); use the "
            "same settings and answers to go on, or delete it to start again"
        )
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in state["model"].items():
            named[name].copy_(value)
    made.load_state_dict(state["optimiser"])
    step, losses, smooth = int(state["step"]), list(state["losses"]), state["smooth"]
    if not 0 <= step <= about["steps"]:
        raise ValueError(f"step {step} of {about['steps']}")
    return step, losses, None if smooth is None else float(smooth)
