"use strict";
// The way to each page: the address says which. What an earlier page still waits for is dropped.
(function (Remat) {
  const { el, ended, seconds, signed, percent } = Remat.words;
  const service = Remat.service, main = document.getElementById("main"), notice = document.getElementById("notice");
  let visit = 0; // grows with every change of page

  // An error that belongs to no field stays until it is closed, or until what failed works again.
  function tell(error, again) {
    if (!error) {
      notice.replaceChildren();
      return;
    }
    const text = error.message || String(error);
    notice.replaceChildren(el("p", {}, again ? `${text.replace(/\.$/, "")}. This page tries again.` : text),
      el("button", { class: "quiet", "aria-label": "Close this message", onclick: () => notice.replaceChildren() }, "×",
      ));
  }
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));

  // Asks until there is an answer; what passes by itself, such as a restart of the service, is told meanwhile.
  const patiently = (current) => async (ask) => {
    for (let failed = false; ; failed = true) {
      try {
        const found = await ask();
        if (failed && current()) tell(null);
        return found;
      } catch (error) {
        if (!error.passing || !current()) throw error;
        tell(error, true);
        await pause(5000);
        if (!current()) throw error;
      }
    }
  };
  const name = (text) => { document.title = text ? `${text} · remat` : "remat"; };

  // Everything about one solve; a graph's plan is replayed here, other plans by the service.
  Remat.whole = async (id) => {
    const [answer, problem, progress, name, { run, names }] = await Promise.all([service.solve(id), service.problem(id),
      service.progress(id), service.nameOf(id), service.attachments(id)]);
    const timeline = problem.graph ? null : await service.timeline(id);
    return { answer, name, problem, timeline, progress: progress.progress, names: service.names(id) || names?.names,
      where: names?.where, ran: run };
  };

  async function solvePage(box, current, { tell, patient }, id) {
    const live = el("div", { class: "live", "aria-live": "polite" }, "Loading…"), inside = el("div");
    const cancel = el("button", { hidden: true, onclick: () => service.cancel(id).catch(tell) },
      "Cancel and keep the best plan so far");
    box.append(el("p", {}, el("a", { href: "#/" }, "← All solves")), live, cancel, inside);
    const draw = (whole) => {
      inside.replaceChildren();
      name(Remat.plan.show(inside, { ...whole, redraw: draw }));
    };
    let shown = "";
    while (current()) {
      const answer = await patient(() => service.solve(id)),
        key = `${answer.status} ${answer.cost_ns} ${answer.bound_ns}`;
      if (!current()) return;
      cancel.hidden = ended(answer);
      if (key !== shown) {
        const whole = await patient(() => Remat.whole(id));
        if (!current()) return;
        shown = key;
        draw(whole);
      }
      live.textContent = ended(answer) ? ""
        : `${answer.status === "queued" ? "Waiting for a free solver" : "Solving"} for ${seconds(answer.seconds)}` +
          (answer.overhead === null ? ""
            : `: ${signed(answer.overhead)} time, at most ${percent(answer.gap)} from optimal`);
      if (ended(answer)) return;
      await pause(1000);
    }
  }

  function missing(box, what) {
    name("Not found");
    box.append(el("h1", {}, "Nothing here"), el("p", {}, what),
      el("p", {}, el("a", { href: "#/" }, "To the list of solves"), " or ", el("a", { href: "#/help" }, "to the help"),
        "."));
  }

  function signIn(error) {
    visit++;
    main.replaceChildren();
    tell(null);
    name("Sign in");
    Remat.account.page(main, error, () => {
      if (location.hash === "#/sign-in") location.hash = "#/";
      else turnTo();
    });
  }

  const PAGES = { "": ["Solves", Remat.list.page], solve: ["Solve", solvePage],
    sweep: ["Time against memory", Remat.sweep.page], "max-batch": ["Largest batch", Remat.batch.page],
    compare: ["Compare", (box, current, _, ...ids) => Remat.compare.page(box, current, ...ids)],
    operate: ["Operation", Remat.operate.page], help: ["Help", Remat.help.page] };

  // A part of the address; one that is not well encoded is taken as it stands, and names nothing.
  function decoded(part) {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  }

  async function turnTo() {
    const mine = ++visit, current = () => mine === visit, [path, query] = location.hash.replace(/^#\/?/, "").split("?"),
      [page, ...rest] = path.split("/").map(decoded);
    main.replaceChildren();
    tell(null);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.getAttribute("href").split("/")[1] === page) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (page === "solves") { // as the API's own address says it
      location.replace(rest.length ? `#/solve/${rest.join("/")}` : "#/");
      return;
    }
    if (page === "sign-in") {
      signIn(null);
      return;
    }
    if (!Object.hasOwn(PAGES, page)) {
      missing(main, `There is no page “${path}”.`);
      return;
    }
    const [title, show] = PAGES[page];
    name(title);
    try {
      await show(main, current, { tell, pause, patient: patiently(current) },
        ...(page ? rest : [Object.fromEntries(new URLSearchParams(query || ""))]));
    } catch (error) {
      if (!current()) return;
      if (error.status === 401 || error.status === 403) signIn(error);
      else if (error.status === 404 || error.status === 410 || error.status === 422) {
        main.replaceChildren();
        missing(main, error.status === 422 ? `“${rest.join("/")}” is no id.`
            : `${error.message[0].toUpperCase()}${error.message.slice(1)}.`);
      } else {
        main.append(el("p", { class: "error" }, error.message, " ", el("button", { onclick: turnTo }, "Try again")));
      }
    }
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  if (service.offline) {
    const draw = () => {
      main.replaceChildren();
      name(Remat.plan.show(main, service.offline));
    };
    draw();
    dark.addEventListener("change", () => { if (!window.matchMedia("print").matches) draw(); });
    return;
  }
  // the hash is the page's address
  document.querySelector(".skip").addEventListener("click", (e) => {
    e.preventDefault();
    main.focus();
  });
  window.addEventListener("hashchange", () => {
    turnTo();
    main.focus();
  });
  // pictures are drawn in the colors of their moment; what is typed elsewhere stays, and so does what is being printed
  dark.addEventListener("change", () => {
    if (main.querySelector("canvas") && !window.matchMedia("print").matches) turnTo();
  });
  Remat.account.show();
  turnTo();
})(window.Remat);
