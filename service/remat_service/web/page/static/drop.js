"use strict";
// A form that takes a file by click, keyboard or drop: what a problem is about, a graph, a chain or a join.
window.Remat = window.Remat || {};
(function (Remat) {
  const { el, budget } = Remat.words, service = Remat.service;
  const KEYS = { "remat-graph/1": "graph", "remat-chain/1": "chain", "remat-join/1": "join" };

  // {kind, body, names}: the body to send carries no names; they stay in this browser.
  async function read(file) {
    let data;
    try { data = JSON.parse(await file.text()); } catch (error) { throw new Error(`${file.name} is not JSON: ${error.message}`); }
    const kind = data && KEYS[data.format];
    if (!kind) throw new Error(`${file.name} is none of ${Object.keys(KEYS).join(", ")}: its format is ${JSON.stringify(data && data.format)}.`);
    const { op_names: names, value_names: _, ...bare } = data;
    return { kind, body: { [kind]: bare }, names };
  }

  // Bytes from what was typed; a fraction is of the plain activation peak, above the fixed bytes.
  function budgetBytes(about, text) {
    const asked = budget(text);
    if (asked.bytes !== undefined) return asked.bytes;
    return about.fixed_bytes + Math.floor(asked.fraction * (about.plain_peak_bytes - about.fixed_bytes));
  }

  // Calls `submit(subject, fields, method)`; `guard` turns what goes wrong into a sentence.
  function form(button, extra, submit, guard) {
    const file = el("input", { type: "file", accept: ".json,application/json", "aria-label": "Graph file" });
    const fields = {};
    const field = (name, text, value) => { fields[name] = el("input", { value, "aria-label": text }); return el("label", {}, text, fields[name]); };
    const method = el("select", {}, el("option", { value: "auto" }, "auto"));
    service.capabilities().then((c) => {
      for (const m of c.methods || []) if (m.name !== "auto") method.append(el("option", { value: m.name, title: m.summary }, m.name));
    }, () => {});
    const inside = el("form", { onsubmit: guard(async (event) => {
      event.preventDefault();
      if (!file.files.length) throw new Error("Choose a graph file first, or drop one here.");
      const subject = await read(file.files[0]);
      await submit(subject, Object.fromEntries(Object.entries(fields).map(([k, f]) => [k, f.value])), method.value);
    }) }, el("label", {}, "Graph, chain or join file (drop it here)", file), extra(field), el("label", {}, "Method", method), el("button", { type: "submit" }, button));
    const box = el("section", { class: "drop", "aria-label": "Plan a graph",
      ondragover: (e) => { e.preventDefault(); box.classList.add("over"); }, ondragleave: () => box.classList.remove("over"),
      ondrop: guard(async (e) => { e.preventDefault(); box.classList.remove("over"); file.files = e.dataTransfer.files; inside.requestSubmit(); }) }, inside);
    return box;
  }

  Remat.drop = { form, budgetBytes };
})(window.Remat);
