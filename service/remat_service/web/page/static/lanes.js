"use strict";
// What runs when, as bars in lanes (a Gantt chart) under the memory curve; any panel of one time axis is made this way.
(function (Remat) {
  const { el, time } = Remat.words;
  const HEIGHT = 18;

  // lanes: [{name, color (a CSS variable), spans: [[from, to]]}], spans in order and in ns.
  // `tell(lane, span)` makes the tooltip's words.
  function show(box, axis, lanes, label, tell) {
    const { GUTTER, color, follow, width, tooltip } = Remat.chart;
    const canvas = el("canvas", { class: "lanes", role: "img",
      "aria-label": `${label}: ${lanes.map((l) => `${l.name}, ${l.spans.length} stretches`).join("; ")}.` });
    const holder = el("div", { class: "panel" }, canvas);
    box.append(holder);
    const tip = tooltip(holder), inner = () => width(holder) - GUTTER.left - GUTTER.right;
    const toPixel = (x) => GUTTER.left + ((x - axis.lo) / (axis.hi - axis.lo)) * inner();
    const toTime = (px) => axis.lo + ((px - GUTTER.left) / inner()) * (axis.hi - axis.lo);
    function draw(pointed) {
      const dpr = window.devicePixelRatio || 1, wide = width(holder), c = canvas.getContext("2d");
      canvas.width = wide * dpr;
      canvas.height = HEIGHT * lanes.length * dpr;
      canvas.style.height = `${HEIGHT * lanes.length}px`;
      c.scale(dpr, dpr);
      c.font = "12px system-ui, sans-serif";
      c.textBaseline = "middle";
      c.textAlign = "right";
      lanes.forEach((lane, i) => {
        const y = i * HEIGHT;
        c.fillStyle = color("--ink");
        c.fillText(lane.name, GUTTER.left - 8, y + HEIGHT / 2);
        c.fillStyle = color("--never");
        c.fillRect(GUTTER.left, y + 3, inner(), HEIGHT - 6);
        c.fillStyle = color(lane.color);
        for (const [from, to] of lane.spans) {
          if (to < axis.lo || from > axis.hi) continue;
          const a = Math.max(GUTTER.left, toPixel(from)), b = Math.min(GUTTER.left + inner(), toPixel(to));
          c.fillRect(a, y + 3, Math.max(1, b - a), HEIGHT - 6); // what is shorter than a pixel is seen all the same
        }
      });
      if (pointed !== undefined && pointed >= axis.lo && pointed <= axis.hi) {
        c.fillStyle = color("--ink");
        c.fillRect(toPixel(pointed), 0, 1, HEIGHT * lanes.length);
      }
    }
    holder.addEventListener("mousemove", (event) => {
      const at = event.clientX - holder.getBoundingClientRect().left, x = toTime(at), slack = toTime(at + 2) - x;
      const lane = lanes[Math.min(lanes.length - 1, Math.max(0, Math.floor(event.offsetY / HEIGHT)))];
      axis.point(x, draw);
      const span = lane && lane.spans.find(([from, to]) => from - slack <= x && x <= to + slack);
      if (!span) {
        tip.hide();
        return;
      }
      tip.show(at, HEIGHT * lanes.length, el("strong", {}, lane.name),
        el("div", {}, `${time(span[0])} to ${time(span[1])}, ${time(span[1] - span[0])}`), tell ? tell(lane, span) : "",
      );
    });
    holder.addEventListener("mouseleave", () => {
      tip.hide();
      axis.point(undefined, draw);
      draw();
    });
    axis.onShow(draw);
    axis.onPoint((x) => draw(x));
    follow(holder, () => draw());
    draw();
    return holder;
  }

  // Stretches of consecutive rows of a run for which `which(row)` holds.
  function stretches(run, which) {
    const found = [];
    for (let i = 0; i < run.count; i++) {
      if (!which(i)) continue;
      const end = Remat.replay.end(run, i);
      if (i && which(i - 1) && found[found.length - 1][1] === run.rows.start[i]) found[found.length - 1][1] = end;
      else found.push([run.rows.start[i], end]);
    }
    return found;
  }

  Remat.lanes = { show, stretches };
})(window.Remat);
