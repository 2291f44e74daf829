"""A setting for elsewhere: a line of Python, and other engines' flags with what they cannot express."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any

from treespec.export import ENGINES, export
from treespec.policies import Policy
from treespec.policies.base import shown


def as_code(policy: Policy) -> str:
    """A line of Python that rebuilds a policy."""
    fields = [f for f in dataclasses.fields(policy) if f.init and getattr(policy, f.name) != f.default]
    values = {f.name: getattr(policy, f.name) for f in fields}
    plain = (bool, int, float, tuple, str)
    said = ", ".join(f"{k}={v if isinstance(v, plain[:4]) else shown(v)!r}" for k, v in values.items())
    kind = type(policy).__name__
    return f"from treespec.policies import {kind}; policy = {kind}({said})"


def export_html(policy: Policy, row: dict[str, Any] | None) -> str:
    """The settings of all engines for a policy, with what each cannot express."""
    speedup = None if row is None or row["policy"] != policy.spec() else float(row["speedup"])
    out = []
    for engine in ENGINES:
        found = export([(policy, speedup)], engine)
        notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
        text = f"<pre>{escape(found.text)}</pre>" if found.text else ""
        out.append(f"<details><summary><b>{engine}</b></summary>{text}<ul>{notes}</ul></details>")
    return "<h4>This setting elsewhere</h4>" + "".join(out)
