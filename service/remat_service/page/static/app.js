"use strict";
// The pages: the list of solves, one plan, the trade-off curve, two plans side by side. The address says which.
(function (Remat) {
  const { el, bytes, percent, seconds, budget } = Remat.words;
  const service = Remat.service, main = document.getElementById("main"), notice = document.getElementById("notice");
  const ENDED = new Set(["optimal", "feasible", "infeasible", "nothing_found", "cancelled", "failed"]);
  let turn = 0; // grows with every change of page: what an earlier page still awaits is dropped

  function tell(error) {
    notice.textContent = error ? error.message || String(error) : "";
    if (error) setTimeout(() => { notice.textContent = ""; }, 8000);
  }
  const guard = (action) => async (...a) => { try { await action(...a); } catch (error) { tell(error); } };
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));

  async function readGraph(file) {
    let data;
    try { data = JSON.parse(await file.text()); } catch (error) { throw new Error(`${file.name} is not JSON: ${error.message}`); }
    if (data && data.format !== "remat-graph/1") throw new Error(`${file.name} is no remat-graph/1 file: its format is ${JSON.stringify(data.format)}.`);
    return data;
  }
  function budgetBytes(graph, text) {
    const asked = budget(text);
    if (asked.bytes !== undefined) return asked.bytes;
    const fixed = graph.fixed_bytes || 0, peak = Remat.replay.replay(graph, Remat.replay.plain(graph)).peak;
    return fixed + Math.floor(asked.fraction * (peak - fixed));
  }

  // A form that takes a graph file by click, keyboard or drop, and calls `submit(graph, fields)`.
  function drop(button, extra, submit) {
    const file = el("input", { type: "file", accept: ".json,application/json", "aria-label": "Graph file" });
    const fields = {};
    const field = (name, text, value) => { fields[name] = el("input", { value, "aria-label": text }); return el("label", {}, text, fields[name]); };
    const method = el("select", {}, el("option", { value: "auto" }, "auto"));
    service.capabilities().then((c) => {
      for (const m of c.methods || []) { const name = m.name || m; if (name !== "auto") method.append(el("option", { value: name }, name)); }
    }, () => {});
    const form = el("form", { onsubmit: guard(async (event) => {
      event.preventDefault();
      if (!file.files.length) throw new Error("Choose a graph file first, or drop one here.");
      const graph = await readGraph(file.files[0]);
      await submit(graph, Object.fromEntries(Object.entries(fields).map(([k, f]) => [k, f.value])), method.value);
    }) }, el("label", {}, "Graph file (drop it here)", file), extra(field), el("label", {}, "Method", method), el("button", { type: "submit" }, button));
    const box = el("section", { class: "drop", "aria-label": "Plan a graph",
      ondragover: (e) => { e.preventDefault(); box.classList.add("over"); }, ondragleave: () => box.classList.remove("over"),
      ondrop: guard(async (e) => { e.preventDefault(); box.classList.remove("over"); file.files = e.dataTransfer.files; form.requestSubmit(); }) }, form);
    return box;
  }

  const state = (s) => el("span", { class: `state ${s.status}` }, s.status.replace("_", " "));

  function rows(solves) {
    return solves.map((s) => el("tr", {},
      el("td", {}, el("a", { href: `#/solve/${s.id}` }, String(s.id).slice(0, 13))), el("td", {}, state(s)), el("td", {}, s.method),
      el("td", { class: "n wide" }, s.ops ?? "–"), el("td", { class: "n" }, bytes(s.budget_bytes)), el("td", { class: "n" }, percent(s.overhead)),
      el("td", { class: "n" }, percent(s.gap)), el("td", { class: "n" }, seconds(s.seconds)), el("td", { class: "n wide" }, s.joined ?? "–"),
      el("td", { class: "wide" }, s.cache || ""),
      el("td", {}, ENDED.has(s.status) ? "" : el("button", { "aria-label": `Cancel ${s.id}`, onclick: guard(async () => { await service.cancel(s.id); }) }, "Cancel"))));
  }

  async function listPage(mine) {
    const body = el("tbody"), more = el("button", { hidden: true }, "Older"), empty = el("p", { class: "empty" }, "Loading…");
    main.append(el("h1", {}, "Solves"),
      drop("Plan it", (field) => [field("budget", "Budget (bytes, 12GiB or 0.5)", "0.5"), field("limit", "Time limit (s)", "60")], async (graph, fields, method) => {
        const answer = await service.post({ problem: { graph: service.bare(graph), budget_bytes: budgetBytes(graph, fields.budget) }, method, time_limit_s: Number(fields.limit), max_gap: 0.001 });
        service.remember(answer.id, graph);
        location.hash = `#/solve/${answer.id}`;
      }),
      el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, [["solve"], ["state"], ["method"], ["ops", "n wide"], ["budget", "n"], ["overhead", "n"], ["gap", "n"], ["elapsed", "n"], ["joined", "n wide"], ["cache", "wide"], [""]]
        .map(([t, c]) => el("th", { scope: "col", class: c }, t)))), body)), empty, more);
    let older = [], next = null;
    more.addEventListener("click", guard(async () => { const page = await service.list(next); older.push(...page.solves); next = page.next; more.hidden = !next; body.append(...rows(page.solves)); }));
    while (mine === turn) {
      let running = false;
      try {
        const page = await service.list();
        if (mine !== turn) return;
        if (!older.length) { next = page.next; more.hidden = !next; }
        running = page.solves.some((s) => !ENDED.has(s.status));
        const focused = document.activeElement && body.contains(document.activeElement);
        if (!focused) body.replaceChildren(...rows([...page.solves, ...older]));
        empty.textContent = page.solves.length ? "" : "Nothing has been solved here yet. Drop a graph file above, or run a training job with REMAT_BASE_URL set to this address.";
        tell(null);
      } catch (error) { empty.textContent = ""; tell(error); }
      await pause(running ? 1000 : 4000);
    }
  }

  async function load(id) {
    const [answer, problem, progress] = await Promise.all([service.solve(id), service.problem(id), service.progress(id)]);
    return { answer, problem, progress: progress.progress, names: service.names(id) };
  }

  async function solvePage(mine, id) {
    const head = el("h1", {}, `Solve ${id}`), live = el("div", { "aria-live": "polite" }, "Loading…"), box = el("div");
    const cancel = el("button", { hidden: true, onclick: guard(async () => { await service.cancel(id); }) }, "Cancel and keep the best plan so far");
    main.append(head, live, cancel, box);
    let shown = "";
    while (mine === turn) {
      const answer = await service.solve(id);
      const ended = ENDED.has(answer.status), key = `${answer.status} ${answer.cost_ns} ${answer.bound_ns}`;
      cancel.hidden = ended;
      if (key !== shown) {
        const whole = await load(id);
        if (mine !== turn) return;
        shown = key; box.replaceChildren();
        if (whole.problem.graph) Remat.plan.show(box, whole);
        else box.append(Remat.plan.facts(whole.answer), el("p", {}, whole.answer.message || ""));
      }
      live.textContent = ended ? "" : `${answer.status} for ${seconds(answer.seconds)}: overhead ${percent(answer.overhead)}, gap ${percent(answer.gap)}`;
      if (ended) return;
      await pause(1000);
    }
  }

  async function sweepPage(mine) {
    const box = el("div"), note = el("p", { class: "empty", "aria-live": "polite" }, "Choose a graph and the budgets to try; the curve is drawn as the plans come.");
    main.append(el("h1", {}, "Overhead against budget"),
      drop("Draw the curve", (field) => [field("from", "Lowest fraction", "0.3"), field("to", "Highest fraction", "1"), field("points", "Points", "8"), field("limit", "Seconds a point", "10"), field("baselines", "Baselines", "chen-sqrt,ap-greedy")], async (graph, fields, method) => {
        const [lo, hi, n] = [Number(fields.from), Number(fields.to), Math.min(40, Math.max(2, Number(fields.points)))];
        if (!(lo > 0 && hi > lo)) throw new Error("The fractions must ascend and be positive.");
        const budgets = [...Array(n).keys()].map((i) => budgetBytes(graph, String(lo + (hi - lo) * i / (n - 1) >= 1 ? 1 : (lo + (hi - lo) * i / (n - 1)))));
        const points = [], total = graph.op_cost_ns.reduce((a, b) => a + b, 0), bare = service.bare(graph);
        const others = fields.baselines.split(",").map((s) => s.trim()).filter(Boolean).map((name) => ({ name, points: [] }));
        const one = async (name, budget_bytes) => {
          let answer = await service.post({ problem: { graph: bare, budget_bytes }, method: name, time_limit_s: Number(fields.limit), max_gap: 0.001 });
          while (mine === turn && !ENDED.has(answer.status)) { await pause(400); answer = await service.solve(answer.id); }
          return answer;
        };
        for (const b of [...budgets].reverse()) {
          if (mine !== turn) return;
          note.textContent = `Planning at ${bytes(b)}…`;
          const a = await one(method, b);
          points.push({ budget_bytes: b, overhead: a.overhead, bound: a.bound_ns === null || a.bound_ns === undefined ? null : a.bound_ns / total - 1, least: a.least_budget_bound_bytes, status: a.status });
          for (const other of others) { const o = await one(other.name, b); if (o.overhead !== null) other.points.push({ budget_bytes: b, overhead: o.overhead }); }
          Remat.draw.curve(box, points, others, Math.max(0, ...points.map((p) => p.least || 0)));
        }
        note.textContent = `${points.filter((p) => p.overhead !== null).length} of ${points.length} budgets have a plan; no plan fits in the shaded zone.`;
      }), box, note);
  }

  async function comparePage(mine, first, second) {
    const page = await service.list(), ended = page.solves.filter((s) => s.cost_ns);
    if (mine !== turn) return;
    const pick = (value, n) => el("label", {}, `Plan ${n}`, el("select", { id: `pick-${n}` }, ended.map((s) => el("option", { value: s.id, selected: s.id === value }, `${String(s.id).slice(0, 13)} ${s.method} ${bytes(s.budget_bytes)}`))));
    main.append(el("h1", {}, "Two plans side by side"));
    if (!ended.length) { main.append(el("p", { class: "empty" }, "There is no plan yet to compare.")); return; }
    main.append(el("form", { class: "row", onsubmit: (e) => { e.preventDefault(); location.hash = `#/compare/${document.getElementById("pick-1").value}/${document.getElementById("pick-2").value}`; } },
      pick(first, 1), pick(second, 2), el("button", { type: "submit" }, "Compare")));
    if (!first || !second) return;
    const both = el("div", { class: "two" });
    main.append(both);
    for (const id of [first, second]) {
      const box = el("section", {}, el("h2", {}, `Solve ${id}`));
      both.append(box);
      const whole = await load(id);
      if (mine !== turn) return;
      Remat.plan.show(box, whole);
    }
  }

  async function turnTo() {
    const mine = ++turn, [page, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
    main.replaceChildren(); tell(null);
    const pages = { "": listPage, solve: solvePage, sweep: sweepPage, compare: comparePage };
    try { await (pages[page] || (async () => { main.append(el("p", { class: "empty" }, "There is no such page.")); }))(mine, ...rest); }
    catch (error) { if (mine === turn) { main.append(el("p", { class: "empty" }, error.message)); tell(error); } }
  }

  if (service.offline) { main.append(el("h1", {}, "A remat plan")); Remat.plan.show(main, service.offline); return; }
  window.addEventListener("hashchange", () => { turnTo(); main.focus(); });
  turnTo();
})(window.Remat);
