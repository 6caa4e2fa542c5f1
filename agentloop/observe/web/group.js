// One group: its rollouts, which of them are trained on and why, rewards and advantages.
(() => {
  "use strict";
  const { h, setText, setAttr, format, parts } = window.agentloop;
  const { svg } = parts;

  const REFRESH_MS = 1000; // minimum time between two requests for a group in flight

  // [key, header, class, sort key]
  const COLUMNS = [
    ["number", "#", "num gr-wide", (row) => row.number],
    ["id", "Rollout", "", (row) => row.id],
    ["reward", "Reward", "", (row) => row.reward],
    ["advantage", "Advantage", "num", (row) => row.advantage],
    ["kept", "Selection", "", (row) => (row.kept ? 0 : 1) + (row.dropped ?? "")],
    ["tokens", "Tokens", "num", (row) => row.tokens],
    ["turns", "Turns", "num", (row) => row.turns],
    ["failed", "Failed calls", "num", (row) => row.failed_calls],
    ["stop", "Stop reason", "", (row) => row.stop ?? ""],
    ["answer", "Answer", "gr-answer", (row) => row.answer ?? ""],
    ["branch", "Branch", "gr-branch", (row) => row.branch ?? ""],
  ];

  window.agentloop.view("group", {
    title: "Group",
    mount(root, params, app) {
      const view = new Group(root, params.id ?? "", app);
      return () => view.close();
    },
  });

  class Group {
    constructor(root, id, app) {
      this.id = id;
      this.app = app;
      this.group = null;
      this.build(root);
      this.off = app.store.on((changed) => {
        if (changed.has("about")) this.offerRuns();
        if (this.group?.state === "live" && (changed.has("rollouts") || changed.has("groups"))) this.refresh();
      });
      this.load();
      this.offerRuns();
    }

    close() {
      this.closed = true;
      this.off();
      clearTimeout(this.timer);
    }

    async load() {
      try {
        const group = await this.app.api.get(`api/groups/${encodeURIComponent(this.id)}`);
        if (this.closed) return;
        this.group = group;
        this.draw();
      } catch (error) {
        if (this.closed) return;
        this.note.hidden = false;
        setText(this.note, `This group cannot be shown: ${error.message}`);
        this.paper.hidden = this.group === null;
      }
    }

    /** Offers to show another run's rollouts of the same task, which can be read from disk. */
    async offerRuns() {
      if (this.offered || this.app.store.about.kind !== "view") return;
      this.offered = true;
      const runs = await this.app.api.get("api/runs").then((body) => body.runs, () => []);
      const others = runs.filter((run) => !run.current).map(({ name }) => [name, name]);
      if (others.length) this.picker.append(parts.choice("Beside run", [["", "no other"], ...others], "", (run) => this.showRun(run)));
    }

    async showRun(run) {
      this.other.node.hidden = true;
      setText(this.compared, "");
      if (!run) return;
      try {
        const group = await this.app.api.get(`api/groups/${encodeURIComponent(`${run}//${this.id}`)}`);
        setText(this.compared, `${run}: mean reward ${parts.number(group.mean_reward)} of ${format.plural(group.rollouts.length, "rollout")}`);
        this.other.show(group.rollouts);
        this.other.node.hidden = false;
      } catch (error) {
        setText(this.compared, error.message);
      }
    }

    /** The address of a rollout of another run beside the first of this one. */
    besideFirst(id) {
      return `${parts.hash("rollout", this.group.rollouts[0].id)}?beside=${encodeURIComponent(id)}`;
    }

    refresh() {
      this.timer ??= setTimeout(() => {
        this.timer = null;
        this.load();
      }, REFRESH_MS);
    }

    build(root) {
      this.note = h("p", { class: "v-empty", role: "alert", hidden: true });
      this.facts = h("dl", { class: "v-facts" });
      this.summary = h("ul", { class: "gr-summary" });
      this.plot = h("figure", { class: "gr-plot" });
      this.prompt = h("div", { class: "tr-text tr-fixed" });
      this.answer = h("p", { class: "gr-truth" });
      this.members = new Members("Rollouts of the group", (id) => parts.hash("rollout", id));
      this.other = new Members("Rollouts of the other run", (id) => this.besideFirst(id));
      this.other.node.hidden = true;
      this.compared = h("p", { class: "v-muted", role: "status" });
      this.picker = h("div", { class: "v-bar" });
      this.paper = h(
        "div", null, this.facts, this.summary, this.plot,
        h("details", { class: "tr-prompt", open: true }, h("summary", null, "Task"), this.prompt, this.answer),
        this.picker, this.members.node, this.compared, this.other.node,
      );
      root.append(h("section", { class: "v gr" }, this.note, h("p", { class: "tr-id" }, this.id), this.paper));
    }

    draw() {
      const { group } = this;
      const rows = group.rollouts;
      const scored = rows.filter((row) => parts.rewardOf(row) !== "none");
      const kept = rows.filter((row) => row.kept);
      const mean = scored.reduce((sum, row) => sum + row.reward, 0) / scored.length;
      const hasSelection = rows.some((row) => row.kept !== null && row.kept !== undefined);
      const facts = [
        ["State", h("span", { class: `v-chip ${group.state}` }, parts.stateText(group.state))],
        ["Task", group.task ?? "–"],
        ["Sampled", `${rows.length} of ${group.size}`],
        ["Kept", hasSelection ? `${kept.length} of ${rows.length}` : "–"],
        ["Mean reward", scored.length ? parts.number(mean, 3) : "–"],
      ];
      this.facts.replaceChildren(...facts.map(([term, what]) => parts.fact(term, what)));
      this.summary.replaceChildren(...summaryOf(rows, hasSelection).map((text) => h("li", null, text)));
      this.summary.hidden = !hasSelection;
      if (this.prompted !== group.prompt) {
        this.prompted = group.prompt;
        parts.fillLong(this.prompt, group.prompt ?? "", parts.LONG_PROMPT);
      }
      this.answer.hidden = group.answer === null || group.answer === undefined;
      this.answer.replaceChildren("Reference answer: ", h("b", null, String(group.answer ?? "–")));
      this.plot.replaceChildren(...plot(rows, (id) => this.app.go(parts.hash("rollout", id))));
      this.members.show(rows);
    }
  }

  /** The rollouts of a group as a table, which is sorted by the column whose header is pressed. */
  class Members {
    /** `hashOf`: returns the address of a rollout's view by its id. */
    constructor(label, hashOf) {
      [this.hashOf, this.columns, this.rows, this.order] = [hashOf, [], [], { key: "number", down: false }];
      [this.head, this.body] = [h("tr"), h("tbody")];
      this.node = h("div", { class: "v-table", role: "region", "aria-label": label, tabindex: "0" }, h("table", null, h("thead", null, this.head), this.body));
    }

    show(rows) {
      this.rows = rows.map((row, number) => ({ ...row, number: number + 1 }));
      const columns = columnsOf(rows);
      const keys = (some) => some.map(([key]) => key).join();
      if (keys(columns) !== keys(this.columns))
        this.head.replaceChildren(...columns.map(([key, text, kind]) =>
          h("th", { scope: "col", class: kind || null }, h("button", { type: "button", class: "gr-sort", onclick: () => this.sort(key) }, text))));
      this.columns = columns;
      this.draw();
    }

    sort(key) {
      this.order = { key, down: this.order.key === key && !this.order.down };
      this.draw();
    }

    draw() {
      const { key, down } = this.order;
      const keyOf = this.columns.find(([name]) => name === key)[3];
      const rows = [...this.rows].sort((a, b) => compare(keyOf(a), keyOf(b), down) || a.number - b.number);
      this.columns.forEach(([name], i) => setAttr(this.head.children[i], "aria-sort", name === key && (down ? "descending" : "ascending")));
      const old = this.body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      this.body.replaceChildren(...rows.map((row) => line(row, this.columns, this.hashOf(row.id))));
      if (old) [...this.body.querySelectorAll("a")].find((a) => a.getAttribute("href") === old)?.focus({ preventScroll: true });
    }
  }

  /** The columns that these rows fill, with one for each part of the reward. */
  function columnsOf(rows) {
    const names = new Set(rows.flatMap((row) => Object.keys(row.parts ?? {})));
    const columns = COLUMNS.filter(([key]) => key !== "branch" || rows.some((row) => row.branch));
    columns.splice(3, 0, ...[...names].map((name) => [`part/${name}`, name, "num", (row) => row.parts?.[name]]));
    return columns;
  }

  /** Compares numbers as numbers; unknown values come last in both directions. */
  function compare(a, b, down) {
    const [hasA, hasB] = [a, b].map((x) => x !== null && x !== undefined && x !== "");
    if (!hasA || !hasB) return hasB - hasA;
    const order = typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
    return down ? -order : order;
  }

  function line(row, columns, hash) {
    const cells = {
      number: row.number, reward: parts.rewardMark(row), advantage: parts.signed(row.advantage), kept: selection(row),
      tokens: format.whole(row.tokens), turns: format.whole(row.turns),
      failed: row.calls ? `${row.failed_calls} of ${row.calls}` : "no calls",
      stop: parts.stateText(row.state === "live" ? "live" : (row.stop ?? row.state)),
      answer: row.answer ?? "–", branch: row.branch || "–",
    };
    if (row.failed_calls) cells.failed = h("span", { class: "v-bad" }, cells.failed);
    if (row.reason) cells.reward.title = row.reason;
    return h(
      "tr", { class: row.kept === false ? "dropped" : null },
      columns.map(([key, , kind, valueOf]) =>
        key === "id"
          ? h("th", { scope: "row" }, h("a", { href: hash }, row.id))
          : h("td", { class: kind || null }, key === "answer" ? h("span", { title: row.reason ?? null }, String(cells[key])) : (cells[key] ?? parts.number(valueOf(row)))),
      ),
    );
  }

  function selection(row) {
    if (row.kept) return h("span", { class: "gr-kept" }, "kept");
    if (row.kept === false || row.dropped) return h("span", { class: "gr-dropped" }, `dropped: ${parts.whyDropped(row.dropped)}`);
    return "–";
  }

  /** Lines such as "20 correct: 8 kept". */
  function summaryOf(rows, hasSelection) {
    if (!hasSelection) return [];
    const withReward = (kind) => rows.filter((row) => parts.rewardOf(row) === kind);
    const kept = (some) => some.filter((row) => row.kept).length;
    const [correct, incorrect, none] = ["correct", "incorrect", "none"].map(withReward);
    const lines = [`${correct.length} correct: ${kept(correct)} kept`, `${incorrect.length} incorrect: ${kept(incorrect)} kept`];
    if (none.length) lines.push(`${none.length} without a reward`);
    const reasons = new Map();
    for (const row of rows) if (!row.kept && row.dropped) reasons.set(row.dropped, (reasons.get(row.dropped) ?? 0) + 1);
    for (const [why, num] of reasons) lines.push(`${num} dropped: ${parts.whyDropped(why)}`);
    return lines;
  }

  const [STEP, HIGH, LOW] = [22, 34, 44]; // of a column: its width, the height of the reward, half the height of the advantage

  /** A column per rollout: the reward as a mark, the advantage as a bar. Those that are not trained on are hollow or thin. */
  function plot(rows, open) {
    if (!rows.length) return [];
    const width = Math.max(rows.length * STEP, STEP);
    const middle = HIGH + LOW;
    const largest = Math.max(0.5, ...rows.map((row) => Math.abs(row.advantage ?? 0)));
    const numCorrect = rows.filter((row) => parts.rewardOf(row) === "correct").length;
    const image = svg("svg", {
      viewBox: `0 0 ${width} ${HIGH + 2 * LOW}`, role: "img", class: "gr-chart",
      "aria-label": `Rewards and advantages of ${rows.length} rollouts, ${numCorrect} of them correct. The values are in the table below.`,
    });
    image.append(svg("line", { class: "gr-zero", x1: 0, x2: width, y1: middle, y2: middle }));
    rows.forEach((row, i) => {
      const kind = parts.rewardOf(row);
      const hollow = row.kept ? "" : " hollow";
      const x = i * STEP;
      const column = svg("g", { class: "gr-column", onclick: () => open(row.id) });
      column.append(svg("rect", { class: "gr-hit", x, y: 0, width: STEP, height: HIGH + 2 * LOW }));
      column.append(
        kind === "none"
          ? svg("circle", { class: "gr-mark none", cx: x + STEP / 2, cy: HIGH / 2, r: 2.5 })
          : kind === "correct"
            ? svg("circle", { class: `gr-mark correct${hollow}`, cx: x + STEP / 2, cy: HIGH / 2, r: 6 })
            : svg("path", { class: `gr-mark incorrect${hollow}`, d: `M${x + 6} ${HIGH / 2 - 5}l10 10m0 -10l-10 10` }),
      );
      if (Number.isFinite(row.advantage)) {
        const height = Math.max((Math.abs(row.advantage) / largest) * (LOW - 4), 1);
        column.append(
          svg("rect", {
            class: `gr-bar ${row.advantage < 0 ? "negative" : "positive"}`, x: x + 5, width: STEP - 10,
            y: row.advantage < 0 ? middle : middle - height, height,
          }),
        );
      }
      column.append(svg("title", null, `${row.id}: reward ${parts.rewardText(row)}, advantage ${parts.signed(row.advantage)}`));
      image.append(column);
    });
    image.style.maxWidth = `${width * 1.5}px`;
    const caption = h(
      "figcaption", null, `Top: reward (● correct, ✗ incorrect; hollow or thin if it is not trained on). Bottom: advantage, from −${parts.number(largest, 2)} to +${parts.number(largest, 2)}.`,
    );
    return [image, caption];
  }
})();
