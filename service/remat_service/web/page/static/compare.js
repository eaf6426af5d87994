"use strict";
// Two plans side by side: what differs in a table, their curves on one axis, and their recomputations.
(function (Remat) {
  const { el, bytes, time, percent, signed, seconds } = Remat.words, service = Remat.service;

  const by = (a, b, show) => a === null || b === null || a === undefined || b === undefined ? "–" : a === b ? "same"
        : `${b > a ? "+" : "−"}${show(Math.abs(b - a))}`;
  const points = (a, b) =>
    by(a && Math.round(a * 1e5) / 1e5, b && Math.round(b * 1e5) / 1e5, (f) => `${percent(f).replace(" %", "")} points`);

  function table(a, b) {
    const relative = (x, y) => (x && y && x !== y ? ` (${signed(y / x - 1)})` : "");
    const rows = [
      ["Memory", bytes(a.peak_bytes), bytes(b.peak_bytes),
        by(a.peak_bytes, b.peak_bytes, bytes) + relative(a.peak_bytes, b.peak_bytes)],
      ["Time of a step", time(a.cost_ns), time(b.cost_ns),
        by(a.cost_ns, b.cost_ns, time) + relative(a.cost_ns, b.cost_ns)],
      ["More time than plain", signed(a.overhead), signed(b.overhead), points(a.overhead, b.overhead)],
      ["Budget", bytes(a.budget_bytes), bytes(b.budget_bytes),
        by(a.budget_bytes, b.budget_bytes, bytes) + relative(a.budget_bytes, b.budget_bytes)],
      ["Quality", Remat.facts.quality(a)[0], Remat.facts.quality(b)[0], points(a.gap, b.gap)],
      ["Method", a.method, b.method, a.method === b.method ? "same" : ""],
      ["Solving", seconds(a.seconds), seconds(b.seconds), by(a.seconds, b.seconds, seconds)]];
    const heads = ["", "Plan A", "Plan B", "B − A"];
    return el("div", { class: "scroll" },
      el("table", { class: "wrapped delta" },
        el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", { scope: "col", class: i ? "n" : null }, h)))),
        el("tbody", {},
          rows.map((row) =>
            el("tr", {}, el("th", { scope: "row" }, row[0]), row.slice(1).map((c, i) => el("td", { class: "n" }, c))))),
      ));
  }

  // Both curves with the same axes: zooming or pointing at one does so at the other.
  function curves(box, wholes, views) {
    const axis = Remat.chart.timeAxis(0, Math.max(...views.map((v) => v.run.time))),
      highest = Math.max(...wholes.map((w, i) => Math.max(w.answer.budget_bytes, views[i].run.peak)));
    views.forEach((v, i) => {
      const { answer } = wholes[i], lanes = Remat.plan.lanesOf(v),
        stack = v.graph ? Remat.stack.byOrigin(v.graph, v.run) : null,
        panel = el("section", { "aria-label": `Memory of plan ${"AB"[i]}` },
          el("h3", {}, `Plan ${"AB"[i]}: `,
            el("a", { href: `#/solve/${answer.id}` }, Remat.facts.title(answer, wholes[i].name))));
      box.append(panel);
      Remat.memory.show(panel, axis, { run: v.run, before: null, budget: answer.budget_bytes, boundary: v.boundary,
        spans: lanes[lanes.length - 1].spans, stack, label: `Memory of plan ${"AB"[i]}: peak ${bytes(v.run.peak)}.`,
        tell: Remat.plan.telling(v, answer, stack), highest, height: 230 });
      Remat.lanes.show(panel, axis, [lanes[lanes.length - 1], ...Remat.transfers.lanes(v.run)],
        `Recomputations of plan ${"AB"[i]}`);
      if (i && stack)
        panel.append(
          Remat.chart.legend(stack.layers.map((layer) => ({ text: layer.name, color: `var(${layer.color})` }))));
    });
  }

  // Why two plans cannot be compared op by op, or null.
  function difference(a, b) {
    const graph = (w) => JSON.stringify(w.problem.graph || w.problem.chain || w.problem.join);
    if (graph(a) === graph(b)) return null;
    const [m, n] = [a, b].map((w) => (w.problem.graph ? `${w.problem.graph.op_cost_ns.length} ops` : "no graph"));
    const how = m === n ? `both of ${m}, with other costs, sizes or edges` : `${m} and ${n}`;
    return `These plans are of different graphs (${how}): their times and memory answer different questions.`;
  }

  const label = (s) =>
    `${s.name || String(s.id).slice(0, 13)}: ${bytes(s.budget_bytes)}, ${signed(s.overhead)}, ${s.method}`;

  async function page(main, current, first, second) {
    const list = (await service.list({ limit: 200 })).solves.filter((s) => s.peak_bytes && s.status !== "running");
    if (!current()) return;
    main.append(el("h1", {}, "Compare two plans"));
    for (const id of [first, second]) if (id && !list.some((s) => s.id === id)) list.push(await service.solve(id));
    if (!current()) return;
    if (!list.length) {
      main.append(
        el("p", { class: "empty" }, "There is no plan yet to compare. ", el("a", { href: "#/" }, "Plan one"), " first.",
        ));
      return;
    }
    const options = list.map((s) => [s.id, label(s)]);
    const form = Remat.fields.form(
      [{ name: "a", label: "Plan A", options, value: first || options[0][0] },
        { name: "b", label: "Plan B", options, value: second || (options[1] || options[0])[0] }],
      { button: "Compare", label: "Plans to compare" },
      async ({ a, b }) => {
        if (a === b) throw Remat.words.wrong("b", "Choose another plan than A.");
        location.hash = `#/compare/${a}/${b}`;
      });
    main.append(form.node);
    if (!first || !second) return;
    const wholes = await Promise.all([first, second].map((id) => Remat.whole(id)));
    if (!current()) return;
    const lacking = wholes.findIndex((w) => !w.answer.plan);
    if (lacking >= 0) {
      main.append(el("p", { class: "error" }, `Plan ${"AB"[lacking]} is not there: this solve has no plan.`));
      return;
    }
    const views = wholes.map(Remat.plan.view), differ = difference(...wholes);
    if (differ) main.append(el("p", { class: "warning", role: "note" }, differ));
    main.append(table(wholes[0].answer, wholes[1].answer), el("h2", {}, "Memory over the step"));
    curves(main, wholes, views);
    views.forEach((v, i) => {
      if (v.graph) main.append(el("h2", {}, `Stages of plan ${"AB"[i]}`), Remat.matrix.pair(v.graph, v.run, v.name));
    });
  }

  Remat.compare = { page };
})(window.Remat);
