"""Where models go: plans from configs alone, and loading that follows them."""

from treespec.placement.devices import Device, local_devices, parse_devices
from treespec.placement.layout import DevicePlan, PlacementPlan
from treespec.placement.plan import plan

__all__ = ["Device", "DevicePlan", "PlacementPlan", "local_devices", "parse_devices", "plan"]
