"use strict";
// Forms whose errors stand next to the field that they are about, and stay until it is changed.
(function (Remat) {
  const { el, wrong } = Remat.words;
  let count = 0;

  // spec: {name, label, value, hint, type, options, accept, optional, pointers}.
  // pointers: where in a request's body it goes.
  function field(spec) {
    const id = `field-${++count}`;
    const input = spec.options
      ? el("select", { id, name: spec.name },
          spec.options.map(([value, text, title]) =>
            el("option", { value, title, selected: value === spec.value }, text)))
      : el("input", { id, name: spec.name, type: spec.type || "text", value: spec.value, accept: spec.accept,
          autocomplete: spec.autocomplete || "off", spellcheck: "false" });
    const error = el("p", { class: "error", id: `${id}-error`, role: "alert" });
    const node = el("div", { class: "field" }, el("label", { for: id }, spec.label), input,
      spec.hint ? el("p", { class: "hint", id: `${id}-hint` }, spec.hint) : null, error);
    const described = spec.hint ? `${id}-hint` : "";
    function fail(text) {
      error.textContent = text;
      if (text) {
        input.setAttribute("aria-invalid", "true");
        input.setAttribute("aria-describedby", `${id}-error ${described}`.trim());
      } else {
        input.removeAttribute("aria-invalid");
        if (described) input.setAttribute("aria-describedby", described);
        else input.removeAttribute("aria-describedby");
      }
    }
    fail("");
    input.addEventListener("input", () => fail(""));
    return { node, input, fail, spec };
  }

  // A form of fields; `submit(values)` may throw an error with `field`, or one of the service with a pointer.
  function form(specs, { button, label }, submit) {
    const fields = specs.map(field), whole = el("p", { class: "error", role: "alert" });
    const send = el("button", { type: "submit", class: "primary" }, button);
    function show(error) {
      const at = fields.find((f) => f.spec.name === error.field) ||
        fields.find((f) => (f.spec.pointers || []).some((p) => (error.pointer || "").startsWith(p)));
      if (!at) {
        whole.textContent = error.message;
        return;
      }
      at.fail(error.message);
      at.input.focus();
    }
    const node = el("form", { "aria-label": label, novalidate: true,
      onsubmit: async (event) => {
        event.preventDefault();
        whole.textContent = "";
        fields.forEach((f) => f.fail(""));
        send.disabled = true;
        try {
          await submit(
            Object.fromEntries(
              fields.map((f) => [f.spec.name, f.spec.type === "file" ? f.input.files[0] : f.input.value.trim()])));
        } catch (error) {
          show(error);
        } finally {
          send.disabled = false;
        }
      } }, el("div", { class: "fields" }, fields.map((f) => f.node), el("div", { class: "field" }, send)), whole);
    return { node, show, input: (name) => fields.find((f) => f.spec.name === name).input,
      row: (name) => fields.find((f) => f.spec.name === name).node };
  }

  // A part that stands open where there is room for it, and is opened by a tap on a phone.
  function folded(title, part) {
    return el("details", { class: "folded", open: !window.matchMedia("(max-width: 760px)").matches },
      el("summary", {}, title), part);
  }

  // A number within bounds, or the error at its field.
  function number(values, name, what, { least = 0, most = Infinity } = {}) {
    const found = Number(values[name]);
    if (values[name] === "" || !Number.isFinite(found) || found < least || found > most)
      throw wrong(name,
        `${what} must be a number ${most < Infinity ? `from ${least} to ${most}` : `of at least ${least}`}, ` +
          `not “${values[name]}”.`);
    return found;
  }

  Remat.fields = { form, folded, number };
})(window.Remat);
