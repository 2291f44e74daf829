"""What is imported when: a help text, the bare package and a replay do not wait for what they never use."""

import ast
import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import treespec
from treespec import drafters, placement, trace, widgets

ROOT = Path(treespec.__file__).parents[1]
HEAVY = {"torch", "transformers", "accelerate", "numpy", "pandas", "scipy", "plotly", "ipywidgets", "pyarrow", "igraph"}
# seconds each, and all of them the decoding engine's
ENGINE = ("transformers", "accelerate", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


def fresh(code):
    """The JSON that a new process prints last."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    quiet = {k: v for k, v in os.environ.items() if k not in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import json, sys\n{code}"],
        capture_output=True,
        text=True,
        env={**quiet, "PYTHONPATH": search},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_help_and_typing_errors_need_no_library_and_transformers_is_quiet_when_it_comes():
    seen = fresh("""
from treespec.cli import main
codes = []
for words in ([], ["--help"], ["tune", "--help"], ["generate", "--help"], ["tune", "--nosuch"], ["nosuch"]):
    sys.argv = ["treespec", *words]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
loaded = sorted({name.partition(".")[0] for name in sys.modules})
import transformers.utils.logging as logging
print(json.dumps([codes, loaded, logging.get_verbosity() == logging.ERROR, logging.is_progress_bar_enabled()]))
""")
    codes, loaded, silent, bars = seen
    assert codes == [0, 0, 0, 0, 2, 2] and not HEAVY & set(loaded)
    assert silent and not bars  # its stderr is no terminal


def test_the_bare_package_costs_nothing_and_its_names_do_not_depend_on_the_order_of_imports():
    bare, ours, kinds, same = fresh("""
before = set(sys.modules)
import treespec
new = set(sys.modules) - before
bare = sorted({n.partition(".")[0] for n in new} - sys.stdlib_module_names)
ours = sorted(n for n in new if n.startswith("treespec"))
import treespec.tune, treespec.trace.record, treespec.trace.replay, treespec.placement.plan, treespec.policies
from treespec import tune
from treespec.trace import record, replay
from treespec.placement import plan
found = [treespec.tune, treespec.trace.record, treespec.trace.replay, treespec.placement.plan, treespec.policies]
same = [tune is found[0], record is found[1], replay is found[2], plan is found[3], treespec.plan is plan,
        treespec.replay is replay, "tune" in dir(treespec) and "generate" in dir(treespec)]
print(json.dumps([bare, ours, [type(f).__name__ for f in found], same]))
""")
    assert bare == ["treespec"] and ours == ["treespec", "treespec.lazy"]
    assert kinds == ["function"] * 4 + ["module"] and all(same)


def test_what_works_on_recordings_does_not_load_the_engine():
    tokens, loaded, statistics = fresh("""
from treespec import Trace, replay, tune
from treespec.cost import load_cost
from treespec.table import article_table
import treespec.export, treespec.plots, treespec.policies, treespec.report, treespec.report_figures
from treespec.widgets import TreeExplorer
statistics = "scipy" in sys.modules
found = replay(Trace.load("data/traces/sampled.parquet"), "linear:gamma=2", load_cost("measured"))
print(json.dumps([found.totals["tokens_per_step"], sorted(sys.modules), statistics]))
""")
    assert 1 < tokens <= 3 and "torch" in loaded and not set(ENGINE) & set(loaded) and not statistics
    assert "treespec.api" not in loaded and "treespec.pairs" not in loaded


@pytest.mark.parametrize("package", [treespec, drafters, placement, trace, widgets], ids=lambda p: p.__name__)
def test_every_name_resolves_and_means_what_its_module_says(package):
    asked = {name: getattr(package, name) for name in package.__all__}
    for name, module in package.WHERE.items():
        own = importlib.import_module(f"{package.__name__}.{module}")
        assert asked[name] is getattr(own, name) and not isinstance(asked[name], ModuleType)
    assert set(package.__all__) <= set(dir(package))
    star = {}
    exec(f"from {package.__name__} import *", star)
    assert {name: star[name] for name in asked} == asked
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = package.nonsense
    assert not hasattr(package, "_nonsense")


@pytest.mark.parametrize("package", [treespec, drafters, placement, trace], ids=lambda p: p.__name__)
def test_type_checkers_are_told_the_same(package):
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    told = {alias.name: line.module for line in block.body for alias in line.names}
    told.pop("policies", None)  # a module
    assert told == {name: f"{package.__name__}.{module}" for name, module in package.WHERE.items()}


def test_functions_are_pickled_by_name_and_modules_can_be_asked_for():
    for value in (treespec.tune, treespec.replay, treespec.plan, treespec.Trace, trace.record):
        assert pickle.loads(pickle.dumps(value)) is value
    assert treespec.errors.TreespecError is treespec.TreespecError and treespec.policies.parse_policy("plain")
