"""The operators' view in headless Chromium: what works and waits, ending solves, tenants, quotas and keys."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from remat_ir import Problem, budget_at
from service.browsing import LOOKS, Visit
from service.serving import Service, hard_graph, serving
from service.test_tenants import Tenant, cli

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


def command(service: Service, *arguments: str) -> str:
    """Run `remat-service`, in a thread: the browser's driver has an event loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(cli, service, *arguments).result()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("operated"), workers=1, require_keys="true") as running:
        yield running


def signed_in(browser: Any, service: Service, key: str, look: tuple[str, str]) -> Visit:
    visit = Visit(browser, service.url, *look)
    visit.go("#/sign-in", "input[name=secret]")
    visit.tab.fill("input[name=secret]", key)
    visit.press("Enter")
    return visit


@pytest.mark.parametrize("look", LOOKS)
def test_an_operator_sees_and_changes_what_there_is(browser: Any, keyed: Service, look: tuple[str, str]) -> None:
    name = f"team-{'-'.join(look)}"
    team = Tenant(keyed, command(keyed, "keys", "create", name, "--new-tenant"))
    graph = hard_graph(60, len(name))
    sent = team.post(Problem(graph, budget_at(graph, 0.4)), 0, method="staged", time_limit_s=90, max_gap=0)
    chief = command(keyed, "keys", "create", "operators", "--scope", "operate", "--new-tenant")
    visit = signed_in(browser, keyed, chief, look)
    tab = visit.tab
    expect(tab.locator("h1")).to_have_text("Operation")  # the key may do nothing else
    expect(tab.locator(".fact", has_text="Workers")).to_contain_text("of 1 busy")
    mine = tab.locator("tr", has_text=name)
    expect(mine.filter(has_text="staged")).to_have_count(1)
    tab.get_by_role("button", name="End solve").first.click()
    expect(tab.get_by_text("Nothing waits or runs.")).to_be_visible()
    assert team.http.get(f"/v1/solves/{sent.json()['id']}").json()["limit"] == "cancel"

    visit.unfold()
    tab.fill("input[name=name]", name)
    tab.fill("input[name=most_running]", "many")
    tab.get_by_role("button", name="Save the tenant").click()
    expect(tab.locator(".field:has([name=most_running]) .error")).to_contain_text("must be a number")
    tab.fill("input[name=most_running]", "3")
    tab.get_by_role("button", name="Save the tenant").click()
    expect(mine.first).to_contain_text("Running at once: 3")

    keys = tab.locator("form", has=tab.locator("[name=scopes]"))
    keys.locator("[name=tenant]").fill(name)
    keys.locator("[name=label]").fill("made here")
    tab.get_by_role("button", name="Make a key").click()
    made = tab.locator(".warning code").inner_text()
    assert Tenant(keyed, made).http.get("/v1/capabilities").json()["tenant"] == name
    row = tab.locator("tr", has_text="made here").filter(has_text=name)
    row.get_by_role("button").click()
    expect(row).to_contain_text("ended")

    tab.get_by_role("button", name=f"Disable {name}").click()
    expect(tab.get_by_role("button", name=f"Enable {name}")).to_be_visible()
    assert visit.fits()
    assert visit.unreadable() == []
    assert visit.nameless() == []
    visit.leave(but="status of 40")  # before signing in


def test_the_view_is_shown_to_operators_alone(browser: Any, keyed: Service) -> None:
    """Others have no link to it, and its address asks them for another key."""
    visit = signed_in(browser, keyed, command(keyed, "keys", "create", "reader", "--new-tenant"), ("desktop", "light"))
    expect(visit.tab.locator("#account")).to_contain_text("Tenant reader")
    expect(visit.tab.locator("#operate")).to_be_hidden()
    visit.tab.evaluate("location.hash = '#/operate'")
    expect(visit.tab.locator("h1")).to_have_text("Sign in")
    expect(visit.tab.get_by_text("lacks the scope")).to_be_visible()
    visit.leave(but="status of 40")
