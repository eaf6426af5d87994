"use strict";
// The pages: the list of solves, one plan, two plans side by side, and the way to the trade-off curve. The address says which.
(function (Remat) {
  const { el, bytes, percent, seconds } = Remat.words;
  const service = Remat.service, main = document.getElementById("main"), notice = document.getElementById("notice");
  const ENDED = new Set(["optimal", "feasible", "infeasible", "nothing_found", "cancelled", "failed"]);
  let turn = 0; // grows with every change of page: what an earlier page still awaits is dropped

  function tell(error) {
    notice.textContent = error ? error.message || String(error) : "";
    if (error) setTimeout(() => { notice.textContent = ""; }, 8000);
  }
  const guard = (action) => async (...a) => { try { await action(...a); } catch (error) { tell(error); } };
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const drop = (button, extra, submit) => Remat.drop.form(button, extra, submit, guard);

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
      drop("Plan it", (field) => [field("budget", "Budget (12GiB, bytes or 50%)", "50%"), field("limit", "Time limit (s)", "60")], async (subject, fields, method) => {
        const budget_bytes = Remat.drop.budgetBytes(await service.validate(subject), fields.budget);
        const answer = await service.post({ problem: { ...subject.body, budget_bytes }, method, time_limit_s: Number(fields.limit), max_gap: 0.001 });
        service.remember(answer.id, subject.names);
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
    const timeline = problem.graph || !answer.plan ? null : await service.timeline(id); // a graph's plan is replayed here
    return { answer, problem, timeline, progress: progress.progress, names: service.names(id) };
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
        Remat.plan.show(box, whole);
      }
      live.textContent = ended ? "" : `${answer.status} for ${seconds(answer.seconds)}: overhead ${percent(answer.overhead)}, gap ${percent(answer.gap)}`;
      if (ended) return;
      await pause(1000);
    }
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
    const sweepPage = (...a) => Remat.sweep.page(main, () => mine === turn, { drop, guard, pause, state }, ...a.slice(1));
    const pages = { "": listPage, solve: solvePage, sweep: sweepPage, compare: comparePage };
    try { await (pages[page] || (async () => { main.append(el("p", { class: "empty" }, "There is no such page.")); }))(mine, ...rest); }
    catch (error) { if (mine === turn) { main.append(el("p", { class: "empty" }, error.message)); tell(error); } }
  }

  if (service.offline) { main.append(el("h1", {}, "A remat plan")); Remat.plan.show(main, service.offline); return; }
  window.addEventListener("hashchange", () => { turnTo(); main.focus(); });
  turnTo();
})(window.Remat);
