"use strict";
// The trade-off curve of one step: sweeps at the service, one for each method, whose ids are the page's address.
window.Remat = window.Remat || {};
(function (Remat) {
  const { el, bytes, percent, seconds } = Remat.words, service = Remat.service;

  const words = (text) => text.split(",").map((s) => s.trim()).filter(Boolean);

  // Largest first: a bound at a larger budget holds at every smaller one.
  function budgets(about, fields) {
    const [lo, hi, n] = [Number(fields.from), Number(fields.to), Math.min(64, Math.max(2, Math.round(Number(fields.points))))];
    if (!(lo > 0 && hi > lo && n >= 2)) throw new Error("The fractions must ascend and be positive, and the points be at least 2.");
    const at = (i) => Math.min(1, lo + ((hi - lo) * i) / (n - 1));
    return [...new Set([...Array(n).keys()].map((i) => Remat.drop.budgetBytes(about, `${100 * at(i)}%`)))].sort((a, b) => b - a);
  }

  async function ask(subject, fields, method) {
    const about = await service.validate(subject);
    const body = { ...subject.body, budgets_bytes: budgets(about, fields), time_limit_s: Number(fields.limit), max_gap: 0.001 };
    const methods = [...new Set([method, ...words(fields.baselines)])];
    const asked = [];
    for (const name of methods) asked.push(await service.postSweep({ ...body, method: name }));
    location.hash = `#/sweep/${asked.map((sweep) => sweep.id).join(",")}`;
  }

  function table(sweeps, state) {
    const byBudget = new Map();
    sweeps.forEach((sweep, i) => sweep.solves.forEach((s) => byBudget.set(s.budget_bytes, Object.assign(byBudget.get(s.budget_bytes) || {}, { [i]: s }))));
    const cell = (s) => el("td", { class: "n" }, !s ? "–" : el("a", { href: `#/solve/${s.id}`, title: `${s.method}: ${s.status}` }, s.overhead === null ? s.status.replace("_", " ") : percent(s.overhead)));
    return el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "n" }, "budget"), sweeps.map((sweep) => el("th", { scope: "col", class: "n" }, sweep.solves[0].method)),
        el("th", { scope: "col", class: "n" }, "gap"), el("th", { scope: "col" }, "state"), el("th", { scope: "col", class: "n wide" }, "solved in"))),
      el("tbody", {}, [...byBudget].sort((a, b) => b[0] - a[0]).map(([budget, row]) => el("tr", {}, el("td", { class: "n" }, bytes(budget)), sweeps.map((_, i) => cell(row[i])),
        el("td", { class: "n" }, percent(row[0] && row[0].gap)), el("td", {}, row[0] ? state(row[0]) : ""), el("td", { class: "n wide" }, seconds(row[0] && row[0].seconds)))))));
  }

  function draw(box, sweeps, total) {
    const points = (sweep) => sweep.solves.map((s) => ({ budget_bytes: s.budget_bytes, overhead: s.overhead, bound: s.bound_ns === null ? null : s.bound_ns / total - 1, least: s.least_budget_bound_bytes || 0 }));
    const [mine, ...others] = sweeps.map((sweep) => ({ name: sweep.solves[0].method, points: points(sweep) }));
    const solved = others.map((o) => ({ ...o, points: o.points.filter((p) => p.overhead !== null) }));
    Remat.draw.curve(box, mine.points, solved, Math.max(0, ...mine.points.map((p) => p.least)));
  }

  async function page(main, current, { drop, pause, state }, ids) {
    const note = el("p", { class: "empty", "aria-live": "polite" }, "Choose a file and the budgets to try; the curve is drawn as the plans come, and keeps its address.");
    const box = el("div"), rows = el("div");
    main.append(el("h1", {}, "Overhead against budget"),
      drop("Draw the curve", (field) => [field("from", "Lowest fraction", "0.3"), field("to", "Highest fraction", "1"), field("points", "Points", "8"), field("limit", "Seconds a point", "10"), field("baselines", "Baselines", "chen-sqrt,ap-greedy")], ask),
      box, note, rows);
    if (!ids) return;
    let wait = 0, total = null;
    while (current()) {
      const sweeps = await Promise.all(ids.split(",").map((id) => service.sweep(id, wait)));
      if (!current()) return;
      if (total === null) total = (await service.timeline(sweeps[0].solves[0].id)).total_cost_ns;
      if (!current()) return;
      const mine = sweeps[0].solves, planned = mine.filter((s) => s.overhead !== null).length, ended = sweeps.every((s) => s.ended);
      draw(box, sweeps, total);
      if (ended || !rows.contains(document.activeElement)) rows.replaceChildren(table(sweeps, state));
      note.textContent = `${planned} of ${mine.length} budgets have a plan${ended ? "" : " so far"}; no plan fits in the shaded zone.`;
      if (ended) return;
      wait = 1; await pause(200);
    }
  }

  Remat.sweep = { page };
})(window.Remat);
