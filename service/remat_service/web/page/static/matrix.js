"use strict";
// The matrices R (what each stage computes) and S (what it starts with) of the Checkmate paper.
// Ops go across, stages down.
(function (Remat) {
  const { el, bytes, time } = Remat.words;
  const MARGIN = { left: 52, top: 8, right: 10, bottom: 44 },
    SEEN = 3; // pixels of a recomputation, however many ops there are

  const ticks = (n) => {
    const rough = n / 5, power = 10 ** Math.floor(Math.log10(Math.max(1, rough))),
      step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough) || 1;
    return Array.from({ length: Math.floor((n - 1) / step) + 1 }, (_, k) => k * step);
  };

  function frame(c, side, n, backward) {
    const { color } = Remat.chart, unit = side / n;
    c.fillStyle = color("--paper");
    c.fillRect(0, 0, side + MARGIN.left + MARGIN.right, side + MARGIN.top + MARGIN.bottom);
    c.translate(MARGIN.left, MARGIN.top);
    c.fillStyle = color("--never");
    c.beginPath();
    c.moveTo(0, 0);
    c.lineTo(side, 0);
    c.lineTo(side, side);
    c.fill();
    c.strokeStyle = color("--edge");
    c.lineWidth = 1;
    c.strokeRect(0.5, 0.5, side - 1, side - 1);
    c.fillStyle = color("--ink");
    c.font = "12px system-ui, sans-serif";
    for (const t of ticks(n)) {
      const at = (t + 0.5) * unit;
      c.textAlign = "center";
      c.textBaseline = "top";
      c.fillRect(at, side, 1, 5);
      c.fillText(t, at, side + 7);
      c.textAlign = "right";
      c.textBaseline = "middle";
      c.fillRect(-5, at, 5, 1);
      c.fillText(t, -8, at);
    }
    c.textAlign = "center";
    c.textBaseline = "bottom";
    c.fillText("op", side / 2, side + MARGIN.bottom - 2);
    c.save();
    c.translate(-MARGIN.left + 14, side / 2);
    c.rotate(-Math.PI / 2);
    c.fillText("stage", 0, 0);
    c.restore();
    return () => {
      // over the marks: where the backward pass begins
      if (backward === null || backward === undefined) return;
      const at = backward * unit;
      c.strokeStyle = color("--ink");
      c.setLineDash([2, 3]);
      c.beginPath();
      c.moveTo(at, 0);
      c.lineTo(at, side);
      c.moveTo(0, at);
      c.lineTo(side, at);
      c.stroke();
      c.setLineDash([]);
    };
  }

  function drawR(c, unit, graph, run) {
    const { color } = Remat.chart, square = (i, size) =>
        c.fillRect((run.rows.ops[i] + 0.5) * unit - size / 2, (run.rows.stage[i] + 0.5) * unit - size / 2, size, size);
    c.fillStyle = color("--plan");
    for (let i = 0; i < run.count; i++) if (!run.rows.again[i]) square(i, Math.max(1.5, unit));
    c.fillStyle = color("--again");
    for (let i = 0; i < run.count; i++) if (run.rows.again[i]) square(i, Math.max(SEEN, unit));
  }

  const stages = (run, [, from, to]) => [run.rows.stage[from] + 1, run.rows.stage[to]];

  function drawS(c, unit, graph, run) {
    const { color } = Remat.chart;
    for (const again of [0, 1]) {
      c.fillStyle = color(again ? "--again" : "--plan");
      for (const interval of run.intervals) {
        const [first, last] = stages(run, interval);
        if (run.rows.again[interval[1]] !== again || last < first) continue;
        c.fillRect(graph.value_op[interval[0]] * unit, first * unit, Math.max(again ? 2 : 1, unit),
          Math.max(again ? SEEN : 1, (last - first + 1) * unit));
      }
    }
  }

  // The nearest thing within a few pixels of an op and a stage; recomputations first, since they are few.
  function nearest(graph, run, which, op, stage, reach) {
    if (which === "S") {
      return run.intervals
        .filter((i) => {
          const [a, b] = stages(run, i);
          return b >= a && Math.abs(graph.value_op[i[0]] - op) <= reach && stage >= a - reach && stage <= b + reach;
        })
        .sort((p, q) => run.rows.again[q[1]] - run.rows.again[p[1]] ||
            Math.abs(graph.value_op[p[0]] - op) - Math.abs(graph.value_op[q[0]] - op),
        )[0];
    }
    let best = -1, score = Infinity;
    for (let i = 0; i < run.count; i++) {
      const far =
        Math.max(Math.abs(run.rows.ops[i] - op), Math.abs(run.rows.stage[i] - stage)) - (run.rows.again[i] ? reach : 0);
      if (far <= (run.rows.again[i] ? 0 : reach) && far < score) {
        best = i;
        score = far;
      }
    }
    return best < 0 ? undefined : best;
  }

  function words(graph, run, which, found, name) {
    if (which === "R") {
      const op = run.rows.ops[found];
      return [el("strong", {}, name(op)),
        el("div", {}, run.rows.again[found] ? `computed again in stage ${run.rows.stage[found]}`
            : `first computed, in stage ${run.rows.stage[found]}`),
        el("div", {}, `${time(graph.op_cost_ns[op])}, op ${op}`)];
    }
    const [v, from] = found, [first, last] = stages(run, found);
    return [el("strong", {}, `value of ${name(graph.value_op[v])}`),
      el("div", {}, `kept from stage ${first} to ${last}${run.rows.again[from] ? ", after it was computed again" : ""}`,
      ), el("div", {}, `${bytes(graph.value_bytes[v])}, op ${graph.value_op[v]}`)];
  }

  // One matrix with its legend; arrow keys go from one recomputation to the next.
  function one(graph, run, which, name) {
    const { color, follow, tooltip, legend } = Remat.chart, n = graph.op_cost_ns.length;
    const what = which === "R" ? "R: what each stage computes" : "S: what is kept when each stage begins";
    const again = run.rows.again.reduce((a, b) => a + b, 0);
    const canvas = el("canvas", { class: "matrix", role: "application", tabindex: "0", "data-matrix": which,
      "aria-label": `${what}. ${n} ops across, stages down, ${again} recomputations. ` +
        "Arrow keys go from one recomputation to the next.",
    });
    const holder = el("div", { class: "panel" }, canvas), said = el("p", { class: "sr", "aria-live": "polite" });
    const figure = el("figure", {}, el("figcaption", {}, what), holder, said,
      legend(which === "R"
          ? [{ text: "first computation", color: "var(--plan)" }, { text: "recomputation", color: "var(--again)" },
              { text: "ops of later stages", color: "var(--never)" },
              { text: "backward pass begins", color: "var(--ink)", kind: "dash" },
            ].filter((i) => i.kind !== "dash" || graph.backward_from >= 0)
          : [{ text: "kept since its first computation", color: "var(--plan)" },
              { text: "kept after a recomputation", color: "var(--again)" }]));
    const tip = tooltip(holder);
    let side = 0;
    function draw() {
      const dpr = window.devicePixelRatio || 1, c = canvas.getContext("2d");
      side = Math.max(160, holder.clientWidth - MARGIN.left - MARGIN.right);
      canvas.width = (side + MARGIN.left + MARGIN.right) * dpr;
      canvas.height = (side + MARGIN.top + MARGIN.bottom) * dpr;
      c.scale(dpr, dpr);
      const finish = frame(c, side, n, graph.backward_from);
      (which === "R" ? drawR : drawS)(c, side / n, graph, run);
      finish();
    }
    const place = (op, stage) => [MARGIN.left + (op + 0.5) * (side / n), MARGIN.top + (stage + 0.5) * (side / n)];
    canvas.addEventListener("mousemove", (e) => {
      const op = (e.offsetX - MARGIN.left) / (side / n) - 0.5, stage = (e.offsetY - MARGIN.top) / (side / n) - 0.5;
      const found = op < -1 || op > n || stage < -1 || stage > n ? undefined
          : nearest(graph, run, which, op, stage, Math.max(0.5, (4 * n) / side));
      if (found === undefined) tip.hide();
      else tip.show(e.offsetX, e.offsetY, ...words(graph, run, which, found, name));
    });
    canvas.addEventListener("mouseleave", tip.hide);
    canvas.addEventListener("blur", tip.hide);
    const stops = which === "R" ? Array.from(run.rows.again.keys()).filter((i) => run.rows.again[i])
        : run.intervals.filter((i) => run.rows.again[i[1]] && stages(run, i)[1] >= stages(run, i)[0]);
    let stop = -1;
    canvas.addEventListener("keydown", (e) => {
      const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[e.key];
      if (!step || !stops.length || e.ctrlKey || e.altKey || e.metaKey) return;
      e.preventDefault();
      stop = (stop + step + stops.length) % stops.length;
      const found = stops[stop], spot = which === "R" ? place(run.rows.ops[found], run.rows.stage[found])
            : place(graph.value_op[found[0]], stages(run, found)[0]);
      tip.show(...spot, ...words(graph, run, which, found, name));
      said.textContent = [...tip.node.children].map((x) => x.textContent).join(", ");
    });
    requestAnimationFrame(() => {
      draw();
      follow(holder, draw);
    });
    return figure;
  }

  Remat.matrix = {
    pair: (graph, run, name) => el("div", { class: "two" }, one(graph, run, "R", name), one(graph, run, "S", name)) };
})(window.Remat);
