// The overview: progress, key figures, waits, metrics of the last step, and a log of events.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, panel, sparkline, format, isEvaluation } = window.agentloop;
  const { isNumber, short, whole, percent, span, bytes } = format;

  const SHOWN_WAITS = 8;

  // What the time of rollouts is spent on: the parts of bottleneck.py, with their names and colors.
  const PARTS = [
    ["kv", "waiting for KV space", "wait"],
    ["prefill", "prefill", "prefill"],
    ["decode", "decode", "decode"],
    ["queue", "waiting for a sandbox slot", "queue"],
    ["tool", "tools", "tool"],
    ["reward", "scoring", "reward"],
    ["sync", "weight sync", "sync"],
    ["learner", "learner", "learner"],
    ["other", "no rollout in flight", "other"],
  ];

  // Tiles with a number and a sparkline of its `history`. A tile whose `value` is null is not shown.
  const TILES = [
    { name: "tokens_per_s", label: "tokens/s", value: ({ now }) => now.tokens_per_s, text: short },
    { name: "calls_per_s", label: "tool calls/s", value: ({ now }) => now.calls_per_s, text: short },
    {
      name: "in_flight",
      label: "rollouts in flight",
      href: "#/rollouts",
      value: ({ now }) => now.in_flight,
      text: whole,
      note: ({ now }) => isNumber(now.rollouts_done) && `${whole(now.rollouts_done)} done`,
    },
    { name: "num_waiting", label: "waiting for capacity", value: ({ now }) => now.num_waiting, text: whole, note: () => "requests" },
    {
      name: "groups_open",
      label: "groups in flight",
      href: "#/groups",
      value: ({ now, about, groups }) => (about.kind === "serve" && !groups.size ? null : now.groups_open),
      text: whole,
      note: ({ now }) => isNumber(now.slots_used) && isNumber(now.slots) && `${now.slots_used} of ${now.slots} slots`,
    },
    {
      name: "queue_groups",
      label: "groups in the queue",
      value: ({ now }) => now.queue_groups,
      text: whole,
      note: ({ now }) => `for the learner${isNumber(now.queue_bytes) ? `, ${bytes(now.queue_bytes)}` : ""}`,
    },
    {
      name: "staleness",
      label: "staleness",
      value: ({ now }) => now.staleness,
      text: short,
      note: ({ now }) => isNumber(now.max_staleness) && `versions, at most ${now.max_staleness}`,
    },
    {
      name: "healthy",
      label: "servers healthy",
      href: "#/servers",
      value: ({ servers }) => (servers.length ? servers.filter((one) => one.healthy).length : null),
      text: whole,
      note: ({ servers }) => `of ${whole(servers.length)}`,
      kind: ({ servers }) => servers.some((one) => !one.healthy) && "bad",
    },
    {
      name: "kv",
      label: "KV cache in use",
      href: "#/servers",
      value: (store) => store.kvShare(),
      text: percent,
      note: () => "held or reserved",
    },
    {
      name: "sandbox_busy",
      label: "sandbox slots busy",
      href: "#/sandbox",
      value: ({ sandbox }) => sandbox?.busy,
      text: whole,
      note: ({ sandbox }) => `of ${whole(sandbox.slots)}${sandbox.waiting ? `, ${whole(sandbox.waiting)} queued` : ""}`,
    },
    {
      name: "refusals",
      label: "requests refused",
      value: ({ now }) => now.refusals,
      text: whole,
      kind: ({ now }) => now.refusals > 0 && "warn",
    },
    {
      name: "loop_lag_ms",
      label: "event loop lag",
      value: ({ now }) => now.loop_lag_ms,
      text: format.ms,
      note: ({ now }) => now.loop_lag_ms > 50 && "slow",
      kind: ({ now }) => now.loop_lag_ms > 50 && "warn",
    },
  ];

  // One sentence that names the bottleneck, and a bar of all parts.
  const mountSpent = (store) => {
    const sentence = h("p", { class: "bottleneck" });
    const bar = h("div", { class: "spent-bar", "aria-hidden": "true" });
    const legend = h("ul", { class: "spent-legend" });
    const caption = h("p", { class: "muted" });
    const node = h("section", { class: "spent", "aria-label": "Where the time goes" }, sentence, bar, legend, caption);
    const piece = ([, , color]) => h("span", { class: `spent-${color}` });
    const item = ([, name, color]) => h("li", {}, h("span", { class: `swatch spent-${color}`, "aria-hidden": "true" }), `${name} `, h("b", {}));
    const update = () => {
      const { window_s: total = 0, seconds = {}, sentence: text = "" } = store.now.spent ?? {};
      const share = ([name]) => (seconds[name] ?? 0) / total;
      const shown = total > 0 ? PARTS.filter((part) => share(part) >= 0.005) : [];
      node.hidden = !shown.some(([name]) => name !== "other");
      if (node.hidden) return;
      setText(sentence, text ? `${text}.` : "Nothing holds the rollouts up.");
      // Percent, because a bar whose pieces grow by less than 1 in all is not filled.
      keyed(bar, shown, ([name]) => name, piece, (one, part) => (one.style.flexGrow = 100 * share(part)));
      keyed(legend, shown, ([name]) => name, item, (one, part) => setText(one.lastChild, percent(share(part))));
      const isOver = Boolean(store.now.ended);
      const when = store.about.live === false ? "of the run" : isOver ? "at the end" : "of the last minute";
      setText(caption, `${span(total)} ${when}; rollouts that run at the same time share it.`);
    };
    return { node, update };
  };

  const makeTile = ({ label, href, name }) => {
    const number = h("span", { class: "number" });
    const note = h("span", { class: "note" });
    const spark = sparkline();
    const text = href ? h("a", { href }, label) : label;
    const node = h("li", { class: "tile", "data-name": name }, h("span", { class: "label" }, text), number, note, spark.node);
    node.parts = { number, note, spark };
    return node;
  };

  const range = (points, text) => {
    const values = points.map(([, value]) => value);
    const duration = span(points[points.length - 1][0] - points[0][0]);
    return `${text(Math.min(...values))} to ${text(Math.max(...values))} over the last ${duration}`;
  };

  const mountTiles = (store) => {
    const list = h("ul", { class: "tiles", "aria-label": "Current metrics" });
    const update = (changed) => {
      const shown = TILES.filter((tile) => isNumber(tile.value(store)));
      keyed(list, shown, (tile) => tile.name, makeTile, (node, tile) => {
        setText(node.parts.number, tile.text(tile.value(store)));
        setText(node.parts.note, tile.note?.(store) || "");
        setAttr(node, "data-kind", tile.kind?.(store));
        if (changed.has("history") || !node.drawn) {
          node.drawn = true;
          const points = store.history.get(tile.name) ?? [];
          node.parts.spark.draw(points);
          setAttr(node, "title", points.length > 1 && range(points, tile.text));
        }
      });
      list.hidden = !shown.length || store.about.live === false; // from disk, the values are those of the last step
    };
    return { node: list, update };
  };

  // Stage, step, estimated time left, and a sentence about the current activity.
  const mountProgress = (store) => {
    const stage = h("span", { class: "stage" });
    const bar = h("progress", { "aria-label": "Steps of this stage" });
    const facts = h("span", { class: "facts" });
    const sentence = h("p", { class: "sentence" });
    const stall = h("p", { class: "bad stall" });
    const node = h("section", { class: "progress", "aria-label": "Progress" }, h("div", {}, stage, facts), bar, sentence, stall);
    const update = () => {
      const { now } = store;
      // Supervised fine-tuning and evaluations have their own count; the training loop has no step yet.
      const step = now.step ?? now.stage_step;
      const numSteps = now.num_steps ?? now.stage_num_steps;
      const hasSteps = isNumber(step) && isNumber(numSteps) && numSteps > 0;
      setText(stage, format.capitalized(now.stage ?? ""));
      setText(
        facts,
        [
          hasSteps && `${now.unit ?? "step"} ${whole(step)} of ${whole(numSteps)}`,
          now.policy_version && `policy version ${now.policy_version}`,
          !now.ended && isNumber(now.left_s) && `about ${span(now.left_s)} left`,
          now.ended?.state,
          !now.ended && now.paused && "paused",
          !now.ended && now.draining && "draining",
        ]
          .filter(Boolean)
          .join(" · "),
      );
      bar.hidden = !hasSteps;
      if (hasSteps) Object.assign(bar, { max: numSteps, value: step });
      const waits = now.ended ? "" : (now.waits ?? "");
      setText(sentence, format.capitalized(waits));
      sentence.hidden = !waits;
      stall.hidden = Boolean(now.ended) || !(now.no_progress_s >= 10);
      if (!stall.hidden) setText(stall, `No progress for ${span(now.no_progress_s)}.`);
      node.hidden = !now.stage && !facts.textContent && !waits && stall.hidden;
    };
    return { node, update };
  };

  const mountWaits = (store) => {
    const { table: node, body } = table(
      "Waits, longest first",
      [{ text: "Rollout or component" }, { text: "Waiting for" }, { text: "Duration", class: "num" }],
      "waits",
    );
    const none = h("p", { class: "muted" }, "Nothing is waiting.");
    let all = false;
    const more = h("button", { type: "button", class: "quiet", onclick: () => ((all = !all), update()) });
    const make = () => {
      const [who, what, duration] = [h("td", { role: "cell" }), h("td", { role: "cell" }), h("td", { role: "cell", class: "num" })];
      const row = h("tr", { role: "row" }, who, what, duration);
      row.parts = { who, what, duration };
      return row;
    };
    const update = () => {
      const shown = all ? store.waits : store.waits.slice(0, SHOWN_WAITS);
      keyed(body, shown, ({ who, what }) => `${who}\n${what}`, make, ({ parts }, { who, what, waited_s: waited }) => {
        if (parts.who.textContent !== who) {
          const isRollout = store.rollouts.has(who);
          const name = isRollout ? h("a", { href: `#/rollout/${encodeURIComponent(who)}`, class: "mono id", title: who }, who) : who;
          parts.who.replaceChildren(name);
        }
        setText(parts.what, what);
        setText(parts.duration, span(waited));
      });
      node.hidden = !store.waits.length;
      none.hidden = store.waits.length > 0;
      more.hidden = store.waits.length <= SHOWN_WAITS;
      setText(more, all ? "Show fewer" : `Show all ${store.waits.length}`);
    };
    return { node: panel("Waits", node, none, more), update };
  };

  // How long turns and calls take: the kinds of latency.py.
  const KINDS = [
    ["first_token", "time to first token", "from the start of a turn, waits included"],
    ["token", "time per output token", "of a turn, after its first token"],
    ["turn", "turn", "from its start to its last token"],
    ["call", "tool call", "the wait for a sandbox slot included"],
  ];
  const millis = (value) => (value < 1000 ? `${short(value)} ms` : format.ms(value));
  const mountLatency = (store) => {
    const columns = [{ text: "Duration" }, { text: "p50", class: "num" }, { text: "p95", class: "num" }, { text: "Number", class: "num" }];
    const { table: node, body } = table("Durations of turns and calls", columns, "latency");
    const caption = h("p", { class: "muted" });
    const box = panel("Latency", node, caption);
    const make = ([, name, about]) => h("tr", {}, h("th", { scope: "row", title: about }, name), [1, 2, 3].map(() => h("td", { class: "num" })));
    const update = () => {
      const { window_s: recent, max_kept: most, of = {} } = store.now.latency ?? {};
      const shown = KINDS.filter(([name]) => of[name]);
      keyed(body, shown, ([name]) => name, make, (row, [name]) => {
        const { p50, p95, num } = of[name];
        [millis(p50), millis(p95), whole(num)].forEach((text, i) => setText(row.children[i + 1], text));
      });
      const isFull = shown.some(([name]) => of[name].num === most);
      const when = store.now.ended ? "in the last minute of the run" : `in the last ${span(recent)}`;
      setText(caption, recent ? `Of what ended ${when}${isFull ? `, the newest ${whole(most)}` : ""}.` : "Of the whole run, as far as it is shown.");
      box.hidden = !shown.length;
    };
    return { node: box, update };
  };

  // Rewards from 0 to 1 vary at most as much as those that are 0 or 1, so this is at most too wide. Wilson's.
  const heldOutInterval = (mean, row) => {
    const num = row["held_out/num_rollouts"];
    if (!isNumber(mean) || !(num > 0) || mean < 0 || mean > 1) return "–";
    const [z2, middle] = [1.96 ** 2 / num, mean + 1.96 ** 2 / (2 * num)];
    const half = 1.96 * Math.sqrt((mean * (1 - mean)) / num + z2 / (4 * num));
    return `${short((middle - half) / (1 + z2))} to ${short((middle + half) / (1 + z2))}, ${format.plural(num, "rollout")}`;
  };

  // For a run from disk, metrics of the last step. An evaluation after the step has a row of its own.
  const VALUES = [
    ["reward", "reward", short],
    ["held_out/reward", "held-out reward", short],
    ["held_out/reward", "held-out reward, 95% interval", heldOutInterval],
    ["tool_errors_in_correct", "tool errors in correct rollouts", percent],
    ["length_mean", "tokens per rollout", short],
    ["learner/loss", "loss", short],
    ["learner/entropy", "entropy, nats per token", short],
    ["step_s", "step time", span],
    ["rollout_tokens_per_s", "tokens/s while rolling out", short],
    ["staleness_max", "largest staleness, versions", whole],
  ];
  const valuesOf = (store) => {
    if (store.now.values && (!store.now.ended || isEvaluation(store.about))) return Object.entries(store.now.values);
    const step = store.steps.at(-1)?.step;
    const last = Object.assign({}, ...store.steps.filter((row) => row.step === step));
    return VALUES.filter(([key]) => store.steps.some((row) => isNumber(row[key]))).map(([key, label, text]) => [label, text(last[key], last)]);
  };

  const mountValues = (store) => {
    const list = h("dl", { class: "values" });
    const node = panel("Last step", list);
    const title = node.querySelector("h2");
    const make = ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}));
    const update = () => {
      setText(title, isEvaluation(store.about) ? "Results" : "Last step");
      const values = valuesOf(store);
      keyed(list, values, ([name]) => name, make, (row, [, value]) => setText(row.lastChild, String(value)));
      node.hidden = !values.length;
    };
    return { node, update };
  };

  // How a run on disk was made: its settings, which are its config.toml.
  const mountSettings = (store) => {
    const text = h("pre", { class: "settings", tabindex: "0", role: "group", "aria-label": "config.toml" });
    const facts = h("p", { class: "muted" });
    const node = panel("Settings", facts, h("details", {}, h("summary", {}, "config.toml"), text));
    const update = () => {
      const { settings, version } = store.about;
      const steps = store.steps.filter((row) => isNumber(row.step_s));
      const took = steps.reduce((sum, row) => sum + row.step_s, 0);
      node.hidden = !settings;
      if (node.hidden) return;
      setText(text, settings);
      setText(facts, [took > 0 && `${format.plural(steps.length, "step")} in ${span(took)}, evaluations not counted`, version && `shown by ${version}`].filter(Boolean).join("; "));
    };
    return { node, update };
  };

  const mountLog = (store) => {
    const list = h("ol", { class: "log" });
    const none = h("p", { class: "muted" }, "No events yet.");
    const make = ({ t, text, kind, href }) =>
      h(
        "li",
        { "data-kind": kind },
        h("time", {}, t === null ? (store.about.live === false ? "" : "earlier") : format.clock(t)),
        href ? h("a", { href }, text) : h("span", {}, text),
      );
    const update = () => {
      setAttr(list, "data-timeless", store.log.length > 0 && store.about.live === false && store.log.every(({ t }) => t === null) && "yes");
      keyed(list, store.log, ({ id }) => id, make, () => {});
      none.hidden = store.log.length > 0;
    };
    const scroll = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Events, newest first" }, list);
    return { node: panel("Events", none, scroll), update };
  };

  view("now", {
    title: "Overview",
    mount(root, params, app) {
      const { store } = app;
      const [progress, tiles, waits] = [mountProgress(store), mountTiles(store), mountWaits(store)];
      const [spent, latency, settings] = [mountSpent(store), mountLatency(store), mountSettings(store)];
      const [values, log] = [mountValues(store), mountLog(store)];
      const empty = h("p", { class: "muted" }, "Waiting for data…");
      const columns = h("div", { class: "columns" }, h("div", {}, waits.node, values.node, latency.node), h("div", {}, log.node, settings.node));
      root.append(spent.node, progress.node, tiles.node, empty, columns);
      const update = (changed) => {
        const has = (...keys) => keys.some((key) => changed.has(key));
        empty.hidden = columns.hidden = store.ready;
        columns.hidden = !store.ready;
        if (has("now")) [spent, progress, latency].forEach((part) => part.update());
        if (has("now", "steps")) values.update();
        if (has("about", "steps")) settings.update();
        if (has("now", "servers", "sandbox", "history")) tiles.update(changed);
        if (has("waits")) waits.update();
        waits.node.hidden = Boolean(store.now.ended) || (!store.waits.length && store.about.live === false);
        if (has("log")) log.update();
      };
      update(new Set(["about", "now", "servers", "sandbox", "history", "waits", "log"]));
      return store.on(update);
    },
  });
})();
