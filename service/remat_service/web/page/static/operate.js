"use strict";
// For who runs the service: workers, the queue, the last hour; solves of all tenants; tenants, quotas and keys.
(function (Remat) {
  const { el, bytes, seconds, percent, ago, wrong } = Remat.words, ask = Remat.service.operator;

  const QUOTAS = [["most_running", "Running at once"], ["most_queued", "Waiting at once"],
    ["most_solver_seconds", "Solver seconds a day"], ["most_stored_bytes", "Stored bytes"],
    ["most_requests", "Kept requests"], ["most_profiles", "Stored profiles"]];
  const SCOPES = [["solve read", "plan and read"], ["read", "read"], ["operate", "operate the service"]];

  function fact(title, value, about) {
    return el("div", { class: "fact" }, el("dt", {}, title), el("dd", {}, value, about ? el("small", {}, about) : null),
    );
  }

  function facts(found) {
    const hour = found.last_hour,
      waits = found.oldest_queued_s === null ? "nothing waits" : `oldest for ${seconds(found.oldest_queued_s)}`;
    return el("dl", { class: "facts" }, fact("Service", found.ready ? "ready" : "not ready", found.version),
      fact("Workers", `${found.workers_busy} of ${found.workers_alive} busy`),
      fact("Queue", `${found.queued} waiting`, waits), fact("Solving", `${found.running} running`),
      fact("Requests, last hour", hour.requests,
        `${hour.requests ? percent(hour.hits / hour.requests) : "none"} from the store`),
      fact("Solves, last hour", hour.solves, `${hour.failures} failed`),
      fact("Saved, last hour", seconds(hour.saved_s), "of solving, by stored answers"),
      fact("Memory saved, last hour", bytes(hour.saved_bytes), "by plans, against plain training"),
      fact("Store", bytes(found.store_bytes)));
  }

  // heads: [title, class]; rows: arrays of cells. On a phone each row is a card.
  function table(caption, heads, rows, empty) {
    if (!rows.length) return el("p", { class: "empty" }, empty);
    const head = el("thead", {},
      el("tr", {}, heads.map(([title, kind]) => el("th", { scope: "col", class: kind }, title))));
    const cell = (content, i) => el("td", { class: heads[i][1], "data-label": heads[i][0] }, content);
    const body = el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))));
    return el("div", { class: "scroll" }, el("table", { class: "cards" }, el("caption", {}, caption), head, body));
  }

  // A part that is not drawn anew while the reader's focus is in it.
  function put(box, made) { if (!box.contains(document.activeElement)) box.replaceChildren(made); }

  function act(tell, what, after) {
    return async () => {
      try {
        tell(null);
        await what();
        document.activeElement.blur();
        await after();
      } catch (error) { tell(error); }
    };
  }

  function solvesTable(solves, tell, after) {
    const heads = [["Solve"], ["Tenant"], ["State"], ["Method"], ["Worker"], ["Asked for by", "n"],
      ["Solver time", "n"], ["Queued"], [""]];
    const row = (s) => [s.id.slice(0, 13), s.tenant, s.state === "queued" ? "waiting" : s.state, s.method,
      s.worker || "–", s.requests, seconds(s.spent_s), ago(s.queued_at),
      el("button", { "aria-label": `End solve ${s.id}`, onclick: act(tell, () => ask.cancel(s.id), after) }, "End")];
    return table("Waiting and running, of all tenants", heads, solves.map(row), "Nothing waits or runs.");
  }

  function limits(tenant) {
    const set = QUOTAS.filter(([name]) => tenant[name] !== null);
    const units = { most_stored_bytes: bytes, most_solver_seconds: seconds },
      said = (name) => (units[name] || String)(tenant[name]);
    return set.length ? set.map(([name, title]) => el("span", { class: "block" }, `${title}: ${said(name)}`)) : "none";
  }

  function tenantsTable(tenants, use, tell, after) {
    const heads = [["Tenant"], ["Weight", "n"], ["Running", "n"], ["Waiting", "n"], ["Solver time", "n"], ["Limits"],
      ["State"], [""]];
    const row = (t) => {
      const now = use.get(t.name) || { running: 0, queued: 0, solver_seconds: 0 };
      const turn = () => ask.changeTenant(t.name, { disabled: !t.disabled });
      const label = t.disabled ? "Enable" : "Disable";
      return [t.name, t.weight, now.running, now.queued, seconds(now.solver_seconds), limits(t),
        t.disabled ? "disabled" : "open",
        el("button", { "aria-label": `${label} ${t.name}`, onclick: act(tell, turn, after) }, label)];
    };
    return table("A disabled tenant's keys are refused, and what it has under way ends", heads, tenants.map(row),
      "There are no tenants.");
  }

  function keysTable(keys, tell, after) {
    const heads = [["Tenant"], ["Key"], ["Label"], ["May"], ["Ends"], [""]];
    const end = (k) =>
      el("button",
        { "aria-label": `End key ${k.prefix} of ${k.tenant}`, onclick: act(tell, () => ask.endKey(k.id), after) },
        "End");
    const row = (k) => [k.tenant, `${k.prefix}…`, k.label || "–", k.scopes.join(", "),
      k.revoked ? "ended" : k.expires_at ? new Date(k.expires_at).toLocaleString() : "never", k.revoked ? "" : end(k)];
    return table("A key's secret is shown once, when it is made", heads, keys.map(row), "There are no keys.");
  }

  // A limit as a number, or null for none.
  function limit(values, name, title) { return values[name] === "" ? null : Remat.fields.number(values, name, title); }

  function tenantForm(names, after) {
    const specs = [{ name: "name", label: "Tenant", hint: "A new name makes a tenant." },
      { name: "weight", label: "Weight", value: "1" },
      ...QUOTAS.map(([name, label]) => ({ name, label, hint: "Empty: no limit.", pointers: [`/${name}`] }))];
    const form = Remat.fields.form(specs, { button: "Save the tenant", label: "Make or change a tenant" },
      async (values) => {
        if (!values.name) throw wrong("name", "Write the name of a tenant.");
        const weight = Remat.fields.number(values, "weight", "The weight", { least: 0.001 });
        if (!names().includes(values.name)) await ask.addTenant({ name: values.name, weight });
        const change = Object.fromEntries(QUOTAS.map(([name, title]) => [name, limit(values, name, title)]));
        await ask.changeTenant(values.name, { weight, ...change });
        await after();
      });
    return form;
  }

  function keyForm(shown, after) {
    const specs = [{ name: "tenant", label: "Tenant" }, { name: "label", label: "Label", hint: "For people." },
      { name: "scopes", label: "May", options: SCOPES, value: "solve read" },
      { name: "days", label: "Days", hint: "Empty: it never ends." }];
    return Remat.fields.form(specs, { button: "Make a key", label: "Make a key" }, async (values) => {
      if (!values.tenant) throw wrong("tenant", "Write the name of a tenant.");
      const days = limit(values, "days", "Days");
      const made = await ask.addKey({ tenant: values.tenant, label: values.label || null,
        scopes: values.scopes.split(" "), days });
      shown.replaceChildren(
        el("p", { class: "warning" }, "Copy it now, it is not shown again: ", el("code", {}, made.key)));
      await after();
    });
  }

  async function page(main, current, { tell, pause, patient }) {
    const [top, solves, tenants, keys, shown] = Array.from({ length: 5 }, () => el("div"));
    let known = [];
    const refresh = async () => {
      const [overview, running, waiting, all, made] = await Promise.all([ask.overview(), ask.solves("running"),
        ask.solves("queued"), ask.tenants(), ask.keys()]);
      if (!current()) return;
      known = all.tenants;
      top.replaceChildren(facts(overview));
      put(solves, solvesTable([...running.solves, ...waiting.solves], tell, refresh));
      put(tenants, tenantsTable(known, new Map(overview.tenants.map((use) => [use.tenant, use])), tell, refresh));
      put(keys, keysTable(made.keys, tell, refresh));
    };
    const change = tenantForm(() => known.map((t) => t.name), refresh);
    change.input("name").addEventListener("change", (event) => {
      const tenant = known.find((t) => t.name === event.target.value.trim());
      for (const name of tenant ? ["weight", ...QUOTAS.map(([q]) => q)] : [])
        change.input(name).value = tenant[name] ?? "";
    });
    main.append(el("h1", {}, "Operation"), top, el("h2", {}, "Solves"), solves, el("h2", {}, "Tenants"), tenants,
      Remat.fields.folded("Make or change a tenant", el("section", { class: "card" }, change.node)),
      el("h2", {}, "API keys"), keys,
      Remat.fields.folded("Make a key", el("section", { class: "card" }, keyForm(shown, refresh).node, shown)));
    while (current()) {
      await patient(refresh);
      await pause(2000);
    }
  }

  Remat.operate = { page };
})(window.Remat);
