"use strict";
// The list of solves: filtered, sorted and paged by the service; sweeps folded; two of them picked to compare.
(function (Remat) {
  const { el, bytes, percent, signed, seconds, ago, state, together, inSearch, ended, SOURCES } = Remat.words,
    service = Remat.service;
  const COLUMNS = [["", null], ["Name", null], ["Submitted", "created_at"], ["State", "status"],
    ["Memory of plain", null], ["Budget", "budget_bytes", "n"], ["More time", "overhead", "n"],
    ["From optimal", "gap", "n"], ["Ops", "ops", "n"], ["Solving", "seconds", "n"], ["Source", null]];
  const MEMBERS = 200; // of a group, shown at most
  const STATES = [["", "all states"], ["optimal", "optimal"], ["feasible", "plan found"],
    ["running,queued", "solving or waiting"], ["infeasible,nothing_found", "no plan"], ["cancelled", "cancelled"],
    ["failed", "failed"]];

  // How much of what plain training needs is left, as a bar and in words.
  function share(s) {
    if (!s.peak_bytes) return s.plain_peak_bytes ? `– of ${bytes(s.plain_peak_bytes)}` : "–";
    if (!s.plain_peak_bytes) return bytes(s.peak_bytes);
    const part = s.peak_bytes / s.plain_peak_bytes;
    return [el("span", { class: "bar", "aria-hidden": "true", vars: { "--part": `${Math.min(100, 100 * part)}%` } }),
      el("span", {}, `${percent(part)}: ${bytes(s.peak_bytes)} of ${bytes(s.plain_peak_bytes)}`)];
  }

  // What a folded group has come to, in a line.
  function summary({ kind, requests, ended, planned, least_budget_bytes: least, most_budget_bytes: most,
    best_batch: batch, bound,
  }) {
    const open = ended < requests ? `, ${requests - ended} still open` : "";
    if (kind === "max-batch" && bound !== null) return `${Remat.batch.sentence(batch, bound)}${open}`;
    const budgets = least === most ? bytes(least) : `${bytes(least)} to ${bytes(most)}`;
    return `${planned} of ${requests} with a plan${open}; ${budgets}`;
  }

  function row(s, tools, inner) {
    const name = s.name || String(s.id).slice(0, 13), folded = s.group && s.group.requests > 1 && !inner && tools.fold;
    const picked = el("input", { type: "checkbox", "aria-label": `Compare ${name}`, checked: tools.picked.has(s.id),
      disabled: !s.peak_bytes, onchange: (e) => tools.pick(s.id, e.target.checked) });
    const cancel = ended(s) ? null
      : el("button", { class: "quiet", "aria-label": `Cancel ${name}`,
          onclick: () => service.cancel(s.id).then(tools.again, tools.tell),
        }, "Cancel");
    const more = folded
      ? [
          el("button", { class: "quiet", "aria-expanded": tools.open.has(s.group.id) ? "true" : "false",
            "aria-label": `Show the ${s.group.requests} solves of this ${s.group.kind}`,
            "data-group": s.group.id, onclick: () => tools.toggle(s.group.id).catch(tools.tell) },
            `${tools.open.has(s.group.id) ? "▾" : "▸"} ` +
              `${s.group.kind === "sweep" ? "sweep" : "batch search"} of ${s.group.requests}`),
          el("a", { href: `#/${s.group.kind}/${s.group.id}` }, s.group.kind === "sweep" ? "curve" : "search"),
          el("span", { class: "block" }, summary(s.group))]
      : null;
    const link = el("a", { href: `#/solve/${s.id}` }, name), how = el("span", { class: "soft block" }, s.method);
    const cells = [picked,
      more ? [el("div", { class: "group" }, more), el("span", { class: "soft" }, "newest: "), link, how].flat()
        : [link, how],
      ago(s.created_at),
      [folded && s.group.kind === "sweep" ? together(s.group)
          : state(s.group && s.group.kind === "max-batch" ? inSearch(s) : s),
        cancel],
      share(s), bytes(s.budget_bytes), signed(s.overhead), s.gap === 0 ? "0 %" : percent(s.gap), s.ops ?? "–",
      seconds(s.seconds), (ended(s) && SOURCES[s.cache] || "–").replace("solved for this request", "solved") +
        (s.joined ? `, shared by ${s.joined + 1}` : "")];
    return el("tr", { class: inner ? "inner" : null },
      cells.map((c, i) =>
        el("td", { class: COLUMNS[i][2] || (i === 4 ? "share" : null), "data-label": COLUMNS[i][0] || "Compare" }, c)));
  }

  // What is asked for is the page's address: #/?search=…&state=…&sort=…&order=…&flat=1
  function address(asked) {
    const kept = Object.entries(asked).filter(([, v]) => v);
    return `#/${kept.length ? `?${new URLSearchParams(kept)}` : ""}`;
  }

  function head(asked) {
    return el("thead", {},
      el("tr", {},
        COLUMNS.map(([text, key, cls]) => {
          if (!key) return el("th", { scope: "col", class: cls }, text || el("span", { class: "sr" }, "Compare"));
          const now = (asked.sort || "created_at") === key, up = now && asked.order === "asc";
          const go = () => { location.hash = address({ ...asked, sort: key, order: now && !up ? "asc" : "" }); };
          return el("th", { scope: "col", class: cls, "aria-sort": now ? (up ? "ascending" : "descending") : "none" },
            el("button", { class: "sort", onclick: go }, text,
              el("span", { "aria-hidden": "true" }, now ? (up ? " ▴" : " ▾") : "")));
        })));
  }

  function filters(asked, fold) {
    const search = el("input", { id: "search", type: "search", value: asked.search || "",
      placeholder: "name, id or method", autocomplete: "off" });
    const pick = el("select", { id: "state" },
      STATES.map(([v, t]) => el("option", { value: v, selected: v === (asked.state || "") }, t)));
    const flat = el("input", { id: "fold", type: "checkbox", checked: fold });
    const go = () => {
      location.hash = address({ ...asked, search: search.value.trim(), state: pick.value, flat: flat.checked ? "" : "1",
      });
    };
    for (const input of [pick, flat]) input.addEventListener("change", go);
    const order = el("select", { id: "order" },
      COLUMNS.filter((c) => c[1]).flatMap(([text, key]) =>
        [["", "largest or newest first"], ["asc", "smallest or oldest first"], ].map(([o, how]) =>
          el("option",
            { value: `${key} ${o}`, selected: key === (asked.sort || "created_at") && o === (asked.order || "") },
            `${text}, ${how}`))));
    order.addEventListener("change", () => {
      const [sort, o] = order.value.split(" ");
      location.hash = address({ ...asked, sort, order: o });
    });
    return el("form", { class: "row filters", role: "search",
      onsubmit: (e) => {
        e.preventDefault();
        go();
      } }, el("div", { class: "field" }, el("label", { for: "search" }, "Filter"), search),
      el("div", { class: "field" }, el("label", { for: "state" }, "State"), pick),
      el("div", { class: "field phone" }, el("label", { for: "order" }, "Sort by"), order),
      el("label", { class: "inline", for: "fold" }, flat, "Fold sweeps"), el("button", { type: "submit" }, "Filter"));
  }

  const planForm = () =>
    Remat.drop.form("Plan it",
      [
        {
          name: "budget", label: "Budget", value: "50%", hint: "12GiB, bytes, or 50% of plain",
          pointers: ["/problem/budget_bytes"] },
        { name: "limit", label: "Time limit in seconds", value: "60", pointers: ["/time_limit_s"] }],
      async (subject, values) => {
        const time_limit_s = Remat.fields.number(values, "limit", "The time limit", { least: 0.1 });
        const budget_bytes = Remat.drop.budgetBytes(await service.validate(subject), values.budget, "budget");
        const answer = await service.post({ problem: { ...subject.body, budget_bytes }, method: values.method,
          time_limit_s, max_gap: 0.001 });
        service.remember(answer.id, subject.names);
        location.hash = `#/solve/${answer.id}`;
      });

  // The step of a small network, made here: eight layers, and a backward op of each that reads what the layer made.
  function sampleGraph(layers = 8) {
    const ops = [...Array(2 * layers).keys()], mib = 2 ** 20;
    return { format: "remat-graph/1", fixed_bytes: 0, optional: [], once: [], keep: [], backward_from: layers,
      op_cost_ns: ops.map((op) => (op < layers ? 1000 + 300 * (op % 3) : 2400)),
      op_inputs: ops.map((op) => (op < layers ? (op ? [op - 1] : []) : [2 * layers - 1 - op, op - 1]))
        .map((read) => [...new Set(read)].sort((a, b) => a - b)),
      value_op: ops, value_bytes: ops.map((op) => (op < layers ? (1 + (op % 4)) * mib : mib)) };
  }

  async function planSample() {
    const graph = sampleGraph(), about = await service.validate({ kind: "graph", body: { graph } });
    const answer = await service.post({
      problem: { graph, budget_bytes: Remat.drop.budgetBytes(about, "60%", "budget") }, method: "auto",
      time_limit_s: 10, max_gap: 0.001, name: "sample" });
    location.hash = `#/solve/${answer.id}`;
  }

  async function page(main, current, { tell, pause }, asked) {
    const fold = !asked.flat, body = el("tbody"), empty = el("p", { class: "empty" }, "Loading…"), picked = new Set(),
      open = new Map(), before = [];
    let after = null, next = null, shown = [], failing = false, wake = () => {};
    const newer = el("button",
        {
          onclick: () => {
            after = before.pop() || null;
            wake();
          } },
        "← Newer"),
      older = el("button", {
        onclick: () => {
          before.push(after);
          after = next;
          wake();
        },
      }, "Older →");
    const compare = el("a", { class: "button", href: "#/compare" }, "Compare"), note = el("span", { class: "soft" });
    const tools = { fold, picked, open, tell, again: () => wake(),
      pick(id, on) {
        if (on) picked.add(id);
        else picked.delete(id);
        if (picked.size > 2) {
          picked.delete([...picked][0]);
          draw();
        }
        picks();
      },
      async toggle(id) {
        if (open.has(id)) open.delete(id);
        else open.set(id, await members(id));
        draw();
        [...body.querySelectorAll("[data-group]")].find((button) => button.dataset.group === id)?.focus();
      } };
    const members = async (id) =>
      (await service.list({ group: id, limit: MEMBERS, sort: "budget_bytes" })).solves;
    // What stands below an open group is of the moment too.
    const follow = async () => {
      for (const [id, known] of [...open]) {
        const all = shown.find((s) => s.group?.id === id)?.group.requests ?? known.length;
        if (known.every(ended) && known.length >= Math.min(all, MEMBERS)) continue;
        const found = await members(id);
        if (open.has(id)) open.set(id, found);
      }
    };
    const picks = () => {
      const two = picked.size === 2;
      compare.hidden = !two;
      compare.href = `#/compare/${[...picked].join("/")}`;
      note.textContent = two ? "" : picked.size ? "Pick one more plan to compare." : "Pick two plans to compare.";
    };
    const draw = () =>
      body.replaceChildren(
        ...shown.flatMap((s) => [row(s, tools),
          ...((s.group && open.get(s.group.id)) || []).map((m) => row(m, tools, true))]));
    const sample = el("button", { class: "primary", hidden: true, onclick: () => planSample().catch(tell) },
        "Plan a sample"),
      choose = filters(asked, fold),
      table = el("div", { class: "scroll" }, el("table", { class: "cards solves" }, head(asked), body));
    main.append(el("h1", {}, "Solves"), Remat.fields.folded("Plan a problem", planForm()), choose,
      el("div", { class: "row picks" }, compare, note), table, empty, sample,
      el("div", { class: "row pages" }, newer, older));
    picks();
    while (current()) {
      let running = false;
      try {
        const query = { limit: 25, fold, sort: asked.sort || "created_at", order: asked.order || "desc",
          search: asked.search || "", ...(after ? { after } : {}) };
        const list = await service.list([...Object.entries(query),
          ...(asked.state || "").split(",").filter(Boolean).map((s) => ["status", s])]);
        if (!current()) return;
        shown = list.solves;
        next = list.next;
        await follow();
        if (!current()) return;
        running = shown.some((s) => !ended(s));
        newer.hidden = !before.length;
        older.hidden = !next;
        note.parentNode.hidden = !shown.length;
        if (!body.contains(document.activeElement) || !body.isConnected || body.children.length === 0) draw();
        const all = shown.length || asked.search || asked.state;
        sample.hidden = all;
        choose.hidden = table.hidden = !all;
        empty.textContent = shown.length ? "" : all ? "No solve is like that."
            : "Nothing has been solved here yet. Choose a graph file above, plan a sample, or run a training job " +
              "with REMAT_BASE_URL set to this address.";
        if (failing) tell(null); // what else is told there stays
        failing = false;
      } catch (error) {
        if (error.status === 401 || error.status === 403) throw error;
        failing = true;
        if (!shown.length) empty.textContent = "";
        tell(error, true);
      }
      await Promise.race([pause(running ? 1000 : 5000),
        new Promise((done) => {
          wake = () => {
            document.activeElement?.blur();
            done();
          };
        })]);
    }
  }

  Remat.list = { page };
})(window.Remat);
