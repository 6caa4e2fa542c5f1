// One rollout, updated while it runs: turns, calls and results. Tokens can be colored by a measure.
//
// deltas ──> record ──> per turn: segments (reasoning, answer, call) ──> pieces of text
//                                     if colored and near the viewport: a span per token
//
// The page is reconciled with the record once per animation frame, and matching segments are kept: a
// stream only appends, and a tag that is completed only affects its own segment. Text and spans have
// the same size, so only text near the viewport needs spans, however long the rollout is.
(() => {
  "use strict";
  const { h, setText, setAttr, format, parts } = window.agentloop;

  const BLOCK = 150; // tokens after which the next line starts a new block, which limits the layout of growing text
  const PIECE = 300; // maximum tokens of a text node without a line break
  const NEAR = "600px 0px"; // distance from the viewport within which tokens have spans
  const LONG_CODE = 20_000; // characters; longer code is not highlighted
  const MARK_MS = 1000; // how often the forking tokens are recomputed during the stream
  const FORKING = 0.2; // fraction of tokens with the highest surprisal (compare rStar2-Agent, arXiv 2508.20722)
  const REFLECTION = 64; // a forking token among the first 64 after a tool response is a reflection
  const RATE_S = 0.5; // minimum decoding time for a rate: servers send tokens in bursts
  const NEAR_PX = 96; // distance from the end that counts as being at the end
  const ENDS = { length: "cut off at the token limit", abort: "aborted" };
  const TAG = /<\/?(?:reason|think|answer|tool_call)>|<\|[a-z_]{1,20}\|>/g;
  const STEPS = [0.01, 0.05, 0.15, 0.3, 0.6, 1, 1.5, 2.2, 3.2]; // lower bounds of the shades, in nats

  const SHADES = [
    ["none", "None"], ["logprob", "Log-probability"], ["mask", "Training mask"], ["version", "Policy version"],
  ];
  let shade = "none"; // kept when the view is closed

  window.agentloop.view("rollout", {
    title: "Rollout",
    mount(root, params, app) {
      const ids = [params.id ?? "", params.query.get("beside")].filter((id) => id !== null);
      const columns = ids.map(() => h("div"));
      root.append(...(ids.length > 1 ? [h("div", { class: "tr-pair" }, columns)] : columns));
      const views = ids.map((id, i) => new Trajectory(columns[i], id, app, ids));
      return () => views.forEach((view) => view.close());
    },
  });

  class Trajectory {
    /** `shown`: the ids of the rollouts that are shown beside each other. */
    constructor(root, id, app, shown) {
      this.id = id;
      this.app = app;
      this.shown = shown;
      this.record = null;
      this.turns = []; // a TurnView for each turn
      this.cursor = null; // [turn, token] that is selected
      this.threshold = Infinity;
      this.marked = 0;
      this.asked = 0;
      this.closed = false;
      this.followed = false;
      this.root = root;
      this.build();
      this.page = document.scrollingElement;
      this.near = new IntersectionObserver((entries) => {
        for (const { target, isIntersecting } of entries) target.piece?.show(isIntersecting);
      }, { rootMargin: NEAR });
      this.scrolled = () => this.noticeScroll();
      window.addEventListener("scroll", this.scrolled, { passive: true });
      this.off = app.store.on((changed, ids) => {
        const isMine = changed.has("rollouts") && (ids === null || ids.has(id));
        if (this.record?.state === "live" || isMine || changed.has("groups")) this.ask();
      });
      this.load();
    }

    close() {
      this.closed = true;
      this.off();
      this.near.disconnect();
      this.stream?.();
      window.removeEventListener("scroll", this.scrolled);
      cancelAnimationFrame(this.asked);
    }

    // -- from the server

    async load() {
      const path = `api/rollouts/${encodeURIComponent(this.id)}`;
      try {
        const record = await this.app.api.get(path);
        if (this.closed) return;
        this.take(record);
        if (record.state === "live" && this.app.store.about.live !== false) this.watch(`${path}/stream`);
      } catch (error) {
        if (!this.closed) this.fail(error);
      }
    }

    watch(path) {
      this.followed = true;
      this.setFollow(true);
      this.stream = this.app.api.watch(path, {
        trajectory: (record) => this.take(record),
        delta: (delta) => this.apply(delta),
        end: (record) => record && this.take(record),
        error: (error) => this.fail(error),
      });
    }

    take(record) {
      if (this.closed) return;
      this.record = record;
      this.bar.hidden = this.copier.hidden = false;
      this.remark = true;
      this.ask();
      if (record.group !== this.grouped && this.app.store.groups.has(record.group)) this.loadSiblings(record.group);
    }

    /** Offers the previous and the next rollout of the group, and any to be shown beside this one. */
    async loadSiblings(group) {
      this.grouped = group;
      const rows = await this.app.api.get(`api/groups/${encodeURIComponent(group)}`).then((body) => body.rollouts, () => []);
      const at = rows.findIndex(({ id }) => id === this.id);
      if (this.closed || at < 0 || (rows.length < 2 && !this.shown[1]) || this.id !== this.shown[0]) return;
      const beside = this.shown[1] ?? "";
      const [previous, next] = [rows[at - 1], rows[at + 1]];
      if (beside.includes("//")) { // of another run, whose rollouts of the task follow
        const other = `${beside.split("//", 1)[0]}//${group}`;
        rows.push(...(await this.app.api.get(`api/groups/${encodeURIComponent(other)}`).then((body) => body.rollouts, () => [])));
      }
      const options = rows.filter(({ id }) => id !== this.id).map((row) => [row.id, `${row.id.includes("//") ? `${row.id.split("//", 1)[0]} ` : ""}${row.id.slice(row.id.lastIndexOf("."))} ${parts.rewardText(row)} ${(row.answer ?? "").slice(0, 30)}`]);
      const step = (sign, label, row) => row && h("a", { class: "v-button", href: parts.hash("rollout", row.id), "aria-label": label, title: label }, sign);
      this.siblings.replaceChildren(...[
        step("‹", "Previous rollout of the group", previous),
        step("›", "Next rollout of the group", next),
        parts.choice("Beside", [["", "no other"], ...options], beside, (id) => this.app.go(parts.hash("rollout", this.id) + (id ? `?beside=${encodeURIComponent(id)}` : ""))),
      ].filter(Boolean));
      this.siblings.hidden = false;
    }

    /** Replaces the turns from `turn` on; the first of them keeps its first `token` tokens. */
    apply({ turn, token, turns }) {
      if (this.closed || !this.record) return;
      const old = this.record.turns[turn];
      const [first, ...rest] = turns;
      if (first && old) {
        for (const name of ["pieces", "ids", "logprobs"]) {
          if (!first[name] || !old[name]) continue;
          old[name].length = Math.min(old[name].length, token);
          for (const value of first[name]) old[name].push(value);
          first[name] = old[name];
        }
      }
      this.record.turns.splice(turn, Infinity, ...(first ? [first, ...rest] : []));
      this.ask();
    }

    fail(error) {
      this.note.hidden = false;
      setText(this.note, `This rollout cannot be shown: ${error.message}`);
      this.paper.hidden = this.bar.hidden = this.copier.hidden = true;
    }

    // -- elements

    build() {
      this.facts = h("dl", { class: "v-facts" });
      this.siblings = h("div", { class: "v-cluster", role: "group", "aria-label": "Rollouts of the group", hidden: true });
      this.cancel = h("button", { type: "button", class: "v-button danger", hidden: true, onclick: () => this.stop() }, "Cancel rollout");
      this.copier = h("button", { type: "button", class: "v-button", hidden: true, onclick: () => this.copy() }, "Copy as JSON");
      this.copied = h("span", { role: "status", class: "v-muted" });
      this.note = h("p", { class: "v-empty", role: "alert", hidden: true });
      this.timeline = h("div", { class: "tr-timeline" });
      this.prompt = h("div", { class: "tr-text tr-fixed" });
      this.promptNote = h("span", { class: "tr-note" });
      this.promptFold = h("details", { class: "tr-prompt", open: true }, h("summary", null, "Prompt ", this.promptNote), this.prompt);
      this.list = h("div", { class: "tr-turns" });
      this.legend = h("div", { class: "tr-legend" });
      this.followButton = h(
        "button", { type: "button", class: "v-button", "aria-pressed": "false", hidden: true, onclick: () => this.setFollow(!this.follow) },
        "Follow",
      );
      const jump = (to) => () => this.jump(to);
      this.jumps = h(
        "div", { class: "v-cluster", role: "group", "aria-label": "Forking tokens" },
        parts.button("‹", "Previous forking token", jump(-1)), h("span", { class: "tr-forks" }, "forking"),
        parts.button("›", "Next forking token", jump(1)),
      );
      const choose = parts.choice("Color tokens by", SHADES, shade, (value) => {
        shade = value;
        this.ask();
      });
      this.bar = h("div", { class: "v-bar tr-bar", hidden: true }, choose, this.jumps, this.legend, this.followButton);
      this.readout = h("p", { class: "tr-readout", hidden: true });
      this.spoken = h("p", { class: "v-hidden", "aria-live": "polite" });
      this.paper = h("div", { class: "tr-paper" }, this.promptFold, this.list);
      this.paper.addEventListener("pointerover", (event) => this.point(event.target));
      this.paper.addEventListener("click", (event) => this.point(event.target, true));
      this.paper.addEventListener("keydown", (event) => this.key(event));
      this.paper.addEventListener("focusin", (event) => {
        if (event.target.tagName === "SUMMARY") return;
        const at = event.target.closest?.(".tr-tokens");
        if (at && this.cursor?.[0] !== at.turn) this.move([at.turn, 0]);
      });
      const head = h(
        "header", { class: "tr-head" },
        h("div", { class: "tr-line" }, h("p", { class: "tr-id" }, this.shown.length > 1 ? parts.link("rollout", this.id) : this.id), h("div", { class: "v-cluster" }, this.siblings, this.cancel, this.copier, this.copied)),
        this.facts, this.timeline,
      );
      this.section = h("section", { class: "v tr" }, this.note, head, this.bar, this.paper, this.readout, this.spoken);
      this.root.append(this.section);
    }

    ask() {
      if (this.closed) return;
      this.asked ||= requestAnimationFrame(() => {
        this.asked = 0;
        if (this.record) this.draw();
      });
    }

    // -- one frame

    draw() {
      const { record } = this;
      this.versions = [...new Set(record.turns.flatMap((turn) => turn.versions.map((span) => span.version)))];
      if (record.state !== "live" || this.remark || performance.now() - this.marked > MARK_MS) this.mark();
      this.section.dataset.shade = shade;
      this.drawHead();
      this.drawBar();
      this.drawPrompt();
      record.turns.forEach((turn, index) => (this.turns[index] ??= new TurnView(this, index)).draw(turn, record));
      while (this.turns.length > record.turns.length) this.turns.pop().remove();
      if (this.follow) this.toEnd();
    }

    drawHead() {
      const { record } = this;
      const row = this.app.store.rollouts.get(this.id);
      const state = parts.stateOf(record);
      const sampled = record.turns.reduce((sum, turn) => sum + turn.ids.length, 0);
      const observed = record.turns.reduce((sum, turn) => sum + (turn.observation_tokens ?? 0), 0);
      const calls = record.turns.reduce((sum, turn) => sum + turn.calls.length, 0);
      const failed = record.turns.reduce((sum, turn) => sum + turn.results.filter((result) => hasFailed(result.status)).length, 0);
      const elapsed = state === "live" ? this.app.time() / 1000 - this.startOf(row) : record.elapsed_s;
      const servers = [...new Set(record.turns.flatMap((turn) => turn.servers))];
      const waits = row?.lanes?.at(-1)?.[0] === "client";
      const stop = state === "live" ? `${waits ? "waiting for its client" : "in flight"}, turn ${record.turns.length}` : parts.words(record.stop_reason ?? record.state);
      const reward = [parts.rewardMark(record)];
      if (record.reason) reward.push(` ${record.reason}`);
      const named = Object.entries(record.parts ?? {}).map(([name, value]) => `${name} ${parts.number(value)}`);
      const isScored = parts.rewardOf(record) !== "none" || record.reason;
      const isKnown = this.app.store.groups.has(record.group);
      let facts = [
        ["State", h("span", { class: `v-chip ${state}` }, stop)],
        ["Reward", isScored && h("span", null, reward)],
        ["Parts of it", named.join(", ")],
        ["Advantage", record.dropped ? `– (dropped: ${parts.whyDropped(record.dropped)})` : format.isNumber(record.advantage) && parts.signed(record.advantage)],
        ["Answer", record.answer],
        ["Expected", this.app.store.groups.get(record.group)?.answer],
        ["Tokens", record.turns.every(isCounted)
          ? `${format.whole(record.prompt_tokens)} prompt, ${format.whole(sampled)} sampled, ${format.whole(observed)} observed`
          : `${format.whole(row?.tokens)} sampled`],
        ["Tool calls", failed ? h("span", { class: "v-bad" }, `${calls} (${failed} failed)`) : format.whole(calls)],
        ["Time", format.span(elapsed)],
        ["Group", record.group && (isKnown ? parts.link("group", record.group) : record.group)],
        ["Task", record.task],
        ["Model", record.model],
        ["Branch", record.branch],
        ["Continues", record.parent && parts.link("rollout", record.parent)],
        [servers.length > 1 ? "Servers" : "Server", servers.join(", ") || row?.server || "–"],
      ];
      if (record.created_unix_s) facts.push(["Started", new Date(record.created_unix_s * 1000).toLocaleString("en-GB")]);
      if (record.error) facts.push(["Error", h("span", { class: "v-bad" }, record.error)]);
      facts = facts.filter(([, what]) => what || what === 0); // omit unknown and inapplicable facts
      const key = facts.map(([, what]) => what.textContent ?? what).join("|");
      if (key !== this.factsKey) {
        this.factsKey = key;
        this.facts.replaceChildren(...facts.map(([term, what]) => parts.fact(term, what)));
      }
      const can = this.app.store.about.controls?.includes("cancel") && state === "live" && typeof this.app.control === "function";
      this.cancel.hidden = !can;
      this.drawTimeline(row, elapsed);
    }

    /** The lane of a turn until its first token, as in the rollouts view. */
    get lane() {
      return this.app.store.about.live === false ? "wait" : "prefill";
    }

    /** Start of the rollout in seconds since the start of the run. A row's first lane starts with its first turn. */
    startOf(row) {
      if (row?.lanes?.length && !row.more) return row.lanes[0][1] / 1000 - (this.record.turns[0]?.started_s ?? 0);
      return this.record.created_unix_s - (this.app.store.about.t0 ?? this.record.created_unix_s);
    }

    drawTimeline(row, elapsed) {
      const { record } = this;
      const ended = row?.end ? row.end / 1000 - this.startOf(row) : 0; // includes the time after its last token
      const total = Math.max(elapsed || 0, ended, ...record.turns.map((turn) => lastOf(turn)));
      const since = row ? this.startOf(row) : 0;
      const pieces = row?.lanes?.length && !row.more
        ? parts.spans(row, (since + total) * 1000).map(([lane, from, to]) => [lane, from / 1000 - since, to / 1000 - since])
        : record.turns.flatMap((turn) => lanesOf(turn, total, this.lane));
      if (pieces[0]?.[0] === "wait") pieces[0][1] = 0;
      const key = JSON.stringify([this.lane, pieces.length, Math.round(total * (record.state === "live" ? 4 : 100)), record.turns.length]);
      if (key === this.timelineKey || this.timeline.contains(document.activeElement)) return;
      this.timelineKey = key;
      const calls = record.turns.flatMap((turn) => turn.results);
      const label = `Timeline of ${format.span(total)}: ${format.plural(record.turns.length, "turn")}, ${format.plural(calls.length, "finished call")}`;
      const turns = h("div", { class: "tr-ticks" });
      record.turns.forEach((turn, index) => {
        const tick = h("a", { href: parts.hash("rollout", this.id), class: "tr-tick", "aria-label": `Turn ${index + 1}`, onclick: (event) => {
          event.preventDefault();
          this.turns[index]?.reveal();
        } }, String(index + 1));
        tick.style.left = `${total ? (turn.started_s / total) * 100 : 0}%`;
        const next = record.turns[index + 1]?.started_s ?? total;
        tick.style.width = `${total ? Math.max((next - turn.started_s) / total, 0) * 100 : 100}%`;
        turns.append(tick);
      });
      this.timeline.replaceChildren(turns, parts.strip(pieces, total, label), parts.legend());
    }

    drawBar() {
      const { record } = this;
      const key = [shade, record.state === "live", record.turns.length && shade === "version" ? this.versions.join() : ""].join("|");
      if (key === this.barKey) return;
      this.barKey = key;
      this.followButton.hidden = record.state !== "live";
      this.jumps.hidden = shade === "none";
      this.legend.replaceChildren(...legendOf(shade, this.versions));
    }

    drawPrompt() {
      if (this.prompted === this.record.prompt) return;
      this.prompted = this.record.prompt;
      this.promptFold.hidden = !this.record.prompt && !this.record.prompt_tokens;
      setText(this.promptNote, `${format.plural(this.record.prompt_tokens, "token")}, not trained on`);
      parts.fillLong(this.prompt, this.record.prompt ?? "", parts.LONG_PROMPT);
    }

    /** Computes the minimum surprisal of a forking token, from all tokens of this rollout. */
    mark() {
      this.remark = false;
      this.marked = performance.now();
      let size = 0;
      for (const turn of this.record.turns) size += turn.ids.length;
      if (size === this.measured) return;
      this.measured = size;
      const values = new Float64Array(size);
      let at = 0;
      for (const turn of this.record.turns) for (let k = 0; k < turn.ids.length; k++) values[at++] = surprisal(turn, k);
      values.sort();
      // A fraction is meaningless for fewer than ten tokens. Tokens that the model was certain of never fork.
      const index = Math.floor(size * (1 - FORKING));
      this.threshold = size < 10 ? Infinity : Math.max(values[Math.min(index, size - 1)], STEPS[0]);
    }

    /** 0: neither; 1: forking; 2: a reflection, which is a forking token soon after a tool response.
     *  Tokens of tool calls are neither, as in `agentloop runs entropy`. */
    markOf(index, k) {
      const { turns } = this.record;
      if (surprisal(turns[index], k) < this.threshold) return 0;
      if (turns[index].calls.some(({ start, end }) => start <= k && k < end)) return 0;
      return k < REFLECTION && index > 0 && turns[index - 1].results.length ? 2 : 1;
    }

    // -- following the end

    setFollow(on) {
      this.follow = on;
      this.followButton.setAttribute("aria-pressed", String(on));
      if (on) this.toEnd();
    }

    toEnd() {
      this.page.scrollTop = this.page.scrollHeight;
      this.lastTop = this.page.scrollTop;
    }

    /** Stops following when the reader scrolls up, and resumes when they return to the end. */
    noticeScroll() {
      if (!this.followed) return;
      const top = this.page.scrollTop;
      const near = this.page.scrollHeight - top - this.page.clientHeight < NEAR_PX;
      if (this.follow && top < (this.lastTop ?? 0) - 2 && !near) this.setFollow(false);
      else if (!this.follow && near && this.record?.state === "live") this.setFollow(true);
      this.lastTop = top;
    }

    // -- tokens under the pointer and the keyboard

    point(target, selects = false) {
      const at = target.token === undefined ? null : [target.closest(".tr-tokens").turn, target.token];
      if (selects && at) this.move(at, false);
      else this.showDetails(at ?? this.cursor);
    }

    key(event) {
      const tokens = event.target.closest(".tr-tokens");
      if (!tokens || event.altKey || event.ctrlKey || event.metaKey || !this.cursor) return;
      const [index, k] = this.cursor;
      const last = this.record.turns[index].ids.length - 1;
      const to = { ArrowRight: k + 1, ArrowLeft: k - 1, ArrowDown: k + 10, ArrowUp: k - 10, Home: 0, End: last }[event.key];
      if (to !== undefined) this.move([index, Math.min(Math.max(to, 0), last)]);
      else if (event.key === "n" || event.key === "p") this.jump(event.key === "n" ? 1 : -1);
      else return;
      event.preventDefault();
    }

    /** Selects the next forking token, in this turn or another one. */
    jump(by) {
      const { turns } = this.record;
      let [index, k] = this.cursor ?? (by > 0 ? [0, -1] : [turns.length - 1, turns.at(-1)?.ids.length ?? 0]);
      for (;;) {
        k += by;
        while (turns[index] && (k < 0 || k >= turns[index].ids.length)) {
          index += by;
          k = by > 0 ? 0 : (turns[index]?.ids.length ?? 0) - 1;
        }
        if (!turns[index]) return;
        if (this.markOf(index, k)) break;
      }
      this.move([index, k]);
    }

    move(at, reveal = true) {
      this.spanOf(this.cursor)?.classList.remove("at");
      this.cursor = at;
      const span = this.spanOf(at);
      span?.classList.add("at");
      if (reveal && span) {
        this.setFollow(false);
        const box = span.getBoundingClientRect();
        if (box.top < 120 || box.bottom > window.innerHeight - 80) span.scrollIntoView({ block: "center" });
      }
      this.showDetails(at);
      setText(this.spoken, this.describe(at).join(", "));
    }

    spanOf(at) {
      return at ? this.turns[at[0]]?.spanOf(at[1]) : null;
    }

    showDetails(at) {
      const turn = at && this.record?.turns[at[0]];
      this.readout.hidden = !turn || at[1] >= turn.ids.length;
      if (this.readout.hidden) return;
      const [piece, ...rest] = this.describe(at);
      this.readout.replaceChildren(h("code", null, piece), ...rest.map((text) => h("span", null, text)));
    }

    describe([index, k]) {
      const turn = this.record.turns[index];
      const logprob = turn.logprobs[k];
      const version = turn.versions.find((span) => span.start <= k && k < span.end)?.version;
      const details = [
        visible(turn.pieces[k]), `id ${turn.ids[k]}`,
        `log-probability ${Number.isFinite(logprob) ? `${parts.number(logprob)} (p ${parts.number(Math.exp(logprob), 2)})` : "unknown"}`,
        `surprisal ${parts.number(-logprob)}`,
        `version ${version ?? "unknown"}`, `turn ${index + 1}, token ${k + 1} of ${turn.ids.length}`,
      ];
      const mark = this.markOf(index, k);
      if (mark) details.push(mark === 2 ? "reflection" : "forking");
      return details;
    }

    // -- actions

    async copy() {
      const text = JSON.stringify(this.record, null, 1);
      try {
        await navigator.clipboard.writeText(text);
        setText(this.copied, `Copied ${format.whole(text.length)} characters.`);
      } catch {
        const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: `${this.id}.json` });
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 1000);
        setText(this.copied, "The clipboard is not available, so the record was saved as a file.");
      }
    }

    async stop() {
      try {
        const answer = await this.app.control({ do: "cancel", rollout: this.id });
        setText(this.copied, answer?.done ?? "Cancelled.");
      } catch (error) {
        setText(this.copied, error.message);
      }
    }
  }

  // -- a turn on the page

  class TurnView {
    constructor(owner, index) {
      this.owner = owner;
      this.index = index;
      this.segments = []; // on the page: {kind, from, to, drawn, ...}
      this.meta = h("span", { class: "tr-note" });
      this.strip = h("div", { class: "tr-strip" });
      this.tokens = h("div", { class: "tr-tokens" });
      this.tokens.turn = index;
      this.observed = h("div", { class: "tr-observed" });
      this.heading = h("h2", { tabindex: "-1" }, `Turn ${index + 1} `, this.meta);
      this.node = h(
        "section", { class: "tr-turn", "aria-label": `Turn ${index + 1}${owner.shown.length > 1 ? ` of ${owner.id}` : ""}` },
        h("div", { class: "tr-line" }, this.heading, this.strip), this.tokens, this.observed,
      );
      owner.list.append(this.node);
    }

    remove() {
      while (this.segments.length) this.close(this.segments.pop());
      this.node.remove();
    }

    reveal() {
      this.owner.setFollow(false);
      this.heading.scrollIntoView({ block: "start" });
      this.heading.focus({ preventScroll: true });
    }

    draw(turn, record) {
      this.drawHead(turn);
      const previous = this.index ? record.turns[this.index - 1].observation : record.prompt;
      // A finished turn that has not changed need not be drawn again.
      const key = [shade, turn.ids.length, turn.calls.length, turn.results.length, turn.end, this.owner.threshold].join("|");
      if (key !== this.key || this.turn !== turn) {
        this.turn = turn;
        this.key = key;
        this.drawTokens(turn, segmentsOf(turn, previous ?? ""));
      }
      this.drawObservation(turn);
    }

    drawHead(turn) {
      const isAwaited = !turn.ids.length && !turn.end;
      const notes = isAwaited ? ["no tokens yet"] : isCounted(turn) ? [format.plural(turn.ids.length, "token")] : [];
      if (turn.first_token_s) notes.push(`TTFT ${format.span(turn.first_token_s - turn.started_s)}`);
      const took = (turn.generated_s || 0) - (turn.first_token_s || 0);
      if (took >= RATE_S && turn.ids.length > 1) notes.push(`${parts.number((turn.ids.length - 1) / took, 3)} tokens/s`);
      if (turn.cached_tokens) notes.push(`${format.whole(turn.cached_tokens)} cached`);
      if (turn.end && turn.end !== "stop") notes.push(ENDS[turn.end] ?? turn.end);
      if (turn.servers.length > 1) notes.push(`moved: ${turn.servers.join(" → ")}`);
      setText(this.meta, notes.join(" · "));
      const from = turn.started_s;
      const total = lastOf(turn) - from;
      const key = `${total.toFixed(3)}|${turn.results.length}|${this.owner.lane}`;
      if (key === this.stripKey || !(total > 0)) return;
      this.stripKey = key;
      const pieces = lanesOf(turn, lastOf(turn), this.owner.lane).map(([lane, a, b]) => [lane, a - from, b - from]);
      const label = pieces.map(([lane, a, b]) => `${parts.laneLabel(lane)} ${format.span(b - a)}`).join(", ");
      this.strip.replaceChildren(parts.strip(pieces, total, `Turn ${this.index + 1}: ${label}`));
      this.strip.title = label;
    }

    /** Reconciles the segments on the page with those of the record. */
    drawTokens(turn, wanted) {
      if (this.shade !== shade) {
        this.shade = shade;
        while (this.segments.length) this.close(this.segments.pop());
        const isNavigable = shade !== "none";
        setAttr(this.tokens, "tabindex", isNavigable && "0");
        setAttr(this.tokens, "role", isNavigable && "group");
        setAttr(this.tokens, "aria-label", isNavigable && `Tokens of turn ${this.index + 1}. Use the arrow keys to move, N and P to go to the next and previous forking token.`);
      }
      let same = 0;
      while (same < this.segments.length && same < wanted.length) {
        const [old, now] = [this.segments[same], wanted[same]];
        if (old.kind !== now.kind || old.from !== now.from || old.call !== now.call || old.drawn > now.to) break;
        same++;
      }
      while (this.segments.length > same) this.close(this.segments.pop());
      wanted.forEach((one, i) => {
        const segment = (this.segments[i] ??= this.open(one));
        segment.to = one.to;
        if (segment.kind === "call") this.drawCall(turn, segment);
        else this.fillText(turn, segment);
      });
      if (this.threshold !== this.owner.threshold) for (const piece of this.pieces()) piece.mark();
      this.threshold = this.owner.threshold;
    }

    *pieces() {
      for (const segment of this.segments) yield* segment.pieces;
    }

    open({ kind, from, to, call }) {
      const segment = { kind, from, to, call, drawn: from, pieces: [] };
      segment.body = h("div", { class: "tr-text" });
      if (kind === "call") {
        segment.node = h("div", { class: "tr-call" });
        segment.head = h("div", { class: "tr-callhead" });
        segment.code = h("pre", { class: "tr-code", tabindex: "0", role: "group" });
        segment.out = h("div");
        segment.node.append(segment.head, shade === "none" ? segment.code : segment.body, segment.out);
      } else {
        const label = { reasoning: "reasoning", answer: "answer", text: "" }[kind];
        segment.node = h("div", { class: `tr-seg ${kind}` }, label ? h("span", { class: "tr-kind" }, label) : null, segment.body);
      }
      this.tokens.append(segment.node);
      return segment;
    }

    close(segment) {
      for (const piece of segment.pieces) piece.close();
      segment.node.remove();
    }

    /** Appends new tokens as text: in blocks of lines, which consist of pieces. */
    fillText(turn, segment) {
      const { pieces: texts } = turn;
      const { pieces } = segment;
      while (segment.drawn < segment.to) {
        let piece = pieces.at(-1);
        const from = segment.drawn;
        const ends = piece && texts[from - 1].endsWith("\n");
        if (!piece || (ends && from - segment.block >= BLOCK)) {
          segment.block = from;
          const block = h("div");
          segment.body.append(block);
          pieces.push((piece = new Piece(this, block, from)));
        } else if (from - piece.from >= PIECE || (ends && from - piece.from >= BLOCK)) {
          pieces.push((piece = new Piece(this, piece.block, from)));
        }
        let to = from + 1;
        const most = Math.min(segment.to, piece.from + PIECE);
        while (to < most && !(texts[to - 1].endsWith("\n") && to - segment.block >= BLOCK)) to++;
        piece.grow(turn, to);
        segment.drawn = to;
      }
    }

    classOf(turn, k, marked) {
      const mark = MARKS[marked];
      const { cursor, versions } = this.owner;
      const at = cursor?.[0] === this.index && cursor[1] === k ? " at" : "";
      switch (shade) {
        case "logprob":
          return `l${level(-turn.logprobs[k])}${mark}${at}`;
        case "version": {
          const version = turn.versions.find((span) => span.start <= k && k < span.end)?.version;
          return `p${version === undefined ? "x" : versions.indexOf(version) % 6}${mark}${at}`;
        }
        default:
          return `m1${mark}${at}`;
      }
    }

    spanOf(k) {
      for (const piece of this.pieces()) {
        if (k < piece.from || k >= piece.to) continue;
        piece.show(true);
        return piece.spans[k - piece.from];
      }
      return null;
    }

    drawCall(turn, segment) {
      if (shade !== "none") this.fillText(turn, segment);
      const call = turn.calls[segment.call];
      const result = call && turn.results.find((one) => one.call_id === call.id);
      const raw = call ? null : turn.pieces.slice(segment.from, segment.to).join("");
      const key = `${raw?.length}|${call?.id}|${result?.status}`;
      if (key === segment.key) return;
      segment.key = key;
      segment.drawn = segment.to;
      const status = result ? result.status : call ? (turn.ended_s ? "no result" : "running") : turn.end ? "incomplete" : "in progress";
      const tone = result ? (result.status === "ok" ? "good" : hasFailed(result.status) ? "bad" : "muted") : "muted";
      const name = call?.name || "call";
      segment.head.replaceChildren(
        h("b", null, name), h("span", { class: `v-chip ${tone}` }, parts.words(status)), result ? timing(result, turn) : "",
      );
      segment.code.setAttribute("aria-label", `Code of ${name}`);
      segment.node.classList.toggle("failed", Boolean(result && hasFailed(result.status)));
      segment.code.replaceChildren(...codeOf(call, raw));
      const below = [];
      const input = call?.arguments?.input;
      if (typeof input === "string" && input) below.push(labelled("input", input));
      if (call?.error && !result?.content.includes(call.error)) below.push(labelled("error", call.error));
      if (result) below.push(labelled("output", result.content));
      segment.out.replaceChildren(...below);
    }

    drawObservation(turn) {
      const text = turn.observation ?? "";
      if (text === this.observation || !text) return;
      this.observation = text;
      const body = h("div", { class: "tr-text tr-fixed" });
      const fold = h(
        "details", { class: "tr-observation" },
        h("summary", null, "Observation ", h("span", { class: "tr-note" }, `${format.plural(turn.observation_tokens, "token")} as read by the model, not trained on`)),
        body,
      );
      fold.addEventListener("toggle", () => fold.open && !body.firstChild && parts.fillLong(body, text));
      this.observed.replaceChildren(fold);
    }
  }

  // -- a piece of text, with a span per token while it is near the viewport

  const MARKS = ["", " fork", " reflect"];

  class Piece {
    constructor(view, block, from) {
      Object.assign(this, { view, block, from, to: from, spans: null, marks: [] });
      this.node = h("span");
      this.node.piece = this;
      block.append(this.node);
      if (shade !== "none") view.owner.near.observe(this.node);
    }

    close() {
      this.view.owner.near.unobserve(this.node);
    }

    grow(turn, to) {
      this.turn = turn;
      if (this.spans) this.node.append(this.spansOf(this.to, to));
      else if (this.node.firstChild) this.node.firstChild.appendData(this.text(this.to, to));
      else this.node.append(this.text(this.to, to));
      this.to = to;
    }

    text(from, to) {
      return this.turn.pieces.slice(from, to).join("");
    }

    show(near) {
      if (near === (this.spans !== null)) return;
      this.spans = near ? [] : null;
      this.marks = [];
      if (near) this.node.replaceChildren(this.spansOf(this.from, this.to));
      else this.node.textContent = this.text(this.from, this.to);
    }

    spansOf(from, to) {
      const { owner, index } = this.view;
      const found = document.createDocumentFragment();
      for (let k = from; k < to; k++) {
        const span = document.createElement("span");
        const mark = owner.markOf(index, k);
        span.textContent = this.turn.pieces[k];
        span.token = k;
        span.className = this.view.classOf(this.turn, k, mark);
        this.spans.push(span);
        this.marks.push(mark);
        found.append(span);
      }
      return found;
    }

    /** Updates the spans whose mark has changed with the threshold. */
    mark() {
      this.turn = this.view.turn;
      this.spans?.forEach((span, i) => {
        const mark = this.view.owner.markOf(this.view.index, span.token);
        if (mark === this.marks[i]) return;
        this.marks[i] = mark;
        span.className = this.view.classOf(this.turn, span.token, mark);
      });
    }
  }

  // -- segments

  /**
   * Returns reasoning, answer, text and calls as ranges of tokens. A token belongs to the segment of its
   * first character; tags belong to the segment that they open or close.
   */
  function segmentsOf(turn, before) {
    const { pieces, calls } = turn;
    const found = [];
    const open = (kind, from, call) => {
      const last = found.at(-1);
      if (last && last.from === from) found.pop();
      else if (last) last.to = from;
      found.push({ kind, from, to: pieces.length, call });
    };
    let at = 0;
    let kind = startsThinking(before, pieces) ? "reasoning" : "text";
    open(kind, 0);
    const inside = (from, to) => {
      if (from >= to) return;
      const text = pieces.slice(from, to).join("");
      let k = from;
      let offset = 0;
      const tokenAt = (character) => {
        while (k < to && offset + pieces[k].length <= character) offset += pieces[k++].length;
        return k;
      };
      for (const match of text.matchAll(TAG)) {
        const tag = match[0];
        const opens = tag[1] !== "/";
        if (tag.includes("tool_call")) {
          if (opens) {
            open("call", tokenAt(match.index), -1); // incomplete or still streaming
            return;
          }
          continue;
        }
        if (tag.startsWith("<|")) continue;
        const next = /reason|think/.test(tag) ? (opens ? "reasoning" : "text") : opens ? "answer" : "text";
        if (next === kind) continue;
        kind = next;
        open(kind, opens ? tokenAt(match.index) : Math.min(tokenAt(match.index + tag.length - 1) + 1, to));
      }
    };
    calls.forEach((call, index) => {
      const from = Math.max(call.start, at);
      inside(at, from);
      open("call", from, index);
      at = Math.min(Math.max(call.end, from), pieces.length);
      if (at < pieces.length) open(kind, at);
    });
    inside(at, pieces.length);
    return found.filter(({ from, to, kind: what }) => to > from && (what === "call" || !blank(pieces, from, to)));
  }

  function blank(pieces, from, to) {
    for (let k = from; k < to; k++) if (pieces[k].trim() && !/^<\|[a-z_]{1,20}\|>$/.test(pieces[k].trim())) return false;
    return shade === "none";
  }

  function startsThinking(before, pieces) {
    if (/<(?:reason|think)>\s*$/.test(before)) return true;
    const tags = pieces.join("").match(/<\/?(?:reason|think)>/);
    return tags?.[0][1] === "/";
  }

  // -- values

  const surprisal = (turn, k) => -(turn.logprobs[k] ?? 0);

  function level(nats) {
    if (!(nats >= STEPS[0])) return 0;
    let at = 1;
    while (at < STEPS.length && nats >= STEPS[at]) at++;
    return at;
  }

  const INNOCENT = new Set(["ok", "caller", "cancelled", "infrastructure"]);
  const NEVER_RAN = new Set(["malformed", "unknown_tool", "bad_arguments", "caller"]);
  const hasFailed = (status) => !INNOCENT.has(status);

  /** False for turns from external endpoints, which return text without tokens. */
  const isCounted = (turn) => turn.ids.length > 0 || !turn.pieces.length;

  function lastOf(turn) {
    const ends = turn.results.map((result) => result.ended_s);
    return Math.max(turn.started_s, turn.first_token_s || 0, turn.generated_s || 0, turn.ended_s || 0, ...ends);
  }

  /** Lanes of a turn, from its own times; older records do not distinguish waiting from prefill. */
  function lanesOf(turn, until, before) {
    const first = turn.first_token_s || (turn.generated_s ? turn.generated_s : until);
    const generated = turn.generated_s || (turn.end ? first : until);
    const placed = turn.placed_s ?? null;
    const waits = placed === null ? [[before, turn.started_s, first]] : [["wait", turn.started_s, placed], ["prefill", placed, first]];
    const lanes = [...waits, ["decode", first, generated]];
    const never = new Set(turn.results.filter((result) => NEVER_RAN.has(result.status)).map((result) => result.call_id));
    if (turn.calls.some((call) => !never.has(call.id)) && turn.generated_s) lanes.push(["tool", generated, turn.ended_s || until]);
    return lanes.filter(([, from, to]) => to > from);
  }

  /** Returns the highlighted code of a call, else its arguments, else its raw text. */
  function codeOf(call, raw) {
    if (!call) return highlighted(partialCode(raw));
    const code = call.arguments?.code;
    if (typeof code === "string") return highlighted(code);
    const isFilled = call.arguments && Object.keys(call.arguments).length;
    return [isFilled ? JSON.stringify(call.arguments, null, 2) : (call.raw ?? "").trim() || "(empty)"];
  }

  /** Extracts the code from a call that is still streaming: JSON that may be cut off anywhere. */
  function partialCode(raw) {
    const start = raw.match(/"code"\s*:\s*"/);
    if (!start) return raw.replace(/^[^<]*<tool_call>\s*/, "");
    const text = raw.slice(start.index + start[0].length);
    const end = text.search(/(?<!\\)(?:\\\\)*"/);
    const NAMES = { n: "\n", t: "\t", r: "\r", b: "\b", f: "\f" };
    return (end < 0 ? text : text.slice(0, end + text.slice(end).indexOf('"'))).replace(
      /\\(?:u([0-9a-fA-F]{4})|(.)|$)/g, (_, hex, one) => (hex ? String.fromCharCode(parseInt(hex, 16)) : (NAMES[one] ?? one ?? "")),
    );
  }

  const PYTHON = new RegExp(
    [
      /(?<note>#[^\n]*)/,
      /(?<text>[rbfu]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))/,
      /\b(?<word>and|as|assert|async|await|break|class|continue|def|del|elif|else|except|False|finally|for|from|global|if|import|in|is|lambda|None|nonlocal|not|or|pass|raise|return|True|try|while|with|yield)\b/,
      /\b(?<number>\d[\w.]*)/,
    ].map((one) => one.source).join("|"),
    "g",
  );

  /** Splits Python code into plain text and elements for keywords, strings, numbers and comments. */
  function highlighted(code) {
    if (code.length > LONG_CODE) return [code];
    const found = [];
    let at = 0;
    for (const match of code.matchAll(PYTHON)) {
      if (match.index > at) found.push(code.slice(at, match.index));
      const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
      found.push(h("span", { class: `py-${kind}` }, match[0]));
      at = match.index + match[0].length;
    }
    if (at < code.length) found.push(code.slice(at));
    return found;
  }

  const visible = (piece) => (piece === "" ? "(partial character)" : piece.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

  // -- small elements

  /** When a call was queued and when it ran, within its turn. */
  function timing(result, turn) {
    if (NEVER_RAN.has(result.status)) return h("span", { class: "tr-note tr-timing" }, result.status === "caller" ? "left for the caller to run" : "did not run");
    const queued = Math.max(result.started_s - result.dispatched_s, 0);
    const ran = Math.max(result.ended_s - result.started_s, 0);
    const label = `queued ${format.span(queued)}, ran ${format.span(ran)}`;
    const early = turn.generated_s - result.dispatched_s;
    const [from, total] = [turn.started_s, lastOf(turn) - turn.started_s];
    const pieces = [
      ["wait", result.dispatched_s - from, result.started_s - from],
      ["tool", result.started_s - from, result.ended_s - from],
    ];
    const image = parts.strip(pieces, total, label);
    const note = early > 0.001 ? `${label}, began ${format.span(early)} before the turn's last token` : label;
    return h("span", { class: "tr-timing" }, image, h("span", { class: "tr-note" }, note));
  }

  function labelled(label, text) {
    const body = h("pre", { class: "tr-output", tabindex: "0", role: "group", "aria-label": label });
    parts.fillLong(body, text ?? "");
    return h("div", { class: "tr-result" }, h("span", { class: "tr-kind" }, label), body);
  }

  function legendOf(measure, versions) {
    const marks = [
      h("span", { class: "tr-key" }, h("span", { class: "fork" }, "forking"), ": top 20% by surprisal"),
      h("span", { class: "tr-key" }, h("span", { class: "reflect" }, "reflection"), ": forking, after a tool response"),
    ];
    const shades = [...STEPS.keys(), STEPS.length].map((i) => h("i", { class: `l${i}` }));
    switch (measure) {
      case "none":
        return [];
      case "logprob":
        return [h("span", { class: "tr-key" }, "p = 1 ", h("span", { class: "tr-ramp", "aria-hidden": "true" }, shades), " p < 0.04"), ...marks];
      case "version":
        return [...versions.map((version, i) => h("span", { class: "tr-key" }, h("span", { class: `p${i % 6}` }, `version ${version}`))), ...marks];
      default:
        return [h("span", { class: "tr-key" }, h("span", { class: "m1" }, "trained on"), " (mask 1)"), h("span", { class: "tr-key" }, "not trained on (mask 0)"), ...marks];
    }
  }
})();
