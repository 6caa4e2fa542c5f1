// Shared by the views of rollouts: lanes, rewards and small elements.
(() => {
  "use strict";
  const { h, format, color } = window.agentloop;

  // A lane is a phase of a rollout: [name, label, tooltip].
  const LANES = [
    ["wait", "Waiting", "waiting for capacity on a server; from disk, the time until the first token"],
    ["prefill", "Prefill", "time until the first token on a server: queueing and prefill"],
    ["decode", "Decode", "generating tokens"],
    ["tool", "Tool", "waiting for tool calls after the turn's last token"],
    ["client", "Waiting for client", "a session has answered, and goes on when its client asks again"],
    ["siblings", "Waiting for group", "waiting until all rollouts of its group have ended"],
    ["reward", "Scoring", "the answer is being checked"],
  ];
  // Lanes differ in height as well as in color: [top, height] as fractions of the bar's height.
  const SHAPES = {
    wait: [0.42, 0.16],
    prefill: [0.25, 0.5],
    decode: [0, 1],
    tool: [0.12, 0.76],
    client: [0.46, 0.08],
    siblings: [0.46, 0.08],
    reward: [0.25, 0.5],
  };
  const LONG = 6000; // characters of an output that are shown initially
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

  /** A number with at most `digits` significant digits and a typographic minus. */
  function number(x, digits = 3) {
    return format.isNumber(x) ? String(Number(x.toPrecision(digits))).replace("-", "−") : "–";
  }

  const signed = (x, digits = 2) =>
    format.isNumber(x) ? (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits) : "–";

  /** The identifier of a stop reason, a status or a reason for dropping, as words. */
  const words = (name) => String(name ?? "").replaceAll("_", " ");

  /** A state, or the stop reason of a rollout that has ended, as words. */
  const stateText = (state) => (state === "live" ? "in flight" : words(state));

  const BROKEN = new Set(["infrastructure", "straggler", "environment"]);

  /** "live", "done", or "failed", which means that it ended for reasons other than the model. */
  function stateOf(row) {
    if (row.state === "live") return "live";
    return row.state === "abandoned" || BROKEN.has(row.stop ?? row.stop_reason) ? "failed" : "done";
  }

  /** "correct", "incorrect", or "none" if it has no reward (yet). */
  function rewardOf(row) {
    if (!format.isNumber(row.reward)) return "none";
    return row.reward > 0 ? "correct" : "incorrect";
  }

  /** A reward with a symbol, so that it does not rely on color alone, or the kind of reason why there is none. */
  function rewardText(row) {
    const kind = rewardOf(row);
    if (kind === "none") return row.no_reward ? `– ${words(row.no_reward)}` : "–";
    return `${kind === "correct" ? "✓" : "✗"} ${number(row.reward, 2)}`;
  }

  const rewardMark = (row) => h("span", { class: `v-reward ${rewardOf(row)}` }, rewardText(row));

  // --- lanes ------------------------------------------------------------------------------------

  /** Returns [lane, from, to] for each lane of a row, in ms since the start of the run. */
  function spans(row, now) {
    const end = row.end ?? now;
    return (row.lanes ?? []).map(([lane, from], i, lanes) => [lane, from, lanes[i + 1]?.[1] ?? end]);
  }

  function lanesText(row, now) {
    const total = {};
    for (const [lane, from, to] of spans(row, now)) total[lane] = (total[lane] ?? 0) + to - from;
    const used = LANES.filter(([lane]) => total[lane] > 0);
    return used.map(([lane, name]) => `${name.toLowerCase()} ${format.ms(total[lane])}`).join(", ") || "not started";
  }

  function legend() {
    const items = LANES.map(([lane, name, meaning]) =>
      h("li", { title: meaning }, h("span", { class: `v-lane ${lane}`, "aria-hidden": "true" }), name),
    );
    return h("ul", { class: "v-legend", "aria-label": "Phases of a rollout" }, items);
  }

  const laneLabel = (lane) => (LANES.find(([name]) => name === lane)?.[1] ?? lane).toLowerCase();

  /** An image of lanes that fills the width of its container: `pieces` of [lane, from, to] within 0..total. */
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

  /** The theme's colors by name, for a canvas. */
  function colors() {
    const names = ["fg", "muted", "line", "panel", "accent", "good", "bad", "warn"];
    names.push(...LANES.map(([lane]) => `lane-${lane}`));
    return Object.fromEntries(names.map((name) => [name, color(`--${name}`) || "gray"]));
  }

  /** Resizes a canvas to a size in CSS pixels, at the screen's resolution. Returns its cleared context. */
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

  /** A labelled select element. `options`: [value, text]. */
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
    return h("label", { class: "v-field" }, h("span", null, "Search"), input);
  }

  function check(label, value, changed) {
    const box = h("input", { type: "checkbox", checked: value, onchange: () => changed(box.checked) });
    return h("label", { class: "v-check" }, box, label);
  }

  /** A button with a symbol; `label` describes its action. */
  function button(sign, label, clicked) {
    return h("button", { type: "button", class: "v-button", "aria-label": label, title: label, onclick: clicked }, sign);
  }

  /** Shows a text; a long one is abbreviated in the middle until the reader expands it. */
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
    no_reward: "no reward",
    group_rejected: "the whole group was rejected",
    negative: "incorrect, quota full",
    positive: "correct, quota full",
  };
  /** Why a rollout is not trained on. */
  const whyDropped = (reason) => WHY_DROPPED[reason] ?? words(reason);

  window.agentloop.parts = {
    LANES, SHAPES, svg, number, signed, words, whyDropped, stateOf, stateText, rewardOf, rewardText, rewardMark, spans, laneLabel, lanesText,
    legend, strip, colors, fit, choice, search, check, button, fillLong, LONG_PROMPT, fact, hash, link,
  };
})();
