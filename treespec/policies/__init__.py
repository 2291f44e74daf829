"""Strategies for growing and pruning token trees, and their names on the command line."""

from treespec.policies.base import Decision, Frontier, Observation, Policy
from treespec.policies.bestfirst import BestFirst
from treespec.policies.dynamic import DynamicTreePruner
from treespec.policies.eagle2 import Eagle2
from treespec.policies.opttree import OptTree
from treespec.policies.parse import POLICIES, parse_policies, parse_policy
from treespec.policies.sequoia import Sequoia
from treespec.policies.specinfer import SpecInfer
from treespec.policies.static import Autoregressive, Linear, Uniform
from treespec.policies.threshold import Threshold
from treespec.policies.throughput import Throughput

__all__ = [
    "POLICIES",
    "Autoregressive",
    "BestFirst",
    "Decision",
    "DynamicTreePruner",
    "Eagle2",
    "Frontier",
    "Linear",
    "Observation",
    "OptTree",
    "Policy",
    "Sequoia",
    "SpecInfer",
    "Threshold",
    "Throughput",
    "Uniform",
    "parse_policies",
    "parse_policy",
]
