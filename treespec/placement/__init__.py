"""Where models go: plans from configs alone, and loading that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespec.lazy import lazy

__all__ = ["Device", "DevicePlan", "PlacementPlan", "local_devices", "parse_devices", "plan"]

if TYPE_CHECKING:
    from treespec.placement.devices import Device, local_devices, parse_devices
    from treespec.placement.layout import DevicePlan, PlacementPlan
    from treespec.placement.plan import plan
else:
    WHERE = {
        "Device": "devices",
        "local_devices": "devices",
        "parse_devices": "devices",
        "DevicePlan": "layout",
        "PlacementPlan": "layout",
        "plan": "plan",
    }
    __getattr__, __dir__ = lazy(__name__, WHERE)
