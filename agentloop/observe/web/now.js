// The overview: progress, the bottleneck, key figures, what the run is, wrong answers, waits, and a log of events.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, panel, sparkline, format, isEvaluation } = window.agentloop;
  const { isNumber, short, whole, percent, span, bytes } = format;

  const SHOWN_WAITS = 8;
  const MAX_WAITS = 50; // that the server sends
  const SHOWN_WRONG = 8;
  const MAX_WRONG = 50; // of an evaluation

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
      label: "in flight",
      href: "#/rollouts",
      value: ({ now }) => now.in_flight,
      text: whole,
      note: ({ now }) => isNumber(now.rollouts_done) && `${whole(now.rollouts_done)} done`,
    },
    { name: "num_waiting", label: "waiting", value: ({ now }) => now.num_waiting, text: whole, note: () => "for KV capacity" },
    {
      name: "groups_open",
      label: "groups in flight",
      href: "#/groups",
      value: ({ now, about, groups }) => (about.kind === "serve" && !groups.size ? null : now.groups_open),
      text: whole,
      note: ({ now }) => isNumber(now.slots_used) && isNumber(now.slots) && `${now.slots_used} of ${now.slots} to train on`,
    },
    {
      name: "queue_groups",
      label: "groups queued",
      value: ({ now }) => now.queue_groups,
      text: whole,
      note: ({ now }) => (now.queue_bytes ? bytes(now.queue_bytes) : "for the learner"),
    },
    {
      name: "staleness",
      label: "staleness",
      value: ({ now }) => now.staleness,
      text: short,
      note: ({ now }) => isNumber(now.max_staleness) && `at most ${now.max_staleness}`,
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
      label: "sandbox busy",
      href: "#/sandbox",
      value: ({ sandbox }) => sandbox?.busy,
      text: whole,
      note: ({ sandbox }) => `of ${whole(sandbox.slots)} slots${sandbox.waiting ? `, ${whole(sandbox.waiting)} queued` : ""}`,
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

  // What the run has learned, or why it cannot learn: before everything about speed.
  const mountLearning = (store) => {
    const node = h("p", { class: "learning" });
    const update = () => {
      const { text = "", is_stuck: isStuck } = store.now.learning ?? {};
      setText(node, text && `${format.capitalized(text)}.`);
      setAttr(node, "data-kind", isStuck && "bad");
      node.hidden = !text;
    };
    return { node, update };
  };

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
      sentence.hidden = Boolean(store.now.learning?.is_stuck); // faster rollouts would not help
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
      setText(stage, format.capitalized(now.ended?.state ?? now.stage ?? ""));
      setText(
        facts,
        [
          hasSteps && `${now.unit ?? "step"} ${whole(step)} of ${whole(numSteps)}`,
          now.policy_version && `policy version ${now.policy_version}`,
          !now.ended && isNumber(now.left_s) && `about ${span(now.left_s)} left`,
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
      node.hidden = !stage.textContent && !facts.textContent && !waits && stall.hidden;
    };
    return { node, update };
  };

  // Those that wait for the same are one row.
  const mountWaits = (store) => {
    const columns = [{ text: "Rollout or component" }, { text: "Waiting for" }, { text: "Longest", class: "num" }];
    const { table: node, body } = table("Waits, longest first", columns, "waits");
    const note = h("p", { class: "muted" });
    const make = () => h("tr", {}, h("td", {}, h("a", { class: "mono id" }), h("span", {})), h("td", {}), h("td", { class: "num" }));
    const update = () => {
      const kinds = new Map();
      for (const wait of store.waits) {
        const kind = kinds.get(wait.what);
        if (kind) kind.others++;
        else kinds.set(wait.what, { ...wait, others: 0 });
      }
      const shown = [...kinds.values()];
      keyed(body, shown.slice(0, SHOWN_WAITS), ({ what }) => what, make, (row, { who, what, waited_s: waited, others }) => {
        const [link, rest] = row.firstChild.children;
        const isRollout = store.rollouts.has(who);
        setAttr(link, "href", isRollout && `#/rollout/${encodeURIComponent(who)}`);
        setText(link, isRollout ? who : "");
        setText(rest, `${isRollout ? "" : who}${others ? ` and ${format.plural(others, "other")}` : ""}`);
        setText(row.children[1], what);
        setText(row.lastChild, span(waited));
      });
      node.hidden = !shown.length;
      setText(note, !shown.length ? "Nothing is waiting." : store.waits.length >= MAX_WAITS ? `Of the ${MAX_WAITS} that have waited longest.` : "");
    };
    return { node: panel("Waits", node, note), update };
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
    ["tool_errors_in_correct", "tool errors in correct rollouts", percent],
    ["length_mean", "tokens per rollout", short],
    ["learner/loss", "loss", short],
    ["learner/entropy", "entropy, nats per token", short],
    ["step_s", "step time", span],
    ["rollout_tokens_per_s", "tokens/s while rolling out", short],
    ["staleness_max", "largest staleness, versions", whole],
  ];
  const valuesOf = (store) => {
    if (isEvaluation(store.about)) return []; // they are beside what the run is
    if (store.now.values && !store.now.ended) return Object.entries(store.now.values);
    const step = store.steps.at(-1)?.step;
    const last = Object.assign({}, ...store.steps.filter((row) => row.step === step));
    return VALUES.filter(([key]) => store.steps.some((row) => isNumber(row[key]))).map(([key, label, text]) => [label, text(last[key], last)]);
  };

  const mountValues = (store) => {
    const list = h("dl", { class: "values" });
    const node = panel("Last step", list);
    const make = ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}));
    const update = () => {
      const values = valuesOf(store);
      keyed(list, values, ([name]) => name, make, (row, [, value]) => setText(row.lastChild, String(value)));
      node.hidden = !values.length;
    };
    return { node, update };
  };

  // How long a run took in all, up to now or to its last rollout; a process that was killed has not noted its end.
  const tookOf = ({ about, rollouts, t }) => {
    const { commands = [], t0, live } = about;
    let last = 0;
    if (live === false) for (const { end } of rollouts.values()) last = Math.max(last, end ?? 0);
    if (!commands.length) return last ? `${span(last / 1000)} from its first to its last rollout` : "–";
    const seconds = commands.map(({ unix_s: from, ended_unix_s: to }, i) => {
      const isLast = i === commands.length - 1;
      return (to ?? (isLast ? (live ? t : t0 + last / 1000) : from)) - from;
    });
    return span(seconds.reduce((sum, one) => sum + Math.max(one, 0), 0));
  };

  // The held-out reward from the first evaluation to the last; how the run was made, and its settings.
  const mountRun = (store) => {
    const list = h("dl", { class: "values wide" });
    const spark = sparkline();
    const chart = h("a", { class: "run-chart", href: "#/curves", "aria-label": "Curves of the held-out reward and of all other metrics" }, spark.node);
    const text = h("pre", { class: "settings", tabindex: "0", role: "group", "aria-label": "config.toml" });
    const fold = h("details", {}, h("summary", {}, "Settings (config.toml)"), text);
    const node = panel("This run", list, chart, fold);
    const make = ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}));
    const update = () => {
      const { about, steps } = store;
      const { commands = [], settings } = about;
      const heldOut = steps.filter((row) => isNumber(row["held_out/reward"]));
      const [first, last] = [heldOut[0], heldOut.at(-1)];
      const rewards = heldOut.map((row) => row["held_out/reward"]);
      const came = commands.map(({ command }) => command).join("\n");
      const { version, commit, unix_s: started } = commands.at(-1) ?? {};
      const facts = [
        ["held-out reward", last && `${rewards.length > 1 ? `${rewards[0].toFixed(3)} at step ${first.step} → ` : ""}${rewards.at(-1).toFixed(3)} at step ${last.step}`],
        ["its 95% interval now", last && heldOutInterval(rewards.at(-1), last)],
        [about.live === false || store.now.ended ? "took" : "running for", (commands.length || about.live === false) && tookOf(store)],
        ["started", isNumber(commands[0]?.unix_s) && `${new Date(1000 * commands[0].unix_s).toLocaleString("en-GB")}${commands.length > 1 ? `, resumed ${new Date(1000 * started).toLocaleString("en-GB")}` : ""}`],
        ["command", came],
        ["agentloop", version && `${version}${commit ? `; working directory at commit ${commit}` : ""}`],
      ].filter(([, value]) => value);
      if (isEvaluation(about)) facts.unshift(...Object.entries(store.now.values ?? {}));
      keyed(list, facts, ([name]) => name, make, (row, [, value]) => setText(row.lastChild, String(value)));
      spark.draw(heldOut.map((row) => [row.step, row["held_out/reward"]]));
      chart.hidden = rewards.length < 2;
      setText(text, settings ?? "");
      fold.hidden = !settings;
      node.hidden = !facts.length && !settings;
    };
    return { node, update };
  };

  // What is still answered wrongly: held-out tasks of the last evaluation, else the groups that are shown.
  const wrongGroups = (store) => {
    const evaluated = (group) => Number(/^(\d+)-held-out-/.exec(group.id)?.[1] ?? -1);
    const groups = [...store.groups.values()];
    const running = new Set(groups.filter((group) => group.state === "live").map(evaluated));
    const last = Math.max(-1, ...groups.map(evaluated).filter((step) => !running.has(step)));
    const shown = groups.filter((group) => group.wrong && (last < 0 || evaluated(group) === last));
    return { shown: shown.sort((a, b) => (a.mean_reward ?? 1) - (b.mean_reward ?? 1) || b.start - a.start), last };
  };

  const mountWrong = (store) => {
    const columns = [{ text: "Task" }, { text: "Answered" }, { text: "Expected" }, { text: "Mean reward", class: "num" }];
    const { table: node, body } = table("Tasks that were answered wrongly, lowest reward first", columns, "wrong");
    const none = h("p", { class: "muted" }, "No wrong answers.");
    const more = h("p", {}, h("a", { href: "#/groups?sort=worst" }, "All groups, lowest reward first"));
    const box = panel("Wrong answers", node, none, more);
    const title = box.querySelector("h2");
    const make = ({ wrong, question, task }) =>
      h("tr", {}, h("td", {}, h("a", { href: `#/rollout/${encodeURIComponent(wrong.id)}` }, question || String(task))), h("td", {}), h("td", {}), h("td", { class: "num" }));
    const update = () => {
      const { shown, last } = wrongGroups(store);
      setText(title, last < 0 ? "Wrong answers" : `Wrong answers on held-out tasks, step ${last}`);
      keyed(body, shown.slice(0, isEvaluation(store.about) ? MAX_WRONG : SHOWN_WRONG), ({ id }) => id, make, (row, { wrong, answer, mean_reward: mean }) => {
        [wrong.answer || "no answer", answer ?? "–", isNumber(mean) ? mean.toFixed(2) : "–"].forEach((text, i) => setText(row.children[i + 1], text));
      });
      box.hidden = !store.groups.size;
      node.hidden = more.hidden = !shown.length;
      none.hidden = shown.length > 0;
    };
    return { node: box, update };
  };

  // How often each value occurs among the rollouts that are shown: as many bars as `NUM_BINS`, from the least to the greatest.
  const NUM_BINS = 20;
  const SPREADS = [["reward", "Rewards", ""], ["tokens", "Lengths", " tokens"]];
  const mountSpread = (store) => {
    const parts = SPREADS.map(([key, title, unit]) => {
      const bars = h("path", {});
      const image = h("svg", { class: "histogram", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img" }, bars);
      const [low, middle, high] = [0, 1, 2].map(() => h("span", {}));
      const node = h("div", {}, h("h3", {}, title), image, h("p", { class: "muted range" }, low, middle, high));
      const update = (rows) => {
        const values = rows.map((row) => row[key]).filter(isNumber).sort((a, b) => a - b);
        node.hidden = values.length < 2;
        if (node.hidden) return;
        const [least, most] = [values[0], values.at(-1)];
        const counts = new Array(NUM_BINS).fill(0);
        for (const value of values) counts[Math.min(Math.floor(((value - least) / (most - least || 1)) * NUM_BINS), NUM_BINS - 1)]++;
        const [width, tallest] = [100 / NUM_BINS, Math.max(...counts)];
        bars.setAttribute("d", counts.map((count, i) => (count ? `M${i * width + 0.3} 30v${-Math.max((30 * count) / tallest, 0.5)}h${width - 0.6}V30Z` : "")).join(""));
        [short(least), `mean ${short(values.reduce((sum, value) => sum + value, 0) / values.length)}, median ${short(values[values.length >> 1])}`, `${short(most)}${unit}`].forEach((text, i) => setText([low, middle, high][i], text));
        setAttr(image, "aria-label", `${title} of ${format.plural(values.length, "rollout")}, from ${low.textContent} to ${high.textContent}: ${middle.textContent}`);
      };
      return { node, update };
    });
    const caption = h("p", { class: "muted" });
    const box = panel("Rewards and lengths", h("div", { class: "spread" }, parts.map(({ node }) => node)), caption);
    const update = () => {
      const ended = [...store.rollouts.values()].filter((row) => row.state === "done");
      for (const part of parts) part.update(ended);
      box.hidden = parts.every(({ node }) => node.hidden);
      setText(caption, `Of ${format.plural(ended.length, "rollout")}, the newest that have ended.`);
    };
    return { node: box, update };
  };

  const mountLog = (store) => {
    const list = h("ol", { class: "log" });
    const none = h("p", { class: "muted" }, "No events yet.");
    const make = ({ t, text, kind, href }) =>
      h(
        "li",
        { "data-kind": kind },
        h("time", {}, t === null ? "" : format.clock(t)),
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
      const learning = mountLearning(store);
      const [spent, latency, run] = [mountSpent(store), mountLatency(store), mountRun(store)];
      const [values, wrong, log, spread] = [mountValues(store), mountWrong(store), mountLog(store), mountSpread(store)];
      const empty = h("p", { class: "muted" }, "Waiting for data…");
      const columns = h("div", { class: "columns" }, h("div", {}, run.node, waits.node, values.node, latency.node), h("div", {}, wrong.node, spread.node, log.node));
      root.append(progress.node, learning.node, spent.node, tiles.node, empty, columns);
      const update = (changed) => {
        const has = (...keys) => keys.some((key) => changed.has(key));
        empty.hidden = columns.hidden = store.ready;
        columns.hidden = !store.ready;
        if (has("now")) [learning, spent, progress, latency].forEach((part) => part.update());
        if (has("now", "steps")) values.update();
        if (has("about", "steps", "now", "rollouts")) run.update();
        if (has("groups", "about")) wrong.update();
        if (has("rollouts")) spread.update();
        if (has("now", "servers", "sandbox", "history")) tiles.update(changed);
        if (has("waits")) waits.update();
        waits.node.hidden = Boolean(store.now.ended) || (!store.waits.length && store.about.live === false);
        if (has("log")) log.update();
      };
      update(new Set(["about", "groups", "rollouts", "now", "servers", "sandbox", "history", "waits", "log"]));
      return store.on(update);
    },
  });
})();
