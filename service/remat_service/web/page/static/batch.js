"use strict";
// A search for the largest batch inside a budget: what it has reached, what is proved, and every batch that it tried.
(function (Remat) {
  const { el, bytes, signed, seconds, state, inSearch } = Remat.words, service = Remat.service;

  function sentence(batch, bound) {
    if (!bound) return "no batch trains";
    const trains = batch ? `a batch of ${batch} trains` : "no batch is known to train";
    return `${trains}, and ${batch === bound ? "no larger one does" : `none above ${bound} does`}`;
  }

  function table(search) {
    const heads = ["Batch", "State", "More time", "Peak", "Solving", "Solve"];
    // a larger batch that has a plan takes more time than was asked for
    const slow = (s, i) => search.ended && s.peak_bytes && search.batches[i] > search.best_batch;
    const rows = search.solves.map((s, i) => [search.batches[i],
      [state(inSearch(s)), slow(s, i) ? el("span", { class: "soft" }, " too slow") : null], signed(s.overhead),
      bytes(s.peak_bytes), seconds(s.seconds),
      el("a", { href: `#/solve/${s.id}`, title: s.message },
        s.id === search.best_solve ? "the plan of the largest" : "plan")]);
    const cls = (i) => (i === 1 || i === 5 ? null : "n");
    return el("div", { class: "scroll" },
      el("table", { class: "cards" },
        el("thead", {}, el("tr", {}, heads.map((h, i) => el("th", { scope: "col", class: cls(i) }, h)))),
        el("tbody", {},
          rows.map((row) => el("tr", {}, row.map((c, i) => el("td", { class: cls(i), "data-label": heads[i] }, c)))))));
  }

  async function page(main, current, { tell, pause, patient }, id) {
    const found = el("p", { class: "headline", "aria-live": "polite" }), about = el("p", { class: "soft" }),
      name = el("p", { class: "eyebrow" }), rows = el("div"),
      cancel = el("button", { hidden: true, onclick: () => service.cancelBatch(id).catch(tell) },
        "Cancel and keep the largest so far");
    main.append(el("p", {}, el("a", { href: "#/" }, "← All solves")), name, el("h1", {}, "Largest batch"), found, about,
      cancel, rows);
    for (let wait = 0; current(); wait = 1) {
      const search = await patient(() => service.batch(id, wait));
      if (!wait && search.solves.length)
        name.textContent = (await patient(() => service.nameOf(search.solves[0].id))) || "";
      if (!current()) return;
      const text = search.bound === null
          ? `${search.best_batch ? `a batch of ${search.best_batch}` : "none"} of those named trains`
          : sentence(search.best_batch, search.bound);
      found.textContent = `${search.solves.length ? `Within ${bytes(search.solves[0].budget_bytes)}: ` : ""}${text}.`;
      about.textContent = search.message;
      cancel.hidden = search.ended;
      if (search.ended || !rows.contains(document.activeElement)) rows.replaceChildren(table(search));
      if (search.ended) return;
      await pause(500);
    }
  }

  Remat.batch = { page, sentence };
})(window.Remat);
