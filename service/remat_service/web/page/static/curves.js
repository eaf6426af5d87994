"use strict";
// Two line charts: incumbent and bound while a solve runs, and overhead against the budget.
(function (Remat) {
  const { bytes, seconds, percent } = Remat.words;

  function history(box, progress, total, until) {
    const { axes, plot, color, legend } = Remat.chart, last = progress[progress.length - 1];
    // the lines run on to where the solve stands
    if (until > last.seconds) progress = [...progress, { ...last, seconds: until }];
    const xs = progress.map((p) => p.seconds), over = (c) => (c === null || c === undefined ? null : c / total - 1);
    const stepped = uPlot.paths.stepped({ align: 1 }),
      line = (label, stroke) => ({ label, stroke, width: 2, paths: stepped, spanGaps: true });
    const columns = [["best plan", "--plan", progress.map((p) => over(p.cost_ns))],
      ["proved: no plan is below", "--bound", progress.map((p) => over(p.bound_ns))],
    ].filter(([, , ys]) => ys.some((y) => y !== null));
    const inside = document.createElement("div");
    box.append(inside);
    plot(inside, { height: 220, scales: { x: { time: false, range: [0, Math.max(0.1, ...xs)] } },
      axes: axes("seconds of solving", "more time", seconds, percent),
      series: [{}, ...columns.map(([label, hue]) => line(label, color(hue)))] }, [xs, ...columns.map((c) => c[2])]);
    box.append(legend(columns.map(([text, hue]) => ({ text, color: `var(${hue})`, kind: "line" }))));
  }

  const HUES = ["--layer-3", "--layer-4", "--again", "--layer-6", "--layer-5"];

  // least: {bytes, by}, below which no plan fits, by a certificate or as somebody claims.
  // lines: [{name, points: [[budget, overhead]], bound}]; those without a point are left out of picture and legend.
  function tradeOff(box, lines, least) {
    const { axes, plot, color, legend } = Remat.chart;
    const drawn = lines.filter((l) => l.points.some((p) => p[1] !== null))
      .map((l, i) => ({ ...l, hue: l.bound ? "--bound" : l.main ? "--plan" : HUES[i % HUES.length] }));
    const xs = [...new Set(lines.flatMap((l) => l.points.map((p) => p[0])))].sort((a, b) => a - b);
    const column = (l) => {
      const m = new Map(l.points);
      return xs.map((x) => (m.has(x) ? m.get(x) : null));
    };
    const items = drawn.map((l) => ({ text: l.name, color: color(l.hue), kind: l.bound ? "dash" : "line" }));
    if (least.bytes)
      items.push({
        text: `no plan fits: below ${bytes(least.bytes)}, ${least.by ? `claimed by ${least.by}` : "certified"}`,
        color: color("--infeasible"), kind: "area" });
    const inside = document.createElement("div");
    box.replaceChildren(inside, legend(items));
    const chart = plot(inside, { height: 340,
      scales: { x: { time: false }, y: { range: (_, lo, hi) => [Math.min(0, lo), Math.max(0.01, hi) * 1.08] } },
      axes: axes("budget", "more time", bytes, percent),
      series: [{},
        ...drawn.map((l) => ({ label: l.name, stroke: color(l.hue), width: 2, dash: l.bound ? [4, 3] : undefined,
          spanGaps: true, points: { show: true, size: 7, fill: color(l.hue) } }))],
      hooks: {
        drawClear: [
          (u) => {
            if (!least.bytes) return;
            const x = Math.min(Math.max(u.bbox.left, u.valToPos(least.bytes, "x", true)), u.bbox.left + u.bbox.width);
            u.ctx.save();
            u.ctx.fillStyle = color("--infeasible");
            u.ctx.fillRect(u.bbox.left, u.bbox.top, x - u.bbox.left, u.bbox.height);
            u.ctx.restore();
          }] } },
      [xs, ...drawn.map(column)]);
    return { chart, items };
  }

  Remat.curves = { history, tradeOff };
})(window.Remat);
