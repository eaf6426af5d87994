"""The page in headless Chromium against a real service: empty, at work, in error, huge, on a phone, offline."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remat_ir import Chain, Join, Problem, budget_at
from service.serving import Service, serving, training_graph

playwright = pytest.importorskip("playwright.sync_api")

QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; where REMAT_REQUIRE_BROWSER is set, its absence is a failure."""
    found = os.environ.get("REMAT_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        if os.environ.get("REMAT_REQUIRE_BROWSER"):
            pytest.fail("no Chromium on the PATH; install it or set REMAT_TEST_CHROMIUM")
        pytest.skip("no Chromium on the PATH; install it or set REMAT_TEST_CHROMIUM to test the page")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=QUIET)
        yield running
        running.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of this module's own: what it has solved is what these tests asked for."""
    with serving(tmp_path_factory.mktemp("page"), workers=1) as running:
        yield running


class Visit:
    """One tab, with everything it complained about and everyone it asked."""

    def __init__(self, browser: Any, base: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.tab = self.context.new_page()
        self.base = base
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.tab.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.tab.on("request", lambda r: self.hosts.add(r.url.split("/")[2]) if r.url.startswith("http") else None)

    def go(self, where: str = "") -> None:
        """Open a page of the page."""
        self.tab.goto(f"{self.base}/{where}")


@pytest.fixture
def visit(browser: Any, served: Service, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A tab that must end without a complaint, having asked nobody but the service."""
    base = f"http://127.0.0.1:{served.port}"
    here = Visit(browser, base, **getattr(request, "param", {}))
    yield here
    here.context.close()
    assert here.complaints == []
    assert here.hosts <= {base.removeprefix("http://")}


def graph_file(folder: Path, layers: int = 12) -> Path:
    """A graph with names, as a client writes it for people."""
    graph = training_graph(layers)
    data = graph.to_json() | {"op_names": [f"layer{i}" for i in range(graph.ops)]}
    path = folder / "graph.json"
    path.write_text(json.dumps(data))
    return path


def test_an_empty_service_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    """Nothing solved yet: a sentence, not a blank table."""
    with serving(tmp_path, workers=1) as fresh:
        here = Visit(browser, f"http://127.0.0.1:{fresh.port}")
        here.go()
        playwright.expect(here.tab.get_by_text("Nothing has been solved here yet")).to_be_visible()
        here.context.close()
        assert here.complaints == []


def test_a_dropped_graph_is_planned_shown_and_taken_home(visit: Visit, served: Service, tmp_path: Path) -> None:
    """File in, plan page out; names stay in the browser; JSON, trace and an HTML file that opens from a disk."""
    visit.go()
    tab = visit.tab
    tab.set_input_files("input[type=file]", graph_file(tmp_path))
    tab.fill("input[aria-label^=Budget]", "60%")
    tab.click("button[type=submit]")
    tab.wait_for_selector("canvas[aria-label^=R]", timeout=60_000)
    solve_id = tab.url.rsplit("/", 1)[1]
    answer = served.get(solve_id)[1]
    assert answer["plan"]["steps"]
    assert "layer" in tab.inner_text(".scroll table"), "the names of the file are shown"
    assert "layer" not in json.dumps(served.http.get(f"/v1/solves/{solve_id}/problem").json()), "but never sent"

    with tab.expect_download() as saved:
        tab.get_by_text("Answer as JSON").click()
    assert json.loads(Path(saved.value.path()).read_text())["plan"] == answer["plan"]
    with tab.expect_download() as saved:
        tab.get_by_text("Trace for Perfetto").click()
    events = json.loads(Path(saved.value.path()).read_text())["traceEvents"]
    computes = sum(step[0] == "compute" for step in answer["plan"]["steps"])
    assert sum(event["ph"] == "X" for event in events) == computes
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == answer["peak_bytes"], (
        "the picture is the verifier's"
    )
    with tab.expect_download() as saved:
        tab.get_by_text("One HTML file").click()
    offline = tmp_path / "plan.html"
    shutil.copy(saved.value.path(), offline)
    asked: list[str] = []
    reader = visit.context.new_page()
    reader.on("request", lambda r: asked.append(r.url))
    reader.goto(offline.as_uri())
    reader.wait_for_selector("canvas[aria-label^=S]")
    assert reader.get_by_text("layer").count()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_list_shows_states_and_two_plans_stand_side_by_side(visit: Visit, served: Service) -> None:
    """Every solve is in the list with its state; two of them are compared."""
    graph = training_graph(10)
    ids = [served.post(Problem(graph, budget_at(graph, f)))[1]["id"] for f in (0.6, 0.8)]
    impossible = served.post(Problem(graph, 1))[1]
    visit.go()
    for solve_id in (*ids, impossible["id"]):
        playwright.expect(visit.tab.locator(f"a[href='#/solve/{solve_id}']")).to_be_visible()
    assert visit.tab.get_by_text("infeasible").count()
    visit.go(f"#/compare/{ids[0]}/{ids[1]}")
    visit.tab.wait_for_selector("section:nth-of-type(2) canvas[aria-label^=S]")
    assert visit.tab.locator("canvas").count() >= 4


def test_an_infeasible_solve_says_the_least_budget(visit: Visit, served: Service) -> None:
    """No plan: the sentence and the least budget instead of pictures."""
    answer = served.post(Problem(training_graph(6), 1))[1]
    visit.go(f"#/solve/{answer['id']}")
    playwright.expect(visit.tab.get_by_text(answer["message"])).to_be_visible()
    playwright.expect(visit.tab.get_by_text("least budget proved")).to_be_visible()
    playwright.expect(visit.tab.get_by_text("infeasible, certified")).to_be_visible()


def test_a_file_that_is_no_graph_is_refused_in_words(visit: Visit, tmp_path: Path) -> None:
    """What, where and what to do; nothing is sent."""
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    visit.go()
    visit.tab.set_input_files("input[type=file]", bad)
    visit.tab.click("button[type=submit]")
    playwright.expect(visit.tab.locator("#notice")).to_contain_text("bad.json is not JSON")


def test_the_trade_off_is_drawn_and_keeps_its_address(visit: Visit, served: Service, tmp_path: Path) -> None:
    """A curve over budgets with a baseline next to it, each point a solve; the address brings it back."""
    visit.go("#/sweep")
    tab = visit.tab
    tab.set_input_files("input[type=file]", graph_file(tmp_path, 8))
    tab.fill("input[aria-label=Points]", "3")
    tab.fill("input[aria-label='Seconds a point']", "2")
    tab.click("button[type=submit]")
    for _ in range(2):
        playwright.expect(tab.get_by_text("of 3 budgets have a plan; no plan")).to_be_visible(timeout=90_000)
        assert tab.locator(".u-legend").inner_text().count("chen-sqrt") == 1
        tab.reload()
    playwright.expect(tab.locator(".scroll tbody tr")).to_have_count(3)
    tab.locator(".scroll tbody a").first.click()
    tab.wait_for_selector("canvas[aria-label^=R]")


def test_a_chain_and_a_join_are_planned_and_drawn(visit: Visit, tmp_path: Path) -> None:
    """Their plans have curves, recomputed steps and a trace too."""
    stages = 6
    chain = Chain(
        forward_ns=(1000,) * stages,
        backward_ns=(2000,) * stages,
        forward_workspace_bytes=(0,) * stages,
        backward_workspace_bytes=(0,) * stages,
        tape_bytes=(30,) * stages,
        activation_bytes=(10,) * (stages + 1),
        gradient_bytes=(10,) * (stages + 1),
    )
    join = Join(lengths=(4, 5), forward_ns=10, backward_ns=10, turn_ns=1, slots=20)
    tab = visit.tab
    for subject, budget, step in ((chain, "60%", "F_"), (join, "70%", "of branch")):
        path = tmp_path / "subject.json"
        path.write_text(json.dumps(subject.to_json()))
        visit.go()
        tab.set_input_files("input[type=file]", path)
        tab.fill("input[aria-label^=Budget]", budget)
        tab.click("button[type=submit]")
        playwright.expect(tab.locator("caption", has_text="over one pass")).to_be_visible(timeout=60_000)
        assert step in tab.locator(".scroll tbody").inner_text()
        with tab.expect_download() as saved:
            tab.get_by_text("Trace for Perfetto").click()
        assert json.loads(Path(saved.value.path()).read_text())["traceEvents"]


@pytest.mark.slow
def test_thirty_thousand_ops_are_shown(visit: Visit, served: Service) -> None:
    """A huge plan is drawn, thinned without losing the peak."""
    graph = training_graph(15_000)
    answer = served.post(Problem(graph, budget_at(graph, 1.0)))[1]
    assert answer["status"] == "optimal", answer
    visit.go(f"#/solve/{answer['id']}")
    visit.tab.wait_for_selector("canvas[aria-label^=S]", timeout=60_000)
    visit.tab.mouse.move(400, 500)


PHONE = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
def test_a_phone_in_the_dark(visit: Visit, served: Service) -> None:
    """Nothing is wider than the screen, and the paper is dark."""
    graph = training_graph(10)
    answer = served.post(Problem(graph, budget_at(graph, 0.7)))[1]
    for where in ("", f"#/solve/{answer['id']}"):
        visit.go(where)
        visit.tab.wait_for_selector("canvas" if where else "tbody tr")
        assert visit.tab.evaluate("() => document.documentElement.scrollWidth") <= 390
    red, green, blue = (
        int(x) for x in visit.tab.evaluate("() => getComputedStyle(document.body).backgroundColor")[4:-1].split(",")
    )
    assert red + green + blue < 150


def test_the_keyboard_reaches_everything(visit: Visit) -> None:
    """The first stop skips to the content; every control has a name."""
    visit.go()
    visit.tab.keyboard.press("Tab")
    assert visit.tab.evaluate("() => document.activeElement.textContent") == "Skip to content"
    nameless = visit.tab.evaluate(
        "() => [...document.querySelectorAll('a,button,input,select')].filter(e => e.offsetParent && "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length))).length"
    )
    assert nameless == 0


def test_the_page_is_guarded(served: Service) -> None:
    """A strict policy on the page and on its files; nothing inline, nothing from elsewhere."""
    for path in ("/", "/static/app.js", "/static/vendor/uPlot.iife.min.js"):
        reply = served.http.get(path)
        assert reply.status_code == 200
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert served.http.get("/static/../app.py").status_code in (400, 404)
