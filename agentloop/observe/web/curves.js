// Charts of the run's metrics over its steps, optionally with those of other runs.
//
//     rows of metrics.jsonl ──by step──> a chart for each metric that has data
//
// With several runs, colors distinguish the runs and strokes the metrics. All charts share a cursor, which the
// mouse moves, or the slider for keyboards and touch screens.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, format, color, download } = window.agentloop;
  const { isNumber, short } = format;
  const percent = (share) => `${Number((100 * share).toPrecision(2))}%`;
  const span = (seconds) => (seconds ? format.span(seconds) : "0");

  const MAX_COMPARED = 5; // in addition to the run itself
  const MAX_TABLE = 500; // rows
  const FEW = 40; // with at most this many points, each is marked
  const COLORS = ["lane-decode", "lane-tool", "lane-reward", "lane-prefill", "bad", "lane-wait"];
  const STROKES = {
    thin: { width: 1.25 },
    thick: { width: 2, points: true },
    dashed: { width: 1.25, dash: [5, 4] },
  };
  const SMOOTH = [
    ["1", "none"],
    ["5", "5 steps"],
    ["20", "20 steps"],
  ];
  // What the steps are laid out by: the step itself, or the sum of a metric up to and including it.
  const AXES = {
    step: { label: "Step", text: String, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000] },
    time: { label: "Time in steps", sum: "step_s", text: (seconds) => span(seconds) },
    tokens: { label: "Sampled tokens", sum: "num_sampled_tokens", text: (tokens) => short(tokens) },
  };
  const PHASES = [
    ["start", "supervised fine-tuning"],
    ["run", "rollouts"],
  ];

  // `series`: [key, label, stroke]. `text`: formats a value. `most`: upper bound of the metric.
  const both = (key) => [[key, "rollouts", "thin"], [`held_out/${key}`, "held out", "thick"]];
  const CHARTS = [
    {
      title: "Groups with a signal",
      note: "fraction whose rollouts differ in reward, which is what is learned from",
      series: [["groups_with_signal", "groups", "thin"]],
      most: 1,
      text: percent,
    },
    { title: "Reward", note: "mean of the rollouts", series: both("reward"), most: 1 },
    { title: "avg@k and pass@k", note: "over k rollouts per task", series: null, most: 1 },
    { title: "Parts of the reward", note: "as the environment names them, means of the rollouts", named: "part" },
    { title: "Recorded", note: "by the environment, means of the rollouts", named: "recorded" },
    {
      title: "Tool errors in correct rollouts",
      note: "fraction of calls that failed",
      series: both("tool_errors_in_correct"),
      most: 1,
      text: percent,
    },
    { title: "Tokens per rollout", note: "mean number of sampled tokens", series: both("length_mean") },
    { title: "Truncated", note: "fraction of rollouts ended by a budget", series: both("truncated"), most: 1, text: percent },
    { title: "Entropy", note: "nats per token", series: [["learner/entropy", "entropy", "thin"]] },
    {
      title: "Mismatch KL",
      note: "between servers and learner, nats per token",
      series: [["learner/mismatch_kl", "mismatch", "thin"]],
    },
    { title: "Loss", note: "mean over the step", series: [["learner/loss", "loss", "thin"]] },
    { title: "Learning rate", series: [["learner/lr", "learning rate", "thin"]] },
    { title: "Gradient norm", note: "before clipping", series: [["learner/grad_norm", "norm", "thin"]] },
    {
      title: "Staleness",
      note: "policy versions that the rollouts are behind",
      series: [["staleness_mean", "mean", "thin"], ["staleness_max", "maximum", "dashed"]],
    },
    {
      title: "Solve rate",
      note: "mean over the tasks tried so far",
      series: [["curriculum/solve_rate", "solve rate", "thin"]],
      most: 1,
      text: percent,
    },
    {
      title: "Curriculum tasks",
      series: [["curriculum/num_tasks", "tried", "thin"], ["curriculum/num_retired", "retired", "dashed"]],
    },
    {
      title: "Step time",
      note: "by activity",
      stack: [
        ["wait_s", "waiting for rollouts", "lane-wait"],
        ["learn_s", "training", "lane-decode"],
        ["sync_s", "weight sync", "lane-prefill"],
        ["rest_s", "other", "lane-tool"],
      ],
      text: span,
    },
    { title: "Other metrics", any: true },
  ];

  // --- rows ---------------------------------------------------------------------------------------

  const AT_K = /^(held_out\/)?(avg|pass)(?:@(\d+)|_at_k)?$/;

  // The steps of supervised fine-tuning are counted separately; their metrics have the prefix start/, except in `agentloop sft`.
  const START = "start/";
  const isOfStart = (row) => isNumber(row[`${START}step`]);
  const ofPhase = (rows, phase) => {
    if (phase !== "start") return rows;
    const plain = (row) => Object.fromEntries(Object.entries(row).map(([name, value]) => [name.slice(START.length), value]));
    return rows.some(isOfStart) ? rows.filter(isOfStart).map(plain) : rows.filter((row) => isNumber(row.epoch));
  };

  // Merges rows of the same step, such as those of training and of the evaluation after it.
  const bySteps = (rows) => {
    const steps = new Map();
    for (const row of rows) if (isNumber(row.step)) steps.set(row.step, { ...steps.get(row.step), ...row });
    for (const row of steps.values()) {
      const known = ["wait_s", "learn_s", "sync_s"].reduce((sum, name) => sum + (row[name] ?? 0), 0);
      if (known && isNumber(row.step_s) && row.step_s - known > 0.001) row.rest_s = row.step_s - known;
    }
    return new Map([...steps].sort(([a], [b]) => a - b));
  };

  // The rows by their place on an axis.
  const along = (rows, { sum }) => {
    if (!sum) return rows;
    const placed = new Map();
    let total = 0;
    for (const row of rows.values()) {
      total += row[sum] ?? 0;
      placed.set(total, { ...placed.get(total), ...row });
    }
    return placed;
  };

  const has = (run, key) => [...run.rows.values()].some((row) => isNumber(row[key]));

  const keysOf = (runs) => {
    const keys = new Set();
    for (const run of runs)
      for (const row of run.rows.values()) for (const [key, value] of Object.entries(row)) if (isNumber(value)) keys.add(key);
    for (const key of ["step", "unix_s"]) keys.delete(key);
    return keys;
  };

  // With one rollout per task, pass@k equals the reward, which has a chart of its own.
  const saysNew = (runs, key) => {
    const reward = key.startsWith("held_out/") ? "held_out/reward" : "reward";
    return runs.some((run) => [...run.rows.values()].some((row) => isNumber(row[key]) && row[key] !== row[reward]));
  };

  // How many rollouts a task has, where the name of the metric does not say it: as the settings do.
  const groupSize = (runs) => {
    const sizes = new Set(runs.map(({ origin }) => origin?.get("loop.group_size")));
    return sizes.size === 1 ? [...sizes][0] : undefined;
  };

  const atK = (runs, keys) => {
    const found = [...keys].filter((key) => AT_K.test(key) && saysNew(runs, key)).sort();
    return found.map((key) => {
      const [, heldOut, name, k] = AT_K.exec(key);
      const num = k ?? (heldOut ? 1 : groupSize(runs)) ?? "k"; // a held-out task has one rollout
      return [key, `${name}@${num}, ${heldOut ? "held out" : "rollouts"}`, heldOut ? "thick" : "thin"];
    });
  };

  // What environments name themselves: `part/found` of the only one, `env/guess/part/found` of several.
  const namedBy = (kind, keys) => {
    const pattern = new RegExp(`^(held_out/)?(?:env/([^/]+)/)?${kind}/(.+)$`);
    const found = [...keys].sort().map((key) => pattern.exec(key)).filter(Boolean);
    return found.map(([key, heldOut, environment, name]) => {
      const label = `${environment ? `${environment}: ` : ""}${name}${heldOut ? ", held out" : ""}`;
      return [key, label, heldOut ? "thick" : "thin"];
    });
  };

  // The values in a config.toml by their full names, and what started the run.
  const originOf = ({ settings, commands }) => {
    const { command, version, commit } = commands?.at(-1) ?? {};
    const values = new Map(Object.entries({ command, version, commit }).filter(([, value]) => value));
    let section = "";
    for (const line of (settings ?? "").split("\n")) {
      const at = line.indexOf(" = ");
      if (line.startsWith("[")) section = `${line.slice(1, line.lastIndexOf("]"))}.`;
      else if (at > 0) values.set(section + line.slice(0, at), line.slice(at + 3));
    }
    return values;
  };

  const smoothed = (values, window) => {
    if (window <= 1) return values;
    const last = [];
    return values.map((value) => {
      if (!isNumber(value)) return null;
      last.push(value);
      if (last.length > window) last.shift();
      return last.reduce((sum, one) => sum + one, 0) / last.length;
    });
  };

  // --- a chart ------------------------------------------------------------------------------------

  class Chart {
    constructor(spec, page) {
      [this.spec, this.page] = [spec, page];
      this.plot = h("div", { class: "cv-plot", role: "img" });
      this.legend = h("ul", { class: "cv-legend" });
      this.title = spec.title;
      this.name = h("span", {}, spec.title);
      const head = h("h2", {}, this.name);
      this.note = h("p", { class: "muted" }, spec.note ?? "");
      if (spec.any) {
        this.chosen = h("select", { "aria-label": "Metric", onchange: () => page.draw() });
        head.append(" ", this.chosen);
      }
      this.node = h(
        "section",
        { class: "panel cv-chart", "aria-label": spec.title },
        h("div", { class: "cv-head" }, head, this.note),
        this.plot,
        this.legend,
      );
      this.text = spec.text ?? short;
      this.shape = "";
    }

    // The lines to draw: [{label, run, key, color, stroke, fill}]
    lines(runs, keys) {
      const { spec } = this;
      if (spec.stack) {
        const parts = spec.stack.filter(([key]) => has(runs[0], key));
        const line = ([key, label, name]) => ({ key, label, run: runs[0], color: color(`--${name}`), fill: true, stroke: STROKES.thin });
        return parts.map(line).reverse();
      }
      let series = spec.series;
      if (spec.any) series = this.offer(keys);
      else if (spec.named) series = namedBy(spec.named, keys);
      else if (series === null) series = atK(runs, keys);
      return runs.flatMap((run) =>
        series
          .filter(([key]) => keys.has(key) && has(run, key))
          .map(([key, label, stroke], i) => ({
            ...{ key, label, run, stroke: STROKES[stroke] },
            color: color(`--${runs.length > 1 ? run.color : COLORS[i % COLORS.length]}`),
          })),
      );
    }

    offer(keys) {
      const isHeldOut = (key) => Number(key.startsWith("held_out/"));
      const left = [...keys].filter((key) => !this.page.shownElsewhere.has(key)).sort();
      left.sort((a, b) => isHeldOut(a) - isHeldOut(b)); // those of training first
      const before = this.chosen.value;
      if (left.join() !== this.offered) {
        this.offered = left.join();
        this.chosen.replaceChildren(...left.map((key) => h("option", { value: key }, key.replaceAll("_", " "))));
        this.chosen.value = left.includes(before) ? before : (left[0] ?? "");
      }
      return left.length ? [[this.chosen.value, this.chosen.value.replaceAll("_", " "), "thin"]] : [];
    }

    draw(runs, keys, steps) {
      const lines = this.lines(runs, keys);
      this.node.hidden = !lines.length;
      if (!lines.length) return this.destroy();
      [this.lineList, this.steps] = [lines, steps];
      if (this.spec.series === null) this.rename([...new Set(lines.map(({ label }) => `${label.split("@")[0]}@k`))].join(" and "));
      this.values = lines.map(({ run, key }) => steps.map((step) => run.rows.get(step)?.[key] ?? null));
      const { window } = this.page;
      let drawn = this.values.map((values, i) => (lines[i].stroke.points ? values : smoothed(values, window)));
      if (this.spec.stack) drawn = stacked(drawn);
      const data = [steps, ...drawn];
      const few = steps.length <= FEW;
      const isLog = this.page.isLog && !this.spec.stack && drawn.flat().every((value) => value === null || value > 0);
      const shape = JSON.stringify([lines.map(({ run, key, color }) => [run.name, key, color]), few, isLog]);
      if (shape !== this.shape || !this.u) {
        this.destroy();
        this.shape = shape;
        this.u = new uPlot(this.options(lines, few, isLog), data, this.plot);
      } else this.u.setData(data, !this.page.zoom);
      if (this.page.zoom) this.u.setScale("x", this.page.zoom);
      const areSeveral = runs.length > 1;
      if (this.spec.stack) setText(this.note, `${this.spec.note}${areSeveral ? `, in ${runs[0].name}` : ""}`);
      this.drawLegend(lines, areSeveral && !this.spec.stack);
      this.showValues();
      setAttr(this.plot, "aria-label", this.summary());
    }

    rename(title) {
      this.title = title;
      setText(this.name, title);
      setAttr(this.node, "aria-label", title);
    }

    // A row per metric, with a value for each run.
    drawLegend(lines, areSeveral) {
      const labels = new Map(lines.map((line) => [line.key, []]));
      for (const line of lines) labels.get(line.key).push(line);
      const row = ([, [{ label }]]) => h("li", {}, h("span", { class: "cv-name" }, label), h("span", { class: "cv-values" }));
      const value = (line) => {
        const node = h("span", {}, h("span", { class: "cv-key", "aria-hidden": "true" }), h("span", { class: "hidden" }), h("b", {}));
        const { style, classList } = node.firstChild;
        classList.toggle("fill", line.fill === true);
        style.background = line.stroke.dash ? `repeating-linear-gradient(90deg, ${line.color} 0 4px, transparent 4px 7px)` : line.color;
        style.height = line.fill ? "" : line.stroke.points ? "4px" : "2px";
        return node;
      };
      this.valueNodes = new Map();
      keyed(this.legend, [...labels], ([key]) => key, row, (node, [, some]) => {
        keyed(node.lastChild, some, (line) => `${line.run.name} ${line.color}`, value, (one, line) => {
          setText(one.children[1], areSeveral ? `${line.run.name}: ` : "");
          setAttr(one, "title", areSeveral && line.run.name);
          this.valueNodes.set(line, one.lastChild);
        });
      });
    }

    options(lines, few, isLog) {
      const { page, spec } = this;
      const [muted, line, panel] = ["muted", "line", "panel"].map((name) => color(`--${name}`));
      const font = `11px ${color("--sans")}`;
      const axis = { stroke: muted, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
      const series = lines.map(({ color: stroke, stroke: { width, dash, points }, fill }) => ({
        stroke: fill ? panel : stroke,
        fill: fill ? stroke : undefined,
        width: fill ? Number(few) : width, // borders would hide narrow areas
        dash,
        spanGaps: true,
        points: { show: !fill && (few || points === true), size: points ? 6 : 4, fill: stroke, stroke },
      }));
      return {
        ...this.size(),
        legend: { show: false },
        padding: [8, 16, 0, 0],
        cursor: {
          sync: { key: "curves", scales: ["x", null], setSeries: false },
          drag: { x: true, y: false },
          points: { size: 7 },
          y: false,
        },
        scales: {
          x: { time: false },
          y: isLog
            ? { distr: 3, range: (u, low, high) => (low > 0 ? uPlot.rangeLog(low, high, 10, false) : [1, 10]) }
            : { range: (u, low, high) => extent(low, high, spec.most) },
        },
        axes: [
          {
            ...{ ...axis, size: 26, space: page.axis.sum ? 70 : 50 },
            ...(page.axis.incrs && { incrs: page.axis.incrs }),
            values: (u, all) => all.map(page.axis.sum ? page.axis.text : short),
          },
          {
            ...{ ...axis, size: 54, space: 30 },
            // A logarithmic axis has marks without labels.
            values: (u, all, i, space, by) => {
              const text = this.text === short && !isLog ? alike(by) : this.text;
              return all.map((value) => (value === null ? "" : text(value)));
            },
          },
        ],
        series: [{}, ...series],
        hooks: {
          setCursor: [(u) => page.point(u.cursor.idx ?? null)],
          setScale: [(u, name) => name === "x" && page.zoomed(u)],
        },
      };
    }

    size() {
      return { width: Math.max(this.plot.clientWidth, 160), height: 170 };
    }

    resize() {
      const { width, height } = this.size();
      if (this.u && this.u.width !== width) this.u.setSize({ width, height });
    }

    // Shows the values at the cursor's step, or at the last step. Where a metric has none, as between evaluations, that is
    // its last value until there; "–" means that there is none.
    showValues() {
      this.values?.forEach((values, i) => {
        let at = this.page.index ?? values.length - 1;
        while (at > 0 && !isNumber(values[at])) at -= 1;
        const found = values[at];
        setText(this.valueNodes.get(this.lineList[i]), isNumber(found) ? this.text(found) : "–");
      });
    }

    summary() {
      const parts = this.lineList.map(({ run, label }, i) => {
        const points = this.values[i].map((value, j) => [this.steps[j], value]).filter(([, value]) => isNumber(value));
        const [[first, from], [last, to]] = [points[0], points[points.length - 1]];
        const name = this.page.runs.length > 1 ? `${run.name}, ${label}` : label;
        const { label: by, text } = this.page.axis;
        const at = (place) => `at ${by.toLowerCase()} ${text(place)}`;
        return points.length > 1
          ? `${name}: ${this.text(from)} ${at(first)}, ${this.text(to)} ${at(last)}`
          : `${name}: ${this.text(to)} ${at(last)}`;
      });
      return `${this.title} over steps. ${parts.join(". ")}.`;
    }

    destroy() {
      this.u?.destroy();
      this.u = null;
    }
  }

  // Each series on top of those after it, so the highest is drawn first and the others in front of it.
  const stacked = (parts) => {
    const sums = parts[0].map(() => 0);
    const up = parts.toReversed().map((values) => values.map((value, i) => (isNumber(value) || sums[i] ? (sums[i] += value ?? 0) : null)));
    return up.reverse();
  };

  // Labels of an axis with as many digits as its increments.
  const alike = (by) => {
    if (by >= 1) return short;
    const digits = Math.ceil(-Math.log10(by) - 1e-9); // position of its first nonzero digit
    const exact = String(Number((by * 10 ** digits).toPrecision(3))).split(".")[1] ?? ""; // such as 2.5
    return digits + exact.length < 6 ? (value) => value.toFixed(digits + exact.length) : (value) => (value ? value.toExponential(1) : "0");
  };

  const extent = (low, high, most) => {
    if (!isNumber(low) || !isNumber(high)) return [0, 1];
    const bottom = Math.min(0, low * 1.08);
    const top = Math.max(high * 1.08, 0);
    if (top <= bottom) return [bottom, bottom + (most ?? 1)];
    return [bottom, isNumber(most) && high <= most ? Math.min(top, most * 1.02) : top];
  };

  // --- the view -----------------------------------------------------------------------------------

  class Curves {
    constructor(root, params, app) {
      [this.app, this.compared, this.others] = [app, new Map(), []];
      [this.window, this.zoom, this.index, this.steps] = [1, null, null, []];
      [this.axis, this.isLog] = [AXES.step, false];
      this.charts = CHARTS.map((spec) => new Chart(spec, this));
      this.build(root);
      this.resizeObserver = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
      this.resizeObserver.observe(this.grid);
      this.off = app.store.on((changed) => {
        if (changed.has("steps") || changed.has("about")) this.draw();
        else if (changed.has("theme")) this.redraw();
      });
      this.draw();
      this.load(params.query.getAll("with"));
    }

    close() {
      this.closed = true;
      this.off();
      this.resizeObserver.disconnect();
      for (const chart of this.charts) chart.destroy();
    }

    build(root) {
      this.step = h("input", { type: "range", id: "cv-step", min: 0, max: 0, value: 0, oninput: () => this.move() });
      this.at = h("output", { for: "cv-step", class: "cv-at" });
      const smooth = h("select", { id: "cv-smooth", onchange: () => ((this.window = Number(smooth.value)), this.draw()) });
      for (const [value, text] of SMOOTH) smooth.append(h("option", { value }, text));
      const axis = h("select", { id: "cv-axis", onchange: () => this.layOut(AXES[axis.value]) });
      for (const [value, { label }] of Object.entries(AXES)) axis.append(h("option", { value }, label.toLowerCase()));
      const scale = h("select", { id: "cv-scale", onchange: () => ((this.isLog = scale.value === "log"), this.draw()) });
      for (const [value, text] of [["linear", "linear"], ["log", "logarithmic"]]) scale.append(h("option", { value }, text));
      this.by = h("label", { for: "cv-step" }, this.axis.label);
      this.all = h("button", { type: "button", hidden: true, onclick: () => this.unzoom() }, "Show all steps");
      this.phases = h("select", { id: "cv-phase", onchange: () => this.enter(this.phases.value) });
      for (const [value, text] of PHASES) this.phases.append(h("option", { value }, text));
      this.phaseBox = h("span", { hidden: true }, h("label", { for: "cv-phase" }, "Phase"), " ", this.phases);
      this.bar = h(
        "div",
        { class: "cv-bar" },
        this.by,
        this.step,
        this.at,
        this.phaseBox,
        h("label", { for: "cv-smooth" }, "Smoothing"),
        smooth,
        h("label", { for: "cv-axis" }, "By"),
        axis,
        h("label", { for: "cv-scale" }, "Scale"),
        scale,
        this.all,
        h("span", { class: "muted" }, "Drag across a chart to zoom."),
      );
      this.choices = h("ul", { class: "cv-runs" });
      this.full = h("p", { class: "muted", role: "status" });
      this.picker = h("details", { class: "cv-picker", hidden: true }, h("summary", {}, "Compare with other runs"), this.choices, this.full);
      this.legend = h("ul", { class: "cv-legend cv-shown", "aria-label": "Runs shown" });
      this.differences = h("details", { class: "cv-numbers", open: true, hidden: true });
      this.none = h("p", { class: "muted" });
      this.grid = h("div", { class: "cv-grid" }, this.charts.map(({ node }) => node));
      this.tableRun = h("select", { "aria-label": "Run", onchange: () => this.fill() });
      this.tableBox = h("div", { class: "cv-table", role: "region", "aria-label": "Metrics by step", tabindex: "0" });
      this.table = h("details", { class: "cv-numbers", ontoggle: () => this.fill() }, h("summary", {}, "Metrics as a table"), this.tableRun, " ", h("button", { type: "button", onclick: () => this.save() }, "Save as CSV"), this.tableBox);
      root.append(this.picker, this.legend, this.differences, this.bar, this.none, this.grid, this.table);
    }

    get own() {
      const { about } = this.app.store;
      return this.others.find((run) => run.current)?.name ?? String(about.title ?? "this run");
    }

    // --- other runs

    async load(wanted) {
      try {
        this.others = (await this.app.api.get("api/runs")).runs;
      } catch {
        return; // the run's own curves are shown anyway
      }
      if (this.closed) return;
      const names = this.others.map(({ name }) => name);
      for (const name of wanted.filter((one) => names.includes(one)).slice(0, MAX_COMPARED)) await this.add(name);
      if (this.compared.size) this.picker.open = true;
      this.draw();
    }

    async add(name) {
      const used = new Set([...this.compared.values()].map((run) => run.color));
      const run = { name, raw: [], rows: new Map(), color: COLORS.slice(1).find((one) => !used.has(one)) };
      this.compared.set(name, run);
      this.say("");
      try {
        const { rows, ...origin } = await this.app.api.get(`api/curves?run=${encodeURIComponent(name)}`);
        [run.raw, run.origin] = [rows, originOf(origin)];
        if (!rows.length) this.say(`${name} has no metrics yet.`);
      } catch (error) {
        this.compared.delete(name);
        if (!this.closed) this.say(`${name} cannot be shown: ${error.message}`);
      }
    }

    async choose(name, isOn) {
      if (isOn) await this.add(name);
      else this.compared.delete(name);
      if (this.closed) return;
      const query = new URLSearchParams([...this.compared.keys()].map((one) => ["with", one])).toString();
      history.replaceState(null, "", `#/curves${query ? `?${query}` : ""}`);
      this.draw();
    }

    say(text) {
      setText(this.full, text);
    }

    showRuns() {
      const others = this.others.filter((run) => !run.current);
      this.picker.hidden = !others.length;
      const isFull = this.compared.size >= MAX_COMPARED;
      const make = ({ name, steps, modified_unix_s: modified }) => {
        const box = h("input", { type: "checkbox", onchange: () => this.choose(name, box.checked) });
        const when = isNumber(modified) ? new Date(1000 * modified).toLocaleDateString("en-GB") : "";
        const about = h("span", { class: "muted" }, [format.plural(steps, "step"), when].filter(Boolean).join(", "));
        const node = h("li", {}, h("label", {}, box, h("span", { class: "cv-name" }, name), about));
        node.box = box;
        return node;
      };
      keyed(this.choices, others, ({ name }) => name, make, ({ box }, { name }) => {
        box.checked = this.compared.has(name);
        box.disabled = isFull && !box.checked;
      });
      const shown = this.runs.length > 1 ? this.runs : [];
      const swatch = ({ name }) => h("li", {}, h("span", { class: "key", "aria-hidden": "true" }), h("span", { class: "cv-name" }, name));
      keyed(this.legend, shown, ({ name }) => name, swatch, (node, run) => {
        node.firstChild.style.background = color(`--${run.color}`);
      });
      this.legend.hidden = !shown.length;
      this.showDifferences(shown.filter(({ origin }) => origin));
    }

    // The settings of the compared runs that are not the same.
    showDifferences(runs) {
      const keys = [...new Set(runs.flatMap(({ origin }) => [...origin.keys()]))];
      const differing = keys.filter((key) => key !== "run.name" && new Set(runs.map(({ origin }) => origin.get(key))).size > 1);
      const shape = JSON.stringify([runs.map(({ name }) => name), differing]);
      this.differences.hidden = runs.length < 2;
      if (shape === this.differing) return;
      this.differing = shape;
      const { table: node, body } = table("Settings that differ", [{ text: "Setting" }, ...runs.map(({ name }) => ({ text: name }))]);
      for (const key of differing)
        body.append(h("tr", {}, h("th", { scope: "row" }, key), runs.map(({ origin }) => h("td", { class: "mono" }, origin.get(key) ?? "–"))));
      this.differences.replaceChildren(h("summary", {}, differing.length ? `${format.plural(differing.length, "difference")} in settings` : "The settings are the same"), h("div", { class: "cv-table", tabindex: "0", role: "region", "aria-label": "Settings that differ" }, node));
    }

    // --- drawing

    draw() {
      const { store } = this.app;
      const own = { name: this.own, raw: store.steps, color: COLORS[0], origin: originOf(store.about) };
      const hasStart = store.steps.some(isOfStart);
      this.phaseBox.hidden = !hasStart;
      const phase = !hasStart ? "run" : (this.phase ?? (store.steps.some(({ step }) => isNumber(step)) ? "run" : "start"));
      this.phases.value = phase;
      for (const run of [own, ...this.compared.values()]) run.rows = along(bySteps(ofPhase(run.raw, phase)), this.axis);
      this.runs = [own, ...this.compared.values()].filter((run, i) => !i || run.rows.size);
      const keys = keysOf(this.runs);
      this.shownElsewhere = new Set(CHARTS.flatMap((spec) => [...(spec.series ?? []), ...(spec.stack ?? [])].map(([key]) => key)));
      for (const key of keys) if (AT_K.test(key)) this.shownElsewhere.add(key);
      const steps = [...new Set(this.runs.flatMap((run) => [...run.rows.keys()]))].sort((a, b) => a - b);
      this.steps = steps;
      if (this.index !== null && this.index >= steps.length) this.index = null;
      this.showRuns();
      for (const one of [this.grid, this.table]) one.hidden = !keys.size;
      this.bar.hidden = !keys.size && !hasStart;
      this.none.hidden = keys.size > 0;
      setText(this.none, store.ready ? "No steps have finished yet." : "Waiting for data…");
      this.drawing = true; // ignore cursor events while drawing
      for (const chart of this.charts) chart.draw(this.runs, keys, steps);
      this.drawing = false;
      this.step.max = Math.max(steps.length - 1, 0);
      this.point(this.index);
      this.fill();
    }

    // Shows another phase, which has its own steps.
    enter(phase) {
      this.phase = phase;
      this.layOut(this.axis);
    }

    layOut(axis) {
      [this.axis, this.zoom, this.index] = [axis, null, null];
      setText(this.by, axis.label);
      this.all.hidden = true;
      this.redraw();
    }

    redraw() {
      for (const chart of this.charts) chart.shape = "";
      this.draw();
    }

    // Moves the cursor to the step at this index; null: no cursor.
    point(index) {
      if (this.drawing) return;
      this.index = index;
      const at = index ?? this.steps.length - 1;
      const step = this.steps[at];
      if (this.step.valueAsNumber !== at) this.step.value = at;
      const { label, text: write } = this.axis;
      const text = step === undefined ? "" : `${write(step)}${index === null ? " (last)" : ""}`;
      setText(this.at, text);
      setAttr(this.step, "aria-valuetext", `${label.toLowerCase()} ${text}`);
      for (const chart of this.charts) chart.showValues();
    }

    move() {
      const index = this.step.valueAsNumber;
      this.drawing = true;
      for (const { u } of this.charts) u?.setCursor({ left: u.valToPos(this.steps[index], "x"), top: 0 });
      this.drawing = false;
      this.point(index);
    }

    zoomed(u) {
      if (this.drawing) return;
      const { min, max } = u.scales.x;
      const isAll = min <= this.steps[0] && max >= this.steps[this.steps.length - 1];
      this.zoom = isAll ? null : { min, max };
      this.all.hidden = isAll;
    }

    unzoom() {
      this.zoom = null;
      this.all.hidden = true;
      this.redraw();
      this.step.focus();
    }

    // All metrics of the run that the table shows.
    save() {
      const run = this.runs.find(({ name }) => name === this.tableRun.value) ?? this.runs[0];
      const columns = ["step", ...keysOf([run])];
      const rows = [...run.rows.values()].map((row) => columns.map((key) => row[key] ?? ""));
      download(`${run.name}.csv`, "text/csv", [columns, ...rows].map((row) => row.join(",")).join("\n"));
    }

    fill() {
      if (!this.table.open || !this.runs) return;
      keyed(this.tableRun, this.runs, ({ name }) => name, ({ name }) => h("option", { value: name }, name), () => {});
      this.tableRun.hidden = this.runs.length < 2;
      const run = this.runs.find(({ name }) => name === this.tableRun.value) ?? this.runs[0];
      const columns = new Map();
      for (const chart of this.charts)
        for (const line of chart.node.hidden ? [] : (chart.lineList ?? []))
          if (line.run === run || chart.spec.stack)
            columns.set(line.key, { title: chart.spec.any ? line.label : `${chart.title}: ${line.label}`, text: chart.text });
      const rows = [...run.rows.values()].reverse().slice(0, MAX_TABLE);
      const cells = (row) =>
        h(
          "tr",
          {},
          h("th", { scope: "row", class: "num" }, String(row.step)),
          [...columns].map(([key, { text }]) => h("td", { class: "num" }, isNumber(row[key]) ? text(row[key]) : "–")),
        );
      const left = run.rows.size - rows.length;
      this.tableBox.replaceChildren(
        h(
          "table",
          {},
          h("caption", {}, `${run.name}, newest step first${left ? `; ${format.whole(left)} older steps are omitted` : ""}`),
          h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "num" }, "Step"), [...columns.values()].map(({ title }) => h("th", { scope: "col", class: "num" }, title)))),
          h("tbody", {}, rows.map(cells)),
        ),
      );
    }
  }

  view("curves", {
    title: "Curves",
    mount(root, params, app) {
      const curves = new Curves(root, params, app);
      return () => curves.close();
    },
  });
})();
