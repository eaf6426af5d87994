"use strict";
// Talking to the service this page came from; errors are its problem+json, told as one line.
(function (Remat) {
  const offline = document.getElementById("remat-data");
  const key = () => sessionStorage.getItem("remat-key"), tenant = () => sessionStorage.getItem("remat-tenant");

  const enc = encodeURIComponent;

  // What the page signs in with, until the tab is closed: an API key, or a token and which of its tenants is meant.
  function credentials(secret, name) {
    for (const [item, value] of [["remat-key", secret], ["remat-tenant", name], ]) {
      if (value) sessionStorage.setItem(item, value);
      else sessionStorage.removeItem(item);
    }
  }

  async function call(path, options = {}) {
    const headers = { Accept: "application/json", ...(options.headers || {}) };
    if (key()) headers.Authorization = `Bearer ${key()}`;
    if (tenant()) headers["Remat-Tenant"] = tenant();
    if (options.body !== undefined) {
      headers["Content-Type"] = "application/json";
      options.body = JSON.stringify(options.body);
    }
    let reply, text;
    try {
      reply = await fetch(path, { ...options, headers });
      text = await reply.text();
    } catch {
      throw Object.assign(new Error("The service does not answer; it may be restarting."), { passing: true });
    }
    const passing = reply.status === 429 || reply.status > 501; // busy, away or stopping
    let data = null;
    try {
      data = text ? JSON.parse(text) : null;
    } catch {
      throw Object.assign(new Error(`The service answered ${reply.status} with something that is not JSON.`),
        { passing });
    }
    if (!reply.ok) {
      const { detail, title, pointer, issuer } = data || {};
      throw Object.assign(new Error(detail || title || `The service answered ${reply.status}.`), { status: reply.status,
        passing, pointer, issuer });
    }
    return data;
  }

  // Names stay in this browser, and go to the service only where it stores this tenant's.
  function remember(id, opNames) {
    if (!opNames) return;
    call("v1/capabilities")
      .then(
        (told) => told.stores_names && call(`v1/solves/${enc(id)}/names`, { method: "PUT", body: { names: opNames } }))
      .catch(() => {}); // they are here all the same
    try {
      sessionStorage.setItem(`remat-names-${id}`, JSON.stringify(opNames));
    } catch { /* storage full: labels fall back to numbers */ }
  }
  function names(id) {
    try {
      return JSON.parse(sessionStorage.getItem(`remat-names-${id}`) || "null");
    } catch {
      return null;
    }
  }

  Remat.service = { offline: offline ? JSON.parse(offline.textContent) : null,
    list: (asked) => call(`v1/solves?${new URLSearchParams(asked)}`), solve: (id) => call(`v1/solves/${enc(id)}`),
    nameOf: async (id) =>
      (await call(`v1/solves?${new URLSearchParams({ search: id, limit: 1 })}`)).solves.find((s) => s.id === id)
        ?.name || null, // an answer has none: it is shared
    problem: (id) => call(`v1/solves/${enc(id)}/problem`), timeline: (id) => call(`v1/solves/${enc(id)}/timeline`),
    progress: (id) => call(`v1/solves/${enc(id)}/progress`),
    attachments: (id) => call(`v1/solves/${enc(id)}/attachments`),
    cancel: (id) => call(`v1/solves/${enc(id)}/cancel`, { method: "POST" }),
    capabilities: () => call("v1/capabilities"),
    post: (body) => call("v1/solves", { method: "POST", headers: { Prefer: "wait=0" }, body }),
    validate: (subject) => call("v1/graphs:validate", { method: "POST", body: subject.body }),
    postSweep: (body) => call("v1/sweeps", { method: "POST", body }),
    batch: (id, wait) => call(`v1/max-batch/${enc(id)}?wait=${wait}`),
    cancelBatch: (id) => call(`v1/max-batch/${enc(id)}/cancel`, { method: "POST" }),
    sweep: (id, wait) => call(`v1/sweeps/${enc(id)}?wait=${wait}`),
    operator: { overview: () => call("v1/operator/overview"),
      solves: (state) => call(`v1/operator/solves?${new URLSearchParams({ state })}`),
      cancel: (id) => call(`v1/operator/solves/${enc(id)}/cancel`, { method: "POST" }),
      tenants: () => call("v1/operator/tenants"),
      addTenant: (body) => call("v1/operator/tenants", { method: "POST", body }),
      changeTenant: (name, body) => call(`v1/operator/tenants/${enc(name)}`, { method: "PATCH", body }),
      keys: () => call("v1/operator/keys"), addKey: (body) => call("v1/operator/keys", { method: "POST", body }),
      endKey: (id) => call(`v1/operator/keys/${enc(id)}`, { method: "DELETE" }) },
    remember, names, credentials, signedIn: () => Boolean(key()), credentialsNow: () => [key(), tenant()] };
})(window.Remat);
