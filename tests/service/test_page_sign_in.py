"""Signing in to the page in headless Chromium, by key or token, and what operators see and change there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.browsing import LOOKS, Visit, cli, signed_in
from service.serving import Service, at_peak, open_problem, serving, training_graph
from service.test_oidc import Issuer
from service.test_tenants import Tenant

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

ERROR = ".field:has([name={}]) .error"
REFUSED = "status of 40"
"""What the browser itself writes about refusals."""


def plan_of(service: Service, key: str) -> str:
    """The id of a plan of a tenant's."""
    return str(Tenant(service, key).post(at_peak(training_graph(5))).json()["id"])


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that wants keys, with two tenants in a group and one in none."""
    with serving(tmp_path_factory.mktemp("keyed"), workers=1, require_keys="true") as running:
        for name in ("vision", "speech", "alone"):
            cli(running, "tenants", "add", name)
        cli(running, "groups", "create", "research")
        for name in ("vision", "speech"):
            cli(running, "groups", "join", "research", name)
        yield running


@pytest.mark.thorough
@pytest.mark.parametrize("look", LOOKS)
def test_a_key_signs_in_by_keyboard(browser: Any, keyed: Service, look: tuple[str, str]) -> None:
    """A form, an error next to its field, then the page that was asked for; signing out forgets the key."""
    key = cli(keyed, "keys", "create", "vision", "--new-tenant")
    solve = plan_of(keyed, key)
    here = Visit(browser, keyed.url, *look)
    here.go(f"#/solve/{solve}", "input[type=password]")
    tab = here.tab
    here.check()
    assert tab.evaluate("() => document.activeElement.name") == "secret"
    expect(tab.locator(".field:has([name=tenant])")).to_be_hidden()
    assert "null" not in tab.locator("main").inner_text()
    here.press("Enter")
    expect(tab.locator(ERROR.format("secret"))).to_have_text("Write your API key.")
    tab.keyboard.type("remat_ab…")  # as the operators' list shows a key
    here.press("Enter")
    expect(tab.locator(ERROR.format("secret"))).to_contain_text("“…” cannot be sent")
    here.press("Control+A")
    tab.keyboard.type("remat_wrong")
    here.press("Enter")
    expect(tab.locator(ERROR.format("secret"))).to_contain_text("not valid")
    assert tab.evaluate("() => sessionStorage.getItem('remat-key')") is None
    here.press("Control+A")
    tab.keyboard.type(key)
    here.press("Enter")
    tab.wait_for_selector("[data-matrix=R]")
    expect(tab.locator("#account")).to_contain_text("Tenant vision: plans are shared within the group research.")
    here.tab_to("#account button")
    here.press("Enter")
    tab.wait_for_selector("input[type=password]")
    assert tab.evaluate("() => sessionStorage.getItem('remat-key')") is None
    here.leave(but=REFUSED)


@pytest.mark.thorough
def test_the_page_says_who_shares(browser: Any, keyed: Service) -> None:
    """A tenant in no group shares with nobody; it does not see a plan of another tenant's, and finds the way back."""
    others = plan_of(keyed, cli(keyed, "keys", "create", "vision", "--new-tenant"))
    here = signed_in(browser, keyed, cli(keyed, "keys", "create", "alone", "--new-tenant"))
    expect(here.tab.locator("#account")).to_contain_text("Tenant alone: plans are shared with no other tenant.")
    here.tab.evaluate("id => { location.hash = `#/solve/${id}`; }", others)
    expect(here.tab.get_by_text("There is no solve with this id.")).to_be_visible()
    here.tab.get_by_text("To the list of solves").click()
    expect(here.tab.get_by_text("Nothing has been solved here yet")).to_be_visible()
    here.leave(but=REFUSED)


@pytest.mark.thorough
def test_a_revoked_key_leads_back_to_the_form(browser: Any, keyed: Service) -> None:
    """The list stops, and says why it wants a key again."""
    here = signed_in(browser, keyed, cli(keyed, "keys", "create", "alone", "--new-tenant"))
    expect(here.tab.get_by_text("Nothing has been solved here yet")).to_be_visible()
    for line in cli(keyed, "keys", "list").splitlines():
        key_id, tenant = line.split()[:2]
        if tenant == "alone":
            cli(keyed, "keys", "revoke", key_id)
    here.tab.wait_for_selector("input[type=password]", timeout=20_000)
    here.leave(but=REFUSED)


@pytest.mark.thorough
def test_a_refusal_on_the_list_stays(browser: Any, keyed: Service) -> None:
    """Though the list is asked for again and again; and a key that may not read it is asked for another."""
    team = Tenant(keyed, cli(keyed, "keys", "create", "vision", "--new-tenant"))
    sent = team.post(open_problem(31), 0, method="staged", time_limit_s=60, max_gap=0).json()["id"]
    here = signed_in(browser, keyed, cli(keyed, "keys", "create", "vision", "--scope", "read"))
    tab = here.tab
    tab.get_by_role("button", name="Cancel").first.click()
    expect(tab.locator("#notice")).to_contain_text("lacks the scope 'solve'")
    with tab.expect_response("**/v1/solves?*"):
        pass
    with tab.expect_response("**/v1/solves?*"):
        pass
    expect(tab.locator("#notice")).to_contain_text("lacks the scope 'solve'")
    operator = cli(keyed, "keys", "create", "vision", "--scope", "operate")
    tab.evaluate("key => sessionStorage.setItem('remat-key', key)", operator)
    expect(tab.locator("h1")).to_have_text("Sign in", timeout=15_000)
    expect(tab.get_by_text("lacks the scope 'read'")).to_be_visible()
    assert team.http.post(f"/v1/solves/{sent}/cancel").is_success
    here.leave(but=REFUSED)


@pytest.mark.thorough
def test_a_token_signs_in_and_names_its_tenant(browser: Any, tmp_path: Path) -> None:
    """Where OIDC is set the form names the provider; a token of several tenants has to say which."""
    with Issuer() as issuer, serving(tmp_path, workers=1, require_keys="true", oidc_issuer=issuer.url) as running:
        for name in ("vision", "speech"):
            cli(running, "tenants", "add", name, "--identity-group", name)
        here = Visit(browser, running.url)
        here.go("", "input[type=password]")
        tab = here.tab
        expect(tab.get_by_label("API key or bearer token")).to_be_visible()
        expect(tab.locator(".hint", has_text=issuer.url)).to_be_visible()
        tab.fill("[name=secret]", issuer.token(groups=["vision", "speech"]))
        here.press("Enter")
        expect(tab.locator(ERROR.format("tenant"))).to_contain_text("speech, vision")
        tab.fill("[name=tenant]", "speech")
        here.press("Enter")
        expect(tab.locator("#account")).to_contain_text("Tenant speech")
        here.leave(but=REFUSED)


@pytest.mark.thorough
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
    visit.leave(but=REFUSED)  # before signing in


@pytest.mark.thorough
def test_an_operator_comes_to_the_view_by_its_address(browser: Any, keyed: Service) -> None:
    """A bookmark of it asks for a key; one that may do nothing else leads on to the view, which is there already."""
    chief = cli(keyed, "keys", "create", "operators", "--scope", "operate", "--new-tenant")
    visit = signed_in(browser, keyed, chief, "#/operate")
    expect(visit.tab.locator("h1")).to_have_text("Operation")
    visit.leave(but=REFUSED)


def test_the_view_is_shown_to_operators_alone(browser: Any, keyed: Service) -> None:
    """Others have no link to it, and its address asks them for another key."""
    visit = signed_in(browser, keyed, cli(keyed, "keys", "create", "reader", "--new-tenant"), "#/sign-in")
    expect(visit.tab.locator("#account")).to_contain_text("Tenant reader")
    expect(visit.tab.locator("#operate")).to_be_hidden()
    visit.tab.evaluate("location.hash = '#/operate'")
    expect(visit.tab.locator("h1")).to_have_text("Sign in")
    expect(visit.tab.get_by_text("lacks the scope")).to_be_visible()
    visit.leave(but=REFUSED)
