"use strict";
// What the pictures show and what the words mean, for those who meet them for the first time.
(function (Remat) {
  const { el } = Remat.words;
  const PARTS = [
    ["The headline",
      "“1.28 GiB → 655 MiB (−49 %) for +9.7 % time”: the peak of memory without and with the plan, and how " +
        "much longer a step takes because some ops run again."],
    ["The words",
      "Budget: the most memory that a plan may use. Plain: training without a plan, each op once and each " +
        "value freed after its last use. Optimal: proved that no plan in this budget is faster. Within 0.08 % " +
        "of optimal: no plan can save more than that. Certified: the proof was checked by a program that " +
        "shares no code with the solver. Claimed: a solver says so, without a proof that can be checked."],
    ["Memory over the step",
      "The line is the memory while each op runs; the gray one is plain training. Colors show what the " +
        "memory consists of. Amber stretches run again. The dotted line is where the backward pass begins. " +
        "Drag to zoom; the arrow keys step from op to op."],
    ["Names and modules",
      "The service stores names of your ops only where its operator lets your tenant. Drop the graph file that " +
        "remat capture wrote, and this browser colors memory by module and shows names everywhere."],
    ["R and S", "The matrices of the Checkmate paper. A row is a stage, which ends with the first computation of one " +
        "op. R: what the stage computes; amber is computed again. S: what is kept in memory when the stage " +
        "begins."],
    ["Time against memory",
      "Each point is the best plan for one budget. Below the dashed line there is no plan, whatever the " +
        "method. In the shaded part no plan fits at all."],
    ["From a script", "Everything here is asked of the service's own API, which is described at "]];

  function page(main) {
    main.append(el("h1", {}, "Help"));
    for (const [title, text] of PARTS)
      main.append(el("h2", {}, title),
        el("p", {}, text, title === "From a script" ? el("a", { href: "openapi.json" }, "openapi.json") : null));
  }

  Remat.help = { page };
})(window.Remat);
