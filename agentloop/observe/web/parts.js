// What the views of rollouts have in common: lanes, rewards, small elements.
(() => {
  "use strict";
  const { h, format, color } = window.agentloop;

  const LANES = [
    ["wait", "Waiting", "for KV space on a server; in a run from disk, until the first token"],
    ["prefill", "Prefill", "on a server until the first token: queue and prefill"],
    ["decode", "Decode", "sampling"],
    ["tool", "Tool", "calls that run after the turn's last token"],
    ["siblings", "Waiting for group", "until all rollouts of its group have ended"],
    ["reward", "Reward", "its answer is checked"],
  ];
  // Lanes differ in height as well as in colour: [top, height] as shares of the bar's height.
  const SHAPES = {
    wait: [0.42, 0.16],
    prefill: [0.25, 0.5],
    decode: [0, 1],
    tool: [0.12, 0.76],
    siblings: [0.46, 0.08],
    reward: [0.25, 0.5],
  };
  const LONG = 6000; // characters of an output that are shown at first
  const LONG_PROMPT = 2500;
  const SVG = "http://www.w3.org/2000/svg";

  function svg(tag, attributes, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  // --- numbers and words ------------------------------------------------------------------------

  /** At most so many digits, with a minus that is one. */
  function number(x, digits = 3) {
    return format.isNumber(x) ? String(Number(x.toPrecision(digits))).replace("-", "−") : "–";
  }

  const signed = (x, digits = 2) =>
    format.isNumber(x) ? (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits) : "–";

  /** A stop reason, a status or a reason for dropping, as words. */
  const words = (name) => String(name ?? "").replaceAll("_", " ");

  const BROKEN = new Set(["infrastructure", "straggler", "environment"]);

  /** live, done, or failed: ended by something that says nothing about the model. */
  function stateOf(row) {
    if (row.state === "live") return "live";
    return row.state === "abandoned" || BROKEN.has(row.stop ?? row.stop_reason) ? "failed" : "done";
  }

  /** right, wrong, or none: without a reward (yet). */
  function rewardOf(row) {
    if (!format.isNumber(row.reward)) return "none";
    return row.reward > 0 ? "right" : "wrong";
  }

  /** A reward with a sign for the eye: never by colour alone. */
  function rewardText(row) {
    const kind = rewardOf(row);
    return kind === "none" ? "–" : `${kind === "right" ? "✓" : "✗"} ${number(row.reward, 2)}`;
  }

  const rewardMark = (row) => h("span", { class: `v-reward ${rewardOf(row)}` }, rewardText(row));

  // --- lanes ------------------------------------------------------------------------------------

  /** [lane, from, to] of a row, in ms since the run's start. */
  function spans(row, now) {
    const end = row.end ?? now;
    return (row.lanes ?? []).map(([lane, from], i, lanes) => [lane, from, lanes[i + 1]?.[1] ?? end]);
  }

  function lanesText(row, now) {
    const total = {};
    for (const [lane, from, to] of spans(row, now)) total[lane] = (total[lane] ?? 0) + to - from;
    const said = LANES.filter(([lane]) => total[lane] > 0);
    return said.map(([lane, name]) => `${name.toLowerCase()} ${format.ms(total[lane])}`).join(", ") || "nothing yet";
  }

  function legend() {
    const items = LANES.map(([lane, name, meaning]) =>
      h("li", { title: meaning }, h("span", { class: `v-lane ${lane}`, "aria-hidden": "true" }), name),
    );
    return h("ul", { class: "v-legend", "aria-label": "Lanes" }, items);
  }

  /** Lanes as an image: `pieces` of [lane, from, to] within 0..total, as wide as its place. */
  function strip(pieces, total, label) {
    const image = svg("svg", { class: "v-strip", viewBox: "0 0 1000 16", preserveAspectRatio: "none" });
    image.setAttribute("role", "img");
    image.setAttribute("aria-label", label);
    const scale = total > 0 ? 1000 / total : 0;
    for (const [lane, from, to] of pieces) {
      const [top, height] = SHAPES[lane] ?? SHAPES.decode;
      const [x, width] = [from * scale, Math.max((to - from) * scale, 1.5)];
      image.append(svg("rect", { class: `v-fill ${lane}`, x, width, y: 16 * top, height: 16 * height }));
    }
    return image;
  }

  // --- canvas -----------------------------------------------------------------------------------

  /** The theme's colours by name, for a canvas. */
  function colours() {
    const names = ["fg", "muted", "line", "panel", "accent", "good", "bad", "warn"];
    names.push(...LANES.map(([lane]) => `lane-${lane}`));
    return Object.fromEntries(names.map((name) => [name, color(`--${name}`) || "gray"]));
  }

  /** A canvas of so many CSS pixels, sharp on this screen. Gives its context, cleared. */
  function fit(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [width, height].map((length) => Math.max(1, Math.round(length * ratio)));
    if (canvas.width !== w || canvas.height !== h) {
      [canvas.width, canvas.height] = [w, h];
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  // --- small elements ---------------------------------------------------------------------------

  /** A labelled choice. `options`: [value, text]. */
  function choice(label, options, value, changed) {
    const select = h("select", { onchange: () => changed(select.value) });
    for (const [name, text] of options) select.append(h("option", { value: name, selected: name === value }, text));
    return h("label", { class: "v-field" }, h("span", null, label), select);
  }

  function search(placeholder, value, changed) {
    const input = h("input", {
      type: "search", value, placeholder, autocomplete: "off", spellcheck: "false",
      oninput: () => changed(input.value.trim().toLowerCase()),
    });
    return h("label", { class: "v-field" }, h("span", null, "Find"), input);
  }

  function check(label, value, changed) {
    const box = h("input", { type: "checkbox", checked: value, onchange: () => changed(box.checked) });
    return h("label", { class: "v-check" }, box, label);
  }

  /** A button whose text is a sign: `label` says what it does. */
  function button(sign, label, clicked) {
    return h("button", { type: "button", class: "v-button", "aria-label": label, title: label, onclick: clicked }, sign);
  }

  /** A long text in two steps: its two ends at first, all of it when asked for. */
  function fillLong(node, text, long = LONG) {
    if (text.length <= long) {
      node.textContent = text;
      return;
    }
    const half = long / 2;
    const more = h("button", { type: "button", class: "v-button" }, `Show all ${format.whole(text.length)} characters`);
    more.addEventListener("click", () => (node.textContent = text));
    node.replaceChildren(text.slice(0, half), h("div", null, more), text.slice(-half));
  }

  const fact = (term, what) => h("div", { class: "v-fact" }, h("dt", null, term), h("dd", null, what));

  const hash = (kind, id) => `#/${kind}/${encodeURIComponent(id)}`;
  const link = (kind, id) => h("a", { href: hash(kind, id) }, id);

  const WHY_DROPPED = {
    infrastructure: "no reward: infrastructure failure",
    group_rejected: "the whole group is rejected",
    negative: "wrong, over the quota",
    positive: "right, over the quota",
  };
  /** Why a rollout is not learned from, in the same words in every view. */
  const whyDropped = (reason) => WHY_DROPPED[reason] ?? words(reason);

  window.agentloop.parts = {
    LANES, SHAPES, svg, number, signed, words, whyDropped, stateOf, rewardOf, rewardText, rewardMark, spans, lanesText,
    legend, strip, colours, fit, choice, search, check, button, fillLong, LONG_PROMPT, fact, hash, link,
  };
})();
