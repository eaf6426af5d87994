"use strict";
// Pictures: memory over time and bound over time with uPlot, the R and S matrices on a canvas.
window.Remat = window.Remat || {};
(function (Remat) {
  const { bytes, time, seconds, percent } = Remat.words;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const BINARY = Array.from({ length: 50 }, (_, k) => 2 ** k); // ticks of bytes at powers of two

  function axes(xText, yText, xFormat, yFormat) {
    const incrs = (format) => (format === bytes ? { incrs: BINARY } : {});
    const common = { stroke: color("--ink"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    return [
      { ...common, ...incrs(xFormat), label: xText, values: (_, ticks) => ticks.map(xFormat) },
      { ...common, ...incrs(yFormat), label: yText, size: 86, values: (_, ticks) => ticks.map(yFormat) }];
  }

  function width(box) { return Math.max(280, Math.floor(box.clientWidth)); }

  // A chart that follows the width of its box.
  function chart(box, options, data) {
    box.replaceChildren();
    const plot = new uPlot({ width: width(box), height: options.height || 300, ...options }, data, box);
    const watch = new ResizeObserver(() => {
      if (!box.isConnected) return watch.disconnect();
      plot.setSize({ width: width(box), height: options.height || 300 });
    });
    watch.observe(box);
    return plot;
  }

  // At most `most` points that keep every bucket's highest one, so that no peak is lost to thinning.
  function thin(run, most) {
    const xs = [], ys = [], size = Math.max(1, Math.ceil(run.count / most));
    for (let from = 0; from < run.count; from += size) {
      let best = from;
      for (let i = from; i < Math.min(run.count, from + size); i++) if (run.rows.memory[i] > run.rows.memory[best]) best = i;
      xs.push(run.rows.start[best]); ys.push(run.rows.memory[best]);
    }
    return { xs, ys };
  }

  // Two runs on one time axis: each series has nulls where only the other has a point.
  function join(a, b) {
    const xs = [...new Set([...a.xs, ...b.xs])].sort((p, q) => p - q);
    const at = (s) => { const m = new Map(s.xs.map((x, i) => [x, s.ys[i]])); return xs.map((x) => (m.has(x) ? m.get(x) : null)); };
    return [xs, at(a), at(b)];
  }

  function memory(box, run, plainRun, budget, onHover) {
    const [xs, mine, ghost] = join(thin(run, 6000), thin(plainRun, 6000));
    const stepped = uPlot.paths.stepped({ align: 1 });
    return chart(box, {
      scales: { x: { time: false }, y: { range: (_, lo, hi) => [0, Math.max(hi, budget) * 1.06] } },
      axes: axes("time in the step", "memory", time, bytes),
      cursor: { drag: { x: true, y: false } },
      series: [{ label: "time", value: (_, v) => time(v) },
        { label: "this plan", stroke: color("--plan"), fill: color("--plan-fill"), width: 1.5, paths: stepped, spanGaps: true, points: { show: false }, value: (_, v) => bytes(v) },
        { label: "without recomputation", stroke: color("--ghost"), width: 1, dash: [3, 3], paths: stepped, spanGaps: true, points: { show: false }, value: (_, v) => bytes(v) },
        { label: "budget", stroke: color("--budget"), width: 2, points: { show: false }, value: (_, v) => bytes(v) }],
      hooks: { setCursor: [(u) => { if (u.cursor.idx !== null && u.cursor.idx !== undefined) onHover(u.data[0][u.cursor.idx]); }] },
    }, [xs, mine, ghost, xs.map(() => budget)]);
  }

  function history(box, progress, total, until) {
    const last = progress[progress.length - 1];
    if (until > last.seconds) progress = [...progress, { ...last, seconds: until }]; // the lines run on to where the solve stands
    const xs = progress.map((p) => p.seconds), over = (c) => (c === null || c === undefined ? null : c / total - 1);
    const stepped = uPlot.paths.stepped({ align: 1 });
    return chart(box, {
      height: 220, scales: { x: { time: false, range: [0, Math.max(0.1, ...xs)] } }, axes: axes("seconds of solving", "overhead", seconds, percent),
      series: [{ label: "at", value: (_, v) => seconds(v) },
        { label: "incumbent", stroke: color("--plan"), width: 2, paths: stepped, spanGaps: true, value: (_, v) => percent(v) },
        { label: "bound", stroke: color("--bound"), width: 2, paths: stepped, spanGaps: true, value: (_, v) => percent(v) }],
    }, [xs, progress.map((p) => over(p.cost_ns)), progress.map((p) => over(p.bound_ns))]);
  }

  // points: [{budget_bytes, overhead, bound, status}]; others: [{name, points}] drawn next to the curve.
  function curve(box, points, others, least) {
    const all = [points, ...others.map((o) => o.points)];
    const xs = [...new Set(all.flat().map((p) => p.budget_bytes))].sort((a, b) => a - b);
    const column = (ps, key) => { const m = new Map(ps.map((p) => [p.budget_bytes, p[key]])); return xs.map((x) => (m.has(x) ? m.get(x) : null)); };
    const hues = ["#c2410c", "#7c3aed", "#be185d", "#a16207", "#0e7490", "#475569"];
    const line = (label, stroke, dash) => ({ label, stroke, width: 2, dash, spanGaps: true, points: { show: true, size: 6 }, value: (_, v) => percent(v) });
    return chart(box, {
      height: 340, scales: { x: { time: false } }, axes: axes("budget", "overhead", bytes, percent),
      series: [{ label: "budget", value: (_, v) => bytes(v) }, line("best plan", color("--plan")), line("proved bound", color("--bound"), [4, 3]),
        ...others.map((o, i) => line(o.name, hues[i % hues.length], [2, 4]))],
      hooks: { drawClear: [(u) => {
        if (!least) return;
        const x = Math.min(u.valToPos(least, "x", true), u.bbox.left + u.bbox.width);
        u.ctx.save(); u.ctx.fillStyle = color("--infeasible");
        u.ctx.fillRect(u.bbox.left, u.bbox.top, Math.max(0, x - u.bbox.left), u.bbox.height); u.ctx.restore();
      }] },
    }, [xs, column(points, "overhead"), column(points, "bound"), ...others.map((o) => column(o.points, "overhead"))]);
  }

  // R (what each stage computes) and S (what it starts with), stage down, op across, as in the Checkmate paper.
  function matrix(canvas, graph, run, which) {
    const n = graph.op_cost_ns.length, size = canvas.clientWidth || 320, dpr = window.devicePixelRatio || 1;
    canvas.width = canvas.height = Math.round(size * dpr);
    const c = canvas.getContext("2d"), unit = canvas.width / n, dot = Math.max(unit, dpr);
    c.fillStyle = color("--paper"); c.fillRect(0, 0, canvas.width, canvas.height);
    c.fillStyle = color("--never"); c.beginPath(); c.moveTo(0, 0); c.lineTo(canvas.width, 0); c.lineTo(canvas.width, canvas.height); c.fill();
    if (which === "R") {
      for (let i = 0; i < run.count; i++) {
        c.fillStyle = run.rows.again[i] ? color("--again") : color("--plan");
        c.fillRect(run.rows.ops[i] * unit, run.rows.stage[i] * unit, dot, dot);
      }
      return;
    }
    c.fillStyle = color("--plan");
    for (const [v, from, to] of run.intervals) {
      const first = run.rows.stage[from] + 1, last = run.rows.stage[to];
      if (last >= first) c.fillRect(graph.value_op[v] * unit, first * unit, dot, (last - first + 1) * unit);
    }
  }

  Remat.draw = { memory, history, curve, matrix };
})(window.Remat);
