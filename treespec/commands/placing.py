"""Commands about machines: will a pair fit, and what is this machine good for?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from treespec.commands.options import Dtype, Json, Where
from treespec.console import plain_console


def plan(
    target: Annotated[
        str, typer.Option(help="A hub id, a folder, a config.json, 'smollm2', or a shape such as llama-3.1-70b.")
    ] = "smollm2",
    draft: Annotated[
        str,
        typer.Option(help="The same, or 'mix', 'head', 'lm', 'ngram', 'none'. 'auto': mix for smollm2, else ngram."),
    ] = "auto",
    gpus: Annotated[
        str, typer.Option(help="4x80GB, a100x4, 2x24GB,cpu:64GB,disk and the like. Default: this machine's devices.")
    ] = "",
    context: Annotated[int, typer.Option(min=1, help="Most tokens of a text, prompt and answer.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 1,
    budget: Annotated[int, typer.Option(min=0, help="Candidates of a tree.")] = 48,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16, float32, or int8 and int4 for the target's weights.")
    ] = "bfloat16",
    tensor_parallel: Annotated[
        bool, typer.Option("--tensor-parallel", help="Divide every layer among the GPUs, as under torchrun.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether a target and its draft fit on some GPUs, and what goes where; nothing is loaded, no GPU is needed.

    Exit code 0 whether it fits or not: see "fits" of --json. GB are 10^9 bytes.

    Example: treespec plan --target llama-3.1-70b --draft llama-3.2-3b --gpus 4x80GB --context 2048 --dtype bf16
    """
    from treespec.placement import plan as run
    from treespec.placement.layout import ASSUMED

    found = run(
        target,
        draft,
        gpus or None,
        context=context,
        batch=batch,
        budget=budget,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
    )
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    plain_console(160).print(found)
    print(ASSUMED[0].upper() + ASSUMED[1:] + ".")


def doctor(
    target: Annotated[
        str, typer.Option(help="Also load this model, check it and time it: 'smollm2', 'toy', a folder or a hub id.")
    ] = "",
    dtype: Dtype = "float32",
    device: Where = "auto",
    as_json: Json = False,
) -> None:
    """Look at this machine: devices, memory, versions, threads, the C kernel, a model's self-check, and what is slow.

    Exit code 1 if the model named cannot verify a tree.

    Example: treespec doctor --target smollm2
    """
    from treespec.doctor import examine, print_report

    found = examine(target, dtype, device)
    print(json.dumps(found)) if as_json else print_report(found)
    if found["model"] is not None and not found["model"]["self_check"]:
        raise typer.Exit(1)
