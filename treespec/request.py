"""What transformers makes of a call to ``generate``: processors, criteria, lengths, prompt.

treespec does not read generation arguments itself. It lets the target's own ``generate`` prepare everything and catches
the result where the decoding method would start, so every argument means exactly what it means there.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria, TemperatureLogitsWarper
from transformers.cache_utils import DynamicCache

from treespec.cache import TreeCache
from treespec.errors import InputError, TreespecError

COLD = 1e-6
# what a tree can serve; in assisted generation it is treespec that assists
MODES = ("greedy_search", "sample", "assisted_generation")


@dataclass
class Request:
    """One prepared generation.

    Attributes:
        input_ids: ``[1, L]`` as given, padding included: what processors, criteria and the result see.
        visible: prompt token ids without padding: what the models see.
        processors, criteria, config: as transformers prepared them.
        sample: draw tokens rather than take the largest.
        cache: a :class:`TreeCache` of an earlier turn, or None.
    """

    input_ids: Tensor
    visible: list[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: Any
    sample: bool = False
    cache: TreeCache | None = None

    @property
    def most_new(self) -> int:
        """Most new tokens."""
        return int(self.config.max_length) - self.input_ids.shape[1]


def prepare(model: Any, input_ids: Tensor, **kwargs: Any) -> Request:
    """Let ``model.generate`` prepare a request without decoding anything.

    Raises:
        InputError: for requests that a tree cannot serve.
    """
    check_ids(input_ids)
    caught: list[Request] = []

    def catch(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        caught.append(from_prepared(input_ids, **prepared))
        return input_ids

    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if kwargs.get(name):
            raise InputError(f"{name} is transformers' own speculation; pass draft= and policy= to treespec instead")
    try:
        model.generate(input_ids, custom_generate=catch, **kwargs)
    except TreespecError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ImportError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"transformers cannot prepare this request: {reason[:300]}") from error
    return caught[0]


def take_stop_strings(target: Any, generation: dict[str, Any], tokenizer: Any) -> Any:
    """Turn stop strings, wherever they are asked for, into a stopping criterion in ``generation``.

    transformers makes the criterion itself, but it hands a callable decoding method no tokenizer to make it with.

    Returns:
        The model to prepare the request with: ``target``, or a shallow copy whose generation config names none.
    """
    given, default = generation.get("generation_config"), getattr(target, "generation_config", None)
    strings = generation.get("stop_strings")
    for config in (given, default):
        strings = getattr(config, "stop_strings", None) if strings is None else strings
    if strings is None:
        return target
    if tokenizer is None:
        raise InputError("stop_strings needs tokenizer=")
    try:
        criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"stop_strings must be one or more texts that the tokenizer's tokens can spell; got {strings!r}"
        ) from error
    generation["stopping_criteria"] = StoppingCriteriaList([*(generation.get("stopping_criteria") or []), criterion])
    generation.pop("stop_strings", None)
    if given is not None:
        generation["generation_config"] = copy.copy(given)
        generation["generation_config"].stop_strings = None
    if default is None or default.stop_strings is None:
        return target
    silent = copy.copy(target)  # what a config leaves open is filled in from the model's own
    silent.generation_config = copy.copy(default)
    silent.generation_config.stop_strings = None
    return silent


def check_ids(input_ids: Tensor) -> None:
    """Refuse what is not one non-empty sequence of token ids.

    Raises:
        InputError: saying what is wrong.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InputError(
            f"input_ids must be whole numbers of shape [1, L]; got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if input_ids.shape[0] != 1:
        raise InputError(
            f"treespec decodes one sequence at a time; got a batch of {input_ids.shape[0]}. Call it once per prompt"
        )
    if input_ids.shape[1] == 0:
        raise InputError("the prompt is empty; give at least one token (a BOS token will do)")


def from_prepared(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    inputs_embeds: Tensor | None = None,
    **extra: Any,
) -> Request:
    """A request from what transformers hands to a decoding method.

    Raises:
        InputError: for requests that a tree cannot serve.
    """
    config = generation_config
    if config.num_beams != 1:
        raise InputError(f"beam search cannot be decoded speculatively; set num_beams=1 (got {config.num_beams})")
    if (mode := config.get_generation_mode()).value not in MODES:
        raise InputError(
            f"{mode.value.replace('_', ' ')} cannot be decoded speculatively; only greedy decoding and sampling can"
        )
    if not isinstance(config.max_length, Integral):
        raise InputError(f"max_new_tokens and max_length must be whole numbers; got a length of {config.max_length!r}")
    if inputs_embeds is not None:
        raise InputError("inputs_embeds cannot be decoded speculatively: a draft needs token ids; pass input_ids")
    check_ids(input_ids)
    if config.output_attentions or config.output_hidden_states:
        raise InputError("output_attentions and output_hidden_states are not available from tree verification")
    visible = input_ids[0]
    _check_positions(position_ids, attention_mask)
    if attention_mask is not None:
        check_mask(attention_mask, input_ids)
        visible = visible[attention_mask[0].bool()]
    config_cache = None if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0 else cache
    if config_cache is not None and not isinstance(config_cache, TreeCache):
        raise InputError(
            f"a {type(cache).__name__} cannot keep a tree's path; pass the cache that an earlier treespec call returned"
        )
    # a temperature this low would only lose the order of the scores, to infinities
    warm = LogitsProcessorList([p for p in logits_processor if not _is_cold(p)])
    sample = bool(config.do_sample) and len(warm) == len(logits_processor)
    return Request(input_ids, visible.tolist(), warm, stopping_criteria, config, sample, config_cache)


def check_mask(mask: Tensor, input_ids: Tensor) -> None:
    """Refuse a mask that is not one 0 or 1 for every prompt token, or that leaves no last token.

    Raises:
        InputError: saying what is wrong.
    """
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            f"attention_mask must hold a 0 or a 1 for every prompt token, shape {list(input_ids.shape)}; got "
            f"{'other values' if mask.shape == input_ids.shape else f'shape {list(mask.shape)}'}"
        )
    if not bool(mask.any()):
        raise InputError("attention_mask hides the whole prompt")
    if not bool(mask[0, -1]):
        raise InputError("the last prompt token is masked out; pad on the left")


def _is_cold(processor: Any) -> bool:
    """A temperature at which float32 scores overflow: the limit T -> 0, which is greedy."""
    return isinstance(processor, TemperatureLogitsWarper) and float(processor.temperature) < COLD


def _check_positions(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Transformers always sends positions; only its own (counted over visible tokens) can be honoured."""
    if position_ids is None:
        return
    if mask is None:
        usual = torch.arange(position_ids.shape[1], device=position_ids.device)
        same = torch.equal(position_ids[0], usual)
    else:
        seen = mask.bool()
        same = position_ids.shape != mask.shape or torch.equal(position_ids[seen], (mask.long().cumsum(-1) - 1)[seen])
    if not same:
        raise InputError("custom position_ids are not supported; positions follow from attention_mask")
