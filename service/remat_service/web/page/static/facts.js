"use strict";
// An answer in words: the headline, what matters most in four cards, and the rest on demand.
(function (Remat) {
  const { el, bytes, time, percent, signed, seconds, state, ended, headline, SOURCES, LIMITS } = Remat.words;
  const title = (answer, name) => name || `Solve ${String(answer.id || "").slice(0, 13)}`;

  // Whether what is proved rests on a certificate, or on a solver's word.
  function trust(answer) {
    const by = answer.claimed_by,
      claimed = by && (answer.status === "infeasible" || answer.claimed_bound_ns <= answer.bound_ns);
    return claimed ? `claimed by ${by}` : "certified";
  }

  function quality(answer) {
    const within = (answer.restricted_to || []).join(", "),
      among = within ? ` among plans restricted to ${within}` : "";
    if (answer.status === "optimal") return [`optimal${among}`, trust(answer)];
    if (answer.gap === null || answer.gap === undefined) return ["no bound known", ""];
    return [`within ${percent(answer.gap)} of optimal${among}`, trust(answer)];
  }

  const card = (name, value, more) =>
    el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null));

  // What is saved of the memory of plain training.
  const saved = (used, plain) =>
    card("Memory saved", bytes(plain - used), `${percent(1 - used / plain)} of the ${bytes(plain)} without a plan`);

  function cards(answer, plain, total) {
    if (!answer.peak_bytes) {
      return el("dl", { class: "facts" },
        card("Budget", bytes(answer.budget_bytes),
          plain ? `${percent(answer.budget_bytes / plain)} of the plain peak, ${bytes(plain)}` : null),
        answer.least_budget_bound_bytes
          ? card("Least budget proved necessary", bytes(answer.least_budget_bound_bytes),
              answer.status === "infeasible" ? trust(answer) : "certified")
          : null,
        answer.least_budget_bytes ? card("Budget known to be enough", bytes(answer.least_budget_bytes)) : null);
    }
    const [good, sure] = quality(answer);
    return el("dl", { class: "facts" },
      card("Memory", bytes(answer.peak_bytes),
        `${percent(answer.peak_bytes / answer.budget_bytes)} of the budget, ${bytes(answer.budget_bytes)}`),
      plain ? saved(answer.peak_bytes, plain) : null,
      card("Time of a step", signed(answer.overhead),
        total ? `${time(answer.cost_ns)} instead of ${time(total)}` : time(answer.cost_ns)),
      card("Quality", good, sure), card("Solving", seconds(answer.seconds), SOURCES[answer.cache] || null));
  }

  // A step by this plan in a training job, as the job measured it, next to what was predicted.
  function ran(run, plain, fixed) {
    if (!run) return null;
    const against = (measured, predicted, show) => measured === null ? "not measured" : predicted
          ? [show(measured), `${signed(measured / predicted - 1)} of the predicted ${show(predicted)}`]
          : [show(measured), null];
    const [peak, more] = against(run.measured_bytes, run.predicted_bytes, bytes),
      step = run.measured_ns === null ? null : against(run.measured_ns, run.predicted_ns, time);
    return el("section", { "aria-label": "As measured" }, el("h2", {}, "As measured in training"),
      el("p", { class: "soft" }, "Reported by the job ", Remat.words.ago(run.created_at),
        run.device ? `, on ${run.device}` : "", ". The peak is above what is there throughout."),
      el("dl", { class: "facts" }, card("Peak of a step", peak, more),
        plain && fixed !== null ? saved(fixed + run.measured_bytes, plain) : null,
        step ? card("Time of a step", step[0], step[1]) : null));
  }

  // Everything else, for those who look for it.
  function rest(answer, plain) {
    const rows = [["method", answer.method], ["without a plan", plain ? bytes(plain) : null],
      ["lower bound of the time", answer.bound_ns === null ? null : `${time(answer.bound_ns)}, ${trust(answer)}`],
      ["the bound holds for", (answer.restricted_to || []).join(", ") || "all plans"],
      ["persistent chain optimum", baseline(answer)],
      ["claimed bound", answer.claimed_by ? `${time(answer.claimed_bound_ns)}, by ${answer.claimed_by}` : null],
      ["least budget proved necessary",
        answer.peak_bytes && answer.least_budget_bound_bytes ? bytes(answer.least_budget_bound_bytes) : null],
      ["stopped by", ended(answer) ? LIMITS[answer.limit] || "nothing: it ran to its end" : null], ["id", answer.id],
      ["digest of the problem", answer.digest]];
    return el("details", {}, el("summary", {}, "All figures"),
      el("dl", { class: "rest" }, rows.filter(([, v]) => v !== null && v !== undefined && v !== "")
          .map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))));
  }

  // of a graph whose network is linear: what the best persistent chain schedule adds, next to what this plan does
  function baseline(answer) {
    if (answer.chain_cost_ns === null || answer.chain_cost_ns === undefined || answer.overhead === null) return null;
    const chain = (answer.chain_cost_ns * (1 + answer.overhead)) / answer.cost_ns - 1;
    return `${signed(chain)} time, this plan ${signed(answer.overhead)}`;
  }

  // `fixed` is there throughout a step: part of the peak without a plan, and not of what a job measures.
  function show(box, answer, { plain, fixed, total, name, run }) {
    const said = headline(answer, plain) ||
      (answer.status === "infeasible" ? `No plan fits ${bytes(answer.budget_bytes)}` : ended(answer)
          ? "No plan was found" : "Looking for a plan");
    box.append(el("p", { class: "eyebrow" }, title(answer, name), " ", state(answer)),
      el("h1", { class: "headline" }, ended(answer) || !answer.peak_bytes ? said : `${said}, so far`),
      cards(answer, plain, total), answer.message ? el("p", { class: "soft" }, answer.message) : null,
      rest(answer, plain), ...[ran(run, plain, fixed)].filter(Boolean));
    return name ? `${name}: ${said}` : said;
  }

  Remat.facts = { show, title, quality };
})(window.Remat);
