"""Controls for a policy, made from the policy itself: its search space where it has one, a text field elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ipywidgets as w
import traitlets

from treespec.policies import POLICIES, Policy, parse_policy
from treespec.policies.base import shown
from treespec.policies.space import Choice, Range, Real, Whole
from treespec.widgets.base import free

POINTS = 61  # stops of a logarithmic slider
BANDS = ("low", "high")  # two ends of one range, where a policy has both
LABEL = {"description_width": "84px"}
WIDE = "330px"
HIDDEN = (w.Dropdown, w.Text)  # what is no slider
MORE, LESS = "more ▾", "less ▴"


class PolicyControls(w.VBox):
    """A choice of policy and one control for each of its parameters: sliders in view, the rest behind "more".

    Args:
        policy: what to show first, a policy or its command-line form.
        names: policies to choose from; default all.

    Attributes:
        spec: what the controls say, in command-line form; it changes with every control and may be out of range:
            :attr:`policy` says so.
    """

    spec = traitlets.Unicode()

    def __init__(self, policy: Policy | str = "dynamic", names: Sequence[str] = tuple(POLICIES)) -> None:
        super().__init__()
        self.choice = w.Dropdown(options=list(names), description="policy", style=LABEL, layout={"width": WIDE})
        self.parameters: dict[str, w.DOMWidget] = {}
        self._rest: list[w.DOMWidget] = []
        self.more = w.ToggleButton(
            description=MORE, tooltip="the parameters that are no numbers", layout={"width": "84px"}
        )
        self._box = w.Box(layout={"flex_flow": "row wrap", "width": "100%", "align_items": "center"})
        self._muted = False
        self.choice.observe(self._chosen, "value")
        self.more.observe(self._fold, "value")
        self.children = (self._box,)
        self.show(policy)

    @property
    def policy(self) -> Policy:
        """The policy that the controls say.

        Raises:
            PolicyError: for values that do not fit together, such as ``deep`` below ``depth``.
        """
        return parse_policy(self.spec)

    def show(self, policy: Policy | str) -> None:
        """Set all controls to a policy; ``spec`` changes once.

        Raises:
            PolicyError: if there is no such policy.
        """
        policy = parse_policy(policy) if isinstance(policy, str) else policy
        self._muted = True
        try:
            self.choice.value = policy.name
            self._build(policy)
        finally:
            self._muted = False
        self._tell()

    def _chosen(self, change: Any) -> None:
        if not self._muted:
            self.show(POLICIES[self.choice.value]())

    def _build(self, policy: Policy) -> None:
        old, self.parameters = self.parameters, {}
        values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.init}
        banded = set(BANDS) <= set(values) and isinstance(policy.space.get(BANDS[0]), Real)
        for name, value in values.items():
            if not banded or name not in BANDS:
                self.parameters[name] = control(name, value, policy.space.get(name))
            elif name == BANDS[0]:
                self.parameters["/".join(BANDS)] = _bands(policy, values)
        for widget in self.parameters.values():
            widget.observe(self._tell, "value")
        self._place({f.name: f.default for f in dataclasses.fields(policy)})
        for widget in old.values():
            free(widget)

    def _place(self, defaults: dict[str, Any]) -> None:
        """Sliders first; the others behind the button, which stands open where one of them is not at its default."""
        sliders = [widget for widget in self.parameters.values() if not isinstance(widget, HIDDEN)]
        self._rest = [widget for widget in self.parameters.values() if isinstance(widget, HIDDEN)]
        self.more.layout.display = "" if sliders and self._rest else "none"
        changed = any(
            shown(widget.value) != shown(defaults[name])
            for name, widget in self.parameters.items()
            if isinstance(widget, HIDDEN)
        )
        self.more.value = changed or not sliders
        self._fold()
        self._box.children = (self.choice, *sliders, self.more, *self._rest)

    def _fold(self, change: Any = None) -> None:
        self.more.description = LESS if self.more.value else MORE
        for widget in self._rest:
            widget.layout.display = "" if self.more.value else "none"

    def _tell(self, change: Any = None) -> None:
        if self._muted:
            return
        said: dict[str, Any] = {}
        for name, widget in self.parameters.items():
            said.update(zip(BANDS, widget.value) if name == "/".join(BANDS) else [(name, widget.value)])
        defaults = {f.name: f.default for f in dataclasses.fields(POLICIES[self.choice.value]) if f.init}
        texts = {name: shown(round(v, 6) if isinstance(v, float) else v) for name, v in said.items()}  # 0.1 + 0.2
        changed = [f"{name}={text}" for name, text in texts.items() if text != shown(defaults[name])]
        self.spec = self.choice.value + (":" + ",".join(changed) if changed else "")


def control(name: str, value: Any, where: Range | None) -> w.DOMWidget:
    """One parameter's control; its range is widened to hold ``value``.

    Args:
        name: of the parameter.
        value: what it says first.
        where: its range in the policy's space; None gives a text field that takes what the command line takes.
    """
    if isinstance(value, str) and not isinstance(where, Choice):  # tau=auto, a curve's name
        where = None
    look: dict[str, Any] = {"description": name, "style": LABEL, "layout": {"width": WIDE}}
    if isinstance(where, Choice):
        options = list(dict.fromkeys([*where.values, value]))
        return w.Dropdown(options=[(shown(o), o) for o in options], value=value, **look)
    if isinstance(where, Whole):
        return w.IntSlider(value=value, min=min(where.low, value), max=max(where.high, value), **look)
    if isinstance(where, Real) and where.log:
        stops = sorted({*(where.at(i / (POINTS - 1)) for i in range(POINTS)), value})
        return w.SelectionSlider(options=[(f"{v:g}", v) for v in stops], value=value, **look)
    if isinstance(where, Real):
        return w.FloatSlider(value=value, min=min(where.low, value), max=max(where.high, value), step=0.01, **look)
    return w.Text(value=shown(value), continuous_update=False, **look)


def _bands(policy: Policy, values: dict[str, Any]) -> w.FloatRangeSlider:
    ends = [policy.space[name] for name in BANDS]
    low, high = values[BANDS[0]], values[BANDS[1]]
    return w.FloatRangeSlider(
        value=(low, high),
        min=min(0.0, low),
        max=max(high, *(e.high for e in ends if isinstance(e, Real))),
        step=0.05,
        description="bands, bits",
        readout_format=".2f",
        style=LABEL,
        layout={"width": WIDE},
    )
