"""Strategies for growing and pruning token trees, and their names on the command line."""

from treespec.policies.base import Decision, Frontier, Observation, Policy
from treespec.policies.bestfirst import BestFirst
from treespec.policies.dynamic import DynamicTreePruner
from treespec.policies.parse import POLICIES, parse_policies, parse_policy
from treespec.policies.static import Autoregressive, Linear, Uniform
from treespec.policies.threshold import Threshold

__all__ = [
    "POLICIES",
    "Autoregressive",
    "BestFirst",
    "Decision",
    "DynamicTreePruner",
    "Frontier",
    "Linear",
    "Observation",
    "Policy",
    "Threshold",
    "Uniform",
    "parse_policies",
    "parse_policy",
]
