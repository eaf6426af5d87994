"use strict";
// One plan, seen from all sides. `whole` is {answer, problem, progress, names}: fetched, or embedded in an offline file.
window.Remat = window.Remat || {};
(function (Remat) {
  const { el, bytes, time, percent, seconds, save } = Remat.words;
  const { replay, plain, resident, recomputed, fromTimeline, at, trace } = Remat.replay;

  const SHOWN = 30; // rows of the table of recomputed ops; the JSON has them all

  function facts(answer) {
    const within = (answer.restricted_to || []).join(", "), by = answer.claimed_by;
    const claimed = by && (answer.status === "infeasible" || answer.claimed_bound_ns <= answer.bound_ns);
    const sure = claimed ? `claimed by ${by}` : "certified";
    const state = answer.status === "optimal" && within ? `optimal within ${within}` : answer.status;
    const rows = [["state", answer.status === "infeasible" ? `infeasible, ${sure}` : state], ["method", answer.method], ["overhead", percent(answer.overhead)], ...baseline(answer), ["gap", percent(answer.gap)],
      ["cost", time(answer.cost_ns)], ["bound", answer.bound_ns == null ? "–" : `${time(answer.bound_ns)}, ${sure}`], ["peak", bytes(answer.peak_bytes)], ["budget", bytes(answer.budget_bytes)],
      ["least budget known", bytes(answer.least_budget_bytes)], ["least budget proved", bytes(answer.least_budget_bound_bytes)],
      ["solved in", seconds(answer.seconds)], ["stopped by", answer.limit || "its end"], ["from", answer.cache || "–"],
      ["bound holds for", within || "the whole space"]];
    if (by && !claimed) rows.push(["claimed bound", `${time(answer.claimed_bound_ns)}, by ${by}`]);
    return el("div", { class: "facts" }, rows.map(([k, v]) => el("div", {}, el("dl", {}, el("dt", {}, k), el("dd", {}, v)))));
  }

  // of a graph whose network is linear: what the best persistent chain schedule adds, next to what this plan does
  function baseline(answer) {
    if (answer.chain_cost_ns === null || answer.chain_cost_ns === undefined || answer.overhead === null) return [];
    return [["persistent chain optimum", percent((answer.chain_cost_ns * (1 + answer.overhead)) / answer.cost_ns - 1)]];
  }

  function label(whole) {
    return (op) => (whole.names && whole.names[op] ? `${whole.names[op]}` : `op ${op}`);
  }

  function matrices(graph, run) {
    return el("div", { class: "two" }, ["R", "S"].map((which) => {
      const what = which === "R" ? "R: what each stage computes; recomputations in amber" : "S: what each stage starts with";
      const canvas = el("canvas", { role: "img", "aria-label": `${what}. ${graph.op_cost_ns.length} ops across, stages down.` });
      requestAnimationFrame(() => Remat.draw.matrix(canvas, graph, run, which));
      return el("figure", {}, canvas, el("figcaption", {}, what));
    }));
  }

  function table(graph, run, total, name) {
    const rows = recomputed(graph, run), shown = rows.slice(0, SHOWN);
    if (!rows.length) return el("p", { class: "empty" }, "Nothing is computed twice.");
    const again = rows.reduce((s, r) => s + r.cost, 0);
    return el("div", { class: "scroll" }, el("table", {},
      el("caption", { class: "hover" }, `${rows.length} ops run again, ${time(again)} in all (${percent(again / total)} of one pass)${rows.length > SHOWN ? `; the ${SHOWN} dearest` : ""}.`),
      el("thead", {}, el("tr", {}, ["op", "times again", "cost", "share of the step"].map((h, i) => el("th", { scope: "col", class: i ? "n" : null }, h)))),
      el("tbody", {}, shown.map((r) => el("tr", {}, el("td", {}, name(r.op)), el("td", { class: "n" }, r.times), el("td", { class: "n" }, time(r.cost)),
        el("td", { class: "n" }, percent(run.time ? r.cost / run.time : 0)))))));
  }

  function describe(graph, run, name, out) {
    return (x) => {
      const lo = at(run, x), held = resident(graph, run, lo), op = run.rows.ops[lo];
      out.textContent = `${name(op)} ${run.rows.again[lo] ? "runs again" : "runs"} at ${time(run.rows.start[lo])}, memory ${bytes(run.rows.memory[lo])}; ` +
        `${held.length} values resident, the largest ${held.slice(0, 4).map((v) => `${bytes(graph.value_bytes[v])} of ${name(graph.value_op[v])}`).join(", ") || "none"}.`;
    };
  }

  function downloads(whole, traced) {
    const stem = `remat-${(whole.answer.digest || "plan").slice(0, 12)}`;
    return el("div", { class: "row" },
      el("button", { onclick: () => save(`${stem}.json`, "application/json", JSON.stringify(whole.answer)) }, "Answer as JSON"),
      el("button", { onclick: () => save(`${stem}.trace.json`, "application/json", JSON.stringify(traced())) }, "Trace for Perfetto"),
      Remat.service.offline ? null : el("button", { onclick: () => offlineFile(whole).then((html) => save(`${stem}.html`, "text/html", html)) }, "One HTML file"));
  }

  // This page's own scripts and styles with the data inside: opens from a disk, asks nobody for anything.
  async function offlineFile(whole) {
    const sources = [...document.querySelectorAll("script[src]")].map((s) => s.src);
    const sheets = [...document.querySelectorAll("link[rel=stylesheet]")].map((s) => s.href);
    const text = (url) => fetch(url).then((r) => r.text());
    const [scripts, styles] = [await Promise.all(sources.map(text)), await Promise.all(sheets.map(text))];
    const data = JSON.stringify(whole).replace(/</g, "\\u003c");
    return `<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">` +
      `<meta name="color-scheme" content="light dark"><title>remat plan</title><style>${styles.join("\n")}</style></head><body>` +
      `<header><span class="brand">remat</span></header><main id="main"></main><div id="notice" role="alert"></div>` +
      `<script type="application/json" id="remat-data">${data}</` + `script>` +
      scripts.map((s) => `<script>${s.replace(/<\/script/gi, "<\\/script")}</` + "script>").join("") + `</body></html>`;
  }

  // Chains and joins, whose plans the service has replayed: memory over time and the steps that run again.
  function steps(box, whole, total) {
    const { answer, timeline } = whole, run = fromTimeline(timeline.plan), before = fromTimeline(timeline.plain);
    const hover = el("p", { class: "hover", "aria-live": "off" }, "Point at the curve to see what runs.");
    const chart = el("div", { role: "img", "aria-label": `Memory over the step: peak ${bytes(run.peak)} under a budget of ${bytes(answer.budget_bytes)}; without recomputation the peak is ${bytes(before.peak)}.` });
    box.append(el("h2", {}, "Memory over the step"), chart, hover);
    Remat.draw.memory(chart, run, before, answer.budget_bytes, (x) => {
      const i = at(run, x);
      hover.textContent = `${run.rows.what[i]}${run.rows.again[i] ? ", again," : ""} at ${time(run.rows.start[i])}, memory ${bytes(run.rows.memory[i])}.`;
    });
    const again = new Map();
    run.rows.what.forEach((what, i) => { if (run.rows.again[i]) again.set(what, (again.get(what) || 0) + 1); });
    const rows = [...again].sort((a, b) => b[1] - a[1]);
    box.append(el("h2", {}, "Recomputed steps"), rows.length ? el("div", { class: "scroll" }, el("table", {},
      el("caption", { class: "hover" }, `${rows.reduce((n, r) => n + r[1], 0)} recomputations${rows.length > SHOWN ? `; the ${SHOWN} most frequent steps` : ""}, ${percent(answer.cost_ns / total - 1)} over one pass.`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "step"), el("th", { scope: "col", class: "n" }, "times again"))),
      el("tbody", {}, rows.slice(0, SHOWN).map(([what, times]) => el("tr", {}, el("td", {}, what), el("td", { class: "n" }, times))))))
      : el("p", { class: "empty" }, "Nothing is computed twice."),
      el("h2", {}, "Take it with you"), downloads(whole, () => trace(run, (i) => run.rows.what[i], () => ({}))));
  }

  function show(box, whole) {
    const { answer } = whole, graph = whole.problem.graph, name = label(whole);
    const total = graph ? graph.op_cost_ns.reduce((a, b) => a + b, 0) : whole.timeline && whole.timeline.total_cost_ns;
    box.append(facts(answer), el("p", {}, answer.message || ""));
    if (total && whole.progress && whole.progress.length) {
      const bound = el("div");
      box.append(el("h2", {}, "Incumbent and bound"), bound);
      Remat.draw.history(bound, whole.progress, total, answer.seconds);
    }
    if (!answer.plan) return;
    if (!graph) { steps(box, whole, total); return; }
    const run = replay(graph, answer.plan.steps), before = replay(graph, plain(graph));
    const hover = el("p", { class: "hover", "aria-live": "off" }, "Point at the curve to see what runs and what is resident.");
    const chart = el("div", { role: "img", "aria-label": `Memory over the step: peak ${bytes(run.peak)} under a budget of ${bytes(answer.budget_bytes)}; without recomputation the peak is ${bytes(before.peak)}.` });
    box.append(el("h2", {}, "Memory over the step"), chart, hover);
    Remat.draw.memory(chart, run, before, answer.budget_bytes, describe(graph, run, name, hover));
    box.append(el("h2", {}, "Stages"), matrices(graph, run), el("h2", {}, "Recomputed ops"), table(graph, run, total, name),
      el("h2", {}, "Take it with you"), downloads(whole, () => trace(run, (i) => name(run.rows.ops[i]), (i) => ({ op: run.rows.ops[i], stage: run.rows.stage[i] }))));
  }

  Remat.plan = { show, facts };
})(window.Remat);
