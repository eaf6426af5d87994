"use strict";
// What all pictures share: colors, axes, a tooltip, and one axis of time that several panels show the same part of.
(function (Remat) {
  const { el, bytes } = Remat.words;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const GUTTER = { left: 98, right: 16 }; // panels of one axis start and end at the same pixels
  const BINARY = Array.from({ length: 50 }, (_, k) => 2 ** k); // ticks of bytes at powers of two

  // The part of the step that is shown, and the moment that is pointed at; every panel of it follows.
  function timeAxis(lo, hi) {
    const shown = [], pointed = [];
    const axis = { lo, hi, full: [lo, hi],
      set(a, b) {
        const least = (hi - lo) / 1e5, span = Math.min(hi - lo, Math.max(least, b - a)),
          from = Math.min(Math.max(lo, a), hi - span);
        axis.lo = from;
        axis.hi = from + span;
        shown.forEach((f) => f());
      },
      reset() { axis.set(lo, hi); },
      zoom(factor, at = (axis.lo + axis.hi) / 2) {
        axis.set(at - (at - axis.lo) * factor, at + (axis.hi - at) * factor);
      },
      onShow(f) { shown.push(f); },
      point(x, from) { pointed.forEach((f) => f(x, from)); },
      onPoint(f) { pointed.push(f); } };
    return axis;
  }

  function axes(xText, yText, xFormat, yFormat) {
    const incrs = (format) => (format === bytes ? { incrs: BINARY } : {});
    const common = { stroke: color("--ink"), font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif", labelSize: 20, grid: { stroke: color("--line"), width: 1 },
      ticks: { stroke: color("--line") } };
    return [
      { ...common, ...incrs(xFormat), label: xText, size: 34, space: 76, values: (_, ticks) => ticks.map(xFormat) },
      { ...common, ...incrs(yFormat), label: yText, size: GUTTER.left - 20, values: (_, ticks) => ticks.map(yFormat) }];
  }

  const width = (box) => Math.max(240, Math.floor(box.clientWidth));

  // Calls `act` when the box changes its width, for as long as it is on the page.
  function follow(box, act) {
    let last = width(box);
    const watch = new ResizeObserver(() => {
      if (!box.isConnected) {
        watch.disconnect();
        return;
      }
      if (width(box) !== last) {
        last = width(box);
        act(last);
      }
    });
    watch.observe(box);
  }

  const drawn = new Set(); // uPlot keeps every chart, with its canvas, until it is destroyed

  // A chart that follows the width of its box; legends are lists of our own, which say only what is drawn.
  function plot(box, options, data) {
    box.replaceChildren();
    for (const chart of drawn) {
      if (chart.root.isConnected) continue;
      chart.destroy();
      drawn.delete(chart);
    }
    const height = options.height || 300;
    const made = new uPlot(
      { width: width(box), height, legend: { show: false }, padding: [14, GUTTER.right, 0, 0], ...options }, data, box);
    drawn.add(made);
    follow(box, (wide) => made.setSize({ width: wide, height }));
    return made;
  }

  // items: [{text, color, kind: "line" | "dash" | "area" | "dot"}]
  function legend(items) {
    return el("ul", { class: "legend" },
      items.map((i) =>
        el("li", {},
          el("span", { class: `key ${i.kind || "area"}`, vars: { "--key": i.color }, "aria-hidden": "true" }), i.text)),
    );
  }

  // A card that floats next to what is pointed at, and flips before it would leave its box.
  function tooltip(box) {
    const tip = el("div", { class: "tip", hidden: true });
    box.append(tip);
    return { node: tip, hide: () => { tip.hidden = true; },
      show(x, y, ...content) {
        tip.replaceChildren(...content);
        tip.hidden = false;
        const right = x + 16 + tip.offsetWidth <= box.clientWidth;
        tip.style.left = `${right ? x + 16 : Math.max(0, x - 16 - tip.offsetWidth)}px`;
        tip.style.top = `${Math.max(0, y)}px`;
      } };
  }

  // The picture as it is seen, on paper, with a title and the legend.
  function png(chart, title, items) {
    const from = chart.ctx.canvas, unit = window.devicePixelRatio || 1, canvas = document.createElement("canvas"),
      c = canvas.getContext("2d");
    const line = 22 * unit, head = 14 * unit + line * (1 + items.length);
    canvas.width = from.width;
    canvas.height = from.height + head;
    c.fillStyle = color("--paper");
    c.fillRect(0, 0, canvas.width, canvas.height);
    c.font = `600 ${15 * unit}px system-ui, sans-serif`;
    c.fillStyle = color("--ink");
    c.fillText(title, 12 * unit, line);
    c.font = `${12 * unit}px system-ui, sans-serif`;
    items.forEach((item, i) => {
      const y = line * (i + 2);
      c.fillStyle = item.color;
      c.fillRect(12 * unit, y - 8 * unit, 14 * unit, 6 * unit);
      c.fillStyle = color("--ink");
      c.fillText(item.text, 34 * unit, y);
    });
    c.drawImage(from, 0, head);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  Remat.chart = { color, GUTTER, timeAxis, axes, plot, follow, width, legend, tooltip, png };
})(window.Remat);
