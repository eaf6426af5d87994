"""The arguments and options that several commands of `remat` have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..target.devices import TARGETS

File = Annotated[Path, typer.Argument(metavar="FILE", help="A graph, chain or join file; - is standard input.")]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", "-b", metavar="SIZE", help="4GiB, bytes, or 50% of what plain training needs beyond fixed bytes."
    ),
]
Fraction = Annotated[
    float | None,
    typer.Option("--budget-fraction", "-f", metavar="F", help="Share of the plain activation peak, 0 to 1."),
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="LINK",
        help="Plan transfers to the host over this link: pcie4, pcie5, nvlink-c2c, a device such as h100, bytes a "
        "second each way such as 25GB, or a JSON file.",
    ),
]
Method = Annotated[str, typer.Option("--method", "-m", help="A method of the solver; auto combines them.")]
Time = Annotated[float, typer.Option("--time-limit", "-t", metavar="S", help="Seconds to solve for.")]
Gap = Annotated[float, typer.Option("--max-gap", "-g", metavar="G", help="Stop at this gap, (cost − bound) / cost.")]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        metavar="N",
        help="Stop when a better plan could save less in N steps of training than the time already spent.",
    ),
]
Url = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="URL of the service, instead of REMAT_BASE_URL.")
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the solve in the service's lists; it is sent there."),
]
Local = Annotated[bool, typer.Option("--local", help="Solve here, whatever REMAT_BASE_URL says.")]
OfMethod = Annotated[
    list[str] | None, typer.Option("--option", "-O", metavar="KEY=VALUE", help="An option of the method.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
EachTime = Annotated[float, typer.Option("--time-limit", "-t", metavar="S", help="Seconds for each solve.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan here.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="SCRIPT:make_model, a config.json, or a preset.")]
DEVICES = f"One of {', '.join(sorted(TARGETS))}, or a table in a TOML or JSON file"
Device = Annotated[
    str | None,
    typer.Option("--device", "-d", metavar="D", help=f"{DEVICES}."),
]
Batch = Annotated[
    int | None, typer.Option("--batch", metavar="N", min=1, help="Given to the function as its argument batch.")
]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", metavar="NAME", help="adamw, sgd, …: its state counts as fixed bytes.")
]
