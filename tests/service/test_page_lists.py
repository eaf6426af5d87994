"""The page's lists, sweeps and comparisons in headless Chromium against a real service."""

from __future__ import annotations

import csv
import io
import struct
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from remat_ir import Problem, plain_peak
from service.browsing import GRAPH, Stored, Visit, in_every_look, named_graph

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


ROWS = ".solves tbody tr"


@pytest.mark.thorough
@in_every_look
def test_no_column_is_hidden_on_any_screen(visit: Visit, stored: Stored) -> None:
    """Every row shows its name, age, state, share of the plain peak, and all other columns."""
    visit.go("", ROWS)
    shown = visit.tab.locator(f"{ROWS}:has(a[href='#/solve/{stored.plans[1]}'])")
    cells = shown.locator("td")
    assert cells.count() == 11
    assert all(cells.nth(i).is_visible() for i in range(11))
    assert visit.tab.locator(".scroll").evaluate_all("all => all.every(e => e.scrollWidth <= e.clientWidth)")
    row = stored.service.get(stored.plans[1])[1]
    expect(shown).to_contain_text(f"{round(100 * row['peak_bytes'] / plain_peak(GRAPH))} %")
    expect(shown).to_contain_text("optimal")
    expect(shown.locator("time")).to_have_count(1)


@pytest.mark.thorough
def test_sweeps_fold_and_open(visit: Visit, stored: Stored) -> None:
    """A sweep is one row, whose button shows its solves and whose link shows its curve."""
    visit.go("", ROWS)
    tab = visit.tab
    expect(tab.locator(ROWS)).to_have_count(4 + 2)
    tab.get_by_text("sweep of 3").click()
    expect(tab.locator(ROWS)).to_have_count(4 + 2 + 3)
    expect(tab.locator("tr.inner")).to_have_count(3)
    tab.get_by_text("sweep of 3").click()
    expect(tab.locator(ROWS)).to_have_count(6)
    tab.get_by_label("Fold sweeps").uncheck()
    expect(tab.locator(ROWS)).to_have_count(4 + 3 + 2)
    tab.go_back()
    expect(tab.locator(ROWS)).to_have_count(6)
    expect(tab.locator("a", has_text="curve").first).to_have_attribute("href", f"#/sweep/{stored.sweeps[1]}")


@pytest.mark.thorough
def test_an_open_sweep_keeps_the_focus_and_says_what_fails(visit: Visit, stored: Stored) -> None:
    """The focus stays at the button that was pressed, whatever else is open; a refusal is told."""
    visit.go("", ROWS)
    tab = visit.tab
    focused = "() => document.activeElement.textContent"
    for pressed, said in (
        ("sweep of 2", "▾ sweep of 2"),
        ("sweep of 3", "▾ sweep of 3"),
        ("sweep of 3", "▸ sweep of 3"),
    ):
        tab.get_by_text(pressed).click()
        expect(tab.get_by_text(said)).to_be_visible()
        assert tab.evaluate(focused) == said
    tab.route("**/v1/solves?group=*", lambda route: route.abort())
    tab.get_by_text("sweep of 3").click()
    expect(tab.locator("#notice")).to_contain_text("does not answer")
    visit.complaints[:] = [text for text in visit.complaints if "ERR_FAILED" not in text]  # the browser's own words


@pytest.mark.thorough
def test_solves_of_an_open_sweep_are_of_the_moment(visit: Visit, stored: Stored) -> None:
    """They were waiting when it was opened, and say so no longer once they have ended."""
    visit.go("", ROWS)
    tab = visit.tab

    def waiting(route: Any) -> None:
        found = route.fetch().json()
        route.fulfill(json=found | {"solves": [s | {"status": "queued"} for s in found["solves"]]})

    tab.route("**/v1/solves?group=*", waiting)
    tab.get_by_text("sweep of 3").click()
    expect(tab.locator("tr.inner", has_text="waiting")).to_have_count(3)
    tab.evaluate("() => document.activeElement.blur()")
    tab.unroute("**/v1/solves?group=*")
    expect(tab.locator("tr.inner")).to_have_count(3)
    expect(tab.locator("tr.inner", has_text="waiting")).to_have_count(0, timeout=15_000)


@pytest.mark.thorough
def test_the_list_is_filtered_and_sorted_by_the_address(visit: Visit, stored: Stored) -> None:
    """Filters and the order are the address, so that it can be sent to somebody; headers say the order."""
    visit.go("", ROWS)
    tab = visit.tab
    tab.select_option("#state", "infeasible,nothing_found")
    expect(tab.locator(ROWS)).to_have_count(3)
    assert "state=" in tab.url
    expect(tab.locator(f"a[href='#/solve/{stored.infeasible}']")).to_be_visible()
    tab.fill("#search", "no such solve")
    visit.press("Enter")
    expect(tab.get_by_text("No solve is like that.")).to_be_visible()
    visit.go(f"#/?search={stored.other[:18]}", ROWS)
    expect(tab.locator(ROWS)).to_have_count(1)
    visit.go("#/?flat=1", ROWS)
    for order in ("descending", "ascending"):
        tab.get_by_role("button", name="Budget").click()
        header = tab.get_by_role("columnheader", name="Budget")
        expect(header).to_have_attribute("aria-sort", order)
        expect(tab.locator(ROWS)).to_have_count(9)
        listed = stored.service.http.get("/v1/solves", params={"sort": "budget_bytes", "order": order[:-6]}).json()
        links = tab.locator(f"{ROWS} td:nth-child(2) a")
        expect(links.first).to_have_attribute("href", f"#/solve/{listed['solves'][0]['id']}")


@pytest.mark.thorough
def test_pages_go_on_and_back(visit: Visit, stored: Stored) -> None:
    """Older and newer lead through the whole list."""
    visit.tab.route(
        "**/v1/solves?*", lambda route: route.continue_(url=route.request.url.replace("limit=25", "limit=2"))
    )
    visit.go("#/?flat=1", ROWS)
    tab = visit.tab
    first = tab.locator(f"{ROWS} td:nth-child(2) a").first.get_attribute("href")
    older, newer = tab.get_by_role("button", name="Older"), tab.get_by_role("button", name="Newer")
    expect(newer).to_be_hidden()
    for _ in range(4):
        older.click()
        expect(newer).to_be_visible()
        tab.wait_for_timeout(400)
    expect(older).to_be_hidden()
    expect(tab.locator(ROWS)).to_have_count(1)
    for _ in range(4):
        newer.click()
        tab.wait_for_timeout(400)
    expect(newer).to_be_hidden()
    expect(tab.locator(f"{ROWS} td:nth-child(2) a").first).to_have_attribute("href", str(first))


@pytest.mark.thorough
@in_every_look
def test_two_plans_are_picked_and_compared_by_keyboard(visit: Visit, stored: Stored) -> None:
    """Two check marks lead to a table with differences, and two curves over the same axes."""
    visit.go("", ROWS)
    tab = visit.tab
    for plan in stored.plans:
        visit.tab_to(f"tr:has(a[href='#/solve/{plan}']) input[type=checkbox]", most=140)
        visit.press("Space")
        tab.evaluate("() => document.activeElement.blur()")
    tab.evaluate("() => document.getElementById('main').focus()")
    visit.tab_to("a.button")
    visit.press("Enter")
    tab.wait_for_selector("section:nth-of-type(2) canvas")
    assert tab.url.endswith("#/compare/" + "/".join(stored.plans))
    one, two = (stored.service.get(plan)[1] for plan in stored.plans)
    table = tab.inner_text(".delta tbody")
    assert f"+{round(100 * (two['peak_bytes'] / one['peak_bytes'] - 1), 1):g} %" in table
    expect(tab.locator(".warning")).to_have_count(0)
    assert visit.fits()


@pytest.mark.thorough
def test_a_comparison_that_is_left_draws_nothing_on_the_next_page(visit: Visit, stored: Stored) -> None:
    """A plan that is not in the list is read by itself; its answer comes when the reader is at the help."""
    tab = visit.tab
    held: list[Any] = []
    tab.route("**/v1/solves?limit=200", lambda route: route.fulfill(json={"solves": [], "next": None}))
    tab.route(f"**/v1/solves/{stored.plans[0]}", lambda route: held.append(route))
    visit.go(f"#/compare/{'/'.join(stored.plans)}")
    while not held:
        tab.wait_for_timeout(20)
    tab.get_by_role("link", name="Help").click()
    expect(tab.locator("h1")).to_have_text("Help")
    with tab.expect_response(f"**/v1/solves/{stored.plans[1]}"):
        held[0].continue_()
    tab.wait_for_timeout(200)
    expect(tab.locator("main form")).to_have_count(0)


@pytest.mark.thorough
def test_plans_of_different_graphs_are_compared_with_a_warning(visit: Visit, stored: Stored) -> None:
    """Their sizes are named; a solve without a plan is an error next to nothing else."""
    visit.go(f"#/compare/{stored.plans[0]}/{stored.other}", ".warning")
    expect(visit.tab.locator(".warning")).to_contain_text("20 ops and 14 ops")
    visit.go(f"#/compare/{stored.plans[0]}/{stored.infeasible}", "main > .error")
    expect(visit.tab.locator("main > .error")).to_contain_text("Plan B is not there")


@pytest.mark.thorough
@in_every_look
def test_a_sweep_says_why_a_method_has_no_plan(visit: Visit, stored: Stored) -> None:
    """Only methods with a line are in the legend; the others are explained; CSV and PNG."""
    visit.go(f"#/sweep/{','.join(stored.sweeps)}", ".legend")
    tab = visit.tab
    legend = tab.inner_text(".legend")
    assert "auto" in legend
    assert "checkpoint-all" not in legend
    expect(tab.locator(".reasons")).to_contain_text("checkpoint-all has no plan at 2 of 2 budgets")
    rows = list(csv.DictReader(io.StringIO(visit.downloaded("Table as CSV").read_text())))
    answers = [s for i in stored.sweeps for s in stored.service.http.get(f"/v1/sweeps/{i}").json()["solves"]]
    assert [(r["method"], int(r["budget_bytes"]), r["cost_ns"]) for r in rows] == [
        (a["method"], a["budget_bytes"], "" if a["cost_ns"] is None else str(a["cost_ns"])) for a in answers
    ]
    picture = visit.downloaded("Picture as PNG").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", picture[16:20])[0] >= 240
    assert visit.fits()


@pytest.mark.thorough
def test_a_sweep_is_asked_for_and_keeps_its_address(visit: Visit, tmp_path: Path) -> None:
    """A curve over budgets with a baseline next to it, each point a solve; an unknown baseline is named."""
    visit.go("#/sweep")
    tab = visit.tab
    tab.set_input_files("input[type=file]", named_graph(tmp_path, 8))
    tab.fill("[name=from]", "8")  # and 92 % more are a hair above 100 % in the numbers of the language
    tab.fill("[name=points]", "6")
    tab.fill("[name=limit]", "2")
    tab.fill("[name=baselines]", "chen")
    tab.click("button[type=submit].primary")
    expect(tab.locator(".field:has([name=baselines]) .error")).to_contain_text("There is no method “chen”")
    tab.fill("[name=baselines]", "linearized-greedy")
    tab.click("button[type=submit].primary")
    for _ in range(2):
        expect(tab.get_by_text("of 6 budgets have a plan.")).to_be_visible(timeout=90_000)
        expect(tab.locator(".legend")).to_contain_text("auto")
        tab.reload()
    expect(tab.locator(".scroll tbody tr")).to_have_count(6)
    tab.locator(".scroll tbody a").first.click()
    tab.wait_for_selector("[data-matrix=R]")


@pytest.mark.thorough
def test_a_service_that_goes_away_is_told_until_it_is_back(visit: Visit) -> None:
    """The message stays while it is true, and the list is there meanwhile."""
    visit.go("", ROWS)
    tab = visit.tab
    tab.route("**/v1/solves?*", lambda route: route.abort())
    notice = tab.locator("#notice")
    expect(notice).to_contain_text("does not answer", timeout=15_000)
    tab.wait_for_timeout(5500)
    expect(notice).to_contain_text("does not answer")
    assert tab.locator(ROWS).count()
    tab.unroute("**/v1/solves?*")
    expect(notice).to_have_text("", timeout=15_000)
    visit.complaints[:] = [text for text in visit.complaints if "ERR_FAILED" not in text]  # the browser's own words


@pytest.mark.thorough
@pytest.mark.parametrize("status", [None, 503])
@pytest.mark.parametrize("page", ["solve", "sweep", "max-batch"])
def test_a_page_that_polls_goes_on_once_the_service_is_back(
    visit: Visit, stored: Stored, page: str, status: int | None
) -> None:
    """It says so while the service is away, or is stopping, and asks nobody to reload it."""
    if page == "max-batch":
        body = {"problem": Problem(GRAPH, 2 * plain_peak(GRAPH)).to_json(), "time_limit_s": 5, "total_s": 20}
        found = stored.service.http.post("/v1/max-batch", json=body, headers={"Prefer": "wait=30"}).json()["id"]
    else:
        found = stored.plans[0] if page == "solve" else stored.sweeps[0]
    tab = visit.tab
    refused = {"status": status, "content_type": "application/problem+json", "body": '{"detail": "it stops"}'}
    tab.route("**/v1/**", lambda route: route.abort() if status is None else route.fulfill(**refused))
    visit.go(f"#/{page}/{found}", "#notice p")
    notice = tab.locator("#notice")
    expect(notice).to_contain_text("does not answer" if status is None else "it stops")
    expect(notice).to_contain_text("This page tries again.")
    tab.unroute("**/v1/**")
    expect(tab.locator("[data-matrix=S], main table").first).to_be_visible(timeout=30_000)
    expect(notice).to_have_text("")
    visit.complaints[:] = [text for text in visit.complaints if "ERR_FAILED" not in text and "503" not in text]


@pytest.mark.thorough
@in_every_look
def test_a_folded_row_says_what_it_has_come_to_and_a_search_has_its_page(visit: Visit, stored: Stored) -> None:
    """How many budgets have a plan; which batch trains, at the row and on the search's own page."""
    name = f"search {uuid4().hex}"  # the service is that of all looks
    body = {"problem": Problem(GRAPH, 2 * plain_peak(GRAPH)).to_json(), "time_limit_s": 5, "name": name}
    started = stored.service.http.post("/v1/max-batch", json=body | {"total_s": 20}, headers={"Prefer": "wait=30"})
    search = started.json()
    assert search["ended"]
    visit.go("", ROWS)
    tab = visit.tab
    curve = tab.locator(f"a[href='#/sweep/{stored.sweeps[0]}']")
    expect(tab.locator(ROWS, has=curve)).to_contain_text("2 of 3 with a plan")
    told = tab.locator(f"{ROWS} .group .block").first.bounding_box()
    assert told["width"] > told["height"], "it is read in lines, not word by word"
    without = tab.locator(f"{ROWS}:has(a[href='#/sweep/{stored.sweeps[1]}']) .group")
    expect(without).to_contain_text("0 of 2 with a plan")
    for sweep, said in zip(stored.sweeps, ("2 of 3 planned", "nothing found"), strict=True):
        row = tab.locator(f"{ROWS}:has(a[href='#/sweep/{sweep}'])")  # its newest solve may have none
        expect(row.locator("td[data-label=State]")).to_contain_text(said)
        expect(row).not_to_contain_text("no plan fits")
    row = tab.locator(ROWS, has_text=name)
    expect(row).to_contain_text(f"batch search of {len(search['solves'])}")
    largest, bound = search["best_batch"], search["bound"]
    outcome = f"a batch of {largest} trains, and " + (
        "no larger one does" if largest == bound else f"none above {bound} does"
    )
    expect(row).to_contain_text(outcome)
    row.get_by_text("search", exact=True).click()
    expect(tab.locator("h1")).to_have_text("Largest batch")
    expect(tab.locator(".headline")).to_contain_text(f" {outcome}.")
    expect(tab.locator("tbody tr")).to_have_count(len(search["batches"]))
    expect(tab.locator("tbody")).not_to_contain_text("cancelled")
    assert tab.locator("tbody tr td:first-child").all_inner_texts() == [str(batch) for batch in search["batches"]]
    visit.check()
    tab.get_by_text("the plan of the largest").click()
    tab.wait_for_url(f"**/#/solve/{search['best_solve']}")
