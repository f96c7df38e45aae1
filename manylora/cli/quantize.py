"""`manylora quantize`: writes a checkpoint with linear weights in 8, 4 or 3.5 bits, and shows the error of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from manylora.cli.options import JSON
from manylora.cli.table import print_table, show

Model = Annotated[str, typer.Option(help="Base model in floats: folder or hub id.")]
Format = Annotated[str, typer.Option("--format", help="int8, int4 or q3.5.")]
Output = Annotated[Path, typer.Option(help="Folder to write; it must not exist.")]


def quantize(model: Model, target: Format, output: Output, as_json: JSON = False) -> None:
    """Quantise a model's linear weights by rounding to the nearest level, so that it takes less memory.

    Prints the relative error of each weight by layer. int8 and int4 are compressed-tensors checkpoints, which vLLM and
    transformers can read too; only Manylora reads q3.5.
    """
    from manylora.engine.model.checkpoint.quantise import TargetFormat, quantise
    from manylora.engine.model.spec import resolve_model

    errors = quantise(resolve_model(model), output, cast(TargetFormat, target))
    mean = {path: sum(layers) / len(layers) for path, layers in errors.items()}
    if as_json:
        body = {"format": target, "output": str(output), "errors": errors, "mean": mean}
        show(body, True, ())
        return
    names = [path.rpartition(".")[2].removesuffix("_proj").upper() for path in errors]
    rows = [
        [str(layer), *map(_percent, row)]
        for layer, row in enumerate(zip(*errors.values(), strict=True))
    ]
    print_table([["LAYER", *names], *rows, ["mean", *map(_percent, mean.values())]], names)
    typer.echo(f"\n{output}: {target}, relative errors of the weights by layer")


def _percent(error: float) -> str:
    return f"{error:.2%}"
