"""``batchfinder gpus``: list the GPUs that can be simulated. Imports no torch."""

from __future__ import annotations

import dataclasses
import json

import click

from batchfinder.reporting.estimates import gpu_table
from batchfinder.simulation.gpus import all_gpus


def list_gpus(as_json: bool) -> None:
    """Print every GPU that can be simulated."""
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(gpu) for gpu in all_gpus()]))
    else:
        click.echo("\n".join(gpu_table(all_gpus())))
