"use strict";
// What the memory of each moment consists of: by where it was made, or by module where the names of ops are known.
(function (Remat) {
  const MODULES = 7; // drawn apart; the rest is one layer

  // The part of a name that says where: "h.0.attn" of "h.0.attn:mm+add".
  const place = (name) => (name.includes(":") ? name.slice(0, name.lastIndexOf(":")) : "");

  // Each op's module, at the least depth where none that has parts holds much more than a third of all, and its bytes.
  function modules(graph, run, names) {
    const paths = names.map((name) => place(name).split(".")),
      deepest = paths.reduce((most, path) => Math.max(most, path.length), 1);
    for (let depth = 1; ; depth++) {
      const of = paths.map((path) => path.slice(0, depth).join(".")), weight = new Map();
      for (const [v, from, to] of run.intervals) {
        const m = of[graph.value_op[v]];
        weight.set(m, (weight.get(m) || 0) + graph.value_bytes[v] * (to - from + 1));
      }
      const parted = new Set(of.filter((_, op) => paths[op].length > depth)),
        all = [...weight.values()].reduce((a, b) => a + b, 0);
      if (depth === deepest || [...parted].every((m) => (weight.get(m) || 0) <= 0.35 * all)) return { of, weight };
    }
  }

  // Bytes of each layer while each row runs: what is resident, from the row after it was made to its last one.
  function layered(graph, run, names, layerOf) {
    const sums = names.map(() => new Float64Array(run.count + 1)), total = new Float64Array(run.count);
    for (const [v, from, to] of run.intervals) {
      const sum = sums[layerOf(v, from)];
      sum[from + 1] += graph.value_bytes[v];
      if (to + 1 <= run.count) sum[to + 1] -= graph.value_bytes[v];
    }
    for (const sum of sums)
      for (let i = 0; i < run.count; i++) {
        if (i) sum[i] += sum[i - 1];
        total[i] += sum[i];
      }
    return { sums, total };
  }

  // {layers: [{name, color}], at(row): bytes of each, upTo(row, j): of the first j + 1}.
  // The last layer is what the op that runs makes.
  function assemble(graph, run, layers, layerOf) {
    const fixed = graph.fixed_bytes || 0, { sums, total } = layered(graph, run, layers, layerOf);
    const all = [...(fixed ? [{ name: "fixed: parameters, inputs", color: "--fixed" }] : []), ...layers,
      { name: "the op that runs: outputs, workspace", color: "--running" }];
    const at = (i) => [...(fixed ? [fixed] : []), ...sums.map((sum) => sum[i]),
      Math.max(0, run.rows.memory[i] - fixed - total[i])];
    const tops = []; // of each layer between, the bytes up to its upper edge
    for (const sum of sums) {
      const below = tops[tops.length - 1];
      tops.push(sum.map((size, i) => size + (below ? below[i] : fixed)));
    }
    const upTo = (i, j) => {
      const k = j - (fixed ? 1 : 0);
      return k < 0 ? fixed : k < tops.length ? tops[k][i] : Math.max(run.rows.memory[i], fixed + total[i]);
    };
    return { layers: all, at, upTo };
  }

  function byOrigin(graph, run) {
    const first = graph.backward_from, backward = first === null || first === undefined ? Infinity : first;
    const layers = [{ name: backward < Infinity ? "made in the forward pass" : "made once", color: "--layer-0" },
      { name: "computed again", color: "--again" }];
    if (backward < Infinity) layers.push({ name: "made in the backward pass", color: "--layer-1" });
    return assemble(graph, run, layers, (v, from) => run.rows.again[from] ? 1 : graph.value_op[v] >= backward ? 2 : 0);
  }

  function byModule(graph, run, names) {
    const { of, weight } = modules(graph, run, names);
    const top = [...weight].sort((a, b) => b[1] - a[1]).slice(0, MODULES).map(([name]) => name)
      .sort((a, b) => of.indexOf(a) - of.indexOf(b));
    const index = new Map(top.map((name, j) => [name, j])), rest = weight.size > top.length;
    const layers = top.map((name, j) => ({ name: name || "outside of modules", color: `--layer-${j}` }));
    if (rest) layers.push({ name: `${weight.size - top.length} other modules`, color: "--ghost" });
    return assemble(graph, run, layers, (v) =>
      index.has(of[graph.value_op[v]]) ? index.get(of[graph.value_op[v]]) : top.length);
  }

  Remat.stack = { byOrigin, byModule };
})(window.Remat);
