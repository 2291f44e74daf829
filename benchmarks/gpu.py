"""Everything that needs a GPU, in one command for any machine with one: equality, then what a verification costs.

First the ``gpu`` tests; then T_verify(n) for n = 1 to 512 on Llama shapes of 1B and 8B, built from their configs with
random weights: what a forward costs does not depend on them. The curve of the larger shape goes to ``--out`` with the
machine's fingerprint. It is made to take less than eight minutes and stops measuring when they are over.

It has not been run on a GPU yet: this project's machines have none. Without one it says so and does nothing.

    python -m benchmarks.gpu --out data/costs/h100.json
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from treespec.cost import CostCurve
from treespec.fast import speed_up
from treespec.intervals import median_interval
from treespec.measure import _lines
from treespec.model import TreeModel
from treespec.placement.configs import load_config
from treespec.placement.needs import model_needs
from treespec.tree import TokenTree

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (512, 2048)
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
SECONDS = 450.0  # for everything
ROUNDS = 20


def random_model(shape: str) -> Any:
    """A model of a shape with random weights, made on the GPU in bfloat16."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(load_config(shape), dtype=torch.bfloat16)
    return model.eval()


@torch.no_grad()
def measure(model: Any, until: float) -> dict[tuple[int, int], list[float]]:
    """Seconds of verifications by (context, nodes): interleaved rounds, the first one warms up, until time is over."""
    owner = TreeModel.of(model)
    found: dict[tuple[int, int], list[float]] = {}
    sessions = {}
    for context in CONTEXTS:
        sessions[context] = owner.session(context + SIZES[-1])
        sessions[context].extend([1 + i % 1000 for i in range(context)], logits="none")
    for turn in range(ROUNDS + 1):
        for context, session in sessions.items():
            for n in SIZES:
                tree = TokenTree.from_lists([1] * n, [-1, *((i - 1) // 2 for i in range(1, n))], [0.0] * n)
                before = session.seconds
                session.tree(tree.token.tolist(), tree.depth.tolist(), tree.ancestors())
                if turn:
                    found.setdefault((context, n), []).append(session.seconds - before)
                session.keep([])
        if turn >= 3 and time.monotonic() > until:
            break
    return found


def curve_of(found: dict[tuple[int, int], list[float]], shape: str, forward: str) -> tuple[CostCurve, list[Any]]:
    """A cost curve of the samples, and its points with their intervals."""
    import numpy as np

    middle = {key: float(np.median(values)) for key, values in found.items()}
    base, slopes = _lines(list(CONTEXTS), np.array([[middle[c, n] for n in SIZES] for c in CONTEXTS]))
    points = []
    for (context, n), values in sorted(found.items()):
        seconds, low, high = median_interval(values)
        points.append(
            {"context": context, "rows": n, "seconds": seconds, "interval": [low, high], "samples": len(values)}
        )
    name, rounds = torch.cuda.get_device_name(0), min(map(len, found.values()))
    curve = CostCurve(
        tuple(map(float, SIZES)),
        base,
        (1.0,),
        (0.0,),
        provenance=f"measured by benchmarks.gpu: {shape} with random weights, bfloat16, {forward}, one {name}, "
        f"{rounds} rounds, {datetime.date.today().isoformat()}; no draft and no overhead in it",
        context=float(CONTEXTS[0]),
        context_seconds=slopes,
        longest=float(CONTEXTS[-1]),
    )
    return curve, points


def tests() -> int:
    """Run the ``gpu`` tests; their exit code."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, check=False, cwd=Path(__file__).resolve().parents[1]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the curve goes, e.g. data/costs/h100.json")
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: there is no CUDA GPU here; nothing was measured", file=sys.stderr)
        return 2
    if not options.out.parent.is_dir():
        print(f"benchmarks.gpu: there is no folder {options.out.parent}", file=sys.stderr)
        return 2
    start = time.monotonic()
    failed = 0 if options.skip_tests else tests()
    memory = torch.cuda.mem_get_info(0)[0]
    curves = {}
    for i, shape in enumerate(SHAPES):
        need = model_needs(shape, "bfloat16").weight_bytes * 2.3  # the lean forward copies what it fuses
        if need > memory:
            print(f"{shape}: needs {need / 1e9:.0f} GB, {memory / 1e9:.0f} are free; left out")
            continue
        model = random_model(shape)
        forward = speed_up(model, "lean")
        found = measure(model, start + SECONDS * (i + 1) / len(SHAPES))
        curves[shape] = curve_of(found, shape, forward)
        del model
        torch.cuda.empty_cache()
        times = ", ".join(f"{n}: {1e3 * curves[shape][0].verify(n):.2f}" for n in SIZES)
        print(f"{shape} ({forward}), context {CONTEXTS[0]}, ms by nodes: {times}")
    if not curves:
        return 1
    shape = list(curves)[-1]
    about = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    more = {name: {"verify": points} for name, (_, points) in curves.items()}
    curves[shape][0].save(options.out, target=shape, dtype="bfloat16", machine=about, points=more)
    print(f"{options.out}; {time.monotonic() - start:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
