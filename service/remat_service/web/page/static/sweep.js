"use strict";
// The trade-off curve of one step: sweeps at the service, one for each method, whose ids are the page's address.
(function (Remat) {
  const { el, bytes, percent, signed, seconds, state, wrong, save } = Remat.words, service = Remat.service;
  const words = (text) => text.split(",").map((s) => s.trim()).filter(Boolean);

  // Largest first: a bound at a larger budget holds at every smaller one.
  function budgets(about, values) {
    const number = (name, what) => Remat.fields.number(values, name, what, { least: 1, most: 100 }) / 100;
    const lo = number("from", "The lowest budget"), hi = number("to", "The highest budget"),
      n = Remat.fields.number(values, "points", "The number of points", { least: 2, most: 64 });
    if (hi <= lo) throw wrong("to", "The highest budget must be above the lowest.");
    return [
      ...new Set(
        [...Array(Math.round(n)).keys()].map((i) =>
          Remat.drop.budgetBytes(about, `${Math.min(100, 100 * (lo + ((hi - lo) * i) / (n - 1)))}%`, "to"))),
    ].sort((a, b) => b - a);
  }

  async function ask(subject, values) {
    const time_limit_s = Remat.fields.number(values, "limit", "The time limit", { least: 0.1 });
    const known = (await service.capabilities()).methods.map((m) => m.name),
      strange = words(values.baselines).find((name) => !known.includes(name));
    if (strange) throw wrong("baselines", `There is no method “${strange}”: ${known.join(", ")}.`);
    const about = await service.validate(subject),
      body = { ...subject.body, budgets_bytes: budgets(about, values), time_limit_s, max_gap: 0.001 }, asked = [];
    for (const name of new Set([values.method, ...words(values.baselines)]))
      asked.push(await service.postSweep({ ...body, method: name }));
    location.hash = `#/sweep/${asked.map((sweep) => sweep.id).join(",")}`;
  }

  const method = (sweep) => sweep.solves[0].method;

  function table(sweeps) {
    const byBudget = new Map();
    sweeps.forEach((sweep, i) =>
      sweep.solves.forEach((s) =>
        byBudget.set(s.budget_bytes, Object.assign(byBudget.get(s.budget_bytes) || {}, { [i]: s }))));
    const heads = ["Budget", ...sweeps.map(method), "From optimal", "State", "Solving"];
    const cell = (s, i) =>
      el("td", { class: "n", "data-label": heads[i + 1] }, !s ? "–"
          : el("a", { href: `#/solve/${s.id}`, title: s.message }, s.overhead === null ? state(s) : signed(s.overhead)),
      );
    return el("div", { class: "scroll" },
      el("table", { class: "cards" },
        el("thead", {},
          el("tr", {}, heads.map((h) => el("th", { scope: "col", class: h === "State" ? null : "n" }, h)))),
        el("tbody", {}, [...byBudget].sort((a, b) => b[0] - a[0])
            .map(([budget, row]) =>
              el("tr", {}, el("td", { class: "n", "data-label": heads[0] }, bytes(budget)),
                sweeps.map((_, i) => cell(row[i], i)),
                el("td", { class: "n", "data-label": "From optimal" }, percent(row[0] && row[0].gap)),
                el("td", { "data-label": "State" }, row[0] ? state(row[0]) : "–"),
                el("td", { class: "n", "data-label": "Solving" }, seconds(row[0] && row[0].seconds)))))));
  }

  // Why a method has no plan at some budgets: its own message, once for all budgets with the same.
  function reasons(sweeps) {
    const found = sweeps.flatMap((sweep) => {
      const without = sweep.solves.filter((s) => s.overhead === null && s.status !== "running" && s.status !== "queued",
        ), said = new Map();
      for (const s of without) {
        const text = (s.message || s.status).replace(/\d[\d,. ]*([KMGT]?i?B|bytes)/g, "…");
        said.set(text, [...(said.get(text) || []), s]);
      }
      return [...said.values()].map((those) =>
        el("li", {}, el("strong", {}, method(sweep)),
          ` has no plan at ${those.length} of ${sweep.solves.length} budgets ` +
            `(${bytes(Math.max(...those.map((s) => s.budget_bytes)))}${those.length > 1 ? " and below" : ""}): `,
          those[0].message || those[0].status.replace("_", " ")));
    });
    return found.length ? el("ul", { class: "reasons" }, found) : null;
  }

  function csv(sweeps) {
    const quoted = (x) =>
      x === null || x === undefined ? "" : /[",\n]/.test(x) ? `"${String(x).replace(/"/g, '""')}"` : x;
    const columns = ["method", "budget_bytes", "status", "overhead", "gap", "cost_ns", "bound_ns", "peak_bytes",
      "seconds", "message"];
    return (
      [columns.join(","),
        ...sweeps.flatMap((sweep) => sweep.solves.map((s) => columns.map((c) => quoted(s[c])).join(","))),
      ].join("\n") + "\n");
  }

  function draw(box, sweeps, total) {
    const tight = sweeps[0].solves.filter((s) => s.status === "infeasible")
      .map((s) => ({ bytes: s.least_budget_bound_bytes || 0, by: s.claimed_by }));
    const least = tight.reduce((a, b) => (b.bytes > a.bytes || (b.bytes === a.bytes && !b.by) ? b : a), { bytes: 0 });
    const lines = sweeps.map((sweep, i) => ({ name: method(sweep), main: !i,
      points: sweep.solves.map((s) => [s.budget_bytes, s.overhead]) }));
    if (total)
      lines.splice(1, 0, { name: "proved: no plan is below", bound: true,
        points: sweeps[0].solves.map((s) => [s.budget_bytes,
          s.bound_ns === null || (s.restricted_to || []).length ? null : s.bound_ns / total - 1]) });
    return Remat.curves.tradeOff(box, lines, least);
  }

  // The cost of each op once, from any plan; the service replays where there is none.
  async function totalOf(sweeps) {
    const planned = sweeps.flatMap((s) => s.solves).find((s) => s.overhead !== null);
    return planned ? planned.cost_ns / (1 + planned.overhead)
      : (await service.timeline(sweeps[0].solves[0].id)).total_cost_ns;
  }

  async function page(main, current, { pause, patient }, ids) {
    const note = el("p", { class: "soft", "aria-live": "polite" },
        "Choose a file and the budgets to try. The curve is drawn as plans come; its address can be shared."),
      box = el("div", { class: "curve" }), why = el("div"), rows = el("div");
    main.append(el("h1", {}, "Time against memory"));
    const form = Remat.drop.form("Draw the curve",
      [{ name: "from", label: "Lowest budget, % of plain", value: "30" },
        { name: "to", label: "Highest budget, % of plain", value: "100" },
        { name: "points", label: "Points", value: "8" },
        { name: "limit", label: "Seconds a point", value: "10", pointers: ["/time_limit_s"] },
        {
          name: "baselines", label: "Compare with methods", value: "chen-sqrt,ap-greedy", hint: "names, with commas",
          pointers: ["/method"] }],
      ask);
    if (!ids) {
      main.append(form, note);
      return;
    }
    const tools = el("div", { class: "row", hidden: true }), name = el("p", { class: "eyebrow" });
    main.prepend(el("p", {}, el("a", { href: "#/" }, "← All solves")), name);
    main.append(note, box, tools, why, rows, el("details", {}, el("summary", {}, "Draw another curve"), form));
    let wait = 0;
    while (current()) {
      const sweeps = await patient(() => Promise.all(ids.split(",").map((id) => service.sweep(id, wait))));
      const total = current() ? await patient(() => totalOf(sweeps)) : 0;
      if (!wait && current())
        name.textContent = (await patient(() => service.nameOf(sweeps[0].solves[0].id))) || "";
      if (!current()) return;
      const mine = sweeps[0].solves, planned = mine.filter((s) => s.overhead !== null).length,
        ended = sweeps.every((s) => s.ended), { chart, items } = draw(box, sweeps, total);
      if (ended || !rows.contains(document.activeElement)) rows.replaceChildren(table(sweeps));
      why.replaceChildren(...[reasons(sweeps)].filter(Boolean));
      note.textContent = `${planned} of ${mine.length} budgets have a plan${ended ? "." : " so far."}`;
      tools.hidden = false;
      tools.replaceChildren(
        el("button", { onclick: () => save("remat-curve.csv", "text/csv", csv(sweeps)) }, "Table as CSV"),
        el("button", {
          onclick: async () =>
            save("remat-curve.png", "image/png", await Remat.chart.png(chart, "More time against the budget", items)),
        }, "Picture as PNG"));
      if (ended) return;
      wait = 1;
      await pause(200);
    }
  }

  Remat.sweep = { page };
})(window.Remat);
