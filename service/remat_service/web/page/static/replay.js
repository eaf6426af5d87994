"use strict";
// What a plan does, step by step: a fold over its steps for pictures only.
// The verifier is on the server and in the client.
(function (Remat) {
  // The values each op makes, which of them are optional, and who reads each value.
  function index(graph) {
    const ops = graph.op_cost_ns.length, values = graph.value_op.length;
    const made = Array.from({ length: ops }, () => []);
    const optional = new Uint8Array(values), keep = new Uint8Array(values), readers = new Int32Array(values).fill(-1);
    for (const v of graph.optional || []) optional[v] = 1;
    for (const v of graph.keep || []) keep[v] = 1;
    graph.value_op.forEach((op, v) => made[op].push(v));
    graph.op_inputs.forEach((inputs, op) => { for (const v of inputs) readers[v] = Math.max(readers[v], op); });
    return { ops, values, made, optional, keep, readers };
  }

  // [op, kept values] for a compute step; what is kept is spelt out.
  function kept(ix, step) { return step.length > 2 ? step[2] : ix.made[step[1]].filter((v) => !ix.optional[v]); }

  // Training without rematerialization: each op once, each value freed after its last use.
  function plain(graph) {
    const ix = index(graph), dying = Array.from({ length: ix.ops }, () => []), steps = [];
    for (let v = 0; v < ix.values; v++) if (ix.readers[v] >= 0 && !ix.keep[v]) dying[ix.readers[v]].push(v);
    for (let op = 0; op < ix.ops; op++) {
      steps.push(["compute", op, ix.made[op].filter((v) => ix.readers[v] >= 0 || ix.keep[v])]);
      for (const v of dying[op]) steps.push(["free", v]);
    }
    return steps;
  }

  // One row a computation: when it starts, how long it takes, memory while it runs, its stage, whether again.
  function replay(graph, steps) {
    const ix = index(graph), n = steps.reduce((k, s) => k + (s[0] === "compute"), 0);
    const rows = { ops: new Int32Array(n), start: new Float64Array(n), end: new Float64Array(n),
      host: new Float64Array(n), memory: new Float64Array(n), after: new Float64Array(n), stage: new Int32Array(n),
      again: new Uint8Array(n), step: new Int32Array(n) };
    const born = new Int32Array(ix.values).fill(-1), intervals = [];
    const workspace = graph.op_workspace_bytes || [], link = graph.link ? Remat.transfers.link(graph) : null;
    let memory = graph.fixed_bytes || 0, time = 0, done = 0, row = 0;
    const leave = (v) => {
      intervals.push([v, born[v], row - 1]);
      born[v] = -1;
    };
    steps.forEach((step, position) => {
      if (step[0] === "compute") {
        const op = step[1], keeps = kept(ix, step), keepSet = new Set(keeps);
        let during = memory + (workspace[op] || 0);
        for (const v of ix.made[op]) if (!ix.optional[v] || keepSet.has(v)) during += graph.value_bytes[v];
        const again = op < done;
        if (!again) done = op + 1;
        // recomputations belong to the stage of the first computation that they lead up to
        rows.ops[row] = op;
        rows.start[row] = time;
        rows.memory[row] = during;
        rows.again[row] = again ? 1 : 0;
        rows.stage[row] = again ? done : op;
        rows.step[row] = position;
        for (const v of keeps) {
          memory += graph.value_bytes[v];
          born[v] = row;
        }
        rows.after[row] = memory;
        rows.host[row] = link ? link.host() : 0;
        time += graph.op_cost_ns[op];
        rows.end[row] = time;
        row++;
      } else if (step[0] === "free") {
        memory -= graph.value_bytes[step[1]];
        leave(step[1]);
        if (link) link.step("free", step[1], time);
        if (row) rows.after[row - 1] = memory;
      } else {
        const changed = link.step(step[0], step[1], time);
        memory += changed.memory;
        time = changed.now;
        if (step[0] === "drop") leave(step[1]);
        if (step[0] === "prefetch") born[step[1]] = row - 1;
        if (row) rows.after[row - 1] = memory;
      }
    });
    for (let v = 0; v < ix.values; v++) if (born[v] >= 0) intervals.push([v, born[v], n - 1]);
    return { rows, intervals, count: n, time, copies: link ? link.copies : [],
      hostPeak: rows.host.reduce((a, b) => Math.max(a, b), 0),
      peak: rows.memory.reduce((a, b) => Math.max(a, b), graph.fixed_bytes || 0) };
  }

  // Values resident while computation `row` runs, largest first.
  function resident(graph, run, row) {
    return run.intervals.filter(([, from, to]) => from < row && row <= to).map(([v]) => v)
      .sort((a, b) => graph.value_bytes[b] - graph.value_bytes[a] || a - b);
  }

  // How often each op runs again, and what that costs: [{op, times, cost}], most expensive first.
  function recomputed(graph, run) {
    const times = new Map();
    for (let i = 0; i < run.count; i++)
      if (run.rows.again[i]) times.set(run.rows.ops[i], (times.get(run.rows.ops[i]) || 0) + 1);
    return [...times].map(([op, k]) => ({ op, times: k, cost: k * graph.op_cost_ns[op] }))
      .sort((a, b) => b.cost - a.cost || a.op - b.op);
  }

  // A curve of the service's timeline as a run: the same rows, without values.
  function fromTimeline({ start_ns, memory_bytes, what, again, end_ns }) {
    return { rows: { start: start_ns, memory: memory_bytes, what, again }, count: what.length, time: end_ns,
      peak: memory_bytes.reduce((a, b) => Math.max(a, b), 0) };
  }

  // When a row's computation ends; after it there may be a wait for a copy.
  function end(run, i) {
    if (run.rows.end) return run.rows.end[i];
    return i + 1 < run.count ? run.rows.start[i + 1] : run.time;
  }

  // The row that runs at a time.
  function at(run, x) {
    let lo = 0, hi = run.count - 1;
    while (lo < hi) {
      const mid = (lo + hi + 1) >> 1;
      if (run.rows.start[mid] <= x) lo = mid;
      else hi = mid - 1;
    }
    return lo;
  }

  // Chrome's trace format, which Perfetto opens: slices for rows, a counter for memory; times in microseconds.
  function trace(run, label, args, valueLabel = (v) => `value ${v}`) {
    const events = [{ ph: "M", pid: 1, name: "process_name", args: { name: "remat plan" } },
      { ph: "M", pid: 1, tid: 1, name: "thread_name", args: { name: "first computation" } },
      { ph: "M", pid: 1, tid: 2, name: "thread_name", args: { name: "recomputation" } }];
    for (let i = 0; i < run.count; i++) {
      const ts = run.rows.start[i] / 1000;
      events.push({ ph: "X", pid: 1, tid: run.rows.again[i] ? 2 : 1, ts, dur: end(run, i) / 1000 - ts, name: label(i),
        args: args(i) });
      events.push({ ph: "C", pid: 1, ts, name: "memory", args: { bytes: run.rows.memory[i] } });
    }
    return { traceEvents: [...events, ...Remat.transfers.events(run, valueLabel)], displayTimeUnit: "ms" };
  }

  Remat.replay = { plain, replay, resident, recomputed, fromTimeline, at, end, trace };
})(window.Remat);
