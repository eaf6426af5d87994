"use strict";
// Talking to the service this page came from; errors are its problem+json, told as one line.
window.Remat = window.Remat || {};
(function (Remat) {
  const offline = document.getElementById("remat-data");
  const key = () => sessionStorage.getItem("remat-key");

  async function call(path, options = {}) {
    const headers = { Accept: "application/json", ...(options.headers || {}) };
    if (key()) headers.Authorization = `Bearer ${key()}`;
    if (options.body !== undefined) { headers["Content-Type"] = "application/json"; options.body = JSON.stringify(options.body); }
    let reply;
    try { reply = await fetch(path, { ...options, headers }); } catch { throw new Error("The service does not answer. It may be restarting; this page tries again."); }
    const text = await reply.text();
    let data = null;
    try { data = text ? JSON.parse(text) : null; } catch { throw new Error(`The service answered ${reply.status} with something that is not JSON.`); }
    if (reply.status === 401) {
      const given = window.prompt("This service wants an API key:");
      if (given) { sessionStorage.setItem("remat-key", given.trim()); return call(path, options); }
    }
    if (!reply.ok) {
      const where = data && data.pointer ? ` (at ${data.pointer})` : "";
      throw new Error(`${(data && (data.detail || data.title)) || `The service answered ${reply.status}.`}${where}`);
    }
    return data;
  }

  // Names stay in this browser: they are kept next to the digest and never sent.
  function remember(id, opNames) {
    if (!opNames) return;
    try { sessionStorage.setItem(`remat-names-${id}`, JSON.stringify(opNames)); } catch { /* storage full: labels fall back to numbers */ }
  }
  function names(id) {
    try { return JSON.parse(sessionStorage.getItem(`remat-names-${id}`) || "null"); } catch { return null; }
  }

  const enc = encodeURIComponent;
  Remat.service = {
    offline: offline ? JSON.parse(offline.textContent) : null,
    list: (after) => call(`v1/solves?limit=50${after ? `&after=${enc(after)}` : ""}`),
    solve: (id) => call(`v1/solves/${enc(id)}`),
    problem: (id) => call(`v1/solves/${enc(id)}/problem`),
    timeline: (id) => call(`v1/solves/${enc(id)}/timeline`),
    progress: (id) => call(`v1/solves/${enc(id)}/progress`),
    cancel: (id) => call(`v1/solves/${enc(id)}/cancel`, { method: "POST" }),
    capabilities: () => call("v1/capabilities"),
    post: (body) => call("v1/solves", { method: "POST", headers: { Prefer: "wait=0" }, body }),
    validate: (subject) => call("v1/graphs:validate", { method: "POST", body: subject.body }),
    postSweep: (body) => call("v1/sweeps", { method: "POST", body }),
    sweep: (id, wait) => call(`v1/sweeps/${enc(id)}?wait=${wait}`),
    remember, names,
  };
})(window.Remat);
