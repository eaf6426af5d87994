"use strict";
// Memory over the step: the plan's curve over plain training's, what is resident, the peak, the boundary,
// recomputations.
(function (Remat) {
  const { el, bytes, time } = Remat.words;
  const { at } = Remat.replay;
  const MOST = 4000; // points drawn at once: every bucket keeps its highest one, and a zoom shows what was left out

  // Rows of the part that is shown, thinned; the curve begins with what runs at its left edge.
  function sample(run, lo, hi) {
    const from = at(run, lo), to = Math.min(run.count, at(run, hi) + 2),
      size = Math.max(1, Math.ceil((to - from) / MOST)), rows = [];
    for (let start = from; start < to; start += size) {
      let best = start;
      for (let i = start; i < Math.min(to, start + size); i++) if (run.rows.memory[i] > run.rows.memory[best]) best = i;
      rows.push(best);
    }
    return rows;
  }

  // The columns that uPlot draws: plan, stack from the top down, plain training, budget; all at the same moments.
  function columns(axis, runs, stack, budget) {
    const [run, before] = runs, rows = sample(run, axis.lo, axis.hi);
    const xs = [
      ...new Set([...rows.map((i) => run.rows.start[i]),
        ...(before ? sample(before, axis.lo, axis.hi).map((i) => before.rows.start[i]) : []),
        ...runs.map((r) => r.time)]),
    ].sort((p, q) => p - q);
    const onto = (r, value, picked) => {
      let k = 0;
      return xs.map((x) => {
        while (k + 1 < picked.length && r.rows.start[picked[k + 1]] <= x) k++;
        return x > r.time || !picked.length ? null : value(picked[k]);
      });
    };
    const mine = onto(run, (i) => run.rows.memory[i], rows);
    const layers = stack
      ? stack.layers.map((_, j) => onto(run, (i) => stack.upTo(i, stack.layers.length - 1 - j), rows)) : [];
    const ghost = before ? [onto(before, (i) => before.rows.memory[i], sample(before, axis.lo, axis.hi))] : [];
    const host = run.hostPeak ? [onto(run, (i) => run.rows.host[i], rows)] : [];
    return [xs, ...layers, ...ghost, mine, ...host, xs.map(() => budget)];
  }

  function series(stack, before, host) {
    const { color } = Remat.chart, stepped = uPlot.paths.stepped({ align: 1 });
    const line = (label, stroke, more) => ({ label, stroke, width: 1.5, paths: stepped, points: { show: false },
      ...more });
    const layers = stack ? [...stack.layers]
          .reverse().map((layer) => line(layer.name, "transparent", { width: 0, fill: color(layer.color) }))
      : [];
    return [{ label: "time" }, ...layers,
      ...(before ? [line("without a plan", color("--ghost"), { dash: [4, 3], width: 1 })] : []),
      line("this plan", color("--plan"), stack ? {} : { fill: color("--plan-fill") }),
      ...(host ? [line("on the host", color("--layer-4"))] : []),
      line("budget", color("--budget"), { paths: undefined, dash: [8, 4] })];
  }

  // What is drawn over the curve: where the backward pass begins, stretches that run again, the peak, the budget.
  function marks(u, axis, run, boundary, spans, budget) {
    const { color } = Remat.chart, c = u.ctx, dpr = window.devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    const text = (words, x, y, align, paint) => {
      c.font = `${12 * dpr}px system-ui, sans-serif`;
      c.textAlign = align;
      c.textBaseline = "bottom";
      c.lineWidth = 3 * dpr;
      c.strokeStyle = color("--paper");
      c.strokeText(words, x, y);
      c.fillStyle = color(paint);
      c.fillText(words, x, y);
    };
    c.save();
    c.beginPath();
    c.rect(left, 0, width, top + height);
    c.clip();
    c.fillStyle = color("--again-fill");
    for (const [from, to] of spans) {
      if (to < axis.lo || from > axis.hi) continue;
      const a = u.valToPos(from, "x", true);
      c.fillRect(a, top, Math.max(dpr, u.valToPos(to, "x", true) - a), height);
    }
    if (boundary !== null && boundary >= axis.lo && boundary <= axis.hi) {
      const x = u.valToPos(boundary, "x", true);
      c.setLineDash([2 * dpr, 3 * dpr]);
      c.strokeStyle = color("--ink");
      c.lineWidth = dpr;
      c.beginPath();
      c.moveTo(x, top);
      c.lineTo(x, top + height);
      c.stroke();
      c.setLineDash([]);
      if (x - left > 60 * dpr) text("forward ", x, top + height - 4 * dpr, "right", "--ink");
      if (left + width - x > 66 * dpr) text(" backward", x, top + height - 4 * dpr, "left", "--ink");
    }
    text(`budget ${bytes(budget)}`, left + 6 * dpr, u.valToPos(budget, "y", true) - 3 * dpr, "left", "--budget");
    const peak = run.rows.memory.indexOf(run.peak), x = run.rows.start[peak];
    if (peak >= 0 && x >= axis.lo && x <= axis.hi) {
      const px = u.valToPos(x, "x", true), py = u.valToPos(run.peak, "y", true);
      c.fillStyle = color("--plan");
      c.strokeStyle = color("--paper");
      c.lineWidth = 2 * dpr;
      c.beginPath();
      c.arc(px, py, 5 * dpr, 0, 7);
      c.fill();
      c.stroke();
      const label = `peak ${bytes(run.peak)}`, flip = px + 12 * dpr + c.measureText(label).width > left + width;
      text(label, px + (flip ? -9 : 9) * dpr, py + 18 * dpr, flip ? "right" : "left", "--ink");
    }
    c.restore();
  }

  // Arrow keys step from op to op, + and − zoom, 0 and Escape show all; what is pointed at is read out.
  function keys(holder, axis, run, point) {
    let row = -1;
    holder.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return; // the browser's own: its zoom, the way back
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (step) {
        row = Math.min(run.count - 1, Math.max(0, row + step));
        point(row);
      } else if (event.key === "Home" || event.key === "End") {
        row = event.key === "Home" ? 0 : run.count - 1;
        point(row);
      } else if (event.key === "+" || event.key === "=") axis.zoom(0.5, row < 0 ? undefined : run.rows.start[row]);
      else if (event.key === "-") axis.zoom(2);
      else if (event.key === "0" || event.key === "Escape") axis.reset();
      else return;
      event.preventDefault();
    });
    return (i) => { row = i; };
  }

  function zoomButtons(axis) {
    const button = (label, text, act) => el("button", { "aria-label": label, title: label, onclick: act }, text);
    return el("div", { class: "zoom", role: "group", "aria-label": "Zoom" },
      button("Zoom in", "+", () => axis.zoom(0.5)), button("Zoom out", "−", () => axis.zoom(2)),
      button("Show the whole step", "Reset", () => axis.reset()));
  }

  // options: {run, before, budget, boundary, spans, stack, label, tell(row) → nodes}; the panel joins `axis`.
  function show(box, axis, { run, before, budget, boundary, spans, stack, label, tell, highest = 0, height = 320 }) {
    const { plot, axes, tooltip } = Remat.chart;
    const holder = el("div", { class: "panel", tabindex: "0", role: "application", "aria-label": label }),
      inside = el("div"), said = el("p", { class: "sr", "aria-live": "polite" });
    box.append(zoomButtons(axis), holder, said);
    holder.append(inside);
    const runs = before ? [run, before] : [run], data = () => columns(axis, runs, stack, budget);
    const top = Math.max(budget, run.peak, before ? before.peak : 0, run.hostPeak || 0, highest) * 1.08;
    let remember = () => {};
    const tip = tooltip(holder),
      tipAt = (i) => {
        remember(i);
        tip.show(u.valToPos(run.rows.start[i], "x") + u.bbox.left / (window.devicePixelRatio || 1), 18, ...tell(i));
      };
    const u = plot(inside, { height,
      scales: { x: { time: false, range: () => [axis.lo, axis.hi] }, y: { range: () => [0, top] } },
      axes: axes("time in the step", "memory", time, bytes), series: series(stack, before, run.hostPeak),
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: false },
        bind: {
          dblclick: () => () => {
            axis.reset();
            return null;
          } } },
      hooks: { draw: [(chart) => marks(chart, axis, run, boundary, spans, budget)],
        setCursor: [
          (chart) => {
            if (chart.cursor.left < 0) {
              tip.hide();
              axis.point(undefined, holder);
              return;
            }
            const x = chart.posToVal(chart.cursor.left, "x");
            if (x >= 0 && x <= run.time) tipAt(at(run, x));
            else tip.hide();
            axis.point(x, holder);
          }],
        setSelect: [
          (chart) => {
            if (chart.select.width < 3) return;
            const [a, b] = [chart.select.left, chart.select.left + chart.select.width].map((px) =>
              chart.posToVal(px, "x"));
            chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            axis.set(a, b);
          }] } },
      data());
    axis.onShow(() => u.setData(data()));
    axis.onPoint((x, from) => {
      if (from !== holder) u.setCursor({ left: x === undefined ? -10 : u.valToPos(x, "x"), top: 10 }, false);
    });
    remember = keys(holder, axis, run, (i) => {
      const x = run.rows.start[i], pad = (axis.hi - axis.lo) / 2;
      if (x < axis.lo || x > axis.hi) axis.set(x - pad, x + pad);
      u.setCursor({ left: u.valToPos(x, "x"), top: 10 }, false);
      axis.point(x, holder);
      tipAt(i);
      said.textContent = [...tip.node.children].slice(0, 3).map((n) => n.textContent).join(", ");
    });
    holder.addEventListener("blur", () => tip.hide());
    holder.addEventListener("wheel",
      (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        axis.zoom(event.deltaY > 0 ? 1.25 : 0.8,
          u.posToVal(event.clientX - holder.getBoundingClientRect().left - Remat.chart.GUTTER.left, "x"));
      }, { passive: false });
    return u;
  }

  Remat.memory = { show };
})(window.Remat);
