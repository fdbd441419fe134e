"""`leeway bench ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from leeway.errors import UsageError

app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)
SIZES = (0.6e9, 1.7e9, 8e9, 32e9, 70e9)
SAMPLERS = (64, 128, 256, 512)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def weights(
    model: Annotated[
        str, typer.Option(help="Directory in Hugging Face format, or a built-in name.")
    ] = "smollm2-135m-instruct",
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-6,
    steps: Annotated[str, typer.Option(help="Optimizer steps of the deltas, increasing.")] = "1,4,16",
    samplers: Annotated[int, typer.Option(min=0, help="Maximum number of vLLM samplers; 0: none.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure a broadcast of weights, in full and as a delta, with real AdamW updates."""
    from leeway.config import ModelConfig
    from leeway.tasks.kinds.digits import DigitsConfig
    from leeway_host.bench.weights import bench_weights
    from leeway_host.models import prepare_model

    counts = _rising(steps)
    directory = prepare_model(ModelConfig(name=model), task=DigitsConfig())

    def progress(text: str) -> None:
        if not as_json:
            typer.echo(text, err=True)

    result = bench_weights(directory, learning_rate=lr, steps=counts, samplers=samplers, progress=progress)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)


@app.command()
def fanout(
    measured: Annotated[Path, typer.Argument(help="File with the output of leeway bench weights --json.")],
    network_gbit: Annotated[float, typer.Option(help="Network bandwidth of a Redis server, Gbit/s.")] = 25.0,
    load_gb_s: Annotated[
        float | None, typer.Option(help="Reload rate of an engine, GB/s; default: as measured.")
    ] = None,
    delta_ratio: Annotated[
        float | None,
        typer.Option(help="Size of the weights divided by that of a delta; default: the last measured one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one broadcast to 64-512 samplers of models of 0.6-70 B parameters from measured rates."""
    from dataclasses import asdict

    from leeway_host.bench.fanout import rates_from, rows

    try:
        result = json.loads(measured.read_text())
        load = None if load_gb_s is None else load_gb_s * 1e9
        rates = rates_from(result, network_bytes_s=network_gbit * 1e9 / 8, load_bytes_s=load)
        ratio = delta_ratio or result["pair"][-1]["byte_ratio"]
    except (OSError, ValueError, KeyError, IndexError) as exc:
        raise UsageError(
            f"{measured}: {type(exc).__name__} {exc}; expected the output of leeway bench weights --json "
            "with at least one sampler"
        ) from exc
    made = rows(rates, parameters=SIZES, samplers=SAMPLERS, delta_ratio=ratio)
    if as_json:
        plain = [{**row, **{k: asdict(row[k]) for k in ("alone", "with_replicas")}} for row in made]
        typer.echo(json.dumps({"rates": asdict(rates), "delta_ratio": ratio, "rows": plain}))
    else:
        _print_fanout(made)


def _print_fanout(made: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = ("B", "sent", "samplers", "read s", "wall s", "pause s", "replicas", "wall s", "help from")
    table = Table(*heads, title="alone: read, wall, pause; with replicas: how many, wall")
    for row in made:
        alone, helped = row["alone"], row["with_replicas"]
        table.add_row(
            f"{row['parameters'] / 1e9:g}",
            row["kind"],
            str(row["samplers"]),
            *(f"{seconds:.1f}" for seconds in (alone.read_s, alone.wall_s, alone.pause_s)),
            str(row["replicas"]),
            f"{helped.wall_s:.1f}",
            str(row["replicas_help_from"] or "-"),
        )
    Console().print(table)


def _rising(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or steps[0] < 1 or sorted(set(steps)) != steps:
        raise UsageError(f"--steps {text}: expected increasing numbers from 1, for example 1,4,16")
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
