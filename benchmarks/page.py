"""The service's page in headless Chromium: its pictures for the documentation.

`python -m benchmarks.page` captures the training step of GPT-2 (12 layers, batch 8, a roofline of the A100; `--graph`
takes a graph file of one's own), has it planned by a service of the run's own, and writes the pictures of
`docs/page.md` to `docs/figures/page/`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks.graphs.instances import instance
from benchmarks.harness.serve import Processes
from remat_ir import Graph, Problem, budget_at, plain_peak

OUT = Path("docs/figures/page")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run"]
DRAWN = "[data-matrix=S]"
"""The last picture of a plan's page."""


def make_model(batch: int = 8) -> Any:
    """GPT-2 of 12 layers and a batch of 1,024 tokens each."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.zeros(batch, 1024, dtype=torch.long)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": tokens, "labels": tokens}


class Asked:
    """A service of this run's own, and a browser to look at it."""

    def __init__(self, url: str, browser: Any) -> None:
        self.http, self.browser = httpx2.Client(base_url=url, timeout=120, trust_env=False), browser
        self.url = url

    def plan(self, graph: Graph, budget: int, **more: Any) -> str:
        """Plan a problem and return the id, once the solve has ended."""
        body = {"problem": Problem(graph, budget).to_json(), **more}
        return self._asked("/v1/solves", body, lambda found: found["status"] not in ("queued", "running"))

    def sweep(self, graph: Graph, method: str, points: int) -> str:
        """Plan a whole curve and return its id, once it has ended."""
        body = {"graph": graph.to_json(), "points": points, "time_limit_s": 10, "method": method}
        return self._asked("/v1/sweeps", body, lambda found: found["ended"])

    def largest_batch(self, graph: Graph) -> str:
        """Search for the largest batch in twice the plain peak and return the search's id, once it has ended."""
        problem = Problem(graph, 2 * plain_peak(graph)).to_json()
        body = {"problem": problem, "time_limit_s": 10, "total_s": 60, "name": "GPT, 4 layers"}
        return self._asked("/v1/max-batch", body, lambda found: found["ended"])

    def _asked(self, path: str, body: dict[str, Any], ended: Callable[[dict[str, Any]], bool]) -> str:
        found = self.http.post(path, json=body, headers={"Prefer": "wait=30"}).json()
        while not ended(found):
            found = self.http.get(f"{path}/{found['id']}", params={"wait": 30}).json()
        return str(found["id"])

    def tab(self, width: int, theme: str, height: int = 900) -> Any:
        """A new tab."""
        return self.browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme).new_page()


@contextmanager
def looking() -> Iterator[Asked]:
    """A service and a browser for as long as a block runs."""
    found = os.environ.get("REMAT_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(Path(folder)) as service,
        sync_playwright() as driver,
    ):
        service.serve()
        browser = driver.chromium.launch(executable_path=found, args=QUIET)
        yield Asked(service.url, browser)
        browser.close()


def captured(path: Path | None, folder: Path) -> tuple[Graph, list[str]]:
    """The graph of a file, or of GPT-2, without its names, which are not sent, and the names of its ops."""
    if path is None:
        path = folder / "graph.json"
        command = [sys.executable, "-m", "remat", "capture", "benchmarks.page:make_model", "--device", "a100"]
        subprocess.run([*command, "-o", str(path)], check=True)
    data = json.loads(path.read_text())
    sent = {key: value for key, value in data.items() if key not in ("op_names", "value_names")}
    return Graph.from_json(sent), data["op_names"]


def keep(name: str, png: bytes) -> None:
    """Write a picture with 128 colors, at two thirds of its size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    if picture.width > 1000:
        picture = picture.resize((960, round(picture.height * 960 / picture.width)), Image.Resampling.LANCZOS)
    OUT.mkdir(parents=True, exist_ok=True)
    picture.quantize(128).save(OUT / name, optimize=True)


def pictures(graph_file: Path | None) -> None:
    """Have a few problems planned and take the pictures of the documentation."""
    with tempfile.TemporaryDirectory() as folder, looking() as here:
        graph, names = captured(graph_file, Path(folder))
        small = instance("gpt-4-whole")
        sweeps = [here.sweep(small, method, 8) for method in ("auto", "ap-greedy", "chen-sqrt")]
        here.plan(graph, budget_at(graph, 0.01))
        ids = [
            here.plan(graph, budget_at(graph, f), time_limit_s=30, name="GPT2LMHeadModel 8×1024") for f in (0.7, 0.5)
        ]
        batch = here.largest_batch(small)
        shot(here, "max-batch-light.png", f"#/max-batch/{batch}", ".cards tbody tr", 1440, "light", 480)
        shot(here, "list-light.png", "", ".solves tbody tr", 1440, "light")
        shot(here, "list-phone.png", "", ".solves tbody tr", 390, "light", top=".picks")
        shot(here, "sweep-light.png", f"#/sweep/{','.join(sweeps)}", ".reasons", 1440, "light")
        shot(here, "compare-dark.png", f"#/compare/{'/'.join(ids)}", DRAWN, 820, "dark", 1180)
        for width, theme, height in ((1440, "light", 1040), (1440, "dark", 1040), (390, "dark", 900)):
            kind = "phone" if width == 390 else theme
            shot(here, f"plan-{kind}.png", f"#/solve/{ids[1]}", DRAWN, width, theme, height, names)
        matrices(here, ids[1], names)


def opened(here: Asked, where: str, wait_for: str, tab: Any, names: list[str] | None) -> None:
    """Open a page; with names, as a browser that has been given the names file."""
    if names is not None:
        key = json.dumps(f"remat-names-{where.rsplit('/', 1)[1]}")
        tab.add_init_script(f"sessionStorage.setItem({key}, {json.dumps(json.dumps(names))})")
    tab.goto(f"{here.url}/{where}")
    tab.wait_for_selector(wait_for)
    tab.wait_for_timeout(700)


def shot(
    here: Asked, name: str, where: str, wait_for: str, width: int, theme: str, height: int = 900,
    names: list[str] | None = None, top: str | None = None,
) -> None:  # fmt: skip
    """One picture of a page from its beginning, or from an element on; on a plan's, with the pointer on the curve."""
    tab = here.tab(width, theme, height)
    opened(here, where, wait_for, tab, names)
    if top is not None:
        tab.locator(top).evaluate("element => element.scrollIntoView()")
    if names is not None and width > 800:
        box = tab.locator(".u-over").first.bounding_box()
        tab.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 60)
        tab.wait_for_timeout(200)
    keep(name, tab.screenshot())
    tab.context.close()


def matrices(here: Asked, solve: str, names: list[str]) -> None:
    """The two matrices, with the pointer on a recomputation."""
    tab = here.tab(1440, "light")
    opened(here, f"#/solve/{solve}", DRAWN, tab, names)
    tab.locator("[data-matrix=R]").focus()
    for _ in range(40):
        tab.keyboard.press("ArrowRight")
    keep("matrices-light.png", tab.locator(".two").last.screenshot())
    tab.context.close()


def main() -> None:
    """Read the arguments and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", type=Path, help="a graph file with names, in place of GPT-2's")
    pictures(parser.parse_args().graph)


if __name__ == "__main__":
    main()
