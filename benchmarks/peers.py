"""The contestants of ``benchmarks.versus``: transformers, treespec, and other libraries, each behind one call.

A peer is offered with a small grid of settings; :func:`tune` picks the fastest on prompts that are not measured. All
peers decode greedily with the very target object of the baseline and with the same independent draft model:

- ``transformers assisted``: ``generate(assistant_model=…)``; the settings are read from the assistant's
  ``generation_config``. Without scikit-learn (as here) transformers leaves the confidence threshold where it was set.
- ``transformers prompt lookup``: ``generate(prompt_lookup_num_tokens=…)``; no draft model.
- ``flashspec``: ``SpeculativeEngine.generate``. Its chain (a model drafter alone) is ``drafter_strategy="bandit"`` with
  one arm; its default, a lookup that falls back to the model, is in the grid too.
- ``economize``: ``apply(model, …).decode``. With an independent draft it drafts chains only (its trees need trained
  heads); lookup with that draft behind it (``hybrid``) is in the grid too. Its ``generate`` refuses the ``cache``
  argument of transformers 5.24, so ``decode`` is called, the loop that ``generate`` would run.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from treespec.api import generate
from treespec.events import Stats
from treespec.packed import pack_linears
from treespec.policies import Policy

Decode = Callable[[list[int], int], list[int]]  # prompt ids, most new tokens -> new ids
Settings = dict[str, Any]


@dataclass
class Contestant:
    """Something that decodes.

    Attributes:
        name: what the table calls it.
        group: ``"baseline"``, ``"treespec"`` or ``"peer"``.
        decode: prompt ids and the most new tokens to new ids.
        fast: the fast setting of its target, for treespec's.
        policy: its policy's command-line form, for treespec's.
        settings: what tuning chose, for peers.
        stats: the last run's steps, for treespec's.
    """

    name: str
    group: str
    decode: Decode
    fast: str = "off"
    policy: str = ""
    settings: Settings = field(default_factory=dict)
    stats: Stats | None = None

    def run(self, ids: list[int], n: int) -> list[int]:
        """The new token ids, up to and with the end-of-text token, at most ``n``."""
        return self.decode(ids, n)


@dataclass(frozen=True)
class Peer:
    """A library that can be tuned: ``make`` turns one of the grid's settings into a call; the first is the default."""

    name: str
    grid: tuple[Settings, ...]
    make: Callable[[Settings], Decode]


def end_ids(model: Any) -> frozenset[int]:
    """The target's end-of-text ids."""
    found = model.generation_config.eos_token_id
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def until_end(tokens: Sequence[int], ends: frozenset[int], n: int) -> list[int]:
    """At most ``n`` tokens, up to and with the first end-of-text token."""
    tokens = list(tokens[:n])
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


def by_transformers(model: Any, **options: Any) -> Decode:
    """``model.generate``, greedily."""
    ends = end_ids(model)
    pad = model.generation_config.pad_token_id
    options["pad_token_id"] = pad if pad is not None else min(ends, default=0)

    def decode(ids: list[int], n: int) -> list[int]:
        prompt = torch.tensor([ids], device=model.device)
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=n, **options)
        return until_end(out[0, len(ids) :].tolist(), ends, n)

    return decode


def baselines(model: Any, left_out: dict[str, str]) -> list[Contestant]:
    """Plain transformers, and the same over packed linear layers; where they cannot be packed, the reason is noted.

    The packed model is a second module tree over the same parameters, so it costs no second target.
    """
    found = [Contestant("transformers", "baseline", by_transformers(model))]
    name = "transformers + packed linears"
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    try:
        if pack_linears(twin):
            return [*found, Contestant(name, "baseline", by_transformers(twin))]
        left_out[name] = "no linear layer can be packed here"
    except RuntimeError as error:  # oneDNN without the instructions for this dtype
        left_out[name] = reason(error)
    return found


def by_treespec(target: Any, drafter: Any, policy: Policy, fast: str) -> Contestant:
    """One policy of treespec's; ``drafter`` is made once, outside the time taken."""
    name = f"treespec {policy.spec()}" + ("" if fast == "off" else ", fast")

    def decode(ids: list[int], n: int) -> list[int]:
        drafts = drafter if policy.levels > 0 else None
        result = generate(target, drafts, ids, policy=policy, do_sample=False, max_new_tokens=n)
        contestant.stats = result.stats
        return result.tokens

    contestant = Contestant(name, "treespec", decode, fast, policy.spec())
    return contestant


def peers(target: Any, draft: Any, folder: str) -> list[Peer]:
    """Every peer there is; those that want an independent draft are left out by the caller where there is none.

    Args:
        target: the baseline's model.
        draft: the independent draft model, or None.
        folder: where it was loaded from (economize loads its own copy), or "".
    """
    lookup = Peer(
        "transformers prompt lookup",
        tuple({"prompt_lookup_num_tokens": n} for n in (10, 3)),
        lambda settings: by_transformers(target, **settings),
    )
    if draft is None:
        return [lookup]
    assisted = tuple(
        {"num_assistant_tokens": n, "assistant_confidence_threshold": c} for c in (0.4, 0.0) for n in (4, 2, 6)
    )
    flash = tuple({"strategy": s} for s in ("composite-g6-f2", "composite-g4")) + tuple(
        {"strategy": "chain", "gamma": n} for n in (3, 2, 5)
    )
    economize = tuple(
        {"mode": mode, "cycle_length": n, "min_confidence": c}
        for mode, n, c in (
            ("chain", 4, None), ("chain", 3, None), ("chain", 6, None), ("chain", 6, 0.4),
            ("hybrid", 4, None), ("hybrid", 6, 0.4),
        )
    )  # fmt: skip
    return [
        lookup,
        Peer("transformers assisted", assisted, lambda settings: _assisted(target, draft, settings)),
        Peer("flashspec", flash, lambda settings: _flashspec(target, draft, settings)),
        Peer("economize", economize, _economize(target, folder)),
    ]


def _assisted(target: Any, draft: Any, settings: Settings) -> Decode:
    inner = by_transformers(target, assistant_model=draft)

    def decode(ids: list[int], n: int) -> list[int]:
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        for name, value in settings.items():
            setattr(draft.generation_config, name, value)
        return inner(ids, n)

    return decode


def _flashspec(target: Any, draft: Any, settings: Settings) -> Decode:
    flash, engine = importlib.import_module("flashspec"), importlib.import_module("flashspec.engine")
    for name in list(logging.root.manager.loggerDict):  # it warns that one arm is one arm
        if name.split(".")[0] == "flashspec":
            logging.getLogger(name).setLevel(logging.ERROR)
    ends, device, dtype = end_ids(target), target.device, target.dtype
    chain = settings["strategy"] == "chain"
    config = flash.FlashSpecConfig(
        device=str(device),
        drafter_strategy="bandit" if chain else settings["strategy"],
        bandit=flash.BanditConfig(n_arms=1),
        eos_token_ids=tuple(sorted(ends)),
        sampling=flash.SamplingConfig(temperature=0.0, gamma=settings.get("gamma", 4)),
    )
    drafters = [engine.HuggingFaceDrafter("draft", device, dtype, temperature=0.0, model=draft)]
    machine = flash.SpeculativeEngine(config, drafters, engine.TargetModel("target", device, dtype, model=target))

    def decode(ids: list[int], n: int) -> list[int]:
        with torch.no_grad():
            result = machine.generate(torch.tensor([ids], device=device), max_new_tokens=n)
        return until_end(result.output_ids[0, : result.n_tokens_generated].tolist(), ends, n)

    return decode


def _economize(target: Any, folder: str) -> Callable[[Settings], Decode]:
    wrapped: dict[str, Any] = {}  # mode -> model; each loads the draft once

    def model_of(library: Any, mode: str) -> Any:
        if mode not in wrapped:
            config = importlib.import_module("economize.techniques.draft_model").DraftModelConfig(model=folder)
            if mode == "hybrid":
                config = importlib.import_module("economize.techniques.hybrid").HybridConfig(fallback=config)
            wrapped[mode] = library.apply(target, config)
        return wrapped[mode]

    def make(settings: Settings) -> Decode:
        library, ends = importlib.import_module("economize"), end_ids(target)
        logging.getLogger("economize").setLevel(logging.ERROR)  # it misses the tokenizer of a draft without one
        model = model_of(library, settings["mode"])
        how = library.DecodeConfig(
            cycle_length=settings["cycle_length"], min_confidence=settings["min_confidence"], verifier="greedy"
        )

        def decode(ids: list[int], n: int) -> list[int]:
            prompt = torch.tensor(ids, device=target.device)
            result = model.decode(prompt, n, decoding=how, stop=ends or None)
            return until_end(torch.as_tensor(result.tokens).tolist(), ends, n)

        return decode

    return make


def tune(
    peer: Peer, prompts: list[list[int]], n: int, tell: Callable[[str], None]
) -> tuple[Contestant, list[Settings]]:
    """The fastest of a peer's settings by seconds per token, interleaved; the first one where there are no prompts.

    Returns:
        The contestant, and what every setting took, for the record.

    Raises:
        Exception: what the peer raised, if none of its settings works.
    """
    ways: list[tuple[Settings, Decode]] = []
    record: list[Settings] = []
    failure: Exception | None = None
    for settings in peer.grid if prompts else peer.grid[:1]:
        try:
            decode = peer.make(settings)
            decode(prompts[0] if prompts else [1, 2, 3], min(n, 8))  # warm-up
            ways.append((settings, decode))
        except Exception as error:
            failure = failure or error
            record.append({**settings, "failed": reason(error)})
    if not ways:
        raise failure or RuntimeError("no settings")
    seconds, tokens = [0.0] * len(ways), [0] * len(ways)
    for turn, ids in enumerate(prompts):
        for k in range(len(ways)):
            which = (turn + k) % len(ways)
            tell(f"tuning {peer.name} {show(ways[which][0])}")
            start = perf_counter()
            out = ways[which][1](ids, n)
            seconds[which] += perf_counter() - start
            tokens[which] += len(out)
    cost = [1e3 * s / max(t, 1) for s, t in zip(seconds, tokens)]
    record += [{**settings, "ms_per_token": round(c, 3)} for (settings, _), c in zip(ways, cost)]
    best = min(range(len(ways)), key=cost.__getitem__)
    settings, decode = ways[best]
    return Contestant(f"{peer.name} ({show(settings)})", "peer", decode, settings=settings), record


def show(settings: Settings) -> str:
    """Settings in a few words."""
    short = {"num_assistant_tokens": "tokens", "assistant_confidence_threshold": "confidence"}
    short |= {"prompt_lookup_num_tokens": "tokens", "min_confidence": "confidence", "cycle_length": "cycle"}
    words = [v if k in ("mode", "strategy") else f"{short.get(k, k)}={v}" for k, v in settings.items() if v is not None]
    return ", ".join(words)


def reason(error: BaseException) -> str:
    """Why something is left out, in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install 'treespec[bench]')"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]
