"use strict";
// Who asks: signing in with a key or a token, signing out, and with whom plans are shared.
(function (Remat) {
  const { el } = Remat.words, service = Remat.service, box = document.getElementById("account");

  // `why`: the refusal that led here, or null; `done()` goes on to where the reader was going.
  function page(main, why, done) {
    const issuer = why && why.issuer, what = issuer ? "API key or bearer token" : "API key";
    const form = Remat.fields.form(
      [
        {
          name: "secret", label: what, type: "password",
          hint: issuer ? `A key that an operator has made, or a token of ${issuer}.`
            : "A key that an operator of this service has made." },
        { name: "tenant", label: "Tenant", hint: "Only where a token speaks for several tenants." }],
      { button: "Sign in", label: "Sign in" },
      async ({ secret, tenant }) => {
        if (!secret) throw Remat.words.wrong("secret", `Write your ${what.replace("bearer ", "")}.`);
        for (const [field, text] of Object.entries({ secret, tenant })) {
          const odd = /[^ -~]/u.exec(text);
          if (odd) throw Remat.words.wrong(field, `“${odd[0]}” cannot be sent: write ASCII characters alone.`);
        }
        const before = service.credentialsNow();
        service.credentials(secret, tenant);
        let scopes;
        try {
          ({ scopes } = await service.capabilities());
        } catch (error) {
          service.credentials(...before);
          if (error.status === 403 && secret.split(".").length === 3) {
            form.row("tenant").hidden = false;
            error.field = "tenant";
          } else error.field = error.status ? "secret" : undefined;
          throw error;
        }
        show();
        if (scopes.includes("read") || location.hash === "#/operate") done();
        else location.hash = "#/operate";
      });
    form.row("tenant").hidden = !issuer;
    main.append(el("h1", {}, "Sign in"));
    if (why && why.status !== 401) main.append(el("p", {}, why.message));
    main.append(
      el("section", { class: "card narrow" }, form.node,
        el("p", { class: "hint" },
          "It is kept in this tab until you sign out or close it, and sent to nobody but this service.")));
    form.input("secret").focus();
  }

  // The line at the top: the tenant, and the group with which its plans are shared.
  async function show() {
    if (service.offline || !box) return;
    const out = el("button", { class: "quiet",
      onclick: () => {
        service.credentials(null, null);
        location.hash = "#/";
        location.reload();
      },
    }, "Sign out");
    const way = service.signedIn() ? out : el("a", { href: "#/sign-in" }, "Sign in");
    try {
      const { tenant, group, scopes } = await service.capabilities();
      document.getElementById("operate").hidden = !scopes.includes("operate");
      box.replaceChildren(
        el("span", {},
          `Tenant ${tenant}: plans are ${group ? `shared within the group ${group}` : "shared with no other tenant"}.`),
        way);
    } catch {
      box.replaceChildren(way);
    }
  }

  Remat.account = { page, show };
})(window.Remat);
