"use strict";
// Numbers as people read them, and elements without innerHTML: nothing that came over the wire is ever parsed as HTML.
window.Remat = window.Remat || {};
(function (Remat) {
  function scaled(value, units, step) {
    if (value === null || value === undefined) return "–";
    let i = 0, x = value;
    while (Math.abs(x) >= step && i < units.length - 1) {
      x /= step;
      i++;
    }
    return `${i && Math.abs(x) < 100 ? x.toPrecision(3) : Math.round(x)} ${units[i]}`;
  }
  const bytes = (b) => scaled(b, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
  const time = (ns) => scaled(ns, ["ns", "µs", "ms", "s"], 1000);
  // 49 %, 9.7 %, 0.08 %: as many digits as help.
  function percent(f) {
    if (f === null || f === undefined) return "–";
    const p = 100 * f, size = Math.abs(p);
    if (size && size < 0.001) return "< 0.001 %";
    const rounded = size >= 20 ? Math.round(p) : Number(size >= 0.95 ? p.toFixed(1) : p.toPrecision(2));
    return `${String(rounded).replace("-", "−")} %`;
  }
  const signed = (f) => (f === null || f === undefined ? "–" : f > 0 ? `+${percent(f)}` : percent(f));
  const seconds = (s) => s === null || s === undefined ? "–" : s < 1 ? `${s.toFixed(2)} s` : s < 10
          ? `${s.toFixed(1)} s` : s < 600 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min`
            : `${Number((s / 3600).toPrecision(3))} h`;

  function ago(iso) {
    const then = new Date(iso), s = (Date.now() - then) / 1000;
    const text = s < 60 ? "just now" : s < 3600 ? `${Math.floor(s / 60)} min ago` : s < 86400
            ? `${Math.floor(s / 3600)} h ago` : then.toLocaleDateString(undefined, { dateStyle: "medium" });
    return el("time", { datetime: iso, title: then.toLocaleString() }, text);
  }

  // What became of a solve, or where its plan comes from, in words that need no manual.
  const STATES = { optimal: ["✓", "optimal"], feasible: ["◐", "plan found"], infeasible: ["✕", "no plan fits"],
    nothing_found: ["?", "nothing found"], cancelled: ["■", "cancelled"], failed: ["!", "failed"],
    queued: ["…", "waiting"], running: ["▸", "solving"] };
  const SOURCES = { hit: "from cache", near: "from a similar problem in the cache",
    joined: "shared with the same request", miss: "solved for this request" };
  const LIMITS = { gap: "close enough to optimal", time: "time limit", cancel: "cancelled",
    memory: "memory limit of the solver" };
  const ended = (answer) => answer.status !== "queued" && answer.status !== "running";
  const state = (answer) =>
    el("span", { class: `state ${answer.status}` },
      el("span", { "aria-hidden": "true" }, `${STATES[answer.status][0]} `), STATES[answer.status][1]);

  // What became of a folded group: how many of its solves have a plan, rather than what the newest one came to.
  function together({ requests, ended, planned }) {
    if (ended < requests) return state({ status: "running" });
    if (planned === requests) return state({ status: "feasible" });
    if (!planned) return state({ status: "nothing_found" });
    return el("span", { class: "state feasible" }, el("span", { "aria-hidden": "true" }, "◐ "),
      `${planned} of ${requests} planned`);
  }

  // A search for the largest batch ends a solve as soon as it knows enough: nobody has given it up.
  const inSearch = (answer) =>
    answer.status === "cancelled" ? { ...answer, status: answer.peak_bytes ? "feasible" : "nothing_found" } : answer;

  // "1.28 GiB → 655 MiB (−49 %) for +9.7 % time": memory without and with the plan, and what it costs.
  function headline(answer, plain) {
    if (!answer.peak_bytes) return null;
    const saved = plain ? `${bytes(plain)} → ${bytes(answer.peak_bytes)} (${signed(answer.peak_bytes / plain - 1)})`
      : bytes(answer.peak_bytes);
    return `${saved} for ${answer.overhead > 0 ? signed(answer.overhead) : "no additional"} time`;
  }

  // el("td", {class: "n"}, "text", child, …): attributes by name, listeners as functions under on….
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") node.addEventListener(key.slice(2), value);
      else if (key === "vars")
        // the policy forbids style attributes
        for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
      else if (value !== null && value !== undefined && value !== false)
        node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat().filter((c) => c !== null && c !== undefined));
    return node;
  }

  function save(name, type, text) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    const link = el("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  // "12GiB", "500 MB", "50%" of what plain training needs, or plain bytes.
  function budget(text) {
    const match = /^\s*([0-9.]+)\s*(?:(%)|([kmgt]?)(i?)b?)\s*$/i.exec(text);
    if (!match || !Number.isFinite(+match[1]))
      throw new Error(`“${text}” is no budget: write 12GiB, bytes, or a percentage such as 50%.`);
    const number = +match[1];
    if (match[2] && number > 100)
      throw new Error(`a share of what plain training needs is at most 100%, not ${number}%.`);
    if (match[2]) return { fraction: number / 100 };
    if (!match[3] && !Number.isInteger(number))
      throw new Error(`“${text}” has no unit: write ` +
          (number <= 1 ? `${100 * number}% for that share of what plain training needs, or ` : "") +
          `${number}GiB for a size`);
    const power = " kmgt".indexOf((match[3] || " ").toLowerCase());
    return { bytes: Math.floor(number * (match[4] ? 1024 : 1000) ** power) };
  }

  // An error that belongs to one field of a form.
  const wrong = (field, text) => Object.assign(new Error(text), { field });

  Remat.words = { bytes, time, percent, signed, seconds, ago, el, save, budget, state, together, inSearch, ended,
    headline, wrong, SOURCES, LIMITS };
})(window.Remat);
