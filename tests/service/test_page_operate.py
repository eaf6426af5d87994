"""The operators' view in headless Chromium: what works and waits, ending solves, tenants, quotas and keys."""

from __future__ import annotations

from typing import Any

import pytest

from service.browsing import LOOKS, cli, signed_in
from service.serving import Service, open_problem, served
from service.test_tenants import Tenant

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

keyed = served(workers=1, require_keys="true")


@pytest.mark.parametrize("look", LOOKS)
def test_an_operator_sees_and_changes_what_there_is(browser: Any, keyed: Service, look: tuple[str, str]) -> None:
    name = f"team-{'-'.join(look)}"
    team = Tenant(keyed, cli(keyed, "keys", "create", name, "--new-tenant"))
    sent = team.post(open_problem(len(name)), 0, method="staged", time_limit_s=90, max_gap=0)
    chief = cli(keyed, "keys", "create", "operators", "--scope", "operate", "--new-tenant")
    visit = signed_in(browser, keyed, chief, "#/sign-in", look)
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
    visit.check()
    visit.leave(but="status of 40")  # before signing in


def test_the_view_is_shown_to_operators_alone(browser: Any, keyed: Service) -> None:
    """Others have no link to it, and its address asks them for another key."""
    visit = signed_in(browser, keyed, cli(keyed, "keys", "create", "reader", "--new-tenant"), "#/sign-in")
    expect(visit.tab.locator("#account")).to_contain_text("Tenant reader")
    expect(visit.tab.locator("#operate")).to_be_hidden()
    visit.tab.evaluate("location.hash = '#/operate'")
    expect(visit.tab.locator("h1")).to_have_text("Sign in")
    expect(visit.tab.get_by_text("lacks the scope")).to_be_visible()
    visit.leave(but="status of 40")
