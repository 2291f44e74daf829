"""``dynamic:tau=0.05,budget=32`` to a policy and back; unknown names and parameters get one sentence."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from treespec.errors import PolicyError
from treespec.policies.base import Policy
from treespec.policies.bestfirst import BestFirst
from treespec.policies.dynamic import DynamicTreePruner
from treespec.policies.eagle2 import Eagle2
from treespec.policies.opttree import OptTree
from treespec.policies.sequoia import Sequoia
from treespec.policies.specinfer import SpecInfer
from treespec.policies.static import Autoregressive, Linear, Uniform
from treespec.policies.threshold import Threshold
from treespec.policies.throughput import Throughput

POLICIES: dict[str, type[Policy]] = {
    cls.name: cls
    for cls in (
        Autoregressive,
        Linear,
        Uniform,
        Threshold,
        DynamicTreePruner,
        SpecInfer,
        Eagle2,
        OptTree,
        Sequoia,
        BestFirst,
        Throughput,
    )
}
ALL = "all"


def parse_policy(text: str) -> Policy:
    """A policy from its command-line form.

    Raises:
        PolicyError: for an unknown name or parameter, or a value out of range.
    """
    name, _, rest = text.strip().partition(":")
    if name not in POLICIES:
        raise PolicyError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}{_did_you_mean(name, POLICIES)}")
    cls = POLICIES[name]
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals or key not in known:
            raise PolicyError(
                f"policy {name!r} has no parameter {key!r}; it takes "
                f"{', '.join(known) or 'none'}{_did_you_mean(key, known)}"
            )
        values[key] = _value(value, f"{name}:{key}", known[key].default)
    return cls(**values)


def parse_policies(text: str) -> list[Policy]:
    """Policies from a comma-separated list in which ``key=value`` items belong to the policy before them.

    ``all`` stands for every policy with its defaults, plain decoding first.
    """
    if text.strip() == ALL:
        return [cls() for cls in POLICIES.values()]
    parts: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        if parts and "=" in item.partition(":")[0]:  # a value may hold a colon: cost=a100x4:70b
            parts[-1] += ("," if ":" in parts[-1] else ":") + item
        else:
            parts.append(item)
    if not parts:
        raise PolicyError(f"no policy given; expected a list such as plain,linear:gamma=5 of {', '.join(POLICIES)}")
    return [parse_policy(part) for part in parts]


def _value(text: str, where: str, default: Any) -> Any:
    try:
        if isinstance(default, tuple):
            return tuple(int(part) for part in text.split("/"))
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float) and text != "auto":
            return float(text)
    except ValueError:
        kind = {tuple: "whole numbers such as 2/3", int: "a whole number"}.get(type(default), "a number")
        raise PolicyError(f"{where} must be {kind}; got {text!r}") from None
    return text


def _did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
