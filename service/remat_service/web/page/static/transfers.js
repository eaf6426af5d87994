"use strict";
// Transfers to the host and back in a plan's replay: when each copy runs on its direction of the link,
// and what the host holds.
(function (Remat) {
  // A fold over offload, wait, drop, prefetch and free; `step` gives by how much memory changes, and the time after it.
  function link(graph) {
    const { link: between, value_bytes: size } = graph, ends = new Map(), onHost = new Map(), copies = [];
    const free = { out: 0, back: 0 };
    let host = 0;
    const takes = (v, speed) => (between.latency_ns || 0) + Math.ceil((size[v] * 1e9) / speed);
    function copy(v, way, now) {
      const from = Math.max(now, free[way]),
        to = from + takes(v, way === "out" ? between.to_host_bytes_per_s : between.to_device_bytes_per_s);
      free[way] = to;
      ends.set(v, { way, to });
      copies.push({ value: v, way, from, to });
    }
    const gone = (v) => { if (onHost.delete(v)) host -= size[v]; };
    function step(verb, v, now) {
      if (verb === "offload") {
        host += size[v];
        onHost.set(v, true);
        copy(v, "out", now);
      } else if (verb === "prefetch") {
        copy(v, "back", now);
        return { memory: size[v], now };
      } else if (verb === "drop") return { memory: -size[v], now };
      else if (verb === "wait") {
        const { way, to } = ends.get(v);
        ends.delete(v);
        if (way === "back") gone(v);
        return { memory: 0, now: Math.max(now, to) };
      } else gone(v);
      return { memory: 0, now };
    }
    return { step, copies, host: () => host };
  }

  // Lanes of the two directions, for the Gantt chart; none where nothing moves.
  function lanes(run) {
    const of = (way) => (run.copies || []).filter((c) => c.way === way).map((c) => [c.from, c.to, c.value]);
    return run.copies && run.copies.length
      ? [{ name: "to host", color: "--layer-4", spans: of("out") },
          { name: "from host", color: "--layer-3", spans: of("back") }]
      : [];
  }

  // The copies and the host's memory in Chrome's trace format.
  function events(run, label) {
    if (!run.copies || !run.copies.length) return [];
    const named = (tid, name) => ({ ph: "M", pid: 1, tid, name: "thread_name", args: { name } });
    const bars = run.copies.map((c) => ({ ph: "X", pid: 1, tid: c.way === "out" ? 3 : 4, ts: c.from / 1000,
      dur: (c.to - c.from) / 1000, name: label(c.value), args: { value: c.value } }));
    const held = Array.from(run.rows.host, (bytes, i) => ({ ph: "C", pid: 1, ts: run.rows.start[i] / 1000,
      name: "host memory", args: { bytes } }));
    return [named(3, "copies to the host"), named(4, "copies to the device"), ...bars, ...held];
  }

  Remat.transfers = { link, lanes, events };
})(window.Remat);
