"""The page in headless Chromium against a real service: every flow at three widths, in both themes, by keyboard."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from remat_ir import Join, Problem, budget_at, plain_peak
from service.browsing import GRAPH, Stored, Visit, in_every_look, named_graph
from service.serving import even_chain, posed, serving, training_graph

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


@pytest.mark.thorough
def test_an_empty_service_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    """Nothing solved yet: a sentence, not a blank table."""
    with serving(tmp_path, workers=1) as fresh:
        here = Visit(browser, fresh.url)
        here.go()
        expect(here.tab.get_by_text("Nothing has been solved here yet")).to_be_visible()
        here.tab.get_by_role("button", name="Plan a sample").click()
        here.tab.wait_for_selector("[data-matrix=R]", timeout=60_000)
        expect(here.tab.locator(".eyebrow")).to_contain_text("sample")
        solve = here.tab.url.split("/")[-1]
        here.go(f"#/solves/{solve}", "[data-matrix=R]")  # the API's own address of it
        assert here.tab.url.endswith(f"#/solve/{solve}")
        here.leave()


@pytest.mark.thorough
def test_on_a_phone_the_list_comes_before_the_form(browser: Any, stored: Stored) -> None:
    """The form is one line, and opens by a tap."""
    here = Visit(browser, stored.service.url, "phone")
    here.go("", ".solves tbody tr")
    expect(here.tab.locator("[name=budget]")).to_be_hidden()
    row = here.tab.locator(".solves tbody tr").first.bounding_box()
    assert row["y"] < here.tab.viewport_size["height"]
    here.tab.get_by_text("Plan a problem").click()
    expect(here.tab.locator("[name=budget]")).to_be_visible()
    here.leave()


@pytest.mark.thorough
@in_every_look
def test_every_page_is_readable(visit: Visit, stored: Stored) -> None:
    """No page is wider than its screen; texts have contrast, controls have names, and tabs have titles."""
    pages = {
        "": (".solves tbody tr", "Solves · remat"),
        f"#/solve/{stored.plans[0]}": ("[data-matrix=S]", "% time · remat"),
        f"#/solve/{stored.infeasible}": ("h1.headline", "No plan fits 1 B · remat"),
        f"#/compare/{'/'.join(stored.plans)}": ("[data-matrix=S]", "Compare · remat"),
        f"#/sweep/{','.join(stored.sweeps)}": (".legend", "Time against memory · remat"),
        "#/help": ("h2", "Help · remat"),
        "#/sign-in": ("input[type=password]", "Sign in · remat"),
        "#/nothing/here": ("text=There is no page", "Not found · remat"),
    }
    for where, (wait_for, title) in pages.items():
        visit.go(where, wait_for)
        visit.tab.wait_for_function("t => document.title.endsWith(t)", arg=title)
        visit.check(where)
        expect(visit.tab.locator("nav a", has_text="Help")).to_be_visible()
    visit.tab.get_by_text("To the list of solves").click()
    expect(visit.tab.locator(".solves tbody tr").first).to_be_visible()


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["#/100%", "#/constructor", "#/toString/x", "#/__proto__"])
def test_an_address_that_names_nothing_says_so(visit: Visit, where: str) -> None:
    """However it is written: not well encoded, or a word that every object of the language knows."""
    visit.go(where, "text=There is no page")
    expect(visit.tab.locator("h1")).to_have_text("Nothing here")


@pytest.mark.thorough
def test_an_id_that_is_not_well_encoded_is_no_id(visit: Visit) -> None:
    visit.go("#/solve/50%", "h1")
    expect(visit.tab.get_by_text("“50%” is no id.")).to_be_visible()
    visit.complaints[:] = [text for text in visit.complaints if "422" not in text]  # the service's refusal


@pytest.mark.thorough
def test_a_solve_with_a_name_shows_it_on_its_page(visit: Visit, stored: Stored) -> None:
    """Above the headline and in the title of the tab; it is the request's, not the answer's, which others share."""
    named = stored.service.post(Problem(GRAPH, budget_at(GRAPH, 0.6)), name="GPT-2 of team A")[1]
    visit.go(f"#/solve/{named['id']}", ".eyebrow")
    expect(visit.tab.locator(".eyebrow")).to_contain_text("GPT-2 of team A")
    visit.tab.wait_for_function("document.title.startsWith('GPT-2 of team A: ')")
    visit.go(f"#/compare/{named['id']}/{stored.plans[1]}", "[data-matrix=S]")
    expect(visit.tab.locator(f"h3 a[href='#/solve/{named['id']}']")).to_have_text("GPT-2 of team A")
    assert "name" not in named


@pytest.mark.thorough
def test_a_job_sees_what_it_has_saved(visit: Visit, stored: Stored) -> None:
    """Plain training's peak less the plan's, and less what the job measured; both include what is there throughout."""
    graph = training_graph(9, size=2**20, fixed=50 * 2**20)
    answer = stored.service.post(Problem(graph, budget_at(graph, 0.6)))[1]
    peak, plain = answer["peak_bytes"], plain_peak(graph)
    page, above = f"#/solve/{answer['id']}", peak - graph.fixed_bytes
    run = {"predicted_bytes": above, "measured_bytes": above + 2**20}
    assert stored.service.http.put(f"/v1/solves/{answer['id']}/run", json=run).status_code == 204
    visit.go(page, "[aria-label='As measured']")
    cards = visit.tab.locator(".fact", has_text="Memory saved")
    expect(cards).to_have_count(2)
    for card, used in zip(cards.all(), (peak, peak + 2**20), strict=True):
        mebibytes, percent = map(float, re.findall(r"([\d.]+) (?:MiB|%)", card.inner_text())[:2])
        assert mebibytes == pytest.approx((plain - used) / 2**20, rel=0.01)
        assert percent == pytest.approx(100 * (1 - used / plain), rel=0.05)


@in_every_look
def test_a_problem_is_planned_by_keyboard(visit: Visit, tmp_path: Path) -> None:
    """From the file to the plan without a mouse; the curve and the matrices are stepped through and read out."""
    visit.go()
    tab = visit.tab
    visit.press("Tab")
    assert tab.evaluate("() => document.activeElement.textContent") == "Skip to content"
    visit.press("Enter")
    assert tab.evaluate("() => document.activeElement.id") == "main"
    tab.set_input_files("input[type=file]", named_graph(tmp_path))
    if visit.width <= 760:
        visit.tab_to("summary")
        visit.press("Enter")
    visit.tab_to("[name=budget]")
    visit.press("Control+A")
    tab.keyboard.type("60%")
    visit.press("Enter")
    tab.wait_for_selector("[data-matrix=R]", timeout=60_000)
    visit.tab_to(".panel[role=application]")
    visit.press("ArrowRight", "ArrowRight")
    expect(tab.locator(".tip").first).to_contain_text("runs at")
    expect(tab.locator("[aria-live=polite]", has_text="of the budget")).to_have_count(1)
    visit.press("+", "+", "0", "End")
    expect(tab.locator(".tip").first).to_contain_text("net.block3")
    visit.press("Escape")
    visit.tab_to("[data-matrix=R]")
    visit.press("ArrowRight")
    expect(tab.locator("figure .tip").first).to_contain_text("computed again in stage")
    visit.tab_to("[data-matrix=S]")
    visit.press("ArrowDown")
    expect(tab.locator("figure .tip").nth(1)).to_contain_text("after it was computed again")


def test_a_plan_is_shown_and_taken_home(visit: Visit, stored: Stored, tmp_path: Path) -> None:
    """The headline; names that never leave; JSON, trace, and an HTML file that opens from a disk."""
    visit.go()
    tab = visit.tab
    tab.set_input_files("input[type=file]", named_graph(tmp_path))
    tab.fill("[name=budget]", "60%")
    tab.click("button[type=submit].primary")
    tab.wait_for_selector("[data-matrix=R]", timeout=60_000)
    solve_id = tab.url.rsplit("/", 1)[1]
    answer = stored.service.get(solve_id)[1]
    plain = plain_peak(training_graph(12))
    said = tab.inner_text("h1")
    assert f"(−{round(100 * (1 - answer['peak_bytes'] / plain))} %)" in said
    assert said.endswith("% time")
    assert tab.locator("#stack-by").input_value() == "module"
    assert "net.block0" in tab.inner_text(".legend >> nth=0")
    sent = stored.service.http.get(f"/v1/solves/{solve_id}/problem").text
    assert "block" not in sent, "names are never sent"

    assert json.loads(visit.downloaded("Answer as JSON").read_text())["plan"] == answer["plan"]
    events = json.loads(visit.downloaded("Trace for Perfetto").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == sum(step[0] == "compute" for step in answer["plan"]["steps"])
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == answer["peak_bytes"]
    offline = tmp_path / "plan.html"
    shutil.copy(visit.downloaded("One HTML file"), offline)
    asked: list[str] = []
    reader = visit.context.new_page()
    reader.on("request", lambda r: asked.append(r.url))
    reader.on("pageerror", lambda e: visit.complaints.append(str(e)))
    reader.goto(offline.as_uri())
    reader.wait_for_selector("[data-matrix=S]")
    assert reader.inner_text("h1") == said
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.thorough
@pytest.mark.parametrize("status", [None, 503])
def test_a_file_that_cannot_be_made_is_told(visit: Visit, stored: Stored, status: int | None) -> None:
    """The service is away, or answers with something else than the page's scripts: no file, and why."""
    visit.go(f"#/solve/{stored.plans[0]}", "[data-matrix=S]")
    tab = visit.tab
    files: list[Any] = []
    tab.on("download", lambda file: files.append(file))
    tab.route("**/static/words.js", lambda route: route.abort() if status is None else route.fulfill(status=status))
    tab.get_by_text("One HTML file").click()
    expect(tab.locator(".row > .error")).to_contain_text("does not give the page's own files")
    assert files == []
    visit.complaints[:] = [text for text in visit.complaints if "ERR_FAILED" not in text and "503" not in text]


@pytest.mark.thorough
def test_the_curve_zooms_and_tells_what_is_resident(visit: Visit, stored: Stored) -> None:
    """The parts in the tooltip add up to the memory that it shows; a drag zooms, a reset shows all; lanes follow."""
    visit.go(f"#/solve/{stored.plans[0]}", "[data-matrix=S]")
    tab = visit.tab
    problem = stored.service.http.get(f"/v1/solves/{stored.plans[0]}/problem").json()
    steps = stored.service.get(stored.plans[0])[1]["plan"]["steps"]
    sums = tab.evaluate(
        """([graph, steps]) => { const run = Remat.replay.replay(graph, steps), names = graph.op_cost_ns.map((_, i) => `m${i % 3}.x:op`);
        return [Remat.stack.byOrigin(graph, run), Remat.stack.byModule(graph, run, names)]
          .map(s => Array.from({length: run.count}, (_, i) => s.upTo(i, s.layers.length - 1) - run.rows.memory[i])); }""",  # noqa: E501
        [problem["graph"], steps],
    )
    assert all(difference == 0 for layers in sums for difference in layers)
    over = tab.locator(".u-over").first
    box = over.bounding_box()
    before = over.screenshot()
    tab.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
    expect(tab.locator(".tip").first).to_contain_text("values are resident")
    tab.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 50, steps=4)
    tab.mouse.up()
    tab.mouse.move(0, 0)
    assert over.screenshot() != before
    tab.get_by_text("Reset", exact=True).click()
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(200)
    assert over.screenshot() == before


@pytest.mark.thorough
def test_keys_of_the_browser_are_left_to_it(visit: Visit, stored: Stored) -> None:
    """Ctrl and plus zoom the whole page, Alt and an arrow lead back, whatever picture has the focus."""
    visit.go(f"#/solve/{stored.plans[0]}", "[data-matrix=S]")
    for picture in (".panel[role=application]", "[data-matrix=R]"):
        taken = visit.tab.locator(picture).first.evaluate(
            """e => [["+", "ctrlKey"], ["0", "metaKey"], ["ArrowLeft", "altKey"], ["ArrowLeft", "none"]].map(
            ([key, held]) => !e.dispatchEvent(new KeyboardEvent("keydown", { key, [held]: true, cancelable: true })))"""
        )
        assert taken == [False, False, False, True]


@pytest.mark.thorough
def test_a_change_of_theme_draws_only_pictures_anew(visit: Visit, stored: Stored) -> None:
    """In the evening what is typed stays, and on paper, which is light, the plan; only pictures have other colors."""
    tab = visit.tab
    visit.go()
    visit.unfold()
    tab.fill("[name=budget]", "37%")
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_timeout(200)
    assert tab.input_value("[name=budget]") == "37%"
    visit.go(f"#/solve/{stored.plans[0]}", "[data-matrix=S]")
    tab.evaluate("() => document.querySelector('[data-matrix=S]').classList.add('former')")
    tab.emulate_media(media="print", color_scheme="light")
    tab.wait_for_timeout(200)
    expect(tab.locator(".former")).to_have_count(1)
    tab.emulate_media(media="screen", color_scheme="dark")
    expect(tab.locator(".former")).to_have_count(0)
    tab.wait_for_selector("[data-matrix=S]")


@pytest.mark.thorough
def test_charts_that_are_gone_are_given_back(visit: Visit, stored: Stored) -> None:
    """uPlot keeps a chart for as long as it is not destroyed; a sweep's page draws one a second for hours."""
    visit.go("#/help", "h2")
    tab = visit.tab
    tab.evaluate(
        """() => {
        const Real = uPlot;
        window.alive = 0;
        window.uPlot = function (options, data, box) {
          alive++;
          return new Real({ ...options, hooks: { ...options.hooks, destroy: [() => alive--] } }, data, box);
        };
        Object.assign(window.uPlot, Real);
        }"""
    )
    curve, plan = (f"#/sweep/{stored.sweeps[0]}", ".curve .uplot"), (f"#/solve/{stored.plans[0]}", ".panel .uplot")
    for where, drawn in (curve, plan, curve):
        tab.evaluate("where => { location.hash = where; }", where)
        tab.wait_for_selector(drawn)
        assert tab.evaluate("() => alive === document.querySelectorAll('.uplot').length")


@pytest.mark.thorough
def test_names_color_the_memory_later_too(visit: Visit, stored: Stored, tmp_path: Path) -> None:
    """A names file on the page of a plan; one of another graph is refused next to its field, and the error stays."""
    visit.go(f"#/solve/{stored.plans[0]}", "[data-matrix=S]")
    tab = visit.tab
    tab.get_by_text("Names of ops…").click()
    tab.set_input_files(".names input[type=file]", named_graph(tmp_path, 12))
    tab.get_by_text("Show names").click()
    error = tab.locator(".names .field .error")
    expect(error).to_contain_text("names 24 ops, and this graph has 20")
    tab.set_input_files(".names input[type=file]", named_graph(tmp_path, 10))
    tab.get_by_text("Show names").click()
    expect(tab.locator(".legend").first).to_contain_text("net.block")
    tab.select_option("#stack-by", "origin")
    expect(tab.locator(".legend").first).to_contain_text("made in the forward pass")


@pytest.mark.thorough
@in_every_look
def test_errors_stay_next_to_their_field(visit: Visit, tmp_path: Path) -> None:
    """What is wrong is said where it is wrong until it is changed, whoever finds it: the page or the service."""
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    visit.go()
    tab = visit.tab
    visit.unfold()
    send = tab.locator("button[type=submit].primary")
    error = {name: tab.locator(f".field:has([name={name}]) .error") for name in ("file", "budget", "limit")}
    send.click()
    expect(error["file"]).to_have_text("Choose a file first, or drop one here.")
    tab.set_input_files("input[type=file]", bad)
    expect(error["file"]).to_have_text("")
    send.click()
    expect(error["file"]).to_contain_text("bad.json is not JSON")
    tab.set_input_files("input[type=file]", named_graph(tmp_path))
    for name, text, said in (
        ("budget", "0.5", "has no unit: write 50%"),
        ("limit", "-1", "at least 0.1"),
        ("limit", "1e9", ""),
    ):
        old = tab.input_value(f"[name={name}]")
        tab.fill(f"[name={name}]", text)
        send.click()
        expect(error[name]).not_to_have_text("")
        expect(error[name]).to_contain_text(said)
        assert tab.get_attribute(f"[name={name}]", "aria-invalid") == "true"
        assert tab.evaluate("() => document.activeElement.name") == name
        tab.wait_for_timeout(300)
        expect(error[name]).not_to_have_text("")
        assert visit.fits()
        tab.fill(f"[name={name}]", old)
        expect(error[name]).to_have_text("")
    visit.complaints[:] = [
        text for text in visit.complaints if "422" not in text
    ]  # the service's refusal, on the console


@pytest.mark.thorough
def test_a_chain_and_a_join_are_planned_and_drawn(visit: Visit, tmp_path: Path) -> None:
    """Their plans have curves, recomputed steps and a trace too."""
    chain = even_chain(6, 10)
    join = Join(lengths=(4, 5), forward_ns=10, backward_ns=10, turn_ns=1, slots=20)
    tab = visit.tab
    for subject, budget, step in ((chain, "60%", "F_"), (join, "70%", "of branch")):
        path = tmp_path / "subject.json"
        path.write_text(json.dumps(subject.to_json()))
        visit.go()
        tab.set_input_files("input[type=file]", path)
        tab.fill("[name=budget]", budget)
        tab.click("button[type=submit].primary")
        expect(tab.locator("caption", has_text="over one pass")).to_be_visible(timeout=60_000)
        assert step in tab.locator(".scroll tbody").inner_text()
        assert json.loads(visit.downloaded("Trace for Perfetto").read_text())["traceEvents"]


@pytest.mark.slow
def test_thirty_thousand_ops_are_shown(visit: Visit, stored: Stored) -> None:
    """A huge plan is drawn, thinned without losing the peak."""
    answer = stored.service.post(posed(training_graph(15_000), 1.0))[1]
    assert answer["status"] == "optimal", answer
    visit.go(f"#/solve/{answer['id']}", "[data-matrix=S]")
    visit.tab.mouse.move(400, 500)
