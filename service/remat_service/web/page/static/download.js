"use strict";
// A plan to take along: the answer, a trace for Perfetto, and this page as one file that asks nobody for anything.
(function (Remat) {
  const { el, save } = Remat.words;

  function row(whole, traced) {
    const stem = `remat-${(whole.answer.digest || "plan").slice(0, 12)}`,
      wrong = el("p", { class: "error", role: "alert" });
    const page = async () => {
      wrong.textContent = "";
      try {
        save(`${stem}.html`, "text/html", await offlineFile(whole));
      } catch {
        wrong.textContent = "The service does not give the page's own files; it may be restarting.";
      }
    };
    return el("div", { class: "row" },
      el("button", { onclick: () => save(`${stem}.json`, "application/json", JSON.stringify(whole.answer)) },
        "Answer as JSON"),
      el("button", { onclick: () => save(`${stem}.trace.json`, "application/json", JSON.stringify(traced())) },
        "Trace for Perfetto"),
      Remat.service.offline ? null
        : el("button", { onclick: page }, "One HTML file"), wrong);
  }

  // This page's own scripts and styles with the data inside.
  async function offlineFile(whole) {
    const sources = [...document.querySelectorAll("script[src]")].map((s) => s.src);
    const sheets = [...document.querySelectorAll("link[rel=stylesheet]")].map((s) => s.href);
    const text = async (url) => {
      const reply = await fetch(url);
      if (!reply.ok) throw new Error(`${url}: ${reply.status}`);
      return reply.text();
    };
    const [scripts, styles] = [await Promise.all(sources.map(text)), await Promise.all(sheets.map(text))];
    const data = JSON.stringify(whole).replace(/</g, "\\u003c");
    return (`<!doctype html><html lang="en"><head><meta charset="utf-8">` +
      `<meta name="viewport" content="width=device-width, initial-scale=1">` +
      `<meta name="color-scheme" content="light dark"><title>remat plan</title>` +
      `<style>${styles.join("\n")}</style></head><body>` +
      `<header><span class="brand">remat</span></header><main id="main"></main><div id="notice" role="alert"></div>` +
      `<script type="application/json" id="remat-data">${data}</` + `script>` +
      scripts.map((s) => `<script>${s.replace(/<\/script/gi, "<\\/script")}</` + "script>").join("") +
      `</body></html>`);
  }

  Remat.download = { row };
})(window.Remat);
