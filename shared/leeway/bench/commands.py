"""`leeway bench ...`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from leeway.errors import UsageError

app = typer.Typer(help="Measurements on this machine.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def weights(
    model: Annotated[
        str, typer.Option(help="Directory in Hugging Face format, or a built-in name.")
    ] = "smollm2-135m-instruct",
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-6,
    steps: Annotated[str, typer.Option(help="Optimiser steps of the deltas, rising.")] = "1,4,16",
    samplers: Annotated[int, typer.Option(min=0, help="Up to this many vLLM samplers; 0: none.")] = 1,
    as_json: AsJson = False,
) -> None:
    """What a broadcast of weights costs, in full and as a delta, with real AdamW updates."""
    from leeway.bench.weights import bench_weights
    from leeway.config import ModelConfig, TaskConfig
    from leeway.models import prepare_model

    counts = _rising(steps)
    directory = prepare_model(ModelConfig(name=model), task=TaskConfig(kind="digits"))

    def progress(text: str) -> None:
        if not as_json:
            typer.echo(text, err=True)

    result = bench_weights(directory, learning_rate=lr, steps=counts, samplers=samplers, progress=progress)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)


def _rising(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or steps[0] < 1 or sorted(set(steps)) != steps:
        raise UsageError(f"--steps {text}: expected rising numbers from 1 on, for example 1,4,16")
    return steps


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    baseline = result["baseline"]
    console.print(
        f"{result['model']}: {result['parameters'] / 1e6:.1f} M parameters, "
        f"{result['full_bytes'] / 1e6:.1f} MB; AdamW lr {result['learning_rate']:g}; one full XADD + XREAD: "
        f"{baseline['write_s']:.2f} + {baseline['read_s']:.2f} s"
    )
    heads = ("steps", "sent", "MB", "smaller", "encode", "write", "read", "decode", "vs full", "extra MiB")
    table = Table(*heads, title="seconds; vs full: sum / one full XADD + XREAD; MiB: encoder, decoder")
    for row in result["pair"]:
        table.add_row(
            str(row["steps"]),
            row["codec"],
            f"{row['wire_bytes'] / 1e6:.2f}",
            f"{row['byte_ratio']:.0f} x",
            *(f"{row[name]:.3f}" for name in ("encode_s", "write_s", "read_s", "decode_s", "time_ratio")),
            ", ".join(f"{row[f'{side}_extra_bytes'] / 2**20:.0f}" for side in ("encoder", "decoder")),
        )
    console.print(table)
    if result["samplers"]:
        table = Table("samplers", "full wall s", "full pause s", "delta wall s", "delta pause s")
        for row in result["samplers"]:
            names = ("full_wall_s", "full_pause_s", "delta_wall_s", "delta_pause_s")
            table.add_row(str(row["samplers"]), *(f"{row[name]:.3f}" for name in names))
        console.print(table)
