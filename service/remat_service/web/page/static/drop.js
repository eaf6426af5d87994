"use strict";
// A form that takes a file by click, keyboard or drop: what a problem is about, a graph, a chain or a join.
(function (Remat) {
  const { el, budget, wrong } = Remat.words, service = Remat.service;
  const KEYS = { "remat-graph/1": "graph", "remat-chain/1": "chain", "remat-join/1": "join" };

  async function json(file) {
    try {
      return JSON.parse(await file.text());
    } catch (error) { throw wrong("file", `${file.name} is not JSON: ${error.message}.`); }
  }

  // {kind, body, names}: the body to send carries no names; they stay in this browser.
  async function read(file) {
    if (!file) throw wrong("file", "Choose a file first, or drop one here.");
    const data = await json(file), kind = data && (KEYS[data.format] || (data.nodes && !data.format ? "graph" : null));
    if (!kind)
      throw wrong("file", `${file.name} is none of ${Object.keys(KEYS).join(", ")}: ` +
          `its format is ${JSON.stringify((data && data.format) || null)}.`);
    const { op_names: names, value_names: _, ...bare } = data;
    return { kind, body: { [kind]: bare }, names };
  }

  // The names of a graph's ops, from the file that the client wrote, or a plain array of strings.
  async function names(file, ops) {
    const data = await json(file), found = Array.isArray(data) ? data : data && data.op_names;
    if (!Array.isArray(found) || !found.every((name) => typeof name === "string"))
      throw wrong("file", `${file.name} has no op_names: take the graph file that remat capture wrote.`);
    if (found.length !== ops)
      throw wrong("file",
        `${file.name} names ${found.length} ops, and this graph has ${ops}: it is the file of another graph.`);
    return found;
  }

  // Bytes from what was typed; a fraction is of the plain activation peak, above the fixed bytes.
  function budgetBytes(about, text, field) {
    let asked;
    try {
      asked = budget(text);
    } catch (error) { throw wrong(field, error.message); }
    if (asked.bytes !== undefined) return asked.bytes;
    return about.fixed_bytes + Math.floor(asked.fraction * (about.plain_peak_bytes - about.fixed_bytes));
  }

  // Files may be dropped anywhere on `box`; they go into the input, as if they had been chosen.
  function target(box, input, then) {
    box.addEventListener("dragover", (e) => {
      e.preventDefault();
      box.classList.add("over");
    });
    box.addEventListener("dragleave", () => box.classList.remove("over"));
    box.addEventListener("drop", (e) => {
      e.preventDefault();
      box.classList.remove("over");
      input.files = e.dataTransfer.files;
      then();
    });
    return box;
  }

  // A problem's file, more fields, and a method; calls `submit(subject, values)`.
  function form(button, specs, submit) {
    const made = Remat.fields.form(
      [
        {
          name: "file", label: "Graph, chain or join file", type: "file", accept: ".json,application/json",
          hint: "Choose it, or drop it here. Names of ops stay in this browser, unless this tenant’s are stored.",
          pointers: ["/problem/graph", "/graph", "/problem/chain", "/chain", "/problem/join", "/join"] },
        ...specs,
        { name: "method", label: "Method", options: [["auto", "auto"]], value: "auto", pointers: ["/method"] }],
      { button, label: "Plan a problem" }, async (values) => submit(await read(values.file), values));
    service.capabilities().then(
      (c) => {
        for (const m of c.methods || [])
          if (m.name !== "auto") made.input("method").append(el("option", { value: m.name, title: m.summary }, m.name));
      }, () => {});
    return target(el("section", { class: "card drop", "aria-label": "Plan a problem" }, made.node), made.input("file"),
      () => {});
  }

  Remat.drop = { form, names, target, budgetBytes };
})(window.Remat);
