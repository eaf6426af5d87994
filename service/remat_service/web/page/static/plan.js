"use strict";
// One plan, seen from all sides.
// `whole` is {answer, problem, progress, names, timeline}: fetched, or embedded in an offline file.
(function (Remat) {
  const { el, bytes, time, percent, signed, ended } = Remat.words;
  const { replay, plain, resident, recomputed, fromTimeline, trace } = Remat.replay;
  const SHOWN = 12; // rows of the table of recomputed ops; the JSON has them all

  // What a plan does and what plain training does, replayed once:
  // {graph, run, before, total, name(op), where(op), what(row), boundary}.
  function view(whole) {
    const graph = whole.problem.graph || null, { timeline, answer } = whole, names = whole.names;
    const name = (op) => (names && names[op] ? names[op] : `op ${op}`),
      where = (op) => (whole.where ? whole.where[op] : null);
    const total = graph ? graph.op_cost_ns.reduce((a, b) => a + b, 0) : timeline ? timeline.total_cost_ns : null;
    const before = graph ? replay(graph, plain(graph)) : timeline ? fromTimeline(timeline.plain) : null;
    const run = !answer.plan ? null : graph ? replay(graph, answer.plan.steps) : fromTimeline(timeline.plan);
    const what = (i) => (graph ? name(run.rows.ops[i]) : run.rows.what[i]);
    const isBack = (i) =>
      (graph ? graph.backward_from >= 0 && graph.backward_from !== null && run.rows.ops[i] >= graph.backward_from
        : /^(B|turn)/.test(run.rows.what[i])) && !run.rows.again[i];
    const first = run ? Array.from({ length: run.count }, (_, i) => i).find(isBack) : undefined;
    return { graph, run, before, total, name, where, what, isBack,
      boundary: first === undefined ? null : run.rows.start[first] };
  }

  // What the tooltip says of one row: what runs, memory, and what is resident.
  function telling(v, answer, stack) {
    const { color } = Remat.chart;
    return (i) => {
      const { run, graph } = v, end = Remat.replay.end(run, i), memory = run.rows.memory[i];
      const nodes = [el("strong", {}, v.what(i)),
        graph && v.where(run.rows.ops[i]) ? el("div", { class: "soft" }, v.where(run.rows.ops[i])) : null,
        el("div", { class: run.rows.again[i] ? "again" : null },
          `${run.rows.again[i] ? "runs again" : "runs"} at ${time(run.rows.start[i])}, ` +
            `for ${time(end - run.rows.start[i])}`),
        el("div", {}, `${bytes(memory)}, ${percent(memory / answer.budget_bytes)} of the budget` +
            (run.hostPeak ? `; ${bytes(run.rows.host[i])} on the host` : "")),
      ].filter(Boolean);
      if (!stack) return nodes;
      const parts = stack.at(i), held = resident(graph, run, i);
      nodes.push(
        el("ul", { class: "parts" },
          stack.layers.map((layer, j) => [layer, parts[j]]).reverse().filter(([, b]) => b > 0)
            .map(([layer, b]) =>
              el("li", {}, el("span", { class: "key area", vars: { "--key": color(layer.color) } }),
                el("span", {}, layer.name), el("span", { class: "n" }, bytes(b))))));
      if (held.length)
        nodes.push(el("div", { class: "soft" }, `${held.length} values are resident; the largest:`),
          el("ul", { class: "parts" }, held.slice(0, 4)
              .map((value) =>
                el("li", {}, el("span", {}, v.name(graph.value_op[value])),
                  el("span", { class: "n" }, bytes(graph.value_bytes[value]))))));
      return nodes;
    };
  }

  function lanesOf(v) {
    const { stretches } = Remat.lanes, { run } = v, again = (i) => Boolean(run.rows.again[i]);
    return [
      {
        name: v.boundary === null ? "ops" : "forward", color: "--plan",
        spans: stretches(run, (i) => !again(i) && !v.isBack(i)) },
      ...(v.boundary === null ? [] : [{ name: "backward", color: "--layer-1", spans: stretches(run, v.isBack) }]),
      { name: "again", color: "--again", spans: stretches(run, again) }];
  }

  // The curve, the lanes under it and the legend; drawn anew where the colors mean something else.
  function memory(box, whole, v, by) {
    const { answer } = whole, stack = !v.graph ? null : by === "module"
          ? Remat.stack.byModule(v.graph, v.run, whole.names) : Remat.stack.byOrigin(v.graph, v.run);
    const axis = Remat.chart.timeAxis(0, Math.max(v.run.time, v.before ? v.before.time : 0)), lanes = lanesOf(v);
    const label = `Memory over the step: peak ${bytes(v.run.peak)} under a budget of ${bytes(answer.budget_bytes)}; ` +
      `without a plan the peak is ${bytes(v.before.peak)}. ` +
      "Arrow keys step from op to op, plus and minus zoom, zero shows all.";
    box.replaceChildren();
    Remat.memory.show(box, axis, { run: v.run, before: v.before, budget: answer.budget_bytes, boundary: v.boundary,
      spans: lanes[lanes.length - 1].spans, stack, label, tell: telling(v, answer, stack) });
    const moved = (lane, span) => span.length < 3 ? ""
        : el("div", {}, `${v.name(v.graph.value_op[span[2]])}, ${bytes(v.graph.value_bytes[span[2]])}`);
    Remat.lanes.show(box, axis, [...lanes, ...Remat.transfers.lanes(v.run)], "What runs when", moved);
    const items = [{ text: "this plan", color: "var(--plan)", kind: "line" },
      { text: `without a plan: ${bytes(v.before.peak)}`, color: "var(--ghost)", kind: "dash" },
      { text: "budget", color: "var(--budget)", kind: "dash" },
      { text: "something runs again", color: "var(--again-fill)" }];
    if (v.run.hostPeak)
      items.push({ text: `on the host: ${bytes(v.run.hostPeak)}`, color: "var(--layer-4)", kind: "line" });
    if (stack) items.push(...stack.layers.map((layer) => ({ text: layer.name, color: `var(${layer.color})` })));
    box.append(Remat.chart.legend(items),
      el("p", { class: "hint" }, "Drag to zoom, double-click or Reset to see all; Ctrl and the wheel zoom too. " +
          "With the keyboard: ← and → step, + and − zoom, 0 resets."));
    return axis;
  }

  function memorySection(box, whole, v) {
    const panel = el("div"),
      pick = el("select", { id: "stack-by", onchange: () => memory(panel, whole, v, pick.value) },
        el("option", { value: "origin" }, "where it was made"),
        el("option", { value: "module", disabled: !whole.names, selected: Boolean(whole.names) }, "module"));
    const section = el("section", { "aria-label": "Memory over the step" }, el("h2", {}, "Memory over the step"));
    if (v.graph) {
      const file = Remat.fields.form(
        [
          {
            name: "file", label: "File with the names of the ops", type: "file", accept: ".json,application/json",
            hint: "Colors memory by module. It stays in this browser." }],
        { button: "Show names", label: "Names of ops" },
        async (values) => {
          if (!values.file) throw Remat.words.wrong("file", "Choose a file first, or drop one here.");
          const names = await Remat.drop.names(values.file, v.graph.op_cost_ns.length);
          Remat.service.remember(whole.answer.id, names);
          whole.redraw({ ...whole, names });
        });
      const drop = Remat.drop.target(el("details", { class: "names" }, el("summary", {}, "Names of ops…"), file.node),
        file.input("file"), () => file.node.requestSubmit());
      section.append(
        el("div", { class: "row" }, el("label", { class: "inline", for: "stack-by" }, "Color by"), pick,
          whole.redraw && !Remat.service.offline ? drop : null));
    }
    section.append(panel);
    box.append(section);
    memory(panel, whole, v, pick.value);
  }

  function table(rows, caption, heads) {
    return el("div", { class: "scroll" },
      el("table", { class: "wrapped" }, el("caption", {}, caption),
        el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", { scope: "col", class: i ? "n" : null }, h)))),
        el("tbody", {},
          rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: i ? "n" : null }, cell)))))));
  }

  function recomputations(v) {
    if (v.graph) {
      const rows = recomputed(v.graph, v.run), again = rows.reduce((s, r) => s + r.cost, 0);
      if (!rows.length) return el("p", { class: "empty" }, "Nothing is computed twice.");
      return table(rows.slice(0, SHOWN)
          .map((r) => [[v.name(r.op), v.where(r.op) ? el("span", { class: "soft block" }, v.where(r.op)) : null],
            r.times, time(r.cost), percent(r.cost / v.run.time)]),
        `${rows.length} ops run again, ${time(again)} in all, ${signed(again / v.total)} over one pass.` +
          (rows.length > SHOWN ? ` The ${SHOWN} most expensive:` : ""),
        ["op", "times again", "time", "share of the step"]);
    }
    const again = new Map();
    v.run.rows.what.forEach((what, i) => { if (v.run.rows.again[i]) again.set(what, (again.get(what) || 0) + 1); });
    const rows = [...again].sort((a, b) => b[1] - a[1]);
    if (!rows.length) return el("p", { class: "empty" }, "Nothing is computed twice.");
    return table(rows.slice(0, SHOWN),
      `${rows.reduce((n, r) => n + r[1], 0)} recomputations, ${signed(v.run.time / v.total - 1)} over one pass.` +
        (rows.length > SHOWN ? ` The ${SHOWN} most frequent steps:` : ""),
      ["step", "times again"]);
  }

  function show(box, whole) {
    const { answer, progress } = whole, v = view(whole);
    const said = Remat.facts.show(box, answer, { plain: v.before ? v.before.peak : null,
      fixed: v.graph ? v.graph.fixed_bytes || 0 : null, total: v.total, name: whole.name, run: whole.ran });
    const history = () => {
      if (!v.total || !progress || !progress.length || (ended(answer) && progress.length < 2)) return;
      const section = el("section", { "aria-label": "How the solve went" }, el("h2", {}, "How the solve went"));
      box.append(section);
      Remat.curves.history(section, progress, v.total, answer.seconds);
    };
    if (!v.run) {
      history();
      return said;
    }
    if (!ended(answer)) history();
    memorySection(box, whole, v);
    if (v.graph) box.append(el("h2", {}, "Stages"), Remat.matrix.pair(v.graph, v.run, v.name));
    box.append(el("h2", {}, "What is computed again"), recomputations(v));
    if (ended(answer)) history();
    box.append(el("h2", {}, "Take it with you"),
      Remat.download.row(whole, () =>
        trace(v.run, v.what, (i) => (v.graph ? { op: v.run.rows.ops[i], stage: v.run.rows.stage[i] } : {}),
          v.graph ? (value) => v.name(v.graph.value_op[value]) : undefined)));
    return said;
  }

  Remat.plan = { show, view, lanesOf, telling };
})(window.Remat);
