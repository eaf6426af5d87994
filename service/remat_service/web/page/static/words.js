"use strict";
// Numbers as people read them, and elements without innerHTML: nothing that came over the wire is ever parsed as HTML.
window.Remat = window.Remat || {};
(function (Remat) {
  function scaled(value, units, step) {
    if (value === null || value === undefined) return "–";
    let i = 0, x = value;
    while (Math.abs(x) >= step && i < units.length - 1) { x /= step; i++; }
    return `${i && Math.abs(x) < 100 ? x.toPrecision(3) : Math.round(x)} ${units[i]}`;
  }
  const bytes = (b) => scaled(b, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
  const time = (ns) => scaled(ns, ["ns", "µs", "ms", "s"], 1000);
  const percent = (f) => (f === null || f === undefined ? "–" : `${(100 * f).toPrecision(3)} %`);
  const seconds = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${s.toFixed(2)} s` : s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);

  // el("td", {class: "n"}, "text", child, …): attributes by name, listeners as functions under on….
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat().filter((c) => c !== null && c !== undefined));
    return node;
  }

  function save(name, type, text) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    const link = el("a", { href: url, download: name });
    document.body.append(link); link.click(); link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  // "12GiB", "500 MB", "50%" of what plain training needs, or plain bytes.
  function budget(text) {
    const match = /^\s*([0-9.]+)\s*(?:(%)|([kmgt]?)(i?)b?)\s*$/i.exec(text);
    if (!match || !Number.isFinite(+match[1])) throw new Error(`“${text}” is no budget: write 12GiB, bytes, or a percentage such as 50%`);
    const number = +match[1];
    if (match[2] && number > 100) throw new Error(`a share of what plain training needs is at most 100%, not ${number}%`);
    if (match[2]) return { fraction: number / 100 };
    if (!match[3] && !Number.isInteger(number)) throw new Error(`“${text}” has no unit: write ${number <= 1 ? `${100 * number}% for that share of what plain training needs, or ` : ""}${number}GiB for a size`);
    const power = " kmgt".indexOf((match[3] || " ").toLowerCase());
    return { bytes: Math.floor(number * (match[4] ? 1024 : 1000) ** power) };
  }

  Remat.words = { bytes, time, percent, seconds, el, save, budget };
})(window.Remat);
