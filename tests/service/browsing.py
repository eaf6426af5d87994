"""A visitor of the page: one tab, with everything it complained about and everyone it asked."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from service import test_tenants
from service.serving import Service, training_graph

WIDTHS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
_TIERS = {("phone", "light"): (), ("tablet", "dark"): pytest.mark.thorough, ("desktop", "light"): pytest.mark.thorough}
LOOKS = [
    pytest.param(look, id="-".join(look), marks=_TIERS.get(look, pytest.mark.slow))
    for look in itertools.product(WIDTHS, ("light", "dark"))
]
"""The screens and themes in which every flow is gone through: one quickly, each screen and theme for every change."""

in_every_look = pytest.mark.parametrize("visit", LOOKS, indirect=True)


class Visit:
    """One tab on a service, at a width and in a theme."""

    def __init__(self, browser: Any, base: str, width: str = "desktop", theme: str = "light") -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self.context = browser.new_context(viewport=size, color_scheme=theme)
        self.tab = self.context.new_page()
        self.base, self.width = base, size["width"]
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.tab.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.tab.on("request", lambda r: self.hosts.add(r.url.split("/")[2]) if r.url.startswith("http") else None)

    def go(self, where: str = "", wait_for: str = "h1") -> None:
        """Open a page of the page, and wait until it shows something."""
        self.tab.goto("about:blank")
        self.tab.goto(f"{self.base}/{where}")
        self.tab.wait_for_selector(wait_for, state="attached")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            self.tab.keyboard.press(key)

    def tab_to(self, selector: str, most: int = 80) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(most):
            if self.tab.evaluate("s => document.activeElement.matches(s)", selector):
                return
            self.press("Tab")
        raise AssertionError(f"{selector} is not reached by {most} tabs")

    def downloaded(self, text: str) -> Path:
        """The file that a click on a text saves."""
        with self.tab.expect_download() as saved:
            self.tab.get_by_text(text).click()
        return Path(saved.value.path())

    def unfold(self) -> None:
        """Open the forms, which are folded on a phone."""
        for form in self.tab.locator("details.folded:not([open]) > summary").all()[::-1]:
            form.click()

    def fits(self) -> bool:
        """Whether nothing is wider than the screen."""
        return bool(self.tab.evaluate("() => document.documentElement.scrollWidth") <= self.width)

    def check(self, where: str = "") -> None:
        """Check that nothing is wider than the screen, that texts have contrast, and that controls have names."""
        assert self.fits(), where
        assert self.tab.evaluate(_UNREADABLE) == [], where
        assert self.tab.evaluate(_NAMELESS) == [], where

    def leave(self, but: str | None = None) -> None:
        """Close the tab, which must not have complained `but` of this, and have asked nobody but its service."""
        self.context.close()
        complaints = [text for text in self.complaints if but is None or but not in text]
        assert complaints == [], complaints
        assert self.hosts <= {self.base.removeprefix("http://")}


# controls that a screen reader could not name
_NAMELESS = """() => [...document.querySelectorAll('a,button,input,select,summary,[tabindex="0"]')]
  .filter(e => e.offsetParent && !e.textContent.trim() && !e.getAttribute('aria-label'))
  .filter(e => !(e.labels && e.labels.length))
  .map(e => e.outerHTML)"""

# texts whose contrast with what is behind them is below 4.5 to 1, as WCAG 2 measures it
_UNREADABLE = """() => {
  const rgba = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => [r, g, b].map(x => x / 255).map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const e = node.parentElement;
    if (!node.textContent.trim() || !e.offsetParent || ['SCRIPT', 'OPTION'].includes(e.tagName) || e.closest(':disabled')) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${node.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""  # noqa: E501 – one expression for the browser


def named_graph(folder: Path, layers: int = 12) -> Path:
    """A graph with names, as a client writes it for people."""
    graph = training_graph(layers)
    names = [f"net.block{i % layers // 3}.{'norm' if i % 2 else 'linear'}:op{i}" for i in range(graph.ops)]
    path = folder / "graph.json"
    path.write_text(json.dumps(graph.to_json() | {"op_names": names}))
    return path


GRAPH = training_graph(10)


class Stored(NamedTuple):
    """A service and the ids of what it has solved."""

    service: Service
    plans: tuple[str, str]
    other: str
    infeasible: str
    sweeps: tuple[str, str]


def cli(service: Service, *arguments: str) -> str:
    """Run `remat-service`, in a thread: the browser's driver has an event loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(test_tenants.cli, service, *arguments).result()


def signed_in(browser: Any, service: Service, key: str, where: str = "", look: tuple[str, ...] = ()) -> Visit:
    """A tab at a page for which a key was asked and given."""
    visit = Visit(browser, service.url, *look)
    visit.go(where, "input[name=secret]")
    visit.tab.fill("input[name=secret]", key)
    visit.press("Enter")
    return visit
