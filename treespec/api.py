"""The two ways in: :func:`generate`, and the same engine behind ``model.generate(custom_generate=…)``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from treespec.decode import Decoding
from treespec.drafters import Drafter, HeadDrafter, ModelDrafter, NgramDrafter
from treespec.drafters.cached import CachedDrafter
from treespec.errors import InputError, VocabularyError
from treespec.events import Generation, StepEvent
from treespec.head import FeatureHead, check_fits
from treespec.model import TreeModel
from treespec.policies import Autoregressive, DynamicTreePruner, Policy, parse_policy
from treespec.request import Request, check_ids, check_mask, from_prepared, prepare, take_stop_strings
from treespec.verify import make_rule

PADDING = 0.1  # vocabularies that differ by more than this are not one vocabulary with padding
ALIGNED = 64  # but small ones may: heads are padded to a multiple of 64


def generate(
    target: Any,
    draft: Any = None,
    inputs: Any = None,
    *,
    policy: Policy | str | None = None,
    rule: str = "match",
    seed: int | None = 0,
    tokenizer: Any = None,
    streamer: Any = None,
    on_step: Callable[[StepEvent], None] | None = None,
    **generation: Any,
) -> Generation:
    """Decode with a token tree; the text is the target's own.

    Args:
        target: a transformers causal LM, unmodified.
        draft: a causal LM of the same vocabulary, a :class:`treespec.head.FeatureHead`, ``"ngram"``, a
            :class:`Drafter`, or None for plain decoding.
        inputs: prompt: token ids ``[1, L]`` (tensor, list, or a tokenizer's output), or text with ``tokenizer``.
        policy: a policy or its command-line form; default :class:`DynamicTreePruner`, plain without a draft.
        rule: acceptance rule, one of :data:`treespec.verify.RULES`; greedy decoding makes them one.
        seed: of the sampling, if ``do_sample``; None draws one from torch's global generator.
        tokenizer: needed for text prompts, ``stop_strings`` and :attr:`Generation.text`.
        streamer: a transformers streamer; it gets the prompt, every emitted token, then ``end()``.
        on_step: called with every :class:`StepEvent` as it happens.
        **generation: anything that ``target.generate`` takes; it means what it means there.

    Returns:
        The token ids, the text, and every step with its tree and times.

    Raises:
        TreespecError: for anything that cannot be decoded, before any forward.
    """
    decoding = start(
        target, draft, inputs, policy=policy, rule=rule, seed=seed, tokenizer=tokenizer, streamer=streamer, **generation
    )
    events = []
    for event in decoding:
        events.append(event)
        event.tree.tokenizer = tokenizer
        if on_step is not None:
            on_step(event)
    return Generation(
        sequences=decoding.sequences,
        prompt_length=decoding.request.input_ids.shape[1],
        steps=events,
        tokenizer=tokenizer,
        scores=tuple(decoding.scores) or None,
        logits=tuple(decoding.logits) or None,
        cache=decoding.cache,
    )


def start(
    target: Any,
    draft: Any,
    inputs: Any,
    *,
    policy: Policy | str | None = None,
    rule: str = "match",
    seed: int | None = 0,
    tokenizer: Any = None,
    streamer: Any = None,
    **generation: Any,
) -> Decoding:
    """Like :func:`generate`, but return the loop itself: iterate over it for the steps."""
    owner = TreeModel(target)
    ids, mask = token_ids(inputs, tokenizer, owner)
    if generation.get("attention_mask") is not None:
        mask = as_mask(generation["attention_mask"], owner)
    if mask is not None:
        check_ids(ids)
        check_mask(mask, ids)  # transformers would stretch one of another length
        generation["attention_mask"] = mask
    request = prepare(take_stop_strings(target, generation, tokenizer), ids, **generation)
    return _decoding(owner, request, draft, policy, rule, seed, streamer)


def steps(target: Any, draft: Any, inputs: Any, **options: Any) -> Iterator[StepEvent]:
    """The steps of :func:`generate`, one by one, as they happen."""
    return iter(start(target, draft, inputs, **options))


def custom_generate(
    draft: Any = None,
    policy: Policy | str | None = None,
    *,
    rule: str = "match",
    seed: int | None = None,
    streamer: Any = None,
    on_step: Callable[[StepEvent], None] | None = None,
) -> Callable[..., Any]:
    """The engine as transformers' decoding method: ``model.generate(**inputs, custom_generate=custom_generate(…))``.

    Processors, criteria, generation config and the return type are the caller's. Two things transformers does not hand
    to a callable, so they are bound here or passed otherwise: the **streamer** (transformers would put the prompt to it
    and then drop it), and the tokenizer, so stop strings go in as
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.

    Args:
        draft: as in :func:`generate`; a ``draft=`` given to ``model.generate`` wins.
        policy: as in :func:`generate`; a ``policy=`` given to ``model.generate`` wins.
        rule: acceptance rule.
        seed: of the sampling; None takes it from torch's global generator, so ``torch.manual_seed`` counts.
        streamer: gets the prompt, the tokens, then ``end()``.
        on_step: called with every step.
    """
    bound = {"draft": draft, "policy": policy}

    def decode(model: Any, input_ids: Tensor, draft: Any = None, policy: Any = None, **prepared: Any) -> Any:
        owner = TreeModel(model)
        request = from_prepared(input_ids, **prepared)
        chosen = draft if draft is not None else bound["draft"]
        rules = policy if policy is not None else bound["policy"]
        decoding = _decoding(owner, request, chosen, rules, rule, seed, streamer)
        for event in decoding:
            if on_step is not None:
                on_step(event)
        return _as_transformers(decoding)

    return decode


def _as_transformers(decoding: Decoding) -> Any:
    if not decoding.request.config.return_dict_in_generate:
        return decoding.sequences
    return GenerateDecoderOnlyOutput(
        sequences=decoding.sequences,
        scores=tuple(decoding.scores) or None,
        logits=tuple(decoding.logits) or None,
        cache=decoding.cache,
    )


def _decoding(
    owner: TreeModel, request: Request, draft: Any, policy: Any, rule: str, seed: int | None, streamer: Any
) -> Decoding:
    chosen = make_policy(policy, draft)
    rules = make_rule(rule, sample=request.sample, seed=seed, vocabulary=owner.vocabulary)
    # what is wrong with the request is said before any forward, those of the self-checks included
    rules.check(chosen)
    owner.limits.check_prompt(len(request.visible), request.most_new)
    owner.checked()
    drafter = make_drafter(draft, owner) if chosen.levels > 0 else None
    if chosen.levels > 0 and drafter is None:
        raise InputError(
            f"policy {chosen.spec()!r} needs a draft; give draft= a model or 'ngram', or use policy 'plain'"
        )
    return Decoding(owner, request, drafter, chosen, rules, streamer)


def make_policy(policy: Policy | str | None, draft: Any) -> Policy:
    """A policy from what a caller may give."""
    if policy is None:
        return Autoregressive() if draft is None else DynamicTreePruner()
    return parse_policy(policy) if isinstance(policy, str) else policy


def make_drafter(draft: Any, owner: TreeModel) -> Drafter | None:
    """A drafter from what a caller may give, for one text.

    Of our own drafters it is a copy that shares models and corpora: texts decoded at the same time, from one pair say,
    would otherwise mix. A drafter of another kind is taken as it is and serves one text at a time.

    Raises:
        InputError: for something that is no drafter.
        VocabularyError: if a draft model's vocabulary cannot be the target's.
    """
    if draft is None or draft == "none":
        return None
    if draft == "ngram":
        return NgramDrafter()
    if hasattr(draft, "grow") and hasattr(draft, "commit"):
        own: Any = copy.copy(draft) if isinstance(draft, (CachedDrafter, NgramDrafter)) else draft
        return cast(Drafter, own)
    if isinstance(draft, FeatureHead):
        check_fits(draft.config, owner.model)
        return HeadDrafter(draft)
    if not hasattr(draft, "config"):
        got = repr(draft) if isinstance(draft, (str, int, float)) else f"a {type(draft).__name__}"
        raise InputError(f"draft must be a causal LM, a feature head, a Drafter, 'ngram' or None; got {got}")
    check_vocabularies(owner.vocabulary, int(draft.config.get_text_config(decoder=True).vocab_size))
    return ModelDrafter(draft)


def check_vocabularies(target: int, draft: int, target_tokenizer: Any = None, draft_tokenizer: Any = None) -> None:
    """Refuse a draft whose ids mean something else.

    Sizes may differ by padding. With both tokenizers at hand the tokens themselves are compared, and then sizes may
    differ by any amount.

    Raises:
        VocabularyError: naming the difference.
    """
    if target_tokenizer is not None and draft_tokenizer is not None:
        mine, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        wrong = next((t for t, i in theirs.items() if i < target and mine.get(t, i) != i), None)
        shared = sum(mine.get(t) == i for t, i in theirs.items())
        if wrong is not None or shared < 0.5 * min(len(mine), len(theirs)):
            example = f"; token {wrong!r} has id {theirs[wrong]} there and {mine[wrong]} here" if wrong else ""
            raise VocabularyError(
                f"the draft's tokenizer is not the target's ({shared:,} of {len(theirs):,} tokens agree{example}); "
                "use a draft of the target's family, or --draft ngram"
            )
        return
    if abs(target - draft) >= max(ALIGNED, PADDING * max(target, draft)):
        raise VocabularyError(
            f"the draft has {draft:,} tokens and the target {target:,}: too different for one vocabulary with padding; "
            "use a draft of the target's family, or draft='ngram'"
        )


def token_ids(inputs: Any, tokenizer: Any, owner: TreeModel) -> tuple[Tensor, Tensor | None]:
    """``[1, L]`` int64 ids on the target's device, and an attention mask if one was given.

    A flat list of ids is taken whole: nothing in it is padding, though some token may look like it.

    Raises:
        InputError: if this is no prompt.
    """
    mask = None
    if isinstance(inputs, str):
        if tokenizer is None:
            raise InputError("a text prompt needs tokenizer=; or pass token ids")
        inputs = tokenizer(inputs, return_tensors="pt")
    if isinstance(inputs, Mapping):
        if "input_ids" not in inputs:
            raise InputError(f"the prompt must hold input_ids; got {', '.join(map(repr, inputs)) or 'nothing'}")
        mask, inputs = inputs.get("attention_mask"), inputs["input_ids"]
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iuf":
        inputs = torch.from_numpy(inputs.astype(np.int64 if inputs.dtype.kind != "f" else np.float32))
    if isinstance(inputs, Sequence):
        try:
            inputs = torch.tensor(inputs)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InputError("the prompt must be text, a tensor, or a list of token ids") from None
        inputs = inputs if inputs.numel() else inputs.long()
        if mask is None and inputs.dim() == 1:
            mask = torch.ones_like(inputs)[None]
    if not isinstance(inputs, Tensor):
        raise InputError(f"the prompt must be text, a tensor, or a list of token ids; got {type(inputs).__name__}")
    if inputs.dim() == 1:
        inputs = inputs[None]
    if (
        inputs.numel()
        and not inputs.is_floating_point()
        and not 0 <= int(inputs.min()) <= int(inputs.max()) < owner.embedded
    ):
        raise InputError(
            f"token ids must be from 0 to {owner.embedded - 1}; got {int(inputs.min())} to {int(inputs.max())}"
        )
    ids = inputs if inputs.is_floating_point() or inputs.dtype == torch.bool else inputs.long()
    return ids.to(owner.device), mask if mask is None else as_mask(mask, owner)


def as_mask(mask: Any, owner: TreeModel) -> Tensor:
    """An attention mask ``[1, L]`` as the ids are taken: a tensor or lists, with or without the batch dimension.

    Raises:
        InputError: if this is no mask.
    """
    try:
        table = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise InputError("attention_mask must be a tensor or a list of zeros and ones") from None
    return (table[None] if table.dim() == 1 else table).to(owner.device)
